//! Results of work on threads of the pool, for which the interpreter waits later.

use crate::run::spawn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

type Work<T> = Box<dyn FnOnce() -> T + Send>;

/// Result of work for a thread of the pool. If all threads are busy, the waiting thread does the work.
pub struct Later<T> {
    /// The work, until a thread begins it.
    work: Mutex<Option<Work<T>>>,
    /// `None` until the work has ended. Then its result, or `Some(None)` after a panic.
    outcome: Mutex<Option<Option<T>>>,
    has_ended: Condvar,
    /// The process that started the work. A forked child does not have its thread.
    process: u32,
}

impl<T: Send + 'static> Later<T> {
    /// Starts work. `None` if no thread can start.
    pub fn start(work: impl FnOnce() -> T + Send + 'static) -> Option<Arc<Self>> {
        let work: Work<T> = Box::new(work);
        let this = Arc::new(Self {
            work: Mutex::new(Some(work)),
            outcome: Mutex::new(None),
            has_ended: Condvar::new(),
            process: std::process::id(),
        });
        let later = this.clone();
        spawn(move || later.begin()).ok()?;
        Some(this)
    }

    /// Waits until the work has ended, and takes its result. `None` if it panicked, if the result was taken before, or in a forked
    /// child. Must not be called on a thread of the pool.
    pub fn take(&self) -> Option<T> {
        self.ended()?.as_mut().and_then(Option::take)
    }

    /// As [`Later::take`], but leaves the result.
    pub fn get(&self) -> Option<T>
    where
        T: Clone,
    {
        self.ended()?.clone().flatten()
    }

    /// Waits for at most `time` while other threads do the work. Returns whether there is nothing more to wait for.
    pub fn ends_within(&self, time: Duration) -> bool {
        if !self.is_own() {
            return true;
        }
        self.begin();
        let waited = self.has_ended.wait_timeout_while(locked(&self.outcome), time, |outcome| outcome.is_none());
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Drops work that no thread has begun. Otherwise waits until the work has ended. There is no result afterwards, so nobody else
    /// may wait for it.
    pub fn abandon(&self) {
        if self.is_own() && locked(&self.work).take().is_none() {
            drop(self.ended());
        }
    }

    fn is_own(&self) -> bool {
        self.process == std::process::id()
    }

    /// Does the work, unless a thread has begun it. A panic in it is dropped.
    fn begin(&self) {
        let Some(work) = locked(&self.work).take() else { return };
        let result = catch_unwind(AssertUnwindSafe(work)).ok();
        *locked(&self.outcome) = Some(result);
        self.has_ended.notify_all();
    }

    fn ended(&self) -> Option<MutexGuard<'_, Option<Option<T>>>> {
        if !self.is_own() {
            return None;
        }
        self.begin();
        let waited = self.has_ended.wait_while(locked(&self.outcome), |outcome| outcome.is_none());
        Some(waited.unwrap_or_else(PoisonError::into_inner))
    }
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
