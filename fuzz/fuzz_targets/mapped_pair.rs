//! A hostile pair in files, whose blob is mapped: it gives the results and errors of the same pair in memory, also if its blob is
//! cut.
//!
//! Input: that of `apply_pair`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::fs;
use std::sync::LazyLock;
use tempfile::TempDir;
use tpde::{Apply, MappedSource, MemoryCheckpoint, OpenOptions, Pair, Result, Source, TensorInfo, ValidatedIndex};
use tpde_fuzz::application::{check, open};
use tpde_fuzz::memory::Counting;
use tpde_fuzz::{LIMITS, base_tensors, one_thread, repair_pair, split_pair};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder for temporary files"));

fuzz_target!(init: one_thread(), |data: &[u8]| {
    let Some((repair, mut index, mut blob)) = split_pair(data) else { return };
    if repair % 16 != 15 {
        repair_pair(&mut index, &mut blob);
    }
    let Some(pair) = open(index, blob, repair % 4 != 3) else { return };
    let mapped = map(pair.index(), pair.blob()).expect("a pair that opens in memory");
    check(&mapped);
    assert_eq!(outcome(&mapped), outcome(&pair));
    drop(mapped);

    let (index, mut blob) = pair.into_parts();
    blob.truncate(data.len() % blob.len());
    let refused = map(&index, &blob).expect_err("a blob that was cut");
    assert_eq!(refused.to_string(), Pair::new(index, blob).expect_err("a blob that was cut").to_string());
});

/// Writes the files of a pair with another blob, and opens them.
fn map(index: &ValidatedIndex, blob: &[u8]) -> Result<Pair<MappedSource>> {
    let path = FOLDER.path().join("pair");
    for (extension, bytes) in [("tpde-index", index.as_bytes()), ("tpde-blob", blob)] {
        fs::write(path.with_extension(extension), bytes).expect("room for a small file");
    }
    // SAFETY: only this process has the folder, and it writes the files again after the last mapping is gone.
    unsafe { Pair::open_mapped(&path, &OpenOptions::default().limits(LIMITS), &|_| {}) }
}

/// The target's tensors, or the error.
fn outcome<B: Source>(pair: &Pair<B>) -> Result<Vec<(TensorInfo, Vec<u8>)>, String> {
    let base = MemoryCheckpoint::new(base_tensors(pair.index())).expect("tensors as long as their shapes say");
    Apply::new(pair).base(&base).to_memory().map_err(|e| e.to_string())
}
