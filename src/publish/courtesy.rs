//! Calls that a file system may refuse although it keeps files.

use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::path::Path;
use tpde_core::error::Escaped;

/// Whether the file system does not support a call, or does not allow it. An error of the disk is no refusal.
pub(super) fn is_refused(error: Errno) -> bool {
    matches!(
        error,
        Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::PERM | Errno::ACCESS | Errno::NOLCK | Errno::NOTTY | Errno::ISDIR
    )
}

/// Whether a call of std was refused.
pub(super) fn was_refused(error: &io::Error) -> bool {
    Errno::from_io_error(error).is_some_and(is_refused)
}

/// Logs a refusal of a call without which files are complete, and goes on. `lost` says what is missing.
pub(super) fn or_warn(outcome: io::Result<()>, path: &Path, lost: &str) -> io::Result<()> {
    match outcome {
        Err(error) if was_refused(&error) => {
            tracing::warn!("{}: {lost}: {error}", Escaped(&path.display().to_string()));
            Ok(())
        }
        outcome => outcome,
    }
}

/// Sets the size of a new file, so that a limit of the file size is found early. On some file systems, files grow only by writes.
pub(crate) fn reserve(file: &File, size: u64) -> io::Result<()> {
    match file.set_len(size) {
        Err(error) if was_refused(&error) => Ok(()),
        outcome => outcome,
    }
}
