//! The builder that applies a pair, with one method for each kind of output.

use super::accelerator::Accelerator;
use super::find::find_base;
use super::in_place::{InPlace, InPlaceRun, TensorMut, whole_tensors};
use super::kept::KEPT_PAYLOADS;
use super::moves::Moves;
use super::plan::{Item, Plan};
use super::range::{self, Changes};
use super::request::{ApplyReport, Request, Sink};
use super::slices_to_path::{self, GROUP_BYTES, Output};
use super::to_path;
use crate::checkpoint::{Checkpoint, CheckpointFiles, MemoryCheckpoint, TensorInfo};
use crate::cut::Piece;
use crate::reader::{Pair, VerifyReport};
use crate::safetensors::{display_name, outputs, target_metadata};
use crate::slice::{FusedSlices, Memories};
use crate::source::zeroed;
use crate::watch::{Watcher, progress_methods};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use tpde_core::error::{Error, Escaped, Result, Rule};
use tpde_core::format::BaseKind;
use tpde_core::index::Tensor;
use tpde_core::rectangle::Rectangle;
use tpde_core::source::Source;

static EMPTY: MemoryCheckpoint<'static> = MemoryCheckpoint::EMPTY;

/// Rebuilds the target of a pair, or a part of it, from its base.
///
/// Set the options, then call a method that does the work: [`to_path`](Self::to_path), [`to_memory`](Self::to_memory),
/// [`to_buffers`](Self::to_buffers), [`to_sink`](Self::to_sink), [`in_place`](Self::in_place), [`range`](Self::range),
/// [`changes`](Self::changes) or [`verify`](Self::verify).
///
/// ```
/// # use tpde::{Apply, Dtype, Encode, MemoryCheckpoint, TensorInfo};
/// # fn main() -> tpde::Result<()> {
/// let info = TensorInfo { name: "w".into(), dtype: Dtype::Bf16, shape: vec![3] };
/// let (old, new) = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]);
/// let base = MemoryCheckpoint::new([(info.clone(), &old[..])])?;
/// let target = MemoryCheckpoint::new([(info, &new[..])])?;
/// let (pair, _) = Encode::new(&target).base(&base).to_memory()?;
///
/// let mut out = [0; 6];
/// Apply::new(&pair).base(&base).to_buffers(&mut [&mut out])?;
/// assert_eq!(out, new);
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is rebuilt before a method such as `to_path` is called"]
pub struct Apply<'a, B> {
    pair: &'a Pair<B>,
    base: Option<&'a dyn Checkpoint>,
    /// Indexes of the selected tensors in the pair's index, ascending.
    selected: Vec<usize>,
    /// Whether the caller has called [`Apply::tensors`].
    is_selection: bool,
    digests: bool,
    overwrite: bool,
    accelerator: Option<&'a dyn Accelerator>,
    watcher: Watcher<'a>,
}

impl<'a, B: Source> Apply<'a, B> {
    /// Applies all tensors of `pair`, with all checks and without a base, unless options say otherwise.
    pub fn new(pair: &'a Pair<B>) -> Self {
        Self {
            pair,
            base: None,
            selected: (0..pair.index().tensor_count()).collect(),
            is_selection: false,
            digests: true,
            overwrite: false,
            accelerator: None,
            watcher: Watcher::Nobody,
        }
    }

    /// Sets the base: the checkpoint from which the target differs. A pair that was made without a base needs none. The base is
    /// never written.
    pub fn base(mut self, base: &'a dyn Checkpoint) -> Self {
        self.base = Some(base);
        self
    }

    /// Narrows the selection to the tensors whose names satisfy `is_wanted`. Repeated calls combine: a tensor must satisfy all.
    pub fn tensors(mut self, is_wanted: impl Fn(&str) -> bool) -> Self {
        self.selected.retain(|&i| is_wanted(self.pair.index().tensor(i).name));
        self.is_selection = true;
        self
    }

    /// Sets whether BLAKE3 digests of tensors are compared. The default is `true`. It has no effect on the comparison of payloads
    /// with their digests, which pairs have from format 1.2 on.
    ///
    /// Without digests of tensors, decoding is about three times as fast, and each chunk's CRC and sums still detect damage. They
    /// do not detect forgery: both are linear, so a blob of format 1.0 or 1.1 can be changed to give other weights with the same
    /// index and pair digest. From format 1.2 on, digests of payloads detect forgery if all payloads are read or the index stores
    /// their digests; [`ApplyReport::payload_digests`] says which were compared.
    pub fn digests(mut self, on: bool) -> Self {
        self.digests = on;
        self
    }

    /// Sets whether [`Apply::to_path`] may replace existing files, and may remove older weights that programs would read instead of
    /// the output. The default is `false`.
    pub fn overwrite(mut self, on: bool) -> Self {
        self.overwrite = on;
        self
    }

    /// Decodes on a device, with the same result. The device also hashes bases and targets, if digests are compared. Ranges,
    /// changes, moves and rebuilt slices use only the CPU.
    pub fn on(mut self, device: &'a dyn Accelerator) -> Self {
        self.accelerator = Some(device);
        self
    }

    progress_methods!("the size of the selected tensors");

    /// The selected tensors in ascending order of name. [`Apply::to_buffers`] expects its buffers in this order.
    pub fn selected(&self) -> impl Iterator<Item = Tensor<'a>> + '_ {
        self.selected.iter().map(|&i| self.pair.index().tensor(i))
    }

    /// Writes the target's files at `path`. If the target was one safetensors file, `path` becomes a file; if it was a folder, a
    /// folder. If the pair describes no files, or if tensors are selected, `path` becomes one safetensors file with a new header.
    ///
    /// Nothing appears at `path` until everything is written, compared with the digests and synced. A new folder appears
    /// complete, in one step. In an existing folder the files are replaced one by one. Until the last one is replaced, the folder
    /// has a shard index that every reader rejects. The shard index of the pair replaces it last.
    ///
    /// A replaced file keeps its permission bits. If `path` is a link to a file, the link is replaced and the linked file is not
    /// changed.
    ///
    /// # Errors
    /// - The errors of [`Apply::check_writable`], before anything is written, and those of [`Apply::to_sink`].
    /// - [`Error::InvalidArgument`] if the output is, contains, or is inside a file or folder of the base or the pair.
    /// - [`Error::BadCheckpoint`] if an existing folder has other files that programs would read instead of those of the pair, or
    ///   with them. With [`overwrite`](Apply::overwrite), files of the same checkpoint and files with names that common loaders
    ///   look for are removed instead.
    /// - [`Error::Io`] if `path` exists and [`overwrite`](Apply::overwrite) is not set; if `path` is neither a regular file nor a
    ///   folder; or if another process holds a lock on the folder for 30 seconds.
    pub fn to_path(&self, path: impl AsRef<Path>) -> Result<ApplyReport> {
        if self.base.is_none() {
            self.check_needs_no_base()?;
        }
        to_path::write(&self.unchecked_request(), self.base_files(), self.is_selection, path.as_ref(), self.overwrite)
    }

    /// Rebuilds the selected tensors in new memory, in ascending order of name. To reuse memory, call [`Apply::to_buffers`].
    ///
    /// # Errors
    /// The errors of [`Apply::to_buffers`]; [`Error::Io`] if the memory cannot be allocated.
    pub fn to_memory(&self) -> Result<Vec<(TensorInfo, Vec<u8>)>> {
        let mut tensors = Vec::with_capacity(self.selected.len());
        for tensor in self.selected() {
            let bytes = zeroed(tensor.bytes()).map_err(|e| Error::io("allocate", tensor.name.as_ref(), e))?;
            let info = TensorInfo { name: tensor.name.to_owned(), dtype: tensor.dtype, shape: tensor.shape.to_vec() };
            tensors.push((info, bytes));
        }
        let mut buffers: Vec<_> = tensors.iter_mut().map(|(_, bytes)| bytes.as_mut_slice()).collect();
        self.to_buffers(&mut buffers)?;
        Ok(tensors)
    }

    /// Rebuilds into buffers: one per tensor of [`Apply::selected`], with exactly the tensor's size.
    ///
    /// Cost: one read of the base and one write of the target; with digests, also one hash of each.
    ///
    /// # Errors
    /// [`Error::WrongBase`], [`Error::AlreadyApplied`] or [`Error::Invalid`]: discard the buffers. [`Error::InvalidArgument`] if
    /// a buffer's length is wrong.
    pub fn to_buffers(&self, outputs: &mut [&mut [u8]]) -> Result<ApplyReport> {
        self.request()?.to_buffers(outputs)
    }

    /// Rebuilds into a sink, chunk by chunk. After an error, discard what the sink has received.
    ///
    /// # Errors
    /// The errors of [`Apply::to_buffers`] and of the sink.
    pub fn to_sink(&self, sink: &dyn Sink) -> Result<ApplyReport> {
        self.request()?.to_sink(sink)
    }

    /// Rebuilds the target and discards it, to check that this base and this pair give the target.
    ///
    /// # Errors
    /// The errors of [`Apply::to_buffers`].
    pub fn verify(&self) -> Result<VerifyReport> {
        self.request()?.verify()
    }

    /// The bytes of a range of elements of a tensor. Decodes only the chunks that have bytes of the range, also where the pair has
    /// the tensor in parts. The tensor need not be selected.
    ///
    /// CRC and sums of the chunks are checked, and the digests of their payloads if the index stores them. Digests of tensors are
    /// not compared, because such a digest covers the whole tensor.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the pair has no such tensor, the tensor no such range, or the pair only some elements of the
    /// range; [`Error::Io`] if the memory cannot be allocated; otherwise the errors of [`Apply::to_buffers`].
    pub fn range(&self, name: &str, elements: Range<u64>) -> Result<Vec<u8>> {
        range::range(&self.request_for(self.pair.index().entries(name))?, name, elements)
    }

    /// The elements of a tensor whose bits differ between base and target, in ascending order, with their new values. An element
    /// that the base lacks is compared with zero. For a packed dtype the unit is a byte. The tensor need not be selected.
    ///
    /// Only the changed chunks are decoded. They are checked as in [`Apply::range`]. Memory: the size of the result, and about
    /// twice that while changes of parts are sorted.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the pair has no such tensor; [`Error::Incomplete`] if it has only some parts of the tensor;
    /// otherwise the errors of [`Apply::to_buffers`].
    pub fn changes(&self, name: &str) -> Result<Changes> {
        range::changes(&self.request_for(self.pair.index().entries(name))?, name)
    }

    /// How far the lanes of a tensor move from base to target. A lane that the base lacks moves from zero. The tensor need not be
    /// selected.
    ///
    /// Only the changed chunks are decoded. They are checked as in [`Apply::range`].
    ///
    /// # Errors
    /// The errors of [`Apply::changes`].
    pub fn moves(&self, name: &str) -> Result<Moves> {
        range::moves(&self.request_for(self.pair.index().entries(name))?, name)
    }

    /// Changes the tensors in memory from base to target. They may come in any order, and other tensors of the pair are skipped.
    /// The tensors themselves are the base, so no other base may be set.
    ///
    /// Only [`InPlace::AllChecked`] compares digests of tensors; [`InPlace`] says what that means for a forged blob. In mode
    /// `AllChecked`, a watcher cannot stop the work once writing has begun.
    ///
    /// # Errors
    /// - [`Error::WrongBase`], [`Error::AlreadyApplied`], [`Error::Changed`], [`Error::Invalid`] or [`Error::Io`]: the tensors are
    ///   unchanged.
    /// - [`Error::Poisoned`]: some tensors have changed. Possible with [`InPlace::ChunkByChunk`], and with
    ///   [`InPlace::AllChecked`] only if the blob changes or fails between the two passes.
    /// - [`Error::Incomplete`] for a tensor of which the pair has only some parts: [`Apply::in_place_slices`] changes those.
    /// - [`Error::InvalidArgument`] for a tensor that is not selected, occurs twice, has another length, or changes its number of
    ///   rows; also if a base or a device is set.
    pub fn in_place<'t>(&self, tensors: impl IntoIterator<Item = TensorMut<'t>>, mode: InPlace) -> Result<ApplyReport> {
        if self.base.is_some() {
            return Err(Error::InvalidArgument("an application in place takes no base: the tensors are the base".into()));
        }
        self.check_processor()?;
        let tensors: Vec<_> = tensors.into_iter().collect();
        let is_selected = |tensor_index| self.selected.binary_search(&tensor_index).is_ok();
        let in_index = tensors.iter().map(|tensor| self.pair.index().find(tensor.name));
        if let Some(tensor) = in_index.flatten().find(|tensor| !is_selected(tensor.place)) {
            return Err(Error::InvalidArgument(format!("tensor {} is not selected", Escaped(tensor.name))));
        }
        self.run_in_place(mode).slices(whole_tensors(self.pair.index(), tensors)?)
    }

    /// Rebuilds slices: rectangles of tensors, in memory that may have gaps between rows. Decodes only the chunks that have
    /// elements of the slices. The tensors need not be selected. Several slices may be of one tensor, without common elements.
    /// Slices whose rows interleave in one memory are a [`FusedSlices`].
    ///
    /// The base may hold only slices of its tensors ([`SliceCheckpoint`](crate::SliceCheckpoint)), if they have the base lanes of
    /// these chunks. Chunks are checked as in [`Apply::range`]. Tensors and parts of which all chunks are decoded are also compared
    /// with their digests, unless [`Apply::digests`] is off.
    ///
    /// # Errors
    /// - Nothing is decoded: [`Error::InvalidArgument`] if the pair has no such tensor, if a slice is not within its tensor or has
    ///   another size, or if slices overlap; [`Error::Incomplete`] if the pair has only some elements of a slice;
    ///   [`Error::NotHeld`] if the base lacks lanes of a chunk.
    /// - Discard the slices: the errors of [`Apply::to_buffers`].
    pub fn to_slices<'t>(&self, slices: impl IntoIterator<Item = impl Into<FusedSlices<'t>>>) -> Result<ApplyReport> {
        let mut memories = Memories::new(slices)?;
        let mut bytes = std::mem::take(&mut memories.bytes);
        self.slices(&memories, Some(&mut bytes))
    }

    /// [`Apply::to_slices`], or its checks alone if there are no `bytes` to write to.
    pub(crate) fn slices(&self, memories: &Memories<'_>, bytes: Option<&mut [&mut [u8]]>) -> Result<ApplyReport> {
        let entries = memories.slices.iter().flat_map(|slice| self.pair.index().entries(slice.name));
        let request = self.request_for(entries.collect::<Vec<_>>())?;
        request.to_slices(memories, bytes)
    }

    /// Writes slices as one safetensors file with a new header, each under the name of its tensor, and with the shape of its
    /// rectangle. Decodes only the chunks that have elements of the slices. The file appears as by [`Apply::to_path`].
    ///
    /// Memory: 256 MiB, or the largest slice.
    ///
    /// # Errors
    /// Those of [`Apply::to_slices`] and, for the file, of [`Apply::to_path`]. There is no file then.
    pub fn slices_to_path(&self, slices: &BTreeMap<String, Rectangle>, path: impl AsRef<Path>) -> Result<ApplyReport> {
        let inputs = self.base.iter().flat_map(|base| base.paths()).chain(self.pair.paths()).collect();
        let output =
            Output { path: path.as_ref(), replace: self.overwrite, inputs, progress: &self.watcher, group_bytes: GROUP_BYTES };
        slices_to_path::write(self.pair.index(), slices, output, |slices| self.to_slices(slices))
    }

    /// Changes slices of tensors ([`SliceMut`](crate::SliceMut), or several in one memory, [`FusedSlices`]) from base to target.
    /// Several slices may be of one tensor, without common elements. The slices themselves are the base, so no other base may be
    /// set. The pair must have all elements of each slice. Bytes between rows stay as they are.
    ///
    /// The slices must have all elements of each chunk of which they have some. A pair in which each slice is a part of its tensor,
    /// or is cut into parts, fulfils that.
    /// [`InPlace::AllChecked`] compares the digests of tensors and parts that are held completely.
    ///
    /// # Errors
    /// As for [`Apply::in_place`], but the tensors need not be selected. Before any work: [`Error::Incomplete`] if the pair has only
    /// some elements of a slice; [`Error::NotHeld`] if the slices of a tensor have only some lanes of a chunk.
    pub fn in_place_slices<'t>(
        &self,
        slices: impl IntoIterator<Item = impl Into<FusedSlices<'t>>>,
        mode: InPlace,
    ) -> Result<ApplyReport> {
        if self.base.is_some() {
            return Err(Error::InvalidArgument("an application in place takes no base: the tensors are the base".into()));
        }
        self.check_processor()?;
        self.run_in_place(mode).slices(Memories::new(slices)?)
    }

    fn run_in_place(&self, mode: InPlace) -> InPlaceRun<'_, B> {
        InPlaceRun { pair: self.pair, mode, digests: self.digests, max_kept_bytes: KEPT_PAYLOADS, progress: &self.watcher }
    }

    /// An application in place has no device.
    fn check_processor(&self) -> Result<()> {
        if self.accelerator.is_none() {
            return Ok(());
        }
        let reason = "an application in place runs on the processor: tpde-cuda changes tensors on a device";
        Err(Error::InvalidArgument(reason.into()))
    }

    /// Finds the cause of an error that another decoder reported, such as `tpde-cuda`. If the error is about the sum of a base
    /// chunk, the base is compared with its digests, and the error may become [`Error::WrongBase`] or [`Error::AlreadyApplied`].
    /// Other errors are returned unchanged.
    ///
    /// Tensors and parts of which the base holds only some elements are not compared. Cost for an error about a base sum: one
    /// read and one hash of the selected tensors of the base.
    #[must_use]
    pub fn explain(&self, error: Error) -> Error {
        self.explain_with(error, |tensor, base| match (tensor.base_kind, tensor.derived) {
            (BaseKind::None, _) => None,
            (_, Some(_)) => find_base(tensor, base).ok().flatten(),
            _ => named(tensor, base, tensor.base_name),
        })
    }

    /// [`Apply::explain`] for an application in place. The base must hold the caller's tensors, under their names in the target.
    #[must_use]
    pub fn explain_in_place(&self, error: Error) -> Error {
        self.explain_with(error, |tensor, base| named(tensor, base, tensor.name))
    }

    fn explain_with(&self, error: Error, find: impl Fn(&Tensor<'_>, &dyn Checkpoint) -> Option<Piece>) -> Error {
        let request = self.unchecked_request();
        // If the base holds only a part of an entry, its digest cannot be compared.
        let is_held = |piece: &Piece| piece.is_held(request.base, 0, piece.size(request.base) as usize);
        let item = |tensor| Item::whole(tensor, find(&tensor, request.base).filter(is_held));
        let plan = Plan { items: request.selected().map(item).collect() };
        request.engine(&plan).explain(error)
    }

    /// Checks that [`Apply::to_path`] can write the target of the pair. Nothing is written. If this method and [`Apply::verify`]
    /// succeed, [`Apply::to_path`] fails only for reasons of the file system. [`Verify`](crate::Verify) calls both.
    ///
    /// Cost: reads the headers of all files, or composes one, and holds them in memory.
    ///
    /// # Errors
    /// - [`Error::Invalid`] if the pair's files do not match its tensors, or if the pair takes a header or the shard index from the
    ///   base, and no base is set or the base lacks the file.
    /// - [`Error::NotWritable`] if the target is to be one file with a new header (no files in the pair, or a selection), and no
    ///   reader would accept it: for instance because a tensor is named `__metadata__`, or because the header is larger than
    ///   100,000,000 bytes.
    pub fn check_writable(&self) -> Result<()> {
        let chosen = self.is_selection.then(|| self.selected().collect::<Vec<_>>());
        outputs(self.pair.index(), self.base_files(), chosen.as_deref()).map(|_| ())
    }

    /// The `__metadata__` of all files of the target, merged. If files have different values for a key, the first file's is used.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the pair takes a header from the base, and no base is set or the base lacks the file; also if a
    /// header is damaged.
    pub fn metadata(&self) -> Result<BTreeMap<String, String>> {
        target_metadata(self.pair.index(), self.base_files())
    }

    fn base_files(&self) -> Option<&'a dyn CheckpointFiles> {
        self.base.and_then(|base| base.files())
    }

    fn request(&self) -> Result<Request<'_, B>> {
        self.request_for(self.selected())
    }

    /// Creates a request, after checking that a base is set if one of `tensors` needs it.
    ///
    /// # Errors
    /// [`Error::Invalid`] with rule `base.tensor` if a tensor needs a base and none is set.
    fn request_for<'t>(&self, tensors: impl IntoIterator<Item = Tensor<'t>>) -> Result<Request<'_, B>> {
        if self.base.is_none() {
            tensors.into_iter().try_for_each(|tensor| find_base(&tensor, &EMPTY).map(drop))?;
        }
        Ok(self.unchecked_request())
    }

    fn unchecked_request(&self) -> Request<'_, B> {
        let mut request = Request::new(self.pair, self.base.unwrap_or(&EMPTY), &self.watcher);
        request.selected = self.selected.clone();
        request.digests = self.digests;
        request.accelerator = self.accelerator;
        request
    }

    /// Returns an error, with rule `base.tensor` or `base.file`, if a selected tensor or a file of the pair needs a base.
    pub(super) fn check_needs_no_base(&self) -> Result<()> {
        self.request()?;
        let of_base = self.pair.index().files().find(|file| !file.kind.is_stored());
        if let Some(file) = of_base.filter(|_| !self.is_selection) {
            return Err(Rule::BaseFile.broken(format_args!("{} of the base", display_name(file.name)), "no base"));
        }
        Ok(())
    }
}

/// The lanes of an entry in the tensor of this name. A part needs a tensor of its dtype and whole shape.
fn named(tensor: &Tensor<'_>, base: &dyn Checkpoint, name: &str) -> Option<Piece> {
    let is_whole = tensor.part.is_none() && tensor.derived.is_none();
    let fits = |info: &TensorInfo| is_whole || info.dtype == tensor.dtype && info.shape == tensor.whole_shape();
    let found = base.find(name).filter(|&i| fits(&base.tensors()[i]))?;
    Some(Piece::of(found, tensor.layout()))
}
