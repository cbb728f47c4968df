//! Versions of neural-network checkpoints in a folder or an object store.
//!
//! A store is a prefix: a folder, or a prefix in S3, Google Cloud Storage or Azure (features `aws`, `gcp`, `azure`). Versions are
//! pairs of the format TPDE, each the difference from the version before, and anchors. The document `docs/stores.md` of the
//! repository describes layout, manifests and what happens after a failure.
//!
//! ```
//! use tpde_store::{GetOptions, PutOptions, Store, StoreOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let at = |name: &str| folder.path().join(name);
//! # for (name, byte) in [("step-1.safetensors", 1u8), ("step-2.safetensors", 2)] {
//! #     let header = br#"{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
//! #     std::fs::write(at(name), [&(header.len() as u64).to_le_bytes()[..], header, &[7, byte]].concat())?;
//! # }
//! let store = Store::init(at("store").to_str().ok_or("a path in UTF-8")?, &StoreOptions::default())?;
//! store.put(at("step-1.safetensors"), &PutOptions::default())?;
//! store.put(at("step-2.safetensors"), &PutOptions::default().metadata([("step", "2")]))?;
//!
//! store.get("main@0", at("back.safetensors"), &GetOptions::default())?;
//! assert_eq!(std::fs::read(at("back.safetensors"))?, std::fs::read(at("step-1.safetensors"))?);
//! assert_eq!(store.log("main")?[0].metadata["step"], "2");
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod blob;
mod catalog;
mod digest;
mod download;
mod error;
mod fold;
mod folder;
mod gc;
mod get;
#[doc(hidden)]
pub mod internals;
mod lease;
mod local;
mod manifest;
mod names;
mod opened;
mod prefix;
mod put;
mod reach;
mod remote;
mod report;
mod route;
mod store;
mod threads;
mod upload;
mod verify;
mod wanted;

pub use digest::{Digest, UploadId};
pub use error::{Error, Result};
pub use fold::{FoldOptions, PruneReport};
pub use gc::GcReport;
pub use get::{GetOptions, GetReport, SelectTensors};
pub use manifest::{Content, Reference, Segment, Shortcut, SinceAnchor, Stored, StoredFile, StoredPair, Version};
pub use opened::{LoadTensors, Opened};
pub use put::{Anchor, PutOptions};
pub use reach::LeftOut;
pub use report::{PairReport, VersionReport};
pub use store::{MEMORY, Store, StoreOptions, Usage};
pub use verify::VerifyReport;
