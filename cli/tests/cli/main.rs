//! The command line from outside: what it writes, what it says, and how it ends.

#[allow(dead_code, unused_imports, reason = "not all tests use all of it")]
#[path = "../common/mod.rs"]
mod common;

mod device;
mod explain;
mod inputs;
mod outputs;
mod printing;
mod round_trips;
mod usage;
mod verify;
