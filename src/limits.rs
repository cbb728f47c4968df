//! Limits of a reader for untrusted files (spec section 13.4).

/// Limits of a reader. The defaults are those of the spec.
///
/// Opening a pair takes at most `index_size + 2 * (expanded sections) + 100 * (tensors)` bytes of memory, plus twice the name and
/// 100 bytes per file. The header states the sizes of the sections, which are compared with the limits before anything is
/// allocated. There are three compressible sections: tensor table, file table and codec tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Most bytes of an index file.
    pub index_size: u64,
    /// Most bytes that one compressible section may expand to. Values above 2^32 - 1 act like 2^32 - 1.
    pub section_size: u64,
}

impl Limits {
    /// The defaults.
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
