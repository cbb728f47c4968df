//! The registry of layouts (`spec/codecs.md` section 3).

use crate::format::registry;

registry! {
    /// Layout of the content of a frame, which is its first byte.
    #[derive(Default)]
    Layout: u8 as "layout" {
        /// Byte planes of all lanes' deltas.
        #[default]
        Planes = 0 => "planes",
        /// Gaps in bytes, byte planes of the changed lanes' deltas.
        Gaps = 1 => "gaps",
        /// Gaps in Elias-δ, byte planes of the changed lanes' deltas.
        EliasDelta = 2 => "elias-delta",
        /// A gap and a delta per byte; large ones are escaped.
        NibbleGaps = 3 => "nibble-gaps",
        /// The deltas of two lanes per byte; large ones are escaped.
        NibblePlanes = 4 => "nibble-planes",
    }
}
