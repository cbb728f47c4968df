//! Types shared by all platforms: tiles of lanes, streams of words, tables of classes.

#![forbid(unsafe_code)]

/// Most lanes of a step, which is the maximal number of states of a stream.
pub(crate) const STEP: usize = 32;
/// Lanes per mask of nonzero values. Steps of one or two groups have vector code.
pub(crate) const GROUP: usize = 16;

/// Why a stream is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Broken {
    /// A word is missing.
    Short,
    /// A value has too many bits.
    Value,
}

/// Lanes per mask of coded lanes: half a block.
pub(crate) const HALF: usize = 64;

/// Values below this are their own tokens.
pub(crate) const DIRECT: u32 = 64;
/// `extra_bits = token / 2 - EXTRA_BIAS`, for tokens from [`DIRECT`] on.
pub(crate) const EXTRA_BIAS: u32 = DIRECT / 2 - (DIRECT.ilog2() - 1);
/// Number of tokens for values of 32 bits, the largest that vector code handles.
pub(super) const TOKENS_32: usize = 2 * (30 + EXTRA_BIAS) as usize + 2;

/// The division of lanes into tiles and steps. Each tile begins a new step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiles {
    /// Half blocks per tile. The last tile may have fewer.
    pub halves: usize,
    /// Lanes of a step: a power of two, at most [`STEP`].
    pub step: usize,
}

impl Tiles {
    /// Length of a list of `coded` lanes of a tile, padded to whole steps.
    #[inline(always)]
    pub fn padded_len(self, coded: usize) -> usize {
        (coded + self.step - 1) & !(self.step - 1)
    }
}

/// Output of [`super::Platform::compact`]: the coded lanes, with each tile padded to whole steps.
pub(crate) struct CompactedLanes<'a> {
    /// A mask for each half of a block.
    pub masks: &'a mut [u64],
    /// Class of each coded lane, then 0 up to the end of the tile's last step. Elements behind are undefined.
    pub classes: &'a mut [u8],
    /// Position of each coded lane; empty if positions are not needed. Elements of the padding are undefined.
    pub positions: &'a mut [u32],
}

impl CompactedLanes<'_> {
    /// Ends a tile whose list has elements `start..count`. Returns where the next tile begins.
    #[inline(always)]
    pub(super) fn end_tile(&mut self, tiles: Tiles, start: usize, count: usize) -> usize {
        if let Some(padding) = self.classes[count..].first_chunk_mut::<STEP>() {
            *padding = [0; STEP];
        }
        start + tiles.padded_len(count - start)
    }
}

/// The decoder's table for values of limited size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DecodeTable<'a> {
    /// All slots of classes 0 to 15.
    pub entries: &'a [Entry],
    /// Number of tokens whose values are allowed.
    pub tokens: usize,
}

/// Output of [`super::Platform::decode_steps`].
#[derive(Debug)]
pub(crate) struct DecodedSteps<'a> {
    /// The values.
    pub values: &'a mut [u32],
    /// Masks of the values that are not 0, one per [`GROUP`].
    pub changed: &'a mut [u16],
}

/// A slot of a class: the first slot of its token in the low 12 bits, the number of the token's slots minus 1 in the next 12, the
/// token in the high 8.
pub(crate) type Entry = u32;

/// All slots of class 0, which pads steps. Its only token, 0, has all slots, so decoding it leaves a state unchanged and needs no
/// word.
pub(crate) const NO_CLASS: Entry = 0xFFF << 12;

/// log2 of the slots per class. Entry `class << 12 | slot` of a table describes a slot.
pub(crate) const SLOTS_LOG2: u32 = 12;

/// The words of a stream, read while it is decoded.
#[derive(Debug)]
pub(crate) struct Words<'a> {
    /// The words after the states.
    pub words: &'a [[u8; 2]],
    /// Number of words read so far.
    pub read: usize,
}

impl Words<'_> {
    /// Appends a word to state `x` if it is below the lower bound.
    #[inline(always)]
    pub fn renormalize(&mut self, x: u32) -> Result<u32, Broken> {
        if x >= 1 << 16 {
            return Ok(x);
        }
        let word = *self.words.get(self.read).ok_or(Broken::Short)?;
        self.read += 1;
        Ok(x << 16 | u32::from(u16::from_le_bytes(word)))
    }
}

/// The encoder's table: the frequencies of all tokens of all classes.
pub(crate) struct EncodeTable {
    /// Entry `class << 8 | token`: the first slot in the low 12 bits, the number of slots minus 1 in the next 12, and min(⌊2^32 /
    /// number⌋, 2^32 − 1) in the high 32. 0 if the class lacks the token.
    pub(super) entries: Vec<u64>,
}

impl Default for EncodeTable {
    /// Class 0 alone, which pads steps: encoding its token leaves a state unchanged.
    fn default() -> Self {
        let mut table = Self { entries: vec![0; 16 << 8] };
        table.set(0, 0, 0, 1 << SLOTS_LOG2);
        table
    }
}

impl EncodeTable {
    /// Gives a class a token with `count` slots from `start` on.
    pub fn set(&mut self, class: u8, token: u8, start: u32, count: u32) {
        let reciprocal = ((1u64 << 32) / u64::from(count)).min(u32::MAX.into());
        self.entries[Self::at(class, token)] = u64::from(start | (count - 1) << 12) | reciprocal << 32;
    }

    /// Whether a class has a token.
    #[inline(always)]
    pub fn has(&self, class: u8, token: u8) -> bool {
        self.entries[Self::at(class, token)] != 0
    }

    /// Encodes a token. Its class must have it.
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
pub(crate) struct ReverseWriter<'a> {
    /// At least `SPARE` elements longer than the words that will be kept.
    pub words: &'a mut [u16],
    /// Index of the next word.
    pub next: usize,
}

impl ReverseWriter<'_> {
    /// Words below the kept ones that may be overwritten.
    pub const SPARE: usize = 16;

    /// Writes the low word of a state that is `limit` or more, and returns the rest of the state. Without a branch, which would
    /// be mispredicted.
    #[inline(always)]
    pub fn renormalize(&mut self, state: u32, limit: u64) -> u32 {
        let full = u64::from(state) >= limit;
        self.words[self.next] = state as u16;
        self.next -= usize::from(full);
        state >> (16 * u32::from(full))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
