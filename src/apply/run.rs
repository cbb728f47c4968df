//! One application of a pair: rebuilds selected tensors from a base (spec section 13, steps 8 to 12).

use super::accelerator::{Accelerator, TensorHashes, Work};
use super::chunk::{Chunks, DecodeWorker, Hashes, decode_from, decode_to};
use super::find::{BaseTensors, find_base, wrong_base};
use super::payloads::Compared;
use crate::base::PaddedBase;
use crate::batches::{Pool, hash_tensor, in_batches};
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::cut::{Cut, Piece};
use crate::reader::{Pair, PayloadDigests, VerifyReport};
use crate::watch::{NoProgress, Progress};
use blake3::Hash;
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use tpde_core::digest::{self, short};
use tpde_core::error::{Error, Escaped, Result, Rule, hex};
use tpde_core::format::BaseKind;
use tpde_core::index::{Tensor, ValidatedIndex};
use tpde_core::source::Source;

/// Receives rebuilt bytes. Calls come from any thread; their byte ranges never overlap.
pub trait Sink: Sync {
    /// Stores `bytes` at byte `offset` of the tensor at position `tensor_index` of the pair's index.
    ///
    /// # Errors
    /// Any error that prevents the sink from storing the bytes. It ends the application.
    fn write(&self, tensor_index: usize, offset: u64, bytes: &[u8]) -> Result<()>;
}

/// The result of an application.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ApplyReport {
    /// Number of rebuilt tensors.
    pub tensors: u64,
    /// Size of the rebuilt tensors in bytes.
    pub bytes: u64,
    /// Whether base and target were compared with the digests of the pair.
    pub digests_checked: bool,
    /// Whether payloads were compared with the digests that the pair digest covers.
    pub payload_digests: PayloadDigests,
    /// Files of the output's folder that programs would have read instead of the output. They were removed when it was published.
    pub removed: Vec<String>,
}

/// The parameters and the state of one application.
pub(crate) struct Run<'a, B> {
    pub pair: &'a Pair<B>,
    /// Source of the payloads that the CPU decodes: the pair, or the payloads kept from an earlier pass.
    pub chunks: &'a dyn Chunks,
    /// The base of the caller. Base lanes are read from [`Run::base`].
    pub whole_base: &'a dyn Checkpoint,
    /// For a pair with parts or derived bases, the base with one tensor per entry of the pair.
    pub cut: Option<Cut<'a>>,
    /// Indexes of the selected tensors in the pair's index, ascending.
    pub selected: Vec<usize>,
    /// Whether the base has exactly the selected tensors, in the same order. Base tensors are then found by position, not by
    /// name.
    pub in_order: bool,
    pub digests: bool,
    pub progress: Progress<'a>,
    pub accelerator: Option<&'a dyn Accelerator>,
    /// Cached hashes of complete base tensors, by position in the base. Several target tensors may share a base tensor.
    whole_bases: Mutex<BTreeMap<usize, Hash>>,
}

/// One chunk to decode.
struct Job<'a> {
    /// Position among the selected tensors.
    at: usize,
    tensor: Tensor<'a>,
    base: Option<usize>,
    chunk: u32,
    /// Destination of the chunk's lanes. If `None`, they are decoded into a buffer of the thread.
    out: Option<&'a mut [u8]>,
}

impl Job<'_> {
    fn byte_range(&self) -> Range<u64> {
        let range = self.tensor.chunk_range(self.chunk);
        let width = self.tensor.lane_bytes() as u64;
        range.start * width..range.end * width
    }
}

impl<'a, B: Source> Run<'a, B> {
    /// A run over all tensors, with all checks, on the CPU.
    pub fn new(pair: &'a Pair<B>, base: &'a dyn Checkpoint, progress: Progress<'a>) -> Self {
        let selected = (0..pair.index().tensor_count()).collect();
        Self {
            pair,
            chunks: pair,
            whole_base: base,
            cut: None,
            selected,
            in_order: false,
            digests: true,
            progress,
            accelerator: None,
            whole_bases: Mutex::default(),
        }
    }

    /// [`Run::new`] for any pair: if it has parts or derived bases, `find` finds the base tensors, which are then cut or formed.
    pub fn with_parts(
        pair: &'a Pair<B>,
        base: &'a dyn Checkpoint,
        progress: Progress<'a>,
        find: impl Fn(&dyn Checkpoint, &Tensor<'_>) -> Option<usize>,
    ) -> Self {
        let is_cut = pair.index().has_parts() || pair.index().has_derived();
        let cut = is_cut.then(|| cut_base(pair.index(), base, find));
        Self { cut, ..Self::new(pair, base, progress) }
    }

    /// The checkpoint that has the base tensors. [`Run::bases`] gives positions in it.
    pub fn base(&self) -> &dyn Checkpoint {
        self.cut.as_ref().map_or(self.whole_base, |cut| cut)
    }

    /// The number of a tensor's base tensor in [`Run::base`], after checking dtype and shape.
    pub fn find_base(&self, tensor: &Tensor<'_>) -> Result<Option<usize>> {
        let found = find_base(tensor, self.whole_base)?;
        Ok(found.map(|found| if self.cut.is_some() { tensor.place } else { found.base }))
    }

    /// The selected tensors.
    pub fn selected(&self) -> impl Iterator<Item = Tensor<'a>> + '_ {
        self.selected.iter().map(|&i| self.pair.index().tensor(i))
    }

    /// Rebuilds into buffers: one per selected tensor, of the tensor's size.
    pub fn to_buffers(&self, outputs: &mut [&mut [u8]]) -> Result<ApplyReport> {
        let lengths: Vec<_> = self.selected().map(|tensor| (tensor.name, tensor.bytes())).collect();
        if outputs.len() != lengths.len() {
            return Err(Error::InvalidArgument(format!(
                "expected {} buffers, one per tensor, found {}",
                lengths.len(),
                outputs.len()
            )));
        }
        for (output, (name, bytes)) in outputs.iter().zip(lengths) {
            if output.len() as u64 != bytes {
                return Err(Error::InvalidArgument(format!(
                    "the buffer of tensor {} has {} bytes: expected {bytes}",
                    Escaped(name),
                    output.len()
                )));
            }
        }
        let bases = self.bases()?;
        if let Some(accelerator) = self.accelerator {
            return self.run_on(accelerator, &bases, &mut |at, bytes| {
                outputs[at].copy_from_slice(bytes);
                Ok(())
            });
        }
        let jobs = outputs.iter_mut().enumerate().flat_map(|(at, output)| {
            let tensor = self.pair.index().tensor(self.selected[at]);
            let base = bases[at];
            let chunk_bytes = tensor.chunk_lanes as usize * tensor.lane_bytes();
            tensor.chunks().zip(output.chunks_mut(chunk_bytes)).map(move |(chunk, out)| Job {
                at,
                tensor,
                base,
                chunk,
                out: Some(out),
            })
        });
        self.run_jobs(&bases, jobs, None)
    }

    /// Rebuilds into a sink, chunk by chunk.
    pub fn to_sink(&self, sink: &dyn Sink) -> Result<ApplyReport> {
        let bases = self.bases()?;
        if let Some(accelerator) = self.accelerator {
            return self.run_on(accelerator, &bases, &mut |at, bytes| {
                let pieces = bytes.par_chunks(1 << 20).enumerate();
                pieces.try_for_each(|(i, piece)| sink.write(self.selected[at], (i as u64) << 20, piece))
            });
        }
        self.run_jobs(&bases, self.jobs(&bases), Some(sink))
    }

    /// Rebuilds and discards the result.
    pub fn verify(&self) -> Result<VerifyReport> {
        let bases = self.bases()?;
        let report = match self.accelerator {
            Some(accelerator) => self.run_on(accelerator, &bases, &mut |_, _| Ok(()))?,
            None => self.run_jobs(&bases, self.jobs(&bases), None)?,
        };
        Ok(VerifyReport {
            tensors: report.tensors,
            chunks: self.selected().map(|t| u64::from(t.chunk_count)).sum(),
            stored_bytes: self.pair.index().size() + self.pair.index().header().blob_size,
            base_checked: self.digests,
            target_checked: self.digests,
            payload_digests: report.payload_digests,
        })
    }

    /// For each selected tensor, the position of its base tensor in [`Run::base`].
    pub fn bases(&self) -> Result<Vec<Option<usize>>> {
        if self.in_order {
            return Ok((0..self.selected.len()).map(Some).collect());
        }
        self.selected().map(|tensor| self.find_base(&tensor)).collect()
    }

    /// One job per chunk, without outputs. The chunks of the parts of a tensor are in the order of their first bytes in the tensor,
    /// so that neighbouring columns are rebuilt, and written, together.
    fn jobs<'j>(&'j self, bases: &'j [Option<usize>]) -> impl Iterator<Item = Job<'j>> {
        let index = self.pair.index();
        let tensors =
            self.selected.chunk_by(|&a, &b| index.tensor(a).part.is_some() && index.tensor(a).name == index.tensor(b).name);
        let mut next = 0;
        tensors.flat_map(move |parts| {
            let first = next;
            next += parts.len();
            let job = |at: usize, chunk| Job { at, tensor: index.tensor(self.selected[at]), base: bases[at], chunk, out: None };
            let chunks = |at: usize| index.tensor(self.selected[at]).chunks().map(move |chunk| (at, chunk));
            let mut order: Vec<(usize, u32)> = (first..next).flat_map(chunks).collect();
            if parts.len() > 1 {
                let runs: Vec<_> = parts.iter().map(|&i| index.tensor(i).runs()).collect();
                let position = |at: usize, chunk| runs[at - first].as_ref().map(|runs| runs.at(job(at, chunk).byte_range().start));
                order.sort_by_cached_key(|&(at, chunk)| position(at, chunk));
            }
            order.into_iter().map(move |(at, chunk)| job(at, chunk))
        })
    }

    fn run_jobs<'j>(
        &self,
        bases: &[Option<usize>],
        jobs: impl Iterator<Item = Job<'j>>,
        sink: Option<&dyn Sink>,
    ) -> Result<ApplyReport> {
        let workers = Pool::new(DecodeWorker::new);
        let chunks = self.compared(self.selected().flat_map(|tensor| tensor.chunks()));
        let mut check = DigestCheck::new(self, bases);
        let outcome = in_batches(
            jobs,
            |job| job.byte_range().end - job.byte_range().start,
            |job| {
                let range = job.byte_range();
                let size = (range.end - range.start) as usize;
                let Job { tensor, chunk, base, .. } = *job;
                let base = PaddedBase::new(Some(self.base()), base);
                let hashes = workers.with(|worker| {
                    if let Some(out) = &mut job.out {
                        return decode_to(base, &chunks, &tensor, chunk, worker, out, self.digests);
                    }
                    worker.with_lanes(size, |worker, lanes| {
                        let hashes = decode_from(base, &chunks, &tensor, chunk, worker, lanes, self.digests)?;
                        if let Some(sink) = sink {
                            sink.write(tensor.place, range.start, lanes)?;
                        }
                        Ok(hashes)
                    })
                })?;
                self.progress.done(size as u64)?;
                Ok(hashes)
            },
            |job, hashes| check.add(job.at, hashes),
        );
        outcome.and_then(|()| check.finish()).map_err(|e| chunks.explain(self.explain(e, bases)))?;
        Ok(self.report(chunks.finish()?))
    }

    /// The payloads of the chunks in `read`. Each is compared with its digest.
    pub(super) fn compared(&self, read: impl Iterator<Item = u32>) -> Compared<'a> {
        Compared::new(self.chunks, read)
    }

    fn report(&self, payload_digests: PayloadDigests) -> ApplyReport {
        ApplyReport {
            tensors: self.selected.len() as u64,
            bytes: self.selected().map(|tensor| tensor.bytes()).sum(),
            digests_checked: self.digests,
            payload_digests,
            removed: Vec::new(),
        }
    }

    /// [`Run::run_jobs`] on a device. Each tensor is hashed, by the device or by the CPU, and then passed to `store`.
    fn run_on(
        &self,
        accelerator: &dyn Accelerator,
        bases: &[Option<usize>],
        store: &mut dyn FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<ApplyReport> {
        let tensors: Vec<_> = self.selected.iter().copied().zip(bases.iter().copied()).collect();
        let of_device = Mutex::new(None);
        let hashed = |hashes: TensorHashes| *of_device.lock().unwrap_or_else(PoisonError::into_inner) = Some(hashes);
        let hashed: Option<&(dyn Fn(TensorHashes) + Sync)> = if self.digests { Some(&hashed) } else { None };
        let work = Work { index: self.pair.index(), blob: self.pair.blob(), base: self.base(), tensors: &tensors, hashed };
        let mut check = DigestCheck::new(self, bases);
        let outcome = accelerator.rebuild(&work, &mut |at, bytes| {
            let of_device = of_device.lock().unwrap_or_else(PoisonError::into_inner).take();
            match of_device {
                _ if !self.digests => {}
                Some(TensorHashes { base, target }) => check.add_whole(at, Hashes { base, target })?,
                None => {
                    for hashes in self.hash_chunks(at, bases[at], bytes)? {
                        check.add(at, Some(hashes))?;
                    }
                }
            }
            store(at, bytes)?;
            self.progress.done(bytes.len() as u64)
        });
        let compared = outcome.and_then(|compared| check.finish().map(|()| compared)).map_err(|e| self.explain(e, bases))?;
        Ok(self.report(compared))
    }

    /// The hashes of a rebuilt tensor's chunks, and of the base chunks.
    fn hash_chunks(&self, at: usize, base: Option<usize>, target: &[u8]) -> Result<Vec<Hashes>> {
        let tensor = self.pair.index().tensor(self.selected[at]);
        let chunk_bytes = tensor.chunk_lanes as usize * tensor.lane_bytes();
        let base = base.filter(|_| tensor.base_kind.has_all_lanes());
        let hash = |scratch: &mut Vec<u8>, (i, lanes): (usize, &[u8])| {
            let offset = (i * chunk_bytes) as u64;
            let hash_base = |base_index| -> Result<[u8; 32]> {
                let bytes = self.base().bytes(base_index, offset, lanes.len(), scratch)?;
                Ok(digest::of_piece(bytes, offset, tensor.base_bytes()))
            };
            let base = base.map(hash_base).transpose()?;
            Ok(Hashes { base, target: digest::of_piece(lanes, offset, tensor.bytes()) })
        };
        target.par_chunks(chunk_bytes).enumerate().map_init(Vec::new, hash).collect()
    }

    /// [`Run::explain`] for a base that has exactly the selected tensors, in the same order.
    pub(super) fn explain_in_order(&self, error: Error) -> Error {
        let bases: Vec<_> = (0..self.selected.len()).map(Some).collect();
        self.explain(error, &bases)
    }

    /// The hash of a complete base tensor, computed once and cached. The watcher can stop the work, but no progress is reported.
    fn hash_base(&self, base_index: usize) -> Result<Hash> {
        let known = || self.whole_bases.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hash) = known().get(&base_index) {
            return Ok(*hash);
        }
        let hash = hash_tensor(self.base(), base_index, &NoProgress(self.progress))?;
        known().insert(base_index, hash);
        Ok(hash)
    }

    /// Finds the cause of an error about a chunk's base sum: hashes the base tensors, and returns [`Error::WrongBase`] or
    /// [`Error::AlreadyApplied`] if their digests show that. Other errors are returned unchanged.
    pub fn explain(&self, error: Error, bases: &[Option<usize>]) -> Error {
        // An error about an earlier step of a chain is an `Error::Step`, and is not about this pair.
        let failed = match &error {
            Error::Invalid(invalid) if invalid.rule == Rule::ChunkBaseSum => invalid.at.chunk,
            _ => return error,
        };
        let mut wrong = None;
        let mut all_are_targets = true;
        for (tensor, base) in self.selected().zip(bases) {
            // A tensor that needs no base has a position in `bases` only in an application in place. If the pair was already
            // applied, its memory holds the target.
            let Some(base_index) = *base else { continue };
            let found = match self.hash_base(base_index) {
                Ok(hash) => short(&hash),
                // Report the failed read: a base that cannot be read may still be the right one.
                Err(unread) => return unread,
            };
            all_are_targets &= found == tensor.digests.target_digest;
            if tensor.base_kind != BaseKind::None && found != tensor.digests.base_digest {
                // The tensor of the chunk that failed, or else the first one whose base differs.
                let chunk = failed.filter(|chunk| tensor.chunks().contains(chunk));
                if wrong.is_none() || chunk.is_some() {
                    wrong = Some(wrong_base(&tensor, &found, chunk));
                }
            }
        }
        match wrong {
            Some(wrong) if all_are_targets => wrong.into_already_applied(),
            Some(wrong) => wrong,
            // The base matches all digests, so the sum in the index is wrong.
            None => error,
        }
    }
}

/// The base with one tensor per entry of the index. Entries whose base `find` does not find have an empty tensor.
fn cut_base<'a>(
    index: &ValidatedIndex,
    base: &'a dyn Checkpoint,
    find: impl Fn(&dyn Checkpoint, &Tensor<'_>) -> Option<usize>,
) -> Cut<'a> {
    let mut cut = Cut::new(base);
    for tensor in index.tensors() {
        let (name, dtype) = (tensor.base_name.to_owned(), tensor.dtype);
        if tensor.base_kind.is_derived() {
            let scales = tensor.derived.and_then(|derived| base.find(derived.scales?.1));
            let found = find(base, &tensor).map(|base| BaseTensors { base, scales });
            let formed = found.filter(|found| found.fit(&tensor, base)).and_then(|found| found.formed(&tensor));
            if let Some(formed) = formed {
                cut.push(TensorInfo { name, dtype, shape: tensor.shape.to_vec() }, Piece::Formed(formed));
                continue;
            }
        }
        let fits = |&i: &usize| base.tensors()[i].dtype == dtype && base.tensors()[i].shape == tensor.whole_shape();
        match find(base, &tensor).filter(|i| tensor.part.is_none() && tensor.derived.is_none() || fits(i)) {
            Some(i) => {
                let whole = &base.tensors()[i];
                let shape = if tensor.part.is_some() { tensor.shape } else { &whole.shape[..] };
                let info = TensorInfo { shape: shape.to_vec(), ..whole.clone() };
                cut.push(info, Piece::of(i, tensor.runs()));
            }
            None => cut.push(TensorInfo { name, dtype, shape: vec![0] }, Piece::of(usize::MAX, None)),
        }
    }
    cut
}

/// Combines the hashes of chunks into hashes of tensors, and compares them with the digests in the index.
pub(super) struct DigestCheck<'a, 'b, B> {
    run: &'b Run<'a, B>,
    bases: &'b [Option<usize>],
    /// Number of tensors at the front of the selection that are complete.
    ended: usize,
    /// Hashes of the chunks of the tensors after those, by position among the selected tensors. The chunks of each tensor come in
    /// order; those of the parts of one tensor may be mixed.
    chunks: BTreeMap<usize, Vec<Hashes>>,
    /// Whether the hashes are those of tensors instead of chunks.
    of_tensors: bool,
    base_root: digest::Root,
    target_root: digest::Root,
}

impl<'a, 'b, B: Source> DigestCheck<'a, 'b, B> {
    pub fn new(run: &'b Run<'a, B>, bases: &'b [Option<usize>]) -> Self {
        let (base_root, target_root) = (digest::Root::default(), digest::Root::default());
        Self { run, bases, ended: 0, chunks: BTreeMap::new(), of_tensors: false, base_root, target_root }
    }

    /// Adds the hashes of the next chunk of selected tensor `at`.
    pub fn add(&mut self, at: usize, hashes: Option<Hashes>) -> Result<()> {
        let Some(hashes) = hashes else { return Ok(()) };
        self.chunks.entry(at).or_default().push(hashes);
        self.end_complete()
    }

    /// Adds the hashes of selected tensor `at`. Then no hashes of chunks may be added.
    pub fn add_whole(&mut self, at: usize, hashes: Hashes) -> Result<()> {
        self.of_tensors = true;
        self.add(at, Some(hashes))
    }

    /// Compares the digests of the next tensors, as long as all of their chunks have been added.
    fn end_complete(&mut self) -> Result<()> {
        while let Some(&tensor_index) = self.run.selected.get(self.ended) {
            let added = self.chunks.get(&self.ended).map_or(0, Vec::len);
            let expected = if self.of_tensors { 1 } else { self.run.pair.index().tensor(tensor_index).chunk_count as usize };
            if added < expected {
                break;
            }
            self.end_tensor()?;
        }
        Ok(())
    }

    fn end_tensor(&mut self) -> Result<()> {
        let tensor = self.run.pair.index().tensor(self.run.selected[self.ended]);
        let chunks = self.chunks.remove(&self.ended).unwrap_or_default();
        let base_hash = match tensor.base_kind {
            BaseKind::None => None,
            BaseKind::Same | BaseKind::Cast | BaseKind::Dequantised => {
                Some(digest::combine(&chunks.iter().filter_map(|hashes| hashes.base).collect::<Vec<_>>()))
            }
            BaseKind::Prefix => self.bases[self.ended].map(|base_index| self.run.hash_base(base_index)).transpose()?,
        };
        if let Some(found) = base_hash.as_ref().map(short).filter(|found| *found != tensor.digests.base_digest) {
            // The chunk sums matched. Either the base is forged, or it is a `prefix` base that differs in rows the target lacks.
            return Err(wrong_base(&tensor, &found, None));
        }
        let target_hash = digest::combine(&chunks.iter().map(|hashes| hashes.target).collect::<Vec<_>>());
        let (expected, found) = (&tensor.digests.target_digest, short(&target_hash));
        Rule::TensorTargetDigest.check(*expected == found, hex(expected), hex(&found)).map_err(|e| e.in_tensor(tensor.name))?;
        self.base_root.add_hash(base_hash.as_ref());
        self.target_root.add_hash(Some(&target_hash));
        self.ended += 1;
        Ok(())
    }

    pub fn finish(mut self) -> Result<()> {
        if !self.run.digests {
            return Ok(());
        }
        let count = self.run.selected.len();
        while self.ended < count {
            self.end_tensor()?;
        }
        let index = self.run.pair.index();
        // Roots over stored digests were compared when the index was parsed.
        let is_all = self.run.selected.iter().copied().eq(0..index.tensor_count());
        if is_all && !index.has_payload_root() {
            let root = self.base_root.finish();
            Rule::DigestBaseRoot.check(root == index.base_root(), hex(index.base_root()), hex(&root))?;
            let root = self.target_root.finish();
            Rule::DigestTargetRoot.check(root == index.target_root(), hex(index.target_root()), hex(&root))?;
        }
        Ok(())
    }
}
