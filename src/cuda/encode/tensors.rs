//! Checkpoints in device memory.

use crate::checkpoint::{Checkpoint, MemoryCheckpoint, TensorInfo};
use crate::cuda::runtime::device::Device;
use crate::cuda::runtime::memory::DeviceSlice;
use crate::error::{Error, Escaped, Result};

/// A checkpoint in device memory: named tensors, row-major without gaps, little-endian as in safetensors.
#[derive(Debug)]
pub struct DeviceCheckpoint {
    device: Device,
    infos: Vec<TensorInfo>,
    memory: Vec<DeviceSlice>,
}

impl DeviceCheckpoint {
    /// Creates a checkpoint of `tensors`, in any order. Any alignment of the memory to whole lanes is allowed; a multiple of 16
    /// bytes is faster.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if two tensors have the same name, if the size or the alignment of a tensor's memory does not
    /// match its dtype and shape, or if memory was allocated by another [`Device`].
    pub fn new(device: &Device, tensors: impl IntoIterator<Item = (TensorInfo, DeviceSlice)>) -> Result<Self> {
        let mut tensors: Vec<_> = tensors.into_iter().collect();
        tensors.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].0.name == pair[1].0.name) {
            return Err(Error::InvalidArgument(format!("two tensors are named {}", Escaped(&pair[0].0.name))));
        }
        for (info, memory) in &tensors {
            memory.check_device(&device.inner)?;
            let width = info.dtype.lane_bytes() as u64;
            let lanes = info.dtype.lanes(&info.shape);
            if lanes.and_then(|n| n.checked_mul(width)) != Some(memory.bytes()) || !memory.address().is_multiple_of(width) {
                let (name, found, at) = (Escaped(&info.name), memory.bytes(), memory.address());
                return Err(Error::InvalidArgument(format!(
                    "tensor {name} of {} {:?} cannot have {found} bytes at {at:#x} of device memory",
                    info.dtype, info.shape
                )));
            }
            memory.end()?;
        }
        let (infos, memory) = tensors.into_iter().unzip();
        Ok(Self { device: device.clone(), infos, memory })
    }

    /// Copies a checkpoint in host memory to the device.
    ///
    /// # Errors
    /// [`Error::Device`] if there is not enough memory.
    pub fn upload(device: &Device, checkpoint: &MemoryCheckpoint<'_>) -> Result<Self> {
        let mut tensors = Vec::with_capacity(checkpoint.tensors().len());
        for (i, info) in checkpoint.tensors().iter().enumerate() {
            let memory = device.alloc(info.bytes())?;
            if let Some(bytes) = checkpoint.in_place(i, 0, info.bytes() as usize) {
                device.write(&memory, bytes)?;
            }
            tensors.push((info.clone(), memory));
        }
        Self::new(device, tensors)
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the memory of each tensor of [`Checkpoint::tensors`].
    pub fn memory(&self) -> &[DeviceSlice] {
        &self.memory
    }
}

impl Checkpoint for DeviceCheckpoint {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    /// Copies the bytes from the device. Work on them must have completed.
    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let missing = || Error::InvalidArgument(format!("there is no tensor {tensor_index}"));
        let memory = self.memory.get(tensor_index).ok_or_else(missing)?;
        self.device.read(&memory.slice(offset, out.len() as u64)?, out)
    }
}
