//! Slices of named tensors, in memory of any kind.

use super::layout::SliceLayout;
use crate::checkpoint::TensorInfo;
use std::ops::Range;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::rectangle::{Rectangle, overlap};

/// A slice to be held: its tensor, its place in the tensor, and its memory of `size` bytes.
pub(crate) struct NewSlice<M> {
    pub tensor: TensorInfo,
    pub rectangle: Rectangle,
    pub pitch: Option<u64>,
    pub size: u64,
    pub memory: M,
}

/// A slice of a tensor.
#[derive(Debug)]
pub(crate) struct HeldSlice<M> {
    pub rectangle: Rectangle,
    pub layout: SliceLayout,
    pub memory: M,
}

/// Slices of tensors, which a checkpoint holds. `M` is their memory.
#[derive(Debug)]
pub(crate) struct HeldSlices<M> {
    infos: Vec<TensorInfo>,
    /// The slices of each tensor.
    held: Vec<Vec<HeldSlice<M>>>,
}

impl<M> Default for HeldSlices<M> {
    fn default() -> Self {
        Self { infos: Vec::new(), held: Vec::new() }
    }
}

impl<M> HeldSlices<M> {
    /// Sorts slices by tensor. Several may be of one tensor, and a slice may be empty.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if slices of one tensor have elements in common, or state different dtypes or shapes, or if a
    /// slice is not within its tensor or has another size.
    pub fn new(slices: impl IntoIterator<Item = NewSlice<M>>) -> Result<Self> {
        let mut slices: Vec<_> = slices.into_iter().collect();
        slices.sort_by(|a, b| a.tensor.name.cmp(&b.tensor.name));
        let (mut infos, mut all) = (Vec::<TensorInfo>::new(), Vec::<Vec<HeldSlice<M>>>::new());
        for NewSlice { tensor, rectangle, pitch, size, memory } in slices {
            let TensorInfo { name, dtype, shape } = &tensor;
            let is_possible = dtype.lanes(shape).is_some();
            let impossible = || Error::InvalidArgument(format!("tensor {} has an impossible shape {shape:?}", Escaped(name)));
            is_possible.then_some(()).ok_or_else(impossible)?;
            let layout = SliceLayout::new(name, *dtype, shape, &rectangle, pitch, size)?;
            let held = HeldSlice { rectangle, layout, memory };
            match (infos.last(), all.last_mut()) {
                (Some(last), Some(others)) if last.name == *name => {
                    if (last.dtype, &last.shape) != (*dtype, shape) {
                        let found = format!("{} {:?} and {dtype} {shape:?}", last.dtype, last.shape);
                        return Err(Error::InvalidArgument(format!("slices are of tensor {} of {found}", Escaped(name))));
                    }
                    others.push(held);
                }
                _ => {
                    all.push(vec![held]);
                    infos.push(tensor);
                }
            }
        }
        for (info, held) in infos.iter().zip(&all) {
            check_disjoint(&info.name, held.iter().map(|held| &held.rectangle))?;
        }
        Ok(Self { infos, held: all })
    }

    /// The tensors, in ascending order of name.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    /// The slices of a tensor.
    pub fn of(&self, tensor_index: usize) -> &[HeldSlice<M>] {
        self.held.get(tensor_index).map_or(&[], |held| held)
    }

    /// The slice of a tensor that is held whole.
    pub fn whole(&self, tensor_index: usize) -> Option<&HeldSlice<M>> {
        let [held] = self.of(tensor_index) else { return None };
        (held.rectangle.extent == self.infos[tensor_index].shape).then_some(held)
    }

    /// The rectangles of a tensor that are held.
    pub fn rectangles(&self, tensor_index: usize) -> Vec<Rectangle> {
        self.of(tensor_index).iter().map(|held| held.rectangle.clone()).collect()
    }

    /// Whether `size` bytes of a tensor, from byte `offset` on, are held.
    pub fn holds(&self, tensor_index: usize, offset: u64, size: usize) -> bool {
        let bytes: Result<usize> = self.of(tensor_index).iter().map(|held| held.layout.try_each(offset, size, |_, _| Ok(()))).sum();
        bytes.is_ok_and(|bytes| bytes == size)
    }

    /// Calls `read` for each slice with some of the `size` bytes of a tensor from byte `offset` on: with its memory, and the runs
    /// of these bytes, as their offsets in the memory and their ranges within the `size` bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if not all of the bytes are held.
    pub fn try_read(
        &self,
        tensor_index: usize,
        offset: u64,
        size: usize,
        mut read: impl FnMut(&M, &[(usize, Range<usize>)]) -> Result<()>,
    ) -> Result<()> {
        let mut count = 0;
        let mut runs = Vec::new();
        for HeldSlice { layout, memory, .. } in self.of(tensor_index) {
            runs.clear();
            count += layout.try_each(offset, size, |at, range| {
                runs.push((at, range));
                Ok(())
            })?;
            read(memory, &runs)?;
            if count == size {
                return Ok(());
            }
        }
        let reason = format!("tensor {tensor_index}: not all of {size} bytes from byte {offset} on are held");
        if count == size { Ok(()) } else { Err(Error::InvalidArgument(reason)) }
    }
}

/// Checks that slices of a tensor have no elements in common.
pub(crate) fn check_disjoint<'a>(name: &str, slices: impl IntoIterator<Item = &'a Rectangle>) -> Result<()> {
    match overlap(slices) {
        Some([a, b]) => Err(Error::InvalidArgument(format!("slices {a} and {b} of tensor {} overlap", Escaped(name)))),
        None => Ok(()),
    }
}
