//! Header of payloads of codec `conditioned` (`spec/codecs.md` section 4.4). It is read in place, without a copy.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Header of a payload of codec `conditioned`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ConditionedHeader {
    /// Number of low bits of each delta that are stored uncoded.
    pub low_bits: u8,
    /// log2 of the number of states per stream.
    pub states_log2: u8,
    /// log2 of the number of segments.
    pub segments_log2: u8,
    /// Bits per activity.
    pub activity_bits: u8,
    /// First context with its own entry in the maps.
    pub first_context: U16,
    /// Number of entries per map.
    pub context_count: u8,
    /// Zero.
    pub reserved: u8,
    /// Number of exceptions, which are changes that are listed instead of coded.
    pub exception_count: U32,
    /// With low bits, a value is `center` minus the high bits of the delta.
    pub center: U32,
}
