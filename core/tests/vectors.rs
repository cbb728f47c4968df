//! The test vectors: each index and blob is opened, and whole tensors with an equal base or none are decoded.

use serde_json::Value;
use std::fs;
use std::path::Path;
use tpde_core::blob;
use tpde_core::error::{Error, Result};
use tpde_core::format::BaseKind;
use tpde_core::index::{Tensor, ValidatedIndex};
use tpde_core::limits::Limits;

#[allow(dead_code, reason = "not all of it is used here")]
#[path = "../../tests/common/versions.rs"]
mod versions;

/// The bytes of a tensor of a safetensors file.
fn tensor_of(file: &Path, name: &str) -> Option<Vec<u8>> {
    let bytes = fs::read(file).ok()?;
    let end = 8 + u64::from_le_bytes(*bytes.first_chunk()?) as usize;
    let header: Value = serde_json::from_slice(bytes.get(8..end)?).ok()?;
    let at = |i: usize| header[name]["data_offsets"][i].as_u64().map(|offset| end + offset as usize);
    bytes.get(at(0)?..at(1)?).map(<[u8]>::to_vec)
}

/// The base lanes of a tensor; `None` if this test cannot form them.
fn base_of(tensor: &Tensor<'_>, base: &Value, folder: &Path) -> Option<Vec<u8>> {
    match tensor.base_kind {
        _ if tensor.part.is_some() => None,
        BaseKind::None => Some(vec![0; tensor.bytes() as usize]),
        BaseKind::Same => {
            tensor_of(&folder.join(base.as_str()?), tensor.base_name).filter(|lanes| lanes.len() as u64 == tensor.bytes())
        }
        _ => None,
    }
}

fn open(index: Vec<u8>, blob: &[u8]) -> Result<ValidatedIndex> {
    let index = ValidatedIndex::parse(index, &Limits::default())?;
    blob::check_header(&index, &blob[..blob.len().min(64)], blob.len() as u64)?;
    Ok(index)
}

/// Rules that decoding checks, or their beginnings.
const DECODED: [&str; 3] = ["payload.", "chunk.", "tensor.target_digest"];

#[derive(Default)]
struct Counts {
    opened: usize,
    rebuilt: usize,
    refused: usize,
    damaged: usize,
}

fn compare(vector: &Value, folder: &Path, counts: &mut Counts) {
    let name = vector["name"].as_str().unwrap();
    let [index, blob] = ["index", "blob"].map(|key| fs::read(folder.join(vector[key].as_str().unwrap())).unwrap());
    let is_valid = vector["verdict"] == "valid";
    let index = match open(index, &blob) {
        Ok(index) => index,
        Err(error) => {
            let rule = error.rule().map_or("limit", |rule| rule.id());
            assert!(!is_valid && (error.rule().is_some() || matches!(error, Error::Limit { .. })), "{name}: {error}");
            assert_eq!(vector["rule"], rule, "{name}: {error}");
            counts.refused += 1;
            return;
        }
    };
    assert!(!["open_index", "open_blob"].contains(&vector["when"].as_str().unwrap_or_default()), "{name} was opened");
    counts.opened += 1;
    for tensor in index.tensors() {
        let Some(mut lanes) = base_of(&tensor, &vector["base"], folder) else { continue };
        let decoded = blob::decode_tensor(&index, &tensor, &blob, &mut lanes);
        if is_valid {
            decoded.unwrap_or_else(|error| panic!("{name}, {}: {error}", tensor.name));
            let digest = blake3::hash(&lanes).to_hex().to_string();
            assert_eq!(vector["tensors"][tensor.name], digest, "{name}, {}", tensor.name);
            counts.rebuilt += 1;
        } else if vector["tensor"] == tensor.name && DECODED.iter().any(|rule| vector["rule"].as_str().unwrap().starts_with(rule)) {
            let rule = decoded.expect_err(name).rule().map(|rule| rule.id());
            assert_eq!(vector["rule"].as_str(), rule, "{name}, {}", tensor.name);
            counts.damaged += 1;
        }
    }
}

#[test]
fn vectors_open_and_decode_as_their_manifests_say() {
    let mut counts = Counts::default();
    for folder in versions::names().iter().map(|name| versions::folder(name)) {
        let manifest: Value = serde_json::from_slice(&fs::read(folder.join("manifest.json")).unwrap()).unwrap();
        for vector in manifest["vectors"].as_array().unwrap() {
            compare(vector, &folder, &mut counts);
        }
    }
    let Counts { opened, rebuilt, refused, damaged } = counts;
    assert!(opened > 600 && rebuilt > 600 && refused > 500 && damaged > 100, "{opened}, {rebuilt}, {refused}, {damaged}");
}
