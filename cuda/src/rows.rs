//! Memory in rows with gaps between them.

use super::abi::{ENDLESS_ROW, TensorRows};

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
