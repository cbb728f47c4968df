//! Payload digests: payloads that CRC and sums accept, but whose digest is not that of the pair.

use super::super::{Application, ApplyPlan, DeviceIndex, Mode, Payloads};
use super::cases::{Case, Random, random_lanes};
use super::generated;
use super::laid::{Laid, Route, payloads, routes};
use super::stand_in;
use super::vectors::MODES;
use std::sync::Arc;
use tpde::{Encode, EncodeOptions, InPlace, MemoryCheckpoint, Pair, PayloadDigests, TensorInfo};
use tpde_core::codec::{Codec, Encoded};
use tpde_core::digest;
use tpde_core::error::{Error, Rule};
use tpde_core::format::{BaseKind, Form, FormatVersion};
use tpde_core::lane::Dtype;
use tpde_core::writer::{PairBuilder, TensorSpec};

const WITH_LIST: Form = Form { version: FormatVersion::V1_2, payload_digests: true };
const WITH_ROOT: Form = Form { version: FormatVersion::V1_2, payload_digests: false };

/// Tensors of one chunk each. A chunk without changes has no payload.
fn cases() -> Vec<(Case, Vec<u8>)> {
    let mut random = Random(7);
    let mut cases = Vec::new();
    for (n, (codec, dtype, lanes, rarity)) in [
        (Codec::Conditioned, Dtype::Bf16, 9000, 20),
        (Codec::Raw, Dtype::F32, 3000, 4),
        (Codec::Conditioned, Dtype::F32, 4000, 3),
        (Codec::Raw, Dtype::U8, 70_000, 2),
        (Codec::Zstd, Dtype::Bf16, 4000, 9),
        (Codec::Conditioned, Dtype::Bf16, 4000, usize::MAX),
        (Codec::Raw, Dtype::U8, 300, 9),
    ]
    .into_iter()
    .enumerate()
    {
        let (base, mut target) = random_lanes(&mut random, dtype, lanes, if rarity == usize::MAX { 1 << 20 } else { rarity });
        if rarity == usize::MAX {
            target.clone_from(&base);
        }
        let case = Case::encoded(codec, dtype, 0, base, &target);
        assert_eq!(case.payload.is_empty(), n == 5);
        cases.push((case, target));
    }
    cases
}

fn name(n: usize) -> String {
    format!("{n:02}")
}

/// A pair of the cases. The digest of payload `forged` is that of other bytes. It stands for a forged payload, whose CRC and sums
/// are correct.
fn pair_of(cases: &[(Case, Vec<u8>)], form: Form, forged: Option<usize>) -> Pair<Vec<u8>> {
    pair_with(cases, form, forged, None)
}

/// [`pair_of`], where the target digest of tensor `other` is that of other bytes. It stands for forged payloads and sums.
fn pair_with(cases: &[(Case, Vec<u8>)], form: Form, forged: Option<usize>, other: Option<usize>) -> Pair<Vec<u8>> {
    let mut builder = PairBuilder::new(Vec::new(), "memory".into(), form).unwrap();
    for (n, (case, target)) in cases.iter().enumerate() {
        builder.begin_tensor(&TensorSpec {
            name: name(n),
            base_name: None,
            dtype: case.dtype,
            shape: vec![case.lanes as u64],
            part: None,
            base_kind: BaseKind::Same,
            base_param: 0,
            derived: None,
            codec: case.codec,
            tables: case.set.clone().map(Arc::new),
            chunk_lanes_log2: 18,
        });
        let mut digest = digest::of_payload(&case.payload);
        if forged == Some(n) {
            digest[n % 16] ^= 1 << (n % 8);
        }
        let encoded = Encoded { uncompressed_size: case.uncompressed_size, num_deltas: case.num_deltas };
        builder.hashed_chunk(&case.payload, digest, encoded, case.base_sum, case.target_sum).unwrap();
        let mut target = target.clone();
        if other == Some(n) {
            let at = n * 7919 % target.len();
            target[at] ^= 1 << (n % 8);
        }
        builder.end_tensor(Some(blake3::hash(&case.base)), blake3::hash(&target));
    }
    builder.finish().unwrap().try_into().unwrap()
}

fn base_of(cases: &[(Case, Vec<u8>)]) -> MemoryCheckpoint<'_> {
    let infos = cases
        .iter()
        .enumerate()
        .map(|(n, (case, _))| (TensorInfo { name: name(n), dtype: case.dtype, shape: vec![case.lanes as u64] }, &case.base[..]));
    MemoryCheckpoint::new(infos).unwrap()
}

/// Where the host forms the payload list, it finds a damaged payload before the payload root differs, and names its tensor.
#[test]
#[ignore = "needs a CUDA device"]
fn a_damaged_payload_is_named_where_the_host_hashes_payloads() {
    let device = super::device();
    let cases = cases();
    let base = base_of(&cases);
    let pair = pair_of(&cases, WITH_ROOT, None);
    let index = DeviceIndex::upload(device, pair.index()).unwrap();
    let mut damaged = 0;
    for (n, record) in pair.index().records().iter().enumerate().filter(|(_, record)| record.compressed_size.get() > 0) {
        let mut blob = pair.blob().to_vec();
        blob[(record.blob_offset.get() + u64::from(record.compressed_size.get())) as usize - 1] ^= 1;
        for mode in [Mode::OutOfPlace, Mode::InPlace(InPlace::AllChecked), Mode::InPlace(InPlace::ChunkByChunk)] {
            let laid = Laid::new(device, pair.index(), &base, mode != Mode::OutOfPlace, 1);
            let plan = ApplyPlan::new(&index, &laid.bindings, mode, Payloads::Host(&blob)).unwrap();
            let error = Application::prepare(plan).unwrap_err().to_string();
            assert!(error.contains("payload.crc32") && error.contains(&format!("tensor {}", name(n))), "{error}");
            assert!(laid.is_untouched(device));
        }
        damaged += 1;
    }
    assert_eq!(damaged, cases.len() - 1);
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_payload_with_another_digest_is_refused() {
    let device = super::device();
    let cases = cases();
    let base = base_of(&cases);
    // If the index has only the root, the host forms the payload list where it expands payloads of codec `zstd`; otherwise the
    // device does. The set without `zstd` tests the device.
    let without_zstd: Vec<_> = cases.iter().filter(|(case, _)| case.codec != Codec::Zstd).cloned().collect();
    let base_without_zstd = base_of(&without_zstd);
    let all = (&cases, &base);
    let mut refused = 0;
    for (form, (cases, base)) in [(WITH_LIST, all), (WITH_ROOT, all), (WITH_ROOT, (&without_zstd, &base_without_zstd))] {
        let forged = (0..cases.len()).filter(|&n| !cases[n].0.payload.is_empty());
        for forged in forged.map(Some).chain([None]) {
            let pair = pair_of(cases, form, forged);
            let index = DeviceIndex::upload(device, pair.index()).unwrap();
            for mode in MODES {
                for &route in routes(pair.index()) {
                    let told = format!("{form:?}, forged {forged:?}, {mode:?}, {route:?}");
                    let mut laid = Laid::new(device, pair.index(), base, mode != Mode::OutOfPlace, forged.unwrap_or(0));
                    // From the host, slices so small that each payload has its own; otherwise one slice for all.
                    let slice = if route == Route::Host { 1 } else { 1 << 30 };
                    let plan = ApplyPlan::in_slices(&index, &laid.bindings, mode, payloads(device, &pair, route), slice).unwrap();
                    assert_eq!(plan.compared(), PayloadDigests::All, "{told}");
                    let stream = device.stream().unwrap();
                    let outcome = Application::prepare(plan).and_then(|application| {
                        assert_eq!(application.payload_digests(), PayloadDigests::All, "{told}");
                        application.launch(&stream)?.wait()
                    });
                    let Some(forged) = forged else {
                        outcome.unwrap_or_else(|e| panic!("{told}: {e}"));
                        for (n, found) in laid.outputs(device) {
                            assert!(found == cases[n].1, "{told}");
                        }
                        continue;
                    };
                    refused += 1;
                    let error = outcome.unwrap_err();
                    let is_one_by_one = mode == Mode::InPlace(InPlace::ChunkByChunk);
                    let error = match error {
                        // The payload root is compared when all chunks have been stored.
                        Error::Poisoned { written, total, source } if is_one_by_one && !form.payload_digests => {
                            assert!(written.len() == cases.len() && total as usize == cases.len(), "{told}: {written:?}");
                            for (n, found) in laid.outputs(device) {
                                assert!(found == cases[n].1, "{told}, tensor {n}");
                            }
                            *source
                        }
                        Error::Poisoned { written, total, source } if is_one_by_one => {
                            // If the host expands the forged payload, it reads no further, so not all other chunks are written.
                            assert!(!written.contains(&(forged as u32)) && total as usize == cases.len(), "{told}: {written:?}");
                            for (n, found) in laid.outputs(device) {
                                let (case, target) = &cases[n];
                                let is_written = written.contains(&(n as u32));
                                assert!(&found == if is_written { target } else { &case.base }, "{told}, tensor {n}");
                            }
                            *source
                        }
                        error => {
                            let is_root_on_device =
                                !form.payload_digests && cases.iter().all(|(case, _)| case.codec != Codec::Zstd);
                            assert!(!(is_one_by_one && is_root_on_device), "{told}: {error}");
                            assert!(mode == Mode::OutOfPlace || laid.is_untouched(device), "{told}");
                            error
                        }
                    };
                    let Error::Invalid(invalid) = error else { panic!("{told}: {error}") };
                    if form.payload_digests {
                        assert_eq!(invalid.rule, Rule::PayloadDigest, "{told}");
                        assert_eq!(invalid.at.tensor, Some(name(forged)), "{told}");
                    } else {
                        assert_eq!(invalid.rule, Rule::HeaderPayloadRoot, "{told}");
                    }
                }
            }
        }
    }
    eprintln!("{refused} applications of forged payloads refused");
}

/// The root covers the whole pair, so it is compared if all payloads are read, even if the first tensors, which have none, are left out.
#[test]
#[ignore = "needs a CUDA device"]
fn the_payload_root_is_compared_without_tensors_that_have_no_payload() {
    let device = super::device();
    let mut cases = cases();
    cases.retain(|(case, _)| case.codec != Codec::Zstd);
    cases.sort_by_key(|(case, _)| !case.payload.is_empty());
    assert!(cases[0].0.payload.is_empty() && !cases[1].0.payload.is_empty());
    let base = base_of(&cases);
    for (forged, expected) in [(None, None), (Some(cases.len() - 1), Some(Rule::HeaderPayloadRoot))] {
        let pair = pair_of(&cases, WITH_ROOT, forged);
        let index = DeviceIndex::upload(device, pair.index()).unwrap();
        for mode in MODES {
            for &route in routes(pair.index()) {
                let laid = Laid::new(device, pair.index(), &base, mode != Mode::OutOfPlace, 0);
                let plan = ApplyPlan::new(&index, &laid.bindings[1..], mode, payloads(device, &pair, route)).unwrap();
                assert_eq!(plan.compared(), PayloadDigests::All);
                let application = Application::prepare(plan.digests(false)).unwrap();
                let stream = device.stream().unwrap();
                let outcome = application.launch(&stream).unwrap().wait();
                assert_eq!(outcome.err().and_then(|e| e.rule()), expected, "{mode:?} {route:?}");
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_target_with_another_digest_is_refused() {
    let device = super::device();
    let mut cases = cases();
    // Several chunks per piece are not possible here, but a tensor of many pieces, and of several batches with the next one.
    let (base, target) = random_lanes(&mut Random(8), Dtype::F32, 200_000, 50);
    cases.push((Case::encoded(Codec::Conditioned, Dtype::F32, 0, base, &target), target));
    let base = base_of(&cases);
    let mut refused = 0;
    for other in (0..cases.len()).map(Some).chain([None]) {
        let pair = pair_with(&cases, WITH_LIST, None, other);
        let index = DeviceIndex::upload(device, pair.index()).unwrap();
        for mode in MODES {
            for &route in routes(pair.index()) {
                let told = format!("other target {other:?}, {mode:?}, {route:?}");
                let mut laid = Laid::in_rows(device, pair.index(), &base, mode != Mode::OutOfPlace, 3, route == Route::Host);
                let plan = || ApplyPlan::new(&index, &laid.bindings, mode, payloads(device, &pair, route)).unwrap();
                let stream = device.stream().unwrap();
                let application = Application::prepare(plan()).unwrap();
                let outcome = application.launch(&stream).unwrap().wait();
                let Some(other) = other else {
                    outcome.unwrap_or_else(|e| panic!("{told}: {e}"));
                    for (n, found) in laid.outputs(device) {
                        assert!(found == cases[n].1, "{told}, tensor {n}");
                    }
                    continue;
                };
                refused += 1;
                let error = match outcome.unwrap_err() {
                    Error::Poisoned { written, total, source } if mode == Mode::InPlace(InPlace::ChunkByChunk) => {
                        assert!(written.len() == cases.len() && total as usize == cases.len(), "{told}: {written:?}");
                        *source
                    }
                    error => {
                        assert!(mode != Mode::InPlace(InPlace::ChunkByChunk), "{told}: {error}");
                        assert!(mode == Mode::OutOfPlace || laid.is_untouched(device), "{told}");
                        error
                    }
                };
                let Error::Invalid(invalid) = error else { panic!("{told}: {error}") };
                assert_eq!((invalid.rule, invalid.at.tensor), (Rule::TensorTargetDigest, Some(name(other))), "{told}");
                // Without digests of targets, the same pair is accepted.
                let application = Application::prepare(plan().digests(false)).unwrap();
                if mode == Mode::InPlace(InPlace::ChunkByChunk) {
                    laid.restore(device);
                }
                application.launch(&stream).unwrap().wait().unwrap_or_else(|e| panic!("{told}: {e}"));
                for (n, found) in laid.outputs(device) {
                    assert!(found == cases[n].1, "{told}, tensor {n}");
                }
            }
        }
    }
    eprintln!("{refused} applications with other targets refused");
}

#[test]
#[ignore = "needs a CUDA device"]
fn launches_after_a_forged_payload_start_anew() {
    let device = super::device();
    let cases = cases();
    let base = base_of(&cases);
    let good = pair_of(&cases, WITH_LIST, None);
    let index = DeviceIndex::upload(device, good.index()).unwrap();
    // Damaging a payload without changing its CRC takes a search. So the digests on the device are damaged instead.
    let list = good.index().records().len() * 16;
    let on_device = index.payload_list_for_test(list as u64);
    let mut bytes = vec![0; list];
    device.read(&on_device, &mut bytes).unwrap();
    for mode in MODES {
        for skipped in [false, true] {
            let mut laid = Laid::new(device, good.index(), &base, mode != Mode::OutOfPlace, 0);
            let plan = ApplyPlan::new(&index, &laid.bindings, mode, payloads(device, &good, Route::Pinned)).unwrap();
            let application = Application::prepare(plan.payload_digests(!skipped)).unwrap();
            let expected = if skipped { PayloadDigests::NotCompared } else { PayloadDigests::All };
            assert_eq!(application.payload_digests(), expected);
            let stream = device.stream().unwrap();
            let mut other = bytes.clone();
            other[16 + 3] ^= 4;
            device.write(&on_device, &other).unwrap();
            let outcome = application.launch(&stream).unwrap().wait();
            let rule = match outcome {
                Err(Error::Poisoned { source, .. }) => source.rule(),
                outcome => outcome.err().and_then(|e| e.rule()),
            };
            assert_eq!(rule, (!skipped).then_some(Rule::PayloadDigest), "{mode:?}");
            device.write(&on_device, &bytes).unwrap();
            if !skipped {
                if mode == Mode::InPlace(InPlace::ChunkByChunk) {
                    laid.restore(device);
                }
                application.launch(&stream).unwrap().wait().unwrap();
            }
            for (n, found) in laid.outputs(device) {
                assert!(found == cases[n].1, "{mode:?}, tensor {n}");
            }
        }
    }
}

/// Payloads of more than 32 pieces, whose nodes are combined in several rounds, and many small ones.
#[test]
#[ignore = "needs a CUDA device"]
fn digests_of_large_payloads_are_those_of_the_processor() {
    let device = super::device();
    let random = &mut generated::Random(11);
    // The stand-in is slow: a large chunk and a small one, and each value of both options once.
    let lanes = if stand_in::is_used() { 1_100_000 } else { 1_500_000 };
    let (base, target) = generated::lanes(random, Dtype::U8, lanes, 1);
    let infos = |name: &'static str| TensorInfo { name: name.into(), dtype: Dtype::U8, shape: vec![lanes as u64] };
    let checkpoint = |lanes| MemoryCheckpoint::new([(infos("w"), lanes)]).unwrap();
    let (old, new) = (checkpoint(&base[..]), checkpoint(&target[..]));
    let options = [(1 << 20, true), (4096, false), (1 << 20, false), (4096, true)];
    for &(chunk_lanes, payload_digests) in if stand_in::is_used() { &options[..2] } else { &options } {
        let options = EncodeOptions::default().codec(Codec::Raw).chunk_lanes(chunk_lanes).payload_digests(payload_digests);
        let pair = Encode::new(&new).base(&old).options(options).to_memory().unwrap().0;
        let largest = pair.index().records().iter().map(|record| record.compressed_size.get()).max().unwrap();
        assert!(chunk_lanes == 4096 || largest > 32 << 15, "{largest}");
        let index = DeviceIndex::upload(device, pair.index()).unwrap();
        let mut laid = Laid::new(device, pair.index(), &old, true, 0);
        let plan =
            ApplyPlan::new(&index, &laid.bindings, Mode::InPlace(InPlace::AllChecked), payloads(device, &pair, Route::Device));
        let application = Application::prepare(plan.unwrap()).unwrap();
        assert_eq!(application.payload_digests(), PayloadDigests::All);
        let stream = device.stream().unwrap();
        application.launch(&stream).unwrap().wait().unwrap();
        assert!(laid.outputs(device).remove(0).1 == target);
        // The counters of nodes are ready for another launch, which finds that the base is the target.
        let outcome = application.launch(&stream).unwrap().wait();
        assert_eq!(outcome.unwrap_err().rule(), Some(Rule::ChunkBaseSum));
    }
}
