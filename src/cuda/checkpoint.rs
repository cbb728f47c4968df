//! Slices of tensors on a device, as a checkpoint.

use super::runtime::device::Device;
use super::runtime::memory::DeviceSlice;
use super::slices::TensorSlice;
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::error::{Error, Escaped, Result};
use crate::lane::Dtype;
use crate::rectangle::Rectangle;
use crate::slice::{SliceLayout, check_disjoint};
use std::ops::Range;

/// Most bytes of one copy that also reads gaps between rows.
const MAX_COPY: usize = 4 << 20;

/// Tensors or slices of tensors on a device, read as a checkpoint: with [`Apply::explain`](crate::Apply::explain) it tells why a
/// launch failed. Each read waits for its copies. Read it only while no queued work writes the memory.
#[derive(Debug)]
pub struct DeviceSliceCheckpoint<'a> {
    device: &'a Device,
    infos: Vec<TensorInfo>,
    /// The slices of each tensor.
    held: Vec<Vec<Held>>,
}

/// A slice of a [`DeviceSliceCheckpoint`].
#[derive(Debug)]
struct Held {
    rectangle: Rectangle,
    layout: SliceLayout,
    memory: DeviceSlice,
}

impl<'a> DeviceSliceCheckpoint<'a> {
    /// A checkpoint of these slices, each of a tensor of this dtype and shape. Several slices may be of one tensor.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a slice is not within its tensor or has another size, or if slices of one tensor have elements in
    /// common, or state different dtypes or shapes.
    pub fn new<'s>(device: &'a Device, slices: impl IntoIterator<Item = (Dtype, Vec<u64>, TensorSlice<'s>)>) -> Result<Self> {
        let mut slices: Vec<_> = slices.into_iter().collect();
        slices.sort_by(|(.., a), (.., b)| a.name.cmp(b.name));
        let mut checkpoint = Self { device, infos: Vec::new(), held: Vec::new() };
        for (dtype, shape, slice) in slices {
            let TensorSlice { name, rectangle, memory, pitch } = slice;
            let layout = SliceLayout::new(name, dtype, &shape, &rectangle, pitch, memory.bytes())?;
            let held = Held { rectangle, layout, memory };
            let info = TensorInfo { name: name.to_owned(), dtype, shape };
            match (checkpoint.infos.last(), checkpoint.held.last_mut()) {
                (Some(last), Some(others)) if last.name == info.name => {
                    if *last != info {
                        return Err(Error::InvalidArgument(format!("slices of tensor {} have two types", Escaped(name))));
                    }
                    others.push(held);
                }
                _ => {
                    checkpoint.infos.push(info);
                    checkpoint.held.push(vec![held]);
                }
            }
        }
        for (info, held) in checkpoint.infos.iter().zip(&checkpoint.held) {
            check_disjoint(&info.name, held.iter().map(|held| &held.rectangle))?;
        }
        Ok(checkpoint)
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

impl Checkpoint for DeviceSliceCheckpoint<'_> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let size = out.len();
        let mut read = 0;
        for Held { layout, memory, .. } in self.held.get(tensor_index).into_iter().flatten() {
            let mut runs = Vec::new();
            read += layout.try_each(offset, size, |at, range| {
                runs.push((at, range));
                Ok(())
            })?;
            self.read_runs(memory, &runs, out)?;
        }
        let reason = format!("tensor {tensor_index}: not all of {size} bytes from byte {offset} on are held");
        if read == size { Ok(()) } else { Err(Error::InvalidArgument(reason)) }
    }

    fn held(&self, tensor_index: usize) -> Vec<Rectangle> {
        self.held.get(tensor_index).into_iter().flatten().map(|held| held.rectangle.clone()).collect()
    }

    fn holds(&self, tensor_index: usize, offset: u64, size: usize) -> bool {
        let held = self.held.get(tensor_index).into_iter().flatten();
        let bytes: Result<usize> = held.map(|held| held.layout.try_each(offset, size, |_, _| Ok(()))).sum();
        bytes.is_ok_and(|bytes| bytes == size)
    }
}
