//! What an encoding on a device does.

use super::digests::KnownDigests;
use super::limits::Limits;
use super::session::{Encoder, Memory};
use crate::checkpoint::DeviceCheckpoint;
use crate::runtime::inner::Inner;
use crate::runtime::stream::Stream;
use std::sync::Arc;
use tpde::{EncodeOptions, Watch};
use tpde_core::error::Error;

/// What to encode, and how. See the methods of the builder.
pub(super) struct Job<'a> {
    pub target: &'a DeviceCheckpoint,
    pub base: Option<&'a DeviceCheckpoint>,
    pub options: &'a EncodeOptions,
    pub base_digests: &'a KnownDigests,
    pub target_digests: &'a KnownDigests,
    pub after: Option<&'a Stream>,
    pub encoder: Option<&'a Encoder>,
    pub limits: Limits,
    pub watcher: &'a dyn Watch,
}

impl Job<'_> {
    /// Memory for a part of the work: that of the caller's encoder, if it has some.
    pub fn memory(&self, device: &Arc<Inner>) -> Memory {
        self.encoder.map_or_else(Memory::default, |encoder| encoder.take(device))
    }
}

/// The error for an option that the encoder on a device lacks.
pub(super) fn unsupported(what: &str) -> Error {
    Error::InvalidArgument(format!("encoding on a device: {what}"))
}
