//! Writing so that an interruption leaves the old files, the new files, or files that a reader refuses.
//!
//! A file is written without a name where the file system allows that (`O_TMPFILE`), elsewhere under a temporary name. All
//! files are synced before the first one gets its name. A lock on the folder serialises the commits of several writers and
//! keeps readers out of a commit.

mod folder;
mod lock;
mod output;
mod overlap;
mod staged;
mod temporaries;
#[cfg(test)]
mod tests;

pub(crate) use lock::between_publications;
pub(crate) use overlap::check_apart;
pub use temporaries::Temporaries;

use crate::error::{Error, Result};
use crate::watch::Progress;
use folder::{folder_of, sync_folder};
use lock::{FolderLock, LOCK_TIMEOUT};
use rustix::fs::FlockOperation;
use staged::{OpenFiles, Staged};
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use temporaries::{Temporary, hold_signals};

/// A set of files that are published together.
#[derive(Debug)]
pub(crate) struct Publication {
    /// The folder that temporary files are created in.
    folder: PathBuf,
    destination: Destination,
    files: Vec<Output>,
    open: OpenFiles,
    replace: bool,
    lock_timeout: Duration,
}

#[derive(Debug)]
struct Output {
    staged: Staged,
    path: PathBuf,
    /// Permission bits of the file that it replaces.
    mode: Option<u32>,
}

#[derive(Debug)]
enum Destination {
    /// Files that get their names one after the other.
    Files,
    /// A folder that does not exist yet and appears with all its files at once.
    NewFolder(PathBuf),
    /// An existing folder. [`Barrier`] keeps readers away while its files are replaced.
    Folder(Barrier),
}

/// A file that makes readers refuse a folder while it exists: a shard index that names a missing file.
///
/// It is published before the first file of a folder. After the others it is replaced by the real file of its name, or removed if
/// there is none.
#[derive(Debug)]
pub(crate) struct Barrier {
    /// Its name in the folder.
    pub name: String,
    /// Its bytes.
    pub content: &'static [u8],
}

impl Publication {
    /// A publication of files in the folder that contains `beside`. Existing files are replaced only if `replace`.
    pub fn files(beside: &Path, replace: bool) -> Self {
        Self::new(folder_of(beside), Destination::Files, replace)
    }

    /// A publication of files in the folder `path`. A new folder appears as a whole. In an existing one, `barrier` exists while
    /// files are replaced.
    pub fn folder(path: &Path, barrier: Barrier, replace: bool) -> Self {
        if path.symlink_metadata().is_ok() {
            return Self::new(path.to_owned(), Destination::Folder(barrier), replace);
        }
        Self::new(folder_of(path), Destination::NewFolder(path.to_owned()), false)
    }

    fn new(folder: PathBuf, destination: Destination, replace: bool) -> Self {
        Self { folder, destination, files: Vec::new(), open: OpenFiles::default(), replace, lock_timeout: LOCK_TIMEOUT }
    }

    /// A new file, to be published as `path` after those added before. It has the mode of the file that it replaces.
    ///
    /// # Errors
    /// [`Error::Io`] if `path` exists and may not be replaced, is neither absent nor a regular file, or the folder cannot be
    /// written.
    pub fn add(&mut self, path: &Path) -> Result<Arc<File>> {
        if path.file_name().is_none() {
            return Err(Error::InvalidArgument(format!("{} names no file", path.display())));
        }
        let mode = output::check_free(path, self.replace)?;
        let error = |e| Error::io("create a file in", &self.folder, e);
        // Before it has the mode of the file that it replaces, only its owner may read it.
        let initial = if mode.is_some() { 0o600 } else { 0o666 };
        let i = self.files.len();
        let create = if i < OpenFiles::MAX { Staged::create } else { Staged::create_named };
        let (staged, file) = create(&self.folder, initial).map_err(error)?;
        if matches!(staged, Staged::Named(_)) {
            self.open.insert(i, file.clone()).map_err(error)?;
        }
        self.files.push(Output { staged, path: path.to_owned(), mode });
        Ok(file)
    }

    /// The file that was added after `i` others, open for writing. If there are many files, only a few are open at a time.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be opened.
    pub fn file(&self, i: usize) -> Result<Arc<File>> {
        let Output { staged, path, .. } = &self.files[i];
        self.open.get(i, staged).map_err(|e| Error::io("open", path, e))
    }

    /// Refuses work that would fill the file system: a pair of a few bytes can describe a target of terabytes.
    ///
    /// # Errors
    /// [`Error::Io`] if the file system has fewer than `size` bytes left.
    pub fn check_space(&self, size: u64) -> Result<()> {
        let error = |e| Error::io("write to", &self.folder, e);
        let available = rustix::fs::statvfs(&self.folder).map_err(|e| error(e.into()))?;
        let available = available.f_bavail.saturating_mul(available.f_frsize);
        if size > available {
            let reason = format!("{size} bytes are needed, but only {available} are available");
            return Err(error(io::Error::new(io::ErrorKind::StorageFull, reason)));
        }
        Ok(())
    }

    /// Syncs all files, gives them their names in the order in which they were added, and syncs the folder.
    ///
    /// Without `replace`, a file that has appeared meanwhile is left as it is, and what was published before it is removed
    /// again. `progress` can cancel the publication until the first file gets its name.
    ///
    /// # Errors
    /// [`Error::Io`] at the first failure; files without their name are removed by then. A failed sync is never tried again:
    /// the system may have dropped the pages. [`Error::Io`] of kind `TimedOut` if another process holds a lock on the folder
    /// for longer than [`LOCK_TIMEOUT`]. [`Error::Cancelled`] from `progress`.
    pub fn commit(self, progress: Progress<'_>) -> Result<()> {
        self.commit_after(progress, &|| Ok(()))
    }

    /// As [`Publication::commit`], but calls `check` while it holds the lock, before the first file gets its name.
    ///
    /// # Errors
    /// As [`Publication::commit`], and what `check` returns.
    pub fn commit_after(mut self, progress: Progress<'_>, check: &dyn Fn() -> Result<()>) -> Result<()> {
        for (i, Output { path, mode, .. }) in self.files.iter().enumerate() {
            progress.done(0)?;
            let file = self.file(i)?;
            if let Some(mode) = mode {
                file.set_permissions(Permissions::from_mode(*mode)).map_err(|e| Error::io("set the mode of", path, e))?;
            }
            file.sync_all().map_err(|e| Error::io("sync", path, e))?;
        }
        progress.done(0)?;
        let files = std::mem::take(&mut self.files);
        if let Destination::NewFolder(path) = &self.destination {
            return self.commit_new_folder(path, files);
        }
        let folder = File::open(&self.folder).map_err(|e| Error::io("open", &self.folder, e))?;
        let _lock = FolderLock::take(&folder, &self.folder, FlockOperation::NonBlockingLockExclusive, self.lock_timeout, progress)?;
        for file in &files {
            output::check_free(&file.path, self.replace)?; // another writer may have published meanwhile
        }
        check()?;
        match &self.destination {
            // A barrier of an interrupted publication must be removed too.
            Destination::Folder(barrier) if files.len() > 1 || self.folder.join(&barrier.name).exists() => {
                self.commit_folder(&folder, barrier, files)
            }
            _ => self.commit_files(&folder, files),
        }
    }

    fn commit_files(&self, folder: &File, files: Vec<Output>) -> Result<()> {
        let held = hold_signals();
        self.publishing(|published| publish(files, self.replace, published))?;
        drop(held);
        folder.sync_all().map_err(|e| Error::io("sync", &self.folder, e))
    }

    fn commit_new_folder(&self, path: &Path, files: Vec<Output>) -> Result<()> {
        let held = hold_signals();
        let temporary = Temporary::folder(&self.folder).map_err(|e| Error::io("create a folder in", &self.folder, e))?;
        for Output { staged, path, .. } in files {
            let name = path.file_name().unwrap_or_default(); // `add` has checked that there is one
            staged.publish(&temporary.path().join(name), false).map_err(|e| Error::io("publish", &path, e))?;
        }
        sync_folder(temporary.path())?;
        temporary.rename_new(path).map_err(|e| Error::io("publish", path, e))?;
        drop(held);
        sync_folder(&self.folder)
    }

    /// Replaces the files of an existing folder behind a barrier. Each step is on disk before the next one begins.
    fn commit_folder(&self, folder: &File, barrier: &Barrier, mut files: Vec<Output>) -> Result<()> {
        let sync = || folder.sync_all().map_err(|e| Error::io("sync", &self.folder, e));
        let path = self.folder.join(&barrier.name);
        let error = |e| Error::io("publish", &path, e);
        let last = files.iter().position(|file| file.path == path).map(|i| files.remove(i));
        let held = hold_signals();
        let (staged, file) = Staged::create(&self.folder, 0o666).map_err(error)?;
        (&*file).write_all(barrier.content).and_then(|()| file.sync_all()).map_err(error)?;
        self.publishing(|published| {
            staged.publish(&path, self.replace).map_err(error)?;
            published.push(path.clone());
            sync()?;
            publish(files, self.replace, published)?;
            sync()?;
            match last {
                Some(Output { staged, path, .. }) => staged.publish(&path, true).map_err(|e| Error::io("publish", &path, e)),
                None => std::fs::remove_file(&path).map_err(|e| Error::io("remove", &path, e)),
            }
        })?;
        drop(held);
        sync()
    }

    /// Runs `commit`, which adds the names that it publishes to a list. After a failure without `replace`, nothing had these
    /// names before, so all of them are removed. The first one, which may be the barrier, is removed last.
    fn publishing(&self, commit: impl FnOnce(&mut Vec<PathBuf>) -> Result<()>) -> Result<()> {
        let mut published = Vec::new();
        let outcome = commit(&mut published);
        if outcome.is_err() && !self.replace {
            published.iter().rev().for_each(|path| _ = std::fs::remove_file(path));
        }
        outcome
    }
}

/// Gives files their names, and adds these to `published`.
fn publish(files: Vec<Output>, replace: bool, published: &mut Vec<PathBuf>) -> Result<()> {
    for Output { staged, path, .. } in files {
        staged.publish(&path, replace).map_err(|e| Error::io("publish", &path, e))?;
        published.push(path);
    }
    Ok(())
}
