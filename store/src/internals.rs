//! Parts of the crate for its own tests and fuzz targets. No promises are made about them.

use crate::error::Result;
use crate::manifest::{StoreManifest, Version};
use crate::names::STORE;
use crate::prefix::Prefix;
use crate::remote::Remote;
use crate::store::{Store, StoreOptions};
use object_store::ObjectStore;
use object_store::path::Path;
use std::sync::Arc;

/// [`Store::init`] in an object store of the caller, with segments of another size.
pub fn init(store: Arc<dyn ObjectStore>, options: &StoreOptions, segment_bytes: usize) -> Result<Store> {
    let made = Store::init_at(Remote::new(store, Path::from("a/prefix"), "memory")?, options)?;
    Ok(Store(Prefix { segment_bytes, ..made.0 }))
}

/// [`Store::open`] in an object store of the caller, with segments of another size.
pub fn open(store: Arc<dyn ObjectStore>, segment_bytes: usize) -> Result<Store> {
    let opened = Store::open_at(Remote::new(store, Path::from("a/prefix"), "memory")?)?;
    Ok(Store(Prefix { segment_bytes, ..opened.0 }))
}

/// [`init`], for simulations: requests run on the caller's thread, one after the other.
pub fn init_sequential(store: Arc<dyn ObjectStore>, options: &StoreOptions, segment_bytes: usize) -> Result<Store> {
    let made = Store::init_at(Remote::with(store, Path::from("a/prefix"), "memory", true)?, options)?;
    Ok(Store(Prefix { segment_bytes, ..made.0 }))
}

/// [`open`], for simulations: requests run on the caller's thread, one after the other.
pub fn open_sequential(store: Arc<dyn ObjectStore>, segment_bytes: usize) -> Result<Store> {
    let opened = Store::open_at(Remote::with(store, Path::from("a/prefix"), "memory", true)?)?;
    Ok(Store(Prefix { segment_bytes, ..opened.0 }))
}

/// Makes all ids that this thread draws from now on a function of `seed`.
pub fn seed_ids(seed: u64) {
    crate::digest::seed_ids(seed);
}

/// Reads a manifest of version 3 of branch `main`. What is read, is written and read again in the same way.
pub fn parse_manifests(bytes: &[u8]) {
    let _ = StoreManifest::parse(bytes, STORE);
    if let Ok(version) = Version::parse(bytes, "branches/main/0000000003.json", "main", 3) {
        let written = serde_json::to_vec(&version).expect("a version can be written");
        assert_eq!(Version::parse(&written, "the same", "main", 3).expect("what was written can be read"), version);
    }
}
