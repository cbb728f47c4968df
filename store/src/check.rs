//! `verify` and `gc`.

use crate::catalog::{Branch, Catalog, Have};
use crate::digest::Digest;
use crate::download::{Cache, each_segment};
use crate::error::{Error, Result};
use crate::get::check_pair;
use crate::manifest::Version;
use crate::names::{self, BRANCHES, CLOCK, OBJECTS};
use crate::prefix::{NOBODY, Prefix};
use crate::put::Base;
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use tpde::Apply;

/// What [`Store::verify`](crate::Store::verify) has found.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Number of versions that were checked.
    pub versions: u64,
    /// Number of bytes that were read.
    pub bytes: u64,
    /// Versions that are damaged, with the first fault of each.
    pub faults: BTreeMap<String, String>,
    /// Versions that need a checkpoint which is not in the store. Only their own pairs and files were checked.
    pub external: Vec<String>,
}

/// What [`Store::gc`](crate::Store::gc) has done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GcReport {
    /// Number of removed versions: of deleted branches.
    pub versions: u64,
    /// Number of objects that versions use.
    pub used: u64,
    /// Number of objects that no version uses, and that are too young to be removed.
    pub young: u64,
    /// Number of removed objects.
    pub removed: u64,
    /// Size of the removed objects in bytes.
    pub removed_bytes: u64,
}

pub(crate) fn verify(prefix: &Prefix, branch: Option<&str>, rebuild: bool) -> Result<VerifyReport> {
    let mut catalog = Catalog::new(&prefix.remote);
    let versions: Vec<Version> = match branch {
        Some(name) => catalog.branch(name)?.versions().cloned().collect(),
        None => catalog.all()?.values().flat_map(Branch::versions).cloned().collect(),
    };
    if let (Some(name), true) = (branch, versions.is_empty()) {
        return Err(Error::NoVersion { version: name.to_owned() });
    }
    let mut report = VerifyReport::default();
    let mut checked = HashSet::new();
    for version in &versions {
        report.versions += 1;
        match verify_one(prefix, &mut catalog, version, rebuild, &mut checked) {
            Ok(bytes) => report.bytes += bytes,
            Err(Error::External { .. }) => report.external.push(version.name()),
            Err(error @ Error::Request { .. }) => return Err(error),
            Err(error) => _ = report.faults.insert(version.name(), error.to_string()),
        }
    }
    Ok(report)
}

fn verify_one(
    prefix: &Prefix,
    catalog: &mut Catalog<'_>,
    version: &Version,
    rebuild: bool,
    checked: &mut HashSet<Digest>,
) -> Result<u64> {
    let mut bytes = 0;
    if let Some(stored) = version.pair() {
        let folder = tempfile::tempdir().map_err(|e| Error::io("create", &std::env::temp_dir(), e))?;
        let pair = Cache { remote: &prefix.remote, folder: folder.path(), watch: NOBODY }.whole(stored)?;
        pair.verify()?;
        check_pair(version, &pair)?;
        bytes += stored.bytes();
    }
    for file in &version.files {
        let is_new = file.content.segments.iter().any(|segment| !checked.contains(&segment.digest));
        if is_new {
            each_segment(&prefix.remote, &file.content, |_, _| Ok(()))?;
            checked.extend(file.content.segments.iter().map(|segment| segment.digest));
            bytes += file.content.bytes;
        }
    }
    let route = catalog.route(version, &Have::new())?;
    if rebuild {
        let base = Base::open(prefix, route, NOBODY)?;
        let chain = base.chain()?;
        if let Some(last) = base.last() {
            Apply::new(last).base(&chain.without_last()).verify()?;
        }
    }
    Ok(bytes)
}

pub(crate) fn gc(prefix: &Prefix) -> Result<GcReport> {
    let clock = format!("{CLOCK}/{:032x}", rand::random::<u128>());
    prefix.remote.put(clock.clone(), Vec::new()).wait()??;
    let clocks = prefix.remote.list(CLOCK)?;
    let now = clocks.iter().find(|entry| entry.name == clock).map(|entry| entry.modified);
    let now = now.ok_or_else(|| Error::Request {
        action: "list",
        object: clock.clone(),
        source: "an object that was just written is not listed".into(),
    })?;
    let oldest = now.saturating_sub(i64::try_from(prefix.rules.grace.saturating_mul(1000)).unwrap_or(i64::MAX));
    let mut catalog = Catalog::new(&prefix.remote);
    let needed = catalog.needed()?;
    let old: HashSet<String> =
        prefix.remote.list(BRANCHES)?.into_iter().filter(|entry| entry.modified <= oldest).map(|entry| entry.name).collect();
    let mut used = HashSet::new();
    let mut report = GcReport::default();
    for (name, branch) in catalog.all()? {
        let may_go = branch.deletion().is_some_and(|number| old.contains(&names::manifest(name, number)));
        for version in branch.deleted() {
            if may_go && !needed.contains(&version.reference()) {
                // Before the objects that it names: a manifest never names an object that was removed.
                prefix.remote.delete(&names::manifest(&version.branch, version.number))?;
                report.versions += 1;
            } else {
                used.extend(version.segments().map(|segment| segment.digest));
            }
        }
        used.extend(branch.versions().flat_map(Version::segments).map(|segment| segment.digest));
    }
    for entry in prefix.remote.list(OBJECTS)? {
        let digest = entry.name.strip_prefix(OBJECTS).and_then(|name| Digest::parse(name.strip_prefix('/')?));
        match digest {
            Some(digest) if used.contains(&digest) => report.used += 1,
            _ if entry.modified > oldest => report.young += 1,
            _ => {
                prefix.remote.delete(&entry.name)?;
                report.removed += 1;
                report.removed_bytes += entry.bytes;
            }
        }
    }
    // Also those of collections that were interrupted.
    for entry in clocks.iter().filter(|entry| entry.name == clock || entry.modified <= oldest) {
        prefix.remote.delete(&entry.name)?;
    }
    Ok(report)
}
