//! Rectangles of tensors: the parts of spec section 8.4.

#![forbid(unsafe_code)]

use crate::prelude::*;
use core::fmt;
use core::ops::Range;

/// A rectangle of a tensor: the elements whose index in each dimension is in `origin .. origin + extent`. A pair may describe a
/// tensor in parts, each of which is a rectangle.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct Rectangle {
    /// First index in each dimension.
    pub origin: Vec<u64>,
    /// Number of indexes in each dimension.
    pub extent: Vec<u64>,
}

impl Rectangle {
    /// A rectangle from its first index and its number of indexes in each dimension.
    pub fn new(origin: impl Into<Vec<u64>>, extent: impl Into<Vec<u64>>) -> Self {
        Self { origin: origin.into(), extent: extent.into() }
    }

    /// The rectangle of all elements of a tensor.
    pub fn whole(shape: &[u64]) -> Self {
        Self { origin: vec![0; shape.len()], extent: shape.to_vec() }
    }

    /// The part of this rectangle that rank `rank` of `ranks` holds if dimension `dim` is sharded as by `torch.chunk`: ranks have
    /// ⌈length / ranks⌉ indexes each, until none are left. The last rectangles may be empty. `None` if there is no such dimension
    /// or rank.
    ///
    /// ```
    /// # use tpde_core::rectangle::Rectangle;
    /// let rows = |rank| Some(Rectangle::whole(&[5, 8]).shard(0, 4, rank)?.extent[0]);
    /// assert_eq!([0, 1, 2, 3, 4].map(rows), [Some(2), Some(2), Some(1), Some(0), None]);
    /// ```
    #[must_use]
    pub fn shard(&self, dim: usize, ranks: u64, rank: u64) -> Option<Self> {
        let &length = self.extent.get(dim).filter(|_| rank < ranks)?;
        let size = length.div_ceil(ranks);
        let first = rank.saturating_mul(size).min(length);
        let mut shard = self.clone();
        *shard.origin.get_mut(dim)? = self.origin.get(dim)?.saturating_add(first);
        shard.extent[dim] = size.min(length - first);
        Some(shard)
    }

    /// The elements that both rectangles have. `None` if they have none in common, or if their numbers of dimensions differ.
    ///
    /// ```
    /// # use tpde_core::rectangle::Rectangle;
    /// let rows = Rectangle::new([2, 0], [4, 8]);
    /// let columns = Rectangle::new([0, 4], [8, 2]);
    /// assert_eq!(rows.intersection(&columns), Some(Rectangle::new([2, 4], [4, 2])));
    /// assert_eq!(rows.intersection(&Rectangle::new([6, 0], [2, 8])), None);
    /// ```
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        self.dims().filter(|_| self.dims() == other.dims())?;
        let origin: Vec<u64> = self.origin.iter().zip(&other.origin).map(|(&a, &b)| a.max(b)).collect();
        let ends = self.ends().zip(other.ends()).map(|(a, b)| a.min(b));
        let extent = ends.zip(&origin).map(|(end, &origin)| end.checked_sub(origin).filter(|&extent| extent > 0));
        let extent: Vec<u64> = extent.collect::<Option<_>>()?;
        Some(Self { origin, extent })
    }

    /// Number of elements. Rectangles of tensors have fewer than 2^64.
    pub fn elements(&self) -> u64 {
        // The other extents may be so large that their product overflows.
        if self.extent.contains(&0) { 0 } else { self.extent.iter().fold(1, |n, &extent| n.saturating_mul(extent)) }
    }

    /// Whether the rectangle lies in a tensor of this shape.
    pub fn is_within(&self, shape: &[u64]) -> bool {
        self.dims() == Some(shape.len()) && self.ends().zip(shape).all(|(end, dim)| end <= *dim)
    }

    /// Number of dimensions; `None` if `origin` and `extent` have different lengths.
    fn dims(&self) -> Option<usize> {
        (self.origin.len() == self.extent.len()).then_some(self.extent.len())
    }

    fn ends(&self) -> impl Iterator<Item = u64> {
        self.origin.iter().zip(&self.extent).map(|(origin, extent)| origin.saturating_add(*extent))
    }

    /// This rectangle with other indexes in one dimension.
    fn with(&self, dim: usize, indexes: Range<u64>) -> Self {
        let mut other = self.clone();
        (other.origin[dim], other.extent[dim]) = (indexes.start, indexes.end - indexes.start);
        other
    }
}

/// As an index: `[4:8, 0:8]`.
impl fmt::Display for Rectangle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[")?;
        for (dim, (origin, end)) in self.origin.iter().zip(self.ends()).enumerate() {
            write!(f, "{}{origin}:{end}", if dim > 0 { ", " } else { "" })?;
        }
        write!(f, "]")
    }
}

/// Two rectangles of one tensor that have elements in common, if there are such. Time: n log n if the rectangles nest, else up to
/// quadratic.
pub fn overlap<'a>(rectangles: impl IntoIterator<Item = &'a Rectangle>) -> Option<[&'a Rectangle; 2]> {
    let mut sorted: Vec<_> = rectangles.into_iter().collect();
    sorted.sort_by(|a, b| a.origin.cmp(&b.origin));
    if sorted.windows(2).all(|pair| precedes((&pair[0].origin, &pair[0].extent), (&pair[1].origin, &pair[1].extent))) {
        return None;
    }
    sorted.iter().enumerate().find_map(|(i, &a)| {
        // Later rectangles begin at the same index of the first dimension, or at a higher one.
        let end = a.ends().next();
        let near = sorted[i + 1..].iter().take_while(|b| b.origin.first().copied() < end || end.is_none());
        near.copied().find(|b| a.intersection(b).is_some()).map(|b| [a, b])
    })
}

/// The reason why a rectangle is not a part of a tensor of this shape, whose elements have `bits` bits.
pub fn part_fault(bits: u64, shape: &[u64], origin: &[u64], extent: &[u64]) -> Option<&'static str> {
    if origin.len() != shape.len() || extent.len() != shape.len() {
        return Some("another number of dimensions than the tensor has");
    }
    for ((&dim, &origin), &extent) in shape.iter().zip(origin).zip(extent) {
        if extent == 0 {
            return Some("an extent of 0");
        }
        if origin.checked_add(extent).is_none_or(|end| end > dim) {
            return Some("an end beyond the tensor");
        }
    }
    let Some(last) = cut_dim(shape, extent) else { return Some("the whole tensor") };
    // The shape has fewer than 2^63 bits, so this product does not overflow.
    let inner = bits * shape[last + 1..].iter().product::<u64>();
    let is_whole_bytes = [shape[last], origin[last], extent[last]].iter().all(|n| (n % 8 * (inner % 8)).is_multiple_of(8));
    (!is_whole_bytes).then_some("a run that is not of whole bytes")
}

/// The last dimension that the extents do not span.
fn cut_dim(shape: &[u64], extent: &[u64]) -> Option<usize> {
    shape.iter().zip(extent).rposition(|(dim, extent)| extent < dim)
}

/// The order of parts: whether part `a` ends before part `b` begins, in the first dimension in which they differ. If each part
/// precedes the next one, the parts are disjoint.
pub fn precedes(a: (&[u64], &[u64]), b: (&[u64], &[u64])) -> bool {
    for i in 0..a.0.len() {
        if (a.0[i], a.1[i]) != (b.0[i], b.1[i]) {
            return a.0[i] + a.1[i] <= b.0[i];
        }
    }
    false
}

/// The first elements of `within` that no part has. `parts` are in the order of section 8.4.
pub fn first_gap(parts: &[Rectangle], within: &Rectangle) -> Option<Rectangle> {
    if within.extent.contains(&0) { None } else { gap_from(parts, within, 0) }
}

/// [`first_gap`] for parts that span `within` in the dimensions before `dim`.
fn gap_from(parts: &[Rectangle], within: &Rectangle, dim: usize) -> Option<Rectangle> {
    let Some((&start, end)) = within.origin.get(dim).zip(within.ends().nth(dim)) else {
        return parts.is_empty().then(|| within.clone());
    };
    let mut next = start;
    // Parts that differ in this dimension have no index of it in common.
    for group in parts.chunk_by(|a, b| (a.origin[dim], a.extent[dim]) == (b.origin[dim], b.extent[dim])) {
        let (first, last) = (group[0].origin[dim], (group[0].origin[dim] + group[0].extent[dim]).min(end));
        if last <= next {
            continue;
        }
        if first > next {
            return Some(within.with(dim, next..first.min(end)));
        }
        if let Some(gap) = gap_from(group, &within.with(dim, next..last), dim + 1) {
            return Some(gap);
        }
        next = last;
    }
    (next < end).then(|| within.with(dim, next..end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A shape and a rectangle of it.
    fn rectangles() -> impl Strategy<Value = (Vec<u64>, Vec<u64>, Vec<u64>)> {
        prop::collection::vec((1u64..7, any::<u64>(), any::<u64>()), 1..5).prop_map(|dims| {
            let cut = |(dim, a, b): (u64, u64, u64)| {
                let origin = a % dim;
                (dim, origin, 1 + b % (dim - origin))
            };
            let dims: Vec<_> = dims.into_iter().map(cut).collect();
            (dims.iter().map(|d| d.0).collect(), dims.iter().map(|d| d.1).collect(), dims.iter().map(|d| d.2).collect())
        })
    }

    /// The index in the tensor of each element of a rectangle, in row-major order, from the definition.
    fn elements(shape: &[u64], origin: &[u64], extent: &[u64]) -> Vec<u64> {
        (0..shape.iter().product())
            .filter(|element| {
                let mut rest = *element;
                let mut is_inside = true;
                for i in (0..shape.len()).rev() {
                    let index = rest % shape[i];
                    is_inside &= (origin[i]..origin[i] + extent[i]).contains(&index);
                    rest /= shape[i];
                }
                is_inside
            })
            .collect()
    }

    proptest! {
        #[test]
        fn a_part_that_precedes_another_shares_no_element_with_it((shape, a, b) in rectangles(), other in any::<[u64; 8]>()) {
            let dims = || shape.iter().enumerate();
            let origin: Vec<u64> = dims().map(|(i, dim)| other[i] % dim).collect();
            let extent: Vec<u64> = dims().map(|(i, dim)| 1 + other[i + 4] % (dim - origin[i])).collect();
            if precedes((&a, &b), (&origin, &extent)) {
                let (one, two) = (elements(&shape, &a, &b), elements(&shape, &origin, &extent));
                prop_assert!(one.iter().all(|element| !two.contains(element)));
                prop_assert!(!precedes((&origin, &extent), (&a, &b)));
            }
        }
    }

    proptest! {
        #[test]
        fn overlap_and_intersection_are_those_of_sets(
            (shape, a, b) in rectangles(),
            others in prop::collection::vec(any::<[u64; 8]>(), 0..6),
        ) {
            let mut all = vec![Rectangle::new(a, b)];
            for other in others {
                let origin: Vec<u64> = shape.iter().zip(other).map(|(dim, n)| n % dim).collect();
                let room = shape.iter().zip(&origin).zip(&other[4..]);
                all.push(Rectangle::new(origin.clone(), room.map(|((dim, from), n)| 1 + n % (dim - from)).collect::<Vec<_>>()));
            }
            let elements = |part: &Rectangle| elements(&shape, &part.origin, &part.extent);
            let common = |a: &Rectangle, b: &Rectangle| {
                let of_b = elements(b);
                elements(a).into_iter().filter(|element| of_b.contains(element)).collect::<Vec<_>>()
            };
            let mut any = false;
            for (i, a) in all.iter().enumerate() {
                prop_assert_eq!(a.elements(), elements(a).len() as u64);
                for b in &all[i + 1..] {
                    prop_assert_eq!(a.intersection(b).map_or(Vec::new(), |both| elements(&both)), common(a, b));
                    any |= !common(a, b).is_empty();
                }
            }
            let found = overlap(&all);
            prop_assert_eq!(found.is_some(), any);
            prop_assert!(found.is_none_or(|[a, b]| !common(a, b).is_empty()));
        }
    }

    #[test]
    fn rectangles_of_scalars_and_empty_tensors() {
        let scalar = Rectangle::whole(&[]);
        assert_eq!(scalar.intersection(&scalar), Some(scalar.clone()));
        assert!(overlap([&scalar, &scalar]).is_some());
        let empty = Rectangle::whole(&[1 << 40, 1 << 40, 0]);
        assert_eq!((empty.elements(), empty.intersection(&empty)), (0, None));
        assert!(overlap([&empty, &empty]).is_none());
        assert_eq!(scalar.intersection(&empty), None);
        let beyond = Rectangle::new([u64::MAX], [2]);
        assert_eq!(beyond.intersection(&Rectangle::new([0], [u64::MAX])), None);
        let four = Rectangle::new([2], [4]);
        for (dim, ranks, rank) in [(1, 2, 0), (0, 0, 0), (0, 2, 2), (0, 2, u64::MAX)] {
            assert_eq!(four.shard(dim, ranks, rank), None, "{dim} {ranks} {rank}");
        }
        assert_eq!(four.shard(0, u64::MAX, 3), Some(Rectangle::new([5], [1])));
        assert_eq!(four.shard(0, u64::MAX, u64::MAX - 1), Some(Rectangle::new([6], [0])));
    }

    /// Cuts a rectangle in each dimension, as parts may be cut. Drops some of the pieces.
    fn cut(whole: &Rectangle, numbers: &mut impl Iterator<Item = u64>, dim: usize, parts: &mut Vec<Rectangle>) {
        if dim == whole.extent.len() {
            if !numbers.next().unwrap().is_multiple_of(4) {
                parts.push(whole.clone());
            }
            return;
        }
        let (first, extent) = (whole.origin[dim], whole.extent[dim]);
        let middle = first + numbers.next().unwrap() % extent;
        for indexes in [first..middle, middle..first + extent].into_iter().filter(|indexes| !indexes.is_empty()) {
            cut(&whole.with(dim, indexes), numbers, dim + 1, parts);
        }
    }

    proptest! {
        #[test]
        fn the_first_gap_has_elements_of_no_part((shape, a, b) in rectangles(), numbers in prop::collection::vec(any::<u64>(), 64)) {
            let mut parts = Vec::new();
            cut(&Rectangle::whole(&shape), &mut numbers.into_iter().cycle(), 0, &mut parts);
            let within = Rectangle::new(a, b);
            let elements = |part: &Rectangle| elements(&shape, &part.origin, &part.extent);
            let held: Vec<u64> = parts.iter().flat_map(elements).collect();
            let missing: Vec<u64> = elements(&within).into_iter().filter(|element| !held.contains(element)).collect();
            match first_gap(&parts, &within) {
                None => prop_assert!(missing.is_empty()),
                Some(gap) => {
                    let of_gap = elements(&gap);
                    prop_assert!(of_gap.contains(&missing[0]) && of_gap.iter().all(|element| missing.contains(element)));
                }
            }
        }
    }

    #[test]
    fn a_rectangle_is_shown_as_an_index() {
        assert_eq!(Rectangle::new([0, 64], [512, 1]).to_string(), "[0:512, 64:65]");
        assert_eq!(Rectangle::new([], []).to_string(), "[]");
    }

    #[test]
    fn parts_of_packed_dtypes_have_whole_bytes() {
        // Elements of 4 bits.
        assert_eq!(part_fault(4, &[4, 6], &[0, 0], &[4, 2]), None);
        assert!(part_fault(4, &[4, 6], &[0, 1], &[4, 2]).is_some());
        assert!(part_fault(4, &[4, 6], &[0, 0], &[4, 3]).is_some());
        assert!(part_fault(4, &[4, 5], &[0, 0], &[4, 2]).is_some());
        assert_eq!(part_fault(4, &[4, 3, 2], &[1, 0, 0], &[2, 3, 2]), None);
        assert_eq!(part_fault(6, &[4, 4], &[1, 0], &[1, 4]), None);
        assert!(part_fault(6, &[4, 2], &[1, 0], &[1, 2]).is_some());
    }

    #[test]
    fn a_rectangle_beyond_its_tensor_or_without_elements_is_no_part() {
        for (origin, extent) in [([0, 0], [2, 0]), ([1, 0], [2, 3]), ([u64::MAX, 0], [2, 3]), ([2, 0], [1, 3]), ([0, 0], [2, 3])] {
            assert!(part_fault(16, &[2, 3], &origin, &extent).is_some(), "{origin:?} {extent:?}");
        }
        assert!(part_fault(16, &[2, 3], &[0], &[1]).is_some());
        assert_eq!(part_fault(16, &[2, 3], &[1, 1], &[1, 2]), None);
    }
}
