//! Compares a checkpoint with the target of a pair, without decoding.

use crate::batches::hash_piece;
use crate::checkpoint::Checkpoint;
use crate::cut::Piece;
use crate::watch::Progress;
use tpde_core::digest::{Root, short};
use tpde_core::error::{Escaped, Result, Rule, hex};
use tpde_core::index::ValidatedIndex;

/// Compares the names, dtypes, shapes and digests of a checkpoint's tensors with those of the target of a pair.
///
/// Cost: one read and one hash of the checkpoint, by all threads of the pool.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) with rule `tensor.target_digest` for the first tensor that is missing or differs;
/// the same error with rule `digest.target_root` for a tensor that the pair lacks; [`Error::Io`](crate::Error::Io).
pub fn check_target(index: &ValidatedIndex, target: &dyn Checkpoint, progress: Progress<'_>) -> Result<()> {
    let mut root = Root::default();
    for tensor in index.tensors() {
        let expected = hex(&tensor.digests.target_digest);
        let broken = |found: &dyn std::fmt::Display| {
            let expected = format!(
                "the checkpoint to be the target of this pair, with {} {:?} of digest {expected}",
                tensor.dtype,
                tensor.whole_shape()
            );
            Rule::TensorTargetDigest.broken(expected, found).in_tensor(tensor.name)
        };
        let tensor_index = target.find(tensor.name).ok_or_else(|| broken(&"no such tensor"))?;
        let info = &target.tensors()[tensor_index];
        if info.dtype != tensor.dtype || info.shape != tensor.whole_shape() {
            return Err(broken(&format_args!("{} {:?}", info.dtype, info.shape)));
        }
        let hash = hash_piece(target, &Piece::of(tensor_index, tensor.layout()), progress)?;
        let found = short(&hash);
        if found != tensor.digests.target_digest {
            return Err(broken(&format_args!("digest {}", hex(&found))));
        }
        root.add_hash(Some(&hash));
    }
    if let Some(other) = target.tensors().iter().find(|info| index.find(&info.name).is_none()) {
        let expected = format_args!("the {} tensors of the pair", index.tensor_count());
        return Err(Rule::DigestTargetRoot.broken(expected, format_args!("tensor {} too", Escaped(&other.name))));
    }
    if index.has_payload_root() {
        return Ok(()); // roots over stored digests were compared when the index was parsed
    }
    let root = root.finish();
    Rule::DigestTargetRoot.check(root == index.target_root(), hex(index.target_root()), hex(&root))
}
