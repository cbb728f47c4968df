//! Makes table sets from samples of the tensors that will share them.
//!
//! Training clusters the contexts of all tensors into classes with similar statistics:
//! 1. Contexts with similar rates of change and similar mean magnitudes of change form a group. There are a few hundred groups.
//! 2. Each group moves to the class that encodes it in the fewest bits (k-means with the Kullback–Leibler divergence).
//! 3. Of the classes whose split saves more than its table costs, the one with the largest excess cost is split.

use super::cost::{BIT, exception_cost, log2};
use super::stats::{LEVELS, Row, Split, Stats, all_lanes};
use super::tables::{MAX_CLASSES, SCALE, SCALE_LOG2, TableSet, base_value, tokens_within};
use crate::codec::Difference;
use crate::dispatch::vectorized;
use crate::lane::{Dtype, Lane, with_lane};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Number of rounds of reassignment after each split.
const ROUNDS: usize = 2;
/// Cost of a table entry.
const ENTRY_COST: u64 = 12 * BIT;

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
pub(crate) struct Sample {
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

    /// Returns a sample in which `changed` lanes change, from the token counts of its groups of contexts: rate of change and mean
    /// magnitude as in [`Group`], and the number of lanes by token.
    #[cfg(feature = "cuda")]
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
pub(crate) struct Trainer(BTreeMap<Group, Row>);

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
    std::iter::once(SCALE as u16 - others * each).chain(std::iter::repeat_n(each, others.into())).collect()
}

/// Excess cost of a class: the cost of its rows minus their cost if each row had its own class. Ordered by the total.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Excess {
    total: u64,
    largest: u64,
    /// Row with the largest excess cost.
    row: usize,
}

/// Clusters rows into at most `classes_max` classes, and returns the sum of each class. `own` is the cost of each row if it had its
/// own class.
fn cluster(rows: &[Row], own: &[u64], classes_max: usize) -> Vec<Row> {
    let columns = Columns::new(rows);
    let mut clusters = Clusters::new(rows, &columns, own);
    while clusters.classes.len() < classes_max && clusters.split() {}
    clusters.classes.iter().map(|class| Row { counts: class.counts().collect() }).collect()
}

/// Rows per vector. Columns are padded to a multiple of it.
const VECTOR: usize = 16;

/// The counts of all rows, token by token. The rows are in descending order of their lengths, so that each column has the counts of
/// the first rows only.
struct Columns {
    /// Index of each row.
    order: Vec<usize>,
    /// The columns, one after the other.
    counts: Vec<u32>,
    /// Number of rows in each column.
    lengths: Vec<usize>,
}

impl Columns {
    fn new(rows: &[Row]) -> Self {
        let used = |row: &Row| row.counts.iter().rposition(|&n| n != 0).map_or(0, |last| last + 1);
        let used: Vec<usize> = rows.iter().map(used).collect();
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(used[i]));
        let (mut counts, mut lengths) = (Vec::new(), Vec::new());
        for token in 0..order.first().map_or(0, |&i| used[i]) {
            let length = order.partition_point(|&i| used[i] > token).next_multiple_of(VECTOR);
            let count = |place: usize| order.get(place).and_then(|&i| rows[i].counts.get(token)).copied().unwrap_or(0);
            counts.extend((0..length).map(count));
            lengths.push(length);
        }
        Self { order, counts, lengths }
    }

    /// Returns the number of rows with padding.
    fn rows(&self) -> usize {
        self.order.len().next_multiple_of(VECTOR)
    }

    /// Returns the cost of each row, in their order here, in a class with these counts.
    fn costs(&self, counts: impl Iterator<Item = u32> + Clone) -> Vec<u64> {
        let tokens = token_costs(counts, self.lengths.len());
        let mut costs = vec![0; self.rows()];
        vectorized(
            #[inline(always)]
            || {
                let mut rest = &self.counts[..];
                for (&length, &token) in self.lengths.iter().zip(&tokens) {
                    let (column, after) = rest.split_at(length);
                    for (cost, &count) in costs.iter_mut().zip(column) {
                        *cost += u64::from(count) * u64::from(token);
                    }
                    rest = after;
                }
            },
        );
        costs
    }
}

/// A class of rows. Clones share its contents until they change.
#[derive(Clone)]
struct Class {
    /// Number of lanes by token, of the rows that were in the class when it was last summed up.
    sum: Rc<Vec<u64>>,
    /// Number of these rows.
    rows: usize,
    /// Number of tokens that occur in these rows.
    entries: u64,
    /// Cost of each row in this class.
    costs: Rc<Vec<u64>>,
}

impl Class {
    /// Returns a class without rows. Until it is summed up, rows cost what they cost in a class with these counts.
    fn new(columns: &Columns, counts: &[u32]) -> Self {
        let costs = Rc::new(columns.costs(counts.iter().copied()));
        Self { sum: Rc::new(vec![0; columns.lengths.len()]), rows: 0, entries: 0, costs }
    }

    /// Returns the number of lanes by token. Counts saturate.
    fn counts(&self) -> impl Iterator<Item = u32> + Clone {
        self.sum.iter().map(|&n| n.min(u32::MAX.into()) as u32)
    }

    /// Computes what depends on the sum.
    fn update(&mut self, columns: &Columns) {
        self.entries = self.sum.iter().filter(|&&n| n != 0).count() as u64;
        self.costs = Rc::new(columns.costs(self.counts()));
    }
}

/// Assignment of rows to classes. Vectors are in the order of the columns, with padding.
#[derive(Clone)]
struct Clusters<'a> {
    rows: &'a [Row],
    columns: &'a Columns,
    /// Cost of each row if it had its own class, in the order of `rows`.
    own: &'a [u64],
    /// Class of each row.
    class: Vec<u64>,
    /// Class of each row when the classes were last summed up.
    summed: Vec<u64>,
    /// Cost of each row in its class, without extra bits.
    cost: Vec<u64>,
    classes: Vec<Class>,
}

/// Marks a row that is in no class yet.
const NO_CLASS: u64 = u64::MAX;

impl<'a> Clusters<'a> {
    fn new(rows: &'a [Row], columns: &'a Columns, own: &'a [u64]) -> Self {
        let of = |value| vec![value; columns.rows()];
        let classes = vec![Class::new(columns, &[])];
        let mut clusters = Self { rows, columns, own, class: of(0), summed: of(NO_CLASS), cost: of(0), classes };
        clusters.sum_up();
        clusters.assign();
        clusters
    }

    /// Moves rows from sum to sum, as they have moved from class to class.
    fn sum_up(&mut self) {
        let Self { rows, columns, class, summed, classes, .. } = self;
        // The costs of a class without rows are not those of its sum.
        let mut is_changed: Vec<bool> = classes.iter().map(|class| class.rows == 0).collect();
        let moves = columns.order.iter().zip(summed).zip(class).filter(|((_, before), after)| before != after);
        vectorized(
            #[inline(always)]
            || {
                for ((&row, before), &mut after) in moves {
                    let counts = &rows[row].counts;
                    if let Some(class) = classes.get_mut(*before as usize) {
                        Rc::make_mut(&mut class.sum).iter_mut().zip(counts).for_each(|(sum, &n)| *sum -= u64::from(n));
                        class.rows -= 1;
                        is_changed[*before as usize] = true;
                    }
                    let class = &mut classes[after as usize];
                    Rc::make_mut(&mut class.sum).iter_mut().zip(counts).for_each(|(sum, &n)| *sum += u64::from(n));
                    class.rows += 1;
                    is_changed[after as usize] = true;
                    *before = after;
                }
            },
        );
        for (class, _) in self.classes.iter_mut().zip(is_changed).filter(|(_, is_changed)| *is_changed) {
            class.update(self.columns);
        }
    }

    /// Moves each row to the class in which it costs least, the first one if there are several.
    fn assign(&mut self) {
        self.class.fill(0);
        self.cost.fill(u64::MAX);
        for (number, class) in (0..).zip(&self.classes) {
            // The compiler vectorizes the loop over a vector of rows. A loop over all rows it leaves scalar.
            let vectors = self.class.as_chunks_mut::<VECTOR>().0.iter_mut().zip(self.cost.as_chunks_mut::<VECTOR>().0);
            let vectors = vectors.zip(class.costs.as_chunks::<VECTOR>().0);
            vectorized(
                #[inline(always)]
                || {
                    for ((best, least), costs) in vectors {
                        for k in 0..VECTOR {
                            best[k] = if costs[k] < least[k] { number } else { best[k] };
                            least[k] = costs[k].min(least[k]);
                        }
                    }
                },
            );
        }
    }

    fn total(&self) -> u64 {
        let entries: u64 = self.classes.iter().map(|class| class.entries).sum();
        self.cost.iter().sum::<u64>() + entries * ENTRY_COST
    }

    /// Splits the class with the largest excess cost among those whose split saves bits. The new class starts with the row that
    /// has the largest excess cost. Returns false if no split saves bits; the assignment is then unchanged.
    fn split(&mut self) -> bool {
        let mut excess = vec![Excess::default(); self.classes.len()];
        for ((&row, &class), &cost) in self.columns.order.iter().zip(&self.class).zip(&self.cost) {
            let (cost, excess) = (cost.saturating_sub(self.own[row]), &mut excess[class as usize]);
            excess.total += cost;
            if (cost, row) >= (excess.largest, excess.row) {
                (excess.largest, excess.row) = (cost, row);
            }
        }
        excess.sort_unstable_by(|a, b| b.cmp(a));
        let total = self.total();
        let split = excess.iter().filter(|excess| excess.total > 0).find_map(|excess| self.split_at(excess.row, total));
        split.map(|split| *self = split).is_some()
    }

    /// Returns the assignment with one more class, which starts with row `seed`; `None` unless that costs less than `total`.
    fn split_at(&self, seed: usize, total: u64) -> Option<Self> {
        let mut split = self.clone();
        split.classes.push(Class::new(self.columns, &self.rows[seed].counts));
        for _ in 0..ROUNDS {
            split.assign();
            split.sum_up();
        }
        split.assign();
        let pays = split.classes.iter().all(|class| class.rows > 0) && split.total() < total;
        pays.then_some(split)
    }
}

/// Returns the cost of a row if it had its own class.
fn own_cost(row: &Row) -> u64 {
    let total = log2(row.lanes().max(1));
    row.counts.iter().filter(|&&n| n != 0).map(|&n| u64::from(n) * (total - log2(n.into()))).sum()
}

/// Returns the cost of each token in a class with these counts. 1/32 is added to each count, so that every cost is finite.
fn token_costs(counts: impl Iterator<Item = u32> + Clone, tokens: usize) -> Vec<u32> {
    const PART: u64 = 32;
    let lanes: u64 = counts.clone().map(u64::from).sum();
    let total = log2(PART * lanes + super::tables::MAX_TOKENS as u64);
    let cost = |n: u32| (total - log2(PART * u64::from(n) + 1)) as u32;
    let mut costs = vec![total as u32; tokens]; // log2(1) is 0
    for (cost_of, n) in costs.iter_mut().zip(counts).filter(|(_, n)| *n != 0) {
        *cost_of = cost(n);
    }
    costs
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

    /// Splits as [`Clusters`] does, with all sums and costs computed anew in each round. Returns the sum of each class.
    fn cluster_slowly(rows: &[Vec<u32>], classes_max: usize) -> Vec<Vec<u32>> {
        fn sums(rows: &[Vec<u32>], of: &[usize], classes: usize) -> Vec<Row> {
            let mut sums = vec![Row::default(); classes];
            rows.iter().zip(of).for_each(|(row, &class)| sums[class].add(row));
            sums
        }
        fn assign(rows: &[Vec<u32>], sums: &[Row]) -> (Vec<usize>, Vec<u64>) {
            let costs: Vec<_> = sums.iter().map(|sum| token_costs(sum.counts.iter().copied(), 180)).collect();
            let cost = |row: &Vec<u32>, class: usize| {
                row.iter().zip(&costs[class]).map(|(&n, &c)| u64::from(n) * u64::from(c)).sum::<u64>()
            };
            rows.iter()
                .map(|row| (0..sums.len()).map(|class| (cost(row, class), class)).min().map(|(a, b)| (b, a)).unwrap())
                .unzip()
        }
        let total = |sums: &[Row], costs: &[u64]| {
            let entries = sums.iter().flat_map(|sum| &sum.counts).filter(|&&n| n != 0).count() as u64;
            costs.iter().sum::<u64>() + entries * ENTRY_COST
        };
        let own: Vec<u64> = rows.iter().map(|row| own_cost(&Row { counts: row.clone() })).collect();
        let mut best = sums(rows, &vec![0; rows.len()], 1);
        while best.len() < classes_max {
            let (class, cost) = assign(rows, &best);
            let mut excess = vec![Excess::default(); best.len()];
            for i in 0..rows.len() {
                let (cost, excess) = (cost[i].saturating_sub(own[i]), &mut excess[class[i]]);
                excess.total += cost;
                if cost >= excess.largest {
                    (excess.largest, excess.row) = (cost, i);
                }
            }
            excess.sort_unstable_by(|a, b| b.cmp(a));
            let split = excess.iter().filter(|excess| excess.total > 0).find_map(|excess| {
                let mut split = best.clone();
                split.push(Row { counts: rows[excess.row].clone() });
                for _ in 0..ROUNDS {
                    split = sums(rows, &assign(rows, &split).0, split.len());
                }
                let pays = total(&split, &assign(rows, &split).1) < total(&best, &cost);
                (pays && split.iter().all(|sum| !sum.counts.is_empty())).then_some(split)
            });
            let Some(split) = split else { break };
            best = split;
        }
        best.into_iter().map(|sum| sum.counts).collect()
    }

    /// Rows around a few random distributions.
    fn clustered_rows() -> impl Strategy<Value = Vec<Vec<u32>>> {
        let row = (0u32..5, 1usize..40, 0u32..14, any::<u64>()).prop_map(|(kind, tokens, log2, seed)| {
            let mut random = seed;
            let count = |t: usize| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                ((random >> 40) as u32 % (1 << log2)) >> (t as u32 * (kind + 1) / 4).min(31)
            };
            let mut counts: Vec<u32> = (0..tokens + 1).map(count).collect();
            counts[1] = counts[1].max(1);
            counts
        });
        proptest::collection::vec(row, 1..60)
    }

    proptest! {
        #[test]
        fn classes_are_those_of_the_slow_way(rows in clustered_rows(), classes_max in 1usize..=MAX_CLASSES) {
            let structs: Vec<_> = rows.iter().map(|counts| Row { counts: counts.clone() }).collect();
            let own: Vec<u64> = structs.iter().map(own_cost).collect();
            let found = cluster(&structs, &own, classes_max);
            let trimmed = |counts: &[u32]| counts[..counts.iter().rposition(|&n| n != 0).map_or(0, |last| last + 1)].to_vec();
            let found: Vec<_> = found.iter().map(|sum| trimmed(&sum.counts)).collect();
            let expected: Vec<_> = cluster_slowly(&rows, classes_max).iter().map(|counts| trimmed(counts)).collect();
            prop_assert_eq!(found, expected);
        }

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
