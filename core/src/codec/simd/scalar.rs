//! Inner loops in portable code.

#![forbid(unsafe_code)]

use super::types::{
    CLASS_BITS, CompactedLanes, CountTile, CountTiles, DIGIT_BITS, HALF, PIECE, PIECE_ROWS, ROWS, TILE_TOKENS, Tiles,
};
use crate::sums::{ChunkSum, inner_sum};

/// See [`super::Platform::compact`].
pub(super) fn compact(
    indexes: &[[u8; HALF]],
    activities: &[u8],
    maps: &[[u8; HALF]; 4],
    tiles: Tiles,
    first: u32,
    out: &mut CompactedLanes<'_>,
) -> usize {
    let (mut start, mut count) = (0, 0);
    for (h, indexes) in indexes.iter().enumerate() {
        if h != 0 && h % tiles.halves == 0 {
            count = out.end_tile(tiles, start, count);
            start = count;
        }
        let map = &maps[usize::from(activities[h / 2] & 3)];
        let mut mask = 0;
        for (i, &index) in indexes.iter().enumerate() {
            let class = map.get(usize::from(index)).copied().unwrap_or(0);
            out.classes[count] = class;
            if let Some(position) = out.positions.get_mut(count) {
                *position = first + (h * HALF + i) as u32;
            }
            count += usize::from(class != 0);
            mask |= u64::from(class != 0) << i;
        }
        out.masks[h] = mask;
    }
    out.end_tile(tiles, start, count)
}

/// See [`super::Platform::copy_piece`].
pub(super) fn copy_piece(from: &[u8; PIECE], to: &mut [u8; PIECE]) -> [u64; PIECE_ROWS] {
    *to = *from;
    let mut sums = [0; PIECE_ROWS];
    sums.iter_mut().zip(from.chunks(ChunkSum::BLOCK)).for_each(|(sum, row)| *sum = inner_sum(row));
    sums
}

/// See [`super::Platform::differ`].
pub(super) fn differ(width: usize, base: &[u8], target: &[u8], masks: &mut [u64]) {
    for ((base, target), mask) in base.chunks(64 * width).zip(target.chunks(64 * width)).zip(masks) {
        let lanes = base.chunks(width).zip(target.chunks(width)).enumerate();
        *mask = lanes.fold(0, |mask, (i, (base, target))| mask | u64::from(base != target) << i);
    }
}

/// See [`super::Platform::pack`].
#[inline(always)]
pub(super) fn pack<T: Copy>(lanes: &[T; HALF], mut mask: u64, out: &mut [T]) {
    for out in out.iter_mut().take(mask.count_ones() as usize) {
        *out = lanes[mask.trailing_zeros() as usize % HALF];
        mask &= mask.wrapping_sub(1);
    }
}

/// See [`super::Platform::keys`].
pub(super) fn keys(counts: &CountTiles, costs: &[[u16; TILE_TOKENS]], class: u8, keys: &mut [[u64; ROWS]]) {
    let mut rest = &counts.tiles[..];
    for (lengths, keys) in counts.lengths.iter().zip(keys) {
        let mut sums = [0u64; ROWS];
        for &length in lengths {
            let (tiles, after) = rest.split_at(length);
            rest = after;
            sums = sums.map(|sum| sum << DIGIT_BITS);
            for (CountTile(tile), costs) in tiles.iter().zip(costs) {
                for (row, sum) in sums.iter_mut().enumerate() {
                    let pairs = tile.iter().zip(costs.as_chunks::<2>().0);
                    let [even, odd] = [0, 1].map(|i| {
                        let products = pairs.clone().map(|(pairs, costs)| (pairs[CountTile::element(row)][i], costs[i]));
                        products.map(|(digit, cost)| u32::from(digit) * u32::from(cost)).sum::<u32>()
                    });
                    *sum += u64::from(even + odd);
                }
            }
        }
        *keys = sums.map(|sum| sum << CLASS_BITS | u64::from(class));
    }
}
