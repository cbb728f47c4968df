//! The versions of a store. A branch is listed once, and its manifests are read when they are needed.

use crate::error::{Error, Result};
use crate::manifest::{Content, MAX_MANIFEST, Reference, Shortcut, VOID, Version, check_size};
use crate::names::{self, BRANCHES, MAX_NUMBER, SHORTCUTS};
use crate::remote::{self, IN_FLIGHT, Remote, concurrently};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

/// A branch: the versions behind its last deletion, without those that were pruned. The others may be gone.
pub(crate) struct Branch {
    name: String,
    /// All manifests that there are, by number.
    manifests: BTreeMap<u64, Manifest>,
    /// Numbers of the versions that were pruned.
    pruned: BTreeSet<u64>,
    /// Numbers of the manifests that are marked as deletions.
    marked: BTreeSet<u64>,
    /// Number of the first version behind the last deletion.
    begin: u64,
    /// Number of manifests that the next read takes.
    ahead: usize,
}

/// A manifest, as far as it is known.
enum Manifest {
    Listed(remote::Entry),
    Read(Box<Version>),
    /// There is no version of this number, and never will be.
    Void,
    /// Not valid, for this reason.
    Damaged(String),
}

impl Manifest {
    fn version(&self) -> Option<&Version> {
        match self {
            Self::Listed(_) | Self::Void | Self::Damaged(_) => None,
            Self::Read(version) => Some(version),
        }
    }
}

impl Branch {
    /// A branch from a list of its objects, which may lack those of versions before `from`. Reads its newest manifest, and those that
    /// are marked as deletions.
    fn new(remote: &Remote, name: &str, listed: Vec<remote::Entry>, from: u64) -> Result<Self> {
        let (manifests, pruned, marked) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        let mut branch = Self { name: name.to_owned(), manifests, pruned, marked, begin: 0, ahead: 1 };
        let number = |found: Option<(&str, u64)>| found.filter(|found| found.0 == name).map(|(_, number)| number);
        for entry in listed {
            if let Some(number) = number(names::of_mark(&entry.name)) {
                branch.pruned.insert(number);
            } else if let Some(number) = number(names::of_deletion(&entry.name)) {
                branch.marked.insert(number);
            } else if let Some(number) = number(names::of_manifest(&entry.name)) {
                branch.manifests.insert(number, Manifest::Listed(entry));
            }
        }
        // A list may lack the newest manifests, so the numbers behind its last one are tried too.
        let mut next = branch.next_number().max(from);
        let get = |number: u64| remote.get(names::manifest(name, number), MAX_MANIFEST);
        let mut request = get(next);
        branch.read(remote, branch.manifests.keys().next_back().copied())?;
        while let Some(bytes) = request.wait()?.or_else(|error| branch.damaged(next, error))? {
            branch.insert(next, &bytes)?;
            if next == MAX_NUMBER {
                break;
            }
            next += 1;
            request = get(next);
        }
        // A mark is made before its deletion, which then may not happen.
        for number in branch.marked.clone().into_iter().rev() {
            if number < branch.begin {
                break;
            }
            branch.read(remote, [number])?;
        }
        Ok(branch)
    }

    fn insert(&mut self, number: u64, bytes: &[u8]) -> Result<()> {
        if bytes == VOID {
            self.manifests.insert(number, Manifest::Void);
            return Ok(());
        }
        let version = match Version::parse(bytes, &names::manifest(&self.name, number), &self.name, number) {
            Ok(version) => version,
            Err(error) => return self.damaged(number, error).map(drop),
        };
        if version.content == Content::Deleted {
            self.begin = self.begin.max(number + 1);
        }
        self.manifests.insert(number, Manifest::Read(Box::new(version)));
        Ok(())
    }

    /// Keeps the reason why a manifest is not valid. Other errors, also those of another schema, are returned.
    fn damaged(&mut self, number: u64, error: Error) -> Result<Option<Vec<u8>>> {
        let Error::Manifest { reason, .. } = error else { return Err(error) };
        self.manifests.insert(number, Manifest::Damaged(reason));
        Ok(None)
    }

    /// The manifests that are not valid, by number, with the reasons.
    pub fn all_damaged(&self) -> impl Iterator<Item = (u64, Error)> {
        self.manifests.iter().filter_map(|(number, manifest)| match manifest {
            Manifest::Damaged(reason) => Some((*number, Error::manifest(&names::manifest(&self.name, *number), reason))),
            _ => None,
        })
    }

    /// Those of [`Branch::all_damaged`] that can be named.
    pub fn live_damaged(&self) -> impl Iterator<Item = (u64, Error)> {
        self.all_damaged().filter(|(number, _)| self.is_live(*number))
    }

    /// # Errors
    /// That of the manifest if it is not valid.
    fn check(&self, number: u64) -> Result<()> {
        match self.manifests.get(&number) {
            Some(Manifest::Damaged(reason)) => Err(Error::manifest(&names::manifest(&self.name, number), reason)),
            _ => Ok(()),
        }
    }

    /// Reads those of the manifests of these numbers that are there and were not read.
    fn read(&mut self, remote: &Remote, numbers: impl IntoIterator<Item = u64>) -> Result<()> {
        let listed = |number| match self.manifests.get(&number) {
            Some(Manifest::Listed(entry)) => Some((number, entry.clone())),
            _ => None,
        };
        let (missing, large): (Vec<_>, Vec<_>) =
            numbers.into_iter().filter_map(listed).partition(|(_, entry)| entry.bytes <= MAX_MANIFEST);
        for (number, entry) in large {
            check_size(entry.bytes, &entry.name).or_else(|error| self.damaged(number, error).map(drop))?;
        }
        remote.each(
            missing,
            |(_, entry)| remote.get_listed(entry, MAX_MANIFEST),
            |(number, _), bytes| {
                match bytes {
                    Some(bytes) => self.insert(number, &bytes)?,
                    // One that was deleted since it was listed is no error.
                    None => _ = self.manifests.remove(&number),
                }
                Ok(())
            },
        )
    }

    /// The manifest of a number, if it is there. Searches go from a version to those before it, so these are read along: one, then
    /// two, four, and at most as many as there are requests at the same time.
    fn at(&mut self, remote: &Remote, number: u64) -> Result<Option<&Version>> {
        if let Some(Manifest::Listed(_)) = self.manifests.get(&number) {
            let listed = |(number, manifest): (&u64, &Manifest)| match manifest {
                Manifest::Listed(entry) if !self.pruned.contains(number) => Some((*number, entry.clone())),
                _ => None,
            };
            let before = self.manifests.range(self.begin.min(number)..number).rev().filter_map(listed).take(self.ahead - 1);
            let requests: Vec<_> = before.map(|(number, entry)| (number, remote.get_listed(&entry, MAX_MANIFEST))).collect();
            self.ahead = (2 * self.ahead).min(IN_FLIGHT);
            self.read(remote, [number])?;
            for (number, request) in requests {
                // What is wrong with one that is not needed does not matter.
                if let Ok(Some(bytes)) = request.wait()? {
                    let _ = self.insert(number, &bytes);
                }
            }
        }
        // Of one that was pruned because it is damaged, nothing is left.
        if !self.pruned.contains(&number) {
            self.check(number)?;
        }
        Ok(self.manifests.get(&number).and_then(Manifest::version))
    }

    /// The newest versions, at most `count`, in ascending order of number.
    fn newest(&mut self, remote: &Remote, count: usize) -> Result<Vec<Version>> {
        loop {
            let mut numbers: Vec<u64> = self.numbers().rev().take(count).collect();
            numbers.reverse();
            // Some may turn out to be no versions, or to be gone.
            self.read(remote, numbers.iter().copied())?;
            numbers.iter().try_for_each(|number| self.check(*number))?;
            let versions: Vec<_> = numbers.iter().filter_map(|number| self.live(*number)?.version().cloned()).collect();
            if versions.len() == numbers.len() {
                return Ok(versions);
            }
        }
    }

    /// Numbers of the versions that can be named, in ascending order.
    fn numbers(&self) -> impl DoubleEndedIterator<Item = u64> {
        let is_live = |found: &(&u64, &Manifest)| !matches!(found.1, Manifest::Void) && !self.pruned.contains(found.0);
        self.manifests.range(self.begin..).filter(is_live).map(|(number, _)| *number)
    }

    /// Number of the newest version; `None` if there is no such branch.
    pub fn head(&self) -> Option<u64> {
        self.numbers().next_back()
    }

    /// Whether the version of this number can be named.
    pub fn is_live(&self, number: u64) -> bool {
        self.live(number).is_some()
    }

    fn live(&self, number: u64) -> Option<&Manifest> {
        let is_live = number >= self.begin && !self.pruned.contains(&number);
        self.manifests.get(&number).filter(|manifest| is_live && !matches!(manifest, Manifest::Void))
    }

    /// Number of the manifest that is written next. Numbers of deleted versions are not used again; nor are those of versions that
    /// were pruned because they were damaged.
    pub fn next_number(&self) -> u64 {
        self.manifests.keys().next_back().max(self.pruned.last()).map_or(0, |last| last + 1)
    }

    /// The error for a version that cannot be named.
    fn no_version(&self, number: u64) -> Error {
        let named = |number: u64| format!("{}@{number}", self.name);
        let version = named(number);
        if number < self.begin || !self.pruned.contains(&number) {
            return Error::NoVersion { version };
        }
        let before = self.numbers().rfind(|kept| *kept < number);
        let after = self.numbers().find(|kept| *kept > number);
        Error::Pruned { version, kept: before.into_iter().chain(after).map(named).collect() }
    }

    /// Numbers of the versions that were pruned. Their manifests may be gone.
    pub fn pruned(&self) -> &BTreeSet<u64> {
        &self.pruned
    }

    /// Numbers of the manifests that are marked as deletions.
    pub fn marked(&self) -> impl Iterator<Item = &u64> {
        self.marked.iter()
    }

    /// Number of the last deletion.
    pub fn deletion(&self) -> Option<u64> {
        self.begin.checked_sub(1)
    }
}

/// A branch all of whose manifests were read.
#[derive(Clone, Copy)]
pub(crate) struct Whole<'a>(&'a Branch);

impl<'a> Whole<'a> {
    fn range(self, from: u64) -> impl DoubleEndedIterator<Item = &'a Version> {
        self.0.manifests.range(from..).filter_map(|(_, manifest)| manifest.version())
    }

    /// The versions, in ascending order of number.
    pub fn versions(self) -> impl DoubleEndedIterator<Item = &'a Version> {
        self.range(self.0.begin).filter(move |version| !self.0.pruned.contains(&version.number))
    }

    /// All manifests but deletions, in ascending order of number: also of versions that were pruned, or whose branch was deleted.
    pub fn all_versions(self) -> impl DoubleEndedIterator<Item = &'a Version> {
        self.range(0).filter(|version| version.content != Content::Deleted)
    }

    /// The versions behind the last deletion that were pruned and are still there, in ascending order of number.
    pub fn pruned_versions(self) -> impl Iterator<Item = &'a Version> {
        self.range(self.0.begin).filter(move |version| self.0.pruned.contains(&version.number))
    }

    /// The manifests before the last deletion, deletions among them.
    pub fn deleted(self) -> impl Iterator<Item = &'a Version> {
        self.range(0).take_while(move |version| version.number + 1 < self.0.begin)
    }
}

impl Deref for Whole<'_> {
    type Target = Branch;

    fn deref(&self) -> &Branch {
        self.0
    }
}

/// The versions that were read so far.
pub(crate) struct Catalog<'a> {
    remote: &'a Remote,
    branches: BTreeMap<String, Branch>,
    /// The shortcuts to versions, by branch and number.
    shortcuts: BTreeMap<(String, u64), Vec<Shortcut>>,
    /// The objects in which the shortcuts to versions of a branch are.
    listed: BTreeMap<String, Vec<remote::Entry>>,
    /// Shortcuts to these versions whose manifests are not valid.
    damaged: Vec<(String, Error)>,
}

impl<'a> Catalog<'a> {
    pub fn new(remote: &'a Remote) -> Self {
        let (branches, shortcuts, listed) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { remote, branches, shortcuts, listed, damaged: Vec::new() }
    }

    fn branch_mut(&mut self, name: &str) -> Result<&mut Branch> {
        match self.branches.entry(name.to_owned()) {
            Entry::Occupied(read) => Ok(read.into_mut()),
            Entry::Vacant(new) => {
                let listed = self.remote.list(&format!("{BRANCHES}/{name}"))?;
                Ok(new.insert(Branch::new(self.remote, name, listed, 0)?))
            }
        }
    }

    /// A branch. It has no versions if there is none of this name.
    pub fn branch(&mut self, name: &str) -> Result<&Branch> {
        Ok(self.branch_mut(name)?)
    }

    /// A branch, with all its manifests.
    ///
    /// # Errors
    /// That of the first manifest that is not valid, of those of versions that can be named.
    pub fn whole(&mut self, name: &str) -> Result<Whole<'_>> {
        let branch = self.sound_and_damaged(name)?;
        match branch.live_damaged().next() {
            Some((_, error)) => Err(error),
            None => Ok(branch),
        }
    }

    /// A branch, with all its manifests. [`Branch::all_damaged`] has those that are not valid.
    pub fn sound_and_damaged(&mut self, name: &str) -> Result<Whole<'_>> {
        let remote = self.remote;
        let branch = self.branch_mut(name)?;
        branch.read(remote, branch.manifests.keys().copied().collect::<Vec<_>>())?;
        Ok(Whole(branch))
    }

    /// The newest versions of a branch, at most `count`, in ascending order of number.
    pub fn newest(&mut self, name: &str, count: usize) -> Result<Vec<Version>> {
        let remote = self.remote;
        self.branch_mut(name)?.newest(remote, count)
    }

    /// The versions of a branch from number `from` on, in ascending order. Those before are not even listed.
    pub fn since(&self, name: &str, from: u64) -> Result<Vec<Version>> {
        let listed = self.remote.list_after(&format!("{BRANCHES}/{name}"), Some(&names::before(name, from)))?;
        Branch::new(self.remote, name, listed, from)?.newest(self.remote, usize::MAX)
    }

    /// Lists all branches, and returns their names.
    pub fn list(&mut self) -> Result<Vec<String>> {
        let mut listed: BTreeMap<String, Vec<remote::Entry>> = BTreeMap::new();
        for entry in self.remote.list(BRANCHES)? {
            let of = names::of_manifest(&entry.name).or(names::of_mark(&entry.name)).or(names::of_deletion(&entry.name));
            if let Some((name, _)) = of {
                listed.entry(name.to_owned()).or_default().push(entry);
            }
        }
        let names = listed.keys().cloned().collect();
        listed.retain(|name, _| !self.branches.contains_key(name));
        let read = |(name, listed): (String, _)| Ok((name.clone(), Branch::new(self.remote, &name, listed, 0)?));
        self.branches.extend(concurrently(listed, read)?);
        Ok(names)
    }

    /// All branches, with all their manifests.
    pub fn all(&mut self) -> Result<BTreeMap<&str, Whole<'_>>> {
        for name in self.list()? {
            self.whole(&name)?;
        }
        Ok(self.branches.iter().map(|(name, branch)| (name.as_str(), Whole(branch))).collect())
    }

    /// The newest versions of all branches, in ascending order of the names.
    pub fn heads(&mut self) -> Result<Vec<Version>> {
        let mut heads = Vec::new();
        for name in self.list()? {
            heads.extend(self.newest(&name, 1)?);
        }
        Ok(heads)
    }

    /// The newest version of a branch; `None` if there is no such branch.
    pub fn head(&mut self, name: &str) -> Result<Option<Version>> {
        Ok(self.newest(name, 1)?.pop())
    }

    /// The version that `text` names: `BRANCH@NUMBER`, or `BRANCH` for its head.
    pub fn find(&mut self, text: &str) -> Result<Version> {
        let (name, number) = names::version(text)?;
        let remote = self.remote;
        let no_version = || Error::NoVersion { version: text.to_owned() };
        let Some(number) = number else { return self.head(name)?.ok_or_else(no_version) };
        let branch = self.branch_mut(name)?;
        if branch.is_live(number) {
            branch.read(remote, [number])?;
            branch.check(number)?;
        }
        // Once more, because it may be gone since it was listed.
        if !branch.is_live(number) {
            return Err(branch.no_version(number));
        }
        branch.manifests.get(&number).and_then(Manifest::version).cloned().ok_or_else(no_version)
    }

    /// The version that `reference` means, if it is still there. It may be pruned, or its branch deleted.
    pub fn at(&mut self, reference: &Reference) -> Result<Option<Version>> {
        let remote = self.remote;
        let found = self.branch_mut(&reference.branch)?.at(remote, reference.number)?;
        Ok(found.filter(|version| version.id == reference.id).cloned())
    }

    /// All shortcuts, whether or not the versions are still there. Those whose manifests are not valid are left out:
    /// [`Catalog::damaged`] has them.
    pub fn all_shortcuts(&mut self) -> Result<Vec<Shortcut>> {
        let listed = self.remote.list(SHORTCUTS)?.into_iter();
        let listed: Vec<_> = listed.filter(|entry| names::of_shortcut(&entry.name).is_some()).collect();
        read_shortcuts(self.remote, &listed, &mut self.damaged)
    }

    /// Names of the manifests of all shortcuts.
    pub fn shortcut_names(&self) -> Result<Vec<String>> {
        Ok(self.remote.list(SHORTCUTS)?.into_iter().map(|entry| entry.name).collect())
    }

    /// The shortcuts to a version. Those whose manifests are not valid are left out: [`Catalog::damaged`] has them.
    pub fn shortcuts(&mut self, to: &Version) -> Result<&[Shortcut]> {
        let listed = match self.listed.entry(to.branch.clone()) {
            Entry::Occupied(listed) => listed.into_mut(),
            Entry::Vacant(new) => new.insert(self.remote.list(&format!("{SHORTCUTS}/{}", to.branch))?),
        };
        match self.shortcuts.entry((to.branch.clone(), to.number)) {
            Entry::Occupied(read) => Ok(read.into_mut()),
            Entry::Vacant(new) => {
                let below = names::shortcuts(&to.branch, to.number);
                let first = listed.partition_point(|entry| entry.name < below);
                let here = listed[first..].iter().take_while(|entry| entry.name.starts_with(&below));
                let here: Vec<_> = here.filter(|entry| names::of_shortcut(&entry.name).is_some()).cloned().collect();
                let mut shortcuts = read_shortcuts(self.remote, &here, &mut self.damaged)?;
                shortcuts.retain(|shortcut| shortcut.to.id == to.id);
                Ok(new.insert(shortcuts))
            }
        }
    }

    /// The manifests of shortcuts from one version to another that are not valid.
    pub fn damaged_shortcuts(&mut self, from: &Version, to: &Version) -> Result<Vec<String>> {
        self.shortcuts(to)?;
        let ends = Some(((to.branch.as_str(), to.number), (from.branch.as_str(), from.number)));
        let names = self.damaged.iter().map(|(object, _)| object);
        Ok(names.filter(|object| names::of_shortcut(object) == ends).cloned().collect())
    }

    /// The manifests of shortcuts that are not valid, among those that were read.
    pub fn damaged(&self) -> &[(String, Error)] {
        &self.damaged
    }
}

/// Reads manifests of shortcuts. Those that are not valid go to `damaged`.
fn read_shortcuts(remote: &Remote, listed: &[remote::Entry], damaged: &mut Vec<(String, Error)>) -> Result<Vec<Shortcut>> {
    let mut shortcuts = Vec::new();
    let (sound, large): (Vec<_>, Vec<_>) = listed.iter().partition(|entry| entry.bytes <= MAX_MANIFEST);
    let too_large = |entry: &remote::Entry| Some((entry.name.clone(), check_size(entry.bytes, &entry.name).err()?));
    damaged.extend(large.into_iter().filter_map(too_large));
    let start = |entry: &&remote::Entry| remote.get_listed(entry, MAX_MANIFEST);
    remote.each(sound, start, |entry, bytes| {
        // One that was deleted since it was listed is no error.
        let bytes = bytes.filter(|bytes| **bytes != *VOID);
        match bytes.map(|bytes| Shortcut::parse(&bytes, &entry.name)) {
            Some(Ok(shortcut)) => shortcuts.push(shortcut),
            Some(Err(error)) => damaged.push((entry.name.clone(), error)),
            None => {}
        }
        Ok(())
    })?;
    Ok(shortcuts)
}
