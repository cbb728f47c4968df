//! `report`: what each version changes, and what it takes to read it.

use crate::catalog::Catalog;
use crate::download::index_of;
use crate::error::{Error, Result};
use crate::manifest::{Content, Reference, StoredPair, Version};
use crate::prefix::Prefix;
use crate::route::{self, Start};
use tpde::TensorReport;

/// A version, as [`Store::report`](crate::Store::report) describes it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct VersionReport {
    /// The version.
    pub version: Version,
    /// The pairs that lead to it: its own if its base is still stored, and those of shortcuts.
    pub pairs: Vec<PairReport>,
    /// Number and bytes of the pairs that a reader without any version reads, and without the checkpoint of an external version.
    pub to_read: (u64, u64),
}

/// A pair that leads to a version.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PairReport {
    /// The version that is its base; `None` if it is whole.
    pub from: Option<Reference>,
    /// Whether it is that of a shortcut.
    pub is_shortcut: bool,
    /// Size in bytes.
    pub bytes: u64,
    /// Number of elements of all tensors.
    pub elements: u64,
    /// Number of elements that differ from the base.
    pub changed: u64,
}

pub(crate) fn report(prefix: &Prefix, branch: &str) -> Result<Vec<VersionReport>> {
    let mut catalog = prefix.catalog()?;
    let versions: Vec<Version> = catalog.whole(branch)?.versions().cloned().collect();
    if versions.is_empty() {
        return Err(Error::NoVersion { version: branch.to_owned() });
    }
    let mut reports = Vec::with_capacity(versions.len());
    for version in versions {
        let mut pairs = Vec::new();
        for (from, is_shortcut, stored) in pairs_to(&mut catalog, &version)? {
            let index = index_of(&prefix.remote, &stored)?;
            let (mut elements, mut changed) = (0, 0);
            for tensor in index.tensors() {
                let report = TensorReport::new(&index, &tensor);
                elements += report.lanes;
                changed += report.changed;
            }
            pairs.push(PairReport { from, is_shortcut, bytes: stored.bytes(), elements, changed });
        }
        let route = route::find(&mut catalog, &version, Start::Anchor)?;
        reports.push(VersionReport { version, pairs, to_read: (route.steps.len() as u64, route.bytes()) });
    }
    Ok(reports)
}

/// The pairs that give a version, each with its base and whether it is that of a shortcut. A pair whose base is gone is of no use,
/// and is not stored for long.
pub(crate) fn pairs_to(catalog: &mut Catalog<'_>, version: &Version) -> Result<Vec<(Option<Reference>, bool, StoredPair)>> {
    let mut pairs = Vec::new();
    match (&version.content, &version.parent) {
        (Content::Whole(pair), _) => pairs.push((None, false, pair.clone())),
        (Content::Difference(pair), Some(parent)) if catalog.at(parent)?.is_some() => {
            pairs.push((Some(parent.clone()), false, pair.clone()));
        }
        _ => {}
    }
    for shortcut in catalog.shortcuts(version)?.to_vec() {
        if catalog.at(&shortcut.from)?.is_some() {
            pairs.push((Some(shortcut.from), true, shortcut.pair));
        }
    }
    Ok(pairs)
}
