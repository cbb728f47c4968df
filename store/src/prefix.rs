//! State and functions that all calls of a store share: the prefix, and its rules.

use crate::catalog::Catalog;
use crate::digest::{self, Digest};
use crate::error::{Error, Result};
use crate::manifest::{Content, MAX_MANIFEST, StoreManifest, VERSION_SCHEMA, Version};
use crate::names::{self, STORE};
use crate::remote::Remote;
use crate::route::Have;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;
use tpde::{ValidatedIndex, Watch};

/// Size of the segments of new files, in bytes.
pub(crate) const SEGMENT_BYTES: usize = 32 << 20;

/// The watcher of a call that has none.
pub(crate) const NOBODY: &dyn Watch = &|_: u64| ();

/// An opened store.
pub(crate) struct Prefix {
    pub remote: Remote,
    pub rules: StoreManifest,
    /// The bytes of `store.json`, which has an id. They tell this store from another one at the same location.
    pub identity: Arc<[u8]>,
    pub segment_bytes: usize,
}

impl Prefix {
    /// Checks that the store that was opened is still there.
    ///
    /// # Errors
    /// [`Error::NotAStore`]; [`Error::Replaced`]; [`Error::Request`].
    pub fn check(&self) -> Result<()> {
        let location = || self.remote.location().to_owned();
        match self.remote.get(STORE.into(), MAX_MANIFEST).wait()?? {
            Some(found) if *found == *self.identity => Ok(()),
            Some(_) => Err(Error::Replaced { location: location() }),
            None => Err(Error::NotAStore { location: location() }),
        }
    }

    /// The versions of the store, which is checked first: [`Prefix::check`].
    pub fn catalog(&self) -> Result<Catalog<'_>> {
        self.check()?;
        Ok(Catalog::new(&self.remote))
    }

    /// Marks a version as pruned.
    pub fn mark_pruned(&self, branch: &str, number: u64) -> Result<()> {
        self.remote.create(&names::mark(branch, number), Vec::new()).map(drop)
    }
}

/// Splits versions and paths of checkpoints that the caller has, and finds the heads that are meant. A version that was pruned
/// since the caller has read it may still be of use.
pub(crate) fn resolve(catalog: &mut Catalog<'_>, have: &[(String, PathBuf)]) -> Result<Have> {
    let found = have.iter().map(|(version, path)| match catalog.find(version) {
        Ok(version) => Ok(((version.branch, version.number), path.clone())),
        Err(Error::Pruned { version, .. }) => {
            let (branch, number) = names::version(&version)?;
            Ok(((branch.to_owned(), number.unwrap_or_default()), path.clone()))
        }
        Err(error) => Err(error),
    });
    found.collect()
}

/// The members that every new version has.
pub(crate) fn new_version(branch: &str, number: u64, parent: Option<&Version>) -> Version {
    Version {
        schema: VERSION_SCHEMA.into(),
        branch: branch.to_owned(),
        number,
        id: new_id(),
        parent: parent.map(Version::reference),
        state: Digest([0; 32]),
        tensors: 0,
        tensor_bytes: 0,
        content: Content::Same,
        since_anchor: None,
        files: Vec::new(),
        created: now(),
        metadata: BTreeMap::new(),
    }
}

/// The digest of the tensors of the target of a pair.
pub(crate) fn state(index: &ValidatedIndex) -> Digest {
    let mut digest = [0; 32];
    digest.copy_from_slice(index.target_root());
    Digest(digest)
}

/// Checks that a pair gives the tensors of a version.
pub(crate) fn check_state(version: &Version, pair: &ValidatedIndex) -> Result<()> {
    let (expected, found) = (version.state, state(pair));
    if found != expected {
        return Err(Error::manifest(
            &version.name(),
            format_args!("expected a pair whose target has state {expected}, found {found}"),
        ));
    }
    Ok(())
}

pub(crate) fn json(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec_pretty(value).map_err(|e| Error::InvalidArgument(format!("the manifest cannot be written: {e}")))
}

pub(crate) fn new_id() -> String {
    format!("{:032x}", digest::random())
}

pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
