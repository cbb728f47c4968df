//! Watching long work: what has been done, and whether to go on.

#![forbid(unsafe_code)]

use crate::error::Result;

/// Told from any thread what has been done, and able to end the work. Closures that take the bytes do the former alone.
pub trait Watch: Sync {
    /// `bytes` more of the work are done: lanes of the target, or of what else is read.
    ///
    /// # Errors
    /// [`Error::Cancelled`](crate::Error::Cancelled), or any other error that the work shall end with, at the next chunk.
    fn done(&self, bytes: u64) -> Result<()>;
}

impl<F: Fn(u64) + Sync> Watch for F {
    fn done(&self, bytes: u64) -> Result<()> {
        self(bytes);
        Ok(())
    }
}

/// Who watches.
pub type Progress<'a> = &'a dyn Watch;
