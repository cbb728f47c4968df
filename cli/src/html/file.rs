//! The file of a page.

use crate::signals::TemporaryFolder;
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tpde::{Error, Result};

fn failed(path: &Path, source: io::Error) -> Error {
    Error::Io { action: "create", path: path.to_owned(), source }
}

fn exists(path: &Path) -> Error {
    failed(path, io::Error::new(io::ErrorKind::AlreadyExists, "it exists (--force replaces it)"))
}

/// Refuses a file that exists, unless it may be replaced.
pub fn check_free(path: &Path, force: bool) -> Result<()> {
    if !force && path.symlink_metadata().is_ok() { Err(exists(path)) } else { Ok(()) }
}

/// Writes a page. It appears under its name once it is complete.
pub fn write(path: &Path, page: &str, force: bool) -> Result<()> {
    let failed = |source| failed(path, source);
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = TemporaryFolder::create_in(parent, ".tpde-html-").map_err(failed)?;
    let all = Permissions::from_mode(0o666); // less the umask
    let mut file = tempfile::Builder::new().permissions(all).tempfile_in(folder.path()).map_err(failed)?;
    file.write_all(page.as_bytes()).and_then(|()| file.as_file().sync_all()).map_err(failed)?;
    let kept = if force { file.persist(path) } else { file.persist_noclobber(path) };
    kept.map(drop).map_err(|e| if e.error.kind() == io::ErrorKind::AlreadyExists { exists(path) } else { failed(e.error) })
}
