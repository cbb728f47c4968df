//! The driver and what is built on it: contexts, streams, events, memory and its pools, the staging ring, compiled kernels.
//!
//! Nothing here knows of pairs.

pub(super) mod calls;
pub(super) mod copies;
pub(super) mod device;
pub(super) mod driver;
pub(super) mod graph;
pub(super) mod inner;
pub(super) mod kernels;
pub(super) mod layout;
pub(super) mod memory;
pub(super) mod pools;
pub(super) mod scratch;
pub(super) mod staging;
pub(super) mod stream;
