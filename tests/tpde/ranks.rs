//! Ranks of a job that hold slices of target and base: each encodes what it holds, and the pairs merge to that of the whole.

use crate::common::slices::{Held, cut, info, memory, whole};
use crate::common::{Tensor as Data, tensor, tuned};
use proptest::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};
use tpde::{
    Apply, Checkpoint, Codec, CodecChoice, Dtype, Encode, EncodeOptions, Error, Merge, Pair, PartNotHeld, Rectangle, Slice,
    SliceCheckpoint, TensorInfo, Verify,
};

type InMemory = Pair<Vec<u8>>;

/// The slices that a rank holds of some tensors.
#[derive(Clone, Default)]
struct Rank(Vec<(TensorInfo, Held)>);

impl Rank {
    fn checkpoint(&self) -> SliceCheckpoint<'_> {
        SliceCheckpoint::new(self.0.iter().map(|(info, held)| held.slice(info.clone()))).unwrap()
    }
}

fn encode(target: &dyn Checkpoint, base: &dyn Checkpoint, options: EncodeOptions) -> InMemory {
    Encode::new(target).base(base).options(options).to_memory().unwrap().0
}

/// Base and target: a matrix, a vector, experts, and a tensor without a base.
fn checkpoints(rows: usize, columns: usize) -> (Vec<Data>, Vec<Data>) {
    let base =
        vec![tensor("a", "BF16", &[rows, columns], 1), tensor("b", "F32", &[rows], 2), tensor("e", "BF16", &[3, columns, rows], 4)];
    let mut target: Vec<_> = base.iter().map(|data| tuned(data, 7)).collect();
    target.insert(2, tensor("c", "U8", &[columns, rows], 3));
    (base, target)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    #[test]
    fn pairs_of_ranks_merge_to_the_pair_of_the_whole(
        (rows, columns) in (1usize..60, 1usize..60),
        numbers in prop::collection::vec(any::<u64>(), 60),
        owners in prop::collection::vec(0usize..3, 40),
        gap in prop::sample::select(vec![0, 4]),
        codec in prop::sample::select(CodecChoice::ALL.to_vec()),
    ) {
        let (base, target) = checkpoints(rows, columns);
        let mut numbers = numbers.into_iter();
        let mut owners = owners.into_iter().cycle();
        let mut ranks = vec![(Rank::default(), Rank::default()); 3];
        let mut cuts = Vec::new();
        for data in &target {
            let mut parts = Vec::new();
            // Ranks hold slabs of rows, some ranks none, and the slabs are cut further.
            let nothing = Rectangle::new(whole(data).origin, vec![0; data.shape.len()]);
            let slabs: Vec<_> = cut(&whole(data), &mut numbers, 1, 0).into_iter().map(|slab| (owners.next().unwrap(), slab)).collect();
            for (owner, slab) in (0..3).map(|rank| (rank, nothing.clone())).chain(slabs) {
                if slab != nothing {
                    parts.extend(cut(&slab, &mut numbers, 3, 0));
                }
                ranks[owner].0.0.push((info(data), Held::new(data, &slab, gap)));
                if let Some(base) = base.iter().find(|base| base.name == data.name) {
                    ranks[owner].1.0.push((info(base), Held::new(base, &slab, gap)));
                }
            }
            cuts.push((data.name.clone(), parts));
        }
        let options = EncodeOptions::default().codec(codec).chunk_lanes(4096).cuts(cuts);
        let (base, target) = (memory(&base), memory(&target));
        let pairs: Vec<_> = ranks.iter().map(|(target, base)| encode(&target.checkpoint(), &base.checkpoint(), options.clone())).collect();
        let merged = Merge::new(&pairs).to_memory().unwrap().0;
        let expected = encode(&target, &base, options);
        prop_assert_eq!(merged.index().tensor_count(), expected.index().tensor_count());
        if [Codec::Raw, Codec::Zstd].map(CodecChoice::Only).contains(&codec) {
            prop_assert!(merged.index().as_bytes() == expected.index().as_bytes(), "the indexes differ");
            prop_assert!(merged.blob() == expected.blob(), "the blobs differ");
        }
        Verify::new(&merged).base(&base).target(&target).run().unwrap();
    }
}

/// A rank that holds rows 4 to 7 of a matrix of 10 rows and 6 columns, as target and base.
fn rows() -> (Data, Data, Rectangle) {
    let base = tensor("w", "BF16", &[10, 6], 1);
    (tuned(&base, 3), base, Rectangle::new([4, 0], [4, 6]))
}

fn refused(outcome: tpde::Result<(InMemory, tpde::EncodeReport)>) -> PartNotHeld {
    match outcome {
        Err(Error::PartNotHeld(refused)) => *refused,
        other => panic!("{:?}", other.map(|_| ())),
    }
}

#[test]
fn a_part_that_is_held_only_partly_is_refused_and_the_error_says_where_to_cut() {
    let (target, base, part) = rows();
    let (target, base) =
        (Rank(vec![(info(&target), Held::new(&target, &part, 0))]), Rank(vec![(info(&base), Held::new(&base, &part, 0))]));
    let (target, base) = (target.checkpoint(), base.checkpoint());
    let encode = |options: EncodeOptions| Encode::new(&target).base(&base).options(options).to_memory();
    let split = |rule: &str| EncodeOptions::default().split(rule.parse().unwrap());

    let whole = refused(encode(EncodeOptions::default()));
    assert_eq!((whole.checkpoint, &whole.tensor[..]), ("target", "w"));
    assert_eq!((&whole.part, &whole.held), (&Rectangle::whole(&[10, 6]), &vec![part.clone()]));
    let rows = refused(encode(split("w=0:2")));
    assert_eq!(rows.part, Rectangle::new([0, 0], [5, 6]));
    assert_eq!(rows.to_string(), "tensor w: of [0:5, 0:6] the target has only [4:5, 0:6]. Cut the tensor there");
    let columns = refused(encode(split("w=1:3")));
    assert_eq!((&columns.part, &columns.held), (&Rectangle::new([0, 0], [10, 2]), &vec![Rectangle::new([4, 0], [4, 2])]));

    // The error's advice works.
    let advised = [columns.held, vec![Rectangle::new([4, 2], [4, 4])]].concat();
    let pair = encode(EncodeOptions::default().cuts([("w", advised.clone())])).unwrap().0;
    assert_eq!(pair.index().tensors().map(|entry| entry.rectangle()).collect::<Vec<_>>(), advised);
    // Of the parts that a rule or the caller names, the pair has those that are held.
    let (pair, report) = encode(split("w=0:5")).unwrap();
    let found: Vec<_> = pair.index().tensors().map(|entry| entry.rectangle()).collect();
    assert_eq!(found, [Rectangle::new([4, 0], [2, 6]), Rectangle::new([6, 0], [2, 6])]);
    assert_eq!((report.tensors.len(), report.target_bytes), (2, 48));
    let done = AtomicU64::new(0);
    let parts =
        Encode::new(&target).base(&base).options(split("w=0:5")).progress(|bytes| _ = done.fetch_add(bytes, Ordering::Relaxed));
    parts.to_memory().unwrap();
    assert_eq!((done.load(Ordering::Relaxed), parts.progress_bytes().unwrap()), (48, 48));
    assert_eq!(refused(Encode::new(&target).progress_bytes().map(|bytes| panic!("{bytes} bytes"))).held, whole.held);
    let elsewhere = encode(EncodeOptions::default().cuts([("w", vec![Rectangle::new([0, 0], [4, 6])])])).unwrap().0;
    assert_eq!(elsewhere.index().tensor_count(), 0);
}

#[test]
fn a_base_that_lacks_elements_of_a_part_is_refused() {
    let (target, base, part) = rows();
    let target = Rank(vec![(info(&target), Held::new(&target, &part, 0))]);
    let options = || EncodeOptions::default().cuts([("w", vec![part.clone()])]);
    for (held, expected) in
        [(Rectangle::new([5, 0], [4, 6]), vec![Rectangle::new([5, 0], [3, 6])]), (Rectangle::new([0, 0], [2, 6]), vec![])]
    {
        let base = Rank(vec![(info(&base), Held::new(&base, &held, 0))]);
        let error = refused(Encode::new(&target.checkpoint()).base(&base.checkpoint()).options(options()).to_memory());
        assert_eq!((error.checkpoint, &error.part, &error.held), ("base", &part, &expected), "{error}");
    }
    // A base in two slices, and one that is whole.
    let [one, other] = [([3, 0], [2, 6]), ([5, 0], [5, 6])].map(|(origin, extent)| Rectangle::new(origin, extent));
    let slices = Rank([one, other].map(|part| (info(&base), Held::new(&base, &part, 2))).to_vec());
    let whole = [base];
    let from_slices = encode(&target.checkpoint(), &slices.checkpoint(), options());
    let from_whole = encode(&target.checkpoint(), &memory(&whole), options());
    assert!(from_slices.index().as_bytes() == from_whole.index().as_bytes() && from_slices.blob() == from_whole.blob());
    assert_eq!(from_slices.index().tensor(0).base_kind.name(), "same");
}

#[test]
fn a_pair_of_a_ranks_slices_is_written_to_files_and_has_no_target_files() {
    let (target, base, part) = rows();
    let norm = tensor("norm", "F32", &[6], 2);
    let place = tempfile::tempdir().unwrap();
    let held = |data: &Data| {
        let norm = (info(&norm), Held::new(&norm, &whole(&norm), 0));
        Rank(vec![(info(data), Held::new(data, &part, 0)), norm])
    };
    let (target, base) = (held(&target), held(&base));
    let options = EncodeOptions::default().split("w=0:5".parse().unwrap());
    Encode::new(&target.checkpoint()).base(&base.checkpoint()).options(options).to_path(place.path().join("pair")).unwrap();
    let pair = Pair::open(place.path().join("pair")).unwrap();
    assert_eq!((pair.index().tensor_count(), pair.index().files().len()), (3, 0));
    Apply::new(&pair).base(&base.checkpoint()).verify().unwrap();
}

/// A tensor that grows by rows stays whole, so a rank cannot encode it from a slice.
#[test]
fn a_tensor_whose_rows_grow_is_encoded_by_a_rank_that_holds_it_all() {
    let base = [tensor("w", "BF16", &[8, 6], 1)];
    let target = tensor("w", "BF16", &[10, 6], 2);
    let options = || EncodeOptions::default().codec(Codec::Raw).split("w=0:2".parse().unwrap());
    let rank = |part: &Rectangle| Rank(vec![(info(&target), Held::new(&target, part, 0))]);
    let slice = rank(&Rectangle::new([0, 0], [5, 6]));
    let error = refused(Encode::new(&slice.checkpoint()).base(&memory(&base)).options(options()).to_memory());
    assert_eq!(error.part, whole(&target));
    let all = rank(&whole(&target));
    let of_slices = Rank(vec![(info(&base[0]), Held::new(&base[0], &Rectangle::new([0, 0], [4, 6]), 0))]);
    let error = refused(Encode::new(&all.checkpoint()).base(&of_slices.checkpoint()).options(options()).to_memory());
    assert_eq!((error.checkpoint, &error.part), ("base", &whole(&base[0])));
    assert_eq!(encode(&all.checkpoint(), &memory(&base), options()).index().tensor(0).base_kind.name(), "prefix");
}

/// Parts of packed dtypes are held by bytes.
#[test]
fn ranks_hold_slices_of_packed_dtypes() {
    let bytes: Vec<u8> = (0..32).collect();
    let info = TensorInfo { name: "w".into(), dtype: Dtype::F4, shape: vec![8, 8] };
    let options = || EncodeOptions::default().codec(Codec::Raw).split("w=1:2".parse().unwrap());
    let half = |from: usize| bytes.chunks(4).flat_map(|row| row[from..from + 2].to_vec()).collect::<Vec<_>>();
    let halves = [half(0), half(2)];
    let pairs: Vec<_> = halves
        .iter()
        .zip([0, 4])
        .map(|(half, from)| {
            let slice = Slice::new(info.clone(), Rectangle::new([0, from], [8, 4]), half);
            Encode::new(&SliceCheckpoint::new([slice]).unwrap()).options(options()).to_memory().unwrap().0
        })
        .collect();
    let merged = Merge::new(&pairs).to_memory().unwrap().0;
    let target = tpde::MemoryCheckpoint::new([(info, &bytes[..])]).unwrap();
    let expected = Encode::new(&target).options(options()).to_memory().unwrap().0;
    assert!(merged.index().as_bytes() == expected.index().as_bytes() && merged.blob() == expected.blob());
}
