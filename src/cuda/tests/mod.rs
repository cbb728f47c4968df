//! Tests on a device. Without one they are ignored; `scripts/gpu-check` runs them where there is one, and `stand_in` runs them
//! anywhere on a driver without a device.

mod asynchronous;
mod cases;
mod emulated;
mod frames;
mod generated;
mod given;
mod hostile;
mod laid;
mod layout;
mod pairs;
mod refused;
mod stand_in;
mod vectors;

use super::Device;
use std::sync::OnceLock;

/// The device that tests share.
fn device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| Device::open(0).unwrap_or_else(|e| panic!("this test needs a CUDA device: {e}")))
}

/// What is missing without a device has a name, and the library goes on.
#[test]
fn no_device_is_an_error_that_says_so() {
    match Device::open(99) {
        Err(crate::Error::NoDevice(why)) => assert!(!why.is_empty()),
        other => panic!("{other:?}"),
    }
}
