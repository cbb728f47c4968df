//! Types that all platforms share: tiles of lanes, streams of words, tables of classes.

#![forbid(unsafe_code)]

use crate::prelude::*;
use crate::sums::ChunkSum;

/// Maximum number of lanes per step, and of states per stream.
pub const STEP: usize = 32;
/// Lanes per mask of nonzero values. Vector code exists for steps of one or two groups.
pub const GROUP: usize = 16;

/// Reason why a stream is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A word is missing.
    Short,
    /// A value has too many bits.
    Value,
}

/// Lanes per half block. One mask of coded lanes covers a half block.
pub const HALF: usize = 64;

/// Values below `DIRECT` are their own tokens.
pub const DIRECT: u32 = 64;
/// `extra_bits = token / 2 - EXTRA_BIAS`, for tokens from [`DIRECT`] on.
pub const EXTRA_BIAS: u32 = DIRECT / 2 - (DIRECT.ilog2() - 1);
/// Number of tokens for values of at most 32 bits. Vector code handles no larger values.
pub(super) const TOKENS_32: usize = 2 * (30 + EXTRA_BIAS) as usize + 2;

/// Division of lanes into tiles and steps. Each tile begins a new step.
#[derive(Debug, Clone, Copy)]
pub struct Tiles {
    /// Half blocks per tile. The last tile may have fewer.
    pub halves: usize,
    /// Lanes per step: a power of two, at most [`STEP`].
    pub step: usize,
}

impl Tiles {
    /// Returns the length of a tile's list of `coded` coded lanes, padded to whole steps.
    #[inline(always)]
    pub fn padded_len(self, coded: usize) -> usize {
        (coded + self.step - 1) & !(self.step - 1)
    }
}

/// Output of [`super::Platform::compact`]: the coded lanes, with each tile padded to whole steps.
pub struct CompactedLanes<'a> {
    /// One mask per half block.
    pub masks: &'a mut [u64],
    /// Class of each coded lane, then 0 up to the end of the tile's last step. Later elements are undefined.
    pub classes: &'a mut [u8],
    /// Position of each coded lane, with undefined padding. Empty if positions are not needed.
    pub positions: &'a mut [u32],
}

impl CompactedLanes<'_> {
    /// Ends a tile with list elements `start..count`. Returns the index of the next tile's first element.
    #[inline(always)]
    pub(super) fn end_tile(&mut self, tiles: Tiles, start: usize, count: usize) -> usize {
        if let Some(padding) = self.classes[count..].first_chunk_mut::<STEP>() {
            *padding = [0; STEP];
        }
        start + tiles.padded_len(count - start)
    }
}

/// Rows of a chunk sum per piece. Small in tests, so that short chunks span several pieces.
pub const PIECE_ROWS: usize = if cfg!(any(test, fuzzing)) { 1 } else { 4 };
/// Bytes per piece: the number of base lanes that a decoder copies at a time. A piece, its base lanes and the lists of its coded
/// lanes fit in the L1 cache, if few lanes are coded.
pub const PIECE: usize = PIECE_ROWS * ChunkSum::BLOCK;
/// Bytes per cache line.
pub(super) const LINE: usize = 64;

/// Memory that is used next. Loops that need little memory themselves bring it into the cache, line by line. Lines of four rows
/// alternate, so that several pages are accessed at the same time.
#[derive(Debug)]
pub struct Prefetch<'a> {
    /// Base lanes that are not copied yet.
    pub from: &'a [u8],
    pub requested: &'a mut PrefetchedLines,
}

impl Prefetch<'_> {
    pub fn reborrow(&mut self) -> Prefetch<'_> {
        Prefetch { from: self.from, requested: self.requested }
    }
}

/// Number of lines that a [`Prefetch`] has requested.
#[derive(Debug, Default)]
pub struct PrefetchedLines(pub usize);

impl PrefetchedLines {
    /// Returns the offset of the line that is requested as number `i`.
    #[inline(always)]
    pub fn offset(i: usize) -> usize {
        const TOGETHER: usize = 4;
        const GROUP_LINES: usize = TOGETHER * ChunkSum::BLOCK / LINE;
        let (group, i) = (i / GROUP_LINES, i % GROUP_LINES);
        (group * TOGETHER + i % TOGETHER) * ChunkSum::BLOCK + i / TOGETHER * LINE
    }
}

/// Table of a decoder, for values of limited size.
#[derive(Debug, Clone, Copy)]
pub struct DecodeTable<'a> {
    /// All slots of classes 0 to 15.
    pub entries: &'a [Entry],
    /// Number of tokens whose values are allowed.
    pub tokens: usize,
}

/// Steps of one stream, for [`super::Platform::decode_steps`]. `T` is a lane in memory.
#[derive(Debug)]
pub struct StreamSteps<'a, 'w, T> {
    pub words: &'a mut Words<'w>,
    pub states: &'a mut [u32; STEP],
    pub classes: &'a [u8],
    /// Receives one value per class.
    pub values: &'a mut [T],
    /// Receives masks of nonzero values, one per [`GROUP`].
    pub changed: &'a mut [u16],
}

/// Entry of a slot. Low 12 bits: first slot of its token. Next 12 bits: number of slots of the token, minus 1. High 8 bits:
/// token.
pub type Entry = u32;

/// Entry of every slot of class 0, which pads steps. The only token of class 0 is 0 and has all slots, so decoding it leaves the
/// state unchanged and reads no word.
pub const NO_CLASS: Entry = 0xFFF << 12;

/// log2 of the number of slots per class. A table has the entry of a slot at index `class << 12 | slot`.
pub const SLOTS_LOG2: u32 = 12;

/// Reader of the words of a stream.
#[derive(Debug)]
pub struct Words<'a> {
    /// Words after the initial states.
    pub words: &'a [[u8; 2]],
    /// Number of words read so far.
    pub read: usize,
}

impl Words<'_> {
    /// Shifts a word into state `x` if `x` is below the lower bound.
    #[inline(always)]
    pub fn renormalize(&mut self, x: u32) -> Result<u32, Fault> {
        if x >= 1 << 16 {
            return Ok(x);
        }
        let word = *self.words.get(self.read).ok_or(Fault::Short)?;
        self.read += 1;
        Ok(x << 16 | u32::from(u16::from_le_bytes(word)))
    }
}

/// Table of an encoder: first slot and number of slots of all tokens of all classes.
pub struct EncodeTable {
    /// Entry of a token, at index `class << 8 | token`. Low 12 bits: first slot. Next 12 bits: number of slots, minus 1. High 32
    /// bits: min(⌊2^32 / number⌋, 2^32 − 1). The entry is 0 if the class lacks the token.
    pub entries: Vec<u64>,
}

impl Default for EncodeTable {
    /// Returns a table with class 0 only. This class pads steps: encoding its token leaves a state unchanged.
    fn default() -> Self {
        let mut table = Self { entries: vec![0; 16 << 8] };
        table.set(0, 0, 0, 1 << SLOTS_LOG2);
        table
    }
}

impl EncodeTable {
    /// Adds a token to a class, with `count` slots from slot `start` on.
    pub fn set(&mut self, class: u8, token: u8, start: u32, count: u32) {
        let reciprocal = ((1u64 << 32) / u64::from(count)).min(u32::MAX.into());
        self.entries[Self::at(class, token)] = u64::from(start | (count - 1) << 12) | reciprocal << 32;
    }

    #[inline(always)]
    pub fn has(&self, class: u8, token: u8) -> bool {
        self.entries[Self::at(class, token)] != 0
    }

    /// Encodes a token, which its class must have. Returns the new state.
    #[inline(always)]
    pub fn encode(&self, class: u8, token: u8, state: u32, words: &mut ReverseWriter<'_>) -> u32 {
        let entry = self.entries[Self::at(class, token)];
        let (start, count) = (entry as u32 & 0xFFF, (entry as u32 >> 12) + 1);
        let x = words.renormalize(state, u64::from(count) << 20);
        // The estimate of the quotient is at most 1 too small.
        let quotient = ((u64::from(x) * (entry >> 32)) >> 32) as u32;
        let rest = x - quotient * count;
        let more = u32::from(rest >= count);
        ((quotient + more) << 12) + (rest - more * count) + start
    }

    #[inline(always)]
    fn at(class: u8, token: u8) -> usize {
        usize::from(class & 15) << 8 | usize::from(token)
    }
}

/// A buffer of words that is filled from the end.
pub struct ReverseWriter<'a> {
    /// Buffer, at least `SPARE` elements longer than the words to keep.
    pub words: &'a mut [u16],
    /// Index of the next word.
    pub next: usize,
}

impl ReverseWriter<'_> {
    /// Number of elements below the kept words that vector code can overwrite.
    pub const SPARE: usize = 16;

    /// Writes the low word of the state if the state is at least `limit`. Returns the rest of the state. There is no branch,
    /// because the processor would often mispredict it.
    #[inline(always)]
    pub fn renormalize(&mut self, state: u32, limit: u64) -> u32 {
        let full = u64::from(state) >= limit;
        self.words[self.next] = state as u16;
        self.next -= usize::from(full);
        state >> (16 * u32::from(full))
    }
}

/// Rows per block of [`CountTiles`].
pub const ROWS: usize = 16;
/// Tokens per tile of [`CountTiles`].
pub const TILE_TOKENS: usize = 8;
/// Bits per digit of a count. The sum of [`TILE_TOKENS`] digits, each times a cost below 2^14, is below 2^32.
pub(super) const DIGIT_BITS: u32 = 15;
/// Digits per count.
pub(super) const DIGITS: usize = u32::BITS.div_ceil(DIGIT_BITS) as usize;
/// Number of low bits of a key that [`super::Platform::keys`] sets to the class.
pub const CLASS_BITS: u32 = 4;

/// One digit of each count of 8 tokens in 16 rows, by pairs of tokens. The rows are in the order of [`CountTile::element`].
#[derive(Clone, Copy, Default)]
pub(super) struct CountTile(pub [[[u16; 2]; ROWS]; TILE_TOKENS / 2]);

impl CountTile {
    /// Returns the element of a row. Rows of the two halves alternate, so a vector of elements, taken as half as many wide
    /// elements, has a row of the first half in each low half.
    pub const fn element(row: usize) -> usize {
        2 * (row % (ROWS / 2)) + row / (ROWS / 2)
    }
}

/// Counts of tokens in blocks of 16 rows, for [`super::Platform::keys`].
#[derive(Default)]
pub struct CountTiles {
    /// For each block, for each digit from the highest on: one tile per 8 tokens.
    pub(super) tiles: Vec<CountTile>,
    /// For each block, the number of tiles of each digit. Without a digit of more than 0, there is none.
    pub(super) lengths: Vec<[usize; DIGITS]>,
    /// The largest of these numbers.
    pub(super) longest: usize,
}

impl CountTiles {
    /// Adds a block of at most 16 rows. Each row has its counts by token.
    pub fn push(&mut self, rows: &[&[u32]]) {
        assert!(rows.len() <= ROWS);
        let tokens = rows.iter().map(|row| row.len()).max().unwrap_or(0);
        let bits = rows.iter().copied().flatten().fold(0, |bits, count| bits | count);
        let mut lengths = [0; DIGITS];
        for (length, digit) in lengths.iter_mut().zip((0..DIGITS as u32).rev()) {
            let shift = DIGIT_BITS * digit;
            if bits >> shift == 0 {
                continue;
            }
            let digit = |count: u32| (count >> shift) as u16 & ((1 << DIGIT_BITS) - 1);
            let start = self.tiles.len();
            self.tiles.resize(start + tokens.div_ceil(TILE_TOKENS), CountTile::default());
            for (row, counts) in rows.iter().enumerate() {
                let element = CountTile::element(row);
                let (whole, rest) = counts.as_chunks::<TILE_TOKENS>();
                for (tile, counts) in self.tiles[start..].iter_mut().zip(whole) {
                    for (pairs, pair) in tile.0.iter_mut().zip(counts.as_chunks().0) {
                        pairs[element] = pair.map(digit);
                    }
                }
                for (token, &count) in rest.iter().enumerate() {
                    self.tiles[start + whole.len()].0[token / 2][element][token % 2] = digit(count);
                }
            }
            // Only the first tokens have high digits.
            let is_zero = |tile: &CountTile| tile.0.as_flattened().as_flattened().iter().all(|&digit| digit == 0);
            self.tiles.truncate(start + self.tiles[start..].iter().rposition(|tile| !is_zero(tile)).map_or(0, |last| last + 1));
            *length = self.tiles.len() - start;
            self.longest = self.longest.max(*length);
        }
        self.lengths.push(lengths);
    }

    pub fn blocks(&self) -> usize {
        self.lengths.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_line_is_requested_once() {
        let mut offsets: Vec<usize> = (0..2 * 256).map(PrefetchedLines::offset).collect();
        assert_eq!(offsets[..5], [0, 4096, 2 * 4096, 3 * 4096, LINE]);
        offsets.sort_unstable();
        assert!(offsets.into_iter().eq((0..2 * 256).map(|line| line * LINE)));
    }

    proptest! {
        #[test]
        fn a_token_is_coded_by_division(class in 1u8..16, token: u8, count in 1u32..=4096, state in 1u32 << 16..) {
            let mut table = EncodeTable::default();
            let start = 4096 - count;
            table.set(class, token, start, count);
            prop_assert!(table.has(class, token) && !table.has(class, token ^ 1));
            let mut padding = [0; 2];
            let mut words = ReverseWriter { words: &mut padding, next: 1 };
            let next = table.encode(class, token, state, &mut words);
            let full = u64::from(state) >= u64::from(count) << 20;
            let x = if full { state >> 16 } else { state };
            prop_assert_eq!(next, ((x / count) << 12) + x % count + start);
            prop_assert_eq!(words.next, usize::from(!full));
            prop_assert!(!full || padding[1] == state as u16);
        }
    }
}
