//! A checkpoint whose tensors are repeated to any size. Bytes are read from the original on demand.

use tpde::{Checkpoint, Error, Escaped, Result, TensorInfo};

/// Repeats every tensor of a checkpoint along its first dimension. Scalars are not repeated.
pub struct RepeatedCheckpoint<C> {
    of: C,
    infos: Vec<TensorInfo>,
}

impl<C: Checkpoint> RepeatedCheckpoint<C> {
    /// # Errors
    /// [`Error::InvalidArgument`] if a repeated tensor is too large, or if the bytes of the checkpoint do not fit in 64 bits.
    pub fn new(of: C, times: u64) -> Result<Self> {
        let mut infos = of.tensors().to_vec();
        let mut bytes = 0u64;
        for info in &mut infos {
            let rows = info.shape.first_mut().map_or(Some(0), |rows| {
                *rows = rows.checked_mul(times)?;
                Some(*rows)
            });
            let has_size = rows.is_some() && info.dtype.lanes(&info.shape).is_some();
            bytes = bytes.checked_add(info.bytes()).filter(|_| has_size).ok_or_else(|| {
                Error::InvalidArgument(format!("tensor {} cannot be repeated {times} times: it is too large", Escaped(&info.name)))
            })?;
        }
        Ok(Self { of, infos })
    }
}

impl<C: Checkpoint> Checkpoint for RepeatedCheckpoint<C> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn read(&self, place: usize, offset: u64, mut out: &mut [u8]) -> Result<()> {
        let size = self.of.tensors()[place].bytes();
        let mut at = offset.checked_rem(size).unwrap_or(0);
        while !out.is_empty() && size > 0 {
            let (part, rest) = out.split_at_mut((size - at).min(out.len() as u64) as usize);
            self.of.read(place, at, part)?;
            (out, at) = (rest, 0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tpde::{Dtype, MemoryCheckpoint};

    #[test]
    fn tensors_follow_themselves() {
        let info = |name: &str, shape: &[u64]| TensorInfo { name: name.into(), dtype: Dtype::U8, shape: shape.to_vec() };
        let tensors = [(info("none", &[0, 3]), &[][..]), (info("rows", &[2, 3]), b"abcdef"), (info("scalar", &[]), b"x")];
        let repeated = RepeatedCheckpoint::new(MemoryCheckpoint::new(tensors).unwrap(), 3).unwrap();
        assert_eq!(repeated.tensors(), [info("none", &[0, 3]), info("rows", &[6, 3]), info("scalar", &[])]);
        let read = |place, offset, size| {
            let mut out = vec![0; size];
            repeated.read(place, offset, &mut out).map(|()| out)
        };
        assert_eq!(read(1, 0, 18).unwrap(), b"abcdefabcdefabcdef");
        assert_eq!(read(1, 4, 9).unwrap(), b"efabcdefa");
        assert_eq!(read(2, 0, 1).unwrap(), b"x");
        assert_eq!(read(0, 0, 0).unwrap(), b"");
    }

    #[test]
    fn what_becomes_too_large_is_refused() {
        let info = |rows| TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![rows, 0] };
        let repeated = |rows, times| RepeatedCheckpoint::new(MemoryCheckpoint::new([(info(rows), &[][..])]).unwrap(), times);
        assert!(repeated(1 << 62, 3).is_ok());
        assert!(matches!(repeated(1 << 62, 4), Err(Error::InvalidArgument(_))));
    }
}
