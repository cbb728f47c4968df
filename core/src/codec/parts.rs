//! Sizes of the parts of payloads.

/// Defines a struct with one byte count per part, in file order. The counts add up to the size of the payloads.
macro_rules! parts {
    ($(#[$meta:meta])* $name:ident { $($(#[$of_part:meta])* $part:ident => $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
        #[non_exhaustive]
        pub struct $name { $($(#[$of_part])* pub $part: u64,)+ }

        impl $name {
            /// Returns the name and size in bytes of each part.
            pub fn each(&self) -> impl ExactSizeIterator<Item = (&'static str, u64)> + use<> {
                [$(($text, self.$part),)+].into_iter()
            }

            /// Returns the sum of all parts.
            pub fn total(&self) -> u64 {
                self.each().map(|(_, bytes)| bytes).sum()
            }
        }

        impl core::ops::AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                $(self.$part += other.$part;)+
            }
        }
    };
}
pub(crate) use parts;

parts! {
    /// Sizes of the parts of payloads, in bytes.
    PayloadParts {
        /// Codec `conditioned`: headers, maps from contexts to classes, and the sizes of streams.
        headers => "headers and maps",
        /// Codec `conditioned`: the activity of each block of 128 lanes.
        activities => "activities",
        /// Codec `conditioned`: exceptions, which are changes that no class codes.
        exceptions => "exceptions",
        /// Codec `conditioned`: low bits, stored without coding.
        low_bits => "low bits",
        /// Codec `conditioned`: initial states of streams.
        states => "states",
        /// Codec `conditioned`: words of streams, which code the changes.
        words => "words",
        /// Codec `zstd`: frames.
        frames => "frames",
        /// Codec `raw`: positions, and their padding to a whole lane.
        positions => "positions",
        /// Codec `raw`: deltas.
        deltas => "deltas",
        /// Zeros after payloads, up to a multiple of 16 bytes.
        padding => "padding",
    }
}
