//! Checkpoints in device memory.

use super::rows::Rows;
use super::runtime::device::Device;
use super::runtime::memory::{DeviceSlice, PinnedBuffer};
use super::runtime::stream::Event;
use super::slices::TensorSlice;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;
use tpde::internals::Views;
use tpde::{Checkpoint, TensorInfo, Watch};
use tpde_core::error::{Error, Escaped, PartNotHeld, Result};
use tpde_core::lane::Dtype;
use tpde_core::rectangle::Rectangle;

/// Most bytes of one copy that also reads gaps between rows.
const MAX_COPY: usize = 4 << 20;
/// Size of a pinned slot in bytes.
const SLOT: u64 = 64 << 20;
/// Size of a read from a checkpoint in bytes.
const PIECE: usize = 1 << 20;
/// Alignment of uploaded tensors in device memory, in bytes.
const ALIGN: u64 = 256;

/// Tensors in device memory, or slices of tensors: little-endian as in safetensors, with rows as in [`TensorSlice`].
///
/// [`Encode`](super::Encode) takes base and target in this form. Read as a [`Checkpoint`], with
/// [`Apply::explain`](tpde::Apply::explain) it tells why a launch failed. Each read waits for its copies; read only while no queued
/// work writes the memory.
#[derive(Debug)]
pub struct DeviceCheckpoint {
    device: Device,
    slices: Views<Memory>,
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
            Ok((tensor, rectangle, pitch, memory.bytes(), Memory { slice: memory, pitch }))
        };
        let slices = slices.into_iter().map(checked).collect::<Result<Vec<_>>>()?;
        Ok(Self { device: device.clone(), slices: Views::new(slices)? })
    }

    /// Copies a checkpoint in host memory or in files to the device. All threads of the current rayon pool read into two pinned
    /// slots of 64 MiB, each of which is copied while the other one is filled.
    ///
    /// Device memory: the size of the checkpoint.
    ///
    /// # Errors
    /// [`Error::Device`] if there is not enough memory; the errors of [`Checkpoint::read`].
    pub fn upload(device: &Device, checkpoint: &dyn Checkpoint) -> Result<Self> {
        Self::upload_watched(device, checkpoint, &|_| {})
    }

    /// [`DeviceCheckpoint::upload`] with a watcher. It gets the number of bytes of each read.
    ///
    /// # Errors
    /// The errors of [`DeviceCheckpoint::upload`], and any error of the watcher.
    pub fn upload_watched(device: &Device, checkpoint: &dyn Checkpoint, watch: &dyn Watch) -> Result<Self> {
        let infos = checkpoint.tensors();
        let mut starts = Vec::with_capacity(infos.len());
        let mut end = 0u64;
        for info in infos {
            starts.push(end);
            end = end.saturating_add(info.bytes()).saturating_add(ALIGN - 1) / ALIGN * ALIGN;
        }
        let memory = device.alloc(end)?;
        let stream = device.stream()?;
        let slot_bytes = end.min(SLOT);
        let mut slots: Vec<(Arc<PinnedBuffer>, Option<Event>)> = Vec::new();
        let mut next = 0;
        for (n, start) in (0..end).step_by(SLOT as usize).enumerate() {
            let bytes = slot_bytes.min(end - start);
            if slots.len() < 2 {
                slots.push((Arc::new(device.pinned(bytes as usize)?), None));
            }
            let (slot, copied) = &mut slots[n % 2];
            copied.take().map_or(Ok(()), |event| event.wait())?;
            if slot.len() as u64 != bytes {
                *slot = Arc::new(device.pinned(bytes as usize)?);
            }
            let unshared = || Error::InvalidArgument("a pinned slot is in use".into());
            let mut rest = &mut Arc::get_mut(slot).ok_or_else(unshared)?[..];
            let (mut at, mut pieces) = (start, Vec::new());
            while next < infos.len() && starts[next] < start + bytes {
                let (first, size) = (starts[next].max(at), infos[next].bytes());
                let stop = (starts[next] + size).min(start + bytes);
                let gap = rest.split_off_mut(..(first - at) as usize).map(|gap| gap.len());
                debug_assert_eq!(gap, Some((first - at) as usize));
                let own = rest.split_off_mut(..stop.saturating_sub(first) as usize).unwrap_or_default();
                let offset = first - starts[next];
                pieces.extend((offset..).step_by(PIECE).zip(own.chunks_mut(PIECE)).map(|(offset, piece)| (next, offset, piece)));
                at = first.max(stop);
                if starts[next] + size > start + bytes {
                    break;
                }
                next += 1;
            }
            pieces.into_par_iter().try_for_each(|(tensor_index, offset, piece)| {
                checkpoint.read(tensor_index, offset, piece)?;
                watch.done(piece.len() as u64)
            })?;
            stream.copy_in(&memory.slice(start, bytes)?, slot)?;
            *copied = Some(stream.record()?);
        }
        for (_, copied) in slots {
            copied.map_or(Ok(()), |event| event.wait())?;
        }
        let tensors = infos.iter().zip(starts).map(|(info, start)| Ok((info.clone(), memory.slice(start, info.bytes())?)));
        Self::new(device, tensors.collect::<Result<Vec<_>>>()?)
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the slices, each with dtype and shape of its tensor, in ascending order of name: what [`DeviceCheckpoint::of_slices`]
    /// takes.
    pub fn slices(&self) -> impl Iterator<Item = (Dtype, Vec<u64>, TensorSlice<'_>)> {
        self.tensors().iter().enumerate().flat_map(move |(i, info)| {
            self.slices.of(i).map(move |held| {
                let Memory { slice, pitch } = &held.memory;
                let (rectangle, memory) = (held.rectangle.clone(), slice.clone());
                (info.dtype, info.shape.clone(), TensorSlice { name: &info.name, rectangle, memory, pitch: *pitch })
            })
        })
    }

    /// Returns the memory of a tensor that is one slice without gaps; `None` for another tensor.
    pub(super) fn memory_of_whole(&self, tensor_index: usize) -> Option<DeviceSlice> {
        let Memory { slice, pitch } = &self.slices.whole(tensor_index)?.memory;
        pitch.is_none().then(|| slice.clone())
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
        let mut slices = self.slices.of(tensor_index);
        if rectangle.elements() == 0 {
            return slices.next().ok_or_else(missing)?.memory.slice.slice(0, 0).map(|memory| (memory, None));
        }
        match slices.find(|held| is_in(&held.rectangle)) {
            Some(held) => {
                let Memory { slice, pitch } = &held.memory;
                let slice = TensorSlice { name, rectangle: held.rectangle.clone(), memory: slice.clone(), pitch: *pitch };
                slice.memory_of(*dtype, rectangle)
            }
            None => {
                let held = self.slices.of(tensor_index).filter_map(|held| held.rectangle.intersection(rectangle)).collect();
                let part = PartNotHeld::new(what, name.clone(), rectangle.clone(), held);
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

    fn is_whole(&self, tensor_index: usize) -> bool {
        self.slices.whole(tensor_index).is_some()
    }

    fn holds(&self, tensor_index: usize, offset: u64, size: usize) -> bool {
        self.slices.holds(tensor_index, offset, size)
    }
}
