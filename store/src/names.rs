//! Names of branches, versions, files and objects.

use crate::digest::{Digest, UploadId};
use crate::error::{Error, Result};

/// The object that makes a prefix a store.
pub(crate) const STORE: &str = "store.json";
/// Prefix of the manifests of versions.
pub(crate) const BRANCHES: &str = "branches";
/// Prefix of the manifests of shortcuts.
pub(crate) const SHORTCUTS: &str = "shortcuts";
/// Prefix of the leases of running calls.
pub(crate) const LEASES: &str = "leases";
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

/// An object: segments with the same bytes have different names if different calls have uploaded them. So an object that `gc` has
/// decided to delete is never written again.
pub(crate) fn object(digest: &Digest, upload: Option<UploadId>) -> String {
    match upload {
        Some(upload) => format!("{OBJECTS}/{digest}.{upload}"),
        None => format!("{OBJECTS}/{digest}"),
    }
}

/// The lease of a call.
pub(crate) fn lease(id: UploadId) -> String {
    format!("{LEASES}/{id}.json")
}

/// The object whose time of writing says that the call of a lease goes on.
pub(crate) fn renewal(id: UploadId) -> String {
    format!("{LEASES}/{id}.renewed")
}

/// An object from which `gc` reads the store's clock.
pub(crate) fn clock(id: UploadId) -> String {
    format!("{CLOCK}/{id}")
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

/// Prefix of the objects of the versions of a branch.
pub(crate) fn branch(name: &str) -> String {
    format!("{BRANCHES}/{name}")
}

/// The name before those of all objects of the versions of a branch from `number` on.
pub(crate) fn before(branch: &str, number: u64) -> String {
    format!("{BRANCHES}/{branch}/{number:010}")
}

/// Prefix of the shortcuts to a version.
pub(crate) fn shortcuts(branch: &str, number: u64) -> String {
    format!("{SHORTCUTS}/{branch}/{number:010}/")
}

/// The manifest of a shortcut to a version, from another one, by the call that makes it. Earlier writers had no ids, and names that a
/// file system may refuse for a branch with a long name.
pub(crate) fn shortcut((branch, number): (&str, u64), (from_branch, from_number): (&str, u64), id: Option<UploadId>) -> String {
    let below = shortcuts(branch, number);
    match id {
        Some(id) => format!("{below}{from_branch}/{from_number:010}.{id}.json"),
        None => format!("{below}{from_branch}@{from_number}.json"),
    }
}

/// The call that has uploaded an object that a version or a shortcut can use. Those of earlier writers do not say it.
pub(crate) fn of_object(object: &str) -> Option<Option<UploadId>> {
    let name = object.strip_prefix(OBJECTS)?.strip_prefix('/')?;
    let (digest, upload) = match name.split_once('.') {
        Some((digest, upload)) => (digest, Some(UploadId::parse(upload)?)),
        None => (name, None),
    };
    (self::object(&Digest::parse(digest)?, upload) == object).then_some(upload)
}

/// The id of a lease.
pub(crate) fn of_lease(object: &str) -> Option<UploadId> {
    of_id(object, ".json", lease)
}

/// The id of a lease that was renewed.
pub(crate) fn of_renewal(object: &str) -> Option<UploadId> {
    of_id(object, ".renewed", renewal)
}

/// Whether this is the name of an object from which `gc` reads the store's clock.
pub(crate) fn is_clock(object: &str) -> bool {
    of_id(object, "", clock).is_some()
}

fn of_id(object: &str, ending: &str, name: impl Fn(UploadId) -> String) -> Option<UploadId> {
    let id = UploadId::parse(object.rsplit('/').next()?.strip_suffix(ending)?)?;
    (name(id) == object).then_some(id)
}

/// Branch and number.
type VersionKey<'a> = (&'a str, u64);

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
pub(crate) fn of_shortcut(object: &str) -> Option<(VersionKey<'_>, VersionKey<'_>)> {
    let (branch, rest) = object.strip_prefix(SHORTCUTS)?.strip_prefix('/')?.split_once('/')?;
    let (number, from) = rest.split_once('/')?;
    let number: u64 = number.parse().ok()?;
    let from = from.strip_suffix(".json")?;
    let (from_branch, from_number, id) = match from.split_once('/') {
        Some((branch, from)) => {
            let (number, id) = from.split_once('.')?;
            (branch, number, Some(UploadId::parse(id)?))
        }
        None => {
            let (branch, number) = from.split_once('@')?;
            (branch, number, None)
        }
    };
    let from_number: u64 = from_number.parse().ok().filter(|&number| number <= MAX_NUMBER)?;
    check_branch(from_branch).ok()?;
    let is_canonical = shortcut((branch, number), (from_branch, from_number), id) == object;
    let ends = ((branch, number), (from_branch, from_number));
    (number <= MAX_NUMBER && is_canonical && check_branch(branch).is_ok()).then_some(ends)
}

/// Whether an object has a name that this crate gives.
pub(crate) fn is_of_store(object: &str) -> bool {
    let is_of_version = of_manifest(object).or(of_mark(object)).or(of_deletion(object)).is_some();
    let is_of_call = of_lease(object).or(of_renewal(object)).is_some() || is_clock(object);
    object == STORE || of_object(object).is_some() || of_shortcut(object).is_some() || is_of_version || is_of_call
}

/// Whether a folder of this name holds manifests or leases: that of a branch, or one for shortcuts.
pub(crate) fn is_folder(object: &str) -> bool {
    let is_branch = |name: &str| check_branch(name).is_ok();
    let is_number = |text: &str| text.len() == 10 && text.bytes().all(|byte| byte.is_ascii_digit());
    match object.split('/').collect::<Vec<_>>()[..] {
        [BRANCHES, branch] | [SHORTCUTS, branch] => is_branch(branch),
        [SHORTCUTS, branch, number] => is_branch(branch) && is_number(number),
        [SHORTCUTS, branch, number, from] => is_branch(branch) && is_number(number) && is_branch(from) && !from.ends_with(".json"),
        _ => false,
    }
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
