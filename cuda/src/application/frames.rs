//! Payloads of codec `zstd` that nvCOMP expands: their memory, and the kernels before and after nvCOMP.

use crate::index::DeviceIndex;
use crate::nvcomp::{Batch, NvcompSupport};
use crate::plan::schedule::{Group, Schedule};
use crate::runtime::copies;
use crate::runtime::driver::{EnterGuard, RawStream};
use crate::runtime::inner::Inner;
use crate::runtime::kernels::FrameKernels;
use crate::runtime::layout::MemoryLayout;
use crate::runtime::memory::{Allocation, PinnedBuffer};
use std::sync::Arc;
use tpde_core::codec::raw_size;
use tpde_core::error::Result;
use tpde_core::format::{ChunkMetadata, PAYLOAD_ALIGN};
use zerocopy::IntoBytes;

/// A zstd frame with one byte of content. It replaces damaged frames.
const SUBSTITUTE: [u8; 10] = [0x28, 0xB5, 0x2F, 0xFD, 0x20, 1, 9, 0, 0, 0];

/// The parameter of both kernels: `Frames` of `kernels/zstd/frames.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct FrameParameter {
    stored: u64,
    expanded: u64,
    chunk_tensors: u64,
    tensors: u64,
    blob: u64,
    payloads: u64,
    order: u64,
    statuses: u64,
    frames: u64,
    frame_bytes: u64,
    contents: u64,
    content_bytes: u64,
    outcomes: u64,
    substitute: u64,
    substitute_bytes: u32,
    count: u32,
    digests: u64,
}

impl FrameParameter {
    /// Returns the arrays that nvCOMP reads and writes.
    fn batch(&self, capacities: u64, temporary: u64, temporary_bytes: usize) -> Batch {
        let FrameParameter { frames, frame_bytes, content_bytes, contents, outcomes, .. } = *self;
        let count = self.count as usize;
        Batch { frames, frame_bytes, capacities, content_bytes, contents, outcomes, count, temporary, temporary_bytes }
    }
}

/// Sizes and offsets of the contents of frames, and of the payloads that the device makes of them.
struct Contents {
    /// Records of the span of the schedule, for the expanded payloads.
    expanded: Vec<ChunkMetadata>,
    capacities: Vec<u64>,
    contents: Vec<u64>,
    content_end: u64,
    payload_end: u64,
    /// Size of the largest content.
    largest: u64,
}

impl Contents {
    fn new(index: &DeviceIndex, schedule: &Schedule, chunks: &[u32]) -> Result<Self> {
        let span = schedule.span.start as usize..schedule.span.end as usize;
        let mut of = Self {
            expanded: index.uploaded.records[span].to_vec(),
            capacities: Vec::with_capacity(chunks.len()),
            contents: Vec::with_capacity(chunks.len()),
            content_end: 0,
            payload_end: 0,
            largest: 0,
        };
        for chunk in chunks {
            let record = &mut of.expanded[(chunk - schedule.span.start) as usize];
            let size = u64::from(record.uncompressed_size.get());
            of.contents.push(of.content_end);
            of.capacities.push(size);
            of.content_end += size.next_multiple_of(PAYLOAD_ALIGN);
            of.largest = of.largest.max(size);
            // The index has checked that both sizes are within the lanes of the chunk.
            let bytes = raw_size(record.num_deltas.get(), 1 << index.chunk_tensor(*chunk)?.device.lane_log2);
            record.blob_offset = of.payload_end.into();
            record.compressed_size = (bytes as u32).into();
            of.payload_end += bytes.next_multiple_of(PAYLOAD_ALIGN);
        }
        Ok(of)
    }
}

/// The frames of an application.
#[derive(Debug)]
pub(super) struct Frames {
    trusted: NvcompSupport,
    parameter: FrameParameter,
    batch: Batch,
    _memory: Allocation,
}

impl Frames {
    /// Allocates memory for all frames of a schedule, and queues the copy of the kernels' arrays on the copy stream. Returns
    /// `None` if there are no frames.
    pub fn new(index: &DeviceIndex, schedule: &Schedule, device: &Arc<Inner>, cx: &EnterGuard<'_>) -> Result<Option<Self>> {
        let Some(trusted) = &index.trusted else { return Ok(None) };
        // One slice has all frames. Chunks without payloads come last.
        let run = schedule.slices.iter().flat_map(|slice| &slice.runs).find(|run| run.group == Group::Frames);
        let Some(run) = run else { return Ok(None) };
        let record = |chunk: &u32| &index.uploaded.records[*chunk as usize];
        let chunks: Vec<u32> =
            schedule.order[run.order.clone()].iter().copied().take_while(|chunk| record(chunk).num_deltas.get() > 0).collect();
        if chunks.is_empty() {
            return Ok(None);
        }

        let Contents { expanded, capacities, mut contents, content_end, payload_end, largest } =
            Contents::new(index, schedule, &chunks)?;
        let count = chunks.len();
        let temporary_bytes = trusted.nvcomp.temporary_bytes(cx, count, largest as usize, content_end as usize)?;
        let (status_bytes, array_bytes) = (4 * schedule.span.len() as u64, 8 * count as u64);
        let mut layout = MemoryLayout::default();
        let [at_expanded, at_capacities, at_contents, at_substitute] =
            layout.add_all([size_of_val(&expanded[..]) as u64, array_bytes, array_bytes, SUBSTITUTE.len() as u64]);
        let copied = layout.bytes();
        let [at_statuses, at_frames, at_frame_bytes, at_content_bytes, at_outcomes] =
            layout.add_all([status_bytes, array_bytes, array_bytes, array_bytes, array_bytes / 2]);
        let [at_content, at_payloads, at_temporary] = layout.add_all([content_end, payload_end, temporary_bytes as u64]);
        let memory = Allocation::new(device, cx, layout.bytes())?;
        let at = |offset: u64| memory.address() + offset;
        contents.iter_mut().for_each(|content| *content += at(at_content));

        let parts = [
            (at_expanded, expanded.as_bytes()),
            (at_capacities, capacities.as_bytes()),
            (at_contents, contents.as_bytes()),
            (at_substitute, &SUBSTITUTE),
        ];
        let pinned = PinnedBuffer::with_parts(device, cx, copied, &parts)?;
        let copy = device.copy.raw();
        let queueing = device.queueing(cx, copy);
        // SAFETY: all parts are within the memory just allocated. It and the pinned memory are held until the copy has completed,
        // also after an error.
        unsafe {
            copies::copy_in(cx, at(0), pinned.as_ptr(), copied as usize, copy)?;
            copies::fill(cx, at(at_statuses), 0, schedule.span.len(), copy)?;
        }
        queueing.end()?;

        // Kernels use chunk indexes of the whole pair, so these are the addresses that element 0 would have.
        let from_zero = |offset, bytes: usize| at(offset).wrapping_sub(schedule.span.start as u64 * bytes as u64);
        let parameter = FrameParameter {
            expanded: from_zero(at_expanded, size_of::<ChunkMetadata>()),
            chunk_tensors: index.uploaded.chunk_tensors,
            payloads: at(at_payloads),
            statuses: from_zero(at_statuses, 4),
            frames: at(at_frames),
            frame_bytes: at(at_frame_bytes),
            contents: at(at_contents),
            content_bytes: at(at_content_bytes),
            outcomes: at(at_outcomes),
            substitute: at(at_substitute),
            substitute_bytes: SUBSTITUTE.len() as u32,
            count: count as u32,
            ..FrameParameter::default()
        };
        let batch = parameter.batch(at(at_capacities), at(at_temporary), temporary_bytes);
        Ok(Some(Self { trusted: trusted.clone(), parameter, batch, _memory: memory }))
    }

    /// Returns the address of the records of the expanded payloads, and the address of blob offset 0 for these records.
    pub fn payloads(&self) -> (u64, u64) {
        (self.parameter.expanded, self.parameter.payloads)
    }

    /// Returns the address that the status word of chunk 0 would have.
    pub fn statuses(&self) -> u64 {
        self.parameter.statuses
    }

    /// Queues check, expansion and conversion to payloads. The addresses are those of the launch: records as stored, blob, tensor
    /// table, and order from the first frame on. `digests` is where the digest's status word of chunk 0 would be, or 0: payloads
    /// with a wrong digest are replaced.
    ///
    /// # Safety
    /// The addresses hold the data of the index, and remain valid until the stream has completed.
    pub unsafe fn expand(
        &self,
        cx: &EnterGuard<'_>,
        stream: RawStream,
        [stored, blob, tensors, order, digests]: [u64; 5],
    ) -> Result<()> {
        let parameter = FrameParameter { stored, blob, tensors, order, digests, ..self.parameter };
        let FrameKernels { check, expand } = self.trusted.kernels;
        // SAFETY: promised by the caller. The index has checked the sizes of contents and payloads, and their memory was
        // allocated. `trust` promised frames of a trusted writer, and `tpde_frames_check` replaces damaged frames.
        unsafe {
            check.launch(cx, stream, parameter.count, &parameter)?;
            self.trusted.nvcomp.expand(cx, &self.batch, stream)?;
            expand.launch(cx, stream, parameter.count, &parameter)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::mem::offset_of;

    const TEXT: &str = include_str!("../../kernels/zstd/frames.cuh");

    #[test]
    fn the_parameter_is_that_of_the_kernels() {
        macro_rules! ours {
            ($($field:ident),+ $(,)?) => { BTreeMap::from([$((stringify!($field), offset_of!(FrameParameter, $field))),+]) };
        }
        let ours = ours![
            stored,
            expanded,
            chunk_tensors,
            tensors,
            blob,
            payloads,
            order,
            statuses,
            frames,
            frame_bytes,
            contents,
            content_bytes,
            outcomes,
            substitute,
            substitute_bytes,
            count,
            digests,
        ];
        let theirs = TEXT.lines().filter_map(|line| {
            let (field, at) = line.strip_prefix("TPDE_OFFSET(Frames, ")?.strip_suffix(");")?.split_once(", ")?;
            Some((field, at.parse().unwrap()))
        });
        assert_eq!(ours, theirs.collect());
        assert!(TEXT.contains(&format!("TPDE_SIZE(Frames, {});", size_of::<FrameParameter>())));
        assert!(TEXT.contains(&format!("#define TPDE_FRAMES_THREADS {}\n", crate::abi::FRAMES_THREADS)));
    }

    #[test]
    fn layouts_and_status_words_are_those_of_the_kernels() {
        for layout in tpde::Layout::ALL {
            let name = layout.name().replace('-', "_").to_uppercase();
            assert!(TEXT.contains(&format!("#define TPDE_LAYOUT_{name} {}\n", layout.code())), "{name}");
        }
        for (code, rule) in crate::abi::FRAME_RULES {
            let name = rule.id().replace('.', "_").to_uppercase();
            assert!(TEXT.contains(&format!("TPDE_STATUS_{name} = {code},\n")), "{name}");
        }
    }

    #[test]
    fn the_substitute_is_a_frame() {
        assert_eq!(tpde_core::codec::zstd::Expander::default().expand_to_vec(&SUBSTITUTE, 1, 27), Ok(vec![0]));
    }
}
