//! Applies a pair to a base: to new memory or files, in place, or for a range of elements. Also checks a pair against a base and
//! a target (spec sections 9 and 13).

#![forbid(unsafe_code)]

mod accelerator;
mod bands;
mod builder;
mod chunk;
mod compare;
mod digests;
mod engine;
mod find;
mod in_place;
mod kept;
mod memory;
mod moves;
mod payloads;
mod plan;
mod range;
mod rebuilt;
mod request;
mod slices_to_path;
mod to_path;
mod verify;

pub use accelerator::{Accelerator, TensorHashes, Work};
pub use builder::Apply;
pub(crate) use find::{find_base, wrong_base};
pub use in_place::{InPlace, TensorMut};
pub(crate) use in_place::{InPlaceRun, base_of, whole_tensors};
pub(crate) use kept::KEPT_PAYLOADS;
pub use moves::Moves;
pub(crate) use plan::{Item, Plan};
pub use range::Changes;
pub(crate) use rebuilt::{Rebuilder, RebuiltTarget};
pub(crate) use request::Request;
pub use request::{ApplyReport, Sink};
pub use verify::{Authenticity, Verification, Verify};
