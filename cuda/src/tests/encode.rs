//! Pairs that a device encodes have the bytes of those that the processor encodes.

use super::super::encode::Limits;
use super::super::{DeviceCheckpoint, Encode, Encoder};
use super::cases::{Random, random_lanes};
use super::stand_in;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::{Duration, Instant};
use tpde::{
    BaseKind, Checkpoint, Codec, CodecChoice, EncodeOptions, Error, Favor, FormatVersion, MemoryCheckpoint, Pair,
    SafetensorsCheckpoint, TensorInfo,
};
use tpde_core::lane::Dtype;

/// Tensors of base and target, by name.
#[derive(Default)]
pub(super) struct Tensors {
    pub base: Vec<(TensorInfo, Vec<u8>)>,
    pub target: Vec<(TensorInfo, Vec<u8>)>,
}

impl Tensors {
    /// Adds a tensor of `lanes` lanes, of which the base has the first `base_lanes`.
    fn add(&mut self, dtype: Dtype, base_lanes: Option<usize>, base: Vec<u8>, target: Vec<u8>) {
        let width = dtype.lane_bytes();
        let name = format!("t{:04}", self.target.len());
        let info = |lanes: usize| {
            // Elements of packed dtypes are smaller than lanes, those of C64 larger.
            let elements = lanes as u64 * 8 * width as u64 / dtype.bits();
            TensorInfo { name: name.clone(), dtype, shape: vec![elements] }
        };
        if let Some(lanes) = base_lanes {
            let mut base = base;
            base.resize(lanes * width, 0x3C);
            self.base.push((info(lanes), base));
        }
        self.target.push((info(target.len() / width), target));
    }

    pub fn checkpoint(tensors: &[(TensorInfo, Vec<u8>)]) -> MemoryCheckpoint<'_> {
        MemoryCheckpoint::new(tensors.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap()
    }

    /// Encodes on both sides, and compares the pairs.
    pub fn check(&self, options: &EncodeOptions, limits: Limits, what: &str) -> Pair<Vec<u8>> {
        let (base, target) = (Self::checkpoint(&self.base), Self::checkpoint(&self.target));
        let (expected, report) = tpde::Encode::new(&target).base(&base).options(options.clone()).to_memory().unwrap();
        let device = super::device();
        let (base, target) = (DeviceCheckpoint::upload(device, &base).unwrap(), DeviceCheckpoint::upload(device, &target).unwrap());
        let encode = Encode::new(&target).base(&base).options(options.clone()).limits(limits);
        let (found, found_report) = encode.to_memory().unwrap_or_else(|e| panic!("{what}: {e}"));
        compare(&expected, &found, what);
        let (pinned, _) = encode.encoder(encoder()).to_pinned().unwrap_or_else(|e| panic!("{what}, pinned: {e}"));
        assert!(pinned.blob()[..] == expected.blob()[..], "{what}: blobs differ in pinned memory");
        assert!(pinned.index().as_bytes() == expected.index().as_bytes(), "{what}: indexes differ with a blob in pinned memory");
        assert_eq!(format!("{found_report:?}"), format!("{report:?}"), "{what}");
        found
    }
}

/// An encoder that all tests share.
fn encoder() -> &'static Encoder {
    static ENCODER: LazyLock<Encoder> = LazyLock::new(Encoder::new);
    &ENCODER
}

/// Compares pairs, and names the first chunk that differs.
pub(super) fn compare(expected: &Pair<Vec<u8>>, found: &Pair<Vec<u8>>, what: &str) {
    for (a, b) in expected.index().tensors().zip(found.index().tensors()) {
        assert!(a.tables == b.tables, "{what}: tables of {} {}:\n{:?}\n{:?}", a.name, a.dtype, a.tables, b.tables);
        for chunk in a.chunks() {
            let i = chunk as usize;
            let of = |pair: &Pair<Vec<u8>>| {
                let record = pair.index().records()[i];
                let start = record.blob_offset.get() as usize;
                (record.num_deltas.get(), pair.blob()[start..][..record.compressed_size.get() as usize].to_vec())
            };
            let ((changed, expected_payload), (_, payload)) = (of(expected), of(found));
            let first = expected_payload.iter().zip(&payload).position(|(a, b)| a != b);
            assert!(
                expected_payload == payload,
                "{what}: chunk {i} of {} {}, {changed} changes: {} bytes, found {}, first difference at {first:?}\n{:?}\n{:?}",
                a.name,
                a.dtype,
                expected_payload.len(),
                payload.len(),
                &expected_payload[..expected_payload.len().min(64)],
                &payload[..payload.len().min(64)],
            );
            let sums = |pair: &Pair<Vec<u8>>| pair.index().sums()[i];
            assert_eq!(
                (sums(expected).base_sum, sums(expected).target_sum),
                (sums(found).base_sum, sums(found).target_sum),
                "{what}"
            );
        }
    }
    assert!(expected.blob() == found.blob(), "{what}: blobs differ");
    assert!(expected.index().as_bytes() == found.index().as_bytes(), "{what}: indexes differ");
}

/// Tensors of a dtype, of several sizes and rates of change, with every kind of base.
fn tensors_of(dtype: Dtype, seed: u64, sizes: &[usize], rarities: &[usize]) -> Tensors {
    let random = &mut Random(seed);
    let mut tensors = Tensors::default();
    for &lanes in sizes {
        // Packed dtypes have whole bytes only if lanes come in threes.
        let lanes = if matches!(dtype, Dtype::F6E2m3 | Dtype::F6E3m2) { lanes / 3 * 3 } else { lanes / 2 * 2 };
        for &rarity in rarities {
            let (base, target) = random_lanes(random, dtype, lanes, rarity);
            tensors.add(dtype, Some(lanes), base, target);
        }
        let (base, target) = random_lanes(random, dtype, lanes, 7);
        let shorter = lanes / 12 * 6;
        tensors.add(dtype, Some(shorter), base[..shorter * dtype.lane_bytes()].to_vec(), target);
    }
    tensors
}

#[test]
#[ignore = "needs a CUDA device"]
fn pairs_have_the_bytes_of_the_processor() {
    let (sizes, rarities): (&[usize], &[usize]) = match stand_in::is_used() {
        true => (&[0, 6, 600, 9000], &[1, 40]),
        false => (&[0, 6, 126, 132, 600, 4098, 9000, 70_002, 200_010], &[1, 3, 9, 300, 1 << 40]),
    };
    for &dtype in Dtype::ALL {
        let tensors = tensors_of(dtype, u64::from(dtype.code()), sizes, rarities);
        // On the stand-in, the profile is checked with one dtype per width.
        let has_profile = !stand_in::is_used() || [Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F64].contains(&dtype);
        let profile = has_profile.then_some(CodecChoice::Device);
        for codec in [Codec::Conditioned.into(), Codec::Raw.into()].into_iter().chain(profile) {
            let options = EncodeOptions::default().codec(codec).chunk_lanes(1 << 13);
            tensors.check(&options, Limits::default(), &format!("{dtype}, {}", codec.name()));
        }
        // Without a base: coded from zeros.
        let mut without = tensors_of(dtype, u64::from(dtype.code()) + 100, &sizes[sizes.len().min(4) - 1..], &[1]);
        without.base.clear();
        for codec in [Codec::Conditioned.into()].into_iter().chain(profile) {
            without.check(&EncodeOptions::default().codec(codec), Limits::default(), &format!("{dtype}, no base"));
        }
    }
}

/// Profile `device`: tensors for each way, small ones and large ones, of which only a part is read to choose. The ways are those
/// that their names say.
#[test]
#[ignore = "needs a CUDA device"]
fn each_tensor_takes_its_smallest_way() {
    let random = &mut Random(11);
    let mut tensors = Tensors::default();
    let mut expected = Vec::new();
    let lanes_of = |lanes: usize| if stand_in::is_used() { lanes } else { 8 * lanes };
    for lanes in [3000, lanes_of(140_000)] {
        let conditioned = Some((Codec::Conditioned, BaseKind::Same));
        let few = Some((Codec::Raw, BaseKind::Same));
        for dtype in [Dtype::Bf16, Dtype::F32] {
            let width = dtype.lane_bytes();
            let (base, target) = match dtype {
                Dtype::Bf16 => weights(random, lanes, 2),
                _ => random_lanes(random, dtype, lanes, 3),
            };
            let (unrelated, _) = random_lanes(random, dtype, lanes, 1);
            let mut row = base.clone();
            row[256 * width..][..100 * width].copy_from_slice(&unrelated[..100 * width]);
            let mut one = base.clone();
            one[lanes] ^= 1;
            let mut sparse = vec![0; base.len()];
            (0..8).for_each(|k| sparse[k * lanes / 8 * width] = 7);
            let zeros = Some((Codec::Raw, BaseKind::None));
            for (target, way) in [
                (target, conditioned),
                // Either codec may be smaller.
                (row, None),
                (one, few),
                (base.clone(), conditioned),
                (sparse, zeros),
                (weights(random, lanes * width / 2, 1).0, Some((Codec::Conditioned, BaseKind::None))),
            ] {
                tensors.add(dtype, Some(lanes), base.clone(), target);
                expected.push(way);
            }
            tensors.add(dtype, None, Vec::new(), base);
            expected.push(Some((Codec::Conditioned, BaseKind::None)));
        }
    }
    for favor in [Favor::Ratio, Favor::Speed] {
        let options = EncodeOptions::default().codec(CodecChoice::Device).favor(favor).chunk_lanes(1 << 15);
        let pair = tensors.check(&options, Limits { wave: 1 << 16, ..Limits::default() }, &format!("{favor}"));
        let found = pair.index().tensors().map(|tensor| (tensor.codec, tensor.base_kind));
        for (i, (found, expected)) in found.zip(&expected).enumerate() {
            assert!(expected.is_none_or(|expected| found == expected), "{favor}, tensor {i}: {found:?}, expected {expected:?}");
        }
    }
}

/// Weights with few exponents, as models have them, and small changes.
fn weights(random: &mut Random, lanes: usize, rarity: usize) -> (Vec<u8>, Vec<u8>) {
    let mut base = Vec::with_capacity(2 * lanes);
    let mut target = Vec::with_capacity(2 * lanes);
    for _ in 0..lanes {
        let magnitude = 0x3C00u32.saturating_sub((random.bits().leading_zeros() << 7) + random.below(128) as u32) as u16;
        let lane = magnitude | (random.bits() as u16 & 0x8000);
        // Small weights change more often.
        let change = random.once_in(rarity) && random.below(0x3C00) > usize::from(magnitude).saturating_sub(0x3000);
        base.extend(lane.to_le_bytes());
        target.extend((if change { lane + 1 + random.below(3) as u16 } else { lane }).to_le_bytes());
    }
    (base, target)
}

#[test]
#[ignore = "needs a CUDA device"]
fn weights_with_every_favor_and_little_memory() {
    let random = &mut Random(7);
    let lanes = if stand_in::is_used() { 40_000 } else { 3_000_000 };
    let mut tensors = Tensors::default();
    for rarity in [1, 20, 400] {
        let (base, target) = weights(random, lanes, rarity);
        tensors.add(Dtype::Bf16, Some(lanes), base, target);
    }
    let small = Limits { lanes: 1 << 15, payloads: 1 << 13, alone: 0, ..Limits::default() };
    for favor in [Favor::Ratio, Favor::Speed, Favor::Size] {
        let options = EncodeOptions::default().codec(Codec::Conditioned).favor(favor);
        tensors.check(&options, Limits::default(), &format!("{favor}"));
        tensors.check(&options.chunk_lanes(1 << 14), small, &format!("{favor}, little memory"));
    }
    // All streams overflow their first room.
    let options = EncodeOptions::default().codec(Codec::Conditioned);
    tensors.check(&options, Limits { room: 1, ..Limits::default() }, "no room");
}

/// Checkpoints for lanes of each width, with and without low bits, that take each path of the kernels in little time: sanitizers
/// make it ten times slower (`emulated::encoder`).
#[test]
#[ignore = "needs a CUDA device"]
fn small_pairs_of_all_widths() {
    for (dtype, lanes) in [(Dtype::U8, 2600), (Dtype::Bf16, 2600), (Dtype::F32, 1300), (Dtype::F64, 700)] {
        let tensors = tensors_of(dtype, u64::from(dtype.code()) + 200, &[lanes], &[1, 40]);
        let options = EncodeOptions::default().chunk_lanes(1 << 12);
        let several_warps = Limits { alone: 1 << 20, ..Limits::default() };
        let one_warp = Limits { alone: 0, ..Limits::default() };
        tensors.check(&options.clone().codec(Codec::Conditioned), several_warps, &format!("{dtype}, several warps"));
        if dtype == Dtype::Bf16 {
            tensors.check(&options.clone().codec(Codec::Conditioned), one_warp, &format!("{dtype}, one warp"));
            // All streams overflow.
            tensors.check(&options.clone().codec(Codec::Conditioned), Limits { room: 1, ..one_warp }, &format!("{dtype}, no room"));
        }
        tensors.check(&options.clone().codec(Codec::Raw), one_warp, &format!("{dtype}, raw"));
        tensors.check(&options.clone().codec(CodecChoice::Device), one_warp, &format!("{dtype}, device"));
        let mut without = tensors_of(dtype, u64::from(dtype.code()) + 300, &[lanes], &[]);
        without.base.clear();
        without.check(&options.codec(Codec::Conditioned), one_warp, &format!("{dtype}, no base"));
    }
}

/// Many small checkpoints with random sizes, dtypes, rates and options.
#[test]
#[ignore = "needs a CUDA device"]
fn generated_checkpoints() {
    let count = if stand_in::is_used() { 6 } else { 400 };
    for seed in 0..count {
        let random = &mut Random(seed + 1000);
        let mut tensors = Tensors::default();
        for _ in 0..1 + random.below(8) {
            let dtype = Dtype::ALL[random.below(Dtype::ALL.len())];
            // One large checkpoint also on the stand-in.
            let most = [100, 3000, 20_000, 150_000][random.below(if stand_in::is_used() && seed != 1 { 2 } else { 4 })];
            let lanes = 1 + random.below(most);
            let lanes = if dtype.bits().is_multiple_of(8) && dtype != Dtype::C64 { lanes } else { 6 * lanes };
            let rarity = [1, 2, 17, 200, 4000][random.below(5)];
            let (base, target) = random_lanes(random, dtype, lanes, rarity);
            let base_lanes = match random.below(4) {
                0 => None,
                1 => Some(6 * random.below(lanes / 6 + 1)),
                _ => Some(lanes),
            };
            tensors.add(dtype, base_lanes, base, target);
        }
        let favor = [Favor::Ratio, Favor::Speed, Favor::Size][random.below(3)];
        let codec = [Codec::Raw.into(), Codec::Conditioned.into(), CodecChoice::Device, CodecChoice::Device][random.below(4)];
        let options = EncodeOptions::default().codec(codec).favor(favor).chunk_lanes(1 << (12 + random.below(5)));
        let options = match random.below(3) {
            0 => options.format(FormatVersion::V1_1),
            n => options.payload_digests(n == 1),
        };
        let (lanes, payloads) = (1 << (14 + random.below(8)), 1 << (10 + random.below(10)));
        let limits = Limits {
            lanes,
            payloads,
            room: 1 + random.bits() % 400,
            hashed: 1 << random.below(20),
            alone: [0, 1 << 20][random.below(2)],
            ..Limits::default()
        };
        tensors.check(&options, limits, &format!("seed {seed}"));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn digests_that_are_known_are_stored() {
    let (base, target) = random_lanes(&mut Random(3), Dtype::Bf16, 1000, 9);
    let mut tensors = Tensors::default();
    tensors.add(Dtype::Bf16, Some(1000), base, target);
    let device = super::device();
    let [base, target] =
        [&tensors.base, &tensors.target].map(|t| DeviceCheckpoint::upload(device, &Tensors::checkpoint(t)).unwrap());
    let options = EncodeOptions::default().codec(Codec::Raw);
    let encode = Encode::new(&target).base(&base).options(options);
    let known = |byte| [("t0000".to_owned(), [byte; 16])];
    let (pair, _) = encode.base_digests(known(1)).target_digests(known(2)).to_memory().unwrap();
    let digests = pair.index().tensors().next().map(|tensor| (*tensor.base_digest(), *tensor.target_digest()));
    assert_eq!(digests, Some(([1; 16], [2; 16])));
    let options = EncodeOptions::default().codec(Codec::Raw).format(FormatVersion::V1_1);
    let error = Encode::new(&target).base(&base).options(options).base_digests(known(1)).to_memory().unwrap_err();
    assert!(matches!(&error, Error::InvalidArgument(why) if why.contains("use format 1.2")), "{error}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_a_device_cannot_encode_is_refused() {
    let device = super::device();
    let info = TensorInfo { name: "t".into(), dtype: Dtype::Bf16, shape: vec![8] };
    let target = DeviceCheckpoint::new(device, [(info.clone(), device.alloc(16).unwrap())]).unwrap();
    let options = EncodeOptions::default;
    for options in [
        options(),
        options().codec(Codec::Zstd),
        options().codec(Codec::Raw).format(FormatVersion::V1_1).payload_digests(true),
        options().codec(Codec::Raw).chunk_lanes(5000),
    ] {
        let error = Encode::new(&target).options(options).to_memory().unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
    }
    for bytes in [14, 18] {
        let memory = device.alloc(bytes).unwrap();
        assert!(matches!(DeviceCheckpoint::new(device, [(info.clone(), memory)]), Err(Error::InvalidArgument(_))));
    }
}

/// Real checkpoints, if `TPDE_PAIRS` names a folder with them, and every tensor repeated 24 times. Prints times.
#[test]
#[ignore = "needs a CUDA device"]
fn real_pairs_have_the_bytes_of_the_processor() {
    let Some(folder) = std::env::var_os("TPDE_PAIRS").map(PathBuf::from) else {
        eprintln!("SKIPPED encoding of real pairs: TPDE_PAIRS names no folder");
        return;
    };
    for (base_name, target_name) in [("base", "rl20"), ("rl20", "rl21"), ("rl20", "rl30"), ("base", "sft")] {
        let open = |name: &str| SafetensorsCheckpoint::open(folder.join(format!("{name}.safetensors"))).ok();
        let (Some(base), Some(target)) = (open(base_name), open(target_name)) else { continue };
        let large = matches!(target_name, "rl20" | "sft") && !stand_in::is_used();
        for repeat in if large { &[1, 24][..] } else { &[1] } {
            for favor in if *repeat == 1 { &[Favor::Ratio, Favor::Speed, Favor::Size][..] } else { &[Favor::Ratio, Favor::Speed] } {
                let tensors = Tensors { base: repeated(&base, *repeat), target: repeated(&target, *repeat) };
                for codec in [Codec::Conditioned.into(), CodecChoice::Device] {
                    let options = EncodeOptions::default().codec(codec).favor(*favor);
                    tensors.time(&options, &format!("{base_name} -> {target_name} x{repeat}, {}, {favor}", codec.name()));
                }
            }
        }
    }
}

/// The tensors of a checkpoint, repeated along the first dimension.
fn repeated(checkpoint: &SafetensorsCheckpoint, times: usize) -> Vec<(TensorInfo, Vec<u8>)> {
    let tensor = |(i, info): (usize, &TensorInfo)| {
        let mut bytes = vec![0; info.bytes() as usize];
        checkpoint.read(i, 0, &mut bytes).unwrap();
        let mut info = info.clone();
        match info.shape.first_mut() {
            Some(rows) => *rows *= times as u64,
            None => info.shape.push(times as u64),
        }
        (info, bytes.repeat(times))
    };
    checkpoint.tensors().iter().enumerate().map(tensor).collect()
}

impl Tensors {
    /// Compares the pairs of both sides, and prints the time of the device with digests that are known: the median of several.
    fn time(&self, options: &EncodeOptions, what: &str) {
        let (base, target) = (Self::checkpoint(&self.base), Self::checkpoint(&self.target));
        let start = Instant::now();
        let (expected, report) = tpde::Encode::new(&target).base(&base).options(options.clone()).to_memory().unwrap();
        let on_processor = start.elapsed();
        let device = super::device();
        let (base, target) = (DeviceCheckpoint::upload(device, &base).unwrap(), DeviceCheckpoint::upload(device, &target).unwrap());
        let digests = |is_base: bool| -> Vec<_> {
            let digest = |tensor: tpde::Tensor<'_>| match is_base {
                true => (tensor.base_name.to_owned(), *tensor.base_digest()),
                false => (tensor.name.to_owned(), *tensor.target_digest()),
            };
            expected.index().tensors().map(digest).collect()
        };
        let encode = Encode::new(&target).base(&base).options(options.clone());
        let encode = encode.base_digests(digests(true)).target_digests(digests(false)).encoder(encoder());
        let mut times: Vec<Duration> = Vec::new();
        for _ in 0..if stand_in::is_used() { 1 } else { 9 } {
            let start = Instant::now();
            let (found, _) = encode.to_pinned().unwrap_or_else(|e| panic!("{what}: {e}"));
            times.push(start.elapsed());
            assert!(found.blob()[..] == expected.blob()[..], "{what}: blobs differ");
            assert!(found.index().as_bytes() == expected.index().as_bytes(), "{what}: indexes differ");
        }
        times.sort();
        let median = times[times.len() / 2];
        let stored = report.index_bytes + report.blob_bytes;
        let speed = |time: Duration| report.target_bytes as f64 / time.as_secs_f64() / 1e9;
        eprintln!(
            "encode {what}: {:.1} : 1, device {:.2} ms, {:.1} GB/s without digests; processor {:.1} ms, {:.2} GB/s with them",
            report.target_bytes as f64 / stored as f64,
            1e3 * median.as_secs_f64(),
            speed(median),
            1e3 * on_processor.as_secs_f64(),
            speed(on_processor),
        );
    }
}
