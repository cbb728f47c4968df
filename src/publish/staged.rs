//! Files that are written before they get their name.

use super::folder_of;
use super::temporaries::Temporary;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat};
use rustix::io::Errno;
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

/// A file without its name. It is gone on drop.
#[derive(Debug)]
pub(super) struct Staged {
    file: Arc<File>,
    /// `None` for a file without any name (`O_TMPFILE`), which the system removes even if the process is killed.
    temporary: Option<Temporary>,
}

impl Staged {
    /// A new file in `folder`: with permission bits `mode`, or if `None` with those that the umask leaves.
    pub fn create(folder: &Path, mode: Option<u32>) -> io::Result<Self> {
        match unnamed(folder, initial(mode)) {
            Some(file) => Self { file: Arc::new(file), temporary: None }.with_mode(mode),
            None => Self::create_named(folder, mode),
        }
    }

    /// [`Staged::create`] for file systems that lack files without names.
    pub fn create_named(folder: &Path, mode: Option<u32>) -> io::Result<Self> {
        let create = |path: &Path| File::options().read(true).write(true).create_new(true).mode(initial(mode)).open(path);
        let (temporary, file) = Temporary::create(folder, create)?;
        Self { file: Arc::new(file), temporary: Some(temporary) }.with_mode(mode)
    }

    fn with_mode(self, mode: Option<u32>) -> io::Result<Self> {
        if let Some(mode) = mode {
            self.file.set_permissions(Permissions::from_mode(mode))?;
        }
        Ok(self)
    }

    pub fn file(&self) -> Arc<File> {
        self.file.clone()
    }

    /// Gives the file its name. A file of that name is replaced atomically if `replace`, else it is an error.
    pub fn publish(self, path: &Path, replace: bool) -> io::Result<()> {
        let temporary = match self.temporary {
            Some(temporary) => temporary,
            None => match link(&self.file, path) {
                // No call gives a file that has no name the name of another file.
                Err(Errno::EXIST) if replace => Temporary::create(&folder_of(path), |path| Ok(link(&self.file, path)?))?.0,
                outcome => return Ok(outcome?),
            },
        };
        if replace { temporary.rename(path) } else { temporary.rename_new(path) }
    }
}

/// The permission bits that a file is created with: never more than it shall have, because the others are set afterwards.
fn initial(mode: Option<u32>) -> u32 {
    mode.map_or(0o666, |mode| mode & 0o600)
}

/// Path of an open file. It needs `/proc`, but no privilege.
fn path_of(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// A file without a name, if it can get one later.
fn unnamed(folder: &Path, mode: u32) -> Option<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(folder, flags, Mode::from_raw_mode(mode)).ok()?);
    Path::new(&path_of(&file)).symlink_metadata().is_ok().then_some(file)
}

/// Gives a file without a name a name. Never replaces anything.
fn link(file: &File, path: &Path) -> rustix::io::Result<()> {
    linkat(CWD, path_of(file), CWD, path, AtFlags::SYMLINK_FOLLOW)
}
