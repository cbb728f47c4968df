//! `verify`: reads and compares all that versions need.

use crate::catalog::{Branch, Catalog};
use crate::digest::Digest;
use crate::download::{Cache, each_segment};
use crate::error::{Error, Result};
use crate::get::check_pair;
use crate::manifest::Version;
use crate::prefix::{NOBODY, Prefix};
use crate::put::{Base, temporary};
use crate::report::pairs_to;
use crate::route::{self, Have, Start};
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
    let folder = temporary()?;
    let cache = Cache { remote: &prefix.remote, folder: folder.path(), watch: NOBODY };
    for (_, _, stored) in pairs_to(catalog, version)? {
        let pair = cache.whole(&stored)?;
        pair.verify()?;
        check_pair(version, pair.index())?;
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
    let have = Have::new();
    let route = route::find(catalog, version, Start::Get(&have))?;
    if rebuild {
        let base = Base::open(&cache, &route, &have)?;
        let chain = base.chain()?;
        if let Some(last) = base.last() {
            Apply::new(last).base(&chain.without_last()).verify()?;
        }
    }
    Ok(bytes)
}
