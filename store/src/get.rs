//! `get`: rebuilds a version.

use crate::catalog::Catalog;
use crate::download::{Cache, Select, each_segment};
use crate::error::{Error, Result};
use crate::local::{LocalFolder, parent_of};
use crate::manifest::Version;
use crate::prefix::{NOBODY, Prefix, check_state, resolve};
use crate::put::Base;
use crate::reach::{LeftOut, reach};
use crate::route::{self, Have, Route, Source, Start};
use crate::wanted::WantedTensors;
use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf, absolute};
use tpde::{Apply, Escaped, Rectangle, TemporaryFolder, Tensor, ValidatedIndex, Watch, check_neighbours};

/// Returns the wanted rectangle of each wanted tensor, by name: [`Rectangle::whole`] for a whole tensor.
pub type SelectTensors<'a> = dyn Fn(&ValidatedIndex) -> tpde::Result<BTreeMap<String, Rectangle>> + 'a;

/// Options of [`Store::get`](crate::Store::get).
#[derive(Default)]
#[non_exhaustive]
pub struct GetOptions<'a> {
    /// Checkpoints that the caller has: versions, and where they are.
    pub have: Vec<(String, PathBuf)>,
    /// Selects tensors by name. The output is then one safetensors file of them. Only their chunks are read from the store.
    pub tensors: Option<&'a dyn Fn(&str) -> bool>,
    /// Selects tensors and rectangles of tensors, from the index of the pair that gives the version. In the output, a tensor has the
    /// shape of its rectangle. Otherwise like [`tensors`](Self#structfield.tensors), to whose tensors it adds.
    pub select: Option<&'a SelectTensors<'a>>,
    /// Folder for the pairs that are read. They stay there for later calls. By default a hidden folder beside the output, which is
    /// removed when the output is complete and used again after an interruption.
    pub cache: Option<PathBuf>,
    /// Receives the number of rebuilt bytes of tensors; the total is the size of all tensors, or of the selected ones. It can
    /// stop the call, also between two objects of the store. The call then returns its error.
    pub watch: Option<&'a dyn Watch>,
}

impl<'a> GetOptions<'a> {
    /// Adds to [`have`](Self#structfield.have).
    #[must_use]
    pub fn have(mut self, version: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        self.have.push((version.into(), path.into()));
        self
    }

    /// Sets [`tensors`](Self#structfield.tensors).
    #[must_use]
    pub fn tensors(mut self, is_wanted: &'a dyn Fn(&str) -> bool) -> Self {
        self.tensors = Some(is_wanted);
        self
    }

    /// Sets [`select`](Self#structfield.select).
    #[must_use]
    pub fn select(mut self, select: &'a SelectTensors<'a>) -> Self {
        self.select = Some(select);
        self
    }

    /// Sets [`cache`](Self#structfield.cache).
    #[must_use]
    pub fn cache(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache = Some(folder.into());
        self
    }

    /// Sets [`watch`](Self#structfield.watch).
    #[must_use]
    pub fn watch(mut self, watch: &'a dyn Watch) -> Self {
        self.watch = Some(watch);
        self
    }

    /// Whether not all tensors are wanted.
    pub(crate) fn is_selection(&self) -> bool {
        self.tensors.is_some() || self.select.is_some()
    }

    /// What is wanted of the tensors of a pair.
    pub(crate) fn wanted(&self, version: &Version, index: &ValidatedIndex) -> Result<WantedTensors> {
        let selection = self.selection(version, index)?;
        Ok(WantedTensors::of(selection.into_iter().map(|(name, rectangle)| (name, vec![rectangle]))))
    }

    /// The wanted rectangles of the tensors of a pair: all tensors whole, if nothing is selected.
    ///
    /// # Errors
    /// Those of [`selection`](Self::selection).
    pub(crate) fn rectangles(&self, version: &Version, index: &ValidatedIndex) -> Result<BTreeMap<String, Rectangle>> {
        if self.is_selection() {
            return self.selection(version, index);
        }
        Ok(index.tensors().map(|tensor| (tensor.name.to_owned(), Rectangle::whole(tensor.whole_shape()))).collect())
    }

    /// The selected rectangles of the tensors of a pair.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are none; those of [`select`](Self#structfield.select).
    fn selection(&self, version: &Version, index: &ValidatedIndex) -> Result<BTreeMap<String, Rectangle>> {
        let is_wanted = |name: &str| self.tensors.is_some_and(|is_wanted| is_wanted(name));
        let whole = |tensor: Tensor<'_>| (tensor.name.to_owned(), Rectangle::whole(tensor.whole_shape()));
        let mut names = HashSet::new();
        let new = index.tensors().filter(|tensor| names.insert(tensor.name) && is_wanted(tensor.name));
        let mut selection: BTreeMap<_, _> = new.map(whole).collect();
        if let Some(select) = self.select {
            selection.extend(select(index)?);
        }
        if selection.is_empty() {
            return Err(Error::InvalidArgument(format!("no tensor of {} is selected", version.name())));
        }
        Ok(selection)
    }
}

/// What [`Store::get`](crate::Store::get) or [`Store::load`](crate::Store::load) has done.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GetReport {
    /// The version.
    pub version: Version,
    /// Damaged pairs on cheaper ways, which were not used.
    pub left_out: Vec<LeftOut>,
}

pub(crate) fn get(prefix: &Prefix, version: &str, output: impl AsRef<Path>, options: &GetOptions<'_>) -> Result<GetReport> {
    let output = output.as_ref();
    let mut catalog = prefix.catalog()?;
    let have = resolve(&mut catalog, &options.have)?;
    let version = catalog.find(version)?;
    if output.symlink_metadata().is_ok() {
        let reason = "it exists, and get replaces nothing: choose another output, or remove this one first";
        return Err(Error::io("write a version to", output, io::Error::new(io::ErrorKind::AlreadyExists, reason)));
    }
    let Some(name) = output.file_name() else {
        return Err(Error::InvalidArgument(format!("{} names no file or folder", Escaped(&output.display().to_string()))));
    };
    check_neighbours(output)?;
    let parent = parent_of(output);
    check_outside(prefix, "an output", Some(output))?;
    check_outside(prefix, "a cache", options.cache.as_deref())?;
    if let Some(cache) = options.cache.as_deref().filter(|cache| is_within(cache, output)) {
        let [cache, output] = [cache, output].map(|path| Escaped(&path.display().to_string()).to_string());
        return Err(Error::InvalidArgument(format!("expected a cache outside of the output {output}, found {cache}")));
    }
    let have = without_itself(&mut catalog, &version, have)?;
    fs::create_dir_all(parent).map_err(|e| Error::io("create", parent, e))?;
    let staged = TemporaryFolder::create_in(parent)?;
    let kept_path = parent.join(kept_name(name, &version));
    let kept = if options.cache.is_none() { LocalFolder::kept(&kept_path, staged.path())? } else { None };
    let is_new = kept.as_ref().is_some_and(|(_, is_new)| *is_new);
    let folder = match (&options.cache, kept) {
        (Some(cache), _) => LocalFolder::at(cache)?,
        (None, Some((kept, _))) => kept,
        (None, None) => LocalFolder::open(staged.path())?,
    };
    let watch = options.watch.unwrap_or(NOBODY);
    let cache = Cache { remote: &prefix.remote, folder: &folder, watch };

    let select = |index: &ValidatedIndex| options.wanted(&version, index);
    let select = options.is_selection().then_some(&select as Select<'_>);
    let reached = reach(&mut catalog, &cache, &version, Start::Get(&have), select, |route, pairs| {
        rebuild(&cache, &version, &Base::open(route, &have, pairs)?, &staged, options)
    });
    let outcome = reached.and_then(|((), left_out)| {
        check_neighbours(output)?; // files may have appeared during the work
        staged.publish(REBUILT, output)?;
        Ok(GetReport { version, left_out })
    });
    // What was read is of use only to a repeated call.
    let is_over = outcome.as_ref().map_or_else(|error| is_new && is_permanent(error), |_| true);
    if folder.path() == kept_path {
        let _ = if is_over { fs::remove_dir_all(&kept_path) } else { fs::remove_dir(&kept_path) };
    }
    outcome
}

/// Checks that a path is not in the folder of the store.
pub(crate) fn check_outside(prefix: &Prefix, what: &str, path: Option<&Path>) -> Result<()> {
    let Some((path, store)) = path.zip(prefix.remote.folder()) else { return Ok(()) };
    // Folders that do not exist are made, so `none/..` is here.
    let whole = absolute(path).unwrap_or_else(|_| path.to_owned());
    let existing = whole.ancestors().find_map(|above| Some((above.canonicalize().ok()?, whole.strip_prefix(above).ok()?)));
    let place = existing.map(|(mut place, below)| {
        below.components().for_each(|part| match part {
            Component::ParentDir => _ = place.pop(),
            part => place.push(part),
        });
        place
    });
    if place.is_some_and(|place| place.starts_with(store)) {
        let [store, path] = [store, path].map(|path| Escaped(&path.display().to_string()).to_string());
        return Err(Error::InvalidArgument(format!("expected {what} outside of the store {store}, found {path}")));
    }
    Ok(())
}

/// Whether a path is another one, which does not exist, or leads through it.
fn is_within(path: &Path, other: &Path) -> bool {
    let place = |path: &Path| Some((parent_of(path).canonicalize().ok()?, path.file_name()?.to_owned()));
    let other = place(other);
    other.is_some() && path.ancestors().any(|path| place(path) == other)
}

/// The checkpoints of the caller without those that have the tensors of the version: its files are rebuilt from the store.
///
/// # Errors
/// [`Error::InvalidArgument`] if it cannot be rebuilt without them.
pub(crate) fn without_itself(catalog: &mut Catalog<'_>, version: &Version, mut have: Have) -> Result<Have> {
    while let Some(Route { source: Source::Version(same), steps }) = route::find_without(catalog, version, Start::Get(&have), &[])?
        && steps.is_empty()
        && let Some(path) = have.remove(&(same.branch.clone(), same.number))
    {
        if route::find_without(catalog, version, Start::Get(&have), &[])?.is_none() {
            let path = Escaped(&path.display().to_string()).to_string();
            let reason =
                format!("{} is not stored: the checkpoint {path} was passed as this version, so use it as it is", version.name());
            return Err(Error::InvalidArgument(reason));
        }
    }
    Ok(have)
}

/// Whether the same call fails again.
fn is_permanent(error: &Error) -> bool {
    use tpde::Error as E;
    match error {
        Error::InvalidArgument(_) | Error::External { .. } | Error::Unreachable { .. } | Error::Tpde(E::InvalidArgument(_)) => true,
        Error::Tpde(E::Io { source, .. }) => source.kind() == io::ErrorKind::AlreadyExists,
        _ => false,
    }
}

/// Name of a rebuilt version in its temporary folder.
const REBUILT: &str = "rebuilt";

fn rebuild(cache: &Cache<'_>, version: &Version, base: &Base, staged: &TemporaryFolder, options: &GetOptions<'_>) -> Result<()> {
    let output = &staged.path().join(REBUILT);
    // Of another way, which was damaged.
    let _ = fs::remove_dir_all(output);
    let Some(last) = base.last() else {
        return Err(Error::InvalidArgument(format!("{} is a checkpoint that the caller has", version.name())));
    };
    check_pair(version, last.index())?;
    let chain = base.chain()?.without_last();
    let apply = Apply::new(last).base(&chain).watch(cache.watch);
    if options.is_selection() {
        let selection = options.selection(version, last.index())?;
        let shape = |name: &str| last.index().find(name).map(|tensor| tensor.whole_shape());
        if selection.iter().all(|(name, rectangle)| shape(name).is_some_and(|shape| *rectangle == Rectangle::whole(shape))) {
            // Not held in memory.
            apply.tensors(|name| selection.contains_key(name)).to_path(output)?;
        } else {
            apply.slices_to_path(&selection, output)?;
        }
        return Ok(());
    }
    apply.to_path(output)?;
    for file in &version.files {
        // `Version::parse` has checked that the name leads to a place below the folder.
        let path = output.join(&file.name);
        let parent = create_folders(output, &file.name)?;
        // Fails for a name that the file system does not tell apart from another one.
        let open = File::create_new(&path).map_err(|e| Error::io("create", &path, e))?;
        each_segment(cache.remote, &file.content, |offset, bytes| {
            cache.watch.done(0)?;
            open.write_all_at(&bytes, offset).map_err(|e| Error::io("write", &path, e))
        })?;
        open.sync_all().map_err(|e| Error::io("sync", &path, e))?;
        sync(&parent)?;
    }
    if !version.files.is_empty() {
        sync(output)?;
    }
    Ok(())
}

/// Creates the folders between a folder and a file below it. Returns the folder of the file. A folder that was removed meanwhile, at
/// a signal, is not created again.
fn create_folders(folder: &Path, name: &str) -> Result<PathBuf> {
    let mut path = folder.to_owned();
    let (between, _) = name.rsplit_once('/').unwrap_or_default();
    for part in between.split('/').filter(|part| !part.is_empty()) {
        path.push(part);
        match fs::create_dir(&path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(Error::io("create", &path, e)),
            _ => {}
        }
    }
    Ok(path)
}

/// Checks that a pair is what the manifest of its version states: its tensors, and no file of the same name.
pub(crate) fn check_pair(version: &Version, pair: &ValidatedIndex) -> Result<()> {
    check_state(version, pair)?;
    let name = version.name();
    if let Some(file) = version.files.first().filter(|_| is_one_file(pair)) {
        return Err(Error::manifest(&name, format_args!("file {} of a checkpoint that is one file", Escaped(&file.name))));
    }
    let of_pair: HashSet<_> = pair.files().map(|file| file.name).collect();
    match version.files.iter().find(|file| of_pair.contains(file.name.as_str())) {
        Some(file) => Err(Error::manifest(&name, format_args!("file {} is a file of the pair too", Escaped(&file.name)))),
        None => Ok(()),
    }
}

fn is_one_file(pair: &ValidatedIndex) -> bool {
    pair.files().all(|file| file.name.is_empty())
}

fn sync(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(|e| Error::io("sync", path, e))
}

/// Name of the folder for the pairs that a `get` reads: the same after an interruption, and of bounded length.
fn kept_name(output: &OsStr, version: &Version) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(version.id.as_bytes()).update(output.as_encoded_bytes());
    format!(".tpde-get-{}", &hasher.finalize().to_hex()[..32])
}
