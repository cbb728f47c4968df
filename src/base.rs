//! Base bytes of a tensor, for encoding and applying.

use crate::checkpoint::Checkpoint;
use tpde_core::error::Result;

/// Base bytes of a tensor: the bytes of the base tensor, followed by zeros. Without a base tensor all bytes are 0 (section 8.2).
#[derive(Clone, Copy)]
pub(crate) struct PaddedBase<'a>(Option<(&'a dyn Checkpoint, usize)>);

impl<'a> PaddedBase<'a> {
    /// Selects tensor `base_index` of `base`. `None` means no base tensor.
    pub fn new(base: Option<&'a dyn Checkpoint>, base_index: Option<usize>) -> Self {
        Self(base.zip(base_index))
    }

    /// Returns the number of bytes that come from the checkpoint, of the `size` bytes from byte `offset` on.
    fn present(self, offset: u64, size: usize) -> usize {
        let bytes = self.0.map_or(0, |(base, base_index)| base.tensors()[base_index].bytes());
        bytes.saturating_sub(offset).min(size as u64) as usize
    }

    /// Returns `size` bytes from byte `offset` on, if all these bytes are in memory.
    pub fn in_place(self, offset: u64, size: usize) -> Option<&'a [u8]> {
        let (base, base_index) = self.0.filter(|_| self.present(offset, size) == size)?;
        base.in_place(base_index, offset, size)
    }

    /// Fills `out` with the bytes from byte `offset` on.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::read`].
    pub fn read(self, offset: u64, out: &mut [u8]) -> Result<()> {
        let (from_base, zeros) = out.split_at_mut(self.present(offset, out.len()));
        zeros.fill(0);
        match self.0 {
            Some((base, base_index)) if !from_base.is_empty() => base.read(base_index, offset, from_base),
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
        let mut padded = data.to_vec();
        padded.resize(16, 0);
        for (base, expected) in
            [(Some((&memory as &dyn Checkpoint, 0)), &padded), (Some((&disk, 0)), &padded), (None, &vec![0; 16])]
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
        assert_eq!(PaddedBase::new(Some(&memory), Some(0)).in_place(2, 4), Some(&data[2..]));
        assert_eq!(PaddedBase::new(Some(&memory), Some(0)).in_place(2, 5), None);
        assert_eq!(PaddedBase::new(Some(&disk), Some(0)).in_place(2, 4), None);
    }
}
