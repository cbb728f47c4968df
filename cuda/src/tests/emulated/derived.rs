//! Chunks whose base lanes kernels form from tensors of another dtype.

use super::super::cases::{Case, Random, hostile, is_same_kind};
use super::super::derived::{all, memory, pair_of};
use super::emulator::{Cases, Chunk, Source};
use super::{ROWS, SHIFTS, chunks_of, long_or_short, rows_and_turns};
use crate::abi::TensorForm;
use std::collections::BTreeMap;
use tpde::Codec;
use tpde_core::floats::cast_lanes;
use tpde_core::lane::Dtype;

/// A chunk whose base lanes are cast from F32 to BF16: those of the case, but for signalling NaNs, which no cast gives. `None` if
/// the case is not of BF16, or not all lanes have a base.
fn cast_to(case: Case, right: fn(Option<tpde::Rule>, Option<tpde::Rule>) -> bool) -> Option<Chunk> {
    if case.dtype != Dtype::Bf16 || case.base.len() != 2 * case.lanes {
        return None;
    }
    let base: Vec<u8> = case.base.as_chunks::<2>().0.iter().flat_map(|&[low, high]| [0, 0, low, high]).collect();
    let mut formed = vec![0; case.base.len()];
    cast_lanes(Dtype::F32, Dtype::Bf16, &base, &mut formed);
    let case = case.rebased(formed);
    let form = TensorForm { columns: 1, depth: 1, base_dtype: Dtype::F32.code(), ..TensorForm::default() };
    let expected = case.decode();
    Some(Chunk { source: Some(Source { form, base, scales: Vec::new() }), ..Chunk::alone(case, expected, right) })
}

/// All chunks of every form, by tensor.
fn forms(cases: &mut Cases, step: usize) {
    let all = all();
    for codec in [Codec::Raw, Codec::Conditioned] {
        for rarity in [7, 400] {
            let (base, pair, _) = pair_of(&all, codec, rarity, Vec::new());
            let [chunks, _] = chunks_of(&pair, Some(&memory(&base))).unwrap();
            let names = pair.index().tensors().flat_map(|tensor| tensor.chunks().map(move |_| tensor.name));
            let mut by_tensor: BTreeMap<_, Vec<Chunk>> = BTreeMap::new();
            chunks.into_iter().zip(names).for_each(|(chunk, name)| by_tensor.entry(name).or_default().push(chunk));
            for (name, chunks) in by_tensor.into_iter().step_by(step) {
                assert!(chunks.iter().all(|chunk| chunk.expected.is_ok()));
                cases.add(&format!("derived/{name} {codec} 1 in {rarity}"), false, &chunks);
            }
        }
    }
}

#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn every_form() {
    let mut cases = Cases::default();
    forms(&mut cases, 1);
    cases.run("derived", &SHIFTS);
    cases.run("derived", &ROWS);
}

#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn rows_segments_and_hostile_payloads_of_a_cast() {
    let mut cases = Cases::default();
    let mut count = 0;
    for (name, chunk) in rows_and_turns() {
        let Some(chunk) = cast_to(chunk.case, |expected, found| expected == found) else { continue };
        cases.add(&format!("cast {name}"), false, &[chunk]);
        count += 1;
    }
    assert!(count > 20, "{count}");
    let random = &mut Random(0xCA57);
    let (mut made, mut refused) = (0, 0);
    for n in 0..long_or_short(6000, 1500) {
        let make = if n % 4 == 0 { hostile::raw } else { hostile::conditioned };
        let hostile::Hostile { mut case, stored, .. } = make(random, if n % 32 == 0 { 6000 } else { 600 });
        case.payload = stored.unwrap_or(case.payload);
        let Some(chunk) = cast_to(case, is_same_kind) else { continue };
        made += 1;
        refused += usize::from(chunk.expected.is_err());
        cases.add(&format!("cast hostile/{n}"), false, &[chunk]);
    }
    assert!(made > 60 && refused > made / 3, "{refused} of {made}");
    cases.run("derived-hostile", &["--shift", "0", "--shift", "1"]);
    cases.run("derived-hostile", &["--rows", "1", "--shift", "0"]);
}

#[test]
#[cfg_attr(not(has_cxx), ignore = "needs g++, or the compiler that CXX names")]
fn no_races() {
    let mut cases = Cases::default();
    forms(&mut cases, long_or_short(1, 9));
    for (name, chunk) in rows_and_turns().into_iter().step_by(long_or_short(2, 9)) {
        let Some(chunk) = cast_to(chunk.case, |expected, found| expected == found) else { continue };
        cases.add(&format!("cast {name}"), false, &[chunk]);
    }
    cases.find_races("derived-races", &["--shift", "0", "--shift", "3", "--rows", "0", "--rows", "1"]);
}
