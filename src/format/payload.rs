//! The beginning of payloads of codec `conditioned` (`spec/codecs.md` section 4.4), read in place.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Header of a payload of codec `conditioned`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ConditionedHeader {
    /// Low bits of each delta, which are stored without coding.
    pub low_bits: u8,
    /// log2 of the states of a stream.
    pub states_log2: u8,
    /// log2 of the segments of the chunk.
    pub segments_log2: u8,
    /// Bits of a block's activity.
    pub activity_bits: u8,
    /// First context that has an entry of its own in the maps.
    pub first_context: U16,
    /// Entries of a map.
    pub context_count: u8,
    /// Zero.
    pub reserved: u8,
    /// Changes that are listed instead of coded.
    pub exception_count: U32,
    /// The values of the high bits are stored as the difference from this.
    pub center: U32,
}
