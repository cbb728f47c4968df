//! The command line as seen by its user: outputs, messages and exit codes.

#[allow(dead_code, unused_imports, reason = "not all tests use all of it")]
#[path = "../common/mod.rs"]
mod common;

mod chains;
mod device;
mod documents;
mod explain;
mod html;
mod inputs;
#[cfg(feature = "mmap")]
mod mapped;
mod merge;
mod outputs;
mod printing;
mod round_trips;
#[cfg(feature = "store")]
mod store;
mod usage;
mod verify;
