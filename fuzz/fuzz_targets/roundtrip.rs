//! Any two checkpoints and any options: every way of applying the pair restores the target.

#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;
use tpde::{
    Apply, BaseKind, Codec, CodecChoice, Dtype, Encode, EncodeOptions, Favor, InPlace, Layout, MemoryCheckpoint, TensorInfo,
    TensorMut,
};
use tpde_fuzz::derived::{Origin, derived};
use tpde_fuzz::{base_lanes, one_thread};

#[derive(Arbitrary, Debug)]
struct Input {
    tensors: Vec<Tensor>,
    codec: u8,
    layout: Option<Layout>,
    chunk_lanes_log2: u8,
    range: (u16, u16),
}

#[derive(Arbitrary, Debug)]
struct Tensor {
    dtype: Dtype,
    shape: Shape,
    base: Base,
    base_seed: u8,
    edits: Vec<(u16, Edit)>,
}

#[derive(Arbitrary, Debug)]
enum Shape {
    Scalar,
    Vector(u16),
    Rows(u8, u8),
    Empty(u64),
}

#[derive(Arbitrary, Debug, Clone, Copy)]
enum Base {
    None,
    OtherDtype,
    Same,
    Renamed,
    /// The base tensor of the first tensor, whose dtype may differ from this tensor's.
    Tied,
    Rows(u8),
    Derived(Origin),
}

/// A change to one lane or several.
#[derive(Arbitrary, Debug)]
enum Edit {
    Step(i8),
    Bits([u8; 8]),
    /// XORs the first byte of this many lanes with the second value, from the edited lane on.
    Run(u16, u8),
}

fuzz_target!(init: one_thread(), |data: &[u8]| {
    if let Ok(mut input) = Input::arbitrary_take_rest(Unstructured::new(data)) {
        input.tensors.truncate(4);
        check(&input);
    }
});

/// The tensor's shape. The last dim fills whole bytes, and dims are small enough for fast inputs.
fn shape(tensor: &Tensor) -> Vec<u64> {
    let multiple = |n: u64| n.next_multiple_of(8 / tensor.dtype.bits().min(8) * 2);
    let packed = tensor.dtype.bits() < 8;
    match tensor.shape {
        Shape::Scalar if packed => vec![4],
        Shape::Scalar => vec![],
        Shape::Vector(n) if packed => vec![multiple(u64::from(n) % 9000) * 2],
        Shape::Vector(n) => vec![u64::from(n) % 9000],
        Shape::Rows(a, b) => vec![u64::from(a) % 80, u64::from(b) % 80 * if packed { 4 } else { 1 }],
        Shape::Empty(n) => vec![n, 0, 3],
    }
}

fn target_of(tensor: &Tensor, dtype: Dtype, base: &[u8], size: usize) -> Vec<u8> {
    let mut target = base.to_vec();
    target.resize(size, tensor.base_seed);
    let width = dtype.lane_bytes();
    let lanes = size / width;
    for (at, edit) in tensor.edits.iter().filter(|_| lanes > 0) {
        let at = usize::from(*at) % lanes;
        let lane = at * width..(at + 1) * width;
        match edit {
            Edit::Step(step) => target[lane][0] = target[at * width].wrapping_add_signed(*step),
            Edit::Bits(bits) => target[lane].copy_from_slice(&bits[..width]),
            Edit::Run(count, xor) => {
                let end = lanes.min(at + usize::from(*count)) * width;
                target[lane.start..end].iter_mut().step_by(width).for_each(|byte| *byte ^= xor);
            }
        }
    }
    target
}

fn check(input: &Input) {
    let mut bases: Vec<(TensorInfo, &[u8])> = Vec::new();
    let mut targets: Vec<(TensorInfo, Vec<u8>)> = Vec::new();
    let mut renamed = BTreeMap::new();
    for (i, tensor) in input.tensors.iter().enumerate() {
        let info = TensorInfo { name: format!("t{i}"), dtype: tensor.dtype, shape: shape(tensor) };
        if let Base::Derived(origin) = tensor.base
            && let Some((info, of_base, formed)) = derived(origin, info.clone(), tensor.base_seed)
        {
            let tensor = target_of(tensor, info.dtype, &formed, info.bytes() as usize);
            targets.push((info, tensor));
            bases.extend(of_base);
            continue;
        }
        let mut base = info.clone();
        match tensor.base {
            Base::OtherDtype => base.dtype = if base.dtype == Dtype::U8 { Dtype::I8 } else { Dtype::U8 },
            Base::Renamed => base.name = format!("old{i}"),
            Base::Rows(n) if !base.shape.is_empty() => {
                base.shape[0] = u64::from(n) % 100 * if tensor.dtype.bits() < 8 { 4 } else { 1 }
            }
            _ => {}
        }
        let base_bytes = base_lanes(tensor.base_seed, base.bytes() as usize);
        targets.push((info.clone(), target_of(tensor, info.dtype, base_bytes, info.bytes() as usize)));
        match tensor.base {
            Base::Tied if i > 0 && bases.first().is_some_and(|(first, _)| first.name == "t0") => {
                renamed.insert(info.name, "t0".to_owned());
            }
            Base::None | Base::Tied | Base::Derived(_) => {}
            _ => {
                if let Base::Renamed = tensor.base {
                    renamed.insert(info.name, base.name.clone());
                }
                bases.push((base, base_bytes));
            }
        }
    }
    let base = MemoryCheckpoint::new(bases).expect("sizes match");
    let target = MemoryCheckpoint::new(targets.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).expect("sizes match");
    let codec = CodecChoice::ALL[usize::from(input.codec) % CodecChoice::ALL.len()];
    let layout = input.layout.filter(|_| codec == Codec::Zstd.into());
    let favor = Favor::ALL[usize::from(input.chunk_lanes_log2 / 3) % Favor::ALL.len()];
    let chunk_lanes = 1 << (12 + input.chunk_lanes_log2 % 3);
    let options = EncodeOptions::default().codec(codec).layout(layout).chunk_lanes(chunk_lanes).favor(favor).renamed(renamed);
    let (pair, report) = Encode::new(&target).base(&base).options(options).to_memory().expect("valid options");
    assert_eq!(report.tensors.len(), targets.len());
    pair.verify().expect("undamaged payloads");

    let apply = Apply::new(&pair).base(&base);
    let mut outputs: Vec<_> = targets.iter().map(|(_, bytes)| vec![0xA5; bytes.len()]).collect();
    let mut slices: Vec<_> = outputs.iter_mut().map(|output| &mut output[..]).collect();
    apply.to_buffers(&mut slices).expect("the base of the pair");
    for ((info, bytes), output) in targets.iter().zip(&outputs) {
        assert!(bytes == output, "{info:?}");
        // Eight elements fill whole bytes in every dtype.
        let elements = info.bytes() * 8 / info.dtype.bits();
        let (a, b) = (u64::from(input.range.0) % (elements + 1), u64::from(input.range.1) % (elements + 1));
        let (from, to) = (a.min(b) / 8 * 8, a.max(b) / 8 * 8);
        let byte = |element: u64| (element * info.dtype.bits() / 8) as usize;
        let range = apply.range(&info.name, from..to).expect("a range of the tensor");
        assert!(range == bytes[byte(from)..byte(to)]);
    }

    for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
        let in_place = pair.index().tensors().filter(|tensor| matches!(tensor.base_kind, BaseKind::None | BaseKind::Same));
        let mut lanes: Vec<_> = in_place
            .map(|tensor| {
                use tpde::Checkpoint;
                let place = base.find(tensor.base_name).filter(|_| tensor.base_kind == BaseKind::Same);
                let bytes = place.and_then(|place| base.in_place(place, 0, tensor.bytes() as usize));
                (tensor.name, bytes.map_or_else(|| vec![0x5A; tensor.bytes() as usize], <[u8]>::to_vec))
            })
            .collect();
        let tensors: Vec<_> = lanes.iter_mut().map(|(name, bytes)| TensorMut { name, bytes }).collect();
        Apply::new(&pair).in_place(tensors, mode).expect("the base of the pair");
        for (name, lanes) in &lanes {
            assert!(targets.iter().any(|(info, bytes)| info.name == *name && bytes == lanes), "{name}");
        }
    }
}
