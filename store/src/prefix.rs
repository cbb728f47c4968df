//! State and functions that all calls of a store share: the prefix, its rules, and the creation of manifests.

use crate::catalog::Catalog;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::manifest::{Content, Shortcut, StoreManifest, VERSION_SCHEMA, Version};
use crate::names::{self, MAX_NUMBER};
use crate::remote::Remote;
use crate::route::Have;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Instant, SystemTime};
use tpde::{ValidatedIndex, Watch};

/// Size of the segments of new files, in bytes.
pub(crate) const SEGMENT_BYTES: usize = 32 << 20;

/// The watcher of a call that has none.
pub(crate) const NOBODY: &dyn Watch = &|_: u64| ();

/// An opened store.
pub(crate) struct Prefix {
    pub remote: Remote,
    pub rules: StoreManifest,
    pub segment_bytes: usize,
}

impl Prefix {
    /// Creates the manifest of a version by a call that began to read the store at `begin`. In half of the grace, nothing that it
    /// has read or uploaded is collected.
    pub fn publish(&self, version: &Version, begin: Instant) -> Result<()> {
        self.check_time(begin)?;
        if version.number > MAX_NUMBER {
            return Err(Error::InvalidArgument(format!("a branch has at most {MAX_NUMBER} versions")));
        }
        let object = names::manifest(&version.branch, version.number);
        let bytes = json(version)?;
        // This crate must be able to read what it writes.
        Version::parse(&bytes, &object, &version.branch, version.number)?;
        match self.remote.create(&object, bytes)? {
            true => Ok(()),
            false => Err(Error::Conflict { version: version.name() }),
        }
    }

    /// Creates the manifest of a shortcut, as [`Prefix::publish`]. If there is one already, that one is as good.
    pub fn publish_shortcut(&self, shortcut: &Shortcut, begin: Instant) -> Result<()> {
        self.check_time(begin)?;
        let object = shortcut.object();
        let bytes = json(shortcut)?;
        Shortcut::parse(&bytes, &object)?;
        self.remote.create(&object, bytes)?;
        Ok(())
    }

    /// Marks a version as pruned, in a call that began to read the store at `begin`.
    pub fn mark_pruned(&self, version: &Version, begin: Instant) -> Result<()> {
        self.check_time(begin)?;
        self.remote.create(&names::mark(&version.branch, version.number), Vec::new())?;
        Ok(())
    }

    fn check_time(&self, begin: Instant) -> Result<()> {
        let (seconds, grace) = (begin.elapsed().as_secs_f64(), self.rules.grace);
        if seconds > grace as f64 / 2.0 {
            return Err(Error::TooSlow { seconds: seconds as u64, grace });
        }
        Ok(())
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
    format!("{:032x}", rand::random::<u128>())
}

pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
