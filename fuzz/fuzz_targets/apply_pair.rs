//! A hostile pair whose checksums are all correct: all ways of applying it agree, and an application in place that fails before
//! it writes leaves the tensors unchanged.
//!
//! Input: one byte that selects the repairs, the length of the index as a u16, the index, and the blob.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tpde_fuzz::application::{check, open};
use tpde_fuzz::memory::Counting;
use tpde_fuzz::{one_thread, repair_pair, split_pair};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fuzz_target!(init: one_thread(), |data: &[u8]| {
    let Some((repair, mut index, mut blob)) = split_pair(data) else { return };
    if repair % 16 != 15 {
        repair_pair(&mut index, &mut blob);
    }
    if let Some(pair) = open(index, blob, repair % 4 != 3) {
        check(&pair);
    }
});
