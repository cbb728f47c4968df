//! Reports of the library, and the interfaces that pass data on: sinks, accelerators, lists of changes.

use crate::common::inputs::{Input, inputs};
use std::sync::Mutex;
use tpde::{
    Accelerator, Apply, Dtype, Encode, EncodeOptions, Error, FormatVersion, InPlace, MemoryCheckpoint, Pair, PayloadDigests,
    Result, Rule, Sink, TensorInfo, TensorMut, Verify, Work,
};

/// A tensor with its bytes.
type Held = (TensorInfo, Vec<u8>);

fn input(name: &str, side: u64) -> Input {
    inputs(side).find(|input| input.name == name).unwrap()
}

fn pair_of(input: &Input) -> Pair<Vec<u8>> {
    let options = EncodeOptions::default().chunk_lanes(1 << 16);
    Encode::new(&input.target()).base(&input.base()).options(options).to_memory().unwrap().0
}

#[test]
fn figures_of_a_pair_are_those_of_its_tensors() {
    for (name, side) in [("several dtypes", 96), ("a vocabulary and one row", 64), ("empty tensors and scalars", 1)] {
        let input = input(name, side);
        let pair = pair_of(&input);
        let index = pair.index();
        assert_eq!(index.size(), index.as_bytes().len() as u64);
        let bytes = |held: &[Held]| held.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
        assert_eq!(index.tensor_bytes(), (bytes(&input.base), bytes(&input.target)));
        for (tensor, (info, bytes)) in index.tensors().zip(&input.target) {
            assert_eq!((tensor.bytes(), tensor.dtype), (bytes.len() as u64, info.dtype));
            assert_eq!(tensor.target_digest()[..], blake3::hash(bytes).as_bytes()[..16]);
            if info.shape.iter().product::<u64>() > 0 {
                assert_eq!(tensor.element_bytes() as u64 * info.shape.iter().product::<u64>(), bytes.len() as u64);
            }
        }
        let report = pair.verify().unwrap();
        let with_base = Apply::new(&pair).base(&input.base()).verify().unwrap();
        let stored = index.as_bytes().len() as u64 + pair.blob().len() as u64;
        assert_eq!((report.stored_bytes, with_base.stored_bytes), (stored, stored));
        assert_eq!((report.tensors, report.chunks), (input.target.len() as u64, index.records().len() as u64));
        assert_eq!((with_base.tensors, with_base.chunks), (report.tensors, report.chunks));
        assert_eq!((report.base_checked, with_base.base_checked, with_base.target_checked), (false, true, true));
    }
}

#[test]
fn elements_of_packed_dtypes_are_bytes() {
    let input = input("packed, F4", 64);
    let pair = pair_of(&input);
    assert_eq!(pair.index().tensor(0).element_bytes(), 1);
}

/// The rule that fails when these tensors are compared with the target of the pair; `None` if they are the target.
fn compared(pair: &Pair<Vec<u8>>, held: &[Held]) -> Option<Rule> {
    let checkpoint = MemoryCheckpoint::new(held.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap();
    match Verify::new(pair).target(&checkpoint).run() {
        Ok(_) => None,
        Err(Error::Invalid(invalid)) => Some(invalid.rule),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_checkpoint_that_differs_from_the_target_in_one_thing_is_told_apart() {
    let input = input("several dtypes", 64);
    let pair = pair_of(&input);
    let differs = |change: &dyn Fn(&mut Vec<Held>)| {
        let mut held = input.target.clone();
        change(&mut held);
        compared(&pair, &held)
    };
    assert_eq!(differs(&|_| {}), None);
    let first = |what: &dyn Fn(&mut TensorInfo)| differs(&|held| what(&mut held[0].0));
    assert_eq!(first(&|info| info.shape.reverse()), None, "a square is the same either way");
    assert_eq!(first(&|info| info.shape = vec![info.shape[0] * info.shape[1]]), Some(Rule::TensorTargetDigest));
    assert_eq!(input.target[0].0.dtype, Dtype::Bf16);
    assert_eq!(first(&|info| info.dtype = Dtype::F16), Some(Rule::TensorTargetDigest));
    assert_eq!(differs(&|held| held[1].1[7] ^= 1), Some(Rule::TensorTargetDigest));
    assert_eq!(differs(&|held| drop(held.pop())), Some(Rule::TensorTargetDigest));
    let more = |held: &mut Vec<_>| held.push((TensorInfo { name: "zz".into(), dtype: Dtype::U8, shape: vec![1] }, vec![1]));
    assert_eq!(differs(&more), Some(Rule::DigestTargetRoot));
}

#[test]
fn changes_are_listed_for_each_lane_of_all_chunks() {
    for name in ["one training step, F32", "one training step, F64", "one training step, BF16"] {
        // The last chunk is not full.
        let input = input(name, 300);
        let pair = pair_of(&input);
        for ((info, target), (_, base)) in input.target.iter().zip(&input.base) {
            let width = info.dtype.lane_bytes();
            let lanes = base.chunks(width).zip(target.chunks(width)).zip(0u64..);
            let expected: Vec<_> = lanes.filter(|((base, target), _)| base != target).map(|(_, lane)| lane).collect();
            let found = Apply::new(&pair).base(&input.base()).changes(&info.name).unwrap();
            assert!(found.positions == expected, "{name}");
        }
    }
}

/// The place of a floating-point number among all numbers of its dtype, in the order of values.
fn place(lane: &[u8]) -> i128 {
    let bits = lane.iter().rev().fold(0i128, |bits, byte| bits << 8 | i128::from(*byte));
    let negative = 1 << (8 * lane.len() - 1);
    if bits & negative == 0 { bits } else { negative - 1 - bits }
}

#[test]
fn moves_count_the_steps_of_each_lane() {
    for name in ["one training step, F32", "one training step, F64", "one training step, BF16"] {
        let input = input(name, 300);
        let pair = pair_of(&input);
        for ((info, target), (_, base)) in input.target.iter().zip(&input.base) {
            let width = info.dtype.lane_bytes();
            let (mut unchanged, mut up, mut down) = (0, [0; 64], [0; 64]);
            for (base, target) in base.chunks(width).zip(target.chunks(width)) {
                match place(target) - place(base) {
                    0 => unchanged += 1,
                    steps @ 1.. => up[steps.ilog2() as usize] += 1,
                    steps => down[(-steps).ilog2() as usize] += 1,
                }
            }
            let found = Apply::new(&pair).base(&input.base()).moves(&info.name).unwrap();
            assert_eq!((found.unchanged, found.up, found.down), (unchanged, up, down), "{name}");
            assert_eq!(found.changed(), up.iter().chain(&down).sum::<u64>());
        }
    }
}

#[test]
fn moves_between_the_ends_of_an_order() {
    // Distances wrap around: 255 is one step below 0.
    let info = TensorInfo { name: "u".into(), dtype: Dtype::U8, shape: vec![6] };
    let (base, target) = ([0u8, 255, 0, 5, 5, 9], [255u8, 0, 128, 8, 1, 9]);
    let [base, target] = [&base, &target].map(|bytes| MemoryCheckpoint::new([(info.clone(), &bytes[..])]).unwrap());
    let (pair, _) = Encode::new(&target).base(&base).to_memory().unwrap();
    let found = Apply::new(&pair).base(&base).moves("u").unwrap();
    let counts = |bins: &[u64; 64]| bins.iter().enumerate().filter(|(_, n)| **n != 0).map(|(i, n)| (i, *n)).collect::<Vec<_>>();
    assert_eq!((found.unchanged, counts(&found.up), counts(&found.down)), (1, vec![(0, 1), (1, 1)], vec![(0, 1), (2, 1), (7, 1)]));
    let error = Apply::new(&pair).base(&base).moves("v").unwrap_err();
    assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
}

/// An accelerator that returns known tensors, as a device would have rebuilt them.
struct Known<'a>(&'a [(TensorInfo, Vec<u8>)]);

impl Accelerator for Known<'_> {
    fn rebuild(&self, work: &Work<'_>, done: &mut dyn FnMut(usize, &[u8]) -> Result<()>) -> Result<PayloadDigests> {
        work.tensors.iter().enumerate().try_for_each(|(at, (place, _))| done(at, &self.0[*place].1))?;
        Ok(PayloadDigests::NotCompared)
    }
}

struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Sink for Buffers {
    fn write(&self, place: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.0.lock().unwrap()[place][offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

#[test]
fn a_sink_gets_every_byte_that_an_accelerator_rebuilds() {
    // One of the tensors has more than 2 MiB and several chunks.
    let input = input("several dtypes", 1500);
    let pair = pair_of(&input);
    let base = input.base();
    let known = Known(&input.target);
    let sink = Buffers(Mutex::new(input.target.iter().map(|(_, bytes)| vec![0xA5; bytes.len()]).collect()));
    let report = Apply::new(&pair).base(&base).on(&known).to_sink(&sink).unwrap();
    assert!(report.digests_checked);
    assert!(sink.0.into_inner().unwrap().iter().zip(&input.target).all(|(found, (_, bytes))| found == bytes));
    let mut by_processor = Apply::new(&pair).base(&base).verify().unwrap();
    assert_eq!(by_processor.payload_digests, PayloadDigests::All);
    by_processor.payload_digests = PayloadDigests::NotCompared;
    assert_eq!(Apply::new(&pair).base(&base).on(&known).verify().unwrap(), by_processor);
}

/// A report claims no more than what was compared.
#[test]
fn reports_say_which_payload_digests_were_compared() {
    use PayloadDigests::{All, EachRead, NotCompared};
    let input = input("several dtypes", 300);
    let base = input.base();
    for (format, payload_digests, whole, part) in [
        (FormatVersion::V1_1, false, NotCompared, NotCompared),
        (FormatVersion::V1_2, false, All, NotCompared),
        (FormatVersion::V1_2, true, All, EachRead),
    ] {
        let options = EncodeOptions::default().format(format).payload_digests(payload_digests);
        let pair = || Encode::new(&input.target()).base(&base).options(options.clone()).to_memory().unwrap().0;
        let pair_of_part = pair();
        let first = pair_of_part.index().tensor(0).name.to_owned();
        let apply = || Apply::new(&pair_of_part).base(&base).digests(false);
        let compared = |apply: Apply<'_, Vec<u8>>| apply.to_sink(&Ignored).unwrap().payload_digests;
        assert_eq!(compared(apply()), whole);
        assert_eq!(compared(apply().tensors(|name| name == first)), part);
        let in_place = |pair: &tpde::Pair<Vec<u8>>, mode| {
            let mut bytes = input.base[0].1.clone();
            let tensors = [TensorMut { name: &first, bytes: &mut bytes }];
            Apply::new(pair).in_place(tensors, mode).unwrap().payload_digests
        };
        // In place, payloads are compared before anything is written.
        let written = if format == FormatVersion::V1_2 { EachRead } else { NotCompared };
        for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
            assert_eq!(in_place(&pair(), mode), written, "{mode:?}");
        }
        // A pair that was verified compares every later read.
        assert_eq!(pair_of_part.verify().unwrap().payload_digests, whole);
        assert_eq!(compared(apply().tensors(|name| name == first)), written);
    }
}

/// A sink that stores nothing.
struct Ignored;

impl Sink for Ignored {
    fn write(&self, _: usize, _: u64, _: &[u8]) -> Result<()> {
        Ok(())
    }
}

#[test]
fn small_chunks_of_an_accelerator_have_the_digest_of_the_tensor() {
    let input = input("one training step, F64", 160);
    let options = EncodeOptions::default().chunk_lanes(1 << 12);
    let (pair, _) = Encode::new(&input.target()).base(&input.base()).options(options).to_memory().unwrap();
    Apply::new(&pair).base(&input.base()).on(&Known(&input.target)).verify().unwrap();
}

#[test]
fn a_wrong_byte_from_an_accelerator_is_found_by_its_digest() {
    let input = input("several dtypes", 600);
    let pair = pair_of(&input);
    for at in 0..input.target.len() {
        for from_end in [false, true] {
            let mut wrong = input.target.clone();
            let last = wrong[at].1.len() - 1;
            wrong[at].1[if from_end { last } else { 0 }] ^= 1;
            let outcome = Apply::new(&pair).base(&input.base()).on(&Known(&wrong)).verify();
            assert!(matches!(&outcome, Err(Error::Invalid(e)) if e.rule == Rule::TensorTargetDigest), "{outcome:?}");
        }
    }
}

#[test]
fn a_wrong_base_of_an_accelerator_is_found_by_its_digest() {
    let input = input("several dtypes", 600);
    let pair = pair_of(&input);
    for at in 0..input.base.len() {
        for from_end in [false, true] {
            let mut wrong = input.base.clone();
            let last = wrong[at].1.len() - 1;
            wrong[at].1[if from_end { last } else { 0 }] ^= 1;
            let base = MemoryCheckpoint::new(wrong.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap();
            let outcome = Apply::new(&pair).base(&base).on(&Known(&input.target)).verify();
            assert!(matches!(&outcome, Err(Error::WrongBase { .. })), "{outcome:?}");
        }
    }
}
