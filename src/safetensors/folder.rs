//! Which files of a folder are its checkpoint.

use super::neighbours::{SAFETENSORS, SHARD_INDEX, rival_of};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use tpde_core::error::{Error, Escaped, Result};

/// The names in a folder.
pub(super) struct Folder {
    path: PathBuf,
    /// Files, and folders.
    names: BTreeSet<String>,
    /// The shard index that the caller has chosen.
    chosen: Option<String>,
}

impl Folder {
    pub fn list(path: &Path) -> Result<Self> {
        let mut names = BTreeSet::new();
        for entry in path.read_dir().map_err(|e| Error::io("list", path, e))? {
            let name = entry.map_err(|e| Error::io("list", path, e))?.file_name();
            names.insert(name.to_string_lossy().into_owned());
        }
        Ok(Self { path: path.to_owned(), names, chosen: None })
    }

    pub fn with_index(self, name: &str) -> Self {
        Self { chosen: Some(name.to_owned()), ..self }
    }

    /// A folder is no file of the checkpoint, whatever its name ends with.
    fn is_file(&self, name: &str) -> bool {
        !self.path.join(name).is_dir()
    }

    fn with_ending(&self, ending: &'static str) -> impl Iterator<Item = &str> {
        let names = self.names.iter().map(String::as_str);
        names.filter(move |name| name.ends_with(ending) && !name.starts_with('.') && self.is_file(name))
    }

    pub fn safetensors(&self) -> impl Iterator<Item = &str> {
        self.with_ending(SAFETENSORS)
    }

    /// The shard index, if there is one.
    ///
    /// # Errors
    /// [`Error::BadCheckpoint`] if there are two, and the caller has chosen none.
    pub fn shard_index(&self) -> Result<Option<&str>> {
        if let Some(chosen) = &self.chosen {
            return Ok(Some(chosen));
        }
        let mut indexes = self.with_ending(SHARD_INDEX);
        match (indexes.next(), indexes.next()) {
            (Some(one), Some(other)) => {
                let (one, other) = (Escaped(one), Escaped(other));
                let reason = format_args!("two shard indexes, {one} and {other}: give the path of one in place of the folder's");
                Err(Error::bad_checkpoint(&self.path, reason))
            }
            (one, _) => Ok(one),
        }
    }

    /// Checks that all shards exist.
    pub fn check_shards(&self, shard_index: &str, shards: &BTreeSet<&str>) -> Result<()> {
        let is_missing = |name: &&&str| !self.names.contains(**name) || !self.is_file(name);
        let mut missing = shards.iter().filter(is_missing);
        let Some(first) = missing.next() else { return Ok(()) };
        let more = missing.count();
        let (shard_index, first, count) = (Escaped(shard_index), Escaped(first), shards.len());
        let others = if more == 0 { String::new() } else { format!(", and so are {more} more of its {count} files") };
        let reason = format_args!(
            "the shard index names {first}, which is missing{others}: fetch what is missing, or remove {shard_index} if it is of \
             other files"
        );
        Err(Error::bad_checkpoint(&self.path, reason))
    }

    /// The file that other programs may read instead of the shards.
    pub fn rival(&self, shard_index: &str, shards: &BTreeSet<&str>) -> Option<String> {
        let rival = rival_of(shard_index).filter(|_| self.chosen.is_none())?;
        (self.names.contains(rival) && self.is_file(rival) && !shards.contains(rival)).then(|| rival.to_owned())
    }

    /// The names that do not belong to the checkpoint.
    pub fn others(&self, shard_index: Option<&str>, shards: &BTreeSet<&str>) -> Vec<String> {
        let names = self.names.iter().filter(|name| !shards.contains(&***name) && shard_index != Some(name));
        names.cloned().collect()
    }

    /// Why the folder is not a checkpoint.
    pub fn without_checkpoint(&self) -> Error {
        let has_safetensors = |name: &&String| {
            let entries = self.path.join(name).read_dir().into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().ends_with(SAFETENSORS))
        };
        let below: Vec<_> = self.names.iter().filter(has_safetensors).map(|name| Escaped(name).to_string()).collect();
        let of = |endings: &[&str]| self.names.iter().find(|name| endings.iter().any(|ending| name.ends_with(ending)));
        let how = if !below.is_empty() {
            format!("; {} are folders with such files: each of them is a checkpoint of its own", below.join(", "))
        } else if let Some(name) = of(&[".bin", ".pt", ".pth", ".ckpt"]) {
            let name = Escaped(name);
            format!("; {name} may be one of torch.save: load it with torch.load, and save it with safetensors.torch.save_file")
        } else if let Some(name) = of(&[".gguf"]) {
            format!("; {} is one of llama.cpp: give the safetensors files that it was made from", Escaped(name))
        } else if self.names.iter().any(|name| name.ends_with(".tpde-index")) {
            "; it has pairs, which are named without their endings".to_owned()
        } else {
            String::new()
        };
        Error::bad_checkpoint(&self.path, format_args!("no .safetensors file in this folder{how}"))
    }
}
