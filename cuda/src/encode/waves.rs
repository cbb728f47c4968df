//! Waves of chunks. Threads of the host encode them in turn, each on a stream of its own, so that the device has work while a thread
//! waits or plans. Meanwhile the caller's thread copies the payloads of those before from the device, on another stream, and adds
//! them to the pair.

use super::assembly::Assembly;
use super::blob::Blob;
use super::chunks::{Analysis, ChunkJob, Tables, Wave, memory_of_all};
use super::job::Job;
use super::payloads::{self, Payloads};
use super::session::{Memory, Session, SessionGuard};
use super::source::Source;
use crate::runtime::driver::RawEvent;
use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::mpsc::sync_channel;
use std::{iter, thread};
use tpde_core::error::{Error, Result};
use tpde_core::writer::{FileSpec, Finished};

/// Number of payloads that a thread makes before those before are copied. Dense waves have several, of up to [`Limits::payloads`]
/// bytes each.
///
/// [`Limits::payloads`]: super::limits::Limits::payloads
const AHEAD: usize = 4;

/// All waves of a pair.
pub(super) struct Waves<'s, 'a> {
    pub job: &'s Job<'s>,
    /// The work of the caller that precedes.
    pub after: Option<&'s RawEvent>,
    pub source: &'s Source,
    /// Set when training has ended.
    pub tables: OnceLock<Tables>,
    pub waves: &'s [&'s [ChunkJob<'a>]],
}

/// A thread that encodes every `of`th wave, from wave `number` on.
struct Worker {
    number: usize,
    of: usize,
    /// The memory of its own, if it has some before tables are trained.
    memory: Option<Memory>,
}

/// Device memory of a thread, and the analyses in it of its first waves.
#[derive(Default)]
struct TrainingMemory {
    memory: Memory,
    analyses: VecDeque<Analysis>,
}

/// Why a thread ended early: its error, or `None` if another thread had one.
struct ThreadEnd(Option<Error>);

impl From<Error> for ThreadEnd {
    fn from(error: Error) -> Self {
        Self(Some(error))
    }
}

impl Waves<'_, '_> {
    /// Trains tables with `train`, encodes all waves, adds their payloads in order, and finishes the pair, which describes `files`.
    ///
    /// `session` trains, and then copies the payloads. The first thread uses its memory after that. Each further thread has one of
    /// `memories`. While tables are trained, `train` analyses the first wave, and further threads analyse their first waves.
    /// Threads begin when `train` calls its argument.
    pub fn encode<W: Blob>(
        &self,
        session: &Session<'_>,
        mut memories: Vec<Memory>,
        train: impl FnOnce(&mut dyn FnMut()) -> Result<(Tables, Option<Analysis>)>,
        mut assembly: Assembly<'_, W>,
        files: Vec<FileSpec>,
    ) -> Result<Finished<W>> {
        let unused = memories.split_off(self.waves.len().saturating_sub(1).min(memories.len()));
        let train = |queued: &mut dyn FnMut()| {
            let (tables, first) = train(queued)?;
            self.tables.get_or_init(|| tables);
            let mut memory = session.take_memory()?;
            memory.shrink(self.job.limits.memory);
            Ok::<_, ThreadEnd>(TrainingMemory { memory, analyses: first.into_iter().collect() })
        };
        let mut blob_bytes = 0;
        let finish = |mut assembly: Assembly<'_, W>| {
            blob_bytes = assembly.blob_bytes();
            Ok::<_, ThreadEnd>(assembly.finish(files)?)
        };
        let encoded = if memories.is_empty() {
            // Starting a thread takes longer than it would save.
            train(&mut || {}).and_then(|trained| {
                let worker = Worker { number: 0, of: 1, memory: None };
                let memory = self.work(worker, || Ok(trained), &mut |payloads| Ok(assembly.add(session, &payloads)?))?;
                Ok((vec![memory], finish(assembly)?))
            })
        } else {
            self.encode_in_threads(session, memories, train, assembly, finish)
        };
        // Without an error of its own, the caller's thread ended because another one did, whose error is returned.
        let (used, finished) = encoded.map_err(|ThreadEnd(error)| error.unwrap_or(Error::Cancelled))?;
        if let Some(encoder) = self.job.encoder {
            for mut memory in used.into_iter().chain(unused) {
                memory.blob_bytes = blob_bytes;
                encoder.give_back(session.device, memory);
            }
        }
        Ok(finished)
    }

    /// [`Waves::encode`], with a thread per memory and one that gets its memory from `train`. Returns the memories too.
    fn encode_in_threads<W: Blob>(
        &self,
        session: &Session<'_>,
        memories: Vec<Memory>,
        train: impl FnOnce(&mut dyn FnMut()) -> Result<TrainingMemory, ThreadEnd>,
        mut assembly: Assembly<'_, W>,
        finish: impl FnOnce(Assembly<'_, W>) -> Result<Finished<W>, ThreadEnd>,
    ) -> Result<(Vec<Memory>, Finished<W>), ThreadEnd> {
        let workers = 1 + memories.len();
        let (finished, ended) = thread::scope(|scope| {
            let (mut threads, mut starts, mut receivers) = (Vec::new(), Vec::new(), Vec::new());
            let mut memories = Some(memories);
            // Threads begin while the device takes samples: starting them takes time, and their analyses would delay the samples.
            let mut begin = || {
                let memories = memories.take().map(|memories| iter::once(None).chain(memories.into_iter().map(Some)));
                for (number, memory) in memories.into_iter().flatten().enumerate() {
                    let (start, started) = sync_channel(1);
                    let (sender, receiver) = sync_channel(AHEAD);
                    let mut sink = move |payloads| sender.send(payloads).map_err(|_| ThreadEnd(None));
                    let worker = Worker { number, of: workers, memory };
                    // Without a sender, training has failed.
                    threads.push(scope.spawn(move || self.work(worker, || started.recv().map_err(|_| ThreadEnd(None)), &mut sink)));
                    starts.push(start);
                    receivers.push(receiver);
                }
            };
            let trained = train(&mut begin);
            if trained.is_ok() {
                begin(); // if there were no samples
            }
            let trained = trained.map(|memory| {
                // A thread that has ended has an error.
                let of_threads = iter::once(memory).chain(iter::repeat_with(TrainingMemory::default));
                starts.into_iter().zip(of_threads).for_each(|(start, memory)| _ = start.send(memory));
            });
            let added = trained.and_then(|()| {
                self.waves.iter().zip(receivers.iter().cycle()).try_for_each(|(wave, receiver)| {
                    let mut rest = wave.len();
                    while rest > 0 {
                        // Without a sender, the thread has ended with an error.
                        let payloads = receiver.recv().map_err(|_| ThreadEnd(None))?;
                        rest -= payloads.chunks.len();
                        assembly.add(session, &payloads)?;
                    }
                    Ok(())
                })
            });
            // Without a receiver, a thread ends with its next payloads.
            drop(receivers);
            // Threads take a while to end.
            let finished = added.and_then(|()| finish(assembly));
            let ended = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            (finished, ended.collect::<Vec<Result<Memory, ThreadEnd>>>())
        });
        // The error that came first is the one of the caller's thread, or else of a thread that has one.
        if let Err(ThreadEnd(Some(error))) = finished {
            return Err(ThreadEnd(Some(error)));
        }
        let mut memories = Vec::new();
        for ended in ended {
            match ended {
                Ok(memory) => memories.push(memory),
                Err(ThreadEnd(Some(error))) => return Err(ThreadEnd(Some(error))),
                Err(ThreadEnd(None)) => {}
            }
        }
        finished.map(|finished| (memories, finished))
    }

    /// Encodes the waves of a worker, and returns the memory. `start` waits until tables are trained, and returns memory of the
    /// training.
    fn work(
        &self,
        worker: Worker,
        start: impl FnOnce() -> Result<TrainingMemory, ThreadEnd>,
        sink: &mut dyn FnMut(Payloads) -> Result<(), ThreadEnd>,
    ) -> Result<Memory, ThreadEnd> {
        let Self { job, source, .. } = *self;
        let waves = self.waves.iter().skip(worker.number).step_by(worker.of);
        let cx = job.target.device().inner.context.enter()?;
        let has_memory = worker.memory.is_some();
        let session = Session::new(job.target, &cx, self.after, job.limits.in_training(), worker.memory.unwrap_or_default())?;
        let _drained = SessionGuard(&session);
        let mut bytes = 0;
        let ahead = waves.clone().take_while(|jobs| {
            let is_first = bytes == 0;
            bytes += memory_of_all(source, jobs);
            has_memory && (is_first || bytes <= job.limits.ahead)
        });
        let mut analyses = ahead.map(|jobs| Analysis::of_wave(&session, source, jobs)).collect::<Result<VecDeque<_>>>()?;
        let trained = start()?;
        session.extend(trained.memory, job.limits);
        analyses.extend(trained.analyses);
        let tables = self.tables.get().ok_or(ThreadEnd(None))?;
        for jobs in waves {
            let analysis = analyses.pop_front().map_or_else(|| Analysis::of_wave(&session, source, jobs), Ok)?;
            let mut wave = Wave::new(&session, tables, jobs, analysis)?;
            payloads::write(&session, tables, job.limits, &mut wave, sink)?;
        }
        Ok(session.take_memory()?)
    }
}
