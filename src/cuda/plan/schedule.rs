//! What an application launches: which chunks, in which order, and where their payloads are staged.

use super::binding::Binding;
use crate::codec::{Codec, raw_size};
use crate::cuda::index::{DeviceIndex, TensorOnDevice};
use crate::error::{Error, Escaped, Result};
use crate::format::{ChunkMetadata, PAYLOAD_ALIGN};
use std::cmp::Reverse;
use std::ops::Range;

/// Which kernel takes a chunk, and what its payload is when it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) enum Group {
    /// `tpde_conditioned`.
    Conditioned,
    /// `tpde_without_base`.
    WithoutBase,
    /// `tpde_raw`, as stored.
    Raw,
    /// `tpde_raw`, a payload of codec `zstd` that the host has expanded and checked.
    Expanded,
    /// `tpde_raw`, a payload of codec `zstd` as stored, which is expanded on the device.
    Frames,
}

/// Chunks of one kernel that are launched together: a range of [`Schedule::order`].
#[derive(Debug, Clone)]
pub(in crate::cuda) struct Run {
    pub group: Group,
    pub order: Range<usize>,
}

/// Whole chunks whose payloads are copied together and then launched.
#[derive(Debug, Clone)]
pub(in crate::cuda) struct Slice {
    pub runs: Vec<Run>,
    /// Its chunks as staged, in the order of their payloads.
    pub chunks: Range<usize>,
}

/// All launches of an application.
#[derive(Debug)]
pub(in crate::cuda) struct Schedule {
    /// Numbers of chunks as launched: by slice, then kernel, then the most costly first, so that none of them is the last to begin.
    pub order: Vec<u32>,
    pub slices: Vec<Slice>,
    /// Chunks with payloads, in the order of the blob, and where each is staged.
    pub staged: Vec<Staged>,
    pub staged_bytes: u64,
    /// Records of [`Schedule::span`] that say where payloads are staged; empty where one distance serves for all.
    pub records: Vec<ChunkMetadata>,
    /// What is added to an offset in the blob to give one in the staging memory, mod 2^64, where there are no own records.
    pub shift: u64,
    /// From the first chunk to behind the last one.
    pub span: Range<u32>,
    pub has_expanded: bool,
}

#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Staged {
    pub chunk: u32,
    pub tensor: u32,
    pub at: u64,
    pub bytes: u32,
    pub group: Group,
}

impl Staged {
    /// Bytes with their padding.
    pub fn padded_len(&self) -> u64 {
        u64::from(self.bytes).next_multiple_of(PAYLOAD_ALIGN)
    }
}

impl Schedule {
    /// Payloads are copied in slices of about `slice_bytes` bytes, or are on the device if that is `None`.
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
        let mut chunks = Vec::new();
        let mut has_frames = false;
        for binding in bindings {
            let tensor = index.tensor(binding.tensor)?;
            let group = group_of(tensor, index.trusted.is_some());
            has_frames |= group == Group::Frames;
            schedule.has_expanded |= group == Group::Expanded;
            if slice_bytes.is_none() && group == Group::Expanded {
                let name = Escaped(&tensor.name);
                return Err(Error::Misuse(format!(
                    "tensor {name} has codec zstd, which the processor expands: give the blob in memory of the host"
                )));
            }
            chunks.extend(tensor.chunks().map(|chunk| {
                let has_no_base = group == Group::Conditioned && tensor.first_lane(chunk) >= tensor.device.base_lanes;
                (chunk, binding.tensor as u32, if has_no_base { Group::WithoutBase } else { group })
            }));
        }
        if let (Some((first, ..)), Some((last, ..))) = (chunks.first(), chunks.last()) {
            schedule.span = *first..last + 1;
        }
        match slice_bytes {
            None => schedule.add_slice(index, &chunks, 0..0)?,
            // Frames are expanded together.
            Some(_) if has_frames => schedule.stage(index, &chunks, u64::MAX)?,
            Some(slice_bytes) => schedule.stage(index, &chunks, slice_bytes)?,
        }
        Ok(schedule)
    }

    /// Cuts the chunks into slices, and finds a place for each payload.
    fn stage(&mut self, index: &DeviceIndex, chunks: &[(u32, u32, Group)], slice_bytes: u64) -> Result<()> {
        let mut first = 0;
        let (mut begun_at, mut begun) = (0, 0);
        for (i, &(chunk, tensor, group)) in chunks.iter().enumerate() {
            let record = &index.uploaded.records[chunk as usize];
            let lane_bytes = 1usize << index.tensor(tensor as usize)?.device.lane_log2;
            let bytes = match group {
                // The index has bounded both by the chunk's lanes.
                Group::Expanded if record.num_deltas.get() > 0 => raw_size(record.num_deltas.get(), lane_bytes) as u32,
                _ => record.compressed_size.get(),
            };
            if bytes > 0 {
                let staged = Staged { chunk, tensor, at: self.staged_bytes, bytes, group };
                self.staged_bytes += staged.padded_len();
                self.staged.push(staged);
            }
            let is_last = i + 1 == chunks.len();
            if is_last || self.staged_bytes - begun_at >= slice_bytes {
                self.add_slice(index, &chunks[first..=i], begun..self.staged.len())?;
                (first, begun_at, begun) = (i + 1, self.staged_bytes, self.staged.len());
            }
        }
        let Some(start) = self.staged.first() else { return Ok(()) };
        // Payloads follow each other in the blob, so that often all of them are as far from there.
        let offset = |staged: &Staged| index.uploaded.records[staged.chunk as usize].blob_offset.get();
        self.shift = start.at.wrapping_sub(offset(start));
        // Where payloads were expanded they have other sizes too.
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

    fn add_slice(&mut self, index: &DeviceIndex, chunks: &[(u32, u32, Group)], staged: Range<usize>) -> Result<()> {
        let mut sorted = Vec::with_capacity(chunks.len());
        for &(chunk, tensor, group) in chunks {
            let tensor = index.tensor(tensor as usize)?;
            let bytes = tensor.chunk_lanes(chunk) << tensor.device.lane_log2;
            let size = u64::from(index.uploaded.records[chunk as usize].compressed_size.get());
            sorted.push((rank(group, bytes, size), chunk));
        }
        sorted.sort_unstable();
        let mut runs: Vec<Run> = Vec::new();
        for &((group, ..), chunk) in &sorted {
            let at = self.order.len();
            match runs.last_mut() {
                Some(run) if run.group == group => run.order.end = at + 1,
                _ => runs.push(Run { group, order: at..at + 1 }),
            }
            self.order.push(chunk);
        }
        if !runs.is_empty() {
            self.slices.push(Slice { runs, chunks: staged });
        }
        Ok(())
    }
}

/// What chunks are sorted by, with `bytes` bytes of lanes and `size` of payload: those that take a block longest are to be begun
/// first, but frames that are there come before those that are not, as nvCOMP is given the first ones. A byte of a payload of codec
/// `conditioned` takes as long as some thirty of the base, by what an H200 takes for them.
fn rank(group: Group, bytes: u64, size: u64) -> (Group, bool, Reverse<u64>) {
    let effort = bytes + if matches!(group, Group::Conditioned | Group::WithoutBase) { 30 * size } else { size };
    (group, group == Group::Frames && size == 0, Reverse(effort))
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
        chunks.sort_by_key(|&(group, bytes, size)| rank(group, bytes, size));
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
