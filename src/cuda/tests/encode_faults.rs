//! Encodings in which a call of the driver fails.

use super::super::encode::Limits;
use super::super::{DeviceCheckpoint, Encode, Encoder};
use super::cases::{Random, random_lanes};
use super::stand_in;
use crate::lane::Dtype;
use crate::{Codec, EncodeOptions, Error, MemoryCheckpoint, TensorInfo};
use std::path::Path;

/// Whichever call fails: a typed error, nothing is published, and the device encodes afterwards. An encoder gives its memory up, or
/// stays usable. Of each function of the driver, the first call fails without an encoder, and the last one with an encoder that has
/// memory; with `TPDE_LONG`, every call with and without.
#[test]
#[ignore = "needs a CUDA device"]
fn a_refused_call_ends_the_encoding_and_nothing_else() {
    if !stand_in::is_used() {
        return println!("skipped: only the stand-in for the driver refuses calls");
    }
    let info = |name: &str| TensorInfo { name: name.into(), dtype: Dtype::Bf16, shape: vec![400] };
    let (base, target) = random_lanes(&mut Random(5), Dtype::Bf16, 400, 9);
    let device = super::device();
    let [base, target] = [&base, &target].map(|bytes| {
        let tensors = ["a", "b"].map(|name| (info(name), &bytes[..]));
        DeviceCheckpoint::upload(device, &MemoryCheckpoint::new(tensors).unwrap()).unwrap()
    });
    let folder = tempfile::tempdir().unwrap();
    let files = ["pair.tpde-index", "pair.tpde-blob"].map(|name| folder.path().join(name));
    let encode = |path: &Path, encoder: Option<&Encoder>| {
        let options = EncodeOptions::default().codec(Codec::Conditioned);
        // A wave per tensor.
        let limits = Limits { lanes: 1, ..Limits::default() };
        let encode = Encode::new(&target).base(&base).options(options).limits(limits);
        if let Some(encoder) = encoder { encode.encoder(encoder).to_path(path) } else { encode.to_path(path) }
    };
    let read = || files.each_ref().map(|file| std::fs::read(file).unwrap());
    let remove = || files.iter().for_each(|file| std::fs::remove_file(file).unwrap());
    let path = folder.path().join("pair");
    let kept = Encoder::new();
    encode(&path, Some(&kept)).unwrap();
    let expected = read();
    remove();

    let mut errors = 0;
    let mut refuse = |name: &str, calls, encoder: Option<&Encoder>| {
        let what = format!("call {calls} of {name}, {} encoder", if encoder.is_some() { "with an" } else { "without" });
        stand_in::refuse_named(name, calls);
        let result = encode(&path, encoder);
        let is_refused = stand_in::refuse(None);
        match result {
            Ok(_) => {}
            Err(Error::Device { .. }) if is_refused => {
                assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "{what}: something was published");
                errors += 1;
                encode(&path, encoder).unwrap_or_else(|e| panic!("after {what}: {e}"));
            }
            Err(e) => panic!("{what}: {e}"),
        }
        assert!(read() == expected, "after {what}");
        remove();
        is_refused
    };
    let is_long = std::env::var_os("TPDE_LONG").is_some();
    for encoder in [None, Some(&kept)] {
        stand_in::refuse(None);
        encode(&path, encoder).unwrap();
        remove();
        for (name, count) in stand_in::calls() {
            if is_long {
                (0..count).for_each(|calls| _ = refuse(&name, calls, encoder));
            } else {
                let is_refused = refuse(&name, if encoder.is_some() { count - 1 } else { 0 }, encoder);
                assert!(is_refused || encoder.is_some(), "{name} was not called");
            }
        }
    }
    assert!(errors > 12, "{errors} errors");
    for name in ["cuMemAllocFromPoolAsync", "cuLaunchKernel", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemsetD32Async"] {
        assert!(stand_in::has_refused(name), "{name} was never refused");
    }
}
