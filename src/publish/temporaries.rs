//! Creates temporary files and folders, and removes them.

use super::courtesy::is_refused;
use super::folder::{Folder, folder_of};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, RenameFlags, flock, renameat_with};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use tpde_core::error::{Error, Result};

/// Temporary names of this process. Only [`Temporaries::track`] sets them. A process that does not call it has no lock, so a fork
/// cannot copy a locked one.
static TRACKED: OnceLock<TrackedNames> = OnceLock::new();

/// Beginning of temporary names.
const PREFIX: &str = ".tpde-";
/// End of the name of a [`TemporaryFolder`].
const FOLDER: &str = ".dir";

#[derive(Default)]
struct TrackedNames {
    /// Locked during a commit. Lock order: `commit` before `names`.
    commit: Mutex<()>,
    /// Locked while a temporary name is created or removed.
    names: Mutex<BTreeSet<PathBuf>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn names() -> Option<MutexGuard<'static, BTreeSet<PathBuf>>> {
    TRACKED.get().map(|tracked| lock(&tracked.names))
}

/// Makes [`Temporaries::remove_then`] wait until the guard is dropped.
pub(super) fn hold_signals() -> Option<MutexGuard<'static, ()>> {
    TRACKED.get().map(|tracked| lock(&tracked.commit))
}

/// The temporary files and folders of this process, for a program that handles signals.
///
/// A publication removes its temporary files if it fails, but not if a signal ends the process. With `O_TMPFILE`, files have no
/// name until they are published, so little can remain. On file systems without it, all temporary files remain.
#[derive(Debug, Clone, Copy)]
pub struct Temporaries(());

impl Temporaries {
    /// Tracks the temporary files that this process creates from now on.
    pub fn track() -> Self {
        TRACKED.get_or_init(TrackedNames::default);
        Self(())
    }

    /// Waits for the end of a commit in progress, removes all temporary files, and runs `end`, which should end the process. While
    /// this runs, no file is published and no temporary file is created. Call it on a thread that waits for signals, not in a
    /// signal handler.
    pub fn remove_then<T>(&self, end: impl FnOnce() -> T) -> T {
        let _commit = hold_signals();
        let names = names();
        names.iter().flat_map(|names| names.iter()).for_each(|path| remove(path));
        end()
    }
}

/// Number of attempts to remove a folder in which another thread creates files.
const ATTEMPTS: usize = 10_000;

/// Removes a file or folder. Ignores failures.
///
/// Other threads may still create files in the folder, so a removal can find it not empty. Once the folder is gone they cannot.
fn remove(path: &Path) {
    if std::fs::remove_file(path).is_ok() {
        return;
    }
    for _ in 0..ATTEMPTS {
        match std::fs::remove_dir_all(path) {
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => std::thread::yield_now(),
            _ => return,
        }
    }
}

/// Renames a file or folder. Fails if the new name exists. Returns whether the old name is gone.
fn rename_new(from: &Path, to: &Path) -> io::Result<bool> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(true),
        // The file system does not support NOREPLACE. A hard link also fails if the name exists, but folders and some file systems
        // have no hard links. For them, a check and a plain rename remain, which are not atomic.
        Err(error) if is_refused(error) => match std::fs::hard_link(from, to) {
            Ok(()) => Ok(false),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(e),
            Err(_) if to.symlink_metadata().is_ok() => Err(io::ErrorKind::AlreadyExists.into()),
            Err(_) => std::fs::rename(from, to).map(|()| true),
        },
        Err(e) => Err(e.into()),
    }
}

/// A file or folder with a temporary name. It is removed on drop.
#[derive(Debug)]
pub(super) struct Temporary(PathBuf);

impl Temporary {
    /// Calls `make` with a temporary path in `folder`, to create a file or folder there. Repeats that if the name exists.
    ///
    /// The temporary name does not contain the final name, which may already have the maximum length.
    pub fn create<T>(folder: &Path, make: impl FnMut(&Path) -> io::Result<T>) -> io::Result<(Self, T)> {
        Self::create_with(folder, ".tmp", make)
    }

    fn create_with<T>(folder: &Path, ending: &str, mut make: impl FnMut(&Path) -> io::Result<T>) -> io::Result<(Self, T)> {
        let mut names = names();
        let named = tempfile::Builder::new().prefix(PREFIX).suffix(ending).make_in(folder, |path| make(path))?;
        let (made, path) = named.into_parts();
        let path = path.keep()?;
        if let Some(names) = &mut names {
            names.insert(path.clone());
        }
        Ok((Self(path), made))
    }

    /// Creates a folder with a temporary name.
    pub fn folder(within: &Path) -> io::Result<Self> {
        Ok(Self::create(within, |path| std::fs::DirBuilder::new().mode(0o777).create(path))?.0)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Renames the file or folder. Replaces an existing file.
    pub fn rename(self, to: &Path) -> io::Result<()> {
        std::fs::rename(&self.0, to)?;
        self.keep();
        Ok(())
    }

    /// Renames the file or folder. Fails if the new name exists.
    pub fn rename_new(self, to: &Path) -> io::Result<()> {
        // After a hard link, the temporary name is still there and is removed on drop.
        if rename_new(&self.0, to)? {
            self.keep();
        }
        Ok(())
    }

    /// Forgets the temporary name after a rename, without removing anything.
    fn keep(self) {
        if let Some(names) = &mut names() {
            names.remove(&self.0);
        }
        std::mem::forget(self);
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let mut names = names();
        remove(&self.0);
        if let Some(names) = &mut names {
            names.remove(&self.0);
        }
    }
}

/// A folder with a temporary name, for files that are thrown away or moved out of it. Only its owner may read it. It is removed on
/// drop, and by [`Temporaries::remove_then`].
///
/// A process that is killed leaves its folders. The next process that creates one in the same place removes them: it holds a lock on
/// each of its folders, so one without a lock has no process any more. On a file system without locks they stay.
#[derive(Debug)]
pub struct TemporaryFolder {
    /// Removed on drop.
    _folder: Temporary,
    /// A folder in it, which publications can lock.
    files: PathBuf,
    /// Holds the lock.
    _open: File,
}

impl TemporaryFolder {
    /// Creates a folder in the folder of the system for temporary files.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create() -> Result<Self> {
        Self::create_in(&std::env::temp_dir())
    }

    /// Creates a folder in `parent`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create_in(parent: &Path) -> Result<Self> {
        let failed = |e| Error::io("create a temporary folder in", parent, e);
        loop {
            let make = |path: &Path| std::fs::DirBuilder::new().mode(0o700).create(path);
            let (folder, ()) = Temporary::create_with(parent, FOLDER, make).map_err(failed)?;
            // Another process may find the folder before it is locked, and remove it.
            match lock_folder(folder.path()) {
                Ok(Lock::Taken(open) | Lock::Unsupported(open)) => {
                    remove_dead(parent, open.metadata().map_err(failed)?.uid());
                    let files = folder.path().join("files");
                    std::fs::create_dir(&files).map_err(failed)?;
                    return Ok(Self { _folder: folder, files, _open: open });
                }
                Ok(Lock::Held) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(failed(e)),
            }
        }
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.files
    }

    /// Moves a file or folder, whose content is synced, out of the folder to `to`, which must not exist. Syncs the folder of `to`.
    ///
    /// # Errors
    /// [`Error::Io`], of kind `AlreadyExists` if there is something at `to`.
    pub fn publish(&self, name: &str, to: &Path) -> Result<()> {
        let held = hold_signals();
        rename_new(&self.path().join(name), to).map_err(|e| Error::io("create", to, e))?;
        drop(held);
        Folder::open(&folder_of(to))?.sync()
    }
}

/// Result of an attempt to lock a folder.
enum Lock {
    Taken(File),
    /// Another process has it, or has removed the folder.
    Held,
    Unsupported(File),
}

/// Opens a folder, which must not be a link, and locks it.
fn lock_folder(path: &Path) -> io::Result<Lock> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    match flock(&open, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Ok(Lock::Held),
        Err(_) => return Ok(Lock::Unsupported(open)),
        Ok(()) => {}
    }
    let (here, there) = (open.metadata()?, path.symlink_metadata()?);
    Ok(if (here.dev(), here.ino()) == (there.dev(), there.ino()) { Lock::Taken(open) } else { Lock::Held })
}

/// Removes the folders in `parent` that processes of this user left when they were killed. Ignores failures.
fn remove_dead(parent: &Path, user: u32) {
    let is_ours = |name: &str| name.starts_with(PREFIX) && name.ends_with(FOLDER);
    for entry in parent.read_dir().into_iter().flatten().flatten() {
        if !entry.file_name().to_str().is_some_and(is_ours) {
            continue;
        }
        let path = entry.path();
        if let Ok(Lock::Taken(open)) = lock_folder(&path)
            && open.metadata().is_ok_and(|metadata| metadata.uid() == user)
        {
            remove(&path);
        }
    }
}
