//! The inner loops of codec `conditioned` that are worth vector instructions written by hand: finding changed and coded lanes,
//! packing values, decoding and encoding steps of states. They give the same results on every path; tests hold them together.
//!
//! This module and [`crate::dispatch`] are the only places of the codecs with `unsafe`, and it is safe to call: a [`Path`] other
//! than [`Path::Scalar`] exists only where its instructions were detected.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

use crate::lane::Lane;

/// Most lanes of a step: as many as a stream may have states.
pub(crate) const STEP: usize = 32;
/// Lanes that have a mask of those with a value. Steps of one or two groups have vector paths.
pub(crate) const GROUP: usize = 16;

/// A function that asks the processor for every feature that the functions of a path enable, and the list of them, with which a
/// test compares the source.
#[cfg(target_arch = "x86_64")]
macro_rules! detection {
    ($has:ident, $features:ident: $($feature:tt),+) => {
        fn $has() -> bool {
            $(is_x86_feature_detected!($feature))&&+
        }
        #[cfg(test)]
        const $features: &[&str] = &[$($feature),+];
    };
}

#[cfg(target_arch = "x86_64")]
detection!(has_avx2, AVX2_FEATURES: "avx2", "bmi1", "bmi2", "popcnt");
#[cfg(target_arch = "x86_64")]
detection!(
    has_avx512, AVX512_FEATURES:
    "avx512f", "avx512bw", "avx512vl", "avx512cd", "avx512vbmi", "avx512vbmi2", "bmi2", "popcnt"
);

/// Instructions to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Path(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

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
const TOKENS_32: usize = 2 * (30 + EXTRA_BIAS) as usize + 2;

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
    fn end_tile(&mut self, tiles: Tiles, start: usize, count: usize) -> usize {
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
    entries: Vec<u64>,
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

impl Path {
    /// The portable path.
    pub const SCALAR: Self = Self(Kind::Scalar);

    /// Every path that this processor can take, the fastest last.
    pub fn available() -> Vec<Self> {
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut, reason = "there is one path"))]
        let mut paths = vec![Self::SCALAR];
        #[cfg(target_arch = "x86_64")]
        {
            if has_avx2() {
                paths.push(Self(Kind::Avx2));
            }
            if has_avx512() {
                paths.push(Self(Kind::Avx512));
            }
        }
        paths
    }

    /// The fastest path of this processor.
    pub fn best() -> Self {
        Self::available().pop().unwrap_or(Self::SCALAR)
    }

    /// Whether [`Path::decode_steps`] exists.
    pub fn has_steps(self) -> bool {
        self != Self::SCALAR
    }

    /// Finds the coded lanes of some tiles: those whose class, `map[index]` where the index is below 64 and 0 elsewhere, is
    /// not 0. Each block of 128 indexes has the map of its activity. Returns how many places they take.
    ///
    /// # Panics
    /// If `out` has no room, or the number of activities is not that of the blocks.
    pub fn compact(
        self,
        indexes: &[[u8; HALF]],
        activities: &[u8],
        maps: &[[u8; HALF]; 4],
        tiles: Tiles,
        first: u32,
        out: &mut Coded<'_>,
    ) -> usize {
        let lanes = indexes.len() * HALF;
        assert!(indexes.len() == 2 * activities.len() && out.masks.len() == indexes.len());
        assert!(tiles.halves.is_multiple_of(2) && tiles.step.is_power_of_two() && tiles.step <= STEP);
        // Each half writes 64 classes and positions from where the last one ended, and the places of a tile are not more than
        // its lanes, of which there are whole steps.
        assert!(out.classes.len() >= lanes + HALF && (out.positions.is_empty() || out.positions.len() >= lanes + HALF));
        match self.0 {
            Kind::Scalar => scalar::compact(indexes, activities, maps, tiles, first, out),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a path of this kind is only made in `available`, which detects all features that the function enables.
            Kind::Avx2 => unsafe { avx2::compact(indexes, activities, maps, tiles, first, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Avx512 => unsafe { avx512::compact(indexes, activities, maps, tiles, first, out) },
        }
    }

    /// Sets `masks` to a mask for each 64 lanes, of `width` bytes, of those that differ.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn differ(self, width: usize, base: &[u8], target: &[u8], masks: &mut [u64]) {
        assert!(base.len() == target.len() && masks.len() == base.len().div_ceil(64 * width));
        masks.fill(0);
        let whole = base.len() / (64 * width);
        let (whole_masks, last) = masks.split_at_mut(whole);
        let (base, base_rest) = base.split_at(64 * width * whole);
        let (target, target_rest) = target.split_at(64 * width * whole);
        match (self.0, width) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Kind::Avx512, 1 | 2 | 4 | 8) => unsafe { avx512::differ(width, base, target, whole_masks) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Kind::Avx2, 1 | 2 | 4 | 8) => unsafe { avx2::differ(width, base, target, whole_masks) },
            _ => scalar::differ(width, base, target, whole_masks),
        }
        scalar::differ(width, base_rest, target_rest, last);
    }

    /// Packs the lanes that `mask` selects to the beginning of `out`; what follows them there is either as it was or 0.
    ///
    /// # Panics
    /// If `out` has no room for 64 lanes.
    #[inline(always)]
    pub fn pack<L: Lane>(self, lanes: &[L::Le; HALF], mask: u64, out: &mut [L::Le]) {
        let out = &mut out[..HALF];
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            Kind::Avx512 => unsafe { avx512::pack::<L>(lanes, mask, out) },
            _ => scalar::pack(lanes, mask, out),
        }
    }

    /// Codes whole steps of `count` lanes, which fill `classes`, from the last one back; returns how many lanes are left to be
    /// coded lane by lane: all that this path has no instructions for, or those up to and with the last step in which a class
    /// lacks a token.
    ///
    /// # Panics
    /// If the lengths differ or there is no room for the words.
    #[inline(always)]
    pub fn encode_steps<L: Lane>(
        self,
        count: usize,
        divisors: &Divisors,
        classes: &[u8],
        values: &[L::Le],
        states: &mut [u32; STEP],
        words: &mut Backwards<'_>,
    ) -> usize {
        assert!(classes.len() == values.len() && classes.len().is_multiple_of(count));
        match (self.0, count) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Kind::Avx512, GROUP) if L::BYTES <= 4 => unsafe {
                avx512::encode_steps::<L, 1>(divisors, classes, values, states, words)
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Kind::Avx512, STEP) if L::BYTES <= 4 => unsafe {
                avx512::encode_steps::<L, 2>(divisors, classes, values, states, words)
            },
            _ => classes.len(),
        }
    }

    /// Decodes steps of `count` lanes, 16 or 32, whose classes (0 to 15) fill `classes`, into as many values of at most 32
    /// bits, and a mask for each 16 lanes of those that are not 0.
    ///
    /// `entries` has all slots of the classes 0 to 15; `tokens` is the number of tokens whose values are allowed: at most those of
    /// 32 bits.
    ///
    /// # Errors
    /// A word that is missing, or a value with too many bits; states and values are then undefined.
    ///
    /// # Panics
    /// If the lengths do not fit, or on the scalar path, which has no such function.
    #[expect(clippy::too_many_arguments, reason = "the state of an inner loop")]
    pub fn decode_steps(
        self,
        count: usize,
        entries: &[Entry],
        tokens: usize,
        words: &mut Words<'_>,
        states: &mut [u32; STEP],
        classes: &[u8],
        values: &mut [u32],
        changed: &mut [u16],
    ) -> Result<(), Broken> {
        assert!(entries.len() == 16 << SLOTS_LOG2 && tokens <= TOKENS_32 && (count == GROUP || count == STEP));
        assert!(classes.len().is_multiple_of(count) && classes.len() == values.len() && classes.len() == GROUP * changed.len());
        let (classes, values, tokens) = (classes.as_chunks().0, values.as_chunks_mut().0, tokens as u32);
        match (self.0, count) {
            (Kind::Scalar, _) => unreachable!("the scalar path decodes lane by lane"),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Kind::Avx2, GROUP) => unsafe { avx2::decode_steps::<1>(entries, tokens, words, states, classes, values, changed) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Kind::Avx2, _) => unsafe { avx2::decode_steps::<2>(entries, tokens, words, states, classes, values, changed) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Kind::Avx512, GROUP) => unsafe { avx512::decode_steps::<1>(entries, tokens, words, states, classes, values, changed) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Kind::Avx512, _) => unsafe { avx512::decode_steps::<2>(entries, tokens, words, states, classes, values, changed) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_feature_that_a_path_enables_is_detected() {
        let paths = [(include_str!("avx2.rs"), AVX2_FEATURES), (include_str!("avx512.rs"), AVX512_FEATURES)];
        for (source, detected) in paths {
            let attributes = source.lines().filter_map(|line| line.trim().strip_prefix("#[target_feature(enable = \""));
            let mut enabled: Vec<_> =
                attributes.flat_map(|rest| rest.strip_suffix("\")]").expect("one list a line").split(',')).collect();
            enabled.sort_unstable();
            enabled.dedup();
            let mut detected = detected.to_vec();
            detected.sort_unstable();
            assert_eq!(enabled, detected);
        }
    }

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

        #[test]
        fn packing_is_the_same_on_every_path(lanes in proptest::collection::vec(any::<u64>(), HALF), mask: u64) {
            fn check<L: Lane>(lanes: &[u64], mask: u64) {
                let lanes: [L::Le; HALF] = std::array::from_fn(|i| L::from_u64(lanes[i]).store());
                for path in Path::available() {
                    let mut out = [L::default().store(); HALF];
                    path.pack::<L>(&lanes, mask, &mut out);
                    let mut found = out.iter().map(|lane| L::load(*lane));
                    for i in (0..HALF).filter(|i| mask >> i & 1 == 1) {
                        assert_eq!(found.next(), Some(L::load(lanes[i])));
                    }
                    assert!(found.all(|lane| lane == L::default()));
                }
            }
            check::<u8>(&lanes, mask);
            check::<u16>(&lanes, mask);
            check::<u32>(&lanes, mask);
            check::<u64>(&lanes, mask);
        }
    }

    proptest! {
        #[test]
        fn differing_is_the_same_on_every_path(
            base in proptest::collection::vec(any::<u8>(), 0..300),
            flips in proptest::collection::vec((0usize..2400, 1u8..), 0..40),
            log2 in 0u32..4,
        ) {
            let width = 1 << log2;
            let base: Vec<u8> = base.iter().copied().cycle().take(base.len() * width).collect();
            let mut target = base.clone();
            for (at, flip) in flips {
                if let Some(byte) = target.get_mut(at) {
                    *byte ^= flip;
                }
            }
            let lanes: Vec<bool> = base.chunks(width).zip(target.chunks(width)).map(|(b, t)| b != t).collect();
            let expected: Vec<u64> =
                lanes.chunks(64).map(|lanes| lanes.iter().rev().fold(0, |mask, &bit| mask << 1 | u64::from(bit))).collect();
            for path in Path::available() {
                let mut masks = vec![7; expected.len()];
                path.differ(width, &base, &target, &mut masks);
                prop_assert_eq!(&masks, &expected, "{:?}", path);
            }
        }

        #[test]
        fn compacting_is_the_same_on_every_path(
            indexes in proptest::collection::vec(prop_oneof![0u8..70, any::<u8>()], 4 * HALF),
            map in proptest::collection::vec(prop_oneof![Just(0u8), 0u8..16], HALF),
            dense: bool,
            blocks in 1usize..3,
            step_log2 in 0u32..6,
        ) {
            let tiles = Tiles { halves: 2 * blocks, step: 1 << step_log2 };
            let indexes = indexes.as_chunks().0;
            let mut maps = [[0; HALF]; 4];
            maps[0].copy_from_slice(&map);
            maps[1].fill(u8::from(dense) * 3);
            let results = Path::available().into_iter().map(|path| {
                let (mut masks, mut classes, mut positions) = ([0; 4], [0; 5 * HALF], [0; 5 * HALF]);
                let mut out = Coded { masks: &mut masks, classes: &mut classes, positions: &mut positions };
                let count = path.compact(indexes, &[0, 1], &maps, tiles, 1000, &mut out);
                let positions: Vec<u32> = classes.iter().zip(positions).map(|(&class, at)| if class == 0 { 0 } else { at }).collect();
                (masks, classes[..count].to_vec(), positions[..count].to_vec())
            });
            let results: Vec<_> = results.collect();
            let (masks, classes, positions) = &results[0];
            let mut found = classes.iter().zip(positions);
            let mut taken = 0;
            for (i, &index) in indexes.as_flattened().iter().enumerate() {
                if i % (tiles.halves * HALF) == 0 {
                    let filled = found.by_ref().take(tiles.places(taken) - taken);
                    prop_assert!(filled.eq(std::iter::repeat_n((&0, &0), tiles.places(taken) - taken)));
                    taken = 0;
                }
                let class = maps[i / 128].get(usize::from(index)).copied().unwrap_or(0);
                prop_assert_eq!(masks[i / 64] >> (i % 64) & 1 == 1, class != 0);
                if class != 0 {
                    prop_assert_eq!(found.next(), Some((&class, &(1000 + i as u32))));
                    taken += 1;
                }
            }
            prop_assert!(found.eq(std::iter::repeat_n((&0, &0), tiles.places(taken) - taken)));
            for other in &results {
                prop_assert_eq!(other, &results[0]);
            }
        }
    }
}
