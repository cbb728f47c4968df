//! `verify`: reads and compares all that versions need.

use crate::blob::StoredSource;
use crate::catalog::Catalog;
use crate::download::{Cache, each_segment, index_of};
use crate::error::{Error, Result};
use crate::get::check_pair;
use crate::local::LocalFolder;
use crate::manifest::{Segment, StoredPair, Version};
use crate::prefix::{NOBODY, Prefix};
use crate::put::Base;
use crate::reach::{is_damage, is_of_system};
use crate::remote::Remote;
use crate::report::pairs_to;
use crate::route::{self, Have, Start};
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use tpde::{Apply, Pair};

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
    /// Shortcuts that are damaged, as in `the shortcut from main@0 to main@10` or by the name of a manifest that is not valid, with the
    /// first fault of each. Readers leave them out. `fold` makes them anew.
    pub shortcuts: BTreeMap<String, String>,
    /// Versions that need a checkpoint which is not in the store. Only their own pairs and files were checked.
    pub external: Vec<String>,
}

pub(crate) fn verify(prefix: &Prefix, branch: Option<&str>, rebuild: bool) -> Result<VerifyReport> {
    let mut catalog = prefix.catalog()?;
    let names = match branch {
        Some(name) => vec![name.to_owned()],
        None => catalog.list()?,
    };
    let (mut versions, mut report) = (Vec::new(), VerifyReport::default());
    for name in names {
        let found = catalog.sound_and_damaged(&name)?;
        versions.extend(found.versions().cloned());
        report.faults.extend(found.live_damaged().map(|(number, error)| (format!("{name}@{number}"), error.to_string())));
    }
    if let (Some(name), true) = (branch, versions.is_empty() && report.faults.is_empty()) {
        return Err(Error::NoVersion { version: name.to_owned() });
    }
    report.versions += report.faults.len() as u64;
    let mut checked = HashSet::new();
    for version in &versions {
        report.versions += 1;
        match verify_one(prefix, &mut catalog, version, rebuild, &mut checked, &mut report.shortcuts) {
            Ok(bytes) => report.bytes += bytes,
            Err(Error::External { .. }) => report.external.push(version.name()),
            Err(error) if is_of_system(&error) => return Err(error),
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
    checked: &mut HashSet<Segment>,
    shortcuts: &mut BTreeMap<String, String>,
) -> Result<u64> {
    let mut bytes = 0;
    for (from, is_shortcut, stored) in pairs_to(catalog, version)? {
        match (check(&prefix.remote, version, &stored), from) {
            (Ok(()), _) => bytes += stored.bytes(),
            (Err(error), Some(from)) if is_shortcut && is_damage(&error) => {
                let name = format!("the shortcut from {} to {}", from.name(), version.name());
                shortcuts.insert(name, error.to_string());
            }
            (Err(error), _) => return Err(error),
        }
    }
    shortcuts.extend(catalog.damaged().iter().map(|(object, error)| (object.clone(), error.to_string())));
    for file in &version.files {
        let is_new = file.content.segments.iter().any(|segment| !checked.contains(segment));
        if is_new {
            each_segment(&prefix.remote, &file.content, |_, _| Ok(()))?;
            checked.extend(&file.content.segments);
            bytes += file.content.bytes;
        }
    }
    let have = Have::new();
    if !rebuild {
        route::find(catalog, version, Start::Get(&have))?;
    } else {
        let folder = LocalFolder::temporary()?;
        let cache = Cache { remote: &prefix.remote, folder: &folder, watch: NOBODY };
        let base = Base::reach(catalog, &cache, version, &have)?;
        let chain = base.chain()?;
        if let Some(last) = base.last() {
            Apply::new(last).base(&chain.without_last()).verify()?;
        }
    }
    Ok(bytes)
}

/// Reads a pair that leads to a version, and compares all its digests.
pub(crate) fn check(remote: &Remote, version: &Version, stored: &StoredPair) -> Result<()> {
    let index = index_of(remote, stored)?;
    check_pair(version, &index)?;
    let blob = StoredSource::new(remote, &stored.blob);
    let verified = Pair::new(index, &blob).and_then(|pair| pair.verify());
    verified.map(drop).map_err(|error| blob.error(error))
}
