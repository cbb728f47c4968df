//! Running the library: on threads of our own, without the interpreter's lock, and so that Python can end it.

use crate::errors;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;
use tpde::{Error, Result, Watch};

/// How often the calling thread looks for signals and tells the progress.
pub const LOOK: Duration = Duration::from_millis(50);

/// What the calling thread and the working threads tell each other.
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

/// Threads, and the process that has them.
struct Pool {
    process: u32,
    threads: ThreadPool,
}

/// The threads of this process. Those of a parent do not survive a fork, and waiting for them would take for ever. Neither a
/// lock nor the pool of rayon itself, which may be in any state after a fork, is touched.
fn pool() -> Result<&'static ThreadPool> {
    static POOL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());
    let process = std::process::id();
    loop {
        let current = POOL.load(Ordering::Acquire);
        // SAFETY: either null or from `Box::leak` below, and never freed.
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
            // SAFETY: from `Box::into_raw` just above, and nobody else has seen it.
            drop(unsafe { Box::from_raw(new) });
        }
        // A pool that was replaced is the parent's: its threads are not here to be joined, so it stays where it is.
    }
}

/// Calls `progress(done, total)`.
pub fn tell(py: Python<'_>, progress: Option<&Py<PyAny>>, done: u64, total: u64) -> PyResult<()> {
    match progress {
        Some(progress) => progress.call1(py, (done.min(total), total)).map(|_| ()),
        None => Ok(()),
    }
}

/// Runs `work` on the threads of the pool while the calling thread lets go of the interpreter, but for looking for signals and
/// calling `progress(done, total)` now and then. An exception of either ends the work, and is raised when it has ended.
///
/// # Errors
/// The exceptions for what `work` returns, and for a panic in it.
pub fn run<T: Send>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    total: u64,
    work: impl FnOnce(&Steering) -> Result<T> + Send,
) -> PyResult<T> {
    let steering = Steering { done: AtomicU64::new(0), cancelled: AtomicBool::new(false) };
    let tell = |py: Python<'_>, done: u64| tell(py, progress.as_ref(), done, total);
    let (outcome, raised) = py.detach(|| {
        let finished = Mutex::new(None);
        let is_finished = Condvar::new();
        let mut raised: Option<PyErr> = None;
        match pool() {
            Err(error) => return (Ok(Err(error)), None),
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
        (outcome.unwrap_or(Ok(Err(Error::Cancelled))), raised)
    });
    match (outcome, raised) {
        (Ok(Ok(result)), None) => tell(py, total).map(|()| result),
        // Too late to end what is complete, but not to say why.
        (Ok(Ok(_)), Some(raised)) | (Ok(Err(Error::Cancelled)), Some(raised)) => Err(raised),
        (Ok(Err(error)), raised) => {
            let error = errors::to_python(py, &error);
            let Some(raised) = raised else { return Err(error) };
            raised.set_cause(py, Some(error)); // says what the tensors are like now
            Err(raised)
        }
        (Err(payload), _) => Err(errors::panicked(py, &*payload)),
    }
}
