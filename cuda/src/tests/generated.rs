//! Generated tensors of every dtype, codec, mode and density.

use super::super::DeviceIndex;
use super::laid::{apply, routes};
use super::stand_in;
use super::vectors::MODES;
use tpde::{Codec, Encode, EncodeOptions, MemoryCheckpoint, Pair, TensorInfo};
use tpde_core::lane::Dtype;

/// Deterministic pseudo-random numbers.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }
}

/// Returns base and target bytes: lanes of all magnitudes. One lane in `rarity` changes, usually by a few units.
pub fn lanes(random: &mut Random, dtype: Dtype, lanes: usize, rarity: u64) -> (Vec<u8>, Vec<u8>) {
    let width = dtype.lane_bytes();
    let mut base = vec![0; lanes * width];
    for lane in base.chunks_mut(width) {
        let value = random.bits() >> (random.bits() % (8 * width as u64)) >> (64 - 8 * width);
        lane.copy_from_slice(&value.to_le_bytes()[..width]);
    }
    let mut target = base.clone();
    for lane in target.chunks_mut(width) {
        if random.bits().is_multiple_of(rarity) {
            let by = if random.bits().is_multiple_of(16) { random.bits() } else { 1 + random.bits() % 5 };
            let mut value = [0; 8];
            value[..width].copy_from_slice(lane);
            let value = u64::from_le_bytes(value).wrapping_add(by);
            lane.copy_from_slice(&value.to_le_bytes()[..width]);
        }
    }
    (base, target)
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_codec_dtype_mode_and_density() {
    let device = super::device();
    let dtypes = if stand_in::is_used() { &[Dtype::I8, Dtype::Bf16][..] } else { Dtype::ALL };
    let (mut runs, mut tensors) = (0, 0);
    for codec in [Codec::Raw, Codec::Zstd, Codec::Conditioned] {
        for &dtype in dtypes {
            // One pair has tensors in which one lane in 1 to 5,000 changes, or none. They have from one lane to five chunks.
            let mut data = Vec::new();
            let random = &mut Random(u64::from(dtype.code()) + 77);
            for (n, rarity) in [1, 2, 10, 100, 5000, u64::MAX].into_iter().enumerate() {
                for size in [1usize, 255, 4096, 4097, 20_000] {
                    let elements = (size * dtype.lane_bytes() * 8) as u64 / dtype.bits();
                    if dtype.lanes(&[elements]) != Some(size as u64) {
                        continue;
                    }
                    let info = TensorInfo { name: format!("{n}.{size}"), dtype, shape: vec![elements] };
                    let (base, target) = lanes(random, dtype, size, rarity);
                    data.push((info, base, target));
                }
            }
            let base = MemoryCheckpoint::new(data.iter().map(|(info, base, _)| (info.clone(), &base[..]))).unwrap();
            let target = MemoryCheckpoint::new(data.iter().map(|(info, _, target)| (info.clone(), &target[..]))).unwrap();
            let options = EncodeOptions::default().codec(codec).chunk_lanes(4096);
            let (with_base, _) = Encode::new(&target).base(&base).options(options.clone()).to_memory().unwrap();
            let (alone, _) = Encode::new(&target).options(options.clone()).to_memory().unwrap();
            let check = |pair: &Pair<Vec<u8>>, skew: usize| {
                let index = DeviceIndex::upload(device, pair.index()).unwrap();
                let mut runs = 0;
                for mode in MODES {
                    for (n, &route) in routes(pair.index()).iter().enumerate() {
                        let (outcome, outputs) = apply(device, &index, pair, &base, mode, route, skew + n);
                        let told = format!("{codec} {dtype} {mode:?} {route:?}");
                        outcome.unwrap_or_else(|e| panic!("{told}: {e}"));
                        for (place, found) in outputs {
                            let name = pair.index().tensor(place).name;
                            let expected = &data.iter().find(|(info, ..)| info.name == name).unwrap().2;
                            assert!(found == *expected, "{told}: tensor {name}");
                        }
                        runs += 1;
                    }
                }
                runs
            };
            runs += check(&with_base, 0) + check(&with_base, 3) + check(&alone, 1);
            tensors += data.len();
        }
    }
    eprintln!("{tensors} generated tensors right in {runs} runs");
}
