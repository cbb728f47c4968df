//! Slices of tensors: rectangles in memory, with gaps between rows, rebuilt and changed in place, from whole bases and from
//! slices.

#[allow(dead_code, reason = "not all helpers are wanted")]
mod common;

use common::{Tensor as Data, tensor, tuned};
use proptest::prelude::*;
use tpde::{
    Apply, Encode, EncodeOptions, Error, InPlace, MemoryCheckpoint, Pair, Rectangle, Slice, SliceCheckpoint, SliceMut, TensorInfo,
    TensorMut,
};

const GAP: u8 = 0xE7;

fn info(data: &Data) -> TensorInfo {
    let shape = data.shape.iter().map(|&dim| dim as u64).collect();
    TensorInfo { name: data.name.clone(), dtype: data.dtype.parse().unwrap(), shape }
}

fn memory(data: &Data) -> MemoryCheckpoint<'_> {
    MemoryCheckpoint::new([(info(data), &data.bytes[..])]).unwrap()
}

/// A rectangle in memory, element by element, with gaps of `gap` bytes between rows. Returns the memory and the pitch.
fn held(data: &Data, part: &Rectangle, gap: usize) -> (Vec<u8>, u64) {
    let width = common::width(data.dtype);
    let last = *part.extent.last().unwrap();
    let mut bytes = Vec::new();
    for element in 0..part.extent.iter().product::<u64>() {
        if element > 0 && element % last == 0 {
            bytes.extend(vec![GAP; gap]);
        }
        let (mut rest, mut number, mut stride): (u64, u64, u64) = (element, 0, 1);
        for i in (0..part.extent.len()).rev() {
            number += (part.origin[i] + rest % part.extent[i]) * stride;
            rest /= part.extent[i];
            stride *= data.shape[i] as u64;
        }
        bytes.extend(&data.bytes[number as usize * width..][..width]);
    }
    (bytes, last * width as u64 + gap as u64)
}

/// Memory of the same layout with other content.
fn filled(held: &[u8], target: &Data, part: &Rectangle, gap: usize) -> Vec<u8> {
    let mut zeros = target.clone();
    zeros.bytes.fill(0);
    let bytes = self::held(&zeros, part, gap).0;
    assert_eq!(bytes.len(), held.len());
    bytes
}

fn slice<'a>(name: &'a str, part: &Rectangle, bytes: &'a mut [u8], gap: usize, pitch: u64) -> SliceMut<'a> {
    let slice = SliceMut::new(name, part.clone(), bytes);
    if gap > 0 { slice.pitch(pitch) } else { slice }
}

fn base_slice<'a>(data: &Data, part: &Rectangle, bytes: &'a [u8], gap: usize, pitch: u64) -> Slice<'a> {
    let slice = Slice::new(info(data), part.clone(), bytes);
    if gap > 0 { slice.pitch(pitch) } else { slice }
}

/// A rectangle of a shape, as the numbers say.
fn rectangle(shape: &[usize], numbers: &[u64]) -> Rectangle {
    let origin: Vec<u64> = shape.iter().zip(numbers).map(|(&dim, n)| n % dim as u64).collect();
    let extent: Vec<u64> = shape.iter().zip(&origin).zip(&numbers[4..]).map(|((&dim, o), n)| 1 + n % (dim as u64 - o)).collect();
    Rectangle::new(origin, extent)
}

fn pair(base: &Data, target: &Data, cuts: Vec<Rectangle>) -> Pair<Vec<u8>> {
    let options = EncodeOptions::default().chunk_lanes(4096);
    let options = if cuts.is_empty() { options } else { options.cuts([(target.name.clone(), cuts)]) };
    Encode::new(&memory(target)).base(&memory(base)).options(options).to_memory().unwrap().0
}

/// Cuts of a dimension into parts of at most `size`.
fn cuts(shape: &[usize], dim: usize, size: u64) -> Vec<Rectangle> {
    let shape: Vec<u64> = shape.iter().map(|&dim| dim as u64).collect();
    let part = |first: u64| {
        let mut part = Rectangle::whole(&shape);
        (part.origin[dim], part.extent[dim]) = (first, size.min(shape[dim] - first));
        part
    };
    if size >= shape[dim] { Vec::new() } else { (0..shape[dim]).step_by(size as usize).map(part).collect() }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn any_slice_of_any_parts_is_rebuilt(
        shape in prop::collection::vec(1usize..90, 1..4),
        dtype in prop::sample::select(vec!["BF16", "F32", "U8"]),
        numbers in prop::collection::vec(any::<u64>(), 8),
        (dim, size) in (any::<prop::sample::Index>(), 1u64..100),
        gap in prop::sample::select(vec![0, 1, 6, 64]),
        seed in any::<u64>(),
    ) {
        let base = tensor("w", dtype, &shape, seed);
        let target = tuned(&base, 7);
        let pair = pair(&base, &target, cuts(&shape, dim.index(shape.len()), size));
        let part = rectangle(&shape, &numbers);
        let (expected, pitch) = held(&target, &part, gap);
        let mut out = filled(&expected, &target, &part, gap);
        let whole = memory(&base);
        Apply::new(&pair).base(&whole).to_slices([slice("w", &part, &mut out, gap, pitch)]).unwrap();
        prop_assert!(out == expected, "from a whole base");

        // From the base lanes of the chunks that the slice touches, if a slice of the base holds them.
        let (base_bytes, base_pitch) = held(&base, &part, gap);
        let slices = SliceCheckpoint::new([base_slice(&base, &part, &base_bytes, gap, base_pitch)]).unwrap();
        let mut out = filled(&expected, &target, &part, gap);
        let before = out.clone();
        let outcome = Apply::new(&pair).base(&slices).to_slices([slice("w", &part, &mut out, gap, pitch)]);
        match outcome {
            Ok(_) => prop_assert!(out == expected, "from a slice of the base"),
            Err(Error::NotHeld { .. }) => prop_assert!(out == before),
            Err(other) => panic!("{other}"),
        }
        for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
            let mut held = base_bytes.clone();
            match Apply::new(&pair).in_place_slices([slice("w", &part, &mut held, gap, base_pitch)], mode) {
                Ok(_) => prop_assert!(held == expected, "{:?}", mode),
                Err(Error::NotHeld { .. }) => prop_assert!(held == base_bytes, "{:?}", mode),
                Err(other) => panic!("{other}"),
            }
        }
    }

    /// Each rank of a job holds one part, and needs nothing else.
    #[test]
    fn a_rank_that_holds_a_part_needs_no_other_lanes(
        shape in prop::collection::vec(1usize..120, 1..4),
        dim in any::<prop::sample::Index>(),
        ranks in 2u64..9,
        gap in prop::sample::select(vec![0, 10]),
        seed in any::<u64>(),
    ) {
        let base = tensor("w", "BF16", &shape, seed);
        let target = tuned(&base, 5);
        let dim = dim.index(shape.len());
        let parts = cuts(&shape, dim, (shape[dim] as u64).div_ceil(ranks));
        let pair = pair(&base, &target, parts.clone());
        for part in &parts {
            let ((expected, pitch), (old, _)) = (held(&target, part, gap), held(&base, part, gap));
            let slices = SliceCheckpoint::new([base_slice(&base, part, &old, gap, pitch)]).unwrap();
            let mut out = filled(&expected, &target, part, gap);
            Apply::new(&pair).base(&slices).to_slices([slice("w", part, &mut out, gap, pitch)]).unwrap();
            prop_assert!(out == expected);
            for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
                let mut bytes = old.clone();
                let report = Apply::new(&pair).in_place_slices([slice("w", part, &mut bytes, gap, pitch)], mode).unwrap();
                prop_assert!(bytes == expected);
                prop_assert_eq!(report.digests_checked, mode == InPlace::AllChecked);
            }
            // A rank whose memory is not its base changes nothing.
            let mut wrong = old.clone();
            wrong[0] ^= 2;
            let before = wrong.clone();
            let outcome = Apply::new(&pair).in_place_slices([slice("w", part, &mut wrong, gap, pitch)], InPlace::AllChecked);
            if let Err(error) = outcome {
                prop_assert!(matches!(error, Error::WrongBase { .. } | Error::AlreadyApplied), "{}", error);
                prop_assert!(wrong == before);
            }
        }
    }
}

#[test]
fn a_slice_that_cuts_a_chunk_is_refused_and_the_error_names_the_entry() {
    let base = tensor("w", "BF16", &[100, 100], 1);
    let target = tuned(&base, 3);
    let pair = pair(&base, &target, Vec::new());
    let part = Rectangle::new([0, 0], [50, 100]);
    let mut bytes = held(&base, &part, 0).0;
    let before = bytes.clone();
    let refused = Apply::new(&pair).in_place_slices([SliceMut::new("w", part.clone(), &mut bytes)], InPlace::ChunkByChunk);
    let Err(Error::NotHeld { tensor, chunk, reason }) = refused else { panic!("{refused:?}") };
    assert_eq!((&*tensor, chunk), ("w", 1), "{reason}");
    assert!(reason.contains("is cut at the part [0, 0] + [50, 100]"), "{reason}");
    assert!(bytes == before);
    let slices = SliceCheckpoint::new([Slice::new(info(&base), part.clone(), &before)]).unwrap();
    let mut out = vec![0; before.len()];
    let refused = Apply::new(&pair).base(&slices).to_slices([SliceMut::new("w", part, &mut out)]);
    assert!(matches!(refused, Err(Error::NotHeld { chunk: 1, .. })), "{refused:?}");
    assert!(out.iter().all(|&byte| byte == 0));
    // The first 40 rows are within the first chunk.
    let part = Rectangle::new([0, 0], [40, 100]);
    let mut out = held(&base, &part, 0).0;
    Apply::new(&pair).base(&slices).to_slices([SliceMut::new("w", part.clone(), &mut out)]).unwrap();
    assert!(out == held(&target, &part, 0).0);
}

#[test]
fn a_slice_that_the_pair_does_not_cover_is_refused_before_anything_is_written() {
    let base = tensor("w", "BF16", &[100, 100], 1);
    let target = tuned(&base, 3);
    // Rows 60 to 99 are in no part.
    let pair = pair(&base, &target, vec![Rectangle::new([0, 0], [30, 100]), Rectangle::new([30, 0], [30, 100])]);
    let part = Rectangle::new([0, 0], [61, 100]);
    let before = held(&base, &part, 0).0;
    for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
        let mut bytes = before.clone();
        let error = Apply::new(&pair).in_place_slices([SliceMut::new("w", part.clone(), &mut bytes)], mode).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument(text) if text.contains("12000 of 12200 bytes")), "{error}");
        assert!(bytes == before, "{mode:?}");
    }
    let mut out = vec![GAP; before.len()];
    Apply::new(&pair).base(&memory(&base)).to_slices([SliceMut::new("w", part, &mut out)]).unwrap_err();
    assert!(out.iter().all(|&byte| byte == GAP));
}

#[test]
fn a_slice_of_an_empty_tensor_may_have_huge_dimensions() {
    let shape = [1 << 40, 1 << 40, 0];
    let info = TensorInfo { name: "w".into(), dtype: "BF16".parse().unwrap(), shape: shape.to_vec() };
    let base = MemoryCheckpoint::new([(info.clone(), &[][..])]).unwrap();
    let pair = Encode::new(&base).base(&base).to_memory().unwrap().0;
    let whole = Rectangle::whole(&shape);
    Apply::new(&pair).in_place_slices([SliceMut::new("w", whole.clone(), &mut [])], InPlace::AllChecked).unwrap();
    Apply::new(&pair).in_place([TensorMut { name: "w", bytes: &mut [] }], InPlace::AllChecked).unwrap();
    let slices = SliceCheckpoint::new([Slice::new(info, whole.clone(), &[])]).unwrap();
    Apply::new(&pair).base(&slices).to_slices([SliceMut::new("w", whole.clone(), &mut [])]).unwrap();
    let refused = Apply::new(&pair).base(&slices).to_slices([SliceMut::new("w", whole, &mut [0])]);
    assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
}

#[test]
fn slices_that_make_no_sense_are_refused() {
    let base = tensor("w", "BF16", &[10, 10], 1);
    let target = tuned(&base, 3);
    let pair = pair(&base, &target, cuts(&[10, 10], 0, 5)[..1].to_vec());
    let whole = memory(&base);
    let refused = |part: Rectangle, size: usize, pitch: Option<u64>, what: &str| {
        let mut out = vec![0; size];
        let slice = SliceMut::new("w", part, &mut out);
        let slice = pitch.into_iter().fold(slice, |slice, pitch| slice.pitch(pitch));
        let error = Apply::new(&pair).base(&whole).to_slices([slice]).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument(text) if text.contains(what)), "{error}");
    };
    refused(Rectangle::new([0, 0], [2, 10]), 39, None, "memory of 39 bytes, expected 40");
    refused(Rectangle::new([0, 0], [2, 10]), 40, Some(21), "memory of 40 bytes, expected 41");
    refused(Rectangle::new([0, 0], [2, 10]), 40, Some(19), "a pitch of 19 bytes for rows of 20");
    refused(Rectangle::new([9, 0], [2, 10]), 40, None, "an end beyond the tensor");
    refused(Rectangle::new([0], [2]), 4, None, "another number of dimensions");
    refused(Rectangle::new([4, 0], [2, 10]), 40, None, "the pair has 20 of 40 bytes");
    let mut out = vec![0; 20];
    let missing = Apply::new(&pair).base(&whole).to_slices([SliceMut::new("v", Rectangle::new([0, 0], [1, 10]), &mut out)]);
    assert!(matches!(missing, Err(Error::InvalidArgument(_))));
    let bytes = vec![0; 20];
    let slice = || Slice::new(info(&base), Rectangle::new([0, 0], [1, 10]), &bytes);
    assert!(SliceCheckpoint::new([slice(), slice()]).is_err());
}
