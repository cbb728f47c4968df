//! Chooses activities and maps for a chunk by estimated cost.

use super::context::{MAX_CONTEXTS, Maps};
use super::cost::{BIT, Costs, IMPOSSIBLE, exception_cost};
use super::stats::{CONTEXTS, LEVELS, Row, Split, Stats};
use super::tables::TableSet;
use crate::codec::simd::EncodeTable;
use crate::prelude::*;
use core::ops::Range;

/// All lanes of the blocks with one activity are coded if this costs at most 1/`ROWS` more. Steps are then rows of adjacent
/// lanes.
const ROWS: u64 = 64;
/// Number of contexts above the largest sampled context that the maps still cover, because blocks outside of the sample can have
/// them.
const UNSEEN: usize = 3;
/// Maps without holes are chosen if they cost at most 1/`WITHOUT_HOLES_FRACTION` plus `WITHOUT_HOLES_BITS` bits more than maps
/// with holes.
const WITHOUT_HOLES_FRACTION: u64 = 100;
const WITHOUT_HOLES_BITS: u64 = 8 * 12;

/// Activities and maps for a chunk, with their estimated cost.
pub(super) struct Choice {
    pub activity_bits: u8,
    pub maps: Maps,
    pub cost: u64,
}

/// Chooses activities and maps.
pub(super) fn choose(stats: &Stats, model: &Model, split: Split, lane_cost: u64, width: usize) -> Choice {
    let fit = |row: &Row| Fit::new(row, model, split, lane_cost, width);
    let blocks = stats.levels.len() as u64;
    let choices = |bits: u8, groups: &[Range<usize>]| {
        let groups = Groups::new(stats, groups, fit);
        [false, true].map(|holes| {
            let (maps, cost) = groups.maps(stats.first, holes);
            Choice { activity_bits: bits, maps, cost: cost + blocks * u64::from(bits) * BIT }
        })
    };
    let mut best = choices(0, core::slice::from_ref(&(0..LEVELS)));
    if blocks >= 32 {
        for (bits, groups) in [(1, &[0..1, 1..LEVELS][..]), (2, &[0..1, 1..2, 2..3, 3..4][..])] {
            for (best, choice) in best.iter_mut().zip(choices(bits, groups)) {
                if choice.cost < best.cost {
                    *best = choice;
                }
            }
        }
    }
    let [whole, holed] = best;
    if whole.cost <= holed.cost + holed.cost / WITHOUT_HOLES_FRACTION + WITHOUT_HOLES_BITS * BIT { whole } else { holed }
}

/// Returns the activity, of `activity_bits` bits, for a level.
pub(super) fn activity(level: u8, activity_bits: u8) -> u8 {
    match activity_bits {
        0 => 0,
        1 => level.min(1),
        _ => level,
    }
}

/// A table set, and what the encoder derives from it.
pub(super) struct Model {
    pub set: TableSet,
    /// Cost of a value without a token.
    pub missing: u64,
    costs: Costs,
    pub divisors: EncodeTable,
}

impl Model {
    pub fn new(set: &TableSet, missing: u64) -> Self {
        let mut divisors = EncodeTable::default();
        for (class, frequencies) in (1..).zip(set.classes()) {
            let mut start = 0;
            for (token, &frequency) in (0..).zip(frequencies).filter(|(_, frequency)| **frequency != 0) {
                divisors.set(class, token, start, frequency.into());
                start += u32::from(frequency);
            }
        }
        Self { set: set.clone(), missing, costs: Costs::new(set, missing), divisors }
    }
}

/// What an encoder on a device reads of a table set.
pub struct ModelTables {
    /// Entries of the encoder's look-up table.
    pub entries: Vec<u64>,
    /// Costs of each token, per class from class 1 on.
    pub costs: Vec<[u32; super::tables::MAX_CLASSES]>,
    /// Number of tokens before the first absent one, per class.
    pub present: Vec<u32>,
}

impl ModelTables {
    /// For chunks of lanes of `width` bytes with `low_bits` low bits.
    pub fn new(set: &TableSet, low_bits: u32, width: usize) -> Self {
        let model = Model::new(set, missing_cost(low_bits, width));
        let entries = model.divisors.entries.clone();
        let present = entries.chunks(256).map(|class| class.iter().take_while(|&&entry| entry != 0).count() as u32);
        Self { present: present.collect(), costs: model.costs.0, entries }
    }
}

/// Cost of a value without a token: that of an exception, if exceptions are possible.
pub(super) fn missing_cost(low_bits: u32, width: usize) -> u64 {
    if low_bits == 0 { exception_cost(width) } else { IMPOSSIBLE }
}

/// Cost of the lanes that share a context and a group of levels.
#[derive(Debug, Clone, Copy, Default)]
struct Fit {
    /// Cost if the changed lanes are listed as exceptions.
    uncoded: u64,
    /// Cost if the lanes are coded with the cheapest class.
    coded: u64,
    /// The cheapest class; 0 if there are no lanes.
    class: u8,
}

impl Fit {
    /// Larger than any real cost, and small enough that a sum over all contexts does not overflow.
    const NEVER: u64 = 1 << 52;

    fn new(row: &Row, model: &Model, split: Split, lane_cost: u64, width: usize) -> Self {
        let (time, uncoded) = match split.low_bits {
            0 => (row.lanes() * lane_cost, row.others() * exception_cost(width)),
            _ => (0, Self::NEVER),
        };
        let mut fit = Self { uncoded, coded: Self::NEVER, class: 0 };
        let rest = row.extra_bits() * BIT + time;
        for (class, cost) in (1..).zip(model.costs.of(&row.counts)) {
            if cost + rest < fit.coded && (split.low_bits != 0 || model.divisors.has(class, 0)) {
                (fit.coded, fit.class) = (cost + rest, class);
            }
        }
        fit
    }

    /// Returns class and cost of an entry that precedes a coded entry. With `holes`, the entry can be uncoded.
    fn between(&self, holes: bool) -> (u8, u64) {
        if holes && self.uncoded <= self.coded { (0, self.uncoded) } else { (self.class, self.coded) }
    }

    fn occurs(&self) -> bool {
        self.class != 0 || self.coded != 0
    }
}

/// Costs of contexts for groups of levels. Each group has its own map.
struct Groups {
    /// Costs by group and context.
    fits: Vec<[Fit; CONTEXTS]>,
    /// Candidates for the first context of the maps. Per candidate and group: the cost of that context together with all lower
    /// contexts.
    firsts: Vec<(usize, Vec<Fit>)>,
    /// End of a map that codes all lanes: [`UNSEEN`] contexts above the largest sampled context.
    end: usize,
}

impl Groups {
    fn new(stats: &Stats, groups: &[Range<usize>], fit: impl Fn(&Row) -> Fit) -> Self {
        let rows = |levels: &Range<usize>| -> Vec<(usize, Row)> {
            stats.contexts(levels.clone()).map(|context| (context, stats.row(levels.clone(), context))).collect()
        };
        let rows: Vec<_> = groups.iter().map(rows).collect();
        let fits_of = |rows: &Vec<(usize, Row)>| {
            let mut fits = [Fit::default(); CONTEXTS];
            rows.iter().for_each(|(context, row)| fits[*context] = fit(row));
            fits
        };
        let fits: Vec<_> = rows.iter().map(fits_of).collect();

        let coded = |context: &usize| fits.iter().any(|fits| fits[*context].coded < fits[*context].uncoded);
        let lowest = (0..CONTEXTS).find(coded).unwrap_or(0);
        let last = (0..CONTEXTS).rfind(coded).unwrap_or(0);
        let mut shared = vec![Row::default(); groups.len()];
        let mut firsts = Vec::new();
        // Rows are in ascending order of context.
        let mut left: Vec<_> = rows.iter().map(|rows| rows.iter().peekable()).collect();
        for first in 0..=last {
            let mut grown = false;
            for (rows, shared) in left.iter_mut().zip(&mut shared) {
                while let Some((_, row)) = rows.next_if(|(context, _)| *context == first) {
                    shared.add(&row.counts);
                    grown = true;
                }
            }
            if first == lowest || (first > lowest && grown) {
                let fit = |row: &Row| if row.counts.is_empty() { Fit::default() } else { fit(row) };
                firsts.push((first, shared.iter().map(fit).collect()));
            }
        }
        let seen = (0..CONTEXTS).rfind(|&context| fits.iter().any(|fits| fits[context].occurs()));
        Self { fits, firsts, end: CONTEXTS.min(seen.map_or(1, |seen| seen + 1 + UNSEEN)) }
    }

    /// Chooses maps, and returns them with their cost. Without `holes`, the coded entries of each map come first. A decoder can
    /// then find coded lanes by comparing magnitudes.
    fn maps(&self, first_context: u16, holes: bool) -> (Maps, u64) {
        let tails: Vec<_> = self.fits.iter().map(|fits| tails(fits, holes)).collect();
        // Contexts below the first context share its entry. A higher first context saves entries, but raises the cost of the
        // lanes.
        let mut best = (u64::MAX, 0, 1, Vec::new());
        for (first, shared) in &self.firsts {
            let (mut cost, mut count) = (0, 1);
            let mut entries = Vec::new();
            for (fit, tails) in shared.iter().zip(&tails) {
                let tail = tails[first + 1];
                let coded = fit.between(holes).1 + tail.cost;
                let uncoded = fit.uncoded + tail.uncoded;
                let all = fit.coded + tail.all;
                let in_rows = coded < uncoded && all - coded <= coded / ROWS && self.end <= first + MAX_CONTEXTS;
                let end = match in_rows {
                    true => self.end,
                    false if coded < uncoded => tail.end.max(first + 1),
                    false => 0,
                };
                cost += if in_rows { all } else { coded.min(uncoded) };
                count = count.max(end.saturating_sub(*first));
                entries.push((*fit, end, in_rows));
            }
            cost += self.fits.len() as u64 * count.next_multiple_of(2) as u64 * 4 * BIT;
            if count <= MAX_CONTEXTS && cost < best.0 {
                best = (cost, *first, count, entries);
            }
        }
        let (cost, first, count, entries) = best;

        let mut maps = Maps { first: first_context + first as u16, count: count as u8, classes: [[0; MAX_CONTEXTS]; 4] };
        for ((map, fits), (shared, end, in_rows)) in maps.classes.iter_mut().zip(&self.fits).zip(entries) {
            let fit = |context| if context == first { &shared } else { &fits[context] };
            let class_of = |fit: &Fit| if in_rows { fit.class } else { fit.between(holes).0 };
            // A context that does not occur in the sample gets the class of the next higher context that does, or else of the
            // highest.
            let mut class = (first..end).rev().map(fit).find(|fit| fit.occurs()).map_or(0, class_of);
            for context in (first..end).rev() {
                if fit(context).occurs() {
                    class = class_of(fit(context));
                }
                map[context - first] = class;
            }
        }
        (maps, cost)
    }
}

/// Cost of all contexts from a given context on.
#[derive(Debug, Clone, Copy, Default)]
struct Tail {
    /// Cost if contexts before `end` are coded. `end` has the value with the lowest cost.
    cost: u64,
    /// End of the coded contexts; 0 if no context is coded.
    end: usize,
    /// Cost if no context is coded.
    uncoded: u64,
    /// Cost if all contexts are coded.
    all: u64,
}

/// Returns the tail that starts at each context, and an empty last tail.
fn tails(fits: &[Fit; CONTEXTS], holes: bool) -> [Tail; CONTEXTS + 1] {
    let mut tails = [Tail::default(); CONTEXTS + 1];
    for (context, fit) in fits.iter().enumerate().rev() {
        let after = tails[context + 1];
        let (coded, uncoded) = (fit.between(holes).1 + after.cost, fit.uncoded + after.uncoded);
        let all = fit.coded + after.all;
        tails[context] = match coded < uncoded {
            true => Tail { cost: coded, end: after.end.max(context + 1), uncoded, all },
            false => Tail { cost: uncoded, end: 0, uncoded, all },
        };
    }
    tails
}
