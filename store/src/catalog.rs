//! The versions of a store, read branch by branch, and the pairs that lead to one.

use crate::error::{Error, Result};
use crate::manifest::{Content, MAX_MANIFEST, Reference, StoredPair, Version};
use crate::names::{self, BRANCHES, MAX_NUMBER};
use crate::remote::Remote;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::PathBuf;

/// A branch: the versions behind its last deletion. What is before was deleted, and may be gone.
#[derive(Default)]
pub(crate) struct Branch {
    /// All manifests that there are, by number.
    manifests: BTreeMap<u64, Version>,
    /// Number of the first version behind the last deletion.
    begin: u64,
}

impl Branch {
    fn new(manifests: BTreeMap<u64, Version>) -> Self {
        let deletion = manifests.values().rfind(|version| version.content == Content::Deleted);
        Self { begin: deletion.map_or(0, |deletion| deletion.number + 1), manifests }
    }

    /// The versions, in ascending order of number.
    pub fn versions(&self) -> impl DoubleEndedIterator<Item = &Version> {
        self.manifests.range(self.begin..).map(|(_, version)| version)
    }

    /// The newest version; `None` if there is no such branch.
    pub fn head(&self) -> Option<&Version> {
        self.versions().next_back()
    }

    /// Number of the manifest that is written next. Numbers of deleted versions are not used again.
    pub fn next_number(&self) -> u64 {
        self.manifests.keys().next_back().map_or(0, |last| last + 1)
    }

    /// Number of the last deletion.
    pub fn deletion(&self) -> Option<u64> {
        self.begin.checked_sub(1)
    }

    /// The manifests before the last deletion.
    pub fn deleted(&self) -> impl Iterator<Item = &Version> {
        self.manifests.range(..self.begin.saturating_sub(1)).map(|(_, version)| version)
    }
}

/// The versions that were read so far.
pub(crate) struct Catalog<'a> {
    remote: &'a Remote,
    branches: BTreeMap<String, Branch>,
}

/// How a version is rebuilt: a checkpoint that the caller has, or nothing, and pairs that are applied one after the other.
#[derive(Debug, Default)]
pub(crate) struct Route {
    pub have: Option<PathBuf>,
    pub pairs: Vec<StoredPair>,
    /// Size of the anchor in bytes: of its pair, or of the tensors of a checkpoint that is not stored.
    pub anchor_bytes: u64,
    /// The anchor is the first pair.
    pub is_whole: bool,
}

/// Checkpoints that the caller has: versions and paths.
pub(crate) type Have = BTreeMap<(String, u64), PathBuf>;

impl<'a> Catalog<'a> {
    pub fn new(remote: &'a Remote) -> Self {
        Self { remote, branches: BTreeMap::new() }
    }

    /// A branch. It has no versions if there is none of this name.
    pub fn branch(&mut self, name: &str) -> Result<&Branch> {
        match self.branches.entry(name.to_owned()) {
            Entry::Occupied(read) => Ok(read.into_mut()),
            Entry::Vacant(new) => Ok(new.insert(read_branch(self.remote, name)?)),
        }
    }

    /// All branches.
    pub fn all(&mut self) -> Result<&BTreeMap<String, Branch>> {
        let listed = self.remote.list(BRANCHES)?;
        let names: BTreeSet<_> = listed.iter().filter_map(|entry| names::of_manifest(&entry.name)).map(|(name, _)| name).collect();
        for name in names {
            self.branch(name)?;
        }
        Ok(&self.branches)
    }

    /// The version that `text` names: `BRANCH@NUMBER`, or `BRANCH` for its head.
    pub fn find(&mut self, text: &str) -> Result<Version> {
        let (branch, number) = names::version(text)?;
        let branch = self.branch(branch)?;
        let found = number.map_or_else(|| branch.head(), |number| branch.versions().find(|version| version.number == number));
        found.cloned().ok_or_else(|| Error::NoVersion { version: text.to_owned() })
    }

    /// The version before, if it still is the one that `reference` means. Its branch may be deleted.
    fn parent(&mut self, reference: &Reference) -> Result<Option<Version>> {
        let manifests = &self.branch(&reference.branch)?.manifests;
        Ok(manifests.get(&reference.number).filter(|version| version.id == reference.id).cloned())
    }

    /// The versions of all branches, and their ancestors as far as an anchor: all that is needed to rebuild them.
    pub fn needed(&mut self) -> Result<HashSet<Reference>> {
        let versions: Vec<Version> = self.all()?.values().flat_map(Branch::versions).cloned().collect();
        let mut needed = HashSet::new();
        for version in versions {
            let mut next = Some(version);
            while let Some(at) = next
                && needed.insert(at.reference())
            {
                next = match (&at.content, &at.parent) {
                    (Content::Difference(_) | Content::Same, Some(parent)) => self.parent(parent)?,
                    _ => None,
                };
            }
        }
        Ok(needed)
    }

    /// The pairs that lead to a version. The way back ends at a checkpoint that the caller has, or at an anchor.
    pub fn route(&mut self, version: &Version, have: &Have) -> Result<Route> {
        let mut route = Route::default();
        let mut seen = BTreeSet::new();
        let mut at = version.clone();
        let unreachable = |reason| Error::Unreachable { version: version.name(), reason };
        loop {
            if !seen.insert(at.reference()) {
                return Err(unreachable(format!("{} is its own ancestor", at.name())));
            }
            if let Some(path) = have.get(&(at.branch.clone(), at.number)) {
                route.have = Some(path.clone());
                route.anchor_bytes = at.tensor_bytes;
                break;
            }
            match &at.content {
                Content::Whole(pair) => {
                    route.pairs.push(pair.clone());
                    (route.anchor_bytes, route.is_whole) = (pair.bytes(), true);
                    break;
                }
                Content::External { hint } => return Err(Error::External { version: at.name(), hint: hint.clone() }),
                Content::Difference(pair) => route.pairs.push(pair.clone()),
                Content::Same => {}
                Content::Deleted => return Err(unreachable(format!("{} is a deletion", at.name()))),
            }
            let Some(reference) = at.parent.clone() else {
                return Err(unreachable(format!("{} has no parent", at.name())));
            };
            at = self
                .parent(&reference)?
                .ok_or_else(|| unreachable(format!("its ancestor {}@{} was deleted", reference.branch, reference.number)))?;
        }
        route.pairs.reverse();
        Ok(route)
    }

    /// Number of versions, and size of their pairs in bytes, since the last anchor; and the size of that anchor.
    pub fn since_anchor(&mut self, version: &Version) -> Result<(u64, u64, u64)> {
        let (mut count, mut bytes) = (0, 0u64);
        let mut seen = BTreeSet::new();
        let mut at = version.clone();
        while seen.insert(at.reference()) {
            match &at.content {
                Content::Whole(pair) => return Ok((count, bytes, pair.bytes())),
                Content::External { .. } => return Ok((count, bytes, at.tensor_bytes)),
                Content::Difference(pair) => {
                    count += 1;
                    bytes = bytes.saturating_add(pair.bytes());
                }
                Content::Same => {}
                Content::Deleted => break,
            }
            let Some(parent) = at.parent.clone() else { break };
            let Some(parent) = self.parent(&parent)? else { break };
            at = parent;
        }
        Ok((count, bytes, version.tensor_bytes))
    }
}

/// Reads one manifest; `None` if it does not exist.
pub(crate) fn read_version(remote: &Remote, branch: &str, number: u64) -> Result<Option<Version>> {
    let object = names::manifest(branch, number);
    let bytes = remote.get(object.clone(), None, MAX_MANIFEST).wait()??;
    bytes.map(|bytes| Version::parse(&bytes, &object, branch, number)).transpose()
}

/// Reads all manifests of a branch. A list may lack the newest ones, so the numbers behind its last one are tried too.
fn read_branch(remote: &Remote, name: &str) -> Result<Branch> {
    let listed = remote.list(&format!("{BRANCHES}/{name}"))?;
    let numbers = listed.iter().filter_map(|entry| names::of_manifest(&entry.name)).filter(|(branch, _)| *branch == name);
    let mut versions = BTreeMap::new();
    let start = |number: &u64| remote.get(names::manifest(name, *number), None, MAX_MANIFEST);
    Remote::each(numbers.map(|(_, number)| number), start, |number, bytes| {
        // One that was deleted since it was listed is no error.
        if let Some(bytes) = bytes {
            versions.insert(number, Version::parse(&bytes, &names::manifest(name, number), name, number)?);
        }
        Ok(())
    })?;
    let mut next = versions.keys().next_back().map_or(0, |last| last + 1);
    while next <= MAX_NUMBER
        && let Some(version) = read_version(remote, name, next)?
    {
        versions.insert(next, version);
        next += 1;
    }
    Ok(Branch::new(versions))
}
