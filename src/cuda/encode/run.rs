//! Encodes all tensors, and assembles the pair in their order.

use super::blob::{Blob, PinnedBlob};
use super::chunks::{Chunk, Limits, Tables, Wave};
use super::digests::{Digest, Digests, Known};
use super::payloads::{self, Payloads, Sink};
use super::session::{Drained, Encoder, Memory, Session};
use super::source::Source;
use super::train;
use crate::checkpoint::Checkpoint;
use crate::codec::Codec;
use crate::cuda::abi::form;
use crate::cuda::checkpoint::DeviceCheckpoint;
use crate::cuda::runtime::stream::Stream;
use crate::digest;
use crate::encode::{CodecChoice, EncodeOptions, EncodeReport};
use crate::encode::{Plan, Selection, check_holdable, check_options, report};
use crate::error::{Error, Escaped, Result};
use crate::format::{ChunkMetadata, ChunkSums, DIGEST_SIZE, FormatVersion, PAYLOAD_ALIGN, TensorDigests};
use crate::watch::Progress;
use crate::writer::{FileSpec, Finished, PairBuilder};
use rayon::prelude::*;

/// What to encode, and how. See the methods of the builder.
pub(super) struct Job<'a> {
    pub target: &'a DeviceCheckpoint,
    pub base: Option<&'a DeviceCheckpoint>,
    pub options: &'a EncodeOptions,
    pub base_digests: &'a Known,
    pub target_digests: &'a Known,
    pub after: Option<&'a Stream>,
    pub encoder: Option<&'a Encoder>,
    pub limits: Limits,
    pub watcher: Progress<'a>,
}

/// The error for an option that the encoder on a device lacks.
fn unsupported(what: &str) -> Error {
    Error::InvalidArgument(format!("encoding on a device: {what}"))
}

/// Encodes into `builder`. `files` describes the files that readers rebuild, if all tensors are encoded.
pub(super) fn encode<W: Blob>(job: &Job<'_>, files: Vec<FileSpec>, builder: PairBuilder<W>) -> Result<(Finished<W>, EncodeReport)> {
    let (base, target, options) = (job.base, job.target, job.options);
    let base_checkpoint = base.map(|base| base as &dyn Checkpoint);
    check_options(base_checkpoint, target, options)?;
    check_supported(job)?;
    let selection = Selection::new(base_checkpoint, target, options)?;
    if let Some(name) = selection.first_derived() {
        let name = Escaped(name);
        return Err(unsupported(&format!("the base of tensor {name} has another dtype: encode on the processor")));
    }
    let mut plans = selection.plans(options)?;
    let files = if selection.is_complete() { files } else { Vec::new() };
    check_holdable(selection.base(), selection.target(), &plans, &files)?;
    let source = Source::new(base, target, &selection, &plans)?;

    let device = &target.device().inner;
    let cx = device.context.enter()?;
    let known = [job.base_digests, job.target_digests];
    let finished = {
        let memory = job.encoder.map_or_else(Memory::default, |encoder| encoder.take(device));
        let session = Session::new(target, &cx, job.after, memory)?;
        let _drained = Drained(&session);
        let digests = Digests::new(&session, job.limits.hashed, &source, &selection, &plans, known)?;
        train::train(&session, &source, options, &mut plans, job.watcher)?;
        let tables = Tables::upload(&session, &plans)?;
        let mut assembly =
            Assembly { job, selection: &selection, source: &source, plans: &plans, builder, begun: 0, added: 0, digests };
        let jobs: Vec<_> = plans.iter().enumerate().flat_map(|(i, plan)| chunks_of(i, plan)).collect();
        let lanes = wave_bytes(jobs.iter().map(|(_, plan, _)| plan.width() << plan.chunk_lanes_log2).sum(), job.limits);
        let mut rest = &jobs[..];
        while !rest.is_empty() {
            let (mut bytes, mut copied) = (0, 0);
            let count = rest.iter().take_while(|(_, plan, _)| {
                let is_first = bytes == 0;
                bytes += plan.width() << plan.chunk_lanes_log2;
                copied += source.copied_per_lane(plan) << plan.chunk_lanes_log2;
                is_first || (bytes <= lanes && copied <= job.limits.copies)
            });
            let (now, after) = rest.split_at(count.count());
            rest = after;
            let chunks: Vec<_> = now.iter().map(|&(_, plan, number)| (plan, number)).collect();
            let mut wave = Wave::new(&session, &source, &tables, &chunks)?;
            payloads::write(&session, &tables, job.limits, &mut wave, &mut WaveSink { assembly: &mut assembly, jobs: now })?;
        }
        if let Some(encoder) = job.encoder {
            encoder.give_back(device, session.take_memory()?);
        }
        assembly.finish(files)?
    };
    let bases = plans.iter().filter_map(|plan| plan.base).map(|i| selection.base_tensor(i as usize));
    let report = report(&finished, base_checkpoint, bases);
    Ok((finished, report))
}

/// Size of the lanes of a wave, for `total` bytes of lanes in all: waves have about the same size.
fn wave_bytes(total: u64, limits: Limits) -> u64 {
    total.div_ceil(total.div_ceil(limits.lanes.max(1)).max(1))
}

/// Takes the payloads of a wave with these jobs.
struct WaveSink<'s, 'a, W> {
    assembly: &'s mut Assembly<'a, W>,
    jobs: &'s [(usize, &'s Plan, u64)],
}

impl<W: Blob> Sink for WaveSink<'_, '_, W> {
    fn pinned(&mut self, bytes: u64, lanes: u64) -> Option<(&mut PinnedBlob, usize)> {
        let Assembly { plans, builder, added, .. } = &mut *self.assembly;
        let total: u64 = plans.iter().map(|plan| plan.lanes * plan.width()).sum();
        let blob = builder.blob().pinned()?;
        // The other payloads are expected to be as large in relation to their lanes, and an eighth more.
        let now = blob.written() as u64 + bytes;
        let expected = u128::from(now + now / 8) * u128::from(total) / u128::from((*added + lanes).max(1));
        Some((blob, expected as usize))
    }

    fn add(&mut self, wave: &Wave<'_>, payloads: Payloads) -> Result<()> {
        self.assembly.add(self.jobs, wave, &payloads)
    }
}

/// The chunks of a tensor.
fn chunks_of(i: usize, plan: &Plan) -> impl Iterator<Item = (usize, &Plan, u64)> {
    (0..plan.lanes.div_ceil(1 << plan.chunk_lanes_log2)).map(move |number| (i, plan, number))
}

/// Checks that a device can encode with these options.
pub(super) fn check_codec(options: &EncodeOptions) -> Result<()> {
    if matches!(options.codec, CodecChoice::Only(Codec::Conditioned | Codec::Raw)) {
        return Ok(());
    }
    Err(unsupported(&format!("expected codec conditioned or raw for all tensors, found {}", options.codec.name())))
}

fn check_supported(job: &Job<'_>) -> Result<()> {
    let options = job.options;
    check_codec(options)?;
    if options.format == FormatVersion::V1_1 && !(job.base_digests.is_empty() && job.target_digests.is_empty()) {
        return Err(unsupported(
            "format 1.1 with known digests; its roots need whole hashes: leave the digests out, or use format 1.2",
        ));
    }
    match job.base {
        Some(base) if !std::sync::Arc::ptr_eq(&base.device().inner, &job.target.device().inner) => {
            Err(Error::InvalidArgument("base and target are on two devices".into()))
        }
        _ => Ok(()),
    }
}

/// Passes tensors and chunks to the builder in order.
struct Assembly<'a, W> {
    job: &'a Job<'a>,
    selection: &'a Selection<'a>,
    source: &'a Source,
    plans: &'a [Plan],
    builder: PairBuilder<W>,
    /// Number of tensors that have begun. All but the last have ended.
    begun: usize,
    /// Size of the lanes of all chunks that were added.
    added: u64,
    digests: Digests<'a>,
}

impl<W: Blob> Assembly<'_, W> {
    /// Adds payloads. `jobs` are those of the wave: index of the plan, plan, number of the chunk.
    fn add(&mut self, jobs: &[(usize, &Plan, u64)], wave: &Wave<'_>, payloads: &Payloads) -> Result<()> {
        let chunks = &wave.chunks[payloads.chunks.clone()];
        let digests: Vec<_> = {
            let reserved = self.builder.blob().pinned().map_or(&[][..], |blob| blob.reserved());
            let stored = payloads.stored.as_deref().unwrap_or(reserved);
            let stored_of = |chunk: &Chunk<'_>| &stored[chunk.device.payload as usize..][..chunk.device.payload_size as usize];
            chunks.par_iter().map(|chunk| digest::of_payload(stored_of(chunk))).collect()
        };
        let mut first = 0;
        while first < chunks.len() {
            let tensor = jobs[payloads.chunks.start + first].0;
            let same = |i: &usize| jobs[payloads.chunks.start + i].0 == tensor;
            let end = first + (first..chunks.len()).take_while(same).count();
            self.begin_until(tensor + 1)?;
            let of_tensor = &chunks[first..end];
            let start = of_tensor.first().map_or(0, |chunk| chunk.device.payload);
            let stop = of_tensor.last().map_or(0, |chunk| chunk.device.payload + padded(chunk));
            let records: Vec<_> = of_tensor.iter().map(record).collect();
            let sums: Vec<_> = of_tensor.iter().map(sums).collect();
            match &payloads.stored {
                Some(stored) => {
                    self.builder.copied_chunks(&stored[start as usize..stop as usize], &records, &sums, &digests[first..end])?;
                }
                None => {
                    self.builder.placed_chunks(stop - start, &records, &sums, &digests[first..end])?;
                    if let Some(blob) = self.builder.blob().pinned() {
                        blob.commit((stop - start) as usize);
                    }
                }
            }
            let bytes = of_tensor.iter().map(Chunk::bytes).sum();
            self.added += bytes;
            self.job.watcher.done(bytes)?;
            first = end;
        }
        Ok(())
    }

    fn finish(mut self, files: Vec<FileSpec>) -> Result<Finished<W>> {
        self.begin_until(self.plans.len())?;
        self.end_tensor()?;
        files.into_iter().for_each(|file| self.builder.file(file));
        self.builder.finish()
    }

    fn begin_until(&mut self, count: usize) -> Result<()> {
        while self.begun < count {
            self.end_tensor()?;
            let plan = &self.plans[self.begun];
            let Some(&way) = plan.way.get() else { return Err(unsupported("a tensor without a codec")) };
            self.builder.begin_tensor(&plan.spec(way, true, self.selection.base(), self.selection.target()));
            self.begun += 1;
        }
        Ok(())
    }

    /// Ends the last tensor, if one has begun.
    fn end_tensor(&mut self) -> Result<()> {
        let Some(plan) = self.begun.checked_sub(1).map(|last| &self.plans[last]) else { return Ok(()) };
        match self.digests.of(self.source, plan)? {
            (None, Digest::Hashed(target)) => self.builder.end_tensor(None, target),
            (Some(Digest::Hashed(base)), Digest::Hashed(target)) => self.builder.end_tensor(Some(base), target),
            (base, target) => {
                let base_digest = base.map_or([0; DIGEST_SIZE], |base| base.short());
                let digests = TensorDigests { base_digest, target_digest: target.short() };
                self.builder.end_copied_tensor(&digests)?;
            }
        }
        Ok(())
    }
}

fn padded(chunk: &Chunk<'_>) -> u64 {
    u64::from(chunk.device.payload_size).next_multiple_of(PAYLOAD_ALIGN)
}

/// The record of a chunk. Its offset is that of its payload among those that are written together.
fn record(chunk: &Chunk<'_>) -> ChunkMetadata {
    let Chunk { device, state, plan, number, .. } = chunk;
    let uncompressed_size = match device.form {
        form::NONE => 0,
        form::RAW => device.payload_size,
        _ => chunk.bytes() as u32,
    };
    ChunkMetadata {
        blob_offset: device.payload.into(),
        compressed_size: device.payload_size.into(),
        uncompressed_size: uncompressed_size.into(),
        num_deltas: state.changed.into(),
        crc32: state.crc32.into(),
        output_offset: (number << plan.chunk_lanes_log2).into(),
    }
}

/// The sums of a chunk. Without a base, the base lanes are zeros, whose sum is 0.
fn sums(chunk: &Chunk<'_>) -> ChunkSums {
    ChunkSums { base_sum: chunk.state.base_sum.into(), target_sum: chunk.state.target_sum.into() }
}
