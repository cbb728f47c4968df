//! Statistics for the encoder's choices: the number of occurrences of each token, by context and by level of activity.

use super::context::{BLOCK, HALF, indexes};
use super::tables::{extra_bits, token_of, tokens_within};
use crate::codec::simd::DIRECT;
use crate::dispatch::vectorized;
use crate::lane::{Context, Dtype, Lane, Order, lanes_of};
use crate::prelude::*;

/// Number of levels of activity. Level 0 has the unchanged blocks. Levels 1 to 3 have about the same number of blocks each.
pub(super) const LEVELS: usize = 4;
/// Number of counted contexts. A map has fewer, but the first context of the map is chosen after counting.
pub(super) const CONTEXTS: usize = 256;
/// A chunk with more lanes than `LANES`, or more changes than `CHANGES`, is sampled.
const LANES: usize = 1 << 14;
const CHANGES: usize = 1 << 13;
/// Maximum stride: at least one of `STRIDE` blocks is sampled.
const STRIDE: usize = 16;
/// If a block has at least `MANY` changes, the values of all its lanes are computed at once.
const MANY: u16 = 8;

/// Returns the sampling stride for `count` items, if about `enough` items suffice.
fn stride(count: usize, enough: usize) -> usize {
    (1 << (count / enough).max(1).ilog2()).min(STRIDE)
}

/// Returns the index of the sampled item in a group of `stride` items. The index is pseudorandom, so that samples do not coincide
/// with a periodic pattern of lanes, such as rows of a matrix.
pub fn sample_offset(group: u64, stride: u64) -> u64 {
    (group.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 36) % stride
}

/// Returns the sampled blocks: one per `stride` blocks.
fn sampled(blocks: usize, stride: usize) -> impl Iterator<Item = usize> {
    let block = move |group: usize| group * stride + sample_offset(group as u64, stride as u64) as usize;
    (0..blocks.div_ceil(stride)).map(block).filter(move |&block| block < blocks)
}

/// Rule that turns deltas into values. Without low bits, the value is the delta. Otherwise the low bits are stored uncoded, and
/// the value is `center` minus the high bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// Number of low bits of each delta that are stored uncoded.
    pub low_bits: u32,
    /// High bits for which the value is 0. The center is 0 if `low_bits` is 0.
    pub center: u64,
}

impl Split {
    /// Returns the split with `low_bits` low bits. Its center is chosen from a sample of these lanes.
    pub fn for_lanes<'a, L: Lane>(base: &'a [u8], target: &'a [u8], dtype: Dtype, low_bits: u32) -> Self {
        let high_bits = 8 * L::BYTES as u32 - low_bits;
        if low_bits == 0 || high_bits == 0 {
            return Self { low_bits, center: 0 };
        }
        // Floats have at most 11 bits of exponent.
        let mut counts = vec![0usize; 1 << high_bits.min(11)];
        let lanes = base.len() / L::BYTES;
        let stride = stride(lanes, LANES);
        let of_block = |block: usize, lanes: &'a [u8]| lanes_of::<L>(&lanes[range::<L>(block, lanes.len())]);
        let blocks = sampled(lanes.div_ceil(BLOCK), stride);
        for (base, target) in blocks.flat_map(|block| of_block(block, base).iter().zip(of_block(block, target))) {
            let high = L::delta(L::load(*base), L::load(*target), dtype.order()).to_u64() >> low_bits;
            counts[(high as usize).min((1 << high_bits.min(11)) - 1)] += 1;
        }
        // At most 1/1024 of the lanes are above the center. Their values wrap around to large values.
        let mut above = lanes / stride / 1024;
        let mut center = counts.len() - 1;
        while center > 0 && counts[center] <= above {
            above -= counts[center];
            center -= 1;
        }
        Self { low_bits, center: center as u64 }
    }

    /// Returns the value of a delta, for lanes of `bits` bits.
    #[inline(always)]
    pub fn value(self, delta: u64, bits: u32) -> u64 {
        if self.low_bits == 0 {
            return delta;
        }
        let mask = 1u64.checked_shl(bits - self.low_bits).unwrap_or(0).wrapping_sub(1);
        self.center.wrapping_sub(delta.checked_shr(self.low_bits).unwrap_or(0)) & mask
    }
}

/// Histograms of a chunk.
pub(super) struct Stats {
    /// First counted context.
    pub first: u16,
    /// By level and context: the number of lanes, and the index of their row in `counts` or [`NO_ROW`].
    lanes: Vec<[(u32, u32); CONTEXTS]>,
    /// Token counts of the lanes with values, in rows of `tokens` entries. [`Stats::row`] adds the other lanes as token 0.
    counts: Vec<u32>,
    tokens: usize,
    /// Level of each block.
    pub levels: Vec<u8>,
}

/// Marks a level and context without a row.
const NO_ROW: u32 = u32::MAX;

impl Stats {
    /// Gathers the statistics of a chunk. `changed` selects the lanes with values, one mask per half block. `count` lanes change.
    pub fn gather<L: Lane>(base: &[u8], target: &[u8], dtype: Dtype, split: Split, changed: &[u64], count: usize) -> Self {
        let lanes = base.len() / L::BYTES;
        let first = first_context::<L>(base, dtype);
        let tokens = tokens_within(8 * L::BYTES as u32 - split.low_bits);
        let count_of = |halves: &[u64]| halves.iter().map(|mask| mask.count_ones() as u16).sum();
        let changes: Vec<u16> = vectorized!(changed.chunks(2).map(count_of).collect());
        let levels = if split.low_bits == 0 {
            levels_of(&changes, true)
        } else {
            let blocks = base.chunks(BLOCK * L::BYTES).zip(target.chunks(BLOCK * L::BYTES));
            let score = |tokens: [u8; BLOCK]| tokens.iter().map(|&token| u16::from(token.min(15))).sum();
            let scores: Vec<u16> =
                blocks.map(|(base, target)| score(block_tokens::<L>(base, target, dtype.order(), split))).collect();
            levels_of(&scores, false)
        };
        let mut stats = Self { first, lanes: vec![[(0, NO_ROW); CONTEXTS]; LEVELS], counts: Vec::new(), tokens, levels };
        // Lanes are counted only in blocks in which changes are counted too, so that the rate of change is that of the same blocks.
        let change_stride = stride(count, CHANGES);
        let lane_stride = stride(lanes, LANES).max(change_stride);
        // Adjacent lanes often have the same context. Four sets of counters avoid that an increment waits for the previous one.
        let mut counts = vec![[[0u32; CONTEXTS]; 4]; LEVELS];
        let mut contexts = [0; BLOCK];
        let (of, order, bits) = (dtype.context(), dtype.order(), 8 * L::BYTES as u32);
        let every = (lane_stride / change_stride) as u64;
        for (n, b) in (0..).zip(sampled(changes.len(), change_stride)) {
            let with_lanes = n % every == sample_offset(n / every, every);
            let changes = changes[b];
            if !with_lanes && changes == 0 {
                continue;
            }
            let (base, target) = (&base[range::<L>(b, base.len())], &target[range::<L>(b, base.len())]);
            let changed = &changed[2 * b..changed.len().min(2 * b + 2)];
            let level = usize::from(stats.levels[b]);
            if with_lanes || changes >= MANY {
                indexes::<L>(base, dtype, first, &mut contexts);
            }
            if with_lanes {
                for contexts in contexts[..base.len() / L::BYTES].chunks(4) {
                    for (counts, &context) in counts[level].iter_mut().zip(contexts) {
                        counts[usize::from(context)] += lane_stride as u32;
                    }
                }
            }
            if changes >= MANY {
                let tokens = block_tokens::<L>(base, target, order, split);
                each(changed, |i| *stats.count_of(level, contexts[i].into(), tokens[i].into()) += change_stride as u32);
            } else if changes > 0 {
                let (base, target) = (lanes_of::<L>(base), lanes_of::<L>(target));
                each(changed, |i| {
                    let (base, target) = (L::load(base[i]), L::load(target[i]));
                    let context = base.context(of).index_from(L::saturate(first));
                    let token = token_of(split.value(L::delta(base, target, order).to_u64(), bits)).0;
                    *stats.count_of(level, context.into(), token.into()) += change_stride as u32;
                });
            }
        }
        for (lanes, counts) in stats.lanes.iter_mut().zip(counts) {
            for (context, (lanes, _)) in lanes.iter_mut().enumerate() {
                *lanes = counts.iter().map(|counts| counts[context]).sum();
            }
        }
        stats
    }

    #[inline(always)]
    fn count_of(&mut self, level: usize, context: usize, token: usize) -> &mut u32 {
        let row = &mut self.lanes[level][context].1;
        if *row == NO_ROW {
            *row = (self.counts.len() / self.tokens) as u32;
            self.counts.resize(self.counts.len() + self.tokens, 0);
        }
        &mut self.counts[*row as usize * self.tokens + token]
    }

    /// Returns the token counts of a context in a range of levels, including value 0.
    pub fn row(&self, levels: core::ops::Range<usize>, context: usize) -> Row {
        let levels = &self.lanes[levels];
        let lanes: u64 = levels.iter().map(|level| u64::from(level[context].0)).sum();
        let mut row = Row::default();
        for at in levels.iter().map(|level| level[context].1).filter(|at| *at != NO_ROW) {
            row.add(&self.counts[at as usize * self.tokens..][..self.tokens]);
        }
        let values = row.lanes();
        row.counts.resize(row.counts.iter().rposition(|&n| n != 0).map_or(1, |last| last + 1), 0);
        row.counts[0] += lanes.saturating_sub(values) as u32;
        row
    }

    /// Returns the contexts that occur in a range of levels.
    pub fn contexts(&self, levels: core::ops::Range<usize>) -> impl Iterator<Item = usize> + '_ {
        (0..CONTEXTS).filter(move |&context| self.lanes[levels.clone()].iter().any(|level| level[context] != (0, NO_ROW)))
    }
}

/// Returns the byte range of a block's lanes, in a chunk of `bytes` bytes.
fn range<L: Lane>(block: usize, bytes: usize) -> core::ops::Range<usize> {
    let size = BLOCK * L::BYTES;
    (block * size).min(bytes)..((block + 1) * size).min(bytes)
}

/// Calls `f` for each lane of a block that the masks of its two halves select.
#[inline(always)]
fn each(masks: &[u64], mut f: impl FnMut(usize)) {
    for (h, &mask) in masks.iter().enumerate() {
        let mut left = mask;
        while left != 0 {
            f(h * HALF + left.trailing_zeros() as usize);
            left &= left - 1;
        }
    }
}

/// Writes masks that select all of `lanes` lanes, in a reused buffer.
pub(super) fn all_lanes(lanes: usize, masks: &mut Vec<u64>) -> &[u64] {
    masks.clear();
    masks.resize(lanes.div_ceil(HALF), u64::MAX);
    if let (Some(last), 1..) = (masks.last_mut(), lanes % HALF) {
        *last = (1 << (lanes % HALF)) - 1;
    }
    masks
}

/// Returns the tokens of a block's lanes, and 0 past the last lane.
fn block_tokens<L: Lane>(base: &[u8], target: &[u8], order: Order, split: Split) -> [u8; BLOCK] {
    let mut tokens = [0; BLOCK];
    let lanes = tokens.iter_mut().zip(lanes_of::<L>(base)).zip(lanes_of::<L>(target));
    let bits = 8 * L::BYTES as u32;
    vectorized!({
        for ((token, base), target) in lanes {
            *token = token_of(split.value(L::delta(L::load(*base), L::load(*target), order).to_u64(), bits)).0;
        }
    });
    tokens
}

/// Histogram of tokens.
#[derive(Debug, Clone, Default)]
pub(super) struct Row {
    /// Number of lanes by token.
    pub counts: Vec<u32>,
}

impl Row {
    pub fn lanes(&self) -> u64 {
        self.counts.iter().map(|&n| u64::from(n)).sum()
    }

    /// Returns the number of lanes with a value other than 0.
    pub fn others(&self) -> u64 {
        self.counts[1..].iter().map(|&n| u64::from(n)).sum()
    }

    /// Returns the total number of extra bits.
    pub fn extra_bits(&self) -> u64 {
        self.counts.iter().enumerate().skip(DIRECT as usize).map(|(t, &n)| u64::from(n) * u64::from(extra_bits(t as u8))).sum()
    }

    pub fn add(&mut self, other: &[u32]) {
        if self.counts.len() < other.len() {
            self.counts.resize(other.len(), 0);
        }
        self.counts.iter_mut().zip(other).for_each(|(sum, &n)| *sum = sum.saturating_add(n));
    }
}

/// Returns the level of each score: 1, 2 or 3 for the lower, middle or upper third. With `zero_apart`, score 0 has level 0 and is
/// not part of the thirds.
fn levels_of(scores: &[u16], zero_apart: bool) -> Vec<u8> {
    let mut sorted: Vec<u16> = scores.iter().copied().filter(|&score| score != 0 || !zero_apart).collect();
    let mut third = |k: usize| match sorted.len() * k / 3 {
        0 => 0,
        at => *sorted.select_nth_unstable(at - 1).1,
    };
    let (low, middle) = (third(1), third(2));
    let level = |&score: &u16| {
        let apart = zero_apart && score == 0;
        if apart { 0 } else { 1 + u8::from(score > low) + u8::from(score > middle) }
    };
    scores.iter().map(level).collect()
}

/// Returns the first counted context. The counted range ends with the largest context, because most contexts are close to it.
fn first_context<L: Lane>(base: &[u8], dtype: Dtype) -> u16 {
    match dtype.context() {
        Context::Exponent { shift, bits } if 1usize << bits > CONTEXTS => {
            let max = (1 << bits) - 1;
            let exponents = lanes_of::<L>(base).iter().map(|lane| L::load(*lane).to_u64() >> shift & max);
            // Infinities and NaNs do not count.
            let largest = exponents.filter(|&exponent| exponent != max).max().unwrap_or(0);
            (largest as u16).saturating_sub(CONTEXTS as u16 - 2)
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows often have a power of two of blocks. The sample must contain blocks at every offset of a row.
    #[test]
    fn sampled_blocks_have_no_period() {
        for stride in [1, 2, 8, 16] {
            let blocks: Vec<usize> = sampled(8192, stride).collect();
            assert_eq!(blocks.len(), 8192 / stride);
            assert!(blocks.iter().enumerate().all(|(group, block)| block / stride == group));
            for period in [2, 8, 16, 32, 64] {
                for rest in 0..period {
                    assert!(blocks.iter().any(|block| block % period == rest), "{rest} of {period}, one of {stride}");
                }
            }
        }
        assert_eq!(sampled(37, 16).filter(|block| *block >= 37).count(), 0);
    }
}
