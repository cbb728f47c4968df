//! Checkpoints in device memory.

use super::rows::Rows;
use super::runtime::device::Device;
use super::runtime::memory::DeviceSlice;
use super::slices::TensorSlice;
use crate::checkpoint::{Checkpoint, MemoryCheckpoint, TensorInfo};
use crate::error::{Error, Escaped, PartNotHeld, Result};
use crate::lane::Dtype;
use crate::rectangle::Rectangle;
use crate::slice::{HeldSlices, NewSlice};
use std::ops::Range;

/// Most bytes of one copy that also reads gaps between rows.
const MAX_COPY: usize = 4 << 20;

/// Tensors in device memory, or slices of tensors: little-endian as in safetensors, with rows as in [`TensorSlice`].
///
/// [`Encode`](super::Encode) takes base and target in this form. Read as a [`Checkpoint`], with
/// [`Apply::explain`](crate::Apply::explain) it tells why a launch failed. Each read waits for its copies; read only while no queued
/// work writes the memory.
#[derive(Debug)]
pub struct DeviceCheckpoint {
    device: Device,
    slices: HeldSlices<Memory>,
}

/// The memory of a slice.
#[derive(Debug)]
struct Memory {
    slice: DeviceSlice,
    pitch: Option<u64>,
}

impl DeviceCheckpoint {
    /// Creates a checkpoint of whole tensors without gaps, in any order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if two tensors have the same name, if the size of a tensor's memory does not match its dtype and
    /// shape, or if memory was allocated by another [`Device`].
    pub fn new(device: &Device, tensors: impl IntoIterator<Item = (TensorInfo, DeviceSlice)>) -> Result<Self> {
        let mut tensors: Vec<_> = tensors.into_iter().collect();
        tensors.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].0.name == pair[1].0.name) {
            return Err(Error::InvalidArgument(format!("two tensors are named {}", Escaped(&pair[0].0.name))));
        }
        Self::of_new(device, tensors.into_iter().map(|(tensor, memory)| (Rectangle::whole(&tensor.shape), tensor, None, memory)))
    }

    /// Creates a checkpoint of slices, each of a tensor of this dtype and shape. Several slices may be of one tensor, and a slice
    /// may be empty.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a slice is not within its tensor or has another size, if slices of one tensor have elements in
    /// common, or state different dtypes or shapes, or if memory was allocated by another [`Device`].
    pub fn of_slices<'s>(device: &Device, slices: impl IntoIterator<Item = (Dtype, Vec<u64>, TensorSlice<'s>)>) -> Result<Self> {
        let slices = slices.into_iter().map(|(dtype, shape, TensorSlice { name, rectangle, memory, pitch })| {
            (rectangle, TensorInfo { name: name.to_owned(), dtype, shape }, pitch, memory)
        });
        Self::of_new(device, slices)
    }

    fn of_new(
        device: &Device,
        slices: impl IntoIterator<Item = (Rectangle, TensorInfo, Option<u64>, DeviceSlice)>,
    ) -> Result<Self> {
        let checked = |(rectangle, tensor, pitch, memory): (_, _, _, DeviceSlice)| -> Result<_> {
            memory.check_device(&device.inner)?;
            memory.end()?;
            Ok(NewSlice { tensor, rectangle, pitch, size: memory.bytes(), memory: Memory { slice: memory, pitch } })
        };
        let slices = slices.into_iter().map(checked).collect::<Result<Vec<_>>>()?;
        Ok(Self { device: device.clone(), slices: HeldSlices::new(slices)? })
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

    /// Returns the memory of a rectangle of a tensor, and its rows if it has gaps. `what` names the checkpoint in errors.
    ///
    /// # Errors
    /// [`Error::PartNotHeld`] if no slice has the whole rectangle; [`Error::InvalidArgument`] if its rows are at two distances.
    pub(super) fn memory_of(
        &self,
        what: &'static str,
        tensor_index: usize,
        rectangle: &Rectangle,
    ) -> Result<(DeviceSlice, Option<Rows>)> {
        let missing = || Error::InvalidArgument(format!("the {what} has no tensor {tensor_index}"));
        let TensorInfo { name, dtype, .. } = self.tensors().get(tensor_index).ok_or_else(missing)?;
        let is_in = |slice: &Rectangle| slice.intersection(rectangle).is_some_and(|common| common == *rectangle);
        let slices = self.slices.of(tensor_index);
        if rectangle.elements() == 0 {
            return slices.first().ok_or_else(missing)?.memory.slice.slice(0, 0).map(|memory| (memory, None));
        }
        match slices.iter().find(|held| is_in(&held.rectangle)) {
            Some(held) => {
                let Memory { slice, pitch } = &held.memory;
                let slice = TensorSlice { name, rectangle: held.rectangle.clone(), memory: slice.clone(), pitch: *pitch };
                slice.memory_of(*dtype, rectangle)
            }
            None => {
                let held = slices.iter().filter_map(|held| held.rectangle.intersection(rectangle)).collect();
                let part = PartNotHeld { checkpoint: what, tensor: name.clone(), part: rectangle.clone(), held };
                Err(Error::PartNotHeld(Box::new(part)))
            }
        }
    }

    /// Reads runs of bytes: their offsets in the memory, ascending, and their ranges of `out`. Near ones in one copy.
    fn read_runs(&self, memory: &DeviceSlice, runs: &[(usize, Range<usize>)], out: &mut [u8]) -> Result<()> {
        let mut rest = runs;
        let mut buffer = Vec::new();
        while let Some((first, range)) = rest.first() {
            let count = rest.iter().take_while(|(at, range)| at + range.len() - first <= MAX_COPY).count().max(1);
            let (near, further) = rest.split_at(count);
            if let [(at, range)] = near {
                self.device.read(&memory.slice(*at as u64, range.len() as u64)?, &mut out[range.clone()])?;
            } else {
                let end = near.last().map_or(first + range.len(), |(at, range)| at + range.len());
                buffer.resize(end - first, 0);
                self.device.read(&memory.slice(*first as u64, buffer.len() as u64)?, &mut buffer)?;
                for (at, range) in near {
                    out[range.clone()].copy_from_slice(&buffer[at - first..][..range.len()]);
                }
            }
            rest = further;
        }
        Ok(())
    }
}

impl Checkpoint for DeviceCheckpoint {
    fn tensors(&self) -> &[TensorInfo] {
        self.slices.tensors()
    }

    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        self.slices.try_read(tensor_index, offset, out.len(), |memory, runs| self.read_runs(&memory.slice, runs, out))
    }

    fn held(&self, tensor_index: usize) -> Vec<Rectangle> {
        self.slices.rectangles(tensor_index)
    }

    fn holds(&self, tensor_index: usize, offset: u64, size: usize) -> bool {
        self.slices.holds(tensor_index, offset, size)
    }
}
