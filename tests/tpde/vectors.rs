//! The vectors of all versions. Each valid vector decodes to the bytes in the manifest. Each invalid one is refused with the rule
//! that it breaks, at the step in the manifest. `testdata/make_vectors.py` makes the vectors from the spec and shares no code
//! with this crate; `testdata/reader` reads them too. Also compares the rules in the text of the spec with those of the crate.

use crate::common::manifest::{self, Vector, vectors, vectors_of};
use crate::common::versions;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use tpde::{
    Apply, BaseKind, Checkpoint, Error, InPlace, Limits, MemoryCheckpoint, Pair, Result, Rule, SafetensorsCheckpoint, Tensor,
    TensorInfo, TensorMut, ValidatedIndex,
};

/// Result of reading a vector: its bytes, or an error and the step that reported it.
type Outcome = std::result::Result<Decoded, (&'static str, Box<Error>)>;

struct Decoded {
    tensors: BTreeMap<String, String>,
    files: BTreeMap<String, String>,
}

fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

fn read(vector: &Vector) -> Outcome {
    let index =
        ValidatedIndex::parse(manifest::read(&vector.index), &Limits::default()).map_err(|e| ("open_index", Box::new(e)))?;
    let pair = Pair::new(index, manifest::read(&vector.blob)).map_err(|e| ("open_blob", Box::new(e)))?;
    let later = |e| ("decode", Box::new(e));
    pair.verify().map_err(later)?;
    let base = vector.base.as_ref().map(SafetensorsCheckpoint::open).transpose().map_err(later)?;
    let tensors = decode(&pair, base.as_ref()).map_err(later)?;
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("out");
    let mut files = BTreeMap::new();
    if pair.index().files().len() > 0 {
        let apply = base.iter().fold(Apply::new(&pair), |apply, base| apply.base(base));
        apply.to_path(&path).map_err(|e| ("apply", Box::new(e)))?;
        for file in pair.index().files() {
            let path = if file.name.is_empty() { path.clone() } else { path.join(file.name) };
            files.insert(file.name.to_owned(), hash(&std::fs::read(path).unwrap()));
        }
    }
    Ok(Decoded { tensors, files })
}

fn decode(pair: &Pair<Vec<u8>>, base: Option<&SafetensorsCheckpoint>) -> Result<BTreeMap<String, String>> {
    let nothing = MemoryCheckpoint::default();
    let base: &dyn Checkpoint = base.map_or(&nothing, |base| base);
    let mut outputs: Vec<_> = pair.index().tensors().map(|tensor| vec![0xAA; tensor.bytes() as usize]).collect();
    let mut slices: Vec<_> = outputs.iter_mut().map(|output| &mut output[..]).collect();
    Apply::new(pair).base(base).to_buffers(&mut slices)?;
    // The manifest has one digest per name: that of the parts of a tensor, one after the other.
    let mut tensors = BTreeMap::<_, Vec<u8>>::new();
    for (tensor, bytes) in pair.index().tensors().zip(&outputs) {
        tensors.entry(tensor.name.to_owned()).or_default().extend(bytes);
    }
    Ok(tensors.into_iter().map(|(name, bytes)| (name, hash(&bytes))).collect())
}

/// The bytes of an entry in those of its tensor, from the definition of a part.
fn part_bytes(whole: &[u8], entry: &Tensor<'_>) -> Vec<u8> {
    let Some(part) = entry.part else { return whole.to_vec() };
    let mut bytes: Vec<(usize, u8)> = Vec::new();
    for element in 0..entry.shape.iter().product() {
        let (mut rest, mut number, mut stride): (u64, u64, u64) = (element, 0, 1);
        for i in (0..entry.shape.len()).rev() {
            number += (part.origin[i] + rest % entry.shape[i]) * stride;
            rest /= entry.shape[i];
            stride *= part.whole[i];
        }
        // Elements of packed dtypes share bytes.
        let bits = number * entry.dtype.bits()..(number + 1) * entry.dtype.bits();
        let range = bits.start as usize / 8..bits.end.div_ceil(8) as usize;
        bytes.extend(
            range.filter(|at| bytes.last().is_none_or(|(last, _)| last != at)).map(|at| (at, whole[at])).collect::<Vec<_>>(),
        );
    }
    bytes.into_iter().map(|(_, byte)| byte).collect()
}

#[test]
fn archives_of_frozen_versions_are_those_of_the_spec() {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("spec/tpde-format.md")).unwrap();
    let rows = section(&text, "15").lines().filter(|line| line.starts_with('|') && line.contains(".tar.zst"));
    let of_the_spec: Vec<Vec<&str>> = rows.map(|row| row.split('|').map(|cell| cell.trim().trim_matches('`')).collect()).collect();
    let frozen: Vec<_> = versions::names().into_iter().filter(|name| versions::archive(name).exists()).collect();
    let path = |name: &String| format!("testdata/{name}.tar.zst");
    assert_eq!(of_the_spec.iter().map(|row| row[2].to_owned()).collect::<Vec<_>>(), frozen.iter().map(path).collect::<Vec<_>>());
    for (row, name) in of_the_spec.iter().zip(&frozen) {
        let archive = std::fs::read(versions::archive(name)).unwrap();
        assert_eq!((row[3], row[4]), (&*vectors_of(name).len().to_string(), &*versions::sha256(&archive)), "{}", row[2]);
    }
}

#[test]
fn a_damaged_archive_is_refused() {
    let archive = std::fs::read(versions::archive("v1.2")).unwrap();
    let place = tempfile::tempdir().unwrap();
    let mut changed = archive.clone();
    changed[archive.len() / 2] ^= 1;
    for damaged in [&changed[..], &archive[..archive.len() - 1], &archive[..archive.len() / 2], b"version https://example.org/spec"]
    {
        let error = versions::unpacked(damaged, "v1.2", place.path()).unwrap_err().to_string();
        assert!(error.contains("damaged") && error.contains(&versions::sha256(damaged)), "{error}");
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "nothing is left behind");
    }
    // Of threads that unpack the same archive at the same time, one is the first.
    let folders: Vec<_> = std::thread::scope(|scope| {
        let unpacking: Vec<_> =
            (0..3).map(|_| scope.spawn(|| versions::unpacked(&archive, "v1.2", place.path()).unwrap())).collect();
        unpacking.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(folders.iter().all(|folder| *folder == folders[0] && folder.join("manifest.json").exists()), "{folders:?}");
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 1);
}

#[test]
fn valid_vectors_decode_to_the_bytes_of_the_manifest() {
    let vectors: Vec<_> = vectors().into_iter().filter(|v| v.verdict == "valid").collect();
    assert!(vectors.len() >= 460);
    for vector in vectors {
        match read(&vector) {
            Ok(decoded) => {
                assert_eq!(decoded.tensors, vector.tensors, "{}", vector.name);
                assert_eq!(decoded.files, vector.files, "{}", vector.name);
            }
            Err((when, e)) => panic!("{} was refused at {when}: {e}", vector.name),
        }
    }
}

#[test]
fn valid_vectors_are_applied_in_place_where_their_base_kind_allows() {
    let (mut refused, mut partial, mut huge) = (0, 0, 0);
    for vector in vectors().into_iter().filter(|v| v.verdict == "valid") {
        let index = ValidatedIndex::parse(manifest::read(&vector.index), &Limits::default()).unwrap();
        let pair = Pair::new(index, manifest::read(&vector.blob)).unwrap();
        let base = vector.base.as_ref().map(|base| SafetensorsCheckpoint::open(base).unwrap());
        // A small part may belong to a tensor that fits in no memory.
        let elements = |tensor: &Tensor<'_>| tensor.whole_shape().iter().fold(1u64, |n, &dim| n.saturating_mul(dim));
        if pair.index().tensors().any(|tensor| tensor.part.is_some() && elements(&tensor) > 1 << 24) {
            huge += 1;
            continue;
        }
        for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
            let mut memory = BTreeMap::new();
            for tensor in pair.index().tensors() {
                // A further part may be the first that has a base.
                let with_base = pair.index().entries(tensor.name).find(|entry| entry.base_kind != BaseKind::None);
                let base_kind = with_base.map_or(BaseKind::None, |entry| entry.base_kind);
                let whole = TensorInfo { name: String::new(), dtype: tensor.dtype, shape: tensor.whole_shape().to_vec() };
                let mut bytes = vec![0xA5; whole.bytes() as usize];
                match base_kind {
                    BaseKind::None => {}
                    BaseKind::Same => {
                        let base = base.as_ref().unwrap();
                        base.read(base.find(with_base.unwrap().base_name).unwrap(), 0, &mut bytes).unwrap();
                    }
                    _ => {
                        let error = Apply::new(&pair).in_place([TensorMut { name: tensor.name, bytes: &mut bytes }], mode);
                        assert!(matches!(error, Err(Error::InvalidArgument(_))), "{} {}", vector.name, tensor.name);
                        assert!(bytes.iter().all(|&byte| byte == 0xA5), "{} {}", vector.name, tensor.name);
                        refused += 1;
                        continue;
                    }
                }
                memory.insert(tensor.name, bytes);
            }
            // A tensor of which the pair has only some parts is refused.
            memory.retain(|name, bytes| {
                let is_tiled = pair.index().is_tiled(name);
                if !is_tiled {
                    let error = Apply::new(&pair).in_place([TensorMut { name, bytes }], mode);
                    assert!(matches!(error, Err(Error::Incomplete { .. })), "{} {name}", vector.name);
                    partial += 1;
                }
                is_tiled
            });
            let tensors: Vec<_> = memory.iter_mut().map(|(name, bytes)| TensorMut { name, bytes }).collect();
            Apply::new(&pair).in_place(tensors, mode).unwrap_or_else(|e| panic!("{}: {e}", vector.name));
            for (name, bytes) in &memory {
                let parts: Vec<u8> = pair.index().entries(name).flat_map(|entry| part_bytes(bytes, &entry)).collect();
                assert_eq!(hash(&parts), vector.tensors[*name], "{} {name} {mode:?}", vector.name);
            }
        }
    }
    assert!(refused >= 100 && partial >= 10 && huge <= 4, "{refused} {partial} {huge}");
}

#[test]
fn invalid_vectors_are_refused_with_the_rule_that_they_break() {
    let vectors: Vec<_> = vectors().into_iter().filter(|v| v.verdict == "invalid").collect();
    assert!(vectors.len() >= 961);
    let mut wrong = Vec::new();
    for vector in vectors {
        let (when, error) = match read(&vector) {
            Ok(_) => {
                wrong.push(format!("{}: accepted", vector.name));
                continue;
            }
            Err(refused) => refused,
        };
        let expected = (vector.error.as_deref(), vector.rule.as_deref());
        let named = |tensor: Option<&String>, chunk: Option<u32>| {
            (vector.tensor.is_none() || tensor == vector.tensor.as_ref()) && (vector.chunk.is_none() || chunk == vector.chunk)
        };
        let right = match &*error {
            Error::WrongBase { tensor, chunk, rule, .. } => {
                let is_base = expected.0 == Some("wrong_base") || expected.1 == Some("tensor.base_digest");
                is_base && expected.1 == Some(rule.id()) && named(Some(tensor), *chunk)
            }
            Error::AlreadyApplied { tensor, chunk, rule } => {
                expected.0 == Some("already_applied") && expected.1 == Some(rule.id()) && named(Some(tensor), *chunk)
            }
            Error::Limit { .. } => expected.1 == Some("limit"),
            // The pair may be sound, so this crate reports the file, not a rule of the pair.
            Error::BadCheckpoint { .. } => expected.1 == Some("base.file"),
            // The error for a wrong base differs from the error for a wrong pair.
            Error::Invalid(invalid) if expected.0.is_none() => {
                expected.1 == Some(invalid.rule.id()) && named(invalid.at.tensor.as_ref(), invalid.at.chunk)
            }
            _ => false,
        };
        // A reader may report an error at an earlier step than the manifest, never at a later one.
        let steps = ["open_index", "open_blob", "decode", "apply"];
        let step = |name: &str| steps.iter().position(|s| *s == name);
        let in_time = vector.when.as_deref().is_some_and(|expected| step(when) <= step(expected));
        if !right || !in_time {
            wrong.push(format!("{}: expected {expected:?} at {:?}, got at {when}: {error}", vector.name, vector.when));
        }
    }
    assert!(wrong.is_empty(), "{} vectors:\n{}", wrong.len(), wrong.join("\n"));
}

/// Rule ids in backquotes in the spec.
fn ids_of_the_spec() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("spec");
    let text: String = ["tpde-format.md", "codecs.md"].iter().map(|f| std::fs::read_to_string(root.join(f)).unwrap()).collect();
    let groups: BTreeSet<_> = Rule::ALL.iter().filter_map(|rule| rule.id().split_once('.')).map(|(group, _)| group).collect();
    let is_id = |s: &&str| {
        s.split_once('.').is_some_and(|(group, name)| {
            groups.contains(group) && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
        })
    };
    text.split('`').filter(is_id).map(str::to_owned).collect()
}

/// The part of a text from the heading with this number to the next heading of the same level.
fn section<'a>(text: &'a str, number: &str) -> &'a str {
    let mark = if number.contains('.') { format!("\n### {number} ") } else { format!("\n## {number}. ") };
    let start = text.find(&mark).unwrap_or_else(|| panic!("no section {number}"));
    let rest = &text[start + mark.len()..];
    let end = [rest.find("\n## "), rest.find("\n### ").filter(|_| number.contains('.'))].into_iter().flatten().min();
    &rest[..end.unwrap_or(rest.len())]
}

#[test]
fn errors_name_the_section_that_states_their_rule() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("spec");
    let [format, codecs] = ["tpde-format.md", "codecs.md"].map(|file| std::fs::read_to_string(root.join(file)).unwrap());
    for rule in Rule::ALL {
        let stated = match rule.section().strip_prefix('C') {
            Some(number) => section(&codecs, number),
            None => section(&format, rule.section()),
        };
        assert!(stated.contains(&format!("`{rule}`")), "{rule} is not stated in section {}", rule.section());
    }
}

#[test]
fn rules_of_the_crate_are_those_of_the_spec_and_each_has_a_vector() {
    let crate_ids: BTreeSet<_> = Rule::ALL.iter().map(|rule| rule.id().to_owned()).collect();
    let spec_ids = ids_of_the_spec();
    assert_eq!(spec_ids, crate_ids);
    let with_vectors: BTreeSet<_> = vectors().into_iter().filter_map(|vector| vector.rule).collect();
    assert!(spec_ids.is_subset(&with_vectors), "no vector breaks {:?}", spec_ids.difference(&with_vectors));
}
