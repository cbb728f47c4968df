//! Memory of slices.

use crate::checkpoint::TensorInfo;
use std::collections::BTreeSet;
use std::ops::Range;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::rectangle::Rectangle;

/// Memory for a rectangle of a tensor, to be rebuilt or to be changed in place.
///
/// The elements of the rectangle are in row-major order. A *row* is the elements of the rectangle along the last dimension. Rows
/// follow each other without gaps, or begin at multiples of a pitch. The bytes between rows are neither read nor written.
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

/// Memory that holds several slices, whose rows may interleave: tensors beside each other in the rows of a fused parameter. No byte
/// belongs to two slices.
///
/// ```
/// # use tpde::{Apply, Dtype, Encode, FusedSlices, InPlace, MemoryCheckpoint, Rectangle, TensorInfo};
/// # fn main() -> tpde::Result<()> {
/// let info = |name: &str| TensorInfo { name: name.into(), dtype: Dtype::U8, shape: vec![2, 3] };
/// let base = MemoryCheckpoint::new([(info("gate"), &[1, 1, 1, 1, 1, 1][..]), (info("up"), &[2, 2, 2, 2, 2, 2])])?;
/// let target = MemoryCheckpoint::new([(info("gate"), &[1, 1, 5, 1, 1, 1][..]), (info("up"), &[2, 2, 2, 2, 6, 2])])?;
/// let (pair, _) = Encode::new(&target).base(&base).to_memory()?;
///
/// let mut parameter = [1, 1, 1, 2, 2, 2, 1, 1, 1, 2, 2, 2];
/// let whole = Rectangle::whole(&[2, 3]);
/// let fused = FusedSlices::new(&mut parameter).slice("gate", whole.clone(), 0..9, Some(6)).slice("up", whole, 3..12, Some(6));
/// Apply::new(&pair).in_place_slices([fused], InPlace::AllChecked)?;
/// assert_eq!(parameter, [1, 1, 5, 2, 2, 2, 1, 1, 1, 2, 6, 2]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct FusedSlices<'a> {
    bytes: &'a mut [u8],
    slices: Vec<PlacedSlice<'a>>,
}

impl<'a> FusedSlices<'a> {
    /// Memory without slices.
    pub fn new(bytes: &'a mut [u8]) -> Self {
        Self { bytes, slices: Vec::new() }
    }

    /// Adds a slice of tensor `name`. Its first row begins and its last row ends with `range`, a range of the bytes. `pitch` is
    /// as in
    /// [`SliceMut`].
    #[must_use]
    pub fn slice(mut self, name: &'a str, rectangle: Rectangle, range: Range<usize>, pitch: Option<u64>) -> Self {
        self.slices.push(PlacedSlice { name, rectangle, memory: 0, range, pitch });
        self
    }
}

impl<'a> From<SliceMut<'a>> for FusedSlices<'a> {
    fn from(slice: SliceMut<'a>) -> Self {
        let range = 0..slice.bytes.len();
        Self::new(slice.bytes).slice(slice.name, slice.rectangle, range, slice.pitch)
    }
}

/// A slice in one of several memories.
#[derive(Debug, Clone)]
pub(crate) struct PlacedSlice<'a> {
    pub name: &'a str,
    pub rectangle: Rectangle,
    /// Number of the memory.
    pub memory: usize,
    /// The bytes of the memory from the first row to the last.
    pub range: Range<usize>,
    pub pitch: Option<u64>,
}

/// All memories of a call, and the slices in them, in order of name.
pub(crate) struct Memories<'a> {
    pub bytes: Vec<&'a mut [u8]>,
    pub slices: Vec<PlacedSlice<'a>>,
}

impl<'a> Memories<'a> {
    pub fn new(memories: impl IntoIterator<Item = impl Into<FusedSlices<'a>>>) -> Result<Self> {
        let mut all = Self { bytes: Vec::new(), slices: Vec::new() };
        for FusedSlices { bytes, slices } in memories.into_iter().map(Into::into) {
            let (memory, size) = (all.bytes.len(), bytes.len());
            for slice in slices {
                if slice.range.start > slice.range.end || slice.range.end > size {
                    let (Range { start, end }, name) = (slice.range, Escaped(slice.name));
                    let reason = format!("slice of tensor {name} in bytes {start}..{end} of a memory of {size} bytes");
                    return Err(Error::InvalidArgument(reason));
                }
                all.slices.push(PlacedSlice { memory, ..slice });
            }
            all.bytes.push(bytes);
        }
        all.slices.sort_by(|a, b| a.name.cmp(b.name));
        Ok(all)
    }

    /// The slices of tensors with these names, without their memory.
    pub fn only(&self, names: &BTreeSet<&str>) -> Self {
        Self { bytes: Vec::new(), slices: self.slices.iter().filter(|slice| names.contains(slice.name)).cloned().collect() }
    }

    /// Names of the tensors that have slices, in order.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.slices.chunk_by(|a, b| a.name == b.name).map(|slices| slices[0].name)
    }

    /// Size of all slices in bytes, with the bytes between their rows.
    pub fn held_bytes(&self) -> u64 {
        self.slices.iter().map(|slice| slice.range.len() as u64).sum()
    }
}
