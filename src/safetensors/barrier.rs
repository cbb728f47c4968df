//! Makes readers reject a folder while its files are being replaced.

use super::checkpoint::{SAFETENSORS, SHARD_INDEX};
use super::layout::Output;
use crate::error::{Error, Escaped, Result};
use crate::publish::Barrier;
use std::path::Path;

/// Shard index of a folder whose files are being replaced. Readers refuse the folder, because the only shard does not exist.
const UNFINISHED: &[u8] =
    br#"{"metadata": {}, "weight_map": {"unfinished": "publication-of-this-folder-is-unfinished.safetensors"}}"#;

/// Whether the file at `path` is the shard index of an interrupted publication.
fn is_unfinished(path: &Path) -> bool {
    // Read only a regular file of the right size. Another file could be a pipe, or larger than memory.
    let fits = path.symlink_metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() == UNFINISHED.len() as u64);
    fits && std::fs::read(path).is_ok_and(|content| content == UNFINISHED)
}

/// The barrier for publishing `outputs` in the folder `path`, which need not exist.
///
/// # Errors
/// [`Error::BadCheckpoint`] if readers would mix another file of the folder with the outputs. That is another shard index or, if
/// the outputs include no shard index, another safetensors file.
pub(crate) fn barrier(path: &Path, outputs: &[Output]) -> Result<Barrier> {
    let own = outputs.iter().map(|output| output.name.as_str()).find(|name| name.ends_with(SHARD_INDEX));
    let name = own.unwrap_or("model.safetensors.index.json");
    let entries = match path.read_dir() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        outcome => Some(outcome.map_err(|e| Error::io("list", path, e))?),
    };
    for entry in entries.into_iter().flatten() {
        let found = entry.map_err(|e| Error::io("list", path, e))?.file_name().to_string_lossy().into_owned();
        let is_read = !found.starts_with('.') && (found.ends_with(SHARD_INDEX) || own.is_none() && found.ends_with(SAFETENSORS));
        let is_output = outputs.binary_search_by(|output| output.name.as_str().cmp(&found)).is_ok(); // names of a pair's files ascend
        let is_barrier = || is_unfinished(&path.join(&found));
        if is_read && !is_output && !(found == name && is_barrier()) {
            let found = Escaped(&found);
            return Err(Error::bad_checkpoint(
                path,
                format_args!("{found} is not part of the output, but readers of the folder would open it too: remove it"),
            ));
        }
    }
    Ok(Barrier { name: name.to_owned(), content: UNFINISHED })
}
