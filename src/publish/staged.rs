//! Files that get their final names only after they are written.

use super::courtesy::{is_refused, or_warn, was_refused};
use super::folder::folder_of;
use super::temporaries::Temporary;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Seek};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// A file that does not have its final name yet. It is removed on drop.
#[derive(Debug)]
pub(super) enum StagedFile {
    /// A file without a name (`O_TMPFILE`). The system removes it even if the process is killed.
    Unnamed(Arc<File>),
    Named(Temporary),
}

impl StagedFile {
    /// Creates and opens a file in `folder`. Its permission bits are `mode` without the bits of the umask.
    pub fn create(folder: &Path, mode: u32) -> io::Result<(Self, Arc<File>)> {
        let Some(file) = unnamed(folder, mode).map(Arc::new) else { return Self::create_named(folder, mode) };
        Ok((Self::Unnamed(file.clone()), file))
    }

    /// Like [`StagedFile::create`], but with a temporary name. For file systems without `O_TMPFILE`, and if there are so many files
    /// that not all can stay open.
    pub fn create_named(folder: &Path, mode: u32) -> io::Result<(Self, Arc<File>)> {
        let (temporary, file) = Temporary::create(folder, |path| create_new(path, mode))?;
        Ok((Self::Named(temporary), Arc::new(file)))
    }

    /// Gives the file its final name. An existing file is replaced atomically if `replace` is set; otherwise it is an error.
    ///
    /// In some containers and file systems an unnamed file cannot get a name. The file is then copied.
    pub fn publish(self, path: &Path, replace: bool) -> io::Result<()> {
        let temporary = match self {
            Self::Named(temporary) => temporary,
            Self::Unnamed(file) => match link(&file, path) {
                // `linkat` cannot replace an existing file, so link to a temporary name and rename that.
                Err(error) if is_refusal(error) || error == Errno::EXIST && replace => {
                    Temporary::create(&folder_of(path), |path| link_or_copy(&file, path))?.0
                }
                outcome => return Ok(outcome?),
            },
        };
        if replace { temporary.rename(path) } else { temporary.rename_new(path) }
    }
}

/// A cache of open descriptors of staged files with temporary names.
#[derive(Debug, Default)]
pub(super) struct OpenFiles(Mutex<VecDeque<OpenFile>>);

#[derive(Debug)]
struct OpenFile {
    /// Index of the file.
    i: usize,
    file: Arc<File>,
    /// Whether the file was handed out, so that it may have been written.
    is_used: bool,
}

impl OpenFiles {
    /// Maximum number of open files with temporary names per publication. The first `MAX` files may be unnamed and stay open too.
    pub const MAX: usize = 64;

    /// Adds a new, empty file.
    pub fn add(&self, i: usize, file: Arc<File>) -> io::Result<()> {
        self.insert(OpenFile { i, file, is_used: false })
    }

    /// Adds a file. If there are too many, closes the half of them that was used least recently. Files that may have been written are
    /// synced first, because closing a file can lose a write error. Other threads wait, so that they open no further files meanwhile.
    fn insert(&self, opened: OpenFile) -> io::Result<()> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.push_back(opened);
        if open.len() <= Self::MAX {
            return Ok(());
        }
        let closed: Vec<_> = open.drain(..Self::MAX / 2).filter(|closed| closed.is_used).collect();
        if let Some(first) = closed.first() {
            sync_many(&first.file);
        }
        closed.iter().try_for_each(|closed| match closed.file.sync_all() {
            Err(error) if was_refused(&error) => Ok(()), // logged when the file is published
            outcome => outcome,
        })
    }

    /// File `i`, opened if necessary. `staged` is the same file.
    pub fn get(&self, i: usize, staged: &StagedFile) -> io::Result<Arc<File>> {
        let temporary = match staged {
            StagedFile::Unnamed(file) => return Ok(file.clone()),
            StagedFile::Named(temporary) => temporary,
        };
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = open.iter().position(|open| open.i == i)
            && let Some(mut entry) = open.remove(at)
        {
            let file = entry.file.clone();
            entry.is_used = true;
            open.push_back(entry);
            return Ok(file);
        }
        drop(open);
        let file = Arc::new(File::options().write(true).open(temporary.path())?);
        self.insert(OpenFile { i, file: file.clone(), is_used: true })?;
        Ok(file)
    }
}

/// Syncs the whole file system of `file`. A sync of each of many files costs a commit of the journal; after this one, they cost
/// almost nothing. They are what finds errors, so a failure here is ignored.
pub(super) fn sync_many(file: &File) {
    let _ = rustix::fs::syncfs(file);
}

/// A path to an open file, in `/proc`. Unlike `AT_EMPTY_PATH`, using it needs no privilege.
fn path_of(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Creates an unnamed file. `None` if the file system does not support that or if `/proc`, which [`link`] needs, is missing.
fn unnamed(folder: &Path, mode: u32) -> Option<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(folder, flags, Mode::from_raw_mode(mode)).ok()?);
    Path::new(&path_of(&file)).symlink_metadata().is_ok().then_some(file)
}

/// Whether this error of [`link`] means that the system can create unnamed files but cannot name them.
fn is_refusal(error: Errno) -> bool {
    is_refused(error) || matches!(error, Errno::NOENT | Errno::XDEV | Errno::LOOP)
}

/// Gives an unnamed file a name. If the system refuses that, creates a synced copy with this name instead.
fn link_or_copy(mut file: &File, path: &Path) -> io::Result<()> {
    match link(file, path) {
        Err(error) if is_refusal(error) => {}
        outcome => return Ok(outcome?),
    }
    let copy = create_new(path, 0o600)?;
    let mut fill = || {
        file.rewind()?;
        io::copy(&mut file, &mut &copy)?;
        or_warn(copy.set_permissions(file.metadata()?.permissions()), path, "its mode cannot be set")?;
        or_warn(copy.sync_all(), path, "its bytes may not survive a crash of the machine")
    };
    fill().inspect_err(|_| _ = std::fs::remove_file(path))
}

fn create_new(path: &Path, mode: u32) -> io::Result<File> {
    File::options().write(true).create_new(true).mode(mode).open(path)
}

/// Gives an unnamed file a name. Fails if the name exists.
fn link(file: &File, path: &Path) -> rustix::io::Result<()> {
    linkat(CWD, path_of(file), CWD, path, AtFlags::SYMLINK_FOLLOW)
}
