//! Damage of stored bytes: no cut and no flipped bit of any published pair goes unnoticed, and each is called by the rule that
//! it breaks.

use rayon::prelude::*;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use tpde::error::Invalid;
use tpde::{Apply, Checkpoint, Error, Limits, MemoryCheckpoint, Pair, Result, SafetensorsCheckpoint, ValidatedIndex};

#[derive(Deserialize)]
struct Manifest {
    vectors: Vec<Vector>,
}

#[derive(Deserialize)]
struct Vector {
    name: String,
    verdict: String,
    index: PathBuf,
    blob: PathBuf,
    base: Option<PathBuf>,
}

/// A valid pair and its base.
struct Sound {
    name: String,
    index: Vec<u8>,
    blob: Vec<u8>,
    base: Option<SafetensorsCheckpoint>,
}

fn sound_pairs() -> Vec<Sound> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/v1");
    let read = |path: &Path| std::fs::read(folder.join(path)).unwrap();
    let manifest: Manifest = serde_json::from_slice(&read(Path::new("manifest.json"))).unwrap();
    let valid = manifest.vectors.into_iter().filter(|vector| vector.verdict == "valid");
    let pairs: Vec<_> = valid
        .map(|vector| Sound {
            name: vector.name,
            index: read(&vector.index),
            blob: read(&vector.blob),
            base: vector.base.map(|base| SafetensorsCheckpoint::open(&folder.join(base)).unwrap()),
        })
        .collect();
    assert!(pairs.len() >= 100);
    pairs
}

/// All that a reader does with a pair, whatever is found early or late.
fn read(index: &[u8], blob: &[u8], base: Option<&SafetensorsCheckpoint>) -> Result<()> {
    let pair = Pair::new(ValidatedIndex::parse(index.to_vec(), &Limits::default())?, blob)?;
    pair.verify()?;
    let nothing = MemoryCheckpoint::default();
    Apply::new(&pair, base.map_or(&nothing as &dyn Checkpoint, |base| base)).verify()?;
    Ok(())
}

/// The rule that damage was found by; it must be found.
fn found(pair: &Sound, index: &[u8], blob: &[u8], damage: impl std::fmt::Display) -> Invalid {
    match read(index, blob, pair.base.as_ref()) {
        Err(Error::Invalid(invalid)) => *invalid,
        Err(other) => panic!("{}, {damage}: {other}", pair.name),
        Ok(()) => panic!("{}, {damage}: not noticed", pair.name),
    }
}

/// Every byte of small files; of larger ones all of the headers and the end, and some between.
fn places(size: usize) -> impl Iterator<Item = usize> {
    (0..size).filter(move |&at| size <= 4096 || at < 512 || at + 64 > size || at % 61 == 0)
}

#[test]
fn the_pairs_are_sound() {
    for pair in sound_pairs() {
        read(&pair.index, &pair.blob, pair.base.as_ref()).unwrap_or_else(|e| panic!("{}: {e}", pair.name));
    }
}

#[test]
fn every_cut_is_found() {
    sound_pairs().par_iter().for_each(|pair| {
        for size in places(pair.index.len()) {
            let invalid = found(pair, &pair.index[..size], &pair.blob, format_args!("index cut to {size}"));
            assert_eq!(invalid.rule.id(), "header.index_size", "{}, index cut to {size}: {invalid}", pair.name);
        }
        for size in places(pair.blob.len()) {
            let invalid = found(pair, &pair.index, &pair.blob[..size], format_args!("blob cut to {size}"));
            assert_eq!(invalid.rule.id(), "blob.blob_size", "{}, blob cut to {size}: {invalid}", pair.name);
        }
        let longer = |bytes: &[u8]| [bytes, &[0]].concat();
        assert_eq!(found(pair, &longer(&pair.index), &pair.blob, "a longer index").rule.id(), "header.index_size");
        assert_eq!(found(pair, &pair.index, &longer(&pair.blob), "a longer blob").rule.id(), "blob.blob_size");
    });
}

#[test]
fn every_flipped_bit_is_found() {
    sound_pairs().par_iter().for_each(|pair| {
        let flips = |size| places(size).flat_map(|at| (0..8).map(move |bit| (at, 1u8 << bit)));
        let mut index = pair.index.clone();
        for (at, bit) in flips(pair.index.len()) {
            index[at] ^= bit;
            let invalid = found(pair, &index, &pair.blob, format_args!("bit {bit:#04x} of byte {at} of the index"));
            let rule = invalid.rule.id();
            assert!(if at < 256 { rule.starts_with("header.") } else { rule == "index.digest" }, "{}, {at}: {invalid}", pair.name);
            index[at] ^= bit;
        }
        let sound = ValidatedIndex::parse(pair.index.clone(), &Limits::default()).unwrap();
        let mut blob = pair.blob.clone();
        for (at, bit) in flips(pair.blob.len()) {
            blob[at] ^= bit;
            let invalid = found(pair, &pair.index, &blob, format_args!("bit {bit:#04x} of byte {at} of the blob"));
            let rule = invalid.rule.id();
            if at < 64 {
                assert!(rule.starts_with("blob."), "{}, {at}: {invalid}", pair.name);
            } else {
                assert!(matches!(rule, "payload.crc32" | "payload.padding"), "{}, {at}: {invalid}", pair.name);
                let index = ValidatedIndex::parse(pair.index.clone(), &Limits::default()).unwrap();
                let chunk =
                    index.chunks().iter().rposition(|record| record.num_deltas.get() > 0 && record.blob_offset.get() <= at as u64);
                let chunk = chunk.map(|chunk| chunk as u32);
                let tensor = sound.tensors().find(|tensor| chunk.is_some_and(|chunk| tensor.chunks().contains(&chunk)));
                assert_eq!(
                    (invalid.at.chunk, invalid.at.tensor.as_deref()),
                    (chunk, tensor.map(|tensor| tensor.name)),
                    "{}",
                    pair.name
                );
            }
            blob[at] ^= bit;
        }
    });
}

/// A blob whose length reached the disk and whose bytes did not, from some place on.
#[test]
fn a_blob_that_ends_in_a_hole_is_refused() {
    sound_pairs().par_iter().for_each(|pair| {
        for from in (0..pair.blob.len()).step_by(16) {
            let mut blob = pair.blob.clone();
            blob[from..].fill(0);
            if blob != pair.blob {
                let rule = found(pair, &pair.index, &blob, format_args!("zeros from {from} on")).rule.id();
                assert!(
                    if from < 64 { rule.starts_with("blob.") } else { rule == "payload.crc32" },
                    "{}, {from}: {rule}",
                    pair.name
                );
            }
        }
    });
}
