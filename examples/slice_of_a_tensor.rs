//! Rebuilds a few rows of a tensor. Only the chunks that contain these rows are read and decoded.
//!
//! `cargo run --example slice_of_a_tensor`

use tpde::{Apply, Dtype, Encode, EncodeOptions, MemoryCheckpoint, Pair, Result, TensorInfo};

const ROWS: u64 = 4096;
const COLUMNS: u64 = 256;

fn main() -> Result<()> {
    let info = TensorInfo { name: "embeddings.weight".into(), dtype: Dtype::F32, shape: vec![ROWS, COLUMNS] };
    let value = |i: u64| (i as f32).sqrt();
    let old: Vec<u8> = (0..ROWS * COLUMNS).flat_map(|i| value(i).to_le_bytes()).collect();
    let mut new = old.clone();
    new.chunks_mut(4).step_by(7).for_each(|lane| lane[0] ^= 1);
    let base = MemoryCheckpoint::new([(info.clone(), &old[..])])?;
    let target = MemoryCheckpoint::new([(info, &new[..])])?;

    // Small chunks, so that a few rows need only a few chunks.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("update");
    Encode::new(&target).base(&base).options(EncodeOptions::default().chunk_lanes(1 << 14)).to_path(&path)?;

    let pair = Pair::open(&path)?;
    let tensor = pair.index().find("embeddings.weight").expect("the tensor");
    let rows = 1000..1010;
    let elements = rows.start * COLUMNS..rows.end * COLUMNS;
    let (_, chunks) = tensor.locate(elements.clone())?;
    println!("{} rows are in {} of {} chunks", rows.end - rows.start, chunks.len(), tensor.chunk_count);
    assert!((chunks.len() as u32) < tensor.chunk_count / 8);

    let slice = Apply::new(&pair).base(&base).range("embeddings.weight", elements.clone())?;
    assert!(slice == new[elements.start as usize * 4..elements.end as usize * 4]);

    // The elements that change and their new values, for a consumer that updates only those.
    let changes = Apply::new(&pair).base(&base).changes("embeddings.weight")?;
    assert_eq!(changes.positions.len() as u64, (ROWS * COLUMNS).div_ceil(7));
    let mut patched = old.clone();
    for (position, value) in changes.positions.iter().zip(changes.values.chunks(4)) {
        patched[*position as usize * 4..][..4].copy_from_slice(value);
    }
    assert!(patched == new);
    println!("{} elements change", changes.positions.len());
    Ok(())
}

#[test]
fn the_example_runs() {
    main().unwrap();
}
