//! What is wanted of the tensors of a version: the chunks with elements of it, and what these are made from in the pair before.

use std::collections::HashMap;
use std::ops::Range;
use tpde::{BaseKind, Rectangle, Tensor};

/// Some elements of a tensor.
enum Elements {
    All,
    Within(Rectangle),
    /// A range of the elements of a rectangle, in their order.
    Run(Rectangle, Range<u64>),
}

/// What is wanted of tensors, by name.
#[derive(Default)]
pub(crate) struct WantedTensors(HashMap<String, Vec<Elements>>);

impl WantedTensors {
    /// Rectangles of tensors.
    pub fn of(rectangles: impl IntoIterator<Item = (String, Vec<Rectangle>)>) -> Self {
        let within = |one: Vec<Rectangle>| one.into_iter().map(Elements::Within).collect();
        Self(rectangles.into_iter().map(|(name, one)| (name, within(one))).collect())
    }

    /// What these entries and chunks of them are made from.
    pub fn bases<'a>(entries: impl IntoIterator<Item = &'a (Tensor<'a>, Vec<u32>)>) -> Self {
        let mut bases = Self::default();
        entries.into_iter().for_each(|(entry, chunks)| bases.add_bases(entry, chunks));
        bases
    }

    /// The chunks of an entry that have wanted elements, in ascending order.
    pub fn chunks(&self, entry: &Tensor<'_>) -> Vec<u32> {
        let Some(wanted) = self.0.get(entry.name) else { return Vec::new() };
        let (of_entry, extent) = (entry.rectangle(), entry.shape);
        let wanted: Vec<_> = wanted.iter().filter_map(|elements| elements.within(&of_entry)).collect();
        let has = |chunk: &u32| {
            let range = elements_of(entry, *chunk);
            wanted.iter().any(|elements| match elements {
                Elements::All => true,
                Elements::Within(part) => before(extent, part, range.start) < before(extent, part, range.end),
                Elements::Run(_, run) => run.start < range.end && range.start < run.end,
            })
        };
        entry.chunks().filter(has).collect()
    }

    /// Adds what these chunks of an entry are made from, in ascending order.
    fn add_bases(&mut self, entry: &Tensor<'_>, chunks: &[u32]) {
        if chunks.is_empty() || entry.base_kind == BaseKind::None {
            return;
        }
        let of_base = self.0.entry(entry.base_name.to_owned()).or_default();
        if entry.base_kind != BaseKind::Same {
            of_base.push(Elements::All);
        } else {
            for run in chunks.chunk_by(|a, b| a + 1 == *b) {
                let range = elements_of(entry, run[0]).start..elements_of(entry, run[run.len() - 1]).end;
                of_base.push(Elements::Run(entry.rectangle(), range));
            }
        }
        if let Some((scales, ..)) = entry.scales() {
            self.0.entry(scales.to_owned()).or_default().push(Elements::All);
        }
    }
}

impl Elements {
    /// Those that an entry has, which describes this rectangle of the tensor; a rectangle then counts from the start of the entry.
    fn within(&self, entry: &Rectangle) -> Option<Self> {
        match self {
            Self::All => Some(Self::All),
            Self::Run(rectangle, range) if rectangle == entry => Some(Self::Run(rectangle.clone(), range.clone())),
            Self::Run(rectangle, range) => Self::Within(around(rectangle, range)).within(entry),
            Self::Within(rectangle) => {
                let mut common = rectangle.intersection(entry)?;
                common.origin.iter_mut().zip(&entry.origin).for_each(|(first, start)| *first -= start);
                Some(Self::Within(common))
            }
        }
    }
}

/// The elements of an entry of which a chunk has some bits.
fn elements_of(entry: &Tensor<'_>, chunk: u32) -> Range<u64> {
    let (lanes, lane_bits) = (entry.chunk_range(chunk), entry.lane_bytes() as u64 * 8);
    // Fewer than 2^63 bits are in a tensor.
    lanes.start * lane_bits / entry.dtype.bits()..(lanes.end * lane_bits).div_ceil(entry.dtype.bits())
}

/// How many of the first `count` elements of a tensor are in a part of it.
fn before(shape: &[u64], part: &Rectangle, count: u64) -> u64 {
    let (mut inner, mut of_part): (u64, u64) = (shape.iter().product(), part.extent.iter().product());
    let (mut found, mut rest) = (0, count);
    for ((&length, &origin), &extent) in shape.iter().zip(&part.origin).zip(&part.extent) {
        inner /= length;
        of_part /= extent;
        let index = rest / inner;
        rest %= inner;
        found += index.saturating_sub(origin).min(extent) * of_part;
        if index < origin || index - origin >= extent {
            return found;
        }
    }
    // A scalar has no dimension in which it could be counted.
    found + rest
}

/// The smallest rectangle around a range of the elements of another one.
fn around(rectangle: &Rectangle, range: &Range<u64>) -> Rectangle {
    let mut around = rectangle.clone();
    let (mut first, mut last) = (range.start, range.end - 1);
    let mut inner: u64 = rectangle.extent.iter().product();
    for (dim, &length) in rectangle.extent.iter().enumerate() {
        inner /= length;
        let (from, to) = (first / inner, last / inner);
        around.origin[dim] += from;
        around.extent[dim] = to - from + 1;
        if from != to {
            break;
        }
        (first, last) = (first % inner, last % inner);
    }
    around
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_a_part_are_counted_and_surrounded_as_one_by_one() {
        let shape = [3, 4, 5];
        let at = |n: u64| [n / 20, n / 5 % 4, n % 5];
        let is_in = |part: &Rectangle, n: u64| {
            (0..3).all(|dim| (part.origin[dim]..part.origin[dim] + part.extent[dim]).contains(&at(n)[dim]))
        };
        for (origin, extent) in [([0, 0, 0], [3, 4, 5]), ([1, 2, 3], [1, 1, 1]), ([0, 1, 2], [2, 2, 3]), ([2, 0, 4], [1, 4, 1])] {
            let part = Rectangle::new(origin, extent);
            for count in 0..=60 {
                let expected = (0..count).filter(|n| is_in(&part, *n)).count() as u64;
                assert_eq!(before(&shape, &part, count), expected, "{part} {count}");
            }
        }
        let whole = Rectangle::whole(&shape);
        for start in 0..60 {
            for end in start + 1..=60 {
                let found = around(&whole, &(start..end));
                assert!((start..end).all(|n| is_in(&found, n)), "{start}..{end} {found}");
                let count = (0..60).filter(|n| is_in(&found, *n)).count() as u64;
                let rows = if at(start)[0] != at(end - 1)[0] { 20 } else { 5 };
                assert!(count < end - start + 2 * rows, "{start}..{end} {found}");
            }
        }
        assert_eq!(around(&Rectangle::new([7, 1], [2, 6]), &(2..5)), Rectangle::new([7, 3], [1, 3]));
        let scalar = Rectangle::whole(&[]);
        assert_eq!([0, 1].map(|count| before(&[], &scalar, count)), [0, 1]);
    }
}
