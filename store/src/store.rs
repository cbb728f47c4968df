//! The store: its calls.

use crate::catalog::Whole;
use crate::download::Cache;
use crate::error::{Error, Result};
use crate::fold::{self, FoldOptions, PruneReport};
use crate::gc::{self, GcReport};
use crate::get::{self, GetOptions, GetReport};
use crate::local::LocalFolder;
use crate::manifest::{Content, MAX_MANIFEST, STORE_SCHEMA, Shortcut, StoreManifest, StoredPair, Version};
use crate::names::{self, STORE};
use crate::opened::{self, LoadTensors, Opened};
use crate::prefix::{NOBODY, Prefix, SEGMENT_BYTES, json, new_id, new_version, now};
use crate::put::{self, PutOptions};
use crate::remote::{IN_FLIGHT, Remote};
use crate::report::{self, VersionReport};
use crate::verify::{self, VerifyReport};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tpde::{Checkpoint, Rectangle, Watch};

/// Segments that an upload holds beside those that are being sent.
const BEING_FILLED: usize = 2;

/// Memory for objects that a call reads or writes at the same time, in bytes, unless [`Store::with_memory`] sets another bound.
pub const MEMORY: u64 = ((IN_FLIGHT + BEING_FILLED) * SEGMENT_BYTES) as u64;

/// Versions of checkpoints in a folder or an object store.
///
/// Calls block. They may come from any thread, also from one of another tokio runtime.
pub struct Store(pub(crate) Prefix);

/// Rules of a store, which [`Store::init`] stores for all writers.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Objects that are younger are never collected, and a call whose lease is not renewed for so long is given up. The default is a
    /// day; at least 2 s, because clocks of object stores may count whole seconds.
    pub grace: Duration,
    /// A version is stored whole if this many pairs would lead to it from the last anchor; 0 for no such rule. The default is 100.
    pub anchor_every: u64,
    /// Size of a chain, in percent of its anchor, above which the next version is stored whole; 0 for no such rule. The default is
    /// 100.
    pub anchor_percent: u64,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self { grace: Duration::from_secs(24 * 60 * 60), anchor_every: 100, anchor_percent: 100 }
    }
}

impl StoreOptions {
    /// Sets [`grace`](Self#structfield.grace).
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Sets [`anchor_every`](Self#structfield.anchor_every).
    #[must_use]
    pub fn anchor_every(mut self, versions: u64) -> Self {
        self.anchor_every = versions;
        self
    }

    /// Sets [`anchor_percent`](Self#structfield.anchor_percent).
    #[must_use]
    pub fn anchor_percent(mut self, percent: u64) -> Self {
        self.anchor_percent = percent;
        self
    }
}

/// Sizes of what a store's manifests name.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct Usage {
    /// Number of versions that can be named.
    pub versions: u64,
    /// Number of versions that were pruned or deleted, and are still stored. Their bytes count.
    pub waiting: u64,
    /// When the first version that can be named was stored, in seconds since 1970 by its writer's clock.
    pub oldest: Option<u64>,
    /// When the last one was stored.
    pub newest: Option<u64>,
    /// Number of shortcuts.
    pub shortcuts: u64,
    /// Size of the anchors in bytes.
    pub anchor_bytes: u64,
    /// Size of the pairs that need their parent, in bytes.
    pub difference_bytes: u64,
    /// Size of the pairs of shortcuts in bytes.
    pub shortcut_bytes: u64,
    /// Size of the files beside the tensors, each counted once, in bytes.
    pub file_bytes: u64,
    /// Size of all of these in bytes.
    pub stored_bytes: u64,
    /// Size of all tensors of the versions that can be named, in bytes, without those of external versions.
    pub tensor_bytes: u64,
}

impl Store {
    /// Makes a store of a folder, which is created, or of a prefix of an object store.
    ///
    /// `location` is a path, or a URL: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, each with its feature.
    /// Credentials come from the usual environment variables, such as `AWS_ACCESS_KEY_ID` and `AWS_ENDPOINT_URL`.
    ///
    /// # Errors
    /// [`Error::AlreadyAStore`]; [`Error::NoPutIfAbsent`]; [`Error::Request`]; [`Error::InvalidArgument`] for a grace below 2 s.
    pub fn init(location: &str, options: &StoreOptions) -> Result<Self> {
        Self::init_at(Remote::open(location, true)?, options)
    }

    /// [`Store::init`], and then [`Store::watched`]: the watcher can end this call too.
    ///
    /// # Errors
    /// As for [`Store::init`], and the watcher's.
    pub fn init_watched(location: &str, options: &StoreOptions, watch: Arc<dyn Watch + Send + Sync>) -> Result<Self> {
        Self::init_at(Remote::open(location, true)?.watched(watch), options)
    }

    pub(crate) fn init_at(remote: Remote, options: &StoreOptions) -> Result<Self> {
        if options.grace < Duration::from_secs(2) {
            return Err(Error::InvalidArgument(format!("a grace of {:?}: expected at least 2 s", options.grace)));
        }
        let rules = StoreManifest {
            schema: STORE_SCHEMA.into(),
            id: Some(new_id()),
            grace: options.grace.as_secs(),
            anchor_every: options.anchor_every,
            anchor_percent: options.anchor_percent,
        };
        let identity = json(&rules)?;
        if remote.get(STORE.into(), MAX_MANIFEST).wait()??.is_some() || !remote.create(STORE, identity.clone())? {
            return Err(Error::AlreadyAStore { location: remote.location().to_owned() });
        }
        if let Err(error) = remote.probe(STORE, identity.clone()) {
            remote.delete(STORE)?;
            return Err(error);
        }
        Ok(Self(Prefix { remote, rules, identity: identity.into(), segment_bytes: SEGMENT_BYTES }))
    }

    /// Opens a store. `location` is as for [`Store::init`].
    ///
    /// # Errors
    /// [`Error::NotAStore`]; [`Error::Schema`] or [`Error::Manifest`] for its `store.json`; [`Error::Request`].
    pub fn open(location: &str) -> Result<Self> {
        Self::open_at(Remote::open(location, false)?)
    }

    /// [`Store::open`], and then [`Store::watched`]: the watcher can end this call too.
    ///
    /// # Errors
    /// As for [`Store::open`], and the watcher's.
    pub fn open_watched(location: &str, watch: Arc<dyn Watch + Send + Sync>) -> Result<Self> {
        Self::open_at(Remote::open(location, false)?.watched(watch))
    }

    pub(crate) fn open_at(remote: Remote) -> Result<Self> {
        let found = remote.get(STORE.into(), MAX_MANIFEST).wait()??;
        let bytes = found.ok_or_else(|| Error::NotAStore { location: remote.location().to_owned() })?;
        let rules = StoreManifest::parse(&bytes, STORE)?;
        Ok(Self(Prefix { rules, identity: bytes.into(), remote, segment_bytes: SEGMENT_BYTES }))
    }

    /// The same store, whose calls `watch` can end, also while they wait for a request: the watcher is asked every 50 ms. The call
    /// then returns the watcher's error, and the request may still be carried out.
    #[must_use]
    pub fn watched(&self, watch: Arc<dyn Watch + Send + Sync>) -> Self {
        let Prefix { remote, rules, identity, segment_bytes } = &self.0;
        let (remote, rules, identity) = (remote.watched(watch), rules.clone(), identity.clone());
        Self(Prefix { remote, rules, identity, segment_bytes: *segment_bytes })
    }

    /// The same store, whose calls hold objects of about `bytes` in memory at the same time, and at least three of 32 MiB. The
    /// default is [`MEMORY`]. With less memory, fewer requests run at the same time.
    #[must_use]
    pub fn with_memory(&self, bytes: u64) -> Self {
        let Prefix { remote, rules, identity, segment_bytes } = &self.0;
        let count = usize::try_from(bytes / SEGMENT_BYTES as u64).unwrap_or(usize::MAX).saturating_sub(BEING_FILLED);
        Self(Prefix {
            remote: remote.with_in_flight(count),
            rules: rules.clone(),
            identity: identity.clone(),
            segment_bytes: *segment_bytes,
        })
    }

    /// The version that `version` names: `BRANCH@NUMBER`, or `BRANCH` for its head.
    ///
    /// # Errors
    /// [`Error::NoVersion`]; [`Error::Pruned`]; [`Error::InvalidArgument`] for a name that cannot exist; the errors of reading the
    /// branch's manifests.
    pub fn version(&self, version: &str) -> Result<Version> {
        self.0.catalog()?.find(version)
    }

    /// The versions of a branch, newest first.
    ///
    /// # Errors
    /// As for [`Store::version`].
    pub fn log(&self, branch: &str) -> Result<Vec<Version>> {
        names::check_branch(branch).map_err(Error::InvalidArgument)?;
        let mut catalog = self.0.catalog()?;
        let versions: Vec<_> = catalog.whole(branch)?.versions().rev().cloned().collect();
        if versions.is_empty() {
            return Err(Error::NoVersion { version: branch.to_owned() });
        }
        Ok(versions)
    }

    /// The newest versions of a branch, at most `count`, newest first. The manifests of earlier ones are not read.
    ///
    /// # Errors
    /// As for [`Store::version`].
    pub fn newest(&self, branch: &str, count: usize) -> Result<Vec<Version>> {
        names::check_branch(branch).map_err(Error::InvalidArgument)?;
        let mut catalog = self.0.catalog()?;
        let mut versions = catalog.newest(branch, count)?;
        if catalog.branch(branch)?.head().is_none() {
            return Err(Error::NoVersion { version: branch.to_owned() });
        }
        versions.reverse();
        Ok(versions)
    }

    /// The versions of a branch from number `from` on, in ascending order; none if there is no such branch. Earlier ones are not read.
    ///
    /// # Errors
    /// As for [`Store::version`].
    pub fn since(&self, branch: &str, from: u64) -> Result<Vec<Version>> {
        names::check_branch(branch).map_err(Error::InvalidArgument)?;
        self.0.catalog()?.since(branch, from)
    }

    /// The heads of all branches, in ascending order of name.
    ///
    /// # Errors
    /// The errors of reading manifests.
    pub fn branches(&self) -> Result<Vec<Version>> {
        let mut catalog = self.0.catalog()?;
        catalog.heads()
    }

    /// Creates a branch: its first version has the tensors and files of version `from`. Nothing is copied.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the branch exists; [`Error::Conflict`] if another writer creates it first;
    /// [`Error::TooSlow`]; the errors of [`Store::version`].
    pub fn create_branch(&self, name: &str, from: &str) -> Result<Version> {
        let invalid = |reason: String| Error::InvalidArgument(reason);
        names::check_branch(name).map_err(invalid)?;
        let mut catalog = self.0.catalog()?;
        let from = catalog.find(from)?;
        let branch = catalog.branch(name)?;
        if branch.head().is_some() {
            return Err(invalid(format!("branch {name} exists")));
        }
        let version = Version {
            branch: name.to_owned(),
            number: branch.next_number(),
            id: new_id(),
            parent: Some(from.reference()),
            content: Content::Same,
            created: now(),
            metadata: BTreeMap::new(),
            ..from
        };
        put::lease_of(&self.0, &version)?.0.publish(&version)?;
        Ok(version)
    }

    /// Deletes a branch. Its versions can be neither named nor listed from now on. Branches that begin at one of them lose nothing:
    /// [`Store::gc`] removes what no other version needs, once the deletion is older than the grace. A new branch of this name
    /// goes on with higher numbers. Returns the version that was the head, or if its manifest is not valid, the newest one before it.
    ///
    /// # Errors
    /// [`Error::NoVersion`] if there is no such branch; [`Error::Conflict`] if a writer stores a version first: the branch stays;
    /// [`Error::TooSlow`]; the errors of reading the branch's manifests.
    pub fn delete_branch(&self, name: &str) -> Result<Version> {
        names::check_branch(name).map_err(Error::InvalidArgument)?;
        let mut catalog = self.0.catalog()?;
        let no_version = || Error::NoVersion { version: name.to_owned() };
        // Also if the head is damaged: the newest version that is not is then the parent.
        let branch = catalog.sound_and_damaged(name)?;
        branch.head().ok_or_else(no_version)?;
        let (head, number) = (branch.versions().next_back().cloned(), branch.next_number());
        let head = head.unwrap_or_else(|| new_version(name, branch.head().unwrap_or_default(), None));
        let deletion = Version { content: Content::Deleted, ..new_version(name, number, Some(&head)) };
        let (lease, _) = put::lease_of(&self.0, &Version { parent: None, ..deletion.clone() })?;
        // Before the manifest, so that no list shows a deletion without its mark. The lease protects the mark.
        let mark = self.0.remote.put(names::deletion(name, number), Vec::new());
        let (_, lease) = lease.during(|_| mark.wait()?)?;
        lease.publish(&deletion)?;
        Ok(head)
    }

    /// Stores a checkpoint, a `.safetensors` file or a folder, as the next version of a branch.
    ///
    /// The other files of a folder, and of the folders in it, are stored too. A link to a file is stored as that file. Nothing is
    /// left out silently: other links are refused. A file that the parent has is not uploaded again.
    ///
    /// The blob is uploaded while it is encoded. Disk: the pairs that lead to the parent, in a temporary folder, unless the
    /// parent is one of [`PutOptions::have`]. Memory: that of encoding, and about ten segments of 32 MiB.
    ///
    /// # Errors
    /// [`Error::Conflict`] if another call has created the version or deleted the branch first; [`Error::External`] if the parent
    /// must be supplied; [`Error::InvalidArgument`] for a name that is not UTF-8, a link to a folder or to nothing, or a special file;
    /// [`Error::TooSlow`]; [`Error::Unreachable`]; the errors of [`Encode::to_writer`](tpde::Encode::to_writer) and of requests. The
    /// branch is as it was. What was uploaded is collected by [`Store::gc`].
    pub fn put(&self, checkpoint: impl AsRef<Path>, options: &PutOptions<'_>) -> Result<Version> {
        put::put(&self.0, checkpoint.as_ref(), options)
    }

    /// [`Store::put`] for tensors in memory. The version has no files; [`Store::get`] writes it as one safetensors file.
    ///
    /// # Errors
    /// As for [`Store::put`].
    pub fn put_tensors(&self, tensors: &dyn Checkpoint, options: &PutOptions<'_>) -> Result<Version> {
        put::put_checkpoint(&self.0, tensors, None, options)
    }

    /// Rebuilds a version as `output`: a file, or a folder with all files of the checkpoint. `output` must not exist. It appears
    /// when it is complete: all digests are compared, and all files are synced. If a pair on the cheapest way is damaged, such as a
    /// shortcut, the next cheapest way without it is taken: [`GetReport::left_out`].
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Manifest`] or [`Error::Tpde`] if an object is damaged or a base is wrong; [`Error::External`] if
    /// the base is not in the store and not in [`GetOptions::have`]; [`Error::Unreachable`]; [`Error::InvalidArgument`] if the
    /// version is stored only as a checkpoint in `have`; the errors of requests. There is no output then.
    pub fn get(&self, version: &str, output: impl AsRef<Path>, options: &GetOptions<'_>) -> Result<GetReport> {
        get::get(&self.0, version, output.as_ref(), options)
    }

    /// Describes the versions of a branch, in ascending order of number. Reads the indexes of the pairs that lead to them.
    ///
    /// # Errors
    /// The errors of [`Store::log`]; [`Error::Damaged`] or [`Error::Tpde`] if an index is damaged; [`Error::Unreachable`] if a version
    /// cannot be rebuilt.
    pub fn report(&self, branch: &str) -> Result<Vec<VersionReport>> {
        names::check_branch(branch).map_err(Error::InvalidArgument)?;
        report::report(&self.0, branch)
    }

    /// Reads the pairs of a version into a local folder: [`GetOptions::cache`], or a temporary one. Its tensors can then be read, in
    /// whole or in part, without rebuilding it as files, and be the base of a pair.
    ///
    /// `parts` has rectangles by name of the tensor. If it is given, only the chunks that have elements of these rectangles are
    /// read. With [`GetOptions::tensors`] or [`GetOptions::select`], only chunks with elements of the selection are read. It is then an
    /// error to read others.
    ///
    /// # Errors
    /// As for [`Store::get`]. A version that is in [`GetOptions::have`] is no error.
    pub fn open_version(
        &self,
        version: &str,
        parts: Option<&BTreeMap<String, Vec<Rectangle>>>,
        options: &GetOptions<'_>,
    ) -> Result<Opened> {
        opened::open_version(&self.0, version, parts, options)
    }

    /// Rebuilds tensors of a version in memory. `load` gets the pair that gives the version, the base of that pair, and the wanted
    /// rectangle of each wanted tensor. It decodes them with [`tpde::Apply::to_slices`], which compares the digests of complete tensors.
    /// The pairs are read into a local folder: [`GetOptions::cache`], or a temporary one, which is removed. No checkpoint is written. If
    /// a pair turns out to be damaged and there is another way to the version, `load` is called again.
    ///
    /// # Errors
    /// As for [`Store::get`], and those of `load`.
    pub fn load(&self, version: &str, options: &GetOptions<'_>, load: &mut LoadTensors<'_>) -> Result<GetReport> {
        opened::load(&self.0, version, options, load)
    }

    /// Whether the store's rules ask for a whole version after this one. [`Store::put`] follows them; callers of
    /// [`Store::put_pair`] ask.
    ///
    /// # Errors
    /// As for [`Store::version`].
    pub fn needs_anchor(&self, version: &str) -> Result<bool> {
        let mut catalog = self.0.catalog()?;
        let version = catalog.find(version)?;
        put::needs_anchor(&self.0, &mut catalog, &version)
    }

    /// Stores a pair that was made elsewhere as the next version of a branch, such as one merged from the pairs of several ranks. Its
    /// base is the parent. The digests in the two indexes are compared. If the indexes cut tensors differently, the pair is decoded
    /// instead.
    /// [`PutOptions::anchor`] and [`PutOptions::encode`] have no effect.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the pair has no payload digests; [`Error::Tpde`] with [`tpde::Error::Step`] or
    /// [`tpde::Error::WrongBase`] if it does not fit the parent; otherwise as for [`Store::put`].
    pub fn put_pair(&self, pair: impl AsRef<Path>, options: &PutOptions<'_>) -> Result<Version> {
        put::put_pair(&self.0, pair.as_ref(), options)
    }

    /// Uploads a pair without a version. [`Store::gc`] removes it once it is older than the grace. So ranks that share no folder can
    /// pass their pairs to one that merges them.
    ///
    /// # Errors
    /// The errors of opening the pair, and of requests.
    pub fn upload_pair(&self, pair: impl AsRef<Path>) -> Result<StoredPair> {
        put::upload_alone(&self.0, pair.as_ref())
    }

    /// Reads a pair of [`Store::upload_pair`] into a folder. Returns its path.
    ///
    /// # Errors
    /// [`Error::Damaged`]; [`Error::InvalidArgument`] if `stored` contradicts itself; the errors of requests.
    pub fn download_pair(&self, stored: &StoredPair, folder: impl AsRef<Path>) -> Result<PathBuf> {
        stored.check().map_err(Error::InvalidArgument)?;
        let folder = LocalFolder::at(folder.as_ref())?;
        let cache = Cache { remote: &self.0.remote, folder: &folder, watch: NOBODY };
        cache.whole(stored)?;
        Ok(cache.stem(stored))
    }

    /// Reads all objects of the versions of a branch, or of all branches, and compares their digests. With `rebuild`, also rebuilds
    /// every version that needs nothing from outside, and compares the digests of its tensors. Nothing is written but temporary
    /// files.
    ///
    /// # Errors
    /// [`Error::NoVersion`]; the errors of requests, and of reading manifests. Faults of versions are in the report.
    pub fn verify(&self, branch: Option<&str>, rebuild: bool) -> Result<VerifyReport> {
        verify::verify(&self.0, branch, rebuild)
    }

    /// Stores a shortcut: one pair that leads from version `from` to version `to`, which derives from it. Readers that have `from`,
    /// or whose way leads through it, read this pair instead of those in between. No checkpoint is written. If there is a sound
    /// one, it is returned.
    ///
    /// Disk: the pairs that lead to `to`, in a temporary folder. Memory: as for [`Store::put`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `to` does not derive from `from`, or has the same tensors; [`Error::External`] if a checkpoint
    /// must be supplied in [`FoldOptions::have`]; [`Error::TooSlow`]; the errors of [`Store::version`], of
    /// [`Encode::to_writer`](tpde::Encode::to_writer) and of requests.
    pub fn fold(&self, from: &str, to: &str, options: &FoldOptions<'_>) -> Result<Shortcut> {
        fold::fold(&self.0, from, to, options)
    }

    /// The shortcuts to versions of a branch, in ascending order of these versions.
    ///
    /// # Errors
    /// As for [`Store::log`].
    pub fn shortcuts(&self, branch: &str) -> Result<Vec<Shortcut>> {
        let mut catalog = self.0.catalog()?;
        let mut shortcuts = Vec::new();
        for version in self.log(branch)?.iter().rev() {
            shortcuts.extend_from_slice(catalog.shortcuts(version)?);
        }
        Ok(shortcuts)
    }

    /// Prunes a branch: of its versions it keeps those whose number is a multiple of `keep_every`, the head, the anchors, and those where
    /// another branch, or a shortcut into one, begins. The others cannot be named from now on ([`Error::Pruned`]).
    /// [`Store::gc`] removes their pairs after the grace.
    ///
    /// First, shortcuts that skip the versions to be pruned are made. Then these versions are marked. After an interruption, the
    /// next call goes on.
    ///
    /// # Errors
    /// [`Error::NoVersion`]; [`Error::InvalidArgument`] if `keep_every` is 0; the errors of [`Store::fold`]. All versions that were not
    /// marked can still be read.
    pub fn prune(&self, branch: &str, keep_every: u64, options: &FoldOptions<'_>) -> Result<PruneReport> {
        fold::prune(&self.0, branch, keep_every, options)
    }

    /// Prunes the versions of a branch whose manifests are not valid, so that [`Store::put`] and [`Store::gc`] go on without them. What
    /// derives from them is lost, unless a shortcut skips them.
    ///
    /// # Errors
    /// [`Error::NoVersion`]; [`Error::InvalidArgument`] for a manifest that may be a deletion; [`Error::Schema`] for one that a newer
    /// version of this crate may read; the errors of requests.
    pub fn prune_damaged(&self, branch: &str) -> Result<PruneReport> {
        names::check_branch(branch).map_err(Error::InvalidArgument)?;
        let mut catalog = self.0.catalog()?;
        let found = catalog.sound_and_damaged(branch)?;
        if found.versions().next().is_none() && found.live_damaged().next().is_none() {
            return Err(Error::NoVersion { version: branch.to_owned() });
        }
        let is_marked = |number: u64| found.marked().any(|marked| *marked == number);
        if let Some((number, _)) = found.live_damaged().find(|(number, _)| is_marked(*number)) {
            let object = names::manifest(branch, number);
            let reason = format!("{object} is damaged, and may be the deletion of the branch: delete the branch once more");
            return Err(Error::InvalidArgument(reason));
        }
        let mut report = PruneReport { kept: found.versions().count() as u64, ..PruneReport::default() };
        for (number, _) in found.live_damaged() {
            self.0.mark_pruned(branch, number)?;
            report.pruned.push(format!("{branch}@{number}"));
        }
        Ok(report)
    }

    /// Removes versions that were pruned or whose branch was deleted, if no other version needs them; shortcuts from or to such
    /// versions; and objects that no version uses. All this only if the mark, the deletion, the shortcut or the object is older than
    /// the store's grace, by the store's clock. So what a running `put` or `fold` has read or uploaded stays.
    ///
    /// # Errors
    /// The errors of requests, and of reading the manifest of any version that can be named: nothing is removed then, because what
    /// that manifest uses is not known. [`Store::prune_damaged`] and [`Store::delete_branch`] help.
    pub fn gc(&self) -> Result<GcReport> {
        gc::gc(&self.0)
    }

    /// Sizes of what the manifests name.
    ///
    /// # Errors
    /// The errors of reading manifests.
    pub fn usage(&self) -> Result<Usage> {
        let mut catalog = self.0.catalog()?;
        let mut usage = Usage::default();
        let mut files = BTreeMap::new();
        let branches = catalog.all()?;
        let waits = |branch: &Whole<'_>| branch.all_damaged().filter(|(number, _)| !branch.is_live(*number)).count() as u64;
        usage.waiting = branches.values().map(waits).sum();
        let versions: Vec<(bool, Version)> = branches
            .into_values()
            .flat_map(|branch| branch.all_versions().map(move |version| (branch.is_live(version.number), version.clone())))
            .collect();
        for (is_live, version) in versions {
            if is_live {
                usage.versions += 1;
                if !matches!(version.content, Content::External { .. }) {
                    usage.tensor_bytes = usage.tensor_bytes.saturating_add(version.tensor_bytes);
                }
                usage.oldest = Some(usage.oldest.map_or(version.created, |oldest| oldest.min(version.created)));
                usage.newest = usage.newest.max(Some(version.created));
            } else {
                usage.waiting += 1;
            }
            match (&version.content, &version.parent) {
                (Content::Whole(pair), _) => usage.anchor_bytes += pair.bytes(),
                // If the parent was removed, the pair is not stored any more.
                (Content::Difference(pair), Some(parent)) if catalog.at(parent)?.is_some() => {
                    usage.difference_bytes += pair.bytes()
                }
                _ => {}
            }
            files.extend(version.file_segments().map(|segment| ((segment.digest, segment.upload), segment.bytes)));
        }
        for shortcut in catalog.all_shortcuts()? {
            if catalog.at(&shortcut.from)?.is_some() && catalog.at(&shortcut.to)?.is_some() {
                usage.shortcuts += 1;
                usage.shortcut_bytes += shortcut.pair.bytes();
            }
        }
        usage.file_bytes = files.values().sum();
        usage.stored_bytes = usage.anchor_bytes + usage.difference_bytes + usage.shortcut_bytes + usage.file_bytes;
        Ok(usage)
    }

    /// For each of these versions, the size in bytes of the files beside the tensors that its parent does not have. Those of the
    /// parent are stored once.
    ///
    /// # Errors
    /// The errors of reading the manifests of parents.
    pub fn new_file_bytes(&self, versions: &[Version]) -> Result<Vec<u64>> {
        let mut catalog = self.0.catalog()?;
        let known: BTreeMap<_, _> = versions.iter().map(|version| (version.reference(), version)).collect();
        let bytes = versions.iter().map(|version| {
            let mut new: BTreeMap<_, _> = version.file_segments().map(|segment| (segment.digest, segment.bytes)).collect();
            let parent = match version.parent.as_ref().filter(|_| !new.is_empty()) {
                Some(parent) if let Some(known) = known.get(parent) => Some((*known).clone()),
                Some(parent) => catalog.at(parent)?,
                None => None,
            };
            parent.iter().flat_map(Version::file_segments).for_each(|segment| _ = new.remove(&segment.digest));
            Ok(new.values().sum())
        });
        bytes.collect()
    }

    /// The versions of a branch as they appear, from number `from` on. The iterator asks the store every `interval`, and has no
    /// end. It waits for a branch that does not exist yet. If the branch is deleted, it waits until the branch exists again. After an
    /// error the iterator goes on with the next call.
    pub fn watch(&self, branch: &str, from: u64, interval: Duration) -> impl Iterator<Item = Result<Version>> {
        let mut next = from;
        let mut found = Vec::new().into_iter();
        std::iter::from_fn(move || {
            loop {
                if let Some(version) = found.next() {
                    let version: Version = version;
                    next = version.number + 1;
                    return Some(Ok(version));
                }
                // Versions may have been cut out of the branch, so numbers are not tried one by one.
                match self.since(branch, next) {
                    Ok(versions) if versions.is_empty() => std::thread::sleep(interval),
                    Ok(versions) => found = versions.into_iter(),
                    Err(error) => return Some(Err(error)),
                }
            }
        })
    }
}
