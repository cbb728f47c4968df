//! `put`: encodes a checkpoint as a version, and uploads it meanwhile.

use crate::catalog::Catalog;
use crate::digest::{Digest, UploadId};
use crate::download::Cache;
use crate::error::{Error, Result};
use crate::lease::Lease;
use crate::local::{LocalFolder, parent_of};
use crate::manifest::{Content, SinceAnchor, Stored, StoredFile, StoredPair, Version, check_size};
use crate::names;
use crate::prefix::{NOBODY, Prefix, json, new_version, resolve, state};
use crate::reach::reach;
use crate::route::{self, Have, Route, Source, Start};
use crate::upload::{SegmentMap, Upload, take};
use crate::wanted::WantedTensors;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use tpde::{
    Apply, BaseKind, Chain, Checkpoint, Encode, EncodeOptions, Escaped, FileSource, MemoryCheckpoint, PairPaths,
    SafetensorsCheckpoint, Tensor, ValidatedIndex, Watch,
};

/// How a version is stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Anchor {
    /// As a difference from its parent, unless the store's rules ask for an anchor or there is no parent.
    #[default]
    ByRule,
    /// Whole: it needs no other version.
    Whole,
    /// Not at all: only the digest of its tensors. Readers supply the checkpoint.
    External {
        /// Where the checkpoint can be found, such as a name on a hub.
        hint: String,
    },
}

/// Options of [`Store::put`](crate::Store::put).
#[derive(Clone)]
#[non_exhaustive]
pub struct PutOptions<'a> {
    /// The branch. It is created if it does not exist. The default is `main`.
    pub branch: String,
    /// The version that is the base. By default the head of the branch. A version of another branch can be named only for the first
    /// version of a branch. If another version of the branch is its head, that is a conflict.
    pub parent: Option<String>,
    /// How the version is stored.
    pub anchor: Anchor,
    /// Checkpoints that the caller has: versions, and where they are. A version that is not here is read from the store.
    pub have: Vec<(String, PathBuf)>,
    /// The user's own values.
    pub metadata: BTreeMap<String, String>,
    /// Options of the encoder. Renamed tensors are those of the parent; a version that is stored whole ignores them.
    pub encode: EncodeOptions,
    /// Receives the number of encoded bytes of tensors; the total is the size of all tensors. It can stop the call, also between
    /// two objects of the store. The call then returns its error.
    pub watch: Option<&'a dyn Watch>,
}

impl Default for PutOptions<'_> {
    fn default() -> Self {
        Self {
            branch: "main".into(),
            parent: None,
            anchor: Anchor::ByRule,
            have: Vec::new(),
            metadata: BTreeMap::new(),
            encode: EncodeOptions::default(),
            watch: None,
        }
    }
}

impl<'a> PutOptions<'a> {
    /// Sets [`branch`](Self#structfield.branch).
    #[must_use]
    pub fn branch(mut self, name: impl Into<String>) -> Self {
        self.branch = name.into();
        self
    }

    /// Sets [`parent`](Self#structfield.parent).
    #[must_use]
    pub fn parent(mut self, version: impl Into<String>) -> Self {
        self.parent = Some(version.into());
        self
    }

    /// Sets [`anchor`](Self#structfield.anchor).
    #[must_use]
    pub fn anchor(mut self, anchor: Anchor) -> Self {
        self.anchor = anchor;
        self
    }

    /// Adds to [`have`](Self#structfield.have).
    #[must_use]
    pub fn have(mut self, version: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        self.have.push((version.into(), path.into()));
        self
    }

    /// Sets [`metadata`](Self#structfield.metadata).
    #[must_use]
    pub fn metadata(mut self, values: impl IntoIterator<Item = (impl Into<String>, impl Into<String>)>) -> Self {
        self.metadata = values.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
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

pub(crate) fn put(prefix: &Prefix, checkpoint: impl AsRef<Path>, options: &PutOptions<'_>) -> Result<Version> {
    let path = checkpoint.as_ref();
    if let (Some(store), Ok(folder)) = (prefix.remote.folder(), path.canonicalize())
        && store.starts_with(&folder)
    {
        let path = Escaped(&path.display().to_string()).to_string();
        let reason = format!("the checkpoint {path} contains the store {}, into which it is to be put", store.display());
        return Err(Error::InvalidArgument(reason));
    }
    // The other files of a shard index are those of its folder.
    let is_index = || path.extension().is_some_and(|extension| extension == "json");
    let folder = if path.is_dir() { Some(path) } else { is_index().then(|| parent_of(path)) };
    put_checkpoint(prefix, &SafetensorsCheckpoint::open(path)?, folder, options)
}

/// The head of the branch, the parent of the next version, and that version without its content.
fn next_version(catalog: &mut Catalog<'_>, options: &PutOptions<'_>) -> Result<(Option<Version>, Version)> {
    names::check_branch(&options.branch).map_err(Error::InvalidArgument)?;
    let head = catalog.head(&options.branch)?;
    let number = catalog.branch(&options.branch)?.next_number();
    let parent = match &options.parent {
        Some(version) => Some(catalog.find(version)?),
        None => head.clone(),
    };
    if let (Some(head), Some(parent)) = (&head, &parent)
        && head.id != parent.id
    {
        if parent.branch == head.branch {
            return Err(Error::Conflict { version: head.name() });
        }
        let reason = format!("the parent of a new version of {} is its head {}, not {}", head.branch, head.name(), parent.name());
        return Err(Error::InvalidArgument(reason));
    }
    let mut version = new_version(&options.branch, number, parent.as_ref());
    version.metadata.clone_from(&options.metadata);
    // Before all the work. The manifest is checked once more when it is complete.
    let object = names::manifest(&version.branch, version.number);
    check_size(json(&version)?.len() as u64, &object)?;
    Ok((parent, version))
}

/// Stores a checkpoint, and the other files of its folder.
pub(crate) fn put_checkpoint(
    prefix: &Prefix,
    target: &dyn Checkpoint,
    folder: Option<&Path>,
    options: &PutOptions<'_>,
) -> Result<Version> {
    let (parent, version) = next_version(&mut prefix.catalog()?, options)?;
    let (lease, catalog) = lease_of_next(prefix, &version)?;
    let put = Put { prefix, id: lease.id(), catalog, options };
    let (version, lease) = lease.during(|_| put.encode(target, folder, parent, version))?;
    lease.publish(&version)?;
    Ok(version)
}

/// The lease of a call that creates a version, and uses its parent.
pub(crate) fn lease_of<'a>(prefix: &'a Prefix, version: &Version) -> Result<(Lease<'a>, Catalog<'a>)> {
    let creates = Some(names::manifest(&version.branch, version.number));
    Lease::take(prefix, UploadId::new(), creates, version.parent.iter().cloned().collect())
}

/// As [`lease_of`], for the next version of a branch. If the head is gone, another call has deleted the branch: a conflict.
fn lease_of_next<'a>(prefix: &'a Prefix, version: &Version) -> Result<(Lease<'a>, Catalog<'a>)> {
    let is_of_head = version.parent.as_ref().is_some_and(|parent| parent.branch == version.branch);
    lease_of(prefix, version).map_err(|error| match error {
        Error::NoVersion { .. } if is_of_head => Error::Conflict { version: version.name() },
        error => error,
    })
}

/// Stores a pair that was made elsewhere.
pub(crate) fn put_pair(prefix: &Prefix, path: &Path, options: &PutOptions<'_>) -> Result<Version> {
    let (parent, version) = next_version(&mut prefix.catalog()?, options)?;
    let (lease, catalog) = lease_of_next(prefix, &version)?;
    let put = Put { prefix, id: lease.id(), catalog, options };
    let (version, lease) = lease.during(|_| put.describe_pair(path, parent, version))?;
    lease.publish(&version)?;
    Ok(version)
}

/// A call that has a lease, and stores a version.
struct Put<'a> {
    prefix: &'a Prefix,
    id: UploadId,
    /// Read since there is the lease.
    catalog: Catalog<'a>,
    options: &'a PutOptions<'a>,
}

impl Put<'_> {
    /// Encodes a checkpoint as the version behind its parent, and uploads it.
    fn encode(
        self,
        target: &dyn Checkpoint,
        folder: Option<&Path>,
        parent: Option<Version>,
        mut version: Version,
    ) -> Result<Version> {
        let Self { prefix, id, mut catalog, options } = self;
        let watch = options.watch.unwrap_or(NOBODY);
        let have = resolve(&mut catalog, &options.have)?;
        version.tensors = target.tensors().len() as u64;
        version.tensor_bytes = target.tensors().iter().map(|tensor| tensor.bytes()).sum();

        let known: SegmentMap = parent.iter().flat_map(Version::file_segments).map(|segment| (segment.digest, *segment)).collect();
        let encode = options.encode.clone().payload_digests(true); // readers of ranges compare them
        let mut without_parent = encode.clone();
        without_parent.renamed.clear();
        let folder_of_pairs;
        let base = match (&options.anchor, &parent) {
            (Anchor::ByRule, Some(parent)) if !needs_anchor(prefix, &mut catalog, parent)? => {
                folder_of_pairs = LocalFolder::temporary()?;
                let cache = Cache { remote: &prefix.remote, folder: &folder_of_pairs, watch };
                if_reachable(Base::reach(&mut catalog, &cache, parent, &have))?.map(|base| (parent, base))
            }
            _ => None,
        };
        let pair_files = match (&options.anchor, &base) {
            (Anchor::External { hint }, _) => {
                // Encoded against itself, only to form its digests. Nothing of it is kept.
                let pair = Encode::new(target).base(target).options(without_parent).watch(watch).to_memory()?.0;
                version.state = state(pair.index());
                version.content = Content::External { hint: hint.clone() };
                version.since_anchor = Some(SinceAnchor { pairs: 0, bytes: 0, anchor_bytes: version.tensor_bytes });
                file_names(pair.index())
            }
            (_, Some((parent, base))) => {
                let chain = base.chain()?;
                let encode = Encode::new(target).base(&chain).options(encode).watch(watch);
                let (index, pair) = upload_pair(prefix, id, encode, version.tensor_bytes)?;
                version.state = state(&index);
                version.since_anchor = behind(&mut catalog, parent, &pair)?;
                version.content = Content::Difference(pair);
                file_names(&index)
            }
            _ => {
                let encode = Encode::new(target).options(without_parent).watch(watch);
                let (index, pair) = upload_pair(prefix, id, encode, version.tensor_bytes)?;
                version.state = state(&index);
                version.since_anchor = Some(SinceAnchor { pairs: 0, bytes: 0, anchor_bytes: pair.bytes() });
                version.content = Content::Whole(pair);
                file_names(&index)
            }
        };
        if let Some(folder) = folder {
            for (name, path) in files_below(folder, &pair_files)? {
                watch.done(0)?;
                let mut file = FileSource::open(&path)?;
                file.settle()?;
                let content = Upload::new(prefix, id, &known).file(&file)?;
                version.files.push(StoredFile { name, content });
            }
        }
        Ok(version)
    }

    /// Checks a pair that was made elsewhere, and uploads it as the version behind its parent.
    fn describe_pair(self, path: &Path, parent: Option<Version>, mut version: Version) -> Result<Version> {
        let Self { prefix, id, mut catalog, options } = self;
        let have = resolve(&mut catalog, &options.have)?;
        let pair = tpde::Pair::open(path)?;
        let index = pair.index();
        if !index.has_payload_digests() {
            let reason = "a pair in a store has the digest of each payload: encode or merge it with payload digests";
            return Err(Error::InvalidArgument(reason.into()));
        }
        let is_whole = index.tensors().all(|tensor| tensor.base_kind == BaseKind::None);
        let base = parent.as_ref().filter(|_| !is_whole);
        match base {
            Some(parent) => check_fits(prefix, &mut catalog, parent, &have, &pair, options.watch.unwrap_or(NOBODY))?,
            None if is_whole => {}
            None => {
                let reason = format!("the pair has a base, and {} has no parent", version.name());
                return Err(Error::InvalidArgument(reason));
            }
        }
        version.tensors = index.tensors().map(|tensor| tensor.name).collect::<HashSet<_>>().len() as u64;
        version.tensor_bytes = index.tensor_bytes().1;
        version.state = state(index);
        let stored = upload_files(prefix, id, path)?;
        if stored.digest.0 != *index.pair_digest() {
            return Err(tpde::Error::Changed { what: path.display().to_string() }.into());
        }
        version.since_anchor = match base {
            Some(parent) => behind(&mut catalog, parent, &stored)?,
            None => Some(SinceAnchor { pairs: 0, bytes: 0, anchor_bytes: stored.bytes() }),
        };
        version.content = if is_whole { Content::Whole(stored) } else { Content::Difference(stored) };
        Ok(version)
    }
}

/// Checks that the base of a pair is its parent. If both describe the same parts of tensors, the digests in the indexes say so.
/// Otherwise the pair is decoded.
fn check_fits(
    prefix: &Prefix,
    catalog: &mut Catalog<'_>,
    parent: &Version,
    have: &Have,
    pair: &tpde::Pair<FileSource>,
    watch: &dyn Watch,
) -> Result<()> {
    let folder = LocalFolder::temporary()?;
    let cache = Cache { remote: &prefix.remote, folder: &folder, watch };
    let open = |route: &Route, pairs| Base::open(route, have, pairs);
    let (base, _) = reach(catalog, &cache, parent, Start::Get(have), Some(&|_| Ok(WantedTensors::default())), open)?;
    Chain::new(base.checkpoint(), base.pairs.iter().chain([pair]))?;
    let is_described = |tensor: Tensor<'_>| {
        let of_base = base.last().into_iter().flat_map(|last| last.index().entries(tensor.base_name));
        tensor.base_kind == BaseKind::Same && of_base.into_iter().any(|entry| entry.rectangle() == tensor.rectangle())
    };
    if !pair.index().tensors().filter(|tensor| tensor.base_kind != BaseKind::None).all(is_described) {
        let base = Base::reach(catalog, &cache, parent, have)?;
        Apply::new(pair).base(&base.chain()?).watch(watch).verify()?;
    }
    Ok(())
}

/// Uploads a pair for another call. The lease protects it until it is older than the grace.
pub(crate) fn upload_alone(prefix: &Prefix, path: &Path) -> Result<StoredPair> {
    prefix.check()?;
    let (lease, _) = Lease::take(prefix, UploadId::new(), None, Vec::new())?;
    Ok(lease.during(|lease| upload_files(prefix, lease.id(), path))?.0)
}

/// Uploads the files of a pair.
fn upload_files(prefix: &Prefix, id: UploadId, path: &Path) -> Result<StoredPair> {
    let known = SegmentMap::new();
    let paths = PairPaths::new(path);
    let (mut index, mut blob) = (FileSource::open(&paths.index)?, FileSource::open(&paths.blob)?);
    index.settle()?;
    blob.settle()?;
    let digest = Digest(*tpde::Pair::open(path)?.index().pair_digest());
    let upload = |file: &FileSource| Upload::new(prefix, id, &known).file(file);
    let (index, blob) = (upload(&index)?, upload(&blob)?);
    Ok(StoredPair { digest, index, blob })
}

/// Returns whether the store's rules require an anchor after `parent`.
pub(crate) fn needs_anchor(prefix: &Prefix, catalog: &mut Catalog<'_>, parent: &Version) -> Result<bool> {
    let Some(SinceAnchor { pairs, bytes, anchor_bytes }) = since_anchor(catalog, parent)? else { return Ok(false) };
    let is_long = prefix.rules.anchor_every > 0 && pairs.saturating_add(1) >= prefix.rules.anchor_every;
    let percent = u128::from(prefix.rules.anchor_percent);
    let is_large = percent > 0 && u128::from(bytes) * 100 > u128::from(anchor_bytes) * percent;
    Ok(is_long || is_large)
}

/// The base, unless a version that it needs is gone.
fn if_reachable(base: Result<Base>) -> Result<Option<Base>> {
    match base {
        Err(error @ Error::Unreachable { .. }) => {
            tracing::warn!("the version is stored whole: {error}");
            Ok(None)
        }
        outcome => outcome.map(Some),
    }
}

/// What leads to a version from the last anchor. If its manifest does not say so, its way is searched for.
fn since_anchor(catalog: &mut Catalog<'_>, version: &Version) -> Result<Option<SinceAnchor>> {
    match version.since_anchor {
        Some(known) => Ok(Some(known)),
        None => Ok(route::find_without(catalog, version, Start::Anchor, &[])?.map(|route| route.since_anchor())),
    }
}

/// What leads to the version behind `parent` that is stored as `pair`.
fn behind(catalog: &mut Catalog<'_>, parent: &Version, pair: &StoredPair) -> Result<Option<SinceAnchor>> {
    let known = since_anchor(catalog, parent)?;
    Ok(known.map(|known| SinceAnchor {
        pairs: known.pairs.saturating_add(1),
        bytes: known.bytes.saturating_add(pair.bytes()),
        ..known
    }))
}

/// Encodes a pair, and uploads its blob meanwhile.
pub(crate) fn upload_pair(
    prefix: &Prefix,
    id: UploadId,
    encode: Encode<'_>,
    tensor_bytes: u64,
) -> Result<(ValidatedIndex, StoredPair)> {
    // A segment of the parent's pair is uploaded too: that pair may be replaced by a shortcut and removed.
    let known = SegmentMap::new();
    let upload = Upload::new(prefix, id, &known).beside_encoder(tensor_bytes)?;
    let failure = upload.failure();
    let streamed = encode.to_writer(upload).map_err(|e| take(&failure).unwrap_or(e.into()))?;
    if let [first, ..] = &streamed.report.unused[..] {
        tracing::warn!(
            "tensors whose base is not used as it was meant: {}, such as {} (base {}: {})",
            streamed.report.unused.len(),
            Escaped(&first.tensor),
            Escaped(&first.base),
            Escaped(&first.reason)
        );
    }
    let blob: Stored = streamed.blob.finish(&streamed.header)?;
    let index = Upload::new(prefix, id, &known).all(&streamed.index.as_bytes())?;
    let digest = Digest(*streamed.index.pair_digest());
    Ok((streamed.index, StoredPair { digest, index, blob }))
}

/// What a version is rebuilt from, opened: a checkpoint or nothing, and pairs in the folder of a cache.
pub(crate) struct Base {
    checkpoint: Option<SafetensorsCheckpoint>,
    pairs: Vec<tpde::Pair<FileSource>>,
}

static EMPTY: MemoryCheckpoint<'static> = MemoryCheckpoint::EMPTY;

impl Base {
    /// A version, read by the cheapest way.
    pub fn reach(catalog: &mut Catalog<'_>, cache: &Cache<'_>, version: &Version, have: &Have) -> Result<Self> {
        let (base, _) = reach(catalog, cache, version, Start::Get(have), None, |route, pairs| Self::open(route, have, pairs))?;
        Ok(base)
    }

    /// What a route leads to, whose pairs were read.
    pub fn open(route: &Route, have: &Have, pairs: Vec<tpde::Pair<FileSource>>) -> Result<Self> {
        let base = Self { checkpoint: open_source(route, have)?, pairs };
        base.chain()?;
        Ok(base)
    }

    pub fn checkpoint(&self) -> &dyn Checkpoint {
        self.checkpoint.as_ref().map_or(&EMPTY as &dyn Checkpoint, |checkpoint| checkpoint)
    }

    /// The pair that gives the version itself.
    pub fn last(&self) -> Option<&tpde::Pair<FileSource>> {
        self.pairs.last()
    }

    pub fn chain(&self) -> Result<Chain<'_, FileSource>> {
        Ok(Chain::new(self.checkpoint(), &self.pairs)?)
    }
}

/// The checkpoint of the caller at which a route begins, if it does.
fn open_source(route: &Route, have: &Have) -> Result<Option<SafetensorsCheckpoint>> {
    let Source::Version(version) = &route.source else { return Ok(None) };
    let path = have.get(&(version.branch.clone(), version.number));
    Ok(path.map(SafetensorsCheckpoint::open).transpose()?)
}

fn file_names(index: &ValidatedIndex) -> HashSet<String> {
    index.files().map(|file| file.name.to_owned()).collect()
}

/// The files below a folder that no pair describes, as names and paths, in ascending order of name, with those to which links lead.
fn files_below(folder: &Path, of_pair: &HashSet<String>) -> Result<Vec<(String, PathBuf)>> {
    let mut files = Vec::new();
    let mut open = vec![(folder.to_owned(), String::new())];
    while let Some((path, prefix)) = open.pop() {
        let mut is_empty = true;
        for entry in path.read_dir().map_err(|e| Error::io("list", &path, e))? {
            let entry = entry.map_err(|e| Error::io("list", &path, e))?;
            is_empty = false;
            let kind = entry.file_type().map_err(|e| Error::io("look at", &entry.path(), e))?;
            let Ok(name) = entry.file_name().into_string() else {
                let path = entry.path();
                return Err(Error::InvalidArgument(format!("the name of {path:?} is not UTF-8, which names in a store are")));
            };
            let name = prefix.clone() + &name;
            if of_pair.contains(&name) {
                continue;
            }
            names::check_file(&name).map_err(Error::InvalidArgument)?;
            if kind.is_dir() {
                open.push((entry.path(), format!("{name}/")));
            } else if kind.is_file() || (kind.is_symlink() && entry.path().is_file()) {
                files.push((name, entry.path()));
            } else {
                let path = entry.path();
                return Err(Error::InvalidArgument(format!("{path:?} is neither a file nor a folder, nor a link to a file")));
            }
        }
        if is_empty {
            tracing::warn!(
                "the folder {} is empty, and a store has only files: it is left out",
                Escaped(&path.display().to_string())
            );
        }
    }
    files.sort_unstable();
    Ok(files)
}
