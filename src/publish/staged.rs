//! Files that are written before they get their names.

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

/// A file that does not have its final name yet. Removed on drop.
#[derive(Debug)]
pub(super) enum Staged {
    /// A file without any name (`O_TMPFILE`), which the system removes even if the process is killed.
    Unnamed(Arc<File>),
    Named(Temporary),
}

impl Staged {
    /// A new file in `folder`, open, with the permission bits of `mode` that the umask leaves.
    pub fn create(folder: &Path, mode: u32) -> io::Result<(Self, Arc<File>)> {
        let Some(file) = unnamed(folder, mode).map(Arc::new) else { return Self::create_named(folder, mode) };
        Ok((Self::Unnamed(file.clone()), file))
    }

    /// As [`Staged::create`], with a temporary name: for file systems without `O_TMPFILE`, and for more files than may be open.
    pub fn create_named(folder: &Path, mode: u32) -> io::Result<(Self, Arc<File>)> {
        let (temporary, file) = Temporary::create(folder, |path| create_new(path, mode))?;
        Ok((Self::Named(temporary), Arc::new(file)))
    }

    /// Gives the file its name. A file of that name is replaced atomically if `replace`, else it is an error.
    ///
    /// Some containers and file systems cannot name an unnamed file. Then the file is copied.
    pub fn publish(self, path: &Path, replace: bool) -> io::Result<()> {
        let temporary = match self {
            Self::Named(temporary) => temporary,
            Self::Unnamed(file) => match link(&file, path) {
                // `linkat` cannot replace an existing name.
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
pub(super) struct OpenFiles(Mutex<VecDeque<(usize, Arc<File>)>>);

impl OpenFiles {
    /// Most descriptors of a publication for named files, and as many again for unnamed files.
    pub const MAX: usize = 64;

    /// Adds file `i`. The least recently used file is synced and closed if necessary. The sync comes first, because closing can
    /// lose an unreported write error. Other threads do not wait for the sync; one of them may open the same file again
    /// meanwhile.
    pub fn insert(&self, i: usize, file: Arc<File>) -> io::Result<()> {
        self.push(i, file).map_or(Ok(()), |closed| closed.sync_all())
    }

    /// Adds file `i` and returns the file to close.
    fn push(&self, i: usize, file: Arc<File>) -> Option<Arc<File>> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.push_back((i, file));
        if open.len() > Self::MAX { open.pop_front().map(|(_, file)| file) } else { None }
    }

    /// File `i`, which is `staged`.
    pub fn get(&self, i: usize, staged: &Staged) -> io::Result<Arc<File>> {
        let temporary = match staged {
            Staged::Unnamed(file) => return Ok(file.clone()),
            Staged::Named(temporary) => temporary,
        };
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = open.iter().position(|(open, _)| *open == i)
            && let Some(entry) = open.remove(at)
        {
            let file = entry.1.clone();
            open.push_back(entry);
            return Ok(file);
        }
        drop(open);
        let file = Arc::new(File::options().write(true).open(temporary.path())?);
        self.insert(i, file.clone())?;
        Ok(file)
    }
}

/// Path of an open file. It needs `/proc`, but no privilege.
fn path_of(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Creates an unnamed file, if it can be named later.
fn unnamed(folder: &Path, mode: u32) -> Option<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(folder, flags, Mode::from_raw_mode(mode)).ok()?);
    Path::new(&path_of(&file)).symlink_metadata().is_ok().then_some(file)
}

/// Whether this error of [`link`] means that unnamed files can be created but not named.
fn is_refusal(error: Errno) -> bool {
    matches!(
        error,
        Errno::PERM | Errno::ACCESS | Errno::NOENT | Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::LOOP
    )
}

/// Names an unnamed file, or if that is refused, creates a synced copy of it under that name.
fn link_or_copy(mut file: &File, path: &Path) -> io::Result<()> {
    match link(file, path) {
        Err(error) if is_refusal(error) => {}
        outcome => return Ok(outcome?),
    }
    let copy = create_new(path, 0o600)?;
    let mut fill = || {
        file.rewind()?;
        io::copy(&mut file, &mut &copy)?;
        copy.set_permissions(file.metadata()?.permissions())?;
        copy.sync_all()
    };
    fill().inspect_err(|_| _ = std::fs::remove_file(path))
}

fn create_new(path: &Path, mode: u32) -> io::Result<File> {
    File::options().write(true).create_new(true).mode(mode).open(path)
}

/// Names an unnamed file. Never replaces anything.
fn link(file: &File, path: &Path) -> rustix::io::Result<()> {
    linkat(CWD, path_of(file), CWD, path, AtFlags::SYMLINK_FOLLOW)
}
