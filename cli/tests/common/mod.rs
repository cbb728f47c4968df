//! Shared by the tests of the program, including what the tests of the library share.

#[path = "../../../tests/common/mod.rs"]
mod library;
pub mod place;

pub use library::*;
