//! Digests of tensors, which a pair stores.
//!
//! The caller may know them. The others are hashed on the device, on a stream of their own, in batches of many tensors. Two batches
//! are queued at a time. Hashing fills the gaps that the encoder's kernels leave, so digests may be complete later than payloads.

use super::convert::{self, Conversion};
use super::limits::Limits;
use super::session::{SecondStream, Session};
use super::source::{Lanes, Source};
use crate::hashes::{Hashes, PIECE};
use crate::runtime::memory::DeviceSlice;
use std::collections::{BTreeMap, VecDeque};
use tpde::Checkpoint;
use tpde::internals::{Plan, Selection};
use tpde_core::digest;
use tpde_core::error::{Error, Result};
use tpde_core::format::DIGEST_SIZE;

/// Digests of the tensors of a checkpoint, as far as they are known: BLAKE3-128 by name.
pub(super) type KnownDigests = BTreeMap<String, [u8; DIGEST_SIZE]>;

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
    /// Memory for converted lanes while they are hashed, if some bases are derived.
    converted: Option<DeviceSlice>,
    limits: Limits,
}

impl<'a> Digests<'a> {
    /// Queues the first batches. Known digests are those of whole tensors.
    pub fn new(
        session: &'a Session<'a>,
        limits: Limits,
        source: &Source,
        selection: &Selection<'_>,
        plans: &[Plan],
        [known_bases, known_targets]: [&KnownDigests; 2],
    ) -> Result<Self> {
        let names = |checkpoint: Option<&dyn Checkpoint>| checkpoint.map_or(0, |checkpoint| checkpoint.tensors().len());
        let mut base = vec![None; names(selection.base())];
        let mut target = vec![None; names(Some(selection.target()))];
        let mut is_wanted = vec![false; base.len()];
        let mut wanted = Vec::new();
        for plan in plans {
            let known = |known: &KnownDigests, checkpoint: &dyn Checkpoint, i: usize| {
                known.get(&checkpoint.tensors()[i].name).filter(|_| plan.part.is_none()).copied().map(Digest::Known)
            };
            if let (Some(lanes), Some(i), Some(infos)) = (source.base(plan), plan.base, selection.base()) {
                let i = i as usize;
                // The digest of a derived base is that of its converted lanes.
                base[i] = if lanes.conversion.is_some() { None } else { known(known_bases, infos, i) };
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
        let largest = wanted.iter().filter_map(|(_, lanes)| lanes.conversion.as_deref()).map(Conversion::bytes).max();
        let converted =
            largest.map(|bytes| session.alloc_separate(limits.converted.min(bytes.max(1).next_multiple_of(PIECE)))).transpose()?;
        let mut digests = Self { base, target, wanted, queued: 0, batches: VecDeque::new(), stream, converted, limits };
        digests.queue()?;
        Ok(digests)
    }

    /// Queues batches until enough are queued ahead.
    fn queue(&mut self) -> Result<()> {
        let Some(SecondStream { stream, .. }) = &self.stream else { return Ok(()) };
        while self.batches.len() < AHEAD && self.queued < self.wanted.len() {
            let rest = &self.wanted[self.queued..];
            let is_converted = rest.first().is_some_and(|(_, lanes)| lanes.conversion.is_some());
            let mut bytes = 0u64;
            // A converted tensor has longer entries in lists.
            let most = if is_converted { BATCH_TENSORS / 4 } else { BATCH_TENSORS };
            let count = rest.iter().take(most).take_while(|(_, lanes)| {
                let is_first = bytes == 0;
                bytes += if is_converted { lanes.bytes() } else { lanes.memory.bytes() };
                lanes.conversion.is_some() == is_converted && (is_first || bytes <= self.limits.hashed)
            });
            let range = self.queued..self.queued + count.count();
            let batch = &self.wanted[range.clone()];
            let hashes = match &self.converted {
                Some(buffer) if is_converted => {
                    let bases: Vec<_> = batch.iter().filter_map(|(_, lanes)| lanes.conversion.as_deref()).collect();
                    let device = stream.device();
                    convert::queue_hashes(stream, device.kernels.form(&device.context)?, buffer, &bases)?
                }
                _ => Hashes::queue(stream, &batch.iter().map(|(_, lanes)| (lanes.memory.clone(), lanes.rows)).collect::<Vec<_>>())?,
            };
            self.batches.push_back((range.clone(), hashes));
            self.queued = range.end;
        }
        Ok(())
    }

    /// Returns the digests of an entry: of its base if it uses one, and of its target. With `waits`, waits for them; otherwise
    /// returns `None` if they are not complete.
    pub fn of(&mut self, source: &Source, plan: &Plan, waits: bool) -> Result<Option<(Option<Digest>, Digest)>> {
        loop {
            let from_base = plan.choice.get().is_none_or(|choice| choice.from_base) && source.base(plan).is_some();
            let base = plan.base.filter(|_| from_base).map(|i| self.base[i as usize]);
            match (base, self.target[plan.target as usize]) {
                (None, Some(target)) => return Ok(Some((None, target))),
                (Some(Some(base)), Some(target)) => return Ok(Some((Some(base), target))),
                _ => {}
            }
            if let Some((_, hashes)) = self.batches.front()
                && !waits
                && !hashes.is_done()?
            {
                return Ok(None);
            }
            let missing = || Error::InvalidArgument("the digest of a tensor was not queued".into());
            let (range, hashes) = self.batches.pop_front().ok_or_else(missing)?;
            // Another batch is queued, so the device has work. A third one would need more memory.
            let hashes = hashes.wait()?;
            self.queue()?;
            for ((operand, _), hash) in self.wanted[range].iter().zip(hashes) {
                let digest = Some(Digest::Hashed(blake3::Hash::from_bytes(hash)));
                match *operand {
                    Operand::Base(i) => self.base[i] = digest,
                    Operand::Target(i) => self.target[i] = digest,
                }
            }
        }
    }
}
