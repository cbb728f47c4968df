//! Speed of derived bases on a device, beside bases of kind `same`, if `TPDE_PAIRS` names a folder with `base` and `rl20`:
//!
//! ```text
//! TPDE_PAIRS=FOLDER cargo test --package tpde-cuda --all-features --lib derived_speed -- --ignored --nocapture
//! ```

use super::super::{Application, ApplyPlan, Binding, DeviceIndex, Mode, Payloads};
use super::derived::{Given, given, sources_of};
use std::path::PathBuf;
use tpde::{Checkpoint, Codec, Encode, EncodeOptions, MemoryCheckpoint, Pair, SafetensorsCheckpoint, TensorInfo};
use tpde_core::derived::BaseForm;
use tpde_core::lane::Dtype;

/// Number of copies of each tensor.
const COPIES: usize = 24;
const RUNS: usize = 15;
/// The default, and that for layers of `tpde.nn`.
const CHUNK_LANES: [u64; 2] = [1 << 20, 65_536];

/// A matrix of BF16, and the same after some optimizer steps.
struct Matrix {
    shape: [u64; 2],
    base: Vec<u16>,
    target: Vec<u16>,
}

fn matrices(folder: &std::path::Path) -> Option<Vec<Matrix>> {
    let open = |name: &str| SafetensorsCheckpoint::open(folder.join(format!("{name}.safetensors"))).ok();
    let (base, target) = (open("base")?, open("rl20")?);
    let read = |of: &SafetensorsCheckpoint, i: usize| {
        let mut bytes = vec![0; of.tensors()[i].bytes() as usize];
        of.read(i, 0, &mut bytes).unwrap();
        bytes.as_chunks::<2>().0.iter().map(|&lane| u16::from_le_bytes(lane)).collect::<Vec<_>>()
    };
    let fits =
        |info: &TensorInfo| info.dtype == Dtype::Bf16 && info.shape.len() == 2 && info.shape.iter().all(|dim| dim % 128 == 0);
    let matrix = |(i, info): (usize, &TensorInfo)| {
        let there = target.find(&info.name)?;
        Some(Matrix { shape: [info.shape[0], info.shape[1]], base: read(&base, i), target: read(&target, there) })
    };
    Some(base.tensors().iter().enumerate().filter(|(_, info)| fits(info)).filter_map(matrix).collect())
}

fn bytes_of<T, const N: usize>(lanes: &[T], bytes: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
    lanes.iter().flat_map(bytes).collect()
}

fn owned(name: &str, dtype: Dtype, shape: &[u64], bytes: Vec<u8>) -> (TensorInfo, Vec<u8>) {
    (TensorInfo { name: name.into(), dtype, shape: shape.to_vec() }, bytes)
}

/// A matrix as FP8, cut off after three bits of the mantissa, with a scale per block.
fn fp8(matrix: &Matrix) -> Given {
    let [rows, columns] = matrix.shape;
    let across = columns / 128;
    let block = |i: usize| (i as u64 / columns / 128 * across + i as u64 % columns / 128) as usize;
    let mut largest = vec![1u16; (rows / 128 * across) as usize];
    matrix.base.iter().enumerate().for_each(|(i, lane)| largest[block(i)] = largest[block(i)].max(lane >> 7 & 0xFF));
    let lane = |(i, lane): (usize, &u16)| {
        let exponent = 15 + i32::from(lane >> 7 & 0xFF) - i32::from(largest[block(i)]);
        let magnitude = if exponent > 0 { ((exponent as u8) << 3 | (lane >> 4 & 7) as u8).min(0x7E) } else { 0 };
        magnitude | (lane >> 8 & 0x80) as u8
    };
    let base = matrix.base.iter().enumerate().map(lane).collect();
    let scales = bytes_of(&largest, |&largest| (u32::from(largest.saturating_sub(8)) << 23).to_le_bytes());
    let base =
        vec![owned("t", Dtype::F8E4m3, &matrix.shape, base), owned("t_scale_inv", Dtype::F32, &[rows / 128, across], scales)];
    given(base, "t", Dtype::Bf16, &matrix.shape, Some(BaseForm::Fp8Blocks))
}

/// A matrix as MXFP4, cut off after one bit of the mantissa.
fn mxfp4(matrix: &Matrix, form: BaseForm) -> Given {
    let [rows, columns] = matrix.shape;
    let (mut blocks, mut scales) = (Vec::new(), Vec::new());
    for block in matrix.base.chunks(32) {
        let largest = block.iter().map(|lane| lane >> 7 & 0xFF).max().unwrap_or(0).max(2);
        scales.push((largest - 2) as u8);
        let nibble = |lane: u16| {
            let exponent = 3 + i32::from(lane >> 7 & 0xFF) - i32::from(largest);
            (if exponent > 0 { (exponent as u8) << 1 | (lane >> 6 & 1) as u8 } else { 0 }) | (lane >> 12 & 8) as u8
        };
        blocks.extend(block.chunks(2).map(|pair| nibble(pair[0]) | nibble(pair[1]) << 4));
    }
    // A square matrix would have both forms, so the experts of one are matrices, and those of the other have three dims.
    let (shape, of_scales) = match form {
        BaseForm::Mxfp4 => (vec![rows, columns], vec![rows, columns / 32]),
        _ => (vec![1, columns, rows], vec![1, rows, columns / 32]),
    };
    let base = vec![
        owned("t_blocks", Dtype::U8, &[&of_scales[..], &[16]].concat(), blocks),
        owned("t_scales", Dtype::U8, &of_scales, scales),
    ];
    given(base, "t", Dtype::Bf16, &shape, Some(form))
}

/// Copies of tensors, under names of their own.
fn copies(of: &[(TensorInfo, Vec<u8>)]) -> Vec<(TensorInfo, &[u8])> {
    let named = |copy: usize, info: &TensorInfo| TensorInfo { name: format!("{copy}.{}", info.name), ..info.clone() };
    (0..COPIES).flat_map(|copy| of.iter().map(move |(info, bytes)| (named(copy, info), &bytes[..]))).collect()
}

/// Encodes copies of the tensors, decodes them on the device, and prints the speed. Returns it in bytes of the target per second.
fn measure(what: &str, base: &[(TensorInfo, Vec<u8>)], target: &[(TensorInfo, Vec<u8>)]) -> [f64; 2] {
    CHUNK_LANES.map(|chunk_lanes| measure_with(chunk_lanes, what, base, target))
}

fn measure_with(chunk_lanes: u64, what: &str, base: &[(TensorInfo, Vec<u8>)], target: &[(TensorInfo, Vec<u8>)]) -> f64 {
    let device = super::device();
    let [base, target] = [base, target].map(|tensors| MemoryCheckpoint::new(copies(tensors)).unwrap());
    let options = EncodeOptions::default().codec(Codec::Conditioned).chunk_lanes(chunk_lanes);
    let pair: Pair<Vec<u8>> = Encode::new(&target).base(&base).options(options).to_memory().unwrap().0;
    let index = DeviceIndex::upload(device, pair.index()).unwrap();
    let put = |bytes: &[u8]| {
        let memory = device.alloc(bytes.len() as u64).unwrap();
        let mut pinned = device.pinned(bytes.len()).unwrap();
        pinned.copy_from_slice(bytes);
        device.write(&memory, &pinned).unwrap();
        memory
    };
    let read = |name: &str| {
        let place = base.find(name).unwrap();
        let mut bytes = vec![0; base.tensors()[place].bytes() as usize];
        base.read(place, 0, &mut bytes).unwrap();
        bytes
    };
    let bind = |tensor: tpde_core::index::Tensor<'_>| {
        let output = device.alloc(tensor.bytes()).unwrap();
        match sources_of(&tensor, &base) {
            None => Binding::out_of_place(tensor.place, Some(put(&read(tensor.base_name))), output),
            Some((of, lanes, scales)) => {
                let binding = Binding::out_of_place(tensor.place, Some(put(&lanes)), output);
                if of.scales.is_some() { binding.scales(put(&scales), None) } else { binding }
            }
        }
    };
    let bindings: Vec<_> = pair.index().tensors().map(bind).collect();
    let blob = put(pair.blob());
    let payloads = || Payloads::Device(blob.clone());
    let stream = device.stream().unwrap();
    let plan = || ApplyPlan::new(&index, &bindings, Mode::OutOfPlace, payloads()).unwrap();
    // Everything is compared once: sums, digests of payloads and of targets.
    Application::prepare(plan()).unwrap().launch(&stream).unwrap().wait().unwrap();
    let application = Application::prepare(plan().digests(false).payload_digests(false)).unwrap();
    let mut seconds: Vec<f64> = (0..RUNS)
        .map(|_| {
            let start = stream.record().unwrap();
            let pending = application.launch(&stream).unwrap();
            let end = stream.record().unwrap();
            pending.wait().unwrap();
            end.wait().unwrap();
            end.since(&start).unwrap()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    let bytes: u64 = pair.index().tensors().map(|tensor| tensor.bytes()).sum();
    let speed = bytes as f64 / seconds[RUNS / 2];
    let kind = pair.index().tensors().next().unwrap().base_kind;
    eprintln!(
        "{what:32} {chunk_lanes:7} lanes per chunk, kind {kind}, ratio {:.1}, {:.2} GB of target: median {:.0} GB/s, best {:.0}",
        bytes as f64 / pair.blob().len().max(1) as f64,
        bytes as f64 / 1e9,
        speed / 1e9,
        bytes as f64 / seconds[0] / 1e9
    );
    speed
}

#[test]
#[ignore = "needs a CUDA device"]
fn derived_bases_beside_kind_same() {
    let Some(matrices) = std::env::var_os("TPDE_PAIRS").and_then(|folder| matrices(&PathBuf::from(folder))) else {
        eprintln!("SKIPPED speeds of derived bases: TPDE_PAIRS names no folder with base and rl20");
        return;
    };
    let named = |dtype: Dtype, bytes: &dyn Fn(&Matrix) -> Vec<u8>| {
        let of = |(n, matrix): (usize, &Matrix)| owned(&n.to_string(), dtype, &matrix.shape, bytes(matrix));
        matrices.iter().enumerate().map(of).collect::<Vec<_>>()
    };
    let bf16 = |lanes: &[u16]| bytes_of(lanes, |lane| lane.to_le_bytes());
    let f32 = |lanes: &[u16]| bytes_of(lanes, |lane| (u32::from(*lane) << 16).to_le_bytes());
    let compare = |what: &str, derived: [f64; 2], same: [f64; 2]| {
        eprintln!("{what:32} {:.2} and {:.2} of kind same", derived[0] / same[0], derived[1] / same[1]);
    };

    let (base, target) = (named(Dtype::Bf16, &|m| bf16(&m.base)), named(Dtype::Bf16, &|m| bf16(&m.target)));
    let same = measure("BF16 over BF16", &base, &target);
    let wide = named(Dtype::F32, &|m| f32(&m.base));
    compare("BF16 over F32", measure("BF16 over F32", &wide, &target), same);
    let wide_target = named(Dtype::F32, &|m| f32(&m.target));
    let same_wide = measure("F32 over F32", &wide, &wide_target);
    compare("F32 over BF16", measure("F32 over BF16", &base, &wide_target), same_wide);
    let copied = measure("F32 over F32, equal", &wide, &wide);
    compare("F32 over BF16, upcast", measure("F32 over BF16, upcast", &base, &wide), copied);
    drop((base, target, wide, wide_target));

    type Make = fn(&Matrix) -> Given;
    let forms: [(&str, Make); 3] = [
        ("BF16 over FP8 blocks", fp8),
        ("BF16 over MXFP4", |matrix| mxfp4(matrix, BaseForm::Mxfp4)),
        ("BF16 over MXFP4, transposed", |matrix| mxfp4(matrix, BaseForm::Mxfp4Transposed)),
    ];
    for (what, make) in forms {
        let (mut base, mut image, mut target) = (Vec::new(), Vec::new(), Vec::new());
        for (n, matrix) in matrices.iter().enumerate() {
            let given = make(matrix);
            let rename = |(info, bytes): (TensorInfo, Vec<u8>)| (TensorInfo { name: format!("{n}.{}", info.name), ..info }, bytes);
            let steps = matrix.base.iter().zip(&matrix.target).map(|(base, target)| target.wrapping_sub(*base));
            let lanes = given.formed.1.as_chunks::<2>().0.iter().map(|&lane| u16::from_le_bytes(lane));
            let moved = lanes.zip(steps).flat_map(|(lane, step)| lane.wrapping_add(step).to_le_bytes()).collect();
            target.push(rename((given.formed.0.clone(), moved)));
            image.push(rename(given.formed));
            base.extend(given.base.into_iter().map(rename));
        }
        let same = measure(&format!("{what}: over its image"), &image, &target);
        compare(what, measure(what, &base, &target), same);
    }
}
