//! Whether the files of a target can be those of a base (spec section 10.2).

use super::header::{tensor_names, weight_map};
use std::collections::BTreeMap;
use std::path::Path;
use tpde_core::error::Escaped;

/// A file of a target. The content of a safetensors file is its first bytes.
pub(crate) struct TargetContent<'a> {
    pub name: &'a str,
    pub has_tensors: bool,
    /// `None` if it is not known.
    pub content: Option<&'a [u8]>,
}

/// Returns the reason why files of a target cannot be those of a base, if there is one: a base has at least one safetensors file and
/// at most one shard index, and that index names all of the files and only tensors that these files have. `may_grow` says that files
/// may be added later, so that none is missing yet.
pub(crate) fn base_fault(files: &[TargetContent<'_>], may_grow: bool) -> Option<String> {
    let shards: Vec<_> = files.iter().filter(|file| file.has_tensors).collect();
    let indexes: Vec<_> = files.iter().filter(|file| !file.has_tensors).collect();
    let shown = |name: &str| Escaped(name).to_string();
    if shards.is_empty() && !may_grow {
        return Some("no safetensors file".to_owned());
    }
    let index = match indexes[..] {
        [] => return None,
        [index] => index,
        [first, second, ..] => return Some(format!("two shard indexes, {} and {}", shown(first.name), shown(second.name))),
    };
    let map = match weight_map(Path::new(index.name), index.content?) {
        Ok(map) => map,
        Err(error) => return Some(error.to_string()),
    };
    let mut named = BTreeMap::<&str, Vec<&str>>::new();
    map.iter().for_each(|(tensor, file)| named.entry(file).or_default().push(tensor));
    if let Some(shard) = shards.iter().find(|shard| !named.contains_key(shard.name)) {
        return Some(format!("the shard index {} does not name {}", shown(index.name), shown(shard.name)));
    }
    named.into_iter().find_map(|(name, tensors)| {
        let index = shown(index.name);
        let Some(shard) = shards.iter().find(|shard| shard.name == name) else {
            return (!may_grow).then(|| format!("the shard index {index} names {}, which is missing", shown(name)));
        };
        let mut held = tensor_names(shard.content?).ok()?;
        held.sort_unstable();
        let missing = tensors.into_iter().find(|tensor| held.binary_search_by(|held| held.as_str().cmp(tensor)).is_err())?;
        Some(format!("the shard index {index} has tensor {} in {}, which does not", shown(missing), shown(name)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_base_are_shards_and_one_index_that_names_them() {
        let header = |names: &str| {
            let tensors = names
                .split_whitespace()
                .map(|name| format!("\"{name}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}"));
            let json = format!("{{{}}}", tensors.collect::<Vec<_>>().join(","));
            [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat()
        };
        let (a, b) = (header("t u"), header("v"));
        let index = |map: &str| format!("{{\"weight_map\":{{{map}}}}}").into_bytes();
        let right = index(r#""t":"a.safetensors","v":"b.safetensors""#);
        fn file<'a>(name: &'a str, content: &'a [u8]) -> TargetContent<'a> {
            TargetContent { name, has_tensors: !name.ends_with(".json"), content: Some(content) }
        }
        let one = "m.safetensors.index.json";
        let shards = || vec![file("a.safetensors", &a), file("b.safetensors", &b)];
        let fault = |more: Vec<TargetContent<'_>>| base_fault(&shards().into_iter().chain(more).collect::<Vec<_>>(), false);
        assert_eq!(base_fault(&[file("", &a)], false), None);
        assert_eq!(fault(vec![]), None);
        assert_eq!(fault(vec![file(one, &right)]), None);
        assert_eq!(fault(vec![TargetContent { content: None, ..file(one, &[]) }]), None);
        assert!(base_fault(&[], false).unwrap().contains("no safetensors file"));
        assert!(base_fault(&[file(one, &right)], false).unwrap().contains("no safetensors file"));
        assert_eq!(base_fault(&[file(one, &right)], true), None);
        assert_eq!(base_fault(&[file("a.safetensors", &a), file(one, &right)], true), None);
        let other = "n.safetensors.index.json";
        assert_eq!(fault(vec![file(one, &right), file(other, &right)]).unwrap(), format!("two shard indexes, {one} and {other}"));
        for (map, reason) in [
            (r#""t":"a.safetensors""#, "does not name b.safetensors"),
            (r#""t":"a.safetensors","v":"b.safetensors","w":"c.safetensors""#, "names c.safetensors, which is missing"),
            (r#""t":"a.safetensors","w":"b.safetensors""#, "has tensor w in b.safetensors, which does not"),
            ("1", "bad shard index"),
        ] {
            let found = fault(vec![file(one, &index(map))]).unwrap();
            assert!(found.contains(reason), "{found}");
        }
    }
}
