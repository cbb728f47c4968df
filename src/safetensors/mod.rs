//! Checkpoints in safetensors files and sharded folders, and pairs made from and applied to them (spec section 10).
//!
//! The only module that knows the crate of that name. Headers are kept byte for byte: two headers that mean the same are not
//! the same file.

#![forbid(unsafe_code)]

mod checkpoint;
mod header;
mod input;
mod output;
mod verify;

pub use checkpoint::SafetensorsCheckpoint;
pub use input::{encode_files, encode_tensors};
pub use output::{ApplyOptions, apply_to_path, check_needs_no_base, check_target_files, check_writable, target_metadata};
pub use verify::{Authenticity, Verification, VerifyBase, VerifyOptions, verify_files};
