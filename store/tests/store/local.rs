//! What calls read from, write to and leave in local folders.

use crate::hostile::{names, read, write};
use crate::*;
use object_store::path::Path as ObjectPath;
use serde_json::json;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

#[test]
fn a_file_beside_the_weights_that_changes_while_it_is_stored_is_refused() {
    let (place, memory) = (Place::new(), Arc::new(InMemory::new()));
    let store = init(&memory, &never_whole());
    let folder = place.at("step");
    Weights::new(3).write_folder(&folder, "{}");
    let path = folder.join("optimizer.pt");
    fs::write(&path, vec![b'A'; 1 << 20]).unwrap();
    let stop = AtomicBool::new(false);
    let outcomes = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            use std::os::unix::fs::FileExt;
            let file = fs::File::options().write(true).open(&path).unwrap();
            for letter in [b'B', b'A'].iter().cycle() {
                file.write_all_at(&vec![*letter; 1 << 20], 0).unwrap();
                if stop.load(SeqCst) {
                    return;
                }
            }
        });
        let put = |i: u64| store.put(&folder, &PutOptions::default().branch(format!("b{i}")));
        let outcomes: Vec<_> = (0..20).map(put).collect();
        stop.store(true, SeqCst);
        writer.join().unwrap();
        outcomes
    });
    for outcome in &outcomes {
        match outcome {
            Ok(version) => {
                store.get(&version.name(), place.at("out"), &GetOptions::default()).unwrap();
                let bytes = fs::read(place.at("out/optimizer.pt")).unwrap();
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a torn file was stored");
                fs::remove_dir_all(place.at("out")).unwrap();
            }
            Err(Error::Tpde(tpde::Error::Changed { what })) => assert!(what.ends_with("optimizer.pt"), "{what}"),
            Err(error) => panic!("{error}"),
        }
    }
    assert!(outcomes.iter().any(Result::is_err), "the file was to change during a put");
    store.put(&folder, &PutOptions::default()).unwrap();
}

/// The hidden folders beside an output.
fn hidden(folder: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with('.')).collect()
}

/// Runs a `get` that fails once it has read a part, and returns the folder that it leaves.
fn interrupted(memory: &Arc<InMemory>, out: &Path) -> PathBuf {
    for request in 0.. {
        let dead = Faulty::new(memory, Fault::DeadFrom(request));
        internals::open(dead, SEGMENT).and_then(|store| store.get("main", out, &GetOptions::default())).unwrap_err();
        if let [kept] = &hidden(out.parent().unwrap())[..] {
            return kept.clone();
        }
    }
    unreachable!()
}

/// A store with a version of several segments.
fn large(place: &Place) -> (Arc<InMemory>, Weights) {
    let (memory, first, _) = one_version(place);
    (memory, first)
}

#[test]
fn links_and_special_files_in_a_cache_are_replaced_and_not_followed() {
    let place = Place::new();
    let (memory, first) = large(&place);
    let (victim, out) = (place.at("victim"), Place::new());
    let cache = out.at("cache");
    let get = |name: &str| open(&memory).get("main", out.at(name), &GetOptions::default().cache(&cache)).unwrap();
    get("once");
    let files: Vec<_> = fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 2);
    for (i, plant) in ["symlink", "hard link", "pipe"].iter().enumerate() {
        for file in &files {
            fs::write(&victim, "my thesis").unwrap();
            fs::remove_file(file).unwrap();
            match *plant {
                "symlink" => symlink(&victim, file).unwrap(),
                "hard link" => fs::hard_link(&victim, file).unwrap(),
                _ => assert!(std::process::Command::new("mkfifo").arg(file).status().unwrap().success()),
            }
        }
        get(&format!("again-{i}"));
        assert!(fs::read(out.at(&format!("again-{i}"))).unwrap() == first.bytes());
        assert_eq!(fs::read(&victim).unwrap(), b"my thesis", "{plant}");
    }
}

#[test]
fn a_hidden_folder_that_another_user_may_have_made_is_not_used() {
    let place = Place::new();
    let (memory, first) = large(&place);
    let shared = Place::new();
    let out = shared.at("out");
    let kept = interrupted(&memory, &out);
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&kept), 0o700);
    let is_root = fs::metadata(&kept).unwrap().uid() == 0;
    let blob = fs::read_dir(&kept).unwrap().map(|entry| entry.unwrap().file_name()).find(|name| !name.is_empty()).unwrap();
    let elsewhere = place.at("elsewhere");
    for how in ["writable by others", "owned by another user", "a link", "a file"] {
        fs::remove_dir_all(&kept).or_else(|_| fs::remove_file(&kept)).unwrap();
        fs::create_dir_all(&elsewhere).unwrap();
        match how {
            "a link" => symlink(&elsewhere, &kept).unwrap(),
            "a file" => fs::write(&kept, "theirs").unwrap(),
            _ => {
                fs::create_dir(&kept).unwrap();
                fs::write(kept.join(&blob), "theirs").unwrap();
                fs::set_permissions(&kept, fs::Permissions::from_mode(if how.starts_with('w') { 0o777 } else { 0o755 })).unwrap();
                if how.starts_with('o') {
                    if !is_root {
                        continue;
                    }
                    std::os::unix::fs::chown(&kept, Some(65534), None).unwrap();
                }
            }
        }
        open(&memory).get("main", &out, &GetOptions::default()).unwrap();
        assert!(fs::read(&out).unwrap() == first.bytes(), "{how}");
        assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0, "{how}");
        if kept.is_dir() && how != "a link" {
            assert_eq!(fs::read(kept.join(&blob)).unwrap(), b"theirs", "{how}");
        }
        assert_eq!(hidden(shared.0.path()), std::slice::from_ref(&kept), "{how}");
        fs::remove_file(&out).unwrap();
    }
}

#[test]
fn two_calls_with_the_same_output_do_not_share_a_hidden_folder() {
    let place = Place::new();
    let (memory, first) = large(&place);
    let shared = Place::new();
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let get = || open(&memory).get("main", shared.at("out"), &GetOptions::default());
        let calls: Vec<_> = (0..8).map(|_| scope.spawn(get)).collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
    for error in outcomes.into_iter().filter_map(Result::err) {
        assert!(error.to_string().contains("exist"), "{error}");
    }
    assert!(fs::read(shared.at("out")).unwrap() == first.bytes());
    assert!(hidden(shared.0.path()).is_empty());
}

#[test]
fn a_manifest_that_claims_terabytes_allocates_nothing_and_ends_at_once() {
    let place = Place::new();
    let (memory, _, second) = one_version(&place);
    open(&memory).put(place.file(&second), &PutOptions::default()).unwrap();
    let name = ObjectPath::from("a/prefix/branches/main/0000000001.json");
    let right: serde_json::Value = serde_json::from_slice(&read(&memory, &name)).unwrap();
    let there = names(&memory, "objects")[0].filename().unwrap().to_owned();
    let absent = "ab".repeat(32);
    // All segments are missing, or the first is there with another size.
    for first in [&absent, &there] {
        let mut manifest = right.clone();
        let mut segments = vec![json!({"digest": absent, "bytes": 1_u64 << 30}); 4000];
        segments[0]["digest"] = json!(first);
        for file in ["blob", "index"] {
            manifest["content"]["difference"][file] = json!({"bytes": 4000_u64 << 30, "segments": segments});
            write(&memory, &name, manifest.to_string().into_bytes());
            for select in [false, true] {
                let out = Place::new();
                let begin = Instant::now();
                for _ in 0..3 {
                    let all = |_: &str| true;
                    let options = if select { GetOptions::default().tensors(&all) } else { GetOptions::default() };
                    let error = open(&memory).get("main", out.at("out"), &options).unwrap_err();
                    assert!(matches!(error, Error::Damaged { .. } | Error::Manifest { .. }), "{error}");
                    for (name, bytes) in hidden(out.0.path()).iter().flat_map(|folder| tree(folder)) {
                        assert!(bytes.len() < 1 << 20, "{name} has {} bytes", bytes.len());
                    }
                }
                assert!(begin.elapsed() < Duration::from_secs(20));
            }
            manifest = right.clone();
        }
    }
}

#[test]
fn holes_of_a_file_in_a_cache_are_not_hashed() {
    let place = Place::new();
    let (memory, first) = large(&place);
    let cache = place.at("cache");
    open(&memory).get("main", place.at("once"), &GetOptions::default().cache(&cache)).unwrap();
    let blob =
        fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path()).find(|path| path.extension().unwrap() == "tpde-blob");
    // What a version of this crate that extended files has left: as large as a disk, and empty.
    fs::File::create(blob.unwrap()).unwrap().set_len(1 << 42).unwrap();
    let begin = Instant::now();
    open(&memory).get("main", place.at("again"), &GetOptions::default().cache(&cache)).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(20));
    assert!(fs::read(place.at("again")).unwrap() == first.bytes());
}

#[test]
fn an_output_may_have_the_longest_name() {
    let place = Place::new();
    let (memory, first) = large(&place);
    let out = Place::new();
    for length in [212, 213, 255] {
        let path = out.at(&"n".repeat(length));
        open(&memory).get("main", &path, &GetOptions::default()).unwrap();
        assert!(fs::read(path).unwrap() == first.bytes());
    }
    assert!(hidden(out.0.path()).is_empty());
}

#[test]
fn a_cache_in_the_output_is_refused_before_anything_is_written() {
    let place = Place::new();
    let (memory, _) = large(&place);
    let out = Place::new();
    symlink(out.0.path(), place.at("link")).unwrap();
    for cache in
        [out.at("out"), out.at("out/c"), out.at("out/c/d"), out.at("./out/../out/c"), place.at("link/out"), place.at("link/out/c")]
    {
        let error = open(&memory).get("main", out.at("out"), &GetOptions::default().cache(&cache)).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument(why) if why.contains("cache outside of the output")), "{error}");
        assert_eq!(fs::read_dir(out.0.path()).unwrap().count(), 0, "{cache:?}");
    }
    open(&memory).get("main", out.at("cache/out"), &GetOptions::default().cache(out.at("cache"))).unwrap();
}

#[test]
fn a_version_that_the_caller_has_is_rebuilt_from_the_store() {
    let place = Place::new();
    let (memory, first) = large(&place);
    let store = open(&memory);
    let path = place.file(&first);
    store.create_branch("trial", "main").unwrap();
    for version in ["main", "trial"] {
        store.get(version, place.at(version), &GetOptions::default().have("main", &path)).unwrap();
        assert!(fs::read(place.at(version)).unwrap() == first.bytes());
    }
    store.put(&path, &PutOptions::default().branch("outside").anchor(Anchor::External { hint: "elsewhere".into() })).unwrap();
    let error = store.get("outside", place.at("out"), &GetOptions::default().have("outside", &path)).unwrap_err();
    let expected =
        format!("outside@0 is not stored: the checkpoint {} was passed as this version, so use it as it is", path.display());
    assert!(matches!(&error, Error::InvalidArgument(why) if *why == expected), "{error}");
}

#[test]
fn a_folder_that_contains_the_store_is_refused() {
    let place = Place::new();
    let folder = place.at("step");
    Weights::new(3).write_folder(&folder, "{}");
    for inside in ["st", "1_Pooling/st", "."] {
        let location = folder.join(inside);
        let store = Store::init(location.to_str().unwrap(), &never_whole()).unwrap();
        let error = store.put(&folder, &PutOptions::default()).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument(why) if why.contains("contains the store")), "{error}");
    }
}

#[test]
fn a_url_without_its_feature_names_the_feature() {
    for (url, feature, is_there) in [
        ("s3://bucket/prefix", "aws", cfg!(feature = "aws")),
        ("gs://bucket/prefix", "gcp", cfg!(feature = "gcp")),
        ("az://container/prefix", "azure", cfg!(feature = "azure")),
    ] {
        if is_there {
            continue;
        }
        for outcome in [Store::open(url), Store::init(url, &never_whole())] {
            let Err(Error::InvalidArgument(why)) = outcome else { panic!("{url}") };
            assert!(why.contains(&format!("cargo install --locked --path cli --features {feature}")), "{why}");
        }
    }
}

#[test]
fn a_url_of_no_store_is_refused_with_those_that_are() {
    for url in ["https://host/owner/model", "http://host/store", "ftp://host/store"] {
        for outcome in [Store::open(url), Store::init(url, &never_whole())] {
            let Err(Error::InvalidArgument(why)) = outcome else { panic!("{url}") };
            assert!(why.contains("expected a folder, s3://, gs:// or az://"), "{why}");
        }
    }
}

#[test]
fn a_cache_in_the_store_is_refused() {
    let place = Place::new();
    let store = Store::init(place.at("store").to_str().unwrap(), &never_whole()).unwrap();
    store.put(place.file(&Weights::new(3)), &PutOptions::default()).unwrap();
    let options = GetOptions::default().cache(place.at("store/cache"));
    let refused = [
        store.open_version("main", None, &options).err(),
        store.load("main", &options, &mut |_, _, _| Ok(())).err(),
        store.get("main", place.at("out"), &options).err(),
    ];
    for error in refused {
        assert!(matches!(&error, Some(Error::InvalidArgument(why)) if why.contains("outside of the store")), "{error:?}");
    }
    assert!(!place.at("store/cache").exists());
}

#[test]
fn files_that_a_parent_has_count_once() {
    let (place, memory) = (Place::new(), Arc::new(InMemory::new()));
    let store = init(&memory, &never_whole());
    let folder = place.at("step");
    let mut weights = Weights::new(3);
    for step in 0..3 {
        weights.write_folder(&folder, "{}");
        let mut random = Random(step);
        fs::write(folder.join("optimizer.pt"), (0..50_000).map(|_| random.next() as u8).collect::<Vec<_>>()).unwrap();
        store.put(&folder, &PutOptions::default()).unwrap();
        weights.step(step);
    }
    let versions = store.log("main").unwrap();
    let new = store.new_file_bytes(&versions).unwrap();
    assert_eq!(new[..2], [50_000; 2]);
    assert!(new[2] > 50_000);
    let usage = store.usage().unwrap();
    assert_eq!(usage.file_bytes, new.iter().sum::<u64>());
    let pairs: u64 = versions.iter().map(|version| version.pair().unwrap().bytes()).sum();
    assert_eq!(usage.stored_bytes, pairs + usage.file_bytes);
}

#[test]
fn gc_removes_what_a_killed_writer_left_and_nothing_else() {
    let place = Place::new();
    let location = place.at("st");
    let store = Store::init(location.to_str().unwrap(), &StoreOptions::default().grace(Duration::from_secs(60))).unwrap();
    store.put(place.file(&Weights::new(1)), &PutOptions::default()).unwrap();
    let object = fs::read_dir(location.join("objects")).unwrap().next().unwrap().unwrap().file_name().into_string().unwrap();
    let old = std::time::SystemTime::now() - Duration::from_secs(600);
    let make = |name: &str, is_old: bool| {
        fs::create_dir_all(location.join(name).parent().unwrap()).unwrap();
        let file = fs::File::create(location.join(name)).unwrap();
        if is_old {
            file.set_modified(old).unwrap();
        }
    };
    let dead = [format!("objects/{object}#1"), "branches/main/0000000001.json#2".into(), "store.json#1".into()];
    let others = ["objects/notes#1", "notes/a#1", "notes#1"];
    dead.iter().for_each(|name| make(name, true));
    others.iter().for_each(|name| make(name, true));
    make(&format!("objects/{object}#3"), false);
    fs::create_dir(place.at("elsewhere")).unwrap();
    fs::write(place.at("elsewhere/store.json#1"), "mine").unwrap();
    fs::File::options().write(true).open(place.at("elsewhere/store.json#1")).unwrap().set_modified(old).unwrap();
    symlink(place.at("elsewhere"), location.join("objects/linked")).unwrap();
    assert_eq!(store.gc().unwrap().removed, 3);
    assert!(dead.iter().all(|name| !location.join(name).exists()));
    assert!(others.iter().all(|name| location.join(name).exists()));
    assert!(location.join(format!("objects/{object}#3")).exists() && place.at("elsewhere/store.json#1").exists());
    assert!(store.verify(None, true).unwrap().faults.is_empty());
}
