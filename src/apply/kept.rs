//! Payloads that are read twice and must not change between the reads.

use super::chunk::Chunks;
use crate::reader::Pair;
use blake3::Hash;
use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};
use tpde_core::digest;
use tpde_core::error::{Error, Result};
use tpde_core::index::ValidatedIndex;
use tpde_core::source::Source;

/// Maximum size, in bytes, of the payloads that [`InPlace::AllChecked`](super::InPlace::AllChecked) keeps in memory between its
/// passes. For each further payload it keeps only the digest, and compares it when it reads the payload again.
pub const KEPT_PAYLOADS: u64 = 256 << 20;

/// The payloads of a pair whose blob may change on disk. Every later read of a payload gives the bytes of its first read, or fails.
/// A blob in memory cannot change, so its payloads are not copied.
pub(super) struct KeptPayloads<'a, B> {
    pair: &'a Pair<B>,
    read: RwLock<PayloadCache>,
}

struct PayloadCache {
    payloads: HashMap<u32, Payload>,
    /// Remaining budget for kept payloads, in bytes.
    free: u64,
}

enum Payload {
    Bytes(Box<[u8]>),
    Digest(Hash),
}

impl<'a, B: Source> KeptPayloads<'a, B> {
    /// Creates an empty store that keeps at most `limit` bytes of payloads.
    pub fn new(pair: &'a Pair<B>, limit: u64) -> Self {
        Self { pair, read: RwLock::new(PayloadCache { payloads: HashMap::new(), free: limit }) }
    }

    fn keep(&self, chunk: u32, payload: &[u8]) {
        let mut read = self.read.write().unwrap_or_else(PoisonError::into_inner);
        let size = payload.len() as u64;
        let kept = if size <= read.free {
            read.free -= size;
            Payload::Bytes(payload.into())
        } else {
            drop(read); // do not hold the lock while hashing
            let digest = digest::of(payload);
            read = self.read.write().unwrap_or_else(PoisonError::into_inner);
            Payload::Digest(digest)
        };
        read.payloads.insert(chunk, kept);
    }
}

impl<B: Source> Chunks for KeptPayloads<'_, B> {
    fn index(&self) -> &ValidatedIndex {
        self.pair.index()
    }

    fn is_authentic(&self) -> bool {
        self.pair.is_authentic()
    }

    fn authenticate(&self) -> Result<()> {
        self.pair.authenticate(&|_| {})
    }

    fn payload<'a>(&'a self, chunk: u32, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        if self.pair.blob().in_memory().is_some() {
            return self.pair.payload(chunk, scratch);
        }
        let digest = match self.read.read().unwrap_or_else(PoisonError::into_inner).payloads.get(&chunk) {
            Some(Payload::Bytes(bytes)) => {
                scratch.clear();
                scratch.extend_from_slice(bytes);
                return Ok(scratch);
            }
            Some(Payload::Digest(digest)) => Some(*digest),
            None => None,
        };
        let payload = self.pair.payload(chunk, scratch)?;
        match digest {
            Some(digest) if digest != digest::of(payload) => {
                return Err(Error::Changed { what: format!("the payload of chunk {chunk}") });
            }
            Some(_) => {}
            None => self.keep(chunk, payload),
        }
        Ok(payload)
    }
}
