//! Which memory holds which tensor, and what is refused of it.

use super::index::{DeviceIndex, TensorOnDevice};
use super::memory::DeviceSlice;
use crate::error::{Error, Escaped, Result};
use crate::format::BaseKind;

/// A tensor of an application and the memory that it is in. Slices are aligned to the tensor's lanes.
#[derive(Debug, Clone)]
pub struct Binding {
    /// Place of the tensor in the index; see [`DeviceIndex::find`].
    pub tensor: usize,
    /// The base tensor, where the base kind has one and the application is out of place.
    pub base: Option<DeviceSlice>,
    /// Where the target is written; in place, where the base lies.
    pub output: DeviceSlice,
}

impl Binding {
    /// A tensor rebuilt from `base` in `output`.
    pub fn out_of_place(tensor: usize, base: Option<DeviceSlice>, output: DeviceSlice) -> Self {
        Self { tensor, base, output }
    }

    /// A tensor changed where it lies.
    pub fn in_place(tensor: usize, memory: DeviceSlice) -> Self {
        Self { tensor, base: None, output: memory }
    }
}

/// Bindings that kernels may be given, each once.
#[derive(Debug)]
pub(super) struct Checked {
    /// By place of the tensor, ascending; those that others stand for are left out.
    pub bindings: Vec<Binding>,
}

/// Checks lengths, alignment and overlaps. Of tensors that are given with the same memory, which is right where they are the
/// same tensor under several names, one is decoded.
pub(super) fn check(index: &DeviceIndex, given: &[Binding], in_place: bool) -> Result<Checked> {
    let mut bindings = given.to_vec();
    bindings.sort_by_key(|binding| binding.tensor);
    for binding in &bindings {
        check_lengths(index.tensor(binding.tensor)?, binding, in_place)?;
    }
    // By where the outputs lie; of equal ones the first tensor leads.
    bindings.sort_by_key(|binding| (binding.output.address(), std::cmp::Reverse(binding.output.bytes()), binding.tensor));
    let mut kept: Vec<Binding> = Vec::with_capacity(bindings.len());
    for binding in bindings {
        let tensor = index.tensor(binding.tensor)?;
        let before = kept.last().filter(|before| binding.output.bytes() > 0 && before.output.bytes() > 0);
        if let Some(before) = before.filter(|before| before.output.address() + before.output.bytes() > binding.output.address()) {
            let other = index.tensor(before.tensor)?;
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
            return Err(Error::Misuse(format!("the memory for tensor {name} overlaps that for tensor {other}")));
        }
        kept.push(binding);
    }
    if !in_place {
        check_bases(index, &kept)?;
    }
    kept.sort_by_key(|binding| binding.tensor);
    if let Some(pair) = kept.windows(2).find(|pair| pair[0].tensor == pair[1].tensor && pair[0].output.bytes() > 0) {
        let name = &index.tensor(pair[0].tensor)?.name;
        return Err(Error::Misuse(format!("tensor {} is given twice, in different memory", Escaped(name))));
    }
    kept.dedup_by_key(|binding| binding.tensor);
    Ok(Checked { bindings: kept })
}

fn base_of(binding: &Binding) -> Option<u64> {
    binding.base.as_ref().map(DeviceSlice::address)
}

fn check_lengths(tensor: &TensorOnDevice, binding: &Binding, in_place: bool) -> Result<()> {
    let name = Escaped(&tensor.name);
    let lane = 1u64 << tensor.device.lane_log2;
    let fits = |what: &str, slice: &DeviceSlice, bytes: u64| {
        if slice.bytes() != bytes {
            return Err(Error::Misuse(format!("{what} of tensor {name} is given with {} bytes, it has {bytes}", slice.bytes())));
        }
        if bytes > 0 && !slice.address().is_multiple_of(lane) {
            return Err(Error::Misuse(format!("{what} of tensor {name} at {:#x} is not aligned to {lane} bytes", slice.address())));
        }
        slice.end().map(|_| ())
    };
    fits("the memory", &binding.output, tensor.bytes)?;
    if in_place {
        if binding.base.is_some() {
            return Err(Error::Misuse(format!("tensor {name} is changed in place, and given with a base")));
        }
        if tensor.base_kind == BaseKind::Prefix {
            return Err(Error::Misuse(format!("tensor {name} changes its number of rows, which cannot be done in place")));
        }
        return Ok(());
    }
    match (&binding.base, tensor.base_kind) {
        (_, BaseKind::None) => Ok(()),
        (Some(base), _) => fits("the base", base, tensor.base_bytes),
        (None, _) if tensor.base_bytes == 0 => Ok(()),
        (None, _) => Err(Error::Misuse(format!("tensor {name} is given without its base"))),
    }
}

/// Out of place no output may overlap a base: blocks read bases while others write.
fn check_bases(index: &DeviceIndex, outputs: &[Binding]) -> Result<()> {
    // `outputs` ascend and do not overlap, so the only one that can hold a place is the last that begins at or before it.
    for binding in outputs {
        let Some(base) = binding.base.as_ref().filter(|base| base.bytes() > 0) else { continue };
        if index.tensor(binding.tensor)?.base_kind == BaseKind::None {
            continue;
        }
        let end = base.end()?;
        let before = outputs.partition_point(|other| other.output.address() < end);
        let overlapping = outputs[..before].iter().rev().find(|other| other.output.bytes() > 0);
        let Some(other) = overlapping.filter(|other| other.output.address() + other.output.bytes() > base.address()) else {
            continue;
        };
        let name = Escaped(&index.tensor(binding.tensor)?.name);
        let other = Escaped(&index.tensor(other.tensor)?.name);
        return Err(Error::Misuse(format!(
            "the memory for tensor {other} overlaps the base of tensor {name}: that is an application in place"
        )));
    }
    Ok(())
}
