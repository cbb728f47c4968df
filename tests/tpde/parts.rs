//! Pairs that describe tensors in parts: any nested cuts, encoded and applied in every way, give the bytes of the target.

use crate::common::slices::{Held, cut, memory, whole};
use crate::common::{Tensor as Data, Xorshift, tensor, tuned, write_file};
use proptest::prelude::*;
use tpde::{
    Apply, Checkpoint, Codec, CodecChoice, Dtype, Encode, EncodeOptions, Error, Explain, FormatVersion, InPlace, Limits,
    MemoryCheckpoint, Pair, PayloadDigests, Rectangle, SafetensorsCheckpoint, SliceMut, Split, Tensor, TensorInfo, TensorMut,
    ValidatedIndex, Verify,
};

/// The bytes of a rectangle.
fn bytes_of(data: &Data, part: &Rectangle) -> Vec<u8> {
    Held::new(data, part, 0).bytes
}

/// Applies a pair in every way, and compares the results with the target.
fn check(pair: &Pair<Vec<u8>>, base: &[Data], target: &[Data]) {
    let (base_memory, target_memory) = (memory(base), memory(target));
    let apply = || Apply::new(pair).base(&base_memory);
    let data = |entry: &Tensor<'_>| target.iter().find(|data| data.name == entry.name).unwrap();
    let mut outputs: Vec<_> = pair.index().tensors().map(|entry| vec![0xA5; entry.bytes() as usize]).collect();
    let mut slices: Vec<_> = outputs.iter_mut().map(|output| &mut output[..]).collect();
    let report = apply().to_buffers(&mut slices).unwrap();
    assert_eq!(report.payload_digests, PayloadDigests::All);
    for (entry, output) in pair.index().tensors().zip(&outputs) {
        assert!(*output == bytes_of(data(&entry), &entry.rectangle()), "{} {:?}", entry.name, entry.rectangle());
    }
    for (info, bytes) in apply().to_memory().unwrap() {
        assert_eq!(info.bytes(), bytes.len() as u64);
    }
    Verify::new(pair).base(&base_memory).target(&target_memory).run().unwrap();
    let mut random = Xorshift(1 + target.iter().map(|data| data.bytes.len() as u64).sum::<u64>());
    for data in target {
        let width = crate::common::width(data.dtype);
        let count = (data.bytes.len() / width) as u64;
        for _ in 0..4 {
            let from = random.next() % (count + 1);
            let to = from + random.next() % (count - from + 1);
            let found = apply().range(&data.name, from..to).unwrap();
            assert!(found == data.bytes[from as usize * width..to as usize * width], "{} {from}..{to}", data.name);
        }
        assert!(apply().range(&data.name, 0..count + 1).is_err());
        let zeros = vec![0; data.bytes.len()];
        let old = base.iter().find(|base| base.name == data.name).map_or(&zeros, |base| &base.bytes);
        let (old, new) = (old.chunks(width), data.bytes.chunks(width));
        let expected: Vec<_> = (0u64..).zip(old.zip(new)).filter(|(_, (old, new))| old != new).collect();
        let changes = apply().changes(&data.name).unwrap();
        assert!(changes.positions.iter().eq(expected.iter().map(|(position, _)| position)), "{}", data.name);
        assert!(changes.values.chunks(width).eq(expected.iter().map(|(_, (_, new))| *new)), "{}", data.name);
    }
    for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
        // Memory of tensors without a base may hold anything.
        let mut held: Vec<_> = target
            .iter()
            .map(|data| {
                base.iter().find(|base| base.name == data.name).map_or(vec![0x5A; data.bytes.len()], |base| base.bytes.clone())
            })
            .collect();
        let tensors = target.iter().zip(&mut held).map(|(data, bytes)| TensorMut { name: &data.name, bytes });
        Apply::new(pair).in_place(tensors.collect::<Vec<_>>(), mode).unwrap();
        assert!(held.iter().zip(target).all(|(held, data)| *held == data.bytes), "{mode:?}");
    }
    let mut wrong = base.to_vec();
    for at in 0..wrong.len() {
        wrong[at].bytes[0] ^= 2;
        let outcome = Apply::new(pair).base(&memory(&wrong)).verify();
        // The element may belong to a part without a base.
        assert!(matches!(outcome, Ok(_) | Err(Error::WrongBase { .. })), "{outcome:?}");
        wrong[at].bytes[0] ^= 2;
    }
    let report = Explain::new(pair).base(&base_memory).run().unwrap();
    assert_eq!(report.tensors.len(), pair.index().tensor_count());
}

fn data() -> impl Strategy<Value = Data> {
    let dtypes = prop::sample::select(vec!["BF16", "F32", "U8"]);
    (dtypes, prop::collection::vec(1usize..40, 1..4), any::<u64>())
        .prop_map(|(dtype, shape, seed)| tensor("w", dtype, &shape, seed))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    #[test]
    fn any_nested_cuts_give_the_target(
        first in data(),
        second in data(),
        numbers in prop::collection::vec(any::<u64>(), 60),
        has_base in any::<bool>(),
        codec in prop::sample::select(CodecChoice::ALL.to_vec()),
        every in 1usize..60,
    ) {
        let base = [crate::common::named(&first, "a"), crate::common::named(&second, "b")];
        let target: Vec<_> = base.iter().map(|data| tuned(data, every)).collect();
        let base = if has_base { &base[..] } else { &base[..1] };
        let mut numbers = numbers.into_iter();
        let cuts: Vec<_> = target.iter().map(|data| (data.name.clone(), cut(&whole(data), &mut numbers, 3, 0))).collect();
        let options = EncodeOptions::default().codec(codec).chunk_lanes(4096).cuts(cuts.clone());
        let pair = Encode::new(&memory(&target)).base(&memory(base)).options(options).to_memory().unwrap().0;
        for (name, parts) in &cuts {
            let entries: Vec<_> = pair.index().entries(name).map(|entry| entry.rectangle()).collect();
            prop_assert_eq!(&entries, parts);
            prop_assert!(pair.index().is_tiled(name));
            prop_assert_eq!(pair.index().find(name).unwrap().rectangle(), parts[0].clone());
        }
        prop_assert!(pair.index().find("ab").is_none() && pair.index().entries("").len() == 0);
        check(&pair, base, &target);
    }
}

#[test]
fn files_are_rebuilt_from_parts() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    let shapes: [(&str, &[usize]); 4] = [
        ("model.embed_tokens.weight", &[50, 24]),
        ("model.layers.0.mlp.down_proj.weight", &[24, 60]),
        ("model.layers.0.self_attn.q_proj.weight", &[30, 24]),
        ("model.norm.weight", &[24]),
    ];
    let base: Vec<_> = shapes.iter().zip(1..).map(|((name, shape), seed)| tensor(name, "BF16", shape, seed)).collect();
    let target: Vec<_> = base.iter().map(|data| tuned(data, 9)).collect();
    write_file(&path("base"), &base);
    write_file(&path("target"), &target);
    let open = |name| SafetensorsCheckpoint::open(path(name)).unwrap();
    let options = EncodeOptions::default().split("llama:4".parse().unwrap());
    let report = Encode::new(&open("target")).base(&open("base")).options(options).to_path(path("pair")).unwrap();
    assert_eq!(report.tensors.len(), 3 * 4 + 1);
    assert!(report.removed.is_empty());
    let pair = Pair::open(path("pair")).unwrap();
    let extents: Vec<_> = pair.index().entries("model.embed_tokens.weight").map(|entry| entry.shape[0]).collect();
    assert_eq!(extents, [13, 13, 13, 11]);
    assert!(pair.index().entries("model.layers.0.mlp.down_proj.weight").all(|entry| entry.shape == [24, 15]));
    let base = open("base");
    let apply = || Apply::new(&pair).base(&base);
    apply().to_path(path("out")).unwrap();
    assert!(std::fs::read(path("out")).unwrap() == std::fs::read(path("target")).unwrap());
    apply().tensors(|name| name.contains("mlp")).to_path(path("one")).unwrap();
    let one = open("one");
    assert_eq!(one.tensors()[0].shape, [24, 60]);
    let mut bytes = vec![0; target[1].bytes.len()];
    one.read(0, 0, &mut bytes).unwrap();
    assert!(bytes == target[1].bytes);
    Verify::new(&pair).base(&base).target(&open("target")).run().unwrap();
    assert_eq!(Verify::new(&pair).target(&base).run().unwrap_err().rule(), Some(tpde::Rule::TensorTargetDigest));
}

#[test]
fn a_pair_of_some_parts_has_no_files_and_changes_only_slices() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    let base = [tensor("w", "BF16", &[40, 30], 1)];
    let target = [tuned(&base[0], 3)];
    write_file(&path("base"), &base);
    write_file(&path("target"), &target);
    let open = |name| SafetensorsCheckpoint::open(path(name)).unwrap();
    let part = Rectangle::new([10, 5], [20, 7]);
    let options = EncodeOptions::default().cuts([("w", vec![part.clone()])]);
    Encode::new(&open("target")).base(&open("base")).options(options).to_path(path("pair")).unwrap();
    let pair = Pair::open(path("pair")).unwrap();
    assert_eq!(pair.index().files().len(), 0);
    assert!(!pair.index().is_tiled("w"));
    let base_file = open("base");
    let apply = || Apply::new(&pair).base(&base_file);
    // Row 10 has elements 5 to 11 of the part.
    assert!(apply().range("w", 305..312).unwrap() == target[0].bytes[610..624]);
    let refused = apply().range("w", 304..312);
    assert!(matches!(&refused, Err(Error::InvalidArgument(text)) if text.contains("14 of 16 bytes")), "{refused:?}");
    let missing = Rectangle::new([0, 0], [10, 30]);
    let refused = apply().changes("w");
    assert!(matches!(&refused, Err(Error::Incomplete { missing: found, .. }) if *found == missing), "{refused:?}");
    let refused = Apply::new(&pair).base(&base_file).to_path(path("out"));
    assert!(matches!(&refused, Err(Error::NotWritable { reason }) if reason.contains("only some parts")), "{refused:?}");
    for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
        let mut bytes = base[0].bytes.clone();
        let refused = Apply::new(&pair).in_place([TensorMut { name: "w", bytes: &mut bytes }], mode);
        assert!(matches!(&refused, Err(Error::Incomplete { missing: found, .. }) if *found == missing), "{refused:?}");
        assert!(bytes == base[0].bytes);
        // The part as a slice of the whole tensor's memory.
        let first = 2 * (30 * 10 + 5);
        let slice = SliceMut::new("w", part.clone(), &mut bytes[first..first + 19 * 60 + 14]).pitch(60);
        Apply::new(&pair).in_place_slices([slice], mode).unwrap();
        let mut expected = base[0].bytes.clone();
        for row in 10..30 {
            let range = 2 * (30 * row + 5)..2 * (30 * row + 12);
            expected[range.clone()].copy_from_slice(&target[0].bytes[range]);
        }
        assert!(bytes == expected, "{mode:?}");
        assert_eq!(bytes_of(&Data { bytes, ..base[0].clone() }, &part), bytes_of(&target[0], &part));
    }
}

/// A range reads the payloads of the parts that it meets, and no others.
#[test]
fn a_range_decodes_only_chunks_of_the_parts_that_it_meets() {
    let base = [tensor("w", "BF16", &[60, 400], 1)];
    let target = [tuned(&base[0], 3)];
    let (base, expected) = (memory(&base), &target[0].bytes);
    // Four parts of 6,000 elements, in two chunks each.
    let options = EncodeOptions::default().codec(Codec::Raw).chunk_lanes(4096).split("w=1:4".parse().unwrap());
    let pair = Encode::new(&memory(&target)).base(&base).options(options).to_memory().unwrap().0;
    let range = |pair: &Pair<Vec<u8>>, from: usize, to: usize| {
        let bytes = Apply::new(pair).base(&base).range("w", from as u64..to as u64);
        bytes.inspect(|bytes| assert!(*bytes == expected[2 * from..2 * to]))
    };
    for (part, damaged) in pair.index().tensors().flat_map(|entry| entry.chunks()).enumerate() {
        let mut blob = pair.blob().clone();
        blob[pair.index().chunk(damaged).blob_offset as usize] ^= 1;
        let damaged =
            Pair::new(ValidatedIndex::parse(pair.index().as_bytes().to_vec(), &Limits::default()).unwrap(), blob).unwrap();
        let (column, is_first) = (part / 2, part % 2 == 0);
        for other in 0..4 {
            // Row 0 is in the first chunk of a part, row 59 in the second.
            for (row, meets) in [(0, is_first), (59, !is_first)] {
                let from = 400 * row + 100 * other;
                assert_eq!(range(&damaged, from, from + 100).is_err(), other == column && meets, "part {part}, column {other}");
            }
        }
        assert!(range(&damaged, 0, 60 * 400).is_err());
    }
}

#[test]
fn cuts_that_are_no_parts_or_do_not_nest_are_refused_before_a_lane_is_read() {
    let target = [tensor("w", "BF16", &[8, 8], 1)];
    let encode = |options: EncodeOptions| Encode::new(&memory(&target)).options(options).to_memory().map(|_| ());
    let cut = |parts: &[([u64; 2], [u64; 2])]| {
        let parts = parts.iter().map(|&(origin, extent)| Rectangle::new(origin, extent)).collect();
        encode(EncodeOptions::default().cuts([("w", parts)]))
    };
    let refused = |outcome: Result<(), Error>, what: &str| {
        let error = outcome.unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument(text) if text.contains(what)), "{error}");
    };
    cut(&[([0, 0], [4, 8]), ([4, 0], [4, 4]), ([4, 4], [4, 4])]).unwrap();
    cut(&[([4, 4], [4, 4]), ([0, 0], [4, 8]), ([4, 0], [4, 4])]).unwrap();
    // Disjoint, and covering the tensor.
    refused(cut(&[([0, 0], [4, 4]), ([4, 0], [4, 4]), ([0, 4], [8, 4])]), "do not nest: [0:4, 0:4] and [0:8, 4:8]");
    refused(cut(&[([0, 0], [4, 8]), ([3, 0], [5, 8])]), "do not nest");
    refused(cut(&[([0, 0], [4, 8]), ([0, 0], [4, 8])]), "do not nest");
    refused(cut(&[([0, 0], [4, 9])]), "an end beyond the tensor");
    refused(cut(&[([0, 0], [0, 8])]), "an extent of 0");
    refused(cut(&[([0, 0], [8, 8]), ([0, 0], [4, 8])]), "the whole tensor");
    refused(cut(&[]), "no rectangle");
    refused(encode(EncodeOptions::default().cuts([("v", vec![])])), "no tensor v");
    let split: Split = "w=0:2".parse().unwrap();
    refused(encode(EncodeOptions::default().split(split.clone()).format(FormatVersion::V1_1)), "need format 1.2");
    encode(EncodeOptions::default().split(split)).unwrap();
    // The whole tensor as its only part is no part.
    cut(&[([0, 0], [8, 8])]).unwrap();
}

/// A tensor that changes its number of rows has no parts of kind `same`, so rules leave it whole.
#[test]
fn rules_leave_a_tensor_whole_whose_rows_grow() {
    let base = [tensor("w", "BF16", &[8, 8], 1)];
    let mut target = tensor("w", "BF16", &[10, 8], 2);
    target.bytes[..128].copy_from_slice(&base[0].bytes);
    let options = EncodeOptions::default().codec(Codec::Raw).split("w=0:2".parse().unwrap());
    let pair = Encode::new(&memory(&[target])).base(&memory(&base)).options(options).to_memory().unwrap().0;
    assert!(!pair.index().has_parts());
    assert_eq!(pair.index().tensor(0).base_kind.name(), "prefix");
}

/// Parts of packed dtypes begin and end with a byte.
#[test]
fn tensors_of_packed_dtypes_are_cut_between_bytes() {
    let bytes: Vec<u8> = (0..32).collect();
    let info = TensorInfo { name: "w".into(), dtype: Dtype::F4, shape: vec![8, 8] };
    let target = MemoryCheckpoint::new([(info, &bytes[..])]).unwrap();
    let options = EncodeOptions::default().split("w=1:2".parse().unwrap());
    let pair = Encode::new(&target).options(options).to_memory().unwrap().0;
    let parts = Apply::new(&pair).to_memory().unwrap();
    let columns =
        |from: usize| (0..8).flat_map(move |row| 4 * row + from..4 * row + from + 2).map(|at| at as u8).collect::<Vec<_>>();
    assert_eq!((&parts[0].1, &parts[1].1), (&columns(0), &columns(2)));
}
