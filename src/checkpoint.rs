//! Checkpoints: named tensors whose bytes can be read by ranges.

#![forbid(unsafe_code)]

use crate::error::{Error, Escaped, Result};
use crate::lane::Dtype;
use std::any::Any;
use std::path::PathBuf;

/// Name, dtype and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions; empty for a scalar.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// Size of the tensor in bytes. 0 for an invalid shape, which no [`Checkpoint`] contains.
    pub fn bytes(&self) -> u64 {
        self.dtype.lanes(&self.shape).map_or(0, |lanes| lanes * self.dtype.lane_bytes() as u64)
    }
}

/// Named tensors, read by ranges from many threads.
pub trait Checkpoint: Sync {
    /// The tensors, in strictly ascending order of the bytes of their names.
    fn tensors(&self) -> &[TensorInfo];

    /// Fills `out` with bytes of tensor `tensor_index` of [`Checkpoint::tensors`], from byte `offset` of the tensor on.
    ///
    /// # Errors
    /// [`Error::Io`] if the bytes cannot be read, [`Error::InvalidArgument`] if they are not there.
    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()>;

    /// `size` of the same bytes without a copy, if they are in memory.
    fn in_place(&self, _tensor_index: usize, _offset: u64, _size: usize) -> Option<&[u8]> {
        None
    }

    /// The same bytes, without a copy if possible, otherwise through `scratch`.
    ///
    /// # Errors
    /// As for [`Checkpoint::read`].
    fn bytes<'a>(&'a self, tensor_index: usize, offset: u64, size: usize, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        if let Some(bytes) = self.in_place(tensor_index, offset, size) {
            return Ok(bytes);
        }
        if scratch.len() < size {
            scratch.resize(size, 0);
        }
        let out = &mut scratch[..size];
        self.read(tensor_index, offset, out)?;
        Ok(out)
    }

    /// The files and folders from which this checkpoint is read; empty for memory. Outputs must not overlap them.
    fn paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// The `SafetensorsCheckpoint` that this checkpoint is, if it is one: pairs describe its files too.
    #[doc(hidden)]
    fn files(&self) -> Option<&dyn Any> {
        None
    }

    /// Checks that nothing has changed since the checkpoint was opened. Encoding calls this after its last read.
    ///
    /// # Errors
    /// [`Error::Changed`] with the file that has changed since the checkpoint was opened.
    fn check_unchanged(&self) -> Result<()> {
        Ok(())
    }

    /// Index of the tensor with this name.
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
    /// A checkpoint without tensors.
    pub const EMPTY: MemoryCheckpoint<'static> = MemoryCheckpoint { infos: Vec::new(), data: Vec::new() };

    /// A checkpoint of these tensors, in any order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a name repeats or a tensor's bytes are not as many as its dtype and shape say.
    pub fn new(tensors: impl IntoIterator<Item = (TensorInfo, &'a [u8])>) -> Result<Self> {
        let mut tensors: Vec<_> = tensors.into_iter().collect();
        tensors.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].0.name == pair[1].0.name) {
            return Err(Error::InvalidArgument(format!("two tensors are named {}", Escaped(&pair[0].0.name))));
        }
        for (info, data) in &tensors {
            let lanes = info.dtype.lanes(&info.shape);
            if lanes.and_then(|n| n.checked_mul(info.dtype.lane_bytes() as u64)) != Some(data.len() as u64) {
                let (name, found) = (Escaped(&info.name), data.len());
                return Err(Error::InvalidArgument(format!(
                    "tensor {name} of {} {:?} cannot have {found} bytes",
                    info.dtype, info.shape
                )));
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

    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let bytes = self.in_place(tensor_index, offset, out.len());
        let missing =
            || Error::InvalidArgument(format!("tensor {tensor_index} does not have {} bytes from byte {offset} on", out.len()));
        out.copy_from_slice(bytes.ok_or_else(missing)?);
        Ok(())
    }

    fn in_place(&self, tensor_index: usize, offset: u64, size: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        self.data.get(tensor_index)?.get(start..start.checked_add(size)?)
    }
}
