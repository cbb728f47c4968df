//! Where the bytes of a tensor are in the memory of a slice.

use super::span::Span;
use std::ops::Range;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::lane::Dtype;
use tpde_core::rectangle::{Rectangle, part_fault};

/// Where the bytes of a tensor are in the memory of a slice.
#[derive(Debug, Clone)]
pub(crate) struct SliceLayout {
    /// For each dimension before the row: its length, the first index that is held, and the number of indexes that are held.
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
    pub fn contiguous(&self, offset: u64, size: usize) -> Option<usize> {
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

    /// The rows, from address `start` on. `None` if they have no bytes.
    pub fn span(&self, start: u64) -> Option<Span> {
        let (width, rows) = (self.held.end - self.held.start, self.outer.iter().map(|dim| dim.2).product::<u64>());
        (width > 0 && rows > 0).then(|| Span::new(start, (rows - 1) * self.pitch + width, Some((width, self.pitch))))
    }
}
