//! Shortcuts, and branches that are pruned.

use crate::*;
use std::collections::BTreeSet;

/// The store as it is seen when all that was written so far is older than the grace.
fn later(memory: &Arc<InMemory>) -> Store {
    internals::open(Faulty::with(memory, Fault::None, 0, 100_000), SEGMENT).unwrap()
}

/// A store whose `main` has `count` versions. Returns their weights.
fn versions(place: &Place, count: u64) -> (Arc<InMemory>, Vec<Weights>) {
    let memory = Arc::new(InMemory::new());
    let store = init(&memory, &never_whole());
    let mut weights = vec![Weights::new(3)];
    for number in 0..count {
        let last = weights[number as usize].clone();
        let mut options = PutOptions::default();
        if number > 0 {
            options = options.have("main", versions_file(place, &weights[number as usize - 1]));
        }
        store.put(place.file(&last), &options).unwrap();
        let mut next = last;
        next.step(number);
        weights.push(next);
    }
    (memory, weights)
}

fn fold(store: &Store, from: u64, to: u64) -> Shortcut {
    store.fold(&format!("main@{from}"), &format!("main@{to}"), &FoldOptions::default()).unwrap()
}

fn numbers(store: &Store, branch: &str) -> Vec<u64> {
    store.log(branch).unwrap().iter().rev().map(|version| version.number).collect()
}

/// The pairs of the cheapest way to each version: bytes, and number of objects. A way begins at the whole version 0, or at `have`.
fn best(log: &[Version], shortcuts: &[Shortcut], have: Option<u64>) -> Vec<(u64, usize)> {
    let cost = |pair: &StoredPair| (pair.bytes(), pair.index.segments.len() + pair.blob.segments.len());
    let mut best: Vec<(u64, usize)> = Vec::new();
    for version in log {
        let edges = shortcuts.iter().filter(|shortcut| shortcut.to == version.reference());
        let edges = edges.map(|shortcut| (shortcut.from.number as usize, cost(&shortcut.pair)));
        let own = cost(version.pair().unwrap());
        let before = version.parent.as_ref().map(|parent| (parent.number as usize, own));
        let ways = edges.chain(before).map(|(from, cost)| (best[from].0 + cost.0, best[from].1 + cost.1));
        let start = if have == Some(version.number) { Some((0, 0)) } else { version.parent.is_none().then_some(own) };
        best.push(ways.chain(start).min().unwrap());
    }
    best
}

#[test]
fn a_version_is_read_by_the_cheapest_way() {
    let place = Place::new();
    let (memory, weights) = versions(&place, 14);
    let store = open(&memory);
    let mut random = Random(8);
    let mut saved = 0;
    for round in 0..6 {
        let shortcuts = store.shortcuts("main").unwrap();
        assert_eq!(shortcuts.len(), round);
        let log: Vec<_> = store.log("main").unwrap().into_iter().rev().collect();
        for have in [None, Some(random.below(13))] {
            let best = best(&log, &shortcuts, have);
            for number in [13, 1 + random.below(13)] {
                if have == Some(number) {
                    continue;
                }
                let mut options = GetOptions::default();
                if let Some(have) = have {
                    options = options.have(format!("main@{have}"), versions_file(&place, &weights[have as usize]));
                }
                let counted = Faulty::new(&memory, Fault::None);
                let reader = internals::open(counted.clone(), SEGMENT).unwrap();
                let _ = fs::remove_file(place.at("out"));
                reader.get(&format!("main@{number}"), place.at("out"), &options).unwrap();
                assert!(fs::read(place.at("out")).unwrap() == weights[number as usize].bytes(), "main@{number}");
                let read = (counted.object_bytes.load(SeqCst), counted.objects_read.load(SeqCst) as usize);
                assert_eq!(read, best[number as usize], "main@{number} with {have:?} and {round} shortcuts");
                saved += usize::from(best[number as usize] < self::best(&log, &[], have)[number as usize]);
            }
        }
        let to = 2 + random.below(12);
        let shortcut = fold(&store, random.below(to - 1), to);
        if shortcuts.contains(&shortcut) {
            fold(&store, to - 2, to + u64::from(to < 13));
        }
    }
    assert!(saved > 4, "shortcuts were of use {saved} times");
}

#[test]
fn a_shortcut_has_the_bytes_of_a_direct_encoding_and_is_made_once() {
    let place = Place::new();
    let (memory, weights) = versions(&place, 5);
    let counted = Faulty::new(&memory, Fault::None);
    let store = internals::open(counted.clone(), SEGMENT).unwrap();
    let made = fold(&store, 1, 4);
    let direct = store.put(
        place.file(&weights[4]),
        &PutOptions::default().branch("direct").parent("main@1").have("main@1", versions_file(&place, &weights[1])),
    );
    assert_eq!(direct.unwrap().pair().unwrap().digest, made.pair.digest);
    assert_eq!((made.from.name(), made.to.name()), ("main@1".into(), "main@4".into()));
    let before = counted.requests.load(SeqCst);
    assert_eq!(fold(&store, 1, 4), made);
    assert!(counted.requests.load(SeqCst) - before < 12, "a shortcut that exists is not made again");
    assert_eq!(store.shortcuts("main").unwrap(), [made]);
    let usage = store.usage().unwrap();
    assert_eq!((usage.shortcuts, usage.shortcut_bytes), (1, store.shortcuts("main").unwrap()[0].pair.bytes()));
    assert_eq!(later(&memory).gc().unwrap().shortcuts, 0);
    check(&store, "main", &weights[4], &GetOptions::default());

    let refused = |from: &str, to: &str, expected: &str| {
        let error = store.fold(from, to, &FoldOptions::default()).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument(why) if why.contains(expected)), "{error}");
    };
    refused("main@4", "main@1", "main@1 does not derive from main@4");
    refused("main@2", "main@2", "main@2 has the tensors of main@2");
    store.create_branch("side", "main@2").unwrap();
    refused("main@2", "side@0", "side@0 has the tensors of main@2");
    refused("side@0", "main@4", "main@4 does not derive from side@0");
    assert_eq!(store.fold("main@0", "side@0", &FoldOptions::default()).unwrap().to.name(), "side@0");
    check(&store, "side", &weights[2], &GetOptions::default());
    assert!(store.verify(None, true).unwrap().faults.is_empty());
}

#[test]
fn a_shortcut_by_a_stranger_is_checked() {
    let place = Place::new();
    let (memory, weights) = versions(&place, 5);
    let store = open(&memory);
    fold(&store, 0, 3);
    let other = fold(&store, 1, 4);
    let name = hostile::names(&memory, "shortcuts/main/0000000003").remove(0);
    let right: serde_json::Value = serde_json::from_slice(&hostile::read(&memory, &name)).unwrap();
    let id = "0123456789abcdef0123456789abcdef";
    let cases: Vec<(&str, hostile::Change)> = vec![
        ("found tpde.store.shortcut/2", Box::new(|m| m["schema"] = "tpde.store.shortcut/2".into())),
        ("unknown field `extra`", Box::new(|m| m["extra"] = 1.into())),
        ("expected the shortcut of this name, found that from main@1 to main@3", Box::new(|m| m["from"]["number"] = 1.into())),
        ("expected the shortcut of this name", Box::new(|m| m["to"]["branch"] = "side".into())),
        ("from: expected a branch", Box::new(|m| m["from"]["branch"] = "../x".into())),
        ("from: expected an id", Box::new(|m| m["from"]["id"] = "x".into())),
        ("segments of 1 to", Box::new(|m| m["pair"]["blob"]["segments"][0]["bytes"] = 0.into())),
        ("has state", Box::new(move |m| m["pair"] = serde_json::to_value(&other.pair).unwrap())),
        ("no such object", Box::new(|m| m["pair"]["index"]["segments"][0]["digest"] = "0".repeat(64).into())),
    ];
    for (expected, change) in cases {
        let mut wrong = right.clone();
        change(&mut wrong);
        hostile::write(&memory, &name, wrong.to_string().into_bytes());
        let out = Place::new();
        // Another way is taken, without it.
        let report = store.get("main@3", out.at("out"), &GetOptions::default()).unwrap();
        assert!(fs::read(out.at("out")).unwrap() == weights[3].bytes());
        assert_eq!(report.left_out.len(), 1, "{report:?}");
        let (loaded, again) = load(&store, "main@3", &GetOptions::default());
        assert!(loaded == weights[3].tensors() && again.left_out == report.left_out, "{again:?}");
        let reason = &report.left_out[0].reason;
        assert!(reason.contains(expected), "expected {expected:?}, found {reason}");
        let verified = store.verify(None, true).unwrap();
        assert!(verified.faults.is_empty() && verified.shortcuts.values().next().unwrap().contains(expected), "{verified:?}");
        // Versions that it does not lead to are not affected.
        check(&store, "main@2", &weights[2], &GetOptions::default());
    }
    // Of another version that had this number, or from one: of no use.
    for member in ["from", "to"] {
        let mut wrong = right.clone();
        wrong[member]["id"] = id.into();
        hostile::write(&memory, &name, wrong.to_string().into_bytes());
        check(&store, "main@3", &weights[3], &GetOptions::default());
        assert!(store.verify(None, true).unwrap().faults.is_empty());
    }
    assert_eq!(later(&memory).gc().unwrap().shortcuts, 1);
    check(&store, "main@3", &weights[3], &GetOptions::default());
}

/// `main` has 8 versions; `side` begins at version 4 and has one of its own.
fn to_prune(place: &Place) -> (Arc<InMemory>, Vec<Weights>) {
    let (memory, weights) = versions(place, 8);
    let store = open(&memory);
    let options = PutOptions::default().branch("side").parent("main@4").have("main@4", versions_file(place, &weights[4]));
    store.put(place.file(&weights[8]), &options).unwrap();
    (memory, weights)
}

#[test]
fn a_pruned_branch_keeps_every_nth_version_and_gc_removes_the_others() {
    let place = Place::new();
    let (memory, weights) = to_prune(&place);
    let store = open(&memory);
    assert!(matches!(store.prune("main", 0, &FoldOptions::default()), Err(Error::InvalidArgument(_))));
    assert!(matches!(store.prune("none", 3, &FoldOptions::default()), Err(Error::NoVersion { .. })));
    assert_eq!(store.prune("main", 1, &FoldOptions::default()).unwrap().pruned.len(), 0);
    let before = store.usage().unwrap();

    let report = store.prune("main", 3, &FoldOptions::default()).unwrap();
    assert_eq!(report.pruned, ["main@1", "main@2", "main@5"]);
    // To versions 3 and 6; version 7 has its pair from 6, and 4 from 3.
    assert_eq!((report.kept, report.shortcuts), (5, 2));
    assert_eq!(numbers(&store, "main"), [0, 3, 4, 6, 7]);
    let is_sound = |store: &Store| {
        for number in [0, 3, 4, 6, 7] {
            check(store, &format!("main@{number}"), &weights[number as usize], &GetOptions::default());
        }
        check(store, "side", &weights[8], &GetOptions::default());
        assert!(store.verify(None, true).unwrap().faults.is_empty());
    };
    is_sound(&store);
    for (version, kept) in [("main@1", ["main@0", "main@3"]), ("main@5", ["main@4", "main@6"])] {
        for error in [
            store.version(version).unwrap_err(),
            store.get(version, place.at("none"), &GetOptions::default()).unwrap_err(),
            store.create_branch("other", version).unwrap_err(),
            store.put(place.file(&weights[1]), &PutOptions::default().branch("other").parent(version)).unwrap_err(),
            store.fold("main@0", version, &FoldOptions::default()).unwrap_err(),
        ] {
            let Error::Pruned { version: found, kept: nearest } = &error else { panic!("{error}") };
            assert_eq!((found.as_str(), nearest.as_slice()), (version, kept.map(String::from).as_slice()));
            assert!(error.to_string().contains("was pruned: expected a version that was kept (nearest: "), "{error}");
        }
    }
    // One who has a version that was pruned since then still gets others.
    let have = GetOptions::default().have("main@5", versions_file(&place, &weights[5]));
    check(&store, "main@6", &weights[6], &have);
    assert!(store.watch("main", 1, Duration::ZERO).next().unwrap().unwrap().number == 3);

    // Within the grace nothing goes.
    let collected = store.gc().unwrap();
    assert_eq!((collected.versions, collected.waiting), (0, 3));
    let waits = store.usage().unwrap();
    assert_eq!((waits.versions, waits.waiting), (before.versions - 3, 3));
    assert!(waits.tensor_bytes < before.tensor_bytes && waits.difference_bytes == before.difference_bytes);
    let collected = later(&memory).gc().unwrap();
    assert_eq!((collected.versions, collected.waiting, collected.shortcuts, collected.young), (3, 0, 0, 0));
    // The pairs of three versions, and those of versions 3 and 6, whose parents are gone.
    assert!(collected.removed >= 10, "{collected:?}");
    let after = store.usage().unwrap();
    assert_eq!((after.versions, after.waiting, after.shortcuts), (before.versions - 3, 0, 2));
    assert!(after.difference_bytes < before.difference_bytes);
    is_sound(&store);
    check(&store, "main@6", &weights[6], &have);
    assert!(matches!(store.version("main@5"), Err(Error::Pruned { .. })));
    assert_eq!(later(&memory).gc().unwrap().removed, 0);

    // Again, and coarser: version 6 goes although its only pair was a shortcut.
    store.put(place.file(&weights[8]), &PutOptions::default()).unwrap();
    let report = store.prune("main", 4, &FoldOptions::default()).unwrap();
    assert_eq!((report.pruned, report.shortcuts), (vec!["main@3".into(), "main@6".into(), "main@7".into()], 2));
    later(&memory).gc().unwrap();
    assert_eq!(numbers(&store, "main"), [0, 4, 8]);
    for (version, expected) in [("main@0", 0), ("main@4", 4), ("main@8", 8), ("side", 8)] {
        check(&store, version, &weights[expected], &GetOptions::default());
    }
    assert!(store.verify(None, true).unwrap().faults.is_empty());
    assert_eq!(store.usage().unwrap().shortcuts, 2);
    // The objects are those of the manifests, and no more.
    let used: BTreeSet<_> = store.shortcuts("main").unwrap().iter().map(|shortcut| shortcut.pair.digest).collect();
    assert_eq!(used.len(), 2);
    assert_eq!(later(&memory).gc().unwrap(), later(&memory).gc().unwrap());

    // A deleted branch leaves no marks behind.
    store.delete_branch("main").unwrap();
    store.delete_branch("side").unwrap();
    later(&memory).gc().unwrap();
    assert_eq!(hostile::names(&memory, "branches/main").len(), 2, "the deletion and its mark");
    assert_eq!((hostile::names(&memory, "shortcuts").len(), hostile::names(&memory, "objects").len()), (0, 0));
    assert!(matches!(store.version("main@1"), Err(Error::NoVersion { .. })));
}

/// Every version of `main` that can be named comes back: its digests are compared, and one of the versions byte for byte.
fn is_sound(store: &Store, weights: &[Weights], seed: u64) {
    let report = store.verify(None, true).unwrap();
    assert!(report.faults.is_empty(), "{report:?}");
    let numbers = numbers(store, "main");
    let number = numbers[seed as usize % numbers.len()];
    check(store, &format!("main@{number}"), &weights[number as usize], &GetOptions::default());
}

/// Lost answers differ from lost requests only in what was written, so a third is tested.
fn died_late(fault: fn(u64) -> Fault, request: u64) -> bool {
    fault(0) == Fault::DeadFrom(0) || request.is_multiple_of(3)
}

#[test]
fn a_prune_that_dies_at_any_request_leaves_a_store_for_the_next_one() {
    let place = Place::new();
    let (whole, weights) = to_prune(&place);
    let expected = {
        let memory = Arc::new(whole.fork());
        open(&memory).prune("main", 3, &FoldOptions::default()).unwrap();
        later(&memory).gc().unwrap().used
    };
    for fault in [Fault::DeadFrom as fn(u64) -> Fault, Fault::LostAt] {
        let mut died = 0;
        // Requests before the first that writes are reads, and have the same effect, so a sample is tested.
        let is_sampled = |request: &u64| if *request > 24 { died_late(fault, *request) } else { request.is_multiple_of(8) };
        for request in (0..).filter(is_sampled) {
            let memory = Arc::new(whole.fork());
            let faulty = Faulty::new(&memory, fault(request));
            let outcome =
                internals::open(faulty.clone(), SEGMENT).and_then(|store| store.prune("main", 3, &FoldOptions::default()));
            if faulty.requests.load(SeqCst) <= request {
                outcome.unwrap();
                break;
            }
            outcome.unwrap_err();
            died += 1;
            // What is not marked is there, also after a collection.
            let store = open(&memory);
            if request % 2 == 0 {
                later(&memory).gc().unwrap();
            }
            is_sound(&store, &weights, request);
            // A writer goes on, and so does the next prune.
            store.put(place.file(&weights[8]), &PutOptions::default().have("main@7", versions_file(&place, &weights[7]))).unwrap();
            store.prune("main", 3, &FoldOptions::default()).unwrap();
            assert_eq!(numbers(&store, "main"), [0, 3, 4, 6, 8]);
            let collected = later(&memory).gc().unwrap();
            assert_eq!(collected.young, 0);
            is_sound(&store, &weights, request);
            // Index and blob of version 8 take the place of those of version 7.
            assert!(collected.used.abs_diff(expected) <= 1, "{} objects instead of {expected}", collected.used);
        }
        assert!(died > 12, "{died} requests");
    }
}

#[test]
fn a_collection_after_a_prune_that_dies_at_any_request_leaves_what_is_needed() {
    let place = Place::new();
    let (whole, weights) = to_prune(&place);
    open(&whole).prune("main", 3, &FoldOptions::default()).unwrap();
    let mut died = 0;
    for request in 0.. {
        let memory = Arc::new(whole.fork());
        let faulty = Faulty::with(&memory, Fault::DeadFrom(request), 0, 100_000);
        let outcome = internals::open(faulty, SEGMENT).and_then(|store| store.gc());
        let store = open(&memory);
        for number in [0, 3, 4, 6, 7] {
            check(&store, &format!("main@{number}"), &weights[number as usize], &GetOptions::default());
        }
        check(&store, "side", &weights[8], &GetOptions::default());
        if outcome.is_ok() {
            break;
        }
        died += 1;
        later(&memory).gc().unwrap();
        assert_eq!(store.usage().unwrap().versions, 6);
    }
    assert!(died > 15, "{died} requests");
}

#[test]
fn shortcuts_over_an_external_base_need_that_base() {
    let (place, memory) = (Place::new(), Arc::new(InMemory::new()));
    let store = init(&memory, &never_whole());
    let mut weights = vec![Weights::new(9)];
    let base = weights[0].write(&place.at("base.safetensors"));
    store.put(&base, &PutOptions::default().anchor(Anchor::External { hint: "hub/base".into() })).unwrap();
    for number in 1..5u64 {
        let mut next = weights[number as usize - 1].clone();
        next.step(number);
        weights.push(next);
        store.put(place.file(&weights[number as usize]), &PutOptions::default().have("main@0", &base)).unwrap();
    }
    let error = store.prune("main", 4, &FoldOptions::default()).unwrap_err();
    assert!(matches!(&error, Error::External { version, .. } if version == "main@0"), "{error}");
    assert_eq!(numbers(&store, "main"), [0, 1, 2, 3, 4]);
    let report = store.prune("main", 4, &FoldOptions::default().have("main@0", &base)).unwrap();
    assert_eq!((report.pruned.len(), report.shortcuts), (3, 1));
    assert_eq!(later(&memory).gc().unwrap().versions, 3);
    check(&store, "main", &weights[4], &GetOptions::default().have("main@0", &base));
    let mut next = weights[4].clone();
    next.step(77);
    store.put(place.file(&next), &PutOptions::default().have("main@0", &base)).unwrap();
    check(&store, "main", &next, &GetOptions::default().have("main@0", &base));
}

/// What must be in a store: branches, their versions by number, and their weights.
type Expected = std::collections::BTreeMap<String, std::collections::BTreeMap<u64, Weights>>;

#[test]
fn any_order_of_calls_leaves_every_version_as_it_was() {
    for seed in 0..if std::env::var_os("TPDE_LONG").is_some() { 40 } else { 2 } {
        let (place, memory) = (Place::new(), Arc::new(InMemory::new()));
        init(&memory, &StoreOptions::default().anchor_every(7).anchor_percent(0));
        let (mut random, mut expected, mut weights) = (Random(seed), Expected::new(), Weights::new(seed));
        let store = open(&memory);
        for _ in 0..60 {
            let names: Vec<_> = expected.keys().cloned().collect();
            let branch = names.get(random.below(names.len() as u64 + 1) as usize).cloned().unwrap_or_else(|| "main".into());
            let numbers: Vec<u64> = expected.get(&branch).into_iter().flatten().map(|(number, _)| *number).collect();
            let any = |random: &mut Random| numbers[random.below(numbers.len() as u64) as usize];
            match random.below(12) {
                _ if numbers.is_empty() || numbers.len() < 4 => {
                    weights.step(random.next());
                    let version = store.put(place.file(&weights), &PutOptions::default().branch(&branch)).unwrap();
                    expected.entry(branch).or_default().insert(version.number, weights.clone());
                }
                0..=3 => {
                    weights.step(random.next());
                    let version = store.put(place.file(&weights), &PutOptions::default().branch(&branch)).unwrap();
                    expected.entry(branch).or_default().insert(version.number, weights.clone());
                }
                4..=5 => {
                    let (from, to) = (any(&mut random), any(&mut random));
                    if from < to {
                        match store.fold(&format!("{branch}@{from}"), &format!("{branch}@{to}"), &FoldOptions::default()) {
                            Ok(_) => {}
                            // An anchor lies between, or the branch began at another one in between.
                            Err(Error::InvalidArgument(why)) => assert!(why.contains("derive") || why.contains("tensors"), "{why}"),
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
                6..=7 => {
                    let report = store.prune(&branch, 2 + random.below(4), &FoldOptions::default()).unwrap();
                    let kept = expected.get_mut(&branch).unwrap();
                    for version in &report.pruned {
                        kept.remove(&version.split_once('@').unwrap().1.parse().unwrap()).unwrap();
                    }
                    assert_eq!(report.kept, kept.len() as u64);
                }
                8 if names.len() < 5 => {
                    let number = any(&mut random);
                    let name = format!("b{}", random.below(7));
                    if !expected.contains_key(&name) {
                        let version = store.create_branch(&name, &format!("{branch}@{number}")).unwrap();
                        let same = expected[&branch][&number].clone();
                        expected.insert(name, [(version.number, same)].into());
                    }
                }
                9 if names.len() > 2 => {
                    store.delete_branch(&branch).unwrap();
                    expected.remove(&branch);
                }
                _ => _ = later(&memory).gc().unwrap(),
            }
        }
        for round in 0..2 {
            for (branch, versions) in &expected {
                assert_eq!(self::numbers(&store, branch), versions.keys().copied().collect::<Vec<_>>());
                for (number, weights) in versions {
                    check(&store, &format!("{branch}@{number}"), weights, &GetOptions::default());
                }
            }
            assert!(store.verify(None, false).unwrap().faults.is_empty());
            if round == 0 {
                later(&memory).gc().unwrap();
            }
        }
    }
}

#[test]
fn a_damaged_shortcut_is_left_out_and_made_anew() {
    let place = Place::new();
    let (memory, weights) = versions(&place, 5);
    let store = open(&memory);
    let object = |stored: &Stored| {
        let Segment { digest, upload: Some(upload), .. } = stored.segments[0] else { panic!("an object without an upload") };
        object_store::path::Path::from(format!("a/prefix/objects/{digest}.{upload}"))
    };
    for (what, part) in (0..9).map(|case| (case / 3, case % 3)) {
        let shortcut = fold(&store, 0, 4);
        let manifest = hostile::names(&memory, "shortcuts/main/0000000004").remove(0);
        let name = [object(&shortcut.pair.index), object(&shortcut.pair.blob), manifest][what].clone();
        let right = hostile::read(&memory, &name);
        let mut flipped = right.clone();
        flipped[right.len() / 2] ^= 1;
        let wrong = [flipped, right[..right.len() / 2].to_vec(), Vec::new()][part].clone();
        hostile::write(&memory, &name, wrong);
        for is_whole in [true, false] {
            let (is_wanted, out) = (|tensor: &str| tensor == NAMES[2], Place::new());
            let options = if is_whole { GetOptions::default() } else { GetOptions::default().tensors(&is_wanted) };
            let report = store.get("main@4", out.at("out"), &options).unwrap();
            assert_eq!(report.left_out.len(), 1, "{report:?}");
            assert!(!is_whole || fs::read(out.at("out")).unwrap() == weights[4].bytes());
            let (loaded, report) = load(&store, "main@4", &options);
            assert_eq!(report.left_out.len(), 1, "{report:?}");
            assert!(loaded.iter().all(|(name, bytes)| weights[4].tensors()[name] == *bytes) && loaded.contains_key(NAMES[2]));
        }
        let report = store.verify(None, true).unwrap();
        assert_eq!((report.faults.len(), report.shortcuts.len()), (0, 1), "{report:?}");
        // The versions that it replaces are not pruned before it is made anew.
        let copy = Arc::new(memory.fork());
        assert_eq!(open(&copy).prune("main", 4, &FoldOptions::default()).unwrap().shortcuts, 1);
        later(&copy).gc().unwrap();
        check(&open(&copy), "main@4", &weights[4], &GetOptions::default());
        assert_eq!(fold(&store, 0, 4).pair.digest, shortcut.pair.digest);
        assert!(store.verify(None, true).unwrap().shortcuts.is_empty());
        assert_eq!(store.get("main@4", Place::new().at("out"), &GetOptions::default()).unwrap().left_out, []);
    }
}

#[test]
fn a_long_branch_costs_no_more_requests_than_a_short_one() {
    let place = Place::new();
    let mut puts = Vec::new();
    for count in [6, 40] {
        let (memory, weights) = versions(&place, count);
        let last = &weights[count as usize];
        let counted = Faulty::new(&memory, Fault::None);
        let store = internals::open(counted.clone(), SEGMENT).unwrap();
        let requests = |call: &dyn Fn()| {
            let before = counted.requests.load(SeqCst);
            call();
            counted.requests.load(SeqCst) - before
        };
        let have = |number: u64| (format!("main@{number}"), versions_file(&place, &weights[number as usize]));
        for back in [1, 4] {
            let (name, path) = have(count - 1 - back);
            let out = Place::new();
            let reader = internals::open(counted.clone(), SEGMENT).unwrap();
            let found = requests(&|| _ = reader.get("main", out.at("out"), &GetOptions::default().have(&name, &path)).unwrap());
            // Lists of branch and shortcuts, the number behind the last, twice the manifests, and two objects per pair.
            assert!(found <= 4 + 2 * (back + 1) + 3 * back, "{found} requests for {back} steps of {count}");
        }
        let (name, path) = have(count - 1);
        let options = PutOptions::default().have(name, path);
        puts.push(requests(&|| _ = store.put(place.file(last), &options).unwrap()));
        // A list, the number behind the last, and nothing that was read before.
        store.log("main").unwrap();
        assert!(requests(&|| _ = store.log("main").unwrap()) <= 3);
        assert!(requests(&|| _ = store.since("main", count).unwrap()) <= 3);
        let (reader, log) = (internals::open(counted.clone(), SEGMENT).unwrap(), store.log("main").unwrap());
        assert!(requests(&|| assert_eq!(reader.newest("main", 2).unwrap(), log[..2])) <= 5);
    }
    assert!(puts[0] == puts[1] && puts[1] <= 17, "{puts:?}");
}

#[test]
fn a_version_that_cannot_be_folded_does_not_block_prune() {
    let place = Place::new();
    let (memory, weights) = versions(&place, 5);
    let store = open(&memory);
    let segment = store.version("main@3").unwrap().pair().unwrap().blob.segments[0];
    let name = format!("a/prefix/objects/{}.{}", segment.digest, segment.upload.unwrap());
    hostile::write(&memory, &object_store::path::Path::from(name), b"damaged".to_vec());
    let report = store.prune("main", 2, &FoldOptions::default()).unwrap();
    assert_eq!((report.pruned, report.shortcuts), (vec!["main@1".to_owned()], 1));
    assert!(report.skipped.len() == 1 && report.skipped["main@4"].contains("expected"), "{:?}", report.skipped);
    later(&memory).gc().unwrap();
    check(&store, "main@2", &weights[2], &GetOptions::default());
    assert_eq!(store.prune("main", 2, &FoldOptions::default()).unwrap().pruned, [""; 0]);
}
