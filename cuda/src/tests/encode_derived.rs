//! Pairs with derived bases that a device encodes have the bytes of those that the processor encodes.

use super::super::encode::Limits;
use super::super::{DeviceCheckpoint, DeviceSlice, Encode, TensorSlice};
use super::derived::{Given, Owned, all, cast, memory, quantised};
use super::encode::{Tensors, compare};
use super::generated::Random;
use super::stand_in;
use tpde::{Checkpoint, Codec, CodecChoice, EncodeOptions, Error, Favor, FormatVersion, Rectangle};
use tpde_core::derived::BaseForm;
use tpde_core::lane::Dtype;

/// The tensors that are given, of whose lanes one in `rarity` changes.
fn tensors_of(all: impl IntoIterator<Item = Given>, rarity: usize) -> Tensors {
    let mut tensors = Tensors::default();
    for Given { base, formed: (info, mut bytes) } in all {
        bytes.chunks_mut(info.dtype.lane_bytes()).skip(rarity / 2).step_by(rarity).for_each(|lane| lane[0] ^= 3);
        tensors.base.extend(base);
        tensors.target.push((info, bytes));
    }
    tensors
}

/// A tensor of each form, with few lanes.
fn small(random: &mut Random) -> Vec<Given> {
    vec![
        cast(random, Dtype::F32, Dtype::Bf16, &[3, 700]),
        cast(random, Dtype::F32, Dtype::F16, &[2048]),
        cast(random, Dtype::Bf16, Dtype::F32, &[1031]),
        cast(random, Dtype::F16, Dtype::F32, &[1032]),
        cast(random, Dtype::F8E4m3, Dtype::Bf16, &[9, 256]),
        cast(random, Dtype::F8E5m2, Dtype::F16, &[777]),
        quantised(random, BaseForm::Fp8Blocks, Dtype::Bf16, &[131, 24]),
        quantised(random, BaseForm::Fp8Blocks, Dtype::F32, &[5, 260]),
        quantised(random, BaseForm::Fp8Blocks, Dtype::F16, &[10, 192]),
        quantised(random, BaseForm::Mxfp4, Dtype::Bf16, &[3, 7, 96]),
        quantised(random, BaseForm::Mxfp4Transposed, Dtype::Bf16, &[2, 32, 40]),
        quantised(random, BaseForm::Mxfp4Transposed, Dtype::Bf16, &[1, 64, 7]),
    ]
}

/// Waves of few chunks, and converted lanes that are hashed in several rounds.
fn little_memory() -> Limits {
    Limits { lanes: 1 << 14, wave: 1 << 15, payloads: 1 << 12, hashed: 1 << 17, converted: 1 << 15, ..Limits::default() }
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_form_codec_favor_and_density() {
    // For each density, a favor and whether there is little memory.
    for (n, (rarity, is_little)) in [(1, true), (9, false), (500, true)].into_iter().enumerate() {
        for codec in [Codec::Raw.into(), Codec::Conditioned.into(), CodecChoice::Device] {
            // On the stand-in, only a third of the tensors: each table set takes about a second there.
            let few = small(&mut Random(n as u64)).into_iter();
            let tensors = match (stand_in::is_used(), codec) {
                (true, CodecChoice::Only(Codec::Raw)) => tensors_of(few, rarity),
                (true, _) => tensors_of(few.skip(n).step_by(3), rarity),
                (false, _) => tensors_of(all(), rarity),
            };
            let options = EncodeOptions::default().codec(codec).favor([Favor::Ratio, Favor::Speed, Favor::Size][n]);
            let what = format!("{}, 1 in {rarity}", codec.name());
            let (options, limits) = match is_little {
                true => (options.chunk_lanes(1 << 12), little_memory()),
                false => (options, Limits::default()),
            };
            tensors.check(&options, limits, &format!("{what}, little memory: {is_little}"));
        }
    }
}

/// All casts and forms in few lanes, for sanitizers (`emulated::encoder`).
#[test]
#[ignore = "needs a CUDA device"]
fn small_pairs_with_derived_bases() {
    let tensors = tensors_of(small(&mut Random(8)), 30);
    tensors.check(&EncodeOptions::default().codec(Codec::Raw), little_memory(), "small");
    // In a pair, and without derived bases.
    let (base, target) = (memory(&tensors.base), memory(&tensors.target));
    let options = EncodeOptions::default().codec(Codec::Raw);
    let (pair, _) = tpde::Encode::new(&target).base(&base).options(options.clone()).to_memory().unwrap();
    assert!(pair.index().tensors().all(|tensor| tensor.base_kind.is_derived()));
    tensors.check(&options.derived(false), Limits::default(), "without derived bases");
}

/// More than one launch of converted lanes, for a tensor and for several tensors.
#[test]
#[ignore = "needs a CUDA device"]
fn formed_lanes_that_are_hashed_in_parts() {
    let random = &mut Random(4);
    let mut given = vec![
        cast(random, Dtype::F32, Dtype::Bf16, &[(2 << 14) + 5]),
        cast(random, Dtype::Bf16, Dtype::F32, &[1 << 10]),
        quantised(random, BaseForm::Mxfp4Transposed, Dtype::Bf16, &[1, 96, 20]),
        cast(random, Dtype::F32, Dtype::Bf16, &[100]),
        cast(random, Dtype::F32, Dtype::F16, &[0]),
    ];
    // A tensor of the dtype of its base is between derived ones.
    let (mut info, bytes) = given[1].formed.clone();
    info.name = "G".into();
    given.push(Given { base: vec![(info.clone(), bytes.clone())], formed: (info, bytes) });
    let tensors = tensors_of(given, 1000);
    let options = EncodeOptions::default().codec(Codec::Raw);
    for pieces in [1, 2, 4] {
        let limits = Limits { converted: pieces << 15, ..Limits::default() };
        tensors.check(&options, limits, &format!("{pieces} pieces at a time"));
    }
}

/// A tensor in device memory, with `gap` bytes between rows, at an address that is a multiple of its lanes and of `unit`.
fn place(tensor: &Owned, gap: usize, unit: usize) -> (DeviceSlice, Option<u64>) {
    let (info, bytes) = tensor;
    let row = (info.shape.last().unwrap_or(&1) * info.dtype.bits() / 8) as usize;
    let rows: Vec<_> = bytes.chunks(row.max(1)).collect();
    let mut content = rows.join(&vec![0xEE; gap][..]);
    content.splice(..0, vec![0xEE; unit]);
    let device = super::device();
    let slice = device.alloc(content.len() as u64).unwrap();
    device.write(&slice, &content).unwrap();
    let pitch = if gap == 0 { None } else { Some((row + gap) as u64) };
    (slice.slice(unit as u64, (content.len() - unit) as u64).unwrap(), pitch)
}

fn on_device(tensors: &[Owned], gap: usize, unit: usize) -> DeviceCheckpoint {
    let slices = tensors.iter().map(|tensor| {
        let (info, lane) = (&tensor.0, tensor.0.dtype.lane_bytes());
        let (memory, pitch) = place(tensor, gap * lane, unit.next_multiple_of(lane));
        let slice = TensorSlice::new(&info.name, Rectangle::whole(&info.shape), memory);
        (info.dtype, info.shape.clone(), if let Some(pitch) = pitch { slice.pitch(pitch) } else { slice })
    });
    DeviceCheckpoint::of_slices(super::device(), slices).unwrap()
}

/// Parts of tensors, whose base and scales are in rows with gaps between them; renamed tensors.
#[test]
#[ignore = "needs a CUDA device"]
fn parts_and_rows_have_the_bytes_of_the_processor() {
    let random = &mut Random(6);
    let given = [
        cast(random, Dtype::F32, Dtype::Bf16, &[24, 96]),
        cast(random, Dtype::Bf16, Dtype::F32, &[24, 96]),
        quantised(random, BaseForm::Fp8Blocks, Dtype::Bf16, &[136, 136]),
        quantised(random, BaseForm::Mxfp4, Dtype::Bf16, &[1, 10, 128]),
        quantised(random, BaseForm::Mxfp4Transposed, Dtype::Bf16, &[1, 64, 48]),
    ];
    for dims in [None, Some([(0, 16), (0, 7), (0, 128), (1, 4), (1, 32)]), Some([(1, 40), (1, 32), (1, 128), (2, 32), (2, 16)])] {
        let cut = |given: &Given, (dim, at): (usize, u64)| {
            let (mut low, mut high) = (Rectangle::whole(&given.formed.0.shape), Rectangle::whole(&given.formed.0.shape));
            low.extent[dim] = at;
            (high.origin[dim], high.extent[dim]) = (at, high.extent[dim] - at);
            (format!("new.{}", given.formed.0.name), vec![low, high])
        };
        let cuts = dims.map(|dims| given.iter().zip(dims).map(|(given, dim)| cut(given, dim)).collect::<Vec<_>>());
        let given = given.iter().map(|given| Given { base: given.base.clone(), formed: given.formed.clone() });
        let mut tensors = tensors_of(given, 40);
        let mut options = EncodeOptions::default().codec(Codec::Conditioned).chunk_lanes(4096).cuts(cuts.unwrap_or_default());
        for (info, _) in &mut tensors.target {
            options = options.renamed([(format!("new.{}", info.name), info.name.clone())]);
            info.name = format!("new.{}", info.name);
        }
        let (base, target) = (memory(&tensors.base), memory(&tensors.target));
        let encode = tpde::Encode::new(&target).base(&base).options(options.clone());
        let (expected, report) = encode.to_memory().unwrap();
        assert!(expected.index().tensors().all(|tensor| tensor.base_kind.is_derived()));
        // Blocks of MXFP4 in rows with gaps, of which a part has some, are at two distances.
        let (gap, unit) = match dims {
            Some(dims) if dims[0].0 == 1 => (0, 1),
            Some(_) => (16, 48),
            None => (1, 1),
        };
        let (base, target) = (on_device(&tensors.base, gap, unit), on_device(&tensors.target, unit % 2, 2 * gap));
        let encode = Encode::new(&target).base(&base).options(options.clone()).limits(little_memory());
        let what = format!("{dims:?}, gaps of {gap}, at {unit}");
        let (found, found_report) = encode.to_memory().unwrap_or_else(|e| panic!("{what}: {e}"));
        compare(&expected, &found, &what);
        assert_eq!(format!("{found_report:?}"), format!("{report:?}"), "{what}");
    }
}

/// The digest of a derived base is that of its converted lanes. One that is known is that of the tensor of another dtype.
#[test]
#[ignore = "needs a CUDA device"]
fn known_digests_are_those_of_stored_bases() {
    let random = &mut Random(2);
    let tensors = tensors_of([cast(random, Dtype::F32, Dtype::Bf16, &[100])], 10);
    let device = super::device();
    let [base, target] = [&tensors.base, &tensors.target].map(|t| DeviceCheckpoint::upload(device, &memory(t)).unwrap());
    let options = EncodeOptions::default().codec(Codec::Raw);
    let encode = tpde::Encode::new(&base).options(options.clone());
    let expected = tpde::Encode::new(&target).base(&base).options(options.clone()).to_memory().unwrap().0;
    let (before, _) = encode.to_memory().unwrap();
    let known = before.index().tensors().map(|tensor| (tensor.name.to_owned(), *tensor.target_digest())).collect::<Vec<_>>();
    assert_eq!(known.len(), 1);
    let (found, _) = Encode::new(&target).base(&base).options(options).base_digests(known).to_memory().unwrap();
    compare(&expected, &found, "with a known digest");
}

/// Scales that are missing or do not fit, and a format without derived bases: the tensors have no base, as on the processor.
#[test]
#[ignore = "needs a CUDA device"]
fn bases_that_do_not_fit_are_not_used() {
    let options = || EncodeOptions::default().codec(Codec::Conditioned);
    let fp8 = || quantised(&mut Random(3), BaseForm::Fp8Blocks, Dtype::Bf16, &[130, 8]);
    let mut other_scales = fp8();
    other_scales.base[1].0.shape = vec![1, 2];
    let mut other_dtype = fp8();
    other_dtype.base[1].0.dtype = Dtype::I32;
    let mut missing = quantised(&mut Random(3), BaseForm::Mxfp4, Dtype::Bf16, &[2, 64]);
    missing.base.truncate(1);
    for (given, what) in [(other_scales, "scales of another shape"), (other_dtype, "of another dtype"), (missing, "no scales")] {
        tensors_of([given], 7).check(&options(), Limits::default(), what);
    }
    let other = cast(&mut Random(3), Dtype::F32, Dtype::Bf16, &[9]);
    tensors_of([other], 7).check(&options().format(FormatVersion::V1_2), Limits::default(), "an earlier format");
    // Without its scales, a tensor of FP8 is cast.
    let mut unscaled = fp8();
    unscaled.base.truncate(1);
    tensors_of([unscaled], 7).check(&options(), Limits::default(), "without scales");
}

/// Kernels read whole elements.
#[test]
#[ignore = "needs a CUDA device"]
fn elements_across_their_alignment_are_refused() {
    let random = &mut Random(3);
    let given = [cast(random, Dtype::F32, Dtype::Bf16, &[2, 30]), quantised(random, BaseForm::Fp8Blocks, Dtype::Bf16, &[4, 8])];
    for given in given {
        let tensors = tensors_of([given], 7);
        let target = DeviceCheckpoint::upload(super::device(), &memory(&tensors.target)).unwrap();
        let (last, rest) = tensors.base.split_last().unwrap();
        let slices = rest.iter().map(|tensor| (tensor, place(tensor, 0, 0))).chain([(last, place(last, 0, 2))]);
        let slices = slices.map(|((info, _), (memory, _))| (info.clone(), memory));
        let base = DeviceCheckpoint::new(super::device(), slices).unwrap();
        assert_eq!(base.tensors().len(), tensors.base.len());
        let options = EncodeOptions::default().codec(Codec::Raw);
        match Encode::new(&target).base(&base).options(options).to_memory() {
            Err(Error::InvalidArgument(why)) => assert!(why.contains("F32 at") && why.contains("multiples of 4"), "{why}"),
            other => panic!("{other:?}"),
        }
    }
}
