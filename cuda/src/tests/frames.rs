//! Payloads of codec `zstd` that nvCOMP expands, on machines with nvCOMP.

use super::super::{DeviceIndex, Nvcomp};
use super::generated::{Random, lanes};
use super::laid::{Route, apply};
use super::stand_in;
use super::vectors::MODES;
use tpde::{Codec, Encode, EncodeOptions, Error, Limits, MemoryCheckpoint, Pair, TensorInfo, ValidatedIndex};
use tpde_core::codec::Layout;
use tpde_core::lane::Dtype;

const ROUTES: [Route; 3] = [Route::Host, Route::Pinned, Route::Device];

fn nvcomp(test: &str) -> Option<Nvcomp> {
    if stand_in::is_used() {
        stand_in::expand_frames();
    }
    Nvcomp::load().inspect_err(|e| eprintln!("SKIPPED {test}: {e}")).ok()
}

/// Returns tensors with base and target. One lane in 1 to 5,000 changes. Tensors have from one lane to three chunks.
fn data(dtype: Dtype) -> Vec<(TensorInfo, Vec<u8>, Vec<u8>)> {
    let random = &mut Random(u64::from(dtype.code()) + 5);
    let mut data = Vec::new();
    for (n, rarity) in [1, 2, 10, 100, 5000].into_iter().enumerate() {
        for size in [1usize, 65, 4096, 20_000] {
            let info = TensorInfo { name: format!("{n}.{size}"), dtype, shape: vec![size as u64] };
            let (base, target) = lanes(random, dtype, size, rarity);
            data.push((info, base, target));
        }
    }
    data
}

fn pair_of(data: &[(TensorInfo, Vec<u8>, Vec<u8>)], layout: Layout) -> Pair<Vec<u8>> {
    let base = MemoryCheckpoint::new(data.iter().map(|(info, base, _)| (info.clone(), &base[..]))).unwrap();
    let target = MemoryCheckpoint::new(data.iter().map(|(info, _, target)| (info.clone(), &target[..]))).unwrap();
    let options = EncodeOptions::default().codec(Codec::Zstd).layout(layout).chunk_lanes(8192);
    Encode::new(&target).base(&base).options(options).to_memory().unwrap().0
}

#[test]
#[ignore = "needs a CUDA device"]
fn frames_of_every_layout_are_expanded_on_the_device() {
    let device = super::device();
    let Some(nvcomp) = nvcomp("frames") else { return };
    let mut runs = 0;
    for (i, dtype) in [Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F64].into_iter().enumerate() {
        let data = data(dtype);
        let base = MemoryCheckpoint::new(data.iter().map(|(info, base, _)| (info.clone(), &base[..]))).unwrap();
        for (j, &layout) in Layout::ALL.iter().enumerate() {
            let pair = pair_of(&data, layout);
            let index = DeviceIndex::upload(device, pair.index()).unwrap().trust(&nvcomp).unwrap();
            for (k, mode) in MODES.into_iter().enumerate() {
                // On the stand-in, each pair of mode and route occurs with some of the layouts.
                let is_chosen = |skew: &usize| !stand_in::is_used() || *skew == (i + j + k) % ROUTES.len();
                for (skew, route) in ROUTES.into_iter().enumerate().filter(|(skew, _)| is_chosen(skew)) {
                    let (outcome, outputs) = apply(device, &index, &pair, &base, mode, route, skew);
                    let told = format!("{layout} {dtype} {mode:?} {route:?}");
                    outcome.unwrap_or_else(|e| panic!("{told}: {e}"));
                    for (place, found) in outputs {
                        let name = pair.index().tensor(place).name;
                        let expected = &data.iter().find(|(info, ..)| info.name == name).unwrap().2;
                        assert!(found == *expected, "{told}: tensor {name}");
                    }
                    runs += 1;
                }
            }
        }
    }
    eprintln!("frames: every tensor right in {runs} runs");
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_damaged_frame_does_not_reach_nvcomp() {
    let device = super::device();
    let Some(nvcomp) = nvcomp("damaged frames") else { return };
    let data = data(Dtype::Bf16);
    let base = MemoryCheckpoint::new(data.iter().map(|(info, base, _)| (info.clone(), &base[..]))).unwrap();
    let pair = pair_of(&data, Layout::NibbleGaps);
    let index = DeviceIndex::upload(device, pair.index()).unwrap().trust(&nvcomp).unwrap();
    let mut refused = 0;
    for (chunk, record) in pair.index().records().iter().enumerate().filter(|(_, record)| record.num_deltas.get() > 0).step_by(7) {
        let mut blob = pair.blob().clone();
        blob[record.blob_offset.get() as usize + record.compressed_size.get() as usize / 2] ^= 0x10;
        let index_again = ValidatedIndex::parse(pair.index().as_bytes().to_vec(), &Limits::default()).unwrap();
        let damaged = Pair::new(index_again, blob).unwrap();
        for mode in MODES {
            let (outcome, _) = apply(device, &index, &damaged, &base, mode, Route::Device, 0);
            let error = match outcome.unwrap_err() {
                Error::Poisoned { source, .. } => *source,
                error => error,
            };
            let Error::Invalid(invalid) = &error else { panic!("{error}") };
            assert_eq!((invalid.rule, invalid.at.chunk), (tpde_core::error::Rule::PayloadCrc32, Some(chunk as u32)), "{error}");
            refused += 1;
        }
    }
    eprintln!("damaged frames: {refused} refused");
}
