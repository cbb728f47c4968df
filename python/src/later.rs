//! Results of work on threads of the pool, for which the interpreter waits later.

use crate::run::spawn;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The result of work that a thread of the pool does.
pub struct Later<T> {
    /// `None` until the work has ended. Then its result, or `Some(None)` after a panic.
    outcome: Mutex<Option<Option<T>>>,
    has_ended: Condvar,
    /// The process that started the work. A forked child does not have its thread.
    process: u32,
}

impl<T: Send + 'static> Later<T> {
    /// Starts work. `None` if no thread can start.
    pub fn start(work: impl FnOnce() -> T + Send + 'static) -> Option<Arc<Self>> {
        let this = Arc::new(Self { outcome: Mutex::new(None), has_ended: Condvar::new(), process: std::process::id() });
        // Ends the work also if it panics.
        let end = End(this.clone());
        spawn(move || end.with(Some(work()))).ok()?;
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

    fn ended(&self) -> Option<MutexGuard<'_, Option<Option<T>>>> {
        if self.process != std::process::id() {
            return None;
        }
        let outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        Some(self.has_ended.wait_while(outcome, |outcome| outcome.is_none()).unwrap_or_else(PoisonError::into_inner))
    }
}

/// Ends work, without a result unless it has ended before.
struct End<T>(Arc<Later<T>>);

impl<T> End<T> {
    fn with(&self, result: Option<T>) {
        self.0.outcome.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(result);
        self.0.has_ended.notify_all();
    }
}

impl<T> Drop for End<T> {
    fn drop(&mut self) {
        self.with(None);
    }
}
