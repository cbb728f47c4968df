//! Encoding pairs from files and from tensors that are no files.

use super::checkpoint::SafetensorsCheckpoint;
use super::output;
use crate::checkpoint::Checkpoint;
use crate::delta::{self, EncodeOptions, EncodeReport, Progress};
use crate::error::Result;
use std::path::Path;

/// Encodes the difference of checkpoint `target` from `base` (`None`: from nothing) into the pair `path`.
///
/// # Errors
/// As [`delta::encode_to_path`]: [`Error::Changed`](crate::Error::Changed) if a file of either checkpoint has changed since it was opened, as far as
/// [`FileSource::check_unchanged`](crate::source::FileSource::check_unchanged) notices.
pub fn encode_files(
    base: Option<&SafetensorsCheckpoint>,
    target: &SafetensorsCheckpoint,
    options: &EncodeOptions,
    path: &Path,
    replace: bool,
    progress: Progress<'_>,
) -> Result<EncodeReport> {
    let files = target.file_specs(base)?;
    delta::encode_to_path(base.map(|base| base as &dyn Checkpoint), target, files, options, path, replace, progress)
}

/// Encodes the difference of tensors, wherever they lie, into the pair `path`. The pair holds no files: its target is written as
/// one safetensors file with a header of its own.
///
/// # Errors
/// As [`delta::encode_to_path`]; before anything is read, [`Error::NotWritable`](crate::Error::NotWritable) if there can be no such file.
pub fn encode_tensors(
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
    options: &EncodeOptions,
    path: &Path,
    replace: bool,
    progress: Progress<'_>,
) -> Result<EncodeReport> {
    output::compose(target.tensors().to_vec())?;
    delta::encode_to_path(base, target, Vec::new(), options, path, replace, progress)
}
