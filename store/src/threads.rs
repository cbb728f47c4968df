//! Threads that run requests to a folder, which block.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

/// What a thread does.
type Job = Box<dyn FnOnce() + Send>;

/// Threads that are started when they are needed, at most `limit`. If the system refuses all threads, as with a limit of memory, jobs
/// run on the caller's thread.
pub(crate) struct Threads {
    shared: Arc<JobQueue>,
    limit: usize,
}

#[derive(Default)]
struct JobQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    jobs: VecDeque<Job>,
    threads: usize,
    waiting: usize,
    is_over: bool,
}

impl JobQueue {
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.state();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.state();
            } else if state.is_over {
                return;
            } else {
                state.waiting += 1;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.waiting -= 1;
            }
        }
    }
}

impl Threads {
    pub fn new(limit: usize) -> Self {
        Self { shared: Arc::default(), limit }
    }

    pub fn start(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.state();
        state.jobs.push_back(Box::new(job));
        if state.jobs.len() > state.waiting && state.threads < self.limit {
            let shared = self.shared.clone();
            let started = Builder::new().name("tpde-store".into()).spawn(move || shared.run()).is_ok();
            state.threads += usize::from(started);
        }
        if state.threads > 0 {
            self.shared.changed.notify_one();
        } else if let Some(job) = state.jobs.pop_front() {
            drop(state);
            job();
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.state().is_over = true;
        self.shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    #[test]
    fn jobs_run_at_the_same_time_up_to_the_limit_and_in_the_callers_thread_without_one() {
        for limit in [0, 1, 3] {
            let threads = Threads::new(limit);
            let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
            let (sender, done) = mpsc::channel();
            for i in 0..40 {
                let (running, most, sender) = (running.clone(), most.clone(), sender.clone());
                threads.start(move || {
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    running.fetch_sub(1, Ordering::SeqCst);
                    sender.send((i, std::thread::current().id())).unwrap();
                });
            }
            drop((threads, sender));
            let mut done: Vec<_> = done.iter().collect();
            done.sort_by_key(|(i, _)| *i);
            assert_eq!(done.iter().map(|(i, _)| *i).collect::<Vec<_>>(), (0..40).collect::<Vec<_>>());
            assert_eq!(most.load(Ordering::SeqCst), limit.max(1));
            assert_eq!(done.iter().all(|(_, id)| *id == std::thread::current().id()), limit == 0);
        }
    }
}
