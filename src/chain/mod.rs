//! A base and a chain of pairs, read as the checkpoint that they give.

#![forbid(unsafe_code)]

mod files;
mod names;
mod step;
mod view;

pub use view::Chain;
