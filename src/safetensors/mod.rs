//! Checkpoints in safetensors files and sharded folders, and the layout of files that are rebuilt (spec section 10).
//!
//! The only module that knows the crate of that name. Headers are kept byte for byte: two headers that mean the same are not
//! the same file.

#![forbid(unsafe_code)]

mod barrier;
mod checkpoint;
mod header;
mod layout;

pub(crate) use barrier::barrier;
pub use checkpoint::SafetensorsCheckpoint;
pub(crate) use layout::{Output, Places, check_composable, check_target_files, outputs, target_metadata};
