//! Slices of tensors on a device: what the ranks of a distributed job hold.

use super::super::{
    Application, ApplyPlan, Binding, Device, DeviceCheckpoint, DeviceIndex, DeviceSlice, Mode, Payloads, Rows, TensorSlice,
};
use super::generated::{Random, lanes};
use super::laid::{Route, payloads, read, written};
use super::stand_in;
use super::vectors::MODES;
use tpde::{Apply, Codec, CodecChoice, Encode, EncodeOptions, InPlace, MemoryCheckpoint, Pair, PayloadDigests, TensorInfo};
use tpde_core::error::{Error, Result};
use tpde_core::lane::Dtype;
use tpde_core::rectangle::Rectangle;

const HIDDEN: usize = 192;
const CANARY: u8 = 0xC5;

/// A tensor of the model, and the dimension in which ranks cut it.
struct Weight {
    info: TensorInfo,
    base: Vec<u8>,
    target: Vec<u8>,
    dim: Option<usize>,
}

/// A small model with the tensors of Llama.
struct Model(Vec<Weight>);

impl Model {
    fn new(layers: usize) -> Self {
        let random = &mut Random(17);
        let mut weights = Vec::new();
        let mut add = |name: String, shape: &[usize], dim| {
            let (base, target) = lanes(random, Dtype::Bf16, shape.iter().product(), 12);
            let shape = shape.iter().map(|&dim| dim as u64).collect();
            weights.push(Weight { info: TensorInfo { name, dtype: Dtype::Bf16, shape }, base, target, dim });
        };
        add("embed_tokens".into(), &[200, HIDDEN], Some(0));
        for layer in 0..layers {
            let mut add = |name: &str, shape: &[usize], dim| add(format!("layers.{layer}.{name}"), shape, dim);
            add("q_proj", &[HIDDEN, HIDDEN], Some(0));
            add("k_proj", &[96, HIDDEN], Some(0));
            add("v_proj", &[96, HIDDEN], Some(0));
            add("o_proj", &[HIDDEN, HIDDEN], Some(1));
            add("gate_proj", &[320, HIDDEN], Some(0));
            add("up_proj", &[320, HIDDEN], Some(0));
            add("down_proj", &[HIDDEN, 320], Some(1));
            add("norm", &[HIDDEN], None);
        }
        Self(weights)
    }

    fn weight(&self, name: &str) -> &Weight {
        self.0.iter().find(|weight| weight.info.name == name).unwrap()
    }

    /// A pair whose tensors are cut for `ranks` ranks.
    fn pair(&self, codec: CodecChoice, ranks: u64) -> Pair<Vec<u8>> {
        let checkpoint = |bytes: fn(&Weight) -> &[u8]| {
            MemoryCheckpoint::new(self.0.iter().map(|weight| (weight.info.clone(), bytes(weight)))).unwrap()
        };
        let cuts = self.0.iter().filter(|weight| weight.dim.is_some() && ranks > 1).map(|weight| {
            let parts = (0..ranks).map(|rank| weight.part(rank, ranks)).collect();
            (weight.info.name.clone(), parts)
        });
        let options = EncodeOptions::default().codec(codec).chunk_lanes(4096).payload_digests(true).cuts(cuts);
        let (base, target) = (checkpoint(|weight| &weight.base), checkpoint(|weight| &weight.target));
        Encode::new(&target).base(&base).options(options).to_memory().unwrap().0
    }
}

impl Weight {
    /// What a rank holds.
    fn part(&self, rank: u64, ranks: u64) -> Rectangle {
        let mut part = Rectangle::whole(&self.info.shape);
        if let Some(dim) = self.dim {
            part.extent[dim] /= ranks;
            part.origin[dim] = rank * part.extent[dim];
        }
        part
    }

    /// Calls `each` with the range of the tensor's bytes of each row of a part.
    fn rows(&self, part: &Rectangle) -> Vec<std::ops::Range<usize>> {
        let columns = *self.info.shape.last().unwrap() as usize;
        let (first, count, start, width) = match part.extent[..] {
            [width] => (0, 1, part.origin[0], width),
            [rows, width] => (part.origin[0], rows, part.origin[1], width),
            _ => unreachable!("tensors have one or two dimensions"),
        };
        let row = |row: u64| 2 * (row as usize * columns + start as usize);
        (first..first + count).map(|n| row(n)..row(n) + 2 * width as usize).collect()
    }
}

/// Memory of a rank: parameters between canaries, with gaps between their rows, as they are before and after.
#[derive(Default)]
struct Memory {
    before: Vec<u8>,
    after: Vec<u8>,
    /// Name, rectangle, first byte, size and pitch of each slice.
    slices: Vec<(String, Rectangle, usize, usize, usize)>,
}

impl Memory {
    /// Adds parameters, each a row of tensors one below the other, or `beside` each other in the rows of one matrix. `padding` is
    /// the gap between the rows of the matrix in lanes.
    fn add(&mut self, model: &Model, names: &[&str], rank: u64, ranks: u64, beside: bool, padding: usize) {
        self.before.resize(self.before.len().next_multiple_of(16) + 48, CANARY);
        let parts: Vec<_> = names.iter().map(|name| (model.weight(name), model.weight(name).part(rank, ranks))).collect();
        let width = |part: &Rectangle| 2 * *part.extent.last().unwrap() as usize;
        let row = if beside { parts.iter().map(|(_, part)| width(part)).sum() } else { width(&parts[0].1) };
        let pitch = row + 2 * padding;
        let mut at = self.before.len();
        let end = |at: usize, rows: usize| at + rows * pitch;
        self.after.resize(self.before.len(), CANARY);
        for (weight, part) in parts {
            let rows = weight.rows(&part);
            let bytes = (rows.len() - 1) * pitch + width(&part);
            self.slices.push((weight.info.name.clone(), part.clone(), at, bytes, pitch));
            for image in [&mut self.before, &mut self.after] {
                let needed = image.len().max(end(at, rows.len()));
                image.resize(needed, CANARY);
            }
            for (n, range) in rows.iter().enumerate() {
                let to = at + n * pitch..at + n * pitch + width(&part);
                self.before[to.clone()].copy_from_slice(&weight.base[range.clone()]);
                self.after[to].copy_from_slice(&weight.target[range.clone()]);
            }
            at = if beside { at + width(&part) } else { end(at, rows.len()) };
        }
    }

    /// What a rank of an engine has: `q`, `k` and `v` in one parameter, `gate` and `up` in another.
    fn of_rank(model: &Model, rank: u64, ranks: u64, padding: usize) -> Self {
        let mut memory = Self::default();
        memory.add(model, &["embed_tokens"], rank, ranks, false, 0);
        for layer in 0.. {
            if !model.0.iter().any(|weight| weight.info.name.starts_with(&format!("layers.{layer}."))) {
                break;
            }
            let name = |name: &str| format!("layers.{layer}.{name}");
            let names = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj", "down_proj", "norm"].map(name);
            let [q, k, v, gate, up, o, down, norm] = names.each_ref().map(String::as_str);
            memory.add(model, &[q, k, v], rank, ranks, false, padding);
            memory.add(model, &[gate, up], rank, ranks, true, padding);
            memory.add(model, &[o], rank, ranks, false, 8 * padding);
            memory.add(model, &[down], rank, ranks, false, padding / 3);
            memory.add(model, &[norm], rank, ranks, false, 0);
        }
        for image in [&mut memory.before, &mut memory.after] {
            image.resize(image.len() + 100, CANARY);
        }
        memory
    }

    fn on<'a>(&'a self, memory: &DeviceSlice) -> Vec<TensorSlice<'a>> {
        let slice = |(name, part, at, bytes, pitch): &'a (String, Rectangle, usize, usize, usize)| {
            let slice = TensorSlice::new(name, part.clone(), memory.slice(*at as u64, *bytes as u64).unwrap());
            if part.extent.len() == 2 { slice.pitch(*pitch as u64) } else { slice }
        };
        self.slices.iter().map(slice).collect()
    }
}

fn first_difference(found: &[u8], expected: &[u8]) -> Option<usize> {
    assert_eq!(found.len(), expected.len());
    (0..found.len()).find(|&i| found[i] != expected[i])
}

fn launch(device: &Device, index: &DeviceIndex, tensors: &[Binding], mode: Mode, payloads: Payloads<'_>) -> Result<PayloadDigests> {
    let application = Application::prepare(ApplyPlan::new(index, tensors, mode, payloads)?)?;
    application.launch(&device.stream()?)?.wait()?;
    Ok(application.payload_digests())
}

/// All slices of a rank in one launch: fused rows, tensors beside each other, and columns, with gaps of several sizes.
#[test]
#[ignore = "needs a CUDA device"]
fn the_slices_of_a_rank_are_changed_in_one_launch() {
    let device = super::device();
    let model = Model::new(if stand_in::is_used() { 1 } else { 4 });
    let mut launches = 0;
    // A pair cut for as many ranks, and for more, so that several parts tile a slice.
    for (codec, cut, ranks) in [(CodecChoice::Device, 2, 2), (CodecChoice::Auto, 4, 2), (Codec::Raw.into(), 2, 1)] {
        let pair = model.pair(codec, cut);
        let index = DeviceIndex::upload(device, pair.index()).unwrap();
        let has_frames = pair.index().tensors().any(|tensor| tensor.codec == Codec::Zstd);
        for rank in 0..ranks {
            // No gaps; gaps of whole pieces of 16 bytes; other gaps.
            for (padding, mode) in
                [0, 24, 5].into_iter().zip(MODES).chain([0, 24, 5].into_iter().zip([MODES[1], MODES[2], MODES[1]]))
            {
                let held = Memory::of_rank(&model, rank, ranks, padding);
                let memory = written(device, &held.before);
                let route = if has_frames || launches % 2 == 0 { Route::Host } else { Route::Device };
                let slices = held.on(&memory);
                let tensors = match mode {
                    Mode::InPlace(_) => TensorSlice::in_place(&index, &slices),
                    // The base has other gaps.
                    Mode::OutOfPlace => {
                        let base = Memory::of_rank(&model, rank, ranks, [7, 0, 16][rank as usize]);
                        TensorSlice::out_of_place(&index, &slices, &base.on(&written(device, &base.before)))
                    }
                }
                .unwrap();
                assert!(tensors.len() >= slices.len());
                let digests = launch(device, &index, &tensors, mode, payloads(device, &pair, route)).unwrap();
                assert_eq!(digests == PayloadDigests::All, ranks == 1, "{digests:?}");
                let told = format!("{mode:?}, {cut} parts, rank {rank} of {ranks}, padding {padding}");
                assert_eq!(first_difference(&read(device, &memory), &held.after), None, "{told}");
                launches += 1;
            }
        }
    }
    eprintln!("{launches} launches changed all slices of a rank, canaries whole");
}

/// In place, a bad payload leaves all slices as they were, with their gaps.
#[test]
#[ignore = "needs a CUDA device"]
fn a_bad_payload_leaves_slices_untouched() {
    let device = super::device();
    let model = Model::new(1);
    let pair = model.pair(Codec::Conditioned.into(), 2);
    let index = DeviceIndex::upload(device, pair.index()).unwrap();
    let held = Memory::of_rank(&model, 1, 2, 5);
    let memory = written(device, &held.before);
    let tensors = TensorSlice::in_place(&index, &held.on(&memory)).unwrap();
    let last = index.payloads_of(tensors.iter().map(|binding| binding.tensor).max().unwrap()).unwrap();
    let mut blob = pair.blob().clone();
    blob[last.end as usize - 20] ^= 1;
    let bad = Payloads::Host(&blob);
    let error = launch(device, &index, &tensors, Mode::InPlace(InPlace::AllChecked), bad.clone()).unwrap_err();
    assert!(matches!(error, Error::Invalid(_)), "{error}");
    assert_eq!(first_difference(&read(device, &memory), &held.before), None);
    let error = launch(device, &index, &tensors, Mode::InPlace(InPlace::ChunkByChunk), bad).unwrap_err();
    let Error::Poisoned { written, total, .. } = &error else { panic!("{error}") };
    assert_eq!(written.len() as u32 + 1, *total);
}

/// A tensor with more rows than its base, and a tensor without a base, in memory with gaps.
#[test]
#[ignore = "needs a CUDA device"]
fn whole_tensors_have_gaps_between_rows() {
    let device = super::device();
    let info = |name: &str, rows: u64| TensorInfo { name: name.into(), dtype: Dtype::F32, shape: vec![rows, 100] };
    let (old, new) = lanes(&mut Random(5), Dtype::F32, 9000, 7);
    let base = MemoryCheckpoint::new([(info("longer", 60), &old[..60 * 400])]).unwrap();
    let target = MemoryCheckpoint::new([(info("longer", 90), &new[..]), (info("new", 90), &new[..])]).unwrap();
    let options = EncodeOptions::default().codec(CodecChoice::Device).chunk_lanes(4096);
    let (pair, _) = Encode::new(&target).base(&base).options(options).to_memory().unwrap();
    let index = DeviceIndex::upload(device, pair.index()).unwrap();
    for (pitch, base_pitch) in [(416, 400), (404, 432), (400, 408)] {
        let image = |rows: &[u8], count: usize, pitch: usize| {
            let mut image = vec![CANARY; (count - 1) * pitch + 400];
            rows.chunks(400).take(count).enumerate().for_each(|(n, row)| image[n * pitch..][..400].copy_from_slice(row));
            image
        };
        let poison = vec![0xA5; new.len()];
        let outputs = [(); 2].map(|()| written(device, &image(&poison, 90, pitch)));
        let held = written(device, &image(&old, 60, base_pitch));
        let slice = |name, rows: u64, memory: &DeviceSlice, pitch: usize| {
            TensorSlice::new(name, Rectangle::whole(&[rows, 100]), memory.clone()).pitch(pitch as u64)
        };
        let slices = [slice("longer", 90, &outputs[0], pitch), slice("new", 90, &outputs[1], pitch)];
        let tensors = TensorSlice::out_of_place(&index, &slices, &[slice("longer", 60, &held, base_pitch)]).unwrap();
        launch(device, &index, &tensors, Mode::OutOfPlace, Payloads::Host(pair.blob())).unwrap();
        for output in &outputs {
            assert_eq!(first_difference(&read(device, output), &image(&new, 90, pitch)), None);
        }
        assert!(matches!(
            ApplyPlan::new(
                &index,
                &TensorSlice::in_place(&index, &slices).unwrap(),
                Mode::InPlace(InPlace::AllChecked),
                Payloads::Host(pair.blob())
            ),
            Err(Error::InvalidArgument(_))
        ));
    }
}

/// Slices that do not consist of parts, and memory that overlaps, are refused before any work.
#[test]
#[ignore = "needs a CUDA device"]
fn slices_that_do_not_fit_are_refused() {
    let device = super::device();
    let model = Model::new(1);
    let pair = model.pair(CodecChoice::Device, 2);
    let index = DeviceIndex::upload(device, pair.index()).unwrap();
    let (q, o) = ("layers.0.q_proj", "layers.0.o_proj");
    let half = |dim: usize, n: u64| {
        let mut part = Rectangle::whole(&[HIDDEN as u64; 2]);
        part.extent[dim] /= 2;
        part.origin[dim] = n * part.extent[dim];
        part
    };
    let memory = device.alloc(4 * (HIDDEN * HIDDEN) as u64).unwrap();
    let bytes = (HIDDEN * HIDDEN) as u64;
    let of = |name, part: Rectangle| {
        let bytes = part.extent.iter().product::<u64>() * 2;
        TensorSlice::new(name, part, memory.slice(0, bytes).unwrap())
    };

    // Which entries there are.
    assert_eq!((index.find(q), index.find("layers.0.norm").is_some(), index.entries(q).len()), (None, true, 2));
    assert_eq!(index.find_part(o, &half(1, 1)), Some(index.entries(o).start + 1));
    assert_eq!((index.find_part(o, &half(0, 1)), index.entries("p").len()), (None, 0));

    let cut_elsewhere = TensorSlice::in_place(&index, &[of(q, half(1, 0))]).unwrap_err();
    let Error::NotHeld { tensor, chunk, reason } = &cut_elsewhere else { panic!("{cut_elsewhere}") };
    let first = pair.index().entries(q).next().unwrap().first_chunk;
    assert_eq!((tensor.as_str(), *chunk), (q, first));
    assert!(reason.contains("cut at the part [0:192, 0:96]") && reason.contains("[0:96, 0:192]"), "{reason}");
    let base = [of(q, half(0, 1))];
    let without_base = TensorSlice::out_of_place(&index, &[of(q, half(0, 0))], &base).unwrap_err();
    assert!(matches!(without_base, Error::NotHeld { .. }), "{without_base}");
    for (slices, base) in [
        (vec![of("p", half(0, 0))], vec![]),
        (vec![of(q, half(0, 0))], vec![of(o, half(0, 0))]),
        (vec![of(q, half(0, 2))], vec![of(q, half(0, 0))]),
        (vec![of(q, half(0, 0)).pitch(2 * HIDDEN as u64 + 2)], vec![of(q, half(0, 0))]),
        (vec![of(q, half(0, 0)).pitch(2 * HIDDEN as u64 - 2)], vec![of(q, half(0, 0))]),
    ] {
        let error = TensorSlice::out_of_place(&index, &slices, &base).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
    }

    // Two parts whose rows interleave are accepted, if none of their bytes meet.
    let plan = |bindings: &[Binding], mode| ApplyPlan::new(&index, bindings, mode, Payloads::Host(pair.blob())).map(|_| ());
    let beside = |name, part: Rectangle, at: u64| {
        let size = (HIDDEN as u64 - 1) * 384 + 192;
        TensorSlice::new(name, part, memory.slice(at, size).unwrap()).pitch(384)
    };
    let all_checked = Mode::InPlace(InPlace::AllChecked);
    let bind = |slices: &[TensorSlice<'_>]| TensorSlice::in_place(&index, slices).unwrap();
    plan(&bind(&[beside(o, half(1, 0), 0), beside(o, half(1, 1), 192)]), all_checked).unwrap();
    for at in [0, 190, 194, 384, 384 * 5 - 2] {
        let error = plan(&bind(&[beside(o, half(1, 0), 0), beside(o, half(1, 1), at)]), all_checked).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)) && error.to_string().contains("overlap"), "{at}: {error}");
    }
    // Out of place, a base beside its output is accepted too.
    for (at, is_accepted) in [(192, true), (0, false), (190, false)] {
        let slices = [beside(o, half(1, 0), 0)];
        let bindings = TensorSlice::out_of_place(&index, &slices, &[beside(o, half(1, 0), at)]).unwrap();
        assert_eq!(plan(&bindings, Mode::OutOfPlace).is_ok(), is_accepted, "{at}");
    }

    // Rows that do not fit the tensor.
    let part = index.find_part(o, &half(1, 0)).unwrap();
    let whole = memory.slice(0, bytes).unwrap();
    for rows in [
        Rows::new(0, 0),
        Rows::new(7, 8),
        Rows::new(192, 190),
        Rows::new(192, 193),
        Rows::new(192, u64::MAX - 1),
        Rows::new(192, 384),
    ] {
        let error = plan(&[Binding::in_place(part, whole.clone()).output_rows(rows)], all_checked).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{rows:?}: {error}");
    }
    plan(&[Binding::in_place(part, whole.clone()).output_rows(Rows::new(192, 192))], all_checked).unwrap();
}

/// An application that is rebound has kernels for the tensors that had gaps.
#[test]
#[ignore = "needs a CUDA device"]
fn slices_are_bound_anew() {
    let device = super::device();
    let model = Model::new(1);
    let pair = model.pair(CodecChoice::Device, 2);
    let index = DeviceIndex::upload(device, pair.index()).unwrap();
    let held: Vec<_> = [5, 24, 0].map(|padding| Memory::of_rank(&model, 0, 2, padding)).into();
    let memories: Vec<_> = held.iter().map(|held| written(device, &held.before)).collect();
    let bindings: Vec<_> =
        held.iter().zip(&memories).map(|(held, memory)| TensorSlice::in_place(&index, &held.on(memory)).unwrap()).collect();
    let mode = Mode::InPlace(InPlace::ChunkByChunk);
    let plan = ApplyPlan::new(&index, &bindings[0], mode, Payloads::Host(pair.blob())).unwrap();
    let mut application = Application::prepare(plan).unwrap();
    let stream = device.stream().unwrap();
    application.launch(&stream).unwrap().wait().unwrap();
    assert!(application.rebind(&bindings[1]).unwrap());
    application.launch(&stream).unwrap().wait().unwrap();
    assert!(!application.rebind(&bindings[2]).unwrap(), "other tensors have gaps");
    for (held, memory) in held.iter().zip(&memories).take(2) {
        assert_eq!(first_difference(&read(device, memory), &held.after), None);
    }
    assert_eq!(first_difference(&read(device, &memories[2]), &held[2].before), None);
}

/// Columns of one storage, with random pitches, as a target, and as a base beside it.
#[test]
#[ignore = "needs a CUDA device"]
fn columns_of_one_storage_are_slices_if_they_share_no_byte() {
    let device = super::device();
    let random = &mut Random(23);
    let mut found = [0; 2];
    for _ in 0..if stand_in::is_used() { 30 } else { 200 } {
        let below = |random: &mut Random, n: u64| random.bits() % n;
        let tensors: Vec<_> = ["a", "b", "c"]
            .into_iter()
            .map(|name| {
                let (rows, columns) = (1 + below(random, 40), 1 + below(random, 8));
                let (base, target) = lanes(random, Dtype::Bf16, (rows * columns) as usize, 5);
                let info = TensorInfo { name: name.into(), dtype: Dtype::Bf16, shape: vec![rows, columns] };
                (info, base, target)
            })
            .collect();
        let checkpoint = |is_base: bool| {
            let tensors = tensors.iter().map(|(info, base, target)| (info.clone(), if is_base { &base[..] } else { &target[..] }));
            MemoryCheckpoint::new(tensors).unwrap()
        };
        let options = EncodeOptions::default().codec(Codec::Conditioned);
        let (base, target) = (checkpoint(true), checkpoint(false));
        let (pair, _) = Encode::new(&target).base(&base).options(options).to_memory().unwrap();
        let index = DeviceIndex::upload(device, pair.index()).unwrap();

        let pitch = 60 + 2 * below(random, 20) as usize;
        let mut images = [vec![CANARY; 8000], vec![CANARY; 8000]];
        let mut owners = vec![0; 8000];
        let places: Vec<_> = tensors
            .iter()
            .map(|(info, base, target)| {
                let row = 2 * info.shape[1] as usize;
                let pitch = if below(random, 4) == 0 { row + 2 * below(random, 30) as usize } else { pitch };
                let start = 2 * below(random, 40) as usize;
                for (n, (old, new)) in base.chunks(row).zip(target.chunks(row)).enumerate() {
                    let at = start + n * pitch..start + n * pitch + row;
                    images[0][at.clone()].copy_from_slice(old);
                    images[1][at.clone()].copy_from_slice(new);
                    owners[at].iter_mut().for_each(|owners| *owners += 1);
                }
                (start as u64, ((info.shape[0] as usize - 1) * pitch + row) as u64, pitch as u64)
            })
            .collect();
        let is_apart = owners.iter().all(|&owners| owners < 2);
        let memory = written(device, &images[0]);
        let slices: Vec<_> = tensors
            .iter()
            .zip(&places)
            .map(|((info, ..), &(start, size, pitch))| {
                let whole = Rectangle::whole(&info.shape);
                TensorSlice::new(&info.name, whole, memory.slice(start, size).unwrap()).pitch(pitch)
            })
            .collect();
        let mode = [Mode::InPlace(InPlace::AllChecked), Mode::InPlace(InPlace::ChunkByChunk)][found[0] % 2];
        let outcome = launch(device, &index, &TensorSlice::in_place(&index, &slices).unwrap(), mode, Payloads::Host(pair.blob()));
        if is_apart {
            outcome.unwrap();
        } else {
            let error = outcome.unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)) && error.to_string().contains("overlaps"), "{error}");
        }
        assert_eq!(first_difference(&read(device, &memory), &images[usize::from(is_apart)]), None, "{places:?}");
        found[usize::from(is_apart)] += 1;
    }
    assert!(found.iter().all(|&n| n > 2), "{found:?}");
}

/// What the processor says about the failure of a launch, from slices on the device.
#[test]
#[ignore = "needs a CUDA device"]
fn a_failed_launch_on_slices_is_explained() {
    let device = super::device();
    let model = Model::new(1);
    let pair = model.pair(Codec::Conditioned.into(), 2);
    let index = DeviceIndex::upload(device, pair.index()).unwrap();
    let mode = Mode::InPlace(InPlace::AllChecked);
    let explained = |held: &Memory, image: &[u8]| {
        let memory = written(device, image);
        let slices = held.on(&memory);
        let tensors = TensorSlice::in_place(&index, &slices).unwrap();
        let error = launch(device, &index, &tensors, mode, Payloads::Host(pair.blob())).unwrap_err();
        let typed = slices.into_iter().map(|slice| (Dtype::Bf16, model.weight(slice.name).info.shape.clone(), slice));
        let base = DeviceCheckpoint::of_slices(device, typed).unwrap();
        assert_eq!(first_difference(&read(device, &memory), image), None);
        Apply::new(&pair).base(&base).explain_in_place(error)
    };
    for (rank, padding) in [(0, 5), (1, 0)] {
        let held = Memory::of_rank(&model, rank, 2, padding);
        let applied = explained(&held, &held.after);
        assert!(matches!(applied, Error::AlreadyApplied { .. }), "{applied}");
        let mut wrong = held.before.clone();
        let (_, _, at, ..) = held.slices.iter().find(|(name, ..)| name == "layers.0.o_proj").unwrap();
        wrong[at + 1] ^= 4;
        let error = explained(&held, &wrong);
        assert!(matches!(&error, Error::WrongBase { tensor, .. } if tensor == "layers.0.o_proj"), "{error}");
    }
}

/// A part with rows at two distances is refused. Parts of one index each are accepted, as the error says.
#[test]
#[ignore = "needs a CUDA device"]
fn rows_at_two_distances_are_refused_and_the_error_names_the_cut() {
    let device = super::device();
    let info = TensorInfo { name: "experts".into(), dtype: Dtype::Bf16, shape: vec![3, 40, 64] };
    let (base, target) = lanes(&mut Random(3), Dtype::Bf16, 3 * 40 * 64, 5);
    let pair = |cuts: Vec<Rectangle>| {
        let checkpoint = |bytes| MemoryCheckpoint::new([(info.clone(), bytes)]).unwrap();
        let options = EncodeOptions::default().codec(CodecChoice::Device).cuts([("experts", cuts)]);
        Encode::new(&checkpoint(&target[..])).base(&checkpoint(&base[..])).options(options).to_memory().unwrap().0
    };
    let memory = written(device, &base);
    // Parts of both inner dimensions, in memory that holds all.
    let blocks = |experts: u64| {
        let origins = (0..3).step_by(experts as usize).flat_map(|e| [0, 20].map(|row| [0, 32].map(|column| [e, row, column])));
        origins.flatten().map(|origin| Rectangle::new(origin, [experts, 20, 32])).collect::<Vec<_>>()
    };
    let whole = [TensorSlice::new("experts", Rectangle::whole(&info.shape), memory.clone())];
    let coarse = pair(blocks(3));
    let index = DeviceIndex::upload(device, coarse.index()).unwrap();
    let error = TensorSlice::in_place(&index, &whole).unwrap_err();
    let expected = "its rows are at two distances, and a device has one per part. A pair fits in which the tensor is cut at each index \
                    of dimension 0";
    assert!(matches!(error, Error::InvalidArgument(_)) && error.to_string().ends_with(expected), "{error}");

    let fine = pair(blocks(1));
    let index = DeviceIndex::upload(device, fine.index()).unwrap();
    let tensors = TensorSlice::in_place(&index, &whole).unwrap();
    launch(device, &index, &tensors, Mode::InPlace(InPlace::AllChecked), Payloads::Host(fine.blob())).unwrap();
    assert_eq!(first_difference(&read(device, &memory), &target), None);
}

/// Slices of a pair that was not cut: random rectangles, on the device as on the processor. Both take those that consist of whole
/// chunks, and refuse others at the same chunk.
#[test]
#[ignore = "needs a CUDA device"]
fn slices_of_whole_chunks_need_no_cut() {
    let device = super::device();
    let random = &mut Random(41);
    let below = |random: &mut Random, n: u64| random.bits() % n;
    let mut found = [0; 2];
    for case in 0..if stand_in::is_used() { 60 } else { 400 } {
        // Rows shorter than a chunk, as long as one, and of several chunks.
        let shape = [[200, 64], [6, 4096], [3, 3 * 4096], [150, 192]][case % 4];
        let info = TensorInfo { name: "t".into(), dtype: Dtype::Bf16, shape: shape.to_vec() };
        let (base, target) = lanes(random, Dtype::Bf16, (shape[0] * shape[1]) as usize, 9);
        let checkpoint = |bytes| MemoryCheckpoint::new([(info.clone(), bytes)]).unwrap();
        let options = EncodeOptions::default().codec(CodecChoice::Device).chunk_lanes(4096).payload_digests(case % 3 == 0);
        let (pair, _) = Encode::new(&checkpoint(&target[..])).base(&checkpoint(&base[..])).options(options).to_memory().unwrap();
        let index = DeviceIndex::upload(device, pair.index()).unwrap();

        let step = [(64, 64), (1, 4096), (1, 4096), (64, 192)][case % 4];
        let range = |random: &mut Random, length: u64, step: u64| {
            let step = if below(random, 5) == 0 { 1 } else { step };
            let first = below(random, length.div_ceil(step)) * step;
            let end = (first + step * (1 + below(random, length.div_ceil(step)))).min(length);
            (first, end - first)
        };
        let ((row, rows), (column, columns)) = (range(random, shape[0], step.0), range(random, shape[1], step.1));
        let part = Rectangle::new([row, column], [rows, columns]);
        let pitch = 2 * (columns + [0, 8, 3][case % 3]) as usize;
        let image = |bytes: &[u8]| {
            let mut image = vec![CANARY; (rows as usize - 1) * pitch + 2 * columns as usize];
            for n in 0..rows as usize {
                let from = 2 * ((row as usize + n) * shape[1] as usize + column as usize);
                image[n * pitch..][..2 * columns as usize].copy_from_slice(&bytes[from..from + 2 * columns as usize]);
            }
            image
        };
        let (before, after) = (image(&base), image(&target));
        let mut on_cpu = before.clone();
        let slice = tpde::SliceMut::new("t", part.clone(), &mut on_cpu).pitch(pitch as u64);
        let expected = Apply::new(&pair).in_place_slices([slice], InPlace::AllChecked);

        let mode = MODES[case % 3];
        let (memory, held) = match mode {
            Mode::OutOfPlace => (written(device, &vec![CANARY; before.len()]), Some(written(device, &before))),
            Mode::InPlace(_) => (written(device, &before), None),
        };
        let of = |memory: &DeviceSlice| [TensorSlice::new("t", part.clone(), memory.clone()).pitch(pitch as u64)];
        let bindings = match &held {
            Some(base) => TensorSlice::out_of_place(&index, &of(&memory), &of(base)),
            None => TensorSlice::in_place(&index, &of(&memory)),
        };
        let told = format!("{mode:?}, {part} of {shape:?}, pitch {pitch}");
        match (expected, bindings) {
            (Ok(_), Ok(bindings)) => {
                let route = [Route::Host, Route::Pinned, Route::Device][below(random, 3) as usize];
                launch(device, &index, &bindings, mode, payloads(device, &pair, route)).unwrap_or_else(|e| panic!("{told}: {e}"));
                assert_eq!(first_difference(&on_cpu, &after), None, "{told}");
                assert_eq!(first_difference(&read(device, &memory), &after), None, "{told}");
                found[0] += usize::from(part != Rectangle::whole(&shape));
            }
            (Err(Error::NotHeld { chunk, .. }), Err(Error::NotHeld { chunk: on_device, .. })) => {
                assert_eq!(on_device, chunk, "{told}");
                found[1] += 1;
            }
            (expected, found) => panic!("{told}: {expected:?}, {found:?}"),
        }
    }
    assert!(found.iter().all(|&n| n > 5), "{found:?}");
}

/// A damaged payload of a slice's chunks is found. One of other chunks is read only if the pair has a digest over all payloads and
/// none of each: then it is refused before anything is written, as on the processor.
#[test]
#[ignore = "needs a CUDA device"]
fn only_the_chunks_of_a_slice_are_read() {
    let device = super::device();
    let info = TensorInfo { name: "t".into(), dtype: Dtype::Bf16, shape: vec![256, 64] };
    let (base, target) = lanes(&mut Random(6), Dtype::Bf16, 256 * 64, 9);
    let checkpoint = |bytes| MemoryCheckpoint::new([(info.clone(), bytes)]).unwrap();
    let encoded = |has_list| {
        let options = EncodeOptions::default().codec(Codec::Conditioned).chunk_lanes(4096).payload_digests(has_list);
        Encode::new(&checkpoint(&target[..])).base(&checkpoint(&base[..])).options(options).to_memory().unwrap().0
    };
    let half = |n: usize| Rectangle::new([128 * n as u64, 0], [128, 64]);
    let of = |bytes: &[u8], n: usize| bytes[n * 128 * 128..][..128 * 128].to_vec();
    let [all_checked, chunk_by_chunk] = [InPlace::AllChecked, InPlace::ChunkByChunk].map(Mode::InPlace);
    for has_list in [true, false] {
        let pair = encoded(has_list);
        let index = DeviceIndex::upload(device, pair.index()).unwrap();
        for (n, mode) in [(0, all_checked), (1, all_checked), (0, chunk_by_chunk), (1, chunk_by_chunk)] {
            for damaged in 0..4u32 {
                let mut blob = pair.blob().clone();
                blob[pair.index().records()[damaged as usize].blob_offset.get() as usize + 9] ^= 8;
                let memory = written(device, &of(&base, n));
                let bindings = TensorSlice::in_place(&index, &[TensorSlice::new("t", half(n), memory.clone())]).unwrap();
                let outcome = launch(device, &index, &bindings, mode, Payloads::Host(&blob));
                let (found, is_own) = (read(device, &memory), (damaged / 2) as usize == n);
                match outcome {
                    Ok(digests) => {
                        assert!(!is_own && has_list, "{damaged}");
                        assert_eq!(digests, PayloadDigests::EachRead);
                        assert_eq!(first_difference(&found, &of(&target, n)), None);
                    }
                    Err(Error::Poisoned { total: 2, .. }) => assert!(is_own && has_list && mode == chunk_by_chunk),
                    Err(Error::Invalid(invalid)) => {
                        assert_eq!(invalid.at.chunk, Some(damaged));
                        assert!(is_own && mode == all_checked || !has_list);
                        assert_eq!(first_difference(&found, &of(&base, n)), None);
                    }
                    Err(error) => panic!("{error}"),
                }
                let mut held = of(&base, n);
                let slice = tpde::SliceMut::new("t", half(n), &mut held);
                let damaged = Pair::new(encoded(has_list).into_parts().0, &blob[..]).unwrap();
                let on_cpu = Apply::new(&damaged).in_place_slices([slice], InPlace::AllChecked);
                assert_eq!(on_cpu.is_ok(), !is_own && has_list);
            }
        }
    }
    let pair = encoded(false);
    let index = DeviceIndex::upload(device, pair.index()).unwrap();
    // Other memory of the same slice takes the same application, and another slice does not.
    let memories = [0, 0, 1].map(|n| written(device, &of(&base, n)));
    let bindings = |i: usize, n| TensorSlice::in_place(&index, &[TensorSlice::new("t", half(n), memories[i].clone())]).unwrap();
    let plan = ApplyPlan::new(&index, &bindings(0, 0), all_checked, Payloads::Host(pair.blob())).unwrap();
    let mut application = Application::prepare(plan).unwrap();
    let stream = device.stream().unwrap();
    application.launch(&stream).unwrap().wait().unwrap();
    assert!(application.rebind(&bindings(1, 0)).unwrap());
    application.launch(&stream).unwrap().wait().unwrap();
    assert!(!application.rebind(&bindings(2, 1)).unwrap());
    assert_eq!(memories.each_ref().map(|memory| read(device, memory)), [of(&target, 0), of(&target, 0), of(&base, 1)]);
    // Bindings of another mode, of another pair, and with other memory are refused.
    let own = bindings(2, 1);
    let refused = |index: &DeviceIndex, bindings: &[Binding], mode, blob: &Vec<u8>, expected: &str| {
        let error = ApplyPlan::new(index, bindings, mode, Payloads::Host(blob)).map(|_| ()).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument(why) if why.contains(expected)), "{error}");
    };
    refused(&index, &own, Mode::OutOfPlace, pair.blob(), "has no base");
    let coarse = {
        let options = EncodeOptions::default().codec(Codec::Conditioned).chunk_lanes(8192);
        Encode::new(&checkpoint(&target[..])).base(&checkpoint(&base[..])).options(options).to_memory().unwrap().0
    };
    let other = DeviceIndex::upload(device, coarse.index()).unwrap();
    refused(&other, &own, all_checked, coarse.blob(), "bound to another pair or other memory");
    let mut moved = own.clone();
    moved[0].output = memories[0].clone();
    refused(&index, &moved, all_checked, pair.blob(), "bound to another pair or other memory");
    let strange = own[0].clone().output_rows(Rows::new(1, 0));
    refused(&index, &[strange], all_checked, pair.blob(), "bound to another pair or other memory");
    // Several slices of one entry, each with some chunks.
    let both = [0, 1].map(|n| TensorSlice::new("t", half(n), written(device, &of(&base, n))));
    assert!(matches!(TensorSlice::in_place(&index, &both), Err(Error::NotHeld { .. })));
}

/// Errors about portions that a device does not take say why.
#[test]
#[ignore = "needs a CUDA device"]
fn portions_that_a_device_does_not_take_are_refused_with_the_reason() {
    let device = super::device();
    let (base, target) = lanes(&mut Random(8), Dtype::Bf16, 256 * 64, 9);
    let encoded = |base_info: &TensorInfo, base: &[u8], info: &TensorInfo, target: &[u8], chunk_lanes| {
        let [base, target] =
            [(base_info, base), (info, target)].map(|(info, bytes)| MemoryCheckpoint::new([(info.clone(), bytes)]));
        let options = EncodeOptions::default().codec(CodecChoice::Device).chunk_lanes(chunk_lanes);
        Encode::new(&target.unwrap()).base(&base.unwrap()).options(options).to_memory().unwrap().0
    };
    let info = |shape: &[u64]| TensorInfo { name: "t".into(), dtype: Dtype::Bf16, shape: shape.to_vec() };
    let memory = device.alloc(1 << 20).unwrap();
    let of = |part: Rectangle, at: u64| {
        let bytes = 2 * part.elements();
        TensorSlice::new("t", part, memory.slice(at, bytes).unwrap())
    };
    // A base with fewer rows.
    let half = 128 * 128;
    let pair = encoded(&info(&[128, 64]), &base[..half], &info(&[256, 64]), &target, 4096);
    let index = DeviceIndex::upload(device, pair.index()).unwrap();
    let (slice, held) = (of(Rectangle::new([0, 0], [64, 64]), 0), of(Rectangle::whole(&[128, 64]), 1 << 16));
    let error = TensorSlice::out_of_place(&index, std::slice::from_ref(&slice), &[held]).unwrap_err();
    assert!(matches!(&error, Error::NotHeld { reason, .. } if reason.contains("another dtype or shape")), "{error}");
    let bindings = TensorSlice::in_place(&index, &[slice]).unwrap();
    let error = ApplyPlan::new(&index, &bindings, Mode::InPlace(InPlace::AllChecked), Payloads::Host(pair.blob())).unwrap_err();
    assert!(error.to_string().contains("changes its number of rows"), "{error}");

    // Chunks of a row, in memory with rows at two distances.
    let whole = info(&[2, 2, 4096]);
    let pair = encoded(&whole, &base, &whole, &target, 4096);
    let index = DeviceIndex::upload(device, pair.index()).unwrap();
    let part = Rectangle::new([0, 0, 0], [2, 1, 4096]);
    assert_eq!(TensorSlice::in_place(&index, &[of(part, 0)]).unwrap().len(), 1, "rows at one distance");
    let whole = info(&[2, 4, 8192]);
    let (base, target) = ([&base[..]; 4].concat(), [&target[..]; 4].concat());
    let pair = encoded(&whole, &base, &whole, &target, 4096);
    let index = DeviceIndex::upload(device, pair.index()).unwrap();
    let part = Rectangle::new([0, 0, 0], [2, 2, 4096]);
    let error = TensorSlice::in_place(&index, &[of(part.clone(), 0)]).unwrap_err();
    assert!(matches!(&error, Error::InvalidArgument(why) if why.contains("at two distances")), "{error}");
    let mut on_cpu = vec![0; 2 * part.elements() as usize];
    for (n, rows) in on_cpu.chunks_mut(8192).enumerate() {
        let row = 4 * (n / 2) + n % 2;
        rows.copy_from_slice(&base[row * 16384..][..8192]);
    }
    Apply::new(&pair).in_place_slices([tpde::SliceMut::new("t", part, &mut on_cpu)], InPlace::AllChecked).unwrap();
}
