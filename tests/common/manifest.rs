//! The test vectors, as listed in their manifests.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Deserialize)]
struct Manifest {
    vectors: Vec<Vector>,
}

/// The manifest's entry of a vector. Functions of this module give absolute paths.
#[derive(Deserialize)]
pub struct Vector {
    pub name: String,
    pub verdict: String,
    pub index: PathBuf,
    pub blob: PathBuf,
    pub base: Option<PathBuf>,
    #[serde(default)]
    pub tensors: BTreeMap<String, String>,
    #[serde(default)]
    pub files: BTreeMap<String, String>,
    pub rule: Option<String>,
    pub when: Option<String>,
    pub error: Option<String>,
    pub tensor: Option<String>,
    pub chunk: Option<u32>,
}

pub fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The vectors of all versions.
pub fn vectors() -> Vec<Vector> {
    super::versions::names().iter().flat_map(|version| vectors_of(version)).collect()
}

/// The vectors of a version.
pub fn vectors_of(version: &str) -> Vec<Vector> {
    let folder = super::versions::folder(version);
    let mut vectors = serde_json::from_slice::<Manifest>(&read(&folder.join("manifest.json"))).unwrap().vectors;
    for vector in &mut vectors {
        vector.index = folder.join(&vector.index);
        vector.blob = folder.join(&vector.blob);
        vector.base = vector.base.as_ref().map(|base| folder.join(base));
    }
    vectors
}
