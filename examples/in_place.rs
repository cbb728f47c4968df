//! Changes weights in memory from one version to the next, as an engine does when it receives updates.
//!
//! `cargo run --example in_place`

use tpde::{Apply, Dtype, Encode, Error, InPlace, MemoryCheckpoint, Pair, Result, TensorInfo, TensorMut};

const LANES: u64 = 1 << 18;

fn info(name: &str) -> TensorInfo {
    TensorInfo { name: name.into(), dtype: Dtype::Bf16, shape: vec![LANES] }
}

/// The weights of a version. Each version changes different weights.
fn weights(version: u64) -> Vec<u8> {
    let lane = |i: u64| (0..version).fold(0x3C00 + (i % 509) as u16, |lane, v| lane + u16::from(i % 64 == v));
    (0..LANES).flat_map(|i| lane(i).to_le_bytes()).collect()
}

/// The pair from one version to the next, as a trainer would make it.
fn update(version: u64) -> Result<Pair<Vec<u8>>> {
    let (old, new) = (weights(version), weights(version + 1));
    let base = MemoryCheckpoint::new(["a", "b"].map(|name| (info(name), &old[..])))?;
    let target = MemoryCheckpoint::new(["a", "b"].map(|name| (info(name), &new[..])))?;
    Ok(Encode::new(&target).base(&base).to_memory()?.0)
}

fn main() -> Result<()> {
    let (mut a, mut b) = (weights(0), weights(0));
    for version in 0..4 {
        let pair = update(version)?;
        let tensors = [TensorMut { name: "a", bytes: &mut a }, TensorMut { name: "b", bytes: &mut b }];
        // Everything is checked before the first byte is written.
        let report = Apply::new(&pair).in_place(tensors, InPlace::AllChecked)?;
        assert!(report.digests_checked && a == weights(version + 1) && b == a);
        println!("version {}: {} bytes of weights, a pair of {}", version + 1, report.bytes, pair.blob().len());
    }

    // A pair that was already applied, or is out of order, changes nothing.
    let before = a.clone();
    let tensors = [TensorMut { name: "a", bytes: &mut a }];
    let outcome = Apply::new(&update(3)?).in_place(tensors, InPlace::AllChecked);
    assert!(matches!(outcome, Err(Error::AlreadyApplied { .. })));
    let tensors = [TensorMut { name: "a", bytes: &mut a }];
    let outcome = Apply::new(&update(1)?).in_place(tensors, InPlace::AllChecked);
    assert!(matches!(outcome, Err(Error::WrongBase { .. })) && a == before);
    Ok(())
}

#[test]
fn the_example_runs() {
    main().unwrap();
}
