//! `fold` and `prune`: pairs past versions in between.

use crate::catalog::Catalog;
use crate::digest::UploadId;
use crate::download::Cache;
use crate::error::{Error, Result};
use crate::get::check_pair;
use crate::lease::Lease;
use crate::local::LocalFolder;
use crate::manifest::{Content, Reference, SHORTCUT_SCHEMA, Shortcut, Version};
use crate::names;
use crate::prefix::{NOBODY, Prefix, now, resolve};
use crate::put::{Base, upload_pair};
use crate::reach::{is_damage, reach};
use crate::route::{self, Have, Source, Start};
use crate::verify::check;
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use tpde::{Chain, Encode, EncodeOptions, Watch};

/// Options of [`Store::fold`](crate::Store::fold) and [`Store::prune`](crate::Store::prune).
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct FoldOptions<'a> {
    /// Checkpoints that the caller has: versions, and where they are. An external version must be here if a fold begins at it or
    /// after it.
    pub have: Vec<(String, PathBuf)>,
    /// Options of the encoder.
    pub encode: EncodeOptions,
    /// Receives the number of encoded bytes of tensors; the total is the size of all tensors of the versions that get shortcuts.
    /// It can stop the call, also between two objects of the store. The call then returns its error.
    pub watch: Option<&'a dyn Watch>,
}

impl<'a> FoldOptions<'a> {
    /// Adds to [`have`](Self#structfield.have).
    #[must_use]
    pub fn have(mut self, version: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        self.have.push((version.into(), path.into()));
        self
    }

    /// Sets [`encode`](Self#structfield.encode).
    #[must_use]
    pub fn encode(mut self, options: EncodeOptions) -> Self {
        self.encode = options;
        self
    }

    /// Sets [`watch`](Self#structfield.watch).
    #[must_use]
    pub fn watch(mut self, watch: &'a dyn Watch) -> Self {
        self.watch = Some(watch);
        self
    }
}

/// What [`Store::prune`](crate::Store::prune) has done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PruneReport {
    /// The versions that were pruned, in ascending order of number.
    pub pruned: Vec<String>,
    /// Number of versions of the branch that are left.
    pub kept: u64,
    /// Number of shortcuts that were made.
    pub shortcuts: u64,
    /// Size of their pairs in bytes.
    pub shortcut_bytes: u64,
    /// Versions to which no shortcut could be made, and why. The versions that lead to them were kept.
    pub skipped: BTreeMap<String, String>,
}

pub(crate) fn fold(prefix: &Prefix, from: &str, to: &str, options: &FoldOptions<'_>) -> Result<Shortcut> {
    let mut catalog = prefix.catalog()?;
    let (from, to) = (catalog.find(from)?, catalog.find(to)?);
    let folder = LocalFolder::temporary()?;
    let cache = Cache { remote: &prefix.remote, folder: &folder, watch: options.watch.unwrap_or(NOBODY) };
    let mut damaged = catalog.damaged_shortcuts(&from, &to)?;
    for shortcut in catalog.shortcuts(&to)?.iter().filter(|shortcut| shortcut.from == from.reference()) {
        match check(&prefix.remote, &to, &shortcut.pair) {
            Ok(()) => return Ok(shortcut.clone()),
            Err(error) if is_damage(&error) => damaged.push(shortcut.object()),
            Err(error) => return Err(error),
        }
    }
    let invalid = |reason: &str| Err(Error::InvalidArgument(format!("{} {reason} {}", to.name(), from.name())));
    let is_from = |at: &Reference| *at == from.reference();
    let Some(route) = route::find_without(&mut catalog, &to, Start::From(&is_from), &[])? else {
        return invalid("does not derive from");
    };
    if route.steps.is_empty() {
        return invalid("has the tensors of");
    }
    let have = resolve(&mut catalog, &options.have)?;
    Fold { from, to, damaged }.write(prefix, &mut catalog, &cache, &have, options)
}

/// A shortcut to make.
struct Fold {
    from: Version,
    to: Version,
    /// The manifests of damaged shortcuts, which it replaces.
    damaged: Vec<String>,
}

impl Fold {
    fn write(
        &self,
        prefix: &Prefix,
        catalog: &mut Catalog<'_>,
        cache: &Cache<'_>,
        have: &Have,
        options: &FoldOptions<'_>,
    ) -> Result<Shortcut> {
        let (from, to, id) = (self.from.reference(), self.to.reference(), UploadId::new());
        let creates = names::shortcut((&to.branch, to.number), (&from.branch, from.number), Some(id));
        let (lease, _) = Lease::take(prefix, id, Some(creates), vec![from, to])?;
        let (shortcut, lease) = lease.during(|_| self.encode(prefix, id, catalog, cache, have, options))?;
        lease.publish_shortcut(&shortcut)?;
        for object in &self.damaged {
            prefix.remote.delete(object)?;
        }
        Ok(shortcut)
    }

    fn encode(
        &self,
        prefix: &Prefix,
        id: UploadId,
        catalog: &mut Catalog<'_>,
        cache: &Cache<'_>,
        have: &Have,
        options: &FoldOptions<'_>,
    ) -> Result<Shortcut> {
        let base = Base::reach(catalog, cache, &self.from, have)?;
        let base = base.chain()?;
        let reference = self.from.reference();
        let is_from = |at: &Reference| *at == reference;
        let (pairs, _) = reach(catalog, cache, &self.to, Start::From(&is_from), None, |_, pairs| {
            Chain::new(&base, &pairs)?;
            Ok(pairs)
        })?;
        let chain = Chain::new(&base, &pairs)?;
        let encode = Encode::fold(&chain).options(options.encode.clone().payload_digests(true)).watch(cache.watch);
        let (index, pair) = upload_pair(prefix, id, encode, self.to.tensor_bytes)?;
        // Its tensors are those of the version, and in the same parts.
        check_pair(&self.to, &index)?;
        let (from, to) = (self.from.reference(), self.to.reference());
        Ok(Shortcut { schema: SHORTCUT_SCHEMA.into(), from, to, pair, id: Some(id), created: now() })
    }
}

pub(crate) fn prune(prefix: &Prefix, branch: &str, keep_every: u64, options: &FoldOptions<'_>) -> Result<PruneReport> {
    names::check_branch(branch).map_err(Error::InvalidArgument)?;
    if keep_every == 0 {
        return Err(Error::InvalidArgument(
            "expected to keep every version whose number is a multiple of 1 or more, found 0".into(),
        ));
    }
    let mut report = PruneReport::default();
    let folder = LocalFolder::temporary()?;
    let cache = Cache { remote: &prefix.remote, folder: &folder, watch: options.watch.unwrap_or(NOBODY) };
    let (mut made, mut failed) = (HashSet::new(), HashSet::new());
    loop {
        // Folding may take long, while other writers continue. So the versions to mark are chosen from the state after it.
        let mut catalog = prefix.catalog()?;
        let plan = Plan::new(&mut catalog, &cache, branch, keep_every, (&made, &failed))?;
        if plan.folds.is_empty() {
            for version in &plan.cut {
                cache.watch.done(0)?;
                prefix.mark_pruned(branch, version.number)?;
            }
            report.pruned = plan.cut.iter().map(Version::name).collect();
            report.kept = plan.kept;
            report.skipped.extend(plan.unreachable);
            return Ok(report);
        }
        let have = resolve(&mut catalog, &options.have)?;
        for fold in &plan.folds {
            // With the shortcuts made so far, so that bases can be reached without the versions that are pruned.
            match fold.write(prefix, &mut Catalog::new(&prefix.remote), &cache, &have, options) {
                Ok(shortcut) => {
                    report.shortcuts += 1;
                    report.shortcut_bytes += shortcut.pair.bytes();
                    made.insert((shortcut.from, shortcut.to));
                }
                Err(error) if is_damage(&error) => {
                    report.skipped.insert(fold.to.name(), error.to_string());
                    failed.insert(fold.to.reference());
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// What there is to prune.
struct Plan {
    cut: Vec<Version>,
    /// Number of versions that are left.
    kept: u64,
    /// The shortcuts that must exist before.
    folds: Vec<Fold>,
    /// Versions that are left, and cannot be read; with the reasons.
    unreachable: Vec<(String, String)>,
}

impl Plan {
    /// Keeps the versions that [`choose`] chooses. `made` are shortcuts that exist, from one version to another: a list may lack them.
    fn new(
        catalog: &mut Catalog<'_>,
        cache: &Cache<'_>,
        name: &str,
        keep_every: u64,
        (made, failed): (&HashSet<(Reference, Reference)>, &HashSet<Reference>),
    ) -> Result<Self> {
        let (kept, cut, gone) = choose(catalog, name, keep_every, failed)?;
        let (mut folds, mut unreachable) = (Vec::new(), Vec::new());
        for to in kept.iter().filter(|version| matches!(version.content, Content::Difference(_) | Content::Same)) {
            let Some(damaged) = lost(catalog, cache, to, made, &gone)? else { continue };
            let stays = |at: &Reference| *at != to.reference() && !gone.contains(at);
            let route = match route::find(catalog, to, Start::From(&stays)) {
                Ok(route) => route,
                // Nobody can read it now, and `gc` keeps what leads to it.
                Err(error @ (Error::Unreachable { .. } | Error::Manifest { .. })) => {
                    unreachable.push((to.name(), error.to_string()));
                    continue;
                }
                Err(error) => return Err(error),
            };
            let Source::Version(from) = &route.source else { continue };
            // A version with the same tensors, and no pair in between: nothing to fold. What it needs stays.
            if !route.steps.is_empty() {
                let mut replaced = catalog.damaged_shortcuts(from, to)?;
                let of_ends = damaged.iter().filter(|shortcut| shortcut.from == from.reference());
                replaced.extend(of_ends.map(Shortcut::object));
                folds.push(Fold { from: (**from).clone(), to: to.clone(), damaged: replaced });
            }
        }
        Ok(Self { kept: kept.len() as u64, cut, folds, unreachable })
    }
}

/// The versions of a branch that stay, those to cut, and all that are gone then. Keeps the head, anchors, versions whose number is a
/// multiple of `keep_every`, and those where another branch, or a shortcut into one, begins. To versions of `failed` no shortcut can
/// be made, so their parents are kept, back to a version that stays.
fn choose(
    catalog: &mut Catalog<'_>,
    name: &str,
    keep_every: u64,
    failed: &HashSet<Reference>,
) -> Result<(Vec<Version>, Vec<Version>, HashSet<Reference>)> {
    let mut others: HashSet<Reference> = HashSet::new();
    for (_, branch) in catalog.all()?.into_iter().filter(|(other, _)| *other != name) {
        others.extend(branch.all_versions().filter_map(|version| version.parent.clone()));
    }
    // By the names of their manifests, which may be damaged.
    let mut starts: HashSet<u64> = HashSet::new();
    for object in catalog.shortcut_names()? {
        if let Some(((to, _), (from, number))) = names::of_shortcut(&object)
            && to != name
            && from == name
        {
            starts.insert(number);
        }
    }
    let branch = catalog.whole(name)?;
    let head = branch.head().ok_or_else(|| Error::NoVersion { version: name.to_owned() })?;
    let is_kept = |version: &Version| {
        version.number.is_multiple_of(keep_every)
            || version.number == head
            || matches!(version.content, Content::Whole(_) | Content::External { .. })
            || others.contains(&version.reference())
            || starts.contains(&version.number)
    };
    let mut needed: HashSet<Reference> = HashSet::new();
    for version in branch.versions().rev() {
        let is_needed = needed.contains(&version.reference()) && !is_kept(version);
        if is_needed || failed.contains(&version.reference()) {
            needed.extend(version.parent.clone());
        }
    }
    let is_kept = |version: &Version| is_kept(version) || needed.contains(&version.reference());
    let (kept, cut): (Vec<Version>, Vec<Version>) = branch.versions().cloned().partition(is_kept);
    let gone = cut.iter().chain(branch.pruned_versions()).map(Version::reference).collect();
    Ok((kept, cut, gone))
}

/// The damaged shortcuts to a version, if no pair leads to it from a version that stays.
fn lost(
    catalog: &mut Catalog<'_>,
    cache: &Cache<'_>,
    to: &Version,
    made: &HashSet<(Reference, Reference)>,
    gone: &HashSet<Reference>,
) -> Result<Option<Vec<Shortcut>>> {
    let mut has_base = made.iter().any(|(from, made)| *made == to.reference() && !gone.contains(from));
    if let Some(parent) = to.parent.as_ref().filter(|parent| !gone.contains(*parent)) {
        has_base |= catalog.at(parent)?.is_some();
    }
    let is_parent_here = match &to.parent {
        Some(parent) => catalog.at(parent)?.is_some(),
        None => false,
    };
    let mut damaged = Vec::new();
    for shortcut in catalog.shortcuts(to)?.to_vec() {
        if has_base || gone.contains(&shortcut.from) || catalog.at(&shortcut.from)?.is_none() {
            continue;
        }
        // What it replaces goes only if it is sound. Once that is gone, it could not be made anew.
        has_base = !is_parent_here
            || match check(cache.remote, to, &shortcut.pair) {
                Ok(()) => true,
                Err(error) if is_damage(&error) => {
                    damaged.push(shortcut);
                    false
                }
                Err(error) => return Err(error),
            };
    }
    Ok((!has_base).then_some(damaged))
}
