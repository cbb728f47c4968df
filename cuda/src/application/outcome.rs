//! The outcome of a launch: status words turned into errors.

use super::prepared::LaunchData;
use crate::abi::{self, STATUS_NOT_RUN, STATUS_OK};
use crate::hashes::DIFFERS;
use crate::plan::payloads::Mode;
use crate::runtime::driver::RawEvent;
use crate::runtime::memory::{DeviceSlice, PinnedBuffer};
use std::sync::Arc;
use tpde::InPlace;
use tpde_core::error::{Error, Result, Rule, hex};
use tpde_core::format::BaseKind;

const PAYLOAD_CRC32: u32 = abi::status_of(Rule::PayloadCrc32);
const PAYLOAD_DIGEST: u32 = abi::status_of(Rule::PayloadDigest);
const PAYLOAD_ROOT: u32 = abi::status_of(Rule::HeaderPayloadRoot);

/// A queued launch. Dropping it does not cancel the launch.
#[derive(Debug)]
#[must_use = "only `wait` tells whether the data is correct"]
pub struct Pending {
    prepared: Arc<LaunchData>,
    done: Arc<RawEvent>,
    statuses: PinnedBuffer,
    host_error: Option<Error>,
}

/// An invalid chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BadChunk {
    /// Index of the chunk in the index map.
    pub chunk: u32,
    /// The violated rule. `None` if the chunk was not decoded because of an error elsewhere.
    pub rule: Option<Rule>,
}

impl Pending {
    pub(super) fn new(prepared: Arc<LaunchData>, done: Arc<RawEvent>, statuses: PinnedBuffer) -> Self {
        Self { prepared, done, statuses, host_error: None }
    }

    pub(super) fn with_host_error(mut self, error: Option<Error>) -> Self {
        self.host_error = error;
        self
    }

    /// Returns whether the launch has completed. After that [`Pending::wait`] returns at once.
    ///
    /// # Errors
    /// [`Error::Device`] if work on the device failed.
    pub fn is_done(&self) -> Result<bool> {
        self.done.is_passed(&self.prepared.index.device().inner.context.enter()?)
    }

    /// Waits on the host until the launch has completed, and returns an error if a chunk is invalid.
    ///
    /// # Errors
    /// - [`Error::Invalid`] names the first invalid chunk and its tensor. Out of place, discard the output. With
    ///   [`InPlace::AllChecked`], nothing was written.
    /// - Errors of the host while it reads or expands payloads. The output is then as after [`Error::Invalid`].
    /// - [`Error::Poisoned`] if [`InPlace::ChunkByChunk`] has written some chunks before one of these errors.
    /// - [`Error::Device`] if work on the device failed.
    pub fn wait(mut self) -> Result<()> {
        self.finish()?;
        let host_error = self.host_error.take();
        check_statuses(&self.prepared, &self.statuses, host_error)
    }

    /// Waits on the host until the launch has completed, and returns the invalid chunks.
    ///
    /// # Errors
    /// [`Error::Device`] if work on the device failed.
    pub fn bad_chunks(&self) -> Result<Vec<BadChunk>> {
        self.finish()?;
        Ok(bad_chunks(&self.prepared, &self.statuses).collect())
    }

    fn finish(&self) -> Result<()> {
        self.done.wait(&self.prepared.index.device().inner.context.enter()?)
    }
}

/// An application captured into a graph.
#[derive(Debug)]
pub struct Captured {
    prepared: Arc<LaunchData>,
    statuses: PinnedBuffer,
    _staging: Option<DeviceSlice>,
    _payloads: Option<Arc<PinnedBuffer>>,
}

impl Captured {
    pub(super) fn new(
        prepared: Arc<LaunchData>,
        statuses: PinnedBuffer,
        staging: Option<DeviceSlice>,
        payloads: Option<Arc<PinnedBuffer>>,
    ) -> Self {
        Self { prepared, statuses, _staging: staging, _payloads: payloads }
    }

    /// Returns the outcome of the last launch of the graph, which must have completed. Returns `Ok` before the first launch.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    pub fn check(&self) -> Result<()> {
        check_statuses(&self.prepared, &self.statuses, None)
    }
}

/// Returns all chunks of the application with their status words, in the order of the index map.
fn statuses<'a>(prepared: &'a LaunchData, words: &'a PinnedBuffer) -> impl Iterator<Item = (u32, u32)> + 'a {
    let decoded = decoded(prepared, words);
    decoded.map(move |(chunk, status)| (chunk, with_digest(status, digest_status(prepared, words, chunk))))
}

/// Returns all chunks with the status words of the kernels that decode them. Digests of payloads are left out.
fn decoded<'a>(prepared: &'a LaunchData, words: &'a PinnedBuffer) -> impl Iterator<Item = (u32, u32)> + 'a {
    let bound = prepared.bindings.iter().filter_map(|binding| Some((binding, prepared.index.tensor(binding.tensor).ok()?)));
    let chunks = bound.flat_map(|(binding, tensor)| binding.chunks(tensor));
    let span = &prepared.schedule.span;
    chunks.map(move |chunk| {
        let at = (chunk - span.start) as usize;
        let status = words.word(at);
        // An error of a frame takes precedence, because it made `tpde_raw` refuse the payload.
        let frame_status = if prepared.frames.is_some() { words.word(prepared.own_status_words + at) } else { STATUS_OK };
        let status = if status == STATUS_NOT_RUN || frame_status == STATUS_OK { status } else { frame_status };
        (chunk, status)
    })
}

/// Returns the status word of a payload's digest, or `STATUS_OK` if the device does not compare it.
fn digest_status(prepared: &LaunchData, words: &PinnedBuffer, chunk: u32) -> u32 {
    if prepared.digests.is_none() || !prepared.has_payload_on_device(chunk) {
        return STATUS_OK;
    }
    let span = &prepared.schedule.span;
    words.word(span.len() + (chunk - span.start) as usize)
}

/// Combines the status word of a chunk with that of its payload's digest, in the order of spec section 13: the digest of a payload
/// is checked after its CRC, and the payload root after all chunks.
fn with_digest(status: u32, digest_status: u32) -> u32 {
    let is_checked_before = match digest_status {
        STATUS_OK => true,
        STATUS_NOT_RUN => status != STATUS_OK,
        PAYLOAD_ROOT => ![STATUS_OK, STATUS_NOT_RUN, PAYLOAD_DIGEST].contains(&status),
        _ => status == PAYLOAD_CRC32,
    };
    if is_checked_before { status } else { digest_status }
}

fn bad_chunks<'a>(prepared: &'a LaunchData, words: &'a PinnedBuffer) -> impl Iterator<Item = BadChunk> + 'a {
    let bad = statuses(prepared, words).filter(|(_, status)| *status != STATUS_OK);
    bad.map(|(chunk, status)| BadChunk { chunk, rule: abi::rule(status) })
}

/// Returns whether all status words of chunks, frames and digests are `STATUS_OK`: the fast path of [`check_statuses`].
fn are_all_right(prepared: &LaunchData, words: &PinnedBuffer) -> bool {
    let count = prepared.schedule.span.len();
    let of_digests = if prepared.digests.is_some() { count..2 * count } else { 0..0 };
    let is_ok = |at: usize| words.word(at) == STATUS_OK;
    let mut others = (0..prepared.status_bytes() / 4).filter(|at| !of_digests.contains(at));
    others.all(is_ok)
        && prepared.digests.as_ref().is_none_or(|digests| of_digests.filter(|&at| is_ok(at)).count() == digests.payloads)
}

fn check_statuses(prepared: &LaunchData, words: &PinnedBuffer, host_error: Option<Error>) -> Result<()> {
    if host_error.is_none() && are_all_right(prepared, words) {
        return Ok(());
    }
    // An error found by a kernel takes precedence over chunks that were not decoded because of the host.
    let is_invalid = |status: u32| status != STATUS_OK && status != STATUS_NOT_RUN;
    let of_chunk = statuses(prepared, words).find(|&(_, status)| is_invalid(status) && status != PAYLOAD_ROOT);
    let first_invalid = of_chunk.or_else(|| statuses(prepared, words).find(|&(_, status)| is_invalid(status)));
    let first = match (first_invalid, host_error) {
        (Some((chunk, status)), _) => error(prepared, chunk, status),
        (None, Some(error)) => error,
        (None, None) => match statuses(prepared, words).find(|(_, status)| *status != STATUS_OK) {
            Some((chunk, status)) => error(prepared, chunk, status),
            None => match target_error(prepared, words)? {
                Some(error) => error,
                None => return Ok(()),
            },
        },
    };
    if prepared.request.mode != Mode::InPlace(InPlace::ChunkByChunk) {
        return Err(first);
    }
    // A chunk whose digest is compared before it is decoded is not decoded if that differs.
    let written = decoded(prepared, words).filter(|(_, status)| *status == STATUS_OK);
    let written: Vec<u32> = written.map(|(chunk, _)| chunk).collect();
    // Chunks without changes count as written. If only such chunks were written, the tensors still hold the base.
    let changes = |&chunk: &u32| {
        let tensor = prepared.bindings.iter().filter_map(|binding| prepared.index.tensor(binding.tensor).ok());
        let is_new = tensor.clone().any(|tensor| tensor.chunks().contains(&chunk) && tensor.base_kind == BaseKind::None);
        is_new || prepared.index.uploaded.records[chunk as usize].num_deltas.get() > 0
    };
    if !written.iter().any(changes) {
        return Err(first);
    }
    Err(Error::Poisoned { written, total: decoded(prepared, words).count() as u32, source: Box::new(first) })
}

/// Returns the error of the first target that does not have its digest.
fn target_error(prepared: &LaunchData, words: &PinnedBuffer) -> Result<Option<Error>> {
    let first = prepared.target_statuses();
    let entries = prepared.target_plan.iter().flat_map(|targets| &targets.entries);
    let Some((&entry, at)) = entries.zip(first..).find(|&(_, at)| words.word(at) != STATUS_OK) else { return Ok(None) };
    let tensor = prepared.index.tensor(entry)?;
    Ok(Some(match words.word(at) {
        DIFFERS => {
            let expected = hex(&tensor.digests.target_digest);
            Rule::TensorTargetDigest.broken(expected, "another digest, on the device").in_tensor(&tensor.name)
        }
        _ => Error::Device { action: "hash on the device", reason: format!("the kernel did not hash tensor {}", tensor.name) },
    }))
}

fn error(prepared: &LaunchData, chunk: u32, status: u32) -> Error {
    let Some(rule) = abi::rule(status) else {
        let reason = match status {
            STATUS_NOT_RUN => format!("the kernel did not decode chunk {chunk}"),
            _ => format!("the kernel returned the unknown status {status:#x} for chunk {chunk}"),
        };
        return Error::Device { action: "decode on the device", reason };
    };
    let record = &prepared.index.uploaded.records[chunk as usize];
    let expected = match rule {
        Rule::PayloadCrc32 => format!("{:08x}", record.crc32.get()),
        Rule::PayloadDigest => "the digest in the payload list".into(),
        Rule::HeaderPayloadRoot => "the hash of the payload list".into(),
        Rule::PayloadPadding => "zeros after the payload".into(),
        Rule::PayloadSize => format!("parts that fill {} bytes", record.compressed_size.get()),
        Rule::PayloadFrame => format!("one zstd frame that expands to {} bytes", record.uncompressed_size.get()),
        Rule::PayloadLayout => "a known layout".into(),
        Rule::PayloadHeader => "a header within its bounds".into(),
        Rule::PayloadClasses => "classes of the tensor's tables".into(),
        Rule::PayloadStream => "streams that end at their end, in the initial state".into(),
        Rule::PayloadPositions => "ascending positions within the chunk".into(),
        Rule::PayloadDeltas => format!("{} changes that are not zero", record.num_deltas.get()),
        Rule::ChunkBaseSum => "the sum over the base lanes".into(),
        _ => "the sum over the target lanes".into(),
    };
    if rule == Rule::HeaderPayloadRoot {
        return rule.broken(expected, "another hash, on the device");
    }
    let tensor = prepared.bindings.iter().filter_map(|binding| prepared.index.tensor(binding.tensor).ok());
    let name = tensor.clone().find(|tensor| tensor.chunks().contains(&chunk)).map_or("", |tensor| &tensor.name);
    rule.broken(expected, "a mismatch, on the device").in_chunk(chunk).in_tensor(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_reported_in_the_order_of_the_specification() {
        const SIZE: u32 = abi::status_of(Rule::PayloadSize);
        let (ok, not_run) = (STATUS_OK, STATUS_NOT_RUN);
        for (status, digest_status, expected) in [
            (ok, ok, ok),
            (SIZE, ok, SIZE),
            (not_run, ok, not_run),
            // The digest comes after the CRC and before all else.
            (PAYLOAD_CRC32, PAYLOAD_DIGEST, PAYLOAD_CRC32),
            (SIZE, PAYLOAD_DIGEST, PAYLOAD_DIGEST),
            (ok, PAYLOAD_DIGEST, PAYLOAD_DIGEST),
            (not_run, PAYLOAD_DIGEST, PAYLOAD_DIGEST),
            // The payload root comes last.
            (PAYLOAD_CRC32, PAYLOAD_ROOT, PAYLOAD_CRC32),
            (SIZE, PAYLOAD_ROOT, SIZE),
            (ok, PAYLOAD_ROOT, PAYLOAD_ROOT),
            (PAYLOAD_DIGEST, PAYLOAD_ROOT, PAYLOAD_ROOT),
            (not_run, PAYLOAD_ROOT, PAYLOAD_ROOT),
            // A payload that was not hashed is not correct.
            (ok, not_run, not_run),
            (SIZE, not_run, SIZE),
        ] {
            assert_eq!(with_digest(status, digest_status), expected, "{status} {digest_status}");
        }
    }
}
