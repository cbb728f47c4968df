//! A valid pair whose decoded fields, tables, streams and lanes are changed, and whose checksums are then recomputed: all ways of
//! applying it agree, memory is bounded, and an application in place that fails before it writes leaves the tensors unchanged.
//!
//! The input selects a seed of `apply_pair` and the changes.

#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use tpde_fuzz::application::{check, open};
use tpde_fuzz::memory::Counting;
use tpde_fuzz::mutation::Program;
use tpde_fuzz::one_thread;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fuzz_target!(init: one_thread(), |data: &[u8]| {
    let Ok(program) = Program::arbitrary(&mut Unstructured::new(data)) else { return };
    let (index, blob) = program.run();
    if let Some(pair) = open(index, blob, program.signs_sums()) {
        check(&pair);
    }
});
