//! Limits of a reader, for untrusted files (spec section 13.4).

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
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}
