//! What an encoder looks at before it chooses: which contexts have which tokens, in how busy blocks.

use super::context::{BLOCK, indexes};
use super::tables::{extra_bits, token_of, tokens_within};
use crate::dispatch::vectorized;
use crate::lane::{Context, Dtype, Lane, lanes_of};

/// Levels of activity: 0 for blocks without a change, then three of about equal size.
pub(super) const LEVELS: usize = 4;
/// Contexts that are told apart; more than a map has, because where the map begins is not known yet.
const CONTEXTS: usize = 256;
/// Blocks, of a chunk with many changes, of which one is looked at.
const STRIDE: usize = 4;

/// How deltas become values: which of their bits are stored as they are, and what the others count down from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Split {
    /// Bits of a delta that are stored as they are.
    pub low_bits: u32,
    /// What the other bits count down from, if there are low bits.
    pub center: u64,
}

impl Split {
    /// The split that leaves `low_bits` bits alone and suits these lanes.
    pub fn for_lanes<L: Lane>(base: &[u8], target: &[u8], dtype: Dtype, low_bits: u32) -> Self {
        let high_bits = 8 * L::BYTES as u32 - low_bits;
        if low_bits == 0 || high_bits == 0 {
            return Self { low_bits, center: 0 };
        }
        // Floats have at most 11 bits of exponent.
        let mut counts = vec![0usize; 1 << high_bits.min(11)];
        for (base, target) in lanes_of::<L>(base).iter().zip(lanes_of::<L>(target)) {
            let high = L::delta(L::load(*base), L::load(*target), dtype.order()).widen() >> low_bits;
            counts[(high as usize).min((1 << high_bits.min(11)) - 1)] += 1;
        }
        // A few lanes may lie above the center: they wrap to large values.
        let mut above = base.len() / L::BYTES / 1024;
        let mut center = counts.len() - 1;
        while center > 0 && counts[center] <= above {
            above -= counts[center];
            center -= 1;
        }
        Self { low_bits, center: center as u64 }
    }

    /// The value of a delta in a lane of `bits` bits.
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
    /// Context of the first row.
    pub first: u16,
    /// Tokens of a row.
    tokens: usize,
    /// Lanes, by level and context.
    lanes: Vec<[u32; CONTEXTS]>,
    /// Tokens but for those of the value 0, by level, context and token.
    counts: Vec<u32>,
    /// Level of each block.
    pub levels: Vec<u8>,
}

impl Stats {
    /// Looks at a chunk of which `changed` lanes change.
    pub fn gather<L: Lane>(base: &[u8], target: &[u8], dtype: Dtype, split: Split, changed: usize) -> Self {
        let bits = 8 * L::BYTES as u32;
        let count = base.len() / L::BYTES;
        let tokens = tokens_within(bits - split.low_bits);
        let value =
            |base: &L::Le, target: &L::Le| split.value(L::delta(L::load(*base), L::load(*target), dtype.order()).widen(), bits);
        let blocks = || base.chunks(BLOCK * L::BYTES).zip(target.chunks(BLOCK * L::BYTES));
        let scores: Vec<u16> = if split.low_bits == 0 {
            blocks().map(|(base, target)| changed_lanes::<L>(base, target)).collect()
        } else {
            let score = |base, target| -> u16 {
                let lanes = lanes_of::<L>(base).iter().zip(lanes_of::<L>(target));
                lanes.map(|(base, target)| token_of(value(base, target)).0.min(15) as u16 + 1).sum()
            };
            blocks().map(|(base, target)| score(base, target)).collect()
        };
        let levels = levels_of(&scores);

        let first = first_context::<L>(base, dtype);
        let mut stats =
            Self { first, tokens, lanes: vec![[0; CONTEXTS]; LEVELS], counts: vec![0; LEVELS * CONTEXTS * tokens], levels };
        // Few changes are all looked at, so that none surprises; of the lanes, and of many changes, a part says enough.
        let stride = if count >= 1 << 16 { STRIDE } else { 1 };
        let few = 16 * changed < count;
        let mut contexts = [0; BLOCK];
        for (b, (base, target)) in blocks().enumerate() {
            let sampled = b % stride == 0;
            if !sampled && (!few || scores[b] == 0) {
                continue;
            }
            let level = usize::from(stats.levels[b]);
            indexes::<L>(base, dtype, first, &mut contexts);
            if sampled {
                for &context in &contexts[..base.len() / L::BYTES] {
                    stats.lanes[level][usize::from(context)] += stride as u32;
                }
            }
            if scores[b] == 0 {
                continue;
            }
            let weight = if few { 1 } else { stride as u32 };
            let rows = &mut stats.counts[level * CONTEXTS * tokens..][..CONTEXTS * tokens];
            for ((base, target), &context) in lanes_of::<L>(base).iter().zip(lanes_of::<L>(target)).zip(&contexts) {
                if split.low_bits != 0 || L::load(*base) != L::load(*target) {
                    let token = usize::from(token_of(value(base, target)).0);
                    rows[usize::from(context) * tokens + token] += weight;
                }
            }
        }
        stats
    }

    /// The tokens of a context in the levels of a range, those of the value 0 included.
    pub fn row(&self, levels: std::ops::Range<usize>, context: usize) -> Row {
        let mut counts = vec![0; self.tokens];
        let mut lanes = 0;
        for level in levels {
            lanes += u64::from(self.lanes[level][context]);
            let row = &self.counts[(level * CONTEXTS + context) * self.tokens..][..self.tokens];
            counts.iter_mut().zip(row).for_each(|(sum, &n)| *sum += n);
        }
        let changes: u64 = counts.iter().map(|&n| u64::from(n)).sum();
        counts[0] += lanes.saturating_sub(changes) as u32;
        Row { counts }
    }

    /// The contexts that occur in a range of levels.
    pub fn contexts(&self, levels: std::ops::Range<usize>) -> impl Iterator<Item = usize> + '_ {
        (0..CONTEXTS).filter(move |&context| {
            levels.clone().any(|level| {
                let row = (level * CONTEXTS + context) * self.tokens;
                self.lanes[level][context] != 0 || self.counts[row..row + self.tokens].iter().any(|&n| n != 0)
            })
        })
    }
}

/// A histogram of tokens.
#[derive(Debug, Clone, Default)]
pub(super) struct Row {
    /// How often each token occurs.
    pub counts: Vec<u32>,
}

impl Row {
    /// Lanes of the row.
    pub fn lanes(&self) -> u64 {
        self.counts.iter().map(|&n| u64::from(n)).sum()
    }

    /// Lanes with another value than 0.
    pub fn others(&self) -> u64 {
        self.counts[1..].iter().map(|&n| u64::from(n)).sum()
    }

    /// Extra bits of all values.
    pub fn extra_bits(&self) -> u64 {
        self.counts.iter().enumerate().skip(16).map(|(t, &n)| u64::from(n) * u64::from(extra_bits(t as u8))).sum()
    }

    /// Adds another row to this one.
    pub fn add(&mut self, other: &Row) {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, &n)| *sum = sum.saturating_add(n));
    }
}

/// Number of lanes of a block that differ.
fn changed_lanes<L: Lane>(base: &[u8], target: &[u8]) -> u16 {
    if base == target {
        return 0;
    }
    vectorized(
        #[inline(always)]
        || {
            let lanes = lanes_of::<L>(base).iter().zip(lanes_of::<L>(target));
            lanes.fold(0, |n, (base, target)| n + u16::from(L::load(*base) != L::load(*target)))
        },
    )
}

/// 0 for a score of 0, and 1 to 3 for the lower, middle and upper third of the others.
fn levels_of(scores: &[u16]) -> Vec<u8> {
    let mut sorted: Vec<u16> = scores.iter().copied().filter(|&score| score != 0).collect();
    let third = |k: usize, sorted: &mut [u16]| match sorted.len() * k / 3 {
        0 => 0,
        at => *sorted.select_nth_unstable(at - 1).1,
    };
    let (low, middle) = (third(1, &mut sorted), third(2, &mut sorted));
    scores
        .iter()
        .map(|&score| u8::from(score != 0) + u8::from(score > low && score != 0) + u8::from(score > middle.max(low)))
        .collect()
}

/// The context from which on contexts are told apart: those that matter end with the largest one.
fn first_context<L: Lane>(base: &[u8], dtype: Dtype) -> u16 {
    match dtype.context() {
        Context::Exponent { shift, bits } if 1usize << bits > CONTEXTS => {
            let most = (1 << bits) - 1;
            let exponents = lanes_of::<L>(base).iter().map(|lane| L::load(*lane).widen() >> shift & most);
            // Infinities and NaNs say nothing about the others.
            let largest = exponents.filter(|&exponent| exponent != most).max().unwrap_or(0);
            (largest as u16).saturating_sub(CONTEXTS as u16 - 2)
        }
        _ => 0,
    }
}
