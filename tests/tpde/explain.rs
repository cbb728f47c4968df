//! `Explain`: the purpose of each byte of a pair, and the sizes of other encodings.

use crate::common::forge::repair;
use crate::common::inputs::{Input, inputs};
use crate::common::{Xorshift, manifest};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use tpde::{
    BaseKind, Checkpoint, Codec, CodecChoice, Encode, EncodeOptions, Error, Explain, Explanation, Favor, Limits, MemoryCheckpoint,
    Pair, Result, Rule, SafetensorsCheckpoint, Source, TensorReport, ValidatedIndex, WayReport,
};
use tpde_core::format::Section;

fn input(name: &str, side: u64) -> Input {
    inputs(side).find(|input| input.name == name).unwrap()
}

fn pair_of(input: &Input, options: &EncodeOptions) -> Pair<Vec<u8>> {
    Encode::new(&input.target()).base(&input.base()).options(options.clone()).to_memory().unwrap().0
}

fn of_codec(codec: Codec) -> EncodeOptions {
    EncodeOptions::default().codec(codec)
}

/// Asserts that every byte of a pair is explained exactly once, and returns the names of the parts that occur.
fn check_sums<B: Source>(name: &str, pair: &Pair<B>, explained: &Explanation) -> BTreeSet<&'static str> {
    let index = pair.index();
    assert_eq!(explained.index.total(), index.as_bytes().len() as u64, "{name}");
    assert_eq!(explained.blob_header + explained.payloads.total(), pair.blob().size(), "{name}");
    assert_eq!(explained.tensors.len(), index.tensor_count(), "{name}");
    let mut users = vec![0; index.table_sets().len()];
    for (tensor, found) in index.tensors().zip(&explained.tensors) {
        let report = TensorReport::new(index, &tensor);
        assert_eq!(found.parts.total(), report.payload_bytes, "{name}, {}", tensor.name);
        assert_eq!(found.table_set.is_some(), tensor.tables.is_some(), "{name}, {}", tensor.name);
        if let Some(number) = found.table_set {
            assert_eq!(tensor.tables, Some(&index.table_sets()[number - 1]), "{name}, {}", tensor.name);
            users[number - 1] += 1;
        }
        // Parts of other codecs have no bytes.
        let parts = found.parts;
        let (of_zstd, of_raw) = (parts.frames, parts.positions + parts.deltas);
        let of_codec = match tensor.codec {
            Codec::Zstd => of_zstd,
            Codec::Raw => of_raw,
            _ => report.payload_bytes - parts.padding - of_zstd - of_raw,
        };
        assert_eq!(of_codec + parts.padding, report.payload_bytes, "{name}, {}", tensor.name);
    }
    assert!(explained.table_sets.iter().zip(&users).all(|(set, users)| set.tensors == *users), "{name}");
    assert!(explained.table_sets.iter().zip(1..).all(|(set, number)| set.number == number), "{name}");
    let tables: u64 = explained.table_sets.iter().map(|set| set.expanded_bytes).sum();
    assert_eq!(tables, index.header().section(Section::Tables).expanded_size, "{name}");
    let parts = explained.index.each().chain(explained.payloads.each());
    parts.filter(|(_, bytes)| *bytes > 0).map(|(part, _)| part).collect()
}

#[test]
fn parts_add_up_to_both_files_whatever_is_encoded_and_how() {
    let with = |codec, favor, chunk_lanes| EncodeOptions::default().codec(codec).favor(favor).chunk_lanes(chunk_lanes);
    let mut options: Vec<_> = CodecChoice::ALL.iter().map(|&codec| with(codec, Favor::Ratio, 1 << 20)).collect();
    options.extend([Favor::Speed, Favor::Size].map(|favor| with(CodecChoice::Auto, favor, 1 << 12).payload_digests(true)));
    let mut seen = BTreeSet::new();
    for input in inputs(96) {
        for options in &options {
            let pair = pair_of(&input, options);
            let name = format!("{}, {options:?}", input.name);
            seen.extend(check_sums(&name, &pair, &Explain::new(&pair).run().unwrap()));
        }
    }
    // The totals would also be right if parts were mixed up, or if a whole payload were one part.
    let all = Explain::new(&pair_of(&input("any bits", 8), &options[0])).run().unwrap();
    let all: BTreeSet<_> = all.index.each().chain(all.payloads.each()).map(|(part, _)| part).collect();
    let missing: Vec<_> = all.difference(&seen).collect();
    assert_eq!(missing, [&"file table"], "parts that no input has");
}

#[test]
fn parts_of_a_payload_have_the_sizes_that_the_spec_gives_them() {
    let input = input("no base, F32", 120);
    let pair = pair_of(&input, &of_codec(Codec::Conditioned));
    let parts = Explain::new(&pair).run().unwrap().tensors[0].parts;
    let mut payload = Vec::new();
    let payload = pair.payload(0, &mut payload).unwrap();
    let [low_bits, states_log2, segments_log2, activity_bits, _, _, contexts, _] = *payload.first_chunk().unwrap();
    let exceptions = u32::from_le_bytes(payload[8..12].try_into().unwrap());
    let (lanes, segments) = (120u64 * 120, 1u64 << segments_log2);
    assert_eq!((low_bits, parts.low_bits), (24, lanes * 24 / 8));
    assert_eq!(parts.exceptions, u64::from(exceptions) * 8);
    assert_eq!(parts.activities, (lanes.div_ceil(128) * u64::from(activity_bits)).div_ceil(8));
    assert_eq!(parts.states, segments * (4 << states_log2));
    let maps = u64::from(contexts).div_ceil(2) << activity_bits;
    let before = 16 + maps + parts.activities + parts.exceptions + parts.low_bits + 4 * (segments - 1);
    assert_eq!(parts.headers, 16 + maps + 4 * (segments - 1) + before % 2);
    assert_eq!(parts.words, payload.len() as u64 - before.next_multiple_of(2) - parts.states);

    // Positions of 4 bytes each, padded to a multiple of an 8-byte lane.
    let input = self::input("one training step, F64", 33);
    let pair = pair_of(&input, &of_codec(Codec::Raw));
    let changed = u64::from(pair.index().records()[0].num_deltas.get());
    let parts = Explain::new(&pair).run().unwrap().tensors[0].parts;
    assert_eq!((parts.positions, parts.deltas), ((4 * changed).next_multiple_of(8), 8 * changed));
}

#[test]
fn parts_of_all_published_pairs_add_up() {
    let mut some = 0;
    for vector in manifest::vectors() {
        let opened = ValidatedIndex::parse(manifest::read(&vector.index), &Limits::default())
            .and_then(|index| Pair::new(index, manifest::read(&vector.blob)));
        let explained = opened.and_then(|pair| {
            let explained = Explain::new(&pair).run()?;
            Ok((pair, explained))
        });
        match explained {
            Ok((pair, explained)) => _ = check_sums(&vector.name, &pair, &explained),
            Err(e) => assert!(vector.verdict != "valid", "{}: {e}", vector.name),
        }
        if vector.verdict != "valid" {
            continue;
        }
        let index = ValidatedIndex::parse(manifest::read(&vector.index), &Limits::default()).unwrap();
        let pair = Pair::new(index, manifest::read(&vector.blob)).unwrap();
        let base: Box<dyn Checkpoint> = match &vector.base {
            Some(base) => Box::new(SafetensorsCheckpoint::open(base).unwrap()),
            None => Box::new(MemoryCheckpoint::default()),
        };
        let explained = Explain::new(&pair).base(&*base).run().unwrap_or_else(|e| panic!("{}: {e}", vector.name));
        check_sums(&vector.name, &pair, &explained);
        for (tensor, found) in pair.index().tensors().zip(&explained.tensors) {
            let taken: Vec<_> = found.ways.iter().filter(|way| way.taken).collect();
            let changes = TensorReport::new(pair.index(), &tensor).changed > 0;
            assert_eq!(taken.len(), usize::from(changes), "{}, {}", vector.name, tensor.name);
            // These payloads are reported as stored, even if this encoder would write others.
            assert!(taken.iter().all(|way| way.payload_bytes == found.parts.total() && !way.estimated), "{}", vector.name);
            some += taken.len();
        }
    }
    assert!(some > 100, "{some} tensors");
}

/// Whether `way` has this codec and use of the base.
fn is(way: &WayReport, codec: Codec, from_base: bool) -> bool {
    way.codec == codec && way.from_base == from_base
}

#[test]
fn the_way_that_auto_takes_is_the_smallest_of_those_that_are_explained() {
    let mut with_tables = 0;
    for input in inputs(200) {
        let pair = pair_of(&input, &EncodeOptions::default());
        let explained = Explain::new(&pair).base(&input.base()).run().unwrap();
        for (tensor, found) in pair.index().tensors().zip(&explained.tensors) {
            let at = format!("{}, {}: {:?}", input.name, tensor.name, found.ways);
            let Some(taken) = found.ways.iter().find(|way| way.taken) else {
                assert!(found.ways.is_empty() && found.parts.total() == 0, "{at}");
                continue;
            };
            assert!(is(taken, tensor.codec, tensor.base_kind != BaseKind::None), "{at}");
            assert_eq!((taken.payload_bytes, taken.estimated), (found.parts.total(), false), "{at}");
            assert!(found.ways.iter().all(|way| taken.bytes() <= way.bytes()), "{at}");
            for way in &found.ways {
                assert_eq!(way.bytes(), way.payload_bytes + way.table_bytes, "{at}");
                assert!(way.table_bytes == 0 || way.codec == Codec::Conditioned, "{at}");
                with_tables += u64::from(way.table_bytes > 0);
            }
            let has_base = input.base.iter().any(|(info, _)| info.name == tensor.name);
            assert_eq!(found.ways.len(), if has_base { 6 } else { 3 }, "{at}");
        }
    }
    assert!(with_tables > 50, "{with_tables}");
}

#[test]
fn what_another_codec_takes_is_what_a_pair_of_it_has() {
    let mut compared = 0;
    let names = ["one training step, F32", "one training step, F64", "fine-tuned, BF16", "a vocabulary and one row", "half pruned"];
    let cases = names.into_iter().flat_map(|name| [(name, 160, 1 << 12), (name, 160, 1 << 20)]);
    // In these inputs, estimates are sufficient for some chunks but not for all.
    let mixed = ["half of it unrelated", "a new head", "unchanged but for a quarter"].map(|name| (name, 400, 1 << 14));
    for (name, side, chunk_lanes) in cases.chain(mixed) {
        let input = input(name, side);
        // These chunk sizes use different encodings.
        let pair_of = |codec| pair_of(&input, &of_codec(codec).chunk_lanes(chunk_lanes));
        for of_pair in [Codec::Zstd, Codec::Raw, Codec::Conditioned] {
            let explained = Explain::new(&pair_of(of_pair)).base(&input.base()).run().unwrap();
            for other in [Codec::Raw, Codec::Conditioned] {
                let by_hand = pair_of(other);
                for (tensor, found) in by_hand.index().tensors().zip(&explained.tensors) {
                    let bytes = TensorReport::new(by_hand.index(), &tensor).payload_bytes;
                    let way = found.ways.iter().find(|way| is(way, other, true)).unwrap();
                    if !way.estimated || other == Codec::Raw {
                        assert_eq!(way.payload_bytes, bytes, "{name}, {chunk_lanes}, {}: {way:?}", tensor.name);
                        compared += usize::from(!way.taken);
                    }
                }
            }
        }
    }
    assert!(compared > 40, "{compared}");
}

#[test]
fn renamed_tensors_are_compared_from_their_bases() {
    let mut input = input("fine-tuned, BF16", 160);
    let renamed = input.target.iter_mut().map(|(info, _)| {
        let base = info.name.clone();
        info.name = format!("new.{base}");
        (info.name.clone(), base)
    });
    let options = EncodeOptions::default().renamed(renamed);
    let pair = pair_of(&input, &options);
    let explained = Explain::new(&pair).base(&input.base()).run().unwrap();
    for tensor in &explained.tensors {
        assert!(tensor.ways.iter().any(|way| way.from_base && way.taken), "{:?}", tensor.ways);
    }
}

#[test]
fn a_base_that_is_not_the_pairs_is_refused() {
    let input = input("fine-tuned, BF16", 160);
    let pair = pair_of(&input, &EncodeOptions::default());
    let explain = |base: &dyn Checkpoint| Explain::new(&pair).base(base).run();
    assert!(matches!(explain(&input.target()), Err(Error::AlreadyApplied { .. })));
    let mut wrong = input.base.clone();
    wrong[1].1[77] ^= 1;
    let wrong = MemoryCheckpoint::new(wrong.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap();
    let outcome = explain(&wrong);
    assert!(matches!(&outcome, Err(Error::WrongBase { tensor, .. }) if *tensor == input.base[1].0.name), "{outcome:?}");
    assert_eq!(explain(&MemoryCheckpoint::default()).unwrap_err().rule(), Some(Rule::BaseTensor));
}

#[test]
fn progress_reaches_its_end_and_can_end_the_work() {
    let input = input("several dtypes", 160);
    let pair = pair_of(&input, &EncodeOptions::default().chunk_lanes(4096));
    let base = input.base();
    for with_base in [false, true] {
        let explain = || if with_base { Explain::new(&pair).base(&base) } else { Explain::new(&pair) };
        let told = AtomicU64::new(0);
        let progress = |bytes| _ = told.fetch_add(bytes, Ordering::Relaxed);
        explain().progress(progress).run().unwrap();
        assert_eq!(told.into_inner(), explain().progress_bytes());

        struct Ends(Mutex<u64>);
        impl tpde::Watch for Ends {
            fn done(&self, bytes: u64) -> Result<()> {
                let mut left = self.0.lock().unwrap();
                *left = left.checked_sub(bytes).ok_or(Error::Cancelled)?;
                Ok(())
            }
        }
        let ends = Ends(Mutex::new(explain().progress_bytes() - 1));
        assert!(matches!(explain().watch(&ends).run(), Err(Error::Cancelled)), "{with_base}");
    }
}

/// Explains a pair with these bytes, with its base or without.
fn explained(index: &[u8], blob: &[u8], base: Option<&dyn Checkpoint>) -> (Pair<Vec<u8>>, Result<Explanation>) {
    let index = ValidatedIndex::parse(index.to_vec(), &Limits::default()).unwrap();
    let pair = Pair::new(index, blob.to_vec()).unwrap();
    let explained = base.into_iter().fold(Explain::new(&pair), Explain::base).run();
    (pair, explained)
}

#[test]
fn damage_of_a_payload_is_an_error_that_names_tensor_and_chunk() {
    let input = input("several dtypes", 100);
    for codec in Codec::ALL {
        let pair = pair_of(&input, &of_codec(*codec).chunk_lanes(4096));
        let index = pair.index();
        for tensor in index.tensors().filter(|tensor| tensor.chunk_count > 0) {
            let chunk = tensor.chunks().end - 1;
            let record = &index.records()[chunk as usize];
            let mut blob = pair.blob().clone();
            blob[record.blob_offset.get() as usize + record.compressed_size.get() as usize / 2] ^= 4;
            let Err(Error::Invalid(found)) = explained(index.as_bytes(), &blob, None).1 else { panic!("not noticed") };
            assert_eq!((found.rule, found.at.chunk), (Rule::PayloadCrc32, Some(chunk)));
            assert_eq!(found.at.tensor.as_deref(), Some(tensor.name));
        }
    }
}

#[test]
fn payloads_of_any_bytes_are_explained_or_refused() {
    let mut random = Xorshift(7);
    let (mut sums, mut rules) = (0, BTreeSet::new());
    for name in ["fine-tuned, BF16", "no base, F32", "one training step, F64"] {
        let input = input(name, 80);
        let base = input.base();
        for codec in Codec::ALL {
            let pair = pair_of(&input, &of_codec(*codec).chunk_lanes(4096));
            for (chunk, record) in pair.index().records().iter().enumerate().take(2) {
                let (place, size) = (record.blob_offset.get() as usize, record.compressed_size.get() as usize);
                // Offsets in the header and the maps, then random ones.
                let places = (0..size.min(40)).chain((0..40).map(|_| random.next() as usize % size)).collect::<Vec<_>>();
                for at in places {
                    for value in [0, 1, 5, 0x7F, 0xFF, random.next() as u8] {
                        let (mut index, mut blob) = (pair.index().as_bytes().to_vec(), pair.blob().clone());
                        blob[place + at] = value;
                        repair(&mut index, &mut blob, chunk);
                        let with_base = at.is_multiple_of(16).then_some(&base as &dyn Checkpoint);
                        match explained(&index, &blob, with_base) {
                            (pair, Ok(explained)) => {
                                check_sums(name, &pair, &explained);
                                sums += 1;
                            }
                            (_, Err(Error::Invalid(found))) => {
                                assert_eq!(found.at.chunk, Some(chunk as u32), "{found}");
                                assert!(found.at.tensor.is_some(), "{found}");
                                if with_base.is_none() {
                                    rules.insert(found.rule.id());
                                }
                            }
                            (_, Err(other)) => panic!("{name}, {codec}: {other}"),
                        }
                    }
                }
            }
        }
    }
    assert!(sums > 1000, "{sums}");
    let taken_apart = ["payload.classes", "payload.header", "payload.size", "payload.stream"];
    assert!(taken_apart.iter().all(|rule| rules.contains(rule)), "{rules:?}");
}
