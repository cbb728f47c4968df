//! Checkpoints in safetensors files and sharded folders, and the layout of rebuilt files (spec section 10).
//!
//! Only this module uses the safetensors crate. Headers are kept byte for byte, because headers with the same meaning can differ in
//! bytes.

#![forbid(unsafe_code)]

mod as_base;
mod checkpoint;
mod folder;
mod foreign;
mod header;
mod layout;
mod neighbours;

pub(crate) use as_base::{TargetContent, base_fault};
pub(crate) use checkpoint::check_as_base;
pub use checkpoint::{SafetensorsCheckpoint, file_specs};
pub(crate) use header::tensor_names;
pub use layout::check_composable;
pub(crate) use layout::{Location, Locations, Output, check_target_files, compose, display_name, outputs, target_metadata};
pub(crate) use neighbours::Neighbours;
pub use neighbours::check_neighbours;
