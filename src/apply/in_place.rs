//! Applies a pair to tensors in memory, in place (spec section 13, modes of application).

use super::engine::Engine;
use super::kept::KeptPayloads;
use super::memory::Role;
use super::plan::{Plan, Task, check_in_place, no_tensor};
use super::request::ApplyReport;
use crate::checkpoint::{MemoryCheckpoint, TensorInfo};
use crate::reader::{Pair, PayloadDigests};
use crate::slice::{Memories, PlacedSlice, Slice, SliceCheckpoint, SliceMut};
use crate::watch::{NoProgress, Progress};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::format::BaseKind;
use tpde_core::index::ValidatedIndex;
use tpde_core::rectangle::Rectangle;
use tpde_core::source::Source;

/// The checks that an application in place makes before it writes.
///
/// Only digests detect a forged blob, because CRC and chunk sums are linear. If the pair digest covers the payloads (format 1.2),
/// both modes compare the digest of a payload before they write its chunk: if the index does not store them, all payloads of the pair
/// are hashed first, and each again when it is decoded. The descriptions of the modes hold for the CPU. On a CUDA device both
/// modes compare digests of targets, and chunk by chunk, some chunks are written before they are checked, and restored if a
/// check fails; see `tpde-cuda`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum InPlace {
    /// Decode and check everything in a first pass, then write in a second pass. If a check fails, the tensors are unchanged.
    ///
    /// The bytes written are the bytes checked, even if the blob changes between the passes. Up to 256 MiB of payloads are kept
    /// in memory. Other payloads are read again in the second pass and compared with the BLAKE3 digest from the first. A
    /// difference is [`Error::Changed`], and a failed read is [`Error::Io`]; either is wrapped in [`Error::Poisoned`] if a tensor
    /// has already changed. If all payloads are kept, the second pass does not read the blob and cannot fail in these ways.
    ///
    /// The bytes of the tensors are not copied. The exclusive borrow prevents other Rust code from writing to them between the
    /// passes. If foreign code can reach the memory, the caller must prevent it from writing, because the second pass detects
    /// such a write only by chunk sums.
    #[default]
    AllChecked,
    /// Check each chunk just before it is written, in one pass. An error after the first write leaves a mixture of base and
    /// target and is reported as [`Error::Poisoned`].
    ///
    /// Compares CRC and chunk sums but no digests of tensors. It detects a forged blob only from format 1.2 on.
    ChunkByChunk,
}

/// A tensor to be changed in place.
#[derive(Debug)]
pub struct TensorMut<'a> {
    /// Name in the target.
    pub name: &'a str,
    /// The tensor's bytes, row-major and little-endian: base bytes before the call, target bytes after it.
    pub bytes: &'a mut [u8],
}

/// An application of a pair to memory that has the base.
pub(crate) struct InPlaceRun<'a, B> {
    pub pair: &'a Pair<B>,
    pub mode: InPlace,
    /// Whether [`InPlace::AllChecked`] compares digests of tensors.
    pub digests: bool,
    /// Maximum size, in bytes, of the payloads that [`InPlace::AllChecked`] keeps.
    pub max_kept_bytes: u64,
    pub progress: Progress<'a>,
}

impl<B: Source> InPlaceRun<'_, B> {
    /// Changes slices. Progress counts each byte once: when it is checked, in the first pass.
    pub fn slices(&self, mut memories: Memories<'_>) -> Result<ApplyReport> {
        let plan = Plan::in_place(self.pair.index(), &memories)?;
        // Without a payload list in the index, one payload cannot be compared before all were hashed, and nothing may be written
        // before it is compared.
        self.pair.authenticate(&NoProgress(self.progress))?;
        let kept = KeptPayloads::new(self.pair, self.max_kept_bytes);
        let nothing = MemoryCheckpoint::EMPTY;
        let engine = Engine::new(self.pair, &nothing, &plan, self.progress);
        let payload_digests = match self.mode {
            InPlace::AllChecked => {
                let first = Engine { chunks: &kept, digests: self.digests, ..engine };
                let checked = first.execute(&mut memories.bytes, Role::Base, |_, _| Ok(()), |()| {});
                checked.map_err(|e| self.explain(e, &plan, &memories))?;
                // Nothing stops the second pass.
                self.write(&Engine { digests: false, progress: &|_| {}, ..first }, &mut memories)?
            }
            InPlace::ChunkByChunk => self.write(&Engine { digests: false, ..engine }, &mut memories)?,
        };
        let digests_checked = self.mode == InPlace::AllChecked && self.digests && plan.is_complete();
        Ok(ApplyReport::of_slices(&memories, digests_checked, payload_digests))
    }

    /// Changes slices that have the base of the plan, after checks of all chunks by another pass. Compares digests too if
    /// `self.digests`, after the chunks are written.
    pub fn rewrite(&self, plan: &Plan<'_>, memories: &mut Memories<'_>) -> Result<PayloadDigests> {
        let nothing = MemoryCheckpoint::EMPTY;
        self.write(&Engine { digests: self.digests, ..Engine::new(self.pair, &nothing, plan, self.progress) }, memories)
    }

    /// Checks and writes chunk by chunk.
    fn write(&self, engine: &Engine<'_, B>, memories: &mut Memories<'_>) -> Result<PayloadDigests> {
        let written = Mutex::new(Vec::new());
        let is_changed = AtomicBool::new(false);
        let note = |task: Task, _: &[u8]| {
            written.lock().unwrap_or_else(PoisonError::into_inner).push(task.chunk);
            let has_base = engine.plan.items[task.item].tensor.base_kind != BaseKind::None;
            if !has_base || engine.chunks.encoded(task.chunk).num_deltas > 0 {
                is_changed.store(true, Ordering::Relaxed);
            }
            Ok(())
        };
        let source = match engine.execute(&mut memories.bytes, Role::InPlace, note, |()| {}) {
            Ok(payload_digests) => return Ok(payload_digests),
            Err(source) => source,
        };
        // `written` includes unchanged chunks. If it has no others, the tensors still equal the base.
        if !is_changed.into_inner() {
            return Err(self.explain(source, engine.plan, memories));
        }
        let mut written = written.into_inner().unwrap_or_else(PoisonError::into_inner);
        written.sort_unstable();
        Err(Error::Poisoned { written, total: engine.plan.chunks().count() as u32, source: Box::new(source) })
    }

    /// [`Error::AlreadyApplied`], if memory that a plan changes has the target.
    pub fn already_applied(&self, plan: &Plan<'_>, memories: &Memories<'_>) -> Option<Error> {
        let base = base_of(self.pair.index(), memories).ok()?;
        let compared = Engine::new(self.pair, &base, plan, self.progress).compare_bases(None);
        compared.ok().flatten().filter(|error| matches!(error, Error::AlreadyApplied { .. }))
    }

    /// [`Engine::explain`] while the memory has the base.
    fn explain(&self, error: Error, plan: &Plan<'_>, memories: &Memories<'_>) -> Error {
        let Ok(base) = base_of(self.pair.index(), memories) else { return error };
        Engine::new(self.pair, &base, plan, self.progress).explain(error)
    }
}

/// The memory of a plan in place as its base, while nothing writes to it.
pub(crate) fn base_of<'m>(index: &ValidatedIndex, memories: &'m Memories<'_>) -> Result<SliceCheckpoint<'m>> {
    let slice = |PlacedSlice { name, rectangle, memory, range, pitch }: &PlacedSlice<'m>| {
        let tensor = index.find(name)?;
        let info = TensorInfo { name: (*name).to_owned(), dtype: tensor.dtype, shape: tensor.whole_shape().to_vec() };
        Some(Slice { pitch: *pitch, ..Slice::new(info, rectangle.clone(), &memories.bytes[*memory][range.clone()]) })
    };
    SliceCheckpoint::new(memories.slices.iter().filter_map(slice))
}

/// Memory of whole tensors, as that of slices.
///
/// # Errors
/// [`Error::InvalidArgument`] if the pair lacks a tensor, or if a tensor occurs twice, has another size, or cannot be changed in place.
/// [`Error::Incomplete`] if the pair has only some parts of one.
pub(crate) fn whole_tensors<'t>(index: &ValidatedIndex, mut tensors: Vec<TensorMut<'t>>) -> Result<Memories<'t>> {
    tensors.sort_by(|a, b| a.name.cmp(b.name));
    let mut slices = Vec::with_capacity(tensors.len());
    let mut previous = None;
    for TensorMut { name, bytes } in tensors {
        let tensor = index.find(name).ok_or_else(|| no_tensor(name))?;
        if previous.replace(name) == Some(name) {
            return Err(Error::InvalidArgument(format!("tensor {} occurs twice in the arguments", Escaped(name))));
        }
        index.entries(name).try_for_each(|entry| check_in_place(&entry))?;
        let whole = Rectangle::whole(tensor.whole_shape());
        index.check_has(name, &whole)?;
        let info = TensorInfo { name: String::new(), dtype: tensor.dtype, shape: tensor.whole_shape().to_vec() };
        let (expected, found) = (info.bytes(), bytes.len());
        if found as u64 != expected {
            let name = Escaped(name);
            return Err(Error::InvalidArgument(format!("tensor {name} has {found} bytes in memory, expected {expected}")));
        }
        slices.push(SliceMut::new(name, whole, bytes));
    }
    Memories::new(slices)
}

#[cfg(test)]
mod tests;
