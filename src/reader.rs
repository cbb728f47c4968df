//! A pair opened for reading (spec section 11; section 13, steps 7 and 10).

use crate::publish;
use crate::source::FileSource;
#[cfg(feature = "mmap")]
use crate::source::MappedSource;
use crate::watch::Watch;
use rayon::prelude::*;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tpde_core::blob::{check_header, check_payload, stored_size};
use tpde_core::digest;
use tpde_core::error::{Error, Escaped, Result, Rule};
use tpde_core::format::{BLOB_HEADER_SIZE, ChunkMetadata, DIGEST_SIZE, INDEX_HEADER_SIZE};
use tpde_core::index::ValidatedIndex;
use tpde_core::limits::OpenOptions;
use tpde_core::source::Source;
use tpde_core::writer::Finished;

/// Paths of the two files of a pair.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PairPaths {
    /// `NAME.tpde-index`.
    pub index: PathBuf,
    /// `NAME.tpde-blob`.
    pub blob: PathBuf,
}

impl PairPaths {
    /// Paths of a pair. `path` is the path of one of its files, or their common stem without extension.
    pub fn new(path: impl AsRef<Path>) -> Self {
        let path = path.as_ref();
        let stem = match path.extension().and_then(|e| e.to_str()) {
            Some("tpde-index" | "tpde-blob") => path.with_extension(""),
            _ => path.to_owned(),
        };
        let with = |extension: &str| {
            let mut name = stem.clone().into_os_string();
            name.push(extension);
            PathBuf::from(name)
        };
        Self { index: with(".tpde-index"), blob: with(".tpde-blob") }
    }
}

/// Refuses a path that cannot name a pair: one whose last component is empty, `.` or `..`.
///
/// # Errors
/// [`Error::InvalidArgument`].
pub(crate) fn check_pair_name(path: &Path) -> Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let bytes = path.as_os_str().as_bytes();
    let last = bytes.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    if !matches!(last, b"" | b"." | b"..") {
        return Ok(());
    }
    let shown = path.display().to_string();
    let shown = if shown.is_empty() { "an empty path".to_owned() } else { Escaped(&shown).to_string() };
    Err(Error::InvalidArgument(format!("{shown} names no pair: give its folder and its name, as in FOLDER/NAME")))
}

/// A validated index and its blob.
#[derive(Debug)]
pub struct Pair<B> {
    index: ValidatedIndex,
    blob: B,
    /// The files from which the pair was opened.
    paths: Option<PairPaths>,
    /// The payload list, set once it has been formed from all payloads and has matched the payload root. Unused if the index stores
    /// the list.
    formed_list: OnceLock<Box<[[u8; DIGEST_SIZE]]>>,
}

impl Pair<FileSource> {
    /// Opens a pair with the default limits. `path` is the path of one of its files, or their common stem without extension.
    ///
    /// Cost: reads and validates the whole index, and reads the header of the blob. Payloads are checked when they are decoded;
    /// [`Pair::verify`] checks all of them. If the pair is being replaced at the same time, this returns the old pair or the new
    /// pair, never a mixture.
    ///
    /// # Errors
    /// The errors of [`ValidatedIndex::parse`] and [`Pair::new`]; [`Error::Io`]; [`Error::InvalidArgument`] if `path` does not
    /// end in a name.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, &OpenOptions::default(), &|_| {})
    }

    /// [`Pair::open`] with options: other limits, or the pair digest that the caller expects. If the pair is being replaced, the
    /// call may wait for the end of the replacement; `watch` can stop the wait.
    ///
    /// # Errors
    /// The errors of [`Pair::open`]; [`Error::UnexpectedPair`] if the index has another pair digest than expected; any error of
    /// `watch`.
    pub fn open_with(path: impl AsRef<Path>, options: &OpenOptions, watch: &dyn Watch) -> Result<Self> {
        Self::open_by(path.as_ref(), options, watch, |blob| FileSource::open(blob))
    }
}

#[cfg(feature = "mmap")]
impl Pair<MappedSource> {
    /// Like [`Pair::open_with`], but maps the blob: payloads are decoded where the system caches the file, without a copy. The index
    /// is read, because a validated index must not change.
    ///
    /// Cost: as [`Pair::open`], and a page fault for each page that is first used.
    ///
    /// # Safety
    /// No process may change or shorten the blob while the pair exists. A change is undefined behaviour: a payload could differ
    /// between its check and its decoding. If the blob is shortened, or a page of it cannot be read, an access ends the process with
    /// SIGBUS. Replacing the blob by a rename, as this library does, is allowed: the mapping keeps the old file.
    ///
    /// # Errors
    /// The errors of [`Pair::open_with`]; [`Error::Io`] if the blob cannot be mapped.
    pub unsafe fn open_mapped(path: impl AsRef<Path>, options: &OpenOptions, watch: &dyn Watch) -> Result<Self> {
        // SAFETY: the caller promises that the blob stays as it is while the pair, and with it the mapping, exists.
        Self::open_by(path.as_ref(), options, watch, |blob| unsafe { MappedSource::open(blob) })
    }
}

impl TryFrom<Finished<Vec<u8>>> for Pair<Vec<u8>> {
    type Error = Error;

    /// Opens a pair that was built in memory.
    ///
    /// # Errors
    /// The errors of [`Pair::new`].
    fn try_from(finished: Finished<Vec<u8>>) -> Result<Self> {
        let (index, blob) = finished.into_parts();
        Self::new(index, blob)
    }
}

impl<B: Source> Pair<B> {
    /// Opens the files of a pair: reads the index, and opens the blob with `blob`.
    fn open_by(path: &Path, options: &OpenOptions, watch: &dyn Watch, blob: impl Fn(&Path) -> Result<B>) -> Result<Self> {
        check_pair_name(path)?;
        let paths = PairPaths::new(path);
        let open = || {
            let index = read_index(&FileSource::open(&paths.index)?, options)?;
            let pair = Self::new(index, blob(&paths.blob)?)?;
            Ok(Self { paths: Some(paths.clone()), ..pair })
        };
        match open() {
            // The pair may be between the two renames of a publication. Wait for the end of the publication and try again.
            Err(Error::Invalid(e)) if matches!(e.rule, Rule::BlobPairDigest | Rule::BlobBlobSize) => {
                publish::between_publications(&paths.index, watch, open)
            }
            outcome => outcome,
        }
    }

    /// Combines a validated index with its blob, which may be in memory, in a file or mapped.
    ///
    /// # Errors
    /// [`Error::Invalid`] with a `blob` rule if the blob is damaged, truncated, or belongs to another pair.
    pub fn new(index: ValidatedIndex, blob: B) -> Result<Self> {
        let mut scratch = Vec::new();
        let size = blob.size().min(BLOB_HEADER_SIZE.into()) as usize;
        check_header(&index, blob.bytes(0, size, &mut scratch)?, blob.size())?;
        Ok(Self { index, blob, paths: None, formed_list: OnceLock::new() })
    }

    /// The index.
    pub fn index(&self) -> &ValidatedIndex {
        &self.index
    }

    /// The files from which the pair was opened. Empty if it was created by [`Pair::new`].
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        self.paths.iter().flat_map(|paths| [paths.index.clone(), paths.blob.clone()]).collect()
    }

    /// Name of the pair in errors: its path, or `number`.
    pub(crate) fn label(&self, number: usize) -> String {
        let path = self.paths.as_ref().map(|paths| paths.index.with_extension("").display().to_string());
        path.unwrap_or_else(|| format!("pair {number}"))
    }

    /// The blob.
    pub fn blob(&self) -> &B {
        &self.blob
    }

    /// Returns the index and the blob.
    pub fn into_parts(self) -> (ValidatedIndex, B) {
        (self.index, self.blob)
    }

    /// The payload of a chunk, after checking its CRC, its padding, and its digest if that is known. Empty for an unchanged
    /// chunk. Borrowed if the blob is in memory or mapped, else read into `scratch`.
    ///
    /// Digests of payloads are known if [`ValidatedIndex::has_payload_digests`] is true, or if
    /// [`ValidatedIndex::has_payload_root`] is true and [`Pair::verify`] has succeeded on this value.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the chunk if the payload is damaged; [`Error::InvalidArgument`] if the pair has no such chunk;
    /// [`Error::Io`].
    pub fn payload<'a>(&'a self, chunk: u32, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        let records = self.index.records();
        let record = records
            .get(chunk as usize)
            .ok_or_else(|| Error::InvalidArgument(format!("chunk {chunk} of a pair of {} chunks", records.len())))?;
        checked_payload(&self.blob, record, self.digest_of_payload(chunk), chunk, scratch)
    }

    /// The digest that a read of a payload compares; `None` if it is not known.
    pub(crate) fn digest_of_payload(&self, chunk: u32) -> Option<&[u8; DIGEST_SIZE]> {
        let list = match self.index.payload_list() {
            Some(list) => list,
            // Payloads in memory cannot have changed since `check_payloads` hashed them.
            None if self.blob.in_memory().is_some() => return None,
            None => self.formed_list.get()?,
        };
        Some(&list[chunk as usize])
    }

    /// Whether [`Pair::payload`] gives only payloads that the pair digest covers.
    pub(crate) fn is_authentic(&self) -> bool {
        self.index.has_payload_digests() || self.formed_list.get().is_some()
    }

    /// Makes [`Pair::payload`] give only payloads that the pair digest covers, if the index has a payload root. Cost: none if the
    /// index stores the payload list or it was formed before; else all payloads are read and hashed, on all threads of the pool.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the first damaged chunk, or with rule `header.payload_root`; [`Error::Io`]; any error of `watch`.
    pub(crate) fn authenticate(&self, watch: &dyn Watch) -> Result<()> {
        if !self.index.has_payload_root() || self.is_authentic() {
            return Ok(());
        }
        self.check_payloads(watch)
    }

    /// Reads every payload and checks its CRC and padding, on all threads of the pool. If the pair digest covers the payloads
    /// ([`ValidatedIndex::has_payload_root`], format 1.2), also compares their digests, and later reads of payloads through this
    /// value compare them too. That takes 16 bytes of memory per chunk.
    ///
    /// Together with the checks of opening the pair, this detects accidental damage of any stored byte. CRC-32 misses random
    /// damage of a payload with probability 2^-32. Digests also detect forgery: a changed payload is refused unless the pair
    /// digest changes too. Pairs of formats 1.0 and 1.1 have no digests of payloads. A payload of theirs can be changed so that
    /// its CRC and the chunk sums stay the same. To prove that such payloads are authentic, rebuild the target and compare its
    /// digests, as [`Apply::verify`](crate::Apply::verify) does. [`VerifyReport::payload_digests`] says what was compared.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the first damaged chunk, or with rule `header.payload_root` if payloads differ from those that the
    /// pair was made with; [`Error::Io`].
    pub fn verify(&self) -> Result<VerifyReport> {
        self.verify_with(&|_| {})
    }

    /// [`Pair::verify`] with a watcher. Progress counts bytes of payloads; the total is less than [`ValidatedIndex::blob_size`].
    ///
    /// # Errors
    /// The errors of [`Pair::verify`], and any error of `watch`.
    pub fn verify_with(&self, watch: &dyn Watch) -> Result<VerifyReport> {
        self.check_payloads(watch)?;
        Ok(VerifyReport {
            tensors: self.index.tensor_count() as u64,
            chunks: self.index.chunk_count().into(),
            stored_bytes: self.index.size() + self.index.header().blob_size,
            base_checked: false,
            target_checked: false,
            payload_digests: if self.is_authentic() { PayloadDigests::All } else { PayloadDigests::NotCompared },
        })
    }

    /// Reads and checks every payload. If the index has a payload root and no payload list, also forms the list and compares it.
    fn check_payloads(&self, watch: &dyn Watch) -> Result<()> {
        let records = self.index.records();
        let is_formed = self.index.has_payload_root() && !self.is_authentic();
        let mut list = vec![[0; DIGEST_SIZE]; if is_formed { records.len() } else { 0 }];
        let check = |scratch: &mut Vec<u8>, chunk: usize| {
            watch.done(records[chunk].compressed_size.get().into())?;
            self.payload(chunk as u32, scratch)
                .map(|payload| if is_formed { digest::of_payload(payload) } else { [0; DIGEST_SIZE] })
        };
        let failed = if is_formed {
            let form = |scratch: &mut Vec<u8>, (chunk, digest): (usize, &mut [u8; DIGEST_SIZE])| {
                *digest = check(scratch, chunk)?;
                Ok(())
            };
            let outcomes = list.par_iter_mut().with_min_len(16).enumerate().map_init(Vec::new, form);
            outcomes.find_first(|outcome| outcome.is_err())
        } else {
            let outcomes = (0..records.len()).into_par_iter().with_min_len(16);
            outcomes.map_init(Vec::new, |scratch, chunk| check(scratch, chunk).map(|_| ())).find_first(|outcome| outcome.is_err())
        };
        failed.unwrap_or(Ok(())).map_err(|e| self.name_tensor(e))?;
        if is_formed {
            self.index.check_payload_list(&list)?;
            // Another thread may have formed the same list.
            let _ = self.formed_list.set(list.into());
        }
        Ok(())
    }

    /// If `error` names a chunk, adds the name of the chunk's tensor.
    pub(crate) fn name_tensor(&self, error: Error) -> Error {
        let chunk = match &error {
            Error::Invalid(invalid) => invalid.at.chunk,
            _ => None,
        };
        match chunk.and_then(|chunk| self.index.tensors().find(|tensor| tensor.chunks().contains(&chunk))) {
            Some(tensor) => error.in_tensor(tensor.name),
            None => error,
        }
    }
}

/// Reads an index file. Checks the header first, so an invalid file is refused before all of it is read, unless a pair digest is
/// expected.
fn read_index(file: &FileSource, options: &OpenOptions) -> Result<ValidatedIndex> {
    let limits = &options.limits;
    if options.expect.is_none() {
        let mut head = [0; INDEX_HEADER_SIZE as usize];
        let head = &mut head[..file.size().min(INDEX_HEADER_SIZE.into()) as usize];
        file.read(0, head)?;
        ValidatedIndex::check_header(head, file.size(), limits)?;
    }
    // The header is parsed again, because the file may have changed.
    ValidatedIndex::parse_with(file.read_all("size of the index", limits.index_size)?, options)
}

/// The payload of a record, after checking its CRC, its digest if one is known, and its padding.
pub fn checked_payload<'a>(
    blob: &'a (impl Source + ?Sized),
    record: &ChunkMetadata,
    digest: Option<&[u8; DIGEST_SIZE]>,
    chunk: u32,
    scratch: &'a mut Vec<u8>,
) -> Result<&'a [u8]> {
    let stored = blob.bytes(record.blob_offset.get(), stored_size(record), scratch)?;
    check_payload(stored, record, digest, chunk)
}

/// The extent of a verification that found no error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Number of tensors checked.
    pub tensors: u64,
    /// Number of chunks checked.
    pub chunks: u64,
    /// Size of index and blob in bytes.
    pub stored_bytes: u64,
    /// Whether a base was compared with the digests of the pair.
    pub base_checked: bool,
    /// Whether a target was compared with the digests of the pair. It was supplied by the caller or rebuilt from the base; only a
    /// rebuilt target proves that the payloads are correct.
    pub target_checked: bool,
    /// Whether payloads were compared with the digests that the pair digest covers.
    pub payload_digests: PayloadDigests,
}

/// Whether payloads were compared with the digests that the pair digest covers. If so, a forged payload is refused: it would need
/// another pair digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PayloadDigests {
    /// All payloads of the pair were compared.
    All,
    /// Each payload that was read was compared. Others were not read.
    EachRead,
    /// Not compared: the pair is of format 1.0 or 1.1; or it stores only the digest over all payloads, and not all were read at
    /// once.
    NotCompared,
}

impl PayloadDigests {
    /// What was compared of two sets of payloads together.
    pub(crate) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::NotCompared, _) | (_, Self::NotCompared) => Self::NotCompared,
            (Self::All, Self::All) => Self::All,
            _ => Self::EachRead,
        }
    }
}
