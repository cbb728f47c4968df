//! Errors of stores.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use tpde::Escaped;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error type of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the library: a checkpoint, a pair, or a local file.
    #[error(transparent)]
    Tpde(#[from] tpde::Error),
    /// A request failed, also after repetitions.
    #[error("cannot {action} {}: {source}", Escaped(object))]
    Request {
        /// The attempted action: a verb, as in `read`.
        action: &'static str,
        /// The object, below the prefix of the store.
        object: String,
        /// The error of the object store.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// There is no store at the location.
    #[error("{} is not a store: it has no store.json", Escaped(location))]
    NotAStore {
        /// The location.
        location: String,
    },
    /// The location has a store already.
    #[error("{} is a store already", Escaped(location))]
    AlreadyAStore {
        /// The location.
        location: String,
    },
    /// The location has another store than the one that was opened.
    #[error("{} has another store than the one that was opened: open it again", Escaped(location))]
    Replaced {
        /// The location.
        location: String,
    },
    /// The object store overwrites an object that was to be created only if it does not exist, so writers would lose versions.
    #[error(
        "{} ignores conditional writes (`If-None-Match: *`): expected an error for an object that exists, found that it was overwritten",
        Escaped(location)
    )]
    NoPutIfAbsent {
        /// The location.
        location: String,
    },
    /// A manifest has a schema that this version of the crate does not read.
    #[error("{}: expected schema {expected}, found {}", Escaped(object), Escaped(found))]
    Schema {
        /// The manifest.
        object: String,
        /// The schema that is read.
        expected: &'static str,
        /// The schema of the manifest.
        found: String,
    },
    /// A manifest is not valid.
    #[error("{}: {}", Escaped(object), Escaped(reason))]
    Manifest {
        /// The manifest.
        object: String,
        /// The rule that it breaks: expected, found.
        reason: String,
    },
    /// An object is missing or has other bytes than its name and its manifest state.
    #[error("{object}: expected {expected}, found {found}")]
    Damaged {
        /// Name of the object.
        object: String,
        /// What the manifest states.
        expected: String,
        /// What the store has.
        found: String,
    },
    /// There is no such branch or version.
    #[error("there is no version {}", Escaped(version))]
    NoVersion {
        /// The version as `BRANCH@NUMBER`, or the branch.
        version: String,
    },
    /// The version was pruned.
    #[error("{} was pruned: expected a version that was kept (nearest: {})", Escaped(version), shown(kept))]
    Pruned {
        /// The version as `BRANCH@NUMBER`.
        version: String,
        /// The nearest versions that were kept: the one before, and the one after.
        kept: Vec<String>,
    },
    /// Another writer has created the version first. Nothing was overwritten. A new `put` continues from the new head.
    #[error("another writer has created {version} first: put again, on top of it")]
    Conflict {
        /// The version.
        version: String,
    },
    /// A version cannot be rebuilt from what the store has.
    #[error("{version} cannot be rebuilt: {}", Escaped(reason))]
    Unreachable {
        /// The version.
        version: String,
        /// The link that is missing.
        reason: String,
    },
    /// The base of a version is outside of the store and was not supplied.
    #[error("{version} is not stored: supply it as a checkpoint (its source: {})", Escaped(hint))]
    External {
        /// The version that is needed.
        version: String,
        /// What its manifest says about its source.
        hint: String,
    },
    /// `gc` gave the call up: by the store's clock, its lease was not renewed for the grace. It has published nothing.
    #[error(
        "gc gave this call up after {seconds} s: its lease was not renewed for the grace of {grace} s, so nothing was \
         published: put again"
    )]
    TooSlow {
        /// Duration of the call, by its own clock, which may have stood still.
        seconds: u64,
        /// The grace of the store.
        grace: u64,
    },
    /// An argument of a call is wrong.
    #[error("{}", Escaped(_0))]
    InvalidArgument(String),
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        tpde::Error::Io { action, path: PathBuf::from(path), source }.into()
    }

    /// Advice for an error, as [`tpde::hint`] gives it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Tpde(error) => tpde::hint(error),
            Self::NoVersion { .. } => Some("list the branches, or the log of one: versions are named BRANCH@NUMBER"),
            _ => None,
        }
    }

    pub(crate) fn manifest(object: &str, reason: impl Display) -> Self {
        Self::Manifest { object: object.to_owned(), reason: reason.to_string() }
    }
}

fn shown(versions: &[String]) -> String {
    if versions.is_empty() { "none".to_owned() } else { versions.join(", ") }
}
