//! Watching long work: what has been done, and whether to go on.

#![forbid(unsafe_code)]

use crate::error::Result;

/// Follows long work from any thread, and may end it. A closure that takes the number of bytes follows only.
pub trait Watch: Sync {
    /// Called when `bytes` more are done: lanes of the target, or of other input that is read.
    ///
    /// # Errors
    /// [`Error::Cancelled`](crate::Error::Cancelled), or any other error. The work ends with it at the next chunk.
    fn done(&self, bytes: u64) -> Result<()>;
}

impl<F: Fn(u64) + Sync> Watch for F {
    fn done(&self, bytes: u64) -> Result<()> {
        self(bytes);
        Ok(())
    }
}

/// The watcher of a function.
pub(crate) type Progress<'a> = &'a dyn Watch;

/// The watcher that a builder holds.
#[derive(Default)]
pub(crate) enum Watcher<'a> {
    /// Nobody.
    #[default]
    Nobody,
    /// A closure that the builder owns.
    Closure(Box<dyn Fn(u64) + Send + Sync + 'a>),
    /// The caller's.
    Borrowed(&'a dyn Watch),
}

impl Watch for Watcher<'_> {
    fn done(&self, bytes: u64) -> Result<()> {
        match self {
            Self::Nobody => Ok(()),
            Self::Closure(report) => report.done(bytes),
            Self::Borrowed(watch) => watch.done(bytes),
        }
    }
}
