//! Tensor table (spec section 8).

use super::registry;
use binrw::{BinRead, BinWrite};

/// One tensor (40 bytes); its dims and names follow the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, BinRead, BinWrite)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[brw(little)]
pub struct TensorEntry {
    /// Bytes of the name.
    pub name_size: u32,
    /// Bytes of the base tensor's name; 0 if it is the same.
    pub base_name_size: u32,
    /// Code of the dtype.
    pub dtype: u16,
    /// Number of dims.
    pub rank: u16,
    /// Code of the base kind.
    pub base_kind: u16,
    /// Id of the codec.
    pub codec: u16,
    /// log2 of the lanes of a chunk.
    pub chunk_lanes_log2: u8,
    /// Zero.
    pub reserved: [u8; 3],
    /// Bytes of this tensor's codec tables.
    pub tables_size: u32,
    /// Index of the first chunk record.
    pub first_chunk: u32,
    /// Number of chunk records.
    pub chunk_count: u32,
    /// Parameter of the base kind.
    pub base_param: u64,
}

impl TensorEntry {
    /// Bytes of an entry.
    pub const SIZE: usize = 40;
}

registry! {
    /// Where the base lanes of a tensor come from (section 8.2).
    BaseKind: u16 as "base kind" {
        /// All base lanes are zero.
        None = 0 => "none",
        /// A base tensor of the same dtype and shape.
        Same = 1 => "same",
        /// A base tensor with another number of rows.
        Prefix = 2 => "prefix",
    }
}
