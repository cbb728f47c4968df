//! Waves of chunks. A thread of the host encodes them; meanwhile the caller's thread copies the payloads of those before from the
//! device, on another stream, and adds them to the pair.

use super::assembly::Assembly;
use super::blob::Blob;
use super::chunks::{Job as ChunkJob, Tables, Wave};
use super::job::Job;
use super::payloads::{self, Payloads};
use super::session::{Drained, Memory, Session};
use super::source::Source;
use crate::error::{Error, Result};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

/// All waves of a pair.
pub(super) struct Waves<'s, 'a> {
    pub job: &'s Job<'s>,
    pub source: &'s Source,
    pub tables: &'s Tables,
    pub waves: Vec<&'s [ChunkJob<'a>]>,
}

impl Waves<'_, '_> {
    /// Encodes all waves, and adds their payloads in order. `session` copies the payloads, and `memory` is used for all else.
    pub fn encode<W: Blob>(&self, session: &Session<'_>, memory: Memory, assembly: &mut Assembly<'_, W>) -> Result<()> {
        thread::scope(|scope| {
            // Some payloads wait while the next ones are made.
            let (sender, receiver) = sync_channel(1);
            let worker = scope.spawn(move || self.work(memory, &sender));
            let added = receiver.iter().try_for_each(|payloads| assembly.add(session, &payloads));
            // Without a receiver, the worker ends with its next payloads.
            drop(receiver);
            let memory = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            added?;
            let mut memory = memory?;
            memory.blob_bytes = assembly.blob_bytes();
            if let Some(encoder) = self.job.encoder {
                encoder.give_back(session.device, memory);
            }
            Ok(())
        })
    }

    /// Encodes all waves, and returns the memory.
    fn work(&self, memory: Memory, sender: &SyncSender<Payloads>) -> Result<Memory> {
        let device = &self.job.target.device().inner;
        let cx = device.context.enter()?;
        let session = Session::new(self.job.target, &cx, self.job.after, self.job.limits, memory)?;
        let _drained = Drained(&session);
        for jobs in &self.waves {
            let mut wave = Wave::new(&session, self.source, self.tables, jobs)?;
            payloads::write(&session, self.tables, self.job.limits, &mut wave, &mut |payloads| {
                sender.send(payloads).map_err(|_| Error::Cancelled)
            })?;
        }
        session.take_memory()
    }
}
