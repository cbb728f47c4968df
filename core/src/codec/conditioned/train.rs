//! Makes table sets from samples of the tensors that will share them.
//!
//! Contexts with similar rates of change and similar mean magnitudes of change form a group. There are a few hundred groups. They
//! are clustered into classes with similar statistics (`cluster`), which become the classes of the set.

use super::cluster::{cluster, own_cost};
use super::cost::{BIT, exception_cost, log2};
use super::stats::{LEVELS, Row, Split, Stats, all_lanes};
use super::tables::{MAX_CLASSES, SCALE, SCALE_LOG2, TableSet, base_value, tokens_within};
use crate::codec::Difference;
use crate::lane::{Dtype, Lane, with_lane};
use crate::prelude::*;
use alloc::collections::BTreeMap;

/// Frequencies of value 0 in the two fallback classes, one for a low and one for a high rate of change. Contexts that are not in
/// the sample use these classes.
const FALLBACK_ZEROS: [u16; 2] = [3584, 512];

/// Key of a group of contexts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Group {
    /// -2 · log2 of the rate of change.
    rate: u8,
    /// 4 · mean magnitude of the changes.
    magnitude: u16,
}

/// Statistics of a range of a tensor's lanes.
#[derive(Debug, Default)]
pub struct Sample {
    groups: BTreeMap<Group, Row>,
    changed: u64,
    cost: u64,
}

impl Sample {
    /// Gathers statistics of a range of a tensor's lanes: a multiple of 128 lanes, except at the end of the tensor.
    pub fn gather(dtype: Dtype, low_bits: u32, base: &[u8], target: &[u8]) -> Self {
        let mut sample = Self::default();
        let (mut masks, mut all) = (Vec::new(), Vec::new());
        let Difference { masks, changed, .. } = Difference::find(dtype, base, target, &mut masks);
        sample.changed = changed as u64;
        if changed == 0 && low_bits == 0 {
            return sample;
        }
        with_lane!(dtype.lane_bytes(), L => {
            let split = Split::for_lanes::<L>(base, target, dtype, low_bits);
            let valued = if low_bits == 0 { masks } else { all_lanes(base.len() / L::BYTES, &mut all) };
            let stats = Stats::gather::<L>(base, target, dtype, split, valued, changed);
            // If many lanes change, the encoder distinguishes blocks by activity. The sample must do the same.
            let by_level = 16 * changed * L::BYTES >= base.len();
            let apart = [0..1, 1..2, 2..3, 3..4];
            let together = core::slice::from_ref(&(0..LEVELS));
            for levels in if by_level { &apart[..] } else { together } {
                for context in stats.contexts(levels.clone()) {
                    let row = stats.row(levels.clone(), context);
                    sample.cost += own_cost(&row) + (row.extra_bits() + row.lanes() * u64::from(low_bits)) * BIT;
                    if let Some(group) = group_of(&row) {
                        sample.groups.entry(group).or_default().add(&row.counts);
                    }
                }
            }
        });
        sample
    }

    /// Returns a sample in which `changed` lanes change, from the token counts of its groups of contexts: rate of change and mean
    /// magnitude as in [`Group`], and the number of lanes by token.
    pub fn from_counts(changed: u64, groups: impl IntoIterator<Item = (u8, u16, Vec<u32>)>) -> Self {
        let groups = groups.into_iter().map(|(rate, magnitude, counts)| (Group { rate, magnitude }, Row { counts }));
        Self { groups: groups.collect(), changed, cost: 0 }
    }

    /// Returns the number of lanes that change.
    pub fn changed(&self) -> u64 {
        self.changed
    }

    /// Returns the approximate cost of encoding these lanes with optimal tables, in 256ths of a bit.
    pub fn cost(&self) -> u64 {
        self.cost
    }
}

fn group_of(row: &Row) -> Option<Group> {
    let (lanes, others) = (row.lanes(), row.others());
    let sum: u64 = row.counts.iter().zip(0..).map(|(&n, token)| u64::from(n) * magnitude(token)).sum();
    let rate = 2 * (log2(lanes.max(1)) - log2(others.max(1)).min(log2(lanes.max(1)))) / BIT;
    (others > 0).then(|| Group { rate: rate.min(31) as u8, magnitude: (4 * sum / others) as u16 })
}

/// Returns the magnitude of a token's values: linear for small tokens, logarithmic for large ones. A few large changes then do
/// not dominate the mean.
fn magnitude(token: u8) -> u64 {
    let value = base_value(token);
    match value.checked_ilog2() {
        Some(log2 @ 3..) => u64::from(2 + 2 * log2) + (value >> (log2 - 1) & 1),
        _ => value,
    }
}

/// Trainer of a table set. Its samples come from the tensors that will share the set.
#[derive(Debug, Default)]
pub struct Trainer(BTreeMap<Group, Row>);

impl Trainer {
    /// Adds a sample.
    pub fn add(&mut self, sample: Sample) {
        if self.0.is_empty() {
            self.0 = sample.groups;
            return;
        }
        for (group, row) in sample.groups {
            self.0.entry(group).or_default().add(&row.counts);
        }
    }

    /// Returns the set, or `None` if no lane of the samples changes. Values have at most `bits` bits. With `all`, every class
    /// gets every token, because exceptions are not possible. Otherwise, unless `seen_all`, two fallback classes serve unseen
    /// contexts.
    pub fn finish(self, bits: u32, all: bool, seen_all: bool) -> Option<TableSet> {
        let rows: Vec<Row> = self.0.into_values().collect();
        if rows.is_empty() {
            return None;
        }
        let own: Vec<u64> = rows.iter().map(own_cost).collect();
        let fallback = if all || seen_all { &[][..] } else { &FALLBACK_ZEROS };
        let sums = cluster(&rows, &own, MAX_CLASSES - fallback.len());
        let tokens = tokens_within(bits);
        let listed = (!all).then(|| exception_cost(bits as usize / 8) / BIT);
        let mut classes: Vec<_> = sums.iter().map(|sum| frequencies(sum, listed, tokens)).collect();
        classes.extend(fallback.iter().map(|&zeros| uniform_frequencies(zeros, tokens)));
        classes.sort_unstable_by(|a, b| b.cmp(a));
        classes.dedup();
        Some(TableSet::new(&classes))
    }
}

/// Returns frequencies with `zeros` for value 0, and the same frequency for all other tokens.
fn uniform_frequencies(zeros: u16, tokens: usize) -> Vec<u16> {
    let others = tokens as u16 - 1;
    let each = (SCALE as u16 - zeros) / others;
    core::iter::once(SCALE as u16 - others * each).chain(core::iter::repeat_n(each, others.into())).collect()
}

/// Returns frequencies proportional to counts, for at most `tokens_max` tokens. `listed` is the size of an exception in bits, or
/// `None` if exceptions are not possible.
///
/// Without exceptions, all tokens are present. With exceptions, a token is present if it saves more bits than it costs the other
/// tokens: a frequency of 1 costs each lane log2(1 + 1/4096) bits. Because a sample is incomplete, half an occurrence is added to
/// each token, up to UNSEEN tokens after the last token that occurs.
fn frequencies(sum: &Row, listed: Option<u64>, tokens_max: usize) -> Vec<u16> {
    const UNSEEN: usize = 3;
    /// Number of lanes that together lose one bit to a frequency of 1: 4096 · ln 2.
    const LANES: u64 = 2839;
    let total = sum.lanes().max(1);
    let seen = sum.counts.iter().rposition(|&n| n != 0).map_or(1, |last| last + 1);
    let count = |t: usize| u64::from(sum.counts.get(t).copied().unwrap_or(0));
    let saves = |t: usize, bits: u64| (2 * count(t) + 1) * (bits - u64::from(SCALE_LOG2)) * LANES >= 2 * total;
    let minimum = |t: usize| u64::from(t == 0 || listed.is_none_or(|bits| saves(t, bits)));
    let share = |t: usize| ((count(t) * u64::from(SCALE) + total / 2) / total).max(minimum(t)) as u16;
    let tokens = if listed.is_none() { tokens_max } else { (seen + UNSEEN).min(tokens_max) };
    let mut frequencies: Vec<u16> = (0..tokens).map(share).collect();
    while frequencies.last() == Some(&0) {
        frequencies.pop();
    }
    // The largest frequencies absorb the rounding errors, because an error costs least there.
    let mut sum: i32 = frequencies.iter().map(|&f| i32::from(f)).sum();
    while sum != SCALE as i32 {
        let Some(largest) = frequencies.iter_mut().max() else { break };
        let step = (SCALE as i32 - sum).clamp(-(i32::from(*largest) / 2), SCALE as i32);
        *largest = (i32::from(*largest) + step) as u16;
        sum += step;
    }
    frequencies
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All frequencies are rounded up, so the excess is larger than half of the largest frequency.
    #[test]
    fn frequencies_of_many_equally_frequent_tokens_are_valid() {
        let frequencies = frequencies(&Row { counts: vec![1; 167] }, Some(48), 180);
        assert_eq!(frequencies.iter().map(|&f| u32::from(f)).sum::<u32>(), SCALE);
        assert!(frequencies.iter().all(|f| (1..=25).contains(f)), "{frequencies:?}");
    }

    /// With 2^24 lanes and exceptions of 48 bits, a token saves bits from 165 occurrences on.
    #[test]
    fn a_token_is_present_if_it_saves_more_than_it_costs() {
        let with = |n: u32| frequencies(&Row { counts: vec![1 << 24, 1 << 16, n, 1 << 16] }, Some(48), 180);
        assert_eq!(with(164)[2], 0);
        assert_eq!(with(165)[2], 1);
        assert_eq!(with(165).len(), 4, "what has not been seen has no token among so many lanes");
        let few = frequencies(&Row { counts: vec![1 << 10, 8] }, Some(48), 180);
        assert_eq!(few.len(), 5, "but it has among few");
        assert_eq!(frequencies(&Row { counts: vec![1 << 24] }, None, 180).len(), 180);
    }

    proptest! {
        #[test]
        fn frequencies_are_valid(
            counts in proptest::collection::vec(prop_oneof![Just(0u32), 0u32..10, any::<u32>()], 1..180),
            listed in proptest::option::of(40u64..100),
        ) {
            let frequencies = frequencies(&Row { counts: counts.clone() }, listed, 180);
            prop_assert_eq!(frequencies.iter().map(|&f| u32::from(f)).sum::<u32>(), SCALE);
            prop_assert!(frequencies[0] > 0);
            prop_assert_ne!(frequencies.last(), Some(&0));
            if listed.is_none() {
                prop_assert!(frequencies.len() == 180 && frequencies.iter().all(|&f| f > 0));
            }
        }
    }
}
