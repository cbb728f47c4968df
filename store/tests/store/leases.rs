//! What `gc` does to a call that runs, or does not run any more.

use crate::*;

/// The store as `gc` sees it when all that was written so far is older than the grace; leases too, or not.
fn later(memory: &Arc<InMemory>, has_young_leases: bool) -> Store {
    let faulty = Faulty::with(memory, Fault::None, 0, 100_000);
    faulty.has_young_leases.store(has_young_leases, SeqCst);
    internals::open(faulty, SEGMENT).unwrap()
}

/// A store that does something before it creates the next manifest of a version.
fn with_hook(memory: &Arc<InMemory>, hook: impl FnOnce() + Send + 'static) -> Store {
    let faulty = Faulty::new(memory, Fault::None);
    *faulty.before_manifest.lock().unwrap() = Some(Box::new(hook));
    internals::open(faulty, SEGMENT).unwrap()
}

fn names(memory: &Arc<InMemory>, below: &str) -> usize {
    hostile::names(memory, below).len()
}

#[test]
fn a_put_that_was_given_up_before_its_last_request_publishes_nothing_and_the_next_one_goes_on() {
    let place = Place::new();
    let (memory, first, second) = one_version(&place);
    let late = memory.clone();
    let store = with_hook(&memory, move || assert!(later(&late, false).gc().unwrap().removed > 0));
    let error = store.put(place.file(&second), &PutOptions::default()).unwrap_err();
    assert!(matches!(error, Error::TooSlow { .. }), "{error}");
    let store = open(&memory);
    assert_eq!(store.version("main").unwrap().number, 0);
    assert_eq!(store.log("main").unwrap().len(), 1);
    assert!(matches!(store.version("main@1"), Err(Error::NoVersion { .. })));
    assert_eq!(store.put(place.file(&second), &PutOptions::default()).unwrap().number, 2);
    assert_eq!(store.newest("main", 2).unwrap().iter().map(|version| version.number).collect::<Vec<_>>(), [2, 0]);
    assert_eq!(store.since("main", 0).unwrap().len(), 2);
    later(&memory, false).gc().unwrap();
    check(&store, "main@0", &first, &GetOptions::default());
    check(&store, "main", &second, &GetOptions::default());
    assert!(store.verify(None, true).unwrap().faults.is_empty());
    assert_eq!(names(&memory, "leases"), 0);
}

#[test]
fn a_put_that_goes_on_keeps_all_that_it_uploads_and_uses_however_long_it_takes() {
    let place = Place::new();
    let (memory, _, second) = one_version(&place);
    let late = memory.clone();
    // Its parent cannot be named any more when the manifest is created.
    let options = PutOptions::default().branch("side").parent("main");
    let store = with_hook(&memory, move || {
        open(&late).delete_branch("main").unwrap();
        later(&late, true).gc().unwrap();
    });
    assert_eq!(store.put(place.file(&second), &options).unwrap().name(), "side@0");
    later(&memory, true).gc().unwrap();
    check(&open(&memory), "side", &second, &GetOptions::default());
    assert!(matches!(open(&memory).version("main"), Err(Error::NoVersion { .. })));
}

#[test]
fn a_manifest_that_was_created_in_time_is_kept_also_if_its_writer_never_returns() {
    let place = Place::new();
    let (memory, _, second) = one_version(&place);
    let counting = Faulty::new(&memory, Fault::None);
    internals::open(counting.clone(), SEGMENT).unwrap().put(place.file(&second), &PutOptions::default()).unwrap();
    let total = counting.requests.load(SeqCst);
    for request in 0..total {
        let (memory, first, second) = one_version(&place);
        let dead = Faulty::new(&memory, Fault::DeadFrom(request));
        let _ = internals::open(dead, SEGMENT).and_then(|store| store.put(place.file(&second), &PutOptions::default()));
        for _ in 0..2 {
            later(&memory, false).gc().unwrap();
        }
        let head = open(&memory).version("main").unwrap().number;
        check(&open(&memory), "main", if head == 0 { &first } else { &second }, &GetOptions::default());
        assert_eq!(names(&memory, "leases"), 0, "{request}");
    }
}

#[test]
fn an_upload_for_another_call_stays_until_its_lease_is_old() {
    let (place, memory) = (Place::new(), Arc::new(InMemory::new()));
    let store = init(&memory, &never_whole());
    let target = place.file(&Weights::new(1));
    let checkpoint = tpde::SafetensorsCheckpoint::open(&target).unwrap();
    tpde::Encode::new(&checkpoint).to_path(place.at("pair")).unwrap();
    let stored = store.upload_pair(place.at("pair")).unwrap();
    assert_eq!(store.gc().unwrap().removed, 0);
    store.download_pair(&stored, place.at("")).unwrap();
    assert!(later(&memory, false).gc().unwrap().removed > 0);
    assert_eq!(names(&memory, "leases") + names(&memory, "objects"), 0);
}

#[test]
fn a_long_put_renews_its_lease() {
    let place = Place::new();
    let location = place.at("store");
    let store = Store::init(location.to_str().unwrap(), &never_whole().grace(Duration::from_secs(2))).unwrap();
    struct Slow(std::sync::atomic::AtomicU64);
    impl tpde::Watch for Slow {
        fn done(&self, _: u64) -> tpde::Result<()> {
            if self.0.fetch_add(1, SeqCst) == 0 {
                std::thread::sleep(Duration::from_millis(3500));
            }
            Ok(())
        }
    }
    let weights = Weights::new(1);
    std::thread::scope(|scope| {
        let collector = scope.spawn(|| {
            for _ in 0..8 {
                std::thread::sleep(Duration::from_millis(500));
                Store::open(location.to_str().unwrap()).unwrap().gc().unwrap();
            }
        });
        store.put(place.file(&weights), &PutOptions::default().watch(&Slow(Default::default()))).unwrap();
        collector.join().unwrap();
    });
    check(&store, "main", &weights, &GetOptions::default());
}

#[test]
fn an_object_store_that_overwrites_what_exists_is_refused() {
    let (place, memory) = (Place::new(), Arc::new(InMemory::new()));
    let overwriting = || {
        let faulty = Faulty::new(&memory, Fault::None);
        faulty.is_overwriting.store(true, SeqCst);
        faulty
    };
    let error = internals::init(overwriting(), &never_whole(), SEGMENT).err().unwrap();
    assert!(matches!(&error, Error::NoPutIfAbsent { .. }) && error.to_string().contains("If-None-Match"), "{error}");
    assert_eq!(names(&memory, ""), 0);
    init(&memory, &never_whole());
    let store = internals::open(overwriting(), SEGMENT).unwrap();
    let error = store.put(place.file(&Weights::new(1)), &PutOptions::default()).unwrap_err();
    assert!(matches!(&error, Error::NoPutIfAbsent { .. }), "{error}");
    assert!(matches!(store.log("main"), Err(Error::NoVersion { .. })));
}
