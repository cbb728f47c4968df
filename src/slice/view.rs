//! Views of named tensors, in memory of any kind.

use crate::checkpoint::TensorInfo;
use std::ops::Range;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::lane::Dtype;
use tpde_core::layout::{Placement, StridedLayout};
use tpde_core::rectangle::{Rectangle, overlap, part_fault};

/// A rectangle of a tensor in a memory `M`. Rows of the rectangle, which are its elements along the last dimension, follow each other
/// without gaps, or begin at multiples of a pitch.
#[derive(Debug, Clone)]
pub struct View<M> {
    dtype: Dtype,
    pub rectangle: Rectangle,
    pitch: Option<u64>,
    pub memory: M,
}

impl<M> View<M> {
    /// A view of a tensor of this name, dtype and shape. The shape must be possible. The memory has `size` bytes, from the first
    /// row to the last.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the rectangle is not within the tensor, if its rows are not whole bytes, or if the memory has
    /// another size.
    pub fn new(
        (name, dtype, shape): (&str, Dtype, &[u64]),
        rectangle: Rectangle,
        pitch: Option<u64>,
        size: u64,
        memory: M,
    ) -> Result<Self> {
        let (origin, extent) = (&rectangle.origin[..], &rectangle.extent[..]);
        let refused = |reason: &str| {
            let name = Escaped(name);
            Error::InvalidArgument(format!("slice {rectangle} of tensor {name} of {shape:?}: {reason}"))
        };
        let is_whole = rectangle == Rectangle::whole(shape);
        let is_empty = extent.contains(&0) && rectangle.is_within(shape);
        if let Some(fault) = part_fault(dtype.bits(), shape, origin, extent).filter(|_| !is_whole && !is_empty) {
            return Err(refused(fault));
        }
        let needed = match pitch {
            _ if is_empty => Some(0),
            Some(pitch) => {
                let is_odd = |elements: Option<&u64>| !elements.is_none_or(|n| (n * dtype.bits()).is_multiple_of(8));
                if is_odd(shape.last()) || is_odd(origin.last()) || is_odd(extent.last()) {
                    return Err(refused("rows that are not of whole bytes"));
                }
                // A scalar is a row of one element.
                let elements = extent.last().copied().unwrap_or(1);
                let (row, rows) = (elements * dtype.bits() / 8, rectangle.elements() / elements);
                if pitch < row {
                    return Err(refused(&format!("a pitch of {pitch} bytes for rows of {row}")));
                }
                (rows - 1).checked_mul(pitch).and_then(|bytes| bytes.checked_add(row))
            }
            None => Some(rectangle.elements() * dtype.bits() / 8),
        };
        if needed != Some(size) {
            let needed = needed.map_or("too many".to_owned(), |bytes| bytes.to_string());
            return Err(refused(&format!("memory of {size} bytes, expected {needed}")));
        }
        Ok(Self { dtype, rectangle, pitch, memory })
    }

    /// Where the bytes of a rectangle of the tensor are in the memory. `None` if the view has no elements of the rectangle.
    pub fn placement(&self, array: &Rectangle) -> Option<Placement> {
        Placement::of_rectangles(self.dtype.bits(), array, &self.rectangle, self.pitch)
    }

    /// The layout of the view in its memory.
    pub fn layout(&self) -> StridedLayout {
        let Rectangle { extent, .. } = &self.rectangle;
        StridedLayout::of_rectangle(self.dtype.bits(), extent, self.pitch, &vec![0; extent.len()], extent)
    }
}

/// Views of tensors, which a checkpoint holds.
#[derive(Debug)]
pub struct Views<M> {
    infos: Vec<TensorInfo>,
    /// The views of each tensor, and where the bytes of the tensor are in their memory; `None` for an empty view.
    views: Vec<Vec<(View<M>, Option<Placement>)>>,
}

impl<M> Default for Views<M> {
    fn default() -> Self {
        Self { infos: Vec::new(), views: Vec::new() }
    }
}

impl<M> Views<M> {
    /// Sorts views by tensor. Each is given by its tensor, rectangle, pitch, and the size of its memory. Several may be of one
    /// tensor, and a view may be empty.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if views of one tensor have elements in common, or state different dtypes or shapes, or if a view
    /// is not within its tensor or has another size.
    pub fn new(views: impl IntoIterator<Item = (TensorInfo, Rectangle, Option<u64>, u64, M)>) -> Result<Self> {
        let mut views: Vec<_> = views.into_iter().collect();
        views.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        let mut all = Self::default();
        for (tensor, rectangle, pitch, size, memory) in views {
            let TensorInfo { name, dtype, shape } = &tensor;
            let is_possible = dtype.lanes(shape).is_some();
            let impossible = || Error::InvalidArgument(format!("tensor {} has an impossible shape {shape:?}", Escaped(name)));
            is_possible.then_some(()).ok_or_else(impossible)?;
            let view = View::new((name, *dtype, shape), rectangle, pitch, size, memory)?;
            let placement = view.placement(&Rectangle::whole(shape));
            match (all.infos.last(), all.views.last_mut()) {
                (Some(last), Some(others)) if last.name == *name => {
                    if (last.dtype, &last.shape) != (*dtype, shape) {
                        let found = format!("{} {:?} and {dtype} {shape:?}", last.dtype, last.shape);
                        return Err(Error::InvalidArgument(format!("slices are of tensor {} of {found}", Escaped(name))));
                    }
                    others.push((view, placement));
                }
                _ => {
                    all.views.push(vec![(view, placement)]);
                    all.infos.push(tensor);
                }
            }
        }
        for (info, views) in all.infos.iter().zip(&all.views) {
            check_disjoint(&info.name, views.iter().map(|(view, _)| &view.rectangle))?;
        }
        Ok(all)
    }

    /// The tensors, in ascending order of name.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    /// The views of a tensor.
    pub fn of(&self, tensor_index: usize) -> impl Iterator<Item = &View<M>> {
        self.placed(tensor_index).iter().map(|(view, _)| view)
    }

    fn placed(&self, tensor_index: usize) -> &[(View<M>, Option<Placement>)] {
        self.views.get(tensor_index).map_or(&[], |views| views)
    }

    /// The view of a tensor that is held whole.
    pub fn whole(&self, tensor_index: usize) -> Option<&View<M>> {
        let [(view, _)] = self.placed(tensor_index) else { return None };
        (view.rectangle.extent == self.infos[tensor_index].shape).then_some(view)
    }

    /// The rectangles of a tensor that are held.
    pub fn rectangles(&self, tensor_index: usize) -> Vec<Rectangle> {
        self.of(tensor_index).map(|view| view.rectangle.clone()).collect()
    }

    /// Whether `size` bytes of a tensor, from byte `offset` on, are held.
    pub fn holds(&self, tensor_index: usize, offset: u64, size: usize) -> bool {
        let placements = self.placed(tensor_index).iter().filter_map(|(_, placement)| placement.as_ref());
        placements.map(|placement| placement.count(offset, size)).sum::<usize>() == size
    }

    /// A memory with `size` bytes of a tensor, from byte `offset` on, without gaps, and their offset there.
    pub fn contiguous_at(&self, tensor_index: usize, offset: u64, size: usize) -> Option<(&M, usize)> {
        let views = self.placed(tensor_index).iter();
        views.clone().find_map(|(view, placement)| Some((&view.memory, placement.as_ref()?.contiguous_at(offset, size)?)))
    }

    /// Calls `read` for each view with some of the `size` bytes of a tensor from byte `offset` on: with its memory, and the runs of
    /// these bytes, as their offsets in the memory and their ranges within the `size` bytes.
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
        for (View { memory, .. }, placement) in self.placed(tensor_index) {
            let Some(placement) = placement else { continue };
            runs.clear();
            count += placement.try_each(offset, size, |at, range| -> Result<()> {
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
