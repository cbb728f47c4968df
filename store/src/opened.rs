//! Versions whose pairs are in a local folder, read without rebuilding them as files.

use crate::catalog::Catalog;
use crate::download::{Cache, fetch_pairs};
use crate::error::{Error, Result};
use crate::get::{GetOptions, check_pair};
use crate::manifest::Version;
use crate::prefix::{NOBODY, Prefix, resolve};
use crate::put::{open_source, temporary};
use crate::route::{self, Start};
use std::collections::BTreeMap;
use std::fs;
use tpde::{Chain, Checkpoint, FileSource, MemoryCheckpoint, Pair, Rectangle, SafetensorsCheckpoint, Tensor};

static EMPTY: MemoryCheckpoint<'static> = MemoryCheckpoint::EMPTY;

/// A version whose pairs were read from the store: [`Store::open_version`](crate::Store::open_version) makes it.
///
/// [`Opened::chain`] is its tensors as a checkpoint: they can be read, and be the base of a pair. Nothing is rebuilt before it is
/// read, and nothing is written.
pub struct Opened {
    version: Version,
    checkpoint: Option<SafetensorsCheckpoint>,
    pairs: Vec<Pair<FileSource>>,
    /// Removed on drop.
    _folder: Option<tempfile::TempDir>,
}

impl Opened {
    /// The version.
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// The pair that gives the version; `None` if it is a checkpoint that the caller has.
    pub fn last(&self) -> Option<&Pair<FileSource>> {
        self.pairs.last()
    }

    /// The version as a checkpoint. [`Chain::without_last`] of it is the base of [`Opened::last`].
    ///
    /// # Errors
    /// Those of [`Chain::new`].
    pub fn chain(&self) -> Result<Chain<'_, FileSource>> {
        let base = self.checkpoint.as_ref().map_or(&EMPTY as &dyn Checkpoint, |checkpoint| checkpoint);
        Ok(Chain::new(base, &self.pairs)?)
    }
}

pub(crate) fn open_version(
    prefix: &Prefix,
    version: &str,
    parts: Option<&BTreeMap<String, Vec<Rectangle>>>,
    options: &GetOptions<'_>,
) -> Result<Opened> {
    let mut catalog = Catalog::new(&prefix.remote);
    let have = resolve(&mut catalog, &options.have)?;
    let version = catalog.find(version)?;
    let route = route::find(&mut catalog, &version, Start::Get(&have))?;
    let (folder, path) = match &options.cache {
        Some(cache) => (None, cache.clone()),
        None => {
            let folder = temporary()?;
            let path = folder.path().to_owned();
            (Some(folder), path)
        }
    };
    fs::create_dir_all(&path).map_err(|e| Error::io("create", &path, e))?;
    let cache = Cache { remote: &prefix.remote, folder: &path, watch: options.watch.unwrap_or(NOBODY) };
    let by_name = options.tensors.map(|is_wanted| move |tensor: &Tensor<'_>| is_wanted(tensor.name));
    let by_part = parts.map(|parts| {
        move |tensor: &Tensor<'_>| {
            let meets = |wanted: &Rectangle| wanted.intersection(&tensor.rectangle()).is_some();
            parts.get(tensor.name).is_some_and(|wanted| wanted.iter().any(meets))
        }
    });
    let is_wanted = match (&by_part, &by_name) {
        (Some(by_part), _) => Some(by_part as &dyn Fn(&Tensor<'_>) -> bool),
        (None, Some(by_name)) => Some(by_name as _),
        (None, None) => None,
    };
    let pairs = fetch_pairs(&cache, &route.pairs, is_wanted)?;
    if let Some(last) = pairs.last() {
        check_pair(&version, last.index())?;
    }
    let checkpoint = open_source(&route, &have)?;
    Ok(Opened { version, checkpoint, pairs, _folder: folder })
}
