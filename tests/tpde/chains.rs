//! Chains of pairs: applied in one pass, folded into one pair, reverted; and chains that do not fit.

use crate::common::{Xorshift, named, tensor, tuned, write_file, write_folder};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use tpde::{
    Apply, Chain, Checkpoint, Codec, CodecChoice, Dtype, Encode, EncodeOptions, Error, Favor, FileSource, FormatVersion,
    MemoryCheckpoint, Merge, Pair, PairPaths, Rectangle, Result, Rule, SafetensorsCheckpoint, TensorInfo, Verify,
};

type InMemory = Pair<Vec<u8>>;

/// The tensors of a version.
type Version = BTreeMap<String, (TensorInfo, Vec<u8>)>;

fn memory(version: &Version) -> MemoryCheckpoint<'_> {
    MemoryCheckpoint::new(version.values().map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap()
}

fn below(random: &mut Xorshift, n: u64) -> u64 {
    (random.next() >> 24) % n
}

fn random_bytes(random: &mut Xorshift, size: u64) -> Vec<u8> {
    (0..size).map(|_| (random.next() >> 32) as u8).collect()
}

fn new_tensor(random: &mut Xorshift, name: &str) -> (TensorInfo, Vec<u8>) {
    let dtype = [Dtype::Bf16, Dtype::F32, Dtype::U8, Dtype::F8E4m3][below(random, 4) as usize];
    let shape = match below(random, 5) {
        0 => vec![below(random, 3)],
        1 => vec![1 + below(random, 90), 1 + below(random, 120)],
        _ => vec![1 + below(random, 200), 64],
    };
    let info = TensorInfo { name: name.to_owned(), dtype, shape };
    let bytes = random_bytes(random, info.bytes());
    (info, bytes)
}

/// Changes some lanes by small numbers.
fn change(random: &mut Xorshift, bytes: &mut [u8], width: usize) {
    let every = 1 + below(random, 60) as usize;
    for lane in bytes.chunks_mut(width).step_by(every) {
        lane[0] = lane[0].wrapping_add(1 + below(random, 3) as u8);
    }
}

/// The next version, and the names of its renamed tensors with their names before.
fn next(random: &mut Xorshift, version: &Version) -> (Version, BTreeMap<String, String>) {
    let (mut next, mut renamed) = (Version::new(), BTreeMap::new());
    for (name, (info, bytes)) in version {
        let (mut info, mut bytes) = (info.clone(), bytes.clone());
        match below(random, 13) {
            0 => continue,
            1 => {}
            2 if !info.shape.is_empty() && bytes.len() > 1 => {
                let row = bytes.len() as u64 / info.shape[0];
                info.shape[0] = 1 + below(random, 2 * info.shape[0]);
                let size = info.shape[0] * row;
                bytes.resize((bytes.len() as u64).min(size) as usize, 0);
                bytes.extend(random_bytes(random, size - bytes.len() as u64));
                change(random, &mut bytes, info.dtype.lane_bytes());
            }
            3 => (info, bytes) = new_tensor(random, name),
            4 => {
                let new_name = format!("{}{}", [b'a', b'z'][below(random, 2) as usize] as char, name);
                renamed.insert(new_name.clone(), name.clone());
                info.name = new_name;
                change(random, &mut bytes, info.dtype.lane_bytes());
            }
            // Another dtype with nearly the same values.
            5 => {
                (info.dtype, bytes) = match info.dtype {
                    Dtype::F32 => (Dtype::Bf16, bytes.chunks(4).flat_map(|lane| [lane[2], lane[3]]).collect()),
                    Dtype::Bf16 => (Dtype::F32, bytes.chunks(2).flat_map(|lane| [0, 0, lane[0], lane[1]]).collect()),
                    other => (other, bytes),
                };
                change(random, &mut bytes, info.dtype.lane_bytes());
            }
            // Another shape with nearly the same values.
            6 => {
                info.shape = match info.shape[..] {
                    [rows, columns] if columns % 2 == 0 && below(random, 2) == 0 => vec![2 * rows, columns / 2],
                    [rows, columns] => vec![columns, rows],
                    [rows] => vec![1, rows],
                    _ => info.shape,
                };
                change(random, &mut bytes, info.dtype.lane_bytes());
            }
            _ => change(random, &mut bytes, info.dtype.lane_bytes()),
        }
        next.insert(info.name.clone(), (info, bytes));
    }
    if below(random, 3) == 0 {
        let name = format!("n{}", below(random, 1000));
        next.entry(name.clone()).or_insert_with(|| new_tensor(random, &name));
    }
    renamed.retain(|new, old| next.contains_key(new) && version.contains_key(old));
    (next, renamed)
}

fn options(random: &mut Xorshift) -> EncodeOptions {
    let any = |random: &mut Xorshift, count: usize| below(random, count as u64) as usize;
    let codec = CodecChoice::ALL[any(random, CodecChoice::ALL.len())];
    let favor = Favor::ALL[any(random, Favor::ALL.len())];
    let chunk_lanes = [4096, 8192, 1 << 20][any(random, 3)];
    let split = ["", "", "*=0:3", "*=0:2", "*n*=0:4,*=0:2"][any(random, 5)];
    let options = EncodeOptions::default().codec(codec).favor(favor).chunk_lanes(chunk_lanes);
    if split.is_empty() {
        let format = [FormatVersion::V1_1, FormatVersion::V1_2, FormatVersion::V1_3][any(random, 3)];
        return options.format(format);
    }
    options.split(split.parse().unwrap())
}

/// A chain of random versions, with one pair per step.
struct Case {
    versions: Vec<Version>,
    pairs: Vec<InMemory>,
    /// Names of the tensors of the last version, with the names from which they derive.
    names: BTreeMap<String, String>,
    options: EncodeOptions,
}

fn case(seed: u64, steps: usize) -> Case {
    let random = &mut Xorshift(seed | 1);
    (0..20).for_each(|_| _ = random.next());
    let mut first = Version::new();
    for i in 0..1 + below(random, 4) {
        let name = format!("t{i}");
        first.insert(name.clone(), new_tensor(random, &name));
    }
    if below(random, 4) == 0 {
        first.clear();
    }
    let (mut versions, mut pairs) = (vec![first], Vec::new());
    let mut names = BTreeMap::new();
    for _ in 0..steps {
        let before = versions.last().unwrap();
        let (version, renamed) = next(random, before);
        let of_step = options(random).renamed(renamed);
        let pair = Encode::new(&memory(&version)).base(&memory(before)).options(of_step).to_memory().unwrap().0;
        // A tensor that the pair stores whole has no name before.
        let name_before = |name: &String| {
            let base_name = pair.index().entries(name).find(|entry| entry.base_kind != tpde::BaseKind::None);
            let before = base_name.map_or(name.as_str(), |entry| entry.base_name);
            (name.clone(), names.get(before).cloned().unwrap_or_else(|| before.to_owned()))
        };
        names = version.keys().map(name_before).collect();
        versions.push(version);
        pairs.push(pair);
    }
    Case { versions, pairs, names, options: options(random) }
}

/// The rectangles in which a pair describes tensors that are not whole.
fn parts(pair: &InMemory) -> BTreeMap<String, Vec<Rectangle>> {
    let mut cuts = BTreeMap::<String, Vec<Rectangle>>::new();
    for entry in pair.index().tensors().filter(|entry| entry.part.is_some()) {
        cuts.entry(entry.name.to_owned()).or_default().push(entry.rectangle());
    }
    cuts
}

fn assert_same(found: &InMemory, expected: &InMemory) {
    let tensors = |pair: &InMemory| pair.index().tensors().map(|tensor| format!("{tensor:?}")).collect::<Vec<_>>();
    assert_eq!(tensors(found), tensors(expected));
    assert!(found.index().as_bytes() == expected.index().as_bytes(), "the indexes differ");
    assert!(found.blob() == expected.blob(), "the blobs differ");
}

fn rebuilt(pair: &InMemory, base: &dyn Checkpoint) -> Result<Version> {
    let mut version = Version::new();
    for (info, bytes) in Apply::new(pair).base(base).to_memory()? {
        assert!(pair.index().find(&info.name).is_some());
        version.insert(info.name.clone(), (info, bytes));
    }
    Ok(version)
}

fn check(case: &Case, seed: u64) {
    let (base, last) = (&case.versions[0], case.versions.last().unwrap());
    let (base_memory, last_memory) = (memory(base), memory(last));
    let chain = Chain::new(&base_memory, &case.pairs).unwrap();

    // The chain reads as the last version, in whole tensors and in any ranges.
    assert_eq!(chain.tensors(), last_memory.tensors());
    let random = &mut Xorshift(seed.wrapping_mul(31) | 1);
    for (i, (info, bytes)) in last.values().enumerate() {
        for _ in 0..6 {
            let start = below(random, bytes.len() as u64 + 1) as usize;
            let end = start + below(random, (bytes.len() - start) as u64 + 1) as usize;
            let mut out = vec![0xA5; end - start];
            chain.read(i, start as u64, &mut out).unwrap();
            assert!(out == bytes[start..end], "{} {start}..{end}", info.name);
            assert!(chain.holds(i, start as u64, end - start));
        }
        assert!(chain.read(i, bytes.len() as u64, &mut [0]).is_err());
        assert!(!chain.holds(i, bytes.len() as u64, 1));
    }

    // Folded and reverted pairs are those that the checkpoints give.
    let renamed: BTreeMap<_, _> = case.names.iter().filter(|(new, old)| new != old && base.contains_key(*old)).collect();
    assert!(chain.renamed().iter().eq(renamed.iter().map(|(new, old)| (*new, *old))), "{:?} {renamed:?}", chain.renamed());
    let uncut = case.options.split.is_empty();
    let direct_options = |cuts: BTreeMap<String, Vec<Rectangle>>, renamed: BTreeMap<String, String>| {
        let options = case.options.clone().renamed(renamed);
        if uncut { options.cuts(cuts) } else { options }
    };
    let last_pair = case.pairs.last().unwrap();
    let of_last = parts(last_pair);
    let is_cut = uncut && !of_last.is_empty();
    let direct = direct_options(of_last.clone(), chain.renamed());
    let direct = Encode::new(&last_memory).base(&base_memory).options(direct).to_memory();
    let folded = Encode::fold(&chain).options(case.options.clone()).to_memory();
    if is_cut && case.options.format == FormatVersion::V1_1 {
        assert!(matches!(folded, Err(Error::InvalidArgument(text)) if text.contains("format 1.2")));
    } else {
        let (folded, report) = folded.unwrap();
        let (direct, direct_report) = direct.unwrap();
        assert_same(&folded, &direct);
        if uncut {
            assert_eq!(parts(&folded), of_last);
        }
        assert_eq!(report.removed, direct_report.removed);
        assert_eq!(rebuilt(&folded, &base_memory).unwrap().keys().collect::<Vec<_>>(), last.keys().collect::<Vec<_>>());
        Verify::new(&folded).base(&base_memory).target(&last_memory).run().unwrap();
    }

    let back = Encode::revert(&chain).options(case.options.clone().format(FormatVersion::V1_3)).to_memory().unwrap().0;
    let origins: BTreeSet<_> = case.names.values().filter(|old| base.contains_key(*old)).collect();
    let from: BTreeMap<&String, &String> = origins
        .into_iter()
        .map(|old| {
            let mut derived = case.names.iter().filter(|(_, name)| *name == old).map(|(new, _)| new);
            (old, derived.clone().find(|new| *new == old).or_else(|| derived.next()).unwrap())
        })
        .collect();
    let renamed_back: BTreeMap<String, String> =
        from.iter().filter(|(old, new)| old != new).map(|(old, new)| ((*old).clone(), (*new).clone())).collect();
    assert_eq!(chain.renamed_back(), renamed_back);
    // A tensor of another shape is left whole.
    let is_same_shape = |old: &String, new: &String| base[old].0.shape == last[new].0.shape;
    let same_shape = from.iter().filter(|(old, new)| is_same_shape(old, new));
    let cuts = same_shape.filter_map(|(old, new)| Some(((*old).clone(), of_last.get(*new)?.clone()))).collect();
    let direct = direct_options(cuts, renamed_back).format(FormatVersion::V1_3);
    let direct = Encode::new(&base_memory).base(&last_memory).options(direct).to_memory().unwrap().0;
    assert_same(&back, &direct);
    Verify::new(&back).base(&last_memory).target(&base_memory).run().unwrap();

    // In one pass, the chain gives the last version.
    let (last_pair, earlier) = case.pairs.split_last().unwrap();
    let before = Chain::new(&base_memory, &case.pairs).unwrap().without_last();
    assert_eq!(before.tensors(), Chain::new(&base_memory, earlier).unwrap().tensors());
    Verify::new(last_pair).base(&before).target(&last_memory).run().unwrap();
    for (i, entry) in last_pair.index().tensors().enumerate() {
        if entry.part.is_none() {
            let all = Apply::new(last_pair).base(&before).to_memory().unwrap();
            assert!(all[i].1 == last[entry.name].1, "{}", entry.name);
        }
    }

    // In another order, or with a step left out or repeated, nothing but the target of the last pair comes out.
    let count = case.pairs.len();
    let mut orders: Vec<Vec<usize>> = (0..count).map(|out| (0..count).filter(|i| *i != out).collect()).collect();
    orders.extend((1..count).map(|i| {
        let mut order: Vec<_> = (0..count).collect();
        order.swap(i - 1, i);
        order
    }));
    orders.extend((0..count).map(|twice| (0..count).flat_map(|i| vec![i; 1 + usize::from(i == twice)]).collect()));
    for order in orders.into_iter().filter(|order| !order.is_empty()) {
        let target = memory(&case.versions[order[order.len() - 1] + 1]);
        let chain = match Chain::new(&base_memory, order.iter().map(|i| &case.pairs[*i])) {
            Ok(chain) => chain,
            Err(Error::Step { number, source, .. }) => {
                assert!((1..=order.len()).contains(&number));
                assert!(
                    matches!(*source, Error::WrongBase { .. } | Error::AlreadyApplied { .. })
                        || source.rule() == Some(Rule::BaseTensor),
                    "{source}"
                );
                continue;
            }
            Err(other) => panic!("{other}"),
        };
        match Encode::fold(&chain).to_memory() {
            Ok((folded, _)) => _ = Verify::new(&folded).base(&base_memory).target(&target).run().unwrap(),
            Err(Error::Step { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn chains_read_fold_and_revert_as_their_checkpoints(seed in any::<u64>(), steps in 1usize..6) {
        check(&case(seed, steps), seed);
    }
}

/// Versions of one model: a matrix that is cut by columns, one that is cut by rows, and a vector.
fn model(steps: usize) -> Vec<Vec<crate::common::Tensor>> {
    let first = vec![
        tensor("model.layers.0.mlp.down_proj.weight", "BF16", &[96, 240], 1),
        tensor("model.layers.0.self_attn.q_proj.weight", "BF16", &[130, 96], 2),
        tensor("model.norm.weight", "F32", &[96], 3),
    ];
    let mut versions = vec![first];
    for step in 0..steps {
        let before = versions.last().unwrap();
        versions.push(before.iter().map(|data| tuned(data, 5 + 2 * step)).collect());
    }
    versions
}

/// A folder with the versions of a model as files, and the pairs between them.
struct Place(tempfile::TempDir);

impl Place {
    fn new(versions: &[Vec<crate::common::Tensor>], options: &EncodeOptions) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        for (i, version) in versions.iter().enumerate() {
            write_file(&place.path(&format!("v{i}.safetensors")), version);
        }
        for i in 1..versions.len() {
            let (base, target) = (place.version(i - 1), place.version(i));
            Encode::new(&target).base(&base).options(options.clone()).to_path(place.path(&format!("p{i}"))).unwrap();
        }
        place
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    fn version(&self, i: usize) -> SafetensorsCheckpoint {
        SafetensorsCheckpoint::open(self.path(&format!("v{i}.safetensors"))).unwrap()
    }

    fn pair(&self, i: usize) -> Pair<FileSource> {
        Pair::open(self.path(&format!("p{i}"))).unwrap()
    }

    fn pairs(&self, numbers: impl IntoIterator<Item = usize>) -> Vec<Pair<FileSource>> {
        numbers.into_iter().map(|i| self.pair(i)).collect()
    }

    /// Asserts that two pairs have the same bytes.
    fn assert_same(&self, a: &str, b: &str) {
        let (a, b) = (PairPaths::new(self.path(a)), PairPaths::new(self.path(b)));
        assert!(fs::read(a.index).unwrap() == fs::read(b.index).unwrap(), "the indexes differ");
        assert!(fs::read(a.blob).unwrap() == fs::read(b.blob).unwrap(), "the blobs differ");
    }

    fn names(&self) -> BTreeSet<String> {
        names(self.0.path())
    }
}

fn names(folder: &Path) -> BTreeSet<String> {
    folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn every_codec_and_favor_folds_to_the_bytes_of_an_encoding() {
    let versions = model(3);
    for codec in CodecChoice::ALL.iter().copied() {
        for favor in Favor::ALL.iter().copied() {
            let options = EncodeOptions::default().codec(codec).favor(favor).chunk_lanes(4096);
            let place = Place::new(&versions, &options);
            let (base, target, pairs) = (place.version(0), place.version(3), place.pairs(1..4));
            let chain = Chain::new(&base, &pairs).unwrap();
            Encode::fold(&chain).options(options.clone()).to_path(place.path("folded")).unwrap();
            Encode::new(&target).base(&base).options(options.clone()).to_path(place.path("direct")).unwrap();
            place.assert_same("folded", "direct");
            Encode::revert(&chain).options(options.clone()).to_path(place.path("back")).unwrap();
            Encode::new(&base).base(&target).options(options).to_path(place.path("direct_back")).unwrap();
            place.assert_same("back", "direct_back");
            Apply::new(&Pair::open(place.path("back")).unwrap()).base(&target).to_path(place.path("again")).unwrap();
            assert!(fs::read(place.path("again")).unwrap() == fs::read(place.path("v0.safetensors")).unwrap());
        }
    }
}

#[test]
fn pairs_with_parts_fold_to_parts_whatever_the_cuts_of_the_steps_are() {
    let versions = model(3);
    let splits = ["llama:4", "llama:3", "*=0:2", "*proj*=1:5", ""];
    let option = |split: &str| EncodeOptions::default().chunk_lanes(4096).split(split.parse().unwrap());
    for (first, second, last) in [(0, 0, 0), (0, 1, 2), (4, 0, 4), (2, 4, 3), (3, 1, 1), (4, 4, 0)] {
        let place = Place::new(&versions, &option(splits[first]));
        for (i, split) in [(2, second), (3, last)] {
            let (base, target) = (place.version(i - 1), place.version(i));
            let encode = Encode::new(&target).base(&base).options(option(splits[split])).overwrite(true);
            encode.to_path(place.path(&format!("p{i}"))).unwrap();
        }
        let (base, target, pairs) = (place.version(0), place.version(3), place.pairs(1..4));
        let chain = Chain::new(&base, &pairs).unwrap();
        // Without cuts in the options, the fold is cut as the last pair.
        Encode::fold(&chain).options(option("")).to_path(place.path("folded")).unwrap();
        Encode::new(&target).base(&base).options(option(splits[last])).to_path(place.path("direct")).unwrap();
        place.assert_same("folded", "direct");
        // With other cuts, its digests cannot be those of the last pair, and the tensors are hashed once more.
        Encode::fold(&chain).options(option("*=0:7")).to_path(place.path("cut")).unwrap();
        Encode::new(&target).base(&base).options(option("*=0:7")).to_path(place.path("direct_cut")).unwrap();
        place.assert_same("cut", "direct_cut");
        Encode::revert(&chain).options(option("")).to_path(place.path("back")).unwrap();
        Encode::new(&base).base(&target).options(option(splits[last])).to_path(place.path("direct_back")).unwrap();
        place.assert_same("back", "direct_back");
        let (last, earlier) = pairs.split_last().unwrap();
        Apply::new(last).base(&Chain::new(&base, earlier).unwrap()).to_path(place.path("out")).unwrap();
        assert!(fs::read(place.path("out")).unwrap() == fs::read(place.path("v3.safetensors")).unwrap());
    }
}

#[test]
fn parts_of_one_rank_are_folded_and_applied_without_the_others() {
    let versions = model(2);
    let part = |tensor: &str, part| (tensor.to_owned(), vec![part]);
    let cuts = [
        part("model.layers.0.mlp.down_proj.weight", Rectangle::new([0, 60], [96, 60])),
        part("model.layers.0.self_attn.q_proj.weight", Rectangle::new([65, 0], [65, 96])),
    ];
    let options = EncodeOptions::default().cuts(cuts.clone());
    let place = Place::new(&versions, &options);
    let (base, target, pairs) = (place.version(0), place.version(2), place.pairs(1..3));
    let chain = Chain::new(&base, &pairs).unwrap();
    Encode::fold(&chain).to_path(place.path("folded")).unwrap();
    Encode::new(&target).base(&base).options(options.clone()).to_path(place.path("direct")).unwrap();
    place.assert_same("folded", "direct");
    Encode::revert(&chain).to_path(place.path("back")).unwrap();
    Encode::new(&base).base(&target).options(options).to_path(place.path("direct_back")).unwrap();
    place.assert_same("back", "direct_back");

    // Elements that no pair has are not made up.
    assert!(!chain.holds(0, 0, 2) && chain.holds(0, 120, 120) && !chain.holds(0, 120, 122));
    let refused = chain.read(0, 0, &mut [0; 4]);
    assert!(matches!(&refused, Err(Error::InvalidArgument(text)) if text.contains("only some parts")), "{refused:?}");
    assert_eq!(chain.held(0), [cuts[0].1[0].clone()]);
    let whole = EncodeOptions::default().split("nothing=0:2".parse().unwrap());
    assert!(matches!(Encode::fold(&chain).options(whole).to_memory(), Err(Error::PartNotHeld(_))));

    let second = place.version(1);
    // A step that needs elements that the one before does not have, or has in other parts, is refused.
    for cut in [None, Some(Rectangle::new([0, 60], [96, 30]))] {
        let options = EncodeOptions::default().cuts(cut.map(|cut| part("model.layers.0.mlp.down_proj.weight", cut)));
        let (third, _) = Encode::new(&target).base(&second).options(options).to_memory().unwrap();
        let first = Encode::new(&second).base(&base).options(EncodeOptions::default().cuts(cuts.clone()));
        let first = first.to_memory().unwrap().0;
        match Chain::new(&base, [&first, &third]).err() {
            Some(Error::Step { number: 2, source, .. }) => assert_eq!(source.rule(), Some(Rule::BaseTensor), "{source}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn files_of_a_chain_are_those_of_its_last_pair() {
    let versions = model(4);
    let place = Place::new(&versions, &EncodeOptions::default());
    // Another header in the middle: the second version has another order of tensors.
    let mut reversed = versions[2].clone();
    reversed.reverse();
    write_file(&place.path("v2.safetensors"), &reversed);
    for i in [2, 3] {
        let encode = |target: &SafetensorsCheckpoint, base: &SafetensorsCheckpoint| {
            Encode::new(target).base(base).overwrite(true).to_path(place.path(&format!("p{i}"))).unwrap();
        };
        encode(&place.version(i), &place.version(i - 1));
    }
    let base = place.version(0);
    for last in 1..5 {
        let pairs = place.pairs(1..last + 1);
        let chain = Chain::new(&base, &pairs).unwrap();
        Encode::fold(&chain).overwrite(true).to_path(place.path("folded")).unwrap();
        Encode::new(&place.version(last)).base(&base).overwrite(true).to_path(place.path("direct")).unwrap();
        place.assert_same("folded", "direct");
        let (pair, earlier) = pairs.split_last().unwrap();
        Apply::new(pair).base(&Chain::new(&base, earlier).unwrap()).overwrite(true).to_path(place.path("out")).unwrap();
        assert!(fs::read(place.path("out")).unwrap() == fs::read(place.path(&format!("v{last}.safetensors"))).unwrap());
        Verify::new(pair).target(&chain).run().unwrap();
    }

    // A pair without files gives one file with a new header, on which the next pair may depend. Short headers are stored.
    let long_names = ["a", "b", "c"].map(|name| tensor(&name.repeat(2048), "BF16", &[64], 1));
    write_file(&place.path("v7.safetensors"), &long_names);
    write_file(&place.path("v8.safetensors"), &long_names.iter().map(|tensor| tuned(tensor, 5)).collect::<Vec<_>>());
    let base = place.version(7);
    let (of_files, _) = Encode::new(&place.version(8)).base(&base).to_memory().unwrap();
    let (bare, _) = Merge::new([&of_files]).files(false).to_memory().unwrap();
    Apply::new(&bare).base(&base).to_path(place.path("plain")).unwrap();
    let plain = SafetensorsCheckpoint::open(place.path("plain")).unwrap();
    fs::copy(place.path("plain"), place.path("v9.safetensors")).unwrap();
    let (same_header, _) = Encode::new(&place.version(9)).base(&plain).to_memory().unwrap();
    assert!(same_header.index().files().all(|file| file.content.is_none()));
    let chain = Chain::new(&base, [&bare]).unwrap();
    Apply::new(&same_header).base(&chain).overwrite(true).to_path(place.path("out")).unwrap();
    assert!(fs::read(place.path("out")).unwrap() == fs::read(place.path("v9.safetensors")).unwrap());
    assert_eq!(Encode::fold(&chain).to_memory().unwrap().0.index().files().len(), 0);
    // A header that no step before has is missed before anything is decoded.
    let memory_base = MemoryCheckpoint::EMPTY;
    let (anchor, _) = Encode::new(&base).to_memory().unwrap();
    let broken = Chain::new(&memory_base, [&anchor, &same_header]);
    let refused = broken.and_then(|chain| Encode::fold(&chain).to_memory());
    assert!(matches!(&refused, Err(Error::Step { number: 2, .. })), "{:?}", refused.err());
}

#[test]
fn sharded_folders_are_folded_with_their_shard_index() {
    let versions = model(2);
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    for (i, version) in versions.iter().enumerate() {
        write_folder(&path(&format!("v{i}")), &[&version[..1], &version[1..]]);
    }
    let open = |i: usize| SafetensorsCheckpoint::open(path(&format!("v{i}"))).unwrap();
    let pairs: Vec<_> = (1..3).map(|i| Encode::new(&open(i)).base(&open(i - 1)).to_memory().unwrap().0).collect();
    let base = open(0);
    let chain = Chain::new(&base, &pairs).unwrap();
    let folded = Encode::fold(&chain).to_memory().unwrap().0;
    assert_same(&folded, &Encode::new(&open(2)).base(&base).to_memory().unwrap().0);
    Apply::new(&pairs[1]).base(&Chain::new(&base, &pairs[..1]).unwrap()).to_path(path("out")).unwrap();
    for name in names(&path("out")) {
        assert!(fs::read(path("out").join(&name)).unwrap() == fs::read(path("v2").join(&name)).unwrap(), "{name}");
    }
    assert_eq!(names(&path("out")).len(), 3);
}

/// The error of a chain, as number of the step and its source.
fn step(outcome: Result<impl Sized>) -> (usize, Error) {
    match outcome {
        Err(Error::Step { number, source, .. }) => (number, *source),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("the chain is accepted"),
    }
}

#[test]
fn chains_that_do_not_fit_are_refused_from_their_indexes() {
    let place = Place::new(&model(4), &EncodeOptions::default());
    // Without blobs, nothing can be decoded.
    let base = place.version(0);
    let refused = |order: &[usize]| {
        let pairs = place.pairs(order.iter().copied());
        let error = Chain::new(&base, &pairs).err().unwrap();
        let text = error.to_string();
        let (number, source) = step(Err::<(), _>(error));
        let label = place.path(&format!("p{}", order[number - 1])).display().to_string();
        assert!(text.starts_with(&format!("step {number} of the chain, {label}: ")), "{text}");
        (number, source)
    };
    let first = "model.layers.0.mlp.down_proj.weight";
    for (order, number) in [(&[1, 3][..], 2), (&[2, 1], 2), (&[1, 3, 2, 4], 2), (&[1, 2, 4], 3), (&[1, 2, 3, 1], 4)] {
        let (found, source) = refused(order);
        assert_eq!(found, number, "{order:?}");
        assert!(matches!(&source, Error::WrongBase { tensor, .. } if tensor == first), "{order:?}: {source}");
    }
    for (order, number) in [(&[1, 1][..], 2), (&[1, 2, 2, 3], 3)] {
        let (found, source) = refused(order);
        assert_eq!(found, number, "{order:?}");
        assert!(matches!(source, Error::AlreadyApplied { .. }), "{order:?}: {source}");
    }
    // A base tensor that the version before lacks, or has with another shape.
    let pairs = place.pairs([1]);
    let fits = Chain::new(&base, &pairs);
    assert!(fits.is_ok());
    let other = [tensor("model.norm.weight", "F32", &[96], 3), tensor("x", "U8", &[5], 1)];
    write_file(&place.path("v8.safetensors"), &other);
    let (number, source) = step(Chain::new(&place.version(8), &pairs));
    assert_eq!((number, source.rule()), (1, Some(Rule::BaseTensor)), "{source}");
}

#[test]
fn a_wrong_base_or_a_damaged_pair_is_named_and_nothing_is_published() {
    let options = EncodeOptions::default().chunk_lanes(4096);
    let place = Place::new(&model(3), &options);
    let before = place.names();
    let publish = |base: &dyn Checkpoint, pairs: &[Pair<FileSource>]| {
        let chain = Chain::new(base, pairs).unwrap();
        let (last, earlier) = pairs.split_last().unwrap();
        let applied = Apply::new(last).base(&Chain::new(base, earlier).unwrap()).to_path(place.path("out"));
        let folded = Encode::fold(&chain).options(options.clone()).to_path(place.path("out"));
        let reverted = Encode::revert(&chain).options(options.clone()).to_path(place.path("out"));
        assert_eq!(place.names(), before);
        [step(applied), step(folded), step(reverted)]
    };
    // A base that is another version.
    let pairs = place.pairs(1..4);
    for (number, source) in publish(&place.version(2), &pairs) {
        assert_eq!(number, 1);
        assert!(matches!(&source, Error::WrongBase { tensor, .. } if tensor.contains("down_proj")), "{source}");
    }
    // A damaged payload in the middle, in the last chunk of a tensor.
    let blob = place.path("p2.tpde-blob");
    let sound = fs::read(&blob).unwrap();
    let entry = pairs[1].index().find("model.layers.0.self_attn.q_proj.weight").unwrap();
    let chunk = entry.chunks().end - 1;
    let at = pairs[1].index().chunk(chunk).blob_offset as usize;
    let mut damaged = sound.clone();
    damaged[at] ^= 1;
    fs::write(&blob, &damaged).unwrap();
    for (number, source) in publish(&place.version(0), &place.pairs(1..4)) {
        assert_eq!((number, source.rule()), (2, Some(Rule::PayloadCrc32)), "{source}");
        assert!(source.to_string().contains(&format!("tensor {}, chunk {chunk}", entry.name)), "{source}");
    }
    fs::write(&blob, &sound).unwrap();
    let base = place.version(0);
    Encode::fold(&Chain::new(&base, &pairs).unwrap()).options(options).to_memory().unwrap();
}

#[test]
fn forged_payloads_are_found_by_the_digests_of_the_last_step() {
    let tensors = [tensor("w", "U32", &[1024], 1), tensor("w", "U32", &[1024], 2)];
    let last = tuned(&tensors[1], 50);
    let checkpoint = |data: &crate::common::Tensor| Version::from([(data.name.clone(), (info(data), data.bytes.clone()))]);
    let versions = [checkpoint(&tensors[0]), checkpoint(&tensors[1]), checkpoint(&last)];
    let held: Vec<_> = versions.iter().map(memory).collect();
    for with_list in [false, true] {
        let options = EncodeOptions::default().codec(Codec::Raw).payload_digests(with_list);
        let pair = |i: usize| Encode::new(&held[i]).base(&held[i - 1]).options(options.clone()).to_memory().unwrap().0;
        let (sound, second) = (pair(1), pair(2));
        let (index, mut blob) = sound.into_parts();
        crate::common::forge::forge(&index, &mut blob, &mut tensors[1].bytes.clone());
        let pairs = [Pair::new(index, blob).unwrap(), second];
        let chain = Chain::new(&held[0], &pairs).unwrap();
        let mut out = vec![0; last.bytes.len()];
        let expected = match with_list {
            true => (1, Rule::PayloadDigest),
            // Neither CRC-32 nor sums tell.
            false => {
                chain.read(0, 0, &mut out).unwrap();
                assert!(out != last.bytes);
                (2, Rule::TensorTargetDigest)
            }
        };
        for split in ["", "w=0:2"] {
            let options = EncodeOptions::default().split(split.parse().unwrap());
            for encode in [Encode::fold(&chain), Encode::revert(&chain)] {
                let (number, source) = step(encode.options(options.clone()).to_memory());
                assert_eq!((number, source.rule().unwrap()), expected, "{source}");
            }
        }
        let applied = Apply::new(&pairs[1]).base(&Chain::new(&held[0], &pairs[..1]).unwrap()).to_memory().err().unwrap();
        match with_list {
            true => assert!(matches!(applied, Error::Step { number: 1, .. }), "{applied}"),
            false => assert!(matches!(applied, Error::WrongBase { .. }), "{applied}"),
        }
    }
}

fn info(data: &crate::common::Tensor) -> TensorInfo {
    let shape = data.shape.iter().map(|&dim| dim as u64).collect();
    TensorInfo { name: data.name.clone(), dtype: data.dtype.parse().unwrap(), shape }
}

#[test]
fn outputs_may_not_be_inputs_of_a_chain() {
    let place = Place::new(&model(2), &EncodeOptions::default().codec(Codec::Raw));
    let (base, pairs) = (place.version(0), place.pairs(1..3));
    let chain = Chain::new(&base, &pairs).unwrap();
    for name in ["p1", "p2"] {
        let refused = Encode::fold(&chain).overwrite(true).to_path(place.path(name));
        assert!(matches!(&refused, Err(Error::InvalidArgument(_))), "{:?}", refused.err());
        let refused = Encode::revert(&chain).overwrite(true).to_path(place.path(name));
        assert!(matches!(&refused, Err(Error::InvalidArgument(_))), "{:?}", refused.err());
    }
    let earlier = Chain::new(&base, &pairs[..1]).unwrap();
    let refused = Apply::new(&pairs[1]).base(&earlier).overwrite(true).to_path(place.path("p1.tpde-blob"));
    assert!(matches!(&refused, Err(Error::InvalidArgument(_))), "{:?}", refused.err());
}

#[test]
fn a_chain_without_pairs_is_its_base() {
    let place = Place::new(&model(1), &EncodeOptions::default());
    let base = place.version(0);
    let chain = Chain::<Vec<u8>>::new(&base, []).unwrap();
    assert_eq!(chain.tensors(), base.tensors());
    let pair = place.pair(1);
    Apply::new(&pair).base(&chain).to_path(place.path("out")).unwrap();
    assert!(fs::read(place.path("out")).unwrap() == fs::read(place.path("v1.safetensors")).unwrap());
    let folded = Encode::fold(&chain).to_memory().unwrap().0;
    assert_same(&folded, &Encode::new(&base).base(&base).to_memory().unwrap().0);
    let renamed = named(&model(0)[0][0], "another");
    assert!(chain.find(&renamed.name).is_none());
}
