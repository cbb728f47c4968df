//! The builder that encodes a pair.

use super::options::EncodeOptions;
use super::renames::ChainNames;
use super::run::{EncodeReport, encode, encoded_bytes};
use crate::chain::Chain;
use crate::checkpoint::Checkpoint;
use crate::pair_files::NewPair;
use crate::reader::Pair;
use crate::safetensors::{check_as_base, check_composable, file_specs};
use crate::watch::{Watcher, progress_methods};
use std::io::Write;
use std::path::{Path, PathBuf};
use tpde_core::error::Result;
use tpde_core::format::BLOB_HEADER_SIZE;
use tpde_core::index::ValidatedIndex;
use tpde_core::source::Source;
use tpde_core::writer::{FileSpec, Finished, PairBuilder};

/// Encodes a target checkpoint as a pair: its difference from a base.
///
/// ```
/// # use tpde::{Dtype, Encode, MemoryCheckpoint, TensorInfo};
/// # fn main() -> tpde::Result<()> {
/// # let folder = tempfile::tempdir().expect("a temporary folder");
/// # let path = folder.path().join("update");
/// let info = TensorInfo { name: "w".into(), dtype: Dtype::Bf16, shape: vec![3] };
/// let base = MemoryCheckpoint::new([(info.clone(), &[1, 2, 3, 4, 5, 6][..])])?;
/// let target = MemoryCheckpoint::new([(info, &[1, 2, 3, 4, 5, 7][..])])?;
/// let report = Encode::new(&target).base(&base).to_path(&path)?;
/// assert_eq!(report.tensors[0].changed, 1);
/// # Ok(())
/// # }
/// ```
///
/// The bytes of a pair depend only on base, target, options and the version of zstd, not on threads, time or machine.
///
/// Besides the pair's index, [`Encode::to_path`] needs memory for buffers of each thread, one batch of payloads, and up to 64 MiB
/// of payloads of one tensor until its codec is chosen, whatever the size of the checkpoints.
#[must_use = "nothing is encoded before `to_path` or `to_memory` is called"]
pub struct Encode<'a> {
    target: &'a dyn Checkpoint,
    base: Option<&'a dyn Checkpoint>,
    options: EncodeOptions,
    of_chain: ChainNames,
    /// For a pair that leads back, the name of the pair whose target is its base.
    target_of: Option<String>,
    inputs: Vec<PathBuf>,
    overwrite: bool,
    watcher: Watcher<'a>,
}

/// A pair whose blob was written to a writer.
#[derive(Debug)]
#[non_exhaustive]
pub struct Streamed<W> {
    /// The index. [`ValidatedIndex::as_bytes`] is the content of the index file.
    pub index: ValidatedIndex,
    /// The first bytes of the blob, which were written as zeros.
    pub header: [u8; BLOB_HEADER_SIZE as usize],
    /// The writer of the blob.
    pub blob: W,
    /// Sizes and counts.
    pub report: EncodeReport,
}

impl<'a> Encode<'a> {
    /// Encodes all tensors of `target`, with the default options and without a base.
    ///
    /// If `target` holds only slices of tensors ([`SliceCheckpoint`](crate::SliceCheckpoint)), the pair gets the parts that it
    /// holds. The options [`split`](EncodeOptions#structfield.split) and [`cuts`](EncodeOptions#structfield.cuts) define the parts.
    /// A part is encoded if the target has all of its elements, and left out if it has none of them.
    ///
    /// With the same options on each rank of a job, [`Merge`](crate::Merge) makes one pair of the ranks' pairs. No element may be
    /// in two of these pairs: if several ranks hold a part, only one of them encodes it. A rank that has no element of a tensor in
    /// `cuts` gives an empty slice of it.
    ///
    /// If `target` is a [`SafetensorsCheckpoint`](crate::SafetensorsCheckpoint), the pair also describes its files, and readers
    /// rebuild them byte for byte. The files of a [`Chain`] are those of its last pair. Any other target is rebuilt as one
    /// safetensors file with a new header.
    pub fn new(target: &'a dyn Checkpoint) -> Self {
        Self {
            target,
            base: None,
            options: EncodeOptions::default(),
            of_chain: ChainNames::default(),
            target_of: None,
            inputs: Vec::new(),
            overwrite: false,
            watcher: Watcher::Nobody,
        }
    }

    /// Folds a chain: encodes one pair from its base to its last target, without writing that target. With the same options the
    /// pair has the same bytes as one that is encoded from the two checkpoints.
    ///
    /// Tensors that the pairs rename are paired with their base tensors. Unless the options have cuts or a split, tensors are cut
    /// as in the last pair. So a part has no base if the base tensor has another shape.
    ///
    /// Before anything is published, the digests of all tensors are compared with those of the last pair.
    ///
    /// Cost: that of encoding, and of rebuilding each chunk through all steps. Chunks that training samples are rebuilt twice if
    /// the target is larger than 64 MiB. Tensors are read again for their digests if the new pair is not cut like the last pair.
    ///
    /// # Errors
    /// Those of [`Encode::to_path`]; [`Error::Step`](crate::Error::Step) for a step that is damaged or that does not fit.
    pub fn fold<B: Source>(chain: &'a Chain<'a, B>) -> Self {
        Self { base: Some(chain.base()), of_chain: ChainNames { renamed: chain.renamed(), cuts: chain.cuts() }, ..Self::new(chain) }
    }

    /// Encodes the pair that leads back: from the last target of a chain to its base. Otherwise like [`Encode::fold`]. A base tensor
    /// is not cut if its shape differs from that in the last pair, or if a part would divide an element.
    ///
    /// # Errors
    /// Those of [`Encode::fold`]; [`Error::BadCheckpoint`](crate::Error::BadCheckpoint) if the files of the last target cannot be those
    /// of a base, because no reader would accept them.
    pub fn revert<B: Source>(chain: &'a Chain<'a, B>) -> Self {
        let of_chain = ChainNames { renamed: chain.renamed_back(), cuts: chain.cuts_back() };
        Self { base: Some(chain), of_chain, target_of: chain.last_label().map(str::to_owned), ..Self::new(chain.base()) }
    }

    /// Sets the base: the checkpoint that readers of the pair already have. It may hold only slices of tensors, if they have all
    /// elements of the parts to encode.
    pub fn base(mut self, base: &'a dyn Checkpoint) -> Self {
        self.base = Some(base);
        self
    }

    /// Sets the options.
    pub fn options(mut self, options: EncodeOptions) -> Self {
        self.options = options;
        self
    }

    /// Adds files that the caller has read for this encoding, other than the checkpoints. [`Encode::to_path`] refuses to replace
    /// them.
    pub fn inputs(mut self, paths: impl IntoIterator<Item = impl AsRef<Path>>) -> Self {
        self.inputs.extend(paths.into_iter().map(|path| path.as_ref().to_owned()));
        self
    }

    /// Sets whether [`Encode::to_path`] may replace an existing pair. The default is `false`.
    pub fn overwrite(mut self, on: bool) -> Self {
        self.overwrite = on;
        self
    }

    progress_methods!("[`progress_bytes`](Self::progress_bytes)");

    /// Returns the number of bytes of target tensors to encode. If the target holds only slices of tensors, this is the size of the
    /// parts that it holds. No lane is read.
    ///
    /// # Errors
    /// The errors of [`Encode::to_path`] about parts and cuts of tensors: [`Error::PartNotHeld`](crate::Error::PartNotHeld),
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument), and [`Error::Invalid`](crate::Error::Invalid) for a shape that
    /// the format does not allow.
    pub fn progress_bytes(&self) -> Result<u64> {
        encoded_bytes(self.base, self.target, &self.effective_options()?)
    }

    /// Writes the files of a pair, `NAME.tpde-index` and `NAME.tpde-blob`. `path` is one of these paths, or their common stem
    /// without extension. Both files are written without their names. The blob gets its name first; when the index gets its
    /// name, the pair is complete.
    ///
    /// # Errors
    /// - [`Error::Io`] from the checkpoints or the files of the pair; if the pair exists and [`overwrite`](Encode::overwrite) is
    ///   not set; or if another process holds a lock on the folder for 30 seconds.
    /// - [`Error::Changed`] if a checkpoint has changed since it was opened.
    ///   [`FileSource::check_unchanged`](crate::FileSource::check_unchanged) says which changes are detected.
    /// - [`Error::InvalidArgument`] for invalid options; also if a file of the pair is, or is inside, a file or folder of the
    ///   checkpoints, or is one of [`inputs`](Encode::inputs).
    /// - [`Error::PartNotHeld`], before any lane is read, if target or base have only some elements of a part. The error says
    ///   where to cut the tensor.
    /// - Before any lane is read: [`Error::Invalid`] with the tensor or file if the format does not allow its name or shape;
    ///   [`Error::Limit`] if the number or the total size of entries is too large; [`Error::NotWritable`] if the target has no
    ///   files and cannot be written as one safetensors file.
    /// - Any error of the watcher.
    ///
    /// If an error occurs before the blob gets its name, an existing pair is unchanged. If the index cannot get its name, the old
    /// index remains with the new blob, and readers refuse this combination.
    ///
    /// [`Error::Io`]: crate::Error::Io
    /// [`Error::Changed`]: crate::Error::Changed
    /// [`Error::InvalidArgument`]: crate::Error::InvalidArgument
    /// [`Error::Invalid`]: crate::Error::Invalid
    /// [`Error::Limit`]: crate::Error::Limit
    /// [`Error::PartNotHeld`]: crate::Error::PartNotHeld
    /// [`Error::NotWritable`]: crate::Error::NotWritable
    pub fn to_path(&self, path: impl AsRef<Path>) -> Result<EncodeReport> {
        let files = self.writable_files()?;
        let checkpoints = self.base.iter().flat_map(|base| base.paths()).chain(self.target.paths());
        let inputs: Vec<_> = checkpoints.chain(self.inputs.iter().cloned()).collect();
        let (pair, blob) = NewPair::create(path.as_ref(), &inputs, self.overwrite)?;
        let (finished, report) = self.encode(blob, pair.paths.blob.clone(), files)?;
        pair.publish(finished, &self.watcher)?;
        Ok(report)
    }

    /// Encodes the pair in memory.
    ///
    /// # Errors
    /// The errors of [`Encode::to_path`], except those about files of the pair.
    pub fn to_memory(&self) -> Result<(Pair<Vec<u8>>, EncodeReport)> {
        self.to_memory_in(Vec::new())
    }

    /// Like [`Encode::to_memory`], but reuses the allocation of `blob` for the blob. The content of `blob` is discarded.
    ///
    /// # Errors
    /// The errors of [`Encode::to_memory`].
    pub fn to_memory_in(&self, mut blob: Vec<u8>) -> Result<(Pair<Vec<u8>>, EncodeReport)> {
        blob.clear();
        let (finished, report) = self.encode(blob, "memory".into(), self.files()?)?;
        Ok((finished.try_into()?, report))
    }

    /// Encodes the pair and writes its blob to `blob`, from its first byte to its last. The first bytes are zeros instead of
    /// [`Streamed::header`]: write that there when the call returns. So a blob can be sent while it is encoded.
    ///
    /// # Errors
    /// The errors of [`Encode::to_path`], except those about files of the pair. [`Error::Io`](crate::Error::Io) if `blob` cannot be
    /// written.
    pub fn to_writer<W: Write>(&self, blob: W) -> Result<Streamed<W>> {
        let (finished, report) = self.encode(blob, "the blob".into(), self.writable_files()?)?;
        Ok(Streamed { index: finished.index, header: finished.blob_header, blob: finished.blob, report })
    }

    fn encode<W: Write>(&self, blob: W, blob_path: PathBuf, files: Vec<FileSpec>) -> Result<(Finished<W>, EncodeReport)> {
        let builder = PairBuilder::new(blob, blob_path, self.options.form())?;
        encode(self.base, self.target, files, &self.effective_options()?, builder, &self.watcher)
    }

    /// The options, with the names and cuts of a chain.
    fn effective_options(&self) -> Result<EncodeOptions> {
        self.of_chain.add_to(&self.options, self.base, self.target)
    }

    /// The files of the target. If it has none, checks that it can be written as one.
    fn writable_files(&self) -> Result<Vec<FileSpec>> {
        let files = self.files()?;
        if files.is_empty() {
            check_composable(self.target.tensors())?;
        }
        Ok(files)
    }

    /// The files of the target.
    fn files(&self) -> Result<Vec<FileSpec>> {
        let base = self.base.and_then(|base| base.files());
        if let (Some(pair), Some(files)) = (&self.target_of, base) {
            check_as_base(files, pair)?;
        }
        let bytes = self.target.tensors().iter().map(|tensor| tensor.bytes()).sum();
        self.target.files().map_or(Ok(Vec::new()), |target| file_specs(target, bytes, base))
    }
}
