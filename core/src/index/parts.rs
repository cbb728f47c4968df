//! Bytes of an index by purpose.

use crate::codec::parts;

parts! {
    /// Size of the parts of an index in bytes, as stored.
    IndexParts {
        /// The header, and the pair digest at the end.
        header => "header and pair digest",
        /// Chunk records: 32 bytes per chunk.
        records => "records",
        /// Chunk sums: 16 bytes per chunk.
        sums => "sums",
        /// Digests of payloads: 16 bytes per chunk, if they are stored.
        payload_digests => "payload digests",
        /// Digests: 32 bytes per tensor, and 64 bytes for the two roots.
        digests => "digests",
        /// Tensor table: names, shapes, dtypes, codecs.
        tensors => "tensor table",
        /// File table: names and contents of files.
        files => "file table",
        /// Tables of codec `conditioned`.
        tables => "tables",
        /// Zeros between sections.
        padding => "padding",
    }
}
