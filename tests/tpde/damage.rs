//! Damage to stored bytes: every truncation and every flipped bit of every published pair is detected, and reported with the rule
//! that it breaks.

use crate::common::forge::{forge, repair};
use crate::common::{Xorshift, manifest, tensor};
use rayon::prelude::*;
use tpde::{
    Apply, Checkpoint, Codec, Dtype, Encode, EncodeOptions, Error, FormatVersion, InPlace, Invalid, Limits, MemoryCheckpoint, Pair,
    PayloadDigests, Result, Rule, SafetensorsCheckpoint, TensorInfo, TensorMut, ValidatedIndex,
};

/// A valid pair and its base.
struct Sound {
    name: String,
    index: Vec<u8>,
    blob: Vec<u8>,
    base: Box<dyn Checkpoint>,
}

fn sound_pairs() -> Vec<Sound> {
    let valid = manifest::vectors().into_iter().filter(|vector| vector.verdict == "valid");
    let mut pairs: Vec<_> = valid
        .map(|vector| Sound {
            name: vector.name,
            index: manifest::read(&vector.index),
            blob: manifest::read(&vector.blob),
            base: match vector.base {
                Some(base) => Box::new(SafetensorsCheckpoint::open(base).unwrap()),
                None => Box::new(MemoryCheckpoint::default()),
            },
        })
        .collect();
    assert!(pairs.len() >= 100);
    pairs.extend([1, 2].map(pair_of_codec_conditioned));
    pairs
}

/// A pair made by our encoder: tensors of several dtypes, with and without a base, with their own tables and with shared ones.
fn pair_of_codec_conditioned(seed: u64) -> Sound {
    let mut numbers = Xorshift(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut random = move || numbers.next() >> 11;
    let (mut base, mut target) = (Vec::new(), Vec::new());
    let mut add = |name: &str, dtype: Dtype, lanes: u64, rarity: u64, has_base: bool| {
        let width = dtype.lane_bytes();
        let mut before = Vec::new();
        for _ in 0..lanes {
            let number = (random() % 2001) as f64 / 1e4 - 0.1;
            match dtype {
                Dtype::Bf16 => before.extend(&(number as f32).to_le_bytes()[2..]),
                Dtype::F32 => before.extend((number as f32).to_le_bytes()),
                Dtype::F64 => before.extend(number.to_le_bytes()),
                _ => before.push((number * 100.0) as i8 as u8),
            }
        }
        let mut after = before.clone();
        for lane in after.chunks_mut(width) {
            if random() % rarity == 0 {
                lane[0] = lane[0].wrapping_add(random() as u8 % 5);
            }
        }
        let info = TensorInfo { name: name.into(), dtype, shape: vec![lanes] };
        if has_base {
            base.push((info.clone(), &*before.leak()));
        }
        target.push((info, &*after.leak()));
    };
    add("a", Dtype::Bf16, 2 * 4096 + 77, 60, true);
    add("b", Dtype::Bf16, 4096, 4, true);
    add("c", Dtype::F32, 129, 1, false);
    add("d", Dtype::F32, 300, 7, true);
    add("e", Dtype::I8, 5000, 90, true);
    add("f", Dtype::F64, 40, 1, false);
    let (base, target) = (MemoryCheckpoint::new(base).unwrap(), MemoryCheckpoint::new(target).unwrap());
    let options = EncodeOptions::default().codec(Codec::Conditioned).chunk_lanes(4096).payload_digests(seed == 2);
    let pair = Encode::new(&target).base(&base).options(options).to_memory().unwrap().0;
    assert!(pair.index().tensors().all(|tensor| tensor.codec == Codec::Conditioned && tensor.tables.is_some()));
    let sets = pair.index().table_sets().len();
    assert!((2..6).contains(&sets), "{sets} sets");
    let (index, blob) = (pair.index().as_bytes().to_vec(), pair.blob().clone());
    Sound { name: format!("codec conditioned, {seed}"), index, blob, base: Box::new(base) }
}

/// Does everything that a reader does with a pair.
fn read(index: &[u8], blob: &[u8], base: &dyn Checkpoint) -> Result<()> {
    let pair = Pair::new(ValidatedIndex::parse(index.to_vec(), &Limits::default())?, blob)?;
    pair.verify()?;
    Apply::new(&pair).base(base).verify()?;
    Ok(())
}

/// The rule that detected the damage. Panics if nothing did.
fn found(pair: &Sound, index: &[u8], blob: &[u8], damage: impl std::fmt::Display) -> Invalid {
    match read(index, blob, &*pair.base) {
        Err(Error::Invalid(invalid)) => *invalid,
        Err(other) => panic!("{}, {damage}: {other}", pair.name),
        Ok(()) => panic!("{}, {damage}: not noticed", pair.name),
    }
}

/// Every offset in a small file; in a larger file, the headers, the end, and samples in between.
fn places(size: usize) -> impl Iterator<Item = usize> {
    (0..size).filter(move |&at| size <= 4096 || at < 512 || at + 64 > size || at % 61 == 0)
}

#[test]
fn the_pairs_are_sound() {
    for pair in sound_pairs() {
        read(&pair.index, &pair.blob, &*pair.base).unwrap_or_else(|e| panic!("{}: {e}", pair.name));
    }
}

#[test]
fn every_cut_is_found() {
    sound_pairs().par_iter().for_each(|pair| {
        for size in places(pair.index.len()) {
            let invalid = found(pair, &pair.index[..size], &pair.blob, format_args!("index cut to {size}"));
            assert_eq!(invalid.rule.id(), "header.index_size", "{}, index cut to {size}: {invalid}", pair.name);
        }
        for size in places(pair.blob.len()) {
            let invalid = found(pair, &pair.index, &pair.blob[..size], format_args!("blob cut to {size}"));
            assert_eq!(invalid.rule.id(), "blob.blob_size", "{}, blob cut to {size}: {invalid}", pair.name);
        }
        let longer = |bytes: &[u8]| [bytes, &[0]].concat();
        assert_eq!(found(pair, &longer(&pair.index), &pair.blob, "a longer index").rule.id(), "header.index_size");
        assert_eq!(found(pair, &pair.index, &longer(&pair.blob), "a longer blob").rule.id(), "blob.blob_size");
    });
}

#[test]
fn every_flipped_bit_is_found() {
    sound_pairs().par_iter().for_each(|pair| {
        let flips = |size| places(size).flat_map(|at| (0..8).map(move |bit| (at, 1u8 << bit)));
        let mut index = pair.index.clone();
        for (at, bit) in flips(pair.index.len()) {
            index[at] ^= bit;
            let invalid = found(pair, &index, &pair.blob, format_args!("bit {bit:#04x} of byte {at} of the index"));
            let rule = invalid.rule.id();
            assert!(if at < 256 { rule.starts_with("header.") } else { rule == "index.digest" }, "{}, {at}: {invalid}", pair.name);
            // The stored value is the expected one.
            let stored = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
            match rule {
                "index.digest" => assert_eq!(invalid.expected, stored(&index[index.len() - 32..])),
                "header.crc32" => {
                    let crc: Vec<u8> = index[252..256].iter().rev().copied().collect();
                    assert_eq!(invalid.expected, stored(&crc));
                }
                _ => {}
            }
            index[at] ^= bit;
        }
        let sound = ValidatedIndex::parse(pair.index.clone(), &Limits::default()).unwrap();
        let mut blob = pair.blob.clone();
        for (at, bit) in flips(pair.blob.len()) {
            blob[at] ^= bit;
            let invalid = found(pair, &pair.index, &blob, format_args!("bit {bit:#04x} of byte {at} of the blob"));
            let rule = invalid.rule.id();
            if at < 64 {
                assert!(rule.starts_with("blob."), "{}, {at}: {invalid}", pair.name);
            } else {
                assert!(matches!(rule, "payload.crc32" | "payload.padding"), "{}, {at}: {invalid}", pair.name);
                let index = ValidatedIndex::parse(pair.index.clone(), &Limits::default()).unwrap();
                let chunk =
                    index.records().iter().rposition(|record| record.num_deltas.get() > 0 && record.blob_offset.get() <= at as u64);
                let chunk = chunk.map(|chunk| chunk as u32);
                let tensor = sound.tensors().find(|tensor| chunk.is_some_and(|chunk| tensor.chunks().contains(&chunk)));
                assert_eq!(
                    (invalid.at.chunk, invalid.at.tensor.as_deref()),
                    (chunk, tensor.map(|tensor| tensor.name)),
                    "{}",
                    pair.name
                );
            }
            blob[at] ^= bit;
        }
    });
}

/// After a crash, a blob may have its full length but zeros from some offset on.
#[test]
fn a_blob_that_ends_in_a_hole_is_refused() {
    sound_pairs().par_iter().for_each(|pair| {
        for from in (0..pair.blob.len()).step_by(16) {
            let mut blob = pair.blob.clone();
            blob[from..].fill(0);
            if blob != pair.blob {
                let rule = found(pair, &pair.index, &blob, format_args!("zeros from {from} on")).rule.id();
                assert!(
                    if from < 64 { rule.starts_with("blob.") } else { rule == "payload.crc32" },
                    "{}, {from}: {rule}",
                    pair.name
                );
            }
        }
    });
}

/// A bit that was flipped before the CRC was computed: the payload breaks a rule, or its lanes do not have the chunk's sum. Bits
/// that affect no lane may have any value, such as the class of a context that does not occur.
#[test]
fn flipped_bits_under_a_right_crc_never_change_a_lane() {
    let pairs = [1, 2].map(pair_of_codec_conditioned);
    pairs.par_iter().for_each(|pair| {
        let sound = ValidatedIndex::parse(pair.index.clone(), &Limits::default()).unwrap();
        let (mut found, mut harmless) = (0, 0);
        for (chunk, record) in sound.records().iter().enumerate() {
            let (place, size) = (record.blob_offset.get() as usize, record.compressed_size.get() as usize);
            for (at, bit) in places(size).flat_map(|at| (0..8).map(move |bit| (place + at, 1u8 << bit))) {
                let (mut index, mut blob) = (pair.index.clone(), pair.blob.clone());
                blob[at] ^= bit;
                repair(&mut index, &mut blob, chunk);
                match read(&index, &blob, &*pair.base) {
                    // Reading compared all digests, so the lanes are right.
                    Ok(()) => harmless += 1,
                    Err(Error::Invalid(invalid)) => {
                        let rule = invalid.rule;
                        assert!(rule.id().starts_with("payload.") || rule == Rule::ChunkTargetSum, "{}: {invalid}", pair.name);
                        assert_eq!(invalid.at.chunk, Some(chunk as u32));
                        found += 1;
                    }
                    Err(other) => panic!("{}: {other}", pair.name),
                }
            }
        }
        assert!(found > 20 * harmless, "{}: {found} found, {harmless} without effect", pair.name);
    });
}

/// A forged blob: a pair whose payload was changed so that its CRC and its sums stay the same.
struct Forged {
    pair: Pair<Vec<u8>>,
    old: Vec<u8>,
    /// What the forged payload decodes to.
    wrong: Vec<u8>,
}

fn forged(format: FormatVersion, payload_digests: bool) -> Forged {
    let [old, new] = [1, 2].map(|seed| tensor("w", "U32", &[1024], seed).bytes);
    let info = TensorInfo { name: "w".into(), dtype: Dtype::U32, shape: vec![1024] };
    let base = MemoryCheckpoint::new([(info.clone(), &*old)]).unwrap();
    let target = MemoryCheckpoint::new([(info, &*new)]).unwrap();
    let options = EncodeOptions::default().codec(Codec::Raw).format(format).payload_digests(payload_digests);
    let genuine = Encode::new(&target).base(&base).options(options).to_memory().unwrap().0;
    let (mut blob, mut wrong) = (genuine.blob().clone(), new.clone());
    forge(genuine.index(), &mut blob, &mut wrong);
    let index = ValidatedIndex::parse(genuine.index().as_bytes().to_vec(), &Limits::default()).unwrap();
    let pair = Pair::new(index, blob).unwrap();
    assert!(pair.blob() != genuine.blob() && wrong != new);
    Forged { pair, old, wrong }
}

/// From format 1.2 on, the pair digest covers the payloads. Each way to read the forged payload refuses it, and changes no tensor.
#[test]
fn a_forged_blob_is_refused_on_all_paths_if_the_pair_digest_covers_payloads() {
    for (payload_digests, rule) in [(false, Rule::HeaderPayloadRoot), (true, Rule::PayloadDigest)] {
        let Forged { pair, old, .. } = forged(FormatVersion::V1_2, payload_digests);
        let info = TensorInfo { name: "w".into(), dtype: Dtype::U32, shape: vec![1024] };
        let base = MemoryCheckpoint::new([(info, &*old)]).unwrap();
        let refused = |outcome: Result<()>| {
            let error = outcome.unwrap_err();
            assert_eq!(error.rule(), Some(rule), "{error}");
            let Error::Invalid(invalid) = error else { panic!("{error}") };
            assert_eq!(invalid.at.chunk, payload_digests.then_some(0));
        };
        let mut out = vec![0; old.len()];
        let mut lanes = old.clone();
        for digests in [true, false] {
            let apply = || Apply::new(&pair).base(&base).digests(digests);
            refused(apply().to_buffers(&mut [&mut out]).map(|_| ()));
            refused(apply().to_memory().map(|_| ()));
            refused(apply().verify().map(|_| ()));
            refused(apply().range("w", 0..1024).map(|_| ()));
            refused(apply().range("w", 7..8).map(|_| ()));
            refused(apply().changes("w").map(|_| ()));
            let folder = tempfile::tempdir().unwrap();
            refused(apply().to_path(folder.path().join("out")).map(|_| ()));
            assert!(folder.path().read_dir().unwrap().next().is_none());
            for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
                let tensors = [TensorMut { name: "w", bytes: &mut lanes }];
                refused(Apply::new(&pair).digests(digests).in_place(tensors, mode).map(|_| ()));
                assert_eq!(lanes, old);
            }
        }
        refused(pair.verify().map(|_| ()));
        refused(tpde::Verify::new(&pair).run().map(|_| ()));
        refused(tpde::Verify::new(&pair).base(&base).run().map(|_| ()));
    }
}

/// The limit of formats 1.0 and 1.1: someone who knows the weights of the sums can forge a blob. Only digests of tensors refuse it.
#[test]
fn a_forged_blob_of_format_1_1_is_refused_where_digests_of_tensors_are_compared_and_nowhere_else() {
    let Forged { pair: forged, old, wrong } = forged(FormatVersion::V1_1, false);
    let info = TensorInfo { name: "w".into(), dtype: Dtype::U32, shape: vec![1024] };
    let base = MemoryCheckpoint::new([(info, &*old)]).unwrap();
    let refused = |outcome: Result<()>| assert_eq!(outcome.unwrap_err().rule(), Some(Rule::TensorTargetDigest));
    let mut out = vec![0; old.len()];
    let mut lanes = old.clone();
    let in_place = |lanes: &mut [u8], mode| Apply::new(&forged).in_place([TensorMut { name: "w", bytes: lanes }], mode).map(|_| ());
    refused(Apply::new(&forged).base(&base).to_buffers(&mut [&mut out]).map(|_| ()));
    refused(Apply::new(&forged).base(&base).verify().map(|_| ()));
    refused(in_place(&mut lanes, InPlace::AllChecked));
    assert_eq!(lanes, old);

    let report = forged.verify().unwrap();
    assert_eq!((report.target_checked, report.payload_digests), (false, PayloadDigests::NotCompared));
    let report = Apply::new(&forged).base(&base).digests(false).to_buffers(&mut [&mut out]).unwrap();
    assert_eq!((report.digests_checked, report.payload_digests, &out), (false, PayloadDigests::NotCompared, &wrong));
    assert_eq!(Apply::new(&forged).base(&base).range("w", 0..1024).unwrap(), wrong);
    in_place(&mut lanes, InPlace::ChunkByChunk).unwrap();
    assert_eq!(lanes, wrong);
}
