//! Manifests, which describe the versions of a store. Their bytes may be hostile.

use crate::digest::{Digest, UploadId};
use crate::error::{Error, Result};
use crate::names::{self, MAX_NUMBER, check_branch, check_file};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Schema of `store.json`.
pub(crate) const STORE_SCHEMA: &str = "tpde.store/1";
/// Schema of the manifest of a version.
pub(crate) const VERSION_SCHEMA: &str = "tpde.store.version/1";
/// Schema of the manifest of a shortcut.
pub(crate) const SHORTCUT_SCHEMA: &str = "tpde.store.shortcut/1";
/// The content of a name that no manifest may take any more, because `gc` gave its writer up.
pub(crate) const VOID: &[u8] = b"{\"schema\": \"tpde.store.void/1\"}\n";
/// Maximum size of a manifest in bytes.
pub(crate) const MAX_MANIFEST: u64 = 64 << 20;
/// Maximum size of a segment in bytes.
pub(crate) const MAX_SEGMENT: u64 = 1 << 30;

/// The content of `store.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StoreManifest {
    pub schema: String,
    /// 32 random hexadecimal digits. Stores of earlier writers lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Age, in seconds, below which an object is never collected.
    pub grace: u64,
    /// A version is stored whole if this many pairs would lead to it from the last anchor; 0 for no such rule.
    pub anchor_every: u64,
    /// Size of a chain, in percent of its anchor, above which the next version is stored whole; 0 for no such rule.
    pub anchor_percent: u64,
}

/// A version of a checkpoint, as its manifest describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Version {
    /// `tpde.store.version/1`.
    pub schema: String,
    /// The branch.
    pub branch: String,
    /// Number within the branch.
    pub number: u64,
    /// 32 random hexadecimal digits. References state them, and mean only the version that has them.
    pub id: String,
    /// The version before.
    pub parent: Option<Reference>,
    /// Hash over the digests of all tensors: the target root of its pair (spec section 7).
    pub state: Digest,
    /// Number of tensors.
    pub tensors: u64,
    /// Size of all tensors in bytes.
    pub tensor_bytes: u64,
    /// How the tensors are stored.
    pub content: Content,
    /// What leads to the version from the last anchor. Manifests of earlier writers lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_anchor: Option<SinceAnchor>,
    /// Files beside the tensors, in ascending order of name.
    pub files: Vec<StoredFile>,
    /// Time of creation by the writer's clock, in seconds since 1970-01-01 UTC.
    pub created: u64,
    /// The user's own values.
    pub metadata: BTreeMap<String, String>,
}

/// The pairs that lead from an anchor to a version, from parent to child.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct SinceAnchor {
    /// Number of pairs behind the anchor.
    pub pairs: u64,
    /// Their size in bytes.
    pub bytes: u64,
    /// Size of the anchor in bytes: of its pair, or if it is external, of its tensors.
    pub anchor_bytes: u64,
}

/// A pair that leads from a version to a later one, past those in between.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Shortcut {
    /// `tpde.store.shortcut/1`.
    pub schema: String,
    /// The version that is the base of the pair.
    pub from: Reference,
    /// The version that the pair gives.
    pub to: Reference,
    /// The pair.
    pub pair: StoredPair,
    /// The call that has made it, which is part of its name. Shortcuts of earlier writers lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<UploadId>,
    /// Time of creation by the writer's clock, in seconds since 1970-01-01 UTC.
    pub created: u64,
}

/// Names a version.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Reference {
    /// The branch.
    pub branch: String,
    /// Number within the branch.
    pub number: u64,
    /// [`Version::id`].
    pub id: String,
}

/// How the tensors of a version are stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Content {
    /// An anchor: a pair that needs no base.
    Whole(StoredPair),
    /// A pair whose base is the parent.
    Difference(StoredPair),
    /// An anchor that is not stored: readers supply the checkpoint.
    External {
        /// Where the checkpoint can be found, in the user's words.
        hint: String,
    },
    /// The tensors of the parent.
    Same,
    /// Nothing: the branch was deleted. Its versions end at the parent.
    Deleted,
}

/// A pair in a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct StoredPair {
    /// The pair digest.
    pub digest: Digest,
    /// The index file.
    pub index: Stored,
    /// The blob.
    pub blob: Stored,
}

impl StoredPair {
    /// Size of both files in bytes.
    pub fn bytes(&self) -> u64 {
        self.index.bytes.saturating_add(self.blob.bytes)
    }

    /// The segments of both files.
    pub(crate) fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.index.segments.iter().chain(&self.blob.segments)
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        self.index.check().map_err(|reason| format!("index: {reason}"))?;
        self.blob.check().map_err(|reason| format!("blob: {reason}"))
    }
}

impl Reference {
    /// `BRANCH@NUMBER`.
    pub fn name(&self) -> String {
        format!("{}@{}", self.branch, self.number)
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        check_branch(&self.branch)?;
        check_id(&self.id)?;
        if self.number > MAX_NUMBER {
            return Err(format!("expected a number of at most {MAX_NUMBER}, found {}", self.number));
        }
        Ok(())
    }
}

impl Shortcut {
    /// Reads the manifest `object`.
    ///
    /// # Errors
    /// [`Error::Schema`] for another schema; [`Error::Manifest`] for anything else that is wrong.
    pub(crate) fn parse(bytes: &[u8], object: &str) -> Result<Self> {
        let shortcut: Self = parse(bytes, object, SHORTCUT_SCHEMA)?;
        shortcut.check(object).map_err(|reason| Error::manifest(object, reason))?;
        Ok(shortcut)
    }

    /// The object that is its manifest.
    pub(crate) fn object(&self) -> String {
        names::shortcut((&self.to.branch, self.to.number), (&self.from.branch, self.from.number), self.id)
    }

    fn check(&self, object: &str) -> Result<(), String> {
        self.from.check().map_err(|reason| format!("from: {reason}"))?;
        self.to.check().map_err(|reason| format!("to: {reason}"))?;
        if self.object() != object {
            return Err(format!("expected the shortcut of this name, found that from {} to {}", self.from.name(), self.to.name()));
        }
        if self.from.branch == self.to.branch && self.from.number >= self.to.number {
            return Err(format!("from: expected a number less than {}, found {}", self.to.number, self.from.number));
        }
        self.pair.check()
    }
}

/// A file beside the tensors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct StoredFile {
    /// Path below the folder of the checkpoint, with `/` between names.
    pub name: String,
    /// The content.
    pub content: Stored,
}

/// A file in a store: its bytes, cut into segments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Stored {
    /// Size of the file in bytes.
    pub bytes: u64,
    /// The segments, in order.
    pub segments: Vec<Segment>,
}

/// A segment of a file: one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Segment {
    /// BLAKE3 of the bytes: the first part of the name of the object.
    pub digest: Digest,
    /// Size in bytes.
    pub bytes: u64,
    /// The call that has uploaded the object: the second part of its name. Objects of earlier writers lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<UploadId>,
}

impl Segment {
    /// The object.
    pub(crate) fn object(&self) -> String {
        names::object(&self.digest, self.upload)
    }
}

impl Version {
    /// `BRANCH@NUMBER`.
    pub fn name(&self) -> String {
        format!("{}@{}", self.branch, self.number)
    }

    /// The reference to this version.
    pub fn reference(&self) -> Reference {
        Reference { branch: self.branch.clone(), number: self.number, id: self.id.clone() }
    }

    /// The pair, if the version has one.
    pub fn pair(&self) -> Option<&StoredPair> {
        match &self.content {
            Content::Whole(pair) | Content::Difference(pair) => Some(pair),
            Content::External { .. } | Content::Same | Content::Deleted => None,
        }
    }

    /// The segments of the files beside the tensors.
    pub(crate) fn file_segments(&self) -> impl Iterator<Item = &Segment> {
        self.files.iter().flat_map(|file| &file.content.segments)
    }

    /// Reads the manifest of version `number` of `branch`, which is the object `object`.
    ///
    /// # Errors
    /// [`Error::Schema`] for another schema; [`Error::Manifest`] for anything else that is wrong.
    pub(crate) fn parse(bytes: &[u8], object: &str, branch: &str, number: u64) -> Result<Self> {
        let version: Self = parse(bytes, object, VERSION_SCHEMA)?;
        version.check(branch, number).map_err(|reason| Error::manifest(object, reason))?;
        Ok(version)
    }

    fn check(&self, branch: &str, number: u64) -> Result<(), String> {
        if (self.branch.as_str(), self.number) != (branch, number) {
            return Err(format!("expected the manifest of {branch}@{number}, found that of {}", self.name()));
        }
        self.reference().check()?;
        if let Some(parent) = &self.parent {
            parent.check().map_err(|reason| format!("parent: {reason}"))?;
            if parent.branch == branch && parent.number >= number {
                return Err(format!("number of the parent: expected less than {number}, found {}", parent.number));
            }
        }
        if self.content == Content::Deleted {
            if self.parent.as_ref().is_none_or(|parent| parent.branch != branch) {
                return Err("a deletion needs a parent of the same branch".into());
            }
            if !self.files.is_empty() {
                return Err("a deletion has files".into());
            }
        }
        if self.parent.is_none() && matches!(self.content, Content::Difference(_) | Content::Same) {
            return Err("the content needs a parent, and there is none".into());
        }
        if let Some(pair) = self.pair() {
            pair.check()?;
        }
        for file in &self.files {
            check_file(&file.name)?;
            file.content.check().map_err(|reason| format!("file {}: {reason}", file.name))?;
        }
        // A file whose name is a folder of another file could not be written. In this order that file comes first.
        for pair in self.files.windows(2) {
            if pair[0].name >= pair[1].name {
                return Err(format!("files: expected ascending names, found {} before {}", pair[0].name, pair[1].name));
            }
        }
        Ok(())
    }
}

impl Stored {
    fn check(&self) -> Result<(), String> {
        let mut sum = 0u64;
        for segment in &self.segments {
            if !(1..=MAX_SEGMENT).contains(&segment.bytes) {
                return Err(format!("expected segments of 1 to {MAX_SEGMENT} bytes, found {}", segment.bytes));
            }
            sum = sum.saturating_add(segment.bytes);
        }
        if sum != self.bytes {
            return Err(format!("expected segments of {} bytes, found {sum}", self.bytes));
        }
        Ok(())
    }
}

impl StoreManifest {
    pub fn parse(bytes: &[u8], object: &str) -> Result<Self> {
        parse(bytes, object, STORE_SCHEMA)
    }
}

fn check_id(id: &str) -> Result<(), String> {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if id.len() == 32 && id.bytes().all(is_digit) {
        return Ok(());
    }
    Err(format!("expected an id of 32 hexadecimal digits, found {id}"))
}

/// The rule for the size of a manifest, for readers and writers.
pub(crate) fn check_size(bytes: u64, object: &str) -> Result<()> {
    if bytes > MAX_MANIFEST {
        return Err(Error::manifest(object, format_args!("expected at most {MAX_MANIFEST} bytes, found {bytes}")));
    }
    Ok(())
}

/// Compares the schema before anything else is parsed.
pub(crate) fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8], object: &str, expected: &'static str) -> Result<T> {
    check_size(bytes.len() as u64, object)?;
    #[derive(Deserialize)]
    struct Head {
        schema: String,
    }
    let head: Head = serde_json::from_slice(bytes).map_err(|e| Error::manifest(object, e))?;
    if head.schema != expected {
        return Err(Error::Schema { object: object.to_owned(), expected, found: head.schema });
    }
    serde_json::from_slice(bytes).map_err(|e| Error::manifest(object, e))
}
