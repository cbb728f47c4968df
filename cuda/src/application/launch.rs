//! Queues the program of an application: copies of payloads, and launches of kernels.

use super::digests::Report;
use super::prepared::LaunchData;
use super::targets::Table;
use crate::abi::{self, FLAG_NO_CRC, Launch, mode};
use crate::plan::payloads::{Mode, Payloads};
use crate::plan::program::{Program, Work};
use crate::plan::schedule::{Group, Piece, Run, Slice, StagedPayload};
use crate::runtime::copies;
use crate::runtime::driver::{EnterGuard, RawStream};
use crate::runtime::kernels::{Decoder, Variant};
use crate::runtime::memory::PinnedBuffer;
use crate::runtime::pools::Mark;
use crate::runtime::staging::{SLOT_BYTES, fill_in_parallel};
use rayon::prelude::*;
use std::sync::PoisonError;
use tpde::InPlace;
use tpde::internals::checked_payload;
use tpde_core::codec::{Encoded, RawTranscoder};
use tpde_core::error::{Error, Result};
use tpde_core::source::Source;

/// A launch that is being queued.
pub(super) struct Launcher<'a> {
    pub prepared: &'a LaunchData,
    pub program: &'a Program,
    pub payloads: &'a Payloads<'a>,
    pub cx: &'a EnterGuard<'a>,
    pub stream: RawStream,
    /// Address of the staging memory. `None` if the payloads are on the device.
    pub staging: Option<u64>,
    /// Address of the status words that kernels write: of chunks, of payload digests, and of targets.
    pub statuses: u64,
    /// The status words on the host.
    pub words: &'a PinnedBuffer,
}

impl Launcher<'_> {
    /// Queues all operations. An error of the host, while it reads or expands payloads, ends this and is returned as `Some`.
    /// Operations that were queued before the error may have written to the outputs.
    pub fn run(&self) -> Result<Option<Error>> {
        let operations = &self.program.operations;
        let mut host_error = None;
        // The ends of operations for which others wait, with the number of those that do not wait yet.
        let mut ends: Vec<Option<(Mark<'_>, usize)>> = operations.iter().map(|_| None).collect();
        for (number, operation) in operations.iter().enumerate() {
            if host_error.is_some() && operation.work != Work::CopyFrameStatuses {
                continue;
            }
            let stream = self.prepared.streams.of(operation.queue).unwrap_or(self.stream);
            for &before in &operation.after {
                if let Some((end, left)) = &mut ends[before] {
                    end.hold(self.cx, stream)?;
                    *left -= 1;
                }
                // Its event may be used again.
                ends[before].take_if(|(_, left)| *left == 0);
            }
            if let Some(error) = self.perform(operation.work, stream)? {
                host_error = Some(error);
                self.gather()?;
            } else if operation.awaited > 0 {
                ends[number] = Some((self.mark(stream)?, operation.awaited));
            }
        }
        Ok(host_error)
    }

    /// Queues an operation on a stream. Returns an error of the host as `Some`.
    fn perform(&self, work: Work, stream: RawStream) -> Result<Option<Error>> {
        let prepared = self.prepared;
        let slices = &prepared.schedule.slices;
        let queued = match work {
            Work::Point => Ok(()),
            Work::Copy(n) => self.copy(&slices[n], stream),
            Work::Send(n) => return self.send(&slices[n], stream),
            Work::HashPayloads(n) => self.hash(n, stream),
            Work::ComparePayloadRoot => self.compare_list(stream),
            Work::ExpandFrames(n) => self.expand_frames(&slices[n], stream),
            Work::Decode(n) => self.launch(&slices[n], stream, self.first_mode()),
            Work::Commit(n) => self.launch(&slices[n], stream, mode::COMMIT),
            Work::Rebuild(n) => self.rebuild(n, stream),
            Work::CompareBatch(n) => self.compare_targets(Some(n), stream),
            Work::CompareStored => self.compare_targets(None, stream),
            Work::CopyStatuses => self.copy_statuses(0, prepared.statuses, prepared.own_status_words, stream),
            Work::CopyFrameStatuses => self.copy_frame_statuses(stream),
        };
        queued.map(|()| None)
    }

    /// Returns where digests with these status words are reported. A wrong one sets the flag: then nothing is stored in place.
    fn report(&self, statuses: u64) -> Report {
        let flag = if self.prepared.request.mode == Mode::InPlace(InPlace::AllChecked) { self.prepared.flag } else { 0 };
        Report { statuses, flag }
    }

    /// Queues the payload digests of slice `n`.
    fn hash(&self, n: usize, stream: RawStream) -> Result<()> {
        let Some(digests) = &self.prepared.digests else { return Ok(()) };
        // SAFETY: the records come from a validated index, and payloads are where the records say. All of it is held until the
        // stream has completed.
        unsafe { digests.hash(self.cx, stream, n, (self.prepared.records, self.blob()), self.report(self.digest_statuses())) }
    }

    /// Queues the comparison of the payload list with the payload root.
    fn compare_list(&self, stream: RawStream) -> Result<()> {
        let Some(digests) = &self.prepared.digests else { return Ok(()) };
        // If the list differs, all chunks of the span get its status, so this is the word of the first one.
        let statuses = self.statuses + 4 * self.prepared.schedule.span.len() as u64;
        digests.compare_list(self.cx, stream, self.report(statuses))
    }

    /// Queues the expansion of the frames of a slice by nvCOMP.
    fn expand_frames(&self, slice: &Slice, stream: RawStream) -> Result<()> {
        let run = slice.runs.iter().find(|run| run.group == Group::Frames);
        let (Some(frames), Some(run)) = (&self.prepared.frames, run) else { return Ok(()) };
        let LaunchData { records, table, .. } = *self.prepared;
        let order = table.order + 4 * run.order.start as u64;
        // SAFETY: records and tensors come from a validated index, payloads are where the records say, and the frames were
        // prepared for this run. All of it is held until the stream has completed.
        unsafe { frames.expand(self.cx, stream, [records, self.blob(), table.tensors, order, self.refused()]) }
    }

    /// Queues the decoding of a batch of targets to scratch memory. The chunks get the status words that the dry pass gives them.
    fn rebuild(&self, n: usize, stream: RawStream) -> Result<()> {
        let LaunchData { targets: Some(targets), target_plan: Some(plan), .. } = self.prepared else { return Ok(()) };
        let batch = &plan.batches[n];
        self.launch_runs(&batch.runs, targets.table_of(batch), stream, mode::OUT_OF_PLACE)
    }

    /// Queues the comparison of a batch of targets with their digests, or of all targets where they are stored.
    fn compare_targets(&self, batch: Option<usize>, stream: RawStream) -> Result<()> {
        let LaunchData { targets: Some(targets), target_plan: Some(plan), .. } = self.prepared else { return Ok(()) };
        let Some(hashes) = batch.map_or(plan.stored.as_ref(), |n| Some(&plan.batches[n].hashes)) else { return Ok(()) };
        // SAFETY: the memory of the application, and of its outputs, is held until the stream has completed. Launches with the
        // same nodes are on one stream.
        unsafe { targets.compare(self.cx, stream, hashes, self.report(self.target_statuses())) }
    }

    /// Returns the device address of offset 0 of the blob, for the kernels.
    fn blob(&self) -> u64 {
        self.payloads.on_device().unwrap_or_else(|| self.staging.unwrap_or(0).wrapping_add(self.prepared.schedule.shift))
    }

    /// Makes the caller's stream wait for all other streams with queued work. Called after an error.
    pub fn gather(&self) -> Result<()> {
        self.prepared.streams.all().try_for_each(|other| self.mark(other)?.hold(self.cx, self.stream))
    }

    /// Returns the address that the status word of chunk 0 would have.
    fn chunk_statuses(&self) -> u64 {
        self.statuses.wrapping_sub(4 * u64::from(self.prepared.schedule.span.start))
    }

    /// Returns the address that the digests' status word of chunk 0 would have.
    fn digest_statuses(&self) -> u64 {
        self.chunk_statuses().wrapping_add(4 * self.prepared.schedule.span.len() as u64)
    }

    /// Returns the address of the status word of the first target.
    fn target_statuses(&self) -> u64 {
        self.statuses + 4 * self.prepared.target_statuses() as u64
    }

    /// Returns the address of the digests' status words, for kernels that decode only compared payloads; otherwise 0.
    fn refused(&self) -> u64 {
        if self.prepared.digests.is_some() && self.program.compares_first { self.digest_statuses() } else { 0 }
    }

    fn first_mode(&self) -> u32 {
        match self.prepared.request.mode {
            Mode::OutOfPlace => mode::OUT_OF_PLACE,
            Mode::InPlace(InPlace::AllChecked) => mode::DRY,
            Mode::InPlace(_) => mode::IN_PLACE, // chunk by chunk
        }
    }

    /// Queues the copy of the status words of frames behind the others.
    fn copy_frame_statuses(&self, stream: RawStream) -> Result<()> {
        let Some(frames) = &self.prepared.frames else { return Ok(()) };
        let span = &self.prepared.schedule.span;
        let first = frames.statuses().wrapping_add(4 * u64::from(span.start));
        self.copy_statuses(self.prepared.own_status_words, first, span.len(), stream)
    }

    /// Queues the copy of status words to the host, where `at` words are before them.
    fn copy_statuses(&self, at: usize, from: u64, count: usize, stream: RawStream) -> Result<()> {
        // SAFETY: the words belong to the application. The pinned memory is long enough for all words, and nobody reads it before the
        // stream has completed. Both are held until then.
        unsafe { copies::copy_out(self.cx, self.words.as_ptr().add(4 * at), from, 4 * count, stream) }
    }

    fn launch(&self, slice: &Slice, stream: RawStream, mode: u32) -> Result<()> {
        self.launch_runs(&slice.runs, self.prepared.table, stream, mode)
    }

    fn launch_runs(&self, runs: &[Run], table: Table, stream: RawStream, mode: u32) -> Result<()> {
        let LaunchData { index, scratch, .. } = self.prepared;
        let device = &index.device().inner;
        for run in runs {
            let (records, blob) = match &self.prepared.frames {
                Some(frames) if run.group == Group::Frames => frames.payloads(),
                _ => (self.prepared.records, self.blob()),
            };
            let launch = Launch {
                chunks: records,
                sums: index.uploaded.sums,
                chunk_tensors: index.uploaded.chunk_tensors,
                tensors: table.tensors,
                tables: index.uploaded.tables,
                blob,
                statuses: self.chunk_statuses(),
                flag: self.prepared.flag,
                order: table.order,
                scratch: scratch.map_or(0, |s| s.address),
                first: run.order.start as u32,
                count: run.order.len() as u32,
                mode,
                flags: if matches!(run.group, Group::Expanded | Group::Frames) { FLAG_NO_CRC } else { 0 },
                scratch_slots: scratch.map_or(0, |s| s.slots),
                scratch_slot_bytes: scratch.map_or(0, |s| s.slot_bytes),
                digests: self.refused(),
                rows: table.rows,
                forms: table.forms,
            };
            let shared = match run.group.decoder() {
                Decoder::Conditioned => abi::CONDITIONED_SHARED + index.uploaded.table_bytes,
                Decoder::WithoutBase => abi::WITHOUT_BASE_SHARED + index.uploaded.table_bytes,
                Decoder::Raw => abi::RAW_SHARED,
            };
            for variant in Variant::ALL.into_iter().filter(|&variant| run.has[variant as usize]) {
                let kernel = device.kernels.decoder(&device.context, run.group.decoder(), variant)?.with_shared(shared);
                // SAFETY: records, sums, tensors, rows, forms and tables come from a validated index and are on the device. Memory
                // lengths were compared with them; payloads are where the records say. All of it is held until the stream has
                // completed.
                unsafe { kernel.launch(self.cx, stream, launch.count, &launch)? };
            }
        }
        Ok(())
    }

    /// Queues the copies of the payloads of a slice from pinned memory, but for those that the host expands.
    fn copy(&self, slice: &Slice, stream: RawStream) -> Result<()> {
        let (Some(staging), Payloads::Pinned(pinned)) = (self.staging, self.payloads) else { return Ok(()) };
        for piece in slice.pieces.iter().filter(|piece| !piece.is_expanded) {
            let Piece { blob, at, bytes, .. } = *piece;
            let from = pinned.get(blob as usize..).filter(|from| from.len() as u64 >= bytes);
            let from = from.ok_or_else(|| Error::InvalidArgument("a blob without the payloads of its index".into()))?;
            // SAFETY: the staging memory holds all payloads at the offsets of the schedule. It and the pinned memory are held
            // until the stream has completed. If the bytes change meanwhile, the kernels check them like any other payload.
            unsafe { copies::copy_in(self.cx, staging + at, from.as_ptr(), bytes as usize, stream)? };
        }
        Ok(())
    }

    /// Records an event behind the work queued on a stream.
    fn mark(&self, stream: RawStream) -> Result<Mark<'_>> {
        self.prepared.index.device().inner.pools.mark(self.cx, stream)
    }

    /// Queues the copies of the payloads of a slice through the ring: of all that the host reads, and of those that it expands.
    /// Returns an error of the host as `Some`.
    fn send(&self, slice: &Slice, stream: RawStream) -> Result<Option<Error>> {
        let Some(staging) = self.staging else { return Ok(None) };
        let pinned;
        let (source, sends_all): (&dyn Source, _) = match self.payloads {
            Payloads::Host(source) => (*source, true),
            Payloads::Kept(source) => (&**source, true),
            Payloads::Pinned(buffer) => {
                pinned = &buffer[..];
                (&pinned, false)
            }
            Payloads::Device(_) | Payloads::Parts(_) => return Ok(None),
        };
        let mut ring = self.prepared.index.device().inner.ring.lock().unwrap_or_else(PoisonError::into_inner);
        for piece in slice.pieces.iter().filter(|piece| sends_all || piece.is_expanded) {
            let sent = if piece.is_expanded {
                self.expand(piece, source).and_then(|payloads| {
                    // SAFETY: the staging memory holds all payloads at the offsets of the schedule, and is held.
                    unsafe { ring.send_bytes(self.cx, stream, staging + piece.at, &payloads) }
                })
            } else {
                (0..piece.bytes).step_by(SLOT_BYTES).try_for_each(|done| {
                    let bytes = (piece.bytes - done).min(SLOT_BYTES as u64) as usize;
                    let read = |offset: usize, out: &mut [u8]| source.read(piece.blob + done + offset as u64, out);
                    // SAFETY: the staging memory holds all payloads at the offsets of the schedule, and is held.
                    unsafe { ring.send(self.cx, stream, staging + piece.at + done, bytes, |slot| fill_in_parallel(slot, read)) }
                })
            };
            match sent {
                Ok(()) => {}
                Err(e @ Error::Device { .. }) => return Err(e),
                Err(e) => return Ok(Some(e)),
            }
        }
        Ok(None)
    }

    /// Expands the payloads of a piece to codec `raw`, with the padding and order of the staging memory.
    fn expand(&self, piece: &Piece, source: &dyn Source) -> Result<Vec<u8>> {
        let index = &self.prepared.index;
        let expand = |(transcoder, scratch): &mut (RawTranscoder, Vec<u8>), (staged, out): (&StagedPayload, &mut [u8])| {
            let record = &index.uploaded.records[staged.chunk as usize];
            let tensor = index.tensor(staged.tensor as usize)?;
            let at = |e: Error| e.in_chunk(staged.chunk).in_tensor(&tensor.name);
            let digest = self.prepared.digest_on_host(staged.chunk);
            let payload = checked_payload(source, record, digest, staged.chunk, scratch).map_err(at)?;
            let encoded = Encoded::from(record);
            let lanes = tensor.chunk_lanes(staged.chunk) as usize;
            let raw = transcoder.transcode(encoded, payload, lanes, 1 << tensor.device.lane_log2).map_err(at)?;
            out[..raw.len()].copy_from_slice(raw);
            Ok(())
        };
        let mut payloads = vec![0; piece.bytes as usize];
        let mut rest = &mut payloads[..];
        let mut parts = Vec::with_capacity(piece.staged.len());
        for staged in &self.prepared.schedule.staged[piece.staged.clone()] {
            let (out, behind) = rest.split_at_mut(staged.padded_len() as usize);
            parts.push((staged, out));
            rest = behind;
        }
        // Small pieces finish before other threads would have started.
        if piece.bytes < 64 << 10 {
            let mut worker = Default::default();
            parts.into_iter().try_for_each(|part| expand(&mut worker, part))?;
        } else {
            parts.into_par_iter().with_max_len(1).map_init(Default::default, expand).collect::<Result<()>>()?;
        }
        Ok(payloads)
    }
}
