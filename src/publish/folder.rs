//! Helpers for the folders of outputs.

use crate::error::{Error, Result};
use std::fs::File;
use std::path::{Path, PathBuf};

/// The folder that contains `path`.
pub(super) fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Syncs a folder, so that the names of its files are durable.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(|e| Error::io("sync", path, e))
}
