//! The bytes and rules of TPDE: what every reader and writer needs, whatever its files, threads and devices.
#![no_std]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

extern crate alloc;
#[cfg(any(test, feature = "std"))]
extern crate std;

#[cfg(not(any(feature = "zstd", feature = "ruzstd")))]
compile_error!("tpde-core needs feature `zstd` or feature `ruzstd`: sections of an index are zstd frames");

pub mod blob;
pub mod codec;
pub mod derived;
pub mod digest;
#[doc(hidden)]
pub mod dispatch;
pub mod error;
pub mod floats;
pub mod format;
pub mod index;
pub mod lane;
pub mod limits;
pub mod rectangle;
pub mod source;
pub mod sums;
#[cfg(feature = "std")]
pub mod writer;

/// What `std` has in scope and `core` has not.
mod prelude {
    pub use alloc::{
        borrow::ToOwned,
        boxed::Box,
        format,
        string::{String, ToString},
        vec,
        vec::Vec,
    };
}
