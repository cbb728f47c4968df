//! Slices of tensors on a device: what a rank of a distributed job holds, bound to the entries of a pair.

use super::derived::SourceTensor;
use super::index::{DeviceIndex, TensorOnDevice};
use super::plan::binding::{Binding, Extension, Portion, PortionOf};
use super::rows::Rows;
use super::runtime::memory::DeviceSlice;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
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
/// A device decodes whole chunks, as [`Apply::in_place_slices`](tpde::Apply::in_place_slices) does. A slice may have some chunks of an
/// entry whose base has its dtype and shape, or that has no base; then the digests of the entry are not compared, and no other slice
/// has chunks of it. A slice has all of any other entry. The rows of each entry must be at one distance: an entry that has only some indexes
/// of two or more inner dimensions of the slice is refused.
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
    /// - [`Error::NotHeld`] if a slice has only some elements of a chunk. The reason names the part with which the pair would fit.
    pub fn in_place(index: &DeviceIndex, slices: &[Self]) -> Result<Vec<Binding>> {
        bind(index, slices, None)
    }

    /// Binds the entries of which slices consist, to be rebuilt from slices of the base. A slice of the base has the name of the
    /// base tensor, and may hold more than is needed. Of a derived base, it holds elements of the tensor of another dtype; a
    /// quantised base also needs a slice of its tensor of scales.
    ///
    /// # Errors
    /// As [`TensorSlice::in_place`]; [`Error::InvalidArgument`] if the base lacks a tensor, and [`Error::NotHeld`] if it lacks
    /// elements of a chunk.
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

    /// Extends the memory of elements `common` of an entry to all of the entry. The slice was checked, and has these elements.
    fn extension(&self, tensor: &TensorOnDevice, common: &Rectangle) -> Result<Extension> {
        let (entry, bits) = (&tensor.rectangle, tensor.dtype.bits());
        // Strides of a dimension in the entry and in the memory, and the first common element in both, in bits.
        let (mut in_entry, mut in_memory) = (bits, bits);
        let (mut first, mut at) = (0, 0);
        let mut rows: Option<(u64, u64)> = None;
        let mut fits = true;
        for (dim, &extent) in common.extent.iter().enumerate().rev() {
            first += (common.origin[dim] - entry.origin[dim]) * in_entry;
            at += (common.origin[dim] - self.rectangle.origin[dim]) * in_memory;
            match rows {
                _ if extent == 1 => {}
                None if in_entry == in_memory => {}
                None => rows = Some((in_entry, in_memory)),
                Some((row, pitch)) => fits &= u128::from(in_memory) * u128::from(row) == u128::from(in_entry) * u128::from(pitch),
            }
            in_entry = in_entry.saturating_mul(entry.extent[dim]);
            let pitch = self.pitch.filter(|_| dim + 1 == common.extent.len()).map(|pitch| pitch.saturating_mul(8));
            in_memory = pitch.unwrap_or(in_memory.saturating_mul(self.rectangle.extent[dim]));
        }
        let (row, pitch) = rows.unwrap_or((u64::MAX, u64::MAX));
        if !fits || rows.is_some() && !(row.is_multiple_of(8) && pitch.is_multiple_of(8)) {
            let reason = "the rows of the slice are at two distances in the part, and a device has one";
            return Err(Error::InvalidArgument(format!("part {entry} of tensor {}: {reason}", Escaped(self.name))));
        }
        let before = (first / row).wrapping_mul(pitch / 8).wrapping_add(first % row / 8);
        let start = (self.memory.address() + at / 8).wrapping_sub(before);
        Ok(Extension { start, rows: rows.map(|(row, pitch)| Rows::new(row / 8, pitch / 8)) })
    }
}

fn bind(index: &DeviceIndex, slices: &[TensorSlice<'_>], base: Option<&[TensorSlice<'_>]>) -> Result<Vec<Binding>> {
    let mut bindings = Vec::with_capacity(slices.len());
    let mut portions = HashSet::new();
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
                Some(common) if common != tensor.rectangle => {
                    let binding = bind_portion(i, tensor, &common, slice, base.map(|_| &bases))?;
                    if !portions.insert(i) {
                        let first = tensor.device.first_chunk;
                        return Err(not_held(tensor, first, "each of several slices", slice));
                    }
                    bindings.push(binding);
                    continue;
                }
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

/// Binds the chunks of an entry that a slice has, which are the elements `common`.
fn bind_portion(
    entry: usize,
    tensor: &TensorOnDevice,
    common: &Rectangle,
    slice: &TensorSlice<'_>,
    bases: Option<&HashMap<&str, Vec<&TensorSlice<'_>>>>,
) -> Result<Binding> {
    let chunks = whole_chunks(tensor, common).map_err(|chunk| not_held(tensor, chunk, "the slice", slice))?;
    let first = tensor.device.first_chunk;
    let (output, output_at) = (slice.memory_of(tensor.dtype, common)?, slice.extension(tensor, common)?);
    let mut binding = Binding { output_rows: output.1, ..Binding::in_place(entry, output.0) };
    let mut base_at = None;
    if let Some(bases) = bases.filter(|_| tensor.base_kind != BaseKind::None && tensor.base_bytes > 0) {
        if tensor.base_kind != BaseKind::Same {
            return Err(not_held(tensor, first, "its base has another dtype or shape, and the slice", slice));
        }
        let source = SourceTensor { rectangle: common.clone(), ..plain_base(tensor) };
        let base = holder(&tensor.base_name, &source, bases)?.ok_or_else(|| not_held(tensor, first, "the base", slice))?;
        (binding.base, binding.base_rows) = base.memory_of(tensor.dtype, common).map(|(memory, rows)| (Some(memory), rows))?;
        base_at = Some(base.extension(tensor, common)?);
    }
    let of = PortionOf::new(tensor, &binding);
    binding.portion = Some(Portion { chunks, output: output_at, base: base_at, of });
    Ok(binding)
}

/// Returns the chunks of an entry that consist of the elements `common` of it.
///
/// # Errors
/// The first chunk that has other elements too.
fn whole_chunks(tensor: &TensorOnDevice, common: &Rectangle) -> Result<Vec<Range<u32>>, u32> {
    let entry = &tensor.rectangle;
    let origin: Vec<u64> = common.origin.iter().zip(&entry.origin).map(|(at, first)| at - first).collect();
    let layout = StridedLayout::of_rectangle(tensor.dtype.bits(), &entry.extent, None, &origin, &common.extent);
    let chunk_bytes = 1u64 << (tensor.device.chunk_lanes_log2 + tensor.device.lane_log2);
    let mut chunks: Vec<Range<u32>> = Vec::new();
    layout.try_each(0, layout.bytes() as usize, |at, range| {
        let end = at + range.len() as u64;
        let is_whole = |byte: u64| byte.is_multiple_of(chunk_bytes) || byte == tensor.bytes;
        if let Some(cut) = [at, end].into_iter().find(|&byte| !is_whole(byte)) {
            return Err(tensor.device.first_chunk + (cut / chunk_bytes) as u32);
        }
        let chunk = |byte: u64| tensor.device.first_chunk + byte.div_ceil(chunk_bytes) as u32;
        match chunks.last_mut().filter(|last| last.end == chunk(at)) {
            Some(last) => last.end = chunk(end),
            None => chunks.push(chunk(at)..chunk(end)),
        }
        Ok(())
    })?;
    Ok(chunks)
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
    let base = holder(name, source, bases)?.ok_or_else(|| not_held(tensor, tensor.device.first_chunk, "the base", output))?;
    base.memory_of(source.dtype, &source.rectangle)
}

/// Returns the slice of a tensor of the base that has these elements. `None` if no slice has them all.
fn holder<'s, 'a>(
    name: &str,
    source: &SourceTensor,
    bases: &HashMap<&str, Vec<&'s TensorSlice<'a>>>,
) -> Result<Option<&'s TensorSlice<'a>>> {
    let missing = || Error::InvalidArgument(format!("no slice of the base tensor {}", Escaped(name)));
    for slice in bases.get(name).ok_or_else(missing)? {
        slice.check(source.dtype, &source.shape)?;
        if slice.rectangle.intersection(&source.rectangle).is_some_and(|common| common == source.rectangle) {
            return Ok(Some(slice));
        }
    }
    Ok(None)
}

/// The error for an entry of which `what` lacks elements.
fn not_held(tensor: &TensorOnDevice, chunk: u32, what: &str, slice: &TensorSlice<'_>) -> Error {
    Error::NotHeld {
        tensor: tensor.name.clone(),
        chunk,
        reason: format!(
            "{what} lacks some of {}, and a device decodes whole chunks. A pair fits in which the tensor is cut at the part {}",
            tensor.rectangle, slice.rectangle
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::DeviceTensor;
    use proptest::prelude::*;
    use tpde_core::codec::Codec;
    use tpde_core::format::TensorDigests;

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

    /// An entry of a tensor of this shape.
    fn entry(shape: &[u64], rectangle: Rectangle, chunk_lanes_log2: u8) -> TensorOnDevice {
        let bytes = 2 * rectangle.elements();
        let device = DeviceTensor { first_chunk: 7, lane_log2: 1, chunk_lanes_log2, ..DeviceTensor::default() };
        TensorOnDevice {
            name: "t".into(),
            base_name: "t".into(),
            dtype: Dtype::Bf16,
            whole_shape: shape.to_vec(),
            rectangle,
            base_shape: Some(shape.to_vec()),
            base_kind: BaseKind::Same,
            codec: Codec::Raw,
            bytes,
            base_bytes: bytes,
            chunk_count: (bytes / 2).div_ceil(1 << chunk_lanes_log2) as u32,
            digests: TensorDigests::default(),
            derived: None,
            device,
        }
    }

    /// Memory that would begin far before its address: the distance exceeds 2^64 bits.
    #[test]
    fn an_entry_may_begin_far_before_the_memory_of_a_slice() {
        let (shape, pitch) = ([1 << 26, 4096], 1 << 36);
        let tensor = entry(&shape, Rectangle::whole(&shape), 12);
        let slice = Rectangle::new([1 << 25, 0], [2, 4096]);
        // SAFETY: nothing is done with the memory.
        let memory = unsafe { DeviceSlice::from_raw(1 << 40, pitch + 8192) };
        let one = TensorSlice { name: "t", rectangle: slice.clone(), memory, pitch: Some(pitch) };
        let Extension { start, rows } = one.extension(&tensor, &slice).unwrap();
        assert_eq!(rows, Some(Rows::new(8192, pitch)));
        assert_eq!(start.wrapping_add((1u64 << 25).wrapping_mul(pitch)), 1 << 40);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 5000, ..ProptestConfig::default() })]
        /// The chunks of an entry that a slice has, and where memory of the slice, extended to the entry, has each of their bytes.
        #[test]
        fn some_chunks_of_an_entry_are_where_the_slice_has_them(
            (shape, rectangle, part) in slices(), gap in 0u64..3, chunk_log2 in 0u8..6, swaps: bool,
        ) {
            // The slice is within the entry, or has some of the elements of a part of it.
            let (shape, slice, of_entry) = if swaps { (shape, part, rectangle) } else { (shape, rectangle, part) };
            let Some(common) = slice.intersection(&of_entry) else { return Ok(()) };
            let tensor = entry(&shape, of_entry.clone(), chunk_log2);
            let width = slice.extent.last().unwrap() * 2;
            let rows: u64 = slice.extent.iter().rev().skip(1).product();
            let pitch = (gap > 0).then_some(width + 2 * gap);
            let size = (rows - 1) * pitch.unwrap_or(width) + width;
            // SAFETY: nothing is done with the memory.
            let memory = unsafe { DeviceSlice::from_raw(1 << 40, size) };
            let one = TensorSlice { name: "t", rectangle: slice.clone(), memory, pitch };

            let placement = View::new(("t", Dtype::Bf16, &shape), slice, pitch, size, ()).unwrap().placement(&of_entry).unwrap();
            let chunk_bytes = 2u64 << chunk_log2;
            let held = |chunk: u64| placement.count(chunk * chunk_bytes, chunk_bytes.min(tensor.bytes - chunk * chunk_bytes) as usize);
            let size_of = |chunk: u64| chunk_bytes.min(tensor.bytes - chunk * chunk_bytes) as usize;
            let chunks = 0..u64::from(tensor.chunk_count);
            let expected: Vec<u64> = chunks.clone().filter(|&chunk| held(chunk) > 0).collect();
            let cut = expected.iter().find(|&&chunk| held(chunk) < size_of(chunk));
            match whole_chunks(&tensor, &common) {
                Err(chunk) => prop_assert_eq!(cut, Some(&(u64::from(chunk) - 7))),
                Ok(found) => {
                    prop_assert_eq!(cut, None);
                    let found: Vec<_> = found.into_iter().flatten().map(|chunk| u64::from(chunk) - 7).collect();
                    prop_assert_eq!(&found, &expected);
                    // Rows at two distances are refused, of three dimensions or more.
                    let Ok(Extension { start, rows }) = one.extension(&tensor, &common) else {
                        prop_assert!(shape.len() > 2);
                        return Ok(());
                    };
                    let (row, pitch) = rows.map_or((u64::MAX, 0), |rows| (rows.bytes, rows.pitch));
                    for chunk in found {
                        let at = chunk * chunk_bytes;
                        placement.try_each(at, size_of(chunk), |place, range| {
                            for (n, byte) in (0u64..).zip(range.clone().map(|byte| at + byte as u64)) {
                                assert_eq!(start.wrapping_add(byte / row * pitch).wrapping_add(byte % row), (1 << 40) + place as u64 + n);
                            }
                            Ok::<_, Error>(())
                        }).unwrap();
                    }
                }
            }
        }
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
