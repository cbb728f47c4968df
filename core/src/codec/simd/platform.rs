//! Detects vector instructions, and calls the version of each inner loop that uses them.

use super::scalar;
use super::types::{
    CLASS_BITS, CompactedLanes, CountTiles, DecodeTable, EncodeTable, Fault, GROUP, HALF, PIECE, PIECE_ROWS, Prefetch, ROWS,
    ReverseWriter, SLOTS_LOG2, STEP, StreamSteps, TILE_TOKENS, TOKENS_32, Tiles,
};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::lane::Lane;
use crate::prelude::*;

/// Defines a list of features, and a function that detects all features of the list. A test checks that the list has every
/// feature that the functions of the instruction set enable.
#[cfg(target_arch = "x86_64")]
macro_rules! detection {
    ($has:ident, $features:ident: $($feature:tt),+) => {
        fn $has() -> bool {
            $(crate::dispatch::detected!($feature))&&+
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

/// A set of vector instructions. A value exists only if the processor supports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Platform(Isa);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isa {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// Makes the stores of [`Platform::stream`] visible before later stores, as all other stores of a thread are, when dropped.
pub struct StreamFence;

impl Drop for StreamFence {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 processor has SSE.
        unsafe {
            core::arch::x86_64::_mm_sfence()
        };
    }
}

impl Default for Platform {
    fn default() -> Self {
        Self::best()
    }
}

impl Platform {
    /// Portable code.
    pub const SCALAR: Self = Self(Isa::Scalar);

    /// Returns all platforms that this processor supports, the fastest last.
    pub fn available() -> Vec<Self> {
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut, reason = "there is one platform"))]
        let mut platforms = vec![Self::SCALAR];
        #[cfg(target_arch = "x86_64")]
        {
            if has_avx2() {
                platforms.push(Self(Isa::Avx2));
                // Some functions have no version of their own for AVX-512.
                if has_avx512() {
                    platforms.push(Self(Isa::Avx512));
                }
            }
        }
        platforms
    }

    /// Returns the fastest platform of this processor.
    pub fn best() -> Self {
        Self::available().pop().unwrap_or(Self::SCALAR)
    }

    /// Returns whether [`Platform::decode_steps`] is implemented.
    pub fn has_steps(self) -> bool {
        self != Self::SCALAR
    }

    /// Finds the coded lanes of whole tiles: the lanes with a class other than 0. The class is `map[index]` if the index is below
    /// 64, and 0 otherwise. Each block of 128 indexes uses the map of its activity. Returns the number of elements in the list of
    /// coded lanes, with each tile padded to whole steps.
    ///
    /// # Panics
    /// If `out` is too small, or the number of activities differs from the number of blocks.
    pub fn compact(
        self,
        indexes: &[[u8; HALF]],
        activities: &[u8],
        maps: &[[u8; HALF]; 4],
        tiles: Tiles,
        first: u32,
        out: &mut CompactedLanes<'_>,
    ) -> usize {
        assert_compact_fits(indexes.len(), activities, tiles, out);
        match self.0 {
            Isa::Scalar => scalar::compact(indexes, activities, maps, tiles, first, out),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this variant is made only in `available`, which detects all features that the function enables.
            Isa::Avx2 => unsafe { avx2::compact(indexes, activities, maps, tiles, first, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx512 => unsafe { avx512::compact(indexes, activities, maps, tiles, first, out) },
        }
    }

    /// [`compact`](Self::compact) of BF16 lanes, whose indexes are max(e, `lowest`) − `lowest` for exponent e. Requests lines of
    /// `prefetch` meanwhile. Returns `None` if this platform has no code for it.
    ///
    /// # Panics
    /// As [`compact`](Self::compact).
    #[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "only vector code uses them"))]
    #[expect(clippy::too_many_arguments, reason = "those of `compact`")]
    pub fn compact_bf16(
        self,
        lanes: &[[u8; 2 * HALF]],
        lowest: u8,
        activities: &[u8],
        maps: &[[u8; HALF]; 4],
        tiles: Tiles,
        first: u32,
        prefetch: Option<Prefetch<'_>>,
        out: &mut CompactedLanes<'_>,
    ) -> Option<usize> {
        assert_compact_fits(lanes.len(), activities, tiles, out);
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            Isa::Avx512 => Some(unsafe { avx512::compact_bf16(lanes, lowest, activities, maps, tiles, first, prefetch, out) }),
            _ => None,
        }
    }

    /// Sets `masks` to the bit masks of lanes of `width` bytes that differ, one mask per 64 lanes.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn differ(self, width: usize, base: &[u8], target: &[u8], masks: &mut [u64]) {
        assert!(base.len() == target.len() && masks.len() == base.len().div_ceil(64 * width));
        masks.fill(0);
        let full_groups = base.len() / (64 * width);
        let (whole_masks, last) = masks.split_at_mut(full_groups);
        let (base, base_rest) = base.split_at(64 * width * full_groups);
        let (target, target_rest) = target.split_at(64 * width * full_groups);
        match (self.0, width) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Isa::Avx512, 1 | 2 | 4 | 8) => unsafe { avx512::differ(width, base, target, whole_masks) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Isa::Avx2, 1 | 2 | 4 | 8) => unsafe { avx2::differ(width, base, target, whole_masks) },
            _ => scalar::differ(width, base, target, whole_masks),
        }
        scalar::differ(width, base_rest, target_rest, last);
    }

    /// Returns whether the loops of this platform prefetch, and it has stores that bypass the cache. Then copying base lanes to a
    /// buffer, piece by piece, is the fastest way.
    pub fn has_prefetch(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.0 == Isa::Avx512;
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Copies a piece of base lanes. Returns the inner sum of each row, see [`inner_sum`](crate::sums::inner_sum).
    pub fn copy_piece(self, from: &[u8; PIECE], to: &mut [u8; PIECE]) -> [u64; PIECE_ROWS] {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            Isa::Avx512 => unsafe { avx512::copy_piece(from, to) },
            _ => scalar::copy_piece(from, to),
        }
    }

    /// Copies `from` to `to` with stores that bypass the cache, if this platform has them. The borrowed fence must be dropped before
    /// `to` is accessed again.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn stream(self, from: &[u8], to: &mut [u8], _: &StreamFence) {
        assert!(from.len() == to.len());
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            Isa::Avx512 => unsafe { avx512::stream(from, to) },
            _ => to.copy_from_slice(from),
        }
    }

    /// Packs the lanes selected by `mask` to the beginning of `out`. The lanes after them are unchanged or 0.
    ///
    /// # Panics
    /// If `out` has fewer than 64 lanes.
    #[inline(always)]
    pub fn pack<L: Lane>(self, lanes: &[L::Le; HALF], mask: u64, out: &mut [L::Le]) {
        let out = &mut out[..HALF];
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            Isa::Avx512 => unsafe { avx512::pack::<L>(lanes, mask, out) },
            _ => scalar::pack(lanes, mask, out),
        }
    }

    /// Encodes `values`, whose classes are `classes`: whole steps of `count` lanes, from the last step backwards. Returns the
    /// number of lanes at the beginning that the caller must encode with scalar code. That is all lanes if this platform has no
    /// code for these steps. Otherwise it is the lanes up to and including the last step that has a token that its class lacks.
    ///
    /// # Panics
    /// If the lengths differ, or `words` is too small.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "only vector code uses them"))]
    pub fn encode_steps<L: Lane>(
        self,
        count: usize,
        table: &EncodeTable,
        classes: &[u8],
        values: &[L::Le],
        states: &mut [u32; STEP],
        words: &mut ReverseWriter<'_>,
    ) -> usize {
        assert!(classes.len() == values.len() && classes.len().is_multiple_of(count));
        match (self.0, count) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Isa::Avx512, GROUP) if L::BYTES <= 4 => unsafe { avx512::encode_steps::<L, 1>(table, classes, values, states, words) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Isa::Avx512, STEP) if L::BYTES <= 4 => unsafe { avx512::encode_steps::<L, 2>(table, classes, values, states, words) },
            _ => classes.len(),
        }
    }

    /// Computes the key of each row in a class: `cost << CLASS_BITS | class`. The cost of a row is the sum of its counts, each times
    /// the cost of its token. `costs` has the costs in the class, below 2^14. There are 16 keys per block, one per row.
    ///
    /// # Panics
    /// If a key or the cost of a token is missing, or if the class has too many bits.
    pub fn keys(self, counts: &CountTiles, costs: &[[u16; TILE_TOKENS]], class: u8, keys: &mut [[u64; ROWS]]) {
        assert!(keys.len() == counts.blocks() && counts.longest <= costs.len() && class < 1 << CLASS_BITS);
        debug_assert!(costs.as_flattened().iter().all(|&cost| cost < 1 << 14));
        match self.0 {
            Isa::Scalar => scalar::keys(counts, costs, class, keys),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: both variants are made only in `available`, after it has detected all features that the function enables.
            Isa::Avx2 | Isa::Avx512 => unsafe { avx2::keys(counts, costs, class, keys) },
        }
    }

    /// Decodes steps of `count` lanes, 16 or 32, with `classes` from 0 to 15, to values of at most 32 bits. All streams have the
    /// same number of steps.
    ///
    /// A step depends on the step before it. With two streams, vector code alternates between their steps, and the processor
    /// decodes a step of one stream while it waits for the other. AVX-512 code also requests lines of `prefetch` meanwhile.
    ///
    /// `table` has all slots of classes 0 to 15, and allows at most the tokens of lanes of type `L`. The scalar platform does not
    /// implement this function.
    ///
    /// # Errors
    /// A missing word, or a value with too many bits. States and output are then undefined.
    ///
    /// # Panics
    /// If the lengths do not match, for lanes of 8 bytes, or on the scalar platform.
    #[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "only vector code uses them"))]
    pub fn decode_steps<L: Lane, const STREAMS: usize>(
        self,
        count: usize,
        table: DecodeTable<'_>,
        streams: [StreamSteps<'_, '_, L::Le>; STREAMS],
        prefetch: Option<Prefetch<'_>>,
    ) -> Result<(), Fault> {
        let DecodeTable { entries, tokens } = table;
        assert!(entries.len() == 16 << SLOTS_LOG2 && tokens <= TOKENS_32 && (count == GROUP || count == STEP) && L::BYTES <= 4);
        for StreamSteps { classes, values, changed, .. } in &streams {
            assert!(classes.len().is_multiple_of(count) && classes.len() == streams[0].classes.len());
            assert!(classes.len() == values.len() && classes.len() == GROUP * changed.len());
        }
        let tokens = tokens as u32;
        match (self.0, count) {
            (Isa::Scalar, _) => unreachable!("the scalar platform decodes lane by lane"),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Isa::Avx2, GROUP) => unsafe { avx2::decode_steps::<L, 1, STREAMS>(entries, tokens, streams) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Isa::Avx2, _) => unsafe { avx2::decode_steps::<L, 2, STREAMS>(entries, tokens, streams) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Isa::Avx512, GROUP) => unsafe { avx512::decode_steps::<L, 1, STREAMS>(entries, tokens, streams, prefetch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `compact`.
            (Isa::Avx512, _) => unsafe { avx512::decode_steps::<L, 2, STREAMS>(entries, tokens, streams, prefetch) },
        }
    }
}

/// Asserts that the arguments of [`Platform::compact`] fit, for this number of half blocks.
fn assert_compact_fits(halves: usize, activities: &[u8], tiles: Tiles, out: &CompactedLanes<'_>) {
    let lanes = halves * HALF;
    assert!(halves == 2 * activities.len() && out.masks.len() == halves);
    assert!(tiles.halves.is_multiple_of(2) && tiles.step.is_power_of_two() && tiles.step <= STEP);
    // Each half block writes 64 classes and positions at the current end of the list. A padded tile has at most as many elements
    // as lanes.
    assert!(out.classes.len() >= lanes + HALF && (out.positions.is_empty() || out.positions.len() >= lanes + HALF));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sums::{ChunkSum, chunk_sum};
    use proptest::prelude::*;

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_enabled_feature_is_detected() {
        let platforms = [(include_str!("avx2.rs"), AVX2_FEATURES), (include_str!("avx512.rs"), AVX512_FEATURES)];
        for (source, detected) in platforms {
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
        fn bf16_lanes_compact_as_their_exponents(
            lanes in proptest::collection::vec(any::<u16>(), 2 * HALF),
            map in proptest::collection::vec(prop_oneof![Just(0u8), 0u8..16], HALF),
            lowest: u8,
        ) {
            let indexes: Vec<u8> = lanes.iter().map(|lane| ((lane >> 7) as u8).saturating_sub(lowest)).collect();
            let bytes: Vec<u8> = lanes.iter().flat_map(|lane| lane.to_le_bytes()).collect();
            let mut maps = [[0; HALF]; 4];
            maps[0].copy_from_slice(&map);
            let tiles = Tiles { halves: 2, step: 1 };
            let compact = |f: &dyn Fn(&mut CompactedLanes<'_>) -> Option<usize>| {
                let (mut masks, mut classes, mut positions) = ([0; 2], [0; 3 * HALF], [0; 3 * HALF]);
                let mut out = CompactedLanes { masks: &mut masks, classes: &mut classes, positions: &mut positions };
                f(&mut out).map(|count| (masks, classes[..count].to_vec(), positions[..count].to_vec()))
            };
            let expected =
                compact(&|out| Some(Platform::SCALAR.compact(indexes.as_chunks().0, &[0], &maps, tiles, 1000, out)));
            for platform in Platform::available() {
                let found = compact(&|out| platform.compact_bf16(bytes.as_chunks().0, lowest, &[0], &maps, tiles, 1000, None, out));
                prop_assert!(found.is_none() || found == expected, "{:?}", platform);
            }
        }

        #[test]
        fn packing_is_the_same_on_every_platform(lanes in proptest::collection::vec(any::<u64>(), HALF), mask: u64) {
            fn check<L: Lane>(lanes: &[u64], mask: u64) {
                let lanes: [L::Le; HALF] = core::array::from_fn(|i| L::from_u64(lanes[i]).store());
                for platform in Platform::available() {
                    let mut out = [L::default().store(); HALF];
                    platform.pack::<L>(&lanes, mask, &mut out);
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
        fn pieces_are_copied_and_summed_on_every_platform(bytes in proptest::collection::vec(any::<u8>(), PIECE)) {
            let from: &[u8; PIECE] = bytes.first_chunk().unwrap();
            for platform in Platform::available() {
                let mut to = [0; PIECE];
                let mut sum = ChunkSum::default();
                sum.add_inner_sums(&platform.copy_piece(from, &mut to));
                prop_assert_eq!(sum.value, chunk_sum(from));
                prop_assert!(to == *from);
            }
        }

        #[test]
        fn streaming_copies_to_any_address(bytes in proptest::collection::vec(any::<u8>(), 0..500), start in 0usize..64) {
            for platform in Platform::available() {
                let mut out = vec![0xA5; start + bytes.len() + 1];
                platform.stream(&bytes, &mut out[start..start + bytes.len()], &StreamFence);
                prop_assert_eq!(&out[start..start + bytes.len()], &bytes);
                prop_assert!(out[..start].iter().chain(out.last()).all(|&byte| byte == 0xA5));
            }
        }

        #[test]
        fn differing_is_the_same_on_every_platform(
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
            for platform in Platform::available() {
                let mut masks = vec![7; expected.len()];
                platform.differ(width, &base, &target, &mut masks);
                prop_assert_eq!(&masks, &expected, "{:?}", platform);
            }
        }

        #[test]
        fn keys_are_the_same_on_every_platform(
            rows in proptest::collection::vec(
                proptest::collection::vec(prop_oneof![Just(0u32), 0u32..100, 0u32..1 << 16, any::<u32>(), Just(u32::MAX)], 0..40), 0..40),
            costs in proptest::collection::vec(prop_oneof![0u16..1 << 14, Just((1 << 14) - 1)], 40),
            class in 0u8..16,
        ) {
            let mut counts = CountTiles::default();
            for block in rows.chunks(ROWS) {
                counts.push(&block.iter().map(|row| &row[..]).collect::<Vec<_>>());
            }
            let cost = |row: &Vec<u32>| row.iter().zip(&costs).map(|(&count, &cost)| u64::from(count) * u64::from(cost)).sum::<u64>();
            let expected: Vec<u64> = rows.iter().map(|row| cost(row) << CLASS_BITS | u64::from(class)).collect();
            for platform in Platform::available() {
                let mut keys = vec![[7; ROWS]; rows.len().div_ceil(ROWS)];
                platform.keys(&counts, costs.as_chunks().0, class, &mut keys);
                prop_assert_eq!(&keys.as_flattened()[..rows.len()], &expected, "{:?}", platform);
                prop_assert!(keys.as_flattened()[rows.len()..].iter().all(|&key| key == u64::from(class)), "{:?}", platform);
            }
        }

        #[test]
        fn compacting_is_the_same_on_every_platform(
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
            let results = Platform::available().into_iter().map(|platform| {
                let (mut masks, mut classes, mut positions) = ([0; 4], [0; 5 * HALF], [0; 5 * HALF]);
                let mut out = CompactedLanes { masks: &mut masks, classes: &mut classes, positions: &mut positions };
                let count = platform.compact(indexes, &[0, 1], &maps, tiles, 1000, &mut out);
                let positions: Vec<u32> = classes.iter().zip(positions).map(|(&class, at)| if class == 0 { 0 } else { at }).collect();
                (masks, classes[..count].to_vec(), positions[..count].to_vec())
            });
            let results: Vec<_> = results.collect();
            let (masks, classes, positions) = &results[0];
            let mut found = classes.iter().zip(positions);
            let mut taken = 0;
            for (i, &index) in indexes.as_flattened().iter().enumerate() {
                if i % (tiles.halves * HALF) == 0 {
                    let filled = found.by_ref().take(tiles.padded_len(taken) - taken);
                    prop_assert!(filled.eq(core::iter::repeat_n((&0, &0), tiles.padded_len(taken) - taken)));
                    taken = 0;
                }
                let class = maps[i / 128].get(usize::from(index)).copied().unwrap_or(0);
                prop_assert_eq!(masks[i / 64] >> (i % 64) & 1 == 1, class != 0);
                if class != 0 {
                    prop_assert_eq!(found.next(), Some((&class, &(1000 + i as u32))));
                    taken += 1;
                }
            }
            prop_assert!(found.eq(core::iter::repeat_n((&0, &0), tiles.padded_len(taken) - taken)));
            for other in &results {
                prop_assert_eq!(other, &results[0]);
            }
        }
    }
}
