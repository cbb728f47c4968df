//! Ways to versions: the pairs that give one, applied one after the other.

use crate::catalog::Catalog;
use crate::error::{Error, Result};
use crate::manifest::{Content, Reference, StoredPair, Version};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::path::PathBuf;

/// How a version is rebuilt: from a checkpoint that the caller has, or from nothing, by pairs.
#[derive(Debug, Clone)]
pub(crate) struct Route {
    pub source: Source,
    /// The pairs, in the order in which they are applied.
    pub pairs: Vec<StoredPair>,
}

/// Where a route begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// At a version that the caller has, or of which the caller finds the checkpoint.
    Version(Box<Version>),
    /// At nothing: the first pair is whole.
    Nothing,
}

/// Checkpoints that the caller has: versions and paths.
pub(crate) type Have = BTreeMap<(String, u64), PathBuf>;

/// Where routes may begin.
#[derive(Clone, Copy)]
pub(crate) enum Start<'a> {
    /// At a checkpoint that the caller has, or at a whole version.
    Get(&'a Have),
    /// Likewise, without a checkpoint; and at an external version, as if the caller had it.
    Anchor,
    /// At one of these versions, and not at nothing.
    From(&'a dyn Fn(&Reference) -> bool),
}

/// A version that was reached, or the nothing before a whole one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Version(Reference),
    /// Before this whole version.
    Nothing(Reference),
}

/// Cost of the pairs from a place on: bytes, and objects to read.
type Cost = (u64, usize);

/// The cheapest way to a version: the fewest bytes, then the fewest objects. Versions that were pruned, or
/// whose branch was deleted, are used only if there is no other way, because `gc` may be removing them.
///
/// # Errors
/// [`Error::External`] or [`Error::Unreachable`] if there is none; the errors of reading manifests.
pub(crate) fn find(catalog: &mut Catalog<'_>, version: &Version, start: Start<'_>) -> Result<Route> {
    match find_if_any(catalog, version, start)? {
        Some(route) => Ok(route),
        None => Err(why_not(catalog, version)?),
    }
}

/// [`find`], or `None` if there is no way.
pub(crate) fn find_if_any(catalog: &mut Catalog<'_>, version: &Version, start: Start<'_>) -> Result<Option<Route>> {
    match search(catalog, version, start, false)? {
        None => search(catalog, version, start, true),
        found => Ok(found),
    }
}

impl Route {
    /// Number of pairs since the anchor, and their size in bytes; and the size of the anchor.
    pub fn since_anchor(&self) -> (u64, u64, u64) {
        let (anchor, rest) = match (&self.source, self.pairs.split_first()) {
            (Source::Version(version), _) => (version.tensor_bytes, &self.pairs[..]),
            (Source::Nothing, Some((whole, rest))) => (whole.bytes(), rest),
            (Source::Nothing, None) => (0, &[][..]),
        };
        (rest.len() as u64, rest.iter().fold(0, |sum, pair| sum.saturating_add(pair.bytes())), anchor)
    }
}

/// Dijkstra's algorithm, from the version backwards.
fn search(catalog: &mut Catalog<'_>, version: &Version, start: Start<'_>, all: bool) -> Result<Option<Route>> {
    let end = Place::Version(version.reference());
    let mut best: BTreeMap<Place, Cost> = BTreeMap::from([(end.clone(), (0, 0))]);
    // The step behind a place: its pair, and where it leads.
    let mut steps: BTreeMap<Place, (Option<StoredPair>, Place)> = BTreeMap::new();
    let mut open = BinaryHeap::from([Reverse(((0, 0), end))]);
    while let Some(Reverse((cost, place))) = open.pop() {
        if best.get(&place) != Some(&cost) {
            continue;
        }
        let at = match &place {
            Place::Nothing(_) => return Ok(Some(Route { source: Source::Nothing, pairs: pairs(&steps, place) })),
            Place::Version(reference) => catalog.at(reference)?,
        };
        let Some(at) = at else { continue };
        if is_start(&at, start) {
            return Ok(Some(Route { source: Source::Version(Box::new(at)), pairs: pairs(&steps, place) }));
        }
        let mut before: Vec<(Place, Option<StoredPair>)> = Vec::new();
        match (&at.content, &at.parent) {
            (Content::Whole(pair), _) if !matches!(start, Start::From(_)) => {
                before.push((Place::Nothing(at.reference()), Some(pair.clone())));
            }
            (Content::Difference(pair), Some(parent)) => before.push((Place::Version(parent.clone()), Some(pair.clone()))),
            (Content::Same, Some(parent)) => before.push((Place::Version(parent.clone()), None)),
            _ => {}
        }
        let shortcuts = catalog.shortcuts(&at)?.iter();
        before.extend(shortcuts.map(|shortcut| (Place::Version(shortcut.from.clone()), Some(shortcut.pair.clone()))));
        for (place_before, pair) in before {
            if let Place::Version(reference) = &place_before
                && !all
                && !is_named(reference, start)
                && !catalog.is_live(reference)?
            {
                continue;
            }
            let (bytes, objects) = pair.as_ref().map_or((0, 0), |pair| (pair.bytes(), pair.segments().count()));
            let total = (cost.0.saturating_add(bytes), cost.1 + objects);
            if best.get(&place_before).is_none_or(|known| total < *known) {
                best.insert(place_before.clone(), total);
                steps.insert(place_before.clone(), (pair, place.clone()));
                open.push(Reverse((total, place_before)));
            }
        }
    }
    Ok(None)
}

/// Follows the steps from a place to the end.
fn pairs(steps: &BTreeMap<Place, (Option<StoredPair>, Place)>, mut place: Place) -> Vec<StoredPair> {
    let mut pairs = Vec::new();
    while let Some((pair, next)) = steps.get(&place) {
        pairs.extend(pair.clone());
        place = next.clone();
    }
    pairs
}

fn is_start(version: &Version, start: Start<'_>) -> bool {
    is_named(&version.reference(), start) || (matches!(start, Start::Anchor) && matches!(version.content, Content::External { .. }))
}

/// Whether the caller names a version as a start.
fn is_named(reference: &Reference, start: Start<'_>) -> bool {
    match start {
        Start::Get(have) => have.contains_key(&(reference.branch.clone(), reference.number)),
        Start::From(is_start) => is_start(reference),
        Start::Anchor => false,
    }
}

/// Why there is no route to a version: follows its parents.
fn why_not(catalog: &mut Catalog<'_>, version: &Version) -> Result<Error> {
    let unreachable = |reason| Ok(Error::Unreachable { version: version.name(), reason });
    let mut seen = BTreeSet::new();
    let mut at = version.clone();
    loop {
        if !seen.insert(at.reference()) {
            return unreachable(format!("{} is its own ancestor", at.name()));
        }
        match &at.content {
            Content::External { hint } => return Ok(Error::External { version: at.name(), hint: hint.clone() }),
            Content::Deleted => return unreachable(format!("{} is a deletion", at.name())),
            Content::Whole(_) | Content::Difference(_) | Content::Same => {}
        }
        let Some(parent) = at.parent.clone() else {
            return unreachable(format!("{} has no parent", at.name()));
        };
        let Some(next) = catalog.at(&parent)? else {
            return unreachable(format!("its ancestor {} was deleted", parent.name()));
        };
        at = next;
    }
}
