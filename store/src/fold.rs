//! `fold` and `prune`: pairs past versions in between.

use crate::catalog::Catalog;
use crate::download::Cache;
use crate::error::{Error, Result};
use crate::get::check_pair;
use crate::manifest::{Content, Reference, SHORTCUT_SCHEMA, Shortcut, Version};
use crate::names;
use crate::prefix::{NOBODY, Prefix, now, resolve};
use crate::put::{Base, temporary, upload_pair};
use crate::route::{self, Have, Route, Source, Start};
use serde::Serialize;
use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Instant;
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
}

pub(crate) fn fold(prefix: &Prefix, from: &str, to: &str, options: &FoldOptions<'_>) -> Result<Shortcut> {
    let mut catalog = Catalog::new(&prefix.remote);
    let (from, to) = (catalog.find(from)?, catalog.find(to)?);
    if let Some(shortcut) = catalog.shortcuts(&to)?.iter().find(|shortcut| shortcut.from == from.reference()) {
        return Ok(shortcut.clone());
    }
    let invalid = |reason: &str| Err(Error::InvalidArgument(format!("{} {reason} {}", to.name(), from.name())));
    let is_from = |at: &Reference| *at == from.reference();
    let Some(route) = route::find_if_any(&mut catalog, &to, Start::From(&is_from))? else {
        return invalid("does not derive from");
    };
    if route.pairs.is_empty() {
        return invalid("has the tensors of");
    }
    let folder = temporary()?;
    let cache = Cache { remote: &prefix.remote, folder: folder.path(), watch: options.watch.unwrap_or(NOBODY) };
    let have = resolve(&mut catalog, &options.have)?;
    Fold { from, to, route }.write(prefix, &mut catalog, &cache, &have, options)
}

/// A shortcut to make: `route` leads from one version to another.
struct Fold {
    from: Version,
    to: Version,
    route: Route,
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
        let begin = Instant::now();
        let base = Base::open(cache, &route::find(catalog, &self.from, Start::Get(have))?, have)?;
        let base = base.chain()?;
        let pairs = self.route.pairs.iter().map(|pair| cache.whole(pair)).collect::<Result<Vec<_>>>()?;
        let chain = Chain::new(&base, &pairs)?;
        let encode = Encode::fold(&chain).options(options.encode.clone().payload_digests(true)).watch(cache.watch);
        let (index, pair) = upload_pair(prefix, encode)?;
        // Its tensors are those of the version, and in the same parts.
        check_pair(&self.to, &index)?;
        let (from, to) = (self.from.reference(), self.to.reference());
        let shortcut = Shortcut { schema: SHORTCUT_SCHEMA.into(), from, to, pair, created: now() };
        prefix.publish_shortcut(&shortcut, begin)?;
        Ok(shortcut)
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
    let folder = temporary()?;
    let cache = Cache { remote: &prefix.remote, folder: folder.path(), watch: options.watch.unwrap_or(NOBODY) };
    let mut made = HashSet::new();
    loop {
        // Folding may take long, while other writers continue. So the versions to mark are chosen from the state after it.
        let begin = Instant::now();
        let mut catalog = Catalog::new(&prefix.remote);
        let plan = Plan::new(&mut catalog, branch, keep_every, &made)?;
        if plan.folds.is_empty() {
            for version in &plan.cut {
                cache.watch.done(0)?;
                prefix.mark_pruned(version, begin)?;
            }
            report.pruned = plan.cut.iter().map(Version::name).collect();
            report.kept = plan.kept;
            return Ok(report);
        }
        let have = resolve(&mut catalog, &options.have)?;
        for fold in &plan.folds {
            // With the shortcuts made so far, so that bases can be reached without the versions that are pruned.
            let shortcut = fold.write(prefix, &mut Catalog::new(&prefix.remote), &cache, &have, options)?;
            report.shortcuts += 1;
            report.shortcut_bytes += shortcut.pair.bytes();
            made.insert((shortcut.from, shortcut.to));
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
}

impl Plan {
    /// Keeps the head, anchors, versions whose number is a multiple of `keep_every`, and those at which other branches begin.
    /// `made` are shortcuts that exist, from one version to another: a list may lack them.
    fn new(catalog: &mut Catalog<'_>, name: &str, keep_every: u64, made: &HashSet<(Reference, Reference)>) -> Result<Self> {
        let mut others: HashSet<Reference> = HashSet::new();
        for (_, branch) in catalog.all()?.iter().filter(|(other, _)| *other != name) {
            others.extend(branch.all_versions().filter_map(|version| version.parent.clone()));
        }
        let shortcuts = catalog.all_shortcuts()?.into_iter();
        others.extend(shortcuts.filter(|shortcut| shortcut.to.branch != name).map(|shortcut| shortcut.from));
        let branch = catalog.branch(name)?;
        let head = branch.head().ok_or_else(|| Error::NoVersion { version: name.to_owned() })?.number;
        let is_kept = |version: &Version| {
            version.number.is_multiple_of(keep_every)
                || version.number == head
                || matches!(version.content, Content::Whole(_) | Content::External { .. })
                || others.contains(&version.reference())
        };
        let (kept, cut): (Vec<Version>, Vec<Version>) = branch.versions().cloned().partition(is_kept);
        let gone: HashSet<Reference> = cut.iter().chain(branch.pruned_versions()).map(Version::reference).collect();

        let mut folds = Vec::new();
        for to in kept.iter().filter(|version| matches!(version.content, Content::Difference(_) | Content::Same)) {
            let bases = catalog.shortcuts(to)?.iter().map(|shortcut| &shortcut.from).chain(&to.parent);
            let bases: Vec<_> = bases.filter(|base| !gone.contains(*base)).cloned().collect();
            let mut has_base = made.iter().any(|(from, made)| *made == to.reference() && !gone.contains(from));
            for base in bases {
                has_base |= catalog.at(&base)?.is_some();
            }
            if has_base {
                continue;
            }
            let stays = |at: &Reference| *at != to.reference() && !gone.contains(at);
            let route = route::find(catalog, to, Start::From(&stays))?;
            let Source::Version(from) = &route.source else { continue };
            // A version with the same tensors, and no pair in between: nothing to fold. What it needs stays.
            if !route.pairs.is_empty() {
                folds.push(Fold { from: (**from).clone(), to: to.clone(), route });
            }
        }
        Ok(Self { kept: kept.len() as u64, cut, folds })
    }
}
