//! Clusters rows of counts into classes with similar statistics: k-means with the Kullback–Leibler divergence.
//!
//! All rows begin in one class. The class with the largest excess cost among those whose split saves bits is split, until there are
//! enough classes. Computing what every row costs in a class takes most of the time. Only classes whose rows have changed are
//! computed again.

use super::cost::{BIT, log2};
use super::stats::Row;
use super::tables::{MAX_CLASSES, MAX_TOKENS};
use crate::codec::simd::{CLASS_BITS, CountTiles, Platform, ROWS, TILE_TOKENS};
use crate::dispatch::run_vectorized;
use crate::prelude::*;

/// Number of rounds of reassignment after each split.
const ROUNDS: usize = 2;
/// Cost of a table entry.
const ENTRY_COST: u64 = 12 * BIT;

/// Clusters rows into at most `classes_max` classes, and returns the sum of each class. `own` is the cost of each row if it had its
/// own class.
pub(super) fn cluster(rows: &[Row], own: &[u64], classes_max: usize) -> Vec<Row> {
    cluster_on(Platform::best(), rows, own, classes_max)
}

fn cluster_on(platform: Platform, rows: &[Row], own: &[u64], classes_max: usize) -> Vec<Row> {
    let mut clustering = Clustering::new(platform, rows, own);
    let mut clusters = clustering.one_class();
    while clusters.classes.len() < classes_max
        && let Some(split) = clustering.split(&clusters)
    {
        clusters = split;
    }
    let sums = (0..clusters.classes.len()).map(|class| clusters.sum(class));
    sums.map(|sum| Row { counts: sum.iter().map(|&n| saturated(n) as u32).collect() }).collect()
}

/// Excess cost of a class: the cost of its rows minus their cost if each row had its own class. Ordered by the total.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Excess {
    total: u64,
    largest: u64,
    /// Row with the largest excess cost.
    row: usize,
    /// Place of this row.
    place: usize,
}

/// A row to be clustered.
struct Member<'a> {
    /// Index of the row.
    row: usize,
    /// Number of lanes by token, up to the last token that occurs.
    counts: &'a [u32],
    /// Cost of the row if it had its own class.
    own: u64,
}

/// The rows, and memory for what they cost.
struct Clustering<'a> {
    platform: Platform,
    /// The rows in descending order of their lengths, so that the rows of a block are about equally long.
    members: Vec<Member<'a>>,
    tiles: CountTiles,
    /// Number of tokens of the longest row, rounded up to whole tiles.
    tokens: usize,
    /// Two arrays per class. One has the keys of all rows in the class ([`Platform::keys`]). A split of the clusters writes the
    /// other one.
    keys: Vec<[u64; ROWS]>,
    /// Memory for the cost of each token in a class.
    costs: Vec<u16>,
}

/// Assignment of rows to classes. Rows are in the order of the members.
#[derive(Clone)]
struct Clusters {
    /// The least key of each row: its cost without extra bits, and its class.
    least: Vec<[u64; ROWS]>,
    /// Class of each row when the classes were last summed up.
    summed: Vec<u8>,
    classes: Vec<Class>,
    /// Number of lanes by token of each class, of the rows that were in it when it was last summed up.
    sums: Vec<u64>,
}

#[derive(Clone, Copy)]
struct Class {
    /// Number of rows that were in the class when it was last summed up.
    rows: usize,
    /// Number of tokens that occur in these rows.
    entries: u64,
    /// Number of the array that has the keys.
    keys: usize,
}

/// Marks a row that is in no class yet.
const NO_CLASS: u8 = u8::MAX;

fn class_of(key: u64) -> usize {
    (key & ((1 << CLASS_BITS) - 1)) as usize
}

fn cost_of(key: u64) -> u64 {
    key >> CLASS_BITS
}

/// Limits a sum as counts are limited.
#[inline(always)]
fn saturated(n: u64) -> u64 {
    n.min(u32::MAX.into())
}

impl Clusters {
    /// Returns the number of lanes by token.
    fn sum(&self, class: usize) -> &[u64] {
        let tokens = self.sums.len() / self.classes.len();
        &self.sums[tokens * class..][..tokens]
    }

    fn sum_mut(&mut self, class: usize) -> &mut [u64] {
        let tokens = self.sums.len() / self.classes.len();
        &mut self.sums[tokens * class..][..tokens]
    }

    fn total(&self) -> u64 {
        let entries: u64 = self.classes.iter().map(|class| class.entries).sum();
        self.least.as_flattened().iter().map(|&key| cost_of(key)).sum::<u64>() + entries * ENTRY_COST
    }
}

impl<'a> Clustering<'a> {
    fn new(platform: Platform, rows: &'a [Row], own: &[u64]) -> Self {
        let used = |row: &Row| row.counts.iter().rposition(|&n| n != 0).map_or(0, |last| last + 1);
        let mut order: Vec<(usize, usize)> = rows.iter().map(used).zip(0..).collect();
        order.sort_unstable_by_key(|&(length, _)| core::cmp::Reverse(length));
        let member = |(length, row): (usize, usize)| Member { row, counts: &rows[row].counts[..length], own: own[row] };
        let members: Vec<_> = order.into_iter().map(member).collect();
        let mut tiles = CountTiles::default();
        for block in members.chunks(ROWS) {
            let mut counts = [&[][..]; ROWS];
            counts.iter_mut().zip(block).for_each(|(counts, member)| *counts = member.counts);
            tiles.push(&counts);
        }
        let tokens = members.first().map_or(0, |longest| longest.counts.len().next_multiple_of(TILE_TOKENS));
        let keys = Vec::with_capacity(2 * MAX_CLASSES * tiles.blocks());
        Self { platform, members, tiles, tokens, keys, costs: vec![0; tokens] }
    }

    /// Returns all rows in one class.
    fn one_class(&mut self) -> Clusters {
        let mut clusters = Clusters {
            least: vec![[0; ROWS]; self.tiles.blocks()],
            summed: vec![NO_CLASS; self.members.len()],
            classes: Vec::with_capacity(MAX_CLASSES),
            sums: Vec::with_capacity(MAX_CLASSES * self.tokens),
        };
        self.add_class(&mut clusters);
        self.sum_up(&mut clusters, &[]);
        self.assign(&mut clusters);
        clusters
    }

    /// Adds a class without rows.
    fn add_class(&mut self, clusters: &mut Clusters) {
        let keys = 2 * clusters.classes.len();
        clusters.classes.push(Class { rows: 0, entries: 0, keys });
        clusters.sums.resize(self.tokens * clusters.classes.len(), 0);
        self.keys.resize(self.keys.len().max((keys + 2) * self.tiles.blocks()), [0; ROWS]);
    }

    /// Computes what depends on the sum of a class. The keys of the classes of `kept` stay as they are.
    fn update(&mut self, clusters: &mut Clusters, class: usize, kept: &[Class]) {
        let entries = token_costs(clusters.sum(class), &mut self.costs);
        let keys = kept.get(class).map_or(2 * class, |kept| kept.keys ^ 1);
        clusters.classes[class] = Class { entries, keys, ..clusters.classes[class] };
        let blocks = self.tiles.blocks();
        self.platform.keys(&self.tiles, self.costs.as_chunks().0, class as u8, &mut self.keys[blocks * keys..][..blocks]);
    }

    /// Moves rows from sum to sum, as they have moved from class to class. The keys of the classes of `kept` stay as they are.
    fn sum_up(&mut self, clusters: &mut Clusters, kept: &[Class]) {
        let Clusters { least, summed, classes, sums } = clusters;
        let (count, tokens) = (classes.len(), self.tokens);
        // The keys of a class without rows are not those of its sum.
        let mut is_changed = [false; MAX_CLASSES];
        is_changed.iter_mut().zip(&*classes).for_each(|(is_changed, class)| *is_changed = class.rows == 0);
        for ((member, summed), &key) in self.members.iter().zip(summed).zip(least.as_flattened()) {
            let (before, after) = (usize::from(*summed), class_of(key));
            if before == after {
                continue;
            }
            if let Some(class) = classes.get_mut(before) {
                subtract(&mut sums[tokens * before..][..tokens], member.counts);
                class.rows -= 1;
                is_changed[before] = true;
            }
            add(&mut sums[tokens * after..][..tokens], member.counts);
            classes[after].rows += 1;
            is_changed[after] = true;
            *summed = after as u8;
        }
        for class in (0..count).filter(|&class| is_changed[class]) {
            self.update(clusters, class, kept);
        }
    }

    /// Moves each row to the class in which it costs least, the first one if there are several.
    fn assign(&self, clusters: &mut Clusters) {
        let Clusters { least, classes, .. } = clusters;
        let blocks = self.tiles.blocks();
        let mut keys = [&[][..]; MAX_CLASSES];
        keys.iter_mut().zip(&*classes).for_each(|(keys, class)| *keys = &self.keys[blocks * class.keys..][..blocks]);
        let keys = &keys[..classes.len()];
        run_vectorized(
            #[inline(always)]
            || {
                for (block, least) in least.iter_mut().enumerate() {
                    // The compiler keeps the elements of a local array in vectors.
                    let mut of_block = [u64::MAX; ROWS];
                    for keys in keys {
                        of_block.iter_mut().zip(&keys[block]).for_each(|(least, &key)| *least = key.min(*least));
                    }
                    *least = of_block;
                }
            },
        );
    }

    /// Splits the class with the largest excess cost among those whose split saves bits. The new class starts with the row that
    /// has the largest excess cost. Returns `None` if no split saves bits.
    fn split(&mut self, clusters: &Clusters) -> Option<Clusters> {
        let mut excess = [Excess::default(); MAX_CLASSES];
        for (place, (member, &key)) in self.members.iter().zip(clusters.least.as_flattened()).enumerate() {
            let (row, cost, excess) = (member.row, cost_of(key).saturating_sub(member.own), &mut excess[class_of(key)]);
            excess.total += cost;
            if (cost, row) >= (excess.largest, excess.row) {
                (excess.largest, excess.row, excess.place) = (cost, row, place);
            }
        }
        excess.sort_unstable_by(|a, b| b.cmp(a));
        let total = clusters.total();
        excess.iter().filter(|excess| excess.total > 0).find_map(|excess| self.split_at(clusters, excess.place, total))
    }

    /// Returns the clusters with one more class, which starts with the row at place `seed`; `None` unless that costs less than
    /// `total`.
    fn split_at(&mut self, clusters: &Clusters, seed: usize, total: u64) -> Option<Clusters> {
        let mut split = clusters.clone();
        let (kept, new) = (&clusters.classes, clusters.classes.len());
        self.add_class(&mut split);
        add(split.sum_mut(new), self.members[seed].counts);
        self.update(&mut split, new, kept);
        split.sum_mut(new).fill(0);
        for _ in 0..ROUNDS {
            self.assign(&mut split);
            self.sum_up(&mut split, kept);
        }
        self.assign(&mut split);
        let pays = split.classes.iter().all(|class| class.rows > 0) && split.total() < total;
        pays.then_some(split)
    }
}

fn add(sum: &mut [u64], counts: &[u32]) {
    run_vectorized(
        #[inline(always)]
        || sum.iter_mut().zip(counts).for_each(|(sum, &n)| *sum += u64::from(n)),
    );
}

fn subtract(sum: &mut [u64], counts: &[u32]) {
    run_vectorized(
        #[inline(always)]
        || sum.iter_mut().zip(counts).for_each(|(sum, &n)| *sum -= u64::from(n)),
    );
}

/// Returns the cost of a row if it had its own class.
pub(super) fn own_cost(row: &Row) -> u64 {
    let total = log2(row.lanes().max(1));
    run_vectorized(
        #[inline(always)]
        || row.counts.iter().map(|&n| u64::from(n) * (total - log2(n.max(1).into()))).sum(),
    )
}

/// Sets the cost of each token in a class with this sum. Returns the number of tokens that occur.
///
/// 1/32 is added to each count, so that every cost is finite. A cost is at most log2 of 32 · 180 · 2^32, which is less than 2^14 in
/// cost units.
fn token_costs(sum: &[u64], costs: &mut [u16]) -> u64 {
    const PART: u64 = 32;
    run_vectorized(
        #[inline(always)]
        || {
            let lanes: u64 = sum.iter().map(|&n| saturated(n)).sum();
            let total = log2(PART * lanes + MAX_TOKENS as u64);
            costs.iter_mut().zip(sum).for_each(|(cost, &n)| *cost = (total - log2(PART * saturated(n) + 1)) as u16);
            sum.iter().map(|&n| u64::from(n != 0)).sum()
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the cost of each of 180 tokens in a class with these counts.
    fn costs_slowly(counts: &[u32]) -> Vec<u64> {
        let total = log2(32 * counts.iter().map(|&n| u64::from(n)).sum::<u64>() + 180);
        (0..180).map(|token| total - log2(32 * u64::from(counts.get(token).copied().unwrap_or(0)) + 1)).collect()
    }

    /// Splits as [`Clustering`] does, with all sums and costs computed anew in each round. Returns the sum of each class.
    fn cluster_slowly(rows: &[Vec<u32>], classes_max: usize) -> Vec<Vec<u32>> {
        fn sums(rows: &[Vec<u32>], of: &[usize], classes: usize) -> Vec<Row> {
            let mut sums = vec![Row::default(); classes];
            rows.iter().zip(of).for_each(|(row, &class)| sums[class].add(row));
            sums
        }
        fn assign(rows: &[Vec<u32>], sums: &[Row]) -> (Vec<usize>, Vec<u64>) {
            let costs: Vec<_> = sums.iter().map(|sum| costs_slowly(&sum.counts)).collect();
            let cost =
                |row: &Vec<u32>, class: usize| row.iter().zip(&costs[class]).map(|(&n, &cost)| u64::from(n) * cost).sum::<u64>();
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

    /// Rows around a few random distributions, some twice, and rows of any counts.
    fn clustered_rows() -> impl Strategy<Value = Vec<Vec<u32>>> {
        let around = (0u32..5, 1usize..40, 0u32..14, any::<u64>()).prop_map(|(kind, tokens, log2, seed)| {
            let mut random = seed;
            let count = |t: usize| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                ((random >> 40) as u32 % (1 << log2)) >> (t as u32 * (kind + 1) / 4).min(31)
            };
            let mut counts: Vec<u32> = (0..tokens + 1).map(count).collect();
            counts[1] = counts[1].max(1);
            counts
        });
        let extreme = prop_oneof![Just(0), Just(1), Just(u32::MAX), any::<u32>()];
        let row = prop_oneof![
            12 => around,
            1 => proptest::collection::vec(extreme, 0..=MAX_TOKENS),
            1 => (0..MAX_TOKENS, 0u32..32).prop_map(|(token, log2)| [&vec![0; token][..], &[1 << log2]].concat()),
        ];
        let again = proptest::collection::vec(any::<proptest::sample::Index>(), 0..10);
        (proptest::collection::vec(row, 1..60), again).prop_map(|(mut rows, again)| {
            let again: Vec<_> = again.iter().map(|index| index.get(&rows).clone()).collect();
            rows.extend(again);
            rows
        })
    }

    proptest! {
        #[test]
        fn classes_are_those_of_the_slow_way(rows in clustered_rows(), classes_max in 1usize..=MAX_CLASSES) {
            let structs: Vec<_> = rows.iter().map(|counts| Row { counts: counts.clone() }).collect();
            let own: Vec<u64> = structs.iter().map(own_cost).collect();
            let trimmed = |counts: &[u32]| counts[..counts.iter().rposition(|&n| n != 0).map_or(0, |last| last + 1)].to_vec();
            let expected: Vec<_> = cluster_slowly(&rows, classes_max).iter().map(|counts| trimmed(counts)).collect();
            for platform in Platform::available() {
                let found = cluster_on(platform, &structs, &own, classes_max);
                let found: Vec<_> = found.iter().map(|sum| trimmed(&sum.counts)).collect();
                prop_assert_eq!(found, &expected[..], "{:?}", platform);
            }
        }
    }
}
