//! Pairs that a device encodes of slices, parts and rows with gaps have the bytes of those that the processor encodes.

use super::super::encode::Limits;
use super::super::{DeviceCheckpoint, Encode, TensorSlice};
use super::cases::{Random, random_lanes};
use super::encode::compare;
use super::stand_in;
use tpde::{Checkpoint, Codec, EncodeOptions, Error, Rectangle, Slice, SliceCheckpoint, TensorInfo};
use tpde_core::lane::Dtype;

/// Slices of one checkpoint, in rows of a larger memory.
#[derive(Default)]
struct Held {
    slices: Vec<(TensorInfo, Rectangle, Option<u64>, Vec<u8>)>,
}

impl Held {
    /// Adds a slice, whose elements are `bytes` without gaps. Rows are `gap` bytes apart; gaps have random bytes.
    fn add(&mut self, random: &mut Random, info: &TensorInfo, rectangle: &Rectangle, bytes: &[u8], gap: Option<usize>) {
        let row = (*rectangle.extent.last().unwrap() * info.dtype.bits() / 8) as usize;
        let mut memory = Vec::new();
        for (n, content) in bytes.chunks(row.max(1)).enumerate() {
            if n > 0 {
                memory.extend((0..gap.unwrap_or(0)).map(|_| random.bits() as u8));
            }
            memory.extend(content);
        }
        self.slices.push((info.clone(), rectangle.clone(), gap.map(|gap| (row + gap) as u64), memory));
    }

    fn on_processor(&self) -> SliceCheckpoint<'_> {
        let slices = self.slices.iter().map(|(info, rectangle, pitch, memory)| {
            let slice = Slice::new(info.clone(), rectangle.clone(), memory);
            if let Some(pitch) = pitch { slice.pitch(*pitch) } else { slice }
        });
        SliceCheckpoint::new(slices).unwrap()
    }

    /// The slices in device memory, at addresses that are multiples of `unit`.
    fn on_device(&self, unit: usize) -> DeviceCheckpoint {
        let device = super::device();
        let slices = self.slices.iter().map(|(info, rectangle, pitch, memory)| {
            let place = device.alloc((memory.len() + unit) as u64).unwrap().slice(unit as u64, memory.len() as u64).unwrap();
            device.write(&place, memory).unwrap();
            let slice = TensorSlice::new(&info.name, rectangle.clone(), place);
            (info.dtype, info.shape.clone(), if let Some(pitch) = pitch { slice.pitch(*pitch) } else { slice })
        });
        DeviceCheckpoint::of_slices(device, slices).unwrap()
    }
}

/// The elements of a rectangle of a matrix, without gaps.
fn part(bytes: &[u8], shape: &[u64], rectangle: &Rectangle, width: usize) -> Vec<u8> {
    let (first, columns) = (rectangle.origin[1] as usize * width, rectangle.extent[1] as usize * width);
    let rows = bytes.chunks(shape[1] as usize * width).skip(rectangle.origin[0] as usize).take(rectangle.extent[0] as usize);
    rows.flat_map(|row| &row[first..first + columns]).copied().collect()
}

#[test]
#[ignore = "needs a CUDA device"]
fn slices_and_parts_have_the_bytes_of_the_processor() {
    let count = if stand_in::is_used() { 8 } else { 300 };
    for seed in 0..count {
        let random = &mut Random(seed + 77);
        let (mut base, mut target) = (Held::default(), Held::default());
        let (mut cuts, mut unit) = (Vec::new(), 1);
        for n in 0..1 + random.below(4) {
            let dtype = [Dtype::Bf16, Dtype::F32, Dtype::U8, Dtype::F64][random.below(4)];
            let width = dtype.lane_bytes();
            let shape = [2 + random.below(40) as u64, 2 * (1 + random.below(if stand_in::is_used() { 60 } else { 900 })) as u64];
            let info = TensorInfo { name: format!("t{n}"), dtype, shape: shape.to_vec() };
            let rarity = [1, 5, 90][random.below(3)];
            let (old, new) = random_lanes(random, dtype, (shape[0] * shape[1]) as usize, rarity);
            // This rank has some rows or columns, in its own rows of memory. The parts are halves of these.
            let (dim, whole) = (random.below(2), Rectangle::whole(&shape));
            let held = if random.once_in(3) { whole.clone() } else { whole.shard(dim, 2, random.below(2) as u64).unwrap() };
            let is_cut = held != whole || random.once_in(2);
            if is_cut {
                let parts = (0..2u64).flat_map(|rank| {
                    let half = whole.shard(dim, 2, rank).unwrap();
                    let column = half.origin[1] + half.extent[1] / 2;
                    let [mut left, mut right] = [half.clone(), half];
                    (left.extent[1], right.extent[1]) = (column - left.origin[1], left.extent[1] - (column - left.origin[1]));
                    right.origin[1] = column;
                    [left, right].into_iter().filter(|part| !part.extent.contains(&0))
                });
                cuts.push((info.name.clone(), parts.collect::<Vec<_>>()));
            }
            for (checkpoint, bytes) in [(&mut base, &old), (&mut target, &new)] {
                let gap = if random.once_in(3) { None } else { Some(random.below(9)) };
                checkpoint.add(random, &info, &held, &part(bytes, &shape, &held, width), gap);
            }
            unit = random.below(20);
        }
        let codec = if random.once_in(4) { Codec::Raw } else { Codec::Conditioned };
        let options = EncodeOptions::default().codec(codec).chunk_lanes(4096).cuts(cuts);
        let (expected, report) =
            tpde::Encode::new(&target.on_processor()).base(&base.on_processor()).options(options.clone()).to_memory().unwrap();
        let limits = Limits { wave: 1 << (14 + random.below(6)), hashed: 1 << random.below(16), ..Limits::default() };
        let (base, target) = (base.on_device(unit), target.on_device(unit));
        let found = Encode::new(&target).base(&base).options(options).limits(limits).to_memory();
        let (found, found_report) = found.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        compare(&expected, &found, &format!("seed {seed}"));
        assert_eq!(format!("{found_report:?}"), format!("{report:?}"), "seed {seed}");
    }
}

/// Rules of the option `split` cut whole tensors on a device.
#[test]
#[ignore = "needs a CUDA device"]
fn split_tensors_have_the_bytes_of_the_processor() {
    let random = &mut Random(9);
    let (mut base, mut target) = (Held::default(), Held::default());
    for name in ["layers.0.q_proj.weight", "layers.0.o_proj.weight", "norm.weight"] {
        let info = TensorInfo { name: name.into(), dtype: Dtype::Bf16, shape: vec![64, 96] };
        let (old, new) = random_lanes(random, Dtype::Bf16, 64 * 96, 20);
        base.add(random, &info, &Rectangle::whole(&info.shape), &old, None);
        target.add(random, &info, &Rectangle::whole(&info.shape), &new, Some(4));
    }
    let options = EncodeOptions::default().codec(Codec::Conditioned).split("llama:4".parse().unwrap());
    let (expected, _) =
        tpde::Encode::new(&target.on_processor()).base(&base.on_processor()).options(options.clone()).to_memory().unwrap();
    assert_eq!(expected.index().tensor_count(), 9);
    let (base, target) = (base.on_device(2), target.on_device(2));
    let (found, _) = Encode::new(&target).base(&base).options(options).to_memory().unwrap();
    compare(&expected, &found, "split");
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_part_in_two_slices_is_refused() {
    let random = &mut Random(1);
    let info = TensorInfo { name: "t".into(), dtype: Dtype::U8, shape: vec![4, 4] };
    let mut target = Held::default();
    for rank in 0..2 {
        target.add(random, &info, &Rectangle::whole(&info.shape).shard(0, 2, rank).unwrap(), &[7; 8], None);
    }
    let target = target.on_device(0);
    let encode = |options: EncodeOptions| Encode::new(&target).options(options.codec(Codec::Raw)).to_memory();
    match encode(EncodeOptions::default()) {
        Err(Error::PartNotHeld(part)) => assert_eq!((part.checkpoint, part.held), ("target", target.held(0))),
        other => panic!("{other:?}"),
    }
    // As the error says.
    assert_eq!(encode(EncodeOptions::default().cuts([("t", target.held(0))])).unwrap().0.index().tensor_count(), 2);
}
