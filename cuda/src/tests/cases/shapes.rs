//! Chunks of every shape that the format allows, generated from a few numbers.

use super::writer::{BLOCK, Plan, random_set, tile, write};
use super::{Case, Random, random_lanes};
use tpde_core::lane::{Dtype, Lane, lanes_of_mut, with_lane};

/// Shape of a generated payload. A seed determines the other choices.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub dtype: Dtype,
    pub lanes: usize,
    pub rarity: usize,
    pub classes: usize,
    pub states_log2: u8,
    pub segments_log2: u8,
    pub activity_bits: u8,
    /// Number of low bits, in 64ths of the bits of a lane.
    pub low: u32,
    pub all_tokens: bool,
    /// Whether a lane has both a coded change and an exception.
    pub clash: bool,
    pub seed: u64,
}

impl Shape {
    /// Returns a random shape of up to `most` lanes.
    pub fn any(random: &mut Random, most: usize) -> Self {
        // Packed dtypes need multiples of two (F4) or four (F6) elements. Their lanes are like lanes of U8. Lanes of C64 are like
        // lanes of F32.
        let dtypes: Vec<_> =
            Dtype::ALL.iter().filter(|dtype| dtype.bits() != 6 && dtype.bits() != 4 && **dtype != Dtype::C64).collect();
        Self {
            dtype: *dtypes[random.below(dtypes.len())],
            lanes: 1 + random.below(most),
            rarity: 1 + random.below(60),
            classes: 1 + random.below(15),
            states_log2: random.below(6) as u8,
            segments_log2: random.below(6) as u8,
            activity_bits: random.below(3) as u8,
            low: if random.once_in(4) { 1 + random.below(64) as u32 } else { 0 },
            all_tokens: random.once_in(2),
            clash: false,
            seed: random.bits(),
        }
    }
}

/// Returns a chunk of this shape. At least one lane changes.
pub fn case_of(shape: Shape) -> Case {
    let random = &mut Random(shape.seed);
    let Shape { dtype, lanes, .. } = shape;
    let bits = 8 * dtype.lane_bytes() as u32;
    let (mut base, mut target) = random_lanes(random, dtype, lanes, shape.rarity);
    // The base has fewer lanes than the target, possibly zero.
    if random.once_in(5) {
        let keep = random.below(lanes + 1) * dtype.lane_bytes();
        base[keep..].fill(0);
        if random.once_in(2) {
            target[keep..].copy_from_slice(&base[keep..]);
        }
    }
    if base == target {
        target[0] ^= 1;
    }
    let low_bits = (shape.low * bits).div_ceil(64);
    let high_bits = bits - low_bits;
    let set = random_set(random, shape.classes, high_bits, shape.all_tokens || low_bits != 0);
    let center = match low_bits {
        0 => 0,
        _ => random.bits() & 0xFFFF_FFFF & 1u64.checked_shl(high_bits).unwrap_or(0).wrapping_sub(1),
    };
    let contexts = 1 + random.below(64);
    let blocks = lanes.div_ceil(BLOCK);
    let uncoded = [1, 2, 10][random.below(3)];
    let mut plan = Plan {
        low_bits,
        center: center as u32,
        states_log2: shape.states_log2,
        segments_log2: shape.segments_log2.min(lanes.div_ceil(tile(dtype)).ilog2() as u8),
        activity_bits: shape.activity_bits,
        first_context: [0, 0, random.below(120) as u16, random.bits() as u16][random.below(4)],
        maps: (0..1 << shape.activity_bits)
            .map(|_| {
                (0..contexts).map(|_| if random.once_in(uncoded) { random.below(shape.classes + 1) as u8 } else { 0 }).collect()
            })
            .collect(),
        activities: (0..blocks).map(|_| random.below(1 << shape.activity_bits) as u8).collect(),
        listed: [1, 4, usize::MAX][random.below(3)],
        clash: None,
        too_large: None,
    };
    if shape.clash {
        let width = dtype.lane_bytes();
        let changed: Vec<usize> = (0..lanes).filter(|i| base[i * width..][..width] != target[i * width..][..width]).collect();
        plan.clash = Some(changed[random.below(changed.len())]);
    }
    let payload = write(dtype, &plan, &set, &base, &target);
    let zeros = base.chunks(dtype.lane_bytes()).rev().take_while(|lane| lane.iter().all(|&byte| byte == 0)).count();
    if random.once_in(2) {
        base.truncate(base.len() - zeros * dtype.lane_bytes());
    }
    Case::new(dtype, Some(set), base, &target, payload)
}

/// Returns a chunk of `tiles` complete tiles and a partial tile. Every block is either entirely coded or not coded, so steps are
/// rows of lanes. Without low bits, one lane in `rarity` changes, and values have no extra bits if `rarity` is more than 2. With
/// low bits, the chunk has no base and all lanes are coded. Then, if `rarity` is more than 2, about one lane in 8 · `rarity` has
/// extra bits, so some tiles have none.
pub fn rows_of(
    random: &mut Random,
    dtype: Dtype,
    tiles: usize,
    segments_log2: u8,
    activity_bits: u8,
    low_bits: u32,
    rarity: usize,
) -> Case {
    let lanes = tiles * tile(dtype) + 1 + random.below(200);
    let (mut base, mut target) = random_lanes(random, dtype, lanes, rarity);
    let high_bits = 8 * dtype.lane_bytes() as u32 - low_bits;
    let mut center = 0;
    if low_bits != 0 {
        base.fill(0);
    }
    if low_bits != 0 && rarity > 2 {
        center = 30.min((1u64 << high_bits) - 1);
        with_lane!(dtype.lane_bytes(), L => for lane in lanes_of_mut::<L>(&mut target) {
            let delta = if random.once_in(8 * rarity) { random.bits() } else { random.bits() % ((center + 1) << low_bits) };
            *lane = L::apply(L::from_u64(0), L::from_u64(delta), dtype.order()).store();
        });
    }
    let set = random_set(random, 3, if rarity > 2 && low_bits == 0 { 5 } else { high_bits }, true);
    let plan = Plan {
        low_bits,
        center: center as u32,
        states_log2: 5,
        segments_log2,
        activity_bits,
        // All contexts share the first entry.
        first_context: u16::MAX,
        maps: (0..1 << activity_bits)
            .map(|map| vec![if activity_bits == 0 || low_bits != 0 { 1 + map % 3 } else { map }])
            .collect(),
        activities: (0..lanes.div_ceil(BLOCK)).map(|_| random.below(1 << activity_bits) as u8).collect(),
        listed: if low_bits != 0 { usize::MAX } else { 300 },
        clash: None,
        too_large: None,
    };
    let payload = write(dtype, &plan, &set, &base, &target);
    if low_bits != 0 {
        base.clear();
    }
    Case::new(dtype, Some(set), base, &target, payload)
}
