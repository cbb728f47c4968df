//! Bindings of tensors to memory, and the checks of lengths, alignment and overlaps.

use crate::cuda::index::{TensorOnDevice, tensor_at};
use crate::cuda::runtime::memory::DeviceSlice;
use crate::error::{Error, Escaped, Result};
use crate::format::BaseKind;

/// A tensor of an application and its memory. Addresses are aligned to the lanes of the tensor.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Binding {
    /// Index of the tensor in the pair; see [`DeviceIndex::find`](crate::cuda::DeviceIndex::find).
    pub tensor: usize,
    /// The base tensor. `None` in place, and for base kinds without a base.
    pub base: Option<DeviceSlice>,
    /// The memory of the target. In place it holds the base before the application.
    pub output: DeviceSlice,
}

impl Binding {
    /// Binds a tensor that is rebuilt from `base` in `output`.
    pub fn out_of_place(tensor: usize, base: Option<DeviceSlice>, output: DeviceSlice) -> Self {
        Self { tensor, base, output }
    }

    /// Binds a tensor that is changed in place.
    pub fn in_place(tensor: usize, memory: DeviceSlice) -> Self {
        Self { tensor, base: None, output: memory }
    }
}

/// Checks lengths, alignment and overlaps, and returns the bindings sorted by tensor. Two bindings may share memory only if they
/// are the same tensor, or equal tensors under several names. Then only one binding is returned and decoded.
pub(in crate::cuda) fn check(tensors: &[TensorOnDevice], bindings: &[Binding], in_place: bool) -> Result<Vec<Binding>> {
    let mut bindings = bindings.to_vec();
    bindings.sort_by_key(|binding| binding.tensor);
    for binding in &bindings {
        check_lengths(tensor_at(tensors, binding.tensor)?, binding, in_place)?;
    }
    // Empty outputs overlap nothing. They are excluded from the comparison of neighbours, because an empty output could be
    // between two outputs that overlap.
    let (empty, mut occupied): (Vec<_>, Vec<_>) = bindings.into_iter().partition(|binding| binding.output.bytes() == 0);
    // Sorted by address. Among equal outputs the first tensor comes first.
    occupied.sort_by_key(|binding| (binding.output.address(), std::cmp::Reverse(binding.output.bytes()), binding.tensor));
    let mut kept: Vec<Binding> = Vec::with_capacity(occupied.len() + empty.len());
    for binding in occupied {
        let tensor = tensor_at(tensors, binding.tensor)?;
        let overlapping = |before: &&Binding| before.output.address() + before.output.bytes() > binding.output.address();
        if let Some(before) = kept.last().filter(overlapping) {
            let other = tensor_at(tensors, before.tensor)?;
            let same_memory = (before.output.address(), before.output.bytes())
                == (binding.output.address(), binding.output.bytes())
                && base_of(before) == base_of(&binding);
            if same_memory && before.tensor == binding.tensor {
                continue;
            }
            let same_tensor = tensor.digests == other.digests && tensor.device.dtype == other.device.dtype;
            if same_memory && same_tensor && tensor.base_kind == other.base_kind {
                continue;
            }
            let (name, other) = (Escaped(&tensor.name), Escaped(&other.name));
            return Err(Error::InvalidArgument(format!("the memory for tensor {name} overlaps that for tensor {other}")));
        }
        kept.push(binding);
    }
    if !in_place {
        check_bases(tensors, &kept, &empty)?;
    }
    kept.extend(empty);
    kept.sort_by_key(|binding| binding.tensor);
    if let Some(pair) = kept.windows(2).find(|pair| pair[0].tensor == pair[1].tensor && pair[0].output.bytes() > 0) {
        let name = &tensor_at(tensors, pair[0].tensor)?.name;
        return Err(Error::InvalidArgument(format!("tensor {} is bound twice, to different memory", Escaped(name))));
    }
    kept.dedup_by_key(|binding| binding.tensor);
    Ok(kept)
}

fn base_of(binding: &Binding) -> Option<u64> {
    binding.base.as_ref().map(DeviceSlice::address)
}

fn check_lengths(tensor: &TensorOnDevice, binding: &Binding, in_place: bool) -> Result<()> {
    let name = Escaped(&tensor.name);
    let lane = 1u64 << tensor.device.lane_log2;
    let fits = |what: &str, slice: &DeviceSlice, bytes: u64| {
        if slice.bytes() != bytes {
            return Err(Error::InvalidArgument(format!("{what} of tensor {name} has {} bytes, expected {bytes}", slice.bytes())));
        }
        if bytes > 0 && !slice.address().is_multiple_of(lane) {
            return Err(Error::InvalidArgument(format!(
                "{what} of tensor {name} at {:#x} is not aligned to {lane} bytes",
                slice.address()
            )));
        }
        slice.end().map(|_| ())
    };
    fits("the memory", &binding.output, tensor.bytes)?;
    if in_place {
        if binding.base.is_some() {
            return Err(Error::InvalidArgument(format!("tensor {name} is changed in place, so its binding cannot have a base")));
        }
        if tensor.base_kind == BaseKind::Prefix {
            return Err(Error::InvalidArgument(format!("tensor {name} changes its number of rows, which cannot be done in place")));
        }
        return Ok(());
    }
    match (&binding.base, tensor.base_kind) {
        (_, BaseKind::None) => Ok(()),
        (Some(base), _) => fits("the base", base, tensor.base_bytes),
        (None, _) if tensor.base_bytes == 0 => Ok(()),
        (None, _) => Err(Error::InvalidArgument(format!("the binding of tensor {name} has no base"))),
    }
}

/// Checks that no output overlaps a base, out of place: blocks read bases while other blocks write outputs. `outputs` are sorted
/// by address, disjoint and not empty.
fn check_bases(tensors: &[TensorOnDevice], outputs: &[Binding], empty: &[Binding]) -> Result<()> {
    for binding in outputs.iter().chain(empty) {
        let Some(base) = binding.base.as_ref().filter(|base| base.bytes() > 0) else { continue };
        if tensor_at(tensors, binding.tensor)?.base_kind == BaseKind::None {
            continue;
        }
        // Only the last output that begins before the end of the base can overlap it.
        let end = base.end()?;
        let before = outputs.partition_point(|other| other.output.address() < end);
        let overlapping = outputs[..before].last();
        let Some(other) = overlapping.filter(|other| other.output.address() + other.output.bytes() > base.address()) else {
            continue;
        };
        let name = Escaped(&tensor_at(tensors, binding.tensor)?.name);
        let other = Escaped(&tensor_at(tensors, other.tensor)?.name);
        return Err(Error::InvalidArgument(format!(
            "the memory for tensor {other} overlaps the base of tensor {name}, but the application is out of place"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::index::{all_on_device, tables_of};
    use crate::{Dtype, Encode, MemoryCheckpoint, TensorInfo};

    const START: u64 = 0x7f00_0000_0000;

    /// Returns tensors with these names and numbers of lanes. A lane has two bytes. All digests differ.
    fn tensors(lanes: &[(&str, u64)]) -> Vec<TensorOnDevice> {
        let infos = lanes.iter().map(|(name, n)| TensorInfo { name: (*name).into(), dtype: Dtype::U16, shape: vec![*n] });
        let infos: Vec<_> = infos.collect();
        let bytes = |first: usize| -> Vec<Vec<u8>> {
            lanes.iter().enumerate().map(|(i, (_, n))| vec![(first + i) as u8; 2 * *n as usize]).collect()
        };
        let (base, target) = (bytes(1), bytes(101));
        let [base, target] = [&base, &target]
            .map(|all| MemoryCheckpoint::new(infos.iter().cloned().zip(all.iter().map(|bytes| &bytes[..]))).unwrap());
        let (pair, _) = Encode::new(&target).base(&base).to_memory().unwrap();
        all_on_device(pair.index(), &tables_of(pair.index().table_sets()).unwrap().0)
    }

    /// Returns a slice of fictitious memory, from `at` to `end`.
    fn slice(at: u64, end: u64) -> DeviceSlice {
        // SAFETY: nothing is done with the memory.
        unsafe { DeviceSlice::from_raw(START + at, end - at) }
    }

    fn refused(tensors: &[TensorOnDevice], given: &[Binding], in_place: bool) -> String {
        match check(tensors, given, in_place) {
            Err(Error::InvalidArgument(why)) => why,
            other => panic!("{given:?}: {other:?}"),
        }
    }

    #[test]
    fn an_empty_output_between_two_that_overlap_does_not_hide_that() {
        // Sorted by address, the empty tensors are between the two that overlap.
        let tensors = tensors(&[("a", 50), ("b", 50), ("e", 0), ("f", 0)]);
        let empty = |tensor, at| Binding::in_place(tensor, slice(at, at));
        let given = [Binding::in_place(0, slice(0, 100)), empty(2, 30), empty(3, 98), Binding::in_place(1, slice(98, 198))];
        assert!(refused(&tensors, &given, true).contains("overlaps"));
        let out_of_place = |binding: &Binding| {
            let base = slice(1000 + 1000 * binding.tensor as u64, 1000 + 1000 * binding.tensor as u64 + binding.output.bytes());
            Binding::out_of_place(binding.tensor, Some(base), binding.output.clone())
        };
        assert!(refused(&tensors, &given.clone().map(|binding| out_of_place(&binding)), false).contains("overlaps"));
        // Adjacent outputs are accepted, with empty outputs at any address.
        let given = [Binding::in_place(0, slice(0, 100)), empty(2, 30), empty(3, 100), Binding::in_place(1, slice(100, 200))];
        let bound: Vec<_> = check(&tensors, &given, true).unwrap().iter().map(|binding| binding.tensor).collect();
        assert_eq!(bound, [0, 1, 2, 3]);
    }

    #[test]
    fn an_output_in_a_base_is_refused_with_empty_ones_between() {
        let tensors = tensors(&[("a", 50), ("e", 0)]);
        let empty = |at| Binding::out_of_place(1, None, slice(at, at));
        for (base, output) in [(0, 98), (98, 0), (0, 0)] {
            let bound = Binding::out_of_place(0, Some(slice(base, base + 100)), slice(output, output + 100));
            assert!(refused(&tensors, &[bound, empty(99)], false).contains("overlaps the base"), "{base} {output}");
        }
        let bound = Binding::out_of_place(0, Some(slice(0, 100)), slice(100, 200));
        check(&tensors, &[bound, empty(99)], false).unwrap();
    }

    #[test]
    fn a_tensor_is_bound_once() {
        let tensors = tensors(&[("a", 50), ("e", 0)]);
        let (here, there) = (Binding::in_place(0, slice(0, 100)), Binding::in_place(0, slice(100, 200)));
        assert!(refused(&tensors, &[here.clone(), there], true).contains("twice"));
        let empty = [slice(0, 0), slice(7, 7)].map(|memory| Binding::in_place(1, memory));
        let bound = check(&tensors, &[&[here.clone(), here][..], &empty].concat(), true).unwrap();
        assert_eq!(bound.len(), 2);
    }

    #[test]
    fn memory_that_wraps_around_is_refused() {
        let tensors = tensors(&[("a", 50)]);
        // SAFETY: nothing is done with the memory.
        let memory = unsafe { DeviceSlice::from_raw(u64::MAX - 97, 100) };
        refused(&tensors, &[Binding::in_place(0, memory)], true);
        refused(&tensors, &[Binding::in_place(1, slice(0, 100))], true);
        refused(&tensors, &[Binding::in_place(0, slice(0, 98))], true);
        refused(&tensors, &[Binding::in_place(0, slice(1, 101))], true);
    }
}
