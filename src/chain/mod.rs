//! A base and a chain of pairs, read as the checkpoint that they give.

#![forbid(unsafe_code)]

mod files;
mod in_place;
mod names;
mod step;
mod view;

pub use in_place::ApplyChain;
pub use view::Chain;
