//! The files around an output: those that programs would read instead of it or together with it.

use crate::publish::{Barrier, Publication};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use tpde_core::error::{Error, Escaped, Result};

/// The extension of shard indexes.
pub(super) const SHARD_INDEX: &str = ".safetensors.index.json";
/// The extension of safetensors files.
pub(super) const SAFETENSORS: &str = ".safetensors";

/// Shard index of a folder whose files are being replaced. Readers refuse the folder, because the only shard does not exist.
const UNFINISHED: &[u8] =
    br#"{"metadata": {}, "weight_map": {"unfinished": "publication-of-this-folder-is-unfinished.safetensors"}}"#;

/// Names under which common loaders look for the weights of a folder, without `.safetensors`. transformers, diffusers, vLLM and
/// peft look for one file of such a name, and for its shard index. They differ in which one they prefer. All of them prefer
/// safetensors files to files of pickles, so `.bin` and `.pth` are not looked at.
const LOADED: [&str; 4] = ["model", "diffusion_pytorch_model", "consolidated", ADAPTER];

/// The weights of an adapter are read beside those of a model, not in their place.
const ADAPTER: &str = "adapter_model";

/// What a file of a checkpoint is, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Whole,
    Shard,
    Index,
}

/// The checkpoint to which a file belongs, and its role there, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Name<'a> {
    /// `model` for `model.safetensors`, `model-00001-of-00002.safetensors`, `model.fp16.safetensors` and their shard indexes.
    stem: &'a str,
    /// `fp16` for `model.fp16.safetensors` and `model-00001-of-00002.fp16.safetensors`. Programs read a variant only if it is asked
    /// for.
    variant: &'a str,
    role: Role,
}

impl<'a> Name<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        if name.starts_with('.') {
            return None;
        }
        let (stem, ending, role) = match name.split_once(".safetensors.index.") {
            Some((stem, ending)) => (stem, ending.strip_suffix("json")?.trim_end_matches('.'), Role::Index),
            None => {
                let stem = name.strip_suffix(SAFETENSORS)?;
                shard_of(stem).map_or((stem, "", Role::Whole), |(stem, variant)| (stem, variant, Role::Shard))
            }
        };
        let split = |loaded: &&'a str| Some((*loaded, stem.strip_prefix(*loaded)?.strip_prefix('.')?));
        let (stem, variant) = LOADED.iter().find_map(split).unwrap_or((stem, ""));
        Some(Self { stem, variant: if variant.is_empty() { ending } else { variant }, role })
    }
}

/// The name before `-N-of-N`, and the variant that may follow.
fn shard_of(stem: &str) -> Option<(&str, &str)> {
    let (front, count) = stem.rsplit_once("-of-")?;
    let (name, number) = front.rsplit_once('-')?;
    let (count, variant) = count.split_once('.').unwrap_or((count, ""));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(number) && is_number(count)).then_some((name, variant))
}

/// The file that programs may read instead of the shards of a shard index: `model.safetensors` for
/// `model.safetensors.index.json`. transformers prefers the file, diffusers and this library prefer the shards.
pub(super) fn rival_of(shard_index: &str) -> Option<&str> {
    shard_index.strip_suffix(&SHARD_INDEX[SAFETENSORS.len()..])
}

/// The folder and the names of outputs that are published together.
#[derive(Debug)]
pub(crate) struct Neighbours {
    folder: PathBuf,
    outputs: BTreeSet<String>,
    is_lone: bool,
    /// Whether all safetensors files of the folder belong to one checkpoint. Beside a lone file there may be others.
    is_checkpoint: bool,
    replace: bool,
}

impl Neighbours {
    /// Those of files in the folder `path`, which need not exist.
    pub fn of_folder(path: &Path, names: impl Iterator<Item = String>, replace: bool) -> Self {
        Self { folder: path.to_owned(), outputs: names.collect(), is_lone: false, is_checkpoint: true, replace }
    }

    /// Those of a lone file.
    pub fn of_file(path: &Path, replace: bool) -> Self {
        let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_checkpoint = LOADED.iter().any(|loaded| name.strip_suffix(SAFETENSORS) == Some(loaded));
        Self { folder: folder.to_owned(), outputs: BTreeSet::from([name]), is_lone: true, is_checkpoint, replace }
    }

    /// Begins the publication of these outputs.
    pub fn publication(&self) -> Publication {
        let barrier = Barrier { name: self.barrier_name(), content: UNFINISHED };
        match self.outputs.first() {
            Some(lone) if self.is_lone && Name::parse(lone).is_none() => Publication::files(&self.folder.join(lone), self.replace),
            _ if self.is_lone => Publication::file_in(&self.folder, barrier, self.replace),
            _ => Publication::folder(&self.folder, barrier, self.replace),
        }
    }

    fn barrier_name(&self) -> String {
        match (self.own_index(), self.outputs.first()) {
            (Some(name), _) => name.to_owned(),
            (None, Some(lone)) if self.is_lone => format!("{lone}{}", &SHARD_INDEX[SAFETENSORS.len()..]),
            _ => format!("{}{SHARD_INDEX}", LOADED[0]),
        }
    }

    fn own_index(&self) -> Option<&str> {
        self.outputs.iter().map(String::as_str).find(|name| name.ends_with(SHARD_INDEX))
    }

    /// Whether a program would read the other file instead of the outputs.
    fn is_rival(&self, other: Name<'_>) -> bool {
        let own = || self.outputs.iter().filter_map(|output| Name::parse(output));
        let is_model = self.is_checkpoint && own().all(|own| own.stem != ADAPTER && own.variant.is_empty());
        own().any(|own| (own.stem, own.variant) == (other.stem, other.variant))
            || is_model && other.variant.is_empty() && LOADED.contains(&other.stem)
    }

    /// The files that must go when the outputs appear, because a program would read them instead of the outputs: files with names
    /// that common loaders look for, and files of the outputs' own checkpoint. Shard indexes come last: as long as they exist,
    /// readers refuse the folder without their shards.
    ///
    /// # Errors
    /// [`Error::BadCheckpoint`] for such a file if nothing may be replaced, and for another file that readers of the folder would
    /// read together with the outputs; [`Error::Io`].
    pub fn stale(&self) -> Result<Vec<PathBuf>> {
        let entries = match self.folder.read_dir() {
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(Vec::new()),
            outcome => outcome.map_err(|e| Error::io("list", &self.folder, e))?,
        };
        let barrier = self.barrier_name();
        let mut stale = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|e| Error::io("list", &self.folder, e))?;
            let (path, name) = (self.folder.join(entry.file_name()), entry.file_name().to_string_lossy().into_owned());
            let Some(parsed) = Name::parse(&name).filter(|_| !self.outputs.contains(&name)) else { continue };
            let is_rival = self.is_rival(parsed);
            let is_read = !self.is_lone && (parsed.role == Role::Index || self.own_index().is_none());
            if !is_rival && !is_read || path.is_dir() || name == barrier && is_unfinished(&path) {
                continue;
            }
            let is_removable = is_rival && entry.file_type().is_ok_and(|found| found.is_file() || found.is_symlink());
            if !is_removable || !self.replace {
                let how = if is_removable { ", or replace existing files (--force, replace=True), which removes it" } else { "" };
                let found = Escaped(&name);
                let reason = format_args!(
                    "{found} is not part of the output, but programs that read the folder would open it: remove it{how}"
                );
                return Err(Error::bad_checkpoint(&self.folder, reason));
            }
            stale.push((parsed.role == Role::Index, path));
        }
        stale.sort();
        Ok(stale.into_iter().map(|(_, path)| path).collect())
    }
}

/// Returns an error if programs would read other files of the folder instead of a new file at `path`.
///
/// # Errors
/// [`Error::BadCheckpoint`] with the name of such a file; [`Error::Io`].
pub fn check_neighbours(path: impl AsRef<Path>) -> Result<()> {
    Neighbours::of_file(path.as_ref(), false).stale().map(drop)
}

/// Whether the file at `path` is the shard index of an interrupted publication.
fn is_unfinished(path: &Path) -> bool {
    // Read only a regular file of the right size. Another file could be a pipe, or larger than memory.
    let fits = path.symlink_metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() == UNFINISHED.len() as u64);
    fits && std::fs::read(path).is_ok_and(|content| content == UNFINISHED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_the_checkpoint_and_the_role() {
        for (name, expected) in [
            ("model.safetensors", Some(("model", "", Role::Whole))),
            ("model.fp16.safetensors", Some(("model", "fp16", Role::Whole))),
            ("model-00001-of-00002.safetensors", Some(("model", "", Role::Shard))),
            ("model.fp16-00001-of-00002.safetensors", Some(("model", "fp16", Role::Shard))),
            ("diffusion_pytorch_model-00001-of-00002.fp16.safetensors", Some(("diffusion_pytorch_model", "fp16", Role::Shard))),
            ("model.safetensors.index.json", Some(("model", "", Role::Index))),
            ("model.safetensors.index.fp16.json", Some(("model", "fp16", Role::Index))),
            ("model.safetensors.index.txt", None),
            ("other.v2.safetensors", Some(("other.v2", "", Role::Whole))),
            ("other-1-of-x.safetensors", Some(("other-1-of-x", "", Role::Whole))),
            ("models.safetensors", Some(("models", "", Role::Whole))),
            (".model.safetensors", None),
            ("model.bin", None),
            ("pytorch_model.bin.index.json", None),
        ] {
            let expected = expected.map(|(stem, variant, role)| Name { stem, variant, role });
            assert_eq!(Name::parse(name), expected, "{name}");
        }
        assert_eq!(rival_of("model.safetensors.index.json"), Some("model.safetensors"));
    }
}
