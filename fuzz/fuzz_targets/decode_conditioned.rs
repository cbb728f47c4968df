//! Any bytes as a payload of codec `conditioned`, and payloads of any shape that are in order but for some bytes: refused by a rule
//! of the payload, or decoded to lanes of which as many differ as the record says and whose sum is right.
//!
//! `conditioned_paths` compares the same with the model and every kind of vector instructions.

#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use tpde_fuzz::{Chunk, Conditioned};

fuzz_target!(|chunk: Chunk<'_>| -> Corpus {
    match Conditioned::new(&chunk) {
        Ok(conditioned) => conditioned.check(),
        Err(_) => return Corpus::Reject,
    }
    Corpus::Keep
});
