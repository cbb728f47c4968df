//! Blobs that are read from the store in parts, without a local file.

use crate::download::check_segment;
use crate::error::{Error, Result};
use crate::manifest::Stored;
use crate::remote::{PendingRequest, Remote};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use tpde::Source;

/// Number of segments that are kept: threads that read one after the other are not far from each other.
const HELD: usize = 4;

/// A stored file whose segments are read when they are needed, and those behind them in advance.
pub(crate) struct StoredSource<'a> {
    remote: &'a Remote,
    stored: &'a Stored,
    state: Mutex<BlobState>,
}

#[derive(Default)]
struct BlobState {
    /// Requests for consecutive segments, from this one on.
    first: usize,
    requests: VecDeque<PendingRequest<Result<Result<Vec<u8>>>>>,
    held: VecDeque<(usize, Arc<Vec<u8>>)>,
    failure: Option<Error>,
}

impl<'a> StoredSource<'a> {
    pub fn new(remote: &'a Remote, stored: &'a Stored) -> Self {
        Self { remote, stored, state: Mutex::default() }
    }

    /// The error of the store that made a call fail, or the error of the call.
    pub fn error(&self, error: tpde::Error) -> Error {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).failure.take().unwrap_or(error.into())
    }

    fn segment(&self, at: usize) -> tpde::Result<Arc<Vec<u8>>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, held)) = state.held.iter().find(|(held, _)| *held == at) {
            return Ok(held.clone());
        }
        state.read(self.remote, self.stored, at).map_err(|error| {
            state.failure.get_or_insert(error);
            let source = std::io::Error::other("the store has failed");
            tpde::Error::Io { action: "read", path: PathBuf::from("the store"), source }
        })
    }
}

impl BlobState {
    fn read(&mut self, remote: &Remote, stored: &Stored, at: usize) -> Result<Arc<Vec<u8>>> {
        if !(self.first..self.first + self.requests.len()).contains(&at) {
            self.requests.clear();
        }
        self.requests.drain(..self.requests.len().min(at.saturating_sub(self.first)));
        self.first = at;
        let next = at + self.requests.len();
        let ahead = &stored.segments[next..stored.segments.len().min(at + remote.in_flight())];
        self.requests.extend(ahead.iter().map(|segment| remote.get_segment(segment, None)));
        let Some(request) = self.requests.pop_front() else {
            return Err(Error::InvalidArgument("a segment behind the last one".into()));
        };
        self.first += 1;
        let bytes = Arc::new(check_segment(&stored.segments[at], request.wait()???)?);
        if self.held.len() == HELD {
            self.held.pop_front();
        }
        self.held.push_back((at, bytes.clone()));
        Ok(bytes)
    }
}

impl Source for &StoredSource<'_> {
    fn size(&self) -> u64 {
        self.stored.bytes
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> tpde::Result<()> {
        let (end, mut begin) = (offset + out.len() as u64, 0);
        for (at, segment) in self.stored.segments.iter().enumerate() {
            let (from, to) = (offset.max(begin), end.min(begin + segment.bytes));
            if from < to {
                let bytes = self.segment(at)?;
                let of_segment = (from - begin) as usize..(to - begin) as usize;
                out[(from - offset) as usize..(to - offset) as usize].copy_from_slice(&bytes[of_segment]);
            }
            begin += segment.bytes;
        }
        Ok(())
    }
}
