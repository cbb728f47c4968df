//! Merging pairs that have parts of tensors, as the ranks of a distributed job make them.

use crate::common::{Tensor as Data, tensor, tuned};
use proptest::prelude::*;
use std::collections::BTreeMap;
use tpde::{
    Apply, Checkpoint, Codec, CodecChoice, Conflict, Encode, EncodeOptions, Error, MemoryCheckpoint, Merge, Pair, Rectangle,
    TensorInfo, Verify,
};

type InMemory = Pair<Vec<u8>>;
/// The parts of tensors, by name.
type Cuts = BTreeMap<String, Vec<Rectangle>>;

fn memory(tensors: &[Data]) -> MemoryCheckpoint<'_> {
    let info = |data: &Data| TensorInfo {
        name: data.name.clone(),
        dtype: data.dtype.parse().unwrap(),
        shape: data.shape.iter().map(|&dim| dim as u64).collect(),
    };
    MemoryCheckpoint::new(tensors.iter().map(|data| (info(data), &data.bytes[..]))).unwrap()
}

/// Base and target: a matrix, a vector, and a tensor without a base.
fn checkpoints(rows: usize, columns: usize) -> (Vec<Data>, Vec<Data>) {
    let base = vec![tensor("a", "BF16", &[rows, columns], 1), tensor("b", "F32", &[rows], 2)];
    let mut target: Vec<_> = base.iter().map(|data| tuned(data, 7)).collect();
    target.push(tensor("c", "U8", &[columns, rows], 3));
    (base, target)
}

/// Encodes the parts in `cuts` of the tensors that are named there, and no others.
fn encode(base: &[Data], target: &[Data], cuts: &Cuts, codec: CodecChoice) -> InMemory {
    let target: Vec<_> = target.iter().filter(|data| cuts.contains_key(&data.name)).cloned().collect();
    let shape = |name: &str| target.iter().find(|data| data.name == name).unwrap().shape.clone();
    let is_part = |name: &str, parts: &[Rectangle]| parts[0].extent.iter().zip(shape(name)).any(|(&n, dim)| n != dim as u64);
    let cuts = cuts.iter().filter(|(name, parts)| is_part(name, parts)).map(|(name, parts)| (name.clone(), parts.clone()));
    let options = EncodeOptions::default().codec(codec).chunk_lanes(4096).cuts(cuts.collect::<Vec<_>>());
    Encode::new(&memory(&target)).base(&memory(base)).options(options).to_memory().unwrap().0
}

/// Cuts a tensor of this shape into slabs, and each slab into columns.
fn grid(shape: &[usize], numbers: &mut impl Iterator<Item = u64>) -> Vec<Rectangle> {
    let mut ends = |length: u64| {
        let mut number = || numbers.next().unwrap_or(0);
        let count = number() % 3;
        (0..count).map(|_| 1 + number() % length).chain([length]).collect::<std::collections::BTreeSet<u64>>()
    };
    let mut parts = Vec::new();
    let mut from = 0;
    for end in ends(shape[0] as u64) {
        let Some(&columns) = shape.get(1) else {
            parts.push(Rectangle::new([from], [end - from]));
            from = end;
            continue;
        };
        let mut left = 0;
        for right in ends(columns as u64) {
            parts.push(Rectangle::new([from, left], [end - from, right - left]));
            left = right;
        }
        from = end;
    }
    parts
}

fn assert_equal(a: &InMemory, b: &InMemory) {
    assert!(a.index().as_bytes() == b.index().as_bytes(), "the indexes differ");
    assert!(a.blob() == b.blob(), "the blobs differ");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(40) })]

    #[test]
    fn the_parts_of_ranks_merge_to_the_pair_of_all_parts(
        rows in 1usize..90,
        columns in 1usize..90,
        numbers in prop::collection::vec(any::<u64>(), 30),
        owners in prop::collection::vec(0usize..3, 30),
        is_raw: bool,
    ) {
        let (base, target) = checkpoints(rows, columns);
        let mut numbers = numbers.into_iter();
        let cuts: Cuts = target.iter().map(|data| (data.name.clone(), grid(&data.shape, &mut numbers))).collect();
        let codec = if is_raw { Codec::Raw } else { Codec::Zstd };
        let whole = encode(&base, &target, &cuts, codec.into());
        let mut owners = owners.into_iter().cycle();
        let mut of_ranks = vec![Cuts::new(); 3];
        for (name, parts) in &cuts {
            for part in parts {
                of_ranks[owners.next().unwrap()].entry(name.clone()).or_default().push(part.clone());
            }
        }
        let ranks: Vec<_> = of_ranks.iter().map(|cuts| encode(&base, &target, cuts, codec.into())).collect();
        let (merged, report) = Merge::new(&ranks).to_memory().unwrap();
        assert_equal(&merged, &whole);
        prop_assert_eq!(report.tensors as usize, cuts.values().map(Vec::len).sum::<usize>());
        prop_assert_eq!(merged.index().has_payload_digests(), merged.index().has_parts());
        let (base_memory, target_memory) = (memory(&base), memory(&target));
        Verify::new(&merged).base(&base_memory).target(&target_memory).run().unwrap();
        let folder = tempfile::tempdir().unwrap();
        Apply::new(&merged).base(&base_memory).to_path(folder.path().join("out")).unwrap();
        let rebuilt = tpde::SafetensorsCheckpoint::open(folder.path().join("out")).unwrap();
        for (i, data) in target.iter().enumerate() {
            let mut bytes = vec![0; data.bytes.len()];
            rebuilt.read(i, 0, &mut bytes).unwrap();
            prop_assert!(bytes == data.bytes, "{}", data.name);
        }
    }

    #[test]
    fn parts_of_a_pair_merge_back_to_its_bytes(
        numbers in prop::collection::vec(any::<u64>(), 30),
        owners in prop::collection::vec(0usize..3, 30),
        codec in prop::sample::select(CodecChoice::ALL.to_vec()),
    ) {
        let (base, target) = checkpoints(70, 90);
        let mut numbers = numbers.into_iter();
        let cuts: Cuts = target.iter().map(|data| (data.name.clone(), grid(&data.shape, &mut numbers))).collect();
        let whole = Merge::new([&encode(&base, &target, &cuts, codec)]).payload_digests(true).to_memory().unwrap().0;
        let shards: Vec<_> = (0..3)
            .map(|shard| Merge::new([&whole]).entries(|entry| owners[entry.place % 30] == shard).to_memory().unwrap().0)
            .collect();
        assert_equal(&Merge::new(&shards).to_memory().unwrap().0, &whole);
    }
}

fn cuts(name: &str, parts: &[([u64; 2], [u64; 2])]) -> Cuts {
    [(name.to_owned(), parts.iter().map(|(origin, extent)| Rectangle::new(*origin, *extent)).collect())].into()
}

#[test]
fn parts_that_overlap_or_do_not_nest_are_refused() {
    let (base, target) = checkpoints(8, 8);
    let rank = |parts: &[([u64; 2], [u64; 2])]| encode(&base, &target, &cuts("a", parts), Codec::Raw.into());
    for (first, second, expected) in [
        (([0, 0], [4, 8]), ([4, 0], [4, 8]), None),
        (([0, 0], [4, 8]), ([4, 0], [4, 4]), None),
        (([0, 0], [4, 8]), ([3, 0], [5, 8]), Some(Conflict::Tensor)),
        (([0, 0], [4, 8]), ([0, 0], [4, 8]), Some(Conflict::Tensor)),
        (([0, 0], [4, 8]), ([0, 0], [8, 4]), Some(Conflict::Tensor)),
        (([0, 0], [4, 8]), ([0, 0], [8, 8]), Some(Conflict::Tensor)),
        (([0, 0], [4, 4]), ([0, 4], [8, 4]), Some(Conflict::Cuts)),
        (([2, 0], [4, 4]), ([0, 4], [4, 4]), Some(Conflict::Cuts)),
    ] {
        for [one, other] in [[first, second], [second, first]] {
            let pairs = [rank(&[one]), rank(&[other])];
            match (Merge::new(&pairs).to_memory(), expected) {
                (Ok(_), None) => {}
                (Err(Error::NotMergeable(refused)), Some(conflict)) => {
                    assert_eq!((refused.conflict, &refused.name[..]), (conflict, "a"), "{refused}");
                    assert!(refused.found.iter().any(|found| found.starts_with("BF16 [8, 8], the part of [")), "{refused}");
                }
                (found, _) => panic!("{one:?} and {other:?}: {:?}", found.map(|_| ())),
            }
        }
    }
}

#[test]
fn parts_from_different_bases_are_refused() {
    let (base, target) = checkpoints(8, 8);
    let other: Vec<_> = base.iter().map(|data| tuned(data, 3)).collect();
    let two = [Data { name: "x".into(), ..base[0].clone() }, Data { name: "y".into(), ..base[0].clone() }];
    let renamed = |to: &str, at: u64| {
        let options = EncodeOptions::default().codec(Codec::Raw).renamed([("a", to)]).cuts(cuts("a", &[([at, 0], [4, 8])]));
        Encode::new(&memory(&target[..1])).base(&memory(&two)).options(options).to_memory().unwrap().0
    };
    Merge::new(&[renamed("x", 0), renamed("x", 4)]).to_memory().unwrap();
    let refused = |pairs: [InMemory; 2]| match Merge::new(&pairs).to_memory() {
        Err(Error::NotMergeable(refused)) => *refused,
        found => panic!("{:?}", found.map(|_| ())),
    };
    let names = refused([renamed("x", 0), renamed("y", 4)]);
    assert_eq!((names.conflict, &names.found), (Conflict::Base, &["base tensor x".to_owned(), "base tensor y".to_owned()]));

    // Two target tensors share a base tensor. Their parts are the same rectangle of it.
    let tied = |name: &str, base: &[Data]| {
        let target = [Data { name: name.into(), ..target[0].clone() }];
        let options = EncodeOptions::default().codec(Codec::Raw).renamed([(name, "a")]).cuts(cuts(name, &[([0, 0], [4, 8])]));
        Encode::new(&memory(&target)).base(&memory(base)).options(options).to_memory().unwrap().0
    };
    Merge::new(&[tied("one", &base), tied("two", &base)]).to_memory().unwrap();
    let digests = refused([tied("one", &base), tied("two", &other)]);
    assert_eq!((digests.conflict, &digests.name[..]), (Conflict::Base, "a"));
    assert!(digests.found.iter().all(|found| found.starts_with("digest ")), "{digests}");
}
