//! Slices of tensors: rectangles in memory, with gaps between rows, rebuilt and changed in place, from whole bases and from
//! slices.

use crate::common::slices::{GAP, Held, cut, info, memory, whole};
use crate::common::{Tensor as Data, slices, tensor, tuned, width};
use proptest::prelude::*;
use std::slice::from_ref;
use tpde::{
    Apply, Checkpoint, Dtype, Encode, EncodeOptions, Error, FusedSlices, InPlace, MemoryCheckpoint, Pair, Rectangle, Slice,
    SliceCheckpoint, SliceMut, TensorInfo, TensorMut,
};

/// A rectangle of a shape, as the numbers say.
fn rectangle(shape: &[usize], numbers: &[u64]) -> Rectangle {
    let origin: Vec<u64> = shape.iter().zip(numbers).map(|(&dim, n)| n % dim as u64).collect();
    let extent: Vec<u64> = shape.iter().zip(&origin).zip(&numbers[4..]).map(|((&dim, o), n)| 1 + n % (dim as u64 - o)).collect();
    Rectangle::new(origin, extent)
}

fn pair(base: &Data, target: &Data, cuts: Vec<Rectangle>) -> Pair<Vec<u8>> {
    let options = EncodeOptions::default().chunk_lanes(4096);
    let options = if cuts.is_empty() { options } else { options.cuts([(target.name.clone(), cuts)]) };
    Encode::new(&memory(from_ref(target))).base(&memory(from_ref(base))).options(options).to_memory().unwrap().0
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
        let expected = Held::new(&target, &part, gap).bytes;
        let mut out = Held::zeros(&target, &part, gap);
        let whole = memory(from_ref(&base));
        Apply::new(&pair).base(&whole).to_slices([out.slice_mut("w")]).unwrap();
        prop_assert!(out.bytes == expected, "from a whole base");

        // From the base lanes of the chunks that the slice touches, if a slice of the base holds them.
        let old = Held::new(&base, &part, gap);
        let slices = SliceCheckpoint::new([old.slice(info(&base))]).unwrap();
        let mut out = Held::zeros(&target, &part, gap);
        let before = out.bytes.clone();
        match Apply::new(&pair).base(&slices).to_slices([out.slice_mut("w")]) {
            Ok(_) => prop_assert!(out.bytes == expected, "from a slice of the base"),
            Err(Error::NotHeld { .. }) => prop_assert!(out.bytes == before),
            Err(other) => panic!("{other}"),
        }
        for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
            let mut held = old.clone();
            match Apply::new(&pair).in_place_slices([held.slice_mut("w")], mode) {
                Ok(_) => prop_assert!(held.bytes == expected, "{:?}", mode),
                Err(Error::NotHeld { .. }) => prop_assert!(held.bytes == old.bytes, "{:?}", mode),
                Err(other) => panic!("{other}"),
            }
        }
    }

    /// Slices that together hold a tensor, or nearly, with the pair cut elsewhere.
    #[test]
    fn several_slices_of_one_tensor_are_rebuilt_together(
        shape in prop::collection::vec(1usize..70, 1..4),
        numbers in prop::collection::vec(any::<u64>(), 40),
        (dim, size) in (any::<prop::sample::Index>(), 1u64..100),
        gap in prop::sample::select(vec![0, 6]),
        is_missing in any::<prop::sample::Index>(),
        seed in any::<u64>(),
    ) {
        let base = tensor("w", "BF16", &shape, seed);
        let target = tuned(&base, 5);
        let pair = pair(&base, &target, cuts(&shape, dim.index(shape.len()), size));
        let parts = cut(&whole(&base), &mut numbers.into_iter(), 3, 0);
        let all = |data: &Data| parts.iter().map(|part| Held::new(data, part, gap)).collect::<Vec<_>>();
        let (old, expected) = (all(&base), all(&target));
        let is_equal = |held: &[Held], expected: &[Held]| held.iter().zip(expected).all(|(a, b)| a.bytes == b.bytes);
        let slices = SliceCheckpoint::new(old.iter().map(|held| held.slice(info(&base)))).unwrap();
        let mut out: Vec<_> = parts.iter().map(|part| Held::zeros(&target, part, gap)).collect();
        let report = Apply::new(&pair).base(&slices).to_slices(out.iter_mut().rev().map(|held| held.slice_mut("w"))).unwrap();
        prop_assert!(is_equal(&out, &expected));
        prop_assert_eq!((report.tensors, report.bytes), (1, out.iter().map(|held| held.bytes.len() as u64).sum()));
        for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
            let mut held = old.clone();
            let report = Apply::new(&pair).in_place_slices(held.iter_mut().map(|held| held.slice_mut("w")), mode).unwrap();
            prop_assert!(is_equal(&held, &expected), "{:?}", mode);
            prop_assert_eq!(report.digests_checked, mode == InPlace::AllChecked);

            let mut held = old.clone();
            held.remove(is_missing.index(parts.len()));
            let before = held.clone();
            let mut without = expected.clone();
            without.remove(is_missing.index(parts.len()));
            match Apply::new(&pair).in_place_slices(held.iter_mut().map(|held| held.slice_mut("w")), mode) {
                Ok(_) => prop_assert!(is_equal(&held, &without), "{:?}", mode),
                Err(Error::NotHeld { .. }) => prop_assert!(is_equal(&held, &before), "{:?}", mode),
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
            let (expected, old) = (Held::new(&target, part, gap).bytes, Held::new(&base, part, gap));
            let slices = SliceCheckpoint::new([old.slice(info(&base))]).unwrap();
            let mut out = Held::zeros(&target, part, gap);
            let report = Apply::new(&pair).base(&slices).to_slices([out.slice_mut("w")]).unwrap();
            prop_assert!(out.bytes == expected && report.digests_checked);
            let report = Apply::new(&pair).base(&slices).digests(false).to_slices([out.slice_mut("w")]).unwrap();
            prop_assert!(out.bytes == expected && !report.digests_checked);
            for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
                let mut held = old.clone();
                let report = Apply::new(&pair).in_place_slices([held.slice_mut("w")], mode).unwrap();
                prop_assert!(held.bytes == expected);
                prop_assert_eq!(report.digests_checked, mode == InPlace::AllChecked);
            }
            // A rank whose memory is not its base changes nothing.
            let mut wrong = old.clone();
            wrong.bytes[0] ^= 2;
            let slices = SliceCheckpoint::new([wrong.slice(info(&base))]).unwrap();
            let outcome = Apply::new(&pair).base(&slices).to_slices([out.slice_mut("w")]);
            if let Err(error) = outcome {
                prop_assert!(matches!(error, Error::WrongBase { .. } | Error::AlreadyApplied { .. }), "{}", error);
            }
            wrong.bytes[0] ^= 2;
            wrong.bytes[0] ^= 2;
            let before = wrong.bytes.clone();
            let outcome = Apply::new(&pair).in_place_slices([wrong.slice_mut("w")], InPlace::AllChecked);
            if let Err(error) = outcome {
                prop_assert!(matches!(error, Error::WrongBase { .. } | Error::AlreadyApplied { .. }), "{}", error);
                prop_assert!(wrong.bytes == before);
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
    let mut bytes = Held::new(&base, &part, 0).bytes;
    let before = bytes.clone();
    let refused = Apply::new(&pair).in_place_slices([SliceMut::new("w", part.clone(), &mut bytes)], InPlace::ChunkByChunk);
    let Err(Error::NotHeld { tensor, chunk, reason }) = refused else { panic!("{refused:?}") };
    assert_eq!((&*tensor, chunk), ("w", 1), "{reason}");
    assert!(reason.contains("is cut at the part [0:50, 0:100]"), "{reason}");
    assert!(bytes == before);
    let slices = SliceCheckpoint::new([Slice::new(info(&base), part.clone(), &before)]).unwrap();
    let mut out = vec![0; before.len()];
    let refused = Apply::new(&pair).base(&slices).to_slices([SliceMut::new("w", part, &mut out)]);
    assert!(matches!(refused, Err(Error::NotHeld { chunk: 1, .. })), "{refused:?}");
    assert!(out.iter().all(|&byte| byte == 0));
    // The first 40 rows are within the first chunk.
    let part = Rectangle::new([0, 0], [40, 100]);
    let mut out = Held::new(&base, &part, 0).bytes;
    Apply::new(&pair).base(&slices).to_slices([SliceMut::new("w", part.clone(), &mut out)]).unwrap();
    assert!(out == Held::new(&target, &part, 0).bytes);
}

#[test]
fn slices_that_are_not_the_base_are_named_in_both_modes() {
    let base = tensor("w", "BF16", &[100, 100], 1);
    let target = tuned(&base, 3);
    let rows = Rectangle::new([0, 0], [50, 100]);
    let pair = pair(&base, &target, cuts(&[100, 100], 0, 50));
    for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
        let apply = |of: &Data| {
            let mut held = Held::new(of, &rows, 3);
            let before = held.bytes.clone();
            let outcome = Apply::new(&pair).in_place_slices([held.slice_mut("w")], mode);
            assert!(held.bytes == before, "{mode:?}");
            outcome.unwrap_err()
        };
        assert!(matches!(apply(&target), Error::AlreadyApplied { .. }), "{mode:?}");
        assert!(matches!(apply(&tuned(&base, 8)), Error::WrongBase { .. }), "{mode:?}");
    }
}

#[test]
fn a_slice_that_the_pair_does_not_cover_is_refused_before_anything_is_written() {
    let base = tensor("w", "BF16", &[100, 100], 1);
    let target = tuned(&base, 3);
    // Rows 60 to 99 are in no part.
    let pair = pair(&base, &target, vec![Rectangle::new([0, 0], [30, 100]), Rectangle::new([30, 0], [30, 100])]);
    let part = Rectangle::new([0, 0], [61, 100]);
    let before = Held::new(&base, &part, 0).bytes;
    for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
        let mut bytes = before.clone();
        let error = Apply::new(&pair).in_place_slices([SliceMut::new("w", part.clone(), &mut bytes)], mode).unwrap_err();
        assert_eq!(error.to_string(), "the pair lacks the elements [60:61, 0:100] of tensor w");
        assert!(matches!(error, Error::Incomplete { .. }));
        assert!(bytes == before, "{mode:?}");
    }
    let mut out = vec![GAP; before.len()];
    Apply::new(&pair).base(&memory(from_ref(&base))).to_slices([SliceMut::new("w", part, &mut out)]).unwrap_err();
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
    let whole = memory(from_ref(&base));
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
    let mut out = vec![0; 20];
    let missing = Apply::new(&pair).base(&whole).to_slices([SliceMut::new("v", Rectangle::new([0, 0], [1, 10]), &mut out)]);
    assert!(matches!(missing, Err(Error::InvalidArgument(_))));
    // A scalar is a row of one element.
    let scalar = TensorInfo { name: "s".into(), dtype: Dtype::F32, shape: vec![] };
    let one = MemoryCheckpoint::new([(scalar, &[1, 2, 3, 4][..])]).unwrap();
    let (pair, _) = Encode::new(&one).to_memory().unwrap();
    for pitch in [1, 3, 4, 5] {
        let mut out = [0; 4];
        let outcome = Apply::new(&pair).to_slices([SliceMut::new("s", Rectangle::whole(&[]), &mut out).pitch(pitch)]);
        assert_eq!(matches!(outcome, Err(Error::InvalidArgument(_))), pitch < 4, "{outcome:?}");
        assert_eq!(out == [1, 2, 3, 4], pitch >= 4);
    }
}

/// Slices of one tensor are disjoint, and of one dtype and shape.
#[test]
fn slices_of_one_tensor_that_contradict_each_other_are_refused() {
    let base = tensor("w", "BF16", &[10, 10], 1);
    let pair = pair(&base, &tuned(&base, 3), Vec::new());
    let bytes = [0; 60];
    let slice = |origin: [u64; 2], shape: &[u64]| {
        let info = TensorInfo { shape: shape.to_vec(), ..info(&base) };
        Slice::new(info, Rectangle::new(origin, [6, 5]), &bytes)
    };
    let refused = |slices: [Slice<'_>; 2], what: &str| {
        let error = SliceCheckpoint::new(slices).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument(text) if text.contains(what)), "{error}");
    };
    SliceCheckpoint::new([slice([0, 0], &[10, 10]), slice([0, 5], &[10, 10])]).unwrap();
    refused([slice([4, 3], &[10, 10]), slice([0, 0], &[10, 10])], "slices [0:6, 0:5] and [4:10, 3:8] of tensor w overlap");
    refused([slice([0, 0], &[10, 10]), slice([0, 5], &[10, 11])], "BF16 [10, 10] and BF16 [10, 11]");
    let (mut one, mut other) = (bytes, bytes);
    let whole = memory(from_ref(&base));
    for is_in_place in [false, true] {
        let slice = |origin: [u64; 2], bytes| SliceMut::new("w", Rectangle::new(origin, [6, 5]), bytes);
        let slices = [slice([0, 0], &mut one[..]), slice([4, 4], &mut other[..])];
        let outcome = match is_in_place {
            true => Apply::new(&pair).in_place_slices(slices, InPlace::ChunkByChunk),
            false => Apply::new(&pair).base(&whole).to_slices(slices),
        };
        assert!(matches!(&outcome, Err(Error::InvalidArgument(text)) if text.contains("overlap")), "{outcome:?}");
    }
    assert_eq!((one, other), (bytes, bytes));
}

/// A rank of a sharded tensor may have no rows.
#[test]
fn empty_slices_change_nothing() {
    let base = tensor("w", "BF16", &[10, 10], 1);
    let pair = pair(&base, &tuned(&base, 3), Vec::new());
    let shard = whole(&base).shard(0, 11, 10).unwrap();
    assert_eq!(shard, Rectangle::new([10, 0], [0, 10]));
    let slices = SliceCheckpoint::new([Slice::new(info(&base), shard.clone(), &[])]).unwrap();
    assert!(!slices.holds(0, 0, 2) && slices.holds(0, 0, 0));
    assert!(slices.read(0, 0, &mut [0; 2]).is_err());
    Apply::new(&pair).base(&slices).to_slices([SliceMut::new("w", shard.clone(), &mut [])]).unwrap();
    Apply::new(&pair).in_place_slices([SliceMut::new("w", shard, &mut [])], InPlace::AllChecked).unwrap();
    let beyond = Slice::new(info(&base), Rectangle::new([11, 0], [0, 10]), &[]);
    assert!(SliceCheckpoint::new([beyond]).is_err());
}

#[test]
fn bytes_past_the_end_of_a_tensor_are_in_no_slice() {
    let base = tensor("w", "BF16", &[4, 3], 1);
    for part in [whole(&base), Rectangle::new([0, 1], [4, 2]), Rectangle::new([2, 0], [2, 3])] {
        let held = Held::new(&base, &part, 2);
        let slices = SliceCheckpoint::new([held.slice(info(&base))]).unwrap();
        for offset in 23..80 {
            assert!(slices.read(0, offset, &mut [0; 2]).is_err(), "{part} {offset}");
            assert!(!slices.holds(0, offset, 2) && slices.in_place(0, offset, 2).is_none(), "{part} {offset}");
        }
        assert_eq!(slices.in_place(0, 20, 4), Some(&base.bytes[20..]));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    /// Slices anywhere in one memory, with any pitches. The expected outcome is found byte by byte.
    #[test]
    fn slices_in_one_memory_may_interleave_and_share_no_byte(
        dtype in prop::sample::select(vec!["U8", "BF16"]),
        common in prop::option::weighted(0.7, 8u64..60),
        places in prop::collection::vec((1usize..12, 1u64..14, 0u64..40, 0usize..80), 2..4),
        seed in any::<u64>(),
    ) {
        let width = width(dtype);
        let names = ["a", "b", "c"];
        let base: Vec<_> = places.iter().zip(names).map(|(&(rows, columns, ..), name)| tensor(name, dtype, &[rows, columns as usize], seed)).collect();
        let target: Vec<_> = base.iter().map(|base| tuned(base, 3)).collect();
        let (pair, _) = Encode::new(&memory(&target)).base(&memory(&base)).to_memory().unwrap();

        let mut owners: Vec<Vec<usize>> = Vec::new();
        let [mut before, mut after] = [Vec::new(), Vec::new()];
        let mut ranges = Vec::new();
        for (i, &(rows, columns, gap, start)) in places.iter().enumerate() {
            let row = columns as usize * width;
            let pitch = common.map_or(row + gap as usize, |pitch| row.max(pitch as usize));
            let end = start + (rows - 1) * pitch + row;
            owners.resize(owners.len().max(end + 7), Vec::new());
            before.resize(owners.len(), GAP);
            after.resize(owners.len(), GAP);
            for (n, bytes) in base[i].bytes.chunks(row).enumerate() {
                let at = start + n * pitch;
                owners[at..at + row].iter_mut().for_each(|owners| owners.push(i));
                before[at..at + row].copy_from_slice(bytes);
                after[at..at + row].copy_from_slice(&target[i].bytes[n * row..][..row]);
            }
            ranges.push((start..end, (pitch > row).then_some(pitch as u64)));
        }
        let overlaps = owners.iter().any(|owners| owners.len() > 1);

        let whole = memory(&base);
        for mode in [None, Some(InPlace::AllChecked), Some(InPlace::ChunkByChunk)] {
            let mut held = before.clone();
            let slices = base.iter().zip(&ranges).fold(FusedSlices::new(&mut held), |fused, (base, (range, pitch))| {
                fused.slice(&base.name, slices::whole(base), range.clone(), *pitch)
            });
            let outcome = match mode {
                Some(mode) => Apply::new(&pair).in_place_slices([slices], mode),
                None => Apply::new(&pair).base(&whole).to_slices([slices]),
            };
            match outcome {
                Ok(_) => prop_assert!(!overlaps && held == after, "{mode:?}"),
                Err(Error::InvalidArgument(why)) => {
                    prop_assert!(overlaps && why.contains("share memory"), "{why}");
                    prop_assert!(held == before);
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
}

#[test]
fn a_slice_outside_of_its_memory_is_refused() {
    let base = tensor("w", "U8", &[2, 3], 1);
    let pair = pair(&base, &tuned(&base, 1), Vec::new());
    for (start, end) in [(1, 7), (5, 11), (7, 13), (9, 3)] {
        let range = start..end;
        let mut bytes = [0; 6];
        let fused = FusedSlices::new(&mut bytes).slice("w", whole(&base), range.clone(), None);
        let error = Apply::new(&pair).in_place_slices([fused], InPlace::ChunkByChunk).unwrap_err();
        assert!(error.to_string().contains("of a memory of 6 bytes"), "{range:?}: {error}");
    }
}
