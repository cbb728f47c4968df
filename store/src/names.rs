//! Names of branches, versions, files and objects.

use crate::digest::Digest;
use crate::error::{Error, Result};

/// The object that makes a prefix a store.
pub(crate) const STORE: &str = "store.json";
/// Prefix of the manifests of versions.
pub(crate) const BRANCHES: &str = "branches";
/// Prefix of the manifests of shortcuts.
pub(crate) const SHORTCUTS: &str = "shortcuts";
/// Prefix of the objects that are named by digest.
pub(crate) const OBJECTS: &str = "objects";
/// Prefix of the objects from which `gc` reads the store's clock.
pub(crate) const CLOCK: &str = "clock";

/// Maximum number of a version.
pub(crate) const MAX_NUMBER: u64 = 9_999_999_999;
/// Maximum length of the name of a branch, and of each name in the path of a file.
const MAX_NAME: usize = 255;
/// Maximum length of the path of a file.
const MAX_PATH: usize = 1024;

pub(crate) fn object(digest: &Digest) -> String {
    format!("{OBJECTS}/{digest}")
}

pub(crate) fn manifest(branch: &str, number: u64) -> String {
    format!("{BRANCHES}/{branch}/{number:010}.json")
}

/// The object whose existence says that a version was pruned. It is beside the manifest, so one list shows both.
pub(crate) fn mark(branch: &str, number: u64) -> String {
    format!("{BRANCHES}/{branch}/{number:010}.pruned")
}

/// The object whose existence says that the manifest of this number may be a deletion. So the list of a branch shows where it begins.
pub(crate) fn deletion(branch: &str, number: u64) -> String {
    format!("{BRANCHES}/{branch}/{number:010}.deleted")
}

/// The name before those of all objects of the versions of a branch from `number` on.
pub(crate) fn before(branch: &str, number: u64) -> String {
    format!("{BRANCHES}/{branch}/{number:010}")
}

/// Prefix of the shortcuts to a version.
pub(crate) fn shortcuts(branch: &str, number: u64) -> String {
    format!("{SHORTCUTS}/{branch}/{number:010}/")
}

/// The manifest of a shortcut to a version, from another one.
pub(crate) fn shortcut((branch, number): (&str, u64), (from_branch, from_number): (&str, u64)) -> String {
    format!("{}{from_branch}@{from_number}.json", shortcuts(branch, number))
}

/// Branch and number.
type Place<'a> = (&'a str, u64);

/// Branch and number of a manifest.
pub(crate) fn of_manifest(object: &str) -> Option<(&str, u64)> {
    of_version(object, ".json", manifest)
}

/// Branch and number of a version that was pruned.
pub(crate) fn of_mark(object: &str) -> Option<(&str, u64)> {
    of_version(object, ".pruned", mark)
}

/// Branch and number of a manifest that may be a deletion.
pub(crate) fn of_deletion(object: &str) -> Option<(&str, u64)> {
    of_version(object, ".deleted", deletion)
}

fn of_version<'a>(object: &'a str, ending: &str, name: impl Fn(&str, u64) -> String) -> Option<(&'a str, u64)> {
    let (branch, file) = object.strip_prefix(BRANCHES)?.strip_prefix('/')?.split_once('/')?;
    let number: u64 = file.strip_suffix(ending)?.parse().ok()?;
    (number <= MAX_NUMBER && name(branch, number) == object && check_branch(branch).is_ok()).then_some((branch, number))
}

/// Branch and number of the version to which a shortcut leads, and of the one from which it does.
pub(crate) fn of_shortcut(object: &str) -> Option<(Place<'_>, Place<'_>)> {
    let (branch, rest) = object.strip_prefix(SHORTCUTS)?.strip_prefix('/')?.split_once('/')?;
    let (number, from) = rest.split_once('/')?;
    let number: u64 = number.parse().ok()?;
    let from = from.strip_suffix(".json")?;
    let (from_branch, Some(from_number)) = version(from).ok()? else { return None };
    let is_canonical = shortcut((branch, number), (from_branch, from_number)) == object;
    let ends = ((branch, number), (from_branch, from_number));
    (number <= MAX_NUMBER && is_canonical && check_branch(branch).is_ok()).then_some(ends)
}

/// Names of branches have ASCII letters, digits, `.`, `_` and `-`, and do not begin with `.`.
pub(crate) fn check_branch(name: &str) -> Result<(), String> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(is_allowed) && !name.starts_with('.') {
        return Ok(());
    }
    Err(format!(
        "expected a branch of 1 to {MAX_NAME} ASCII letters, digits, '.', '_' and '-' that does not begin with '.', found {name:?}"
    ))
}

/// A file is below its folder, on every system that reads the path.
pub(crate) fn check_file(name: &str) -> Result<(), String> {
    let is_bad = |part: &str| {
        let is_bad_char = |c: char| c.is_control() || "\\:".contains(c);
        part.is_empty() || part == "." || part == ".." || part.len() > MAX_NAME || part.contains(is_bad_char)
    };
    if name.len() > MAX_PATH || name.split('/').any(is_bad) {
        return Err(format!("expected the path of a file below the folder, found {name:?}"));
    }
    Ok(())
}

/// Splits `BRANCH@NUMBER`, or `BRANCH` for its head.
pub(crate) fn version(text: &str) -> Result<(&str, Option<u64>)> {
    let invalid = |reason: String| Error::InvalidArgument(reason);
    let (branch, number) = match text.split_once('@') {
        Some((branch, number)) => {
            let parsed = number.parse().ok().filter(|&n: &u64| n <= MAX_NUMBER);
            (branch, Some(parsed.ok_or_else(|| invalid(format!("expected BRANCH@NUMBER or BRANCH, found {text:?}")))?))
        }
        None => (text, None),
    };
    check_branch(branch).map_err(invalid)?;
    Ok((branch, number))
}
