//! The pairs that mutations start from.

use crate::parts::Parts;
use crate::{base_tensors, repair_pair, split_pair};
use std::path::Path;
use std::sync::LazyLock;
use tpde::{Limits, ValidatedIndex};

/// Maximum size in bytes of a seed's tensors. Larger ones make every input slow.
const MOST_SEED_BYTES: u64 = 1 << 15;

/// The seeds of `apply_pair`, sorted by file name.
pub static SEEDS: LazyLock<Vec<Parts>> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds/apply_pair");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}; fuzz/make_seeds.py makes it", folder.display()));
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("a seed").path()).collect();
    paths.sort();
    let seeds: Vec<_> = paths.iter().filter_map(|path| read(&std::fs::read(path).expect("a seed"))).collect();
    assert!(seeds.len() >= 100, "{} seeds in {}", seeds.len(), folder.display());
    seeds
});

/// The parts of an input of `apply_pair`; `None` if its tensors are too large.
fn read(seed: &[u8]) -> Option<Parts> {
    let (_, mut index, mut blob) = split_pair(seed)?;
    repair_pair(&mut index, &mut blob);
    let valid = ValidatedIndex::parse(index, &Limits::default()).expect("a valid seed");
    let (base_bytes, target_bytes) = valid.tensor_bytes();
    let is_small = base_bytes.max(target_bytes) <= MOST_SEED_BYTES;
    is_small.then(|| Parts::new(&valid, &blob, &base_tensors(&valid)))
}
