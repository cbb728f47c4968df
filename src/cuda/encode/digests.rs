//! Digests of tensors, which a pair stores.
//!
//! The caller may know them. Otherwise the host computes them from copies, which takes most of the time of an encoding. A kernel
//! that hashes tensors takes the place of [`of_tensor`].

use super::tensors::DeviceCheckpoint;
use crate::batches::hash_tensor;
use crate::checkpoint::Checkpoint;
use crate::digest;
use crate::error::Result;
use crate::format::DIGEST_SIZE;
use crate::watch::Progress;
use std::collections::BTreeMap;

/// Digests of the tensors of a checkpoint, as far as they are known: BLAKE3-128 by name.
pub(super) type Known = BTreeMap<String, [u8; DIGEST_SIZE]>;

/// Returns the digest of a tensor, and computes it if it is not known.
pub(super) fn of_tensor(
    checkpoint: &DeviceCheckpoint,
    tensor_index: usize,
    known: &mut Known,
    progress: Progress<'_>,
) -> Result<[u8; DIGEST_SIZE]> {
    let name = &checkpoint.tensors()[tensor_index].name;
    if let Some(digest) = known.get(name) {
        return Ok(*digest);
    }
    let digest = digest::short(&hash_tensor(checkpoint, tensor_index, progress)?);
    known.insert(name.clone(), digest);
    Ok(digest)
}
