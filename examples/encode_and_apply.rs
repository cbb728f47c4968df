//! Encodes the difference of two safetensors files as a pair, and rebuilds the second file from the first one and the pair.
//!
//! `cargo run --example encode_and_apply`

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use std::error::Error;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use tpde::{Apply, Authenticity, Encode, Pair, SafetensorsCheckpoint, Verify};

const ROWS: usize = 1024;
const COLUMNS: usize = 512;

/// Weights of a layer in BF16. Training has changed every hundredth weight by one unit in the last place.
fn weights(trained: bool) -> Vec<u8> {
    let lane = |i: usize| {
        let weight = (i as f32 * 0.618).sin() * 0.05;
        let bits = (weight.to_bits() >> 16) as u16;
        if trained && i.is_multiple_of(100) { bits ^ 1 } else { bits }
    };
    (0..ROWS * COLUMNS).flat_map(|i| lane(i).to_le_bytes()).collect()
}

fn write(path: &Path, weights: &[u8]) -> Result<(), Box<dyn Error>> {
    let tensor = TensorView::new(Dtype::BF16, vec![ROWS, COLUMNS], weights)?;
    Ok(serialize_to_file([("layer.weight", tensor)], None, path)?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name);
    write(&path("base.safetensors"), &weights(false))?;
    write(&path("target.safetensors"), &weights(true))?;

    let base = SafetensorsCheckpoint::open(path("base.safetensors"))?;
    let target = SafetensorsCheckpoint::open(path("target.safetensors"))?;
    let done = AtomicU64::new(0);
    let encode = Encode::new(&target).base(&base).progress(|bytes| _ = done.fetch_add(bytes, Ordering::Relaxed));
    let report = encode.to_path(path("update"))?;
    let stored = report.index_bytes + report.blob_bytes;
    println!("{} of {} bytes encoded, as {stored}", done.load(Ordering::Relaxed), report.target_bytes);
    assert!(stored < report.target_bytes / 20);

    // On the machine that has the base: check the pair, then rebuild the file.
    let pair = Pair::open(path("update"))?;
    let verified = Verify::new(&pair).base(&base).run()?;
    assert_eq!(verified.payload_authenticity, Authenticity::Checked);
    Apply::new(&pair).base(&base).to_path(path("rebuilt.safetensors"))?;
    assert!(fs::read(path("rebuilt.safetensors"))? == fs::read(path("target.safetensors"))?);
    println!("the rebuilt file is the target, byte for byte");
    Ok(())
}

#[test]
fn the_example_runs() {
    main().unwrap();
}
