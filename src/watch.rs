//! Progress reports and cancellation of long work.

#![forbid(unsafe_code)]

use tpde_core::error::Result;

/// Receives progress from any thread and can stop the work. A closure `Fn(u64)` receives the number of bytes and cannot stop it.
pub trait Watch: Sync {
    /// Called after `bytes` more bytes are done. The `progress` of each builder documents which bytes count. `bytes` is 0 if the
    /// call only asks whether to continue.
    ///
    /// # Errors
    /// [`Error::Cancelled`](crate::Error::Cancelled) or any other error. The error stops the work, which returns it.
    fn done(&self, bytes: u64) -> Result<()>;
}

impl<F: Fn(u64) + Sync> Watch for F {
    fn done(&self, bytes: u64) -> Result<()> {
        self(bytes);
        Ok(())
    }
}

/// The watcher as a function argument.
pub(crate) type Progress<'a> = &'a dyn Watch;

/// A watcher that can stop the work and receives no progress, for work that is not part of the announced total.
pub(crate) struct NoProgress<'a>(pub Progress<'a>);

impl Watch for NoProgress<'_> {
    fn done(&self, _: u64) -> Result<()> {
        self.0.done(0)
    }
}

/// The watcher that a builder holds.
#[derive(Default)]
pub enum Watcher<'a> {
    /// No watcher.
    #[default]
    Nobody,
    /// A closure that the builder owns.
    Closure(Box<dyn Fn(u64) + Send + Sync + 'a>),
    /// A watcher that the caller owns.
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

/// Defines the methods `progress` and `watch` of a builder that has a field `watcher: Watcher<'a>`. `$total` says in the
/// documentation how many bytes will be reported.
#[doc(hidden)]
#[macro_export]
macro_rules! progress_methods {
    ($total:literal) => {
        /// Calls `report`, from any thread, with the number of bytes done since the previous call. The total is
        #[doc = concat!($total, ".")]
        pub fn progress(mut self, report: impl Fn(u64) + Send + Sync + 'a) -> Self {
            self.watcher = Watcher::Closure(Box::new(report));
            self
        }

        /// Like [`progress`](Self::progress), with a watcher that can also stop the work.
        pub fn watch(mut self, watch: &'a dyn $crate::Watch) -> Self {
            self.watcher = Watcher::Borrowed(watch);
            self
        }
    };
}
pub use progress_methods;
