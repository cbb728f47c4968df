//! Tensors in memory that Python owns.

use pyo3::prelude::*;
use tpde::cuda::DeviceSlice;
use tpde::{Dtype, MemoryCheckpoint, Result, TensorInfo};

/// A tensor: name, dtype, dims, address, size in bytes, and an object that keeps the memory in place.
///
/// Only `tpde/_memory.py` and `tpde/_torch_memory.py` make this tuple. They have checked that the tensor is contiguous, and that it
/// is in host memory, or on the device for device functions. Device functions make no host slices from it.
/// The address stays valid while the object is held, unless the owner's memory is freed by other means. The caller of the public
/// function promises that nothing else writes the memory during the call, and that nothing else reads memory being written.
#[derive(FromPyObject)]
pub struct Memory(String, String, Vec<u64>, usize, usize, #[expect(dead_code, reason = "held to keep the memory alive")] Py<PyAny>);

impl Memory {
    pub fn name(&self) -> &str {
        &self.0
    }

    pub fn shape(&self) -> &[u64] {
        &self.2
    }

    /// The memory as a device slice, at an address that is valid on the device.
    ///
    /// # Safety
    /// The memory must be on the device. Its owner must be held until all work queued with the slice has finished. For a tensor
    /// whose streams were recorded, PyTorch does this: it does not reuse the memory until those streams have finished.
    pub unsafe fn device_slice(&self) -> DeviceSlice {
        // SAFETY: promised by the caller.
        unsafe { DeviceSlice::from_raw(self.3 as u64, self.4 as u64) }
    }

    /// A copy without the owner, which does not keep the memory alive.
    pub fn unowned(&self, py: Python<'_>) -> Self {
        Self(self.0.clone(), self.1.clone(), self.2.clone(), self.3, self.4, py.None())
    }

    /// Address of the first byte.
    pub fn address(&self) -> usize {
        self.3
    }

    /// Sets the address. All other fields stay.
    pub fn move_to(&mut self, address: usize) {
        self.3 = address;
    }

    /// Address range: the first byte, and the byte after the last.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.3..self.3.saturating_add(self.4)
    }

    pub fn dtype(&self) -> Result<Dtype> {
        dtype(&self.1)
    }

    pub fn bytes(&self) -> &[u8] {
        if self.4 == 0 || self.3 == 0 {
            return &[];
        }
        // SAFETY: the memory is valid while the owner is held, and nothing writes it during the call (type documentation).
        unsafe { std::slice::from_raw_parts(self.3 as *const u8, self.4) }
    }

    /// The bytes of the tensor, for writing.
    ///
    /// # Safety
    /// No other slice of the same memory may exist.
    pub unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        if self.4 == 0 || self.3 == 0 {
            return &mut [];
        }
        // SAFETY: the memory is valid while the owner is held, and the caller promises that this slice is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.3 as *mut u8, self.4) }
    }
}

/// Parses the name of a dtype.
pub fn dtype(name: &str) -> Result<Dtype> {
    Ok(name.parse()?)
}

/// Name, dtype and shape of a tensor.
pub fn info(tensor: &Memory) -> Result<TensorInfo> {
    Ok(TensorInfo { name: tensor.name().to_owned(), dtype: tensor.dtype()?, shape: tensor.shape().to_vec() })
}

/// A checkpoint of these tensors, which reads their memory.
pub fn checkpoint(tensors: &[Memory]) -> Result<MemoryCheckpoint<'_>> {
    let infos = tensors.iter().map(|tensor| Ok((info(tensor)?, tensor.bytes())));
    MemoryCheckpoint::new(infos.collect::<Result<Vec<_>>>()?)
}
