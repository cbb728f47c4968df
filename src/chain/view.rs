//! The checkpoint that a base and a chain of pairs give.

use super::names;
use super::step::{BaseLanes, Step};
use crate::apply::wrong_base;
use crate::batches::hash_piece;
use crate::checkpoint::{Checkpoint, CheckpointFiles, Region, TensorInfo};
use crate::cut::Piece;
use crate::reader::Pair;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::PoisonError;
use tpde_core::digest::{PieceHasher, short};
use tpde_core::error::{Error, Escaped, Result, Rule, hex};
use tpde_core::format::DIGEST_SIZE;
use tpde_core::index::{Tensor, ValidatedIndex};
use tpde_core::layout::StridedLayout;
use tpde_core::rectangle::Rectangle;
use tpde_core::source::Source;

/// Size of the chunks of the last version that are kept, if they are not read as a whole. So an encoder that samples the chunks
/// of a small checkpoint does not rebuild them twice.
const KEPT_BYTES: u64 = 64 << 20;

/// A base and a chain of pairs, as the checkpoint that the last pair gives: each pair is applied to the result of the one before.
///
/// No version is held in memory or written. Reading a range rebuilds the chunks that overlap it, through all steps.
///
/// | to do | use |
/// |---|---|
/// | rebuild the last target | [`Apply`](crate::Apply) of the last pair, with [`Chain::without_last`] as its base |
/// | change tensors in memory | [`ApplyChain`](crate::ApplyChain) |
/// | make one pair of all | [`Encode::fold`](crate::Encode::fold) |
/// | make the pair that leads back | [`Encode::revert`](crate::Encode::revert) |
///
/// ```
/// # use tpde::{Apply, Chain, Dtype, Encode, MemoryCheckpoint, TensorInfo};
/// # fn main() -> tpde::Result<()> {
/// let version = |bytes| MemoryCheckpoint::new([(TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![3] }, bytes)]);
/// let (base, second, third) = (version(&[1, 2, 3])?, version(&[1, 2, 4])?, version(&[1, 5, 4])?);
/// let pairs = [
///     Encode::new(&second).base(&base).to_memory()?.0,
///     Encode::new(&third).base(&second).to_memory()?.0,
/// ];
///
/// let before = Chain::new(&base, &pairs)?.without_last();
/// assert_eq!(Apply::new(&pairs[1]).base(&before).to_memory()?[0].1, [1, 5, 4]);
///
/// let (folded, _) = Encode::fold(&Chain::new(&base, &pairs)?).to_memory()?;
/// assert_eq!(Apply::new(&folded).base(&base).to_memory()?[0].1, [1, 5, 4]);
/// # Ok(())
/// # }
/// ```
///
/// Every chunk that is rebuilt has passed the checks of its CRC-32 and of its base and target sums, in each step. The digests of
/// payloads are compared where an index stores them. [`Apply`](crate::Apply), [`Encode::fold`](crate::Encode::fold) and
/// [`Encode::revert`](crate::Encode::revert) also compare the digests of the tensors and parts that they read completely from a chain
/// with those of its last step, so their result is that of the last pair. Digests of tensors between base and last step are compared in the indexes
/// alone.
///
/// Memory: the indexes of the pairs, for each step some buffers per thread, and up to 64 MiB of the last version. If chunks of a
/// step are not read as a whole, also two chunks per thread. Time of a read: that of decoding the chunks in each step.
pub struct Chain<'a, B> {
    base: &'a dyn Checkpoint,
    steps: Vec<Step<'a, B>>,
}

impl<'a, B: Source> Chain<'a, B> {
    /// Joins a base and pairs, in the order in which they are applied. Without pairs, the chain gives the base. A chain whose first
    /// pair needs no base may have [`MemoryCheckpoint::EMPTY`](crate::MemoryCheckpoint::EMPTY).
    ///
    /// Compares each pair with the one before: base tensors must be there, and where both describe the same tensor or part, the
    /// digests of the target and of the base must be equal. No payload is read. Whether the base is that of the first pair is found
    /// when it is read.
    ///
    /// # Errors
    /// [`Error::Step`] with the number of the pair that does not fit, and as its source [`Error::WrongBase`];
    /// [`Error::AlreadyApplied`] if the version before is the target of the pair; or [`Error::Invalid`] with rule `base.tensor` if a
    /// base tensor is missing, has another dtype or shape, or is incomplete and cut in another way.
    pub fn new(base: &'a dyn Checkpoint, pairs: impl IntoIterator<Item = &'a Pair<B>>) -> Result<Self> {
        Self::of(base, pairs, |_| true)
    }

    /// [`Chain::new`] for the tensors that satisfy `is_wanted`, which have the same names in all pairs. Others may not be read.
    pub(super) fn of(
        base: &'a dyn Checkpoint,
        pairs: impl IntoIterator<Item = &'a Pair<B>>,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let mut chain = Self { base, steps: Vec::new() };
        for pair in pairs {
            let number = chain.steps.len() + 1;
            let wrap = |source| Error::Step { number, pair: pair.label(number), source: Box::new(source) };
            let step = Step::new(pair, number, &chain, chain.steps.last(), &is_wanted).map_err(wrap)?;
            chain.steps.push(step);
        }
        if let Some(last) = chain.steps.last_mut() {
            last.rebuilder.keep(KEPT_BYTES);
        }
        Ok(chain)
    }

    /// The chain without its last pair: the base of that pair. A chain without pairs stays as it is.
    #[must_use]
    pub fn without_last(mut self) -> Self {
        self.steps.pop();
        self
    }

    /// The base.
    pub fn base(&self) -> &'a dyn Checkpoint {
        self.base
    }

    /// The renamed tensors: names of tensors that derive from base tensors of other names, with these names.
    /// [`Encode::fold`](crate::Encode::fold) pairs tensors accordingly.
    pub fn renamed(&self) -> BTreeMap<String, String> {
        names::renamed(self.base, &self.steps)
    }

    /// [`Chain::renamed`] in the other direction, for [`Encode::revert`](crate::Encode::revert): names of base tensors, with the names
    /// of the tensors that derive from them. If several do, the first.
    pub fn renamed_back(&self) -> BTreeMap<String, String> {
        names::renamed_back(self.base, &self.steps)
    }

    /// The parts in which the last pair describes tensors.
    #[doc(hidden)]
    pub fn cuts(&self) -> BTreeMap<String, Vec<Rectangle>> {
        names::cuts(&self.steps)
    }

    /// [`Chain::cuts`] for the base tensors from which these tensors derive.
    pub(crate) fn cuts_back(&self) -> BTreeMap<String, Vec<Rectangle>> {
        names::cuts_back(self.base, &self.steps)
    }

    /// All bytes of a tensor.
    fn all_of(&self, tensor_index: usize) -> StridedLayout {
        let info = &self.tensors()[tensor_index];
        StridedLayout::contiguous(0, info.bytes())
    }

    /// The name of the last pair in errors.
    pub(crate) fn last_label(&self) -> Option<&str> {
        self.steps.last().map(|step| step.label.as_str())
    }

    pub(super) fn steps(&self) -> &[Step<'a, B>] {
        &self.steps
    }

    /// The pairs, in the order in which they are applied.
    #[doc(hidden)]
    pub fn pairs(&self) -> impl ExactSizeIterator<Item = &'a Pair<B>> {
        self.steps.iter().map(|step| step.pair)
    }

    /// Rebuilds a chunk of step `step`, counted from 0, for its checks alone.
    #[doc(hidden)]
    pub fn check_chunk(&self, step: usize, chunk: u32) -> Result<()> {
        let Some(of) = self.steps.get(step) else { return Ok(()) };
        let Some(tensor) = of.pair.index().tensors().find(|tensor| tensor.chunks().contains(&chunk)) else { return Ok(()) };
        let lanes = tensor.chunk_range(chunk);
        let width = tensor.lane_bytes() as u64;
        let mut out = vec![0; ((lanes.end - lanes.start) * width) as usize];
        self.read_entry(step, tensor.place, lanes.start * width, &mut out).map(drop)
    }

    /// An error of step `step`, counted from 0.
    #[doc(hidden)]
    pub fn at_step(&self, step: usize, source: Error) -> Error {
        Error::Step { number: step + 1, pair: self.steps[step].label.clone(), source: Box::new(source) }
    }

    /// Fills `out` with bytes of a tensor after `level` steps.
    fn read_tensor(&self, level: usize, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let Some(step) = level.checked_sub(1) else { return self.base.read(tensor_index, offset, out) };
        let of = &self.steps[step];
        if tensor_index >= of.tensors.len() {
            return Err(Error::InvalidArgument(format!("no tensor {tensor_index}")));
        }
        if let Some(entry) = of.entry_of(tensor_index, None) {
            return self.read_entry(step, entry, offset, out).map(drop);
        }
        let bytes = offset..offset.saturating_add(out.len() as u64);
        let mut scratch = Vec::new();
        let mut found = 0;
        for entry in of.parts_near(tensor_index, &bytes) {
            let Some(runs) = of.runs(entry) else { continue };
            let (from, to) = (runs.before(bytes.start), runs.before(bytes.end));
            let size = (to - from) as usize;
            if size == 0 {
                continue;
            }
            found += size;
            if let Some(at) = runs.contiguous_at(from, size) {
                self.read_entry(step, entry, from, &mut out[(at - offset) as usize..][..size])?;
                continue;
            }
            scratch.resize(size.max(scratch.len()), 0);
            self.read_entry(step, entry, from, &mut scratch[..size])?;
            runs.try_each(from, size, |at, range| {
                out[(at - offset) as usize..][..range.len()].copy_from_slice(&scratch[range]);
                Ok::<_, Error>(())
            })?;
        }
        if found == out.len() {
            return Ok(());
        }
        let name = Escaped(&of.tensors[tensor_index].name);
        Err(Error::InvalidArgument(format!("the chain gives only some parts of tensor {name}, or it has no such bytes")))
    }

    /// Fills `out` with bytes of a rectangle of a tensor after `level` steps. No bytes between the runs are rebuilt: the pairs may
    /// lack their payloads, and rebuilding them costs more than a call per run.
    fn read_rectangle(&self, level: usize, tensor_index: usize, runs: &StridedLayout, offset: u64, out: &mut [u8]) -> Result<()> {
        let Some(step) = level.checked_sub(1) else { return self.base.read_runs(tensor_index, runs, offset, out) };
        match self.steps[step].entry_of(tensor_index, Some(runs)) {
            Some(entry) => self.read_entry(step, entry, offset, out).map(drop),
            None => runs.try_each(offset, out.len(), |at, range| self.read_tensor(level, tensor_index, at, &mut out[range])),
        }
    }

    /// Fills `out` with bytes of an entry of a step. Returns their chunk sum if it is known.
    fn read_entry(&self, step: usize, entry: usize, offset: u64, out: &mut [u8]) -> Result<Option<u64>> {
        let base = |tensor: &Tensor<'_>, offset, lanes: &mut [u8]| self.read_base(step, tensor, offset, lanes);
        self.steps[step].rebuilder.read(entry, offset, out, &base).map_err(|e| self.explain(step, entry, e))
    }

    /// Fills `out` with base lanes of an entry of a step. Lanes beyond the end of the base are zeros. Returns the chunk sum of the
    /// lanes if it is known.
    fn read_base(&self, step: usize, tensor: &Tensor<'_>, offset: u64, out: &mut [u8]) -> Result<Option<u64>> {
        let present = tensor.base_bytes().saturating_sub(offset).min(out.len() as u64);
        let (from_base, zeros) = out.split_at_mut(present as usize);
        zeros.fill(0);
        if from_base.is_empty() {
            return Ok(Some(0));
        }
        match &self.steps[step].bases[tensor.place] {
            BaseLanes::Zeros => from_base.fill(0),
            // Zeros behind the lanes do not change their sum.
            BaseLanes::Entry(entry) => return self.read_entry(step - 1, *entry, offset, from_base),
            BaseLanes::Piece(piece) if step == 0 => piece.read(self.base, offset, from_base)?,
            BaseLanes::Piece(piece) => piece.read(&Version { chain: self, level: step }, offset, from_base)?,
        }
        Ok(None)
    }

    /// Adds the step to an error about a chunk of an entry. If the sum of the base lanes is wrong, compares the entry's base with
    /// its digest. That reads and hashes the base once per entry.
    fn explain(&self, step: usize, entry: usize, error: Error) -> Error {
        let Error::Invalid(invalid) = &error else { return error };
        if invalid.rule != Rule::ChunkBaseSum {
            return self.at_step(step, error);
        }
        let failed = invalid.at.chunk;
        let of = &self.steps[step];
        let tensor = of.pair.index().tensor(entry);
        let mut known = of.wrong_bases.lock().unwrap_or_else(PoisonError::into_inner);
        let found = match known.get(&entry) {
            Some(found) => *found,
            None => match self.hash_base(step, &tensor) {
                Ok(found) => *known.entry(entry).or_insert(Some(found)),
                // Only some elements of the base are held, so it cannot be compared.
                Err(Error::InvalidArgument(_)) => *known.entry(entry).or_insert(None),
                // A base that cannot be read may still be the right one.
                Err(unread) => return unread,
            },
        };
        let wrong = found.filter(|found| found != tensor.base_digest());
        self.at_step(step, wrong.map_or(error, |found| wrong_base(&tensor, &found, failed)))
    }

    /// The digest of an entry's base. Runs on one thread: other threads may wait for a chunk that this thread rebuilds.
    fn hash_base(&self, step: usize, tensor: &Tensor<'_>) -> Result<[u8; DIGEST_SIZE]> {
        const PIECE: u64 = 1 << 20;
        let bytes = tensor.base_bytes();
        if let (0, BaseLanes::Piece(piece)) = (step, &self.steps[step].bases[tensor.place])
            && !piece.is_held(self.base, 0, bytes as usize)
        {
            return Err(Error::InvalidArgument(format!("the base holds only a part of tensor {}", Escaped(tensor.base_name))));
        }
        let mut hasher = PieceHasher::new(0, bytes);
        let mut buffer = vec![0; bytes.min(PIECE) as usize];
        for offset in (0..bytes).step_by(PIECE as usize) {
            let piece = &mut buffer[..PIECE.min(bytes - offset) as usize];
            self.read_base(step, tensor, offset, piece)?;
            hasher.update(piece);
        }
        Ok(short(&blake3::Hash::from_bytes(hasher.finish())))
    }

    /// Compares the target digests in the index of a fold with those of the last pair: those of tensors and parts that both have.
    /// Unlike [`Checkpoint::check_digests`], reads nothing.
    #[doc(hidden)]
    pub fn check_index(&self, index: &ValidatedIndex) -> Result<()> {
        let Some(last) = self.steps.len().checked_sub(1) else { return Ok(()) };
        for tensor in index.tensors() {
            let Some(tensor_index) = self.find(tensor.name) else { continue };
            if let Some(entry) = self.steps[last].entry_of(tensor_index, tensor.layout().as_ref()) {
                self.check_target(last, entry, tensor.target_digest())?;
            }
        }
        Ok(())
    }

    /// Compares the digest of an entry of the last step.
    fn check_target(&self, step: usize, entry: usize, found: &[u8; DIGEST_SIZE]) -> Result<()> {
        let tensor = self.steps[step].pair.index().tensor(entry);
        let expected = tensor.target_digest();
        let checked = Rule::TensorTargetDigest.check(expected == found, hex(expected), hex(found));
        checked.map_err(|e| self.at_step(step, e.in_tensor(tensor.name)))
    }
}

impl<B: Source> Checkpoint for Chain<'_, B> {
    fn tensors(&self) -> &[TensorInfo] {
        self.steps.last().map_or_else(|| self.base.tensors(), |step| &step.tensors)
    }

    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read_tensor(self.steps.len(), tensor_index, offset, out)
    }

    fn in_place(&self, tensor_index: usize, offset: u64, size: usize) -> Option<&[u8]> {
        if self.steps.is_empty() { self.base.in_place(tensor_index, offset, size) } else { None }
    }

    fn read_runs(&self, tensor_index: usize, runs: &StridedLayout, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read_rectangle(self.steps.len(), tensor_index, runs, offset, out)
    }

    fn held(&self, tensor_index: usize) -> Vec<Rectangle> {
        let Some(last) = self.steps.last() else { return self.base.held(tensor_index) };
        let Some(info) = last.tensors.get(tensor_index) else { return Vec::new() };
        let index = last.pair.index();
        if index.is_tiled(&info.name) {
            return vec![Rectangle::whole(&info.shape)];
        }
        last.entries(tensor_index).map(|entry| index.tensor(entry).rectangle()).collect()
    }

    fn holds(&self, tensor_index: usize, offset: u64, size: usize) -> bool {
        let Some(last) = self.steps.last() else { return self.base.holds(tensor_index, offset, size) };
        let bytes = offset..offset.saturating_add(size as u64);
        let Some(info) = last.tensors.get(tensor_index).filter(|info| bytes.end <= info.bytes()) else { return false };
        // Lanes that the base lacks are found when they are read.
        let held = |entry: usize| {
            let runs = last.runs(entry);
            runs.map_or(info.bytes(), |runs| runs.before(bytes.end) - runs.before(bytes.start))
        };
        last.entry_of(tensor_index, None).is_some() || last.parts_near(tensor_index, &bytes).map(held).sum::<u64>() == size as u64
    }

    fn paths(&self) -> Vec<PathBuf> {
        self.base.paths().into_iter().chain(self.steps.iter().flat_map(|step| step.pair.paths())).collect()
    }

    fn files(&self) -> Option<&dyn CheckpointFiles> {
        Some(self)
    }

    fn check_unchanged(&self) -> Result<()> {
        self.base.check_unchanged()
    }

    fn check_digests(&self, read: &mut dyn Iterator<Item = (Region, Option<&[u8; DIGEST_SIZE]>)>) -> Result<()> {
        let Some(last) = self.steps.len().checked_sub(1) else { return self.base.check_digests(read) };
        let of = &self.steps[last];
        let mut others = BTreeMap::<usize, Vec<StridedLayout>>::new();
        for (Region { tensor, runs }, digest) in read {
            match of.entry_of(tensor, runs.as_ref()).zip(digest) {
                Some((entry, digest)) => self.check_target(last, entry, digest)?,
                None => others.entry(tensor).or_default().push(runs.unwrap_or_else(|| self.all_of(tensor))),
            }
        }
        // These tensors were read in other parts than those that have digests. Entries that were read completely are read again.
        // Of other entries the pairs may lack payloads; their chunks were compared with their sums.
        for (tensor, read) in others {
            for entry in of.entries(tensor) {
                let runs = of.runs(entry).cloned();
                if !runs.clone().unwrap_or_else(|| self.all_of(tensor)).is_covered_by(&read) {
                    continue;
                }
                let hash = hash_piece(self, &Piece::of(tensor, runs), &|_| {})?;
                self.check_target(last, entry, &short(&hash))?;
            }
        }
        Ok(())
    }
}

/// The version after `level` steps, of which there is at least one.
struct Version<'c, 'a, B> {
    chain: &'c Chain<'a, B>,
    level: usize,
}

impl<B: Source> Checkpoint for Version<'_, '_, B> {
    fn tensors(&self) -> &[TensorInfo] {
        &self.chain.steps[self.level - 1].tensors
    }

    fn read(&self, tensor_index: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        self.chain.read_tensor(self.level, tensor_index, offset, out)
    }

    fn read_runs(&self, tensor_index: usize, runs: &StridedLayout, offset: u64, out: &mut [u8]) -> Result<()> {
        self.chain.read_rectangle(self.level, tensor_index, runs, offset, out)
    }
}
