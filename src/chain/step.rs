//! One step of a chain: a pair, and where each of its entries finds its base lanes in the version before.

use crate::apply::{Rebuilder, find_base, wrong_base};
use crate::checkpoint::{Checkpoint, Region, TensorInfo};
use crate::cut::Piece;
use crate::reader::Pair;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Mutex;
use tpde_core::error::{Escaped, Result, Rule};
use tpde_core::format::DIGEST_SIZE;
use tpde_core::index::{Part, Tensor};
use tpde_core::layout::StridedLayout;
use tpde_core::source::Source;

/// The source of an entry's base lanes.
pub(super) enum BaseLanes {
    /// The lanes are zeros.
    Zeros,
    /// An entry of the step before, which describes the same rectangle.
    Entry(usize),
    /// A piece of the version before.
    Piece(Piece),
}

/// A step of a chain.
pub(super) struct Step<'a, B> {
    pub pair: &'a Pair<B>,
    /// Name of the pair in errors.
    pub label: String,
    pub rebuilder: Rebuilder<'a, B>,
    /// The tensors of the version that this step gives, in ascending order of name.
    pub tensors: Vec<TensorInfo>,
    /// For each entry, the source of its base lanes.
    pub bases: Vec<BaseLanes>,
    /// For each tensor, its first entry. One more number ends the last tensor's entries.
    first_entries: Vec<usize>,
    /// For each entry, its bytes in the tensor; `None` for a whole tensor.
    runs: Vec<Option<StridedLayout>>,
    /// For each entry, the largest end of the bytes of this and of earlier parts of the tensor.
    ends: Vec<u64>,
    /// Digests of the base tensors of entries whose base sums differed, by entry. `None` if the base is not held whole.
    pub wrong_bases: Mutex<HashMap<usize, Option<[u8; DIGEST_SIZE]>>>,
}

impl<'a, B: Source> Step<'a, B> {
    /// The step after `before`, whose last step is `previous`; the first step has no previous one. Tensors that are not wanted are not
    /// compared with the step before, and have no base lanes.
    ///
    /// # Errors
    /// [`Error::Invalid`] with rule `base.tensor` if the version before lacks a base tensor, or elements of it;
    /// [`Error::WrongBase`] or [`Error::AlreadyApplied`] if the digests in the indexes show that.
    pub fn new(
        pair: &'a Pair<B>,
        number: usize,
        before: &dyn Checkpoint,
        previous: Option<&Self>,
        is_wanted: &dyn Fn(&str) -> bool,
    ) -> Result<Self> {
        let index = pair.index();
        let mut step = Self {
            pair,
            label: pair.label(number),
            rebuilder: Rebuilder::new(pair),
            tensors: Vec::new(),
            bases: Vec::with_capacity(index.tensor_count()),
            first_entries: Vec::new(),
            runs: index.tensors().map(|tensor| tensor.layout()).collect(),
            ends: Vec::with_capacity(index.tensor_count()),
            wrong_bases: Mutex::default(),
        };
        let mut wrong = None;
        let mut is_applied = true;
        for tensor in index.tensors() {
            let is_further = step.tensors.last().is_some_and(|last| last.name == tensor.name);
            if !is_further {
                let shape = tensor.whole_shape().to_vec();
                step.tensors.push(TensorInfo { name: tensor.name.to_owned(), dtype: tensor.dtype, shape });
                step.first_entries.push(tensor.place);
            }
            let end = step.runs[tensor.place].as_ref().map_or(0, StridedLayout::end);
            step.ends.push(step.ends.last().filter(|_| is_further).map_or(end, |before| end.max(*before)));
            if !is_wanted(tensor.name) {
                step.bases.push(BaseLanes::Zeros);
                continue;
            }
            let lanes = find_base_lanes(&tensor, before, previous)?;
            let entry = if let BaseLanes::Entry(entry) = lanes { Some(entry) } else { None };
            step.bases.push(lanes);
            let Some((entry, previous)) = entry.zip(previous) else { continue };
            let found = previous.pair.index().tensor(entry).target_digest();
            is_applied &= found == tensor.target_digest();
            if found != tensor.base_digest() {
                wrong.get_or_insert_with(|| wrong_base(&tensor, found, None));
            }
        }
        step.first_entries.push(index.tensor_count());
        match wrong {
            Some(wrong) if is_applied => Err(wrong.into_already_applied()),
            Some(wrong) => Err(wrong),
            None => Ok(step),
        }
    }

    /// The entries of a tensor.
    pub fn entries(&self, tensor_index: usize) -> Range<usize> {
        self.first_entries[tensor_index]..self.first_entries[tensor_index + 1]
    }

    /// The bytes of an entry in its tensor; `None` for a whole tensor.
    pub fn runs(&self, entry: usize) -> Option<&StridedLayout> {
        self.runs[entry].as_ref()
    }

    /// The entry that has exactly these bytes of a tensor; `None` means all bytes.
    pub fn entry_of(&self, tensor_index: usize, runs: Option<&StridedLayout>) -> Option<usize> {
        let entries = self.entries(tensor_index);
        let start = runs.map_or(0, StridedLayout::start);
        let starts = &self.runs[entries.clone()];
        let entry = entries.start + starts.partition_point(|part| part.as_ref().map_or(0, StridedLayout::start) < start);
        (entry < entries.end && self.runs(entry) == runs).then_some(entry)
    }

    /// The parts of a tensor that may have bytes of `bytes`.
    pub fn parts_near(&self, tensor_index: usize, bytes: &Range<u64>) -> Range<usize> {
        let entries = self.entries(tensor_index);
        let first = self.ends[entries.clone()].partition_point(|end| *end <= bytes.start);
        let starts = &self.runs[entries.clone()];
        let end = starts.partition_point(|part| part.as_ref().map_or(0, StridedLayout::start) < bytes.end);
        entries.start + first.min(end)..entries.start + end
    }
}

fn find_base_lanes<B: Source>(tensor: &Tensor<'_>, before: &dyn Checkpoint, previous: Option<&Step<'_, B>>) -> Result<BaseLanes> {
    let Some(piece) = find_base(tensor, before)? else { return Ok(BaseLanes::Zeros) };
    let Some(previous) = previous else { return Ok(BaseLanes::Piece(piece)) };
    if let Piece::Of(Region { tensor: tensor_index, runs }) = &piece
        && let Some(entry) = previous.entry_of(*tensor_index, runs.as_ref())
    {
        return Ok(BaseLanes::Entry(entry));
    }
    for region in piece.regions() {
        let name = &before.tensors()[region.tensor].name;
        if previous.pair.index().is_tiled(name) {
            continue;
        }
        let (expected, found) = match &piece {
            Piece::Of(_) => {
                (shown(tensor), format!("{} other parts, which do not cover it", previous.entries(region.tensor).len()))
            }
            Piece::Converted(_) => ("all elements".to_owned(), "parts that do not cover it".to_owned()),
        };
        return Err(Rule::BaseTensor
            .broken(format_args!("{expected} of base tensor {}", Escaped(name)), found)
            .in_tensor(tensor.name));
    }
    Ok(BaseLanes::Piece(piece))
}

/// The elements of an entry.
fn shown(tensor: &Tensor<'_>) -> String {
    let part = |part: Part<'_>| format!("part {:?} + {:?}", part.origin, tensor.shape);
    tensor.part.map_or_else(|| "all elements".to_owned(), part)
}
