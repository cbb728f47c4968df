//! `gc`: removes what no version needs.

use crate::catalog::{Catalog, Whole};
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::manifest::{Content, Reference, Shortcut, Version};
use crate::names::{self, BRANCHES, CLOCK, OBJECTS, SHORTCUTS};
use crate::prefix::Prefix;
use serde::Serialize;
use std::collections::{HashMap, HashSet};

/// What [`Store::gc`](crate::Store::gc) has done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GcReport {
    /// Number of removed versions: those that were pruned, and those of deleted branches.
    pub versions: u64,
    /// Number of removed shortcuts.
    pub shortcuts: u64,
    /// Number of objects that versions use.
    pub used: u64,
    /// Number of objects that no version uses, and that are too young to be removed.
    pub young: u64,
    /// Number of removed objects.
    pub removed: u64,
    /// Size of the removed objects in bytes.
    pub removed_bytes: u64,
}

pub(crate) fn gc(prefix: &Prefix) -> Result<GcReport> {
    let remote = &prefix.remote;
    let clock = format!("{CLOCK}/{:032x}", rand::random::<u128>());
    remote.put(clock.clone(), Vec::new()).wait()??;
    let clocks = remote.list(CLOCK)?;
    let now = clocks.iter().find(|entry| entry.name == clock).map(|entry| entry.modified);
    let now = now.ok_or_else(|| Error::Request {
        action: "list",
        object: clock.clone(),
        source: "an object that was just written is not listed".into(),
    })?;
    let oldest = now.saturating_sub(i64::try_from(prefix.rules.grace.saturating_mul(1000)).unwrap_or(i64::MAX));
    let mut old = HashSet::new();
    for below in [BRANCHES, SHORTCUTS] {
        let listed = remote.list(below)?.into_iter();
        old.extend(listed.filter(|entry| entry.modified <= oldest).map(|entry| entry.name));
    }
    let mut catalog = Catalog::new(remote);
    let shortcuts = catalog.all_shortcuts()?;
    let needed = needed(&mut catalog, &shortcuts)?;
    let mut report = GcReport::default();

    // Manifests go before the objects that only they name.
    let mut stay: HashMap<Reference, Version> = HashMap::new();
    for (name, branch) in catalog.all()? {
        let is_deletion_old = branch.deletion().is_some_and(|number| old.contains(&names::manifest(name, number)));
        for version in branch.deleted() {
            if is_deletion_old && !needed.contains(&version.reference()) {
                remote.delete(&names::manifest(name, version.number))?;
                report.versions += 1;
            } else {
                stay.insert(version.reference(), version.clone());
            }
        }
        for version in branch.pruned_versions() {
            if old.contains(&names::mark(name, version.number)) && !needed.contains(&version.reference()) {
                remote.delete(&names::manifest(name, version.number))?;
                report.versions += 1;
            } else {
                stay.insert(version.reference(), version.clone());
            }
        }
        stay.extend(branch.versions().map(|version| (version.reference(), version.clone())));
        // A mark of a deletion that did not happen, or of an older one. One without a manifest may belong to a running call.
        for number in branch.marked().filter(|number| Some(**number) != branch.deletion()) {
            let mark = names::deletion(name, *number);
            if *number < branch.next_number() || old.contains(&mark) {
                remote.delete(&mark)?;
            }
        }
        // Marks of versions before the deletion have no effect any more.
        for number in branch.pruned().range(..branch.deletion().unwrap_or(0)) {
            if !stay.keys().any(|at| at.branch == name && at.number == *number) {
                remote.delete(&names::mark(name, *number))?;
            }
        }
    }
    let mut used: HashSet<Digest> = HashSet::new();
    for shortcut in &shortcuts {
        let is_of_use = stay.contains_key(&shortcut.from) && stay.contains_key(&shortcut.to);
        if !is_of_use && old.contains(&shortcut.object()) {
            remote.delete(&shortcut.object())?;
            report.shortcuts += 1;
        } else {
            used.extend(shortcut.pair.segments().map(|segment| segment.digest));
        }
    }
    for version in stay.values() {
        // A difference without its base cannot be used: a shortcut has replaced it.
        let is_of_use = match (&version.content, &version.parent) {
            (Content::Difference(_), Some(parent)) => stay.contains_key(parent),
            _ => true,
        };
        let pair = version.pair().filter(|_| is_of_use);
        used.extend(pair.into_iter().flat_map(|pair| pair.segments()).map(|segment| segment.digest));
        used.extend(version.file_segments().map(|segment| segment.digest));
    }
    for entry in remote.list(OBJECTS)? {
        let digest = entry.name.strip_prefix(OBJECTS).and_then(|name| Digest::parse(name.strip_prefix('/')?));
        match digest {
            Some(digest) if used.contains(&digest) => report.used += 1,
            _ if entry.modified > oldest => report.young += 1,
            _ => {
                remote.delete(&entry.name)?;
                report.removed += 1;
                report.removed_bytes += entry.bytes;
            }
        }
    }
    // Also those of collections that were interrupted.
    for entry in clocks.iter().filter(|entry| entry.name == clock || entry.modified <= oldest) {
        remote.delete(&entry.name)?;
    }
    Ok(report)
}

/// All versions that can be named, and what is needed to rebuild them.
///
/// A version is *grounded* if it is an anchor, or if a pair leads to it from a grounded version. As long as a needed version is not
/// grounded, the bases of the pairs that lead to it are needed too.
fn needed(catalog: &mut Catalog<'_>, shortcuts: &[Shortcut]) -> Result<HashSet<Reference>> {
    let branches = catalog.all()?;
    let all: HashMap<Reference, &Version> =
        branches.values().copied().flat_map(Whole::all_versions).map(|version| (version.reference(), version)).collect();
    let mut before: HashMap<&Reference, Vec<&Reference>> = HashMap::new();
    for (reference, version) in &all {
        if let (Content::Difference(_) | Content::Same, Some(parent)) = (&version.content, &version.parent) {
            before.entry(reference).or_default().push(parent);
        }
    }
    for shortcut in shortcuts {
        before.entry(&shortcut.to).or_default().push(&shortcut.from);
    }
    let before = |at: &Reference| before.get(at).into_iter().flatten().copied().filter(|base| all.contains_key(*base));
    let is_anchor = |at: &Reference| matches!(all[at].content, Content::Whole(_) | Content::External { .. });

    let mut needed: HashSet<&Reference> = all.keys().filter(|at| branches[at.branch.as_str()].is_live(at.number)).collect();
    loop {
        let mut grounded: HashSet<&Reference> = needed.iter().copied().filter(|at| is_anchor(at)).collect();
        let mut after: HashMap<&Reference, Vec<&Reference>> = HashMap::new();
        for at in &needed {
            before(at).filter(|base| needed.contains(base)).for_each(|base| after.entry(base).or_default().push(at));
        }
        let mut open: Vec<&Reference> = grounded.iter().copied().collect();
        while let Some(at) = open.pop() {
            open.extend(after.get(at).into_iter().flatten().copied().filter(|next| grounded.insert(next)));
        }
        let floating: Vec<_> = needed.iter().copied().filter(|at| !grounded.contains(at)).collect();
        let size = needed.len();
        needed.extend(floating.into_iter().flat_map(before));
        if needed.len() == size {
            return Ok(needed.into_iter().cloned().collect());
        }
    }
}
