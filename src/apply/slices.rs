//! Rebuilds rectangles of tensors. Only the chunks that have elements of a rectangle are decoded.

use super::memory::Role;
use super::plan::Plan;
use super::request::{ApplyReport, Request};
use crate::slice::Memories;
use tpde_core::error::Result;
use tpde_core::format::BaseKind;
use tpde_core::source::Source;

/// Rebuilds slices in `bytes`, memory whose content is ignored, or only checks that it can be done. Entries of which all chunks are
/// decoded are compared with their digests.
pub(super) fn rebuild<B: Source>(
    request: &Request<'_, B>,
    memories: &Memories<'_>,
    bytes: Option<&mut [&mut [u8]]>,
) -> Result<ApplyReport> {
    let mut plan = Plan::of_slices(request.pair.index(), memories)?;
    // An empty slice needs no base.
    plan.items.retain(|item| !item.chunks.is_empty());
    plan.items.iter_mut().try_for_each(|item| request.find_base(&item.tensor).map(|base| item.base = base))?;
    for item in &mut plan.items {
        let Some(base) = item.base else { continue };
        let is_held = |offset, size| size == 0 || request.base().holds(base, offset, size);
        for &chunk in &item.chunks {
            let (offset, size) = item.bytes_of(chunk);
            let size = item.tensor.base_bytes().saturating_sub(offset).min(size as u64) as usize;
            if !is_held(offset, size) {
                return Err(item.not_held(chunk, Some("the base"), &memories.slices));
            }
        }
        // The digest of a base with other rows covers all of its rows.
        item.is_complete &= item.tensor.base_kind != BaseKind::Prefix || is_held(0, item.tensor.base_bytes() as usize);
    }
    if bytes.is_none() {
        plan.items.iter_mut().for_each(|item| item.places.clear());
    }
    let engine = request.engine(&plan);
    let outcome = engine.execute(bytes.unwrap_or_default(), Role::Target, |_, _| Ok(()), |()| {});
    let payload_digests = outcome.map_err(|e| engine.explain(e))?;
    Ok(ApplyReport {
        tensors: memories.tensors(),
        bytes: memories.held_bytes(),
        digests_checked: request.digests && plan.items.iter().all(|item| item.is_complete),
        payload_digests,
        removed: Vec::new(),
    })
}
