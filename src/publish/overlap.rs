//! Checks that outputs do not overlap inputs.

use super::folder::folder_of;
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tpde_core::error::{Error, Escaped, Result};

/// Device and inode. All names of a file or folder have the same identity.
type Identity = (u64, u64);

fn identity(path: &Path) -> Option<Identity> {
    path.metadata().ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Checks that no output is, contains, or is inside an input.
///
/// Files and folders are compared by device and inode, so symbolic and hard links are detected. An output need not exist. Cost: a
/// few system calls per path and per folder.
///
/// # Errors
/// [`Error::InvalidArgument`] with both paths.
pub(crate) fn check_apart(outputs: &[PathBuf], inputs: &[PathBuf]) -> Result<()> {
    let mut folders = Folders::default();
    let read: HashMap<Identity, &PathBuf> = inputs.iter().filter_map(|input| Some((identity(input)?, input))).collect();
    let mut containing: HashMap<Identity, &PathBuf> = HashMap::new();
    for input in inputs {
        folders.of(input).into_iter().for_each(|folder| _ = containing.entry(folder).or_insert(input));
    }
    for output in outputs {
        let refuse = |how: &str, input: &Path| {
            let shown = |path: &Path| Escaped(&path.display().to_string()).to_string();
            Err(Error::InvalidArgument(format!("output {} {how} input {}", shown(output), shown(input))))
        };
        let own = identity(output);
        if let Some(input) = own.and_then(|own| read.get(&own)) {
            return refuse("is the same as", input);
        }
        if let Some(input) = own.and_then(|own| containing.get(&own)) {
            return refuse("contains", input);
        }
        if let Some(input) = folders.of(output).iter().find_map(|folder| read.get(folder)) {
            return refuse("is inside", input);
        }
    }
    Ok(())
}

/// Cache of the ancestors of folders, by path of the folder.
#[derive(Default)]
struct Folders(HashMap<PathBuf, Vec<Identity>>);

impl Folders {
    /// All folders that contain `path`. If `path` is a link, also all folders that contain the target of the link.
    fn of(&mut self, path: &Path) -> Vec<Identity> {
        let mut all = self.above(folder_of(path));
        if path.is_symlink()
            && let Ok(to) = path.canonicalize()
        {
            all.extend(self.above(folder_of(&to)));
        }
        all
    }

    /// `folder` and all its ancestors, beginning with the nearest that exists.
    fn above(&mut self, folder: PathBuf) -> Vec<Identity> {
        let known = self.0.entry(folder).or_insert_with_key(|folder| {
            let absolute = std::path::absolute(folder).unwrap_or_else(|_| folder.clone());
            let existing = absolute.ancestors().find_map(|folder| folder.canonicalize().ok());
            existing.iter().flat_map(|folder| folder.ancestors()).filter_map(identity).collect()
        });
        known.clone()
    }
}
