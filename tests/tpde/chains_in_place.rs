//! Chains of pairs that change tensors in memory, in one commit.

use crate::common::forge::forge;
use crate::common::{Xorshift, tensor};
use proptest::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use tpde::{
    Apply, ApplyChain, Codec, Dtype, Encode, EncodeOptions, Error, FormatVersion, InPlace, Limits, MemoryCheckpoint, Pair,
    PayloadDigests, Rectangle, Result, SliceMut, Source, TensorInfo, TensorMut, ValidatedIndex,
};

type InMemory = Pair<Vec<u8>>;

/// Versions of the same tensors, and the pair from each to the next.
struct Case {
    infos: Vec<TensorInfo>,
    /// For each version, the bytes of the tensors.
    versions: Vec<Vec<Vec<u8>>>,
    pairs: Vec<InMemory>,
}

fn below(random: &mut Xorshift, n: u64) -> u64 {
    (random.next() >> 24) % n
}

fn reparsed(pair: &InMemory) -> ValidatedIndex {
    ValidatedIndex::parse(pair.index().as_bytes().to_vec(), &Limits::default()).unwrap()
}

fn checkpoint<'a>(infos: &[TensorInfo], version: &'a [Vec<u8>]) -> MemoryCheckpoint<'a> {
    MemoryCheckpoint::new(infos.iter().cloned().zip(version.iter().map(|bytes| &bytes[..]))).unwrap()
}

/// The target of one version, some of whose tensors may have no base.
fn case(seed: u64, steps: usize) -> Case {
    let random = &mut Xorshift(seed | 1);
    (0..20).for_each(|_| _ = random.next());
    let dtypes = [Dtype::Bf16, Dtype::F32, Dtype::U8, Dtype::F4];
    let mut infos: Vec<_> = (0..1 + below(random, 4))
        .map(|i| {
            let dtype = dtypes[below(random, 4) as usize];
            let shape = match below(random, 6) {
                0 => vec![below(random, 2) * 8],
                1 if dtype != Dtype::F4 => vec![],
                _ => vec![1 + below(random, 90), 8 * (1 + below(random, 30))],
            };
            TensorInfo { name: format!("t{i}"), dtype, shape }
        })
        .collect();
    infos.sort_by(|a, b| a.name.cmp(&b.name));
    let mut versions = vec![infos.iter().map(|info| (0..info.bytes()).map(|_| (random.next() >> 32) as u8).collect()).collect()];
    let mut pairs = Vec::new();
    for _ in 0..steps {
        let before: &Vec<Vec<u8>> = versions.last().unwrap();
        let mut next = before.clone();
        let every = 1 + below(random, 40) as usize;
        let is_new = below(random, 5) == 0;
        for (bytes, info) in next.iter_mut().zip(&infos).filter(|_| below(random, 6) > 0) {
            bytes.chunks_mut(info.dtype.lane_bytes()).step_by(every).for_each(|lane| lane[0] = lane[0].wrapping_add(3));
        }
        let format = [FormatVersion::V1_1, FormatVersion::V1_2, FormatVersion::V1_3][below(random, 3) as usize];
        let mut options = EncodeOptions::default().chunk_lanes([4096, 1 << 20][below(random, 2) as usize]);
        let is_cut = below(random, 3) == 0 && infos.iter().all(|info| info.dtype != Dtype::F4 && !info.shape.is_empty());
        options = match is_cut {
            true => options.split("*=0:3".parse().unwrap()),
            false if format == FormatVersion::V1_1 => options.format(format),
            false => options.format(format).payload_digests(below(random, 2) == 0),
        };
        // The first tensor has no base in this pair.
        let held = usize::from(is_new && infos.len() > 1);
        let (base, target) = (checkpoint(&infos[held..], &before[held..]), checkpoint(&infos, &next));
        pairs.push(Encode::new(&target).base(&base).options(options).to_memory().unwrap().0);
        versions.push(next);
    }
    Case { infos, versions, pairs }
}

impl Case {
    fn applied<B: Source>(&self, pairs: &[Pair<B>], memory: &mut [Vec<u8>]) -> Result<tpde::ApplyReport> {
        let tensors = self.infos.iter().zip(memory).map(|(info, bytes)| TensorMut { name: &info.name, bytes });
        ApplyChain::new(pairs).in_place(tensors)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    #[test]
    fn a_chain_in_place_gives_the_last_target_or_changes_nothing(seed: u64, steps in 1usize..5, at: u64, bit in 0u32..8) {
        let case = case(seed, steps);
        let (first, last) = (&case.versions[0], &case.versions[steps]);
        let mut memory = first.clone();
        let report = case.applied(&case.pairs, &mut memory).unwrap();
        prop_assert!(memory == *last);
        prop_assert!(report.digests_checked);
        prop_assert_eq!(report.tensors, case.infos.len() as u64);
        let has_roots = case.pairs.iter().all(|pair| pair.index().has_payload_root());
        prop_assert_eq!(report.payload_digests == PayloadDigests::NotCompared, !has_roots);

        // Some of the tensors, in any order.
        let mut memory = first.clone();
        let some: Vec<usize> = (0..case.infos.len()).filter(|i| seed >> i & 1 == 1).collect();
        let mut given: Vec<_> = memory.iter_mut().enumerate().filter(|(i, _)| some.contains(i)).collect();
        given.reverse();
        let given = given.into_iter().map(|(i, bytes)| TensorMut { name: &case.infos[i].name, bytes });
        ApplyChain::new(&case.pairs).in_place(given).unwrap();
        for (i, bytes) in memory.iter().enumerate() {
            let expected = if some.contains(&i) { last } else { first };
            prop_assert!(*bytes == expected[i]);
        }

        // Applied already, unless the versions are equal.
        let mut memory = last.clone();
        match case.applied(&case.pairs, &mut memory) {
            Ok(_) => {}
            Err(Error::AlreadyApplied { .. } | Error::Step { number: 1, .. }) => {}
            Err(other) => prop_assert!(false, "{}", other),
        }
        prop_assert!(memory == *last);

        // Any flipped bit of a payload is found before the first write.
        let step = at as usize % steps;
        let mut pairs: Vec<InMemory> = case.pairs.iter().map(|pair| Pair::new(reparsed(pair), pair.blob().clone()).unwrap()).collect();
        let mut blob = pairs[step].blob().clone();
        if blob.len() > 64 {
            let place = 64 + at as usize % (blob.len() - 64);
            blob[place] ^= 1 << bit;
            pairs[step] = match Pair::new(reparsed(&pairs[step]), blob) { Ok(pair) => pair, Err(_) => return Ok(()) };
            let mut memory = first.clone();
            match case.applied(&pairs, &mut memory) {
                // A tensor without a base hides what earlier pairs give for it; padding is not read.
                Ok(_) => prop_assert!(memory == *last),
                Err(Error::Step { number, .. }) => {
                    prop_assert_eq!(number, step + 1);
                    prop_assert!(memory == *first);
                }
                Err(Error::Invalid(_)) => prop_assert!(steps == 1 && memory == *first),
                Err(other) => prop_assert!(false, "{}", other),
            }
        }

        // A flipped bit of the base.
        let tensor = at as usize % case.infos.len();
        if !first[tensor].is_empty() {
            let mut wrong = first.clone();
            let place = at as usize % wrong[tensor].len();
            wrong[tensor][place] ^= 1 << bit;
            let mut memory = wrong.clone();
            match case.applied(&case.pairs, &mut memory) {
                // No pair reads it.
                Ok(_) => prop_assert!(memory == *last),
                Err(error) => {
                    prop_assert!(memory == wrong);
                    let source = match error { Error::Step { number, source, .. } => { prop_assert_eq!(number, 1); *source }, error => error };
                    prop_assert!(matches!(source, Error::WrongBase { .. } | Error::AlreadyApplied { .. }), "{}", source);
                }
            }
        }
    }
}

/// A tensor of this many rows of 64 in each version, one rank's rows of it, and pairs that are cut at the ranks.
fn ranks(steps: usize) -> (TensorInfo, Vec<Vec<u8>>, Vec<InMemory>) {
    let info = TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![200, 64] };
    let versions: Vec<Vec<u8>> =
        (0..=steps).map(|v| (0..200 * 64).map(|i| (i % 251 + if i % 7 == 0 { v } else { 0 }) as u8).collect()).collect();
    let pairs = versions.windows(2).map(|two| {
        let [base, target] = [&two[0], &two[1]].map(|bytes| MemoryCheckpoint::new([(info.clone(), &bytes[..])]).unwrap());
        let options = EncodeOptions::default().split("*=0:2".parse().unwrap());
        Encode::new(&target).base(&base).options(options).to_memory().unwrap().0
    });
    let pairs = pairs.collect();
    (info, versions, pairs)
}

#[test]
fn the_rows_of_a_rank_with_gaps_between_them_follow_a_chain() {
    let (_, versions, pairs) = ranks(3);
    let pitch = 70;
    let padded = |version: &[u8]| -> Vec<u8> {
        let rows: Vec<u8> = version[..100 * 64].chunks(64).flat_map(|row| [row, &[9; 6]].concat()).collect();
        rows[..99 * pitch + 64].to_vec()
    };
    let rows = Rectangle::new([0, 0], [100, 64]);
    let mut memory = padded(&versions[0]);
    let run =
        |memory: &mut [u8]| ApplyChain::new(&pairs).in_place_slices([SliceMut::new("w", rows.clone(), memory).pitch(pitch as u64)]);
    run(&mut memory).unwrap();
    assert!(memory == padded(&versions[3]));
    // Its digests are those of a part, so it is known to be the target.
    let again = run(&mut memory);
    assert!(matches!(again, Err(Error::AlreadyApplied { .. })), "{again:?}");
    // A slice of some rows of a part.
    let mut few = versions[0][..10 * 64].to_vec();
    let refused = ApplyChain::new(&pairs).in_place_slices([SliceMut::new("w", Rectangle::new([0, 0], [10, 64]), &mut few)]);
    assert!(matches!(refused, Err(Error::NotHeld { .. })), "{refused:?}");
}

#[test]
fn pairs_that_do_not_follow_each_other_are_refused() {
    let (info, versions, pairs) = ranks(3);
    let [one, two, three] = &pairs[..] else { unreachable!() };
    let run = |pairs: &[&InMemory], version: usize| {
        let mut memory = versions[version].clone();
        let outcome = ApplyChain::new(pairs.iter().copied()).in_place([TensorMut { name: "w", bytes: &mut memory }]);
        assert_eq!(memory == versions[version], outcome.is_err());
        outcome
    };
    run(&[one, two, three], 0).unwrap();
    let step = |outcome| match outcome {
        Err(Error::Step { number, source, .. }) => (number, *source),
        other => panic!("{other:?}"),
    };
    let (number, source) = step(run(&[one, three], 0));
    assert!(number == 2 && matches!(source, Error::WrongBase { .. }), "{number} {source}");
    let (number, source) = step(run(&[two, three], 0));
    assert!(number == 1 && matches!(source, Error::WrongBase { .. }), "{number} {source}");
    let outcome = run(&[one, two, three], 3);
    assert!(matches!(outcome, Err(Error::AlreadyApplied { .. })), "{outcome:?}");
    assert!(matches!(run(&[], 0), Err(Error::InvalidArgument(_))));

    // Other names, a missing tensor, another dtype.
    let renamed = TensorInfo { name: "v".into(), ..info.clone() };
    let [base, target] = [0, 1].map(|v| &versions[v][..]);
    let (base, target) =
        (MemoryCheckpoint::new([(renamed.clone(), base)]).unwrap(), MemoryCheckpoint::new([(info, target)]).unwrap());
    let options = EncodeOptions::default().renamed([("w", "v")]);
    let (from_v, _) = Encode::new(&target).base(&base).options(options).to_memory().unwrap();
    let outcome = run(&[&from_v, two], 0);
    assert!(matches!(&outcome, Err(Error::InvalidArgument(reason)) if reason.contains("w derives from v")), "{outcome:?}");
    let mut memory = versions[0].clone();
    let unknown = ApplyChain::new([one, two]).in_place([TensorMut { name: "v", bytes: &mut memory }]);
    assert!(matches!(unknown, Err(Error::InvalidArgument(_))));
}

/// A blob that is exchanged after so many reads.
struct Exchanged<'a> {
    blobs: [&'a [u8]; 2],
    left: AtomicUsize,
}

impl Source for Exchanged<'_> {
    fn size(&self) -> u64 {
        self.blobs[0].len() as u64
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let is_first = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
        out.copy_from_slice(&self.blobs[usize::from(!is_first)][offset as usize..][..out.len()]);
        Ok(())
    }
}

/// What a chain does to `first` if the blob of pair `which` becomes `other` after each number of reads: how often it gives `last`, leaves
/// the memory as it was, and says that it is a mixture.
fn exchanged(pairs: &[InMemory], which: usize, other: &[u8], first: &[u8], last: &[u8]) -> [usize; 3] {
    let mut outcomes = [0; 3];
    for reads in 0..40 {
        let mut opened = Vec::new();
        for (i, pair) in pairs.iter().enumerate() {
            let blobs = [&pair.blob()[..], if i == which { other } else { pair.blob() }];
            opened.extend(Pair::new(reparsed(pair), Exchanged { blobs, left: AtomicUsize::new(reads) }));
        }
        if opened.len() < pairs.len() {
            continue;
        }
        let mut memory = first.to_vec();
        match ApplyChain::new(&opened).in_place([TensorMut { name: "w", bytes: &mut memory }]) {
            Ok(_) => {
                assert!(memory == last, "{reads}");
                outcomes[0] += 1;
            }
            Err(Error::Poisoned { source, written, total }) => {
                assert!(matches!(&*source, Error::Step { .. }) && written.len() == total as usize, "{source}");
                outcomes[2] += 1;
            }
            Err(error) => {
                assert!(memory == first, "{error}");
                outcomes[1] += 1;
            }
        }
    }
    outcomes
}

#[test]
fn payloads_that_change_between_the_passes_are_found() {
    let (_, versions, pairs) = ranks(2);
    let mut damaged = pairs[1].blob().clone();
    let end = damaged.len() - 40;
    damaged[end] ^= 1;
    let outcomes = exchanged(&pairs, 1, &damaged, &versions[0], &versions[2]);
    assert!(outcomes.iter().all(|&count| count > 0), "{outcomes:?}");

    // A forged payload passes all checks but those of digests.
    let words = [tensor("w", "U32", &[1024], 1), tensor("w", "U32", &[1024], 2)].map(|one| one.bytes);
    let mut last = words[1].clone();
    last.iter_mut().step_by(200).for_each(|byte| *byte ^= 1);
    let info = TensorInfo { name: "w".into(), dtype: Dtype::U32, shape: vec![1024] };
    let of = |bytes| MemoryCheckpoint::new([(info.clone(), bytes)]).unwrap();
    let options = EncodeOptions::default().codec(Codec::Raw).format(FormatVersion::V1_1);
    let pair = |base, target| Encode::new(&of(target)).base(&of(base)).options(options.clone()).to_memory().unwrap().0;
    let pairs = [pair(&words[0], &words[1]), pair(&words[1], &last)];
    let mut forged = pairs[0].blob().clone();
    forge(pairs[0].index(), &mut forged, &mut words[1].clone());
    let outcomes = exchanged(&pairs, 0, &forged, &words[0], &last);
    assert!(outcomes.iter().all(|&count| count > 0), "{outcomes:?}");
}

#[test]
fn one_pair_is_an_application_in_place() {
    let (_, versions, pairs) = ranks(1);
    let [mut chain, mut alone] = [(); 2].map(|()| versions[0].clone());
    let of_chain = ApplyChain::new(&pairs).in_place([TensorMut { name: "w", bytes: &mut chain }]).unwrap();
    let of_pair = Apply::new(&pairs[0]).in_place([TensorMut { name: "w", bytes: &mut alone }], InPlace::AllChecked).unwrap();
    assert_eq!((of_chain, chain), (of_pair, alone));
}

/// A tensor that no pair changes, and the first rows of one that each pair changes, in chunks of 64 rows.
fn with_norm() -> ([TensorInfo; 2], Vec<[Vec<u8>; 2]>, Vec<InMemory>) {
    let infos =
        [("norm", 4), ("w", 256)].map(|(name, rows)| TensorInfo { name: name.into(), dtype: Dtype::U8, shape: vec![rows, 64] });
    let version = |v: u8| [vec![7; 4 * 64], (0..256 * 64).map(|i| (i % 251) as u8 ^ v).collect()];
    let versions = vec![version(0), version(1), version(2)];
    let pairs = versions.windows(2).map(|two| {
        let options = EncodeOptions::default().chunk_lanes(64 * 64);
        Encode::new(&checkpoint(&infos, &two[1])).base(&checkpoint(&infos, &two[0])).options(options).to_memory().unwrap().0
    });
    let pairs = pairs.collect();
    (infos, versions, pairs)
}

#[test]
fn rows_that_are_not_the_target_are_not_called_applied() {
    let (_, versions, pairs) = with_norm();
    let rows = Rectangle::new([0, 0], [64, 64]);
    let run = |norm: &mut [u8], some: &mut [u8], pairs: &[InMemory]| {
        let slices = [SliceMut::new("norm", Rectangle::whole(&[4, 64]), norm), SliceMut::new("w", rows.clone(), some)];
        ApplyChain::new(pairs).in_place_slices(slices)
    };
    let mut norm = versions[0][0].clone();
    // The tensor that no pair changes has the digest of the last target in each version.
    for content in [versions[1][1][..4096].to_vec(), versions[2][1][..4096].to_vec(), vec![9; 4096]] {
        let mut some = content.clone();
        let outcome = run(&mut norm, &mut some, &pairs);
        assert!(matches!(&outcome, Err(Error::Step { number: 1, .. })), "{outcome:?}");
        assert!(some == content);
    }
    let mut some = versions[0][1][..4096].to_vec();
    run(&mut norm, &mut some, &pairs).unwrap();
    assert!(some == versions[2][1][..4096]);
}

#[test]
fn a_tensor_that_is_the_target_does_not_speak_for_rows_of_another() {
    let infos =
        [("a", 4), ("w", 256)].map(|(name, rows)| TensorInfo { name: name.into(), dtype: Dtype::U8, shape: vec![rows, 64] });
    let version = |v: u8| infos.clone().map(|info| (0..info.bytes()).map(|i| (i % 251) as u8 ^ v).collect::<Vec<_>>());
    let (old, new) = (version(0), version(1));
    let options = EncodeOptions::default().chunk_lanes(64 * 64);
    let (pair, _) = Encode::new(&checkpoint(&infos, &new)).base(&checkpoint(&infos, &old)).options(options).to_memory().unwrap();
    let run = |a: &mut [u8], some: &mut [u8]| {
        let slices =
            [SliceMut::new("a", Rectangle::whole(&[4, 64]), a), SliceMut::new("w", Rectangle::new([0, 0], [64, 64]), some)];
        Apply::new(&pair).in_place_slices(slices, InPlace::AllChecked)
    };
    let outcome = run(&mut new[0].clone(), &mut new[1][..4096].to_vec());
    assert!(matches!(outcome, Err(Error::AlreadyApplied { .. })), "{outcome:?}");
    let outcome = run(&mut new[0].clone(), &mut vec![9; 4096]);
    assert!(matches!(outcome, Err(Error::WrongBase { .. })), "{outcome:?}");
}

#[test]
fn tensors_that_are_not_given_need_not_follow_each_other() {
    let (infos, versions, pairs) = with_norm();
    // The first pair has only one of the tensors.
    let first = tpde::Merge::new([&pairs[0]]).tensors(|name| name == "w").to_memory().unwrap().0;
    let mut memory = versions[0][1].clone();
    let chain = [first, Pair::new(reparsed(&pairs[1]), pairs[1].blob().clone()).unwrap()];
    ApplyChain::new(&chain).in_place([TensorMut { name: "w", bytes: &mut memory }]).unwrap();
    assert!(memory == versions[2][1]);
    let mut norm = versions[0][0].clone();
    let outcome = ApplyChain::new(&chain).in_place([TensorMut { name: &infos[0].name, bytes: &mut norm }]);
    assert!(matches!(outcome, Err(Error::InvalidArgument(_))), "{outcome:?}");
}
