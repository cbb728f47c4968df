//! Lossless differences between neural-network checkpoints.
//!
//! A *pair* of files, `NAME.tpde-index` and `NAME.tpde-blob`, holds what turns a *base* checkpoint into a *target*, bit for
//! bit, in chunks that are decoded one by one. The format is written down in `spec/`; the modules here follow it.
//!
//! ```
//! use tpde::{Apply, Dtype, EncodeOptions, MemoryCheckpoint, TensorInfo, encode_to_memory};
//!
//! # fn main() -> tpde::Result<()> {
//! let info = TensorInfo { name: "layer.weight".into(), dtype: Dtype::Bf16, shape: vec![64, 64] };
//! let old: Vec<u8> = (0..8192u32).map(|i| (i % 251) as u8).collect();
//! let mut new = old.clone();
//! new[100] ^= 1; // one lane moves by one unit in the last place
//!
//! let base = MemoryCheckpoint::new([(info.clone(), &old[..])])?;
//! let target = MemoryCheckpoint::new([(info, &new[..])])?;
//! let (pair, report) = encode_to_memory(Some(&base), &target, &EncodeOptions::default())?;
//! assert_eq!(report.tensors[0].changed, 1);
//!
//! let mut rebuilt = vec![0; 8192];
//! Apply::new(&pair, &base).to_buffers(&mut [&mut rebuilt])?;
//! assert_eq!(rebuilt, new);
//! # Ok(())
//! # }
//! ```
//!
//! Files on disk: [`SafetensorsCheckpoint::open`], [`encode_files`] and [`apply_to_path`] work on safetensors files and sharded
//! folders by ranges, so that a model need not fit in memory; [`Pair::open`] opens a pair, and [`verify_files`] checks one. A
//! part of a tensor comes from [`Apply::range`], tensors in memory are changed where they lie by [`Pair::apply_in_place`].
//!
//! On a CUDA device, module `cuda` does the same in memory of the device; [`Apply::on`] puts one in the place of the processor.
//!
//! Nothing here panics on data: what a stranger's file may contain ends in an [`Error`] that says what was expected, what was
//! found, and where.
//!
//! # Features
//!
//! None is on by default.
//!
//! - `cuda`: module `cuda`. The driver is loaded at run time; building needs no toolkit.
//! - `mmap`: `source::MappedSource`, and large pages for large buffers on Linux.
//! - `arbitrary`: implementations of the trait `Arbitrary` for records, for fuzzing.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

pub mod checkpoint;
pub mod codec;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod delta;
mod digest;
mod dispatch;
pub mod error;
pub mod format;
pub mod index;
pub mod lane;
pub mod limits;
mod publish;
pub mod reader;
pub mod safetensors;
pub mod source;
mod sums;
mod watch;
pub mod writer;

// The code in these documents is compiled by the tests. A test lists the documents that have such code.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../docs/cuda.md")]
struct Cuda;

pub use checkpoint::{Checkpoint, MemoryCheckpoint, TensorInfo};
pub use codec::{Codec, Layout};
pub use delta::{Apply, CodecChoice, EncodeOptions, Favor, InPlace, TensorMut, encode_to_memory};
pub use error::{Error, Result};
pub use index::ValidatedIndex;
pub use lane::Dtype;
pub use limits::Limits;
pub use publish::Temporaries;
pub use reader::Pair;
pub use safetensors::{SafetensorsCheckpoint, apply_to_path, encode_files, encode_tensors, verify_files};
pub use sums::chunk_sum;
pub use watch::{Progress, Watch};
