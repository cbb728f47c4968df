//! An encoding that runs in a thread of its own.

use crate::runtime::device::Device;
use crate::runtime::driver::RawEvent;
use crate::runtime::memory::PinnedBuffer;
use crate::runtime::stream::Stream;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use tpde::internals::Watcher;
use tpde::{EncodeReport, Pair, Watch};
use tpde_core::error::{Error, Result};

/// What an encoding returns.
type Outcome = Result<(Pair<PinnedBuffer>, EncodeReport)>;

/// An encoding that [`Encode::start`](super::Encode::start) has started. Dropping it cancels the encoding, and waits until the device does no more work
/// for it.
#[derive(Debug)]
#[must_use = "dropping it cancels the encoding"]
pub struct Encoding<'scope> {
    /// `None` after the thread has ended.
    thread: Option<ScopedJoinHandle<'scope, Outcome>>,
    is_cancelled: Arc<AtomicBool>,
}

/// The watcher of the caller, and the request to cancel.
pub(super) struct Cancellable<'a> {
    watcher: Watcher<'a>,
    pub is_cancelled: Arc<AtomicBool>,
}

impl<'a> Cancellable<'a> {
    pub fn new(watcher: Watcher<'a>) -> Self {
        Self { watcher, is_cancelled: Arc::default() }
    }
}

impl Watch for Cancellable<'_> {
    fn done(&self, bytes: u64) -> Result<()> {
        match self.is_cancelled.load(Ordering::Relaxed) {
            true => Err(Error::Cancelled),
            false => self.watcher.done(bytes),
        }
    }
}

impl<'scope> Encoding<'scope> {
    /// Runs an encoding, whose watcher has the flag, in a thread.
    pub(super) fn new(
        scope: &'scope Scope<'scope, '_>,
        is_cancelled: Arc<AtomicBool>,
        run: impl FnOnce() -> Outcome + Send + 'scope,
    ) -> Self {
        Self { thread: Some(scope.spawn(run)), is_cancelled }
    }

    /// Returns whether the encoding has ended. After that [`Encoding::wait`] returns at once.
    pub fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(ScopedJoinHandle::is_finished)
    }

    /// Asks the encoding to end soon. Unless it is complete already, [`Encoding::wait`] then returns [`Error::Cancelled`].
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// Waits on the host until the encoding has ended, and returns the pair, with the blob in pinned memory.
    ///
    /// # Errors
    /// Those of [`Encode::to_pinned`](super::Encode::to_pinned).
    pub fn wait(mut self) -> Result<(Pair<PinnedBuffer>, EncodeReport)> {
        let thread = self.thread.take().ok_or(Error::Cancelled)?;
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl Drop for Encoding<'_> {
    fn drop(&mut self) {
        self.cancel();
        // The result is not wanted any more, whatever it is.
        _ = self.thread.take().map(ScopedJoinHandle::join);
    }
}

/// Returns a stream that waits for all work that is queued on another stream so far, and for no later work.
pub(super) fn point_of(device: &Device, of: &Stream) -> Result<Stream> {
    let stream = device.stream()?;
    let cx = device.inner.context.enter()?;
    let event = RawEvent::new(&cx, false)?;
    event.record(&cx, of.raw())?;
    event.hold(&cx, stream.raw())?;
    drop(cx);
    Ok(stream)
}
