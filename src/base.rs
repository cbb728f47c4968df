//! Base bytes of a tensor, for encoding and applying.

use crate::checkpoint::Checkpoint;
use crate::cut::Piece;
use tpde_core::error::Result;

/// Base bytes of a tensor: the bytes of the base tensor, followed by zeros. Without a base tensor all bytes are 0 (section 8.2).
#[derive(Clone, Copy)]
pub(crate) struct PaddedBase<'a, 'p>(Option<(&'a dyn Checkpoint, &'p Piece)>);

impl<'a, 'p> PaddedBase<'a, 'p> {
    /// Selects a piece of `base`. `None` means no base tensor.
    pub fn new(base: Option<&'a dyn Checkpoint>, piece: Option<&'p Piece>) -> Self {
        Self(base.zip(piece))
    }

    /// Returns the number of bytes that come from the checkpoint, of the `size` bytes from byte `offset` on.
    fn present(self, offset: u64, size: usize) -> usize {
        let bytes = self.0.map_or(0, |(base, piece)| piece.size(base));
        bytes.saturating_sub(offset).min(size as u64) as usize
    }

    /// Returns `size` bytes from byte `offset` on, if all these bytes are in memory.
    pub fn in_place(self, offset: u64, size: usize) -> Option<&'a [u8]> {
        let (base, piece) = self.0.filter(|_| self.present(offset, size) == size)?;
        piece.in_place(base, offset, size)
    }

    /// Fills `out` with the bytes from byte `offset` on.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::read`].
    pub fn read(self, offset: u64, out: &mut [u8]) -> Result<()> {
        let (from_base, zeros) = out.split_at_mut(self.present(offset, out.len()));
        zeros.fill(0);
        match self.0 {
            Some((base, piece)) if !from_base.is_empty() => piece.read(base, offset, from_base),
            _ => Ok(()),
        }
    }

    /// Returns `size` bytes from byte `offset` on: borrowed if they are in memory, else read into `scratch`.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::read`].
    pub fn bytes<'b>(self, offset: u64, size: usize, scratch: &'b mut Vec<u8>) -> Result<&'b [u8]>
    where
        'a: 'b,
    {
        if let Some(bytes) = self.in_place(offset, size) {
            return Ok(bytes);
        }
        scratch.resize(size.max(scratch.len()), 0);
        let out = &mut scratch[..size];
        self.read(offset, out)?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::TensorInfo;
    use crate::{Dtype, MemoryCheckpoint};

    /// A checkpoint whose bytes can only be copied, like a file's.
    struct OnDisk<'a>(MemoryCheckpoint<'a>);

    impl Checkpoint for OnDisk<'_> {
        fn tensors(&self) -> &[TensorInfo] {
            self.0.tensors()
        }

        fn read(&self, base_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
            self.0.read(base_index, offset, out)
        }
    }

    #[test]
    fn bytes_past_the_end_of_a_base_are_zeros() {
        let data = [1, 2, 3, 4, 5, 6];
        let info = || TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![6] };
        let in_memory = || MemoryCheckpoint::new([(info(), &data[..])]).unwrap();
        let (memory, disk) = (in_memory(), OnDisk(in_memory()));
        let first = Piece::of(0, None);
        let mut padded = data.to_vec();
        padded.resize(16, 0);
        for (base, expected) in
            [(Some((&memory as &dyn Checkpoint, &first)), &padded), (Some((&disk, &first)), &padded), (None, &vec![0; 16])]
        {
            let base = PaddedBase(base);
            for start in 0..10 {
                for end in start..16 {
                    let expected = &expected[start..end];
                    let mut out = vec![9; end - start];
                    base.read(start as u64, &mut out).unwrap();
                    assert_eq!(out, expected, "{start}..{end}");
                    assert_eq!(base.bytes(start as u64, end - start, &mut vec![9; 20]).unwrap(), expected, "{start}..{end}");
                }
            }
        }
        assert_eq!(PaddedBase::new(Some(&memory), Some(&first)).in_place(2, 4), Some(&data[2..]));
        assert_eq!(PaddedBase::new(Some(&memory), Some(&first)).in_place(2, 5), None);
        assert_eq!(PaddedBase::new(Some(&disk), Some(&first)).in_place(2, 4), None);
    }
}
