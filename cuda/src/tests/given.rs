//! Memory of the caller: for an index and an application, and payloads of single tensors.

use super::super::{Application, ApplyPlan, BlobPart, Device, DeviceIndex, DeviceSlice, Mode, Payloads};
use super::generated::{Random, lanes};
use super::laid::{Laid, Route, payloads, prepare, routes, written};
use super::vectors::MODES;
use tpde::{Codec, Encode, EncodeOptions, InPlace, MemoryCheckpoint, Pair, TensorInfo};
use tpde_core::error::Error;
use tpde_core::lane::Dtype;

/// A pair with its base and target tensors, by index.
struct Made {
    infos: Vec<TensorInfo>,
    base: Vec<Vec<u8>>,
    target: Vec<Vec<u8>>,
    pair: Pair<Vec<u8>>,
}

impl Made {
    fn new(codec: Codec) -> Self {
        let random = &mut Random(11);
        let (mut infos, mut base, mut target) = (Vec::new(), Vec::new(), Vec::new());
        for (n, (dtype, size)) in
            [(Dtype::Bf16, 70_001), (Dtype::Bf16, 9), (Dtype::F32, 20_000), (Dtype::U8, 5000)].into_iter().enumerate()
        {
            infos.push(TensorInfo { name: format!("t{n}"), dtype, shape: vec![size as u64] });
            let (old, new) = lanes(random, dtype, size, 30);
            base.push(old);
            target.push(new);
        }
        let options = EncodeOptions::default().codec(codec).chunk_lanes(4096);
        let (old, new) = (checkpoint_of(&infos, &base), checkpoint_of(&infos, &target));
        let pair = Encode::new(&new).base(&old).options(options).to_memory().unwrap().0;
        Self { infos, base, target, pair }
    }

    fn base(&self) -> MemoryCheckpoint<'_> {
        checkpoint_of(&self.infos, &self.base)
    }
}

fn checkpoint_of<'a>(infos: &[TensorInfo], data: &'a [Vec<u8>]) -> MemoryCheckpoint<'a> {
    MemoryCheckpoint::new(infos.iter().cloned().zip(data.iter().map(|d| &d[..]))).unwrap()
}

/// Returns memory of `bytes` bytes, filled with other data.
fn given(device: &Device, bytes: u64) -> DeviceSlice {
    let memory = device.alloc(bytes).unwrap();
    device.write(&memory, &vec![0xEE; bytes as usize]).unwrap();
    memory
}

fn uploaded(device: &Device, made: &Made) -> DeviceIndex {
    let memory = given(device, DeviceIndex::bytes_of(made.pair.index()).unwrap());
    DeviceIndex::upload_to(device, made.pair.index(), memory).unwrap()
}

#[test]
#[ignore = "needs a CUDA device"]
fn all_is_done_in_memory_that_was_given() {
    let device = super::device();
    let mut count = 0;
    for codec in [Codec::Conditioned, Codec::Raw, Codec::Zstd] {
        let made = Made::new(codec);
        let index = uploaded(device, &made);
        for mode in MODES {
            for &route in routes(made.pair.index()) {
                let mut laid = Laid::new(device, made.pair.index(), &made.base(), mode != Mode::OutOfPlace, 3);
                let planned = ApplyPlan::new(&index, &laid.bindings, mode, payloads(device, &made.pair, route)).unwrap();
                let bytes = planned.bytes();
                let memory = given(device, bytes + 256);
                let stream = device.stream().unwrap();
                Application::prepare_in(planned, memory.slice(0, bytes).unwrap()).unwrap().launch(&stream).unwrap().wait().unwrap();
                for (place, found) in laid.outputs(device) {
                    assert!(found == made.target[place], "{mode:?} {route:?}");
                }
                // Memory behind the application is unchanged.
                let mut behind = vec![0; 256];
                device.read(&memory.slice(bytes, 256).unwrap(), &mut behind).unwrap();
                assert!(behind.iter().all(|byte| *byte == 0xEE), "{mode:?} {route:?}");
                count += 1;
            }
        }
    }
    eprintln!("{count} applications");
}

/// After each of several rebinds, the application works in other memory. Payloads use the same staging memory.
#[test]
#[ignore = "needs a CUDA device"]
fn what_is_bound_anew_works_elsewhere() {
    let device = super::device();
    let mut count = 0;
    for codec in [Codec::Conditioned, Codec::Raw, Codec::Zstd] {
        let made = Made::new(codec);
        let index = uploaded(device, &made);
        for mode in MODES {
            for &route in routes(made.pair.index()) {
                let laid = |seed| Laid::new(device, made.pair.index(), &made.base(), mode != Mode::OutOfPlace, seed);
                let mut all = [laid(1), laid(2), laid(3)];
                let planned = ApplyPlan::new(&index, &all[0].bindings, mode, payloads(device, &made.pair, route)).unwrap();
                let planned = planned.max_scratch_bytes(1 << 20);
                let memory = given(device, planned.bytes());
                let mut application = Application::prepare_in(planned, memory).unwrap();
                let stream = device.stream().unwrap();
                for laid in &mut all {
                    assert!(application.rebind(&laid.bindings).unwrap());
                    for _ in 0..if mode == Mode::OutOfPlace { 3 } else { 1 } {
                        let pending = application.launch(&stream).unwrap();
                        assert!(matches!(application.rebind(&laid.bindings), Err(Error::InvalidArgument(_))), "under way");
                        pending.wait().unwrap();
                    }
                    for (place, found) in laid.outputs(device) {
                        assert!(found == made.target[place], "{mode:?} {route:?}");
                    }
                    assert!(!application.rebind(&laid.bindings[1..]).unwrap(), "another plan is needed");
                    count += 1;
                }
            }
        }
    }
    eprintln!("{count} applications bound anew");
}

#[test]
#[ignore = "needs a CUDA device"]
fn parts_of_the_blob_serve_their_tensors() {
    let device = super::device();
    let mut count = 0;
    for codec in [Codec::Conditioned, Codec::Raw] {
        let made = Made::new(codec);
        let index = uploaded(device, &made);
        for mode in MODES {
            let mut laid = Laid::new(device, made.pair.index(), &made.base(), mode != Mode::OutOfPlace, 1);
            for binding in &laid.bindings {
                let range = index.payloads_of(binding.tensor).unwrap();
                let part = &made.pair.blob()[range.start as usize..range.end as usize];
                let memory = device.alloc(part.len() as u64).unwrap();
                device.write(&memory, part).unwrap();
                let payloads = |at| Payloads::Parts(vec![BlobPart { at, memory: memory.clone() }]);
                let tensors = [binding.clone()];
                let stream = device.stream().unwrap();
                let application = prepare(&index, &tensors, mode, payloads(range.start)).unwrap();
                application.launch(&stream).unwrap().wait().unwrap();
                if !part.is_empty() {
                    for at in [range.start + 16, range.start.wrapping_sub(16)] {
                        assert!(matches!(prepare(&index, &tensors, mode, payloads(at)), Err(Error::InvalidArgument(_))), "{at}");
                    }
                }
                count += 1;
            }
            for (place, found) in laid.outputs(device) {
                assert!(found == made.target[place], "{mode:?}");
            }
            // All tensors together, whose parts are in another order than in the blob.
            let mut laid = Laid::new(device, made.pair.index(), &made.base(), mode != Mode::OutOfPlace, 1);
            let ranges = laid.bindings.iter().map(|binding| index.payloads_of(binding.tensor).unwrap());
            let mut parts: Vec<_> = ranges
                .filter(|range| !range.is_empty())
                .map(|range| BlobPart {
                    at: range.start,
                    memory: written(device, &made.pair.blob()[range.start as usize..range.end as usize]),
                })
                .collect();
            parts.reverse();
            assert!(parts.len() > 2);
            let stream = device.stream().unwrap();
            let application = prepare(&index, &laid.bindings, mode, Payloads::Parts(parts.clone())).unwrap();
            application.launch(&stream).unwrap().wait().unwrap();
            for (place, found) in laid.outputs(device) {
                assert!(found == made.target[place], "{mode:?}");
            }
            // A part of no bytes serves a tensor without payloads.
            let mut more = parts.clone();
            more.insert(0, BlobPart { at: 0, memory: written(device, &[]) });
            drop(prepare(&index, &laid.bindings, mode, Payloads::Parts(more)).unwrap());
            for wrong in 0..parts.len() {
                let without =
                    |at: usize| parts.iter().enumerate().filter(|(n, _)| *n != at).map(|(_, part)| part.clone()).collect();
                let refused = prepare(&index, &laid.bindings, mode, Payloads::Parts(without(wrong)));
                assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{wrong}");
                let mut moved = parts.clone();
                moved[wrong].at += 16;
                assert!(matches!(prepare(&index, &laid.bindings, mode, Payloads::Parts(moved)), Err(Error::InvalidArgument(_))));
            }
        }
    }
    eprintln!("{count} tensors from parts of their blobs");
}

#[test]
#[ignore = "needs a CUDA device"]
fn memory_that_does_not_serve_is_refused() {
    let device = super::device();
    let made = Made::new(Codec::Conditioned);
    let bytes = DeviceIndex::bytes_of(made.pair.index()).unwrap();
    let memory = given(device, bytes + 256);
    for wrong in [memory.slice(0, bytes - 1), memory.slice(16, bytes)] {
        assert!(matches!(DeviceIndex::upload_to(device, made.pair.index(), wrong.unwrap()), Err(Error::InvalidArgument(_))));
    }
    let index = uploaded(device, &made);
    for mode in [Mode::OutOfPlace, Mode::InPlace(InPlace::ChunkByChunk)] {
        let laid = Laid::new(device, made.pair.index(), &made.base(), mode != Mode::OutOfPlace, 0);
        let plan = || ApplyPlan::new(&index, &laid.bindings, mode, payloads(device, &made.pair, Route::Host)).unwrap();
        let bytes = plan().bytes();
        let memory = given(device, bytes + 256);
        for wrong in [memory.slice(0, bytes - 1), memory.slice(16, bytes)] {
            assert!(matches!(Application::prepare_in(plan(), wrong.unwrap()), Err(Error::InvalidArgument(_))));
        }
    }
    eprintln!("memory that is too small or not aligned is refused");
}
