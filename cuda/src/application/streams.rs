//! The streams of an application, beside that of the caller and the copy stream of the device.

use crate::plan::program::{Program, Queue};
use crate::runtime::driver::{EnterGuard, OwnStream, RawStream};
use crate::runtime::inner::Inner;
use std::sync::Arc;
use tpde_core::error::Result;

/// Streams from the pools of a device, which get them back.
#[derive(Debug)]
pub(super) struct Streams {
    device: Arc<Inner>,
    payload_digests: Option<OwnStream>,
    target_digests: Option<OwnStream>,
    sides: Vec<OwnStream>,
}

impl Streams {
    /// Takes the streams that a program uses.
    pub fn take(device: &Arc<Inner>, cx: &EnterGuard<'_>, program: &Program) -> Result<Self> {
        let mut streams = Self { device: device.clone(), payload_digests: None, target_digests: None, sides: Vec::new() };
        while program.uses(Queue::Side(streams.sides.len())) {
            streams.sides.push(device.pools.stream(cx)?);
        }
        if program.uses(Queue::PayloadDigests) {
            streams.payload_digests = Some(device.pools.urgent_stream(cx)?);
        }
        if program.uses(Queue::TargetDigests) {
            streams.target_digests = Some(device.pools.stream(cx)?);
        }
        Ok(streams)
    }

    /// Returns the stream of a queue. `None` for that of the caller.
    pub fn of(&self, queue: Queue) -> Option<RawStream> {
        match queue {
            Queue::Caller => None,
            Queue::Copies => Some(self.device.copy.raw()),
            Queue::PayloadDigests => self.payload_digests.as_ref().map(OwnStream::raw),
            Queue::TargetDigests => self.target_digests.as_ref().map(OwnStream::raw),
            Queue::Side(n) => self.sides.get(n).map(OwnStream::raw),
        }
    }

    /// Returns all streams but that of the caller.
    pub fn all(&self) -> impl Iterator<Item = RawStream> {
        let own = self.payload_digests.iter().chain(&self.target_digests).chain(&self.sides);
        own.chain([&self.device.copy]).map(OwnStream::raw)
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        let Ok(cx) = self.device.context.enter() else { return };
        let pools = &self.device.pools;
        self.payload_digests.take().into_iter().for_each(|stream| pools.take_back_urgent(&cx, stream));
        self.sides.drain(..).chain(self.target_digests.take()).for_each(|stream| pools.take_back(&cx, stream));
    }
}
