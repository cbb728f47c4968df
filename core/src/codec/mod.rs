//! Codecs: encode the changes of a chunk as bytes, and decode them (`spec/codecs.md`).
//!
//! One file or folder per codec. Input and output are byte slices; this module does no I/O. An encoder reads base and target
//! lanes. A decoder turns base lanes into target lanes in place. It assumes that the record has passed the checks of the index,
//! and nothing about the payload.

#![deny(unsafe_code)]

#[doc(hidden)]
pub mod conditioned;
mod difference;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod parts;
mod patch;
mod raw;
#[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "instructions that are only used where they were detected"))]
mod simd;
#[doc(hidden)]
pub mod zstd;

use self::conditioned::ConditionedChunk;
pub use self::conditioned::{DecodeCost, TableSet};
#[doc(hidden)]
pub use self::difference::{Difference, GROUP, cleared, compare, count};
pub use self::parts::PayloadParts;
pub(crate) use self::parts::parts;
#[doc(hidden)]
pub use self::patch::{CopiedBase, Patch};
pub use self::patch::{Encoded, Fill};
#[doc(hidden)]
pub use self::raw::size as raw_size;
pub use self::zstd::Layout;
#[doc(hidden)]
pub use self::zstd::{LayoutSize, Layouts};
use crate::prelude::*;

use crate::error::Result;
use crate::format::registry;
use crate::lane::{Dtype, with_lane};
use crate::{error::Rule, lane::Order};

registry! {
    /// Coding of payloads.
    Codec: u16 as "codec" {
        /// Uncompressed positions and deltas.
        Raw = 0 => "raw",
        /// One zstd frame per chunk.
        Zstd = 1 => "zstd",
        /// Entropy coding conditioned on the base lanes.
        Conditioned = 2 => "conditioned",
    }
}

impl Codec {
    /// Returns whether the sizes of a record are possible. The result depends only on record and tensor, so all buffers of a
    /// decoder are bounded before it reads the payload.
    pub fn check_sizes(self, compressed: u32, uncompressed: u32, num_deltas: u32, lanes: u32, lane_bytes: usize) -> bool {
        match self {
            Codec::Raw => u64::from(uncompressed) == raw::size(num_deltas, lane_bytes) && compressed == uncompressed,
            Codec::Zstd => zstd::check_size(uncompressed, lanes, lane_bytes),
            Codec::Conditioned => u64::from(uncompressed) == u64::from(lanes) * lane_bytes as u64,
        }
    }

    /// Returns the sizes of the parts of a payload. The record of the chunk, of `lanes` lanes, has passed the checks of the
    /// index. Nothing is decoded, so streams and frames can still be invalid.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::error::Error::Invalid) with the rule that the payload violates.
    pub fn parts(
        self,
        payload: &[u8],
        num_deltas: u32,
        lanes: usize,
        lane_bytes: usize,
        tables: Option<&TableSet>,
    ) -> Result<PayloadParts> {
        match self {
            Codec::Raw => raw::parts(payload, num_deltas, lane_bytes),
            Codec::Zstd => Ok(PayloadParts { frames: payload.len() as u64, ..PayloadParts::default() }),
            Codec::Conditioned => conditioned::parts(payload, num_deltas, lanes, lane_bytes, tables),
        }
    }
}

/// Coding of a chunk, with its parameters.
#[derive(Debug, Clone, Copy)]
pub enum Coding<'a> {
    /// Codec `raw`.
    Raw,
    /// Codec `zstd`, in this layout. With `None`, a rule selects the layout.
    Zstd(Option<Layout>),
    /// Codec `conditioned`.
    Conditioned {
        /// Tables of the tensor. Without tables, deltas are stored uncoded.
        tables: Option<&'a TableSet>,
        /// Number of low bits of each delta that are stored uncoded. Must be less than the bits of a lane. 0 suits lanes that
        /// are close to their base.
        low_bits: u32,
        /// Weight of decoding time against payload size.
        decode_cost: DecodeCost,
    },
}

/// Encodes chunks. One per thread, reused for every chunk.
pub struct ChunkEncoder {
    zstd: zstd::Encoder,
    conditioned: conditioned::Encoder,
    masks: Vec<u64>,
}

impl ChunkEncoder {
    /// Creates an encoder for all codecs.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::error::Error::InvalidArgument) if the zstd library refuses a parameter.
    pub fn new() -> Result<Self> {
        Ok(Self { zstd: zstd::Encoder::new()?, conditioned: conditioned::Encoder::default(), masks: Vec::new() })
    }

    /// Appends the payload of one chunk to `payload`. Appends nothing if no lane changes.
    ///
    /// `base` and `target` are the chunk's lanes as bytes, of equal length, at most 4 MiB.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::error::Error::InvalidArgument) if the zstd library fails. No input is known to cause that.
    pub fn encode(
        &mut self,
        coding: Coding<'_>,
        dtype: Dtype,
        base: &[u8],
        target: &[u8],
        payload: &mut Vec<u8>,
    ) -> Result<Encoded> {
        debug_assert_eq!(base.len(), target.len());
        let mut masks = core::mem::take(&mut self.masks);
        let encoded = self.encode_difference(coding, Difference::find(dtype, base, target, &mut masks), payload);
        self.masks = masks;
        encoded
    }

    /// Same as [`encode`](Self::encode), for changes that are already found.
    pub fn encode_difference(&mut self, coding: Coding<'_>, difference: Difference<'_>, payload: &mut Vec<u8>) -> Result<Encoded> {
        if difference.changed == 0 {
            return Ok(Encoded::default());
        }
        with_lane!(difference.dtype.lane_bytes(), L => match coding {
            Coding::Raw => Ok(raw::encode::<L>(difference, payload)),
            Coding::Zstd(layout) => {
                let layouts = layout.as_ref().map_or(Layouts::ByRule, |layout| Layouts::These(core::slice::from_ref(layout)));
                Ok(self.zstd.encode::<L>(difference, layouts, 0, payload)?.0)
            }
            Coding::Conditioned { tables, low_bits, decode_cost } => {
                Ok(self.conditioned.encode::<L>(difference, tables, low_bits, decode_cost, payload))
            }
        })
    }

    /// Returns the estimated size of a payload of codec `conditioned` in bytes, without encoding it; of other codecs 0.
    pub fn estimate(&mut self, coding: Coding<'_>, difference: Difference<'_>) -> u64 {
        let Coding::Conditioned { tables, low_bits, decode_cost } = coding else { return 0 };
        with_lane!(difference.dtype.lane_bytes(), L => {
            self.conditioned.estimate::<L>(difference, tables, low_bits, decode_cost)
        })
    }

    /// Appends the smallest payload of codec `zstd` among these layouts. Returns the size of the payload in each tried layout.
    /// See `zstd::Encoder::encode` for `enough`.
    pub fn smallest_frame(
        &mut self,
        difference: Difference<'_>,
        layouts: Layouts<'_>,
        enough: u64,
        payload: &mut Vec<u8>,
    ) -> Result<(Encoded, Vec<LayoutSize>)> {
        with_lane!(difference.dtype.lane_bytes(), L => self.zstd.encode::<L>(difference, layouts, enough, payload))
    }
}

/// An encoded chunk, with the values of its record and tensor that decoding needs.
#[derive(Debug, Clone, Copy)]
pub struct EncodedChunk<'a> {
    /// Codec of the payload.
    pub codec: Codec,
    /// Element type.
    pub dtype: Dtype,
    /// Tables of the tensor, for codec `conditioned`.
    pub tables: Option<&'a TableSet>,
    /// Sizes in the record. They have passed the checks of the index, so they bound the decoder's memory.
    pub encoded: Encoded,
    /// The payload.
    pub payload: &'a [u8],
    /// Chunk sum of the base lanes.
    pub base_sum: u64,
}

/// Decodes chunks. One per thread, reused for every chunk.
#[derive(Default)]
pub struct ChunkDecoder {
    zstd: zstd::Decoder,
    conditioned: conditioned::Decoder,
}

impl ChunkDecoder {
    /// Creates a decoder for all codecs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Turns the base lanes of a chunk into its target lanes, in place. Returns the chunk sum of the target. If few lanes change,
    /// computing this sum takes no pass over all lanes.
    ///
    /// `fill` supplies the base lanes when they are needed, see `Fill`.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::error::Error::Invalid) with the violated rule, or an error of `fill`. `lanes` is then a mixture of base
    /// lanes, target lanes, and lanes that were not filled.
    pub fn decode(&mut self, chunk: &EncodedChunk<'_>, lanes: &mut [u8], fill: Fill<'_>) -> Result<u64> {
        let EncodedChunk { codec, dtype, tables, encoded, payload, base_sum } = *chunk;
        if codec != Codec::Conditioned {
            fill(lanes, lanes.len())?;
        }
        with_lane!(dtype.lane_bytes(), L => match codec {
            Codec::Raw => raw::decode::<L>(payload, encoded.num_deltas, dtype.order(), base_sum, lanes),
            Codec::Zstd => self.zstd.decode::<L>(payload, encoded, dtype.order(), base_sum, lanes),
            Codec::Conditioned => {
                let chunk = ConditionedChunk { dtype, tables, encoded, payload, base_sum };
                self.conditioned.decode::<L>(chunk, lanes, fill)
            },
        })
    }

    /// Same as [`decode`](Self::decode) for codec `conditioned`, with base lanes that are copied from `base`. Faster if the caller
    /// does not read `lanes` soon: base lanes are prefetched, and `lanes` are then not in the cache.
    pub fn decode_copied(&mut self, chunk: &EncodedChunk<'_>, lanes: &mut [u8], base: &mut CopiedBase<'_>) -> Result<u64> {
        let EncodedChunk { dtype, tables, encoded, payload, base_sum, .. } = *chunk;
        let chunk = ConditionedChunk { dtype, tables, encoded, payload, base_sum };
        with_lane!(dtype.lane_bytes(), L => self.conditioned.decode_copied::<L>(chunk, lanes, base))
    }
}

/// Converts payloads of codec `zstd` to codec `raw`, for devices, which do not decode `zstd`. One per thread.
#[derive(Default)]
pub struct RawTranscoder {
    decoder: ChunkDecoder,
    zeros: Vec<u8>,
    deltas: Vec<u8>,
    masks: Vec<u64>,
    payload: Vec<u8>,
}

impl RawTranscoder {
    /// Converts the payload of a chunk of `lanes` lanes. Memory: two chunks and the payload.
    pub fn transcode(&mut self, encoded: Encoded, payload: &[u8], lanes: usize, lane_bytes: usize) -> Result<&[u8]> {
        let size = lanes * lane_bytes;
        self.zeros.resize(self.zeros.len().max(size), 0);
        self.deltas.clear();
        self.deltas.resize(size, 0);
        self.payload.clear();
        let found = with_lane!(lane_bytes, L => {
            // With zeros as base and plain order, the target lanes are the deltas.
            self.decoder.zstd.decode::<L>(payload, encoded, Order::Plain, 0, &mut self.deltas)?;
            let plain = [Dtype::U8, Dtype::U16, Dtype::U32, Dtype::U64][lane_bytes.ilog2() as usize];
            raw::encode::<L>(Difference::find(plain, &self.zeros[..size], &self.deltas, &mut self.masks), &mut self.payload)
        });
        Rule::PayloadDeltas.check_eq(encoded.num_deltas, found.num_deltas)?;
        Ok(&self.payload)
    }
}

#[cfg(test)]
mod tests;
