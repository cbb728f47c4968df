//! Constants and byte layouts of a pair (spec sections 5 to 11).
//!
//! Every struct here has a table in `spec/tpde-format.md` or `spec/codecs.md`, and a struct in `spec/tpde.h`. `tests/tpde/layouts.rs`
//! checks that the three agree. This module does no I/O and no validation: [`crate::index`] and [`crate::codec`] validate.

#![forbid(unsafe_code)]

mod blob;
mod files;
mod header;
mod names;
mod payload;
mod records;
mod tensors;
mod version;

pub use blob::BlobHeader;
pub use files::{FileEntry, FileKind};
pub use header::{IndexHeader, Section, SectionEntry};
#[doc(hidden)]
pub use names::{named, parsed_by_name, registry};
pub use payload::ConditionedHeader;
pub use records::{ChunkMetadata, ChunkSums, TensorDigests};
pub use tensors::{BaseKind, DerivedParam, TensorEntry};
pub use version::{Form, FormatVersion};

/// First bytes of a `.tpde-index` (section 5).
pub const INDEX_MAGIC: [u8; 8] = *b"\x89TPI\r\n\x1a\n";
/// First bytes of a `.tpde-blob` (section 11).
pub const BLOB_MAGIC: [u8; 8] = *b"\x89TPB\r\n\x1a\n";
/// The major version that this crate reads and writes.
pub const VERSION_MAJOR: u16 = 1;
/// The newest minor version that this crate supports. It writes the lowest version that a pair needs.
pub const VERSION_MINOR: u16 = 3;
/// Required feature bit 0: the header has a digest over all payloads, and roots are formed over stored digests (section 7.2).
pub const FEATURE_DIGESTS: u64 = 1 << 0;
/// Required feature bit 1: section `sums` has the digest of each payload (section 7.2).
pub const FEATURE_PAYLOAD_LIST: u64 = 1 << 1;
/// Required feature bit 2: entries of the tensor table may describe parts of tensors (section 8.4).
pub const FEATURE_PARTS: u64 = 1 << 2;
/// Required feature bit 4: base lanes may be formed from a base tensor of another dtype (section 8.2).
pub const FEATURE_DERIVED: u64 = 1 << 4;
/// Required feature bits that this crate knows.
pub const KNOWN_REQUIRED_FEATURES: u64 = FEATURE_DIGESTS | FEATURE_PAYLOAD_LIST | FEATURE_PARTS | FEATURE_DERIVED;

/// Field `part` of an entry that describes a whole tensor.
pub const PART_WHOLE: u8 = 0;
/// Field `part` of an entry that describes the first part of a tensor.
pub const PART_FIRST: u8 = 1;
/// Field `part` of an entry that describes a further part of the tensor of the entry before.
pub const PART_FURTHER: u8 = 2;

/// Size of the index header, in bytes.
pub const INDEX_HEADER_SIZE: u32 = 256;
/// Number of bytes of the index header that its CRC covers.
pub const INDEX_HEADER_CRC_SPAN: usize = 252;
/// Size of the blob header, in bytes.
pub const BLOB_HEADER_SIZE: u32 = 64;
/// Number of bytes of the blob header that its CRC covers.
pub const BLOB_HEADER_CRC_SPAN: usize = 60;
/// Size of the pair digest at the end of the index, in bytes.
pub const PAIR_DIGEST_SIZE: u64 = 32;
/// Size of the two roots before the digests of the tensors, in bytes (section 7).
pub const ROOTS_SIZE: u64 = 64;
/// Size of a stored tensor digest or content digest, in bytes.
pub const DIGEST_SIZE: usize = 16;

/// Alignment of sections in the index, in bytes.
pub const SECTION_ALIGN: u64 = 8;
/// Alignment of payloads in the blob, in bytes.
pub const PAYLOAD_ALIGN: u64 = 16;

/// log2 of the minimum number of lanes per chunk.
pub const MIN_CHUNK_LANES_LOG2: u8 = 12;
/// Maximum size of a chunk's lanes, in bytes.
pub const MAX_CHUNK_BYTES: u64 = 4 << 20;
/// Maximum number of chunks per pair.
pub const MAX_CHUNKS: u32 = (1 << 31) - 1;
/// Maximum number of tensors per pair.
pub const MAX_TENSORS: u32 = 1 << 24;
/// Maximum number of files per pair.
pub const MAX_FILES: u32 = 1 << 16;
/// Maximum size of a tensor name, in bytes.
pub const MAX_NAME_SIZE: u32 = 4096;
/// Maximum size of a file name, in bytes.
pub const MAX_FILE_NAME_SIZE: u32 = 255;
/// Maximum rank of a tensor.
pub const MAX_RANK: u16 = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prelude::*;
    use binrw::io::Cursor;
    use binrw::{BinRead, BinWrite};

    fn written_size<T>(value: &T) -> usize
    where
        for<'a> T: BinWrite<Args<'a> = ()> + binrw::meta::WriteEndian,
    {
        let mut out = Cursor::new(Vec::new());
        value.write(&mut out).unwrap();
        out.into_inner().len()
    }

    #[test]
    fn layouts_have_the_sizes_of_the_spec() {
        assert_eq!(size_of::<ChunkMetadata>(), 32);
        assert_eq!(size_of::<ChunkSums>(), 16);
        assert_eq!(size_of::<TensorDigests>(), 32);
        assert_eq!(size_of::<ConditionedHeader>(), 16);
        let zeros = [0u8; 256];
        let header = IndexHeader::read(&mut Cursor::new(&zeros)).unwrap();
        assert_eq!(written_size(&header), INDEX_HEADER_SIZE as usize);
        let blob = BlobHeader::read(&mut Cursor::new(&zeros)).unwrap();
        assert_eq!(written_size(&blob), BLOB_HEADER_SIZE as usize);
        let tensor = TensorEntry::read(&mut Cursor::new(&zeros)).unwrap();
        assert_eq!(written_size(&tensor), TensorEntry::SIZE);
        let file = FileEntry::read(&mut Cursor::new(&zeros)).unwrap();
        assert_eq!(written_size(&file), FileEntry::SIZE);
    }
}
