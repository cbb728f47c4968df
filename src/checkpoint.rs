//! Checkpoints: named tensors whose bytes can be read in ranges.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::format::DIGEST_SIZE;
use tpde_core::lane::Dtype;
use tpde_core::layout::StridedLayout;
use tpde_core::rectangle::Rectangle;

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
    /// Returns the size of the tensor in bytes; 0 if the shape is invalid. Tensors of a [`Checkpoint`] have valid shapes.
    pub fn bytes(&self) -> u64 {
        self.dtype.lanes(&self.shape).map_or(0, |lanes| lanes * self.dtype.lane_bytes() as u64)
    }
}

/// Named tensors whose bytes can be read in ranges, from many threads at once.
pub trait Checkpoint: Sync {
    /// Returns the tensors, in strictly ascending order of the bytes of their names.
    fn tensors(&self) -> &[TensorInfo];

    /// Fills `out` with bytes of tensor `tensor_index` of [`Checkpoint::tensors`], from byte `offset` of the tensor on.
    ///
    /// # Errors
    /// [`Error::Io`] if the bytes cannot be read; [`Error::InvalidArgument`] if the tensor does not have these bytes.
    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Returns `size` bytes of a tensor from byte `offset` on, without a copy. Returns `None` if the bytes are not in memory.
    fn in_place(&self, _tensor_index: usize, _offset: u64, _size: usize) -> Option<&[u8]> {
        None
    }

    /// Returns `size` bytes of a tensor from byte `offset` on: borrowed if they are in memory, else read into `scratch`.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::read`].
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

    /// The rectangles of a tensor that the checkpoint has. They have no elements in common. A checkpoint that holds slices of
    /// tensors overrides this method and [`Checkpoint::holds`].
    fn held(&self, tensor_index: usize) -> Vec<Rectangle> {
        self.tensors().get(tensor_index).map(|tensor| Rectangle::whole(&tensor.shape)).into_iter().collect()
    }

    /// Whether one rectangle of [`Checkpoint::held`] is all of the tensor.
    #[doc(hidden)]
    fn is_whole(&self, tensor_index: usize) -> bool {
        matches!(&self.held(tensor_index)[..], [held] if held.extent == self.tensors()[tensor_index].shape)
    }

    /// Whether the checkpoint has `size` bytes of a tensor from byte `offset` on: whether they belong to rectangles of
    /// [`Checkpoint::held`].
    fn holds(&self, _tensor_index: usize, _offset: u64, _size: usize) -> bool {
        true
    }

    /// Returns the files and folders from which this checkpoint is read; empty if it is in memory. Outputs must not overlap them.
    fn paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Fills `out` with bytes of a rectangle of a tensor, from byte `offset` of the rectangle on, if the checkpoint stores that
    /// rectangle apart from the rest of the tensor, or must not be read between its runs. Returns whether it did.
    #[doc(hidden)]
    fn read_part(&self, _tensor_index: usize, _runs: &StridedLayout, _offset: u64, _out: &mut [u8]) -> Result<bool> {
        Ok(false)
    }

    /// Returns the files of the checkpoint, if it has files. A pair of this target then describes them too.
    #[doc(hidden)]
    fn files(&self) -> Option<&dyn CheckpointFiles> {
        None
    }

    /// Compares digests of bytes that were read from this checkpoint with those that the checkpoint must have. Encoding calls this
    /// after its last read.
    #[doc(hidden)]
    fn check_digests(&self, _read: &mut dyn Iterator<Item = ReadDigest<'_>>) -> Result<()> {
        Ok(())
    }

    /// Checks that the checkpoint has not changed since it was opened. Encoding calls this after its last read.
    ///
    /// # Errors
    /// [`Error::Changed`] with the file that has changed.
    fn check_unchanged(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the index of the tensor with this name.
    fn find(&self, name: &str) -> Option<usize> {
        self.tensors().binary_search_by(|tensor| tensor.name.as_str().cmp(name)).ok()
    }
}

/// The files of a checkpoint, as a pair describes them (spec section 10.1). A lone file has an empty name.
#[doc(hidden)]
pub trait CheckpointFiles {
    /// Checks that other programs read the same files where these are.
    ///
    /// # Errors
    /// [`Error::BadCheckpoint`] with the file that they may read instead.
    fn check_unambiguous(&self) -> Result<()> {
        Ok(())
    }

    /// Names in ascending order, and whether the file has tensors. Empty for a checkpoint without files.
    fn names(&self) -> Vec<(String, bool)>;

    /// Size and BLAKE3-128 digest of the content of a file; `None` if there is no such file.
    fn digest(&self, name: &str, has_tensors: bool) -> Result<Option<(u64, [u8; DIGEST_SIZE])>>;

    /// The content of a file: length field and header if `has_tensors`, else the whole shard index. `None` if there is no such
    /// file.
    fn content(&self, name: &str, has_tensors: bool) -> Result<Option<Vec<u8>>>;
}

/// The digest of a tensor, or of a rectangle of it, formed from bytes that were read.
#[doc(hidden)]
pub struct ReadDigest<'a> {
    /// Index of the tensor in the checkpoint.
    pub tensor_index: usize,
    /// The bytes of the rectangle; `None` for the whole tensor.
    pub runs: Option<StridedLayout>,
    /// BLAKE3-128; `None` if the bytes were read but not hashed.
    pub digest: Option<&'a [u8; DIGEST_SIZE]>,
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

    /// Creates a checkpoint of `tensors`, in any order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if two tensors have the same name, or if the size of a tensor does not match its dtype and
    /// shape.
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
