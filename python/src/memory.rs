//! Tensors in memory that Python owns.

use pyo3::prelude::*;
use tpde::cuda::DeviceSlice;
use tpde::{Dtype, MemoryCheckpoint, Result, TensorInfo};

/// A tensor: name, dtype, dims, address, bytes, and an object that keeps the memory where it is.
///
/// Only `tpde/_memory.py` and `tpde/_torch_memory.py` make it, from tensors that they have checked: contiguous, and in host memory,
/// or on the device for the functions on devices, which make no host slices of them.
/// The address stays valid while the object is held, unless the owner's memory is freed by other means. The caller of the public
/// function promises that nothing else writes the memory during the call, and that nothing else reads memory that is written.
#[derive(FromPyObject)]
pub struct Memory(String, String, Vec<u64>, usize, usize, #[expect(dead_code, reason = "held to keep the memory alive")] Py<PyAny>);

impl Memory {
    pub fn name(&self) -> &str {
        &self.0
    }

    pub fn shape(&self) -> &[u64] {
        &self.2
    }

    /// The same of memory of a device, at an address that the device sees.
    ///
    /// # Safety
    /// The memory is the device's, and its owner is held until all work that is queued with the slice has passed; PyTorch holds
    /// what a tensor gives back until the streams that were recorded with it have passed.
    pub unsafe fn device_slice(&self) -> DeviceSlice {
        // SAFETY: promised by the caller.
        unsafe { DeviceSlice::from_raw(self.3 as u64, self.4 as u64) }
    }

    /// The same without what keeps the memory.
    pub fn unowned(&self, py: Python<'_>) -> Self {
        Self(self.0.clone(), self.1.clone(), self.2.clone(), self.3, self.4, py.None())
    }

    /// Where it is.
    pub fn address(&self) -> usize {
        self.3
    }

    /// The same of memory elsewhere.
    pub fn move_to(&mut self, address: usize) {
        self.3 = address;
    }

    /// First byte and the one after the last.
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
        // SAFETY: the memory is there while the owner is held, as the type says, and is not written meanwhile.
        unsafe { std::slice::from_raw_parts(self.3 as *const u8, self.4) }
    }

    /// The same, to be written.
    ///
    /// # Safety
    /// No other slice of the same memory may exist.
    pub unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        if self.4 == 0 || self.3 == 0 {
            return &mut [];
        }
        // SAFETY: the memory is there while the owner is held, and the caller promises that the slice is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.3 as *mut u8, self.4) }
    }
}

/// The dtype of this name.
pub fn dtype(name: &str) -> Result<Dtype> {
    Ok(name.parse()?)
}

/// Name, dtype and dims.
pub fn info(tensor: &Memory) -> Result<TensorInfo> {
    Ok(TensorInfo { name: tensor.name().to_owned(), dtype: tensor.dtype()?, shape: tensor.shape().to_vec() })
}

/// Tensors as a checkpoint.
pub fn checkpoint(tensors: &[Memory]) -> Result<MemoryCheckpoint<'_>> {
    let infos = tensors.iter().map(|tensor| Ok((info(tensor)?, tensor.bytes())));
    MemoryCheckpoint::new(infos.collect::<Result<Vec<_>>>()?)
}
