//! Inner loops of the codecs in hand-written vector instructions. One loop finds changed lanes. The others are for codec
//! `conditioned`: they copy base lanes, find coded lanes, pack values, decode and encode steps, and compute what rows of counts cost
//! in a class.
//! Tests check that all platforms give the same results.
//!
//! The codecs use `unsafe` only here and in [`crate::dispatch`]. The functions of this module are safe to call: a [`Platform`]
//! other than [`Platform::SCALAR`] exists only if its instructions were detected.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod platform;
mod scalar;
mod types;

pub use platform::{Platform, StreamFence};
pub use types::{
    CLASS_BITS, CompactedLanes, CountTiles, DIRECT, DecodeTable, EXTRA_BIAS, EncodeTable, Entry, Fault, GROUP, NO_CLASS, PIECE,
    Prefetch, PrefetchedLines, ROWS, ReverseWriter, STEP, StreamSteps, TILE_TOKENS, Tiles, Words,
};
