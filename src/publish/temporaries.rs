//! Creates temporary files and folders, and removes them.

use super::courtesy::is_refused;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Temporary names of this process. Only [`Temporaries::track`] sets them. A process that does not call it has no lock, so a fork
/// cannot copy a locked one.
static TRACKED: OnceLock<Tracked> = OnceLock::new();

#[derive(Default)]
struct Tracked {
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
        TRACKED.get_or_init(Tracked::default);
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

/// Removes a file or folder. Ignores failures.
fn remove(path: &Path) {
    if std::fs::remove_file(path).is_err() {
        let _ = std::fs::remove_dir_all(path);
    }
}

/// A file or folder with a temporary name. It is removed on drop.
#[derive(Debug)]
pub(super) struct Temporary(PathBuf);

impl Temporary {
    /// Calls `make` with a temporary path in `folder`, to create a file or folder there. Repeats that if the name exists.
    ///
    /// The temporary name does not contain the final name, which may already have the maximum length.
    pub fn create<T>(folder: &Path, mut make: impl FnMut(&Path) -> io::Result<T>) -> io::Result<(Self, T)> {
        let mut names = names();
        let named = tempfile::Builder::new().prefix(".tpde-").suffix(".tmp").make_in(folder, |path| make(path))?;
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
        match renameat_with(CWD, &self.0, CWD, to, RenameFlags::NOREPLACE) {
            Ok(()) => self.keep(),
            // The file system does not support NOREPLACE. A hard link also fails if the name exists, but folders and some file
            // systems have no hard links. For them, a check and a plain rename remain, which are not atomic.
            Err(error) if is_refused(error) => match std::fs::hard_link(&self.0, to) {
                Ok(()) => {} // the temporary name is removed on drop
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(e),
                Err(_) if to.symlink_metadata().is_ok() => return Err(io::ErrorKind::AlreadyExists.into()),
                Err(_) => return self.rename(to),
            },
            Err(e) => return Err(e.into()),
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
