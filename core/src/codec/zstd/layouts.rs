//! The layouts of a frame's content (`spec/codecs.md` sections 3.1 to 3.5).

use super::elias;
use super::layout::Layout;
use crate::codec::{Patch, difference::Changes};
use crate::dispatch::vectorized;
use crate::error::{Result, Rule};
use crate::lane::{Lane, Order, lanes_of, lanes_of_mut, with_order};
use crate::prelude::*;
use crate::sums::chunk_sum;

/// Minimum value that needs a token of 15, an escape of 255, and a wide value.
pub(super) const WIDE: u64 = NIBBLE + 255;
/// Minimum value that does not fit in a nibble.
const NIBBLE: u64 = 15;
/// Lanes per block of `nibble-planes`.
const BLOCK: usize = 64;

/// Content of a frame while it is assembled.
#[derive(Default)]
pub(super) struct Content {
    bytes: Vec<u8>,
    part_ends: Vec<usize>,
}

impl Content {
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.part_ends.clear();
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the offsets at which the parts end.
    pub fn parts(&self) -> &[usize] {
        &self.part_ends
    }

    fn end_part(&mut self) {
        self.part_ends.push(self.bytes.len());
    }

    /// Writes a layout of section 3.1 or 3.5. `deltas` has one delta per lane of the chunk.
    pub fn put_dense<L: Lane>(&mut self, layout: Layout, deltas: &[L]) {
        self.bytes.push(layout.code());
        if layout == Layout::Planes {
            return self.put_planes(deltas.iter().copied());
        }
        let start = self.bytes.len();
        self.bytes.resize(start + deltas.len().div_ceil(BLOCK) * (BLOCK / 2), 0);
        let tokens = &mut self.bytes[start..];
        vectorized!(put_tokens(deltas, tokens));
        self.end_part();
        self.put_escapes(deltas, |z| z.to_u64());
    }

    /// Writes a layout of section 3.2, 3.3 or 3.4.
    pub fn put_sparse<L: Lane>(&mut self, layout: Layout, changes: &Changes<L>) {
        self.bytes.push(layout.code());
        let mut next = 0;
        let gaps: Vec<u32> = changes.positions.iter().map(|&p| p - core::mem::replace(&mut next, p + 1)).collect();
        if layout != Layout::NibbleGaps {
            self.put_planes(changes.deltas.iter().copied());
            match layout {
                Layout::EliasDelta => elias::encode(gaps.into_iter(), &mut self.bytes),
                _ => gaps.into_iter().for_each(|gap| put_continued(gap, &mut self.bytes)),
            }
            return;
        }
        let nibble = |x: u64| x.min(NIBBLE) as u8;
        self.bytes.extend(gaps.iter().zip(&changes.deltas).map(|(&g, d)| nibble(g.into()) | nibble(d.to_u64() - 1) << 4));
        self.end_part();
        self.put_escapes(&changes.deltas, |d| d.to_u64() - 1);
        for gap in gaps.into_iter().filter(|&gap| u64::from(gap) >= NIBBLE) {
            put_continued(gap - NIBBLE as u32, &mut self.bytes);
        }
    }

    fn put_planes<L: Lane>(&mut self, lanes: impl Iterator<Item = L> + Clone) {
        for plane in 0..L::BYTES {
            self.bytes.extend(lanes.clone().map(|d| (d.to_u64() >> (8 * plane)) as u8));
            self.end_part();
        }
    }

    /// Writes parts 2 and 3 of the nibble layouts.
    fn put_escapes<L: Lane>(&mut self, deltas: &[L], value: impl Fn(&L) -> u64) {
        let values = || deltas.iter().map(&value).filter(|&v| v >= NIBBLE);
        self.bytes.extend(values().map(|v| (v - NIBBLE).min(255) as u8));
        self.end_part();
        let wide: Vec<L> = values().filter(|&v| v >= WIDE).map(|v| L::from_u64(v - WIDE)).collect();
        if !wide.is_empty() {
            self.put_planes(wide.into_iter());
        }
    }
}

#[inline(always)]
fn nibble<L: Lane>(z: L) -> u8 {
    z.min(L::from_u64(NIBBLE)).to_u64() as u8
}

#[inline(always)]
fn put_tokens<L: Lane>(deltas: &[L], tokens: &mut [u8]) {
    let (blocks, tail) = deltas.as_chunks::<BLOCK>();
    let (full, last) = tokens.split_at_mut(blocks.len() * (BLOCK / 2));
    for (block, tokens) in blocks.iter().zip(full.as_chunks_mut::<{ BLOCK / 2 }>().0) {
        let (low, high) = block.split_at(BLOCK / 2);
        for ((token, &low), &high) in tokens.iter_mut().zip(low).zip(high) {
            *token = nibble(low) | nibble(high) << 4;
        }
    }
    for (i, &z) in tail.iter().enumerate() {
        last[i % (BLOCK / 2)] |= nibble(z) << (4 * (i / (BLOCK / 2)));
    }
}

fn put_continued(mut x: u32, out: &mut Vec<u8>) {
    while x >= 255 {
        out.push(255);
        x -= 255;
    }
    out.push(x as u8);
}

/// Returns the deltas of all lanes of a chunk.
pub(super) fn deltas_of_all<L: Lane>(base: &[u8], target: &[u8], order: Order) -> Vec<L> {
    let pairs = lanes_of::<L>(base).iter().zip(lanes_of::<L>(target));
    with_order!(order, ORDER => vectorized!(pairs.map(|(b, t)| L::delta(L::load(*b), L::load(*t), ORDER)).collect()))
}

/// Decodes the parts of a content and applies them to base lanes.
pub(super) fn decode<L: Lane>(
    layout: Layout,
    parts: &[u8],
    count: usize,
    order: Order,
    base_sum: u64,
    lanes: &mut [u8],
) -> Result<u64> {
    with_order!(order, ORDER => vectorized!(decode_in::<L>(layout, parts, count, ORDER, base_sum, lanes)))
}

#[inline(always)]
fn decode_in<L: Lane>(layout: Layout, parts: &[u8], count: usize, order: Order, base_sum: u64, lanes: &mut [u8]) -> Result<u64> {
    match layout {
        Layout::Planes => decode_planes::<L>(parts, count, order, lanes).map(|()| chunk_sum(lanes)),
        Layout::Gaps => decode_gaps::<L>(parts, count, order, base_sum, lanes),
        Layout::EliasDelta => decode_elias::<L>(parts, count, order, base_sum, lanes),
        Layout::NibbleGaps => decode_nibble_gaps::<L>(parts, count, order, base_sum, lanes),
        Layout::NibblePlanes => decode_nibble_planes::<L>(parts, count, order, lanes).map(|()| chunk_sum(lanes)),
    }
}

/// Takes `size` bytes from the start of `parts`.
#[inline(always)]
fn take<'a>(parts: &mut &'a [u8], size: usize) -> Result<&'a [u8]> {
    let (part, rest) =
        parts.split_at_checked(size).ok_or_else(|| Rule::PayloadSize.broken(format_args!("{size} bytes more"), parts.len()))?;
    *parts = rest;
    Ok(part)
}

fn check_finished(parts: &[u8]) -> Result<()> {
    Rule::PayloadSize.check(parts.is_empty(), "nothing after the last part", format_args!("{} bytes", parts.len()))
}

fn check_count(count: usize, found: usize) -> Result<()> {
    Rule::PayloadDeltas.check(count == found, format_args!("{count} deltas"), found)
}

/// Returns the lanes of byte planes. `planes` has `count` bytes per plane.
fn lanes_of_planes<L: Lane>(planes: &[u8], count: usize) -> impl Iterator<Item = L> {
    (0..count).map(move |i| plane_lane(planes, count, i))
}

#[inline(always)]
fn plane_lane<L: Lane>(planes: &[u8], count: usize, i: usize) -> L {
    L::from_u64((0..L::BYTES).fold(0, |x, k| x | u64::from(planes[k * count + i]) << (8 * k)))
}

/// Applies a delta to each lane. Returns the number of nonzero deltas.
#[inline(always)]
fn apply_all<L: Lane>(lanes: &mut [L::Le], deltas: &[L], order: Order) -> usize {
    let mut changed = 0u32;
    for (lane, &delta) in lanes.iter_mut().zip(deltas) {
        changed += u32::from(delta != L::default());
        *lane = L::apply(L::load(*lane), delta, order).store();
    }
    changed as usize
}

#[inline(always)]
fn decode_planes<L: Lane>(mut parts: &[u8], count: usize, order: Order, lanes: &mut [u8]) -> Result<()> {
    let total = lanes.len() / L::BYTES;
    let planes = take(&mut parts, lanes.len())?;
    check_finished(parts)?;
    let mut changed = 0;
    let mut deltas = [L::default(); BLOCK];
    for (block, lanes) in lanes_of_mut::<L>(lanes).chunks_mut(BLOCK).enumerate() {
        let deltas = &mut deltas[..lanes.len()];
        deltas.fill(L::default());
        for k in 0..L::BYTES {
            let plane = &planes[k * total + block * BLOCK..][..lanes.len()];
            for (delta, &byte) in deltas.iter_mut().zip(plane) {
                *delta = L::from_u64(delta.to_u64() | u64::from(byte) << (8 * k));
            }
        }
        changed += apply_all(lanes, deltas, order);
    }
    check_count(count, changed)
}

#[inline(always)]
fn decode_gaps<L: Lane>(mut parts: &[u8], count: usize, order: Order, base_sum: u64, lanes: &mut [u8]) -> Result<u64> {
    let planes = take(&mut parts, count * L::BYTES)?;
    let mut patch = Patch::<L>::new(lanes, count, base_sum, order);
    for delta in lanes_of_planes::<L>(planes, count) {
        patch.change(take_continued(&mut parts)?, delta)?;
    }
    check_finished(parts)?;
    Ok(patch.finish())
}

#[inline(always)]
fn decode_elias<L: Lane>(mut parts: &[u8], count: usize, order: Order, base_sum: u64, lanes: &mut [u8]) -> Result<u64> {
    let planes = take(&mut parts, count * L::BYTES)?;
    let mut patch = Patch::<L>::new(lanes, count, base_sum, order);
    let mut gaps = elias::Reader::new(parts);
    for delta in lanes_of_planes::<L>(planes, count) {
        let gap = gaps.gap().map_err(|bad| match bad {
            elias::Bad::End => Rule::PayloadSize.broken("a gap", "the end"),
            elias::Bad::TooLong => Rule::PayloadPositions.broken("a gap within a chunk", "a code that begins with five zeros"),
        })?;
        patch.change(gap as usize, delta)?;
    }
    Rule::PayloadSize.check(gaps.is_finished(), "nothing but zeros after the last gap", "other bits")?;
    Ok(patch.finish())
}

/// Takes one number from continued bytes.
#[inline(always)]
fn take_continued(bytes: &mut &[u8]) -> Result<usize> {
    let mut x = 0;
    loop {
        let Some((&byte, rest)) = bytes.split_first() else {
            return Err(Rule::PayloadSize.broken("a gap", "the end"));
        };
        *bytes = rest;
        x += usize::from(byte);
        if byte < 255 {
            return Ok(x);
        }
    }
}

/// Reader of parts 2 and 3 of the nibble layouts.
struct Escapes<'a> {
    bytes: &'a [u8],
    planes: &'a [u8],
    wide: usize,
    wide_read: usize,
}

impl<'a> Escapes<'a> {
    /// Takes both parts from the start of `parts`.
    #[inline(always)]
    fn take<L: Lane>(parts: &mut &'a [u8], escaped: usize) -> Result<Self> {
        let bytes = take(parts, escaped)?;
        let wide = bytes.iter().filter(|&&b| b == 255).count();
        let planes = take(parts, wide * L::BYTES)?;
        Ok(Self { bytes, planes, wide, wide_read: 0 })
    }

    /// Reads one value per set bit of `mask`, from the lowest bit up, and writes it to `out` at the index of the bit. Values must
    /// not exceed `largest`.
    #[inline(always)]
    fn fill<L: Lane>(&mut self, mut mask: u64, largest: u64, out: &mut [L; BLOCK]) -> Result<()> {
        for &byte in take(&mut self.bytes, mask.count_ones() as usize)? {
            let mut value = NIBBLE + u64::from(byte);
            if byte == 255 {
                let low = plane_lane::<L>(self.planes, self.wide, self.wide_read).to_u64();
                self.wide_read += 1;
                value = low.checked_add(WIDE).ok_or_else(|| too_large(low))?;
            }
            if value > largest {
                return Err(too_large(value));
            }
            out[mask.trailing_zeros() as usize % BLOCK] = L::from_u64(value);
            mask &= mask - 1;
        }
        Ok(())
    }
}

#[cold]
fn too_large(value: u64) -> crate::error::Error {
    Rule::PayloadDeltas.broken("a delta that fits in a lane", value)
}

#[inline(always)]
fn decode_nibble_gaps<L: Lane>(mut parts: &[u8], count: usize, order: Order, base_sum: u64, lanes: &mut [u8]) -> Result<u64> {
    let tokens = take(&mut parts, count)?;
    let escaped = tokens.iter().filter(|&&t| t >= 0xF0).count();
    let mut escapes = Escapes::take::<L>(&mut parts, escaped)?;
    let largest = L::from_u64(u64::MAX).to_u64() - 1;
    let mut patch = Patch::<L>::new(lanes, count, base_sum, order);
    // The first half of `values` is unused, because one mask covers the escapes of gaps (low half) and of values (high half).
    let (mut gaps, mut values) = ([0; BLOCK / 2], [L::default(); BLOCK]);
    for tokens in tokens.chunks(BLOCK / 2) {
        let mut padded = [0; BLOCK / 2];
        padded[..tokens.len()].copy_from_slice(tokens);
        for (i, &token) in padded.iter().enumerate() {
            gaps[i] = usize::from(token & 15);
            values[BLOCK / 2 + i] = L::from_u64((token >> 4).into());
        }
        let full = full_nibbles(&padded);
        let (mut long, large) = (full & u64::from(u32::MAX), full & !u64::from(u32::MAX));
        escapes.fill(large, largest, &mut values)?;
        while long != 0 {
            gaps[long.trailing_zeros() as usize] += take_continued(&mut parts)?;
            long &= long - 1;
        }
        for (&gap, value) in gaps.iter().zip(&values[BLOCK / 2..]).take(tokens.len()) {
            patch.change(gap, L::from_u64(value.to_u64() + 1))?;
        }
    }
    check_finished(parts)?;
    Ok(patch.finish())
}

/// Returns the mask of the nibbles that are 15, for 32 tokens. Bits 0 to 31 are for the low nibbles, bits 32 to 63 for the high
/// nibbles. One mask covers both, because the processor usually mispredicts the end of a loop over the bits of a mask.
#[inline(always)]
fn full_nibbles(tokens: &[u8; BLOCK / 2]) -> u64 {
    let mut mask = 0;
    for (i, word) in tokens.as_chunks::<8>().0.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        for (half, nibbles) in [word, word >> 4].into_iter().enumerate() {
            // Adding 1 carries out of a nibble of 15. The product gathers the carries of eight bytes in the top byte.
            let carries = ((nibbles & 0x0F0F_0F0F_0F0F_0F0F) + 0x0101_0101_0101_0101) >> 4 & 0x0101_0101_0101_0101;
            mask |= (carries.wrapping_mul(0x0102_0408_1020_4080) >> 56) << (8 * i + 32 * half);
        }
    }
    mask
}

#[inline(always)]
fn decode_nibble_planes<L: Lane>(mut parts: &[u8], count: usize, order: Order, lanes: &mut [u8]) -> Result<()> {
    let total = lanes.len() / L::BYTES;
    let tokens = take(&mut parts, total.div_ceil(BLOCK) * (BLOCK / 2))?;
    let escaped = tokens.iter().map(|&t| usize::from(t & 15 == 15) + usize::from(t >= 0xF0)).sum();
    let mut escapes = Escapes::take::<L>(&mut parts, escaped)?;
    check_finished(parts)?;
    let mut changed = 0;
    let mut deltas = [L::default(); BLOCK];
    for (lanes, tokens) in lanes_of_mut::<L>(lanes).chunks_mut(BLOCK).zip(tokens.as_chunks::<{ BLOCK / 2 }>().0) {
        let (low, high) = deltas.split_at_mut(BLOCK / 2);
        for ((&token, low), high) in tokens.iter().zip(low).zip(high) {
            *low = L::from_u64((token & 15).into());
            *high = L::from_u64((token >> 4).into());
        }
        escapes.fill(full_nibbles(tokens), L::from_u64(u64::MAX).to_u64(), &mut deltas)?;
        let used = lanes.len();
        let beyond = deltas[used..].iter().any(|&d| d != L::default());
        Rule::PayloadPositions.check(!beyond, "no delta past the chunk's lanes", "one")?;
        changed += apply_all(lanes, &deltas[..used], order);
    }
    check_count(count, changed)
}
