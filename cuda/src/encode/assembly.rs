//! Assembles a pair from the payloads of its chunks, in the order of the tensors.

use super::blob::Blob;
use super::digests::{Digest, Digests};
use super::job::{Job, unsupported};
use super::payloads::{EncodedChunk, Payloads};
use super::session::Session;
use super::source::Source;
use crate::runtime::memory::{DeviceSlice, PinnedBuffer};
use tpde::internals::{Plan, Selection};
use tpde_core::error::Result;
use tpde_core::format::{DIGEST_SIZE, TensorDigests};
use tpde_core::writer::{FileSpec, Finished, PairBuilder};

/// Passes tensors and chunks to the builder in order.
pub(super) struct Assembly<'a, W> {
    pub job: &'a Job<'a>,
    pub selection: &'a Selection<'a>,
    pub source: &'a Source,
    pub plans: &'a [Plan],
    pub builder: PairBuilder<W>,
    /// Number of tensors that have begun.
    pub begun: usize,
    /// Number of tensors whose digests were added.
    pub ended: usize,
    /// Size of the lanes of all chunks that were added.
    pub added: u64,
    /// Expected size of the blob in bytes; 0 if unknown.
    pub expected: usize,
    pub digests: Digests<'a>,
}

impl<W: Blob> Assembly<'_, W> {
    /// Copies payloads from the device, and adds them.
    pub fn add(&mut self, session: &Session<'_>, payloads: &Payloads) -> Result<()> {
        let chunks = &payloads.chunks;
        let lanes = chunks.iter().map(|chunk| chunk.bytes).sum();
        let stored = match &payloads.memory {
            Some(memory) => self.copy(session, memory, lanes)?,
            None => None,
        };
        let mut rest = &chunks[..];
        let mut start = 0;
        while let Some(&EncodedChunk { tensor, .. }) = rest.first() {
            let (of_tensor, after) = rest.split_at(rest.iter().take_while(|chunk| chunk.tensor == tensor).count());
            let end = of_tensor.last().map_or(start, EncodedChunk::end);
            self.begin_until(tensor + 1)?;
            let records: Vec<_> = of_tensor.iter().map(|chunk| chunk.record).collect();
            let sums: Vec<_> = of_tensor.iter().map(|chunk| chunk.sums).collect();
            let digests: Vec<_> = of_tensor.iter().map(|chunk| chunk.digest).collect();
            match &stored {
                Some(stored) => {
                    self.builder.copied_chunks(&stored[start as usize..end as usize], &records, &sums, &digests)?;
                }
                None => {
                    self.builder.placed_chunks(end - start, &records, &sums, &digests)?;
                    if let Some(blob) = self.builder.blob().pinned() {
                        blob.commit((end - start) as usize);
                    }
                }
            }
            let bytes = of_tensor.iter().map(|chunk| chunk.bytes).sum();
            self.added += bytes;
            self.job.watcher.done(bytes)?;
            (rest, start) = (after, end);
        }
        self.end_tensors(false)
    }

    /// Copies payloads for `lanes` bytes of lanes to the blob, if it is in pinned memory. Otherwise returns a copy.
    fn copy(&mut self, session: &Session<'_>, memory: &DeviceSlice, lanes: u64) -> Result<Option<PinnedBuffer>> {
        let total: u64 = self.plans.iter().map(|plan| plan.lanes * plan.width()).sum();
        let Some(blob) = self.builder.blob().pinned() else {
            let mut stored = session.pinned(memory.bytes())?;
            session.read_into(memory, &mut stored)?;
            return Ok(Some(stored));
        };
        // The other payloads are expected to be as large in relation to their lanes, and an eighth more.
        let now = blob.written() as u64 + memory.bytes();
        let expected = u128::from(now + now / 8) * u128::from(total) / u128::from((self.added + lanes).max(1));
        let expected = self.expected.max(expected as usize);
        session.read_into(memory, blob.reserve(memory.bytes() as usize, expected)?)?;
        Ok(None)
    }

    /// Size of the blob in bytes so far, if it is in pinned memory, otherwise 0.
    pub fn blob_bytes(&mut self) -> usize {
        self.builder.blob().pinned().map_or(0, |blob| blob.written())
    }

    pub fn finish(mut self, files: Vec<FileSpec>) -> Result<Finished<W>> {
        self.begin_until(self.plans.len())?;
        self.end_tensors(true)?;
        files.into_iter().for_each(|file| self.builder.file(file));
        self.builder.finish()
    }

    fn begin_until(&mut self, count: usize) -> Result<()> {
        while self.begun < count {
            let plan = &self.plans[self.begun];
            let Some(&choice) = plan.choice.get() else { return Err(unsupported("a tensor without a codec")) };
            self.builder.begin_tensor(&plan.spec(choice, true, self.selection.base(), self.selection.target()));
            self.begun += 1;
        }
        Ok(())
    }

    /// Adds the digests of tensors that have begun: of all, or unless it `waits`, of those whose digests are complete.
    fn end_tensors(&mut self, waits: bool) -> Result<()> {
        while self.ended < self.begun {
            let Some(digests) = self.digests.of(self.source, &self.plans[self.ended], waits)? else { break };
            match digests {
                (None, Digest::Hashed(target)) => self.builder.end_tensor(None, target),
                (Some(Digest::Hashed(base)), Digest::Hashed(target)) => self.builder.end_tensor(Some(base), target),
                (base, target) => {
                    let base_digest = base.map_or([0; DIGEST_SIZE], |base| base.short());
                    let digests = TensorDigests { base_digest, target_digest: target.short() };
                    self.builder.end_copied_tensor(&digests)?;
                }
            }
            self.ended += 1;
        }
        Ok(())
    }
}
