//! Payloads that are read twice and must not change between.

use super::chunk::Chunks;
use crate::digest;
use crate::error::{Error, Result};
use crate::index::ValidatedIndex;
use crate::reader::Pair;
use crate::source::Source;
use blake3::Hash;
use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

/// Most bytes of payloads that [`InPlace::AllChecked`](super::InPlace::AllChecked) keeps in memory between checking and writing.
/// Of further payloads only the digest is kept: they are read again and compared.
pub const KEPT_PAYLOADS: u64 = 256 << 20;

/// The payloads of a pair whose blob may change. After the first read of a payload, every later read gives the same bytes or
/// fails. A blob in memory cannot change, so its payloads are not copied.
pub(super) struct Kept<'a, B> {
    pair: &'a Pair<B>,
    read: RwLock<Read>,
}

struct Read {
    payloads: HashMap<u32, Payload>,
    /// Bytes of payloads that may still be kept.
    free: u64,
}

enum Payload {
    Bytes(Box<[u8]>),
    Digest(Hash),
}

impl<'a, B: Source> Kept<'a, B> {
    /// Nothing is kept yet; at most `limit` bytes of payloads will be.
    pub fn new(pair: &'a Pair<B>, limit: u64) -> Self {
        Self { pair, read: RwLock::new(Read { payloads: HashMap::new(), free: limit }) }
    }

    fn keep(&self, chunk: u32, payload: &[u8]) {
        let mut read = self.read.write().unwrap_or_else(PoisonError::into_inner);
        let size = payload.len() as u64;
        let kept = if size <= read.free {
            read.free -= size;
            Payload::Bytes(payload.into())
        } else {
            drop(read); // hashing is slow, so not under the lock
            let digest = digest::of(payload);
            read = self.read.write().unwrap_or_else(PoisonError::into_inner);
            Payload::Digest(digest)
        };
        read.payloads.insert(chunk, kept);
    }
}

impl<B: Source> Chunks for Kept<'_, B> {
    fn index(&self) -> &ValidatedIndex {
        self.pair.index()
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
