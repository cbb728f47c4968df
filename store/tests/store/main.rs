//! Stores in memory with faults, and in a folder. Every version is compared bit for bit.

mod checkpoints;
mod deleted;
mod faulty;
mod folded;
mod folders;
mod hostile;
mod leases;
mod local;
mod opened;
mod parts;
mod simulated;
mod watched;

use checkpoints::{NAMES, Random, Weights, tree};
use faulty::{Fault, Faulty};
use object_store::memory::InMemory;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tpde::{Apply, Rectangle, SliceMut};
use tpde_store::*;

/// Small, so that blobs and files have several segments.
const SEGMENT: usize = 4096;

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A new version of the weights, as a file.
    fn file(&self, weights: &Weights) -> PathBuf {
        weights.write(&self.at("target.safetensors"))
    }
}

fn never_whole() -> StoreOptions {
    StoreOptions::default().anchor_every(0).anchor_percent(0)
}

fn init(memory: &Arc<InMemory>, options: &StoreOptions) -> Store {
    internals::init(memory.clone(), options, SEGMENT).unwrap()
}

fn open(memory: &Arc<InMemory>) -> Store {
    internals::open(memory.clone(), SEGMENT).unwrap()
}

/// Rebuilds a version, and compares it.
fn check(store: &Store, version: &str, expected: &Weights, options: &GetOptions<'_>) {
    let place = Place::new();
    store.get(version, place.at("out.safetensors"), options).unwrap();
    assert!(fs::read(place.at("out.safetensors")).unwrap() == expected.bytes(), "{version} differs");
    assert_eq!(fs::read_dir(place.0.path()).unwrap().count(), 1, "only the output is left");
    assert!(load(store, version, options).0 == expected.tensors(), "{version} differs in memory");
}

/// The tensors of a version by name, and what [`Store::load`] reports.
fn load(store: &Store, version: &str, options: &GetOptions<'_>) -> (BTreeMap<String, Vec<u8>>, GetReport) {
    let mut loaded = BTreeMap::new();
    let report = store.load(version, options, &mut |last, base, wanted| {
        let empty = |(name, one): (&String, &Rectangle)| (name.clone(), vec![0; 2 * one.extent.iter().product::<u64>() as usize]);
        loaded = wanted.iter().map(empty).collect();
        let slices = loaded.iter_mut().map(|(name, bytes)| SliceMut::new(name, wanted[name].clone(), bytes));
        Ok(Apply::new(last).base(base).to_slices(slices).map(|_| ())?)
    });
    let report = report.unwrap();
    (loaded, report)
}

#[test]
fn two_hundred_versions_come_back_in_any_order_and_anchors_follow_the_rules() {
    let (place, memory) = (Place::new(), Arc::new(InMemory::new()));
    let store = init(&memory, &StoreOptions::default().anchor_every(40).anchor_percent(0));
    let mut weights = Weights::new(1);
    let mut versions = Vec::new();
    for number in 0..200 {
        // Every other parent is at hand, the others are read from the store.
        let mut options = PutOptions::default();
        if number > 0 && number % 2 == 0 {
            options = options.have("main", versions_file(&place, versions.last().unwrap()));
        }
        let version = store.put(place.file(&weights), &options).unwrap();
        assert_eq!(version.name(), format!("main@{number}"));
        assert_eq!(matches!(version.content, Content::Whole(_)), number % 40 == 0, "{number}");
        versions.push(weights.clone());
        weights.step(number);
    }
    let mut random = Random(5);
    for number in (0..12).map(|_| random.below(200)).chain([0, 39, 40, 199]) {
        check(&store, &format!("main@{number}"), &versions[number as usize], &GetOptions::default());
    }
    check(&open(&memory), "main", &versions[199], &GetOptions::default());
    let have = GetOptions::default().have("main@150", versions_file(&place, &versions[150]));
    check(&store, "main@153", &versions[153], &have);
    let usage = store.usage().unwrap();
    assert_eq!(usage.versions, 200);
    assert!(usage.difference_bytes < usage.tensor_bytes / 10, "{usage:?}");
    let report = store.verify(None, false).unwrap();
    assert_eq!((report.versions, report.faults.len(), report.external.len()), (200, 0, 0));
}

fn versions_file(place: &Place, weights: &Weights) -> PathBuf {
    weights.write(&place.at("have.safetensors"))
}

#[test]
fn a_large_chain_makes_the_next_version_an_anchor() {
    let (place, memory) = (Place::new(), Arc::new(InMemory::new()));
    let store = init(&memory, &StoreOptions::default().anchor_every(0).anchor_percent(20));
    let mut weights = Weights::new(1);
    let mut is_whole = Vec::new();
    for number in 0..12 {
        let version = store.put(place.file(&weights), &PutOptions::default()).unwrap();
        is_whole.push(matches!(version.content, Content::Whole(_)));
        weights.step(number);
    }
    let first = store.version("main@0").unwrap().pair().unwrap().bytes();
    let chain: u64 = store
        .log("main")
        .unwrap()
        .iter()
        .rev()
        .skip(1)
        .map_while(|v| match &v.content {
            Content::Difference(pair) => Some(pair.bytes()),
            _ => None,
        })
        .sum();
    assert!(is_whole[0] && is_whole[1..].contains(&true) && is_whole.contains(&false), "{is_whole:?}");
    assert!(chain * 100 > first * 20, "the chain of {chain} bytes before the second anchor, of {first} bytes of the first");
}

#[test]
fn a_folder_comes_back_as_a_folder_byte_for_byte() {
    let place = Place::new();
    let location = place.at("store");
    let store = Store::init(location.to_str().unwrap(), &never_whole()).unwrap();
    let mut weights = Weights::new(3);
    for (number, config) in ["{}", "{\"a\": 1}"].iter().enumerate() {
        let folder = place.at(&format!("step-{number}"));
        weights.write_folder(&folder, config);
        store.put(&folder, &PutOptions::default()).unwrap();
        weights.step(1);
    }
    let before = fs::read_dir(location.join("objects")).unwrap().count();
    let again = Store::open(location.to_str().unwrap()).unwrap();
    for number in 0..2 {
        let out = place.at(&format!("out-{number}"));
        again.get(&format!("main@{number}"), &out, &GetOptions::default()).unwrap();
        assert_eq!(tree(&out), tree(&place.at(&format!("step-{number}"))));
    }
    // Of the second version: an index, a blob and a configuration. Its tokenizer is that of the first.
    let names = |number: usize| {
        again.version(&format!("main@{number}")).unwrap().files.into_iter().map(|file| file.name).collect::<Vec<_>>()
    };
    assert_eq!(names(1), ["1_Pooling/config.json", "config.json", "empty.txt", "tokenizer.json"]);
    assert_eq!(before, 2 + 3 + 3);
    let error = again.get("main", place.at("out-0"), &GetOptions::default()).unwrap_err();
    assert!(matches!(&error, Error::Tpde(tpde::Error::Io { .. })), "{error}");
    assert!(matches!(Store::init(location.to_str().unwrap(), &never_whole()), Err(Error::AlreadyAStore { .. })));
    assert!(matches!(Store::open(place.at("nothing").to_str().unwrap()), Err(Error::NotAStore { .. })));
    assert!(matches!(Store::open(place.at("step-0").to_str().unwrap()), Err(Error::NotAStore { .. })));
}

#[cfg(unix)]
#[test]
fn a_file_whose_name_is_not_utf8_is_refused() {
    use std::os::unix::ffi::OsStrExt;
    let place = Place::new();
    let store = init(&Arc::new(InMemory::new()), &never_whole());
    let folder = place.at("step");
    Weights::new(3).write_folder(&folder, "{}");
    fs::write(folder.join(std::ffi::OsStr::from_bytes(b"caf\xE9.json")), "{}").unwrap();
    let error = store.put(&folder, &PutOptions::default()).unwrap_err();
    assert!(matches!(&error, Error::InvalidArgument(why) if why.contains("caf\\xE9.json")), "{error}");
    assert!(store.log("main").is_err());
}

#[cfg(unix)]
#[test]
fn links_to_files_are_stored_as_files_and_other_links_are_refused() {
    use std::os::unix::fs::symlink;
    let place = Place::new();
    let store = init(&Arc::new(InMemory::new()), &never_whole());
    let folder = place.at("step");
    Weights::new(3).write_folder(&folder, "{}");
    symlink(folder.join("config.json"), folder.join("linked.json")).unwrap();
    store.put(&folder, &PutOptions::default()).unwrap();
    store.get("main", place.at("out"), &GetOptions::default()).unwrap();
    assert_eq!(fs::read(place.at("out").join("linked.json")).unwrap(), b"{}");
    for target in [place.at("nothing"), folder.join("1_Pooling")] {
        symlink(&target, folder.join("other")).unwrap();
        let error = store.put(&folder, &PutOptions::default()).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument(why) if why.contains("other")), "{error}");
        fs::remove_file(folder.join("other")).unwrap();
    }
    assert_eq!(store.log("main").unwrap().len(), 1);
}

/// A store with one version, and the second version's weights.
fn one_version(place: &Place) -> (Arc<InMemory>, Weights, Weights) {
    let memory = Arc::new(InMemory::new());
    let first = Weights::new(7);
    init(&memory, &never_whole()).put(place.file(&first), &PutOptions::default()).unwrap();
    let mut second = first.clone();
    second.step(2);
    (memory, first, second)
}

#[test]
fn a_put_that_dies_at_any_request_leaves_a_store_for_the_next_writer() {
    let place = Place::new();
    for fault in [Fault::DeadFrom as fn(u64) -> Fault, Fault::LostAt] {
        let (mut died, mut has_failed_after) = (0, false);
        for request in 0.. {
            let (memory, first, second) = one_version(&place);
            let faulty = Faulty::new(&memory, fault(request));
            let outcome =
                internals::open(faulty.clone(), SEGMENT).and_then(|store| store.put(place.file(&second), &PutOptions::default()));
            if faulty.requests.load(SeqCst) <= request {
                outcome.unwrap();
                break;
            }
            died += 1;

            // The head is the old version or the new one. What follows the manifest matters to nobody else.
            let store = open(&memory);
            let head = store.version("main").unwrap().number;
            assert!(head == 1 || outcome.is_err(), "{request}");
            has_failed_after |= head == 1 && outcome.is_err();
            check(&store, "main", if head == 0 { &first } else { &second }, &GetOptions::default());
            let mut third = second.clone();
            third.step(3);
            let next = store.put(place.file(&third), &PutOptions::default()).unwrap();
            assert_eq!(next.number, head + 1);
            // Nothing is old enough to be removed; then everything is.
            assert_eq!(store.gc().unwrap().removed, 0);
            let old = Faulty::with(&memory, Fault::None, 0, 100_000);
            let collected = internals::open(old, SEGMENT).unwrap().gc().unwrap();
            assert_eq!((collected.young, store.gc().unwrap().young), (0, 0));
            check(&store, "main@0", &first, &GetOptions::default());
            check(&store, "main", &third, &GetOptions::default());
        }
        assert!(died > 8 && has_failed_after, "{died} requests");
    }
}

#[test]
fn requests_that_fail_now_and_then_are_repeated() {
    let place = Place::new();
    let memory = Arc::new(InMemory::new());
    let store = internals::init(Faulty::new(&memory, Fault::Flaky), &never_whole(), SEGMENT).unwrap();
    let mut weights = Weights::new(1);
    for number in 0..3 {
        // A manifest whose answer got lost is found to be our own.
        assert_eq!(store.put(place.file(&weights), &PutOptions::default()).unwrap().number, number);
        check(&store, "main", &weights, &GetOptions::default());
        weights.step(number);
    }
}

#[test]
fn lists_that_lack_the_newest_manifests_change_nothing() {
    let place = Place::new();
    let (memory, _, second) = one_version(&place);
    for number in 1..4 {
        let store = internals::open(Faulty::with(&memory, Fault::None, 2, 0), SEGMENT).unwrap();
        assert_eq!(store.put(place.file(&second), &PutOptions::default()).unwrap().number, number);
        check(&store, "main", &second, &GetOptions::default());
    }
}

#[test]
fn of_two_writers_one_wins_and_the_other_is_told() {
    let memory = Arc::new(InMemory::new());
    init(&memory, &never_whole());
    let outcomes: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2)
            .map(|writer| {
                let memory = memory.clone();
                scope.spawn(move || {
                    let (place, store) = (Place::new(), open(&memory));
                    let (mut won, mut lost) = (0, 0);
                    while won < 10 {
                        let weights = Weights::new(writer);
                        match store.put(place.file(&weights), &PutOptions::default().metadata([("writer", writer.to_string())])) {
                            Ok(_) => won += 1,
                            Err(Error::Conflict { .. }) => lost += 1,
                            Err(error) => panic!("{error}"),
                        }
                    }
                    (won, lost)
                })
            })
            .collect();
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    let store = open(&memory);
    let log = store.log("main").unwrap();
    assert_eq!(log.len() as u64, outcomes.iter().map(|(won, _)| won).sum::<u64>());
    assert!(outcomes.iter().any(|(_, lost)| *lost > 0), "no race happened: {outcomes:?}");
    for version in log {
        let writer = version.metadata["writer"].parse().unwrap();
        check(&store, &version.name(), &Weights::new(writer), &GetOptions::default());
    }
}

#[test]
fn thirty_branches_over_an_external_base_store_only_their_pairs() {
    let (place, memory) = (Place::new(), Arc::new(InMemory::new()));
    let store = init(&memory, &StoreOptions::default());
    let base = Weights::new(9);
    let path = base.write(&place.at("base.safetensors"));
    let external = PutOptions::default().anchor(Anchor::External { hint: "hub/base".into() });
    store.put(&path, &external).unwrap();
    let fine_tune = |number: u64| {
        let mut weights = base.clone();
        weights.step(100 + number);
        weights
    };
    for number in 0..30 {
        let options = PutOptions::default().branch(format!("tune-{number}")).parent("main@0");
        let file = place.file(&fine_tune(number));
        if number == 0 {
            let error = store.put(&file, &options).unwrap_err();
            assert!(matches!(&error, Error::External { version, hint } if version == "main@0" && hint == "hub/base"), "{error}");
        }
        store.put(&file, &options.have("main@0", &path)).unwrap();
    }
    for number in 0..30 {
        let name = format!("tune-{number}");
        check(&store, &name, &fine_tune(number), &GetOptions::default().have("main@0", &path));
    }
    assert_eq!(store.branches().unwrap().len(), 31);
    let usage = store.usage().unwrap();
    assert_eq!(usage.anchor_bytes, 0);
    assert!(usage.difference_bytes < usage.tensor_bytes / 10, "{usage:?}");
    // Another checkpoint under the same name is refused.
    let wrong = Weights::new(10).write(&place.at("wrong.safetensors"));
    let error = store.get("tune-3", place.at("out"), &GetOptions::default().have("main@0", wrong)).unwrap_err();
    assert!(matches!(&error, Error::Tpde(_)) && error.to_string().contains("wrong base"), "{error}");
    assert!(!place.at("out").exists());
    let report = store.verify(None, true).unwrap();
    assert_eq!((report.faults.len(), report.external.len()), (0, 31));
}

#[test]
fn a_branch_begins_with_the_tensors_of_a_version() {
    let place = Place::new();
    let (memory, first, second) = one_version(&place);
    let store = open(&memory);
    store.create_branch("side", "main").unwrap();
    store.put(place.file(&second), &PutOptions::default().branch("side")).unwrap();
    check(&store, "side@0", &first, &GetOptions::default());
    check(&store, "side@1", &second, &GetOptions::default());
    assert!(matches!(store.create_branch("side", "main"), Err(Error::InvalidArgument(_))));
    assert!(matches!(store.create_branch("../side", "main"), Err(Error::InvalidArgument(_))));
    assert!(matches!(
        store.put(place.file(&second), &PutOptions::default().branch("side").parent("main@0")),
        Err(Error::InvalidArgument(_))
    ));
    assert!(matches!(store.version("main@7"), Err(Error::NoVersion { .. })));
    assert!(matches!(store.log("none"), Err(Error::NoVersion { .. })));
}

#[test]
fn a_selection_of_tensors_reads_only_their_chunks() {
    let (place, memory) = (Place::new(), Arc::new(InMemory::new()));
    let store = init(&memory, &never_whole());
    let mut weights = Weights::new(1);
    for number in 0..5 {
        store.put(place.file(&weights), &PutOptions::default()).unwrap();
        weights.step(number);
    }
    let read = |options: &GetOptions<'_>, out: &Path| {
        let faulty = Faulty::new(&memory, Fault::None);
        internals::open(faulty.clone(), 1 << 20).unwrap().get("main@3", out, options).unwrap();
        faulty.bytes_read.load(SeqCst)
    };
    let whole = read(&GetOptions::default(), &place.at("whole.safetensors"));
    let is_wanted = |name: &str| name == NAMES[1];
    let some = read(&GetOptions::default().tensors(&is_wanted), &place.at("some.safetensors"));
    assert!(some * 2 < whole, "{some} of {whole} bytes");
    let tensor = |path: &str| {
        let checkpoint = tpde::SafetensorsCheckpoint::open(place.at(path)).unwrap();
        let mut bytes = vec![0; 512];
        tpde::Checkpoint::read(&checkpoint, tpde::Checkpoint::find(&checkpoint, NAMES[1]).unwrap(), 0, &mut bytes).unwrap();
        bytes
    };
    assert_eq!(tensor("whole.safetensors"), tensor("some.safetensors"));
    // What a folder for pairs has, from a call for another tensor or from one that was interrupted, is not read again.
    let read_into = |name: &'static str, fault: Fault| {
        let faulty = Faulty::new(&memory, fault);
        let is_wanted = move |tensor: &str| tensor == name;
        let options = GetOptions::default().tensors(&is_wanted).cache(place.at("kept"));
        let _ = fs::remove_file(place.at("of-kept"));
        let outcome = internals::open(faulty.clone(), 1 << 20).and_then(|store| store.get("main@3", place.at("of-kept"), &options));
        (outcome.is_ok(), faulty.object_bytes.load(SeqCst), faulty.requests.load(SeqCst))
    };
    let (_, all, requests) = read_into(NAMES[2], Fault::None);
    fs::remove_dir_all(place.at("kept")).unwrap();
    let mut sums = Vec::new();
    for request in 0..requests {
        assert!(!read_into(NAMES[2], Fault::DeadFrom(request)).0);
        let (_, rest, _) = read_into(NAMES[2], Fault::None);
        assert!(rest <= all, "{rest} of {all} bytes");
        sums.push(rest);
        assert_eq!(read_into(NAMES[2], Fault::None).1, 0, "all is here");
        fs::remove_dir_all(place.at("kept")).unwrap();
    }
    assert!(sums.iter().any(|rest| *rest < all / 3 * 2), "an interrupted call saves little: {sums:?} of {all} bytes");
}

#[test]
fn a_get_that_would_fail_again_leaves_nothing() {
    let place = Place::new();
    let (memory, _, second) = one_version(&place);
    let store = open(&memory);
    let out = Place::new();
    let is_empty = || fs::read_dir(out.0.path()).unwrap().count() == 0;
    let refused = store.get("main", out.at("out"), &GetOptions::default().tensors(&|_| false));
    assert!(matches!(&refused, Err(Error::InvalidArgument(reason)) if reason == "no tensor of main@0 is selected"), "{refused:?}");
    assert!(is_empty());
    let external = PutOptions::default().branch("tuned").anchor(Anchor::External { hint: "elsewhere".into() });
    store.put(place.file(&second), &external).unwrap();
    assert!(matches!(store.get("tuned", out.at("out"), &GetOptions::default()), Err(Error::External { .. })));
    assert!(is_empty());
    // What an interrupted call has read stays, also if a later one is wrong.
    let faulty = Faulty::new(&memory, Fault::None);
    internals::open(faulty.clone(), SEGMENT).unwrap().get("main", place.at("whole"), &GetOptions::default()).unwrap();
    let dead = Faulty::new(&memory, Fault::DeadFrom(faulty.requests.load(SeqCst) - 1));
    internals::open(dead, SEGMENT).unwrap().get("main", out.at("out"), &GetOptions::default()).unwrap_err();
    store.get("main", out.at("out"), &GetOptions::default().tensors(&|_| false)).unwrap_err();
    assert!(!is_empty());
    store.get("main", out.at("out"), &GetOptions::default()).unwrap();
    assert_eq!(fs::read_dir(out.0.path()).unwrap().count(), 1);
}

#[test]
fn a_get_that_is_interrupted_anywhere_resumes_and_publishes_nothing_before_its_end() {
    let place = Place::new();
    let (memory, _, second) = one_version(&place);
    open(&memory).put(place.file(&second), &PutOptions::default()).unwrap();
    let total = {
        let faulty = Faulty::new(&memory, Fault::None);
        internals::open(faulty.clone(), SEGMENT).unwrap().get("main", place.at("first"), &GetOptions::default()).unwrap();
        faulty.bytes_read.load(SeqCst)
    };
    let mut saved = 0;
    for request in 0.. {
        let out = place.at(&format!("out-{request}"));
        let faulty = Faulty::new(&memory, Fault::DeadFrom(request));
        let outcome = internals::open(faulty, SEGMENT).and_then(|store| store.get("main", &out, &GetOptions::default()));
        if outcome.is_ok() {
            break;
        }
        assert!(!out.exists());
        let faulty = Faulty::new(&memory, Fault::None);
        internals::open(faulty.clone(), SEGMENT).unwrap().get("main", &out, &GetOptions::default()).unwrap();
        assert!(fs::read(&out).unwrap() == second.bytes());
        saved = saved.max(total - faulty.bytes_read.load(SeqCst));
    }
    assert!(saved > total / 2, "an interrupted call saves {saved} of {total} bytes");
    let left: Vec<_> = fs::read_dir(place.0.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().starts_with('.')), "{left:?}");
}

#[test]
fn a_watcher_sees_every_version_in_order() {
    let place = Place::new();
    let (memory, _, second) = one_version(&place);
    let seen: Vec<u64> = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let store = open(&memory);
            store.watch("main", 0, Duration::from_millis(5)).take(4).map(|version| version.unwrap().number).collect()
        });
        let store = open(&memory);
        for _ in 0..3 {
            store.put(place.file(&second), &PutOptions::default()).unwrap();
        }
        reader.join().unwrap()
    });
    assert_eq!(seen, [0, 1, 2, 3]);
}
