//! The portable path.

#![forbid(unsafe_code)]

/// See [`super::Path::compact`].
#[inline(always)]
pub(super) fn compact(indexes: &[u8; 64], map: &[u8; 64], out: &mut [u8; 64]) -> u64 {
    let mut mask = 0;
    let mut count = 0;
    for (i, &index) in indexes.iter().enumerate() {
        let class = if index < 64 { map[usize::from(index)] } else { 0 };
        // `count` is at most `i`: one is added a turn, and the remainder says so to the compiler.
        out[count % 64] = class;
        count += usize::from(class != 0);
        mask |= u64::from(class != 0) << i;
    }
    mask
}
