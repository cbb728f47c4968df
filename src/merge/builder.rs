//! The builder that merges pairs.

use super::copy::copy;
use super::input::Input;
use super::parts;
use super::plan::Plan;
use crate::pair_files::NewPair;
use crate::reader::Pair;
use crate::watch::{Watcher, progress_methods};
use serde::Serialize;
use std::io::Write;
use std::path::Path;
use tpde_core::error::Result;
use tpde_core::format::{Form, FormatVersion};
use tpde_core::index::Tensor;
use tpde_core::rectangle::Rectangle;
use tpde_core::source::Source;
use tpde_core::writer::{Finished, PairBuilder};

/// Makes one pair of several, or of some tensors of one. Nothing is decoded, and no base is needed.
///
/// ```
/// # use tpde::{Dtype, Encode, Merge, MemoryCheckpoint, TensorInfo};
/// # fn main() -> tpde::Result<()> {
/// let pair = |name: &str, bytes: &[u8]| -> tpde::Result<_> {
///     let info = TensorInfo { name: name.into(), dtype: Dtype::U8, shape: vec![bytes.len() as u64] };
///     Ok(Encode::new(&MemoryCheckpoint::new([(info, bytes)])?).to_memory()?.0)
/// };
/// let shards = [pair("a", &[1, 2])?, pair("b", &[3])?];
/// let (whole, _) = Merge::new(&shards).to_memory()?;
/// assert_eq!(whole.index().tensor_count(), 2);
///
/// let (subset, _) = Merge::new([&whole]).tensors(|name| name == "b").to_memory()?;
/// assert_eq!(subset.index().tensor(0).name, "b");
/// # Ok(())
/// # }
/// ```
///
/// The result has format 1.2, for inputs of any version. It stores the digest of each payload if an input does, or if it has parts
/// of tensors. Its bytes depend only on the inputs and the version of zstd, not on threads, time or machine.
///
/// Every payload is checked before it is copied: its CRC-32, and its digest where the pair digest of its input covers payloads
/// (format 1.2). If only some tensors of such an input are kept, and it does not store the digests, all of its payloads are read.
/// Payloads of formats 1.0 and 1.1 are copied as they are, so a forged payload stays forged, under a new pair digest that covers
/// it. [`Apply::verify`](crate::Apply::verify) detects that, before or after.
///
/// Memory, besides the indexes of the inputs and of the result: 1 MiB of payloads per thread, or one payload if that is larger,
/// up to 64 MiB of free buffers, about 100 bytes per tensor, and 80 bytes per chunk.
#[must_use = "nothing is merged before `to_path` or `to_memory` is called"]
pub struct Merge<'a, B> {
    inputs: Vec<Input<'a, B>>,
    /// Whether the caller has called [`Merge::tensors`].
    is_selection: bool,
    files: bool,
    payload_digests: bool,
    overwrite: bool,
    watcher: Watcher<'a>,
}

/// The result of a merge: counts and sizes.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct MergeReport {
    /// Number of entries of the tensor table: whole tensors and parts of tensors.
    pub tensors: u64,
    /// Number of chunks.
    pub chunks: u64,
    /// Number of different table sets of codec `conditioned`.
    pub table_sets: u64,
    /// Number of target files that the pair describes; 0 if it describes only tensors.
    pub files: u64,
    /// Size of all target tensors in bytes.
    pub target_bytes: u64,
    /// Size of the copied payloads in bytes, without padding.
    pub payload_bytes: u64,
    /// Size of the index file in bytes.
    pub index_bytes: u64,
    /// Size of the blob file in bytes.
    pub blob_bytes: u64,
}

impl<'a, B: Source> Merge<'a, B> {
    /// Merges all tensors and files of `pairs`.
    pub fn new(pairs: impl IntoIterator<Item = &'a Pair<B>>) -> Self {
        let inputs = pairs.into_iter().zip(1..).map(|(pair, number)| Input::new(pair, number)).collect();
        Self { inputs, is_selection: false, files: true, payload_digests: false, overwrite: false, watcher: Watcher::Nobody }
    }

    /// Narrows the selection to the tensors whose names satisfy `is_wanted`. Repeated calls combine: a tensor must satisfy all.
    ///
    /// Files are kept if the wanted tensors of each input are all the tensors of some of its files, and the input stores the
    /// headers of these files. Otherwise the result describes no files. A shard index is kept only with all files of its input.
    pub fn tensors(self, is_wanted: impl Fn(&str) -> bool) -> Self {
        self.entries(|tensor| is_wanted(tensor.name))
    }

    /// Narrows the selection to the entries that satisfy `is_wanted`: whole tensors and parts of tensors. Otherwise like
    /// [`Merge::tensors`].
    pub fn entries(mut self, is_wanted: impl Fn(&Tensor<'_>) -> bool) -> Self {
        for input in &mut self.inputs {
            let index = input.index();
            input.kept.retain(|&i| is_wanted(&index.tensor(i as usize)));
        }
        self.is_selection = true;
        self
    }

    /// Keeps only those parts of the named tensors that are within their rectangles. Other tensors are not affected.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if no pair has a tensor of that name, or a part within one of its
    /// rectangles; if a rectangle is not within its tensor; or if it has only some elements of a part, because payloads are copied
    /// whole.
    pub fn parts(mut self, parts: impl IntoIterator<Item = (String, Vec<Rectangle>)>) -> Result<Self> {
        parts::narrow(&mut self.inputs, &parts.into_iter().collect())?;
        self.is_selection = true;
        Ok(self)
    }

    /// Sets whether the result describes the files of the inputs. The default is `true`. Without files, the target is rebuilt as
    /// tensors, or as one safetensors file with a new header.
    pub fn files(mut self, on: bool) -> Self {
        self.files = on;
        self
    }

    /// Sets whether the index stores the digest of each payload even if no input does. The default is `false`.
    pub fn payload_digests(mut self, on: bool) -> Self {
        self.payload_digests = on;
        self
    }

    /// Sets whether [`Merge::to_path`] may replace an existing pair. The default is `false`.
    pub fn overwrite(mut self, on: bool) -> Self {
        self.overwrite = on;
        self
    }

    progress_methods!("[`progress_bytes`](Self::progress_bytes)");

    /// Returns the number of bytes of payloads to read.
    pub fn progress_bytes(&self) -> u64 {
        let authenticated = self.inputs.iter().filter(|input| input.must_authenticate());
        let all = |input: &Input<'_, B>| input.index().chunks().map(|chunk| u64::from(chunk.compressed_size)).sum::<u64>();
        authenticated.map(all).sum::<u64>() + self.inputs.iter().map(Input::payload_bytes).sum::<u64>()
    }

    /// Writes the files of the merged pair, `NAME.tpde-index` and `NAME.tpde-blob`. `path` is one of these paths, or their common
    /// stem without extension. The files are published as [`Encode::to_path`](crate::Encode::to_path) publishes them.
    ///
    /// # Errors
    /// - Before any payload is read: [`Error::NotMergeable`](crate::Error::NotMergeable) if two inputs contradict each other;
    ///   [`Error::Limit`](crate::Error::Limit) if the result would have more than 65,535 table sets or too many tensors or chunks;
    ///   [`Error::Invalid`](crate::Error::Invalid) with rule `file.name` if one pair cannot have the files of all inputs.
    /// - [`Error::Invalid`](crate::Error::Invalid) if a payload is damaged, or is not covered by the pair digest of its input. The
    ///   location names the input.
    /// - [`Error::InvalidArgument`](crate::Error::InvalidArgument) if a file of the pair is a file of an input.
    /// - [`Error::Io`](crate::Error::Io) from the inputs or the files of the pair; also if the pair exists and
    ///   [`overwrite`](Merge::overwrite) is not set.
    /// - Any error of the watcher.
    pub fn to_path(&self, path: impl AsRef<Path>) -> Result<MergeReport> {
        let plan = self.plan()?;
        let inputs: Vec<_> = self.inputs.iter().flat_map(|input| input.pair.paths()).collect();
        let (pair, blob) = NewPair::create(path.as_ref(), &inputs, self.overwrite)?;
        let builder = PairBuilder::new(blob, pair.paths.blob.clone(), self.form())?;
        let (finished, report) = self.run(&plan, builder)?;
        pair.publish(finished, &self.watcher)?;
        Ok(report)
    }

    /// Merges in memory.
    ///
    /// # Errors
    /// The errors of [`Merge::to_path`], except those about files of the pair.
    pub fn to_memory(&self) -> Result<(Pair<Vec<u8>>, MergeReport)> {
        let builder = PairBuilder::new(Vec::new(), "memory".into(), self.form())?;
        let (finished, report) = self.run(&self.plan()?, builder)?;
        Ok((finished.try_into()?, report))
    }

    fn plan(&self) -> Result<Plan> {
        Plan::new(&self.inputs, self.is_selection, self.files)
    }

    fn form(&self) -> Form {
        let is_stored = self.inputs.iter().any(|input| input.index().has_payload_digests());
        Form { version: FormatVersion::V1_3, payload_digests: self.payload_digests || is_stored }
    }

    fn run<W: Write>(&self, plan: &Plan, mut builder: PairBuilder<W>) -> Result<(Finished<W>, MergeReport)> {
        copy(&self.inputs, plan, &mut builder, &self.watcher)?;
        plan.files.iter().for_each(|file| builder.file(file.clone()));
        let finished = builder.finish()?;
        let index = &finished.index;
        let report = MergeReport {
            tensors: index.tensor_count() as u64,
            chunks: index.chunk_count().into(),
            table_sets: plan.set_count as u64,
            files: plan.files.len() as u64,
            target_bytes: index.tensors().fold(0, |sum, tensor| u64::saturating_add(sum, tensor.bytes())),
            payload_bytes: self.inputs.iter().map(Input::payload_bytes).sum(),
            index_bytes: index.size(),
            blob_bytes: index.blob_size(),
        };
        Ok((finished, report))
    }
}
