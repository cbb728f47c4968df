//! The published test vectors, as listed in their manifest.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Deserialize)]
struct Manifest {
    vectors: Vec<Vector>,
}

/// The manifest's entry of a vector. Paths are relative to [`folder`].
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

pub fn folder() -> PathBuf {
    super::root().join("testdata/v1")
}

pub fn read(path: &Path) -> Vec<u8> {
    std::fs::read(folder().join(path)).unwrap()
}

pub fn vectors() -> Vec<Vector> {
    serde_json::from_slice::<Manifest>(&read(Path::new("manifest.json"))).unwrap().vectors
}
