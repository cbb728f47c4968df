//! The test vectors, as listed in their manifests.

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

/// Folders of vectors, each with a manifest, and the lists of their published files.
pub const VERSIONS: [(&str, &str); 3] = [("v1", "published.txt"), ("v1.2", "published-1.2.txt"), ("v1.3", "published-1.3.txt")];

pub fn folder() -> PathBuf {
    super::root().join("testdata")
}

pub fn read(path: &Path) -> Vec<u8> {
    std::fs::read(folder().join(path)).unwrap()
}

/// The vectors of all versions.
pub fn vectors() -> Vec<Vector> {
    VERSIONS.iter().flat_map(|(version, _)| vectors_of(version)).collect()
}

/// The vectors in the folder of a version.
pub fn vectors_of(version: &str) -> Vec<Vector> {
    let folder = Path::new(version);
    let mut vectors = serde_json::from_slice::<Manifest>(&read(&folder.join("manifest.json"))).unwrap().vectors;
    for vector in &mut vectors {
        vector.index = folder.join(&vector.index);
        vector.blob = folder.join(&vector.blob);
        vector.base = vector.base.as_ref().map(|base| folder.join(base));
    }
    vectors
}
