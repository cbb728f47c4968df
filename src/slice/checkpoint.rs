//! Slices as a checkpoint.

use super::layout::SliceLayout;
use super::memory::Slice;
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::error::{Error, Escaped, Result};
use crate::rectangle::{Rectangle, overlap};

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
