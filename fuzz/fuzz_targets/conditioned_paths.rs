//! Any table set, payload, base lanes and dtype: the scalar, AVX2 and AVX-512 decoders and the model, which follows the text of the
//! specification, accept the same payloads and give the same lanes.

#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use tpde_core::codec::fuzzing::Decoders;
use tpde_fuzz::{Chunk, Conditioned};

fuzz_target!(init: eprintln!("compared: {}", Decoders::names().join(", ")), |chunk: Chunk<'_>| -> Corpus {
    match Conditioned::new(&chunk) {
        Ok(conditioned) => conditioned.check_paths(),
        Err(_) => return Corpus::Reject,
    }
    Corpus::Keep
});
