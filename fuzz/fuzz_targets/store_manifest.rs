//! Any bytes as a manifest of a store: refused, or written again and read again as the same version.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| tpde_store::internals::parse_manifests(data));
