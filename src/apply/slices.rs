//! Rebuilds rectangles of tensors. Only the chunks that have elements of a rectangle are decoded.

use super::memory::Role;
use super::plan::Plan;
use super::request::{ApplyReport, Request};
use crate::slice::Memories;
use tpde_core::error::Result;
use tpde_core::index::Tensor;
use tpde_core::source::Source;

/// Rebuilds slices in `bytes`, memory whose content is ignored; without `bytes`, decodes and checks without storing. Entries of which all chunks are
/// decoded are compared with their digests.
pub(super) fn rebuild<B: Source>(
    request: &Request<'_, B>,
    memories: &Memories<'_>,
    bytes: Option<&mut [&mut [u8]]>,
) -> Result<ApplyReport> {
    let find = |tensor: &Tensor<'_>| request.find_base(tensor);
    let mut plan = Plan::out_of_place(request.pair.index(), memories, request.base(), find)?;
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
