//! Narrows the inputs of a merge to parts within rectangles.

use super::input::Input;
use std::collections::{BTreeMap, HashSet};
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::index::Tensor;
use tpde_core::rectangle::{Rectangle, part_fault};
use tpde_core::source::Source;

/// Drops the entries of each tensor of `wanted` that are not within one of its rectangles.
///
/// # Errors
/// [`Error::InvalidArgument`] if no input has the tensor, if it has no entry within a rectangle, or if a rectangle is not within the
/// tensor or has only some elements of an entry.
pub(super) fn narrow<B: Source>(inputs: &mut [Input<'_, B>], wanted: &BTreeMap<String, Vec<Rectangle>>) -> Result<()> {
    for (name, rectangles) in wanted {
        let mut used = vec![false; rectangles.len()];
        let mut is_known = false;
        for input in &mut *inputs {
            let mut dropped = HashSet::new();
            for entry in input.index().entries(name) {
                is_known = true;
                if !is_within(&entry, rectangles, &mut used)? {
                    dropped.insert(entry.place as u32);
                }
            }
            if !dropped.is_empty() {
                input.kept.retain(|place| !dropped.contains(place));
            }
        }
        let refused = |reason: &str| Err(Error::InvalidArgument(format!("{reason} of tensor {}", Escaped(name))));
        if !is_known {
            return Err(Error::InvalidArgument(format!("no tensor {} in the pair", Escaped(name))));
        }
        if let Some(unused) = used.iter().position(|used| !used) {
            return refused(&format!("no part of the pair is within {}", rectangles[unused]));
        }
    }
    Ok(())
}

/// Whether an entry is within one of the rectangles. Marks the rectangles that it is within.
fn is_within(entry: &Tensor<'_>, rectangles: &[Rectangle], used: &mut [bool]) -> Result<bool> {
    let (own, shape) = (entry.rectangle(), entry.whole_shape());
    let refused = |rectangle: &Rectangle, reason: &str| {
        let name = Escaped(entry.name);
        Err(Error::InvalidArgument(format!("{rectangle} of tensor {name} of {shape:?}: {reason}")))
    };
    let (mut is_within, mut cut) = (false, None);
    for (rectangle, used) in rectangles.iter().zip(&mut *used) {
        let fault = part_fault(entry.dtype.bits(), shape, &rectangle.origin, &rectangle.extent);
        if let Some(fault) = fault.filter(|_| *rectangle != Rectangle::whole(shape)) {
            return refused(rectangle, fault);
        }
        match rectangle.intersection(&own) {
            Some(common) if common == own => (is_within, *used) = (true, true),
            Some(_) => cut = Some(rectangle),
            None => {}
        }
    }
    match cut.filter(|_| !is_within) {
        Some(rectangle) => refused(rectangle, &format!("only some elements of {own}, which the pair stores as one")),
        None => Ok(is_within),
    }
}
