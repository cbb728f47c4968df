//! Tests on a device. Where there is none each says that it was skipped, or fails if `TPDE_GPU` is set.

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
mod vectors;

use super::Device;
use std::sync::OnceLock;

/// The device that tests share, if there is one.
fn device(test: &str) -> Option<&'static Device> {
    static DEVICE: OnceLock<Result<Device, String>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| Device::open(0).map_err(|e| e.to_string()));
    match device {
        Ok(device) => Some(device),
        Err(e) if std::env::var_os("TPDE_GPU").is_some() => panic!("{e}"),
        Err(e) => {
            eprintln!("SKIPPED {test}: {e}");
            None
        }
    }
}

/// What is missing without a device has a name, and the library goes on.
#[test]
fn no_device_is_an_error_that_says_so() {
    match Device::open(99) {
        Err(crate::Error::NoDevice(why)) => assert!(!why.is_empty()),
        other => panic!("{other:?}"),
    }
}
