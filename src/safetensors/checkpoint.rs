//! Checkpoints in safetensors files and sharded folders.

use super::as_base::{TargetContent, base_fault};
use super::folder::Folder;
use super::header::{self, FileTensor, Header};
use super::layout::Location;
use super::neighbours::SHARD_INDEX;
use crate::checkpoint::{Checkpoint, CheckpointFiles, TensorInfo};
use crate::source::{FileSource, OpenFiles};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tpde_core::digest;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::format::{DIGEST_SIZE, FileKind};
use tpde_core::index::is_file_name;
use tpde_core::source::Source;
use tpde_core::writer::FileSpec;

/// Maximum size of a shard index in bytes.
const SHARD_INDEX_LIMIT: u64 = 100_000_000;
/// A checkpoint in a safetensors file or in a folder of safetensors files. Tensors are read in ranges and not held in memory.
///
/// If a folder has more than 16 files, at most 16 stay open. The others are reopened when they are read.
#[derive(Debug)]
pub struct SafetensorsCheckpoint {
    path: PathBuf,
    /// Safetensors files, in ascending order of name.
    files: Vec<Shard>,
    shard_index: Option<ShardIndex>,
    tensors: Vec<TensorInfo>,
    /// For each tensor, its location in `files`.
    locations: Vec<Location>,
    /// The file that other programs may read instead of this checkpoint, if the caller has chosen neither.
    rival: Option<String>,
    not_included: Vec<String>,
}

/// One safetensors file.
#[derive(Debug)]
struct Shard {
    /// Empty for a single file.
    name: String,
    source: FileSource,
    /// Size, in bytes, of the length field and the header.
    content_size: u64,
}

/// The file that maps tensors to shards.
#[derive(Debug)]
struct ShardIndex {
    name: String,
    content: Vec<u8>,
    source: FileSource,
}

impl Shard {
    fn open(path: &Path, name: &str, shared: Option<&Arc<OpenFiles>>) -> Result<(Self, Vec<FileTensor>)> {
        let mut source = match shared {
            Some(files) => FileSource::open_shared(path, files)?,
            None => FileSource::open(path)?,
        };
        source.settle()?;
        let header = Header::read(&source)?;
        Ok((Self { name: name.to_owned(), source, content_size: header.content_size }, header.tensors))
    }

    /// The length field and the header.
    fn content(&self) -> Result<Vec<u8>> {
        let mut content = vec![0; self.content_size as usize]; // bounded by the header's limit
        self.source.read(0, &mut content)?;
        Ok(content)
    }

    /// The hash of [`Shard::content`], read piece by piece.
    fn content_hash(&self) -> Result<blake3::Hash> {
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; self.content_size.min(1 << 20) as usize];
        let mut at = 0;
        while at < self.content_size {
            let size = buffer.len().min((self.content_size - at) as usize);
            self.source.read(at, &mut buffer[..size])?;
            hasher.update(&buffer[..size]);
            at += size as u64;
        }
        Ok(hasher.finalize())
    }
}

impl SafetensorsCheckpoint {
    /// Opens a `.safetensors` file, a folder, or the shard index of a folder. If a folder has a `*.safetensors.index.json`, its
    /// shards are the files named there; otherwise all its `.safetensors` files. Hidden files and sub-folders are ignored. Of a
    /// folder with several shard indexes, one of them must be given.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be read; [`Error::BadCheckpoint`] if `path` is not a valid checkpoint; [`Error::Changed`] if
    /// a file changes while it is being opened.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.is_dir() {
            return Self::open_folder(path, Folder::list(path)?);
        }
        match path.file_name().and_then(|name| name.to_str()) {
            Some(name) if name.ends_with(SHARD_INDEX) => {
                let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
                Self::open_folder(folder, Folder::list(folder)?.with_index(name))
            }
            _ => Self::from_files(path, vec![(path.to_owned(), String::new())], None),
        }
    }

    fn open_folder(path: &Path, folder: Folder) -> Result<Self> {
        let shard_index = match folder.shard_index()? {
            Some(name) => {
                check_name(path, name, FileKind::Verbatim)?;
                let mut source = FileSource::open(path.join(name))?;
                source.settle()?;
                let content = source.read_all("size of the shard index", SHARD_INDEX_LIMIT)?.to_vec();
                Some(ShardIndex { name: name.to_owned(), content, source })
            }
            None => None,
        };
        let map = shard_index.as_ref().map(|index| header::weight_map(index.source.path(), &index.content)).transpose()?;
        let shards: BTreeSet<&str> = match &map {
            Some(map) => map.values().map(String::as_str).collect(),
            None => folder.safetensors().collect(),
        };
        if shards.is_empty() {
            return Err(folder.without_checkpoint());
        }
        shards.iter().try_for_each(|name| check_name(path, name, FileKind::Safetensors))?;
        if let Some(index) = &shard_index {
            folder.check_shards(&index.name, &shards)?;
        }
        let files = shards.iter().map(|name| (path.join(name), (*name).to_owned())).collect();
        let mut checkpoint = Self::from_files(path, files, map.as_ref())?;
        for (tensor, shard) in map.iter().flatten() {
            let shard_of_tensor = checkpoint.find(tensor).map(|i| &checkpoint.files[checkpoint.locations[i].file].name);
            if shard_of_tensor != Some(shard) {
                let (tensor, shard) = (Escaped(tensor), Escaped(shard));
                let found = match shard_of_tensor {
                    Some(other) => format!("but it is in {}", Escaped(other)),
                    None => "but no shard has it".to_owned(),
                };
                let reason = format_args!("the shard index has tensor {tensor} in {shard}, {found}: correct the shard index");
                return Err(Error::bad_checkpoint(path, reason));
            }
        }
        checkpoint.rival = shard_index.as_ref().and_then(|index| folder.rival(&index.name, &shards));
        checkpoint.not_included = folder.others(shard_index.as_ref().map(|index| &*index.name), &shards);
        checkpoint.shard_index = shard_index;
        Ok(checkpoint)
    }

    /// Opens files. `map` is the map of their shard index, if they have one.
    fn from_files(path: &Path, paths: Vec<(PathBuf, String)>, map: Option<&BTreeMap<String, String>>) -> Result<Self> {
        let mut files = Vec::new();
        let mut all = Vec::new();
        let shared = (paths.len() > OpenFiles::MAX_OPEN).then(Arc::<OpenFiles>::default);
        for (file, (path, name)) in paths.iter().enumerate() {
            let (shard, tensors) = Shard::open(path, name, shared.as_ref())?;
            all.extend(tensors.into_iter().map(|FileTensor { info, offset }| {
                let location = Location { file, start: shard.content_size + offset };
                (info, location)
            }));
            files.push(shard);
        }
        all.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        if let Some(pair) = all.windows(2).find(|pair| pair[0].0.name == pair[1].0.name) {
            let name = &pair[0].0.name;
            let [first, second] = [0, 1].map(|i| Escaped(&files[pair[i].1.file].name).to_string());
            let how = match map.and_then(|map| map.get(name)) {
                Some(named) => format!("the shard index names {}: remove the tensor from the other file", Escaped(named)),
                None => "give one of the files, or a folder with one checkpoint".to_owned(),
            };
            let reason = format_args!("tensor {} occurs twice, in {first} and {second}: {how}", Escaped(name));
            return Err(Error::bad_checkpoint(path, reason));
        }
        let (tensors, locations) = all.into_iter().unzip();
        Ok(Self { path: path.to_owned(), files, shard_index: None, tensors, locations, rival: None, not_included: Vec::new() })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of the files in the folder that are not part of the checkpoint.
    pub fn not_included(&self) -> &[String] {
        &self.not_included
    }

    /// Total size, in bytes, of the files of the checkpoint.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.source.size()).sum::<u64>()
            + self.shard_index.as_ref().map_or(0, |index| index.content.len() as u64)
    }

    /// The safetensors file of this name.
    fn shard(&self, name: &str) -> Option<&Shard> {
        self.files.binary_search_by(|file| file.name.as_str().cmp(name)).ok().map(|i| &self.files[i])
    }

    /// The shard index, if it has this name.
    fn shard_index(&self, name: &str) -> Option<&ShardIndex> {
        self.shard_index.as_ref().filter(|index| index.name == name)
    }
}

/// Contents of files that the base has too are also stored if all contents together have at most this many bytes.
const STORED_BYTES: u64 = 4096;
/// They are also stored if all contents together have at most 1 / `STORED_SHARE` of the bytes of the target's tensors.
const STORED_SHARE: u64 = 8192;

/// The files of `target` as a pair describes them. `tensor_bytes` is the size of its tensors.
///
/// A pair that stores the contents of its files needs only the tensors of its base, whatever files they are in. If that would
/// enlarge the pair noticeably, contents that equal those of a file of the base of the same name are left out, and not held in
/// memory either.
///
/// # Errors
/// [`Error::BadCheckpoint`] if other programs may read other tensors than this library where target or base are;
/// [`Error::Io`].
pub fn file_specs(target: &dyn CheckpointFiles, tensor_bytes: u64, base: Option<&dyn CheckpointFiles>) -> Result<Vec<FileSpec>> {
    [Some(target), base].into_iter().flatten().try_for_each(|files| files.check_unambiguous())?;
    let missing = |name: &str| Error::InvalidArgument(format!("the target has no file {}", Escaped(name)));
    let names = target.names();
    let digests = names.iter().map(|(name, has_tensors)| target.digest(name, *has_tensors)?.ok_or_else(|| missing(name)));
    let digests = digests.collect::<Result<Vec<_>>>()?;
    let size = digests.iter().fold(0, |sum: u64, (size, _)| sum.saturating_add(*size));
    let base = base.filter(|_| size > STORED_BYTES && size > tensor_bytes / STORED_SHARE);
    let spec = |((name, has_tensors), (content_size, content_digest)): ((String, bool), (u64, [u8; DIGEST_SIZE]))| {
        let of_base = base.map_or(Ok(None), |base| base.digest(&name, has_tensors))?;
        let is_of_base = of_base == Some((content_size, content_digest));
        let kind = match (has_tensors, is_of_base) {
            (true, false) => FileKind::Safetensors,
            (true, true) => FileKind::SafetensorsOfBase,
            (false, false) => FileKind::Verbatim,
            (false, true) => FileKind::VerbatimOfBase,
        };
        let content = if is_of_base { Vec::new() } else { target.content(&name, has_tensors)?.ok_or_else(|| missing(&name))? };
        Ok(FileSpec { name, kind, content_size, content_digest, content })
    };
    names.into_iter().zip(digests).map(spec).collect()
}

/// Checks that the files of the target of `pair` can be those of a base.
///
/// # Errors
/// [`Error::BadCheckpoint`] if they cannot; the errors of [`CheckpointFiles::content`].
pub(crate) fn check_as_base(files: &dyn CheckpointFiles, pair: &str) -> Result<()> {
    let names = files.names();
    let content = |(name, has_tensors): &(String, bool)| files.content(name, *has_tensors);
    let contents = names.iter().map(content).collect::<Result<Vec<_>>>()?;
    let mut described = Vec::new();
    for ((name, has_tensors), content) in names.iter().zip(&contents) {
        described.push(TargetContent { name, has_tensors: *has_tensors, content: content.as_deref() });
    }
    match base_fault(&described, false) {
        Some(fault) if !names.is_empty() => {
            Err(Error::bad_checkpoint(Path::new(pair), format_args!("its target cannot be a base: {fault}")))
        }
        _ => Ok(()),
    }
}

fn check_name(folder: &Path, name: &str, kind: FileKind) -> Result<()> {
    if is_file_name(name, kind) {
        return Ok(());
    }
    let ending = if kind.has_tensors() { ".safetensors" } else { SHARD_INDEX };
    let reason = format_args!(
        "file {} cannot be part of a pair: names have at most 255 ASCII letters, digits, '.', '_' and '-', do not begin with '.', and end with {ending}; rename it, also in the shard index, if there is one",
        Escaped(name)
    );
    Err(Error::bad_checkpoint(folder, reason))
}

impl Checkpoint for SafetensorsCheckpoint {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let Location { file, start } = self.locations[tensor_index];
        self.files[file].source.read(start + offset, out)
    }

    fn paths(&self) -> Vec<PathBuf> {
        let shard_index = self.shard_index.iter().map(|index| index.source.path().to_owned());
        let files = self.files.iter().map(|file| file.source.path().to_owned());
        let folder = self.path.clone(); // or the one file
        [folder].into_iter().chain(files).chain(shard_index).collect()
    }

    fn files(&self) -> Option<&dyn CheckpointFiles> {
        Some(self)
    }

    fn check_unchanged(&self) -> Result<()> {
        let mut sources = self.files.iter().map(|file| &file.source).chain(self.shard_index.iter().map(|index| &index.source));
        sources.try_for_each(FileSource::check_unchanged)
    }
}

impl CheckpointFiles for SafetensorsCheckpoint {
    fn check_unambiguous(&self) -> Result<()> {
        let (Some(rival), Some(index)) = (&self.rival, &self.shard_index) else { return Ok(()) };
        let (rival, index) = (Escaped(rival), Escaped(&index.name));
        let reason = format_args!(
            "the folder has both {index} and {rival}, which it does not name; programs differ in which of the two they read: \
             remove one, or give its path in place of the folder's"
        );
        Err(Error::bad_checkpoint(&self.path, reason))
    }

    fn names(&self) -> Vec<(String, bool)> {
        let shards = self.files.iter().map(|file| (file.name.clone(), true));
        let mut names: Vec<_> = shards.chain(self.shard_index.iter().map(|index| (index.name.clone(), false))).collect();
        names.sort_unstable();
        names
    }

    fn digest(&self, name: &str, has_tensors: bool) -> Result<Option<(u64, [u8; DIGEST_SIZE])>> {
        if has_tensors {
            let digest = |file: &Shard| Ok((file.content_size, digest::short(&file.content_hash()?)));
            return self.shard(name).map(digest).transpose();
        }
        let digest = |index: &ShardIndex| (index.content.len() as u64, digest::short(&digest::of(&index.content)));
        Ok(self.shard_index(name).map(digest))
    }

    fn content(&self, name: &str, has_tensors: bool) -> Result<Option<Vec<u8>>> {
        if has_tensors {
            return self.shard(name).map(Shard::content).transpose();
        }
        Ok(self.shard_index(name).map(|index| index.content.clone()))
    }
}
