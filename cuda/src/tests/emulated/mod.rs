//! The sources of the kernels, compiled for the processor (`kernels/emulator`). In every mode they give the results of the
//! decoder, and access only their own memory.

mod derived;
pub mod emulator;
mod encoder;

use self::emulator::{Cases, Chunk, Hashed, Source};
use super::cases::shapes::{Shape, case_of, rows_of};
use super::cases::writer::tile;
use super::cases::{Case, Random, faults, hostile, is_same_kind, random_lanes};
use super::derived::sources_of;
use super::laid::base_of;
use super::vectors;
use tpde::{Checkpoint, Pair};
use tpde_core::codec::{Codec, Encoded, RawTranscoder};
use tpde_core::format::BaseKind;
use tpde_core::lane::Dtype;

/// Alignments of tensors: at multiples of 64 bytes, and at arbitrary lanes. The offsets of base and output are equal or
/// different.
const SHIFTS: [&str; 6] = ["--shift", "0", "--shift", "1", "--shift", "6"];

/// Tensors in rows with gaps between them, aligned and not.
const ROWS: [&str; 6] = ["--rows", "1", "--shift", "0", "--shift", "3"];

/// Returns `all` if `TPDE_LONG` is set, else `short`: the emulator is slow, and a check before a merge must not be. A step through
/// [`rows_and_turns`] has no factor in common with the numbers of its loops, so that it meets all of their values.
fn long_or_short(all: usize, short: usize) -> usize {
    if std::env::var_os("TPDE_LONG").is_some() { all } else { short }
}

/// Returns the chunks of a pair that reach a kernel: as stored, and expanded for codec `zstd`.
fn chunks_of(pair: &Pair<Vec<u8>>, checkpoint: Option<&dyn Checkpoint>) -> Option<[Vec<Chunk>; 2]> {
    let (mut stored, mut expanded) = (Vec::new(), Vec::new());
    for tensor in pair.index().tensors() {
        let width = tensor.lane_bytes();
        let (mut base, mut source) = (Vec::new(), None);
        if tensor.base_kind != BaseKind::None {
            // A base of another shape is checked by the host.
            let checkpoint = checkpoint?;
            let place = checkpoint.find(tensor.base_name)?;
            let fits = |place: usize, dtype: Dtype, shape: &[u64]| {
                checkpoint.tensors()[place].shape == shape && checkpoint.tensors()[place].dtype == dtype
            };
            if !fits(place, tensor.base_dtype(), &tensor.base_shape()?) {
                return None;
            }
            if let Some((name, dtype, shape)) = tensor.scales()
                && !checkpoint.find(name).is_some_and(|place| fits(place, dtype, &shape))
            {
                return None;
            }
            source = sources_of(&tensor, checkpoint).map(|(derived, base, scales)| Source { form: derived.form, base, scales });
            base = base_of(&tensor, checkpoint);
        }
        for number in tensor.chunks() {
            let (record, sums) = (&pair.index().records()[number as usize], &pair.index().sums()[number as usize]);
            let lanes = tensor.chunk_range(number);
            let start = record.blob_offset.get() as usize;
            let end = start + record.compressed_size.get() as usize;
            let here = |lane: u64| (lane as usize * width).min(base.len());
            let mut case = Case {
                codec: tensor.codec,
                dtype: tensor.dtype,
                lanes: (lanes.end - lanes.start) as usize,
                set: tensor.tables.cloned(),
                base: base[here(lanes.start)..here(lanes.end)].to_vec(),
                payload: pair.blob()[start..end].to_vec(),
                padding: pair.blob()[end..end.next_multiple_of(16)].iter().copied().max().unwrap_or(0),
                uncompressed_size: record.uncompressed_size.get(),
                num_deltas: record.num_deltas.get(),
                crc32: record.crc32.get(),
                base_sum: sums.base_sum.get(),
                target_sum: sums.target_sum.get(),
            };
            let expected = case.decode();
            if case.codec == Codec::Zstd && case.num_deltas > 0 {
                let encoded = Encoded { uncompressed_size: case.uncompressed_size, num_deltas: case.num_deltas };
                let checked = crc32fast::hash(&case.payload) == case.crc32 && case.padding == 0;
                let mut transcoder = RawTranscoder::default();
                let Some(raw) = transcoder.transcode(encoded, &case.payload, case.lanes, width).ok().filter(|_| checked) else {
                    continue;
                };
                case.payload = raw.to_vec();
            }
            let list = if case.codec == Codec::Zstd { &mut expanded } else { &mut stored };
            let (first_lane, chunk_lanes) = (lanes.start, tensor.chunk_lanes);
            let right = |expected, found| expected == found;
            list.push(Chunk { case, first_lane, chunk_lanes, expected, right, source: source.clone() });
        }
    }
    Some([stored, expanded])
}

#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn vectors() {
    let mut cases = Cases::default();
    let (mut right, mut wrong) = (0, 0);
    for vector in [vectors::vectors("valid"), vectors::vectors("invalid")].concat() {
        let (name, valid) = (vector["name"].as_str().unwrap(), vector["verdict"] == "valid");
        let Ok((pair, base)) = vectors::open(&vector) else { continue };
        let Some(lists) = chunks_of(&pair, base.as_ref().map(|base| base as &dyn Checkpoint)) else { continue };
        let broken: Vec<_> =
            lists.iter().flatten().filter_map(|chunk| chunk.expected.as_ref().err()).map(|rule| rule.id()).collect();
        match vector["rule"].as_str() {
            _ if valid => assert!(broken.is_empty(), "{name}: {broken:?}"),
            Some(rule) if !broken.is_empty() => assert!(broken.iter().all(|broken| *broken == rule), "{name}: {broken:?}"),
            // The host detects the fault of this vector.
            _ => continue,
        }
        right += usize::from(valid);
        wrong += usize::from(!valid);
        for (chunks, expanded) in lists.iter().zip([false, true]) {
            if !chunks.is_empty() {
                let kind = if valid { "valid" } else { "invalid" };
                cases.add(&format!("{kind}/{name}{}", if expanded { ", expanded" } else { "" }), expanded, chunks);
            }
        }
    }
    assert!(right > 200 && wrong > 50, "{right} right, {wrong} wrong");
    cases.run("vectors", &SHIFTS);
    cases.run("vectors", &ROWS);
}

#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn one_fault_at_a_time() {
    let mut cases = Cases::default();
    for faults::Fault { name, case, .. } in faults::all() {
        let expected = case.decode();
        cases.add(&format!("fault/{name}"), false, &[Chunk::alone(case, expected, |expected, found| expected == found)]);
    }
    // Both shifts give equal alignment, but different scratch memory.
    cases.run("faults", &["--shift", "0", "--shift", "16"]);
    cases.run("faults", &["--rows", "1", "--shift", "0"]);
}

/// Payloads of the encoder for every dtype and several rates of change.
#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn generated() {
    let mut cases = Cases::default();
    let mut seed = 0;
    for codec in [Codec::Raw, Codec::Conditioned] {
        for &dtype in Dtype::ALL {
            for rarity in [1, 9, 300] {
                let chunk = |lanes: usize| {
                    seed += 1;
                    let (base, target) = random_lanes(&mut Random(seed), dtype, lanes, rarity);
                    let mut case = Case::encoded(codec, dtype, 0, base, &target);
                    if case.base == target {
                        case.set = None;
                    }
                    Chunk::alone(case, Ok(target), |expected, found| expected == found)
                };
                let chunks: Vec<_> = [1, 127, 4096, 4097].into_iter().map(chunk).collect();
                cases.add(&format!("generated/{codec} {dtype} 1 in {rarity}"), false, &chunks);
            }
        }
    }
    for (n, dtype) in [Dtype::Bf16, Dtype::F16, Dtype::F32, Dtype::F64, Dtype::F8E4m3].into_iter().enumerate() {
        let (_, target) = random_lanes(&mut Random(n as u64), dtype, 3000, 1);
        let low_bits = dtype.mantissa_bits().unwrap() + 1;
        let mut case = Case::encoded(Codec::Conditioned, dtype, low_bits, vec![0; target.len()], &target);
        let zeros = Chunk::alone(case.clone(), Ok(target.clone()), |expected, found| expected == found);
        case.base.clear();
        let none = Chunk::alone(case, Ok(target), |expected, found| expected == found);
        cases.add(&format!("generated/{dtype} without a base"), false, &[zeros, none]);
    }
    cases.run("generated", &["--shift", "0", "--shift", "3"]);
    cases.run("generated", &ROWS);
}

/// Every number of states with every number of segments, and choices that the encoder never makes.
#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn every_shape() {
    let mut cases = Cases::default();
    for states_log2 in 0..6u8 {
        for segments_log2 in 0..6u8 {
            let random = &mut Random(u64::from(states_log2 * 6 + segments_log2));
            let chunks: Vec<_> = [Dtype::Bf16, Dtype::F32]
                .into_iter()
                .map(|dtype| {
                    let lanes = 3000 + (tile(dtype) << segments_log2);
                    let shape = Shape { dtype, lanes, states_log2, segments_log2, low: 0, ..Shape::any(random, 1) };
                    let case = case_of(shape);
                    let expected = case.decode();
                    assert!(expected.is_ok());
                    Chunk::alone(case, expected, |expected, found| expected == found)
                })
                .collect();
            cases.add(&format!("shape/{} states, {} segments", 1 << states_log2, 1 << segments_log2), false, &chunks);
        }
    }
    cases.run("shapes", &["--shift", "2"]);
    cases.run("shapes", &["--rows", "1", "--shift", "0"]);
}

/// Returns tiles that are decoded row by row, and segments that several warps share, with few and with many tiles.
fn rows_and_turns() -> Vec<(String, Chunk)> {
    let mut chunks = Vec::new();
    for dtype in [Dtype::F8E4m3, Dtype::Bf16, Dtype::F32, Dtype::F64] {
        for segments_log2 in 0..6u8 {
            for (activity_bits, low, rarity) in [
                (0, 0, 2),
                (1, 0, 2),
                (2, 0, 2),
                (0, 5, 2),
                (2, 8, 2),
                (0, 0, 30),
                (0, 0, 400),
                (2, 0, 400),
                (0, 8, 400),
                (2, 8, 400),
            ] {
                let random = &mut Random(chunks.len() as u64);
                let tiles = (1 << segments_log2) + random.below(12);
                let case = rows_of(random, dtype, tiles, segments_log2, activity_bits, low, rarity);
                let expected = case.decode();
                let segments = 1 << segments_log2;
                let name = format!(
                    "rows/{dtype}, {segments} segments, {activity_bits} activity bits, {low} low bits, 1 in {rarity} changes"
                );
                assert!(expected.is_ok(), "{name}: {:?}", expected.err());
                chunks.push((name, Chunk::alone(case, expected, |expected, found| expected == found)));
            }
        }
    }
    chunks
}

#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn rows_of_lanes() {
    let mut cases = Cases::default();
    let rows = rows_and_turns();
    rows.iter().step_by(long_or_short(1, 3)).for_each(|(name, chunk)| cases.add(name, false, std::slice::from_ref(chunk)));
    cases.run("rows", &["--shift", "0"]);
    cases.run("rows", &ROWS);
}

/// Payloads that are truncated at every byte, and payloads with one flipped bit, for a third of the bits. CRCs are correct. Reads
/// must stay inside the payload.
#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn every_cut_and_many_flipped_bits() {
    let mut cases = Cases::default();
    let mut add = |name: String, case: Case| cases.add(&name, false, &[Chunk::alone(case.clone(), case.decode(), is_same_kind)]);
    let shapes = [(Dtype::Bf16, 0, 1), (Dtype::Bf16, 20, 0), (Dtype::U8, 32, 0), (Dtype::F32, 10, 0), (Dtype::F64, 3, 1)];
    for (n, (dtype, low, segments_log2)) in shapes.into_iter().enumerate() {
        let random = &mut Random(n as u64);
        // Two segments need at least two tiles.
        let lanes = 140.max(usize::from(segments_log2) * (tile(dtype) + 12));
        let shape = Shape { dtype, lanes, rarity: 6, classes: 2, states_log2: 1, segments_log2, low, ..Shape::any(random, 1) };
        let case = case_of(shape);
        for size in (0..case.payload.len() + 18).step_by(long_or_short(1, 7)) {
            let mut case = case.clone();
            case.payload.resize(size, 0);
            case.sign();
            add(format!("cut/{n}, {size} of {} bytes", case.payload.len()), case);
        }
        for bit in (0..8 * case.payload.len()).step_by(long_or_short(3, 29)) {
            let mut case = case.clone();
            case.payload[bit / 8] ^= 1 << (bit % 8);
            case.sign();
            add(format!("flip/{n}, bit {bit}"), case);
        }
    }
    cases.run("cuts", &["--shift", "0", "--mode", "out", "--mode", "listed"]);
    cases.run("cuts", &["--rows", "1", "--shift", "0", "--mode", "out", "--mode", "listed"]);
}

/// Returns ranges of every length at a boundary of BLAKE3, aligned and not, with and without gaps.
fn hashed_ranges() -> Vec<Vec<Hashed>> {
    let random = &mut Random(3);
    let mut bytes = |size: usize| (0..size).map(|_| random.bits() as u8).collect::<Vec<u8>>();
    let boundaries = [0, 64, 128, 1024, 2048, 3072, 31 << 10, 32 << 10, 33 << 10, 64 << 10, 96 << 10];
    let sizes = boundaries.into_iter().flat_map(|at: usize| at.saturating_sub(1)..=at + 1);
    let sizes = sizes.chain([4, 63, 100, 1500, 5000, 40_000, 70_000, 200_004]);
    let whole: Vec<_> = sizes.map(|size| Hashed { bytes: bytes(size), row: 0, gap: 0, shift: 0 }).collect();
    let shifted = |by: &[usize]| {
        let moved = |(range, &shift): (&Hashed, &usize)| Hashed { shift, ..range.clone() };
        whole.iter().zip(by.iter().cycle()).map(moved).collect::<Vec<_>>()
    };
    let mut cases = vec![whole.clone(), shifted(&[16, 48, 4, 8]), shifted(&[1, 2, 3, 12, 63])];
    let mut strided = Vec::new();
    for (row, gap) in [(1, 1), (3, 2), (4, 4), (16, 16), (48, 4), (64, 1), (1000, 24), (4096, 16), (40_000, 8), (100_002, 2)] {
        for rows in [1, 2, 33, 1 + 70_000 / row] {
            if rows * row <= 300_000 {
                strided.push(Hashed { bytes: bytes(rows * row), row, gap, shift: 16 * (rows % 2) + rows % 3 % 2 * row % 16 });
            }
        }
    }
    cases.push(strided);
    // More than 32 pieces, and a level of nodes above them.
    cases.extend(
        [32 << 15, (32 << 15) + 1, (33 << 15) + 5000, 65 << 15]
            .map(|size: usize| vec![Hashed { bytes: bytes(size), row: 0, gap: 0, shift: 4 * (size % 2) }]),
    );
    cases
}

#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn hashes_of_memory() {
    let mut cases = Cases::default();
    for (n, ranges) in hashed_ranges().iter().enumerate() {
        cases.add_ranges(&format!("hash/{n}"), ranges);
    }
    cases.run("hashes", &["--mode", "out", "--shift", "0", "--shift", "3", "--shift", "10"]);
}

/// Threads share memory only where barriers order their accesses.
#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn no_races() {
    let mut cases = Cases::default();
    rows_and_turns()
        .iter()
        .step_by(long_or_short(3, 19))
        .for_each(|(name, chunk)| cases.add(name, false, std::slice::from_ref(chunk)));
    let mut seed = 0;
    for dtype in [Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F64] {
        for rarity in [1, 30] {
            let chunk = |lanes: usize| {
                seed += 1;
                let (base, target) = random_lanes(&mut Random(seed), dtype, lanes, rarity);
                Chunk::alone(Case::encoded(Codec::Raw, dtype, 0, base, &target), Ok(target), |expected, found| expected == found)
            };
            let chunks: Vec<_> = [1, 127, 4097].into_iter().map(chunk).collect();
            cases.add(&format!("races/{dtype} 1 in {rarity}"), false, &chunks);
        }
    }
    for (n, ranges) in hashed_ranges().iter().enumerate().filter(|(n, _)| *n != 4 && *n < 6) {
        cases.add_ranges(&format!("races/hash {n}"), ranges);
    }
    cases.find_races("races", &["--shift", "0", "--shift", "3", "--rows", "0", "--rows", "1"]);
}

fn strangers(name: &str, make: fn(&mut Random, usize) -> hostile::Hostile, count: usize) {
    let mut cases = Cases::default();
    let random = &mut Random(0x5EED);
    let mut refused = 0;
    for n in 0..count {
        let most = if n % 32 == 0 { 6000 } else { 600 };
        let hostile::Hostile { mut case, stored, expected } = make(random, most);
        case.payload = stored.unwrap_or(case.payload);
        refused += usize::from(expected.is_err());
        cases.add(&format!("{name}/{n}"), false, &[Chunk::alone(case, expected, is_same_kind)]);
    }
    assert!(refused > count / 3, "{refused} of {count}");
    cases.run(name, &["--shift", "1"]);
    cases.run(name, &ROWS);
}

#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn hostile_payloads_of_codec_conditioned() {
    strangers("hostile", hostile::conditioned, long_or_short(2000, 600));
}

#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn hostile_payloads_of_codec_raw() {
    strangers("hostile-raw", hostile::raw, long_or_short(500, 200));
}
