//! Advisory locks on folders.

use super::folder::{Folder, folder_of};
use crate::watch::Progress;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};
use tpde_core::error::{Error, Result};

/// Maximum time to wait for a lock that another process holds. A commit holds its lock for milliseconds.
pub(super) const LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// Time to wait before a warning is logged.
const WARN_AFTER: Duration = Duration::from_secs(1);
/// Time between two attempts to take the lock.
const RETRY: Duration = Duration::from_millis(10);

/// An advisory lock on a folder. Dropping the value or ending the process releases the lock.
#[derive(Debug)]
pub(super) struct FolderLock<'a>(Option<&'a File>);

impl<'a> FolderLock<'a> {
    /// Locks `folder`, which is at `path`. `operation` must be non-blocking and is repeated for at most `timeout`.
    ///
    /// If the file system does not support locks, continues without one: the pair digest still detects a mixture.
    ///
    /// # Errors
    /// [`Error::Io`] of kind `TimedOut`; any error of `progress`, which is called while waiting.
    pub fn take(
        folder: &'a Folder,
        path: &Path,
        operation: FlockOperation,
        timeout: Duration,
        progress: Progress<'_>,
    ) -> Result<Self> {
        let Some(folder) = &folder.file else { return Ok(Self(None)) };
        let begin = Instant::now();
        let mut warned = false;
        loop {
            match flock(folder, operation) {
                Ok(()) => return Ok(Self(Some(folder))),
                Err(Errno::INTR) => continue,
                Err(Errno::WOULDBLOCK) => {}
                Err(_) => return Ok(Self(None)),
            }
            progress.done(0)?;
            let waited = begin.elapsed();
            if waited >= timeout {
                let reason = format!("another process has held a lock on it for {} s", waited.as_secs());
                return Err(Error::io("lock", path, io::Error::new(io::ErrorKind::TimedOut, reason)));
            }
            if waited >= WARN_AFTER && !warned {
                let folder = tpde_core::error::Escaped(&path.display().to_string()).to_string();
                tracing::warn!("folder {folder} is locked by another process, waiting for up to {} s", timeout.as_secs());
                warned = true;
            }
            std::thread::sleep(RETRY.min(timeout - waited));
        }
    }
}

impl Drop for FolderLock<'_> {
    fn drop(&mut self) {
        if let Some(folder) = self.0 {
            let _ = flock(folder, FlockOperation::Unlock);
        }
    }
}

/// Runs `read` with a shared lock on the folder of `path`, so that no publication commits meanwhile.
///
/// # Errors
/// The errors of `read`; [`Error::Io`] if the folder cannot be opened or stays locked for longer than [`LOCK_TIMEOUT`]; any error
/// of `progress`, which is called while waiting.
pub(crate) fn between_publications<T>(path: &Path, progress: Progress<'_>, read: impl FnOnce() -> Result<T>) -> Result<T> {
    between_within(path, LOCK_TIMEOUT, progress, read)
}

pub(super) fn between_within<T>(
    path: &Path,
    timeout: Duration,
    progress: Progress<'_>,
    read: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let path = folder_of(path);
    let folder = Folder::open(&path)?;
    let _lock = FolderLock::take(&folder, &path, FlockOperation::NonBlockingLockShared, timeout, progress)?;
    read()
}
