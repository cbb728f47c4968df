//! Registry of layouts (`spec/codecs.md` section 3).

use crate::format::registry;

registry! {
    /// Layout of the content of a frame. The first byte of the content is the code of its layout.
    #[derive(Default)]
    Layout: u8 as "layout" {
        /// Byte planes of all lanes' deltas.
        #[default]
        Planes = 0 => "planes",
        /// Gaps in bytes, and byte planes of the deltas of changed lanes.
        Gaps = 1 => "gaps",
        /// Gaps in Elias-δ code, and byte planes of the deltas of changed lanes.
        EliasDelta = 2 => "elias-delta",
        /// One gap and one delta per byte. Large gaps and deltas are escaped.
        NibbleGaps = 3 => "nibble-gaps",
        /// Deltas of two lanes per byte. Large deltas are escaped.
        NibblePlanes = 4 => "nibble-planes",
    }
}
