//! Memory in rows with gaps between them, and whether it overlaps other memory.

use super::abi::{ENDLESS_ROW, TensorRows};
use super::runtime::memory::DeviceSlice;
use std::ops::Range;

/// Rows of equal length, whose beginnings have equal distances. The bytes between rows are neither read nor written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rows {
    /// Size of a row in bytes.
    pub bytes: u64,
    /// Distance between the beginnings of rows in bytes.
    pub pitch: u64,
}

impl Rows {
    /// Rows of `bytes` bytes, `pitch` bytes apart.
    pub fn new(bytes: u64, pitch: u64) -> Self {
        Self { bytes, pitch }
    }
}

/// Returns the rows of a strided tensor. Memory without gaps is one row.
pub(super) fn tensor_rows(base: Option<Rows>, output: Option<Rows>) -> TensorRows {
    let without_gaps = Rows { bytes: ENDLESS_ROW, pitch: ENDLESS_ROW };
    let (base, output) = (base.unwrap_or(without_gaps), output.unwrap_or(without_gaps));
    TensorRows { base_row: base.bytes, base_pitch: base.pitch, output_row: output.bytes, output_pitch: output.pitch }
}

/// Rows in memory. Memory without gaps is one row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    start: u64,
    count: u64,
    rows: Rows,
}

impl Span {
    /// `memory` is not empty, and begins and ends with a row.
    pub fn new(memory: &DeviceSlice, rows: Option<Rows>) -> Self {
        let whole = Rows { bytes: memory.bytes(), pitch: memory.bytes() };
        let rows = rows.unwrap_or(whole);
        Self { start: memory.address(), count: (memory.bytes() - rows.bytes) / rows.pitch + 1, rows }
    }

    pub fn start(&self) -> u64 {
        self.start
    }

    pub fn end(&self) -> u64 {
        self.row(self.count - 1).end
    }

    fn row(&self, number: u64) -> Range<u64> {
        let start = self.start + number * self.rows.pitch;
        start..start + self.rows.bytes
    }

    /// Whether a row has bytes of a range, which is not empty.
    fn meets(&self, range: &Range<u64>) -> bool {
        if range.start < self.start || range.start >= self.end() {
            return range.contains(&self.start);
        }
        let number = (range.start - self.start) / self.rows.pitch;
        self.row(number).contains(&range.start) || number + 1 < self.count && range.contains(&self.row(number + 1).start)
    }

    /// Whether both have a byte in common. Cost: constant if both have one pitch or one of them has one row; otherwise one step
    /// per row, if the address ranges overlap.
    pub fn overlaps(&self, other: &Self) -> bool {
        if self.start >= other.end() || other.start >= self.end() {
            return false;
        }
        // With one pitch, if two rows overlap, so do the rows before them, until one is the first.
        if self.rows.pitch == other.rows.pitch || self.count == 1 || other.count == 1 {
            return other.meets(&self.row(0)) || self.meets(&other.row(0));
        }
        let (few, many) = if self.count < other.count { (self, other) } else { (other, self) };
        (0..few.count).any(|number| many.meets(&few.row(number)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spans() -> impl Strategy<Value = Span> {
        (0u64..60, 1u64..7, 1u64..9, 0u64..9).prop_map(|(start, count, bytes, gap)| Span {
            start,
            count,
            rows: Rows { bytes, pitch: bytes + gap },
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
                b.rows = Rows { bytes: b.rows.bytes.min(a.rows.pitch), pitch: a.rows.pitch };
            }
            let expected = bytes(&a).iter().any(|byte| bytes(&b).contains(byte));
            prop_assert_eq!(a.overlaps(&b), expected);
            prop_assert_eq!(b.overlaps(&a), expected);
        }
    }
}
