//! Reading checkpoints: an unreadable checkpoint is reported as an error of the system, never as a wrong pair or base. No tensor is
//! read more often than necessary.

use crate::common::*;
use std::fs;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use tpde::{
    Accelerator, Apply, Checkpoint, Codec, CodecChoice, Dtype, Encode, EncodeOptions, Error, MemoryCheckpoint, Pair,
    PayloadDigests, Result, Rule, SafetensorsCheckpoint, Sink, TensorInfo, Work,
};

/// Tensors in memory, with one byte that cannot be read.
struct Faulty<'a> {
    tensors: MemoryCheckpoint<'a>,
    tensor: &'a str,
    /// Offset of the byte that cannot be read.
    byte: u64,
    /// Number of reads of that byte that succeed first.
    good: AtomicUsize,
}

impl<'a> Faulty<'a> {
    fn new(held: &'a [(TensorInfo, Vec<u8>)], tensor: &'a str, byte: u64) -> Self {
        Self { tensors: checkpoint(held), tensor, byte, good: AtomicUsize::new(0) }
    }
}

impl Checkpoint for Faulty<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        self.tensors.tensors()
    }

    fn read(&self, place: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let hit = self.tensors()[place].name == self.tensor && (offset..offset + out.len() as u64).contains(&self.byte);
        if hit && self.good.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_err() {
            return Err(eio());
        }
        self.tensors.read(place, offset, out)
    }
}

struct Nowhere;

impl Sink for Nowhere {
    fn write(&self, _: usize, _: u64, _: &[u8]) -> Result<()> {
        Ok(())
    }
}

/// Stands in for a device: reads the requested bases and returns known targets.
struct Copies<'a> {
    targets: &'a [(TensorInfo, Vec<u8>)],
    reads_bases: bool,
}

impl Accelerator for Copies<'_> {
    fn rebuild(&self, work: &Work<'_>, done: &mut dyn FnMut(usize, &[u8]) -> Result<()>) -> Result<PayloadDigests> {
        for (at, &(place, base)) in work.tensors.iter().enumerate() {
            if let (Some(base), true) = (base, self.reads_bases) {
                let mut bytes = vec![0; work.base.tensors()[base].bytes() as usize];
                work.base.read(base, 0, &mut bytes)?;
            }
            done(at, &self.targets[place].1)?;
        }
        Ok(PayloadDigests::NotCompared)
    }
}

fn eio() -> Error {
    Error::Io { action: "read", path: "base".into(), source: std::io::Error::from_raw_os_error(5) }
}

const ROWS: u64 = 600;

fn info(name: &str, rows: u64) -> TensorInfo {
    TensorInfo { name: name.into(), dtype: Dtype::Bf16, shape: vec![rows, 64] }
}

fn held(infos: &[TensorInfo], flipped: usize) -> Vec<(TensorInfo, Vec<u8>)> {
    let mut held = Vec::new();
    for info in infos {
        let mut bytes = tensor(&info.name, "BF16", &[info.bytes() as usize / 2], 7).bytes;
        bytes.iter_mut().step_by(flipped).for_each(|byte| *byte ^= 1);
        held.push((info.clone(), bytes));
    }
    held
}

fn checkpoint(held: &[(TensorInfo, Vec<u8>)]) -> MemoryCheckpoint<'_> {
    MemoryCheckpoint::new(held.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap()
}

struct Case {
    base: Vec<(TensorInfo, Vec<u8>)>,
    target: Vec<(TensorInfo, Vec<u8>)>,
    options: EncodeOptions,
}

impl Case {
    /// Tensor `prefix` has more rows than its base. Tensor `same` has as many.
    fn new(codec: Codec) -> Self {
        let base = held(&[info("prefix", ROWS / 2), info("same", ROWS)], usize::MAX);
        let target = held(&[info("prefix", ROWS), info("same", ROWS)], 100);
        Self { base, target, options: EncodeOptions::default().codec(codec).chunk_lanes(4096) }
    }

    fn pair(&self) -> Pair<Vec<u8>> {
        Encode::new(&checkpoint(&self.target)).base(&checkpoint(&self.base)).options(self.options.clone()).to_memory().unwrap().0
    }
}

#[track_caller]
fn is_io<T>(outcome: Result<T>, what: impl std::fmt::Display) {
    match outcome {
        Err(Error::Io { source, .. }) => assert_eq!(source.raw_os_error(), Some(5), "{what}"),
        Err(e) => panic!("{what}: {e}"),
        Ok(_) => panic!("{what}: no error"),
    }
}

#[test]
fn a_base_that_cannot_be_read_is_said_to_be_unreadable_when_a_pair_is_applied() {
    for &codec in Codec::ALL {
        let case = Case::new(codec);
        let pair = case.pair();
        for (tensor, byte) in [("same", 0), ("same", 2 * 4096 * 2 + 5), ("same", ROWS * 128 - 1), ("prefix", 9), ("prefix", 17_000)]
        {
            let base = Faulty::new(&case.base, tensor, byte);
            let what = format!("{codec:?}, {tensor} {byte}");
            for digests in [true, false] {
                let apply = Apply::new(&pair).base(&base).digests(digests);
                let mut outputs: Vec<_> = apply.selected().map(|tensor| vec![0; tensor.bytes() as usize]).collect();
                let mut slices: Vec<_> = outputs.iter_mut().map(|output| &mut output[..]).collect();
                is_io(apply.to_buffers(&mut slices), &what);
                is_io(apply.to_sink(&Nowhere), &what);
                is_io(apply.verify(), &what);
                let element = byte / 2;
                is_io(apply.range(tensor, element..element + 1), &what);
                is_io(apply.changes(tensor), &what);
            }
        }
    }
}

#[test]
fn a_base_that_cannot_be_read_for_its_digest_is_said_to_be_unreadable() {
    let case = Case::new(Codec::Raw);
    let pair = case.pair();
    // All chunks are read. Then the base, which has another number of rows, is read once more.
    let base = Faulty::new(&case.base, "prefix", 9);
    base.good.store(1, Ordering::Relaxed);
    is_io(Apply::new(&pair).base(&base).verify(), "digest");

    // The first base tensor is wrong, and the second one cannot be read to find out whether it is wrong too.
    let mut wrong = case.base.clone();
    wrong[0].1[5] ^= 1;
    let base = Faulty::new(&wrong, "same", 0);
    let broken = Apply::new(&pair).base(&checkpoint(&wrong)).range("prefix", 0..1).unwrap_err();
    assert_eq!(broken.rule(), Some(Rule::ChunkBaseSum));
    is_io::<()>(Err(Apply::new(&pair).base(&base).explain(broken)), "explained");
}

#[test]
fn a_base_that_a_device_cannot_be_given_is_said_to_be_unreadable() {
    let case = Case::new(Codec::Conditioned);
    let pair = case.pair();
    for reads_bases in [true, false] {
        for tensor in ["prefix", "same"] {
            let base = Faulty::new(&case.base, tensor, 9);
            let device = Copies { targets: &case.target, reads_bases };
            is_io(Apply::new(&pair).base(&base).on(&device).verify(), tensor);
        }
    }
}

#[test]
fn checkpoints_that_cannot_be_read_are_said_to_be_unreadable_when_they_are_encoded() {
    for &codec in CodecChoice::ALL {
        let case = Case::new(Codec::Raw);
        let options = case.options.clone().codec(codec);
        let (base, target) = (checkpoint(&case.base), checkpoint(&case.target));
        for (tensor, byte) in [("same", 0), ("same", ROWS * 128 - 1), ("prefix", 9)] {
            let what = format!("{codec:?}, {tensor} {byte}");
            is_io(Encode::new(&target).base(&Faulty::new(&case.base, tensor, byte)).options(options.clone()).to_memory(), &what);
            is_io(Encode::new(&Faulty::new(&case.target, tensor, byte)).base(&base).options(options.clone()).to_memory(), &what);
        }
    }
}

#[test]
fn a_file_that_is_cut_short_after_it_was_opened_is_said_to_be_unreadable() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("base.safetensors");
    let case = Case::new(Codec::Conditioned);
    let pair = case.pair();
    let tensors = case.base.iter().map(|(info, bytes)| {
        let shape = info.shape.iter().map(|&d| d as usize).collect();
        Tensor { name: info.name.clone(), dtype: "BF16", shape, bytes: bytes.clone() }
    });
    write_file(&path, &tensors.collect::<Vec<_>>());
    let base = SafetensorsCheckpoint::open(&path).unwrap();
    Apply::new(&pair).base(&base).verify().unwrap();
    let size = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(size - 1).unwrap();
    match Apply::new(&pair).base(&base).verify() {
        Err(Error::Io { path: of, .. }) => assert_eq!(of, path),
        outcome => panic!("{outcome:?}"),
    }
}

/// Counts the bytes read.
struct Counted<'a>(MemoryCheckpoint<'a>, AtomicU64);

impl Checkpoint for Counted<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        self.0.tensors()
    }

    fn read(&self, place: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        self.1.fetch_add(out.len() as u64, Ordering::Relaxed);
        self.0.read(place, offset, out)
    }
}

#[test]
fn a_base_tensor_that_many_tensors_name_is_hashed_once() {
    let base = held(&[info("base", ROWS)], usize::MAX);
    let size = base[0].1.len() as u64;
    let names: Vec<_> = (0..300).map(|i| format!("empty.{i:03}")).collect();
    let target: Vec<_> = names.iter().map(|name| (info(name, 0), Vec::new())).collect();
    let renamed = names.iter().map(|name| (&**name, "base"));
    let options = EncodeOptions::default().renamed(renamed);
    let counted = Counted(checkpoint(&base), AtomicU64::new(0));
    let read = || counted.1.swap(0, Ordering::Relaxed);
    let pair = Encode::new(&checkpoint(&target)).base(&counted).options(options).to_memory().unwrap().0;
    assert_eq!(pair.index().tensors().filter(|t| t.base_kind == tpde::BaseKind::Prefix).count(), 300);
    assert!(read() <= 2 * size);
    Apply::new(&pair).base(&counted).verify().unwrap();
    assert_eq!(read(), size);

    // The search for the wrong base tensor hashes each base tensor once more.
    let case = Case::new(Codec::Raw);
    let mut wrong = case.base.clone();
    wrong[0].1[5] ^= 1;
    let broken = Apply::new(&case.pair()).base(&checkpoint(&wrong)).range("prefix", 0..1).unwrap_err();
    read();
    let _ = Apply::new(&pair).base(&counted).explain(broken);
    assert_eq!(read(), size);
}
