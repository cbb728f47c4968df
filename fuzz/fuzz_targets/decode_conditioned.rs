//! Any bytes as a payload of codec `conditioned`, and valid payloads of any shape with damaged bytes. A payload is refused by a
//! `payload.*` rule, or its lanes have the right sum and differ from the base in as many places as the record says.
//!
//! `conditioned_paths` runs the same inputs on the model and on every instruction set.

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
