//! Copies payloads from the inputs of a merge to its result.

use super::input::Input;
use super::plan::{Entry, Plan, tensor};
use crate::batches::in_batches_of;
use crate::watch::Progress;
use std::borrow::Cow;
use std::io::Write;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use tpde_core::blob::{check_payload, stored_size};
use tpde_core::digest;
use tpde_core::error::Result;
use tpde_core::format::{ChunkMetadata, DIGEST_SIZE};
use tpde_core::source::{Source, slice};
use tpde_core::writer::PairBuilder;

/// Size in bytes up to which payloads are read and written together. Each thread reads a block at a time, so that the block is
/// still in a cache when it is written. Larger blocks are not faster.
const BLOCK: usize = 1 << 20;

/// Consecutive chunks of a tensor, to be copied together.
struct Job {
    /// Index of the tensor in [`Plan::entries`].
    entry: usize,
    /// Indexes of the chunks in the pair of the tensor.
    chunks: Range<u32>,
}

impl Job {
    fn chunks(&self) -> Range<usize> {
        self.chunks.start as usize..self.chunks.end as usize
    }
}

/// What is copied of a [`Job`].
struct JobPayloads<'a> {
    /// The payloads with padding, checked.
    stored: Cow<'a, [u8]>,
    digests: Vec<[u8; DIGEST_SIZE]>,
}

/// Copies all chunks of the plan to `builder`, in order. Checks each payload before it is copied.
///
/// Memory: the payloads of one batch, up to [`Buffers::MAX`] bytes of free buffers, and 16 bytes per chunk of inputs with a payload
/// root and no payload list.
///
/// # Errors
/// `Error::Invalid` with the input, for a damaged payload, or with rule `header.payload_root` for payloads that the pair digest of
/// the input does not cover; `Error::Io`; any error of `progress`.
pub(super) fn copy<B: Source, W: Write>(
    inputs: &[Input<'_, B>],
    plan: &Plan,
    builder: &mut PairBuilder<W>,
    progress: Progress<'_>,
) -> Result<()> {
    for input in inputs.iter().filter(|input| input.must_authenticate()) {
        input.pair.authenticate(progress).map_err(|e| e.in_pair(&input.label))?;
    }
    let mut copier = Copier { inputs, plan, builder, begun: 0, lists: inputs.iter().map(empty_list).collect() };
    let buffers = Buffers::default();
    let jobs = plan.entries.iter().enumerate().flat_map(|(entry, &source)| {
        let records = inputs[source.input as usize].index().records();
        blocks(records, tensor(inputs, source).chunks()).map(move |chunks| Job { entry, chunks })
    });
    let input = |job: &Job| &inputs[plan.entries[job.entry].input as usize];
    in_batches_of(
        (BLOCK * rayon::current_num_threads()) as u64,
        jobs,
        |job| input(job).index().records()[job.chunks()].iter().map(|record| stored_size(record) as u64).sum(),
        |job| {
            let copied = read(input(job), job, buffers.take())?;
            let records = &input(job).index().records()[job.chunks()];
            progress.done(records.iter().map(|record| u64::from(record.compressed_size.get())).sum())?;
            Ok(copied)
        },
        |job, JobPayloads { stored, digests }| {
            copier.add(&job, &stored, &digests)?;
            if let Cow::Owned(buffer) = stored {
                buffers.put(buffer);
            }
            Ok(())
        },
    )?;
    copier.finish()
}

/// Divides the chunks of a tensor into blocks of at most [`BLOCK`] bytes of payloads, or of one chunk.
fn blocks(records: &[ChunkMetadata], chunks: Range<u32>) -> impl Iterator<Item = Range<u32>> {
    let mut first = chunks.start;
    std::iter::from_fn(move || {
        let start = first;
        let mut size = 0;
        while first < chunks.end {
            size += stored_size(&records[first as usize]);
            if first > start && size > BLOCK {
                break;
            }
            first += 1;
        }
        (first > start).then_some(start..first)
    })
}

/// Free buffers for payloads. They are reused, because new memory of the size of a block costs more than copying the block.
#[derive(Default)]
struct Buffers(Mutex<(Vec<Vec<u8>>, usize)>);

impl Buffers {
    /// Maximum total size of the free buffers in bytes: more than a batch.
    const MAX: usize = 64 << 20;

    fn take(&self) -> Vec<u8> {
        let (free, size) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let buffer = free.pop().unwrap_or_default();
        *size -= buffer.capacity();
        buffer
    }

    fn put(&self, buffer: Vec<u8>) {
        let (free, size) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *size + buffer.capacity() <= Self::MAX {
            *size += buffer.capacity();
            free.push(buffer);
        }
    }
}

/// Returns a payload list to fill in, if the payloads of an input are not yet compared with its payload root. All of them are
/// copied then.
fn empty_list<B: Source>(input: &Input<'_, B>) -> Vec<[u8; DIGEST_SIZE]> {
    let is_formed = input.index().has_payload_root() && !input.pair.is_authentic();
    vec![[0; DIGEST_SIZE]; if is_formed { input.index().chunk_count() as usize } else { 0 }]
}

/// Reads and checks the payloads of a job.
fn read<'a, B: Source>(input: &Input<'a, B>, job: &Job, mut buffer: Vec<u8>) -> Result<JobPayloads<'a>> {
    let (pair, records) = (input.pair, &input.index().records()[job.chunks()]);
    let offset = records.first().map_or(0, |record| record.blob_offset.get());
    let size = records.iter().map(stored_size).sum();
    let stored = match pair.blob().in_memory() {
        Some(blob) => Cow::Borrowed(slice(blob, offset, size)?),
        None => {
            buffer.resize(size, 0);
            pair.blob().read(offset, &mut buffer)?;
            Cow::Owned(buffer)
        }
    };
    let mut rest = &stored[..];
    let mut digests = Vec::with_capacity(records.len());
    for (chunk, record) in job.chunks.clone().zip(records) {
        let payload;
        (payload, rest) = rest.split_at(stored_size(record));
        let known = pair.digest_of_payload(chunk);
        let payload = check_payload(payload, record, known, chunk).map_err(|e| pair.name_tensor(e).in_pair(&input.label))?;
        digests.push(known.copied().unwrap_or_else(|| digest::of_payload(payload)));
    }
    Ok(JobPayloads { stored, digests })
}

/// Passes tensors and chunks to the builder, in order.
struct Copier<'a, B, W> {
    inputs: &'a [Input<'a, B>],
    plan: &'a Plan,
    builder: &'a mut PairBuilder<W>,
    /// Number of tensors that have begun. All but the last have ended.
    begun: usize,
    /// Payload lists of inputs, by input. Empty if the list of an input is not compared.
    lists: Vec<Vec<[u8; DIGEST_SIZE]>>,
}

impl<B: Source, W: Write> Copier<'_, B, W> {
    fn add(&mut self, job: &Job, stored: &[u8], digests: &[[u8; DIGEST_SIZE]]) -> Result<()> {
        self.begin_until(job.entry + 1)?;
        let Entry { input, .. } = self.plan.entries[job.entry];
        if let Some(listed) = self.lists[input as usize].get_mut(job.chunks()) {
            listed.copy_from_slice(digests);
        }
        let index = self.inputs[input as usize].index();
        self.builder.copied_chunks(stored, &index.records()[job.chunks()], &index.sums()[job.chunks()], digests)
    }

    /// Begins tensors until `count` have begun. Ends the tensor before each.
    fn begin_until(&mut self, count: usize) -> Result<()> {
        while self.begun < count {
            self.end()?;
            self.builder.begin_tensor(&self.plan.spec(self.inputs, self.plan.entries[self.begun]));
            self.begun += 1;
        }
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        let Some(last) = self.begun.checked_sub(1) else { return Ok(()) };
        self.builder.end_copied_tensor(tensor(self.inputs, self.plan.entries[last]).digests)
    }

    /// Ends the last tensor, adds the remaining ones, which have no chunks, and compares the payload lists with the payload roots of
    /// their pairs.
    fn finish(mut self) -> Result<()> {
        self.begin_until(self.plan.entries.len())?;
        self.end()?;
        let mut formed = self.inputs.iter().zip(&self.lists).filter(|(_, list)| !list.is_empty());
        formed.try_for_each(|(input, list)| input.index().check_payload_list(list).map_err(|e| e.in_pair(&input.label)))
    }
}
