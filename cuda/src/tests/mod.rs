//! Tests on a device. They are ignored by default. `scripts/gpu-check` runs them on a machine with a device. The module
//! `stand_in` runs them on any machine, with a stand-in for the driver.

mod abi;
mod again;
mod asynchronous;
mod cases;
mod chain;
mod derived;
mod derived_speed;
mod digests;
mod emulated;
mod encode;
mod encode_derived;
mod encode_faults;
mod encode_memory;
mod encode_slices;
mod encode_started;
mod fold;
mod fold_refused;
#[cfg(feature = "nvcomp")]
mod frames;
mod generated;
mod given;
mod hashes;
mod hostile;
mod laid;
mod pairs;
mod refused;
mod slices;
mod stand_in;
mod vectors;

use super::runtime::calls;
use super::{Device, Stream};
use std::sync::OnceLock;
use tpde::Error;

/// Returns the device, which all tests share.
fn device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| Device::open(0).unwrap_or_else(|e| panic!("this test needs a CUDA device: {e}")))
}

/// Returns whether a stream has no unfinished work.
fn is_idle(stream: &Stream) -> bool {
    let _cx = stream.device().context.enter().unwrap();
    // SAFETY: the stream is alive.
    unsafe { calls::cuStreamQuery(stream.raw()) == calls::Code::SUCCESS }
}

#[test]
fn no_device_is_an_error_that_says_so() {
    match Device::open(99) {
        Err(Error::NoDevice(why)) => assert!(!why.is_empty()),
        other => panic!("{other:?}"),
    }
}

/// Tests that need a device are ignored by default; `scripts/gpu-check` runs them. With `TPDE_GPU=1` this test fails on a machine
/// without a device.
#[test]
fn a_device_that_is_promised_is_there() {
    match Device::open(0) {
        Ok(_) => {}
        Err(Error::NoDevice(_)) if std::env::var("TPDE_GPU").as_deref() != Ok("1") => {}
        Err(e) => panic!("TPDE_GPU=1 promises a CUDA device: {e}"),
    }
}
