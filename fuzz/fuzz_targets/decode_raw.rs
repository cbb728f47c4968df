//! Any bytes as a payload of codec `raw`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tpde::Codec;
use tpde_fuzz::{Chunk, decode};

fuzz_target!(|chunk: Chunk<'_>| {
    // The index refuses a record of any other size (spec/codecs.md section 2).
    let (deltas, width) = (chunk.num_deltas as usize, chunk.dtype.lane_bytes());
    let mut payload = chunk.rest.to_vec();
    payload.resize((4 * deltas).next_multiple_of(width) + deltas * width, 0);
    decode(&chunk, Codec::Raw, payload.len() as u32, &payload);
});
