//! Runs the library on its own threads, without the interpreter's lock. Signals and Python exceptions can cancel the work.

use crate::errors;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use tpde::{Error, Result, Watch};

/// Interval at which the calling thread checks for signals and reports progress.
pub const LOOK: Duration = Duration::from_millis(50);

/// State shared by the calling thread and the workers.
pub struct Steering {
    done: AtomicU64,
    cancelled: AtomicBool,
}

impl Watch for Steering {
    fn done(&self, bytes: u64) -> Result<()> {
        self.done.fetch_add(bytes, Ordering::Relaxed);
        if self.cancelled.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// A thread pool, and the id of the process that started its threads.
struct Pool {
    process: u32,
    threads: ThreadPool,
}

/// The thread pool of this process. After a fork the parent's threads do not exist in the child, and waiting for them would never
/// end, so the child makes a new pool. Locks and rayon's global pool may be in any state after a fork and are not used.
fn pool() -> Result<&'static ThreadPool> {
    static POOL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());
    let process = std::process::id();
    loop {
        let current = POOL.load(Ordering::Acquire);
        // SAFETY: the pointer is null or from `Box::into_raw` below. A pool that was published is never freed.
        if let Some(pool) = unsafe { current.as_ref() }
            && pool.process == process
        {
            return Ok(&pool.threads);
        }
        let threads = ThreadPoolBuilder::new().thread_name(|i| format!("tpde-{i}")).build();
        let threads = threads.map_err(|e| Error::Io {
            action: "start threads for",
            path: "tpde".into(),
            source: std::io::Error::other(e),
        })?;
        let new = Box::into_raw(Box::new(Pool { process, threads }));
        if POOL.compare_exchange(current, new, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            // SAFETY: from `Box::into_raw` just above. The exchange failed, so no other thread has the pointer.
            drop(unsafe { Box::from_raw(new) });
        }
        // A replaced pool is leaked: it belongs to the parent, and its threads cannot be joined from this process.
    }
}

/// Starts work on a thread of the pool. A panic in it is dropped.
pub fn spawn(work: impl FnOnce() + Send + 'static) -> Result<()> {
    pool()?.spawn(move || _ = catch_unwind(AssertUnwindSafe(work)));
    Ok(())
}

/// Calls `progress(done, total)`.
pub fn tell(py: Python<'_>, progress: Option<&Py<PyAny>>, done: u64, total: u64) -> PyResult<()> {
    match progress {
        Some(progress) => progress.call1(py, (done.min(total), total)).map(|_| ()),
        None => Ok(()),
    }
}

/// The errors of work that [`run_with`] runs.
pub trait Failure: From<Error> + Send {
    /// Whether the work ended because its [`Steering`] asked for it.
    fn is_cancelled(&self) -> bool;

    /// The exception for the error.
    fn to_python(&self, py: Python<'_>) -> PyErr;
}

impl Failure for Error {
    fn is_cancelled(&self) -> bool {
        matches!(self, Self::Cancelled)
    }

    fn to_python(&self, py: Python<'_>) -> PyErr {
        errors::to_python(py, self)
    }
}

/// Runs work on the calling thread, without the interpreter's lock. Signals are not looked for. For work that takes less time than
/// waking a thread, and uses no threads of rayon.
///
/// # Errors
/// As for [`run_with`].
pub fn run_here<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    match py.detach(|| catch_unwind(AssertUnwindSafe(work))) {
        Ok(outcome) => outcome.map_err(|error| errors::to_python(py, &error)),
        Err(payload) => Err(errors::panicked(py, &*payload)),
    }
}

/// [`run_with`] for the errors of the library.
///
/// # Errors
/// As for [`run_with`].
pub fn run<T: Send>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    total: u64,
    work: impl FnOnce(&Steering) -> Result<T> + Send,
) -> PyResult<T> {
    run_with(py, progress, total, |steering| work(steering))
}

/// Runs `work` on the threads of the pool, without the interpreter's lock. Meanwhile, the calling thread checks for signals and
/// calls `progress(done, total)` at intervals of [`LOOK`]. An exception from either cancels the work and is raised once the work
/// has ended.
///
/// # Errors
/// The exception for an error that `work` returns, or for a panic in it.
pub fn run_with<T: Send, E: Failure>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    total: u64,
    work: impl FnOnce(&Arc<Steering>) -> Result<T, E> + Send,
) -> PyResult<T> {
    let steering = Arc::new(Steering { done: AtomicU64::new(0), cancelled: AtomicBool::new(false) });
    let tell = |py: Python<'_>, done: u64| tell(py, progress.as_ref(), done, total);
    let (outcome, raised) = py.detach(|| {
        let finished = Mutex::new(None);
        let is_finished = Condvar::new();
        let mut raised: Option<PyErr> = None;
        match pool() {
            Err(error) => return (Ok(Err(error.into())), None),
            Ok(pool) => pool.in_place_scope(|scope| {
                scope.spawn(|_| {
                    let outcome = catch_unwind(AssertUnwindSafe(|| work(&steering)));
                    *finished.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
                    is_finished.notify_one();
                });
                loop {
                    let guard = finished.lock().unwrap_or_else(PoisonError::into_inner);
                    let waited = is_finished.wait_timeout_while(guard, LOOK, |finished| finished.is_none());
                    if waited.unwrap_or_else(PoisonError::into_inner).0.is_some() {
                        break;
                    }
                    if raised.is_none() {
                        let done = steering.done.load(Ordering::Relaxed);
                        raised = Python::attach(|py| py.check_signals().and_then(|()| tell(py, done))).err();
                        steering.cancelled.store(raised.is_some(), Ordering::Relaxed);
                    }
                }
            }),
        }
        let outcome = finished.into_inner().unwrap_or_else(PoisonError::into_inner);
        (outcome.unwrap_or(Ok(Err(Error::Cancelled.into()))), raised)
    });
    match (outcome, raised) {
        (Ok(Ok(result)), None) => tell(py, total).map(|()| result),
        // The work may have completed before it saw the cancellation. The exception is raised in both cases.
        (Ok(Ok(_)), Some(raised)) => Err(raised),
        (Ok(Err(error)), Some(raised)) if error.is_cancelled() => Err(raised),
        (Ok(Err(error)), raised) => {
            let error = error.to_python(py);
            let Some(raised) = raised else { return Err(error) };
            raised.set_cause(py, Some(error)); // says what state the tensors are in
            Err(raised)
        }
        (Err(payload), _) => Err(errors::panicked(py, &*payload)),
    }
}
