//! Renamed tensors: the arguments of `--rename`, and the pattern that a report suggests.

use std::collections::{HashMap, HashSet};

/// Maximum number of suffixes of a name that are compared, from the longest.
const MAX_SUFFIXES: usize = 16;
/// Maximum number of base tensors that are compared with a target tensor of the same suffix.
const MAX_ALIKE: usize = 8;

/// Parses an argument `TARGET=BASE`.
pub fn rename(text: &str) -> Result<(String, String), &'static str> {
    text.split_once('=').map(|(target, base)| (target.to_owned(), base.to_owned())).ok_or("expected TARGET=BASE")
}

/// A pattern that pairs tensors by another prefix.
#[derive(Debug, PartialEq, Eq)]
pub struct Suggestion {
    pub pattern: String,
    /// Number of tensors that it pairs.
    pub tensors: u64,
}

/// The pattern that pairs most of `added`, tensors that only the target has, with tensors of `removed`, which only the base has.
/// `None` if it pairs less than half of them, or only one.
pub fn suggested(added: &[String], removed: &[String]) -> Option<Suggestion> {
    let mut by_suffix = HashMap::<&str, Vec<&str>>::new();
    for name in removed {
        for suffix in suffixes(name) {
            let alike = by_suffix.entry(suffix).or_default();
            if alike.len() < MAX_ALIKE {
                alike.push(&name[..name.len() - suffix.len()]);
            }
        }
    }
    let mut votes = HashMap::<(&str, &str), usize>::new();
    for name in added {
        let Some((suffix, prefixes)) = suffixes(name).find_map(|suffix| Some((suffix, by_suffix.get(suffix)?))) else { continue };
        let prefix = &name[..name.len() - suffix.len()];
        prefixes.iter().for_each(|of_base| *votes.entry((prefix, of_base)).or_default() += 1);
    }
    let ((prefix, of_base), _) = votes.into_iter().max_by_key(|&(prefixes, votes)| (votes, std::cmp::Reverse(prefixes)))?;
    let removed_names: HashSet<&str> = removed.iter().map(String::as_str).collect();
    let is_paired =
        |name: &&String| name.strip_prefix(prefix).is_some_and(|rest| removed_names.contains(format!("{of_base}{rest}").as_str()));
    let tensors = added.iter().filter(is_paired).count();
    let is_many = tensors > 1 && 2 * tensors >= added.len().min(removed.len());
    is_many.then(|| Suggestion { pattern: format!("{prefix}*={of_base}*"), tensors: tensors as u64 })
}

/// The name, and what follows each of its first dots.
fn suffixes(name: &str) -> impl Iterator<Item = &str> {
    std::iter::once(name).chain(name.match_indices('.').map(|(at, _)| &name[at + 1..])).take(MAX_SUFFIXES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_prefix_that_pairs_most_tensors_is_suggested() {
        let base = names(&["model.layers.0.w", "model.layers.1.w", "model.norm.w", "head.w"]);
        for (added, expected) in [
            (
                &["model.language_model.layers.0.w", "model.language_model.layers.1.w", "x"][..],
                Some("model.language_model.*=model.*"),
            ),
            (&["layers.0.w", "layers.1.w", "norm.w"], Some("*=model.*")),
            (&["module.model.layers.0.w", "module.head.w"], Some("module.*=*")),
            (&["layers.0.w"], None),
            (&["a", "b", "c"], None),
            (&["layers.0.w", "layers.1.w", "a", "b", "c", "d", "e", "f", "g"], Some("*=model.*")),
            (&[], None),
        ] {
            let found = suggested(&names(added), &base).map(|suggested| suggested.pattern);
            assert_eq!(found.as_deref(), expected, "{added:?}");
        }
        assert_eq!(suggested(&base, &[]), None);
    }
}
