//! Slices as a checkpoint.

use super::memory::Slice;
use super::view::Views;
use crate::checkpoint::{Checkpoint, TensorInfo};
use tpde_core::error::Result;
use tpde_core::rectangle::Rectangle;

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
    slices: Views<&'a [u8]>,
}

impl<'a> SliceCheckpoint<'a> {
    /// A checkpoint of these slices. Several slices may be of one tensor, and a slice may be empty.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if slices of one tensor have elements in common, or state different
    /// dtypes or shapes, or if a slice is not within its tensor or has another size.
    pub fn new(slices: impl IntoIterator<Item = Slice<'a>>) -> Result<Self> {
        let views = slices
            .into_iter()
            .map(|Slice { tensor, rectangle, bytes, pitch }| (tensor, rectangle, pitch, bytes.len() as u64, bytes));
        Ok(Self { slices: Views::new(views)? })
    }
}

impl Checkpoint for SliceCheckpoint<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        self.slices.tensors()
    }

    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        self.slices.try_read(tensor_index, offset, out.len(), |bytes, runs| {
            for (at, range) in runs {
                out[range.clone()].copy_from_slice(&bytes[*at..][..range.len()]);
            }
            Ok(())
        })
    }

    fn in_place(&self, tensor_index: usize, offset: u64, size: usize) -> Option<&[u8]> {
        let (bytes, at) = self.slices.contiguous_at(tensor_index, offset, size)?;
        bytes.get(at..)?.get(..size)
    }

    fn held(&self, tensor_index: usize) -> Vec<Rectangle> {
        self.slices.rectangles(tensor_index)
    }

    fn is_whole(&self, tensor_index: usize) -> bool {
        self.slices.whole(tensor_index).is_some()
    }

    fn holds(&self, tensor_index: usize, offset: u64, size: usize) -> bool {
        self.slices.holds(tensor_index, offset, size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tpde_core::lane::Dtype;

    #[test]
    fn a_tensor_is_whole_if_one_slice_is_all_of_it() {
        let of = |name: &str, origin: [u64; 2], extent: [u64; 2]| {
            let tensor = TensorInfo { name: name.into(), dtype: Dtype::U8, shape: vec![2, 3] };
            Slice::new(tensor, Rectangle::new(origin, extent), &[0; 6][..(extent[0] * extent[1]) as usize])
        };
        let slices =
            [of("all", [0, 0], [2, 3]), of("parts", [0, 0], [1, 3]), of("parts", [1, 0], [1, 3]), of("row", [1, 0], [1, 3])];
        let checkpoint = SliceCheckpoint::new(slices).unwrap();
        let is_whole: Vec<_> = (0..3).map(|i| checkpoint.is_whole(i)).collect();
        assert_eq!(is_whole, [true, false, false]);
        for (i, info) in checkpoint.tensors().iter().enumerate() {
            assert_eq!(is_whole[i], checkpoint.held(i) == [Rectangle::whole(&info.shape)]);
        }
    }
}
