//! Options for opening a pair: limits for untrusted files (spec section 13.4), and the expected pair digest.

use crate::error::{Error, Result};

/// Limits of a reader. The spec defines the defaults.
///
/// Opening a pair takes at most `index_size + 2 * expanded_sections + 100 * tensors` bytes of memory. Each file takes twice the
/// length of its name and 100 bytes more. Sizes in the header are compared with the limits before memory is allocated. Three
/// sections can be compressed: tensor table, file table and codec tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Maximum size of an index file in bytes.
    pub index_size: u64,
    /// Maximum expanded size, in bytes, of each compressible section. Values above 2^32 - 1 act like 2^32 - 1.
    pub section_size: u64,
}

impl Limits {
    /// The default limits: 1 GiB of index, 256 MiB per expanded section.
    pub const DEFAULT: Self = Self { index_size: 1 << 30, section_size: 256 << 20 };

    /// Sets [`index_size`](Self#structfield.index_size).
    #[must_use]
    pub const fn index_size(mut self, bytes: u64) -> Self {
        self.index_size = bytes;
        self
    }

    /// Sets [`section_size`](Self#structfield.section_size).
    #[must_use]
    pub const fn section_size(mut self, bytes: u64) -> Self {
        self.section_size = bytes;
        self
    }

    /// Returns [`Error::Limit`] for an index of more than [`index_size`](Self#structfield.index_size) bytes.
    pub fn check_index_size(&self, found: u64) -> Result<()> {
        Error::check_limit("size of the index", self.index_size, found)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Options for opening a pair: limits, and the expected pair digest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Limits for untrusted files.
    pub limits: Limits,
    /// The pair digest that the index must have. It is compared with the hash of the index before a section is parsed and before
    /// the blob is opened. A difference is [`Error::UnexpectedPair`].
    pub expect: Option<[u8; 32]>,
}

impl OpenOptions {
    /// Sets [`limits`](Self#structfield.limits).
    #[must_use]
    pub const fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets [`expect`](Self#structfield.expect).
    #[must_use]
    pub const fn expect(mut self, digest: [u8; 32]) -> Self {
        self.expect = Some(digest);
        self
    }
}

impl From<Limits> for OpenOptions {
    fn from(limits: Limits) -> Self {
        Self::default().limits(limits)
    }
}
