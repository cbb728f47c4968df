//! The builder that encodes a pair on a device.

use super::blob::PinnedBlob;
use super::digests::KnownDigests;
use super::job::Job;
use super::limits::Limits;
use super::run::{check_codec, encode};
use super::session::Encoder;
use super::started::{Cancellable, Encoding, point_of};
use crate::checkpoint::DeviceCheckpoint;
use crate::runtime::memory::PinnedBuffer;
use crate::runtime::stream::Stream;
use std::path::{Path, PathBuf};
use std::thread::Scope;
use tpde::internals::{ChainNames, NewPair, Watcher, check_composable, check_options, file_specs, progress_methods};
use tpde::{Chain, Checkpoint, EncodeOptions, EncodeReport, Pair};
use tpde_core::error::Result;
use tpde_core::format::DIGEST_SIZE;
use tpde_core::index::ValidatedIndex;
use tpde_core::source::Source;
use tpde_core::writer::{FileSpec, PairBuilder};

/// Compares the digests in a new index.
type CheckDigests<'a> = Box<dyn Fn(&ValidatedIndex) -> Result<()> + Send + Sync + 'a>;

/// Encodes a target checkpoint in device memory as a pair: its difference from a base in device memory.
///
/// The pair has the bytes that [`tpde::Encode`] makes of the same tensors with the same options. The codec must be `conditioned`
/// or `raw` for all tensors, or the profile `device`, which chooses one of them for each tensor. Each part that the pair describes must be in one slice of the target and in one of the base, with rows
/// at one distance, as [`TensorSlice`](crate::TensorSlice) explains. Digests are hashed on the device.
///
/// Device memory: the compressed bytes, and up to 512 MiB, whatever the size of the checkpoints. The digest of a tensor of more
/// than 8 GiB needs 1,100 bytes per MiB besides. Rows with gaps, and lanes at
/// addresses that are not multiples of their size, are copied before they are encoded: their bytes are read and written once
/// more. Lanes of derived bases are converted there, and once more to be hashed. Calls wait until the pair is complete. After an error, nothing is published, and the device does no more work for the
/// call.
///
/// The streams of an encoding have high priority, except that of digests of tensors: hashing takes what the other kernels leave idle.
/// So work on streams of ordinary priority is slower meanwhile.
///
/// ```no_run
/// use tpde_cuda::{Device, DeviceCheckpoint, Encode};
/// use tpde::{Codec, Dtype, EncodeOptions, TensorInfo};
///
/// # fn main() -> tpde::Result<()> {
/// let device = Device::open(0)?;
/// let info = TensorInfo { name: "w".into(), dtype: Dtype::Bf16, shape: vec![1024, 1024] };
/// let (old, new) = (device.alloc(info.bytes())?, device.alloc(info.bytes())?);
/// // Fill both.
/// let base = DeviceCheckpoint::new(&device, [(info.clone(), old)])?;
/// let target = DeviceCheckpoint::new(&device, [(info, new)])?;
/// let options = EncodeOptions::default().codec(Codec::Conditioned);
/// let (pair, report) = Encode::new(&target).base(&base).options(options).to_memory()?;
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is encoded before `to_path` or `to_memory` is called"]
pub struct Encode<'a> {
    target: &'a DeviceCheckpoint,
    base: Option<&'a DeviceCheckpoint>,
    options: EncodeOptions,
    of_chain: ChainNames,
    base_digests: KnownDigests,
    target_digests: KnownDigests,
    after: Option<&'a Stream>,
    read_from: Option<(&'a dyn Checkpoint, Option<&'a dyn Checkpoint>)>,
    /// Compares the digests of a fold with those of the chain.
    check_digests: Option<CheckDigests<'a>>,
    inputs: Vec<PathBuf>,
    overwrite: bool,
    encoder: Option<&'a Encoder>,
    limits: Limits,
    watcher: Watcher<'a>,
}

impl<'a> Encode<'a> {
    /// Encodes all tensors of `target`, with the default options and without a base.
    pub fn new(target: &'a DeviceCheckpoint) -> Self {
        Self {
            target,
            base: None,
            options: EncodeOptions::default(),
            of_chain: ChainNames::default(),
            base_digests: Default::default(),
            target_digests: Default::default(),
            after: None,
            read_from: None,
            check_digests: None,
            inputs: Vec::new(),
            overwrite: false,
            encoder: None,
            limits: Limits::default(),
            watcher: Watcher::Nobody,
        }
    }

    /// Folds a chain: encodes one pair from its base to its last version, as [`tpde::Encode::fold`] does. `base` has the tensors of
    /// the chain's base, and [`Rebuild`](crate::Rebuild) makes `last`. The pair describes the files of the last version, and
    /// nothing is published if it overlaps files of the chain, or if they have changed.
    ///
    /// With the same options the pair has the bytes of the processor's fold. [`Chain::renamed`] says which tensors are paired. Tensors
    /// and parts of `last` that do not have the digests of the last pair are [`Error::Step`](tpde::Error::Step).
    pub fn fold<B: Source>(chain: &'a Chain<'a, B>, base: &'a DeviceCheckpoint, last: &'a DeviceCheckpoint) -> Self {
        let of_chain = ChainNames { renamed: chain.renamed(), cuts: chain.cuts() };
        let check_digests: CheckDigests<'a> = Box::new(|index| chain.check_index(index));
        let (read_from, check_digests) = (Some((chain as _, Some(chain.base()))), Some(check_digests));
        Self { base: Some(base), of_chain, read_from, check_digests, ..Self::new(last) }
    }

    /// Checks that a device can encode with these options, before checkpoints are copied to it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](tpde::Error::InvalidArgument) if a tensor may get codec `zstd`.
    pub fn check_options(options: &EncodeOptions) -> Result<()> {
        check_codec(options)
    }

    /// Checks the options and the outputs of a fold, before the base is copied to a device: all that [`Encode::to_path`] would refuse
    /// before it encodes.
    ///
    /// # Errors
    /// Those of [`Encode::check_options`] and of [`Encode::to_path`].
    pub fn check_fold<B: Source>(
        chain: &Chain<'_, B>,
        options: &EncodeOptions,
        path: impl AsRef<Path>,
        overwrite: bool,
    ) -> Result<()> {
        check_codec(options)?;
        let of_chain = ChainNames { renamed: chain.renamed(), cuts: chain.cuts() };
        check_options(Some(chain.base()), chain, &of_chain.add_to(options, Some(chain.base()), chain)?)?;
        // Files that are not published leave nothing.
        NewPair::create(path.as_ref(), &chain.paths(), overwrite).map(drop)
    }

    /// Sets the base, which is on the same device.
    pub fn base(mut self, base: &'a DeviceCheckpoint) -> Self {
        self.base = Some(base);
        self
    }

    /// Sets the options.
    pub fn options(mut self, options: EncodeOptions) -> Self {
        self.options = options;
        self
    }

    /// Work on the tensors that is queued on this stream so far completes before they are read. Without this call, all work on
    /// them must have completed.
    pub fn after(mut self, stream: &'a Stream) -> Self {
        self.after = Some(stream);
        self
    }

    /// Uses the memory of an encoder, and leaves it for the next encoding.
    pub fn encoder(mut self, encoder: &'a Encoder) -> Self {
        self.encoder = Some(encoder);
        self
    }

    /// Adds digests of base tensors that are known, by name: BLAKE3-128 of the bytes of a tensor. In a chain of pairs, they are the
    /// target digests of the previous pair. The digests of other tensors, and those of parts and of derived bases, are computed. They are stored in
    /// the pair as they are: with a wrong digest, readers that compare it refuse the base.
    pub fn base_digests(mut self, digests: impl IntoIterator<Item = (String, [u8; DIGEST_SIZE])>) -> Self {
        self.base_digests.extend(digests);
        self
    }

    /// As [`Encode::base_digests`], for target tensors.
    pub fn target_digests(mut self, digests: impl IntoIterator<Item = (String, [u8; DIGEST_SIZE])>) -> Self {
        self.target_digests.extend(digests);
        self
    }

    /// States from which target and base were copied to the device ([`DeviceCheckpoint::upload`]). As with [`tpde::Encode`], the
    /// pair then describes the files of the target, it must not overlap the files of either, and nothing is published if they have
    /// changed.
    pub fn read_from(mut self, target: &'a dyn Checkpoint, base: Option<&'a dyn Checkpoint>) -> Self {
        self.read_from = Some((target, base));
        self
    }

    /// Replaces an existing pair.
    pub fn overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// Adds files and folders that the pair must not overlap.
    pub fn inputs(mut self, paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        self.inputs.extend(paths.into_iter().map(Into::into));
        self
    }

    progress_methods!("The total is the size of the target tensors.");

    /// Encodes the pair into files, as [`tpde::Encode::to_path`] does.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`](tpde::Error::InvalidArgument) for options that a device does not support, or that are
    ///   invalid, and if base and target are on
    ///   two devices. Elements of a base of another dtype must be at multiples of their size.
    /// - [`Error::PartNotHeld`](tpde::Error::PartNotHeld) if no slice has a whole part.
    /// - [`Error::Device`](tpde::Error::Device) if the driver fails, or if there is too little memory.
    /// - The errors of [`tpde::Encode::to_path`] about names, shapes, numbers of tensors, and the files of the pair.
    /// - Any error of the watcher.
    pub fn to_path(&self, path: impl AsRef<Path>) -> Result<EncodeReport> {
        let files = self.files()?;
        if files.is_empty() {
            check_composable(self.target.tensors())?;
        }
        let read = self.checkpoints().flat_map(|checkpoint| checkpoint.paths());
        let inputs: Vec<_> = read.chain(self.inputs.iter().cloned()).collect();
        let (pair, blob) = NewPair::create(path.as_ref(), &inputs, self.overwrite)?;
        let builder = PairBuilder::new(blob, pair.paths.blob.clone(), self.options.form())?;
        let (finished, report) = encode(&self.job(&self.effective_options()?), files, builder)?;
        self.check_read(&finished.index)?;
        pair.publish(finished, &self.watcher)?;
        Ok(report)
    }

    /// Encodes the pair in memory.
    ///
    /// # Errors
    /// The errors of [`Encode::to_path`], except those about files of the pair.
    pub fn to_memory(&self) -> Result<(Pair<Vec<u8>>, EncodeReport)> {
        let builder = PairBuilder::new(Vec::new(), "memory".into(), self.options.form())?;
        let (finished, report) = encode(&self.job(&self.effective_options()?), self.files()?, builder)?;
        self.check_read(&finished.index)?;
        Ok((finished.try_into()?, report))
    }

    /// Encodes the pair in memory, with the blob in pinned memory: the device copies the payloads to their places. When the pair is
    /// dropped, the next encoding can use this memory.
    ///
    /// # Errors
    /// The errors of [`Encode::to_memory`].
    pub fn to_pinned(&self) -> Result<(Pair<PinnedBuffer>, EncodeReport)> {
        let blob = PinnedBlob::new(&self.target.device().inner);
        let builder = PairBuilder::new(blob, "memory".into(), self.options.form())?;
        let (finished, report) = encode(&self.job(&self.effective_options()?), Vec::new(), builder)?;
        self.check_digests.as_ref().map_or(Ok(()), |check| check(&finished.index))?;
        Ok((Pair::new(finished.index, finished.blob.finish(&finished.blob_header)?)?, report))
    }

    /// Starts the encoding in a thread of a scope, and returns a handle of it. [`Encoding::wait`] returns what
    /// [`Encode::to_pinned`] returns.
    ///
    /// Of a stream that [`Encode::after`] names, the encoding waits for the work that is queued before this call, and for no later
    /// work. Until the encoding has ended, the tensors must not be written.
    ///
    /// ```no_run
    /// # use tpde_cuda::{DeviceCheckpoint, Encode, Encoder, Stream};
    /// # use tpde::{Codec, EncodeOptions};
    /// # fn example(base: &DeviceCheckpoint, target: &DeviceCheckpoint, stream: &Stream) -> tpde::Result<()> {
    /// let encoder = Encoder::new();
    /// let options = EncodeOptions::default().codec(Codec::Conditioned);
    /// std::thread::scope(|scope| {
    ///     let encode = Encode::new(target).base(base).options(options).after(stream).encoder(&encoder);
    ///     let encoding = encode.start(scope)?;
    ///     // The host may do other work here.
    ///     let (pair, report) = encoding.wait()?;
    ///     # Ok::<(), tpde::Error>(())
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Device`](tpde::Error::Device) if the driver refuses to wait for the stream.
    pub fn start<'scope>(mut self, scope: &'scope Scope<'scope, '_>) -> Result<Encoding<'scope>>
    where
        'a: 'scope,
    {
        let after = self.after.map(|stream| point_of(self.target.device(), stream)).transpose()?;
        let watch = Cancellable::new(std::mem::take(&mut self.watcher));
        let is_cancelled = watch.is_cancelled.clone();
        let run = move || {
            let encode = self.watch(&watch);
            if let Some(after) = &after { encode.after(after) } else { encode }.to_pinned()
        };
        Ok(Encoding::new(scope, is_cancelled, run))
    }

    /// The checkpoints that were copied to the device.
    fn checkpoints(&self) -> impl Iterator<Item = &'a dyn Checkpoint> {
        self.read_from.into_iter().flat_map(|(target, base)| [Some(target), base].into_iter().flatten())
    }

    /// Checks that the checkpoints that were copied have not changed, and that a fold has the digests of its chain.
    fn check_read(&self, index: &ValidatedIndex) -> Result<()> {
        self.checkpoints().try_for_each(|checkpoint| checkpoint.check_unchanged())?;
        self.check_digests.as_ref().map_or(Ok(()), |check| check(index))
    }

    /// The files of the target.
    fn files(&self) -> Result<Vec<FileSpec>> {
        let Some((target, base)) = self.read_from else { return Ok(Vec::new()) };
        let bytes = target.tensors().iter().map(|tensor| tensor.bytes()).sum();
        target.files().map_or(Ok(Vec::new()), |target| file_specs(target, bytes, base.and_then(|base| base.files())))
    }

    /// The options, with the names and cuts of a chain.
    fn effective_options(&self) -> Result<EncodeOptions> {
        self.of_chain.add_to(&self.options, self.base.map(|base| base as _), self.target)
    }

    fn job<'s>(&'s self, options: &'s EncodeOptions) -> Job<'s> {
        let Self { target, base, base_digests, target_digests, after, encoder, limits, watcher, .. } = self;
        let (base, after, encoder, limits) = (*base, *after, *encoder, *limits);
        Job { target, base, options, base_digests, target_digests, after, encoder, limits, watcher }
    }

    /// Sets limits of memory, for tests.
    #[cfg(test)]
    pub(crate) fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }
}
