//! Waves of chunks. Threads of the host encode them in turn, each on a stream of its own, so that the device has work while a thread
//! waits or plans. Meanwhile the caller's thread copies the payloads of those before from the device, on another stream, and adds
//! them to the pair.

use super::assembly::Assembly;
use super::blob::Blob;
use super::chunks::{Job as ChunkJob, Tables, Wave};
use super::job::Job;
use super::payloads::{self, Payloads};
use super::session::{Drained, Memory, Session};
use super::source::Source;
use crate::cuda::runtime::driver::RawEvent;
use crate::error::{Error, Result};
use crate::writer::{FileSpec, Finished};
use std::sync::mpsc::sync_channel;
use std::thread;

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
    pub tables: &'s Tables,
    pub waves: Vec<&'s [ChunkJob<'a>]>,
}

/// Why a thread ended early: its error, or `None` if another thread had one.
struct Ended(Option<Error>);

impl From<Error> for Ended {
    fn from(error: Error) -> Self {
        Self(Some(error))
    }
}

impl Waves<'_, '_> {
    /// Encodes all waves, adds their payloads in order, and finishes the pair, which describes `files`. `session` copies the
    /// payloads. The threads, as many as there are memories at most, use these for all else.
    pub fn encode<W: Blob>(
        &self,
        session: &Session<'_>,
        mut memories: Vec<Memory>,
        mut assembly: Assembly<'_, W>,
        files: Vec<FileSpec>,
    ) -> Result<Finished<W>> {
        let workers = self.waves.len().clamp(1, memories.len().max(1));
        let unused = memories.split_off(workers.min(memories.len()));
        let mut blob_bytes = 0;
        let finish = |mut assembly: Assembly<'_, W>| {
            blob_bytes = assembly.blob_bytes();
            Ok::<_, Ended>(assembly.finish(files)?)
        };
        let encoded = if workers == 1 {
            // Starting a thread takes longer than it would save.
            let memory = memories.pop().unwrap_or_default();
            let worked = self.work(0, 1, memory, &mut |payloads| Ok(assembly.add(session, &payloads)?));
            worked.and_then(|memory| Ok((vec![memory], finish(assembly)?)))
        } else {
            self.encode_in_threads(session, memories, assembly, finish)
        };
        // Without an error of its own, the caller's thread ended because another one did, whose error is returned.
        let (used, finished) = encoded.map_err(|Ended(error)| error.unwrap_or(Error::Cancelled))?;
        if let Some(encoder) = self.job.encoder {
            for mut memory in used.into_iter().chain(unused) {
                memory.blob_bytes = blob_bytes;
                encoder.give_back(session.device, memory);
            }
        }
        Ok(finished)
    }

    /// [`Waves::encode`], with a thread per memory. Returns the memories too.
    fn encode_in_threads<W: Blob>(
        &self,
        session: &Session<'_>,
        memories: Vec<Memory>,
        mut assembly: Assembly<'_, W>,
        finish: impl FnOnce(Assembly<'_, W>) -> Result<Finished<W>, Ended>,
    ) -> Result<(Vec<Memory>, Finished<W>), Ended> {
        let workers = memories.len();
        let (finished, ended) = thread::scope(|scope| {
            let (mut threads, mut receivers) = (Vec::new(), Vec::new());
            for (worker, memory) in memories.into_iter().enumerate() {
                let (sender, receiver) = sync_channel(AHEAD);
                let mut sink = move |payloads| sender.send(payloads).map_err(|_| Ended(None));
                threads.push(scope.spawn(move || self.work(worker, workers, memory, &mut sink)));
                receivers.push(receiver);
            }
            let added = self.waves.iter().zip(receivers.iter().cycle()).try_for_each(|(wave, receiver)| {
                let mut rest = wave.len();
                while rest > 0 {
                    // Without a sender, the thread has ended with an error.
                    let payloads = receiver.recv().map_err(|_| Ended(None))?;
                    rest -= payloads.chunks.len();
                    assembly.add(session, &payloads)?;
                }
                Ok::<_, Ended>(())
            });
            // Without a receiver, a thread ends with its next payloads.
            drop(receivers);
            // Threads take a while to end.
            let finished = added.and_then(|()| finish(assembly));
            let ended = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            (finished, ended.collect::<Vec<Result<Memory, Ended>>>())
        });
        // The error that came first is the one of the caller's thread, or else of a thread that has one.
        if let Err(Ended(Some(error))) = finished {
            return Err(Ended(Some(error)));
        }
        let mut memories = Vec::new();
        for ended in ended {
            match ended {
                Ok(memory) => memories.push(memory),
                Err(Ended(Some(error))) => return Err(Ended(Some(error))),
                Err(Ended(None)) => {}
            }
        }
        finished.map(|finished| (memories, finished))
    }

    /// Encodes every `workers`th wave, from wave `worker` on, and returns the memory.
    fn work(
        &self,
        worker: usize,
        workers: usize,
        memory: Memory,
        sink: &mut dyn FnMut(Payloads) -> Result<(), Ended>,
    ) -> Result<Memory, Ended> {
        let device = &self.job.target.device().inner;
        let cx = device.context.enter()?;
        let session = Session::new(self.job.target, &cx, self.after, self.job.limits, memory)?;
        let _drained = Drained(&session);
        for jobs in self.waves.iter().skip(worker).step_by(workers) {
            let mut wave = Wave::new(&session, self.source, self.tables, jobs)?;
            payloads::write(&session, self.tables, self.job.limits, &mut wave, sink)?;
        }
        Ok(session.take_memory()?)
    }
}
