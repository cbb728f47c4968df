//! Rows of memory with gaps between them, and whether they overlap.

use std::ops::Range;

/// Rows in memory. Memory without gaps is one row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    start: u64,
    count: u64,
    /// Size of a row.
    width: u64,
    /// Distance between the beginnings of rows.
    pitch: u64,
}

impl Span {
    /// Rows in `size` bytes from `start` on, which are not empty and begin and end with a row. `rows` has the size of a row, and
    /// the distance between the beginnings of rows.
    pub fn new(start: u64, size: u64, rows: Option<(u64, u64)>) -> Self {
        let (width, pitch) = rows.filter(|(width, pitch)| width < pitch).unwrap_or((size, size));
        Self { start, count: (size - width) / pitch + 1, width, pitch }
    }

    pub fn start(&self) -> u64 {
        self.start
    }

    pub fn end(&self) -> u64 {
        self.row(self.count - 1).end
    }

    fn row(&self, number: u64) -> Range<u64> {
        let start = self.start + number * self.pitch;
        start..start + self.width
    }

    /// Whether a row has bytes of a range, which is not empty.
    fn meets(&self, range: &Range<u64>) -> bool {
        if range.start < self.start || range.start >= self.end() {
            return range.contains(&self.start);
        }
        let number = (range.start - self.start) / self.pitch;
        self.row(number).contains(&range.start) || number + 1 < self.count && range.contains(&self.row(number + 1).start)
    }

    /// Whether both have a byte in common. Cost: constant if both have one pitch or one of them has one row; otherwise one step
    /// per row, if the address ranges overlap.
    pub fn overlaps(&self, other: &Self) -> bool {
        if self.start >= other.end() || other.start >= self.end() {
            return false;
        }
        // With one pitch, if two rows overlap, so do the rows before them, until one is the first.
        if self.pitch == other.pitch || self.count == 1 || other.count == 1 {
            return other.meets(&self.row(0)) || self.meets(&other.row(0));
        }
        let (few, many) = if self.count < other.count { (self, other) } else { (other, self) };
        (0..few.count).any(|number| many.meets(&few.row(number)))
    }
}

/// Two spans that have a byte in common, by their numbers, if there are such. Cost: sorting, and for each span one comparison with
/// each that ends behind its beginning.
pub(crate) fn first_overlap(spans: &[(usize, Span)]) -> Option<[usize; 2]> {
    let mut sorted: Vec<_> = spans.iter().collect();
    sorted.sort_by_key(|(_, span)| span.start());
    let mut open: Vec<&(usize, Span)> = Vec::new();
    for one in sorted {
        open.retain(|(_, other)| other.end() > one.1.start());
        if let Some((other, _)) = open.iter().find(|(_, other)| other.overlaps(&one.1)) {
            return Some([*other, one.0]);
        }
        open.push(one);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spans() -> impl Strategy<Value = Span> {
        (0u64..60, 1u64..7, 1u64..9, 0u64..9).prop_map(|(start, count, bytes, gap)| Span {
            start,
            count,
            width: bytes,
            pitch: bytes + gap,
        })
    }

    fn bytes(span: &Span) -> Vec<u64> {
        (0..span.count).flat_map(|number| span.row(number)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]
        #[test]
        fn spans_overlap_if_they_have_a_byte_in_common(a in spans(), b in spans(), same_pitch: bool) {
            let mut b = b;
            if same_pitch {
                (b.width, b.pitch) = (b.width.min(a.pitch), a.pitch);
            }
            let expected = bytes(&a).iter().any(|byte| bytes(&b).contains(byte));
            prop_assert_eq!(a.overlaps(&b), expected);
            prop_assert_eq!(b.overlaps(&a), expected);
        }

        #[test]
        fn the_first_overlap_is_one_of_two_spans_with_a_byte_in_common(spans in prop::collection::vec(spans(), 0..7)) {
            let spans: Vec<_> = spans.into_iter().enumerate().collect();
            let meet = |a: usize, b: usize| bytes(&spans[a].1).iter().any(|byte| bytes(&spans[b].1).contains(byte));
            let expected = (0..spans.len()).any(|b| (0..b).any(|a| meet(a, b)));
            let found = first_overlap(&spans);
            prop_assert_eq!(found.is_some(), expected);
            prop_assert!(found.is_none_or(|[a, b]| a != b && meet(a, b)));
        }
    }
}
