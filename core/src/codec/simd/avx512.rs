//! Inner loops with AVX-512, VBMI and VBMI2.

use super::types::{
    CompactedLanes, DIRECT, EXTRA_BIAS, EncodeTable, Entry, Fault, GROUP, HALF, LINE, PIECE, PIECE_ROWS, Prefetch, PrefetchedLines,
    ReverseWriter, STEP, StreamSteps, Tiles,
};
use crate::lane::Lane;
use crate::sums::{ChunkSum, Q};
use core::arch::asm;
use core::arch::x86_64::*;
use zerocopy::IntoBytes;

/// See [`super::Platform::compact`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
pub(super) fn compact(
    indexes: &[[u8; HALF]],
    activities: &[u8],
    maps: &[[u8; HALF]; 4],
    tiles: Tiles,
    first: u32,
    out: &mut CompactedLanes<'_>,
) -> usize {
    compact_halves(indexes, |half| load(half), None, activities, maps, tiles, first, out)
}

/// See [`super::Platform::compact_bf16`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
#[expect(clippy::too_many_arguments, reason = "those of `compact`, and the prefetch")]
pub(super) fn compact_bf16(
    lanes: &[[u8; 2 * HALF]],
    lowest: u8,
    activities: &[u8],
    maps: &[[u8; HALF]; 4],
    tiles: Tiles,
    first: u32,
    prefetch: Option<Prefetch<'_>>,
    out: &mut CompactedLanes<'_>,
) -> usize {
    let mut odd = [0u8; HALF];
    odd.iter_mut().enumerate().for_each(|(i, odd)| *odd = 2 * i as u8 + 1);
    let (odd, lowest) = (load(&odd), _mm512_set1_epi8(lowest as i8));
    let index_of = |half: &[u8; 2 * HALF]| {
        // After a shift by one, the exponent is the high byte of a lane.
        let [low, high] = [0, 1].map(|i| _mm512_slli_epi16::<1>(load(&half.as_chunks().0[i])));
        _mm512_subs_epu8(_mm512_permutex2var_epi8(low, odd, high), lowest)
    };
    compact_halves(lanes, index_of, prefetch, activities, maps, tiles, first, out)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
#[expect(clippy::too_many_arguments, reason = "those of `compact`, and the prefetch")]
fn compact_halves<T>(
    halves: &[T],
    index_of: impl Fn(&T) -> __m512i,
    mut prefetch: Option<Prefetch<'_>>,
    activities: &[u8],
    maps: &[[u8; HALF]; 4],
    tiles: Tiles,
    first: u32,
    out: &mut CompactedLanes<'_>,
) -> usize {
    let mut lanes = [0u8; HALF];
    lanes.iter_mut().enumerate().for_each(|(i, lane)| *lane = i as u8);
    let lanes = load(&lanes);
    let maps = maps.each_ref().map(|map| load(map));
    let (mut start, mut count, mut left) = (0, 0, tiles.halves);
    for (h, half) in halves.iter().enumerate() {
        if left == 0 {
            count = out.end_tile(tiles, start, count);
            (start, left) = (count, tiles.halves);
        }
        left -= 1;
        if let Some(prefetch) = &mut prefetch {
            request_lines(prefetch);
        }
        let index = index_of(half);
        let within = _mm512_cmplt_epu8_mask(index, _mm512_set1_epi8(64));
        let class = _mm512_permutexvar_epi8(index, maps[usize::from(activities[h / 2] & 3)]);
        let mask = _mm512_mask_test_epi8_mask(within, class, class);
        out.masks[h] = mask;
        let Some(slots) = out.classes[count..].first_chunk_mut::<HALF>() else { return count };
        // SAFETY: `slots` has 64 bytes. Compressing in a register and storing all of it is faster than a compressing store.
        unsafe { _mm512_storeu_epi8(slots.as_mut_ptr().cast(), _mm512_maskz_compress_epi8(mask, class)) };
        let more = mask.count_ones() as usize;
        if let Some(slots) = out.positions.get_mut(count..count + HALF) {
            let mut packed = _mm512_maskz_compress_epi8(mask, lanes);
            let start = _mm512_set1_epi32((first as usize + h * HALF) as i32);
            for quarter in slots.as_chunks_mut::<16>().0 {
                let positions = _mm512_add_epi32(start, _mm512_cvtepu8_epi32(_mm512_castsi512_si128(packed)));
                // SAFETY: `quarter` has 16 words.
                unsafe { _mm512_storeu_epi32(quarter.as_mut_ptr().cast(), positions) };
                packed = _mm512_shuffle_i64x2::<0b00_11_10_01>(packed, packed);
                if more <= 16 {
                    break;
                }
            }
        }
        count += more;
    }
    out.end_tile(tiles, start, count)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: the reference is to 64 bytes; unaligned access is allowed.
    unsafe { _mm512_loadu_epi8(bytes.as_ptr().cast()) }
}

/// See [`super::Platform::differ`]. The lanes fill all masks, 64 lanes each. The masks must be zero before the call.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn differ(width: usize, base: &[u8], target: &[u8], masks: &mut [u64]) {
    let vectors = base.as_chunks().0.iter().zip(target.as_chunks().0).map(|(base, target)| (load(base), load(target)));
    let (mut lanes, mut done) = (0, 0);
    for (base, target) in vectors {
        let mask = match width {
            1 => _mm512_cmpneq_epi8_mask(base, target),
            2 => _mm512_cmpneq_epi16_mask(base, target).into(),
            4 => _mm512_cmpneq_epi32_mask(base, target).into(),
            _ => _mm512_cmpneq_epi64_mask(base, target).into(),
        };
        masks[done] |= mask << lanes;
        lanes += 64 / width;
        if lanes == 64 {
            (lanes, done) = (0, done + 1);
        }
    }
}

/// See [`super::Platform::copy_piece`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn copy_piece(from: &[u8; PIECE], to: &mut [u8; PIECE]) -> [u64; PIECE_ROWS] {
    const ROW_LINES: usize = ChunkSum::BLOCK / LINE;
    let (from, to) = (from.as_chunks::<LINE>().0, to.as_chunks_mut::<LINE>().0);
    let zero = _mm512_setzero_si512();
    let mut sums = [[zero; 2]; PIECE_ROWS];
    for (column, weights) in Q.as_chunks().0.iter().enumerate() {
        let even = load_words(weights);
        let odd = _mm512_srli_epi64::<32>(even);
        // Lines of all rows alternate, so that several pages are accessed at the same time.
        for (r, sums) in sums.iter_mut().enumerate() {
            let mut words = load(&from[r * ROW_LINES + column]);
            // The compiler would otherwise copy row after row, with `memcpy`, and sum afterwards.
            // SAFETY: there is no instruction.
            unsafe { asm!("/* {} */", inout(zmm_reg) words, options(pure, nomem, nostack, preserves_flags)) };
            // SAFETY: the reference is to 64 bytes; unaligned access is allowed.
            unsafe { _mm512_storeu_epi8(to[r * ROW_LINES + column].as_mut_ptr().cast(), words) };
            sums[0] = _mm512_add_epi64(sums[0], _mm512_mul_epu32(words, even));
            sums[1] = _mm512_add_epi64(sums[1], _mm512_mul_epu32(_mm512_srli_epi64::<32>(words), odd));
        }
    }
    sums.map(|[even, odd]| _mm512_reduce_add_epi64(_mm512_add_epi64(even, odd)) as u64)
}

/// Requests the next two lines of base lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn request_lines(prefetch: &mut Prefetch<'_>) {
    let Prefetch { from, requested } = prefetch;
    for _ in 0..2 {
        let Some(line) = from.get(PrefetchedLines::offset(requested.0)) else { return };
        _mm_prefetch::<_MM_HINT_T0>(core::ptr::from_ref(line).cast());
        requested.0 += 1;
    }
}

/// See [`super::Platform::stream`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn stream(from: &[u8], to: &mut [u8]) {
    let head = to.as_ptr().align_offset(LINE).min(to.len());
    let ((from_head, from), (to_head, to)) = (from.split_at(head), to.split_at_mut(head));
    let ((from, from_tail), (to, to_tail)) = (from.as_chunks(), to.as_chunks_mut::<LINE>());
    to_head.copy_from_slice(from_head);
    to_tail.copy_from_slice(from_tail);
    for (from, to) in from.iter().zip(to) {
        // SAFETY: `to` has 64 bytes. Its address is a multiple of 64, because `head` bytes before the first line were split off,
        // and `to` is empty if no multiple of 64 was within bounds.
        unsafe { _mm512_stream_si512(to.as_mut_ptr().cast(), load(from)) };
    }
}

/// See [`super::Platform::pack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2")]
pub(super) fn pack<L: Lane>(lanes: &[L::Le; HALF], mask: u64, out: &mut [L::Le]) {
    let vectors = lanes.as_bytes().as_chunks().0;
    let out = out.as_mut_bytes();
    let (mut mask, mut done) = (mask, 0);
    for vector in vectors {
        let lanes = load(vector);
        let selected = mask & (u64::MAX >> (64 - 64 / L::BYTES));
        let packed = match L::BYTES {
            1 => _mm512_maskz_compress_epi8(selected, lanes),
            2 => _mm512_maskz_compress_epi16(selected as u32, lanes),
            4 => _mm512_maskz_compress_epi32(selected as u16, lanes),
            _ => _mm512_maskz_compress_epi64(selected as u8, lanes),
        };
        let Some(slots) = out[done..].first_chunk_mut::<64>() else { return };
        // SAFETY: `slots` has 64 bytes.
        unsafe { _mm512_storeu_epi8(slots.as_mut_ptr().cast(), packed) };
        done += L::BYTES * selected.count_ones() as usize;
        mask = mask.unbounded_shr(64 / L::BYTES as u32);
    }
}

/// See [`super::Platform::encode_steps`]. `H` vectors of 16 states.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512cd,avx512vbmi2,bmi2,popcnt")]
pub(super) fn encode_steps<L: Lane, const H: usize>(
    table: &EncodeTable,
    classes: &[u8],
    values: &[L::Le],
    states: &mut [u32; STEP],
    words: &mut ReverseWriter<'_>,
) -> usize {
    let zero = _mm512_setzero_si512();
    let mut x = [zero; H];
    for (x, states) in x.iter_mut().zip(states.as_chunks().0) {
        *x = load_words(states);
    }
    let steps = classes.as_chunks::<GROUP>().0.as_chunks::<H>().0.iter().zip(values.as_chunks::<GROUP>().0.as_chunks::<H>().0);
    let mut left = H * GROUP * steps.len();
    for (classes, values) in steps.rev() {
        let (mut value, mut extra, mut slots, mut reciprocal) = ([zero; H], [zero; H], [zero; H], [zero; H]);
        let (mut missing, mut wide, mut wider) = (0, 0, 0);
        for h in 0..H {
            value[h] = widen::<L>(&values[h]);
            let (token, direct);
            (token, extra[h], direct) = tokens_of(value[h]);
            wide |= !direct;
            wider |= _mm512_cmpgt_epu32_mask(extra[h], _mm512_set1_epi32(16));
            // SAFETY: the reference is to 16 bytes; unaligned access is allowed.
            let class = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(classes[h].as_ptr().cast()) });
            let class = _mm512_slli_epi32::<8>(_mm512_and_si512(class, _mm512_set1_epi32(15)));
            let at = _mm512_or_si512(class, token);
            // SAFETY: class and token have 4 and 8 bits (a value of 32 bits has a token below `TOKENS_32`), and there are 2^12
            // entries.
            let (first, last) = unsafe {
                let entries = table.entries.as_ptr().cast();
                (
                    _mm512_i32gather_epi64::<8>(_mm512_castsi512_si256(at), entries),
                    _mm512_i32gather_epi64::<8>(_mm512_extracti64x4_epi64::<1>(at), entries),
                )
            };
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            slots[h] = _mm512_permutex2var_epi32(first, even, last);
            reciprocal[h] = _mm512_permutex2var_epi32(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), last);
            missing |= _mm512_testn_epi32_mask(reciprocal[h], reciprocal[h]);
        }
        if missing != 0 {
            break;
        }
        if wide != 0 {
            for round in (0..1 + i32::from(wider != 0)).rev() {
                for h in (0..H).rev() {
                    x[h] = encode_bits(x[h], value[h], extra[h], 16 * round, words);
                }
            }
        }
        for h in (0..H).rev() {
            x[h] = encode_token(x[h], slots[h], reciprocal[h], words);
        }
        left -= H * GROUP;
    }
    for (x, states) in x.iter().zip(states.as_chunks_mut().0) {
        store_words(states, *x);
    }
    left
}

/// Token and number of extra bits of each value, and the values that are tokens themselves.
#[inline]
#[target_feature(enable = "avx512f,avx512cd")]
fn tokens_of(value: __m512i) -> (__m512i, __m512i, __mmask16) {
    let direct = _mm512_cmplt_epu32_mask(value, _mm512_set1_epi32(DIRECT as i32));
    if direct == u16::MAX {
        return (value, _mm512_setzero_si512(), direct);
    }
    let extra = _mm512_maskz_sub_epi32(!direct, _mm512_set1_epi32(30), _mm512_lzcnt_epi32(value));
    let top = _mm512_and_si512(_mm512_srlv_epi32(value, extra), _mm512_set1_epi32(1));
    let half = _mm512_add_epi32(extra, _mm512_set1_epi32(EXTRA_BIAS as i32));
    let token = _mm512_add_epi32(_mm512_slli_epi32::<1>(half), top);
    (_mm512_mask_mov_epi32(token, direct, value), extra, direct)
}

/// States after at most 16 of the extra bits of each value, from bit `first` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,popcnt")]
fn encode_bits(x: __m512i, value: __m512i, extra: __m512i, first: i32, words: &mut ReverseWriter<'_>) -> __m512i {
    let bits = _mm512_min_epu32(_mm512_subs_epu16(extra, _mm512_set1_epi32(first)), _mm512_set1_epi32(16));
    // A shift by 32 gives 0.
    let over = _mm512_srlv_epi32(x, _mm512_sub_epi32(_mm512_set1_epi32(32), bits));
    let shifted = renormalize_encoder(x, _mm512_test_epi32_mask(over, over), words);
    let part = _mm512_srlv_epi32(value, _mm512_set1_epi32(first));
    let part = _mm512_andnot_si512(_mm512_sllv_epi32(_mm512_set1_epi32(-1), bits), part);
    _mm512_or_si512(_mm512_sllv_epi32(shifted, bits), part)
}

/// States after tokens, given their slots and reciprocals.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,popcnt")]
fn encode_token(x: __m512i, slots: __m512i, reciprocal: __m512i, words: &mut ReverseWriter<'_>) -> __m512i {
    let one = _mm512_set1_epi32(1);
    let start = _mm512_and_si512(slots, _mm512_set1_epi32(0xFFF));
    let count = _mm512_add_epi32(_mm512_srli_epi32::<12>(slots), one);
    let full = _mm512_cmpge_epu32_mask(_mm512_srli_epi32::<20>(x), count);
    let x = renormalize_encoder(x, full, words);
    // The estimate of the quotient is at most 1 too small.
    let even = _mm512_srli_epi64::<32>(_mm512_mul_epu32(x, reciprocal));
    let odd = _mm512_mul_epu32(_mm512_srli_epi64::<32>(x), _mm512_srli_epi64::<32>(reciprocal));
    let quotient = _mm512_mask_mov_epi32(even, 0xAAAA, odd);
    let rest = _mm512_sub_epi32(x, _mm512_mullo_epi32(quotient, count));
    let more = _mm512_cmpge_epu32_mask(rest, count);
    let quotient = _mm512_mask_add_epi32(quotient, more, quotient, one);
    let rest = _mm512_mask_sub_epi32(rest, more, rest, count);
    _mm512_add_epi32(_mm512_slli_epi32::<12>(quotient), _mm512_add_epi32(rest, start))
}

/// Widens 16 lanes of at most 4 bytes to 32 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn widen<L: Lane>(lanes: &[L::Le; GROUP]) -> __m512i {
    let lanes = lanes.as_bytes();
    // SAFETY: the reference is to 16 lanes; unaligned access is allowed.
    unsafe {
        match L::BYTES {
            1 => _mm512_cvtepu8_epi32(_mm_loadu_si128(lanes.as_ptr().cast())),
            2 => _mm512_cvtepu16_epi32(_mm256_loadu_si256(lanes.as_ptr().cast())),
            _ => _mm512_loadu_epi32(lanes.as_ptr().cast()),
        }
    }
}

/// [`ReverseWriter::renormalize`] for the states in `full`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,popcnt")]
fn renormalize_encoder(x: __m512i, full: __mmask16, words: &mut ReverseWriter<'_>) -> __m512i {
    let written = full.count_ones() as usize;
    let packed = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, x));
    // Moves the words to the top of the vector and stores the whole vector, which is faster than a masked store. Later words
    // overwrite the elements below.
    let indexes = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let packed = _mm256_permutexvar_epi16(_mm256_add_epi16(indexes, _mm256_set1_epi16(written as i16)), packed);
    let slots = &mut words.words[words.next + 1 - GROUP..=words.next];
    // SAFETY: `slots` has 16 words.
    unsafe { _mm256_storeu_epi16(slots.as_mut_ptr().cast(), packed) };
    words.next -= written;
    _mm512_mask_srli_epi32::<16>(x, full, x)
}

/// See [`super::Platform::decode_steps`]. `H` vectors of 16 states per stream.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2,popcnt")]
pub(super) fn decode_steps<L: Lane, const H: usize, const STREAMS: usize>(
    entries: &[Entry],
    tokens: u32,
    mut streams: [StreamSteps<'_, '_, L::Le>; STREAMS],
    mut prefetch: Option<Prefetch<'_>>,
) -> Result<(), Fault> {
    let zero = _mm512_setzero_si512();
    let (mut x, mut read) = ([[zero; H]; STREAMS], [0; STREAMS]);
    for ((x, read), stream) in x.iter_mut().zip(&mut read).zip(&streams) {
        for (x, states) in x.iter_mut().zip(stream.states.as_chunks().0) {
            *x = load_words(states);
        }
        *read = stream.words.read;
    }
    let mut steps = streams.each_mut().map(|stream| {
        let values = stream.values.as_chunks_mut::<GROUP>().0.as_chunks_mut::<H>().0;
        let (classes, changed) = (stream.classes.as_chunks::<GROUP>().0, stream.changed.as_chunks_mut::<H>().0);
        (stream.words.words, classes.as_chunks::<H>().0, values, changed)
    });
    let direct = _mm512_set1_epi32(DIRECT as i32);
    let most_bits = _mm512_set1_epi32(16);
    let last_token = _mm512_set1_epi32(tokens as i32 - 1);
    let low = _mm512_set1_epi32(0xFFF);
    for i in 0..steps[0].1.len() {
        if let Some(prefetch) = &mut prefetch {
            request_lines(prefetch);
        }
        for ((x, read), (words, classes, values, changed)) in x.iter_mut().zip(&mut read).zip(&mut steps) {
            // The lists of all streams have the same length.
            let (Some(classes), Some(values), Some(changed)) = (classes.get(i), values.get_mut(i), changed.get_mut(i)) else {
                break;
            };
            let mut entry = [zero; H];
            for h in 0..H {
                // SAFETY: the reference is to 16 bytes; unaligned access is allowed.
                let class = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(classes[h].as_ptr().cast()) });
                let class = _mm512_slli_epi32::<12>(_mm512_and_si512(class, _mm512_set1_epi32(15)));
                let at = _mm512_or_si512(class, _mm512_and_si512(x[h], low));
                // SAFETY: class and slot have 4 and 12 bits, and the caller has checked that there are 2^16 entries.
                entry[h] = unsafe { _mm512_i32gather_epi32::<4>(at, entries.as_ptr().cast()) };
            }
            let mut token = [zero; H];
            let mut wide = [0; H];
            for h in 0..H {
                token[h] = _mm512_srli_epi32::<24>(entry[h]);
                wide[h] = _mm512_cmpge_epu32_mask(token[h], direct);
                changed[h] = _mm512_test_epi32_mask(token[h], token[h]);
                if _mm512_cmpgt_epu32_mask(token[h], last_token) != 0 {
                    return Err(Fault::Value);
                }
                let from_start = _mm512_sub_epi32(_mm512_and_si512(x[h], low), _mm512_and_si512(entry[h], low));
                let frequency_minus_1 = _mm512_and_si512(_mm512_srli_epi32::<12>(entry[h]), low);
                let quotient = _mm512_srli_epi32::<12>(x[h]);
                let scaled = _mm512_add_epi32(_mm512_mullo_epi32(frequency_minus_1, quotient), quotient);
                x[h] = renormalize(_mm512_add_epi32(scaled, from_start), words, read)?;
            }
            if wide.iter().fold(0, |all, wide| all | wide) != 0 {
                // A token without extra bits is its own value.
                let mut left = [zero; H];
                for h in 0..H {
                    left[h] =
                        _mm512_maskz_sub_epi32(wide[h], _mm512_srli_epi32::<1>(token[h]), _mm512_set1_epi32(EXTRA_BIAS as i32));
                    let head = _mm512_add_epi32(_mm512_and_si512(token[h], _mm512_set1_epi32(1)), _mm512_set1_epi32(2));
                    token[h] = _mm512_mask_sllv_epi32(token[h], wide[h], head, left[h]);
                }
                let mut done = zero;
                while left.iter().any(|&left| _mm512_test_epi32_mask(left, left) != 0) {
                    for h in 0..H {
                        let bit_count = _mm512_min_epu32(left[h], most_bits);
                        let bits = _mm512_andnot_si512(_mm512_sllv_epi32(_mm512_set1_epi32(-1), bit_count), x[h]);
                        token[h] = _mm512_or_si512(token[h], _mm512_sllv_epi32(bits, done));
                        left[h] = _mm512_sub_epi32(left[h], bit_count);
                        x[h] = renormalize(_mm512_srlv_epi32(x[h], bit_count), words, read)?;
                    }
                    done = _mm512_add_epi32(done, most_bits);
                }
            }
            for (values, token) in values.iter_mut().zip(token) {
                narrow::<L>(token, values);
            }
        }
    }
    for ((x, read), stream) in x.iter().zip(read).zip(streams) {
        for (x, states) in x.iter().zip(stream.states.as_chunks_mut().0) {
            store_words(states, *x);
        }
        stream.words.read = read;
    }
    Ok(())
}

/// Stores 16 words as lanes of at most 4 bytes. The opposite of [`widen`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn narrow<L: Lane>(words: __m512i, lanes: &mut [L::Le; GROUP]) {
    let lanes = lanes.as_mut_bytes();
    debug_assert!(lanes.len() == GROUP * L::BYTES);
    // SAFETY: the reference is to 16 lanes, and each store has 16 lanes of `L`; unaligned access is allowed.
    unsafe {
        match L::BYTES {
            1 => _mm_storeu_si128(lanes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(words)),
            2 => _mm256_storeu_si256(lanes.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(words)),
            _ => _mm512_storeu_epi32(lanes.as_mut_ptr().cast(), words),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_words(words: &[u32; GROUP]) -> __m512i {
    // SAFETY: the reference is to 64 bytes; unaligned access is allowed.
    unsafe { _mm512_loadu_epi32(words.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_words(words: &mut [u32; GROUP], vector: __m512i) {
    // SAFETY: the reference is to 64 bytes; unaligned access is allowed.
    unsafe { _mm512_storeu_epi32(words.as_mut_ptr().cast(), vector) };
}

/// [`super::Words::renormalize`] for 16 states, in order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2,popcnt")]
fn renormalize(x: __m512i, words: &[[u8; 2]], read: &mut usize) -> Result<__m512i, Fault> {
    let needs_word = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(1 << 16));
    let count = needs_word.count_ones();
    let left = words.get(*read..).ok_or(Fault::Short)?;
    let next = if let Some(next) = left.first_chunk::<GROUP>() {
        // A load without a mask is faster. The words after the first `count` are not used.
        // SAFETY: the reference is to 16 words; unaligned access is allowed.
        unsafe { _mm256_loadu_si256(next.as_ptr().cast()) }
    } else {
        let next = left.get(..count as usize).ok_or(Fault::Short)?;
        let selected = _bzhi_u32(u32::MAX, count) as u16;
        // SAFETY: the mask restricts the load to the `count` words of `next`.
        unsafe { _mm256_maskz_loadu_epi16(selected, next.as_ptr().cast()) }
    };
    *read += count as usize;
    let next = _mm512_maskz_expand_epi32(needs_word, _mm512_cvtepu16_epi32(next));
    Ok(_mm512_mask_or_epi32(x, needs_word, _mm512_slli_epi32::<16>(x), next))
}
