//! Ways to versions that are read from the store. A step that is damaged is left out if there is another way.

use crate::catalog::Catalog;
use crate::download::{Cache, ReadFailure, Select, fetch_pairs};
use crate::error::{Error, Result};
use crate::manifest::Version;
use crate::prefix::check_state;
use crate::route::{self, Route, Start, Step};
use serde::Serialize;
use tpde::{FileSource, Pair};

/// A pair that a call did without, because it is damaged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LeftOut {
    /// The pair, as in `the shortcut from main@0 to main@10`.
    pub pair: String,
    /// What is wrong.
    pub reason: String,
}

/// Reads the cheapest way to a version, and calls `done` with it: with all payloads, or with those that `select` wants. If a pair
/// is damaged, the cheapest way without it is tried. Returns the result of `done`, and the pairs that were left out.
///
/// # Errors
/// The first fault if there is no other way; those of [`route::find`], of requests and of `done`.
pub(crate) fn reach<T>(
    catalog: &mut Catalog<'_>,
    cache: &Cache<'_>,
    version: &Version,
    start: Start<'_>,
    select: Option<Select<'_>>,
    mut done: impl FnMut(&Route, Vec<Pair<FileSource>>) -> Result<T>,
) -> Result<(T, Vec<LeftOut>)> {
    let mut without: Vec<Step> = Vec::new();
    let mut left_out = Vec::new();
    let mut first = None;
    loop {
        let Some(route) = route::find_without(catalog, version, start, &without)? else {
            return Err(match first {
                Some(fault) => fault,
                None => route::why_not(catalog, version)?,
            });
        };
        let (faulty, error) = match read(catalog, cache, &route, select) {
            Ok(pairs) => match done(&route, pairs) {
                Ok(done) => {
                    let damaged = catalog.damaged().iter();
                    left_out.extend(damaged.map(|(object, e)| LeftOut { pair: object.clone(), reason: e.to_string() }));
                    return Ok((done, left_out));
                }
                Err(error) => (suspects(&route, &error), named(&route, error)),
            },
            Err(ReadFailure { at, error }) => (vec![route.steps[at].clone()], error),
        };
        if !is_damage(&error) {
            return Err(error);
        }
        if faulty.is_empty() {
            return Err(first.unwrap_or(error));
        }
        tracing::debug!(version = version.name(), %error, "trying another way");
        left_out.extend(faulty.iter().map(|step| LeftOut { pair: step.to_string(), reason: error.to_string() }));
        without.extend(faulty);
        first.get_or_insert(error);
    }
}

/// Reads the pairs of a route. Each must give the tensors of its version.
fn read(
    catalog: &mut Catalog<'_>,
    cache: &Cache<'_>,
    route: &Route,
    select: Option<Select<'_>>,
) -> Result<Vec<Pair<FileSource>>, ReadFailure> {
    let stored: Vec<_> = route.steps.iter().map(|step| &step.pair).collect();
    let pairs = fetch_pairs(cache, &stored, select)?;
    for (at, (step, pair)) in route.steps.iter().zip(&pairs).enumerate() {
        let mut check = || catalog.at(&step.to)?.map_or(Ok(()), |version| check_state(&version, pair.index()));
        check().map_err(|error| ReadFailure { at, error })?;
    }
    Ok(pairs)
}

/// The steps that may have caused an error of decoding. Without a number of a step, shortcuts are: other pairs can be left out only
/// where shortcuts lead past them.
fn suspects(route: &Route, error: &Error) -> Vec<Step> {
    match error {
        Error::Tpde(tpde::Error::Step { number, .. }) => route.steps.get(number - 1).cloned().into_iter().collect(),
        _ => route.steps.iter().filter(|step| step.is_shortcut()).cloned().collect(),
    }
}

/// The error of a step, with the name of the step: the path of its pair in a cache says little.
fn named(route: &Route, error: Error) -> Error {
    match error {
        Error::Tpde(tpde::Error::Step { number, pair, source }) => {
            let pair = route.steps.get(number - 1).map_or(pair, Step::to_string);
            tpde::Error::Step { number, pair, source }.into()
        }
        error => error,
    }
}

/// Whether an error comes from this machine or the object store, and not from what is stored.
pub(crate) fn is_of_system(error: &Error) -> bool {
    use tpde::Error as E;
    let is_of_machine = |error: &E| matches!(error, E::Io { .. } | E::Changed { .. } | E::Cancelled);
    match error {
        Error::Tpde(error) => is_of_machine(error),
        _ => matches!(error, Error::Request { .. } | Error::NotAStore { .. } | Error::Replaced { .. }),
    }
}

/// Whether an error says that what was read is damaged, or does not fit.
pub(crate) fn is_damage(error: &Error) -> bool {
    use tpde::Error as E;
    match error {
        Error::Tpde(error) => matches!(
            error,
            E::Invalid(_)
                | E::UnexpectedPair { .. }
                | E::WrongBase { .. }
                | E::AlreadyApplied { .. }
                | E::Step { .. }
                | E::Limit { .. }
                | E::NotWritable { .. }
        ),
        _ => matches!(error, Error::Damaged { .. } | Error::Manifest { .. }),
    }
}
