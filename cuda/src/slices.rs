//! Slices of tensors on a device: what a rank of a distributed job holds, bound to the entries of a pair.

use super::derived::SourceTensor;
use super::index::{DeviceIndex, TensorOnDevice};
use super::plan::binding::Binding;
use super::rows::Rows;
use super::runtime::memory::DeviceSlice;
use std::collections::HashMap;
use std::fmt;
use tpde::internals::View;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::format::BaseKind;
use tpde_core::lane::Dtype;
use tpde_core::layout::StridedLayout;
use tpde_core::rectangle::{Rectangle, first_gap, part_fault};

/// Device memory that holds a rectangle of a tensor: the counterpart of [`SliceMut`](tpde::SliceMut) and
/// [`Slice`](tpde::Slice), for memory of this crate or of another library.
///
/// The elements of the rectangle are in row-major order. A *row* is the elements of the rectangle along the last dimension. Rows
/// follow each other without gaps, or begin at multiples of a pitch. The bytes between rows are neither read nor written.
///
/// A device decodes whole entries of a pair. So a slice is one entry, or several parts tile it. The rows of each entry must be at
/// one distance: an entry that has only some indexes of two or more inner dimensions of the slice is refused.
///
/// ```no_run
/// use tpde_cuda::{ApplyPlan, Device, DeviceIndex, DeviceSlice, Mode, Payloads, TensorSlice};
/// use tpde::{InPlace, Pair, Rectangle};
///
/// # fn main() -> tpde::Result<()> {
/// # let (device, pair) = (Device::open(0)?, Pair::open("step-2")?);
/// let index = DeviceIndex::upload(&device, pair.index())?;
/// // The second half of the columns of a matrix [4096, 11008] of BF16, in the middle of memory with 16,384 bytes per row.
/// # let (pointer, bytes) = (0x7f00_0000_0000, 4095 * 16_384 + 2 * 5504);
/// let memory = unsafe { DeviceSlice::from_raw(pointer, bytes) };
/// let part = Rectangle::new([0, 5504], [4096, 5504]);
/// let slices = [TensorSlice::new("layers.0.mlp.down_proj.weight", part, memory).pitch(16_384)];
/// let tensors = TensorSlice::in_place(&index, &slices)?;
/// let plan = ApplyPlan::new(&index, &tensors, Mode::InPlace(InPlace::AllChecked), Payloads::Host(pair.blob()))?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TensorSlice<'a> {
    /// Name of the tensor: in the target, or in the base for a slice of the base.
    pub name: &'a str,
    /// The elements that the memory holds.
    pub rectangle: Rectangle,
    /// The memory, from the first byte of the first row to the last byte of the last row.
    pub memory: DeviceSlice,
    /// Distance between the beginnings of rows in bytes; `None` if rows have no gaps between them.
    pub pitch: Option<u64>,
}

impl<'a> TensorSlice<'a> {
    /// Memory whose rows have no gaps between them.
    pub fn new(name: &'a str, rectangle: Rectangle, memory: DeviceSlice) -> Self {
        Self { name, rectangle, memory, pitch: None }
    }

    /// Sets [`pitch`](Self#structfield.pitch).
    #[must_use]
    pub fn pitch(mut self, bytes: u64) -> Self {
        self.pitch = Some(bytes);
        self
    }

    /// Binds the entries of which slices consist, to be changed in place: a binding per tensor, or per part.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] if the pair lacks a tensor, if a slice is not within its tensor, or if its memory has another
    ///   size; [`Error::Incomplete`] if the pair lacks elements of a slice.
    /// - [`Error::NotHeld`] if a slice has only some elements of a part. The reason names the part with which the pair would fit.
    pub fn in_place(index: &DeviceIndex, slices: &[Self]) -> Result<Vec<Binding>> {
        bind(index, slices, None)
    }

    /// Binds the entries of which slices consist, to be rebuilt from slices of the base. A slice of the base has the name of the
    /// base tensor, and may hold more than is needed. Of a derived base, it holds elements of the tensor of another dtype; a
    /// quantised base also needs a slice of its tensor of scales.
    ///
    /// # Errors
    /// As [`TensorSlice::in_place`]; [`Error::InvalidArgument`] if the base lacks a tensor, and [`Error::NotHeld`] if it lacks
    /// elements of a part.
    pub fn out_of_place(index: &DeviceIndex, slices: &[Self], base: &[Self]) -> Result<Vec<Binding>> {
        bind(index, slices, Some(base))
    }

    /// Returns whether the memory is that of a whole tensor that the pair describes as one entry, without gaps between rows. Such a slice
    /// needs no further checks.
    fn is_all_of(&self, tensor: &TensorOnDevice) -> bool {
        tensor.is_whole() && self.pitch.is_none() && self.rectangle == tensor.rectangle && self.memory.bytes() == tensor.bytes
    }

    /// Checks the slice of a tensor of this dtype and shape.
    fn check(&self, dtype: Dtype, shape: &[u64]) -> Result<()> {
        View::new((self.name, dtype, shape), self.rectangle.clone(), self.pitch, self.memory.bytes(), ()).map(|_| ())
    }

    /// The addresses of the slice, which was checked.
    pub(super) fn layout(&self, dtype: Dtype) -> StridedLayout {
        let extent = &self.rectangle.extent;
        StridedLayout::of_rectangle(dtype.bits(), extent, self.pitch, &vec![0; extent.len()], extent).shifted(self.memory.address())
    }

    /// Returns the memory of a rectangle within the slice, and its rows. The slice was checked.
    pub(super) fn memory_of(&self, dtype: Dtype, rectangle: &Rectangle) -> Result<(DeviceSlice, Option<Rows>)> {
        let refused = |why: &dyn fmt::Display| {
            let (name, slice) = (Escaped(self.name), &self.rectangle);
            Error::InvalidArgument(format!("part {rectangle} of tensor {name} in slice {slice}: {why}"))
        };
        let origin: Vec<u64> = rectangle.origin.iter().zip(&self.rectangle.origin).map(|(at, first)| at - first).collect();
        let is_all = rectangle.extent == self.rectangle.extent;
        if !is_all && part_fault(dtype.bits(), &self.rectangle.extent, &origin, &rectangle.extent).is_some() {
            return Err(refused(&"its rows are not of whole bytes"));
        }
        let layout =
            |extent: &[u64]| StridedLayout::of_rectangle(dtype.bits(), &self.rectangle.extent, self.pitch, &origin, extent);
        let (all, extent) = (layout(&rectangle.extent), &rectangle.extent);
        let rows = match all.dims() {
            [] => None,
            [(_, pitch)] => Some(Rows::new(all.run(), *pitch)),
            _ => {
                // The innermost dimension that has a distance of its own.
                let within = |dim: usize| layout(&[&vec![1; dim][..], &extent[dim..]].concat());
                let dim = (0..extent.len()).rev().find(|&dim| within(dim).dims().len() > 1).unwrap_or(0);
                let dims = if dim == 0 { "dimension 0".to_owned() } else { format!("dimensions 0 to {dim}") };
                return Err(refused(&format_args!(
                    "its rows are at two distances, and a device has one per part. A pair fits in which the tensor is cut at each \
                     index of {dims}"
                )));
            }
        };
        Ok((self.memory.slice(all.start(), all.end() - all.start())?, rows))
    }
}

fn bind(index: &DeviceIndex, slices: &[TensorSlice<'_>], base: Option<&[TensorSlice<'_>]>) -> Result<Vec<Binding>> {
    let mut bindings = Vec::with_capacity(slices.len());
    let mut bases: HashMap<_, Vec<_>> = HashMap::new();
    base.unwrap_or_default().iter().for_each(|slice| bases.entry(slice.name).or_default().push(slice));
    for slice in slices {
        let entries = index.entries(slice.name);
        if entries.is_empty() {
            return Err(Error::InvalidArgument(format!("no tensor {} in the pair", Escaped(slice.name))));
        }
        if let Some(binding) = bind_whole(index, entries.start, slice, base.map(|_| &bases)) {
            bindings.push(binding);
            continue;
        }
        let first = index.tensor(entries.start)?;
        slice.check(first.dtype, &first.whole_shape)?;
        let parts: Vec<_> = index.uploaded.tensors[entries.clone()].iter().map(|tensor| tensor.rectangle.clone()).collect();
        if let Some(missing) = first_gap(&parts, &slice.rectangle) {
            return Err(Error::Incomplete { tensor: slice.name.to_owned(), missing });
        }
        for i in entries {
            let tensor = index.tensor(i)?;
            match slice.rectangle.intersection(&tensor.rectangle) {
                None => continue,
                Some(common) if common != tensor.rectangle => return Err(not_held(tensor, "the slice", slice)),
                Some(_) => {}
            }
            let (output, output_rows) = slice.memory_of(tensor.dtype, &tensor.rectangle)?;
            let mut binding = Binding { output_rows, ..Binding::in_place(i, output) };
            if base.is_some() && tensor.base_kind != BaseKind::None && tensor.base_bytes > 0 {
                let (memory, rows) = match &tensor.derived {
                    Some(derived) => source_of(tensor, &tensor.base_name, &derived.base, &bases, slice)?,
                    None => source_of(tensor, &tensor.base_name, &plain_base(tensor), &bases, slice)?,
                };
                (binding.base, binding.base_rows) = (Some(memory), rows);
                if let Some((name, scales)) = tensor.derived.as_ref().and_then(|derived| derived.scales.as_ref()) {
                    let (memory, rows) = source_of(tensor, name, scales, &bases, slice)?;
                    binding = binding.scales(memory, rows);
                }
            }
            bindings.push(binding);
        }
    }
    Ok(bindings)
}

/// Binds a tensor that is one entry, if its memory is one slice, and that of its base too. `None` if it takes the longer way.
fn bind_whole(
    index: &DeviceIndex,
    entry: usize,
    slice: &TensorSlice<'_>,
    bases: Option<&HashMap<&str, Vec<&TensorSlice<'_>>>>,
) -> Option<Binding> {
    let tensor = index.tensor(entry).ok().filter(|tensor| slice.is_all_of(tensor))?;
    let source = match bases.filter(|_| tensor.base_kind != BaseKind::None && tensor.base_bytes > 0) {
        None => None,
        Some(bases) => match bases.get(tensor.base_name.as_str())?[..] {
            [base] if tensor.base_kind == BaseKind::Same && base.is_all_of(tensor) => Some(base.memory.clone()),
            _ => return None,
        },
    };
    Some(Binding::out_of_place(entry, source, slice.memory.clone()))
}

/// Returns the elements of a base that is not derived.
fn plain_base(tensor: &TensorOnDevice) -> SourceTensor {
    let shape = tensor.base_shape.clone().unwrap_or_default();
    let rectangle = if tensor.is_whole() { Rectangle::whole(&shape) } else { tensor.rectangle.clone() };
    SourceTensor { dtype: tensor.dtype, shape, rectangle }
}

/// Returns the memory of a tensor of the base, of which an entry needs these elements.
fn source_of(
    tensor: &TensorOnDevice,
    name: &str,
    source: &SourceTensor,
    bases: &HashMap<&str, Vec<&TensorSlice<'_>>>,
    output: &TensorSlice<'_>,
) -> Result<(DeviceSlice, Option<Rows>)> {
    let SourceTensor { dtype, shape, rectangle } = source;
    let missing = || Error::InvalidArgument(format!("no slice of the base tensor {}", Escaped(name)));
    for slice in bases.get(name).ok_or_else(missing)? {
        slice.check(*dtype, shape)?;
        if slice.rectangle.intersection(rectangle).is_some_and(|common| common == *rectangle) {
            return slice.memory_of(*dtype, rectangle);
        }
    }
    Err(not_held(tensor, "the base", output))
}

/// The error for an entry of which `what` lacks elements.
fn not_held(tensor: &TensorOnDevice, what: &str, slice: &TensorSlice<'_>) -> Error {
    Error::NotHeld {
        tensor: tensor.name.clone(),
        chunk: tensor.device.first_chunk,
        reason: format!(
            "{what} lacks some of {}, and a device decodes whole parts. A pair fits in which the tensor is cut at the part {}",
            tensor.rectangle, slice.rectangle
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A shape; and for each dimension the range of a slice, and a range within it.
    fn slices() -> impl Strategy<Value = (Vec<u64>, Rectangle, Rectangle)> {
        let within = |length: u64, a: u64, b: u64| {
            let origin = a % length;
            (origin, 1 + b % (length - origin))
        };
        prop::collection::vec((1u64..6, any::<[u64; 4]>()), 1..5).prop_map(move |dims| {
            let mut shape = Vec::new();
            let [mut slice, mut part] = [(); 2].map(|()| Rectangle::new([], []));
            for (dim, [a, b, c, d]) in dims {
                let (origin, extent) = within(dim, a, b);
                let (inner, inner_extent) = within(extent, c, d);
                shape.push(dim);
                slice.origin.push(origin);
                slice.extent.push(extent);
                part.origin.push(origin + inner);
                part.extent.push(inner_extent);
            }
            (shape, slice, part)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]
        /// The bytes of a part, found through the layout of slices that the processor uses.
        #[test]
        fn rows_of_a_part_are_its_bytes_in_the_slice((shape, rectangle, part) in slices(), gap in 0u64..3) {
            let width = rectangle.extent.last().unwrap() * 2;
            let rows: u64 = rectangle.extent.iter().rev().skip(1).product();
            let pitch = (gap > 0).then_some(width + 2 * gap);
            let size = (rows - 1) * pitch.unwrap_or(width) + width;
            // SAFETY: nothing is done with the memory.
            let memory = unsafe { DeviceSlice::from_raw(1 << 40, size) };
            let slice = TensorSlice { name: "t", rectangle: rectangle.clone(), memory, pitch };
            slice.check(Dtype::Bf16, &shape).unwrap();

            let view = View::new(("t", Dtype::Bf16, &shape), rectangle, pitch, size, ()).unwrap();
            let mut expected = Vec::new();
            let all = 2 * part.elements() as usize;
            view.placement(&part).unwrap().try_each(0, all, |place, range| {
                expected.extend(place as u64..(place + range.len()) as u64);
                Ok::<_, Error>(())
            }).unwrap();
            match slice.memory_of(Dtype::Bf16, &part) {
                Ok((memory, rows)) => {
                    let (start, end) = (memory.address() - (1 << 40), memory.end().unwrap() - (1 << 40));
                    let rows = rows.unwrap_or(Rows::new(memory.bytes(), memory.bytes()));
                    let found: Vec<u64> =
                        (start..end).step_by(rows.pitch as usize).flat_map(|row| row..row + rows.bytes).collect();
                    prop_assert_eq!(found, expected);
                }
                // With three dimensions, the rows of a part can be at two distances. Parts of one index avoid that, as the error
                // says.
                Err(error) => {
                    let mut dims = (1..shape.len()).map(|i| (i, format!("dimensions 0 to {i}"))).chain([(0, "dimension 0".into())]);
                    let (last, _) = dims.find(|(_, text)| error.to_string().ends_with(text.as_str())).unwrap();
                    prop_assert!(shape.len() > 2 && last + 2 < shape.len());
                    let mut cut = part.clone();
                    cut.extent[..=last].fill(1);
                    prop_assert!(slice.memory_of(Dtype::Bf16, &cut).is_ok());
                }
            }
        }
    }

    #[test]
    fn packed_elements_have_rows_of_whole_bytes() {
        // SAFETY: nothing is done with the memory.
        let memory = unsafe { DeviceSlice::from_raw(0, 12) };
        let slice = TensorSlice::new("t", Rectangle::whole(&[4, 6]), memory);
        let (memory, rows) = slice.memory_of(Dtype::F4, &Rectangle::new([0, 2], [4, 2])).unwrap();
        assert_eq!((memory.address(), memory.bytes(), rows), (1, 10, Some(Rows::new(1, 3))));
        let (memory, rows) = slice.memory_of(Dtype::F4, &Rectangle::new([1, 0], [2, 6])).unwrap();
        assert_eq!((memory.address(), memory.bytes(), rows), (3, 6, None));
        slice.memory_of(Dtype::F4, &Rectangle::new([0, 1], [4, 2])).unwrap_err();
    }
}
