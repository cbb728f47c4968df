//! The plan of an application: which chunks are decoded, where their base lanes are in the base, and where their bytes are in the
//! caller's memory.

use super::find::find_base;
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::cut::{Cut, Piece};
use crate::slice::{Memories, PlacedSlice, View, check_disjoint};
use std::ops::Range;
use tpde_core::error::{Error, Escaped, List, Result};
use tpde_core::format::BaseKind;
use tpde_core::index::{Tensor, ValidatedIndex};
use tpde_core::layout::{Placement, StridedLayout, relation};
use tpde_core::rectangle::Rectangle;

/// What an application decodes.
#[derive(Default)]
pub(crate) struct Plan<'a> {
    /// In the order of the pair.
    pub items: Vec<Item<'a>>,
}

/// An entry of the pair, of which some chunks are decoded.
pub(crate) struct Item<'a> {
    pub tensor: Tensor<'a>,
    /// Its base lanes in the base. In place, those in memory, also if the entry needs no base.
    pub base: Option<Piece>,
    /// The chunks, ascending.
    pub chunks: Vec<u32>,
    /// Where its bytes are in memory.
    pub places: Vec<Place>,
    /// Whether its digests can be compared: all chunks are decoded, and the base lanes that its base digest covers are there.
    pub is_complete: bool,
}

/// Memory that has bytes of an entry.
pub(crate) struct Place {
    /// Number of the memory.
    pub memory: usize,
    pub placement: Placement,
    /// Number of the slice that asks for these bytes, if slices do.
    slice: usize,
}

/// A chunk to decode.
#[derive(Clone, Copy)]
pub(crate) struct Task {
    /// Number of the item.
    pub item: usize,
    pub chunk: u32,
}

impl<'a> Item<'a> {
    /// All chunks of an entry.
    pub fn whole(tensor: Tensor<'a>, base: Option<Piece>) -> Self {
        Self { tensor, base, chunks: tensor.chunks().collect(), places: Vec::new(), is_complete: true }
    }

    /// Leaves out the chunks of which no memory has bytes.
    fn touched(mut self) -> Self {
        let chunks = std::mem::take(&mut self.chunks);
        self.chunks = chunks.into_iter().filter(|&chunk| self.held(chunk) > 0).collect();
        self
    }

    /// Offset and size of a chunk in bytes of the entry.
    pub fn bytes_of(&self, chunk: u32) -> (u64, usize) {
        let (lanes, width) = (self.tensor.chunk_range(chunk), self.tensor.lane_bytes() as u64);
        (lanes.start * width, ((lanes.end - lanes.start) * width) as usize)
    }

    /// The number of runs that a chunk has in memory, at most.
    pub fn max_runs(&self, chunk: u32) -> u64 {
        let (offset, size) = self.bytes_of(chunk);
        self.places.iter().map(|place| place.placement.max_runs(offset, size)).sum()
    }

    /// How many bytes of a chunk are in memory.
    pub fn held(&self, chunk: u32) -> usize {
        let (offset, size) = self.bytes_of(chunk);
        self.places.iter().map(|place| place.placement.count(offset, size)).sum()
    }

    /// The error for a chunk of which `what`, or else the memory of the slices, lacks lanes. `slices` are those of the request.
    pub fn not_held(&self, chunk: u32, what: Option<&str>, slices: &[PlacedSlice<'_>]) -> Error {
        let (entry, lanes) = (self.tensor.rectangle(), self.tensor.chunk_range(chunk));
        let (offset, size) = self.bytes_of(chunk);
        let touching = self.places.iter().filter(|place| place.placement.count(offset, size) > 0);
        let parts: Vec<_> = touching.map(|place| &slices[place.slice].rectangle).collect();
        let (memory, part) = if parts.len() > 1 { ("the memory of the slices", "parts") } else { ("the slice", "part") };
        let (what, parts) = (what.unwrap_or(memory), List(&parts));
        Error::NotHeld {
            tensor: self.tensor.name.to_owned(),
            chunk,
            reason: format!(
                "{what} lacks some of the lanes {}..{} of {entry}. A pair fits in which the tensor is cut at the {part} {parts}",
                lanes.start, lanes.end
            ),
        }
    }
}

impl<'a> Plan<'a> {
    /// All chunks of entries.
    ///
    /// # Errors
    /// Those of [`find_base`].
    pub fn whole(entries: impl IntoIterator<Item = Tensor<'a>>, base: &dyn Checkpoint) -> Result<Self> {
        let item = |tensor| Ok(Item::whole(tensor, find_base(&tensor, base)?));
        Ok(Self { items: entries.into_iter().map(item).collect::<Result<_>>()? })
    }

    /// All chunks of entries, each of which has a memory of its own.
    ///
    /// # Errors
    /// Those of [`find_base`].
    pub fn in_memories(entries: impl IntoIterator<Item = Tensor<'a>>, base: &dyn Checkpoint) -> Result<Self> {
        let mut plan = Self::whole(entries, base)?;
        for (memory, item) in plan.items.iter_mut().enumerate() {
            item.places = vec![Place { memory, placement: Placement::whole(item.tensor.bytes()), slice: memory }];
        }
        Ok(plan)
    }

    /// All chunks of a tensor. Digests are not compared.
    fn of_tensor(index: &'a ValidatedIndex, name: &str, base: &dyn Checkpoint) -> Result<Self> {
        let mut plan = Self::whole(index.entries(name), base)?;
        plan.items.iter_mut().for_each(|item| item.is_complete = false);
        if plan.items.is_empty() { Err(no_tensor(name)) } else { Ok(plan) }
    }

    /// The chunks that have bytes of a range of elements of a tensor, and the size of the range in bytes. The memory has the range.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such tensor or range, or if the pair has only some parts of the range; those of
    /// [`find_base`].
    pub fn of_range(index: &'a ValidatedIndex, name: &str, elements: Range<u64>, base: &dyn Checkpoint) -> Result<(Self, u64)> {
        let mut plan = Self::of_tensor(index, name, base)?;
        let first = &plan.items[0].tensor;
        let (lanes, width) = (first.lanes_of_whole(elements)?, first.lane_bytes() as u64);
        let (wanted, mut covered) = (lanes.start * width..lanes.end * width, 0);
        for item in &mut plan.items {
            let layout = item.tensor.layout().unwrap_or_else(|| StridedLayout::contiguous(0, item.tensor.bytes()));
            let bytes = layout.before(wanted.start)..layout.before(wanted.end);
            covered += bytes.end - bytes.start;
            item.chunks = item.tensor.chunks_of(&(bytes.start / width..bytes.end / width)).collect();
            item.places = vec![Place { memory: 0, placement: Placement::of_range(layout, &wanted), slice: 0 }];
        }
        let size = wanted.end - wanted.start;
        if covered < size {
            let reason = format!("the pair has parts with {covered} of {size} bytes of the range of tensor {}", Escaped(name));
            return Err(Error::InvalidArgument(reason));
        }
        Ok((plan, size))
    }

    /// The chunks of a tensor that change.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such tensor; [`Error::Incomplete`] if the pair has only some parts of it; those of
    /// [`find_base`].
    pub fn of_changes(index: &'a ValidatedIndex, name: &str, base: &dyn Checkpoint) -> Result<Self> {
        let mut plan = Self::of_tensor(index, name, base)?;
        index.check_has(name, &Rectangle::whole(plan.items[0].tensor.whole_shape()))?;
        let is_changed = |chunk: &u32| index.records()[*chunk as usize].num_deltas.get() > 0;
        plan.items.iter_mut().for_each(|item| item.chunks.retain(is_changed));
        Ok(plan)
    }

    /// The chunks that have bytes of slices. Items have no base yet.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the pair lacks a tensor, if a slice is not within its tensor or has another size, or if slices
    /// share elements or memory; [`Error::Incomplete`] if the pair lacks elements of a slice.
    pub(super) fn of_slices(index: &'a ValidatedIndex, memories: &Memories<'_>) -> Result<Self> {
        let mut plan = Self::default();
        let count = memories.slices.iter().map(|slice| slice.memory + 1).max();
        let mut layouts = vec![Vec::new(); count.unwrap_or(0)];
        let mut next = 0;
        for slices in memories.slices.chunk_by(|a, b| a.name == b.name) {
            let views = plan.add_slices(index, slices, next)?;
            for (view, slice) in views.iter().zip(slices) {
                layouts[slice.memory].push((next, view.layout().shifted(slice.range.start as u64)));
                next += 1;
            }
        }
        for of_memory in layouts {
            let (numbers, of_memory): (Vec<usize>, Vec<_>) = of_memory.into_iter().unzip();
            let first_of = relation(&of_memory);
            // Slices with equal memory are refused too: each is the base of its own tensor.
            let tied = |first_of: Vec<usize>| first_of.into_iter().enumerate().find(|(i, first)| i != first);
            if let Some([a, b]) = first_of.map_or_else(Some, |first_of| tied(first_of).map(|(i, first)| [first, i])) {
                let [a, b] = [a, b].map(|i| Escaped(memories.slices[numbers[i]].name));
                return Err(Error::InvalidArgument(format!("slices of tensors {a} and {b} share memory")));
            }
        }
        Ok(plan)
    }

    /// The chunks that are changed in place in slices. The base has the tensors of the slices, in order of name.
    ///
    /// # Errors
    /// Those of [`Plan::of_slices`]; [`Error::InvalidArgument`] if a tensor cannot be changed in place; [`Error::NotHeld`] if slices
    /// have only some lanes of a chunk.
    pub fn in_place(index: &'a ValidatedIndex, memories: &Memories<'_>) -> Result<Self> {
        let mut plan = Self::of_slices(index, memories)?;
        let names: Vec<_> = memories.names().collect();
        for item in &mut plan.items {
            check_in_place(&item.tensor)?;
            let is_cut = |&&chunk: &&u32| item.held(chunk) < item.bytes_of(chunk).1;
            if let Some(&chunk) = item.chunks.iter().find(is_cut) {
                return Err(item.not_held(chunk, None, &memories.slices));
            }
            item.base = names.binary_search(&item.tensor.name).ok().map(|number| Piece::of(number, item.tensor.layout()));
        }
        Ok(plan)
    }

    /// The chunks from which slices are rebuilt, with a base of which only some lanes may be held.
    ///
    /// # Errors
    /// Those of [`Plan::of_slices`] and [`find_base`]; [`Error::NotHeld`] if the base lacks lanes of a chunk.
    pub fn out_of_place(index: &'a ValidatedIndex, memories: &Memories<'_>, base: &dyn Checkpoint) -> Result<Self> {
        let mut plan = Self::of_slices(index, memories)?;
        // An empty slice needs no base.
        plan.items.retain(|item| !item.chunks.is_empty());
        plan.items.iter_mut().try_for_each(|item| find_base(&item.tensor, base).map(|found| item.base = found))?;
        for item in &mut plan.items {
            let Some(found) = &item.base else { continue };
            let is_held = |offset, size| size == 0 || found.is_held(base, offset, size);
            for &chunk in &item.chunks {
                let (offset, size) = item.bytes_of(chunk);
                let size = item.tensor.base_bytes().saturating_sub(offset).min(size as u64) as usize;
                if !is_held(offset, size) {
                    return Err(item.not_held(chunk, Some("the base"), &memories.slices));
                }
            }
            // The digest of a base with other rows covers all of its rows.
            item.is_complete &= item.tensor.base_kind != BaseKind::Prefix || is_held(0, item.tensor.base_bytes() as usize);
        }
        Ok(plan)
    }

    /// Adds the entries of a tensor that have bytes of its slices, which have numbers from `first` on.
    fn add_slices(&mut self, index: &'a ValidatedIndex, slices: &[PlacedSlice<'_>], first: usize) -> Result<Vec<View<usize>>> {
        let name = slices[0].name;
        let tensor = index.find(name).ok_or_else(|| no_tensor(name))?;
        let of_tensor = (name, tensor.dtype, tensor.whole_shape());
        let view = |slice: &PlacedSlice<'_>| {
            View::new(of_tensor, slice.rectangle.clone(), slice.pitch, slice.range.len() as u64, slice.memory)
        };
        let views = slices.iter().map(view).collect::<Result<Vec<_>>>()?;
        check_disjoint(name, slices.iter().map(|slice| &slice.rectangle))?;
        slices.iter().try_for_each(|slice| index.check_has(name, &slice.rectangle))?;
        for entry in index.entries(name) {
            let array = entry.rectangle();
            let place = |(i, view): (usize, &View<usize>)| {
                let placement = view.placement(&array)?.shifted(slices[i].range.start as u64);
                Some(Place { memory: view.memory, placement, slice: first + i })
            };
            let places: Vec<_> = views.iter().enumerate().filter_map(place).collect();
            // Digests of an empty tensor are compared too.
            let is_empty = entry.lanes == 0 && slices.iter().any(|slice| slice.rectangle == array);
            if !places.is_empty() || is_empty {
                let mut item = Item { places, ..Item::whole(entry, None) }.touched();
                item.is_complete = item.chunks.len() == entry.chunk_count as usize;
                self.items.push(item);
            }
        }
        Ok(views)
    }

    /// The chunks to decode. Those of the parts of a tensor are in the order of their first bytes in the tensor, so that
    /// neighbouring columns are rebuilt, and written, together.
    pub fn tasks(&self) -> impl Iterator<Item = Task> + '_ {
        let tensors = self.items.chunk_by(|a, b| a.tensor.part.is_some() && a.tensor.name == b.tensor.name);
        let mut next = 0;
        tensors.flat_map(move |parts| {
            let first = next;
            next += parts.len();
            let tasks = (first..).zip(parts).flat_map(|(item, part)| part.chunks.iter().map(move |&chunk| Task { item, chunk }));
            let mut tasks: Vec<_> = tasks.collect();
            if parts.len() > 1 {
                let layouts: Vec<_> = parts.iter().map(|part| part.tensor.layout()).collect();
                let position = |task: &Task| {
                    let part = task.item - first;
                    layouts[part].as_ref().map(|layout| layout.at(parts[part].bytes_of(task.chunk).0))
                };
                tasks.sort_by_cached_key(position);
            }
            tasks
        })
    }

    /// The base lanes of the items as tensors of a checkpoint, and the position of each item's.
    pub fn bases<'b>(&self, base: &'b dyn Checkpoint) -> (Cut<'b>, Vec<Option<usize>>) {
        let mut cut = Cut::new(base);
        let mut push = |Item { tensor, base, .. }: &Item<'_>| {
            let rows = tensor.base_shape().filter(|_| tensor.base_kind == BaseKind::Prefix);
            let (name, shape) = (tensor.base_name.to_owned(), rows.unwrap_or_else(|| tensor.shape.to_vec()));
            cut.push(TensorInfo { name, dtype: tensor.dtype, shape }, base.clone()?);
            Some(cut.tensors().len() - 1)
        };
        let positions = self.items.iter().map(&mut push).collect();
        (cut, positions)
    }

    /// Whether the digests of all items can be compared.
    pub fn is_complete(&self) -> bool {
        self.items.iter().all(|item| item.is_complete)
    }

    /// Indexes of the chunks in the index map.
    pub fn chunks(&self) -> impl Iterator<Item = u32> + '_ {
        self.items.iter().flat_map(|item| item.chunks.iter().copied())
    }

    /// Offset and size of a task's chunk in bytes of its entry.
    pub fn bytes_of(&self, task: Task) -> (u64, usize) {
        self.items[task.item].bytes_of(task.chunk)
    }
}

/// The error for a tensor that the pair lacks.
pub(super) fn no_tensor(name: &str) -> Error {
    Error::InvalidArgument(format!("no tensor {} in the pair", Escaped(name)))
}

/// Checks that memory of an entry's base can hold its target.
///
/// # Errors
/// [`Error::InvalidArgument`] if the base has another number of rows or another dtype.
pub(super) fn check_in_place(entry: &Tensor<'_>) -> Result<()> {
    let reason = match entry.base_kind {
        BaseKind::None | BaseKind::Same => return Ok(()),
        BaseKind::Prefix => "changes its number of rows, which cannot be done in place".to_owned(),
        BaseKind::Cast | BaseKind::Dequantised => {
            let (from, to) = (entry.base_dtype(), entry.dtype);
            format!("has a base of {from} and a target of {to}, which cannot be changed in place: rebuild it in other memory")
        }
    };
    Err(Error::InvalidArgument(format!("tensor {} {reason}", Escaped(entry.name))))
}
