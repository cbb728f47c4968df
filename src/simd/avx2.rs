//! AVX2 with BMI2.

use super::{Broken, Rows, STEP, Words};
use std::arch::x86_64::*;

/// See [`super::Path::compact`].
#[inline]
#[target_feature(enable = "avx2,bmi2,popcnt")]
pub(super) fn compact(indexes: &[u8; 64], map: &[u8; 64], out: &mut [u8; 64]) -> u64 {
    let mut classes = [0; 64];
    let mut mask = 0u64;
    for half in 0..2 {
        // SAFETY: `indexes` has 64 bytes, so 32 from byte 0 or 32 on are in bounds; no alignment is asked for.
        let index = unsafe { _mm256_loadu_si256(indexes.as_ptr().add(32 * half).cast()) };
        let quarter = _mm256_and_si256(_mm256_srli_epi16::<4>(index), _mm256_set1_epi8(0xF));
        let mut class = _mm256_setzero_si256();
        for q in 0..4 {
            // SAFETY: `map` has 64 bytes, so 16 from byte 0, 16, 32 or 48 on are in bounds.
            let part = unsafe { _mm_loadu_si128(map.as_ptr().add(16 * q).cast()) };
            // A shuffle looks at the low four bits and gives 0 where the top bit is set, so the comparison selects the rest.
            let found = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(part), _mm256_and_si256(index, _mm256_set1_epi8(0xF)));
            let here = _mm256_cmpeq_epi8(quarter, _mm256_set1_epi8(q as i8));
            class = _mm256_or_si256(class, _mm256_and_si256(found, here));
        }
        let coded = _mm256_cmpgt_epi8(class, _mm256_setzero_si256());
        mask |= u64::from(_mm256_movemask_epi8(coded) as u32) << (32 * half);
        // SAFETY: `classes` has 64 bytes.
        unsafe { _mm256_storeu_si256(classes.as_mut_ptr().add(32 * half).cast(), class) };
    }
    if mask == u64::MAX {
        *out = classes;
        return mask;
    }
    // Eight lanes at a time; each group writes eight bytes, of which the next group overwrites what is no class.
    let mut at = 0;
    let mut spread = [0; 72];
    for (group, classes) in classes.as_chunks::<8>().0.iter().enumerate() {
        let coded = mask >> (8 * group) & 0xFF;
        let bytes = _pdep_u64(coded, 0x0101_0101_0101_0101) * 0xFF;
        let packed = _pext_u64(u64::from_le_bytes(*classes), bytes);
        spread[at..at + 8].copy_from_slice(&packed.to_le_bytes());
        at += coded.count_ones() as usize;
    }
    out.copy_from_slice(&spread[..64]);
    mask
}

/// See [`super::Path::decode_steps`].
#[target_feature(enable = "avx2,bmi2,popcnt")]
pub(super) fn decode_steps(
    rows: &Rows,
    tokens: u32,
    words: &mut Words<'_>,
    states: &mut [u32; STEP],
    classes: &[[u8; STEP]],
    values: &mut [[u32; STEP]],
) -> Result<(), Broken> {
    let zero = _mm256_setzero_si256();
    let mut x = [zero; 4];
    for (h, x) in x.iter_mut().enumerate() {
        // SAFETY: `states` has 32 words, so 8 from word 8·h on are in bounds for h below 4; no alignment is asked for.
        *x = unsafe { _mm256_loadu_si256(states.as_ptr().add(8 * h).cast()) };
    }
    let slots = _mm256_set1_epi32(0xFFF);
    for (classes, values) in classes.iter().zip(values) {
        let mut token = [zero; 4];
        let mut wide = zero;
        for h in 0..4 {
            // SAFETY: `classes` has 32 bytes, so 8 from byte 8·h on are in bounds for h below 4.
            let class = _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(classes.as_ptr().add(8 * h).cast()) });
            let slot = _mm256_and_si256(x[h], slots);
            let (found, start, end) = find(rows, class, slot);
            token[h] = found;
            wide = _mm256_or_si256(wide, _mm256_cmpgt_epi32(found, _mm256_set1_epi32(15)));
            let beyond = _mm256_cmpgt_epi32(found, _mm256_set1_epi32(tokens as i32 - 1));
            if _mm256_testz_si256(beyond, beyond) == 0 {
                return Err(Broken::Value);
            }
            let frequency = _mm256_sub_epi32(end, start);
            let scaled = _mm256_mullo_epi32(frequency, _mm256_srli_epi32::<12>(x[h]));
            x[h] = renormalize(_mm256_add_epi32(scaled, _mm256_sub_epi32(slot, start)), words)?;
        }
        let mut value = token;
        if _mm256_testz_si256(wide, wide) == 0 {
            let mut left = [zero; 4];
            for h in 0..4 {
                let is_wide = _mm256_cmpgt_epi32(token[h], _mm256_set1_epi32(15));
                let extra = _mm256_sub_epi32(_mm256_srli_epi32::<1>(token[h]), _mm256_set1_epi32(5));
                left[h] = _mm256_and_si256(is_wide, extra);
                let head = _mm256_add_epi32(_mm256_and_si256(token[h], _mm256_set1_epi32(1)), _mm256_set1_epi32(2));
                value[h] = _mm256_blendv_epi8(value[h], _mm256_sllv_epi32(head, left[h]), is_wide);
            }
            let mut done = zero;
            loop {
                let any = _mm256_or_si256(_mm256_or_si256(left[0], left[1]), _mm256_or_si256(left[2], left[3]));
                if _mm256_testz_si256(any, any) == 1 {
                    break;
                }
                for h in 0..4 {
                    let now = _mm256_min_epu32(left[h], _mm256_set1_epi32(16));
                    let bits = _mm256_andnot_si256(_mm256_sllv_epi32(_mm256_set1_epi32(-1), now), x[h]);
                    value[h] = _mm256_or_si256(value[h], _mm256_sllv_epi32(bits, done));
                    left[h] = _mm256_sub_epi32(left[h], now);
                    x[h] = renormalize(_mm256_srlv_epi32(x[h], now), words)?;
                }
                done = _mm256_add_epi32(done, _mm256_set1_epi32(16));
            }
        }
        for h in 0..4 {
            // SAFETY: `values` has 32 words, so 8 from word 8·h on are in bounds for h below 4.
            unsafe { _mm256_storeu_si256(values.as_mut_ptr().add(8 * h).cast(), value[h]) };
        }
    }
    for h in 0..4 {
        // SAFETY: as at the load.
        unsafe { _mm256_storeu_si256(states.as_mut_ptr().add(8 * h).cast(), x[h]) };
    }
    Ok(())
}

/// Token of each slot, and where its slots start and end.
#[inline]
#[target_feature(enable = "avx2")]
fn find(rows: &Rows, class: __m256i, slot: __m256i) -> (__m256i, __m256i, __m256i) {
    let mut token = _mm256_setzero_si256();
    let mut start = _mm256_setzero_si256();
    let mut end = look_up(&rows[0], class);
    for next in &rows[1..] {
        let within = _mm256_cmpgt_epi32(end, slot);
        if _mm256_movemask_epi8(within) == -1 {
            break;
        }
        // The mask is −1 where the slot lies past the end: subtracting it adds one.
        let past = _mm256_xor_si256(within, _mm256_set1_epi32(-1));
        token = _mm256_sub_epi32(token, past);
        start = _mm256_blendv_epi8(start, end, past);
        end = _mm256_blendv_epi8(end, look_up(next, class), past);
    }
    (token, start, end)
}

/// `row[class]` of each lane.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up(row: &[u32; 16], class: __m256i) -> __m256i {
    // SAFETY: `row` has 64 bytes; no alignment is asked for.
    let (low, high) = unsafe { (_mm256_loadu_si256(row.as_ptr().cast()), _mm256_loadu_si256(row.as_ptr().add(8).cast())) };
    let (low, high) = (_mm256_permutevar8x32_epi32(low, class), _mm256_permutevar8x32_epi32(high, class));
    // Bit 3 of the class, moved to the sign, selects the half.
    let high_half = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(class));
    _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high), high_half))
}

/// `EXPAND[mask][i]`: which of the next words lane `i` takes: as many as there are bits of the mask below it.
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

/// [`Words::renormalize`] of 8 states in order.
#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn renormalize(x: __m256i, words: &mut Words<'_>) -> Result<__m256i, Broken> {
    let needy = _mm256_cmpeq_epi32(_mm256_srli_epi32::<16>(x), _mm256_setzero_si256());
    let mask = _mm256_movemask_ps(_mm256_castsi256_ps(needy)) as usize;
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
        return Err(Broken::Short);
    }
    words.read += count;
    // SAFETY: `next` has 16 bytes and a row of `EXPAND` has 8; no alignment is asked for.
    let (next, order) = unsafe { (_mm_loadu_si128(next.as_ptr().cast()), _mm_loadl_epi64(EXPAND[mask].as_ptr().cast())) };
    let next = _mm256_permutevar8x32_epi32(_mm256_cvtepu16_epi32(next), _mm256_cvtepu8_epi32(order));
    Ok(_mm256_blendv_epi8(x, _mm256_or_si256(_mm256_slli_epi32::<16>(x), next), needy))
}
