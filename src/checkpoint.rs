//! What encoding and applying see of a checkpoint: named tensors whose bytes can be read by ranges.

#![forbid(unsafe_code)]

use crate::error::{Error, Escaped, Result};
use crate::lane::Dtype;
use std::path::PathBuf;

/// Name, dtype and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dims; none for a scalar.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// Bytes of the tensor: 0 for a shape that no tensor can have, which no [`Checkpoint`] holds.
    pub fn bytes(&self) -> u64 {
        self.dtype.lanes(&self.shape).map_or(0, |lanes| lanes * self.dtype.lane_bytes() as u64)
    }
}

/// Named tensors, read by ranges from many threads.
pub trait Checkpoint: Sync {
    /// The tensors, names strictly ascending as bytes.
    fn tensors(&self) -> &[TensorInfo];

    /// Fills `out` with the bytes of the tensor at `place` of [`Checkpoint::tensors`], from byte `offset` of it on.
    ///
    /// # Errors
    /// [`Error::Io`] if the bytes cannot be read, [`Error::Misuse`] if they are not there.
    fn read(&self, place: usize, offset: u64, out: &mut [u8]) -> Result<()>;

    /// `size` of the same bytes where they lie, if they lie in memory.
    fn in_place(&self, _place: usize, _offset: u64, _size: usize) -> Option<&[u8]> {
        None
    }

    /// The same bytes, in place where that can be, else through `scratch`.
    ///
    /// # Errors
    /// As for [`Checkpoint::read`].
    fn bytes<'a>(&'a self, place: usize, offset: u64, size: usize, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        if let Some(bytes) = self.in_place(place, offset, size) {
            return Ok(bytes);
        }
        if scratch.len() < size {
            scratch.resize(size, 0);
        }
        let out = &mut scratch[..size];
        self.read(place, offset, out)?;
        Ok(out)
    }

    /// The files and folders that this checkpoint is read from; none for memory. No output may touch them.
    fn paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Checks that nothing has changed since the checkpoint was opened. Encoding calls this after its last read.
    ///
    /// # Errors
    /// [`Error::Changed`] naming what has changed since the checkpoint was opened.
    fn check_unchanged(&self) -> Result<()> {
        Ok(())
    }

    /// The place of the tensor of this name.
    fn find(&self, name: &str) -> Option<usize> {
        self.tensors().binary_search_by(|tensor| tensor.name.as_str().cmp(name)).ok()
    }
}

/// A checkpoint in memory, row-major and little-endian as in safetensors.
#[derive(Debug, Default)]
pub struct MemoryCheckpoint<'a> {
    infos: Vec<TensorInfo>,
    data: Vec<&'a [u8]>,
}

impl<'a> MemoryCheckpoint<'a> {
    /// A checkpoint of these tensors, in any order.
    ///
    /// # Errors
    /// [`Error::Misuse`] if a name repeats or a tensor's bytes are not as many as its dtype and shape say.
    pub fn new(tensors: impl IntoIterator<Item = (TensorInfo, &'a [u8])>) -> Result<Self> {
        let mut tensors: Vec<_> = tensors.into_iter().collect();
        tensors.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].0.name == pair[1].0.name) {
            return Err(Error::Misuse(format!("two tensors are named {}", Escaped(&pair[0].0.name))));
        }
        for (info, data) in &tensors {
            let lanes = info.dtype.lanes(&info.shape);
            if lanes.and_then(|n| n.checked_mul(info.dtype.lane_bytes() as u64)) != Some(data.len() as u64) {
                let (name, found) = (Escaped(&info.name), data.len());
                return Err(Error::Misuse(format!("tensor {name} of {} {:?} cannot have {found} bytes", info.dtype, info.shape)));
            }
        }
        let (infos, data) = tensors.into_iter().unzip();
        Ok(Self { infos, data })
    }
}

impl Checkpoint for MemoryCheckpoint<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn read(&self, place: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let bytes = self.in_place(place, offset, out.len());
        let missing = || Error::Misuse(format!("{} bytes from {offset} on of tensor {place} are not there", out.len()));
        out.copy_from_slice(bytes.ok_or_else(missing)?);
        Ok(())
    }

    fn in_place(&self, place: usize, offset: u64, size: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        self.data.get(place)?.get(start..start.checked_add(size)?)
    }
}
