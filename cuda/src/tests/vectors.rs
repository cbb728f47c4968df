//! The published vectors on a device. Valid vectors give the bytes of the manifest. Invalid vectors are refused.

use super::super::{Device, DeviceIndex, Mode};
use super::laid::{apply, routes};
use serde_json::Value;
use std::collections::BTreeMap;
use tpde::{Apply, Checkpoint, InPlace, Limits, MemoryCheckpoint, Pair, Result, SafetensorsCheckpoint, ValidatedIndex};
use tpde_core::error::{Error, Rule};

// The library's tests of its public interface use it too.
#[allow(dead_code, reason = "not all of it is used here")]
#[path = "../../../tests/common/versions.rs"]
mod versions;

pub const MODES: [Mode; 3] = [Mode::OutOfPlace, Mode::InPlace(InPlace::AllChecked), Mode::InPlace(InPlace::ChunkByChunk)];

pub fn vectors(verdict: &str) -> Vec<Value> {
    let mut chosen = Vec::new();
    for folder in versions::names().iter().map(|version| versions::folder(version)) {
        let manifest = std::fs::read(folder.join("manifest.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        for vector in manifest["vectors"].as_array().unwrap().iter().filter(|vector| vector["verdict"] == verdict) {
            let mut vector = vector.clone();
            for key in ["index", "blob", "base"] {
                vector[key] = vector[key].as_str().map(|path| folder.join(path).to_str().unwrap().to_owned()).into();
            }
            chosen.push(vector);
        }
    }
    chosen
}

pub fn open(vector: &Value) -> Result<(Pair<Vec<u8>>, Option<SafetensorsCheckpoint>)> {
    let bytes = |key: &str| std::fs::read(vector[key].as_str().unwrap()).unwrap();
    let index = ValidatedIndex::parse(bytes("index"), &Limits::default())?;
    let pair = Pair::new(index, bytes("blob"))?;
    let base = vector["base"].as_str().map(SafetensorsCheckpoint::open).transpose()?;
    Ok((pair, base))
}

/// Vectors with two faults, of which an application on a device reports the other one: where the host expands payloads, it
/// compares their digests before the device checks any payload.
const REPORTED_OTHERWISE: [(&str, Rule); 2] =
    [("payload_digest_shifted", Rule::PayloadDigest), ("payload_crc32_before_root", Rule::HeaderPayloadRoot)];

/// Whether a vector is reported with the other one of its faults.
fn is_other_fault(vector: &Value, found: Option<Rule>) -> bool {
    REPORTED_OTHERWISE.iter().any(|(name, rule)| vector["name"] == *name && found == Some(*rule))
}

#[test]
#[ignore = "needs a CUDA device"]
fn valid_vectors_decode_to_the_bytes_of_the_manifest() {
    let device = super::device();
    let (mut runs, mut wrong) = (0, Vec::new());
    let vectors = vectors("valid");
    for (n, vector) in vectors.iter().enumerate() {
        let (pair, base) = open(vector).unwrap();
        let nothing = MemoryCheckpoint::default();
        let base: &dyn Checkpoint = base.as_ref().map_or(&nothing, |base| base);
        let index = DeviceIndex::upload(device, pair.index()).unwrap();
        for mode in MODES {
            for &route in routes(pair.index()) {
                let (outcome, outputs) = apply(device, &index, &pair, base, mode, route, n);
                runs += 1;
                let hash = |bytes: &[u8]| blake3::hash(bytes).to_hex().to_string();
                let name = |place| pair.index().tensor(place).name;
                // The hash of a tensor with parts is that of its parts, one after the other.
                let mut tensors = BTreeMap::new();
                // In place, parts with a derived base are left out, so a tensor with such parts is not complete.
                let is_complete = |place: usize| {
                    let mut parts = pair.index().entries(name(place));
                    mode == Mode::OutOfPlace || parts.all(|part| part.derived.is_none())
                };
                for (place, bytes) in outputs.into_iter().filter(|(place, _)| is_complete(*place)) {
                    tensors.entry(name(place)).or_insert_with(Vec::new).extend(bytes);
                }
                let other = tensors.iter().find(|(name, bytes)| vector["tensors"][name] != hash(bytes)).map(|(name, _)| name);
                if let (Err(_), _) | (_, Some(_)) = (&outcome, other) {
                    wrong.push(format!("{} {mode:?} {route:?}: {outcome:?}, differs: {other:?}", vector["name"]));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {runs} runs:\n{}", wrong.len(), wrong.join("\n"));
    eprintln!("{} valid vectors right in {runs} runs", vectors.len());
}

/// Applies a vector on the device, as the test of the vectors on the processor does.
fn read(device: &Device, vector: &Value) -> Result<()> {
    let (pair, base) = open(vector)?;
    let nothing = MemoryCheckpoint::default();
    let tensors: &dyn Checkpoint = base.as_ref().map_or(&nothing, |base| base);
    Apply::new(&pair).base(tensors).on(device).verify()?;
    if pair.index().files().len() > 0 {
        let out = tempfile::tempdir().unwrap();
        Apply::new(&pair).base(tensors).on(device).to_path(out.path().join("out"))?;
    }
    Ok(())
}

#[test]
#[ignore = "needs a CUDA device"]
fn invalid_vectors_are_refused_with_the_rule_that_they_break() {
    let device = super::device();
    let vectors = vectors("invalid");
    let (mut wrong, mut by_device) = (Vec::new(), 0);
    for vector in &vectors {
        let Err(error) = read(device, vector) else {
            wrong.push(format!("{}: accepted", vector["name"]));
            continue;
        };
        let expected = (vector["error"].as_str(), vector["rule"].as_str());
        let named = |tensor: Option<&String>, chunk: Option<u32>| {
            (vector["tensor"].is_null() || vector["tensor"].as_str() == tensor.map(String::as_str))
                && (vector["chunk"].is_null() || vector["chunk"].as_u64() == chunk.map(u64::from))
        };
        let right = match &error {
            Error::WrongBase { tensor, chunk, rule, .. } => {
                let is_base = expected.0 == Some("wrong_base") || expected.1 == Some("tensor.base_digest");
                is_base && expected.1 == Some(rule.id()) && named(Some(tensor), *chunk)
            }
            Error::AlreadyApplied { tensor, chunk, rule } => {
                expected.0 == Some("already_applied") && expected.1 == Some(rule.id()) && named(Some(tensor), *chunk)
            }
            Error::Limit { .. } => expected.1 == Some("limit"),
            Error::BadCheckpoint { .. } => expected.1 == Some("base.file"),
            Error::Invalid(invalid) => {
                by_device += usize::from(invalid.found.ends_with("on the device"));
                expected.1 == Some(invalid.rule.id()) && named(invalid.at.tensor.as_ref(), invalid.at.chunk)
            }
            _ => false,
        };
        if !right && !is_other_fault(vector, error.rule()) {
            wrong.push(format!("{}: expected {expected:?}, got {error}", vector["name"]));
        }
    }
    assert!(wrong.is_empty(), "{} vectors:\n{}", wrong.len(), wrong.join("\n"));
    assert!(by_device >= 50, "{by_device}");
    eprintln!("{} invalid vectors refused, {by_device} of them by the device", vectors.len());
}

/// In place, invalid payloads leave everything unchanged; chunk by chunk, the error lists the written chunks.
#[test]
#[ignore = "needs a CUDA device"]
fn invalid_vectors_in_place() {
    let device = super::device();
    let (mut refused, mut wrong) = (0, Vec::new());
    for vector in vectors("invalid") {
        let Ok((pair, base)) = open(&vector) else { continue };
        let bad = vector["rule"].as_str().is_some_and(|rule| rule.starts_with("payload.") || rule == "chunk.target_sum");
        if !bad {
            continue;
        }
        let nothing = MemoryCheckpoint::default();
        let base: &dyn Checkpoint = base.as_ref().map_or(&nothing, |base| base);
        let index = DeviceIndex::upload(device, pair.index()).unwrap();
        for mode in MODES {
            for (skew, &route) in routes(pair.index()).iter().enumerate() {
                let (outcome, _) = apply(device, &index, &pair, base, mode, route, skew);
                let found = outcome.err().and_then(|e| e.rule());
                if found.map(Rule::id) != vector["rule"].as_str() && !is_other_fault(&vector, found) {
                    wrong.push(format!("{} {mode:?} {route:?}: {found:?}", vector["name"]));
                }
                refused += 1;
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {refused}:\n{}", wrong.len(), wrong.join("\n"));
    assert!(refused > 200, "{refused}");
    eprintln!("{refused} applications of bad payloads refused");
}
