//! What all paths work on: tiles of lanes, streams of words, tables of classes.

#![forbid(unsafe_code)]

/// Most lanes of a step: as many as a stream may have states.
pub(crate) const STEP: usize = 32;
/// Lanes that have a mask of those with a value. Steps of one or two groups have vector paths.
pub(crate) const GROUP: usize = 16;

/// Why a stream is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Broken {
    /// A word is missing.
    Short,
    /// A value has too many bits.
    Value,
}

/// Lanes that a mask describes: half a block.
pub(crate) const HALF: usize = 64;

/// Values below this are their own tokens.
pub(crate) const DIRECT: u32 = 64;
/// What the number of a token's extra bits is less than half of the token, from [`DIRECT`] on.
pub(crate) const EXTRA_BIAS: u32 = DIRECT / 2 - (DIRECT.ilog2() - 1);
/// Tokens of the values of 32 bits, which are all that vectors have room for.
pub(super) const TOKENS_32: usize = 2 * (30 + EXTRA_BIAS) as usize + 2;

/// Lanes that are decoded in steps of their own, whatever comes before them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiles {
    /// Halves of blocks of a tile, of which the last one may have fewer.
    pub halves: usize,
    /// Lanes of a step: a power of two, at most [`STEP`].
    pub step: usize,
}

impl Tiles {
    /// Places that `coded` lanes of a tile take: whole steps.
    #[inline(always)]
    pub fn places(self, coded: usize) -> usize {
        (coded + self.step - 1) & !(self.step - 1)
    }
}

/// Room for what is found out about coded lanes. Each tile takes whole steps of it.
pub(crate) struct Coded<'a> {
    /// A mask for each half of a block.
    pub masks: &'a mut [u64],
    /// Class of each coded lane, and 0 up to the end of the tile's last step; what follows is undefined.
    pub classes: &'a mut [u8],
    /// Position of each coded lane, or no room if that is not wanted; all other places are undefined.
    pub positions: &'a mut [u32],
}

impl Coded<'_> {
    /// Ends a tile that takes the places from `start` up to `count`: returns where the next one begins.
    #[inline(always)]
    pub(super) fn end_tile(&mut self, tiles: Tiles, start: usize, count: usize) -> usize {
        if let Some(room) = self.classes[count..].first_chunk_mut::<STEP>() {
            *room = [0; STEP];
        }
        start + tiles.places(count - start)
    }
}

/// What a slot of a class stands for: where the token's slots begin in the low 12 bits, their number less one in the next 12,
/// the token in the high 8.
pub(crate) type Entry = u32;

/// The slots of class 0, which fills up steps: one token, 0, has all of them, so it leaves a state as it is and needs no word.
pub(crate) const NO_CLASS: Entry = 0xFFF << 12;

/// Slots of a class: entry `class << 12 | slot` of a table.
pub(crate) const SLOTS_LOG2: u32 = 12;

/// The part of a stream that is read as it is decoded.
#[derive(Debug)]
pub(crate) struct Words<'a> {
    /// The words after the states.
    pub words: &'a [[u8; 2]],
    /// How many of them have been read.
    pub read: usize,
}

impl Words<'_> {
    /// State `x` after a word if it needs one.
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

/// What coding a token does to a state: the frequencies of all tokens of all classes.
pub(crate) struct Divisors {
    /// `class << 8 | token`: where the token's slots begin in the low 12 bits, their number less one in the next 12, and in the
    /// high 32 ⌊2^32 / number⌋, or the largest value below it; 0 where the class has no such token.
    pub(super) entries: Vec<u64>,
}

impl Default for Divisors {
    /// Those of class 0 alone, which fills up steps: coding its token leaves a state as it is.
    fn default() -> Self {
        let mut divisors = Self { entries: vec![0; 16 << 8] };
        divisors.set(0, 0, 0, 1 << SLOTS_LOG2);
        divisors
    }
}

impl Divisors {
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

    /// Codes a token that its class has.
    #[inline(always)]
    pub fn encode(&self, class: u8, token: u8, state: u32, words: &mut Backwards<'_>) -> u32 {
        let entry = self.entries[Self::at(class, token)];
        let (start, count) = (entry as u32 & 0xFFF, (entry as u32 >> 12) + 1);
        let x = words.make_room(state, u64::from(count) << 20);
        // The product falls short of the quotient by less than one.
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

/// Words that are written from the last one back; `next` is where the next one goes.
pub(crate) struct Backwards<'a> {
    /// Room for `SPARE` words more than will be kept.
    pub words: &'a mut [u16],
    /// Place of the next word.
    pub next: usize,
}

impl Backwards<'_> {
    /// Words that may be written before the last one that is kept.
    pub const SPARE: usize = 16;

    /// Writes the low word of a state that is not below `limit`, and returns what is left of it. No branch: it would be a guess.
    #[inline(always)]
    pub fn make_room(&mut self, state: u32, limit: u64) -> u32 {
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
            let mut divisors = Divisors::default();
            let start = 4096 - count;
            divisors.set(class, token, start, count);
            prop_assert!(divisors.has(class, token) && !divisors.has(class, token ^ 1));
            let mut room = [0; 2];
            let mut words = Backwards { words: &mut room, next: 1 };
            let next = divisors.encode(class, token, state, &mut words);
            let full = u64::from(state) >= u64::from(count) << 20;
            let x = if full { state >> 16 } else { state };
            prop_assert_eq!(next, ((x / count) << 12) + x % count + start);
            prop_assert_eq!(words.next, usize::from(!full));
            prop_assert!(!full || room[1] == state as u16);
        }
    }
}
