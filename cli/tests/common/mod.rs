//! What tests of the program share, with what they share with tests of the library.

#[path = "../../../tests/common/mod.rs"]
mod library;
pub mod place;

pub use library::*;
