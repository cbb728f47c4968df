//! Encodings in which a call of the driver fails.

use super::super::encode::Limits;
use super::super::{Device, DeviceCheckpoint, Encode, Encoder};
use super::cases::{Random, random_lanes};
use super::stand_in;
use tempfile::TempDir;
use tpde::{Codec, EncodeOptions, Error, MemoryCheckpoint, TensorInfo};
use tpde_core::lane::Dtype;

/// Maximum number of calls of a function that are refused, one per encoding.
const CALLS: u64 = 24;

/// Checkpoints on a device of their own, and an encoder.
struct Place {
    base: DeviceCheckpoint,
    target: DeviceCheckpoint,
    encoder: Encoder,
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        let info = |name: &str| TensorInfo { name: name.into(), dtype: Dtype::Bf16, shape: vec![400] };
        let (base, target) = random_lanes(&mut Random(5), Dtype::Bf16, 400, 9);
        let device = Device::open(0).unwrap();
        let [base, target] = [&base, &target].map(|bytes| {
            let tensors = ["a", "b"].map(|name| (info(name), &bytes[..]));
            DeviceCheckpoint::upload(&device, &MemoryCheckpoint::new(tensors).unwrap()).unwrap()
        });
        Self { base, target, encoder: Encoder::new(), folder: tempfile::tempdir().unwrap() }
    }

    /// A place that has encoded: its encoder and the pools of its device have memory.
    fn used() -> Self {
        let place = Self::new();
        place.encode(true).unwrap();
        place
    }

    fn encode(&self, with_encoder: bool) -> Result<[Vec<u8>; 2], Error> {
        let options = EncodeOptions::default().codec(Codec::Conditioned);
        // A wave per tensor.
        let limits = Limits { lanes: 1, ..Limits::default() };
        let encode = Encode::new(&self.target).base(&self.base).options(options).limits(limits);
        let encode = if with_encoder { encode.encoder(&self.encoder) } else { encode };
        encode.to_path(self.folder.path().join("pair"))?;
        Ok(["pair.tpde-index", "pair.tpde-blob"].map(|name| {
            let bytes = std::fs::read(self.folder.path().join(name)).unwrap();
            std::fs::remove_file(self.folder.path().join(name)).unwrap();
            bytes
        }))
    }

    /// Refuses a call of a function. Returns whether the encoding made this call, and whether it failed.
    fn refuse(&self, name: &str, calls: u64, with_encoder: bool, expected: &[Vec<u8>; 2]) -> (bool, bool) {
        let what = format!("call {calls} of {name}, {} encoder", if with_encoder { "with an" } else { "without" });
        stand_in::refuse_named(name, calls);
        let result = self.encode(with_encoder);
        let is_refused = stand_in::refuse(None);
        match result {
            Ok(found) => assert!(found == *expected, "{what}"),
            Err(Error::Device { .. }) if is_refused => {
                assert_eq!(std::fs::read_dir(self.folder.path()).unwrap().count(), 0, "{what}: something was published");
                let again = self.encode(with_encoder).unwrap_or_else(|e| panic!("after {what}: {e}"));
                assert!(again == *expected, "after {what}");
                return (true, true);
            }
            Err(e) => panic!("{what}: {e}"),
        }
        (is_refused, false)
    }
}

/// Whichever call fails: a typed error, nothing is published, and the device encodes afterwards. An encoder gives its memory up, or
/// stays usable. Of each function of the driver, the first call fails in the first encoding of a device, and the last one with an
/// encoder that has memory; with `TPDE_LONG`, [`CALLS`] calls with and without.
///
/// Only the first encoding of a device is certain to call each function. The pools keep pinned memory and streams of earlier
/// encodings. How many they keep depends on the timing of threads, so a later encoding may need no new ones.
#[test]
#[ignore = "needs a CUDA device"]
fn a_refused_call_ends_the_encoding_and_nothing_else() {
    if !stand_in::is_used() {
        return println!("skipped: only the stand-in for the driver refuses calls");
    }
    let is_long = std::env::var_os("TPDE_LONG").is_some();
    let expected = Place::new().encode(false).unwrap();
    let mut errors = 0;
    for with_encoder in [false, true] {
        let mut place = if with_encoder { Place::used() } else { Place::new() };
        stand_in::refuse(None);
        assert!(place.encode(with_encoder).unwrap() == expected);
        for (name, count) in stand_in::calls() {
            if is_long {
                // In late order, no pinned memory is used again before its device is closed. So each function has a new one.
                place = Place::used();
                for calls in (0..count).step_by(count.div_ceil(CALLS) as usize) {
                    errors += u32::from(place.refuse(&name, calls, with_encoder, &expected).1);
                }
            }
            if with_encoder {
                errors += u32::from(place.refuse(&name, count - 1, true, &expected).1);
            } else {
                let (is_refused, is_error) = Place::new().refuse(&name, 0, false, &expected);
                assert!(is_refused, "{name} was not called");
                errors += u32::from(is_error);
            }
        }
    }
    assert!(errors > 12, "{errors} errors");
    for name in ["cuMemAllocFromPoolAsync", "cuLaunchKernel", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemsetD32Async"] {
        assert!(stand_in::has_refused(name), "{name} was never refused");
    }
}
