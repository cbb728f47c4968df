//! Inner loops with AVX2 and BMI2.

use super::types::{
    CLASS_BITS, CompactedLanes, CountTile, CountTiles, DIGIT_BITS, DIRECT, EXTRA_BIAS, Entry, Fault, GROUP, HALF, ROWS,
    StreamSteps, TILE_TOKENS, Tiles, Words,
};
use crate::lane::Lane;
use core::arch::x86_64::*;

/// See [`super::Platform::compact`].
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub(super) fn compact(
    indexes: &[[u8; HALF]],
    activities: &[u8],
    maps: &[[u8; HALF]; 4],
    tiles: Tiles,
    first: u32,
    out: &mut CompactedLanes<'_>,
) -> usize {
    let (mut start, mut count, mut left) = (0, 0, tiles.halves);
    for (h, indexes) in indexes.iter().enumerate() {
        if left == 0 {
            count = out.end_tile(tiles, start, count);
            (start, left) = (count, tiles.halves);
        }
        left -= 1;
        let (mask, classes) = look_up_classes(indexes, &maps[usize::from(activities[h / 2] & 3)]);
        out.masks[h] = mask;
        let mut at = count;
        for (group, classes) in classes.as_chunks::<8>().0.iter().enumerate() {
            // Writes eight bytes. The next group overwrites the bytes after the coded lanes.
            let coded = mask >> (8 * group) & 0xFF;
            let bytes = _pdep_u64(coded, 0x0101_0101_0101_0101) * 0xFF;
            let packed = _pext_u64(u64::from_le_bytes(*classes), bytes);
            let Some(slots) = out.classes[at..].first_chunk_mut() else { return count };
            *slots = packed.to_le_bytes();
            at += coded.count_ones() as usize;
        }
        if let Some(slots) = out.positions.get_mut(count..at) {
            let mut left = mask;
            for position in slots {
                *position = first + (h * HALF) as u32 + left.trailing_zeros();
                left &= left.wrapping_sub(1);
            }
        }
        count = at;
    }
    out.end_tile(tiles, start, count)
}

/// Returns the classes of 64 lanes, and the mask of lanes whose class is not 0.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up_classes(indexes: &[u8; HALF], map: &[u8; HALF]) -> (u64, [u8; HALF]) {
    let mut classes = [0; HALF];
    let mut mask = 0u64;
    for half in 0..2 {
        // SAFETY: `indexes` has 64 bytes, so 32 from byte 0 or 32 on are in bounds; unaligned access is allowed.
        let index = unsafe { _mm256_loadu_si256(indexes.as_ptr().add(32 * half).cast()) };
        let quarter = _mm256_and_si256(_mm256_srli_epi16::<4>(index), _mm256_set1_epi8(0xF));
        let mut class = _mm256_setzero_si256();
        for q in 0..4 {
            // SAFETY: `map` has 64 bytes, so 16 from byte 0, 16, 32 or 48 on are in bounds.
            let part = unsafe { _mm_loadu_si128(map.as_ptr().add(16 * q).cast()) };
            // A shuffle uses the low four bits of an index. The comparison selects the quarter of the map that the other bits
            // give.
            let entry = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(part), _mm256_and_si256(index, _mm256_set1_epi8(0xF)));
            let here = _mm256_cmpeq_epi8(quarter, _mm256_set1_epi8(q as i8));
            class = _mm256_or_si256(class, _mm256_and_si256(entry, here));
        }
        let coded = _mm256_cmpgt_epi8(class, _mm256_setzero_si256());
        mask |= u64::from(_mm256_movemask_epi8(coded) as u32) << (32 * half);
        // SAFETY: `classes` has 64 bytes.
        unsafe { _mm256_storeu_si256(classes.as_mut_ptr().add(32 * half).cast(), class) };
    }
    (mask, classes)
}

/// See [`super::Platform::differ`]. The lanes fill all masks, 64 lanes each. The masks must be zero before the call.
#[target_feature(enable = "avx2,bmi2")]
pub(super) fn differ(width: usize, base: &[u8], target: &[u8], masks: &mut [u64]) {
    let load = |bytes: &[u8; 32]| {
        // SAFETY: the reference is to 32 bytes; unaligned access is allowed.
        unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
    };
    let (mut lanes, mut done) = (0, 0);
    for (base, target) in base.as_chunks().0.iter().zip(target.as_chunks().0) {
        let (base, target) = (load(base), load(target));
        // The comparison gives one bit per byte, equal for all bytes of a lane. One bit per lane is kept.
        let (equal, one) = match width {
            1 => (_mm256_cmpeq_epi8(base, target), u32::MAX),
            2 => (_mm256_cmpeq_epi16(base, target), 0x5555_5555),
            4 => (_mm256_cmpeq_epi32(base, target), 0x1111_1111),
            _ => (_mm256_cmpeq_epi64(base, target), 0x0101_0101),
        };
        masks[done] |= u64::from(_pext_u32(!_mm256_movemask_epi8(equal) as u32, one)) << lanes;
        lanes += 32 / width;
        if lanes == 64 {
            (lanes, done) = (0, done + 1);
        }
    }
}

/// See [`super::Platform::keys`].
#[target_feature(enable = "avx2")]
pub(super) fn keys(counts: &CountTiles, costs: &[[u16; TILE_TOKENS]], class: u8, keys: &mut [[u64; ROWS]]) {
    let load = |pairs: &[[u16; 2]; 8]| {
        // SAFETY: the reference is to 32 bytes; unaligned access is allowed.
        unsafe { _mm256_loadu_si256(pairs.as_ptr().cast()) }
    };
    let (low, class) = (_mm256_set1_epi64x(u32::MAX.into()), _mm256_set1_epi64x(class.into()));
    let mut rest = &counts.tiles[..];
    for (lengths, keys) in counts.lengths.iter().zip(keys) {
        // Sums of four rows each.
        let mut sums = [_mm256_setzero_si256(); ROWS / 4];
        for &length in lengths {
            let (tiles, after) = rest.split_at(length);
            rest = after;
            sums = sums.map(|sum| _mm256_slli_epi64::<{ DIGIT_BITS as i32 }>(sum));
            for (CountTile(tile), costs) in tiles.iter().zip(costs) {
                // Sums of 32 bits. A sum of two products is positive, so signed arithmetic gives the same.
                let mut elements = [_mm256_setzero_si256(); 2];
                for (pairs, &[even, odd]) in tile.iter().zip(costs.as_chunks().0) {
                    let costs = _mm256_set1_epi32(i32::from(even) | i32::from(odd) << 16);
                    for (sum, pairs) in elements.iter_mut().zip(pairs.as_chunks().0) {
                        *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(load(pairs), costs));
                    }
                }
                let [first, second] = elements;
                let rows = [
                    _mm256_and_si256(first, low),
                    _mm256_and_si256(second, low),
                    _mm256_srli_epi64::<32>(first),
                    _mm256_srli_epi64::<32>(second),
                ];
                sums.iter_mut().zip(rows).for_each(|(sum, more)| *sum = _mm256_add_epi64(*sum, more));
            }
        }
        for (keys, sum) in keys.as_chunks_mut::<4>().0.iter_mut().zip(sums) {
            let of_class = _mm256_or_si256(_mm256_slli_epi64::<{ CLASS_BITS as i32 }>(sum), class);
            // SAFETY: `keys` has 32 bytes.
            unsafe { _mm256_storeu_si256(keys.as_mut_ptr().cast(), of_class) };
        }
    }
}

/// See [`super::Platform::decode_steps`]. `H` groups of 16 states per stream, two vectors each. Streams are decoded one after the
/// other: there are too few registers for two.
#[target_feature(enable = "avx2,bmi2,popcnt")]
pub(super) fn decode_steps<L: Lane, const H: usize, const STREAMS: usize>(
    entries: &[Entry],
    tokens: u32,
    streams: [StreamSteps<'_, '_, L::Le>; STREAMS],
) -> Result<(), Fault> {
    streams.into_iter().try_for_each(
        #[inline(always)]
        |stream| decode_stream::<L, H>(entries, tokens, stream),
    )
}

#[target_feature(enable = "avx2,bmi2,popcnt")]
fn decode_stream<L: Lane, const H: usize>(entries: &[Entry], tokens: u32, stream: StreamSteps<'_, '_, L::Le>) -> Result<(), Fault> {
    let StreamSteps { words, states, classes, values, changed } = stream;
    let (classes, values) = (classes.as_chunks::<GROUP>().0, values.as_chunks_mut::<GROUP>().0);
    let zero = _mm256_setzero_si256();
    let mut x = [[zero; 2]; H];
    for (x, states) in x.as_flattened_mut().iter_mut().zip(states.as_chunks().0) {
        *x = load_words(states);
    }
    let low = _mm256_set1_epi32(0xFFF);
    let last_direct = _mm256_set1_epi32(DIRECT as i32 - 1);
    for ((classes, values), changed) in
        classes.as_chunks::<H>().0.iter().zip(values.as_chunks_mut::<H>().0).zip(changed.as_chunks_mut::<H>().0)
    {
        let mut token = [[zero; 2]; H];
        let mut wide = zero;
        for h in 0..H {
            changed[h] = 0;
            for (half, classes) in classes[h].as_chunks::<8>().0.iter().enumerate() {
                // SAFETY: the reference is to 8 bytes; unaligned access is allowed.
                let class = _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(classes.as_ptr().cast()) });
                let state = x[h][half];
                let slot = _mm256_and_si256(state, low);
                let at = _mm256_or_si256(_mm256_slli_epi32::<12>(_mm256_and_si256(class, _mm256_set1_epi32(15))), slot);
                // SAFETY: class and slot have 4 and 12 bits, and the caller has checked that there are 2^16 entries.
                let entry = unsafe { _mm256_i32gather_epi32::<4>(entries.as_ptr().cast(), at) };
                let tokens_of_half = _mm256_srli_epi32::<24>(entry);
                token[h][half] = tokens_of_half;
                let unchanged = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(tokens_of_half, zero)));
                changed[h] |= (!unchanged as u16 & 0xFF) << (8 * half);
                wide = _mm256_or_si256(wide, _mm256_cmpgt_epi32(tokens_of_half, last_direct));
                let beyond = _mm256_cmpgt_epi32(tokens_of_half, _mm256_set1_epi32(tokens as i32 - 1));
                if _mm256_testz_si256(beyond, beyond) == 0 {
                    return Err(Fault::Value);
                }
                let frequency_minus_1 = _mm256_and_si256(_mm256_srli_epi32::<12>(entry), low);
                let quotient = _mm256_srli_epi32::<12>(state);
                let scaled = _mm256_add_epi32(_mm256_mullo_epi32(frequency_minus_1, quotient), quotient);
                let next = _mm256_add_epi32(scaled, _mm256_sub_epi32(slot, _mm256_and_si256(entry, low)));
                x[h][half] = renormalize(next, words)?;
            }
        }
        if _mm256_testz_si256(wide, wide) == 0 {
            decode_bits(&mut x, &mut token, words)?;
        }
        for (values, token) in values.as_flattened_mut().as_chunks_mut::<8>().0.iter_mut().zip(token.as_flattened()) {
            let mut words = [0; 8];
            store_words(&mut words, *token);
            values.iter_mut().zip(words).for_each(|(value, word)| *value = L::from_u64(word.into()).store());
        }
    }
    for (states, x) in states.as_chunks_mut().0.iter_mut().zip(x.as_flattened()) {
        store_words(states, *x);
    }
    Ok(())
}

/// Replaces tokens by their values: adds the extra bits of those that have some.
#[inline]
#[target_feature(enable = "avx2,bmi2,popcnt")]
fn decode_bits<const H: usize>(
    x: &mut [[__m256i; 2]; H],
    token: &mut [[__m256i; 2]; H],
    words: &mut Words<'_>,
) -> Result<(), Fault> {
    let zero = _mm256_setzero_si256();
    let last_direct = _mm256_set1_epi32(DIRECT as i32 - 1);
    let (x, token) = (x.as_flattened_mut(), token.as_flattened_mut());
    let mut left = [[zero; 2]; H];
    let left = left.as_flattened_mut();
    for (token, left) in token.iter_mut().zip(&mut *left) {
        let is_wide = _mm256_cmpgt_epi32(*token, last_direct);
        let extra = _mm256_sub_epi32(_mm256_srli_epi32::<1>(*token), _mm256_set1_epi32(EXTRA_BIAS as i32));
        *left = _mm256_and_si256(is_wide, extra);
        let head = _mm256_add_epi32(_mm256_and_si256(*token, _mm256_set1_epi32(1)), _mm256_set1_epi32(2));
        *token = _mm256_blendv_epi8(*token, _mm256_sllv_epi32(head, *left), is_wide);
    }
    let mut done = zero;
    while left.iter().any(|&left| _mm256_testz_si256(left, left) == 0) {
        for ((x, token), left) in x.iter_mut().zip(&mut *token).zip(&mut *left) {
            let bit_count = _mm256_min_epu32(*left, _mm256_set1_epi32(16));
            let bits = _mm256_andnot_si256(_mm256_sllv_epi32(_mm256_set1_epi32(-1), bit_count), *x);
            *token = _mm256_or_si256(*token, _mm256_sllv_epi32(bits, done));
            *left = _mm256_sub_epi32(*left, bit_count);
            *x = renormalize(_mm256_srlv_epi32(*x, bit_count), words)?;
        }
        done = _mm256_add_epi32(done, _mm256_set1_epi32(16));
    }
    Ok(())
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_words(words: &[u32; 8]) -> __m256i {
    // SAFETY: the reference is to 32 bytes; unaligned access is allowed.
    unsafe { _mm256_loadu_si256(words.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store_words(words: &mut [u32; 8], vector: __m256i) {
    // SAFETY: the reference is to 32 bytes; unaligned access is allowed.
    unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), vector) };
}

/// `EXPAND[mask][i]`: index of the word that lane `i` reads. It equals the number of set bits of the mask below bit `i`.
static EXPAND: [[u8; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut i, mut count) = (0, 0);
        while i < 8 {
            table[mask][i] = count;
            count += (mask >> i & 1) as u8;
            i += 1;
        }
        mask += 1;
    }
    table
};

/// [`Words::renormalize`] for 8 states, in order.
#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn renormalize(x: __m256i, words: &mut Words<'_>) -> Result<__m256i, Fault> {
    let needs_word = _mm256_cmpeq_epi32(_mm256_srli_epi32::<16>(x), _mm256_setzero_si256());
    let mask = _mm256_movemask_ps(_mm256_castsi256_ps(needs_word)) as usize;
    if mask == 0 {
        return Ok(x);
    }
    let mut next = [[0; 2]; 8];
    let rest = &words.words[words.read..];
    match rest.first_chunk::<8>() {
        Some(words) => next = *words,
        None => next[..rest.len()].copy_from_slice(rest),
    }
    let count = mask.count_ones() as usize;
    if count > rest.len() {
        return Err(Fault::Short);
    }
    words.read += count;
    // SAFETY: `next` has 16 bytes and a row of `EXPAND` has 8; unaligned access is allowed.
    let (next, order) = unsafe { (_mm_loadu_si128(next.as_ptr().cast()), _mm_loadl_epi64(EXPAND[mask].as_ptr().cast())) };
    let next = _mm256_permutevar8x32_epi32(_mm256_cvtepu16_epi32(next), _mm256_cvtepu8_epi32(order));
    Ok(_mm256_blendv_epi8(x, _mm256_or_si256(_mm256_slli_epi32::<16>(x), next), needs_word))
}
