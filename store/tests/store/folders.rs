//! Stores in folders that others change: links, special files, and folders that go away.

#![cfg(unix)]

use crate::*;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::time::SystemTime;

fn at(place: &Place) -> Store {
    Store::open(place.at("store").to_str().unwrap()).unwrap()
}

/// A store with two versions, which are older than the grace.
fn two_versions(place: &Place) -> Store {
    let options = never_whole().grace(Duration::from_secs(2));
    let store = Store::init(place.at("store").to_str().unwrap(), &options).unwrap();
    for seed in 0..2 {
        store.put(place.file(&Weights::new(seed)), &PutOptions::default()).unwrap();
    }
    store
}

fn make_old(path: &Path) {
    let old = SystemTime::now() - Duration::from_secs(1000);
    fs::File::open(path).unwrap().set_modified(old).unwrap();
}

fn fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn gc_removes_nothing_behind_links_and_nothing_with_another_name() {
    let place = Place::new();
    let store = two_versions(&place);
    fs::create_dir_all(place.at("documents/old")).unwrap();
    fs::create_dir_all(place.at("store/clock")).unwrap();
    fs::create_dir_all(place.at("store/objects/below")).unwrap();
    let digest = "ab".repeat(32);
    let mut kept = Vec::new();
    for name in ["documents/old/thesis.txt".to_owned(), format!("documents/{digest}"), format!("documents/{}", "0".repeat(32))] {
        kept.push(place.at(&name));
    }
    for name in ["objects/notes.txt", "clock/notes.txt", &format!("objects/below/{digest}"), "objects/README", "mine.txt"] {
        kept.push(place.at(&format!("store/{name}")));
    }
    for path in &kept {
        fs::write(path, "mine").unwrap();
        make_old(path);
    }
    for link in ["objects/x", "clock/y"] {
        symlink(place.at("documents"), place.at("store").join(link)).unwrap();
    }
    symlink(&kept[0], place.at(&format!("store/objects/{}", "cd".repeat(32)))).unwrap();
    let garbage = place.at(&format!("store/objects/{digest}"));
    fs::write(&garbage, "garbage").unwrap();
    make_old(&garbage);
    assert_eq!(store.gc().unwrap().removed, 1);
    assert!(!garbage.exists());
    for path in &kept {
        assert!(path.exists(), "{}", path.display());
    }
    check(&store, "main", &Weights::new(1), &GetOptions::default());
    // Where a list without something would be dangerous, a link is an error.
    for name in ["branches/other", "leases/00000000000000000000000000000000.json", "shortcuts/other"] {
        let link = place.at("store").join(name);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(place.at("documents"), &link).unwrap();
        let error = store.gc().unwrap_err();
        assert!(error.to_string().contains("found a link"), "{error}");
        fs::remove_file(&link).unwrap();
    }
    // Nothing is written behind a link.
    fs::rename(place.at("store/objects"), place.at("objects")).unwrap();
    symlink(place.at("objects"), place.at("store/objects")).unwrap();
    let before = fs::read_dir(place.at("objects")).unwrap().count();
    assert!(store.put(place.file(&Weights::new(3)), &PutOptions::default()).is_err());
    assert!(store.gc().is_err());
    assert_eq!(fs::read_dir(place.at("objects")).unwrap().count(), before);
}

#[test]
fn special_files_and_links_in_a_store_are_errors_and_no_call_waits_for_them() {
    type Call = fn(&Place) -> Result<()>;
    let calls: [(&str, Call); 6] = [
        ("log", |place| at_or(place)?.log("main").map(drop)),
        ("get", |place| at_or(place)?.get("main", place.at("out"), &GetOptions::default()).map(drop)),
        ("put", |place| at_or(place)?.put(place.file(&Weights::new(5)), &PutOptions::default()).map(drop)),
        ("gc", |place| at_or(place)?.gc().map(drop)),
        ("verify", |place| {
            let report = at_or(place)?.verify(None, false)?;
            if report.faults.is_empty() { Ok(()) } else { Err(Error::InvalidArgument("faults".into())) }
        }),
        ("branch delete", |place| at_or(place)?.delete_branch("main").map(drop)),
    ];
    fn at_or(place: &Place) -> Result<Store> {
        Store::open(place.at("store").to_str().unwrap())
    }
    for what in
        ["store.json", "branches/main/0000000001.json", "objects", "branches/main", "leases/00000000000000000000000000000000.json"]
    {
        for is_fifo in [true, false] {
            for (name, call) in &calls {
                let place = Place::new();
                two_versions(&place);
                let mut path = place.at("store").join(what);
                if what == "objects" {
                    path = fs::read_dir(path).unwrap().next().unwrap().unwrap().path();
                }
                if path.is_dir() {
                    fs::remove_dir_all(&path).unwrap();
                } else if path.exists() {
                    fs::remove_file(&path).unwrap();
                }
                match is_fifo {
                    true => fifo(&path),
                    false => symlink("/dev/zero", &path).unwrap(),
                }
                let outcome = call(&place);
                let is_needed = match what {
                    "objects" => ["verify"].contains(name),
                    "leases/00000000000000000000000000000000.json" => *name == "gc",
                    _ => true,
                };
                assert!(outcome.is_err() || !is_needed, "{name} with {what}");
                assert!(path.symlink_metadata().is_ok_and(|found| !found.is_file()), "{name} has replaced {what}");
            }
        }
    }
}

/// A list without the versions of a branch would make `gc` remove what they use.
#[test]
fn what_has_a_name_of_the_store_is_a_file_or_a_folder_as_it_should_be() {
    let place = Place::new();
    let store = two_versions(&place);
    let objects = || fs::read_dir(place.at("store/objects")).unwrap().count();
    let before = objects();
    let (branch, manifest) = (place.at("store/branches/main"), place.at("store/branches/main/0000000001.json"));
    let refused = |found: &str| {
        std::thread::sleep(Duration::from_secs(3));
        let outcomes = [
            at(&place).gc().err(),
            at(&place).get("main", place.at("out"), &GetOptions::default()).err(),
            at(&place).put(place.file(&Weights::new(3)), &PutOptions::default()).err(),
        ];
        for error in outcomes.map(Option::unwrap) {
            assert!(error.to_string().contains(found), "{error}");
        }
        assert_eq!(objects(), before);
    };
    fs::rename(&branch, place.at("branch")).unwrap();
    fs::write(&branch, "no folder").unwrap();
    refused("found a file");
    fs::remove_file(&branch).unwrap();
    fs::rename(place.at("branch"), &branch).unwrap();
    fs::rename(&manifest, place.at("manifest")).unwrap();
    fs::create_dir(&manifest).unwrap();
    refused("found a folder");
    fs::remove_dir(&manifest).unwrap();
    fs::rename(place.at("manifest"), &manifest).unwrap();
    // The manifests are elsewhere.
    fs::rename(place.at("store/branches"), place.at("branches")).unwrap();
    assert_eq!(at(&place).gc().unwrap().removed, 0);
    assert_eq!(objects(), before);
    fs::rename(place.at("branches"), place.at("store/branches")).unwrap();
    // What has other names is not the store's.
    fs::create_dir_all(place.at("store/shortcuts/main/drafts")).unwrap();
    for (number, folder) in ["branches/main", "shortcuts/main/drafts", "leases"].into_iter().enumerate() {
        fs::create_dir_all(place.at("store").join(folder)).unwrap();
        fifo(&place.at("store").join(folder).join("notes.txt"));
        symlink("/nonexistent", place.at("store").join(folder).join(format!("link-{number}!"))).unwrap();
    }
    store.gc().unwrap();
    check(&at(&place), "main@0", &Weights::new(0), &GetOptions::default());
    assert_eq!(at(&place).put(place.file(&Weights::new(3)), &PutOptions::default()).unwrap().number, 2);
    // Objects behind a link are not damaged, and the error says what is there.
    fs::rename(place.at("store/objects"), place.at("objects")).unwrap();
    symlink(place.at("objects"), place.at("store/objects")).unwrap();
    for error in [
        at(&place).get("main", place.at("out"), &GetOptions::default()).err().unwrap(),
        at(&place).verify(None, false).err().unwrap(),
    ] {
        assert!(error.to_string().contains("found a link"), "{error}");
    }
}

#[test]
fn nothing_is_written_into_the_store_itself_or_beside_weights_that_programs_prefer() {
    let place = Place::new();
    let store = two_versions(&place);
    for name in ["store/out", "store/branches/out/new", "store/objects/out"] {
        let error = store.get("main", place.at(name), &GetOptions::default()).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)) && !place.at(name).exists(), "{error}");
        let error = store.get("main", place.at("out"), &GetOptions::default().cache(place.at(name))).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)) && !place.at(name).exists(), "{error}");
    }
    fs::create_dir(place.at("model")).unwrap();
    fs::write(place.at("model/model.safetensors.index.json"), "{}").unwrap();
    let error = store.get("main", place.at("model/model.safetensors"), &GetOptions::default()).unwrap_err();
    assert!(error.to_string().contains("model.safetensors.index.json"), "{error}");
    assert_eq!(fs::read_dir(place.at("model")).unwrap().count(), 1);
    store.get("main", place.at("model/other.safetensors"), &GetOptions::default()).unwrap();
}

#[test]
fn a_store_that_has_vanished_is_an_error_and_nothing_is_written_in_its_place() {
    let place = Place::new();
    let store = two_versions(&place);
    let is_gone = |error: &Error| matches!(error, Error::NotAStore { .. });
    let calls = |store: &Store, is_right: &dyn Fn(&Error) -> bool| {
        let file = place.file(&Weights::new(3));
        let right = |name: &str, error: Option<Error>| match error {
            Some(error) => assert!(is_right(&error), "{name}: {error}"),
            None => panic!("{name} has succeeded"),
        };
        right("put", store.put(&file, &PutOptions::default()).err());
        right("log", store.log("main").err());
        right("get", store.get("main", place.at("out"), &GetOptions::default()).err());
        right("gc", store.gc().err());
        right("watch", store.watch("main", 0, Duration::ZERO).next().unwrap().err());
        right("branches", store.branches().err());
        right("branch", store.create_branch("side", "main").err());
        right("delete", store.delete_branch("main").err());
        right("prune", store.prune("main", 2, &FoldOptions::default()).err());
        right("verify", store.verify(None, false).err());
        right("usage", store.usage().err());
        right("version", store.version("main").err());
    };
    fs::rename(place.at("store"), place.at("gone")).unwrap();
    calls(&store, &is_gone);
    assert!(!place.at("store").exists());
    // The folder below a file system that was unmounted.
    fs::create_dir(place.at("store")).unwrap();
    calls(&store, &is_gone);
    assert_eq!(fs::read_dir(place.at("store")).unwrap().count(), 0);
    // Another store.
    fs::remove_dir(place.at("store")).unwrap();
    Store::init(place.at("store").to_str().unwrap(), &never_whole()).unwrap();
    calls(&store, &|error| matches!(error, Error::Replaced { .. }));
    assert_eq!(fs::read_dir(place.at("store")).unwrap().count(), 1);
    fs::remove_dir_all(place.at("store")).unwrap();
    fs::rename(place.at("gone"), place.at("store")).unwrap();
    assert_eq!(store.put(place.file(&Weights::new(3)), &PutOptions::default()).unwrap().number, 2);
}

fn has_files(folder: &Path) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| path.is_file() || has_files(&path))
}

#[test]
fn a_store_that_vanishes_during_a_put_gets_nothing_in_its_place() {
    struct Vanish(PathBuf, PathBuf, std::sync::atomic::AtomicBool);
    impl tpde::Watch for Vanish {
        fn done(&self, _: u64) -> tpde::Result<()> {
            if !self.2.swap(true, SeqCst) {
                fs::rename(&self.0, &self.1).unwrap();
            }
            Ok(())
        }
    }
    let place = Place::new();
    let store = two_versions(&place);
    let vanish = Vanish(place.at("store"), place.at("gone"), Default::default());
    let error = store.put(place.file(&Weights::new(3)), &PutOptions::default().watch(&vanish)).unwrap_err();
    assert!(matches!(error, Error::NotAStore { .. }), "{error}");
    // A request that had begun before may have left empty folders.
    assert!(!has_files(&place.at("store")));
    let _ = fs::remove_dir_all(place.at("store"));
    fs::rename(place.at("gone"), place.at("store")).unwrap();
    assert_eq!(at(&place).log("main").unwrap().len(), 2);
}
