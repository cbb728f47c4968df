//! The parts of a payload (`spec/codecs.md` section 4.4).

use super::context::{BLOCK, MAX_CONTEXTS, Maps, tile_blocks};
use crate::error::{Result, Rule};
use crate::format::ConditionedHeader;
use core::ops::Range;
use zerocopy::FromBytes;

/// log2 of the maximum number of states per stream, and of the maximum number of segments per chunk.
pub const MAX_LOG2: u8 = 5;

/// Returns the tiles of segment `s` of `segments`, for a chunk of `tiles` tiles.
pub fn segment(s: usize, segments: usize, tiles: usize) -> Range<usize> {
    s * tiles / segments..(s + 1) * tiles / segments
}

/// A parsed payload. All parts are within the payload and match the chunk. The streams are not decoded yet.
#[derive(Debug)]
pub struct Payload<'a> {
    pub maps: Maps,
    pub activity_bits: u8,
    pub activities: &'a [u8],
    pub positions: &'a [[u8; 4]],
    pub deltas: &'a [u8],
    pub low_bits: u32,
    pub low: &'a [u8],
    pub center: u64,
    pub states_log2: u8,
    pub segments: usize,
    /// Size of header, maps, stream sizes and padding, in bytes.
    pub headers: usize,
    sizes: &'a [[u8; 4]],
    streams: &'a [u8],
}

impl<'a> Payload<'a> {
    /// Parses the payload of a chunk of `lanes` lanes of `width` bytes, in which `num_deltas` lanes change. The tensor's tables
    /// have `classes` classes.
    pub fn parse(payload: &'a [u8], lanes: usize, width: usize, num_deltas: u32, classes: usize) -> Result<Self> {
        let blocks = lanes.div_ceil(BLOCK);
        let mut parts = Parts { rest: payload, size: payload.len() };
        let header = ConditionedHeader::read_from_bytes(parts.take(size_of::<ConditionedHeader>() as u64)?);
        let header = header.map_err(|_| Rule::PayloadSize.broken("a header", "none"))?;
        check_header(&header, blocks.div_ceil(tile_blocks(width)), width, num_deltas)?;

        let map_size = u64::from(header.context_count).div_ceil(2);
        let mut maps = Maps { first: header.first_context.get(), count: header.context_count, classes: [[0; MAX_CONTEXTS]; 4] };
        for map in &mut maps.classes[..1 << header.activity_bits] {
            read_map(parts.take(map_size)?, header.context_count.into(), classes, map)?;
        }
        let activity_bits = blocks as u64 * u64::from(header.activity_bits);
        let activities = parts.take_bits(activity_bits)?;
        let exceptions = u64::from(header.exception_count.get());
        let positions = parts.take(4 * exceptions)?.as_chunks().0;
        let deltas = parts.take(width as u64 * exceptions)?;
        let low = parts.take_bits(lanes as u64 * u64::from(header.low_bits))?;
        let segments = 1usize << header.segments_log2;
        let sizes = parts.take(4 * (segments as u64 - 1))?.as_chunks().0;
        if (payload.len() - parts.rest.len()) % 2 == 1 {
            let padding = parts.take(1)?;
            Rule::PayloadSize.check(padding == [0], "a padding of zero", padding[0])?;
        }
        Rule::PayloadSize.check(
            parts.rest.len().is_multiple_of(2),
            "streams of whole words",
            format_args!("{} bytes", parts.rest.len()),
        )?;
        Ok(Self {
            maps,
            activity_bits: header.activity_bits,
            activities,
            positions,
            deltas,
            low_bits: header.low_bits.into(),
            low,
            center: header.center.get().into(),
            states_log2: header.states_log2,
            segments,
            headers: payload.len() - parts.rest.len() - activities.len() - 4 * positions.len() - deltas.len() - low.len(),
            sizes,
            streams: parts.rest,
        })
    }

    #[inline(always)]
    pub fn activity(&self, block: usize) -> u8 {
        let bits = usize::from(self.activity_bits);
        if bits == 0 {
            return 0;
        }
        // One or two bits never span two bytes.
        let bit = block * bits;
        self.activities[bit / 8] >> (bit % 8) & ((1 << bits) - 1)
    }

    pub fn streams(&self) -> impl Iterator<Item = Result<&'a [u8]>> {
        let mut rest = self.streams;
        let last = self.sizes.len();
        (0..=last).map(move |s| {
            let Some(size) = self.sizes.get(s) else { return Ok(rest) };
            let size = 2 * u64::from(u32::from_le_bytes(*size));
            let (stream, after) = usize::try_from(size).ok().and_then(|size| rest.split_at_checked(size)).ok_or_else(|| {
                Rule::PayloadSize
                    .broken(format_args!("a stream of {size} bytes for segment {s}"), format_args!("{} left", rest.len()))
            })?;
            rest = after;
            Ok(stream)
        })
    }
}

fn check_header(header: &ConditionedHeader, tiles: usize, width: usize, num_deltas: u32) -> Result<()> {
    let rule = Rule::PayloadHeader;
    let bits = 8 * width as u32;
    let low = u32::from(header.low_bits);
    rule.check(low <= bits, format_args!("low_bits of at most {bits}"), low)?;
    rule.check(header.states_log2 <= MAX_LOG2, "states_log2 of at most 5", header.states_log2)?;
    let segments = header.segments_log2;
    rule.check(segments <= MAX_LOG2 && 1 << segments <= tiles, format_args!("at most 32 segments, and {tiles}"), segments)?;
    rule.check(header.activity_bits <= 2, "activity_bits of at most 2", header.activity_bits)?;
    rule.check((1..=MAX_CONTEXTS).contains(&header.context_count.into()), "context_count of 1 to 64", header.context_count)?;
    rule.check(header.reserved == 0, "a reserved byte of 0", header.reserved)?;
    let exceptions = header.exception_count.get();
    rule.check(exceptions <= num_deltas, format_args!("at most {num_deltas} exceptions"), exceptions)?;
    let center = header.center.get();
    let fits = if low == 0 { center == 0 } else { u64::from(center).checked_shr(bits - low).unwrap_or(0) == 0 };
    rule.check(fits, "a center within the high bits", center)
}

/// Reads `count` classes of 4 bits.
fn read_map(bytes: &[u8], count: usize, classes: usize, map: &mut [u8; MAX_CONTEXTS]) -> Result<()> {
    let rule = Rule::PayloadClasses;
    for (i, byte) in bytes.iter().enumerate() {
        let (low, high) = (byte & 15, byte >> 4);
        map[2 * i] = low;
        if 2 * i + 1 < count {
            map[2 * i + 1] = high;
        } else {
            rule.check(high == 0, "zero bits after the last class", high)?;
        }
    }
    let highest = map.iter().copied().max().unwrap_or(0);
    rule.check(usize::from(highest) <= classes, format_args!("classes up to {classes}"), highest)
}

struct Parts<'a> {
    rest: &'a [u8],
    size: usize,
}

impl<'a> Parts<'a> {
    fn take(&mut self, size: u64) -> Result<&'a [u8]> {
        let split = usize::try_from(size).ok().and_then(|size| self.rest.split_at_checked(size));
        let (part, rest) = split.ok_or_else(|| {
            Rule::PayloadSize.broken(format_args!("{size} bytes from byte {} on", self.size - self.rest.len()), self.rest.len())
        })?;
        self.rest = rest;
        Ok(part)
    }

    /// Takes the bytes of a bit string. Unused bits of its last byte must be zero.
    fn take_bits(&mut self, bits: u64) -> Result<&'a [u8]> {
        let part = self.take(bits.div_ceil(8))?;
        let used = bits % 8;
        let clean = used == 0 || part.last().is_none_or(|last| last >> used == 0);
        Rule::PayloadSize.check(clean, "zero bits up to the end of the byte", "others")?;
        Ok(part)
    }
}
