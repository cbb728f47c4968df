//! Files that are written whole.

use super::{Publication, check_apart};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tpde_core::error::{Error, Result};

/// A file that appears under its name after it is complete, with the checks that all outputs have. It replaces no input, device,
/// pipe or folder. Dropping it leaves nothing.
#[derive(Debug)]
pub struct OutputFile {
    path: PathBuf,
    publication: Publication,
    file: Arc<File>,
}

impl OutputFile {
    /// Begins a file. An existing file is replaced only with `overwrite`.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if `path` is one of `inputs`, or is inside one of them.
    /// - [`Error::Io`] if `path` exists and may not be replaced, or is not a regular file; if the folder is missing or not writable.
    pub fn create(path: impl AsRef<Path>, inputs: &[PathBuf], overwrite: bool) -> Result<Self> {
        let path = path.as_ref().to_owned();
        check_apart(std::slice::from_ref(&path), inputs)?;
        let mut publication = Publication::files(&path, overwrite);
        let file = publication.add(&path)?;
        Ok(Self { path, publication, file })
    }

    /// Writes the content, and publishes the file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn publish(self, content: &[u8]) -> Result<()> {
        (&*self.file).write_all(content).map_err(|e| Error::io("write", &self.path, e))?;
        self.publication.commit(&|_| {})
    }
}
