//! Checkpoints: named tensors whose bytes can be read in ranges.

#![forbid(unsafe_code)]

use std::ops::Range;
use std::path::PathBuf;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::format::DIGEST_SIZE;
use tpde_core::lane::Dtype;
use tpde_core::layout::StridedLayout;
use tpde_core::rectangle::Rectangle;

/// Maximum distance in bytes of runs that are read together. Reading a page costs less than a call.
const MAX_GAP: u64 = 4096;
/// Maximum number of bytes that are read together.
const MAX_SPAN: u64 = 64 << 10;

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
        read_into(scratch, size, |out| self.read(tensor_index, offset, out))
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

    /// Fills `out` with bytes of a rectangle of a tensor, from byte `offset` of the rectangle on. The rectangle must have these bytes.
    /// Runs that are near each other are read together, with the bytes between them if the checkpoint holds those. A checkpoint
    /// overrides this method if it stores rectangles apart from the rest of the tensor, or must not be read between their runs.
    #[doc(hidden)]
    fn read_runs(&self, tensor_index: usize, runs: &StridedLayout, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut scratch = Vec::new();
        let mut near: Vec<(u64, Range<usize>)> = Vec::new();
        runs.try_each(offset, out.len(), |at, range| -> Result<()> {
            let is_near = |(start, _): &(u64, Range<usize>), (last, bytes): &(u64, Range<usize>)| {
                at - (last + bytes.len() as u64) <= MAX_GAP && at + range.len() as u64 - start <= MAX_SPAN
            };
            if !near.first().zip(near.last()).is_none_or(|(first, last)| is_near(first, last)) {
                read_near(self, tensor_index, &near, out, &mut scratch)?;
                near.clear();
            }
            near.push((at, range));
            Ok(())
        })?;
        read_near(self, tensor_index, &near, out, &mut scratch)
    }

    /// Returns the files of the checkpoint, if it has files. A pair of this target then describes them too.
    #[doc(hidden)]
    fn files(&self) -> Option<&dyn CheckpointFiles> {
        None
    }

    /// Compares digests of regions that were read from this checkpoint with those that the checkpoint must have. A region that was not
    /// hashed has no digest. Encoding calls this after its last read.
    #[doc(hidden)]
    fn check_digests(&self, _read: &mut dyn Iterator<Item = (Region, Option<&[u8; DIGEST_SIZE]>)>) -> Result<()> {
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

/// A tensor of a checkpoint, or a rectangle of it.
#[derive(Debug, Clone)]
pub struct Region {
    /// Tensor number in the checkpoint.
    pub tensor: usize,
    /// The bytes of the rectangle in that tensor; `None` for the whole tensor.
    pub runs: Option<StridedLayout>,
}

impl Region {
    /// A rectangle of a tensor of this dtype and shape.
    pub fn new(tensor: usize, dtype: Dtype, shape: &[u64], origin: &[u64], extent: &[u64]) -> Self {
        Self { tensor, runs: (shape != extent).then(|| StridedLayout::of_rectangle(dtype.bits(), shape, None, origin, extent)) }
    }

    /// Size in bytes.
    pub fn size(&self, of: &dyn Checkpoint) -> u64 {
        self.runs.as_ref().map_or_else(|| of.tensors()[self.tensor].bytes(), StridedLayout::bytes)
    }

    /// Fills `out` with bytes from byte `offset` on.
    pub fn read(&self, of: &dyn Checkpoint, offset: u64, out: &mut [u8]) -> Result<()> {
        let Some(runs) = &self.runs else { return of.read(self.tensor, offset, out) };
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > runs.bytes()) {
            let reason = format!("a part of tensor {} does not have {} bytes from byte {offset} on", self.tensor, out.len());
            return Err(Error::InvalidArgument(reason));
        }
        of.read_runs(self.tensor, runs, offset, out)
    }

    /// `size` bytes from byte `offset` on, if they are in memory.
    pub fn in_place<'a>(&self, of: &'a dyn Checkpoint, offset: u64, size: usize) -> Option<&'a [u8]> {
        let at = match &self.runs {
            Some(runs) => runs.contiguous_at(offset, size)?,
            None => offset,
        };
        of.in_place(self.tensor, at, size)
    }

    /// `size` bytes from byte `offset` on: borrowed if they are in memory, else read into `scratch`.
    pub fn bytes<'a>(&self, of: &'a dyn Checkpoint, offset: u64, size: usize, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        if let Some(bytes) = self.in_place(of, offset, size) {
            return Ok(bytes);
        }
        read_into(scratch, size, |out| self.read(of, offset, out))
    }

    /// Whether a checkpoint has a range of bytes.
    pub fn is_held(&self, of: &dyn Checkpoint, bytes: Range<u64>) -> bool {
        let (offset, size) = (bytes.start, (bytes.end - bytes.start) as usize);
        let holds = |at: u64, size: usize| of.holds(self.tensor, at, size);
        let each =
            |runs: &StridedLayout| runs.try_each(offset, size, |at, range| if holds(at, range.len()) { Ok(()) } else { Err(()) });
        self.runs.as_ref().map_or_else(|| holds(offset, size), |runs| each(runs).is_ok())
    }
}

/// Returns `size` bytes that `read` puts into `scratch`, which grows if it is too small.
pub(crate) fn read_into(scratch: &mut Vec<u8>, size: usize, read: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<&[u8]> {
    if scratch.len() < size {
        scratch.resize(size, 0);
    }
    let out = &mut scratch[..size];
    read(out)?;
    Ok(out)
}

/// Reads runs of a tensor into their ranges of `out`, together with the bytes between them if the checkpoint holds those.
fn read_near(
    of: &(impl Checkpoint + ?Sized),
    tensor: usize,
    runs: &[(u64, Range<usize>)],
    out: &mut [u8],
    scratch: &mut Vec<u8>,
) -> Result<()> {
    if let [(start, _), .., (last, bytes)] = runs {
        let size = (last - start) as usize + bytes.len();
        if of.holds(tensor, *start, size) {
            let span = of.bytes(tensor, *start, size, scratch)?;
            for (at, range) in runs {
                out[range.clone()].copy_from_slice(&span[(at - start) as usize..][..range.len()]);
            }
            return Ok(());
        }
    }
    runs.iter().try_for_each(|(at, range)| of.read(tensor, *at, &mut out[range.clone()]))
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
