//! Merging pairs, and making a pair of some tensors of one.

use crate::common::{Tensor, Xorshift, safetensors, tensor, tuned, with_long_header, write_file, write_folder};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use tpde::internals;
use tpde::{
    Apply, Codec, CodecChoice, Conflict, Dtype, Encode, EncodeOptions, Error, FileKind, FileSource, FormatVersion, Limits,
    MemoryCheckpoint, Merge, MergeReport, NotMergeable, Pair, PairPaths, Result, Rule, SafetensorsCheckpoint, TensorInfo,
    ValidatedIndex, Verify,
};
use tpde_core::format::Form;
use tpde_core::writer::{FileSpec, PairBuilder};

type InMemory = Pair<Vec<u8>>;
/// A tensor with its bytes.
type Held = (TensorInfo, Vec<u8>);

/// How a target tensor is made.
#[derive(Debug, Clone)]
struct Recipe {
    dtype: Dtype,
    lanes: u64,
    /// Name of the base tensor, among few, so that tensors share them; `None` for a tensor without a base.
    base: Option<u8>,
    /// One lane in `rarity` changes.
    rarity: u64,
    /// The shard that has the tensor.
    shard: usize,
}

fn recipe() -> impl Strategy<Value = Recipe> {
    let dtype = prop_oneof![Just(Dtype::Bf16), Just(Dtype::F32), Just(Dtype::U8), Just(Dtype::I64)];
    let lanes = prop_oneof![Just(0u64), 1u64..60, 4090u64..4100, 8000u64..20_000];
    let base = prop_oneof![Just(None), (0u8..3).prop_map(Some)];
    let rarity = prop_oneof![Just(1u64), 2u64..50, Just(u64::MAX)];
    (dtype, lanes, base, rarity, 0..4usize).prop_map(|(dtype, lanes, base, rarity, shard)| Recipe {
        dtype,
        lanes,
        base,
        rarity,
        shard,
    })
}

/// Base and target checkpoints of these recipes, and the names of renamed tensors.
struct Case {
    base: Vec<Held>,
    target: Vec<Held>,
    renamed: BTreeMap<String, String>,
    shards: BTreeMap<String, usize>,
}

fn case(recipes: &[Recipe]) -> Case {
    let mut random = Xorshift(0x9E37_79B9_7F4A_7C15);
    let (mut base, mut target) = (BTreeMap::<String, Held>::new(), Vec::new());
    let (mut renamed, mut shards) = (BTreeMap::new(), BTreeMap::new());
    for (i, recipe) in recipes.iter().enumerate() {
        let width = recipe.dtype.lane_bytes();
        let shape = vec![recipe.lanes];
        let name = format!("tensor {}", i * 7 % recipes.len().max(1) * 1000 + i);
        let mut bytes: Vec<u8> = (0..recipe.lanes as usize * width).map(|_| (random.next() >> 40) as u8).collect();
        if let Some(number) = recipe.base {
            // The first tensor with this name, dtype and shape makes the base tensor. Others share it.
            let base_name = format!("base {number} {} {:?}", recipe.dtype, shape);
            let info = TensorInfo { name: base_name.clone(), dtype: recipe.dtype, shape: shape.clone() };
            bytes = base.entry(base_name.clone()).or_insert((info, bytes)).1.clone();
            for lane in bytes.chunks_mut(width) {
                lane[0] ^= u8::from(random.next().is_multiple_of(recipe.rarity));
            }
            renamed.insert(name.clone(), base_name);
        }
        shards.insert(name.clone(), recipe.shard);
        target.push((TensorInfo { name, dtype: recipe.dtype, shape }, bytes));
    }
    Case { base: base.into_values().collect(), target, renamed, shards }
}

fn checkpoint(tensors: &[Held]) -> MemoryCheckpoint<'_> {
    MemoryCheckpoint::new(tensors.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap()
}

impl Case {
    /// The pair of the tensors of these shards, with 4,096 lanes per chunk.
    fn pair(&self, options: &EncodeOptions, is_included: impl Fn(usize) -> bool) -> InMemory {
        let tensors: Vec<_> = self.target.iter().filter(|(info, _)| is_included(self.shards[&info.name])).cloned().collect();
        let renamed = self.renamed.iter().filter(|(name, _)| is_included(self.shards[*name]));
        let renamed: Vec<_> = renamed.map(|(name, base)| (name.clone(), base.clone())).collect();
        let options = options.clone().chunk_lanes(4096).renamed(renamed);
        Encode::new(&checkpoint(&tensors)).base(&checkpoint(&self.base)).options(options).to_memory().unwrap().0
    }

    fn shards(&self, options: &EncodeOptions) -> Vec<InMemory> {
        (0..4).map(|shard| self.pair(options, |of| of == shard)).collect()
    }

    /// Asserts that a pair rebuilds the target, and that its payloads are those that its digest covers.
    fn assert_rebuilds(&self, pair: &InMemory) {
        let mut rebuilt = BTreeMap::new();
        let base = checkpoint(&self.base);
        for (info, bytes) in Apply::new(pair).base(&base).to_memory().unwrap() {
            rebuilt.insert(info.name, bytes);
        }
        assert_eq!(rebuilt.len(), self.target.len());
        for (info, bytes) in &self.target {
            assert!(rebuilt[&info.name] == *bytes, "{}", info.name);
        }
        Verify::new(pair).base(&base).run().unwrap();
    }
}

fn merged<'a>(pairs: impl IntoIterator<Item = &'a InMemory>) -> InMemory {
    Merge::new(pairs).to_memory().unwrap().0
}

fn assert_equal(a: &InMemory, b: &InMemory) {
    assert!(a.index().as_bytes() == b.index().as_bytes(), "the indexes differ");
    assert!(a.blob() == b.blob(), "the blobs differ");
}

fn codec() -> impl Strategy<Value = CodecChoice> {
    prop_oneof![Just(CodecChoice::Auto), Just(Codec::Raw.into()), Just(Codec::Zstd.into()), Just(Codec::Conditioned.into())]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Codecs without tables code each tensor by itself.
    #[test]
    fn shards_encoded_apart_merge_to_the_pair_encoded_whole(
        recipes in proptest::collection::vec(recipe(), 0..9),
        is_raw: bool,
        payload_digests: bool,
    ) {
        let case = case(&recipes);
        let codec = if is_raw { Codec::Raw } else { Codec::Zstd };
        let options = EncodeOptions::default().codec(codec).payload_digests(payload_digests);
        let whole = case.pair(&options, |_| true);
        let merged = merged(&case.shards(&options));
        assert_equal(&merged, &whole);
        case.assert_rebuilds(&merged);
    }

    #[test]
    fn shards_of_a_pair_merge_back_to_its_bytes(
        recipes in proptest::collection::vec(recipe(), 0..9),
        codec in codec(),
        payload_digests: bool,
        is_reversed: bool,
    ) {
        let case = case(&recipes);
        let whole = case.pair(&EncodeOptions::default().codec(codec).payload_digests(payload_digests), |_| true);
        let mut shards: Vec<_> = (0..4)
            .map(|shard| Merge::new([&whole]).tensors(|name| case.shards[name] == shard).to_memory().unwrap().0)
            .collect();
        for (shard, pair) in shards.iter().enumerate() {
            let names: Vec<_> = pair.index().tensors().map(|tensor| case.shards[tensor.name]).collect();
            prop_assert!(names.iter().all(|of| *of == shard));
        }
        if is_reversed {
            shards.reverse();
        }
        assert_equal(&merged(&shards), &whole);
    }

    #[test]
    fn shards_of_every_version_and_codec_merge(
        recipes in proptest::collection::vec(recipe(), 0..9),
        codecs in proptest::collection::vec(codec(), 4),
        are_old in proptest::collection::vec(any::<bool>(), 4),
    ) {
        let case = case(&recipes);
        let options = |shard: usize| EncodeOptions::default().codec(codecs[shard]);
        let version = |shard: usize| if are_old[shard] { FormatVersion::V1_1 } else { FormatVersion::V1_2 };
        let shards: Vec<_> = (0..4).map(|shard| case.pair(&options(shard).format(version(shard)), |of| of == shard)).collect();
        let (pair, report) = Merge::new(&shards).to_memory().unwrap();
        prop_assert_eq!(pair.index().version(), (1, 2));
        prop_assert!(pair.index().has_payload_root());
        case.assert_rebuilds(&pair);
        let MergeReport { tensors, chunks, files, payload_bytes, blob_bytes, .. } = report;
        prop_assert_eq!(tensors, recipes.len() as u64);
        prop_assert_eq!(chunks, shards.iter().map(|shard| u64::from(shard.index().chunk_count())).sum::<u64>());
        prop_assert_eq!(files, 0);
        prop_assert_eq!(blob_bytes, pair.blob().len() as u64);
        prop_assert_eq!(payload_bytes, pair.index().chunks().map(|chunk| u64::from(chunk.compressed_size)).sum::<u64>());
        // The version of the inputs does not matter: payloads are the same.
        let newer: Vec<_> = (0..4).map(|shard| case.pair(&options(shard), |of| of == shard)).collect();
        assert_equal(&pair, &merged(&newer));
    }
}

#[test]
fn nothing_merges_to_an_empty_pair() {
    assert_equal(&merged([]), &Encode::new(&MemoryCheckpoint::EMPTY).to_memory().unwrap().0);
}

/// A pair of one U8 tensor with a renamed base of the same shape.
fn pair_of(name: &str, dtype: Dtype, shape: &[u64], base: Option<u8>) -> InMemory {
    let info = TensorInfo { name: name.into(), dtype, shape: shape.into() };
    let target = [(info, vec![7; dtype.lanes(shape).unwrap() as usize * dtype.lane_bytes()])];
    let mut options = EncodeOptions::default().codec(Codec::Raw);
    let base: Vec<Held> = base
        .map(|value| (TensorInfo { name: "base".into(), ..target[0].0.clone() }, vec![value; target[0].1.len()]))
        .into_iter()
        .collect();
    if !base.is_empty() {
        options = options.renamed([(name, "base")]);
    }
    Encode::new(&checkpoint(&target)).base(&checkpoint(&base)).options(options).to_memory().unwrap().0
}

fn refusal(result: Result<(InMemory, MergeReport)>) -> NotMergeable {
    match result {
        Err(Error::NotMergeable(refusal)) => *refusal,
        other => panic!("expected a refusal, found {other:?}"),
    }
}

#[test]
fn contradictions_between_pairs_are_refused() {
    let known = pair_of("w", Dtype::U8, &[2, 3], Some(1));
    let is_base = |dtype, shape: &[u64], value| pair_of("v", dtype, shape, Some(value));
    for (other, conflict, name, found) in [
        (pair_of("w", Dtype::U8, &[2, 3], None), Conflict::Tensor, "w", ["U8 [2, 3]", "U8 [2, 3]"]),
        (pair_of("w", Dtype::I8, &[2, 3], None), Conflict::Type, "w", ["U8 [2, 3]", "I8 [2, 3]"]),
        (pair_of("w", Dtype::U8, &[3, 2], None), Conflict::Type, "w", ["U8 [2, 3]", "U8 [3, 2]"]),
        (is_base(Dtype::U8, &[2, 3], 2), Conflict::Base, "base", ["digest ", "digest "]),
        (is_base(Dtype::I8, &[2, 3], 1), Conflict::Base, "base", ["I8 [2, 3]", "U8 [2, 3]"]),
        (is_base(Dtype::U8, &[6], 1), Conflict::Base, "base", ["U8 [6]", "U8 [2, 3]"]),
    ] {
        let refused = refusal(Merge::new([&known, &other]).to_memory());
        assert_eq!((refused.conflict, &refused.name[..]), (conflict, name));
        for (found, expected) in refused.found.iter().zip(found) {
            assert!(found.starts_with(expected), "{refused}");
        }
        // Base tensor `base` is met first in tensor `v`, which is in the second pair.
        let expected = if conflict == Conflict::Base { ["pair 2", "pair 1"] } else { ["pair 1", "pair 2"] };
        assert_eq!(refused.pairs, expected);
        // A selection without the tensor merges.
        let kept = other.index().tensor(0).name.to_owned();
        if conflict == Conflict::Base {
            Merge::new([&known, &other]).tensors(|name| name != kept).to_memory().unwrap();
        }
    }
    let same_base = pair_of("v", Dtype::U8, &[2, 3], Some(1));
    assert_eq!(merged([&known, &same_base]).index().tensor_count(), 2);
}

/// One tensor with a payload in each of two chunks, and a third chunk without one.
fn damageable(version: FormatVersion, payload_digests: bool) -> (Vec<u8>, Vec<u8>) {
    let info = TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![3 * 4096] };
    let other = TensorInfo { name: "x".into(), dtype: Dtype::U8, shape: vec![4096] };
    let mut bytes = vec![0; 3 * 4096];
    bytes[..2 * 4096].iter_mut().step_by(5).for_each(|byte| *byte = 1);
    let target = [(info, bytes), (other, vec![3; 4096])];
    let options = EncodeOptions::default().codec(Codec::Raw).chunk_lanes(4096).format(version).payload_digests(payload_digests);
    let (index, blob) = Encode::new(&checkpoint(&target)).options(options).to_memory().unwrap().0.into_parts();
    (index.as_bytes().to_vec(), blob)
}

fn opened(index: &[u8], blob: &[u8]) -> InMemory {
    Pair::new(ValidatedIndex::parse(index.to_vec(), &Limits::default()).unwrap(), blob.to_vec()).unwrap()
}

#[test]
fn a_damaged_payload_is_not_copied() {
    for (version, digests) in [(FormatVersion::V1_1, false), (FormatVersion::V1_2, false), (FormatVersion::V1_2, true)] {
        let (index, mut blob) = damageable(version, digests);
        let pair = opened(&index, &blob);
        let second = pair.index().records()[1].blob_offset.get() as usize;
        blob[second] ^= 1;
        let (pair, sound) = (opened(&index, &blob), pair_of("a", Dtype::U8, &[9], None));
        for is_subset in [false, true] {
            let merge = Merge::new([&sound, &pair]);
            let merge = if is_subset { merge.tensors(|name| name == "w") } else { merge };
            let Err(Error::Invalid(error)) = merge.to_memory() else { panic!("a damaged payload was copied") };
            let at = (error.at.pair.as_deref(), error.at.tensor.as_deref(), error.at.chunk);
            assert_eq!((error.rule, at), (Rule::PayloadCrc32, (Some("pair 2"), Some("w"), Some(1))));
            assert!(error.to_string().starts_with("pair 2, tensor w, chunk 1, payload.crc32: expected"), "{error}");
        }
    }
}

/// A payload is replaced, and its CRC-32 stays the same.
#[test]
fn a_payload_that_the_pair_digest_does_not_cover_is_not_copied() {
    for (version, digests, rule) in [
        (FormatVersion::V1_2, false, Some(Rule::HeaderPayloadRoot)),
        (FormatVersion::V1_2, true, Some(Rule::PayloadDigest)),
        (FormatVersion::V1_1, false, None),
    ] {
        let (index, mut blob) = damageable(version, digests);
        let record = opened(&index, &blob).index().records()[1];
        let payload = &mut blob[record.blob_offset.get() as usize..][..record.compressed_size.get() as usize];
        let crc = crc32fast::hash(payload);
        // A multiple of the polynomial of CRC-32, in its bit order.
        let multiple = (1 | 0xEDB8_8320_u64 << 1).to_le_bytes();
        payload.iter_mut().zip(multiple).for_each(|(byte, change)| *byte ^= change);
        assert_eq!(crc32fast::hash(payload), crc);
        let (pair, sound) = (opened(&index, &blob), pair_of("a", Dtype::U8, &[9], None));
        // A subset is refused even if it lacks the forged payload, unless digests are stored.
        for kept in ["wx", "w", "x"] {
            let merge = Merge::new([&sound, &pair]);
            let merge = if kept == "wx" { merge } else { merge.tensors(|name| name == kept) };
            let found = match merge.to_memory() {
                Ok(_) => None,
                Err(Error::Invalid(error)) => Some((error.rule, error.at.pair)),
                Err(error) => panic!("{error}"),
            };
            let expected = if digests && kept == "x" { None } else { rule };
            assert_eq!(found, expected.map(|rule| (rule, Some("pair 2".to_owned()))), "{version} {digests} {kept}");
        }
        // All payloads of such an input are read, and those of the subset a second time.
        if rule.is_none() {
            let done = AtomicU64::new(0);
            let merge = Merge::new([&pair]).tensors(|name| name == "x");
            let total = merge.progress_bytes();
            merge.progress(|bytes| _ = done.fetch_add(bytes, Ordering::Relaxed)).to_memory().unwrap();
            assert_eq!(done.into_inner(), total);
        }
    }
}

#[test]
fn the_payload_list_is_kept_or_added() {
    let with = opened_pair(FormatVersion::V1_2, true);
    let without = opened_pair(FormatVersion::V1_2, false);
    assert!(!merged([&without]).index().has_payload_digests());
    assert!(merged([&with]).index().has_payload_digests());
    let added = Merge::new([&without]).payload_digests(true).to_memory().unwrap().0;
    assert_equal(&added, &with);
    let subset = |pair: &InMemory| Merge::new([pair]).tensors(|name| name == "x").to_memory().unwrap().0;
    assert!(subset(&with).index().has_payload_digests() && !subset(&without).index().has_payload_digests());
    assert_eq!(with.index().header().payload_root, without.index().header().payload_root);
}

fn opened_pair(version: FormatVersion, payload_digests: bool) -> InMemory {
    let (index, blob) = damageable(version, payload_digests);
    opened(&index, &blob)
}

/// Encodes the checkpoint `target` of a folder as the pair `name` in the same folder.
fn encode(folder: &Path, name: &str, target: &str, base: Option<&str>) -> Pair<FileSource> {
    let target = SafetensorsCheckpoint::open(folder.join(target)).unwrap();
    let base = base.map(|base| SafetensorsCheckpoint::open(folder.join(base)).unwrap());
    let encode = Encode::new(&target).options(EncodeOptions::default().codec(Codec::Zstd)).overwrite(true);
    base.iter().fold(encode, |encode, base| encode.base(base)).to_path(folder.join(name)).unwrap();
    Pair::open(folder.join(name)).unwrap()
}

fn files<B: tpde::Source>(pair: &Pair<B>) -> Vec<(String, FileKind)> {
    pair.index().files().map(|file| (file.name.to_owned(), file.kind)).collect()
}

/// Two shards and a shard index, as base and as target. The first header differs.
fn folders(folder: &Path) {
    let [a, b, c] = ["a", "b", "c"].map(|name| tensor(name, "BF16", &[300, 7], name.as_bytes()[0].into()));
    let extra = tensor("d", "F32", &[5], 9);
    write_folder(&folder.join("base"), &[&[a.clone(), b.clone()], std::slice::from_ref(&c)]);
    write_folder(&folder.join("target"), &[&[tuned(&a, 9), b, extra], &[tuned(&c, 5)]]);
}

const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
const SHARD_INDEX: &str = "model.safetensors.index.json";

fn assert_same_folders(a: &Path, b: &Path, names: &[&str]) {
    for name in names {
        assert!(fs::read(a.join(name)).unwrap() == fs::read(b.join(name)).unwrap(), "{name}");
    }
}

#[test]
fn files_are_kept_with_all_of_their_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    folders(folder);
    let pair = encode(folder, "pair", "target", None);
    let all = vec![
        (SHARDS[0].to_owned(), FileKind::Safetensors),
        (SHARDS[1].to_owned(), FileKind::Safetensors),
        (SHARD_INDEX.to_owned(), FileKind::Verbatim),
    ];
    assert_eq!(files(&pair), all);
    for (wanted, kept) in
        [("abcd", &all[..]), ("abd", &all[..1]), ("c", &all[1..2]), ("ab", &[]), ("abc", &[]), ("bcd", &[]), ("", &[])]
    {
        let merge = Merge::new([&pair]).tensors(|name| wanted.contains(name));
        let (subset, report) = merge.to_memory().unwrap();
        assert_eq!(files(&subset), kept, "{wanted}");
        assert_eq!((report.files, report.tensors), (kept.len() as u64, wanted.len() as u64));
        if kept.len() == 1 {
            let output = folder.join(format!("rebuilt {wanted}"));
            Apply::new(&subset).to_path(&output).unwrap();
            assert_same_folders(&output, &folder.join("target"), &[&kept[0].0]);
        }
    }
    // Without their shard index, the files of two shards are those of a folder without one.
    let shard = |wanted: &'static str| Merge::new([&pair]).tensors(|name| wanted.contains(name)).to_memory().unwrap().0;
    let merged = merged([&shard("c"), &shard("abd")]);
    assert_eq!(files(&merged), all[..2]);
    Apply::new(&merged).to_path(folder.join("rebuilt")).unwrap();
    assert_same_folders(&folder.join("rebuilt"), &folder.join("target"), &SHARDS);

    // The second header is the base's, so which tensors it has is unknown.
    for side in ["base", "target"] {
        let path = folder.join(side).join(SHARDS[1]);
        let long = with_long_header(fs::read(&path).unwrap());
        fs::write(path, long).unwrap();
    }
    let based = encode(folder, "based", "target", Some("base"));
    assert_eq!(files(&based)[1], (SHARDS[1].to_owned(), FileKind::SafetensorsOfBase));
    let subset = |wanted: &'static str| Merge::new([&based]).tensors(move |name| wanted.contains(name)).to_memory().unwrap().0;
    assert_eq!(files(&subset("abcd")), files(&based));
    assert_eq!(files(&subset("abd")), files(&based)[..1]);
    assert_eq!(files(&subset("c")), []);
}

#[test]
fn files_of_several_pairs_become_those_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    folders(folder);
    // Each shard is encoded from the base's, as a process that holds one shard does.
    for (number, name) in SHARDS.iter().enumerate() {
        for side in ["base", "target"] {
            let one = folder.join(format!("{side}{number}"));
            fs::create_dir(&one).unwrap();
            fs::copy(folder.join(side).join(name), one.join(name)).unwrap();
        }
    }
    let pairs = [0, 1].map(|i| encode(folder, &format!("shard{i}"), &format!("target{i}"), Some(&format!("base{i}"))));
    let report = Merge::new(&pairs).to_path(folder.join("merged")).unwrap();
    let merged = Pair::open(folder.join("merged")).unwrap();
    assert_eq!(files(&merged), [files(&pairs[0]), files(&pairs[1])].concat());
    assert_eq!((report.files, report.index_bytes), (2, fs::metadata(PairPaths::new(folder.join("merged")).index).unwrap().len()));
    let base = SafetensorsCheckpoint::open(folder.join("base")).unwrap();
    Apply::new(&merged).base(&base).to_path(folder.join("rebuilt")).unwrap();
    assert_same_folders(&folder.join("rebuilt"), &folder.join("target"), &SHARDS);
}

/// A pair of a U8 tensor in a file, with a shard index of this content.
fn with_shard_index(name: &str, shard_index: &[u8]) -> InMemory {
    let file = safetensors(&[tensor(name, "U8", &[9], 1)]);
    let header = &file[..file.len() - 9];
    let files =
        [(format!("{name}.safetensors"), FileKind::Safetensors, header), (SHARD_INDEX.into(), FileKind::Verbatim, shard_index)];
    let spec = |(name, kind, content): (String, FileKind, &[u8])| FileSpec {
        name,
        kind,
        content_size: content.len() as u64,
        content_digest: *blake3::hash(content).as_bytes().first_chunk().unwrap(),
        content: content.to_vec(),
    };
    let mut files: Vec<_> = files.into_iter().map(spec).collect();
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let info = TensorInfo { name: name.into(), dtype: Dtype::U8, shape: vec![9] };
    let target = [(info, file[file.len() - 9..].to_vec())];
    let builder = PairBuilder::new(Vec::new(), "memory".into(), Form::default()).unwrap();
    let made = internals::encode(None, &checkpoint(&target), files, &EncodeOptions::default(), builder, &|_| {});
    made.unwrap().0.try_into().unwrap()
}

#[test]
fn a_shard_index_that_all_shards_have_is_kept_once() {
    let shard_index = br#"{"weight_map": {"x": "x.safetensors", "y": "y.safetensors"}}"#;
    let [x, y, z] = [("x", &shard_index[..]), ("y", shard_index), ("z", b"{}")].map(|(name, index)| with_shard_index(name, index));
    let (merged, _) = Merge::new([&x, &y]).to_memory().unwrap();
    assert_eq!(files(&merged).iter().map(|file| &file.0[..]).collect::<Vec<_>>(), [SHARD_INDEX, "x.safetensors", "y.safetensors"]);
    let folder = tempfile::tempdir().unwrap();
    Apply::new(&merged).to_path(folder.path().join("rebuilt")).unwrap();
    SafetensorsCheckpoint::open(folder.path().join("rebuilt")).unwrap();
    let refused = refusal(Merge::new([&x, &z]).to_memory());
    assert_eq!((refused.conflict, &refused.name[..]), (Conflict::File, SHARD_INDEX));
    // More pairs may come, but a file that the index does not name never belongs to a base.
    let three = br#"{"weight_map": {"x": "x.safetensors", "y": "y.safetensors", "w": "w.safetensors"}}"#;
    Merge::new([&with_shard_index("x", three), &with_shard_index("y", three)]).to_memory().unwrap();
    let others = [with_shard_index("x", shard_index), with_shard_index("z", shard_index)];
    let refused = refusal(Merge::new(&others).to_memory());
    assert!(refused.to_string().contains("does not name z.safetensors"), "{refused}");
    assert_eq!(files(&Merge::new(&others).files(false).to_memory().unwrap().0), []);
}

#[test]
fn files_that_contradict_each_other_are_refused_unless_they_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let lone = |name: &str| {
        write_file(&folder.join(format!("{name}.safetensors")), &[tensor(name, "U8", &[9], 1)]);
        encode(folder, name, &format!("{name}.safetensors"), None)
    };
    let in_folder = |pair: &str, file: &str, tensors: &[Tensor]| {
        fs::create_dir(folder.join(pair)).unwrap();
        write_file(&folder.join(pair).join(file), tensors);
        encode(folder, pair, pair, None)
    };
    let (a, b) = (lone("a"), lone("b"));
    let c = in_folder("in c", "c.safetensors", &[tensor("c", "U8", &[9], 1)]);
    let d = in_folder("in d", "c.safetensors", &[tensor("d", "U8", &[9], 1)]);
    let empty = in_folder("in e", "c.safetensors", &[]);
    let e = in_folder("in f", "C.safetensors", &[tensor("e", "U8", &[9], 1)]);
    Merge::new([&a]).files(false).to_path(folder.join("bare")).unwrap();
    let without_files = Pair::open(folder.join("bare")).unwrap();

    for (pairs, name, found) in [
        ([&a, &b], "", ["a lone safetensors file", "a lone safetensors file"]),
        ([&a, &c], "", ["a lone safetensors file", "c.safetensors of kind safetensors"]),
        ([&c, &a], "", ["a lone safetensors file", "c.safetensors of kind safetensors"]),
        ([&c, &d], "c.safetensors", ["c.safetensors of kind safetensors", "c.safetensors of kind safetensors"]),
        ([&c, &empty], "c.safetensors", ["c.safetensors of kind safetensors", "c.safetensors of kind safetensors"]),
        ([&without_files, &c], "", ["c.safetensors of kind safetensors", "no files"]),
    ] {
        let refused = refusal(Merge::new(pairs).to_memory());
        assert_eq!((refused.conflict, &refused.name[..]), (Conflict::File, name));
        assert!(refused.found.iter().zip(found).all(|(found, expected)| found.starts_with(expected)), "{refused}");
        let stem = |label: &String| label.starts_with(folder.to_str().unwrap());
        assert!(refused.pairs.iter().all(stem), "{refused}");
        let (merged, report) = Merge::new(pairs).files(false).to_memory().unwrap();
        assert_eq!((merged.index().files().len(), report.files), (0, 0));
    }
    let Err(Error::Invalid(error)) = Merge::new([&c, &e]).to_memory() else { panic!("two names differ by case alone") };
    // Names ascend, so that of the first pair comes second.
    let label = folder.join("in c").display().to_string();
    assert_eq!((error.rule, error.at.pair), (Rule::FileName, Some(label)));
    // A pair without tensors and files fits every other one.
    Merge::new([&empty]).files(false).to_path(folder.join("nothing")).unwrap();
    let nothing = Pair::open(folder.join("nothing")).unwrap();
    assert_eq!(files(&Merge::new([&nothing, &a]).to_memory().unwrap().0), files(&a));
    // A part without whole files makes a result without files, not a contradiction.
    let part = Merge::new([&a, &c]).tensors(|name| name == "c").to_memory().unwrap();
    assert_eq!(part.1.files, 1);
}

#[test]
fn the_merged_pair_replaces_nothing_by_accident() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let lone = |name: &str| {
        write_file(&folder.join(format!("{name}.safetensors")), &[tensor(name, "U8", &[9], 1)]);
        encode(folder, name, &format!("{name}.safetensors"), None)
    };
    let (a, b) = (lone("a"), lone("b"));
    let merge = || Merge::new([&a, &b]).files(false);
    let before = fs::read(PairPaths::new(folder.join("a")).blob).unwrap();
    let error = merge().overwrite(true).to_path(folder.join("a")).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
    let report = merge().to_path(folder.join("out")).unwrap();
    assert_eq!(report.tensors, 2);
    let again = merge().to_path(folder.join("out")).unwrap_err();
    assert!(matches!(&again, Error::Io { source, .. } if source.kind() == ErrorKind::AlreadyExists), "{again}");
    merge().overwrite(true).to_path(folder.join("out.tpde-blob")).unwrap();
    Merge::new([&Pair::open(folder.join("out")).unwrap()]).to_path(folder.join("copy")).unwrap();
    let paths = [folder.join("out"), folder.join("copy")].map(PairPaths::new);
    assert_eq!(fs::read(&paths[0].index).unwrap(), fs::read(&paths[1].index).unwrap());
    assert_eq!(fs::read(&paths[0].blob).unwrap(), fs::read(&paths[1].blob).unwrap());
    assert_eq!(fs::read(PairPaths::new(folder.join("a")).blob).unwrap(), before);
    // A watcher that stops the work leaves nothing.
    struct Stop;
    impl tpde::Watch for Stop {
        fn done(&self, _: u64) -> Result<()> {
            Err(Error::Cancelled)
        }
    }
    let count = fs::read_dir(folder).unwrap().count();
    assert!(matches!(merge().watch(&Stop).to_path(folder.join("stopped")), Err(Error::Cancelled)));
    assert_eq!(fs::read_dir(folder).unwrap().count(), count);
}
