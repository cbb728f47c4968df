//! `gc`: removes what no version needs.

use crate::catalog::{Catalog, Whole};
use crate::digest::UploadId;
use crate::error::{Error, Result};
use crate::lease::{self, RunningCalls};
use crate::manifest::{Content, Reference, Shortcut, Version};
use crate::names::{self, BRANCHES, CLOCK, OBJECTS, SHORTCUTS};
use crate::prefix::Prefix;
use crate::remote::{Entry, Remote};
use serde::Serialize;
use std::collections::{HashMap, HashSet};

/// What [`Store::gc`](crate::Store::gc) has done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GcReport {
    /// Number of removed versions: those that were pruned, and those of deleted branches.
    pub versions: u64,
    /// Number of versions that were pruned, or whose branch was deleted, and that stay: the grace is not over, or others need them.
    pub waiting: u64,
    /// Number of removed shortcuts.
    pub shortcuts: u64,
    /// Number of objects that versions use, also versions that wait.
    pub used: u64,
    /// Number of objects that no version uses, and that stay: they are too young to be removed, a running call has uploaded them, or
    /// there is no version at all in a folder, as if that of branches were missing.
    pub young: u64,
    /// Number of removed objects.
    pub removed: u64,
    /// Size of the removed objects in bytes.
    pub removed_bytes: u64,
}

/// The order of the steps is what makes it safe, and not the time: `docs/decisions/store-leases.md` has the proof.
///
/// 1. List what may be removed.
/// 2. Settle the leases. Manifests whose calls have no lease afterwards exist, or never will.
/// 3. Read the manifests.
/// 4. Remove what was listed, and is not needed.
pub(crate) fn gc(prefix: &Prefix) -> Result<GcReport> {
    prefix.check()?;
    let remote = &prefix.remote;
    let (now, clocks) = clock(remote)?;
    let oldest = now.saturating_sub(i64::try_from(prefix.rules.grace.saturating_mul(1000)).unwrap_or(i64::MAX));
    let mut old = HashSet::new();
    // The folder of branches may be missing where the others are.
    let mut has_versions = remote.folder().is_none();
    for below in [BRANCHES, SHORTCUTS] {
        let listed = remote.list(below)?;
        has_versions |= below == BRANCHES && !listed.is_empty();
        old.extend(listed.into_iter().filter(|entry| entry.modified <= oldest).map(|entry| entry.name));
    }
    let objects = remote.list(OBJECTS)?;
    let running = lease::settle(prefix, oldest)?;
    let mut catalog = Catalog::new(remote);
    let shortcuts = catalog.all_shortcuts()?;
    let needed = needed(&mut catalog, &shortcuts, &running.uses)?;
    let mut report = GcReport::default();
    prefix.check()?;

    // Manifests go before the objects that only they name.
    let stay = remove_versions(remote, &mut catalog, &old, (&needed, &running), &mut report)?;
    let mut used: HashSet<String> = HashSet::new();
    for shortcut in &shortcuts {
        let is_of_use = stay.contains_key(&shortcut.from) && stay.contains_key(&shortcut.to);
        if !is_of_use && old.contains(&shortcut.object()) {
            remote.delete(&shortcut.object())?;
            report.shortcuts += 1;
        } else {
            used.extend(shortcut.pair.segments().map(|segment| segment.object()));
        }
    }
    // Nobody reads those that are not valid, except a newer version of this crate.
    for (object, error) in catalog.damaged() {
        if !matches!(error, Error::Manifest { .. }) {
            return Err(Error::manifest(object, error));
        }
        if old.contains(object) {
            remote.delete(object)?;
            report.shortcuts += 1;
        }
    }
    used.extend(objects_of(&stay));
    remove_objects(remote, objects, oldest, has_versions, (&used, &running), &mut report)?;
    let (removed, bytes) = remote.remove_remains(oldest)?;
    report.removed += removed;
    report.removed_bytes += bytes;
    for entry in clocks.iter().filter(|entry| entry.modified <= oldest) {
        remote.delete(&entry.name)?;
    }
    Ok(report)
}

/// Names of the objects that versions use.
fn objects_of(stay: &HashMap<Reference, Version>) -> impl Iterator<Item = String> {
    stay.values().flat_map(|version| {
        // A difference without its base cannot be used: a shortcut has replaced it.
        let is_of_use = match (&version.content, &version.parent) {
            (Content::Difference(_), Some(parent)) => stay.contains_key(parent),
            _ => true,
        };
        let pair = version.pair().filter(|_| is_of_use);
        let segments = pair.into_iter().flat_map(|pair| pair.segments());
        segments.chain(version.file_segments()).map(|segment| segment.object())
    })
}

/// Removes the objects that no version uses, unless they are young. What has another name is not the store's.
fn remove_objects(
    remote: &Remote,
    objects: Vec<Entry>,
    oldest: i64,
    has_versions: bool,
    (used, running): (&HashSet<String>, &RunningCalls),
    report: &mut GcReport,
) -> Result<()> {
    if !has_versions && !objects.is_empty() {
        tracing::warn!("the store has no version, so no object is removed: is its folder {BRANCHES} missing?");
    }
    for entry in objects {
        let Some(upload) = names::of_object(&entry.name) else { continue };
        if used.contains(&entry.name) {
            report.used += 1;
        } else if !has_versions || entry.modified > oldest || upload.is_some_and(|call| running.calls.contains(&call)) {
            report.young += 1;
        } else {
            remote.delete(&entry.name)?;
            report.removed += 1;
            report.removed_bytes += entry.bytes;
        }
    }
    Ok(())
}

/// The time by the store's clock, in milliseconds since 1970; and the objects that were left behind by collections that were interrupted.
fn clock(remote: &Remote) -> Result<(i64, Vec<Entry>)> {
    let clock = names::clock(UploadId::new());
    remote.put(clock.clone(), Vec::new()).wait()??;
    let mut clocks: Vec<Entry> = remote.list(CLOCK)?.into_iter().filter(|entry| names::is_clock(&entry.name)).collect();
    let own = clocks.iter().position(|entry| entry.name == clock).map(|at| clocks.swap_remove(at));
    remote.delete(&clock)?;
    let own = own.ok_or_else(|| Error::Request {
        action: "list",
        object: clock,
        source: "an object that was just written is not listed".into(),
    })?;
    Ok((own.modified, clocks))
}

/// Removes the manifests that are old and not needed, and marks without effect. Returns the versions that stay.
fn remove_versions(
    remote: &Remote,
    catalog: &mut Catalog<'_>,
    old: &HashSet<String>,
    (needed, running): (&HashSet<Reference>, &RunningCalls),
    report: &mut GcReport,
) -> Result<HashMap<Reference, Version>> {
    let mut stay: HashMap<Reference, Version> = HashMap::new();
    for (name, branch) in catalog.all()? {
        let is_deletion_old = branch.deletion().is_some_and(|number| old.contains(&names::manifest(name, number)));
        let is_mark_old = |version: &Version| old.contains(&names::mark(name, version.number));
        let deleted = branch.deleted().map(|version| (version, is_deletion_old));
        let pruned = branch.pruned_versions().map(|version| (version, is_mark_old(version)));
        for (version, is_old) in deleted.chain(pruned) {
            if is_old && !needed.contains(&version.reference()) {
                remote.delete(&names::manifest(name, version.number))?;
                report.versions += 1;
            } else {
                report.waiting += u64::from(version.content != Content::Deleted);
                stay.insert(version.reference(), version.clone());
            }
        }
        // What is damaged and cannot be named is of use to nobody.
        for (number, _) in branch.all_damaged() {
            let is_deleted = branch.deletion().is_some_and(|deletion| number < deletion);
            if (is_deleted && is_deletion_old) || old.contains(&names::mark(name, number)) {
                remote.delete(&names::manifest(name, number))?;
                report.versions += 1;
            } else if !branch.is_live(number) {
                report.waiting += 1;
            }
        }
        stay.extend(branch.versions().map(|version| (version.reference(), version.clone())));
        // A mark of a deletion that did not happen, or of an older one. One without a manifest may belong to a running call.
        for number in branch.marked().filter(|number| Some(**number) != branch.deletion()) {
            let mark = names::deletion(name, *number);
            let is_of_running = running.creates.contains(&names::manifest(name, *number));
            if *number < branch.next_number() || (old.contains(&mark) && !is_of_running) {
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
    Ok(stay)
}

/// All versions that can be named, those that running calls use, and what is needed to rebuild them.
///
/// A version is *grounded* if it is an anchor that can be named, or if a pair leads to it from a grounded one. Of a needed version that is
/// not grounded, the bases of all pairs that lead to it are needed too. So it keeps a way, also if several collections run that have
/// listed the marks at different times: marks are only added, so the way that was grounded last is in none of their lists.
fn needed(catalog: &mut Catalog<'_>, shortcuts: &[Shortcut], uses: &[Reference]) -> Result<HashSet<Reference>> {
    let branches = catalog.all()?;
    let all: HashMap<Reference, &Version> =
        branches.values().copied().flat_map(Whole::all_versions).map(|version| (version.reference(), version)).collect();
    let mut before: HashMap<&Reference, Vec<&Reference>> = HashMap::new();
    let mut after: HashMap<&Reference, Vec<&Reference>> = HashMap::new();
    let mut lead = |from, to| {
        before.entry(to).or_default().push(from);
        after.entry(from).or_default().push(to);
    };
    for (reference, version) in &all {
        if let (Content::Difference(_) | Content::Same, Some(parent)) = (&version.content, &version.parent) {
            lead(parent, reference);
        }
    }
    shortcuts.iter().for_each(|shortcut| lead(&shortcut.from, &shortcut.to));

    let live: HashSet<&Reference> = all.keys().filter(|at| branches[at.branch.as_str()].is_live(at.number)).collect();
    let is_anchor = |at: &Reference| matches!(all[at].content, Content::Whole(_) | Content::External { .. });
    let mut grounded: HashSet<&Reference> = live.iter().copied().filter(|at| is_anchor(at)).collect();
    let mut open: Vec<&Reference> = grounded.iter().copied().collect();
    while let Some(at) = open.pop() {
        let next = after.get(at).into_iter().flatten().copied().filter(|next| live.contains(*next));
        open.extend(next.filter(|next| grounded.insert(next)).collect::<Vec<_>>());
    }
    let mut open: Vec<&Reference> = live.into_iter().chain(uses).filter(|at| all.contains_key(*at)).collect();
    let mut needed: HashSet<&Reference> = open.iter().copied().collect();
    while let Some(at) = open.pop() {
        if !grounded.contains(at) {
            let bases = before.get(at).into_iter().flatten().copied().filter(|base| all.contains_key(*base));
            open.extend(bases.filter(|base| needed.insert(base)).collect::<Vec<_>>());
        }
    }
    Ok(needed.into_iter().cloned().collect())
}
