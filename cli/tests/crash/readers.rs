//! Readers and writers that run at the same time.

use crate::scenario::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use tpde::{Encode, Error, Pair, SafetensorsCheckpoint};

/// Opens all checkpoint files with the library.
fn open_all(place: &Path) -> [SafetensorsCheckpoint; 3] {
    ["base.safetensors", "old.safetensors", "new.safetensors"].map(|name| SafetensorsCheckpoint::open(place.join(name)).unwrap())
}

fn publish(base: &SafetensorsCheckpoint, target: &SafetensorsCheckpoint, pair: &Path, replace: bool) -> tpde::Result<()> {
    Encode::new(target).base(base).overwrite(replace).to_path(pair).map(|_| ())
}

#[test]
fn a_reader_sees_one_pair_or_the_other_while_they_are_replaced() {
    let checkpoints = checkpoints();
    let place = checkpoints.path();
    let [base, old, new] = open_all(place);
    let pair = place.join("pair");
    publish(&base, &old, &pair, false).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = BTreeMap::new();
            while !stop.load(Ordering::Relaxed) {
                *seen.entry(judge_pair(place)).or_insert(0) += 1;
            }
            seen
        });
        for round in 0..100 {
            publish(&base, if round % 2 == 0 { &new } else { &old }, &pair, true).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        let seen = reader.join().unwrap();
        assert!(seen.keys().eq(&[State::Old, State::New]), "{seen:?}");
    });
    assert_eq!(hidden(place), [""; 0]);
}

#[test]
fn of_two_writers_at_once_one_wins() {
    let checkpoints = checkpoints();
    let place = checkpoints.path();
    let [base, old, new] = open_all(place);
    let files = ["pair.tpde-index", "pair.tpde-blob"].map(|name| place.join(name));
    for replace in [true, false] {
        for _ in 0..30 {
            let start = Barrier::new(2);
            let write = |target| {
                start.wait();
                publish(&base, target, &place.join("pair"), replace)
            };
            let [first, second] = std::thread::scope(|scope| {
                [&old, &new].map(|target| scope.spawn(move || write(target))).map(|writer| writer.join().unwrap())
            });
            let state = judge_pair(place);
            match (&first, &second) {
                (Ok(()), Ok(())) => assert!(replace && state != State::Refused),
                (Ok(()), Err(Error::Io { source, .. })) | (Err(Error::Io { source, .. }), Ok(())) => {
                    assert!(!replace && source.kind() == std::io::ErrorKind::AlreadyExists, "{source}");
                    assert_eq!(state, if first.is_ok() { State::Old } else { State::New });
                }
                outcome => panic!("{outcome:?}"),
            }
            files.iter().for_each(|file| fs::remove_file(file).unwrap());
            assert_eq!(hidden(place), [""; 0]);
        }
    }
}

/// A half-copied pair is refused.
#[test]
fn half_of_a_pair_is_refused() {
    let checkpoints = checkpoints();
    let place = checkpoints.path();
    let file = |name: &str| -> PathBuf { place.join(name) };
    fs::copy(file("old-pair.tpde-index"), file("pair.tpde-index")).unwrap();
    assert!(matches!(Pair::open(file("pair")), Err(Error::Io { .. })));
    fs::copy(file("new-pair.tpde-blob"), file("pair.tpde-blob")).unwrap();
    assert_eq!(judge_pair(place), State::Refused);
    fs::copy(file("new-pair.tpde-index"), file("pair.tpde-index")).unwrap();
    assert_eq!(judge_pair(place), State::New);
}
