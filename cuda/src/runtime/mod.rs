//! The driver, and the layer above it: contexts, streams, events, memory pools, the staging ring and compiled kernels.
//!
//! This module does not know about pairs.

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
pub(super) mod ptx;
pub(super) mod scratch;
pub(super) mod staging;
pub(super) mod stream;
