//! Versions that a writer can be asked for (spec section 12).

use super::named;

named! {
    /// Version of the format of a new pair. A pair states the lowest minor version that has all that it uses.
    #[derive(Default)]
    enum FormatVersion as "format version" {
        /// For readers that do not know 1.2. The pair states version 1.0 if that is enough. The pair digest does not cover
        /// payloads.
        V1_1 => "1.1",
        /// The pair digest covers every byte of both files.
        V1_2 => "1.2",
        /// Base tensors may have another dtype than the target. The pair states version 1.2 if that is enough.
        #[default]
        V1_3 => "1.3",
    }
}

/// The features that a writer gives a pair, besides those that its tensors need.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Form {
    /// Version of the format.
    pub version: FormatVersion,
    /// Whether the index has the payload list. Needs version 1.2.
    pub payload_digests: bool,
}
