//! Publishes files: an interruption leaves the old files, the new files, or files that a reader refuses.
//!
//! If the file system allows it, a file is written without a name (`O_TMPFILE`), otherwise under a temporary name. All files are
//! synced before the first one gets its name. A lock on the folder serialises the commits of several writers. A reader that finds a
//! mixture takes the lock to wait for the end of a commit.

mod courtesy;
mod folder;
mod lock;
mod output;
mod output_file;
mod overlap;
mod staged;
mod temporaries;
#[cfg(test)]
mod tests;

pub(crate) use courtesy::reserve;
pub(crate) use lock::between_publications;
pub use output_file::OutputFile;
pub(crate) use overlap::check_apart;
pub use temporaries::{Temporaries, TemporaryFolder};

use crate::watch::Progress;
use courtesy::{is_refused, or_warn};
use folder::{Folder, folder_of};
use lock::{FolderLock, LOCK_TIMEOUT};
use rustix::fs::FlockOperation;
use staged::{OpenFiles, StagedFile, sync_many};
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use temporaries::{Temporary, hold_signals};
use tpde_core::error::{Error, Result};

/// What is missing if a file cannot be synced.
const LOST: &str = "its bytes may not survive a crash of the machine";

/// A set of files that are published together.
#[derive(Debug)]
pub(crate) struct Publication {
    /// The folder in which temporary files are created.
    folder: PathBuf,
    destination: Destination,
    files: Vec<Output>,
    open: OpenFiles,
    replace: bool,
    lock_timeout: Duration,
}

#[derive(Debug)]
struct Output {
    staged: StagedFile,
    path: PathBuf,
    /// Permission bits of the file that this output replaces.
    mode: Option<u32>,
}

#[derive(Debug)]
enum Destination {
    /// Files that get their names one after the other.
    Files,
    /// A folder that does not exist yet. It appears with all its files at once.
    NewFolder(PathBuf),
    /// An existing folder. The [`Barrier`] makes readers refuse it while its files are replaced.
    Folder(Barrier),
}

/// A shard index that names a missing file. While it exists, readers refuse its folder.
///
/// It is published before the first file of a folder. After the last one it is replaced by the output of the same name, or removed
/// if there is no such output.
#[derive(Debug)]
pub(crate) struct Barrier {
    /// Name of the file in the folder.
    pub name: String,
    /// Content of the file.
    pub content: &'static [u8],
}

impl Publication {
    /// A publication of files in the folder that contains `beside`. Existing files are replaced only if `replace` is set.
    pub fn files(beside: &Path, replace: bool) -> Self {
        Self::new(folder_of(beside), Destination::Files, replace)
    }

    /// A publication of files in the folder `path`. A new folder appears complete, in one step. In an existing folder, `barrier`
    /// exists while files are replaced.
    pub fn folder(path: &Path, barrier: Barrier, replace: bool) -> Self {
        if path.symlink_metadata().is_ok() {
            return Self::new(path.to_owned(), Destination::Folder(barrier), replace);
        }
        Self::new(folder_of(path), Destination::NewFolder(path.to_owned()), false)
    }

    /// A publication of one file in the existing folder `path`. `barrier` exists while stale files are removed.
    pub fn file_in(path: &Path, barrier: Barrier, replace: bool) -> Self {
        Self::new(path.to_owned(), Destination::Folder(barrier), replace)
    }

    fn new(folder: PathBuf, destination: Destination, replace: bool) -> Self {
        Self { folder, destination, files: Vec::new(), open: OpenFiles::default(), replace, lock_timeout: LOCK_TIMEOUT }
    }

    /// Creates a file that will be published as `path`, after the files added before. If `path` exists, the new file gets the
    /// permission bits of the old one.
    ///
    /// # Errors
    /// [`Error::Io`] if `path` exists and may not be replaced, if it is not a regular file, or if the folder is not writable.
    pub fn add(&mut self, path: &Path) -> Result<Arc<File>> {
        if path.file_name().is_none() {
            return Err(Error::InvalidArgument(format!("{} names no file", path.display())));
        }
        let mode = output::check_free(path, self.replace)?;
        let error = |e| Error::io("create a file in", &self.folder, e);
        // A file that replaces another gets that file's mode at commit. Until then only its owner may read it.
        let initial = if mode.is_some() { 0o600 } else { 0o666 };
        let i = self.files.len();
        let create = if i < OpenFiles::MAX { StagedFile::create } else { StagedFile::create_named };
        let (staged, file) = create(&self.folder, initial).map_err(error)?;
        if matches!(staged, StagedFile::Named(_)) {
            self.open.add(i, file.clone()).map_err(error)?;
        }
        self.files.push(Output { staged, path: path.to_owned(), mode });
        Ok(file)
    }

    /// The file with index `i`, in the order of [`add`](Self::add), open for writing. Only a few files are open at a time.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be opened.
    pub fn file(&self, i: usize) -> Result<Arc<File>> {
        let Output { staged, path, .. } = &self.files[i];
        self.open.get(i, staged).map_err(|e| Error::io("open", path, e))
    }

    /// Checks that the file system has `size` free bytes. A pair of a few bytes can describe a target of terabytes.
    ///
    /// # Errors
    /// [`Error::Io`] if the file system has less space.
    pub fn check_space(&self, size: u64) -> Result<()> {
        let error = |e| Error::io("write to", &self.folder, e);
        let available = match rustix::fs::statvfs(&self.folder) {
            // Some file systems do not know their size.
            Ok(found) if found.f_blocks == 0 => return Ok(()),
            Err(refused) if is_refused(refused) => return Ok(()),
            outcome => outcome.map_err(|e| error(e.into()))?,
        };
        let available = available.f_bavail.saturating_mul(available.f_frsize);
        if size > available {
            let reason = format!("{size} bytes are needed, but only {available} are available");
            return Err(error(io::Error::new(io::ErrorKind::StorageFull, reason)));
        }
        Ok(())
    }

    /// Syncs all files, gives them their names in the order in which they were added, and syncs the folder.
    ///
    /// Without `replace`, no existing file is replaced. If a name is taken by then, the names published by this call are removed
    /// again. `progress` can cancel the publication until the first file gets its name.
    ///
    /// # Errors
    /// - [`Error::Io`] at the first failure. Files that do not have their name yet are removed. A failed sync is never repeated,
    ///   because the system may have dropped the pages.
    /// - [`Error::Io`] of kind `TimedOut` if another process holds a lock on the folder for longer than [`LOCK_TIMEOUT`].
    /// - [`Error::Cancelled`] from `progress`.
    pub fn commit(self, progress: Progress<'_>) -> Result<()> {
        self.commit_after(progress, &|| Ok(Vec::new())).map(drop)
    }

    /// Like [`Publication::commit`], but first calls `stale`, with the lock held and before the first file gets its name. The files
    /// that it returns are removed in this order, while the barrier exists. A new folder takes no lock and has no stale files. Returns
    /// the names of the files that were removed.
    ///
    /// # Errors
    /// The errors of [`Publication::commit`] and of `stale`.
    pub fn commit_after(mut self, progress: Progress<'_>, stale: &dyn Fn() -> Result<Vec<PathBuf>>) -> Result<Vec<String>> {
        if self.files.len() > OpenFiles::MAX {
            sync_many(&*self.file(0)?);
        }
        for (i, Output { path, mode, .. }) in self.files.iter().enumerate() {
            progress.done(0)?;
            let file = self.file(i)?;
            if let Some(mode) = mode {
                let set = file.set_permissions(Permissions::from_mode(*mode));
                or_warn(set, path, "the mode of the file that is replaced cannot be set")
                    .map_err(|e| Error::io("set the mode of", path, e))?;
            }
            or_warn(file.sync_all(), path, LOST).map_err(|e| Error::io("sync", path, e))?;
        }
        progress.done(0)?;
        let files = std::mem::take(&mut self.files);
        if let Destination::NewFolder(path) = &self.destination {
            return self.commit_new_folder(path, files).map(|()| Vec::new());
        }
        let folder = Folder::open(&self.folder)?;
        let _lock = FolderLock::take(&folder, &self.folder, FlockOperation::NonBlockingLockExclusive, self.lock_timeout, progress)?;
        for file in &files {
            output::check_free(&file.path, self.replace)?; // another writer may have published since `add`
        }
        let stale = stale()?;
        match &self.destination {
            // One file needs no barrier, unless an interrupted publication left one, which must be replaced or removed.
            Destination::Folder(barrier) if files.len() > 1 || !stale.is_empty() || self.folder.join(&barrier.name).is_file() => {
                self.commit_folder(&folder, barrier, files, &stale)
            }
            _ => self.commit_files(&folder, files),
        }?;
        Ok(stale.iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned())).collect())
    }

    fn commit_files(&self, folder: &Folder, files: Vec<Output>) -> Result<()> {
        let held = hold_signals();
        self.publishing(|published| publish(files, self.replace, published))?;
        drop(held);
        folder.sync()
    }

    fn commit_new_folder(&self, path: &Path, files: Vec<Output>) -> Result<()> {
        let held = hold_signals();
        let temporary = Temporary::folder(&self.folder).map_err(|e| Error::io("create a folder in", &self.folder, e))?;
        for Output { staged, path, .. } in files {
            let name = path.file_name().unwrap_or_default(); // `add` has checked that the path has a name
            staged.publish(&temporary.path().join(name), false).map_err(|e| Error::io("publish", &path, e))?;
        }
        Folder::open(temporary.path())?.sync()?;
        temporary.rename_new(path).map_err(|e| Error::io("publish", path, e))?;
        drop(held);
        Folder::open(&self.folder)?.sync()
    }

    /// Replaces the files of an existing folder, and removes stale ones, while the barrier exists. Each step is synced before the
    /// next one begins.
    fn commit_folder(&self, folder: &Folder, barrier: &Barrier, mut files: Vec<Output>, stale: &[PathBuf]) -> Result<()> {
        let path = self.folder.join(&barrier.name);
        let error = |e| Error::io("publish", &path, e);
        let last = files.iter().position(|file| file.path == path).map(|i| files.remove(i));
        let held = hold_signals();
        let (staged, file) = StagedFile::create(&self.folder, 0o666).map_err(error)?;
        (&*file).write_all(barrier.content).and_then(|()| or_warn(file.sync_all(), &path, LOST)).map_err(error)?;
        self.publishing(|published| {
            staged.publish(&path, self.replace).map_err(error)?;
            published.push(path.clone());
            folder.sync()?;
            publish(files, self.replace, published)?;
            // The barrier has replaced a stale file of its name.
            stale.iter().filter(|stale| **stale != path).try_for_each(|stale| remove(stale))?;
            folder.sync()?;
            match last {
                Some(Output { staged, path, .. }) => staged.publish(&path, true).map_err(|e| Error::io("publish", &path, e)),
                None => remove(&path),
            }
        })?;
        drop(held);
        folder.sync()
    }

    /// Runs `commit`, which adds the paths that it publishes to a list. If it fails without `replace`, removes these paths: nothing
    /// had these names before. The first path, which may be the barrier, is removed last.
    fn publishing(&self, commit: impl FnOnce(&mut Vec<PathBuf>) -> Result<()>) -> Result<()> {
        let mut published = Vec::new();
        let outcome = commit(&mut published);
        if outcome.is_err() && !self.replace {
            published.iter().rev().for_each(|path| _ = std::fs::remove_file(path));
        }
        outcome
    }
}

/// Removes a file, if it still exists.
fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        _ => Ok(()),
    }
}

/// Gives files their names, and adds their paths to `published`.
fn publish(files: Vec<Output>, replace: bool, published: &mut Vec<PathBuf>) -> Result<()> {
    for Output { staged, path, .. } in files {
        staged.publish(&path, replace).map_err(|e| Error::io("publish", &path, e))?;
        published.push(path);
    }
    Ok(())
}
