//! Strided layouts: where the bytes of an array are in a memory.

#![forbid(unsafe_code)]

use crate::prelude::*;
use crate::rectangle::Rectangle;
use core::ops::Range;

/// Where the bytes of an array are in a memory. Byte *p* of the array, in row-major order, is at offset [`at(p)`](Self::at).
///
/// The bytes are in runs of equal length. Runs repeat in dimensions, each of an extent and a stride. A rectangle of a tensor, rows
/// with gaps, and a transposed tensor have such layouts. Layouts of the same bytes in the same order are equal, because a dimension
/// that continues the one within it becomes part of it.
///
/// Offsets must be below 2^64.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StridedLayout {
    /// Offset of the first byte.
    start: u64,
    /// Length of a run; 0 if the array is empty.
    run: u64,
    /// Extent and stride of each dimension outside of a run, from the outermost.
    dims: Vec<(u64, u64)>,
}

impl StridedLayout {
    /// Runs of `run` bytes from offset `start` on, repeated in dimensions of an extent and a stride, from the outermost.
    pub fn new(start: u64, run: u64, dims: impl IntoIterator<Item = (u64, u64), IntoIter: DoubleEndedIterator>) -> Self {
        let dims: Vec<_> = dims.into_iter().collect();
        if run == 0 || dims.iter().any(|(extent, _)| *extent == 0) {
            return Self { start, run: 0, dims: Vec::new() };
        }
        let mut layout = Self { start, run, dims: Vec::new() };
        for (extent, stride) in dims.into_iter().rev().filter(|(extent, _)| *extent > 1) {
            match layout.dims.last_mut() {
                None if stride == layout.run => layout.run = layout.run.saturating_mul(extent),
                Some((inner, distance)) if inner.saturating_mul(*distance) == stride => *inner = inner.saturating_mul(extent),
                _ => layout.dims.push((extent, stride)),
            }
        }
        layout.dims.reverse();
        layout
    }

    /// All bytes of a memory from `start` on.
    pub fn contiguous(start: u64, bytes: u64) -> Self {
        Self::new(start, bytes, [])
    }

    /// A rectangle of an array of this shape, whose elements have `bits` bits. The rectangle has no
    /// [`part_fault`](crate::rectangle::part_fault), or is the whole array, or is empty. `pitch` is the distance between rows of the
    /// array, which are its elements along the last dimension, in bytes; `None` if rows have no gaps between them.
    pub fn of_rectangle(bits: u64, shape: &[u64], pitch: Option<u64>, origin: &[u64], extent: &[u64]) -> Self {
        if extent.contains(&0) {
            return Self::contiguous(0, 0);
        }
        // In bits if elements are not whole bytes. Runs are.
        let (element, byte) = if bits.is_multiple_of(8) { (bits / 8, 1) } else { (bits, 8) };
        let mut stride = element;
        let mut dims = Vec::with_capacity(shape.len());
        let mut start = 0u64;
        for (i, length) in shape.iter().enumerate().rev() {
            dims.push((extent[i], stride));
            start = start.saturating_add(origin[i].saturating_mul(stride));
            let of_rows = pitch.filter(|_| i + 1 == shape.len()).map(|bytes| bytes.saturating_mul(byte));
            // What overflows is a stride of one index.
            stride = of_rows.unwrap_or(stride.saturating_mul(*length));
        }
        let Self { start, run, mut dims } = Self::new(start, element, dims.into_iter().rev());
        dims.iter_mut().for_each(|(_, stride)| *stride /= byte);
        Self { start: start / byte, run: run / byte, dims }
    }

    /// The same bytes, `bytes` bytes later in the memory.
    #[must_use]
    pub fn shifted(self, bytes: u64) -> Self {
        Self { start: self.start + bytes, ..self }
    }

    /// Number of bytes of the array.
    pub fn bytes(&self) -> u64 {
        self.dims.iter().fold(self.run, |bytes, (extent, _)| bytes.saturating_mul(*extent))
    }

    /// Length of a run in bytes.
    pub fn run(&self) -> u64 {
        self.run
    }

    /// Extent and stride of each dimension outside of a run, from the outermost.
    pub fn dims(&self) -> &[(u64, u64)] {
        &self.dims
    }

    /// Whether there are several runs.
    pub fn is_scattered(&self) -> bool {
        !self.dims.is_empty()
    }

    /// Offset of the first byte.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Offset after the last byte.
    pub fn end(&self) -> u64 {
        self.start + span(self.run, &self.dims)
    }

    /// Offset of byte `position` of the array.
    pub fn at(&self, position: u64) -> u64 {
        let run = self.run.max(1);
        let mut number = position / run;
        let mut at = self.start + position % run;
        for (extent, stride) in self.dims.iter().rev() {
            at += number % extent * stride;
            number /= extent;
        }
        at
    }

    /// Number of bytes from byte `position` of the array to the end of its run.
    pub fn left_in_run(&self, position: u64) -> u64 {
        self.run - position % self.run.max(1)
    }

    /// Number of bytes of the array before `offset` in the memory. Offsets must ascend with positions, as those of a rectangle do.
    pub fn before(&self, offset: u64) -> u64 {
        let Some(mut rest) = offset.checked_sub(self.start) else { return 0 };
        let mut before = 0;
        let mut inner = self.bytes();
        for (extent, stride) in &self.dims {
            inner /= extent;
            let whole = (rest / (*stride).max(1)).min(*extent);
            before += whole * inner;
            if whole == *extent {
                return before;
            }
            rest -= whole * stride;
        }
        before + rest.min(self.run)
    }

    /// Goes through `size` bytes of the array, from byte `position` on. For each run, calls `each` with its offset, and its range
    /// within these bytes.
    pub fn try_each<E>(
        &self,
        position: u64,
        size: usize,
        mut each: impl FnMut(u64, Range<usize>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut done = 0;
        while done < size && self.run > 0 {
            let position = position + done as u64;
            let end = size.min(done.saturating_add(self.left_in_run(position) as usize));
            each(self.at(position), done..end)?;
            done = end;
        }
        Ok(())
    }

    /// Offset of `size` bytes of the array, if they are contiguous.
    pub fn contiguous_at(&self, position: u64, size: usize) -> Option<u64> {
        if size == 0 || self.run == 0 {
            return Some(self.start);
        }
        (size as u64 <= self.left_in_run(position)).then(|| self.at(position))
    }

    /// Whether other layouts, which may overlap, have all these bytes. Offsets of the others must ascend with positions.
    pub fn is_covered_by(&self, others: &[Self]) -> bool {
        let covered_from = |at: u64, other: &Self| {
            let position = other.before(at);
            (position < other.bytes() && other.at(position) == at).then(|| other.left_in_run(position))
        };
        let each = |at: u64, range: Range<usize>| {
            let (mut at, end) = (at, at + range.len() as u64);
            while at < end {
                at += others.iter().filter_map(|other| covered_from(at, other)).max().ok_or(())?;
            }
            Ok::<_, ()>(())
        };
        self.try_each(0, self.bytes() as usize, each).is_ok()
    }

    /// Whether both have a byte in common. Time: constant for rows of the same pitch, or if one is a run; else one step per run of
    /// those that may overlap.
    pub fn overlaps(&self, other: &Self) -> bool {
        let sorted = |layout: &Self| {
            let mut dims = layout.dims.clone();
            dims.sort_by_key(|(_, stride)| core::cmp::Reverse(*stride));
            dims
        };
        let (dims, other_dims) = (sorted(self), sorted(other));
        let (one, two) = (Runs { start: self.start, run: self.run, dims: &dims }, other);
        self.run > 0 && two.run > 0 && one.meets(Runs { start: two.start, run: two.run, dims: &other_dims })
    }

    /// The layout of an array within this array: `inner` has its layout in this array, and the result has its layout in the memory.
    /// Byte *p* is at `self.at(inner.at(p))`. `None` if extents and strides cannot describe the result. For example, a row of the
    /// inner array ends in one row of this array and goes on in the next one.
    pub fn compose(&self, inner: &Self) -> Option<Self> {
        if inner.run == 0 {
            return Some(Self::contiguous(self.start, 0));
        }
        if inner.end() > self.bytes() {
            return None;
        }
        // A position has one digit per dimension, as a number in a mixed radix. The first digit counts within a run.
        let mut digits = vec![Digit { weight: 1, extent: self.run, stride: 1, room: self.run }];
        for (extent, stride) in self.dims.iter().rev() {
            let weight = digits.last().map_or(1, |digit| digit.weight * digit.extent);
            digits.push(Digit { weight, extent: *extent, stride: *stride, room: *extent });
        }
        for digit in &mut digits {
            digit.room -= inner.start / digit.weight % digit.extent;
        }
        let mut dims = Vec::new();
        for &(extent, stride) in [(inner.run, 1)].iter().chain(inner.dims.iter().rev()) {
            Digit::walk(&mut digits, extent, stride, &mut dims)?;
        }
        dims.reverse();
        Some(Self::new(self.at(inner.start), 1, dims))
    }

    /// The layout of the bytes of this array in another order: this array has the shape `shape` of elements of `size` bytes, and
    /// dimension *i* of the other array is dimension `order[i]` of this one. `None` if the bytes are not those of such an array, if
    /// `order` is no permutation, or as for [`StridedLayout::compose`].
    pub fn permute(&self, size: u64, shape: &[u64], order: &[usize]) -> Option<Self> {
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        if !sorted.into_iter().eq(0..shape.len()) {
            return None;
        }
        if self.run == 0 || shape.contains(&0) {
            return (self.run == 0 && shape.contains(&0)).then(|| self.clone());
        }
        let elements = shape.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim))?;
        if elements.checked_mul(size)? != self.bytes() {
            return None;
        }
        let stride = |dim: usize| size * shape[dim + 1..].iter().product::<u64>();
        self.compose(&Self::new(0, size, order.iter().map(|&dim| (shape[dim], stride(dim)))))
    }
}

/// Size of the memory from the first byte to the last.
fn span(run: u64, dims: &[(u64, u64)]) -> u64 {
    run + dims.iter().map(|(extent, stride)| (extent - 1) * stride).sum::<u64>()
}

/// One digit of positions of an array.
struct Digit {
    weight: u64,
    extent: u64,
    /// Distance in memory of positions whose digits differ by one.
    stride: u64,
    /// How many values the digit can still take without a carry.
    room: u64,
}

impl Digit {
    /// Adds the dimensions in memory of `extent` positions at distance `stride`, from the innermost. `None` if the positions of one
    /// dimension cross the end of a digit.
    fn walk(digits: &mut [Self], mut extent: u64, mut stride: u64, dims: &mut Vec<(u64, u64)>) -> Option<()> {
        if stride == 0 {
            dims.push((extent, 0));
            return Some(());
        }
        let mut first = digits.iter().rposition(|digit| digit.weight <= stride)?;
        while extent > 1 {
            let digit = digits.get_mut(first)?;
            let step = stride / digit.weight;
            if !stride.is_multiple_of(digit.weight) || step == 0 {
                return None;
            }
            // All of the values that the digit takes, or those that lead to a carry.
            let count = if extent.saturating_sub(1).checked_mul(step)? < digit.extent { extent } else { digit.extent / step };
            if count < extent && (count * step != digit.extent || !extent.is_multiple_of(count)) {
                return None;
            }
            digit.room = digit.room.checked_sub((count - 1) * step).filter(|room| *room > 0)?;
            dims.push((count, step * digit.stride));
            extent /= count;
            stride = digit.weight * digit.extent;
            first += 1;
        }
        Some(())
    }
}

/// Runs in dimensions of descending strides.
#[derive(Clone, Copy)]
struct Runs<'a> {
    start: u64,
    run: u64,
    dims: &'a [(u64, u64)],
}

impl<'a> Runs<'a> {
    fn end(self) -> u64 {
        self.start + span(self.run, self.dims)
    }

    /// The runs of one index of the outermost dimension.
    fn block(self, number: u64) -> Self {
        let stride = self.dims.first().map_or(0, |dim| dim.1);
        Self { start: self.start + number * stride, dims: self.dims.get(1..).unwrap_or(&[]), ..self }
    }

    /// The blocks that may have bytes of a range.
    fn near(self, range: Range<u64>) -> Range<u64> {
        let Some(&(extent, stride)) = self.dims.first() else { return 0..0 };
        let block = self.block(0).end() - self.start;
        let first = range.start.saturating_sub(self.start + block - 1).div_ceil(stride.max(1));
        let end = range.end.saturating_sub(self.start).div_ceil(stride.max(1));
        first.min(extent)..end.min(extent)
    }

    fn meets(self, other: Self) -> bool {
        if self.start >= other.end() || other.start >= self.end() {
            return false;
        }
        let outer = |runs: Self| runs.dims.first().map_or((0, 0), |&(extent, stride)| (stride, extent));
        match (outer(self), outer(other)) {
            ((0, _), (0, _)) => true,
            // Only the distance of two blocks matters, so one of both is the first.
            ((a, _), (b, _)) if a == b => {
                let (first, of_other) = (self.block(0), other.block(0));
                self.near(of_other.start..of_other.end()).any(|number| self.block(number).meets(of_other))
                    || other.near(first.start..first.end()).any(|number| other.block(number).meets(first))
            }
            ((a, _), (b, _)) if a > b => self.near(other.start..other.end()).any(|number| self.block(number).meets(other)),
            _ => other.meets(self),
        }
    }
}

/// The relation of memories with these layouts: for each, the number of the first one with the same bytes in the same order, which may
/// be its own. An empty memory shares nothing.
///
/// Time: sorting, and for each layout one comparison with each that begins before it and ends after its beginning.
///
/// # Errors
/// The numbers of two memories, the first one before the other in memory, that have a byte in common and are not the same.
pub fn relation(layouts: &[StridedLayout]) -> Result<Vec<usize>, [usize; 2]> {
    let mut first_of: Vec<_> = (0..layouts.len()).collect();
    let mut sorted: Vec<_> = (0..layouts.len()).filter(|&i| layouts[i].run > 0).collect();
    sorted.sort_by_key(|&i| layouts[i].start);
    // The memories that end behind the beginning of the next one. There are several if their runs interleave.
    let mut open: Vec<usize> = Vec::new();
    for i in sorted {
        open.retain(|&other| layouts[other].end() > layouts[i].start);
        match open.iter().find(|&&other| layouts[other].overlaps(&layouts[i])) {
            Some(&other) if layouts[other] == layouts[i] => first_of[i] = other,
            Some(&other) => return Err([other, i]),
            None => open.push(i),
        }
    }
    Ok(first_of)
}

/// The number of an output, and of a source, that have a byte in common. Outputs may overlap each other, and sources too. If there are
/// several, those of the first source.
pub fn first_shared(outputs: &[StridedLayout], sources: &[StridedLayout]) -> Option<[usize; 2]> {
    let mut sorted: Vec<_> = (0..outputs.len()).filter(|&i| outputs[i].run > 0).collect();
    sorted.sort_by_key(|&i| outputs[i].start);
    // The largest end of each output and those before it.
    let largest = |end: &mut u64, &i: &usize| {
        *end = outputs[i].end().max(*end);
        Some(*end)
    };
    let ends: Vec<_> = sorted.iter().scan(0, largest).collect();
    sources.iter().enumerate().filter(|(_, source)| source.run > 0).find_map(|(number, source)| {
        let first = ends.partition_point(|&end| end <= source.start);
        let behind = sorted.partition_point(|&i| outputs[i].start < source.end());
        let shared = sorted.get(first..behind)?.iter().find(|&&i| outputs[i].overlaps(source))?;
        Some([*shared, number])
    })
}

/// Where the bytes of one array are in another one: those that both have. Positions of the first array ascend with the offsets of
/// its layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Positions in the array of the common bytes.
    from: StridedLayout,
    /// Offsets of the common bytes in memory.
    to: StridedLayout,
    /// The range of common bytes that is used.
    common: Range<u64>,
    /// Added to offsets in memory, modulo 2^64.
    shift: u64,
}

impl Placement {
    /// All bytes of an array of `bytes` bytes, without gaps.
    pub fn whole(bytes: u64) -> Self {
        let all = StridedLayout::contiguous(0, bytes);
        Self { from: all.clone(), to: all, common: 0..bytes, shift: 0 }
    }

    /// The elements of rectangle `array` of a tensor, whose elements have `bits` bits, that memory of rectangle `held` has. Rows of
    /// the memory are `pitch` bytes apart. `None` if there are no such elements.
    pub fn of_rectangles(bits: u64, array: &Rectangle, held: &Rectangle, pitch: Option<u64>) -> Option<Self> {
        // A scalar has one element, and every rectangle of it is all of it.
        let common = array.intersection(held)?;
        let place = |of: &Rectangle, pitch| {
            let origin: Vec<u64> = common.origin.iter().zip(&of.origin).map(|(at, first)| at - first).collect();
            StridedLayout::of_rectangle(bits, &of.extent, pitch, &origin, &common.extent)
        };
        let (from, to) = (place(array, None), place(held, pitch));
        Some(Self { common: 0..from.bytes(), from, to, shift: 0 })
    }

    /// The bytes of an array of layout `to` in a tensor that are in range `held` of the tensor's bytes. The memory has that range.
    pub fn of_range(to: StridedLayout, held: &Range<u64>) -> Self {
        let common = to.before(held.start)..to.before(held.end);
        Self { from: StridedLayout::contiguous(0, to.bytes()), to, common, shift: held.start.wrapping_neg() }
    }

    /// The same bytes in memory that begins `bytes` bytes earlier.
    #[must_use]
    pub fn shifted(self, bytes: u64) -> Self {
        Self { shift: self.shift.wrapping_add(bytes), ..self }
    }

    /// Numbers of the common bytes among `size` bytes of the array from byte `position` on.
    fn common_in(&self, position: u64, size: usize) -> Range<u64> {
        let number = |position| self.from.before(position).clamp(self.common.start, self.common.end);
        number(position)..number(position.saturating_add(size as u64))
    }

    /// How many of `size` bytes of the array, from byte `position` on, the memory has.
    pub fn count(&self, position: u64, size: usize) -> usize {
        let common = self.common_in(position, size);
        (common.end - common.start) as usize
    }

    /// The number of runs that [`Placement::try_each`] goes through, at most.
    pub fn max_runs(&self, position: u64, size: usize) -> u64 {
        let bytes = self.count(position, size) as u64;
        // Each run begins where one of the layouts begins a run, or is the first.
        [&self.from, &self.to].map(|layout| bytes.div_ceil(layout.run().max(1))).iter().sum::<u64>() + u64::from(bytes > 0)
    }

    /// Goes through the bytes that the memory has, of `size` bytes of the array from byte `position` on: calls `each` with their
    /// offset in memory, and their range within the `size` bytes. Returns how many these are.
    pub fn try_each<E>(
        &self,
        position: u64,
        size: usize,
        mut each: impl FnMut(usize, Range<usize>) -> Result<(), E>,
    ) -> Result<usize, E> {
        let Range { start, end } = self.common_in(position, size);
        let mut number = start;
        while number < end {
            let run = self.from.left_in_run(number).min(self.to.left_in_run(number)).min(end - number);
            let first = (self.from.at(number) - position) as usize;
            each(self.to.at(number).wrapping_add(self.shift) as usize, first..first + run as usize)?;
            number += run;
        }
        Ok((end - start) as usize)
    }

    /// Offset in memory of `size` bytes of the array from byte `position` on, if the memory has them all without gaps.
    pub fn contiguous_at(&self, position: u64, size: usize) -> Option<usize> {
        let common = self.common_in(position, size);
        let is_held = common.end - common.start == size as u64;
        let at = self.to.contiguous_at(common.start, size).filter(|_| is_held)?;
        Some(at.wrapping_add(self.shift) as usize)
    }
}

#[cfg(test)]
mod tests;
