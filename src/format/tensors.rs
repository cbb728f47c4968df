//! Tensor table (spec section 8).

use super::registry;
use binrw::{BinRead, BinWrite};

/// Entry of a tensor (40 bytes). Dims and names of the tensors follow the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, BinRead, BinWrite)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[brw(little)]
pub struct TensorEntry {
    /// Size of the name, in bytes.
    pub name_size: u32,
    /// Size of the base tensor's name, in bytes; 0 if both names are equal.
    pub base_name_size: u32,
    /// Code of the dtype.
    pub dtype: u16,
    /// Number of dims.
    pub rank: u16,
    /// Code of the base kind.
    pub base_kind: u16,
    /// Id of the codec.
    pub codec: u16,
    /// log2 of the number of lanes per chunk.
    pub chunk_lanes_log2: u8,
    /// 0 for a whole tensor, 1 for the first part of a tensor, 2 for a further part of the tensor of the entry before.
    pub part: u8,
    /// Zero.
    pub reserved: [u8; 2],
    /// Size of this tensor's codec tables, in bytes.
    pub tables_size: u32,
    /// Index of the first chunk record.
    pub first_chunk: u32,
    /// Number of chunk records.
    pub chunk_count: u32,
    /// Parameter of the base kind.
    pub base_param: u64,
}

impl TensorEntry {
    /// Size of an entry, in bytes.
    pub const SIZE: usize = 40;
}

registry! {
    /// Source of a tensor's base lanes (section 8.2).
    BaseKind: u16 as "base kind" {
        /// All base lanes are zero.
        None = 0 => "none",
        /// A base tensor of the same dtype and shape.
        Same = 1 => "same",
        /// A base tensor with another number of rows.
        Prefix = 2 => "prefix",
    }
}
