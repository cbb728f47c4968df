//! Progress of `put` and `get`, and calls that are stopped.

use crate::*;
use std::sync::atomic::AtomicU64;
use tpde::Watch;

/// Stops the call at its question number `limit`.
struct Stop {
    limit: u64,
    asked: AtomicU64,
    done: AtomicU64,
}

impl Stop {
    fn at(limit: u64) -> Self {
        Self { limit, asked: AtomicU64::new(0), done: AtomicU64::new(0) }
    }
}

impl Watch for Stop {
    fn done(&self, bytes: u64) -> tpde::Result<()> {
        self.done.fetch_add(bytes, SeqCst);
        if self.asked.fetch_add(1, SeqCst) >= self.limit { Err(tpde::Error::Cancelled) } else { Ok(()) }
    }
}

#[test]
fn put_and_get_report_the_bytes_of_all_tensors() {
    let place = Place::new();
    let (memory, _, second) = one_version(&place);
    let store = open(&memory);
    for anchor in [Anchor::ByRule, Anchor::Whole, Anchor::External { hint: "here".into() }] {
        let watch = Stop::at(u64::MAX);
        let version = store.put(place.file(&second), &PutOptions::default().anchor(anchor).watch(&watch)).unwrap();
        assert_eq!(watch.done.into_inner(), version.tensor_bytes);
    }
    let watch = Stop::at(u64::MAX);
    let version = store.get("main@1", place.at("out"), &GetOptions::default().watch(&watch)).unwrap();
    assert_eq!(watch.done.into_inner(), version.version.tensor_bytes);
}

#[test]
fn a_put_or_get_that_is_stopped_anywhere_publishes_nothing() {
    let place = Place::new();
    let (memory, first, second) = one_version(&place);
    let store = open(&memory);
    let is_cancelled = |error: &Error| matches!(error, Error::Tpde(tpde::Error::Cancelled));
    let mut stopped = [0, 0];
    for limit in 0.. {
        match store.put(place.file(&second), &PutOptions::default().watch(&Stop::at(limit))) {
            Ok(version) => {
                assert_eq!(version.name(), "main@1");
                break;
            }
            Err(error) => assert!(is_cancelled(&error), "{error}"),
        }
        stopped[0] += 1;
        assert_eq!(store.log("main").unwrap().len(), 1);
    }
    for limit in 0.. {
        match store.get("main@1", place.at("out"), &GetOptions::default().watch(&Stop::at(limit))) {
            Ok(_) => {
                assert!(fs::read(place.at("out")).unwrap() == second.bytes());
                break;
            }
            Err(error) => assert!(is_cancelled(&error), "{error}"),
        }
        stopped[1] += 1;
        assert!(!place.at("out").exists());
    }
    assert!(stopped.iter().all(|&count| count > 4), "{stopped:?}");
    check(&store, "main@0", &first, &GetOptions::default());
}
