//! Rectangles of tensors in memory, with rows at a distance from each other: the slices that ranks of a distributed job hold.

#![forbid(unsafe_code)]

use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::error::{Error, Escaped, Result};
use crate::lane::Dtype;
use crate::rectangle::{Rectangle, overlap, part_fault};
use std::ops::Range;

/// Memory for a rectangle of a tensor, to be rebuilt or to be changed in place.
///
/// The elements of the rectangle are in row-major order. A *row* is what the rectangle has of the last dimension. Rows follow
/// each other without gaps, or begin at multiples of a pitch. The bytes between rows are neither read nor written.
#[derive(Debug)]
#[non_exhaustive]
pub struct SliceMut<'a> {
    /// Name of the tensor in the target.
    pub name: &'a str,
    /// The elements that the memory holds.
    pub rectangle: Rectangle,
    /// The memory, from the first byte of the first row to the last byte of the last row.
    pub bytes: &'a mut [u8],
    /// Distance between the beginnings of rows in bytes; `None` if rows have no gaps between them.
    pub pitch: Option<u64>,
}

impl<'a> SliceMut<'a> {
    /// Memory whose rows have no gaps between them.
    pub fn new(name: &'a str, rectangle: Rectangle, bytes: &'a mut [u8]) -> Self {
        Self { name, rectangle, bytes, pitch: None }
    }

    /// Sets [`pitch`](Self#structfield.pitch).
    #[must_use]
    pub fn pitch(mut self, bytes: u64) -> Self {
        self.pitch = Some(bytes);
        self
    }
}

/// Memory that holds a rectangle of a tensor, with rows as in [`SliceMut`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Slice<'a> {
    /// Name, dtype and shape of the whole tensor.
    pub tensor: TensorInfo,
    /// The elements that the memory holds.
    pub rectangle: Rectangle,
    /// The memory.
    pub bytes: &'a [u8],
    /// Distance between the beginnings of rows in bytes; `None` if rows have no gaps between them.
    pub pitch: Option<u64>,
}

impl<'a> Slice<'a> {
    /// Memory whose rows have no gaps between them.
    pub fn new(tensor: TensorInfo, rectangle: Rectangle, bytes: &'a [u8]) -> Self {
        Self { tensor, rectangle, bytes, pitch: None }
    }

    /// Sets [`pitch`](Self#structfield.pitch).
    #[must_use]
    pub fn pitch(mut self, bytes: u64) -> Self {
        self.pitch = Some(bytes);
        self
    }
}

/// Where the bytes of a tensor are in the memory of a slice.
#[derive(Debug, Clone)]
pub(crate) struct SliceLayout {
    /// Of each dimension before the row: its length, the first index that is held, and the number of indexes that are held.
    outer: Vec<(u64, u64, u64)>,
    /// Size of a row of the tensor in bytes.
    row: u64,
    /// The bytes of a row that are held.
    held: Range<u64>,
    pitch: u64,
}

impl SliceLayout {
    /// The layout of a rectangle of a tensor in `size` bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the rectangle is not within the tensor, if its rows are not whole bytes, or if the memory
    /// has another size.
    pub fn new(name: &str, dtype: Dtype, shape: &[u64], slice: &Rectangle, pitch: Option<u64>, size: u64) -> Result<Self> {
        let (origin, extent) = (&slice.origin[..], &slice.extent[..]);
        let refused = |reason: &str| {
            let name = Escaped(name);
            Error::InvalidArgument(format!("slice {slice} of tensor {name} of {shape:?}: {reason}"))
        };
        let is_whole = *slice == Rectangle::whole(shape);
        let is_empty = extent.contains(&0) && slice.is_within(shape);
        if let Some(fault) = part_fault(dtype.bits(), shape, origin, extent).filter(|_| !is_whole && !is_empty) {
            return Err(refused(fault));
        }
        if is_empty {
            // No row has bytes. The other dimensions may be so large that their product overflows.
            let empty = Self { outer: Vec::new(), row: u64::MAX, held: 0..0, pitch: 0 };
            return if size == 0 { Ok(empty) } else { Err(refused(&format!("memory of {size} bytes, expected 0"))) };
        }
        // Without gaps between rows, trailing dimensions that are held completely belong to the row.
        let cut = shape.iter().zip(extent).rposition(|(dim, extent)| dim != extent);
        let last = if pitch.is_some() { shape.len().checked_sub(1) } else { cut };
        let inner: u64 = last.map_or(shape, |last| &shape[last + 1..]).iter().product();
        let bytes = |elements: u64| {
            let bits = elements * inner * dtype.bits();
            if bits.is_multiple_of(8) { Ok(bits / 8) } else { Err(refused("rows that are not of whole bytes")) }
        };
        let (row, held) = match last {
            None => (bytes(1)?, 0..bytes(1)?),
            Some(last) => (bytes(shape[last])?, bytes(origin[last])?..bytes(origin[last] + extent[last])?),
        };
        let outer: Vec<_> = (0..last.unwrap_or(0)).map(|i| (shape[i], origin[i], extent[i])).collect();
        let width = held.end - held.start;
        let pitch = pitch.unwrap_or(width);
        if pitch < width {
            return Err(refused(&format!("a pitch of {pitch} bytes for rows of {width}")));
        }
        let rows = outer.iter().map(|dim| dim.2).product::<u64>();
        let needed = match rows {
            0 => Some(0),
            rows => (rows - 1).checked_mul(pitch).and_then(|bytes| bytes.checked_add(width)),
        };
        if needed != Some(size) {
            let needed = needed.map_or("too many".to_owned(), |bytes| bytes.to_string());
            return Err(refused(&format!("memory of {size} bytes, expected {needed}")));
        }
        Ok(Self { outer, row, held, pitch })
    }

    /// Calls `each` for the bytes that are held, of the `size` bytes from byte `offset` of the tensor on: with their offset in
    /// the memory, and their range within the `size` bytes. Returns how many these are.
    pub fn try_each(&self, offset: u64, size: usize, mut each: impl FnMut(usize, Range<usize>) -> Result<()>) -> Result<usize> {
        let (mut done, mut held) = (0, 0);
        while done < size {
            let at = offset + done as u64;
            let (row, from) = (at / self.row, at % self.row);
            let end = (size - done).min((self.row - from) as usize);
            if let Some(number) = self.row_in_memory(row) {
                let range = self.held.start.max(from)..self.held.end.min(from + end as u64);
                if range.start < range.end {
                    let place = number * self.pitch + (range.start - self.held.start);
                    let first = done + (range.start - from) as usize;
                    let count = (range.end - range.start) as usize;
                    each(place as usize, first..first + count)?;
                    held += count;
                }
            }
            done += end;
        }
        Ok(held)
    }

    /// The offset in the memory of `size` bytes from byte `offset` of the tensor on, if one row has them.
    fn contiguous(&self, offset: u64, size: usize) -> Option<usize> {
        let (row, from) = (offset / self.row, offset % self.row);
        let end = from.checked_add(size as u64)?;
        let is_held = self.held.start <= from && end <= self.held.end;
        let number = self.row_in_memory(row).filter(|_| is_held)?;
        Some((number * self.pitch + (from - self.held.start)) as usize)
    }

    /// The number of a row of the tensor among those that are held.
    fn row_in_memory(&self, mut row: u64) -> Option<u64> {
        let (mut number, mut rows) = (0, 1);
        for &(length, origin, extent) in self.outer.iter().rev() {
            let index = (row % length).checked_sub(origin).filter(|&index| index < extent)?;
            number += index * rows;
            rows *= extent;
            row /= length;
        }
        // Rows past the end of the tensor are in no slice.
        (row == 0).then_some(number)
    }
}

/// A checkpoint of which only rectangles of the tensors are held, in memory: what a rank of a distributed job has.
///
/// [`Apply`] reads only the base lanes of the chunks that it decodes. [`Encode`] describes only the parts that are held:
///
/// ```
/// # use tpde::{Dtype, Encode, EncodeOptions, Merge, Rectangle, Slice, SliceCheckpoint, TensorInfo};
/// # fn main() -> tpde::Result<()> {
/// let info = TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![3, 4] };
/// let (base, target) = ([1; 12], [2; 12]);
/// // Two ranks hold two rows and one, and share one list of parts: the halves of their rows.
/// let cuts: Vec<_> = [0, 2].map(|row| [0, 2].map(|column| Rectangle::new([row, column], [2 - row / 2, 2]))).concat();
/// let mut pairs = Vec::new();
/// for (rank, bytes) in [(0, 0..8), (1, 8..12)] {
///     let rows = Rectangle::whole(&info.shape).shard(0, 2, rank).expect("dimension 0 of rank 0 or 1");
///     let slice = |bytes| SliceCheckpoint::new([Slice::new(info.clone(), rows.clone(), bytes)]);
///     let options = EncodeOptions::default().cuts([("w", cuts.clone())]);
///     let (base, target) = (slice(&base[bytes.clone()])?, slice(&target[bytes])?);
///     pairs.push(Encode::new(&target).base(&base).options(options).to_memory()?.0);
/// }
/// assert_eq!(Merge::new(&pairs).to_memory()?.0.index().tensor_count(), 4);
/// # Ok(())
/// # }
/// ```
///
/// [`Apply`]: crate::Apply
/// [`Encode`]: crate::Encode
#[derive(Debug, Default)]
pub struct SliceCheckpoint<'a> {
    infos: Vec<TensorInfo>,
    /// The slices of each tensor.
    held: Vec<Vec<Held<'a>>>,
}

/// A slice of a [`SliceCheckpoint`].
#[derive(Debug)]
struct Held<'a> {
    rectangle: Rectangle,
    layout: SliceLayout,
    bytes: &'a [u8],
}

impl<'a> SliceCheckpoint<'a> {
    /// A checkpoint of these slices. Several slices may be of one tensor, and a slice may be empty.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if slices of one tensor have elements in common, or state different dtypes or shapes, or if a
    /// slice is not within its tensor or has another size.
    pub fn new(slices: impl IntoIterator<Item = Slice<'a>>) -> Result<Self> {
        let mut slices: Vec<_> = slices.into_iter().collect();
        slices.sort_by(|a, b| a.tensor.name.cmp(&b.tensor.name));
        let mut checkpoint = Self::default();
        for Slice { tensor, rectangle, bytes, pitch } in slices {
            let TensorInfo { name, dtype, shape } = &tensor;
            let is_possible = dtype.lanes(shape).is_some();
            let impossible = || Error::InvalidArgument(format!("tensor {} has an impossible shape {shape:?}", Escaped(name)));
            is_possible.then_some(()).ok_or_else(impossible)?;
            let layout = SliceLayout::new(name, *dtype, shape, &rectangle, pitch, bytes.len() as u64)?;
            let held = Held { rectangle, layout, bytes };
            match (checkpoint.infos.last(), checkpoint.held.last_mut()) {
                (Some(last), Some(others)) if last.name == *name => {
                    if (last.dtype, &last.shape) != (*dtype, shape) {
                        let found = format!("{} {:?} and {dtype} {shape:?}", last.dtype, last.shape);
                        return Err(Error::InvalidArgument(format!("slices are of tensor {} of {found}", Escaped(name))));
                    }
                    others.push(held);
                }
                _ => {
                    checkpoint.held.push(vec![held]);
                    checkpoint.infos.push(tensor);
                }
            }
        }
        for (info, held) in checkpoint.infos.iter().zip(&checkpoint.held) {
            check_disjoint(&info.name, held.iter().map(|held| &held.rectangle))?;
        }
        Ok(checkpoint)
    }
}

/// Checks that slices of a tensor have no elements in common.
pub(crate) fn check_disjoint<'a>(name: &str, slices: impl IntoIterator<Item = &'a Rectangle>) -> Result<()> {
    match overlap(slices) {
        Some([a, b]) => Err(Error::InvalidArgument(format!("slices {a} and {b} of tensor {} overlap", Escaped(name)))),
        None => Ok(()),
    }
}

impl Checkpoint for SliceCheckpoint<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let size = out.len();
        let mut read = 0;
        for Held { layout, bytes, .. } in self.held.get(tensor_index).into_iter().flatten() {
            read += layout.try_each(offset, size, |at, range| {
                let count = range.len();
                out[range].copy_from_slice(&bytes[at..at + count]);
                Ok(())
            })?;
            if read == size {
                return Ok(());
            }
        }
        let reason = format!("tensor {tensor_index}: not all of {size} bytes from byte {offset} on are held");
        if read == size { Ok(()) } else { Err(Error::InvalidArgument(reason)) }
    }

    fn in_place(&self, tensor_index: usize, offset: u64, size: usize) -> Option<&[u8]> {
        let at = |held: &Held<'_>| held.layout.contiguous(offset, size);
        self.held.get(tensor_index)?.iter().find_map(|held| held.bytes.get(at(held)?..)?.get(..size))
    }

    fn held(&self, tensor_index: usize) -> Vec<Rectangle> {
        self.held.get(tensor_index).into_iter().flatten().map(|held| held.rectangle.clone()).collect()
    }

    fn holds(&self, tensor_index: usize, offset: u64, size: usize) -> bool {
        let held = self.held.get(tensor_index).into_iter().flatten();
        let bytes: Result<usize> = held.map(|held| held.layout.try_each(offset, size, |_, _| Ok(()))).sum();
        bytes.is_ok_and(|bytes| bytes == size)
    }
}
