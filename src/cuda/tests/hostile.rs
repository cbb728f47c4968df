//! Payloads of strangers behind right CRCs: a device says of each what the processor says, and writes nothing that it should
//! not.

use super::super::{Device, Mode};
use super::laid::{Laid, Route, payloads};
use crate::checkpoint::{MemoryCheckpoint, TensorInfo};
use crate::codec::conditioned::kernel_model::shapes::{Shape, case_of};
use crate::codec::conditioned::kernel_model::writer::{Case, Random, is_same_kind, random_lanes};
use crate::codec::{ChunkDecoder, ChunkEncoder, Codec, Coding, Encoded};
use crate::delta::InPlace;
use crate::error::Rule;
use crate::format::BaseKind;
use crate::lane::Dtype;
use crate::reader::Pair;
use crate::sums::chunk_sum;
use crate::writer::{PairBuilder, TensorSpec};
use std::sync::Arc;

/// Cases of a pair: a launch for all of them.
const BATCH: usize = 2000;

/// A chunk with a payload that may be anything, and what the processor makes of it.
struct Hostile {
    case: Case,
    codec: Codec,
    /// What lies in the blob where it is not the payload whose CRC the record has.
    stored: Option<Vec<u8>>,
    expected: Result<Vec<u8>, Rule>,
}

fn shape(random: &mut Random) -> Shape {
    // Packed dtypes of 6 bits fill whole bytes by threes; their lanes are U8's.
    let dtypes: Vec<_> =
        Dtype::ALL.iter().filter(|dtype| dtype.bits() != 6 && dtype.bits() != 4 && **dtype != Dtype::C64).collect();
    let most = [300, 3000, 9000][random.below(3)];
    Shape {
        dtype: *dtypes[random.below(dtypes.len())],
        lanes: 1 + random.below(most),
        rarity: 1 + random.below(60),
        classes: 1 + random.below(15),
        states_log2: random.below(6) as u8,
        segments_log2: random.below(6) as u8,
        activity_bits: random.below(3) as u8,
        low: if random.once_in(4) { 1 + random.below(64) as u32 } else { 0 },
        all_tokens: random.once_in(2),
        clash: random.once_in(12),
        seed: random.bits(),
    }
}

fn conditioned(random: &mut Random) -> Hostile {
    let mut case = case_of(shape(random));
    let mut stored = None;
    let size = case.payload.len();
    match random.below(16) {
        0 | 1 => {
            for _ in 0..1 + random.below(3) {
                // Half of them where the small parts are.
                let end = if random.once_in(2) { size.min(64) } else { size };
                case.payload[random.below(end)] ^= 1 << random.below(8);
            }
        }
        2 => case.payload.truncate(1 + random.below(size)),
        3 => case.payload.resize(size + 1 + random.below(40), random.bits() as u8),
        4 | 5 => {
            let from = size - size / (1 + random.below(4));
            case.payload[from..].iter_mut().skip(22).for_each(|byte| *byte = random.bits() as u8);
        }
        6 => case.payload.iter_mut().for_each(|byte| *byte = random.bits() as u8),
        7 => case.payload.iter_mut().skip(16).for_each(|byte| *byte = random.bits() as u8),
        8 => {
            let byte = random.below(size.min(16));
            case.payload[byte] = random.bits() as u8;
        }
        9 if !case.base.is_empty() => {
            let at = random.below(case.base.len());
            case.base[at] ^= 1 << random.below(8);
        }
        10 => match random.below(3) {
            0 => case.target_sum ^= 1 << random.below(64),
            1 => case.num_deltas += 1,
            _ => case.num_deltas = (case.num_deltas - 1).max(1),
        },
        11 => {
            let mut damaged = case.payload.clone();
            damaged[random.below(size)] ^= 1 << random.below(8);
            stored = Some(damaged);
        }
        _ => {}
    }
    case.num_deltas = case.num_deltas.min(case.lanes as u32);
    let expanded = case.lanes * case.dtype.lane_bytes();
    if case.payload.len() > expanded + expanded / 64 + 64 {
        // What the index refuses does not come to a kernel.
        return conditioned(random);
    }
    case.sign();
    let mut judged = case.clone();
    judged.payload = stored.clone().unwrap_or(judged.payload);
    Hostile { expected: judged.decode(), case, codec: Codec::Conditioned, stored }
}

fn raw(random: &mut Random) -> Hostile {
    let dtype = shape(random).dtype;
    let width = dtype.lane_bytes();
    let most = [300, 9000][random.below(2)];
    let (lanes, rarity) = (1 + random.below(most), 1 + random.below(60));
    let (base, mut target) = random_lanes(random, dtype, lanes, rarity);
    if base == target {
        target[0] ^= 1;
    }
    let mut payload = Vec::new();
    let encoded = ChunkEncoder::new().unwrap().encode(Coding::Raw, dtype, &base, &target, &mut payload).unwrap();
    let mut case = Case::new(dtype, None, base, &target, payload);
    let count = encoded.num_deltas as usize;
    let position = |random: &mut Random| 4 * random.below(count);
    let deltas = (4 * count).next_multiple_of(width);
    match random.below(9) {
        0 => {
            let at = random.below(case.payload.len());
            case.payload[at] ^= 1 << random.below(8);
        }
        1 => {
            let (a, b) = (position(random), position(random));
            case.payload.copy_within(a..a + 4, b);
        }
        2 => {
            let at = position(random);
            let beyond = (lanes + random.below(5)) as u32;
            case.payload[at..at + 4].copy_from_slice(&beyond.to_le_bytes());
        }
        3 => {
            let at = position(random);
            case.payload[at..at + 4].copy_from_slice(&(random.bits() as u32).to_le_bytes());
        }
        4 => {
            let at = deltas + width * random.below(count);
            case.payload[at..at + width].fill(0);
        }
        5 => case.payload.iter_mut().for_each(|byte| *byte = random.bits() as u8),
        6 => case.payload[4 * count..deltas].fill(1),
        7 => case.base[random.below(lanes * width)] ^= 1,
        _ => {}
    }
    case.sign();
    let mut found = case.all_base_lanes();
    let expected = if chunk_sum(&found) != case.base_sum {
        Err(Rule::ChunkBaseSum)
    } else {
        let encoded = Encoded { uncompressed_size: case.payload.len() as u32, num_deltas: encoded.num_deltas };
        let mut decoder = ChunkDecoder::new();
        let payload = &case.payload;
        match decoder.decode(Codec::Raw, None, dtype, encoded, payload, case.base_sum, &mut found, &mut |_, _| Ok(())) {
            Err(e) => Err(e.rule().unwrap()),
            Ok(sum) if sum != case.target_sum => Err(Rule::ChunkTargetSum),
            Ok(_) => Ok(found),
        }
    };
    Hostile { case, codec: Codec::Raw, stored: None, expected }
}

fn name(n: usize) -> String {
    format!("{n:05}")
}

fn pair_of(cases: &[Hostile]) -> Pair<Vec<u8>> {
    let mut builder = PairBuilder::new(Vec::new(), "memory".into()).unwrap();
    for (n, Hostile { case, codec, .. }) in cases.iter().enumerate() {
        let width = case.dtype.lane_bytes();
        let whole = case.base.len() == case.lanes * width;
        builder.begin_tensor(&TensorSpec {
            name: name(n),
            base_name: None,
            dtype: case.dtype,
            shape: vec![case.lanes as u64],
            base_kind: if whole { BaseKind::Same } else { BaseKind::Prefix },
            base_param: if whole { 0 } else { (case.base.len() / width) as u64 },
            codec: *codec,
            tables: case.set.clone().map(Arc::new),
            chunk_lanes_log2: 14,
        });
        let uncompressed_size = match codec {
            Codec::Raw => case.payload.len(),
            _ => case.lanes * width,
        };
        let encoded = Encoded { uncompressed_size: uncompressed_size as u32, num_deltas: case.num_deltas };
        builder.chunk(&case.payload, encoded, case.base_sum, case.target_sum).unwrap();
        builder.end_tensor(Some(blake3::hash(&case.base)), blake3::hash(&[n as u8]));
    }
    let mut finished = builder.finish().unwrap();
    for (n, case) in cases.iter().enumerate() {
        if let Some(stored) = &case.stored {
            let at = finished.index.chunks()[n].blob_offset.get() as usize;
            finished.blob[at..][..stored.len()].copy_from_slice(stored);
        }
    }
    finished.into_pair().unwrap()
}

/// Runs a batch in a mode, and compares every verdict and every output; what is not as it should be goes to `wrong`.
fn compare(device: &Device, cases: &[Hostile], mode: Mode, route: Route, skew: usize, wrong: &mut Vec<String>) -> usize {
    let pair = pair_of(cases);
    let infos = cases.iter().enumerate().map(|(n, Hostile { case, .. })| {
        let rows = case.base.len() / case.dtype.lane_bytes();
        (TensorInfo { name: name(n), dtype: case.dtype, shape: vec![rows as u64] }, &case.base[..])
    });
    let base = MemoryCheckpoint::new(infos).unwrap();
    let index = device.upload(pair.index()).unwrap();
    let in_place = mode != Mode::OutOfPlace;
    let mut laid = Laid::new(device, pair.index(), &base, in_place, skew);
    let stream = device.stream().unwrap();
    let application = index.prepare_in_slices(&laid.bindings, mode, payloads(device, &pair, route), 64 << 10).unwrap();
    let pending = application.launch(&stream).unwrap();
    let bad = pending.bad_chunks().unwrap();
    assert_eq!(pending.wait().is_err(), !bad.is_empty());
    let mut refused = 0;
    if mode == Mode::InPlace(InPlace::AllChecked) && !bad.is_empty() {
        assert!(laid.is_untouched(device), "written although {} chunks are bad", bad.len());
    }
    let all_checked_refused = mode == Mode::InPlace(InPlace::AllChecked) && !bad.is_empty();
    for (n, output) in laid.outputs(device) {
        let Hostile { case, codec, expected, .. } = &cases[n];
        let found = bad.iter().find(|bad| bad.chunk == n as u32);
        let told = || format!("case {n}: {codec} {:?} {} lanes, {mode:?} {route:?}", case.dtype, case.lanes);
        let found = found.map(|bad| bad.rule.unwrap_or_else(|| panic!("{} was not run", told())));
        let expected_rule = expected.as_ref().err().copied();
        refused += usize::from(found.is_some());
        if !is_same_kind(expected_rule, found) {
            wrong.push(format!("{}: expected {expected_rule:?}, found {found:?}", told()));
        }
        match (expected, found) {
            (Ok(lanes), None) if !all_checked_refused && output != *lanes => wrong.push(format!("{}: other lanes", told())),
            (_, Some(_)) if in_place && output != case.base => wrong.push(format!("{}: written in place", told())),
            _ => {}
        }
    }
    refused
}

fn run(name: &str, make: fn(&mut Random) -> Hostile, batches: usize) {
    let Some(device) = super::device(name) else { return };
    let (mut total, mut refused, mut wrong) = (0, 0, Vec::new());
    for batch in 0..batches {
        let random = &mut Random(0x7E57 + batch as u64);
        let cases: Vec<_> = (0..BATCH).map(|_| make(random)).collect();
        let route = [Route::Device, Route::Pinned, Route::Host][batch % 3];
        let wrong = &mut wrong;
        refused += compare(device, &cases, Mode::OutOfPlace, route, batch, wrong);
        // Once more for the modes in place, which share what decodes.
        compare(device, &cases, Mode::InPlace(InPlace::ChunkByChunk), route, batch + 1, wrong);
        compare(device, &cases, Mode::InPlace(InPlace::AllChecked), route, batch + 2, wrong);
        let right: Vec<_> = cases.into_iter().filter(|case| case.expected.is_ok()).collect();
        compare(device, &right, Mode::InPlace(InPlace::AllChecked), route, batch, wrong);
        total += BATCH;
    }
    assert!(
        wrong.is_empty(),
        "{} of {total} cases, in one mode or another:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(20)].join("\n")
    );
    assert!(refused > total / 3, "{refused} of {total}");
    eprintln!("{name}: {total} cases, {refused} refused, verdicts and outputs as the processor's in every mode, canaries whole");
}

#[test]
fn hostile_payloads_of_codec_conditioned() {
    run("hostile payloads of codec conditioned", conditioned, 6);
}

#[test]
fn hostile_payloads_of_codec_raw() {
    run("hostile payloads of codec raw", raw, 2);
}

/// What the tests on a device are given is worth it: an index takes it, and the processor refuses a good part.
#[test]
fn cases_fit_an_index() {
    for make in [conditioned, raw] {
        let random = &mut Random(3);
        let cases: Vec<_> = (0..400).map(|_| make(random)).collect();
        assert_eq!(pair_of(&cases).index().tensor_count(), cases.len());
        let refused = cases.iter().filter(|case| case.expected.is_err()).count();
        assert!((130..380).contains(&refused), "{refused}");
    }
}
