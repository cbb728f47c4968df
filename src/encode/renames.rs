//! Renamed tensors: patterns for names, and the names and cuts of a chain.

use super::bases::has_base;
use super::options::EncodeOptions;
use crate::checkpoint::Checkpoint;
use std::collections::BTreeMap;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::rectangle::Rectangle;

/// Renamed tensors and cuts of a chain. They apply where the options do not say otherwise.
#[derive(Debug, Default)]
pub struct ChainNames {
    pub renamed: BTreeMap<String, String>,
    pub cuts: BTreeMap<String, Vec<Rectangle>>,
}

impl ChainNames {
    /// The options of an encoding: with these names and cuts, and with tensors instead of patterns.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a pattern that renames nothing.
    pub fn add_to(&self, options: &EncodeOptions, base: Option<&dyn Checkpoint>, target: &dyn Checkpoint) -> Result<EncodeOptions> {
        let mut options = options.clone();
        options.renamed = resolve(options.renamed, base, target)?;
        for (name, base_name) in &self.renamed {
            options.renamed.entry(name.clone()).or_insert_with(|| base_name.clone());
        }
        if options.cuts.is_empty() && options.split.is_empty() {
            options.cuts.clone_from(&self.cuts);
        }
        Ok(options)
    }
}

/// The names of renamed tensors, with each pattern replaced by the names that it stands for.
///
/// # Errors
/// [`Error::InvalidArgument`] for a pattern that renames no tensor, or that has not as many `*` as the name in the base.
fn resolve(
    renamed: BTreeMap<String, String>,
    base: Option<&dyn Checkpoint>,
    target: &dyn Checkpoint,
) -> Result<BTreeMap<String, String>> {
    let is_pattern = |name: &str| name.contains('*') && target.find(name).is_none();
    let (mut patterns, names): (Vec<_>, Vec<_>) = renamed.into_iter().partition(|(name, _)| is_pattern(name));
    patterns.sort_by_key(|(pattern, _)| std::cmp::Reverse(pattern.len()));
    let mut names = BTreeMap::from_iter(names);
    let mut is_used = vec![false; patterns.len()];
    for info in target.tensors() {
        if patterns.is_empty() || names.contains_key(&info.name) {
            continue;
        }
        let matched = patterns.iter().enumerate().find_map(|(i, (pattern, new))| Some((i, replaced(pattern, new, &info.name)?)));
        if let Some((i, name)) = matched.filter(|(_, name)| base.is_some_and(|base| has_base(base, name))) {
            is_used[i] = true;
            names.insert(info.name.clone(), name);
        }
    }
    for ((pattern, new), is_used) in patterns.iter().zip(is_used) {
        let fault = if pattern.matches('*').count() != new.matches('*').count() {
            "both names must have the same number of *"
        } else if !is_used {
            "no tensor of the target has a name that it matches and a base tensor of the name that it gives"
        } else {
            continue;
        };
        let (pattern, new) = (Escaped(pattern), Escaped(new));
        return Err(Error::InvalidArgument(format!("the pattern {pattern}={new} renames nothing: {fault}")));
    }
    Ok(names)
}

/// `name` as `new` says, if it matches `pattern`: each `*` of `new` stands for the text that the `*` of the same number in `pattern`
/// matches. All but the last of them match as little as possible.
fn replaced(pattern: &str, new: &str, name: &str) -> Option<String> {
    let (first, rest) = pattern.split_once('*')?;
    let mut name = name.strip_prefix(first)?;
    let mut texts = Vec::new();
    let literals: Vec<&str> = rest.split('*').collect();
    let (last, between) = literals.split_last()?;
    for literal in between {
        let (text, after) = name.split_once(literal)?;
        texts.push(text);
        name = after;
    }
    texts.push(name.strip_suffix(last)?);
    let mut literals = new.split('*');
    let mut replaced = literals.next()?.to_owned();
    let mut texts = texts.into_iter();
    for literal in literals {
        replaced += texts.next()?;
        replaced += literal;
    }
    texts.next().is_none().then_some(replaced)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{MemoryCheckpoint, TensorInfo};
    use tpde_core::lane::Dtype;

    #[test]
    fn patterns_keep_what_their_stars_match() {
        for (pattern, new, name, expected) in [
            ("A.*", "B.*", "A.x.y", Some("B.x.y")),
            ("A.*", "B.*", "A.", Some("B.")),
            ("A.*", "B.*", "AB.x", None),
            ("module.*", "*", "module.w", Some("w")),
            ("*", "model.*", "w", Some("model.w")),
            ("*.a.*.b", "*.c.*.d", "x.a.1.b.a.2.b", Some("x.c.1.b.a.2.d")),
            ("*a*b", "*-*", "aab", Some("-a")),
            ("a*a", "b*", "a", None),
            ("*.w", "*.v", "l.w.w", Some("l.w.v")),
            ("a*", "b", "ax", None),
            ("a*", "b*c*", "ax", None),
        ] {
            assert_eq!(replaced(pattern, new, name).as_deref(), expected, "{pattern}={new} on {name}");
        }
    }

    #[test]
    fn the_longest_pattern_applies_and_names_come_first() {
        fn checkpoint(names: &[&str]) -> MemoryCheckpoint<'static> {
            let info = |name: &&str| TensorInfo { name: (*name).to_owned(), dtype: Dtype::U8, shape: vec![1] };
            MemoryCheckpoint::new(names.iter().map(|name| (info(name), &[0][..]))).unwrap()
        }
        let (base, target) = (checkpoint(&["b.x.w", "c.w", "d", "head"]), checkpoint(&["a.x.w", "a.y.w", "a.z", "head"]));
        let resolved = |renamed: &[(&str, &str)]| {
            let renamed = renamed.iter().map(|(name, new)| ((*name).to_owned(), (*new).to_owned())).collect();
            resolve(renamed, Some(&base), &target)
        };
        let names = resolved(&[("a.*", "b.*"), ("a.y.*", "c.*"), ("a.z", "d")]).unwrap();
        assert_eq!(
            names.into_iter().collect::<Vec<_>>(),
            [("a.x.w", "b.x.w"), ("a.y.w", "c.w"), ("a.z", "d")].map(|(a, b)| (a.into(), b.into()))
        );
        for wrong in [[("a.*", "b.*.*")], [("q.*", "b.*")], [("a.*", "q.*")], [("a.*", "d")]] {
            assert!(matches!(resolved(&wrong), Err(Error::InvalidArgument(_))), "{wrong:?}");
        }
    }
}
