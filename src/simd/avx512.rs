//! AVX-512 with VBMI and VBMI2.

use super::{Broken, Rows, STEP, Words};
use std::arch::x86_64::*;

/// See [`super::Path::compact`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
pub(super) fn compact(indexes: &[u8; 64], map: &[u8; 64], out: &mut [u8; 64]) -> u64 {
    // SAFETY: the references are to 64 bytes, and the instructions ask for no alignment.
    let (indexes, map) = unsafe { (_mm512_loadu_epi8(indexes.as_ptr().cast()), _mm512_loadu_epi8(map.as_ptr().cast())) };
    let within = _mm512_cmplt_epu8_mask(indexes, _mm512_set1_epi8(64));
    let classes = _mm512_permutexvar_epi8(indexes, map);
    let mask = _mm512_mask_test_epi8_mask(within, classes, classes);
    // SAFETY: as above; compressing in a register and storing all of it is faster than a compressing store.
    unsafe { _mm512_storeu_epi8(out.as_mut_ptr().cast(), _mm512_maskz_compress_epi8(mask, classes)) };
    mask
}

/// See [`super::Path::decode_steps`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2,popcnt")]
pub(super) fn decode_steps(
    rows: &Rows,
    tokens: u32,
    words: &mut Words<'_>,
    states: &mut [u32; STEP],
    classes: &[[u8; STEP]],
    values: &mut [[u32; STEP]],
) -> Result<(), Broken> {
    let load = |half: &[u32]| {
        _mm512_setr_epi32(
            half[0] as i32,
            half[1] as i32,
            half[2] as i32,
            half[3] as i32,
            half[4] as i32,
            half[5] as i32,
            half[6] as i32,
            half[7] as i32,
            half[8] as i32,
            half[9] as i32,
            half[10] as i32,
            half[11] as i32,
            half[12] as i32,
            half[13] as i32,
            half[14] as i32,
            half[15] as i32,
        )
    };
    let mut x = [load(&states[..16]), load(&states[16..])];
    let direct = _mm512_set1_epi32(16);
    let most = _mm512_set1_epi32(tokens as i32 - 1);
    let mut read = words.read;
    for (classes, values) in classes.iter().zip(values) {
        let mut token = [_mm512_setzero_si512(); 2];
        let mut wide = [0; 2];
        let mut symbols = [(_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()); 2];
        for h in 0..2 {
            // SAFETY: `classes` has 32 bytes, so 16 from byte 0 or 16 on are in bounds; no alignment is asked for.
            let class = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(classes.as_ptr().add(16 * h).cast()) });
            symbols[h] = find(rows, class, _mm512_and_si512(x[h], _mm512_set1_epi32(0xFFF)));
        }
        for h in 0..2 {
            let (found, start, end) = symbols[h];
            let slot = _mm512_and_si512(x[h], _mm512_set1_epi32(0xFFF));
            token[h] = found;
            wide[h] = _mm512_cmpge_epu32_mask(found, direct);
            if _mm512_cmpgt_epu32_mask(found, most) != 0 {
                return Err(Broken::Value);
            }
            let frequency = _mm512_sub_epi32(end, start);
            let quotient = _mm512_srli_epi32::<12>(x[h]);
            let next = _mm512_add_epi32(_mm512_mullo_epi32(frequency, quotient), _mm512_sub_epi32(slot, start));
            x[h] = renormalize(next, words.words, &mut read)?;
        }
        if wide[0] | wide[1] == 0 {
            store(values, token);
            continue;
        }
        // Where a token has no extra bits, the number of them is 0 and the value is the token.
        let mut left = [_mm512_setzero_si512(); 2];
        let mut value = token;
        for h in 0..2 {
            let extra = _mm512_sub_epi32(_mm512_srli_epi32::<1>(token[h]), _mm512_set1_epi32(5));
            left[h] = _mm512_maskz_mov_epi32(wide[h], extra);
            let head = _mm512_add_epi32(_mm512_and_si512(token[h], _mm512_set1_epi32(1)), _mm512_set1_epi32(2));
            value[h] = _mm512_mask_sllv_epi32(value[h], wide[h], head, extra);
        }
        let mut done = _mm512_setzero_si512();
        while _mm512_test_epi32_mask(_mm512_or_si512(left[0], left[1]), _mm512_or_si512(left[0], left[1])) != 0 {
            for h in 0..2 {
                let now = _mm512_min_epu32(left[h], direct);
                let bits = _mm512_andnot_si512(_mm512_sllv_epi32(_mm512_set1_epi32(-1), now), x[h]);
                value[h] = _mm512_or_si512(value[h], _mm512_sllv_epi32(bits, done));
                left[h] = _mm512_sub_epi32(left[h], now);
                x[h] = renormalize(_mm512_srlv_epi32(x[h], now), words.words, &mut read)?;
            }
            done = _mm512_add_epi32(done, direct);
        }
        store(values, value);
    }
    words.read = read;
    for h in 0..2 {
        // SAFETY: `states` has 32 words, so 16 from word 0 or 16 on are in bounds; no alignment is asked for.
        unsafe { _mm512_storeu_epi32(states.as_mut_ptr().add(16 * h).cast(), x[h]) };
    }
    Ok(())
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(values: &mut [u32; STEP], vectors: [__m512i; 2]) {
    // SAFETY: `values` has 32 words; no alignment is asked for.
    unsafe {
        _mm512_storeu_epi32(values.as_mut_ptr().cast(), vectors[0]);
        _mm512_storeu_epi32(values.as_mut_ptr().add(16).cast(), vectors[1]);
    }
}

/// Token of each slot, and where its slots start and end. A search from the most frequent tokens on, which are few, beats
/// gathering from a table of slots.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn find(rows: &Rows, class: __m512i, slot: __m512i) -> (__m512i, __m512i, __m512i) {
    let one = _mm512_set1_epi32(1);
    let mut token = _mm512_setzero_si512();
    let mut start = _mm512_setzero_si512();
    let mut end = _mm512_permutexvar_epi32(class, row(&rows[0]));
    for next in &rows[1..] {
        let past = _mm512_cmpge_epu32_mask(slot, end);
        if past == 0 {
            break;
        }
        token = _mm512_mask_add_epi32(token, past, token, one);
        start = _mm512_mask_mov_epi32(start, past, end);
        end = _mm512_mask_permutexvar_epi32(end, past, class, row(next));
    }
    (token, start, end)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn row(row: &[u32; 16]) -> __m512i {
    // SAFETY: the reference is to 64 bytes; no alignment is asked for.
    unsafe { _mm512_loadu_epi32(row.as_ptr().cast()) }
}

/// [`Words::renormalize`] of 16 states in order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2,popcnt")]
fn renormalize(x: __m512i, words: &[[u8; 2]], read: &mut usize) -> Result<__m512i, Broken> {
    let needy = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(1 << 16));
    if needy == 0 {
        return Ok(x);
    }
    let count = needy.count_ones();
    let end = *read + count as usize;
    let next = words.get(*read..end).ok_or(Broken::Short)?;
    let wanted = _bzhi_u32(u32::MAX, count) as u16;
    // SAFETY: only the `count` words that `next` holds are read; the mask keeps the others from being touched.
    let next = unsafe { _mm256_maskz_loadu_epi16(wanted, next.as_ptr().cast()) };
    *read = end;
    let next = _mm512_maskz_expand_epi32(needy, _mm512_cvtepu16_epi32(next));
    Ok(_mm512_mask_or_epi32(x, needy, _mm512_slli_epi32::<16>(x), next))
}
