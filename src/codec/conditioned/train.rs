//! Table sets from a sample of the tensors that will share them.
//!
//! Contexts of all tensors are put into classes that code alike: first by how often and how far their lanes change, which makes
//! some hundred groups of them, then by moving each group to the class that codes it in the fewest bits (k-means with the
//! Kullback–Leibler divergence), splitting the class that wastes most of those for which another table pays.

use super::cost::{BIT, exception_cost, log2};
use super::stats::{LEVELS, Row, Split, Stats, all_lanes};
use super::tables::{MAX_CLASSES, SCALE, SCALE_LOG2, TableSet, least_value, tokens_within};
use crate::codec::Difference;
use crate::lane::{Dtype, Lane, with_lane};
use std::collections::BTreeMap;

/// Rounds of moving groups between classes after each split.
const ROUNDS: usize = 2;
/// What an entry of a table costs.
const ENTRY_COST: u64 = 12 * BIT;

/// Frequencies of the value 0 in classes for what a sample has not seen: where few lanes change, and where many do.
const BROAD: [u16; 2] = [3584, 512];

/// Rate of change in half powers of two, and mean magnitude of the changes in quarters.
type Group = (u8, u16);

/// What a piece of a tensor says.
#[derive(Debug, Default)]
pub(crate) struct Sample {
    groups: BTreeMap<Group, Row>,
    changed: u64,
    cost: u64,
}

impl Sample {
    /// Looks at some lanes of a tensor, a multiple of 128 but for its end.
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
            // Where many lanes change the encoder will tell blocks apart, and classes should know both kinds.
            let by_level = 16 * changed * L::BYTES >= base.len();
            let apart = [0..1, 1..2, 2..3, 3..4];
            let together = std::slice::from_ref(&(0..LEVELS));
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

    /// Lanes that change.
    pub fn changed(&self) -> u64 {
        self.changed
    }

    /// About what coding these lanes with tables of their own would cost, in fractions of a bit.
    pub fn cost(&self) -> u64 {
        self.cost
    }
}

fn group_of(row: &Row) -> Option<Group> {
    let (lanes, others) = (row.lanes(), row.others());
    let sum: u64 = row.counts.iter().zip(0..).map(|(&n, token)| u64::from(n) * magnitude(token)).sum();
    let rate = 2 * (log2(lanes.max(1)) - log2(others.max(1)).min(log2(lanes.max(1)))) / BIT;
    (others > 0).then(|| (rate.min(31) as u8, (4 * sum / others) as u16))
}

/// A token's value where that is small, and a measure of its logarithm beyond: few large changes are not a matter of their own.
fn magnitude(token: u8) -> u64 {
    let value = least_value(token);
    match value.checked_ilog2() {
        Some(log2 @ 3..) => u64::from(2 + 2 * log2) + (value >> (log2 - 1) & 1),
        _ => value,
    }
}

/// Makes a table set from samples of tensors that are to share it.
#[derive(Debug, Default)]
pub(crate) struct Trainer(BTreeMap<Group, Row>);

impl Trainer {
    /// Adds a sample.
    pub fn add(&mut self, sample: &Sample) {
        for (group, row) in &sample.groups {
            self.0.entry(*group).or_default().add(&row.counts);
        }
    }

    /// The set; none if nothing has changed. `bits` is the number of bits of a value, and with `all` every value has a token in
    /// every class, because there is no other way to code it. Unless the samples have `seen_all`, there are two broad classes for
    /// what they have not seen.
    pub fn finish(self, bits: u32, all: bool, seen_all: bool) -> Option<TableSet> {
        let rows: Vec<Row> = self.0.into_values().collect();
        if rows.is_empty() {
            return None;
        }
        let own: Vec<u64> = rows.iter().map(own_cost).collect();
        let mut clusters = Clusters::new(&rows, &own);
        let broad = if all || seen_all { &[][..] } else { &BROAD };
        while clusters.sums.len() < MAX_CLASSES - broad.len() && clusters.split() {}
        let tokens = tokens_within(bits);
        let listed = (!all).then(|| exception_cost(bits as usize / 8) / BIT);
        let mut classes: Vec<_> = clusters.sums.iter().map(|sum| frequencies(sum, listed, tokens)).collect();
        classes.extend(broad.iter().map(|&zeros| even(zeros, tokens)));
        classes.sort_unstable_by(|a, b| b.cmp(a));
        classes.dedup();
        Some(TableSet::new(&classes))
    }
}

/// Frequencies of a class that has `zeros` for the value 0, and all other tokens alike.
fn even(zeros: u16, tokens: usize) -> Vec<u16> {
    let others = tokens as u16 - 1;
    let each = (SCALE as u16 - zeros) / others;
    std::iter::once(SCALE as u16 - others * each).chain(std::iter::repeat_n(each, others.into())).collect()
}

/// Groups in classes.
#[derive(Clone)]
struct Clusters<'a> {
    rows: &'a [Row],
    /// What each row would cost with a class of its own.
    own: &'a [u64],
    /// Class of each row.
    class: Vec<usize>,
    /// What each row costs in its class, extra bits apart.
    cost: Vec<u64>,
    /// Sum of the rows of each class.
    sums: Vec<Row>,
    /// By class, what each row costs in it. Empty if the sum of the class has changed since.
    costs: Vec<Vec<u64>>,
}

impl<'a> Clusters<'a> {
    fn new(rows: &'a [Row], own: &'a [u64]) -> Self {
        let class = vec![0; rows.len()];
        let mut clusters =
            Self { rows, own, class, cost: vec![0; rows.len()], sums: vec![Row::default()], costs: vec![Vec::new()] };
        clusters.sum_up();
        clusters.assign();
        clusters
    }

    fn sum_up(&mut self) {
        let mut sums = vec![Row::default(); self.sums.len()];
        for (row, &class) in self.rows.iter().zip(&self.class) {
            sums[class].add(&row.counts);
        }
        for ((sum, new), costs) in self.sums.iter_mut().zip(sums).zip(&mut self.costs) {
            if sum.counts != new.counts {
                *sum = new;
                costs.clear();
            }
        }
    }

    fn assign(&mut self) {
        for (sum, costs) in self.sums.iter().zip(&mut self.costs).filter(|(_, costs)| costs.is_empty()) {
            let tokens = token_costs(sum);
            let of = |row: &Row| row.counts.iter().zip(&tokens).map(|(&n, &c)| u64::from(n) * c).sum();
            *costs = self.rows.iter().map(of).collect();
        }
        for (i, (class, cost)) in self.class.iter_mut().zip(&mut self.cost).enumerate() {
            let costs = self.costs.iter().map(|costs| costs[i]).enumerate();
            (*class, *cost) = costs.min_by_key(|&(class, cost)| (cost, class)).unwrap_or_default();
        }
    }

    fn total(&self) -> u64 {
        let entries = self.sums.iter().map(|sum| sum.counts.iter().filter(|&&n| n != 0).count() as u64);
        self.cost.iter().sum::<u64>() + entries.sum::<u64>() * ENTRY_COST
    }

    /// Gives a class another one beside it, begun by its worst row: the class that wastes most of those for which that pays; false,
    /// and nothing changed, if there is none.
    fn split(&mut self) -> bool {
        let waste = |(&own, &cost): (&u64, &u64)| cost.saturating_sub(own);
        let mut wasted = vec![(0, 0, 0); self.sums.len()];
        for (i, (waste, &class)) in self.own.iter().zip(&self.cost).map(waste).zip(&self.class).enumerate() {
            let (sum, worst, row) = &mut wasted[class];
            *sum += waste;
            if waste >= *worst {
                (*worst, *row) = (waste, i);
            }
        }
        wasted.sort_unstable_by(|a, b| b.cmp(a));
        let split = wasted.iter().take_while(|(waste, ..)| *waste > 0).find_map(|&(_, _, seed)| self.split_at(seed));
        split.map(|split| *self = split).is_some()
    }

    /// With one class more, begun by a row, if that pays.
    fn split_at(&self, seed: usize) -> Option<Self> {
        let mut split = self.clone();
        split.sums.push(self.rows[seed].clone());
        split.costs.push(Vec::new());
        for _ in 0..ROUNDS {
            split.assign();
            split.sum_up();
        }
        split.assign();
        let pays = split.sums.iter().all(|sum| !sum.counts.is_empty()) && split.total() < self.total();
        pays.then_some(split)
    }
}

/// What a row would cost with a class of its own.
fn own_cost(row: &Row) -> u64 {
    let total = log2(row.lanes().max(1));
    row.counts.iter().filter(|&&n| n != 0).map(|&n| u64::from(n) * (total - log2(n.into()))).sum()
}

/// What each token costs in a class with these counts; one that has not been seen costs as if it had been seen a little.
fn token_costs(sum: &Row) -> Vec<u64> {
    const PART: u64 = 32;
    let total = log2(PART * sum.lanes() + super::tables::MAX_TOKENS as u64);
    let cost = |n: u32| total - log2(PART * u64::from(n) + 1);
    let mut costs: Vec<u64> = sum.counts.iter().map(|&n| cost(n)).collect();
    costs.resize(super::tables::MAX_TOKENS, cost(0));
    costs
}

/// Frequencies in proportion to counts. A value without a token is `listed`, in so many bits, or must have a token, all `most` of
/// which are there then. Else a token is there if it saves more than it takes from the others: one of frequency 1 costs each lane
/// log2(1 + 1/4096) bits. A sample has not seen everything: half a value is added to each token's, up to some after the last one.
fn frequencies(sum: &Row, listed: Option<u64>, most: usize) -> Vec<u16> {
    const UNSEEN: usize = 3;
    /// Lanes of which a frequency of 1 takes a bit: 4096 · ln 2.
    const LANES: u64 = 2839;
    let total = sum.lanes().max(1);
    let seen = sum.counts.iter().rposition(|&n| n != 0).map_or(1, |last| last + 1);
    let count = |t: usize| u64::from(sum.counts.get(t).copied().unwrap_or(0));
    let saves = |t: usize, bits: u64| (2 * count(t) + 1) * (bits - u64::from(SCALE_LOG2)) * LANES >= 2 * total;
    let least = |t: usize| u64::from(t == 0 || listed.is_none_or(|bits| saves(t, bits)));
    let share = |t: usize| ((count(t) * u64::from(SCALE) + total / 2) / total).max(least(t)) as u16;
    let tokens = if listed.is_none() { most } else { (seen + UNSEEN).min(most) };
    let mut frequencies: Vec<u16> = (0..tokens).map(share).collect();
    while frequencies.last() == Some(&0) {
        frequencies.pop();
    }
    // The largest ones bear the rounding: it matters least there.
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

    /// All shares are rounded up, so that more is to be taken away than half of the largest frequency.
    #[test]
    fn frequencies_of_many_tokens_that_occur_alike_are_valid() {
        let frequencies = frequencies(&Row { counts: vec![1; 167] }, Some(48), 180);
        assert_eq!(frequencies.iter().map(|&f| u32::from(f)).sum::<u32>(), SCALE);
        assert!(frequencies.iter().all(|f| (1..=25).contains(f)), "{frequencies:?}");
    }

    /// Of 2^24 lanes, where an exception has 48 bits, 165 of a value pay for its token.
    #[test]
    fn a_token_is_there_if_it_saves_more_than_it_takes() {
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
