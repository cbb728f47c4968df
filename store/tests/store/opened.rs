//! Versions that are read without being rebuilt as files, pairs that were made elsewhere, and calls that end while they wait.

use crate::*;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Instant;
use tpde::{Encode, EncodeOptions, Pair, SafetensorsCheckpoint, Watch};

/// Two versions on branch `main`: one whole, one difference.
fn two_versions(place: &Place) -> (Arc<InMemory>, Weights, Weights) {
    let memory = Arc::new(InMemory::new());
    let store = init(&memory, &never_whole());
    let first = Weights::new(3);
    let mut second = first.clone();
    second.step(1);
    store.put(place.file(&first), &PutOptions::default()).unwrap();
    store.put(place.file(&second), &PutOptions::default()).unwrap();
    (memory, first, second)
}

#[test]
fn tensors_in_memory_and_pairs_from_elsewhere_are_versions_too() {
    let place = Place::new();
    let (memory, _, second) = two_versions(&place);
    let store = open(&memory);
    let mut third = second.clone();
    third.step(2);
    let target = SafetensorsCheckpoint::open(place.file(&third)).unwrap();

    // Another process encodes against the version, and passes its pair through the store.
    let opened = store.open_version("main", None, &GetOptions::default()).unwrap();
    let base = opened.chain().unwrap();
    let encode = Encode::new(&target).base(&base).options(EncodeOptions::default().payload_digests(true));
    encode.to_path(place.at("pair")).unwrap();
    let stored = store.upload_pair(place.at("pair")).unwrap();
    fs::create_dir(place.at("folder")).unwrap();
    let path = store.download_pair(&stored, place.at("folder")).unwrap();
    assert_eq!(store.gc().unwrap().removed, 0, "uploads are young");

    // Not on a branch whose head it was not made from.
    store.create_branch("old", "main@0").unwrap();
    let refused = store.put_pair(&path, &PutOptions::default().branch("old"));
    assert!(matches!(&refused, Err(Error::Tpde(tpde::Error::Step { .. }))), "{refused:?}");
    // Nor if it has other parts, so that the indexes do not tell.
    let options = EncodeOptions::default().payload_digests(true).split("*=0:2".parse().unwrap());
    Encode::new(&target).base(&base).options(options).to_path(place.at("parts")).unwrap();
    let refused = store.put_pair(place.at("parts"), &PutOptions::default().branch("old"));
    assert!(matches!(&refused, Err(Error::Tpde(tpde::Error::WrongBase { .. }))), "{refused:?}");
    store.create_branch("new-parts", "main").unwrap();
    store.put_pair(place.at("parts"), &PutOptions::default().branch("new-parts")).unwrap();
    check(&store, "new-parts", &third, &GetOptions::default());
    let refused = store.put_pair(&path, &PutOptions::default().branch("new"));
    assert!(matches!(&refused, Err(Error::InvalidArgument(reason)) if reason.contains("no parent")), "{refused:?}");
    let version = store.put_pair(&path, &PutOptions::default()).unwrap();
    assert_eq!((version.name(), version.tensors, version.tensor_bytes), ("main@2".into(), 3, 2 * (6144 + 256 + 16384)));
    check(&store, "main@2", &third, &GetOptions::default());

    let mut wrong = stored.clone();
    wrong.blob.bytes += 1;
    assert!(matches!(store.download_pair(&wrong, place.at("folder")), Err(Error::InvalidArgument(_))));
    Encode::new(&target).to_path(place.at("without")).unwrap();
    assert!(!Pair::open(place.at("without")).unwrap().index().has_payload_digests());
    assert!(matches!(store.put_pair(place.at("without"), &PutOptions::default()), Err(Error::InvalidArgument(_))));

    third.step(3);
    let target = SafetensorsCheckpoint::open(place.file(&third)).unwrap();
    let version = store.put_tensors(&target, &PutOptions::default()).unwrap();
    assert_eq!(version.name(), "main@3");
    check(&store, "main@3", &third, &GetOptions::default());
    assert!(store.verify(None, true).unwrap().faults.is_empty());
}

/// Ends the call when `now` is set.
#[derive(Default)]
struct End {
    now: AtomicBool,
    asked: AtomicU64,
}

impl Watch for End {
    fn done(&self, _: u64) -> tpde::Result<()> {
        self.asked.fetch_add(1, SeqCst);
        if self.now.load(SeqCst) { Err(tpde::Error::Cancelled) } else { Ok(()) }
    }
}

#[test]
fn a_call_ends_while_it_waits_for_a_request() {
    let place = Place::new();
    let (memory, ..) = two_versions(&place);
    let end = Arc::new(End::default());
    // Request 0 opens the store, 1 looks whether it is still there, 2 lists the branch, and the first manifest takes more than a second.
    let store = internals::open(Faulty::new(&memory, Fault::SlowAt(3)), SEGMENT).unwrap().watched(end.clone());
    end.now.store(true, SeqCst);
    let begin = Instant::now();
    let found = store.version("main@0").map(|_| ());
    assert!(matches!(found, Err(Error::Tpde(tpde::Error::Cancelled))), "{found:?}");
    assert!(begin.elapsed() < Duration::from_millis(900) && end.asked.load(SeqCst) > 0);
    end.now.store(false, SeqCst);
    assert_eq!(store.version("main").unwrap().name(), "main@1");
}
