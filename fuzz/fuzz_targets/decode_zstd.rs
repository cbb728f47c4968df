//! Any bytes as a payload of codec `zstd`, and any content in a valid frame.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tpde::Codec;
use tpde_fuzz::{Chunk, decode, frame};

fuzz_target!(|chunk: Chunk<'_>| {
    // The index refuses a record of any other size (spec/codecs.md section 3).
    let (lanes, width) = (chunk.base.len() / chunk.dtype.lane_bytes(), chunk.dtype.lane_bytes());
    let sizes = 2..=(width + 3) * lanes + 64;
    if chunk.wrapped {
        if sizes.contains(&chunk.rest.len()) {
            decode(&chunk, Codec::Zstd, chunk.rest.len() as u32, &frame(chunk.rest));
        }
    } else if let Some((size, payload)) = chunk.rest.split_first_chunk() {
        let size = u16::from_le_bytes(*size);
        if sizes.contains(&size.into()) && payload.len() <= usize::from(size) + usize::from(size) / 64 + 64 {
            decode(&chunk, Codec::Zstd, size.into(), payload);
        }
    }
});
