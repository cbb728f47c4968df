//! Writing so that an interruption leaves the old files, the new ones, or ones that a reader refuses.
//!
//! Files are written under temporary names in the folder where they belong, synced, and renamed one after the other; the last
//! rename is the commit. A lock on the folder keeps the renames of two writers, and the opening of a reader, apart.

use crate::error::{Error, Result};
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Files that appear together.
#[derive(Debug)]
pub(crate) struct Publication {
    folder: PathBuf,
    files: Vec<(NamedTempFile, PathBuf)>,
    replace: bool,
}

/// The folder that a path lies in.
fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

impl Publication {
    /// Files to be published into the folder of `beside`; existing ones are replaced only if `replace`.
    pub fn new(beside: &Path, replace: bool) -> Self {
        Self { folder: folder_of(beside), files: Vec::new(), replace }
    }

    /// A new file under a temporary name, to be published as `path` after those added before.
    ///
    /// # Errors
    /// [`Error::Io`] if `path` exists and may not be replaced, is no regular file, or the folder cannot be written.
    pub fn add(&mut self, path: &Path) -> Result<File> {
        self.check_free(path)?;
        let name = path.file_name().ok_or_else(|| Error::Misuse(format!("{} names no file", path.display())))?;
        let prefix = format!(".{}.", name.to_string_lossy());
        let temporary = tempfile::Builder::new()
            .prefix(&prefix)
            .suffix(".tmp")
            .permissions(Permissions::from_mode(0o666)) // less the umask, as for any new file
            .tempfile_in(&self.folder)
            .map_err(|e| Error::io("create a file in", &self.folder, e))?;
        let file = temporary.reopen().map_err(|e| Error::io("create", path, e))?;
        self.files.push((temporary, path.to_owned()));
        Ok(file)
    }

    /// Refuses to begin what cannot end: a pair of a few bytes can name a target of terabytes.
    ///
    /// # Errors
    /// [`Error::Io`] if the file system has fewer than `size` bytes left.
    pub fn check_room(&self, size: u64) -> Result<()> {
        let error = |e| Error::io("write to", &self.folder, e);
        let room = rustix::fs::statvfs(&self.folder).map_err(|e| error(e.into()))?;
        let room = room.f_bavail.saturating_mul(room.f_frsize);
        if size > room {
            let reason = format!("{size} bytes are needed, {room} are left");
            return Err(error(io::Error::new(io::ErrorKind::StorageFull, reason)));
        }
        Ok(())
    }

    fn check_free(&self, path: &Path) -> Result<()> {
        match path.symlink_metadata() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(Error::io("look at", path, e)),
            Ok(metadata) if metadata.is_dir() => Err(Error::io("replace", path, io::ErrorKind::IsADirectory.into())),
            Ok(metadata) if !metadata.is_file() && !metadata.is_symlink() => {
                // A rename over /dev/null would take it from everyone.
                Err(Error::io("replace", path, io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")))
            }
            Ok(_) if !self.replace => {
                Err(Error::io("create", path, io::Error::new(io::ErrorKind::AlreadyExists, "it exists (force replaces it)")))
            }
            Ok(_) => Ok(()),
        }
    }

    /// Syncs all files, then renames them in the order in which they were added, then syncs the folder.
    ///
    /// # Errors
    /// [`Error::Io`] at the first failure; files that are not renamed by then are removed. A failed sync is never tried again:
    /// the system may have dropped the pages.
    pub fn commit(self) -> Result<()> {
        for (temporary, path) in &self.files {
            temporary.as_file().sync_all().map_err(|e| Error::io("sync", path, e))?;
        }
        let folder = File::open(&self.folder).map_err(|e| Error::io("open", &self.folder, e))?;
        let _lock = FolderLock::take(&folder, rustix::fs::FlockOperation::LockExclusive);
        for (_, path) in &self.files {
            self.check_free(path)?; // another writer may have been here since
        }
        for (temporary, path) in self.files {
            temporary.persist(&path).map_err(|e| Error::io("publish", &path, e.error))?;
        }
        folder.sync_all().map_err(|e| Error::io("sync", &self.folder, e))
    }
}

/// An advisory lock on a folder, released on drop and by the end of the process.
pub(crate) struct FolderLock<'a>(Option<&'a File>);

impl<'a> FolderLock<'a> {
    /// File systems without locks are taken as they are: the pair digest still finds a mixture.
    fn take(folder: &'a File, operation: rustix::fs::FlockOperation) -> Self {
        Self(rustix::fs::flock(folder, operation).is_ok().then_some(folder))
    }
}

impl Drop for FolderLock<'_> {
    fn drop(&mut self) {
        if let Some(folder) = self.0 {
            let _ = rustix::fs::flock(folder, rustix::fs::FlockOperation::Unlock);
        }
    }
}

/// Runs `read` while no publication renames files in the folder of `path`.
pub(crate) fn between_publications<T>(path: &Path, read: impl FnOnce() -> Result<T>) -> Result<T> {
    let folder = folder_of(path);
    let folder = File::open(&folder).map_err(|e| Error::io("open", &folder, e))?;
    let _lock = FolderLock::take(&folder, rustix::fs::FlockOperation::LockShared);
    read()
}

/// A folder that appears under its name only when it is complete.
pub(crate) struct NewFolder {
    temporary: tempfile::TempDir,
    path: PathBuf,
}

impl NewFolder {
    /// A folder under a temporary name, beside where `path` shall be.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be created.
    pub fn create(path: &Path) -> Result<Self> {
        let name = path.file_name().ok_or_else(|| Error::Misuse(format!("{} names no folder", path.display())))?;
        let prefix = format!(".{}.", name.to_string_lossy());
        let parent = folder_of(path);
        let temporary = tempfile::Builder::new()
            .prefix(&prefix)
            .suffix(".tmp")
            .permissions(Permissions::from_mode(0o777)) // less the umask
            .tempdir_in(&parent)
            .map_err(|e| Error::io("create a folder in", &parent, e))?;
        Ok(Self { temporary, path: path.to_owned() })
    }

    /// Where files go until then.
    pub fn path(&self) -> &Path {
        self.temporary.path()
    }

    /// Gives the folder its name and syncs its parent.
    ///
    /// # Errors
    /// [`Error::Io`] if the name is taken by now or the system refuses; the folder is then removed.
    pub fn publish(self) -> Result<()> {
        let error = |e| Error::io("publish", &self.path, e);
        std::fs::rename(self.temporary.path(), &self.path).map_err(error)?;
        let _renamed = self.temporary.keep();
        let parent = folder_of(&self.path);
        File::open(&parent).and_then(|folder| folder.sync_all()).map_err(|e| Error::io("sync", &parent, e))
    }
}
