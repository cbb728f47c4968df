//! The versions of a store, read branch by branch.

use crate::error::{Error, Result};
use crate::manifest::{Content, MAX_MANIFEST, Reference, Shortcut, Version};
use crate::names::{self, BRANCHES, MAX_NUMBER, SHORTCUTS};
use crate::remote::Remote;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// A branch: the versions behind its last deletion, without those that were pruned. The others may be gone.
#[derive(Default)]
pub(crate) struct Branch {
    /// All manifests that there are, by number.
    manifests: BTreeMap<u64, Version>,
    /// Numbers of the versions that were pruned.
    pruned: BTreeSet<u64>,
    /// Number of the first version behind the last deletion.
    begin: u64,
}

impl Branch {
    fn new(manifests: BTreeMap<u64, Version>, pruned: BTreeSet<u64>) -> Self {
        let deletion = manifests.values().rfind(|version| version.content == Content::Deleted);
        Self { begin: deletion.map_or(0, |deletion| deletion.number + 1), manifests, pruned }
    }

    /// The versions, in ascending order of number.
    pub fn versions(&self) -> impl DoubleEndedIterator<Item = &Version> {
        self.manifests.range(self.begin..).map(|(_, version)| version).filter(|version| !self.pruned.contains(&version.number))
    }

    /// All manifests but deletions, in ascending order of number: also of versions that were pruned, or whose branch was deleted.
    pub fn all_versions(&self) -> impl DoubleEndedIterator<Item = &Version> {
        self.manifests.values().filter(|version| version.content != Content::Deleted)
    }

    /// Whether the version of this number can be named.
    pub fn is_live(&self, number: u64) -> bool {
        number >= self.begin && self.manifests.contains_key(&number) && !self.pruned.contains(&number)
    }

    /// Numbers of the versions that were pruned. Their manifests may be gone.
    pub fn pruned(&self) -> &BTreeSet<u64> {
        &self.pruned
    }

    /// The versions behind the last deletion that were pruned and are still there, in ascending order of number.
    pub fn pruned_versions(&self) -> impl Iterator<Item = &Version> {
        self.manifests.range(self.begin..).map(|(_, version)| version).filter(|version| self.pruned.contains(&version.number))
    }

    /// The error for a version that cannot be named.
    fn no_version(&self, branch: &str, number: u64) -> Error {
        let version = format!("{branch}@{number}");
        if number < self.begin || !self.pruned.contains(&number) {
            return Error::NoVersion { version };
        }
        let before = self.versions().rfind(|kept| kept.number < number);
        let after = self.versions().find(|kept| kept.number > number);
        Error::Pruned { version, kept: before.into_iter().chain(after).map(Version::name).collect() }
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

    /// The manifests before the last deletion, deletions among them.
    pub fn deleted(&self) -> impl Iterator<Item = &Version> {
        self.manifests.range(..self.begin.saturating_sub(1)).map(|(_, version)| version)
    }
}

/// The versions that were read so far.
pub(crate) struct Catalog<'a> {
    remote: &'a Remote,
    branches: BTreeMap<String, Branch>,
    /// The shortcuts to versions, by branch and number.
    shortcuts: BTreeMap<(String, u64), Vec<Shortcut>>,
    /// Names of the objects in which the shortcuts to versions of a branch are.
    listed: BTreeMap<String, Vec<String>>,
}

impl<'a> Catalog<'a> {
    pub fn new(remote: &'a Remote) -> Self {
        Self { remote, branches: BTreeMap::new(), shortcuts: BTreeMap::new(), listed: BTreeMap::new() }
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

    /// All shortcuts, whether or not the versions are still there.
    pub fn all_shortcuts(&mut self) -> Result<Vec<Shortcut>> {
        let listed = self.remote.list(SHORTCUTS)?;
        let names = listed.into_iter().map(|entry| entry.name).filter(|name| names::of_shortcut(name).is_some());
        let mut shortcuts = Vec::new();
        let start = |name: &String| self.remote.get(name.clone(), None, MAX_MANIFEST);
        Remote::each(names, start, |name, bytes| {
            // One that was deleted since it was listed is no error.
            shortcuts.extend(bytes.map(|bytes| Shortcut::parse(&bytes, &name)).transpose()?);
            Ok(())
        })?;
        Ok(shortcuts)
    }

    /// The version that `text` names: `BRANCH@NUMBER`, or `BRANCH` for its head.
    pub fn find(&mut self, text: &str) -> Result<Version> {
        let (name, number) = names::version(text)?;
        let branch = self.branch(name)?;
        let Some(number) = number else {
            return branch.head().cloned().ok_or_else(|| Error::NoVersion { version: text.to_owned() });
        };
        let found = branch.manifests.get(&number).filter(|_| branch.is_live(number));
        found.cloned().ok_or_else(|| branch.no_version(name, number))
    }

    /// The version that `reference` means, if it is still there. It may be pruned, or its branch deleted.
    pub fn at(&mut self, reference: &Reference) -> Result<Option<Version>> {
        let manifests = &self.branch(&reference.branch)?.manifests;
        Ok(manifests.get(&reference.number).filter(|version| version.id == reference.id).cloned())
    }

    /// Whether a version can be named.
    pub fn is_live(&mut self, reference: &Reference) -> Result<bool> {
        let branch = self.branch(&reference.branch)?;
        Ok(branch.is_live(reference.number)
            && branch.manifests.get(&reference.number).is_some_and(|version| version.id == reference.id))
    }

    /// The shortcuts to a version.
    pub fn shortcuts(&mut self, to: &Version) -> Result<&[Shortcut]> {
        let listed = match self.listed.entry(to.branch.clone()) {
            Entry::Occupied(listed) => listed.into_mut(),
            Entry::Vacant(new) => {
                let listed = self.remote.list(&format!("{SHORTCUTS}/{}", to.branch))?;
                new.insert(listed.into_iter().map(|entry| entry.name).collect())
            }
        };
        match self.shortcuts.entry((to.branch.clone(), to.number)) {
            Entry::Occupied(read) => Ok(read.into_mut()),
            Entry::Vacant(new) => {
                let below = names::shortcuts(&to.branch, to.number);
                let names = listed.iter().filter(|name| name.starts_with(&below) && names::of_shortcut(name).is_some());
                let mut shortcuts = Vec::new();
                let start = |name: &&String| self.remote.get((*name).clone(), None, MAX_MANIFEST);
                Remote::each(names, start, |name, bytes| {
                    // One that was deleted since it was listed is no error.
                    if let Some(bytes) = bytes {
                        let shortcut = Shortcut::parse(&bytes, name)?;
                        shortcuts.extend((shortcut.to.id == to.id).then_some(shortcut));
                    }
                    Ok(())
                })?;
                Ok(new.insert(shortcuts))
            }
        }
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
    let is_here = |found: &(&str, u64)| found.0 == name;
    let numbers = listed.iter().filter_map(|entry| names::of_manifest(&entry.name)).filter(is_here);
    let pruned = listed.iter().filter_map(|entry| names::of_mark(&entry.name)).filter(is_here);
    let pruned = pruned.map(|(_, number)| number).collect();
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
    Ok(Branch::new(versions, pruned))
}
