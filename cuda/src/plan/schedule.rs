//! The schedule of an application: the order of its chunks, and the offsets of their payloads in staging memory.

use super::binding::Binding;
use crate::index::{DeviceIndex, TensorOnDevice};
use crate::runtime::kernels::{Decoder, Variant};
use crate::runtime::staging::SLOT_BYTES;
use std::cmp::Reverse;
use std::ops::Range;
use tpde_core::codec::{Codec, raw_size};
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::format::{ChunkMetadata, PAYLOAD_ALIGN};

/// Kernel of a chunk, and form of its payload in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Group {
    /// `tpde_conditioned`.
    Conditioned,
    /// `tpde_without_base`.
    WithoutBase,
    /// `tpde_raw`, with the stored payload of codec `raw`.
    Raw,
    /// `tpde_raw`, with a payload of codec `zstd` that the host has expanded.
    Expanded,
    /// `tpde_raw`, with a payload of codec `zstd` that nvCOMP expands on the device.
    Frames,
}

impl Group {
    pub fn decoder(self) -> Decoder {
        match self {
            Self::Conditioned => Decoder::Conditioned,
            Self::WithoutBase => Decoder::WithoutBase,
            Self::Raw | Self::Expanded | Self::Frames => Decoder::Raw,
        }
    }
}

/// A chunk to schedule.
#[derive(Debug, Clone, Copy)]
struct Job {
    chunk: u32,
    tensor: u32,
    group: Group,
    variant: Variant,
}

/// Chunks of one group: a range of [`Schedule::order`].
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub group: Group,
    pub order: Range<usize>,
    /// Whether it has chunks of tensors of each [`Variant`], which have kernels of their own. Only a run of [`Group::Frames`]
    /// may have several.
    pub has: [bool; 3],
}

/// Chunks whose payloads are copied together, before their launches.
#[derive(Debug, Clone)]
pub(crate) struct Slice {
    pub runs: Vec<Run>,
    pub pieces: Vec<Piece>,
}

/// Payloads that are contiguous both in the blob and in staging memory: one copy takes them there. A piece of expanded payloads has
/// about four slots of the ring at most, which bounds host memory.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    pub blob: u64,
    pub at: u64,
    pub bytes: u64,
    /// Range of [`Schedule::staged`].
    pub staged: Range<usize>,
    pub is_expanded: bool,
}

/// All launches of an application.
#[derive(Debug)]
pub(crate) struct Schedule {
    /// Chunks in launch order: by slice, then kernel, then descending cost. So cheap chunks start last, which shortens the time
    /// in which only few blocks run.
    pub order: Vec<u32>,
    pub slices: Vec<Slice>,
    /// Chunks with payloads, in the order of the blob, with their staging offsets.
    pub staged: Vec<StagedPayload>,
    pub staged_bytes: u64,
    /// Records of [`Schedule::span`] with staging offsets, or with device addresses. Empty if all offsets are `shift` plus the offset
    /// in the blob.
    pub records: Vec<ChunkMetadata>,
    /// Staging offset minus blob offset, mod 2^64, if it is the same for all payloads.
    pub shift: u64,
    /// Range from the first to the last chunk of the application.
    pub span: Range<u32>,
    pub has_expanded: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct StagedPayload {
    pub chunk: u32,
    pub tensor: u32,
    pub at: u64,
    pub bytes: u32,
    pub group: Group,
}

impl StagedPayload {
    /// Returns the size in bytes, including the padding.
    pub fn padded_len(&self) -> u64 {
        u64::from(self.bytes).next_multiple_of(PAYLOAD_ALIGN)
    }
}

impl Schedule {
    /// Schedules the chunks of the bound tensors. `slice_bytes` is the approximate size of a slice, or `None` if the payloads are
    /// already on the device.
    pub fn new(index: &DeviceIndex, bindings: &[Binding], slice_bytes: Option<u64>) -> Result<Self> {
        let mut schedule = Self {
            order: Vec::new(),
            slices: Vec::new(),
            staged: Vec::new(),
            staged_bytes: 0,
            records: Vec::new(),
            shift: 0,
            span: 0..0,
            has_expanded: false,
        };
        let mut jobs = Vec::new();
        let mut has_frames = false;
        for binding in bindings {
            let tensor = index.tensor(binding.tensor)?;
            let group = group_of(tensor, index.trusted.is_some());
            has_frames |= group == Group::Frames;
            schedule.has_expanded |= group == Group::Expanded;
            if slice_bytes.is_none() && group == Group::Expanded {
                let name = Escaped(&tensor.name);
                return Err(Error::InvalidArgument(format!(
                    "tensor {name} has codec zstd, which the processor expands: pass the blob in host memory"
                )));
            }
            let variant = binding.variant;
            jobs.extend(binding.chunks(tensor).map(|chunk| {
                let has_no_base = group == Group::Conditioned && tensor.first_lane(chunk) >= tensor.device.base_lanes;
                let group = if has_no_base { Group::WithoutBase } else { group };
                Job { chunk, tensor: binding.tensor as u32, group, variant }
            }));
        }
        if let (Some(first), Some(last)) = (jobs.first(), jobs.last()) {
            schedule.span = first.chunk..last.chunk + 1;
        }
        match slice_bytes {
            None => schedule.add_slice(index, &jobs, 0..0)?,
            // nvCOMP expands all frames together, so there is one slice.
            Some(_) if has_frames => schedule.stage(index, &jobs, u64::MAX)?,
            Some(slice_bytes) => schedule.stage(index, &jobs, slice_bytes)?,
        }
        Ok(schedule)
    }

    /// Gives the records of chunks device addresses. `blob` is the address that blob offset 0 would have.
    pub fn place(&mut self, index: &DeviceIndex, chunks: impl Iterator<Item = u32>, blob: u64) {
        let span = self.span.start as usize..self.span.end as usize;
        if self.records.is_empty() {
            self.records = index.uploaded.records[span.clone()].to_vec();
        }
        for chunk in chunks {
            let record = &mut self.records[chunk as usize - span.start];
            record.blob_offset = record.blob_offset.get().wrapping_add(blob).into();
        }
    }

    /// Returns the number of chunks with a payload.
    pub fn payload_count(&self, index: &DeviceIndex) -> usize {
        self.order.iter().filter(|&&chunk| index.uploaded.records[chunk as usize].compressed_size.get() > 0).count()
    }

    /// Divides the chunks into slices, and assigns a staging offset to each payload.
    fn stage(&mut self, index: &DeviceIndex, jobs: &[Job], slice_bytes: u64) -> Result<()> {
        let mut first = 0;
        let (mut slice_start, mut first_staged) = (0, 0);
        for (i, &Job { chunk, tensor, group, .. }) in jobs.iter().enumerate() {
            let record = &index.uploaded.records[chunk as usize];
            let lane_bytes = 1usize << index.tensor(tensor as usize)?.device.lane_log2;
            let bytes = match group {
                // The index has checked that the number of changes is at most the number of lanes, so the size fits.
                Group::Expanded if record.num_deltas.get() > 0 => raw_size(record.num_deltas.get(), lane_bytes) as u32,
                _ => record.compressed_size.get(),
            };
            if bytes > 0 {
                let staged = StagedPayload { chunk, tensor, at: self.staged_bytes, bytes, group };
                self.staged_bytes += staged.padded_len();
                self.staged.push(staged);
            }
            let is_last = i + 1 == jobs.len();
            if is_last || self.staged_bytes - slice_start >= slice_bytes {
                self.add_slice(index, &jobs[first..=i], first_staged..self.staged.len())?;
                (first, slice_start, first_staged) = (i + 1, self.staged_bytes, self.staged.len());
            }
        }
        let Some(start) = self.staged.first() else { return Ok(()) };
        // Payloads are contiguous in the blob, so one shift usually fits all of them.
        let offset = |staged: &StagedPayload| index.uploaded.records[staged.chunk as usize].blob_offset.get();
        self.shift = start.at.wrapping_sub(offset(start));
        // Expanded payloads also have other sizes, so they need records of their own.
        if self.has_expanded || !self.staged.iter().all(|staged| staged.at.wrapping_sub(offset(staged)) == self.shift) {
            self.records = index.uploaded.records[self.span.start as usize..self.span.end as usize].to_vec();
            for staged in &self.staged {
                let record = &mut self.records[(staged.chunk - self.span.start) as usize];
                record.blob_offset = staged.at.into();
                record.compressed_size = staged.bytes.into();
            }
            self.shift = 0;
        }
        Ok(())
    }

    fn add_slice(&mut self, index: &DeviceIndex, jobs: &[Job], staged: Range<usize>) -> Result<()> {
        let mut sorted = Vec::with_capacity(jobs.len());
        for &Job { chunk, tensor, group, variant } in jobs {
            let tensor = index.tensor(tensor as usize)?;
            let bytes = tensor.chunk_lanes(chunk) << tensor.device.lane_log2;
            let size = u64::from(index.uploaded.records[chunk as usize].compressed_size.get());
            sorted.push((rank(group, variant, bytes, size), chunk, variant));
        }
        sorted.sort_unstable();
        let mut runs: Vec<Run> = Vec::new();
        let mut last = None;
        for &((group, apart, ..), chunk, variant) in &sorted {
            let at = self.order.len();
            if last.replace((group, apart)) != Some((group, apart)) {
                runs.push(Run { group, order: at..at, has: [false; 3] });
            }
            if let Some(run) = runs.last_mut() {
                run.order.end = at + 1;
                run.has[variant as usize] = true;
            }
            self.order.push(chunk);
        }
        if !runs.is_empty() {
            let pieces = self.pieces(index, staged);
            self.slices.push(Slice { runs, pieces });
        }
        Ok(())
    }

    /// Groups payloads into pieces.
    fn pieces(&self, index: &DeviceIndex, staged: Range<usize>) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        for (i, staged) in staged.clone().zip(&self.staged[staged]) {
            let is_expanded = staged.group == Group::Expanded;
            let blob = index.uploaded.records[staged.chunk as usize].blob_offset.get();
            if let Some(piece) = pieces.last_mut().filter(|piece| piece.is_expanded == is_expanded) {
                let follows = if is_expanded { piece.bytes < 4 * SLOT_BYTES as u64 } else { piece.blob + piece.bytes == blob };
                if follows {
                    piece.bytes += staged.padded_len();
                    piece.staged.end = i + 1;
                    continue;
                }
            }
            pieces.push(Piece { blob, at: staged.at, bytes: staged.padded_len(), staged: i..i + 1, is_expanded });
        }
        pieces
    }
}

/// Returns the sort key of a chunk with `bytes` bytes of lanes and a payload of `size` bytes:
/// 1. Kernel.
/// 2. Variant. Ignored for [`Group::Frames`], because nvCOMP expands all frames of a run together.
/// 3. For [`Group::Frames`], chunks with a frame first, because nvCOMP expands a prefix.
/// 4. Descending cost. On an H200 one payload byte of codec `conditioned` costs about as much as 30 base bytes.
fn rank(group: Group, variant: Variant, bytes: u64, size: u64) -> (Group, Variant, bool, Reverse<u64>) {
    let estimated_cost = bytes + if matches!(group, Group::Conditioned | Group::WithoutBase) { 30 * size } else { size };
    let apart = if group == Group::Frames { Variant::Plain } else { variant };
    (group, apart, group == Group::Frames && size == 0, Reverse(estimated_cost))
}

fn group_of(tensor: &TensorOnDevice, trusted: bool) -> Group {
    match tensor.codec {
        Codec::Conditioned => Group::Conditioned,
        Codec::Raw => Group::Raw,
        Codec::Zstd if trusted => Group::Frames,
        Codec::Zstd => Group::Expanded,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_first_and_then_what_takes_longest() {
        let mut chunks = [
            (Group::Frames, 1 << 20, 0),
            (Group::Conditioned, 1 << 10, 900),
            (Group::Frames, 1 << 10, 9),
            (Group::Conditioned, 1 << 20, 0),
            (Group::Frames, 1 << 20, 9),
            (Group::Conditioned, 1 << 20, 9),
        ];
        chunks.sort_by_key(|&(group, bytes, size)| rank(group, Variant::Plain, bytes, size));
        let expected = [
            (Group::Conditioned, 1 << 20, 9),
            (Group::Conditioned, 1 << 20, 0),
            (Group::Conditioned, 1 << 10, 900),
            (Group::Frames, 1 << 20, 9),
            (Group::Frames, 1 << 10, 9),
            (Group::Frames, 1 << 20, 0),
        ];
        assert_eq!(chunks, expected);
    }
}
