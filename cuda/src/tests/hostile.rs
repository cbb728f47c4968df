//! Hostile payloads with correct CRCs. The device gives the same verdict as the processor, and writes only to the output.

use super::super::{Application, ApplyPlan, Device, DeviceIndex, Mode};
use super::cases::hostile::{Hostile, conditioned, raw};
use super::cases::{Random, is_same_kind};
use super::laid::{Laid, Route, payloads};
use super::stand_in;
use std::sync::Arc;
use tpde::{InPlace, MemoryCheckpoint, Pair, TensorInfo};
use tpde_core::codec::Encoded;
use tpde_core::format::{BaseKind, Form, FormatVersion};
use tpde_core::writer::{PairBuilder, TensorSpec};

/// Number of cases per pair. One launch decodes all cases of a pair.
const BATCH: usize = 2000;

fn name(n: usize) -> String {
    format!("{n:05}")
}

/// Payload digests are compared too. They are correct.
fn with_list() -> Form {
    Form { version: FormatVersion::V1_2, payload_digests: true }
}

fn pair_of(cases: &[Hostile]) -> Pair<Vec<u8>> {
    let mut builder = PairBuilder::new(Vec::new(), "memory".into(), with_list()).unwrap();
    for (n, Hostile { case, .. }) in cases.iter().enumerate() {
        let width = case.dtype.lane_bytes();
        let whole = case.base.len() == case.lanes * width;
        builder.begin_tensor(&TensorSpec {
            name: name(n),
            base_name: None,
            dtype: case.dtype,
            shape: vec![case.lanes as u64],
            part: None,
            base_kind: if whole { BaseKind::Same } else { BaseKind::Prefix },
            base_param: if whole { 0 } else { (case.base.len() / width) as u64 },
            derived: None,
            codec: case.codec,
            tables: case.set.clone().map(Arc::new),
            chunk_lanes_log2: 14,
        });
        let encoded = Encoded { uncompressed_size: case.uncompressed_size, num_deltas: case.num_deltas };
        builder.chunk(&case.payload, encoded, case.base_sum, case.target_sum).unwrap();
        builder.end_tensor(Some(blake3::hash(&case.base)), blake3::hash(&[n as u8]));
    }
    let mut finished = builder.finish().unwrap();
    for (n, case) in cases.iter().enumerate() {
        if let Some(stored) = &case.stored {
            let at = finished.index.records()[n].blob_offset.get() as usize;
            finished.blob[at..][..stored.len()].copy_from_slice(stored);
        }
    }
    finished.try_into().unwrap()
}

/// Runs a batch in a mode, and compares every verdict and every output. Differences are appended to `wrong`.
fn compare(
    device: &Device,
    cases: &[Hostile],
    mode: Mode,
    route: Route,
    skew: usize,
    has_gaps: bool,
    wrong: &mut Vec<String>,
) -> usize {
    let pair = pair_of(cases);
    let infos = cases.iter().enumerate().map(|(n, Hostile { case, .. })| {
        let rows = case.base.len() / case.dtype.lane_bytes();
        (TensorInfo { name: name(n), dtype: case.dtype, shape: vec![rows as u64] }, &case.base[..])
    });
    let base = MemoryCheckpoint::new(infos).unwrap();
    let index = DeviceIndex::upload(device, pair.index()).unwrap();
    let in_place = mode != Mode::OutOfPlace;
    let mut laid = Laid::in_rows(device, pair.index(), &base, in_place, skew, has_gaps);
    let stream = device.stream().unwrap();
    // Every target digest of the pair is wrong: a payload is refused by the decoder, or not at all.
    let plan = ApplyPlan::in_slices(&index, &laid.bindings, mode, payloads(device, &pair, route), 64 << 10).unwrap();
    let application = Application::prepare(plan.digests(false)).unwrap();
    let pending = application.launch(&stream).unwrap();
    let bad = pending.bad_chunks().unwrap();
    assert_eq!(pending.wait().is_err(), !bad.is_empty());
    let mut refused = 0;
    if mode == Mode::InPlace(InPlace::AllChecked) && !bad.is_empty() {
        assert!(laid.is_untouched(device), "written although {} chunks are bad", bad.len());
    }
    let all_checked_refused = mode == Mode::InPlace(InPlace::AllChecked) && !bad.is_empty();
    for (n, output) in laid.outputs(device) {
        let Hostile { case, expected, .. } = &cases[n];
        let found = bad.iter().find(|bad| bad.chunk == n as u32);
        let told = || format!("case {n}: {} {:?} {} lanes, {mode:?} {route:?}", case.codec, case.dtype, case.lanes);
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

fn run(name: &str, make: fn(&mut Random, usize) -> Hostile, batches: usize, has_gaps: bool) {
    let device = super::device();
    let (batches, batch_cases) = if stand_in::is_used() { (batches.min(3), BATCH / 20) } else { (batches, BATCH) };
    let (mut total, mut refused, mut wrong) = (0, 0, Vec::new());
    for batch in 0..batches {
        let random = &mut Random(0x7E57 + batch as u64 + if has_gaps { 1 << 32 } else { 0 });
        let cases: Vec<_> = (0..batch_cases).map(|n| make(random, [300, 3000, 9000][n % 3])).collect();
        let route = [Route::Device, Route::Pinned, Route::Host][batch % 3];
        let wrong = &mut wrong;
        refused += compare(device, &cases, Mode::OutOfPlace, route, batch, has_gaps, wrong);
        // Modes in place share the decoder, so they get the same cases.
        compare(device, &cases, Mode::InPlace(InPlace::ChunkByChunk), route, batch + 1, has_gaps, wrong);
        compare(device, &cases, Mode::InPlace(InPlace::AllChecked), route, batch + 2, has_gaps, wrong);
        let right: Vec<_> = cases.into_iter().filter(|case| case.expected.is_ok()).collect();
        compare(device, &right, Mode::InPlace(InPlace::AllChecked), route, batch, has_gaps, wrong);
        total += batch_cases;
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
#[ignore = "needs a CUDA device"]
fn hostile_payloads_of_codec_conditioned() {
    run("hostile payloads of codec conditioned", conditioned, 6, false);
}

#[test]
#[ignore = "needs a CUDA device"]
fn hostile_payloads_of_codec_raw() {
    run("hostile payloads of codec raw", raw, 2, false);
}

/// On a device, 12,000 and 4,000 cases.
#[test]
#[ignore = "needs a CUDA device"]
fn hostile_payloads_for_rows_with_gaps() {
    run("hostile payloads of codec conditioned for rows with gaps", conditioned, 6, true);
    run("hostile payloads of codec raw for rows with gaps", raw, 2, true);
}

/// The index accepts the cases, and the processor refuses many. Otherwise they would test little.
#[test]
fn cases_fit_an_index() {
    for make in [conditioned, raw] {
        let random = &mut Random(3);
        let cases: Vec<_> = (0..400).map(|n| make(random, [300, 3000, 9000][n % 3])).collect();
        assert_eq!(pair_of(&cases).index().tensor_count(), cases.len());
        let refused = cases.iter().filter(|case| case.expected.is_err()).count();
        assert!((130..380).contains(&refused), "{refused}");
    }
}
