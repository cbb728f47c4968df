//! Applies a pair to a base: to new memory or files, in place, or for a range of elements. Also checks a pair against a base and
//! a target (spec sections 9 and 13).

#![forbid(unsafe_code)]

mod accelerator;
mod bands;
mod builder;
mod chunk;
mod compare;
mod find;
mod in_place;
mod kept;
mod moves;
mod payloads;
mod range;
mod rebuilt;
mod run;
mod slices;
mod slices_to_path;
mod to_path;
mod verify;

pub use accelerator::{Accelerator, TensorHashes, Work};
pub use builder::Apply;
pub(crate) use find::{find_base, wrong_base};
pub use in_place::{InPlace, TensorMut};
pub use moves::Moves;
pub use range::Changes;
pub(crate) use rebuilt::{Rebuilder, Rebuilt};
pub(crate) use run::Run;
pub use run::{ApplyReport, Sink};
pub use verify::{Authenticity, Verification, Verify};
