//! CRC-32 of a payload by all threads of a block.
//!
//! The payload is seen as rows of as many words as the block has threads, filled up with zeros *in front*, which a CRC that
//! begins with zero does not see. A thread goes down its column: loads are contiguous over a warp, and a step from row to row is
//! one multiplication by x^(32·threads) mod P. That is linear over GF(2), so it is four look-ups by the bytes of the sum so far,
//! in tables made for this number of threads (4 KiB; they lie where the tiles will lie later). At the end column *i* is
//! multiplied by x^(32·(threads − i)), a constant of the thread whatever the payload's size, and all columns are added.
//!
//! A word costs 1 load, 4 look-ups and about 9 other operations; the end costs about 130 operations a thread, once.

use super::memory::Payload;
use super::warp::{PerLane, WARP, per_lane, reduce};

const POLYNOMIAL: u32 = 0xEDB8_8320;
/// The polynomial 1: bits are reflected.
const ONE: u32 = 1 << 31;

/// a·b mod P.
fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    for bit in (0..32).rev() {
        if a >> bit & 1 == 1 {
            product ^= b;
        }
        b = b >> 1 ^ if b & 1 == 1 { POLYNOMIAL } else { 0 };
    }
    product
}

/// x^`n` mod P.
fn power(mut n: usize) -> u32 {
    let (mut result, mut square) = (ONE, ONE >> 1);
    while n > 0 {
        if n & 1 == 1 {
            result = multiply(result, square);
        }
        square = multiply(square, square);
        n >>= 1;
    }
    result
}

/// Constants of a number of threads, made by the host.
pub struct CrcTables {
    /// What each byte of a word becomes a row further on.
    rows: [[u32; 256]; 4],
    /// x^(32·(threads − i)) for thread i.
    columns: Vec<u32>,
}

impl CrcTables {
    pub fn new(threads: usize) -> Self {
        let row = power(32 * threads);
        Self {
            rows: std::array::from_fn(|byte| std::array::from_fn(|value| multiply(row, (value as u32) << (8 * byte)))),
            columns: (0..threads).map(|thread| power(32 * (threads - thread))).collect(),
        }
    }

    fn next_row(&self, sum: u32) -> u32 {
        sum.to_le_bytes().iter().zip(&self.rows).fold(0, |next, (&byte, table)| next ^ table[usize::from(byte)])
    }
}

/// The CRC-32 of `payload` by a block of `warps` warps.
pub fn block_crc32(payload: &Payload<'_>, tables: &CrcTables, warps: usize) -> u32 {
    let threads = warps * WARP;
    let words = payload.size / 4;
    let rows = words.div_ceil(threads);
    let filled = rows * threads - words;
    let mut partial = vec![0; warps];
    for (warp, partial) in partial.iter_mut().enumerate() {
        let mut sum: PerLane<u32> = [0; WARP];
        for row in 0..rows {
            sum = per_lane(|lane| {
                let place = row * threads + warp * WARP + lane;
                let next = tables.next_row(sum[lane]);
                if place < filled {
                    return next;
                }
                // The initial value of the CRC goes into the first word.
                next ^ payload.word(4 * (place - filled)) ^ if place == filled { u32::MAX } else { 0 }
            });
        }
        let sum = per_lane(|lane| multiply(tables.columns[warp * WARP + lane], sum[lane]));
        *partial = reduce(sum, |a, b| a ^ b);
    }
    // Behind a barrier, one thread: the columns of all warps, then the bytes that fill no word.
    let mut crc = partial.iter().fold(0, |a, b| a ^ b);
    if words == 0 {
        crc = u32::MAX;
    }
    for at in 4 * words..payload.size {
        crc ^= u32::from(payload.byte(at));
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { POLYNOMIAL } else { 0 };
        }
    }
    !crc
}
