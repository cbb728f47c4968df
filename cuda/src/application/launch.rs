//! Queues an application: copies of payloads, and launches of kernels.

use super::digests::{DeviceDigests, Report};
use super::prepared::LaunchData;
use super::targets::Table;
use crate::abi::{self, FLAG_NO_CRC, Launch, mode};
use crate::plan::payloads::{Mode, Payloads};
use crate::plan::schedule::{Group, Run, Slice, StagedPayload};
use crate::runtime::copies;
use crate::runtime::driver::{EnterGuard, OwnStream, RawStream};
use crate::runtime::kernels::{Decoder, Variant};
use crate::runtime::memory::PinnedBuffer;
use crate::runtime::pools::Mark;
use crate::runtime::staging::{SLOT_BYTES, fill_in_parallel};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::PoisonError;
use tpde::InPlace;
use tpde::internals::checked_payload;
use tpde_core::codec::{Encoded, RawTranscoder};
use tpde_core::error::{Error, Result};
use tpde_core::source::Source;

/// A launch that is being queued.
pub(super) struct Launcher<'a> {
    pub prepared: &'a LaunchData,
    pub cx: &'a EnterGuard<'a>,
    pub stream: RawStream,
    /// Address of the staging memory. `None` if the payloads are on the device.
    pub staging: Option<u64>,
    /// Whether all work is on one stream.
    pub in_order: bool,
    /// Whether changes are stored after all checks.
    pub commits: bool,
    /// Address of the status words that kernels write: of chunks, of payload digests, and of targets.
    pub statuses: u64,
}

impl Launcher<'_> {
    /// Queues all work. An error of the host, while it reads or expands payloads, stops the queueing and is returned as `Some`.
    /// Work that was queued before the error may have written to the outputs.
    pub fn run(&self, payloads: &Payloads<'_>, words: &PinnedBuffer) -> Result<Option<Error>> {
        let blob = self.blob(payloads);
        let mut host_error = None;
        self.fork()?;
        let queued = self.run_slices(payloads, blob, &mut host_error).and_then(|()| match (self.beside(), &host_error) {
            // While the dry pass runs: a batch has too few chunks to fill a device.
            (Some(beside), None) => self.compare_batches(blob, beside),
            _ => Ok(()),
        });
        // Also after an error, the stream must wait for the side streams.
        self.join()?;
        queued?;
        if host_error.is_none() {
            if self.beside().is_none() {
                self.compare_batches(blob, self.stream)?;
            }
            self.compare_stored()?;
        }
        if host_error.is_none() && self.commits && self.prepared.mode == Mode::InPlace(InPlace::AllChecked) {
            self.fork()?;
            let queued = self.commit(blob);
            self.join()?;
            queued?;
        }
        self.copy_frame_statuses(words)?;
        Ok(host_error)
    }

    fn run_slices(&self, payloads: &Payloads<'_>, blob: u64, host_error: &mut Option<Error>) -> Result<()> {
        let slices = &self.prepared.schedule.slices;
        let hashes_all_first = self.compares_first() && self.prepared.digests.as_ref().is_some_and(DeviceDigests::needs_all);
        for (n, slice) in slices.iter().enumerate() {
            let side = self.side(n);
            let from = match payloads {
                Payloads::Device(_) | Payloads::Parts(_) => None,
                Payloads::Pinned(pinned) => self.copy(slice, pinned, host_error)?,
                Payloads::Host(source) => self.send(self.pieces(slice), *source, host_error)?,
                Payloads::Kept(source) => self.send(self.pieces(slice), &**source, host_error)?,
            };
            let copied = from.filter(|from| *from != side).map(|from| self.mark(from)).transpose()?;
            if let Some(copied) = &copied {
                copied.hold(self.cx, side)?;
            }
            if host_error.is_some() {
                return Ok(());
            }
            if self.compares_first() {
                self.hash(n, side, blob)?;
            }
            // Hashing waits for the payloads, not for their decoding. It also waits for the stream: through `fork`, or here if there
            // is one slice, whose side is the stream.
            let copied = copied.filter(|_| self.forks());
            let beside = match self.beside() {
                Some(beside) => Some((beside, copied.map_or_else(|| self.mark(side), Ok)?)),
                None => None,
            };
            let hash_beside = || match &beside {
                Some((beside, copied)) => copied.hold(self.cx, *beside).and_then(|()| self.hash(n, *beside, blob)),
                None => Ok(()),
            };
            // Codec `raw` is decoded faster than its payloads are hashed. If decoding were queued first, its blocks would fill most
            // multiprocessors, and all warps that hash would share the others. Other codecs decode longer, so they are queued first.
            let hashes_first = slice.runs.iter().all(|run| run.group.decoder() == Decoder::Raw);
            if hashes_first {
                hash_beside()?;
            }
            if !hashes_all_first {
                self.expand_frames(slice, side, blob)?;
                self.launch(slice, side, blob, self.first_mode())?;
            }
            if !hashes_first {
                hash_beside()?;
            }
        }
        if hashes_all_first {
            self.join()?;
            self.compare_list()?;
            self.fork()?;
            for (n, slice) in slices.iter().enumerate() {
                self.expand_frames(slice, self.side(n), blob)?;
                self.launch(slice, self.side(n), blob, self.first_mode())?;
            }
            return Ok(());
        }
        self.compare_list()
    }

    /// Returns whether a payload is decoded only after the comparison of its digest.
    fn compares_first(&self) -> bool {
        self.in_order || self.beside().is_none()
    }

    /// Returns the stream for payload digests that are compared while payloads are decoded.
    fn beside(&self) -> Option<RawStream> {
        self.prepared.digests.as_ref()?.beside.as_ref().map(OwnStream::raw).filter(|_| !self.in_order)
    }

    /// Returns the stream that hashes batches of targets while others are rebuilt.
    fn hashing(&self) -> Option<RawStream> {
        self.prepared.targets.as_ref()?.beside.as_ref().map(OwnStream::raw).filter(|_| !self.in_order)
    }

    /// Returns where digests with these status words are reported. A wrong one sets the flag: then nothing is stored in place.
    fn report(&self, statuses: u64) -> Report {
        let flag = if self.prepared.mode == Mode::InPlace(InPlace::AllChecked) { self.prepared.flag } else { 0 };
        Report { statuses, flag }
    }

    /// Queues the payload digests of slice `n`, whose payloads are in the order of the stream.
    fn hash(&self, n: usize, stream: RawStream, blob: u64) -> Result<()> {
        let Some(digests) = &self.prepared.digests else { return Ok(()) };
        // SAFETY: the records come from a validated index, and payloads are where the records say. All of it is held until the
        // stream has completed.
        unsafe { digests.hash(self.cx, stream, n, (self.prepared.records, blob), self.report(self.digest_statuses())) }
    }

    /// Queues the comparison of the payload list with the payload root, if the index has only the root.
    fn compare_list(&self) -> Result<()> {
        let Some(digests) = &self.prepared.digests else { return Ok(()) };
        // If the list differs, all chunks of the span get its status, so this is the word of the first one.
        let statuses = self.statuses + 4 * self.prepared.schedule.span.len() as u64;
        digests.compare_list(self.cx, self.beside().unwrap_or(self.stream), self.report(statuses))
    }

    /// Queues the expansion of the frames of a slice by nvCOMP.
    fn expand_frames(&self, slice: &Slice, stream: RawStream, blob: u64) -> Result<()> {
        let run = slice.runs.iter().find(|run| run.group == Group::Frames);
        let (Some(frames), Some(run)) = (&self.prepared.frames, run) else { return Ok(()) };
        let LaunchData { records, tensors, order, .. } = *self.prepared;
        let order = order + 4 * run.order.start as u64;
        // SAFETY: records and tensors come from a validated index, payloads are where the records say, and the frames were
        // prepared for this run. All of it is held until the stream has completed.
        unsafe { frames.expand(self.cx, stream, [records, blob, tensors, order, self.refused()]) }
    }

    /// Queues the comparison of the targets with their digests if everything is checked before it is stored: batch by batch, in
    /// scratch memory. One batch is rebuilt while another one is hashed. All payloads are in the order of the stream. The chunks
    /// get the status words that the dry pass gives them.
    fn compare_batches(&self, blob: u64, stream: RawStream) -> Result<()> {
        let LaunchData { targets: Some(targets), target_plan: Some(plan), .. } = self.prepared else { return Ok(()) };
        let hashing = self.hashing();
        // The ends of the hashes of both slots of the scratch memory.
        let mut hashed: [Option<Mark<'_>>; 2] = [None, None];
        for (n, batch) in plan.batches.iter().enumerate() {
            if let Some(hashed) = hashed[n % 2].take() {
                hashed.hold(self.cx, stream)?;
            }
            self.launch_runs(&batch.runs, targets.table_of(batch), stream, blob, mode::OUT_OF_PLACE)?;
            if let Some(hashing) = hashing {
                self.after(stream, hashing)?;
            }
            // SAFETY: the memory of the application, and of its outputs, is held until the stream has completed. Launches with the
            // same nodes are on one stream.
            unsafe { targets.compare(self.cx, hashing.unwrap_or(stream), &batch.hashes, self.report(self.target_statuses()))? };
            hashed[n % 2] = hashing.map(|hashing| self.mark(hashing)).transpose()?;
        }
        hashing.map_or(Ok(()), |hashing| self.after(hashing, stream))
    }

    /// Queues the comparison of the targets with their digests where they are stored.
    fn compare_stored(&self) -> Result<()> {
        let LaunchData { targets: Some(targets), target_plan: Some(plan), .. } = self.prepared else { return Ok(()) };
        let Some(stored) = &plan.stored else { return Ok(()) };
        // SAFETY: the memory of the application, and of its outputs, is held until the stream has completed.
        unsafe { targets.compare(self.cx, self.stream, stored, Report { statuses: self.target_statuses(), flag: 0 }) }
    }

    /// Queues the pass that stores the changes. A dry pass over all chunks has been queued before.
    fn commit(&self, blob: u64) -> Result<()> {
        let mut slices = self.prepared.schedule.slices.iter().enumerate();
        slices.try_for_each(|(n, slice)| self.launch(slice, self.side(n), blob, mode::COMMIT))
    }

    /// Returns the device address of offset 0 of the blob, for the kernels.
    fn blob(&self, payloads: &Payloads<'_>) -> u64 {
        payloads.on_device().unwrap_or_else(|| self.staging.unwrap_or(0).wrapping_add(self.prepared.schedule.shift))
    }

    /// Returns the stream that decodes slice `n`.
    fn side(&self, n: usize) -> RawStream {
        let sides = &self.prepared.sides;
        if sides.is_empty() { self.stream } else { sides[n % sides.len()].raw() }
    }

    /// Returns whether other streams begin with [`Launcher::fork`]. A single slice has no side stream, and `run_slices` makes the
    /// stream of payload digests wait. Without slices, nothing else makes it wait.
    fn forks(&self) -> bool {
        self.prepared.schedule.slices.len() != 1
    }

    /// Makes the side streams, and the stream of payload digests, wait for the stream, if it [`forks`](Launcher::forks).
    fn fork(&self) -> Result<()> {
        let mut sides = self.prepared.sides.iter().map(OwnStream::raw).chain(self.beside()).peekable();
        if !self.forks() || sides.peek().is_none() {
            return Ok(());
        }
        let mark = self.mark(self.stream)?;
        sides.try_for_each(|side| mark.hold(self.cx, side))
    }

    /// Makes the stream wait for the side streams, and for payload digests.
    fn join(&self) -> Result<()> {
        self.prepared.sides.iter().try_for_each(|side| self.after(side.raw(), self.stream))?;
        self.beside().map_or(Ok(()), |beside| self.after(beside, self.stream))
    }

    /// Makes the stream wait for all other streams with queued work. Called after an error.
    pub fn gather(&self) -> Result<()> {
        self.after(self.prepared.index.device().inner.copy.raw(), self.stream)?;
        self.hashing().map_or(Ok(()), |hashing| self.after(hashing, self.stream))?;
        self.join()
    }

    /// Queues all work on one stream, for graphs, and the copy of the status words to `words`. Otherwise as [`Launcher::run`].
    pub fn run_in_order(&self, payloads: &Payloads<'_>, words: &PinnedBuffer) -> Result<()> {
        let blob = self.blob(payloads);
        for (n, slice) in self.prepared.schedule.slices.iter().enumerate() {
            if let Payloads::Pinned(pinned) = payloads {
                self.copy_on(self.pieces(slice), pinned, self.stream)?;
            }
            self.hash(n, self.stream, blob)?;
        }
        self.compare_list()?;
        for slice in &self.prepared.schedule.slices {
            self.launch(slice, self.stream, blob, self.first_mode())?;
        }
        self.compare_batches(blob, self.stream)?;
        self.compare_stored()?;
        if self.prepared.mode == Mode::InPlace(InPlace::AllChecked) {
            let mut slices = self.prepared.schedule.slices.iter();
            slices.try_for_each(|slice| self.launch(slice, self.stream, blob, mode::COMMIT))?;
        }
        // SAFETY: the status words belong to the application. The pinned memory is long enough, and nobody reads it before the
        // graph has run. Both are held until then.
        unsafe { copies::copy_out(self.cx, words.as_ptr(), self.statuses, 4 * self.prepared.own_status_words, self.stream) }
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
        if self.prepared.digests.is_some() && self.compares_first() { self.digest_statuses() } else { 0 }
    }

    fn first_mode(&self) -> u32 {
        match self.prepared.mode {
            Mode::OutOfPlace => mode::OUT_OF_PLACE,
            Mode::InPlace(InPlace::AllChecked) => mode::DRY,
            Mode::InPlace(_) => mode::IN_PLACE, // chunk by chunk
        }
    }

    /// Queues the copy of the status words of frames behind the others.
    fn copy_frame_statuses(&self, words: &PinnedBuffer) -> Result<()> {
        let Some(frames) = &self.prepared.frames else { return Ok(()) };
        let own = 4 * self.prepared.own_status_words;
        let first = frames.statuses().wrapping_add(4 * u64::from(self.prepared.schedule.span.start));
        // SAFETY: the words belong to the frames of the application. The pinned memory is long enough for all words, and nobody reads
        // it before the event that follows. Both are held until then.
        unsafe { copies::copy_out(self.cx, words.as_ptr().add(own), first, 4 * self.prepared.schedule.span.len(), self.stream) }
    }

    fn launch(&self, slice: &Slice, stream: RawStream, blob: u64, mode: u32) -> Result<()> {
        let LaunchData { tensors, rows, forms, order, .. } = *self.prepared;
        self.launch_runs(&slice.runs, Table { tensors, rows, forms, order }, stream, blob, mode)
    }

    fn launch_runs(&self, runs: &[Run], table: Table, stream: RawStream, blob: u64, mode: u32) -> Result<()> {
        let LaunchData { index, scratch, .. } = self.prepared;
        let device = &index.device().inner;
        for run in runs {
            let (records, blob) = match &self.prepared.frames {
                Some(frames) if run.group == Group::Frames => frames.payloads(),
                _ => (self.prepared.records, blob),
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

    /// Queues the copies of the payloads of a slice from pinned memory. Payloads that the host expands go through the ring. Returns
    /// the stream of the copies, if there are any: the stream itself for a single slice without such payloads, else the copy stream.
    fn copy(&self, slice: &Slice, pinned: &PinnedBuffer, host_error: &mut Option<Error>) -> Result<Option<RawStream>> {
        let (expanded, stored): (Vec<_>, Vec<_>) = self.pieces(slice).into_iter().partition(|piece| piece.is_expanded);
        let is_alone = !self.forks() && expanded.is_empty();
        let copy = if is_alone { self.stream } else { self.prepared.index.device().inner.copy.raw() };
        self.copy_on(stored, pinned, copy)?;
        if expanded.is_empty() { Ok(self.staging.map(|_| copy)) } else { self.send(expanded, &&pinned[..], host_error) }
    }

    fn copy_on(&self, pieces: Vec<Piece>, pinned: &PinnedBuffer, stream: RawStream) -> Result<()> {
        let Some(staging) = self.staging else { return Ok(()) };
        for piece in pieces {
            let Piece { blob, at, bytes, .. } = piece;
            let from = pinned.get(blob as usize..).filter(|from| from.len() as u64 >= bytes);
            let from = from.ok_or_else(|| Error::InvalidArgument("a blob without the payloads of its index".into()))?;
            // SAFETY: the staging memory holds all payloads at the offsets of the schedule. It and the pinned memory are held
            // until the stream has completed. If the bytes change meanwhile, the kernels check them like any other payload.
            unsafe { copies::copy_in(self.cx, staging + at, from.as_ptr(), bytes as usize, stream)? };
        }
        Ok(())
    }

    /// Makes `stream` wait for the work queued on `other`.
    pub fn after(&self, other: RawStream, stream: RawStream) -> Result<()> {
        self.mark(other)?.hold(self.cx, stream)
    }

    /// Records an event behind the work queued on a stream.
    fn mark(&self, stream: RawStream) -> Result<Mark<'_>> {
        self.prepared.index.device().inner.pools.mark(self.cx, stream)
    }

    /// Queues the copies of payloads through the ring. Returns the stream of the copies, if there are any.
    fn send(&self, pieces: Vec<Piece>, source: &dyn Source, host_error: &mut Option<Error>) -> Result<Option<RawStream>> {
        let Some(staging) = self.staging else { return Ok(None) };
        let device = &self.prepared.index.device().inner;
        let copy = device.copy.raw();
        let mut ring = device.ring.lock().unwrap_or_else(PoisonError::into_inner);
        for piece in pieces {
            let sent = if piece.is_expanded {
                self.expand(&piece, source).and_then(|payloads| {
                    // SAFETY: the staging memory holds all payloads at the offsets of the schedule, and is held.
                    unsafe { ring.send_bytes(self.cx, copy, staging + piece.at, &payloads) }
                })
            } else {
                (0..piece.bytes).step_by(SLOT_BYTES).try_for_each(|done| {
                    let bytes = (piece.bytes - done).min(SLOT_BYTES as u64) as usize;
                    let read = |offset: usize, out: &mut [u8]| source.read(piece.blob + done + offset as u64, out);
                    // SAFETY: the staging memory holds all payloads at the offsets of the schedule, and is held.
                    unsafe { ring.send(self.cx, copy, staging + piece.at + done, bytes, |slot| fill_in_parallel(slot, read)) }
                })
            };
            match sent {
                Ok(()) => {}
                Err(e @ Error::Device { .. }) => return Err(e),
                Err(e) => {
                    *host_error = Some(e);
                    break;
                }
            }
        }
        Ok(Some(copy))
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

    /// Groups the payloads of a slice into pieces that are contiguous both in the blob and in staging memory. A piece of expanded
    /// payloads has about four slots at most, which bounds host memory.
    fn pieces(&self, slice: &Slice) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        for i in slice.chunks.clone() {
            let staged = &self.prepared.schedule.staged[i];
            let is_expanded = staged.group == Group::Expanded;
            let blob = self.prepared.index.uploaded.records[staged.chunk as usize].blob_offset.get();
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

/// Payloads that one copy takes to the staging memory.
struct Piece {
    blob: u64,
    at: u64,
    bytes: u64,
    staged: Range<usize>,
    is_expanded: bool,
}
