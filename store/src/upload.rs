//! Uploads of files as segments, while they are written.

use crate::digest::{Digest, UploadId};
use crate::error::{Error, Result};
use crate::manifest::{Segment, Stored};
use crate::prefix::Prefix;
use crate::remote::{PendingRequest, Remote, no_memory};
use std::collections::{HashMap, VecDeque};
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use tpde::{FileSource, Source};

/// Cuts what is written to it into segments, and uploads each as soon as it is complete. The first segment waits for the end,
/// because its beginning may still change.
///
/// Memory: [`Remote::in_flight`] + 2 segments.
pub(crate) struct Upload<'a> {
    remote: &'a Remote,
    segment_bytes: usize,
    /// The call, whose lease exists.
    id: UploadId,
    /// Segments that need not be uploaded, because a version that the lease names uses them.
    known: &'a SegmentMap,
    first: Option<Vec<u8>>,
    current: Vec<u8>,
    /// All segments but the first.
    segments: Vec<Segment>,
    pending: VecDeque<PendingRequest<Result<()>>>,
    /// Memory in bytes that is left to others.
    left: usize,
    failure: Failure,
}

/// Segments that are in the store, by digest.
pub(crate) type SegmentMap = HashMap<Digest, Segment>;

/// The error of an upload, for a caller whose writer was consumed.
pub(crate) type Failure = Arc<Mutex<Option<Error>>>;

/// Takes the error of an upload.
pub(crate) fn take(failure: &Failure) -> Option<Error> {
    failure.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Keeps the error of an upload, and returns one for the caller of a writer.
fn fail(failure: &Failure, error: Error) -> io::Error {
    *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    io::Error::other("the upload failed")
}

impl<'a> Upload<'a> {
    pub fn new(prefix: &'a Prefix, id: UploadId, known: &'a SegmentMap) -> Self {
        Self {
            remote: &prefix.remote,
            segment_bytes: prefix.segment_bytes,
            id,
            known,
            first: None,
            current: Vec::new(),
            segments: Vec::new(),
            pending: VecDeque::new(),
            left: 0,
            failure: Failure::default(),
        }
    }

    /// The same upload of a pair, whose segments leave memory to the encoder of `tensor_bytes`: if the system refuses a small buffer, the
    /// process ends.
    ///
    /// # Errors
    /// The system would refuse this memory already now.
    pub fn beside_encoder(self, tensor_bytes: u64) -> Result<Self> {
        const MOST: u64 = 128 << 20;
        let left = tensor_bytes.saturating_mul(4).saturating_add(16 << 20).min(MOST) as usize;
        reserve(&mut Vec::new(), 0, left)?;
        Ok(Self { left, ..self })
    }

    pub fn failure(&self) -> Failure {
        self.failure.clone()
    }

    fn end_segment(&mut self) -> Result<()> {
        let bytes = std::mem::take(&mut self.current);
        if self.first.is_none() {
            self.first = Some(bytes);
            return Ok(());
        }
        let segment = self.send(bytes)?;
        self.segments.push(segment);
        Ok(())
    }

    fn send(&mut self, bytes: Vec<u8>) -> Result<Segment> {
        let segment = Segment { digest: Digest::of(&bytes), bytes: bytes.len() as u64, upload: Some(self.id) };
        if let Some(known) = self.known.get(&segment.digest) {
            return Ok(*known);
        }
        while self.pending.len() >= self.remote.in_flight() {
            self.wait_for_one()?;
        }
        self.pending.push_back(self.remote.put(segment.object(), bytes));
        Ok(segment)
    }

    fn wait_for_one(&mut self) -> Result<()> {
        self.pending.pop_front().map_or(Ok(()), |pending| pending.wait()?)
    }

    /// Replaces the first bytes, and waits for all uploads.
    pub fn finish(mut self, header: &[u8]) -> Result<Stored> {
        if !self.current.is_empty() {
            self.end_segment()?;
        }
        let mut segments = Vec::new();
        if let Some(mut first) = self.first.take() {
            first[..header.len()].copy_from_slice(header);
            segments.push(self.send(first)?);
        }
        while !self.pending.is_empty() {
            self.wait_for_one()?;
        }
        segments.append(&mut self.segments);
        Ok(Stored { bytes: segments.iter().map(|segment| segment.bytes).sum(), segments })
    }

    /// Uploads all bytes of a source.
    pub fn all(mut self, source: &impl Source) -> Result<Stored> {
        let mut offset = 0;
        while offset < source.size() {
            let size = (source.size() - offset).min(self.segment_bytes as u64) as usize;
            self.current = zeroed(size)?;
            source.read(offset, &mut self.current)?;
            offset += size as u64;
            self.end_segment()?;
        }
        self.finish(&[])
    }

    /// Uploads a file. If it has changed since it was opened, a part of what was read may be old and a part new, which is an error.
    pub fn file(self, file: &FileSource) -> Result<Stored> {
        let outcome = self.all(file);
        // First, because a change may be the cause of another error.
        file.check_unchanged()?;
        outcome
    }
}

/// Reserves memory for `more` bytes of a segment, if the system would give `left` bytes besides.
fn reserve(segment: &mut Vec<u8>, more: usize, left: usize) -> Result<()> {
    let mut others = Vec::<u8>::new();
    let reserved = segment.try_reserve_exact(more).and_then(|()| others.try_reserve_exact(left));
    // Otherwise an allocation that nobody uses is optimised away.
    std::hint::black_box(&mut others);
    reserved.map_err(|_| no_memory("a segment"))
}

/// A buffer of `size` bytes.
fn zeroed(size: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reserve(&mut bytes, size, 0)?;
    bytes.resize(size, 0);
    Ok(bytes)
}

impl Write for Upload<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let size = bytes.len().min(self.segment_bytes - self.current.len());
        // Doubles the capacity, but not past the end of the segment.
        let least = if self.current.is_empty() { 1 << 20 } else { self.current.len() };
        if self.current.capacity() - self.current.len() < size {
            let more = least.max(size).min(self.segment_bytes - self.current.len());
            reserve(&mut self.current, more, self.left).map_err(|error| fail(&self.failure, error))?;
        }
        self.current.extend_from_slice(&bytes[..size]);
        if self.current.len() == self.segment_bytes {
            self.end_segment().map_err(|error| fail(&self.failure, error))?;
        }
        Ok(size)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
