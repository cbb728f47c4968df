//! Lossless differences between neural-network checkpoints.
//!
//! A *pair* of files, `NAME.tpde-index` and `NAME.tpde-blob`, turns a *base* checkpoint into a *target*, bit for bit. Tensors
//! are split into chunks, and each chunk can be decoded on its own. The folder `spec/` specifies the format.
//!
//! ```
//! use tpde::{Apply, Dtype, Encode, MemoryCheckpoint, TensorInfo};
//!
//! # fn main() -> tpde::Result<()> {
//! let info = TensorInfo { name: "layer.weight".into(), dtype: Dtype::Bf16, shape: vec![64, 64] };
//! let old: Vec<u8> = (0..8192u32).map(|i| (i % 251) as u8).collect();
//! let mut new = old.clone();
//! new[100] ^= 1; // one lane moves by one unit in the last place
//!
//! let base = MemoryCheckpoint::new([(info.clone(), &old[..])])?;
//! let target = MemoryCheckpoint::new([(info, &new[..])])?;
//! let (pair, report) = Encode::new(&target).base(&base).to_memory()?;
//! assert_eq!(report.tensors[0].changed, 1);
//!
//! let mut rebuilt = vec![0; 8192];
//! Apply::new(&pair).base(&base).to_buffers(&mut [&mut rebuilt])?;
//! assert_eq!(rebuilt, new);
//! # Ok(())
//! # }
//! ```
//!
//! # Where to begin
//!
//! | to do | use |
//! |---|---|
//! | make a pair | [`Encode`], with [`EncodeOptions`] |
//! | describe tensors in parts, for ranks that hold slices | [`EncodeOptions`]: `split`, `cuts`; [`Tensor::part`] |
//! | open a pair | [`Pair::open`]; [`Pair::new`] for a [`ValidatedIndex`] and a blob from any [`Source`] |
//! | rebuild the target, or a part of it | [`Apply`]: files, buffers, a range of a tensor, tensors changed in place |
//! | check a pair, a base and a target | [`Verify`] |
//! | make one pair of several, or of some tensors of one | [`Merge`] |
//! | apply several pairs in a row | [`Chain`]; in memory, [`ApplyChain`] |
//! | make one pair of a chain, or the pair that leads back | [`Encode::fold`], [`Encode::revert`] |
//! | see what the bytes of a pair are used for | [`Explain`], [`ValidatedIndex`] |
//! | encode the slices that a rank holds | [`Encode`] with a [`SliceCheckpoint`]; [`Rectangle::shard`], [`Rectangle::intersection`] |
//! | rebuild or change slices of tensors, from slices of a base | [`Apply::to_slices`], [`Apply::in_place_slices`], [`SliceCheckpoint`] |
//! | read checkpoints | [`SafetensorsCheckpoint`] for files and sharded folders, [`MemoryCheckpoint`] for memory, or your own [`Checkpoint`] |
//! | decode on a CUDA device | [`Apply::on`]; crate `tpde-cuda`, which also takes tensors in device memory |
//! | show progress, or stop the work | `progress` and `watch` of each builder, [`Watch`] |
//!
//! Files are read in ranges, so a model need not fit in memory. Work runs on the threads of the current rayon pool.
//!
//! No function panics because of the content of a file. The result is a value, or an [`Error`] that says what was expected, what
//! was found, and where.
//!
//! # Features
//!
//! No feature is enabled by default.
//!
//! - `mmap`: `Pair::open_mapped` and `MappedSource`, and large pages for large buffers on Linux.
//! - `arbitrary`: the trait `Arbitrary` for the records of the format, for fuzzing.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

mod apply;
mod base;
mod batches;
mod chain;
mod checkpoint;
mod cut;
mod encode;
mod hint;
#[doc(hidden)]
pub mod internals;
mod merge;
#[doc(hidden)]
mod pair_files;
mod publish;
mod reader;
mod safetensors;
mod slice;
mod source;
mod watch;

// Doctests compile the Rust code in these documents. Another test checks that the list is complete.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../docs/rust.md")]
struct Guide;

pub use apply::{
    Accelerator, Apply, ApplyReport, Authenticity, Changes, InPlace, Moves, Sink, TensorHashes, TensorMut, Verification, Verify,
    Work,
};
pub use chain::{ApplyChain, Chain};
pub use checkpoint::{Checkpoint, MemoryCheckpoint, TensorInfo};
pub use encode::{
    CodecChoice, Encode, EncodeOptions, EncodeReport, Explain, Explanation, Favor, PartReport, Split, Streamed, TableSetReport,
    TensorExplanation, TensorReport, UnusedBase, UnusedCause, WayReport,
};
pub use hint::hint;
pub use merge::{Merge, MergeReport};
pub use publish::{OutputFile, Temporaries, TemporaryFolder};
pub use reader::{Pair, PairPaths, PayloadDigests, VerifyReport};
pub use safetensors::{SafetensorsCheckpoint, check_neighbours};
pub use slice::{FusedSlices, Slice, SliceCheckpoint, SliceMut};
pub use source::FileSource;
#[cfg(feature = "mmap")]
pub use source::MappedSource;
pub use tpde_core::codec::{Codec, Layout, PayloadParts};
pub use tpde_core::derived::{BaseForm, Derived};
pub use tpde_core::error::{Conflict, Error, Escaped, Invalid, Location, NotMergeable, PartNotHeld, Result, Rule, UnknownName};
pub use tpde_core::format::{BaseKind, FileKind, FormatVersion};
pub use tpde_core::index::{Chunk, IndexParts, Part, TargetFile, Tensor, ValidatedIndex};
pub use tpde_core::lane::Dtype;
pub use tpde_core::limits::{Limits, OpenOptions};
pub use tpde_core::rectangle::Rectangle;
pub use tpde_core::source::{Buffer, Source};
pub use watch::Watch;
