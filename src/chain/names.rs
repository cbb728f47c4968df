//! Which tensor of the base each tensor of the last version derives from.

use super::step::Step;
use crate::checkpoint::Checkpoint;
use std::collections::BTreeMap;
use tpde_core::format::BaseKind;
use tpde_core::rectangle::{Rectangle, part_fault};
use tpde_core::source::Source;

/// A tensor of the last version, and the base tensor that it derives from.
pub(super) struct DerivedTensor<'a> {
    pub name: &'a str,
    /// Name of the base tensor, which may not exist.
    pub base_name: &'a str,
    /// Index of the tensor in the last version.
    tensor_index: usize,
}

/// All tensors of the last version. Without steps, none.
pub(super) fn derived<'a, B: Source>(steps: &'a [Step<'_, B>]) -> Vec<DerivedTensor<'a>> {
    let tensors = steps.last().map_or(&[][..], |step| &step.tensors);
    let follow = |(tensor_index, name): (usize, &'a str)| {
        let mut base_name = name;
        for step in steps.iter().rev() {
            // The version before may have a tensor of the same name as one that is encoded without a base.
            let entries = step.pair.index().entries(base_name);
            let with_base = entries.into_iter().find(|entry| entry.base_kind != BaseKind::None);
            base_name = with_base.map_or(base_name, |entry| entry.base_name);
        }
        DerivedTensor { name, base_name, tensor_index }
    };
    tensors.iter().map(|info| info.name.as_str()).enumerate().map(follow).collect()
}

/// Names of the tensors of the last version whose base tensors have other names, with these names.
pub(super) fn renamed<B: Source>(base: &dyn Checkpoint, steps: &[Step<'_, B>]) -> BTreeMap<String, String> {
    let derived = derived(steps).into_iter();
    let differ = derived.filter(|tensor| tensor.name != tensor.base_name && base.find(tensor.base_name).is_some());
    differ.map(|tensor| (tensor.name.to_owned(), tensor.base_name.to_owned())).collect()
}

/// The base tensors that tensors of the last version derive from, with one of these tensors each: the one of the same name if
/// there is one, else the first.
fn origins<'a, B: Source>(base: &dyn Checkpoint, steps: &'a [Step<'_, B>]) -> BTreeMap<&'a str, DerivedTensor<'a>> {
    let mut origins = BTreeMap::<&str, DerivedTensor<'_>>::new();
    for tensor in derived(steps).into_iter().filter(|tensor| base.find(tensor.base_name).is_some()) {
        if tensor.name == tensor.base_name || !origins.contains_key(tensor.base_name) {
            origins.insert(tensor.base_name, tensor);
        }
    }
    origins
}

/// [`renamed`] in the other direction: names of base tensors, with the names of tensors of the last version.
pub(super) fn renamed_back<B: Source>(base: &dyn Checkpoint, steps: &[Step<'_, B>]) -> BTreeMap<String, String> {
    let differ = origins(base, steps).into_values().filter(|tensor| tensor.name != tensor.base_name);
    differ.map(|tensor| (tensor.base_name.to_owned(), tensor.name.to_owned())).collect()
}

/// The parts of the tensors of the last version, by name.
pub(super) fn cuts<B: Source>(steps: &[Step<'_, B>]) -> BTreeMap<String, Vec<Rectangle>> {
    let parts = |tensor: DerivedTensor<'_>| Some((tensor.name.to_owned(), parts(steps, &tensor)?));
    derived(steps).into_iter().filter_map(parts).collect()
}

/// [`cuts`] for the tensors of the base. A base tensor of another shape, or of elements that the parts would divide, is left whole.
pub(super) fn cuts_back<B: Source>(base: &dyn Checkpoint, steps: &[Step<'_, B>]) -> BTreeMap<String, Vec<Rectangle>> {
    let parts = |tensor: DerivedTensor<'_>| {
        let info = &base.tensors()[base.find(tensor.base_name)?];
        let parts = parts(steps, &tensor)?;
        let fits = |part: &Rectangle| part_fault(info.dtype.bits(), &info.shape, &part.origin, &part.extent).is_none();
        let shape = &steps.last()?.tensors[tensor.tensor_index].shape;
        (*shape == info.shape && parts.iter().all(fits)).then(|| (tensor.base_name.to_owned(), parts))
    };
    origins(base, steps).into_values().filter_map(parts).collect()
}

fn parts<B: Source>(steps: &[Step<'_, B>], tensor: &DerivedTensor<'_>) -> Option<Vec<Rectangle>> {
    let step = steps.last()?;
    let index = step.pair.index();
    index.tensor(step.entries(tensor.tensor_index).start).part?;
    Some(step.entries(tensor.tensor_index).map(|entry| index.tensor(entry).rectangle()).collect())
}
