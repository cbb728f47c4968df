//! A pair opened for reading (spec section 11; section 13, steps 7 and 10).

use crate::error::{Error, Escaped, Result, Rule, hex};
use crate::format::{BLOB_HEADER_CRC_SPAN, BLOB_HEADER_SIZE, BLOB_MAGIC, BlobHeader, ChunkMetadata, PAYLOAD_ALIGN, VERSION_MAJOR};
use crate::index::ValidatedIndex;
use crate::limits::Limits;
use crate::publish;
use crate::source::{FileSource, Source};
use crate::watch::Watch;
use binrw::BinRead;
use rayon::prelude::*;
use serde::Serialize;
use std::io::Cursor;
use std::path::{Path, PathBuf};

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
}

impl Pair<FileSource> {
    /// Opens a pair with the default limits. `path` is the path of one of its files, or their common stem without extension.
    ///
    /// Cost: reads and validates the whole index, and reads the header of the blob. Payloads are checked when they are decoded;
    /// [`Pair::verify`] checks all of them. If the pair is being replaced at the same time, this returns the old pair or the new
    /// pair, never a mixture.
    ///
    /// # Errors
    /// The errors of [`ValidatedIndex::parse`] and [`Pair::new`]; [`Error::Io`]; [`Error::InvalidArgument`] if `path` does not end
    /// in a name.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, &Limits::default(), &|_| {})
    }

    /// [`Pair::open`] with other limits. If the pair is being replaced, this may wait for the end; `watch` can stop the wait.
    ///
    /// # Errors
    /// The errors of [`Pair::open`], and any error of `watch`.
    pub fn open_with(path: impl AsRef<Path>, limits: &Limits, watch: &dyn Watch) -> Result<Self> {
        let path = path.as_ref();
        check_pair_name(path)?;
        let paths = PairPaths::new(path);
        let open = || Self::open_once(&paths, limits);
        match open() {
            // The pair may be between the two renames of a publication. Wait for the end of the publication and try again.
            Err(Error::Invalid(e)) if matches!(e.rule, Rule::BlobPairDigest | Rule::BlobBlobSize) => {
                publish::between_publications(&paths.index, watch, open)
            }
            outcome => outcome,
        }
    }

    fn open_once(paths: &PairPaths, limits: &Limits) -> Result<Self> {
        let index = ValidatedIndex::read(&FileSource::open(&paths.index)?, limits)?;
        let pair = Self::new(index, FileSource::open(&paths.blob)?)?;
        Ok(Self { paths: Some(paths.clone()), ..pair })
    }
}

impl<B: Source> Pair<B> {
    /// Combines a validated index with its blob, which may be in memory, in a file or mapped.
    ///
    /// # Errors
    /// [`Error::Invalid`] with a `blob` rule if the blob is damaged, truncated, or belongs to another pair.
    pub fn new(index: ValidatedIndex, blob: B) -> Result<Self> {
        let size = index.header().blob_size;
        let mut scratch = Vec::new();
        if blob.size() < u64::from(BLOB_HEADER_SIZE) {
            return Err(Rule::BlobBlobSize.broken(size, blob.size()));
        }
        let bytes = blob.bytes(0, BLOB_HEADER_SIZE as usize, &mut scratch)?;
        // Check the magic before the size, so that a file that is not a blob is reported as such.
        Rule::BlobMagic.check(bytes[..8] == BLOB_MAGIC, hex(&BLOB_MAGIC), hex(&bytes[..8]))?;
        Rule::BlobBlobSize.check_eq(size, blob.size())?;
        let header = BlobHeader::read(&mut Cursor::new(bytes)).map_err(|e| Rule::BlobBlobSize.broken("a header", e))?;
        Rule::BlobVersionMajor.check_eq(VERSION_MAJOR, header.version_major)?;
        Rule::BlobHeaderSize.check_eq(BLOB_HEADER_SIZE, header.header_size)?;
        let crc = crc32fast::hash(&bytes[..BLOB_HEADER_CRC_SPAN]);
        Rule::BlobCrc32.check(
            crc == header.header_crc32,
            format_args!("{crc:08x}"),
            format_args!("{:08x}", header.header_crc32),
        )?;
        Rule::BlobReserved.check_eq(0, header.reserved)?;
        Rule::BlobVersionMinor.check_eq(index.header().version_minor, header.version_minor)?;
        Rule::BlobBlobSize.check_eq(size, header.blob_size)?;
        let own = index.pair_digest();
        Rule::BlobPairDigest.check(*own == header.pair_digest, hex(own), hex(&header.pair_digest))?;
        Ok(Self { index, blob, paths: None })
    }

    /// The index.
    pub fn index(&self) -> &ValidatedIndex {
        &self.index
    }

    /// The files from which the pair was opened. Empty if it was created by [`Pair::new`].
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        self.paths.iter().flat_map(|paths| [paths.index.clone(), paths.blob.clone()]).collect()
    }

    /// The blob.
    pub fn blob(&self) -> &B {
        &self.blob
    }

    /// Returns the index and the blob.
    pub fn into_parts(self) -> (ValidatedIndex, B) {
        (self.index, self.blob)
    }

    /// The payload of a chunk, after checking its CRC and padding. Empty for an unchanged chunk. Borrowed if the blob is in memory
    /// or mapped, else read into `scratch`.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the chunk if the payload is damaged; [`Error::InvalidArgument`] if the pair has no such chunk;
    /// [`Error::Io`].
    pub fn payload<'a>(&'a self, chunk: u32, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        let records = self.index.records();
        let record = records
            .get(chunk as usize)
            .ok_or_else(|| Error::InvalidArgument(format!("chunk {chunk} of a pair of {} chunks", records.len())))?;
        checked_payload(&self.blob, record, chunk, scratch)
    }

    /// Reads every payload and checks its CRC and padding, on all threads of the pool.
    ///
    /// Together with the checks of opening the pair, this detects accidental damage of any stored byte. CRC-32 misses random damage
    /// of a payload with probability 2^-32. It does not detect forgery: a payload can be changed so that its CRC and the chunk
    /// sums stay the same, and the pair digest does not cover payloads. To prove that payloads are authentic, rebuild the target
    /// and compare its digests, as [`Apply::verify`](crate::Apply::verify) does.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the first damaged chunk; [`Error::Io`].
    pub fn verify(&self) -> Result<VerifyReport> {
        self.verify_with(&|_| {})
    }

    /// [`Pair::verify`] with a watcher. Progress counts bytes of payloads; the total is less than [`ValidatedIndex::blob_size`].
    ///
    /// # Errors
    /// The errors of [`Pair::verify`], and any error of `watch`.
    pub fn verify_with(&self, watch: &dyn Watch) -> Result<VerifyReport> {
        let chunks = self.index.header().chunk_count;
        let failed = (0..chunks).into_par_iter().with_min_len(16).map_init(Vec::new, |scratch, chunk| {
            watch.done(self.index.records()[chunk as usize].compressed_size.get().into())?;
            self.payload(chunk, scratch).map(|_| ())
        });
        failed.find_first(|outcome| outcome.is_err()).unwrap_or(Ok(())).map_err(|e| self.name_tensor(e))?;
        Ok(VerifyReport {
            tensors: self.index.tensor_count() as u64,
            chunks: chunks.into(),
            stored_bytes: self.index.size() + self.index.header().blob_size,
            base_checked: false,
            target_checked: false,
        })
    }

    /// If `error` names a chunk, adds the name of the chunk's tensor.
    fn name_tensor(&self, error: Error) -> Error {
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

/// The payload of a record, after checking its CRC and padding.
pub(crate) fn checked_payload<'a>(
    blob: &'a (impl Source + ?Sized),
    record: &ChunkMetadata,
    chunk: u32,
    scratch: &'a mut Vec<u8>,
) -> Result<&'a [u8]> {
    let size = record.compressed_size.get() as usize;
    let stored = size.next_multiple_of(PAYLOAD_ALIGN as usize);
    let (payload, padding) = blob.bytes(record.blob_offset.get(), stored, scratch)?.split_at(size);
    let (expected, found) = (record.crc32.get(), crc32fast::hash(payload));
    let at = |e: Error| e.in_chunk(chunk);
    Rule::PayloadCrc32.check(expected == found, format_args!("{expected:08x}"), format_args!("{found:08x}")).map_err(at)?;
    Rule::PayloadPadding.check(padding.iter().all(|&b| b == 0), "zeros after the payload", "other bytes").map_err(at)?;
    Ok(payload)
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
}
