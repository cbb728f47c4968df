//! File table (spec section 10).

use super::registry;
use binrw::{BinRead, BinWrite};

/// Entry of a target file (40 bytes). Name and stored content of the file follow the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, BinRead, BinWrite)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[brw(little)]
pub struct FileEntry {
    /// Code of the [`FileKind`].
    pub kind: u16,
    /// Zero.
    pub reserved_0: u16,
    /// Size of the name, in bytes.
    pub name_size: u32,
    /// Size of the content, in bytes.
    pub content_size: u64,
    /// BLAKE3-128 of the content.
    pub content_digest: [u8; 16],
    /// Zero.
    pub reserved_1: u64,
}

impl FileEntry {
    /// Size of an entry, in bytes.
    pub const SIZE: usize = 40;
}

registry! {
    /// Composition of a target file.
    FileKind: u16 as "file kind" {
        /// A safetensors header, stored in this pair, then the tensors that it lists.
        Safetensors = 0 => "safetensors",
        /// The safetensors header of the base's file of the same name, then the tensors that it lists.
        SafetensorsOfBase = 1 => "safetensors, header of the base",
        /// A file without tensors, stored in this pair.
        Verbatim = 2 => "verbatim",
        /// A copy of the base's file of the same name.
        VerbatimOfBase = 3 => "verbatim, as the base's",
    }
}

impl FileKind {
    /// Returns whether the content is stored in the index.
    pub const fn is_stored(self) -> bool {
        matches!(self, FileKind::Safetensors | FileKind::Verbatim)
    }

    /// Returns whether tensors follow the content.
    pub const fn has_tensors(self) -> bool {
        matches!(self, FileKind::Safetensors | FileKind::SafetensorsOfBase)
    }
}
