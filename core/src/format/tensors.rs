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
    /// Parameter of the base kind: 0, a number of rows, or the four fields of a derived base.
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
        /// A base tensor of another dtype, converted lane by lane.
        Cast = 3 => "cast",
        /// A quantised base tensor and a tensor of scales.
        Dequantised = 4 => "dequantised",
    }
}

impl BaseKind {
    /// Whether base lanes are formed from a base tensor of another dtype. Needs [`FEATURE_DERIVED`](super::FEATURE_DERIVED).
    pub const fn is_derived(self) -> bool {
        matches!(self, BaseKind::Cast | BaseKind::Dequantised)
    }

    /// Whether there is one base lane for each lane of the target, so that both are hashed in the same pieces.
    pub const fn has_all_lanes(self) -> bool {
        matches!(self, BaseKind::Same) || self.is_derived()
    }
}

/// Field `base_param` of an entry with a derived base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DerivedParam {
    /// Code of the dtype of the base tensor.
    pub base_dtype: u16,
    /// 0 for base kind `cast`, else a code of the form.
    pub form: u8,
    /// Zero.
    pub reserved: u8,
    /// Size of the scales name in bytes; 0 for base kind `cast`.
    pub scales_name_size: u32,
}

impl DerivedParam {
    /// The fields of a base parameter.
    pub const fn from_bits(bits: u64) -> Self {
        Self {
            base_dtype: bits as u16,
            form: (bits >> 16) as u8,
            reserved: (bits >> 24) as u8,
            scales_name_size: (bits >> 32) as u32,
        }
    }

    /// The base parameter.
    pub const fn to_bits(self) -> u64 {
        self.base_dtype as u64 | (self.form as u64) << 16 | (self.reserved as u64) << 24 | (self.scales_name_size as u64) << 32
    }
}
