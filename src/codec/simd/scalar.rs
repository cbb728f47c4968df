//! Inner loops in portable code.

#![forbid(unsafe_code)]

use super::types::{CompactedLanes, HALF, Tiles};

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
