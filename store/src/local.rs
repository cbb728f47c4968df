//! Local folders for files that are read from a store.

use crate::error::{Error, Result};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, openat, unlinkat};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use tpde::TemporaryFolder;

/// The folder of a file that need not exist.
pub(crate) fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// An open folder.
///
/// Its files are opened below the descriptor and never through a link. So nobody can direct a write to another file, by a link in the
/// folder or by another folder under its name.
pub(crate) struct LocalFolder {
    path: PathBuf,
    open: File,
    /// Removed on drop.
    _temporary: Option<TemporaryFolder>,
}

impl LocalFolder {
    /// A folder of the caller's choice, which is created if it does not exist.
    pub fn at(path: &Path) -> Result<Self> {
        fs::create_dir_all(path).map_err(|e| Error::io("create", path, e))?;
        Self::open(path)
    }

    /// A folder that exists. One that a signal has removed is not created again.
    pub fn open(path: &Path) -> Result<Self> {
        let open = File::open(path).map_err(|e| Error::io("open", path, e))?;
        Ok(Self { path: path.to_owned(), open, _temporary: None })
    }

    /// A folder that is removed on drop.
    pub fn temporary() -> Result<Self> {
        let temporary = TemporaryFolder::create()?;
        let folder = Self::open(temporary.path())?;
        Ok(Self { _temporary: Some(temporary), ..folder })
    }

    /// A folder that stays until the caller removes it, and whether it has nothing of earlier calls. `None` if there is something under this name that
    /// another user could have put there or can change, or that another process uses. `own` is a folder that this process has
    /// created beside it.
    pub fn kept(path: &Path, own: &Path) -> Result<Option<(Self, bool)>> {
        let is_new = match fs::DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => true,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => false,
            Err(e) => return Err(Error::io("create", path, e)),
        };
        let look = |e| Error::io("look at", path, e);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(open) = rustix::fs::open(path, flags, Mode::empty()).map(File::from) else { return Ok(None) };
        if flock(&open, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
            return Ok(None);
        }
        let (here, own) = (open.metadata().map_err(look)?, own.metadata().map_err(look)?);
        // Another process may have removed the folder before it was locked.
        let is_there = path.symlink_metadata().is_ok_and(|there| (there.dev(), there.ino()) == (here.dev(), here.ino()));
        // A file system without modes shows every folder as writable for others.
        let is_private = is_new || here.mode() & 0o022 == 0;
        let is_ours = is_there && is_private && here.uid() == own.uid();
        // Not by who has created it: another call may lock it first.
        let is_empty = path.read_dir().is_ok_and(|mut entries| entries.next().is_none());
        Ok(is_ours.then(|| (Self { path: path.to_owned(), open, _temporary: None }, is_empty)))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens or creates a file. What is no regular file with one name is removed first.
    pub fn file(&self, name: &str) -> Result<File> {
        let failed = |e: Errno| Error::io("create", &self.path.join(name), e.into());
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let open = |flags| openat(&self.open, name, flags, Mode::from_raw_mode(0o666)).map(File::from);
        match open(flags) {
            Ok(file) => {
                let metadata = file.metadata().map_err(|e| Error::io("look at", &self.path.join(name), e))?;
                if metadata.is_file() && metadata.nlink() <= 1 {
                    return Ok(file);
                }
            }
            // A link or a socket.
            Err(Errno::LOOP | Errno::NXIO) => {}
            Err(e) => return Err(failed(e)),
        }
        unlinkat(&self.open, name, AtFlags::empty()).map_err(failed)?;
        open(flags | OFlags::EXCL).map_err(failed)
    }
}
