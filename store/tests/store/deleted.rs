//! Branches that are deleted.

use crate::*;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread;

/// The store as it is seen when all that was written so far is older than the grace.
fn later(memory: &Arc<InMemory>) -> Store {
    internals::open(Faulty::with(memory, Fault::None, 0, 100_000), SEGMENT).unwrap()
}

/// `main` has versions 0 to 2, and `side` begins at version 1 and has one of its own. Returns the versions of `main`, and `side@1`.
fn two_branches(place: &Place) -> (Arc<InMemory>, Vec<Weights>) {
    let memory = Arc::new(InMemory::new());
    let store = init(&memory, &never_whole());
    let mut versions = vec![Weights::new(3)];
    for number in 0..3 {
        let mut next = versions[number as usize].clone();
        store.put(place.file(&next), &PutOptions::default()).unwrap();
        next.step(number);
        versions.push(next);
    }
    store.create_branch("side", "main@1").unwrap();
    store.put(place.file(&versions[3]), &PutOptions::default().branch("side")).unwrap();
    (memory, versions)
}

fn numbers(store: &Store, branch: &str) -> Vec<u64> {
    store.log(branch).unwrap().iter().map(|version| version.number).collect()
}

#[test]
fn a_deleted_branch_is_gone_and_those_that_begin_at_it_stay_whole() {
    let place = Place::new();
    let (memory, versions) = two_branches(&place);
    let store = open(&memory);
    assert_eq!(store.delete_branch("main").unwrap().name(), "main@2");
    assert!(matches!(store.delete_branch("main"), Err(Error::NoVersion { .. })));
    assert!(matches!(store.log("main"), Err(Error::NoVersion { .. })));
    assert!(matches!(store.verify(Some("main"), false), Err(Error::NoVersion { .. })));
    for version in ["main", "main@0", "main@1", "main@2", "main@3"] {
        assert!(matches!(store.version(version), Err(Error::NoVersion { .. })), "{version}");
        let error = store.get(version, place.at("none"), &GetOptions::default()).unwrap_err();
        assert!(matches!(error, Error::NoVersion { .. }), "{error}");
    }
    assert_eq!(store.branches().unwrap().iter().map(Version::name).collect::<Vec<_>>(), ["side@1"]);
    let is_sound = || {
        check(&store, "side@0", &versions[1], &GetOptions::default());
        check(&store, "side@1", &versions[3], &GetOptions::default());
        assert!(store.verify(None, true).unwrap().faults.is_empty());
    };
    is_sound();

    // Within the grace nothing is removed. Afterwards main@2 is, which side does not need.
    let collected = store.gc().unwrap();
    assert_eq!((collected.versions, collected.waiting), (0, 3));
    let before = store.usage().unwrap();
    assert_eq!((before.versions, before.waiting), (2, 3));
    let collected = later(&memory).gc().unwrap();
    assert_eq!((collected.versions, collected.waiting, collected.young), (1, 2, 0));
    assert!(collected.removed > 0);
    let after = store.usage().unwrap();
    assert!((after.versions, after.waiting) == (2, 2) && after.difference_bytes < before.difference_bytes);
    is_sound();
    assert_eq!(later(&memory).gc().unwrap().versions, 0);

    // The name can be used again. Numbers go on, so nothing takes the new version for an old one.
    assert_eq!(store.put(place.file(&versions[0]), &PutOptions::default()).unwrap().name(), "main@4");
    assert_eq!(numbers(&store, "main"), [4]);
    assert!(matches!(store.version("main@1"), Err(Error::NoVersion { .. })));
    assert_eq!(store.watch("main", 0, Duration::ZERO).next().unwrap().unwrap().number, 4);
    assert_eq!(later(&memory).gc().unwrap().versions, 0);
    is_sound();

    // Without side, nothing of it, nor of the first main, is left but the deletions.
    store.delete_branch("side").unwrap();
    assert_eq!(later(&memory).gc().unwrap().versions, 4);
    check(&store, "main", &versions[0], &GetOptions::default());
    assert_eq!(store.usage().unwrap().versions, 1);
    let alone = Arc::new(InMemory::new());
    let expected = init(&alone, &never_whole());
    expected.put(place.file(&versions[0]), &PutOptions::default()).unwrap();
    assert_eq!(later(&memory).gc().unwrap().used, later(&alone).gc().unwrap().used);
    assert_eq!(store.create_branch("side", "main").unwrap().name(), "side@3");
    check(&store, "side", &versions[0], &GetOptions::default());
}

#[test]
fn a_collection_that_dies_at_any_request_leaves_what_is_needed() {
    let place = Place::new();
    let mut died = 0;
    for request in 0.. {
        let (memory, versions) = two_branches(&place);
        open(&memory).delete_branch("main").unwrap();
        let faulty = Faulty::with(&memory, Fault::DeadFrom(request), 0, 100_000);
        let outcome = internals::open(faulty, SEGMENT).and_then(|store| store.gc());
        let store = open(&memory);
        check(&store, "side", &versions[3], &GetOptions::default());
        later(&memory).gc().unwrap();
        let usage = store.usage().unwrap();
        assert_eq!((usage.versions, usage.waiting), (2, 2));
        assert!(store.verify(None, true).unwrap().faults.is_empty());
        assert_eq!(store.put(place.file(&versions[0]), &PutOptions::default()).unwrap().number, 4);
        if outcome.is_ok() {
            break;
        }
        died += 1;
    }
    assert!(died > 8, "{died} requests");
}

/// A deletion before any request of a put: the put conflicts, or its version is the first one after the deletion, or the one deleted.
#[test]
fn a_deletion_may_come_before_any_request_of_a_put() {
    let place = Place::new();
    let mut conflicts = 0;
    for request in 0.. {
        let memory = Arc::new(InMemory::new());
        let weights = Weights::new(1);
        init(&memory, &never_whole()).put(place.file(&weights), &PutOptions::default()).unwrap();
        let faulty = Faulty::new(&memory, Fault::None);
        let store = internals::open(faulty.clone(), SEGMENT).unwrap();
        let (late, head) = (memory.clone(), Arc::new(Mutex::new(None)));
        let deleted = head.clone();
        let at = faulty.requests.load(SeqCst) + request;
        *faulty.before_request.lock().unwrap() =
            Some((at, Box::new(move || *head.lock().unwrap() = open(&late).delete_branch("main").ok())));
        let outcome = store.put(place.file(&weights), &PutOptions::default());
        if faulty.before_request.lock().unwrap().is_some() {
            outcome.unwrap();
            break; // the put makes no such request
        }
        match outcome {
            Ok(version) if deleted.lock().unwrap().as_ref().is_some_and(|head| head.number == version.number) => {}
            Ok(version) => check(&open(&memory), &version.name(), &weights, &GetOptions::default()),
            Err(Error::Conflict { .. }) => conflicts += 1,
            Err(error) => panic!("before request {request}: {error}"),
        }
    }
    assert!(conflicts > 5, "{conflicts}");
}

#[test]
fn of_a_put_and_a_deletion_at_the_same_time_one_wins() {
    let memory = Arc::new(InMemory::new());
    init(&memory, &never_whole());
    let mut stored = BTreeMap::new();
    let mut deleted = None;
    thread::scope(|scope| {
        let writer = |seed: u64| {
            let (place, store) = (Place::new(), open(&memory));
            let (mut weights, mut stored) = (Weights::new(seed), Vec::new());
            for number in 0..12 {
                match store.put(place.file(&weights), &PutOptions::default()) {
                    Ok(version) => stored.push((version.number, weights.clone())),
                    Err(Error::Conflict { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                weights.step(number);
            }
            stored
        };
        let writers = [1, 2].map(|seed| scope.spawn(move || writer(seed)));
        let deleter = scope.spawn(|| {
            let store = open(&memory);
            let mut last = None;
            for _ in 0..40 {
                match store.delete_branch("main") {
                    Ok(head) => last = Some(head.number + 1),
                    Err(Error::Conflict { .. } | Error::NoVersion { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                thread::sleep(Duration::from_millis(3));
            }
            last
        });
        for writer in writers {
            for (number, weights) in writer.join().unwrap() {
                assert!(stored.insert(number, weights).is_none(), "two versions have number {number}");
            }
        }
        deleted = deleter.join().unwrap();
    });
    let store = open(&memory);
    stored.retain(|number, _| deleted.is_none_or(|deletion| *number > deletion));
    let found = if stored.is_empty() { Vec::new() } else { numbers(&store, "main") };
    assert_eq!(found, stored.keys().rev().copied().collect::<Vec<_>>());
    for (number, weights) in &stored {
        check(&store, &format!("main@{number}"), weights, &GetOptions::default());
    }
    assert!(store.verify(None, true).unwrap().faults.is_empty());
}
