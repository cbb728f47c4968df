//! Digests of tensors, which a pair stores.
//!
//! The caller may know them. The others are hashed on the device, on a stream of their own, in batches of many tensors. Two batches
//! are queued ahead of the tensor whose digests are needed.

use super::session::{SecondStream, Session};
use super::source::{Lanes, Source};
use crate::checkpoint::Checkpoint;
use crate::cuda::hashes::Hashes;
use crate::digest;
use crate::encode::{Plan, Selection};
use crate::error::{Error, Result};
use crate::format::DIGEST_SIZE;
use std::collections::{BTreeMap, VecDeque};

/// Digests of the tensors of a checkpoint, as far as they are known: BLAKE3-128 by name.
pub(super) type Known = BTreeMap<String, [u8; DIGEST_SIZE]>;

/// Most tensors of a batch.
const BATCH_TENSORS: usize = 1 << 16;
/// Number of batches that are queued ahead.
const AHEAD: usize = 2;

/// A tensor to be hashed: the number of its base or of its target among those of the entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operand {
    Base(usize),
    Target(usize),
}

/// The digest of a tensor.
#[derive(Debug, Clone, Copy)]
pub(super) enum Digest {
    /// The caller knows it.
    Known([u8; DIGEST_SIZE]),
    /// The hash that it begins.
    Hashed(blake3::Hash),
}

impl Digest {
    /// The digest that a pair stores.
    pub fn short(&self) -> [u8; DIGEST_SIZE] {
        match self {
            Self::Known(digest) => *digest,
            Self::Hashed(hash) => digest::short(hash),
        }
    }
}

/// The digests of all entries, computed in their order.
pub(super) struct Digests<'a> {
    base: Vec<Option<Digest>>,
    target: Vec<Option<Digest>>,
    /// What is to be hashed, in the order in which it is needed. `queued` of these have been queued.
    wanted: Vec<(Operand, Lanes)>,
    queued: usize,
    batches: VecDeque<(std::ops::Range<usize>, Hashes)>,
    /// `None` if all digests are known.
    stream: Option<SecondStream<'a>>,
    /// Most bytes of a batch, unless one tensor has more.
    batch_bytes: u64,
}

impl<'a> Digests<'a> {
    /// Queues the first batches, of at most `batch_bytes` bytes. Known digests are those of whole tensors.
    pub fn new(
        session: &'a Session<'a>,
        batch_bytes: u64,
        source: &Source,
        selection: &Selection<'_>,
        plans: &[Plan],
        [known_bases, known_targets]: [&Known; 2],
    ) -> Result<Self> {
        let names = |checkpoint: Option<&dyn Checkpoint>| checkpoint.map_or(0, |checkpoint| checkpoint.tensors().len());
        let mut base = vec![None; names(selection.base())];
        let mut target = vec![None; names(Some(selection.target()))];
        let mut is_wanted = vec![false; base.len()];
        let mut wanted = Vec::new();
        for plan in plans {
            let known = |known: &Known, checkpoint: &dyn Checkpoint, i: usize| {
                known.get(&checkpoint.tensors()[i].name).filter(|_| plan.part.is_none()).copied().map(Digest::Known)
            };
            if let (Some(lanes), Some(i), Some(infos)) = (source.base(plan), plan.base, selection.base()) {
                let i = i as usize;
                base[i] = known(known_bases, infos, i);
                if base[i].is_none() && !std::mem::replace(&mut is_wanted[i], true) {
                    wanted.push((Operand::Base(i), lanes.clone()));
                }
            }
            let i = plan.target as usize;
            target[i] = known(known_targets, selection.target(), i);
            if target[i].is_none() {
                wanted.push((Operand::Target(i), source.target(plan).clone()));
            }
        }
        let stream = if wanted.is_empty() { None } else { Some(session.second_stream()?) };
        let mut digests = Self { base, target, wanted, queued: 0, batches: VecDeque::new(), stream, batch_bytes };
        digests.queue()?;
        Ok(digests)
    }

    /// Queues batches until enough are queued ahead.
    fn queue(&mut self) -> Result<()> {
        let Some(SecondStream { stream, .. }) = &self.stream else { return Ok(()) };
        while self.batches.len() < AHEAD && self.queued < self.wanted.len() {
            let rest = &self.wanted[self.queued..];
            let mut bytes = 0u64;
            let count = rest.iter().take(BATCH_TENSORS).take_while(|(_, lanes)| {
                let is_first = bytes == 0;
                bytes += lanes.memory.bytes();
                is_first || bytes <= self.batch_bytes
            });
            let range = self.queued..self.queued + count.count();
            let ranges: Vec<_> = self.wanted[range.clone()].iter().map(|(_, lanes)| (lanes.memory.clone(), lanes.rows)).collect();
            self.batches.push_back((range.clone(), Hashes::queue(stream, &ranges)?));
            self.queued = range.end;
        }
        Ok(())
    }

    /// Returns the digests of an entry, and waits for them: of its base if it uses one, and of its target.
    pub fn of(&mut self, source: &Source, plan: &Plan) -> Result<(Option<Digest>, Digest)> {
        loop {
            let base = plan.base.filter(|_| source.base(plan).is_some()).map(|i| self.base[i as usize]);
            match (base, self.target[plan.target as usize]) {
                (None, Some(target)) => return Ok((None, target)),
                (Some(Some(base)), Some(target)) => return Ok((Some(base), target)),
                _ => {}
            }
            let missing = || Error::InvalidArgument("the digest of a tensor was not queued".into());
            let (range, hashes) = self.batches.pop_front().ok_or_else(missing)?;
            self.queue()?;
            for ((operand, _), hash) in self.wanted[range].iter().zip(hashes.wait()?) {
                let digest = Some(Digest::Hashed(blake3::Hash::from_bytes(hash)));
                match *operand {
                    Operand::Base(i) => self.base[i] = digest,
                    Operand::Target(i) => self.target[i] = digest,
                }
            }
        }
    }
}
