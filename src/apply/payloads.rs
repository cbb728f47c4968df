//! Compares the payloads of an application with the digests that the pair digest covers (spec section 7.2).

use super::chunk::Chunks;
use crate::reader::PayloadDigests;
use std::sync::{Mutex, PoisonError};
use tpde_core::digest;
use tpde_core::error::{Error, Result, Rule};
use tpde_core::format::DIGEST_SIZE;
use tpde_core::index::ValidatedIndex;

/// The digest of a payload that was read, with its chunk.
type PayloadDigest = (u32, [u8; DIGEST_SIZE]);

/// The chunks that an application reads. If the index has a payload root without a payload list, and the application reads all
/// payloads, each payload is hashed when it is read, and [`ComparedPayloads::finish`] compares the list of the digests with
/// the payload root.
pub(super) struct ComparedPayloads<'a> {
    chunks: &'a dyn Chunks,
    /// Whether all payloads of the pair are read.
    reads_all: bool,
    /// Digests of the payloads read so far, with their chunks. `None` if they need not be collected.
    digests: Option<Mutex<Vec<PayloadDigest>>>,
}

impl<'a> ComparedPayloads<'a> {
    /// `read` gives the chunks that will be read.
    pub fn new(chunks: &'a dyn Chunks, read: impl Iterator<Item = u32>) -> Self {
        let index = chunks.index();
        let payloads = read.filter(|&chunk| index.records()[chunk as usize].compressed_size.get() > 0).count();
        let reads_all = payloads == index.payload_count() as usize;
        let is_collected = reads_all && index.has_payload_root() && !chunks.is_authentic();
        Self { chunks, reads_all, digests: is_collected.then(|| Mutex::new(Vec::with_capacity(payloads))) }
    }

    /// Finds the cause of wrong target digests: if payloads are not those of the pair, returns that error. Other errors are
    /// returned unchanged.
    pub fn explain(&self, error: Error) -> Error {
        if self.digests.is_none() || error.rule() != Some(Rule::TensorTargetDigest) {
            return error;
        }
        match self.chunks.authenticate() {
            Err(forged) if forged.rule() == Some(Rule::HeaderPayloadRoot) => forged,
            _ => error,
        }
    }

    /// Compares the list of the digests, if they were collected. Call this after all chunks were read.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) with rule `header.payload_root` if the payloads are not those of the pair.
    pub fn finish(self) -> Result<PayloadDigests> {
        let Some(digests) = self.digests else {
            return Ok(match (self.chunks.is_authentic(), self.reads_all) {
                (true, true) => PayloadDigests::All,
                (true, false) => PayloadDigests::EachRead,
                (false, _) => PayloadDigests::NotCompared,
            });
        };
        let index = self.chunks.index();
        let mut list = vec![[0; DIGEST_SIZE]; index.records().len()];
        for (chunk, digest) in digests.into_inner().unwrap_or_else(PoisonError::into_inner) {
            list[chunk as usize] = digest;
        }
        index.check_payload_list(&list)?;
        Ok(PayloadDigests::All)
    }
}

impl Chunks for ComparedPayloads<'_> {
    fn index(&self) -> &ValidatedIndex {
        self.chunks.index()
    }

    fn is_authentic(&self) -> bool {
        self.chunks.is_authentic()
    }

    fn authenticate(&self) -> Result<()> {
        self.chunks.authenticate()
    }

    fn payload<'b>(&'b self, chunk: u32, scratch: &'b mut Vec<u8>) -> Result<&'b [u8]> {
        let payload = self.chunks.payload(chunk, scratch)?;
        if let Some(digests) = &self.digests {
            let digest = digest::of_payload(payload);
            digests.lock().unwrap_or_else(PoisonError::into_inner).push((chunk, digest));
        }
        Ok(payload)
    }
}
