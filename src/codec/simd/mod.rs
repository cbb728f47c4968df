//! The inner loops of codecs in vector instructions written by hand: finding changed lanes, and for codec `conditioned` finding
//! coded lanes, packing values, decoding and encoding steps of states. All paths give the same results, which tests compare.
//!
//! This module and [`crate::dispatch`] are the only places of the codecs with `unsafe`, and it is safe to call: a [`Path`] other
//! than [`Path::Scalar`] exists only where its instructions were detected.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod path;
mod scalar;
mod types;

pub(crate) use path::Path;
pub(crate) use types::{Backwards, Broken, Coded, DIRECT, Divisors, EXTRA_BIAS, Entry, GROUP, NO_CLASS, STEP, Tiles, Words};
