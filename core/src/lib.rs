//! The bytes and rules of TPDE, differences between neural-network checkpoints: what every reader and writer needs.
//!
//! This crate has no files, threads, clocks or environment. With files and threads, use the crate `tpde`. The folder `spec/` of the
//! project specifies the format; the modules are divided as its sections are.
//!
//! | to do | use |
//! |---|---|
//! | parse and validate an index | [`ValidatedIndex::parse`](index::ValidatedIndex::parse) |
//! | read records and sums, in place | [`records`](index::ValidatedIndex::records), [`sums`](index::ValidatedIndex::sums) |
//! | check that a blob belongs to an index | [`blob::check_header`] |
//! | decode a tensor or a chunk, with all checks | [`blob::decode_tensor`], [`blob::decode_chunk`] |
//! | decode a payload alone | [`ChunkDecoder`](codec::ChunkDecoder) |
//! | encode a chunk, with tables of your own | [`ChunkEncoder`](codec::ChunkEncoder) |
//! | build a pair from payloads of your own | [`PairBuilder`](writer::PairBuilder), with feature `std` |
//!
//! # From index and blob in memory to a tensor
//!
//! ```
//! use tpde_core::blob;
//! use tpde_core::error::{Error, Result};
//! use tpde_core::format::BaseKind;
//! use tpde_core::index::ValidatedIndex;
//! use tpde_core::limits::Limits;
//!
//! /// Rebuilds a tensor of a pair. `base` has the bytes of its base tensor.
//! fn rebuild(index: &[u8], blob: &[u8], name: &str, base: &[u8]) -> Result<Vec<u8>> {
//!     let index = ValidatedIndex::parse(index.to_vec(), &Limits::default())?;
//!     blob::check_header(&index, &blob[..blob.len().min(64)], blob.len() as u64)?;
//!     let tensor = index.find(name).ok_or_else(|| Error::InvalidArgument(format!("no tensor {name}")))?;
//!     let mut lanes = match tensor.base_kind {
//!         BaseKind::None => vec![0; tensor.bytes() as usize],
//!         BaseKind::Same if base.len() as u64 == tensor.bytes() && tensor.part.is_none() => base.to_vec(),
//!         _ => return Err(Error::InvalidArgument("a part, or a base of another form or size".into())),
//!     };
//!     blob::decode_tensor(&index, &tensor, &blob, &mut lanes)?;
//!     Ok(lanes)
//! }
//! # use tpde_core::{codec::*, digest, format::*, lane::Dtype, sums::chunk_sum, writer::*};
//! # fn main() -> Result<()> {
//! # let (base, target) = ([1u8; 64], [2u8; 64]);
//! # let mut builder = PairBuilder::new(Vec::new(), "memory".into(), Form::default())?;
//! # builder.begin_tensor(&TensorSpec {
//! #     name: "t".into(), base_name: None, dtype: Dtype::U8, shape: vec![64], part: None, base_kind: BaseKind::Same,
//! #     base_param: 0, derived: None, codec: Codec::Raw, tables: None, chunk_lanes_log2: 12,
//! # });
//! # let mut payload = Vec::new();
//! # let encoded = ChunkEncoder::new()?.encode(Coding::Raw, Dtype::U8, &base, &target, &mut payload)?;
//! # builder.chunk(&payload, encoded, chunk_sum(&base), chunk_sum(&target))?;
//! # builder.end_tensor(Some(digest::of(&base)), digest::of(&target));
//! # let (index, blob) = builder.finish()?.into_parts();
//! # assert_eq!(rebuild(index.as_bytes(), &blob, "t", &base)?, target);
//! # assert!(rebuild(index.as_bytes(), &blob, "t", &target).is_err());
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `zstd` (default) | the C library of zstd, and `std`. Encodes codec `zstd`, and compresses sections of an index |
//! | `ruzstd` | zstd frames by `ruzstd`, in Rust alone, for reading. Used where `zstd` is off. For `wasm32-unknown-unknown` and machines without an operating system |
//! | `std` | vector instructions that are found at run time, errors with paths, [`writer`] |
//! | `rayon` | large memory is hashed by all threads |
//! | `arbitrary` | the trait `Arbitrary` for records, for fuzzing |
//!
//! Items that are hidden from this documentation are for the crates of the project, and can change in any release.
//!
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
pub mod layout;
pub mod limits;
mod prelude;
pub mod rectangle;
pub mod source;
pub mod sums;
#[cfg(feature = "std")]
pub mod writer;
