//! Copies payloads from the inputs of a merge to its result.

use super::input::Input;
use super::plan::{Entry, Plan, tensor};
use crate::batches::{Pool, in_batches};
use crate::codec::Encoded;
use crate::digest;
use crate::error::Result;
use crate::format::DIGEST_SIZE;
use crate::source::Source;
use crate::watch::Progress;
use crate::writer::PairBuilder;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

/// A chunk to copy.
#[derive(Clone, Copy)]
struct Job {
    /// Index of its tensor in [`Plan::entries`].
    entry: usize,
    /// Index of the chunk in its pair.
    chunk: u32,
}

/// Copies all chunks of the plan to `builder`, in order. Checks each payload before it is copied.
///
/// Memory: the payloads of one batch, and 16 bytes per chunk of inputs with a payload root and no payload list.
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
    let (scratch, payloads) = (Pool::new(Vec::new), Buffers::default());
    let jobs = plan
        .entries
        .iter()
        .enumerate()
        .flat_map(|(entry, &source)| tensor(inputs, source).chunks().map(move |chunk| Job { entry, chunk }));
    in_batches(
        jobs,
        |job| payload_size(inputs, plan, job),
        |job| {
            let mut payload = payloads.take();
            let entry = plan.entries[job.entry];
            let read = scratch.with(|scratch| read(inputs, entry, job.chunk, scratch, &mut payload));
            progress.done(payload_size(inputs, plan, job))?;
            read.map(|digest| (payload, digest))
        },
        |job, (payload, digest)| {
            copier.add(job, &payload, digest)?;
            payloads.put(payload);
            Ok(())
        },
    )?;
    copier.begin_until(plan.entries.len())?;
    copier.check_lists()
}

/// Buffers for payloads. They are reused, because new memory of the size of a large payload costs more than copying the payload.
#[derive(Default)]
struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    /// Maximum number of kept buffers, which bounds their memory. A batch of large payloads has no more.
    const MAX: usize = 16;

    fn take(&self) -> Vec<u8> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    fn put(&self, buffer: Vec<u8>) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < Self::MAX {
            kept.push(buffer);
        }
    }
}

/// Returns the size of the payload of a chunk, in bytes.
fn payload_size<B: Source>(inputs: &[Input<'_, B>], plan: &Plan, job: &Job) -> u64 {
    let input = &inputs[plan.entries[job.entry].input as usize];
    input.index().records()[job.chunk as usize].compressed_size.get().into()
}

/// Returns a payload list to fill in, if the payloads of an input are not yet compared with its payload root. All of them are
/// copied then.
fn empty_list<B: Source>(input: &Input<'_, B>) -> Vec<[u8; DIGEST_SIZE]> {
    let is_formed = input.index().has_payload_root() && !input.pair.is_authentic();
    vec![[0; DIGEST_SIZE]; if is_formed { input.index().chunk_count() as usize } else { 0 }]
}

/// Reads and checks a payload, and copies it to `copy`. Returns its digest.
fn read<B: Source>(
    inputs: &[Input<'_, B>],
    entry: Entry,
    chunk: u32,
    scratch: &mut Vec<u8>,
    copy: &mut Vec<u8>,
) -> Result<[u8; DIGEST_SIZE]> {
    let Input { pair, label, .. } = &inputs[entry.input as usize];
    let payload = pair.payload(chunk, scratch).map_err(|e| pair.name_tensor(e).in_pair(label))?;
    // If the digest is known, `payload` has compared it.
    let digest = pair.digest_of_payload(chunk).copied().unwrap_or_else(|| digest::of_payload(payload));
    copy.clear();
    copy.extend_from_slice(payload);
    Ok(digest)
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
    fn add(&mut self, job: Job, payload: &[u8], digest: [u8; DIGEST_SIZE]) -> Result<()> {
        self.begin(job.entry + 1)?;
        let Entry { input, .. } = self.plan.entries[job.entry];
        if let Some(listed) = self.lists[input as usize].get_mut(job.chunk as usize) {
            *listed = digest;
        }
        let chunk = self.inputs[input as usize].index().chunk(job.chunk);
        let encoded = Encoded { uncompressed_size: chunk.uncompressed_size, num_deltas: chunk.num_deltas };
        self.builder.hashed_chunk(payload, digest, encoded, chunk.base_sum, chunk.target_sum)
    }

    /// Begins tensors until `count` have begun. Ends the tensor before each.
    fn begin(&mut self, count: usize) -> Result<()> {
        while self.begun < count {
            self.end()?;
            self.builder.begin_tensor(&self.plan.spec(self.inputs, self.plan.entries[self.begun]));
            self.begun += 1;
        }
        Ok(())
    }

    /// Begins and ends all remaining tensors, which have no chunks.
    fn begin_until(&mut self, count: usize) -> Result<()> {
        self.begin(count)?;
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let Some(last) = self.begun.checked_sub(1) else { return Ok(()) };
        self.builder.end_copied_tensor(tensor(self.inputs, self.plan.entries[last]).digests)
    }

    /// Compares the payload lists with the payload roots of their pairs.
    fn check_lists(&self) -> Result<()> {
        let mut formed = self.inputs.iter().zip(&self.lists).filter(|(_, list)| !list.is_empty());
        formed.try_for_each(|(input, list)| input.index().check_payload_list(list).map_err(|e| e.in_pair(&input.label)))
    }
}
