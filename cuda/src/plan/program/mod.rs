//! The program of a launch: its operations in order, their streams, and the earlier operations that each waits for. It has no
//! addresses and needs no device. Streams run a program, or a graph records it.

use super::payloads::{Mode, Payloads};
use super::schedule::Slice;
use crate::runtime::kernels::Decoder;
use tpde::InPlace;

/// Maximum number of slices that are decoded concurrently. Each has a side stream.
pub(crate) const SIDES: usize = 8;

/// The stream of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Queue {
    /// The stream of the caller.
    Caller,
    /// The copy stream of the device, which never waits for a caller's stream.
    Copies,
    /// Compares digests of payloads while payloads are decoded.
    PayloadDigests,
    /// Hashes a batch of targets while the next batch is rebuilt.
    TargetDigests,
    /// Decodes one of several slices. So a slice does not wait for the last chunks of another slice.
    Side(usize),
}

/// Number of different queues.
const QUEUES: usize = 4 + SIDES;

impl Queue {
    fn number(self) -> usize {
        match self {
            Self::Caller => 0,
            Self::Copies => 1,
            Self::PayloadDigests => 2,
            Self::TargetDigests => 3,
            Self::Side(n) => 4 + n,
        }
    }
}

/// What an operation does. Numbers are those of slices of the schedule, and of batches of targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Nothing: a point that other streams wait for, or that waits for them.
    Point,
    /// Copies stored payloads of a slice from pinned memory.
    Copy(usize),
    /// Reads or expands payloads of a slice on the processor, which waits for a free slot of the ring, and copies them.
    Send(usize),
    /// Hashes the payloads of a slice, and compares the hashes unless only the payload root is known.
    HashPayloads(usize),
    /// Compares the hashes of all payloads with the payload root.
    ComparePayloadRoot,
    /// Expands the frames of a slice by nvCOMP.
    ExpandFrames(usize),
    /// Decodes a slice. All checked in place, this writes no tensor.
    Decode(usize),
    /// Rebuilds a batch of targets in scratch memory.
    Rebuild(usize),
    /// Hashes a batch of targets in scratch memory, and compares digests.
    CompareBatch(usize),
    /// Hashes the targets where they are stored, and compares digests.
    CompareStored,
    /// Stores the changes of a slice, unless a check has set the flag of the application.
    Commit(usize),
    /// Copies the status words of a graph to the host.
    CopyStatuses,
    /// Copies the status words of frames to the host. It is also done after an error of the processor.
    CopyFrameStatuses,
}

/// An operation of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Operation {
    pub work: Work,
    pub queue: Queue,
    /// Numbers of operations on other queues that must complete first. Waits that others imply are left out.
    pub after: Vec<usize>,
    /// Number of operations that wait for this one.
    pub awaited: usize,
}

/// Where payloads are before a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    Device,
    Pinned,
    Host,
}

impl From<&Payloads<'_>> for Origin {
    fn from(payloads: &Payloads<'_>) -> Self {
        match payloads {
            Payloads::Device(_) | Payloads::Parts(_) => Self::Device,
            Payloads::Pinned(_) => Self::Pinned,
            Payloads::Host(_) | Payloads::Kept(_) => Self::Host,
        }
    }
}

/// The digests of payloads that a device compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PayloadChecks {
    None,
    /// The digest of each payload.
    Each,
    /// The payload root, which needs the hashes of all payloads.
    Root,
}

/// The digests of targets that a device compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TargetChecks {
    None,
    /// Where the targets are stored.
    Stored,
    /// Before they are stored, in this number of batches.
    Batches(usize),
}

/// Mode and checks of an application.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub mode: Mode,
    pub payload_checks: PayloadChecks,
    pub target_checks: TargetChecks,
    /// Whether nvCOMP expands frames.
    pub has_frames: bool,
}

/// The part of an application that a program runs, and on how many streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variation {
    Whole,
    /// The checks of an application that checks all chunks first.
    WithoutCommit,
    /// All on the caller's stream, for graphs. Digests of payloads are compared first.
    Serial,
}

/// The operations of a launch in the order in which they are queued.
#[derive(Debug)]
pub(crate) struct Program {
    pub operations: Vec<Operation>,
    /// Whether a payload is decoded only after the comparison of its digest.
    pub compares_first: bool,
}

impl Program {
    /// The program of an application with these slices and payloads.
    pub fn new(request: Request, slices: &[Slice], origin: Origin, variation: Variation) -> Self {
        let is_checked = request.payload_checks != PayloadChecks::None;
        // In place, chunks must not be written before the digests of their payloads are compared. The payload root is compared after
        // all payloads have been hashed, so it stops no chunk. nvCOMP must not expand a frame before its digest is compared.
        let stops_chunks = request.mode == Mode::InPlace(InPlace::ChunkByChunk) && request.payload_checks == PayloadChecks::Each;
        let compares_first = variation == Variation::Serial || !is_checked || stops_chunks || request.has_frames;
        let mut builder = Builder {
            request,
            slices,
            origin,
            variation,
            compares_first,
            operations: Vec::new(),
            reached: Vec::new(),
            last: [None; QUEUES],
        };
        builder.build();
        Self { operations: builder.operations, compares_first }
    }

    /// Returns whether the processor reads or expands payloads during a launch. Such a program cannot be recorded as a graph.
    pub fn has_host_work(&self) -> bool {
        self.operations.iter().any(|operation| matches!(operation.work, Work::Send(_)))
    }

    /// Returns whether an operation is on this queue.
    pub fn uses(&self, queue: Queue) -> bool {
        self.operations.iter().any(|operation| operation.queue == queue)
    }
}

struct Builder<'a> {
    request: Request,
    slices: &'a [Slice],
    origin: Origin,
    variation: Variation,
    compares_first: bool,
    operations: Vec<Operation>,
    /// A vector clock per operation. For each queue: the number of its last operation that completes no later, plus one; or 0.
    reached: Vec<[usize; QUEUES]>,
    /// The last operation of each queue.
    last: [Option<usize>; QUEUES],
}

impl Builder<'_> {
    fn build(&mut self) {
        let begin = self.add(Work::Point, Queue::Caller, &[]);
        self.check_and_decode(begin);
        // While the dry pass runs: a batch has too few chunks to fill a device.
        if !self.compares_first {
            self.compare_batches(begin, Queue::PayloadDigests);
        }
        self.join();
        if self.compares_first {
            self.compare_batches(begin, Queue::Caller);
            self.join();
        }
        if self.request.target_checks == TargetChecks::Stored {
            self.add(Work::CompareStored, Queue::Caller, &[]);
        }
        if self.variation != Variation::WithoutCommit && self.request.mode == Mode::InPlace(InPlace::AllChecked) {
            let checked: Vec<_> = self.last[Queue::Caller.number()].into_iter().collect();
            for n in 0..self.slices.len() {
                self.add(Work::Commit(n), self.side(n), &checked);
            }
            self.join();
        }
        if self.is_serial() {
            self.add(Work::CopyStatuses, Queue::Caller, &[]);
        }
        if self.request.has_frames {
            self.add(Work::CopyFrameStatuses, Queue::Caller, &[]);
        }
    }

    /// Copies the payloads, compares their digests, and decodes them: a slice is decoded while the next one is copied.
    fn check_and_decode(&mut self, begin: usize) {
        let (slices, checks_root) = (self.slices, self.request.payload_checks == PayloadChecks::Root);
        let hashes_all_first = self.is_serial() || self.compares_first && checks_root;
        let mut hashed = vec![begin];
        let mut copied = Vec::with_capacity(slices.len());
        for (n, slice) in slices.iter().enumerate() {
            let ready = [self.copy(n), vec![begin]].concat();
            // Codec `raw` is decoded faster than its payloads are hashed. If decoding were queued first, its blocks would fill most
            // multiprocessors, and all warps that hash would share the others. Other codecs decode longer, so they are queued first.
            let hashes_first = self.compares_first || slice.runs.iter().all(|run| run.group.decoder() == Decoder::Raw);
            if hashes_first {
                hashed.extend(self.hash(n, &ready));
            }
            if !hashes_all_first {
                self.decode(n, &ready);
            }
            if !hashes_first {
                hashed.extend(self.hash(n, &ready));
            }
            copied.push(ready);
        }
        if checks_root {
            let queue = if self.compares_first { Queue::Caller } else { Queue::PayloadDigests };
            hashed.push(self.add(Work::ComparePayloadRoot, queue, &hashed.clone()));
        }
        if hashes_all_first {
            // The last one is behind the others: on their queue, or as the comparison of the root.
            let compared: Vec<_> = hashed.last().copied().into_iter().collect();
            for (n, ready) in copied.into_iter().enumerate() {
                self.decode(n, &[ready, compared.clone()].concat());
            }
        }
    }

    /// Takes the payloads of a slice to the device. Returns the operations, if there are any.
    fn copy(&mut self, n: usize) -> Vec<usize> {
        let (is_host, is_stored) = (self.origin == Origin::Host, self.origin == Origin::Pinned);
        let slices = self.slices;
        let has = |is_expanded: bool| slices[n].pieces.iter().any(|piece| piece.is_expanded == is_expanded);
        let sends = has(true) && is_stored || is_host && !slices[n].pieces.is_empty();
        // A single slice needs no copy beside the decoding of another one.
        let queue = if slices.len() == 1 && is_stored && !sends { Queue::Caller } else { Queue::Copies };
        let copied = (has(false) && is_stored).then(|| self.add(Work::Copy(n), queue, &[]));
        copied.into_iter().chain(sends.then(|| self.add(Work::Send(n), queue, &[]))).collect()
    }

    fn hash(&mut self, n: usize, ready: &[usize]) -> Option<usize> {
        let queue = if self.compares_first { self.side(n) } else { Queue::PayloadDigests };
        (self.request.payload_checks != PayloadChecks::None).then(|| self.add(Work::HashPayloads(n), queue, ready))
    }

    fn decode(&mut self, n: usize, ready: &[usize]) {
        if self.request.has_frames {
            self.add(Work::ExpandFrames(n), self.side(n), ready);
        }
        self.add(Work::Decode(n), self.side(n), ready);
    }

    /// Rebuilds the batches of targets and compares their digests. Scratch memory holds two batches: one is rebuilt while the other
    /// one is hashed.
    fn compare_batches(&mut self, begin: usize, queue: Queue) {
        let TargetChecks::Batches(batches) = self.request.target_checks else { return };
        let hashing = if batches > 1 { Queue::TargetDigests } else { queue };
        let mut compared: [Option<usize>; 2] = [None; 2];
        for n in 0..batches {
            let rebuilt = self.add(Work::Rebuild(n), queue, &[compared[n % 2].unwrap_or(begin), begin]);
            compared[n % 2] = Some(self.add(Work::CompareBatch(n), hashing, &[rebuilt]));
        }
    }

    fn is_serial(&self) -> bool {
        self.variation == Variation::Serial
    }

    /// Returns the queue that decodes slice `n`.
    fn side(&self, n: usize) -> Queue {
        if self.slices.len() == 1 { Queue::Caller } else { Queue::Side(n % SIDES) }
    }

    /// Makes the caller's stream wait for all others.
    fn join(&mut self) {
        let all: Vec<_> = self.last.into_iter().flatten().collect();
        let caller = self.last[Queue::Caller.number()].map(|last| self.reached[last]).unwrap_or_default();
        if all.iter().any(|&one| caller[self.operations[one].queue.number()] <= one) {
            self.add(Work::Point, Queue::Caller, &all);
        }
    }

    /// Adds an operation, which waits for others. Returns its number.
    fn add(&mut self, work: Work, queue: Queue, after: &[usize]) -> usize {
        let queue = if self.is_serial() { Queue::Caller } else { queue };
        let number = self.operations.len();
        let mut reached = self.last[queue.number()].map(|last| self.reached[last]).unwrap_or_default();
        let mut waits = Vec::new();
        // A later operation may have waited for earlier ones.
        let mut after = after.to_vec();
        after.sort_unstable_by(|a, b| b.cmp(a));
        for before in after {
            if reached[self.operations[before].queue.number()] <= before {
                waits.push(before);
                self.operations[before].awaited += 1;
                (0..QUEUES).for_each(|queue| reached[queue] = reached[queue].max(self.reached[before][queue]));
            }
        }
        waits.reverse();
        reached[queue.number()] = number + 1;
        self.reached.push(reached);
        self.last[queue.number()] = Some(number);
        self.operations.push(Operation { work, queue, after: waits, awaited: 0 });
        number
    }
}

#[cfg(test)]
mod tests;
