//! The inner loops of codecs in hand-written vector instructions: finding changed lanes; for codec `conditioned`, finding coded
//! lanes, packing values, decoding and encoding steps. All platforms give the same results, which tests compare.
//!
//! Of the codecs, only this module and [`crate::dispatch`] use `unsafe`. It is safe to call: a [`Platform`] other than
//! [`Platform::SCALAR`] exists only where its instructions were detected.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod platform;
mod scalar;
mod types;

pub(crate) use platform::Platform;
pub(crate) use types::{
    Broken, CompactedLanes, DIRECT, DecodeTable, DecodedSteps, EXTRA_BIAS, EncodeTable, Entry, GROUP, NO_CLASS, ReverseWriter,
    STEP, Tiles, Words,
};
