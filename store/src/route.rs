//! Ways to versions: the pairs that give one, applied one after the other.

use crate::catalog::Catalog;
use crate::error::{Error, Result};
use crate::manifest::{Content, Reference, SinceAnchor, StoredPair, Version};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::fmt;
use std::path::PathBuf;

/// How a version is rebuilt: from a checkpoint that the caller has, or from nothing, by pairs.
#[derive(Debug, Clone)]
pub(crate) struct Route {
    pub source: Source,
    /// The steps, in the order in which they are applied.
    pub steps: Vec<Step>,
}

/// A pair on a route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub pair: StoredPair,
    /// The version that is the base of a shortcut; `None` for the pair of a version itself.
    shortcut_from: Option<Reference>,
    pub to: Reference,
}

impl Step {
    pub fn is_shortcut(&self) -> bool {
        self.shortcut_from.is_some()
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.shortcut_from {
            Some(from) => write!(f, "the shortcut from {} to {}", from.name(), self.to.name()),
            None => write!(f, "the pair of {}", self.to.name()),
        }
    }
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
enum Node {
    Version(Reference),
    /// Before this whole version.
    Nothing(Reference),
}

/// Cost of the pairs from a place on: bytes, and objects to read.
type Cost = (u64, usize);

/// The cheapest way to a version: the fewest bytes, then the fewest objects. Versions that were pruned, or
/// whose branch was deleted, are used only if there is no other way, because `gc` may be removing them.
///
/// Manifests are read backwards from the version, only of versions that are nearer to it than the start of the way.
///
/// # Errors
/// [`Error::External`] or [`Error::Unreachable`] if there is none; the errors of reading manifests.
pub(crate) fn find(catalog: &mut Catalog<'_>, version: &Version, start: Start<'_>) -> Result<Route> {
    match find_without(catalog, version, start, &[])? {
        Some(route) => Ok(route),
        None => Err(why_not(catalog, version)?),
    }
}

/// [`find`], without these steps. `None` if there is no way.
pub(crate) fn find_without(
    catalog: &mut Catalog<'_>,
    version: &Version,
    start: Start<'_>,
    without: &[Step],
) -> Result<Option<Route>> {
    match search(catalog, version, start, without, false)? {
        None => search(catalog, version, start, without, true),
        found => Ok(found),
    }
}

impl Route {
    /// Number of pairs since the anchor, and their size in bytes; and the size of the anchor.
    pub fn since_anchor(&self) -> SinceAnchor {
        let (anchor_bytes, rest) = match (&self.source, self.steps.split_first()) {
            (Source::Version(version), _) => (version.tensor_bytes, &self.steps[..]),
            (Source::Nothing, Some((whole, rest))) => (whole.pair.bytes(), rest),
            (Source::Nothing, None) => (0, &[][..]),
        };
        let bytes = rest.iter().fold(0, |sum: u64, step| sum.saturating_add(step.pair.bytes()));
        SinceAnchor { pairs: rest.len() as u64, bytes, anchor_bytes }
    }

    /// Size of all pairs in bytes.
    pub fn bytes(&self) -> u64 {
        self.steps.iter().fold(0, |sum, step| sum.saturating_add(step.pair.bytes()))
    }
}

/// Dijkstra's algorithm, from the version backwards.
fn search(catalog: &mut Catalog<'_>, version: &Version, start: Start<'_>, without: &[Step], all: bool) -> Result<Option<Route>> {
    let end = Node::Version(version.reference());
    let mut best: BTreeMap<Node, Cost> = BTreeMap::from([(end.clone(), (0, 0))]);
    // What leads on from a place: a step if there is a pair, and the place behind it.
    let mut next: BTreeMap<Node, (Option<Step>, Node)> = BTreeMap::new();
    let mut open = BinaryHeap::from([Reverse(((0, 0), end))]);
    while let Some(Reverse((cost, place))) = open.pop() {
        if best.get(&place) != Some(&cost) {
            continue;
        }
        let at = match &place {
            Node::Nothing(_) => return Ok(Some(Route { source: Source::Nothing, steps: steps(&next, place) })),
            // Another way may lead past a manifest that is not valid. If none does, `why_not` says so.
            Node::Version(reference) => match catalog.at(reference) {
                Err(Error::Manifest { .. }) => None,
                found => found?,
            },
        };
        let Some(at) = at else { continue };
        if is_start(&at, start) {
            return Ok(Some(Route { source: Source::Version(Box::new(at)), steps: steps(&next, place) }));
        }
        let step = |pair: &StoredPair, shortcut_from| Step { pair: pair.clone(), shortcut_from, to: at.reference() };
        let mut before: Vec<(Node, Option<Step>)> = Vec::new();
        match (&at.content, &at.parent) {
            (Content::Whole(pair), _) if !matches!(start, Start::From(_)) => {
                before.push((Node::Nothing(at.reference()), Some(step(pair, None))));
            }
            (Content::Difference(pair), Some(parent)) => before.push((Node::Version(parent.clone()), Some(step(pair, None)))),
            (Content::Same, Some(parent)) => before.push((Node::Version(parent.clone()), None)),
            _ => {}
        }
        let shortcuts = catalog.shortcuts(&at)?.iter();
        before.extend(shortcuts.map(|one| (Node::Version(one.from.clone()), Some(step(&one.pair, Some(one.from.clone()))))));
        for (place_before, step) in before {
            if step.as_ref().is_some_and(|step| without.contains(step)) {
                continue;
            }
            if let Node::Version(reference) = &place_before
                && !all
                && !is_named(reference, start)
                && !catalog.branch(&reference.branch)?.is_live(reference.number)
            {
                continue;
            }
            let (bytes, objects) = step.as_ref().map_or((0, 0), |step| (step.pair.bytes(), step.pair.segments().count()));
            let total = (cost.0.saturating_add(bytes), cost.1 + objects);
            if best.get(&place_before).is_none_or(|known| total < *known) {
                best.insert(place_before.clone(), total);
                next.insert(place_before.clone(), (step, place.clone()));
                open.push(Reverse((total, place_before)));
            }
        }
    }
    Ok(None)
}

/// Follows the steps from a place to the end.
fn steps(next: &BTreeMap<Node, (Option<Step>, Node)>, mut place: Node) -> Vec<Step> {
    let mut steps = Vec::new();
    while let Some((step, behind)) = next.get(&place) {
        steps.extend(step.clone());
        place = behind.clone();
    }
    steps
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
pub(crate) fn why_not(catalog: &mut Catalog<'_>, version: &Version) -> Result<Error> {
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
