//! Derived bases: base lanes that kernels form from tensors of another dtype. The expected lanes are formed by the processor.

use super::super::derived::{DerivedOnDevice, SourceTensor};
use super::super::{ApplyPlan, Binding, DeviceIndex, DeviceSlice, Mode, Payloads, TensorSlice};
use super::generated::Random;
use super::laid::{Laid, Route, apply, payloads, prepare, routes};
use super::stand_in;
use tpde::internals::ConvertedTensor;
use tpde::{Apply, Checkpoint, Codec, Encode, EncodeOptions, InPlace, MemoryCheckpoint, Pair, TensorInfo};
use tpde_core::derived::BaseForm;
use tpde_core::error::{Error, Rule};
use tpde_core::index::Tensor;
use tpde_core::lane::Dtype;
use tpde_core::layout::StridedLayout;
use tpde_core::rectangle::Rectangle;

pub type Owned = (TensorInfo, Vec<u8>);

/// A target tensor and the base tensors from which its base lanes are formed.
pub struct Given {
    pub base: Vec<Owned>,
    pub formed: Owned,
}

fn info(name: &str, dtype: Dtype, shape: &[u64]) -> TensorInfo {
    TensorInfo { name: name.into(), dtype, shape: shape.to_vec() }
}

pub fn memory(tensors: &[Owned]) -> MemoryCheckpoint<'_> {
    MemoryCheckpoint::new(tensors.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap()
}

fn noise(random: &mut Random, info: TensorInfo) -> Owned {
    let bytes = (0..info.bytes()).map(|_| random.bits() as u8).collect();
    (info, bytes)
}

/// A cast between all bit patterns.
pub fn cast(random: &mut Random, from: Dtype, to: Dtype, shape: &[u64]) -> Given {
    let name = format!("{from}.{to}.{}", shape[0]);
    let mut base = noise(random, info(&name, from, shape));
    // Half of the lanes are near boundaries of rounding: the lower bits are those of a tie, or next to it.
    if from == Dtype::F32 {
        for lane in base.1.as_chunks_mut::<4>().0.iter_mut().step_by(2) {
            let (bits, cut) = (random.bits(), if to == Dtype::Bf16 { 15 } else { 12 });
            let tie = (u32::from_le_bytes(*lane) >> cut | 1) << cut;
            *lane = tie.wrapping_add((bits % 3) as u32).wrapping_sub(1).to_le_bytes();
        }
    }
    given(vec![base], &name, to, shape, None)
}

pub fn quantised(random: &mut Random, form: BaseForm, to: Dtype, shape: &[u64]) -> Given {
    let name = format!("{form}.{to}.{}", shape.iter().map(|dim| format!("{dim}.")).collect::<String>());
    let [of_base, of_scales] = match form {
        BaseForm::Fp8Blocks => [name.clone(), format!("{name}_scale_inv")],
        _ => [format!("{name}_blocks"), format!("{name}_scales")],
    };
    let base = noise(random, info(&of_base, form.base_dtype(), &form.base_shape(shape)));
    let mut scales = noise(random, info(&of_scales, form.scales_dtype(), &form.scales_dims(shape)));
    if form == BaseForm::Fp8Blocks {
        // Most scales are near 1. Some are not finite, or give subnormal products.
        let special =
            [0x7F80_0000u32, 0x7FC0_1234, 0, 0x8000_0001, 0x0080_0000, 0x0040_0000, 0x7F7F_FFFF, 0x3380_0000, 0xBF80_0000];
        for (i, scale) in scales.1.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let near_one = (random.bits() as u32 >> 6 | 0x3C00_0000) & 0x40FF_FFFF;
            *scale = if i % 3 == 2 { special[i / 3 % special.len()] } else { near_one }.to_le_bytes();
        }
    }
    given(vec![base, scales], &name, to, shape, Some(form))
}

pub fn given(base: Vec<Owned>, name: &str, to: Dtype, shape: &[u64], form: Option<BaseForm>) -> Given {
    let whole = Rectangle::whole(shape);
    let formed = match form {
        Some(form) => ConvertedTensor::dequantised(to, form, shape, &whole, 0, 1),
        None => ConvertedTensor::cast(to, base[0].0.dtype, shape, &whole, 0),
    };
    let info = info(name, to, shape);
    let mut bytes = vec![0; info.bytes() as usize];
    formed.read(&memory(&base), 0, &mut bytes).unwrap();
    Given { base, formed: (info, bytes) }
}

/// Every cast and form, in shapes with and without whole tiles, pieces and blocks.
pub fn all() -> Vec<Given> {
    let random = &mut Random(22);
    let mut all = Vec::new();
    for (from, to) in [
        (Dtype::F32, Dtype::Bf16),
        (Dtype::F32, Dtype::F16),
        (Dtype::Bf16, Dtype::F32),
        (Dtype::F16, Dtype::F32),
        (Dtype::F8E4m3, Dtype::Bf16),
        (Dtype::F8E4m3, Dtype::F16),
        (Dtype::F8E5m2, Dtype::Bf16),
        (Dtype::F8E5m2, Dtype::F16),
    ] {
        all.extend([&[1][..], &[37, 331], &[8192]].map(|shape| cast(random, from, to, shape)));
    }
    for to in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
        all.extend([[1, 1], [131, 257], [136, 384], [2, 9000]].map(|shape| quantised(random, BaseForm::Fp8Blocks, to, &shape)));
    }
    for shape in [&[32][..], &[3, 70, 96], &[129, 64]] {
        all.push(quantised(random, BaseForm::Mxfp4, Dtype::Bf16, shape));
    }
    for shape in [[1, 32, 1], [3, 96, 70], [2, 64, 72], [1, 32, 5000]] {
        all.push(quantised(random, BaseForm::Mxfp4Transposed, Dtype::Bf16, &shape));
    }
    all
}

/// A pair of all tensors, of whose lanes one in `rarity` changes, and its target.
pub fn pair_of(
    all: &[Given],
    codec: Codec,
    rarity: usize,
    cuts: Vec<(String, Vec<Rectangle>)>,
) -> (Vec<Owned>, Pair<Vec<u8>>, Vec<Owned>) {
    let base: Vec<Owned> = all.iter().flat_map(|given| given.base.clone()).collect();
    let changed = |given: &Given| {
        let (info, mut bytes) = given.formed.clone();
        bytes.chunks_mut(info.dtype.lane_bytes()).skip(rarity / 2).step_by(rarity).for_each(|lane| lane[0] ^= 3);
        (info, bytes)
    };
    let target: Vec<Owned> = all.iter().map(changed).collect();
    let options = EncodeOptions::default().codec(codec).chunk_lanes(4096).cuts(cuts);
    let (pair, _) = Encode::new(&memory(&target)).base(&memory(&base)).options(options).to_memory().unwrap();
    (base, pair, target)
}

/// The bytes of a rectangle of a tensor.
fn bytes_of(source: &SourceTensor, name: &str, base: &dyn Checkpoint) -> Vec<u8> {
    let SourceTensor { dtype, shape, rectangle } = source;
    let tensor = base.find(name).unwrap();
    let runs = StridedLayout::of_rectangle(dtype.bits(), shape, None, &rectangle.origin, &rectangle.extent);
    let mut bytes = vec![0; source.bytes() as usize];
    runs.try_each(0, bytes.len(), |at, range| base.read(tensor, at, &mut bytes[range])).unwrap();
    bytes
}

/// What kernels form the base lanes of an entry from, and the bytes of the base tensor and of the tensor of scales.
pub fn sources_of(tensor: &Tensor<'_>, base: &dyn Checkpoint) -> Option<(DerivedOnDevice, Vec<u8>, Vec<u8>)> {
    let on_device = DerivedOnDevice::new(tensor.derived?, tensor.whole_shape(), &tensor.rectangle());
    let lanes = bytes_of(&on_device.base, tensor.base_name, base);
    let scales = on_device.scales.as_ref().map_or(Vec::new(), |(name, scales)| bytes_of(scales, name, base));
    Some((on_device, lanes, scales))
}

/// The base lanes of an entry with a derived base, formed by the processor.
pub fn formed_of(tensor: &Tensor<'_>, base: &dyn Checkpoint) -> Option<Vec<u8>> {
    let (derived, whole, part) = (tensor.derived?, tensor.whole_shape(), tensor.rectangle());
    let of_base = base.find(tensor.base_name).unwrap();
    let formed = match derived.scales {
        Some((form, name)) => ConvertedTensor::dequantised(tensor.dtype, form, whole, &part, of_base, base.find(name).unwrap()),
        None => ConvertedTensor::cast(tensor.dtype, derived.base_dtype, whole, &part, of_base),
    };
    let mut bytes = vec![0; tensor.base_bytes() as usize];
    formed.read(base, 0, &mut bytes).unwrap();
    Some(bytes)
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_form_codec_and_density() {
    let device = super::device();
    let all = all();
    let (mut tensors, mut runs) = (0, 0);
    for codec in [Codec::Raw, Codec::Zstd, Codec::Conditioned] {
        for rarity in [9, 500] {
            let (base, pair, target) = pair_of(&all, codec, rarity, Vec::new());
            let index = DeviceIndex::upload(device, pair.index()).unwrap();
            let derived = pair.index().tensors().filter(|tensor| tensor.derived.is_some()).count();
            // A tensor of few lanes may be smaller without a base.
            assert!(derived + 3 >= all.len(), "{codec}, 1 in {rarity}: {derived} of {}", all.len());
            for (n, &route) in routes(pair.index()).iter().enumerate() {
                // The skew decides alignment, and gaps between rows.
                for skew in if stand_in::is_used() { n..n + 1 } else { 0..6 } {
                    let (outcome, outputs) = apply(device, &index, &pair, &memory(&base), Mode::OutOfPlace, route, skew);
                    let case = format!("{codec}, 1 in {rarity}, {route:?}, skew {skew}");
                    outcome.unwrap_or_else(|e| panic!("{case}: {e}"));
                    for (place, found) in outputs {
                        let name = pair.index().tensor(place).name;
                        let expected = &target.iter().find(|(info, _)| info.name == name).unwrap().1;
                        assert!(found == *expected, "{case}: tensor {name}");
                        tensors += 1;
                    }
                    runs += 1;
                }
            }
            // The route of `apply` and `verify`, which also compares digests of bases.
            let base = memory(&base);
            let on_device = Apply::new(&pair).base(&base).on(device);
            on_device.verify().unwrap();
        }
    }
    eprintln!("{tensors} tensors with derived bases right in {runs} runs");
}

#[test]
#[ignore = "needs a CUDA device"]
fn another_base_is_refused_wherever_it_differs() {
    let device = super::device();
    let all = all();
    let (base, pair, _) = pair_of(&all, Codec::Conditioned, 50, Vec::new());
    let index = DeviceIndex::upload(device, pair.index()).unwrap();
    let stream = device.stream().unwrap();
    let mut refused = 0;
    for tensor in pair.index().tensors() {
        let Some((on_device, lanes, _)) = sources_of(&tensor, &memory(&base)) else { continue };
        // A sign, which every form keeps. The last element is checked like the first.
        for element in [0, lanes.len() / on_device.base.dtype.lane_bytes() - 1] {
            let laid = Laid::new(device, pair.index(), &memory(&base), false, 0);
            let binding = laid.bindings.iter().find(|binding| binding.tensor == tensor.place).unwrap();
            let width = on_device.base.dtype.lane_bytes() as u64;
            let byte = binding.base.as_ref().unwrap().slice(element as u64 * width + width - 1, 1).unwrap();
            let mut sign = [0];
            device.read(&byte, &mut sign).unwrap();
            device.write(&byte, &[sign[0] ^ 0x80]).unwrap();
            let plan = prepare(&index, std::slice::from_ref(binding), Mode::OutOfPlace, payloads(device, &pair, Route::Device));
            let error = plan.unwrap().launch(&stream).unwrap().wait();
            // A product with NaN keeps no sign.
            let keeps = on_device.scales.is_none();
            match error {
                Err(error) => assert_eq!(error.rule(), Some(Rule::ChunkBaseSum), "{}", tensor.name),
                Ok(()) => assert!(!keeps, "{} accepted", tensor.name),
            }
            refused += 1;
        }
    }
    assert!(refused > 60, "{refused}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn bindings_without_what_a_form_needs_are_refused() {
    let device = super::device();
    let random = &mut Random(5);
    let all = [quantised(random, BaseForm::Fp8Blocks, Dtype::Bf16, &[130, 256])];
    let (base, pair, target) = pair_of(&all, Codec::Raw, 100, Vec::new());
    let index = DeviceIndex::upload(device, pair.index()).unwrap();
    let (on_device, lanes, scales) = sources_of(&pair.index().tensor(0), &memory(&base)).unwrap();
    assert_eq!((on_device.base.bytes(), scales.len()), (130 * 256, 4 * 2 * 2));
    let memory_of = |bytes: &[u8]| {
        let memory = device.alloc(bytes.len() as u64).unwrap();
        device.write(&memory, bytes).unwrap();
        memory
    };
    let (lanes, scales) = (memory_of(&lanes), memory_of(&scales));
    let output = device.alloc(2 * 130 * 256).unwrap();
    let plan = |binding: Binding, mode| {
        ApplyPlan::new(&index, &[binding], mode, Payloads::Host(pair.blob())).map(|_| ()).map_err(|error| error.to_string())
    };
    let out_of_place = |base: &DeviceSlice| Binding::out_of_place(0, Some(base.clone()), output.clone());
    plan(out_of_place(&lanes).scales(scales.clone(), None), Mode::OutOfPlace).unwrap();
    for (binding, mode, expected) in [
        (out_of_place(&lanes), Mode::OutOfPlace, "has no scales"),
        (out_of_place(&scales).scales(scales.clone(), None), Mode::OutOfPlace, "the base of tensor"),
        (out_of_place(&lanes).scales(scales.slice(0, 12).unwrap(), None), Mode::OutOfPlace, "the memory of scales of tensor"),
        (out_of_place(&lanes).scales(output.slice(0, 16).unwrap(), None), Mode::OutOfPlace, "overlaps the base"),
        (out_of_place(&lanes).formed(), Mode::OutOfPlace, "formed base lanes"),
        (Binding::in_place(0, output.clone()), Mode::InPlace(InPlace::AllChecked), "base of another dtype"),
        (Binding::in_place(0, output.clone()), Mode::InPlace(InPlace::ChunkByChunk), "base of another dtype"),
    ] {
        let error = plan(binding, mode).unwrap_err();
        assert!(error.contains(expected), "{error}: expected {expected}");
    }
    // Lanes that are formed already.
    let formed = memory_of(&formed_of(&pair.index().tensor(0), &memory(&base)).unwrap());
    let stream = device.stream().unwrap();
    let plan = prepare(&index, &[out_of_place(&formed).formed()], Mode::OutOfPlace, payloads(device, &pair, Route::Device));
    plan.unwrap().launch(&stream).unwrap().wait().unwrap();
    let mut found = vec![0; target[0].1.len()];
    device.read(&output, &mut found).unwrap();
    assert!(found == target[0].1);
}

/// Slices of ranks, whose base is a slice of the base tensor and of its scales, in memory with gaps.
#[test]
#[ignore = "needs a CUDA device"]
fn slices_of_ranks() {
    let device = super::device();
    let random = &mut Random(6);
    let all = [
        cast(random, Dtype::F32, Dtype::Bf16, &[64, 160]),
        cast(random, Dtype::Bf16, Dtype::F32, &[64, 160]),
        quantised(random, BaseForm::Fp8Blocks, Dtype::Bf16, &[256, 384]),
        quantised(random, BaseForm::Mxfp4, Dtype::Bf16, &[4, 40, 128]),
        quantised(random, BaseForm::Mxfp4Transposed, Dtype::Bf16, &[2, 64, 48]),
    ];
    // The origins of the parts of each tensor in its last dimension but one and in its last.
    let cut = |given: &Given, dim: usize, at: u64| {
        let (mut low, mut high) = (Rectangle::whole(&given.formed.0.shape), Rectangle::whole(&given.formed.0.shape));
        low.extent[dim] = at;
        (high.origin[dim], high.extent[dim]) = (at, high.extent[dim] - at);
        vec![low, high]
    };
    for dims in [[(0, 16), (0, 40), (0, 128), (1, 8), (1, 32)], [(1, 96), (1, 32), (1, 256), (2, 32), (2, 16)]] {
        let parts: Vec<_> = all.iter().zip(dims).map(|(given, (dim, at))| cut(given, dim, at)).collect();
        let cuts = all.iter().zip(&parts).map(|(given, parts)| (given.formed.0.name.clone(), parts.clone())).collect();
        let (base, pair, target) = pair_of(&all, Codec::Conditioned, 60, cuts);
        let base = memory(&base);
        let index = DeviceIndex::upload(device, pair.index()).unwrap();
        // All of the base, in rows with a gap of 16 bytes.
        let mut held = Vec::new();
        for (i, info) in base.tensors().iter().enumerate() {
            let row = info.bytes() as usize / info.shape[..info.shape.len() - 1].iter().product::<u64>() as usize;
            let mut bytes = vec![0; info.bytes() as usize];
            base.read(i, 0, &mut bytes).unwrap();
            let mut rows: Vec<u8> = bytes.chunks(row).flat_map(|row| [row, &[0xC5; 16]].concat()).collect();
            rows.truncate(rows.len() - 16);
            let memory = device.alloc(rows.len() as u64).unwrap();
            device.write(&memory, &rows).unwrap();
            held.push((info.clone(), memory, row as u64 + 16));
        }
        let bases = held
            .iter()
            .map(|(info, memory, pitch)| TensorSlice::new(&info.name, Rectangle::whole(&info.shape), memory.clone()).pitch(*pitch));
        let bases: Vec<_> = bases.collect();
        for rank in 0..2 {
            let slice = |(given, parts): (&'_ Given, &Vec<Rectangle>)| {
                let bytes = given.formed.0.dtype.lanes(&parts[rank].extent).unwrap() * given.formed.0.dtype.lane_bytes() as u64;
                (given.formed.0.clone(), parts[rank].clone(), device.alloc(bytes).unwrap())
            };
            let outputs: Vec<_> = all.iter().zip(&parts).map(slice).collect();
            let slices = outputs.iter().map(|(info, part, memory)| TensorSlice::new(&info.name, part.clone(), memory.clone()));
            let slices: Vec<_> = slices.collect();
            let bindings = match TensorSlice::out_of_place(&index, &slices, &bases) {
                Ok(bindings) => bindings,
                // Rows of a base with gaps whose part is not at one distance.
                Err(Error::InvalidArgument(why)) if why.contains("two distances") => continue,
                Err(e) => panic!("{e}"),
            };
            let stream = device.stream().unwrap();
            prepare(&index, &bindings, Mode::OutOfPlace, Payloads::Host(pair.blob()))
                .unwrap()
                .launch(&stream)
                .unwrap()
                .wait()
                .unwrap();
            for ((info, part, memory), (_, expected)) in outputs.iter().zip(&target) {
                let runs = StridedLayout::of_rectangle(info.dtype.bits(), &info.shape, None, &part.origin, &part.extent);
                let (mut found, mut right) = (vec![0; memory.bytes() as usize], Vec::new());
                device.read(memory, &mut found).unwrap();
                let copy = |at: u64, range: std::ops::Range<usize>| {
                    right.extend_from_slice(&expected[at as usize..][..range.len()]);
                    Ok::<_, Error>(())
                };
                runs.try_each(0, found.len(), copy).unwrap();
                assert!(found == right, "rank {rank}: part {part} of {}", info.name);
            }
        }
    }
}
