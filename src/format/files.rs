//! File table (spec section 10).

use super::registry;
use binrw::{BinRead, BinWrite};

/// One target file (40 bytes); its name and stored content follow the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, BinRead, BinWrite)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[brw(little)]
pub struct FileEntry {
    /// Code of the [`FileKind`].
    pub kind: u16,
    /// Zero.
    pub reserved_0: u16,
    /// Bytes of the name.
    pub name_size: u32,
    /// Bytes of the content.
    pub content_size: u64,
    /// BLAKE3-128 of the content.
    pub content_digest: [u8; 16],
    /// Zero.
    pub reserved_1: u64,
}

impl FileEntry {
    /// Bytes of an entry.
    pub const SIZE: usize = 40;
}

registry! {
    /// What a target file consists of, and whether its content is stored.
    FileKind: u16 as "file kind" {
        /// Header stored here, then the tensors that it lists.
        Safetensors = 0 => "safetensors",
        /// Header of the base's file of the same name, then the tensors that it lists.
        SafetensorsOfBase = 1 => "safetensors, header of the base",
        /// The whole file, stored here.
        Verbatim = 2 => "verbatim",
        /// The base's file of the same name.
        VerbatimOfBase = 3 => "verbatim, as the base's",
    }
}

impl FileKind {
    /// Whether the content is stored in the index.
    pub const fn is_stored(self) -> bool {
        matches!(self, FileKind::Safetensors | FileKind::Verbatim)
    }

    /// Whether tensors follow the content.
    pub const fn has_tensors(self) -> bool {
        matches!(self, FileKind::Safetensors | FileKind::SafetensorsOfBase)
    }
}
