//! Any bytes as a payload of codec `conditioned`, and payloads of any shape that are in order but for some bytes: the same on
//! every path of vector instructions and in the model that follows the text of the specification.

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
