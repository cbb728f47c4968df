//! Names of branches, versions, files and objects.

use crate::digest::Digest;
use crate::error::{Error, Result};

/// The object that makes a prefix a store.
pub(crate) const STORE: &str = "store.json";
/// Prefix of the manifests of versions.
pub(crate) const BRANCHES: &str = "branches";
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

/// Branch and number of a manifest.
pub(crate) fn of_manifest(object: &str) -> Option<(&str, u64)> {
    let (branch, file) = object.strip_prefix(BRANCHES)?.strip_prefix('/')?.split_once('/')?;
    let number: u64 = file.strip_suffix(".json")?.parse().ok()?;
    (number <= MAX_NUMBER && manifest(branch, number) == object && check_branch(branch).is_ok()).then_some((branch, number))
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

/// A file is below its folder, whatever system reads the path.
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
