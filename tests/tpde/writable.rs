//! Whether a target can be written is known beforehand. A pair that verifies with its base, and whose files can be planned, can be
//! applied. Any other pair is refused, and no files are left behind.

#[allow(dead_code, reason = "fuzz targets use more of it")]
#[path = "../../fuzz/src/parts.rs"]
mod parts;

use crate::common::*;
use crate::sign;
use parts::Parts;
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use std::fmt::Debug;
use std::fs;
use std::path::Path;
use tempfile::TempDir;
use tpde::internals::encode;
use tpde::{
    Apply, Chain, Checkpoint, Dtype, Encode, EncodeOptions, Error, FileKind, Limits, MemoryCheckpoint, Pair, Result,
    SafetensorsCheckpoint, TensorInfo, ValidatedIndex, Verify,
};
use tpde_core::writer::{FileSpec, PairBuilder};

fn open(path: &Path) -> SafetensorsCheckpoint {
    SafetensorsCheckpoint::open(path).unwrap()
}

/// Defines an enum without data, and a list of all its values.
macro_rules! faults {
    ($(#[$meta:meta])* $name:ident { $($(#[$note:meta])* $fault:ident,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq)]
        enum $name { $($(#[$note])* $fault,)+ }

        const FAULTS: &[$name] = &[$($name::$fault,)+];
    };
}

faults! {
    /// How the files described by the pair are made inconsistent.
    Fault {
        None,
        /// A tensor is in no file.
        Missing,
        /// A tensor is in two files.
        Twice,
        Unknown,
        Shape,
        NotJson,
        Spaced,
        MapOfOtherShard,
        MapOfUnknownTensor,
        MapOfUnknownShard,
        MapLacksShard,
        MapEmpty,
        MapNotJson,
        TwoMaps,
        NoMap,
    }
}

/// A change to the base after the pair was made.
#[derive(Debug, Clone, Copy, PartialEq)]
enum BaseFault {
    None,
    Header,
    Data,
    LoneFile,
    ShardIndex,
}

const BASE_FAULTS: [BaseFault; 5] =
    [BaseFault::None, BaseFault::Header, BaseFault::Data, BaseFault::LoneFile, BaseFault::ShardIndex];

/// A pair that may be invalid, and its base.
#[derive(Debug, Clone)]
struct Case {
    /// Names of the tensors, and whether each is in the second shard.
    tensors: Vec<(&'static str, bool)>,
    /// 0: no files; 1: a single file; 2: two shards.
    layout: u8,
    fault: Fault,
    /// Whether contents that equal the base's are taken from the base.
    of_base: bool,
    base_fault: BaseFault,
    grown: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    let names = ["__metadata__", "a", "b", "c", "d\u{1}\"", "é"];
    let tensors = proptest::collection::vec((proptest::bool::weighted(0.8), any::<bool>()), names.len());
    let tensors = (tensors, proptest::bool::weighted(0.2)).prop_map(move |(present, metadata)| {
        let chosen = names.iter().zip(present).filter(|(name, (there, _))| *there && (metadata || **name != "__metadata__"));
        chosen.map(|(name, (_, shard))| (*name, shard)).collect::<Vec<_>>()
    });
    let fault = prop_oneof![2 => Just(Fault::None), 3 => proptest::sample::select(FAULTS)];
    let base_fault = prop_oneof![2 => Just(BaseFault::None), 1 => proptest::sample::select(&BASE_FAULTS[..])];
    (tensors, 0..3u8, fault, any::<bool>(), base_fault, any::<bool>()).prop_map(
        |(tensors, layout, fault, of_base, base_fault, grown)| Case { tensors, layout, fault, of_base, base_fault, grown },
    )
}

/// The bytes of a safetensors file up to its data.
fn header(tensors: &[Tensor]) -> Vec<u8> {
    let data: usize = tensors.iter().map(|tensor| tensor.bytes.len()).sum();
    let mut file = safetensors(tensors);
    file.truncate(file.len() - data);
    file
}

fn map(shards: &[(&str, Vec<Tensor>)]) -> Map<String, Value> {
    let entries = shards.iter().flat_map(|(name, tensors)| tensors.iter().map(|tensor| (tensor.name.clone(), Value::from(*name))));
    entries.collect()
}

const SHARDS: [&str; 2] = ["model-1.safetensors", "model-2.safetensors"];
const SHARD_INDEX: &str = "model.safetensors.index.json";

impl Case {
    fn split(&self, tensors: &[Tensor]) -> Vec<(&'static str, Vec<Tensor>)> {
        let of = |second| tensors.iter().zip(&self.tensors).filter(move |(_, (_, shard))| *shard == second);
        SHARDS.iter().zip([false, true]).map(|(name, second)| (*name, of(second).map(|(t, _)| t.clone()).collect())).collect()
    }

    /// Writes a checkpoint in the layout of the pair's files. Without files, it is a single file.
    fn write(&self, path: &Path, tensors: &[Tensor]) {
        if self.layout < 2 {
            return write_file(path, tensors);
        }
        fs::create_dir(path).unwrap();
        let shards = self.split(tensors);
        for (name, tensors) in &shards {
            write_file(&path.join(name), tensors);
        }
        if !tensors.is_empty() && shards.iter().all(|(_, tensors)| !tensors.is_empty()) {
            fs::write(path.join(SHARD_INDEX), json!({"weight_map": map(&shards)}).to_string()).unwrap();
        }
    }

    /// The files in the pair.
    fn files(&self, target: &[Tensor], base: &Path) -> Vec<FileSpec> {
        let spec = |name: &str, content: Vec<u8>, has_tensors: bool| {
            let of_base = if name.is_empty() { base.to_owned() } else { base.join(name) };
            let same = fs::read(of_base).is_ok_and(|file| if has_tensors { file.starts_with(&content) } else { file == content });
            let kind = match (has_tensors, same && self.of_base) {
                (true, false) => FileKind::Safetensors,
                (true, true) => FileKind::SafetensorsOfBase,
                (false, false) => FileKind::Verbatim,
                (false, true) => FileKind::VerbatimOfBase,
            };
            FileSpec {
                name: name.into(),
                kind,
                content_size: content.len() as u64,
                content_digest: blake3::hash(&content).as_bytes()[..16].try_into().unwrap(),
                content: if same && self.of_base { Vec::new() } else { content },
            }
        };
        let mut shards = match self.layout {
            0 => return Vec::new(),
            1 => vec![("", target.to_vec())],
            _ => self.split(target),
        };
        let mut contents = map(&shards);
        let first = shards[0].1.first().cloned();
        let last = shards.len() - 1;
        match (self.fault, first) {
            (Fault::Missing, Some(_)) => _ = shards[0].1.remove(0),
            (Fault::Twice, Some(tensor)) => shards[last].1.push(tensor),
            (Fault::Unknown, _) => shards[last].1.push(tensor("unknown", "U8", &[0], 1)),
            (Fault::Shape, Some(_)) => shards[0].1[0].shape.push(1),
            (Fault::MapOfOtherShard, Some(tensor)) => _ = contents.insert(tensor.name, SHARDS[1].into()),
            (Fault::MapOfUnknownTensor, _) => _ = contents.insert("unknown".into(), SHARDS[0].into()),
            (Fault::MapOfUnknownShard, Some(tensor)) => _ = contents.insert(tensor.name, "model-3.safetensors".into()),
            (Fault::MapLacksShard, _) => contents.retain(|_, shard| shard != SHARDS[0]),
            (Fault::MapEmpty, _) => contents.clear(),
            _ => {}
        }
        let mut specs = Vec::new();
        for (i, (name, tensors)) in shards.iter().enumerate() {
            let mut content = header(tensors);
            match self.fault {
                Fault::NotJson if i == last => *content.last_mut().unwrap() = b'x',
                Fault::Spaced => content[9] = b' ',
                _ => {}
            }
            specs.push(spec(name, content, true));
        }
        if self.layout == 2 && self.fault != Fault::NoMap {
            let mut content = json!({"weight_map": contents}).to_string().into_bytes();
            if self.fault == Fault::MapNotJson {
                content.pop();
            }
            if self.fault == Fault::TwoMaps {
                specs.push(spec("another.safetensors.index.json", content.clone(), false));
            }
            specs.push(spec(SHARD_INDEX, content, false));
        }
        specs.sort_by(|a, b| a.name.cmp(&b.name));
        specs
    }

    fn damage(&self, base: &Path) {
        let first = if self.layout < 2 { base.to_owned() } else { base.join(SHARDS[0]) };
        let mut bytes = fs::read(&first).unwrap();
        match self.base_fault {
            BaseFault::None => return,
            BaseFault::Header => bytes[9] = b' ',
            BaseFault::Data => *bytes.last_mut().unwrap() ^= 1,
            BaseFault::LoneFile if self.layout == 2 => return fs::rename(&first, base.join("other.safetensors")).unwrap(),
            BaseFault::ShardIndex if self.layout == 2 => return drop(fs::remove_file(base.join(SHARD_INDEX))),
            _ => return,
        }
        fs::write(first, bytes).unwrap();
    }

    /// Writes the base to `path`, and makes the pair of base and target, or of the target alone.
    fn pair(&self, path: &Path, has_base: bool) -> Pair<Vec<u8>> {
        let rows = |grown: bool| if grown { 3 } else { 2 };
        let base: Vec<_> = self.tensors.iter().map(|(name, _)| tensor(name, "BF16", &[2, 8], 3)).collect();
        let target: Vec<_> = self
            .tensors
            .iter()
            .enumerate()
            .map(|(i, (name, _))| tuned(&tensor(name, "BF16", &[rows(self.grown && i == 0), 8], 3), 5))
            .collect();
        // A base in a file cannot have a tensor with this name.
        let on_disk: Vec<_> = base.iter().filter(|tensor| tensor.name != "__metadata__").cloned().collect();
        self.write(path, &on_disk);

        let held = |tensors: &[Tensor]| -> Vec<(TensorInfo, Vec<u8>)> {
            let info = |tensor: &Tensor| TensorInfo {
                name: tensor.name.clone(),
                dtype: Dtype::Bf16,
                shape: tensor.shape.iter().map(|&d| d as u64).collect(),
            };
            tensors.iter().map(|tensor| (info(tensor), tensor.bytes.clone())).collect()
        };
        fn memory(held: &[(TensorInfo, Vec<u8>)]) -> MemoryCheckpoint<'_> {
            MemoryCheckpoint::new(held.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap()
        }
        let files = self.files(&target, path);
        let (base, target) = (held(&on_disk), held(&target));
        let (base, target) = (memory(&base), memory(&target));
        let base = has_base.then_some(&base as &dyn Checkpoint);
        let builder = PairBuilder::new(Vec::new(), "memory".into(), Default::default()).unwrap();
        let (finished, _) = encode(base, &target, files, &EncodeOptions::default(), builder, &|_| {}).unwrap();
        finished.try_into().unwrap()
    }
}

/// The result of applying a pair to a base.
enum Outcome {
    /// The target is in the subfolder `out` of this folder.
    Written(TempDir),
    NotWritable,
    Refused,
}

/// Applies a pair to a base. Asserts that this succeeds if and only if verification predicted it. On success, the output must be
/// the target as read by this crate and by the safetensors crate; on failure, there must be no output.
fn check(pair: &Pair<Vec<u8>>, base: Option<&SafetensorsCheckpoint>, what: &dyn Debug) -> Outcome {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    let verified = match base {
        Some(base) => Verify::new(pair).base(base).run(),
        None => Verify::new(pair).without_base().run(),
    };
    let is_writable = verified.as_ref().is_ok_and(|verified| verified.writable == Some(true));
    let applied = base.into_iter().fold(Apply::new(pair), |apply, base| apply.base(base)).to_path(&out);
    assert_eq!(is_writable, applied.is_ok(), "{what:?}: {verified:?} {applied:?}");
    if applied.is_err() {
        assert_eq!(place.path().read_dir().unwrap().count(), 0, "{what:?} leaves something behind");
        return if verified.is_ok() { Outcome::NotWritable } else { Outcome::Refused };
    }
    let entries = |folder: &Path| folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let files = if out.is_dir() { entries(&out) } else { vec![out.clone()] };
    // Shard indexes are rebuilt from their stored bytes without a check of their content, so only their bytes are compared.
    let shards: Vec<_> = files.iter().filter(|file| file.extension().is_none_or(|e| e != "json")).collect();
    for file in pair.index().files().filter(|file| !file.kind.has_tensors()) {
        assert_eq!(blake3::hash(&fs::read(out.join(file.name)).unwrap()).as_bytes()[..16], file.content_digest);
    }
    let mut found = 0;
    for shard in &shards {
        let bytes = fs::read(shard).unwrap();
        for (name, tensor) in ::safetensors::SafeTensors::deserialize(&bytes).unwrap().iter() {
            let expected = *pair.index().find(name).unwrap().target_digest();
            assert_eq!(blake3::hash(tensor.data()).as_bytes()[..16], expected, "{what:?}: {name}");
            found += 1;
        }
    }
    assert_eq!(found, pair.index().tensor_count(), "{what:?}: each tensor is in one file");
    Outcome::Written(place)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn what_is_sound_and_writable_is_written(case in cases()) {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("base");
        let pair = case.pair(&path, true);
        case.damage(&path);
        let Ok(base) = SafetensorsCheckpoint::open(&path) else { return Ok(()) };
        let Outcome::Written(written) = check(&pair, Some(&base), &case) else { return Ok(()) };
        // A shard index cannot name a shard without tensors.
        let no_shard_is_empty = [false, true].iter().all(|second| case.tensors.iter().any(|(_, shard)| shard == second));
        // A pair that leads back is made if and only if the target can be its base.
        let target = SafetensorsCheckpoint::open(written.path().join("out"));
        let pairs = [pair];
        let chain = Chain::new(&base, &pairs).unwrap();
        let is_base = target.as_ref().is_ok_and(|target| target.tensors() == chain.tensors());
        match Encode::revert(&chain).to_memory() {
            Ok((back, _)) => {
                prop_assert!(is_base);
                Verify::new(&back).base(&target.unwrap()).target(&base).run().unwrap();
            }
            Err(Error::BadCheckpoint { reason, .. }) => {
                prop_assert!(!is_base || !no_shard_is_empty);
                prop_assert!(reason.contains("cannot be a base"), "{}", reason);
            }
            Err(other) => panic!("{case:?}: {other}"),
        }
        let [pair] = pairs;
        if case.fault == Fault::None && (case.layout < 2 || no_shard_is_empty) {
            Verify::new(&pair).target(&open(&written.path().join("out"))).run().unwrap();
        }
    }
}

/// A source of random choices.
struct Random(Xorshift);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        (self.0.next() >> 20) as usize % end
    }

    fn pick<'a, T>(&mut self, items: &'a mut [T]) -> Option<&'a mut T> {
        if items.is_empty() { None } else { Some(&mut items[self.below(items.len())]) }
    }

    fn name(&mut self, names: &[&str]) -> Vec<u8> {
        names[self.below(names.len())].into()
    }

    /// A number close to `number`, or far from it.
    fn number(&mut self, number: u64) -> u64 {
        match self.below(4) {
            0 => number.wrapping_add(1),
            1 => number.wrapping_sub(1),
            2 => self.below(16) as u64,
            _ => number ^ 1 << self.below(32),
        }
    }

    /// Changes a byte, a digit or the length.
    fn edit(&mut self, bytes: &mut Vec<u8>) {
        let at = self.below(bytes.len() + 1);
        let digits: Vec<_> = (0..bytes.len()).filter(|&at| bytes[at].is_ascii_digit()).collect();
        match self.below(5) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, b"0a {}[]\\\",:._-"[self.below(14)]),
            2 if at < bytes.len() => drop(bytes.remove(at)),
            3 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
            _ if !digits.is_empty() => bytes[digits[self.below(digits.len())]] = b'0' + self.below(10) as u8,
            _ => {}
        }
    }
}

/// Changes one part of a pair. `None` if the pair lacks that part.
fn mutate(parts: &mut Parts, random: &mut Random) -> Option<()> {
    let Parts { tensors, files, roots, .. } = parts;
    match random.below(20) {
        0..4 => {
            let content = &mut random.pick(files)?.content;
            random.edit(content);
            // In most cases, corrects the length field of the header, so that the header is parsed.
            if content.len() >= 8 && random.below(4) > 0 {
                let size = content.len() as u64 - 8;
                content[..8].copy_from_slice(&size.to_le_bytes());
            }
        }
        4 => {
            random.pick(files)?.name =
                random.name(&["", "x.safetensors", SHARDS[0], SHARDS[1], SHARD_INDEX, "x.safetensors.index.json"])
        }
        5 => {
            let file = random.pick(files)?;
            random.edit(&mut file.name);
        }
        6 => {
            let entry = &mut random.pick(files)?.entry;
            match random.below(3) {
                0 => entry.kind = random.number(entry.kind.into()) as u16 % 5,
                1 => entry.content_size = random.number(entry.content_size),
                _ => entry.content_digest[0] ^= 1,
            }
        }
        7 => {
            let which = random.below(files.len().max(1));
            (which < files.len()).then(|| files.remove(which))?;
        }
        8 => {
            let mut copy = random.pick(files)?.clone();
            copy.name.insert(0, b'a');
            files.push(copy);
        }
        9 => random.pick(tensors)?.name = random.name(&["__metadata__", "a", "b", "x", "", "\0"]),
        10 => random.pick(tensors)?.base_name = random.name(&["a", "b", "x", ""]),
        11 => {
            let entry = &mut random.pick(tensors)?.entry;
            entry.dtype = random.number(entry.dtype.into()) as u16 % 32;
        }
        12 => {
            let tensor = random.pick(tensors)?;
            let dim = random.pick(&mut tensor.dims)?;
            *dim = random.number(*dim);
        }
        13 => {
            let dims = &mut random.pick(tensors)?.dims;
            match random.below(3) {
                0 => dims.push(random.below(3) as u64),
                1 => dims.reverse(),
                _ => _ = dims.pop()?,
            }
        }
        14 => {
            let entry = &mut random.pick(tensors)?.entry;
            match random.below(2) {
                0 => entry.base_kind = random.below(4) as u16,
                _ => entry.base_param = random.number(entry.base_param),
            }
        }
        15 => {
            let which = random.below(tensors.len().max(1));
            (which < tensors.len()).then(|| tensors.remove(which))?;
        }
        16 => {
            let mut copy = random.pick(tensors)?.clone();
            copy.base_name = copy.name.clone();
            copy.name.push(b'x');
            tensors.push(copy);
        }
        17 => {
            let tensor = random.pick(tensors)?;
            let chunk = random.pick(&mut tensor.chunks)?;
            random.edit(&mut chunk.payload);
        }
        18 => {
            let tensor = random.pick(tensors)?;
            let chunk = random.pick(&mut tensor.chunks)?;
            match random.below(3) {
                0 => chunk.num_deltas = random.number(chunk.num_deltas.into()) as u32,
                1 => chunk.uncompressed_size = random.number(chunk.uncompressed_size.into()) as u32,
                _ => chunk.sums[0] ^= 1,
            }
        }
        _ => match random.below(2) {
            0 => roots[0] ^= 1,
            _ => random.pick(tensors)?.digests[0] ^= 1,
        },
    }
    Some(())
}

/// Maximum size in bytes of a mutated target. A few bytes of an index can describe terabytes.
const MOST_BYTES: u64 = 1 << 20;

/// A pair of these parts with correct checksums. With `sums`, sums and digests are corrected for `base` and the payloads too.
fn signed(parts: &Parts, base: Option<&SafetensorsCheckpoint>, sums: bool) -> Result<Option<Pair<Vec<u8>>>> {
    let (index, mut blob) = parts.write();
    let mut index = ValidatedIndex::parse(index, &Limits::default())?;
    let (base_bytes, target_bytes) = index.tensor_bytes();
    if base_bytes.max(target_bytes) > MOST_BYTES {
        return Ok(None);
    }
    if sums {
        let bytes = sign::repair_sums(&index, &mut blob, &lanes(base));
        index = ValidatedIndex::parse(bytes, &Limits::default())?;
    }
    Pair::new(index, blob).map(Some)
}

/// The tensors of a checkpoint.
fn lanes(base: Option<&SafetensorsCheckpoint>) -> Vec<(TensorInfo, Vec<u8>)> {
    let read = |base: &SafetensorsCheckpoint, place: usize, info: &TensorInfo| {
        let mut bytes = vec![0; info.bytes() as usize];
        base.read(place, 0, &mut bytes).unwrap();
        (info.clone(), bytes)
    };
    base.iter().flat_map(|base| base.tensors().iter().enumerate().map(|(i, info)| read(base, i, info))).collect()
}

#[test]
fn of_pairs_that_are_changed_and_signed_again_those_that_are_sound_and_writable_are_written() {
    let place = tempfile::tempdir().unwrap();
    let sets: [&[_]; 3] = [&[], &[("a", false)], &[("a", false), ("b", true), ("c", false), ("d\u{1}\"", true), ("é", true)]];
    let mut sound = Vec::new();
    for i in 0..3 * 3 * 2 * 2 * 2 {
        let [layout, set, of_base, grown, has_base] =
            [(1, 3), (3, 3), (9, 2), (18, 2), (36, 2)].map(|(step, count)| i / step % count);
        let (of_base, grown, has_base) = (of_base == 1 && has_base == 1, grown == 1, has_base == 1);
        let tensors = sets[set].to_vec();
        let case = Case { tensors, layout: layout as u8, fault: Fault::None, of_base, base_fault: BaseFault::None, grown };
        let path = place.path().join(i.to_string());
        let pair = case.pair(&path, has_base);
        let base = has_base.then(|| open(&path));
        let tensors = lanes(base.as_ref());
        let parts = Parts::new(pair.index(), pair.blob(), &tensors);
        let again = signed(&parts, base.as_ref(), true).unwrap().unwrap();
        assert!(matches!(check(&again, base.as_ref(), &case), Outcome::Written(_)), "{case:?}");
        sound.push((parts, base));
    }

    let (mut invalid, mut refused, mut not_writable, mut written) = (0, 0, 0, 0);
    for seed in 0..1500 {
        let mut random = Random(Xorshift(0x9E37_79B9_7F4A_7C15 ^ (seed + 1)));
        (0..4).for_each(|_| _ = random.0.next());
        let (parts, base) = &sound[random.below(sound.len())];
        let (mut parts, base) = (parts.clone(), base.as_ref());
        for _ in 0..=random.below(2) {
            mutate(&mut parts, &mut random);
        }
        if random.below(4) > 0 {
            parts.tensors.sort_by(|a, b| a.name.cmp(&b.name));
            parts.files.sort_by(|a, b| a.name.cmp(&b.name));
        }
        let digests: Vec<_> = parts.files.iter().map(|file| file.entry.content_digest).collect();
        parts.derive();
        if random.below(8) == 0 {
            parts.files.iter_mut().zip(digests).for_each(|(file, digest)| file.entry.content_digest = digest);
        }
        let outcome = signed(&parts, base, random.below(8) > 0).map(|pair| pair.map(|pair| check(&pair, base, &seed)));
        match outcome {
            Err(Error::Invalid(_) | Error::Limit { .. }) => invalid += 1,
            Err(error) => panic!("{seed}: {error}"),
            Ok(None) => {}
            Ok(Some(Outcome::Refused)) => refused += 1,
            Ok(Some(Outcome::NotWritable)) => not_writable += 1,
            Ok(Some(Outcome::Written(_))) => written += 1,
        }
    }
    let counts = [invalid, refused, not_writable, written];
    assert!(counts.iter().all(|&count| count >= 60), "all outcomes are frequent: {counts:?}");
}
