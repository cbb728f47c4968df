//! Creates the two files of a new pair, and publishes them.

#![forbid(unsafe_code)]

use crate::publish::{Publication, check_apart};
use crate::reader::{PairPaths, check_pair_name};
use crate::watch::Progress;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tpde_core::error::{Error, Result};
use tpde_core::writer::Finished;

/// Capacity of the buffer in front of the blob. Larger payloads are written without a copy.
const WRITE_BUFFER: usize = 256 << 10;

/// The blob of a new pair, written without its name.
pub type NewBlob = BufWriter<Arc<File>>;

/// The files of a new pair, written without their names. They are removed on drop, unless they were published.
pub struct NewPair {
    pub paths: PairPaths,
    publication: Publication,
    index: Arc<File>,
}

impl NewPair {
    /// Creates the files of the pair `path`. Existing files are replaced only if `overwrite` is set.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `path` names no pair, or if a file of the pair is one of `inputs` or is inside one of them;
    /// [`Error::Io`].
    pub fn create(path: &Path, inputs: &[PathBuf], overwrite: bool) -> Result<(Self, NewBlob)> {
        check_pair_name(path)?;
        let paths = PairPaths::new(path);
        check_apart(&[paths.index.clone(), paths.blob.clone()], inputs)?;
        let mut publication = Publication::files(&paths.index, overwrite);
        let blob = BufWriter::with_capacity(WRITE_BUFFER, publication.add(&paths.blob)?);
        let index = publication.add(&paths.index)?;
        Ok((Self { paths, publication, index }, blob))
    }

    /// Writes the index and the header of the blob, and publishes both files. The blob gets its name first. When the index gets
    /// its name, the pair is complete.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Cancelled`] from `progress`.
    pub fn publish(mut self, finished: Finished<NewBlob>, progress: Progress<'_>) -> Result<()> {
        let Finished { index, blob_header, mut blob } = finished;
        let written = blob.seek(SeekFrom::Start(0)).and_then(|_| blob.write_all(&blob_header)).and_then(|()| blob.flush());
        written.map_err(|e| Error::io("write", &self.paths.blob, e))?;
        self.index.write_all(index.as_bytes()).map_err(|e| Error::io("write", &self.paths.index, e))?;
        self.publication.commit(progress)
    }
}
