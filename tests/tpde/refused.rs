//! Requests that an encoder refuses before it reads a lane, and failures that end its work.

use crate::common::inputs::{Held, inputs};
use tpde::{
    Apply, Checkpoint, Codec, CodecChoice, Dtype, Encode, EncodeOptions, Error, Favor, Layout, MemoryCheckpoint, Result, TensorInfo,
};
use tpde_core::format::{MAX_CHUNKS, Section};

fn held(name: &str, dtype: Dtype, shape: &[u64]) -> Held {
    let info = TensorInfo { name: name.into(), dtype, shape: shape.to_vec() };
    let bytes = vec![1; info.bytes() as usize];
    (info, bytes)
}

fn memory(held: &[Held]) -> MemoryCheckpoint<'_> {
    MemoryCheckpoint::new(held.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap()
}

#[test]
fn options_that_make_no_sense_are_misuse() {
    let tensors = [held("t", Dtype::U8, &[4])];
    let encode = |options| Encode::new(&memory(&tensors)).base(&memory(&tensors)).options(options).to_memory().map(|_| ());
    let refuses = |options| assert!(matches!(encode(options), Err(Error::InvalidArgument(_))));
    for chunk_lanes in [0, 1, 2048, 4095, 4097, 5000, 12288] {
        refuses(EncodeOptions::default().chunk_lanes(chunk_lanes));
    }
    for chunk_lanes in [4096, 8192, 1 << 40] {
        encode(EncodeOptions::default().chunk_lanes(chunk_lanes)).unwrap();
    }
    for &codec in CodecChoice::ALL.iter().filter(|&&codec| codec != Codec::Zstd.into()) {
        refuses(EncodeOptions::default().codec(codec).layout(Layout::ALL[0]));
    }
    for (name, base_name) in [("t", "u"), ("u", "t")] {
        refuses(EncodeOptions::default().renamed([(name, base_name)]));
    }
}

/// A checkpoint that has tensor descriptions but no data.
struct Described(Vec<TensorInfo>);

impl Checkpoint for Described {
    fn tensors(&self) -> &[TensorInfo] {
        &self.0
    }

    fn read(&self, _: usize, _: u64, _: &mut [u8]) -> Result<()> {
        Err(Error::Cancelled)
    }
}

#[test]
fn more_chunks_than_a_pair_holds_are_refused_before_a_lane_is_read() {
    let options = EncodeOptions::default().chunk_lanes(4096);
    let outcome = |lanes: u64| {
        let tensors = ["a", "b"].map(|name| TensorInfo { name: name.into(), dtype: Dtype::U8, shape: vec![lanes / 2] });
        Encode::new(&Described(tensors.into())).options(options.clone()).to_memory().map(|_| ())
    };
    let most = u64::from(MAX_CHUNKS);
    // Two tensors, each with a chunk that is not full.
    assert!(matches!(outcome(4096 * (most - 1) - 10), Err(Error::Cancelled)), "accepted, then cancelled at the first read");
    let refused = outcome(4096 * (most + 1) - 10);
    assert!(matches!(refused, Err(Error::Limit { limit, found, .. }) if limit == most && found == most + 1), "{refused:?}");
}

#[test]
fn as_many_chunks_as_a_pair_holds_are_not_refused() {
    let options = EncodeOptions::default().chunk_lanes(4096);
    let tensor = |chunks: u64| TensorInfo { name: "t".into(), dtype: Dtype::U8, shape: vec![4096 * chunks] };
    let outcome = |chunks| Encode::new(&Described(vec![tensor(chunks)])).options(options.clone()).to_memory().map(|_| ());
    assert!(matches!(outcome(MAX_CHUNKS.into()), Err(Error::Cancelled)));
    assert!(matches!(outcome(u64::from(MAX_CHUNKS) + 1), Err(Error::Limit { .. })));
}

#[test]
fn a_name_of_a_base_that_no_pair_holds_is_refused_with_the_name() {
    let long = "n".repeat(70_000);
    let (base, target) = ([held(&long, Dtype::U8, &[4])], [held("t", Dtype::U8, &[4])]);
    let options = EncodeOptions::default().renamed([("t", &*long)]);
    let refused = Encode::new(&memory(&target)).base(&memory(&base)).options(options).to_memory().unwrap_err();
    assert!(matches!(refused, Error::Invalid(_)), "{refused}");
}

#[test]
fn favors_have_names() {
    assert_eq!(Favor::ALL.iter().map(|favor| favor.name()).collect::<Vec<_>>(), ["ratio", "speed", "size"]);
}

#[test]
fn a_report_has_the_sizes_of_the_sections() {
    for input in inputs(48) {
        let (pair, report) = Encode::new(&input.target()).base(&input.base()).to_memory().unwrap();
        let header = pair.index().header();
        let stored = |section| header.section(section).stored_size;
        assert_eq!(report.tensor_table_bytes, stored(Section::Tensors) + stored(Section::Digests));
        assert_eq!((report.index_bytes, report.blob_bytes), (pair.index().size(), header.blob_size));
        assert_eq!(report.target_bytes, input.target.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>());
    }
}

#[test]
fn hashing_a_base_that_no_chunk_needs_can_be_cancelled() {
    // The target is empty, so the base is read only for its digest.
    let (base, target) = ([held("t", Dtype::U8, &[1 << 20, 4])], [held("t", Dtype::U8, &[0, 4])]);
    let (base, target) = (memory(&base), memory(&target));
    let (pair, _) = Encode::new(&target).base(&base).to_memory().unwrap();
    Apply::new(&pair).base(&base).verify().unwrap();
    struct Stop;
    impl tpde::Watch for Stop {
        fn done(&self, _: u64) -> Result<()> {
            Err(Error::Cancelled)
        }
    }
    let cancelled = Apply::new(&pair).base(&base).watch(&Stop).verify();
    assert!(matches!(cancelled, Err(Error::Cancelled)), "{cancelled:?}");
}
