//! Checks whether a file may be published at a path.

use super::courtesy::is_refused;
use super::folder::folder_of;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tpde_core::error::{Error, Result};

/// Maximum number of links to follow, as in Linux.
const MAX_LINKS: usize = 40;

/// Checks that `path` does not exist or, if `replace` is set, is a regular file or a link to one. Returns the permission bits of
/// the existing file.
///
/// Publication replaces a link, not the file to which it points, because many links of a cache may share one file. A link that
/// leads through `/proc`, such as `/dev/stdout`, is refused even if it ends at a regular file.
///
/// # Errors
/// [`Error::Io`] in all other cases.
pub(crate) fn check_free(path: &Path, replace: bool) -> Result<Option<u32>> {
    let look = |e| Error::io("look at", path, e);
    let refuse = |kind, reason: &str| Err(Error::io("replace", path, io::Error::new(kind, reason)));
    let link = match path.symlink_metadata() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        outcome => outcome.map_err(look)?.is_symlink(),
    };
    if link && leads_through_proc(path).map_err(look)? {
        return refuse(io::ErrorKind::InvalidInput, "it is a link to an open file, not a regular file");
    }
    let metadata = match path.metadata() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return refuse(io::ErrorKind::InvalidInput, "it is a link to nothing, not a regular file");
        }
        outcome => outcome.map_err(look)?,
    };
    if metadata.is_dir() {
        return Err(Error::io("replace", path, io::ErrorKind::IsADirectory.into()));
    }
    if !metadata.is_file() {
        return refuse(io::ErrorKind::InvalidInput, "it is not a regular file"); // a rename could replace /dev/null
    }
    if !replace {
        return Err(Error::io("create", path, io::Error::new(io::ErrorKind::AlreadyExists, "it exists")));
    }
    Ok(Some(metadata.permissions().mode() & 0o777))
}

/// Whether `path` is a link, or leads through a chain of links, with one of them in `/proc`.
fn leads_through_proc(path: &Path) -> io::Result<bool> {
    let mut path: PathBuf = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Ok(to) = path.read_link() else { return Ok(false) };
        let folder = folder_of(&path);
        match rustix::fs::statfs(&folder) {
            Ok(found) if found.f_type == rustix::fs::PROC_SUPER_MAGIC => return Ok(true),
            Err(error) if !is_refused(error) => return Err(error.into()), // /proc itself does not refuse
            _ => {}
        }
        path = folder.join(to);
    }
    Ok(false)
}
