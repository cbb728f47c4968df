//! Section `digests` and the payload list (spec section 7; section 13, step 5).

use super::header::stored;
use super::tensors::TensorTable;
use crate::digest::Root;
use crate::error::{Result, Rule, hex};
use crate::format::*;
use zerocopy::FromBytes;

/// The digests of all tensors.
pub(super) fn of_tensors<'a>(bytes: &'a [u8], header: &IndexHeader) -> &'a [TensorDigests] {
    <[TensorDigests]>::ref_from_bytes(&stored(bytes, header, Section::Digests)[ROOTS_SIZE as usize..]).unwrap_or(&[])
}

/// The payload list: the second half of section `sums`, if the index has it.
pub(super) fn payload_list<'a>(bytes: &'a [u8], header: &IndexHeader) -> Option<&'a [[u8; DIGEST_SIZE]]> {
    header.has(FEATURE_PAYLOAD_LIST).then(|| {
        let (_, list) = stored(bytes, header, Section::Sums).split_at(size_of::<ChunkSums>() * header.chunk_count as usize);
        list.as_chunks().0
    })
}

/// Compares the payload root with a payload list.
pub(super) fn check_payload_root(header: &IndexHeader, list: &[[u8; DIGEST_SIZE]]) -> Result<()> {
    let root = crate::digest::payload_root(list);
    Rule::HeaderPayloadRoot.check(header.payload_root == root, hex(&root), hex(&header.payload_root))
}

/// Step 5, without files.
pub(super) fn check(bytes: &[u8], header: &IndexHeader, tensors: &TensorTable) -> Result<()> {
    if let Some(list) = payload_list(bytes, header) {
        check_payload_root(header, list)?;
    }
    let digests = of_tensors(bytes, header);
    for (i, digests) in digests.iter().enumerate() {
        let none = tensors.has_base(i) || digests.base_digest == [0; DIGEST_SIZE];
        Rule::DigestNone.check(none, "zeros without a base", "other bytes").map_err(|e| e.in_tensor(tensors.name(i)))?;
    }
    if !header.has(FEATURE_DIGESTS) {
        return Ok(()); // these roots are formed over the tensors
    }
    let (mut base_root, mut target_root) = (Root::default(), Root::default());
    for digests in digests {
        base_root.add(&digests.base_digest);
        target_root.add(&digests.target_digest);
    }
    let (base_stored, target_stored) = stored(bytes, header, Section::Digests)[..ROOTS_SIZE as usize].split_at(32);
    for (rule, root, stored) in
        [(Rule::DigestBaseRoot, base_root, base_stored), (Rule::DigestTargetRoot, target_root, target_stored)]
    {
        let root = root.finish();
        rule.check(root == stored, hex(&root), hex(stored))?;
    }
    Ok(())
}
