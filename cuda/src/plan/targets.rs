//! Digests of targets: the ranges to be hashed, and in place the batches that are rebuilt in scratch memory before the commit.

use super::binding::Binding;
use super::payloads::Mode;
use super::program::TargetChecks;
use super::schedule::{Run, Schedule};
use crate::abi::{DeviceTensor, TensorRows};
use crate::hashes::{HashPlan, HashRange, HashSlice, PIECE};
use crate::index::DeviceIndex;
use crate::rows::tensor_rows;
use crate::runtime::layout::MEMORY_ALIGN;
use std::collections::BTreeMap;
use tpde::InPlace;
use tpde_core::error::Result;
use tpde_core::format::DIGEST_SIZE;
use zerocopy::IntoBytes;

/// Maximum size of the targets of a batch in bytes, except that a batch has at least one chunk. Scratch memory holds two batches.
#[cfg(not(test))]
const BATCH_BYTES: u64 = 256 << 20;

#[cfg(test)]
thread_local! {
    /// `BATCH_BYTES` of tests: small, so that tensors span several batches, unless a test measures.
    pub(crate) static BATCH_OF_TEST: std::cell::Cell<u64> = const { std::cell::Cell::new(64 << 10) };
}

fn batch_bytes() -> u64 {
    #[cfg(test)]
    return BATCH_OF_TEST.get();
    #[cfg(not(test))]
    BATCH_BYTES
}

/// Chunks that one launch rebuilds in scratch memory, where the next launch hashes them.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Runs over [`Targets::order`].
    pub runs: Vec<Run>,
    /// Index of the batch's first tensor in the pair.
    pub first_tensor: usize,
    /// Index of its entry in the tensors of all batches.
    pub first_entry: usize,
    pub hashes: HashSlice,
}

/// The targets of an application, as they are hashed. Those of which only some chunks are decoded are left out.
#[derive(Debug)]
pub(crate) struct Targets {
    pub plan: HashPlan,
    /// The entry of each range.
    pub entries: Vec<usize>,
    pub expected: Vec<[u8; DIGEST_SIZE]>,
    /// All parts, if the targets are hashed where they are stored.
    pub stored: Option<HashSlice>,
    /// Else the batches. Addresses of parts and outputs count from the scratch memory.
    pub batches: Vec<Batch>,
    pub order: Vec<u32>,
    pub scratch_bytes: u64,
    tensors: Vec<DeviceTensor>,
    rows: Vec<TensorRows>,
}

/// Returns the size of a full chunk in bytes.
fn chunk_bytes(tensor: &DeviceTensor) -> u64 {
    1 << (tensor.chunk_lanes_log2 + tensor.lane_log2)
}

/// Returns the step of the first bytes of parts: a part begins with a chunk, and with a piece.
fn step_of(tensor: &DeviceTensor) -> u64 {
    chunk_bytes(tensor).max(PIECE)
}

impl Targets {
    pub fn new(index: &DeviceIndex, bindings: &[Binding], schedule: &Schedule, mode: Mode) -> Result<Self> {
        let whole = || bindings.iter().filter(|binding| binding.portion.is_none());
        let digest = |binding: &Binding| Ok(index.tensor(binding.tensor)?.digests.target_digest);
        let mut targets = Self {
            plan: HashPlan::default(),
            entries: whole().map(|binding| binding.tensor).collect(),
            expected: whole().map(digest).collect::<Result<_>>()?,
            stored: None,
            batches: Vec::new(),
            order: Vec::new(),
            scratch_bytes: 0,
            tensors: Vec::new(),
            rows: Vec::new(),
        };
        if mode == Mode::InPlace(InPlace::AllChecked) {
            targets.in_batches(index, whole, schedule, batch_bytes())?;
        } else {
            for binding in whole() {
                targets.plan.add(&binding.output, binding.output_rows)?;
            }
            targets.stored = Some(targets.plan.slice_after(None));
        }
        Ok(targets)
    }

    /// Returns where the targets are compared.
    pub fn checks(&self) -> TargetChecks {
        if self.stored.is_some() { TargetChecks::Stored } else { TargetChecks::Batches(self.batches.len()) }
    }

    /// Divides the chunks into batches. A batch has consecutive chunks of each of its tensors. The scratch memory has two slots, and
    /// batches use them in turn.
    fn in_batches<'a, B: Iterator<Item = &'a Binding>>(
        &mut self,
        index: &DeviceIndex,
        bindings: impl Fn() -> B,
        schedule: &Schedule,
        batch_bytes: u64,
    ) -> Result<()> {
        let mut batch_of = vec![None; schedule.span.len()];
        let mut slot_bytes = batch_bytes;
        for binding in bindings() {
            slot_bytes = slot_bytes.max(step_of(&index.tensor(binding.tensor)?.device));
        }
        let (mut used, mut last): (u64, Option<HashSlice>) = (0, None);
        let mut first = None;
        for binding in bindings() {
            let tensor = index.tensor(binding.tensor)?;
            let device = tensor.device;
            let (chunk_bytes, step) = (chunk_bytes(&device), step_of(&device));
            let range = self.plan.begin(tensor.bytes)?;
            let mut start = 0;
            loop {
                let left = tensor.bytes - start;
                let free = batch_bytes.saturating_sub(used) / step * step;
                if free == 0 && used > 0 && left > 0 {
                    self.close(first.take(), &mut last);
                    used = 0;
                    continue;
                }
                let part = left.min(free.max(step));
                let (first_tensor, first_entry) = *first.get_or_insert((binding.tensor, self.tensors.len()));
                self.tensors.resize(first_entry + binding.tensor - first_tensor + 1, DeviceTensor::default());
                self.rows.resize(self.tensors.len(), tensor_rows(None, None));
                let entry = self.tensors.len() - 1;
                let slot = self.batches.len() as u64 % 2 * slot_bytes;
                let origin = (slot + used).wrapping_sub(start);
                let codec = binding.codec(&device);
                self.tensors[entry] = DeviceTensor { base: binding.output.address(), output: origin, codec, ..device };
                self.rows[entry] = tensor_rows(binding.output_rows, None);
                self.plan.add_part(range, origin, None, start..start + part)?;
                let chunks = tensor.device.first_chunk..tensor.device.first_chunk + tensor.chunk_count;
                let of_part = chunks.skip((start / chunk_bytes) as usize).take(part.div_ceil(chunk_bytes) as usize);
                of_part.for_each(|chunk| batch_of[(chunk - schedule.span.start) as usize] = Some(self.batches.len()));
                used = (used + part).next_multiple_of(MEMORY_ALIGN);
                self.scratch_bytes = self.scratch_bytes.max(slot + used);
                start += part;
                if start == tensor.bytes {
                    break;
                }
            }
        }
        self.close(first, &mut last);
        // Within a batch, chunks keep the order of the schedule.
        let mut lists: BTreeMap<_, Vec<u32>> = BTreeMap::new();
        for run in schedule.slices.iter().flat_map(|slice| &slice.runs) {
            for &chunk in &schedule.order[run.order.clone()] {
                if let Some(batch) = batch_of[(chunk - schedule.span.start) as usize] {
                    lists.entry((batch, run.group, run.has)).or_default().push(chunk);
                }
            }
        }
        for ((batch, group, has), chunks) in lists {
            let order = self.order.len()..self.order.len() + chunks.len();
            self.batches[batch].runs.push(Run { group, order, has });
            self.order.extend(chunks);
        }
        Ok(())
    }

    /// Ends the current batch, if there is one. `first` has its first tensor and entry.
    fn close(&mut self, first: Option<(usize, usize)>, last: &mut Option<HashSlice>) {
        let Some((first_tensor, first_entry)) = first else { return };
        let hashes = self.plan.slice_after(last.as_ref());
        *last = Some(hashes.clone());
        self.batches.push(Batch { runs: Vec::new(), first_tensor, first_entry, hashes });
    }

    /// Returns the tensors of all batches, their rows, and the parts to be hashed, one after the other. `scratch` is the address of
    /// the scratch memory.
    pub fn table(&self, scratch: u64) -> Vec<u8> {
        let moved = |mut tensor: DeviceTensor| {
            tensor.output = tensor.output.wrapping_add(scratch);
            tensor
        };
        let tensors: Vec<_> = self.tensors.iter().copied().map(moved).collect();
        let by = if self.stored.is_some() { 0 } else { scratch };
        let moved = |part: &HashRange| HashRange { address: part.address.wrapping_add(by), ..*part };
        let parts: Vec<_> = self.plan.parts.iter().map(moved).collect();
        [tensors.as_bytes(), self.rows.as_bytes(), parts.as_bytes()].concat()
    }

    /// Returns the offsets of the rows and of the parts in the table, and its size.
    pub fn offsets(&self) -> [u64; 3] {
        let rows = size_of_val::<[DeviceTensor]>(&self.tensors) as u64;
        let parts = rows + size_of_val::<[TensorRows]>(&self.rows) as u64;
        [rows, parts, parts + self.plan.part_bytes()]
    }
}
