//! Versions whose pairs are in a local folder, read without rebuilding them as files.

use crate::catalog::Catalog;
use crate::download::{Cache, Select};
use crate::error::{Error, Result};
use crate::get::{GetOptions, GetReport, check_outside, check_pair, without_itself};
use crate::local::LocalFolder;
use crate::manifest::Version;
use crate::prefix::{NOBODY, Prefix, resolve};
use crate::put::Base;
use crate::reach::{LeftOut, reach};
use crate::route::{Have, Start};
use crate::wanted::WantedTensors;
use std::collections::BTreeMap;
use tpde::{Chain, Checkpoint, FileSource, Pair, Rectangle, ValidatedIndex};

/// A version whose pairs were read from the store: [`Store::open_version`](crate::Store::open_version) makes it.
///
/// [`Opened::chain`] is its tensors as a checkpoint: they can be read, and be the base of a pair. Nothing is rebuilt before it is
/// read, and nothing is written.
pub struct Opened {
    version: Version,
    base: Base,
    left_out: Vec<LeftOut>,
    /// Removed on drop, if it is temporary.
    _folder: LocalFolder,
}

impl Opened {
    /// The version.
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// The pair that gives the version; `None` if it is a checkpoint that the caller has.
    pub fn last(&self) -> Option<&Pair<FileSource>> {
        self.base.last()
    }

    /// Damaged pairs on cheaper ways, which were not used.
    pub fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }

    /// The version as a checkpoint. [`Chain::without_last`] of it is the base of [`Opened::last`].
    ///
    /// # Errors
    /// Those of [`Chain::new`].
    pub fn chain(&self) -> Result<Chain<'_, FileSource>> {
        self.base.chain()
    }
}

/// Reads tensors of a version: of a pair and its base, these rectangles by name of the tensor.
pub type LoadTensors<'a> = dyn FnMut(&Pair<FileSource>, &dyn Checkpoint, &BTreeMap<String, Rectangle>) -> Result<()> + 'a;

pub(crate) fn open_version(
    prefix: &Prefix,
    version: &str,
    parts: Option<&BTreeMap<String, Vec<Rectangle>>>,
    options: &GetOptions<'_>,
) -> Result<Opened> {
    let mut catalog = prefix.catalog()?;
    let have = resolve(&mut catalog, &options.have)?;
    let version = catalog.find(version)?;
    let (base, left_out, folder) = reach_in_folder(prefix, &mut catalog, &version, &have, parts, options, Ok)?;
    Ok(Opened { version, base, left_out, _folder: folder })
}

pub(crate) fn load(prefix: &Prefix, version: &str, options: &GetOptions<'_>, load: &mut LoadTensors<'_>) -> Result<GetReport> {
    let mut catalog = prefix.catalog()?;
    let have = resolve(&mut catalog, &options.have)?;
    let version = catalog.find(version)?;
    let have = without_itself(&mut catalog, &version, have)?;
    let ((), left_out, _) = reach_in_folder(prefix, &mut catalog, &version, &have, None, options, |base| {
        let is_here = || Error::InvalidArgument(format!("{} is a checkpoint that the caller has", version.name()));
        let last = base.last().ok_or_else(is_here)?;
        load(last, &base.chain()?.without_last(), &options.rectangles(&version, last.index())?)
    })?;
    Ok(GetReport { version, left_out })
}

/// Reads the pairs of a version into the folder of the options, or a temporary one, and calls `done` with what they give. Returns
/// its result, the pairs that were left out, and the folder.
fn reach_in_folder<T>(
    prefix: &Prefix,
    catalog: &mut Catalog<'_>,
    version: &Version,
    have: &Have,
    parts: Option<&BTreeMap<String, Vec<Rectangle>>>,
    options: &GetOptions<'_>,
    mut done: impl FnMut(Base) -> Result<T>,
) -> Result<(T, Vec<LeftOut>, LocalFolder)> {
    check_outside(prefix, "a cache", options.cache.as_deref())?;
    let folder = options.cache.as_deref().map_or_else(LocalFolder::temporary, LocalFolder::at)?;
    let cache = Cache { remote: &prefix.remote, folder: &folder, watch: options.watch.unwrap_or(NOBODY) };
    let select = |index: &ValidatedIndex| match parts {
        Some(parts) => Ok(WantedTensors::of(parts.clone())),
        None => options.wanted(version, index),
    };
    let select = (parts.is_some() || options.is_selection()).then_some(&select as Select<'_>);
    let (result, left_out) = reach(catalog, &cache, version, Start::Get(have), select, |route, pairs| {
        let base = Base::open(route, have, pairs)?;
        base.last().map_or(Ok(()), |last| check_pair(version, last.index()))?;
        done(base)
    })?;
    Ok((result, left_out, folder))
}
