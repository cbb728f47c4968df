//! The folders of outputs.

use super::courtesy::{or_warn, was_refused};
use std::cell::Cell;
use std::fs::File;
use std::path::{Path, PathBuf};
use tpde_core::error::{Error, Result};

/// The folder that contains `path`.
pub(super) fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// An open folder, whose names can be made durable and which can be locked, as far as the system allows that.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// `None` if the folder may not be read. Files can be created in it all the same.
    pub file: Option<File>,
    /// Whether a refused sync was logged.
    is_logged: Cell<bool>,
}

impl Folder {
    pub fn open(path: &Path) -> Result<Self> {
        let file = match File::open(path) {
            Err(error) if was_refused(&error) => None,
            outcome => Some(outcome.map_err(|e| Error::io("open", path, e))?),
        };
        Ok(Self { path: path.to_owned(), file, is_logged: Cell::new(false) })
    }

    /// Syncs the folder, so that the names of its files are durable. If the file system refuses that, logs it once: the files
    /// are complete, and only a crash of the machine can lose their names.
    pub fn sync(&self) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let outcome = match file.sync_all() {
            Err(error) if self.is_logged.get() && was_refused(&error) => Ok(()),
            outcome => outcome,
        };
        self.is_logged.set(self.is_logged.get() || outcome.is_err());
        or_warn(outcome, &self.path, "names in this folder may not survive a crash of the machine")
            .map_err(|e| Error::io("sync", &self.path, e))
    }
}
