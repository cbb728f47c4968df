//! The entries of a pair with parts or derived bases: which rectangles of which tensors.

use super::bases::{Derivation, FoundBase, UnusedBase, UnusedCause, find_base};
use super::options::EncodeOptions;
use super::plan::{Plan, lanes, plan, plan_from};
use crate::checkpoint::{Checkpoint, Region, TensorInfo};
use crate::cut::{ConvertedTensor, Cut, Piece};
use tpde_core::error::{Error, Escaped, PartNotHeld, Result};
use tpde_core::format::{BaseKind, FormatVersion};
use tpde_core::index::{Tensor, ValidatedIndex};
use tpde_core::layout::StridedLayout;
use tpde_core::rectangle::{Rectangle, part_fault, precedes};
use tpde_core::writer::{DerivedSpec, PartSpec};

/// What an encoding reads of base and target: all tensors, or the entries of a pair with parts.
pub struct Selection<'a> {
    base: Option<&'a dyn Checkpoint>,
    target: &'a dyn Checkpoint,
    entries: Option<Entries<'a>>,
}

impl<'a> Selection<'a> {
    /// Selects what the options and the slices of the target name.
    ///
    /// # Errors
    /// [`Error::PartNotHeld`] for a part of which target or base have only some elements. [`Error::InvalidArgument`] for rectangles
    /// that are no parts, for rules that cannot be followed, and for parts in format 1.1.
    pub fn new(base: Option<&'a dyn Checkpoint>, target: &'a dyn Checkpoint, options: &EncodeOptions) -> Result<Self> {
        let entries = Entries::new(base, target, options)?;
        if entries.as_ref().is_some_and(Entries::has_parts) && options.format == FormatVersion::V1_1 {
            return Err(Error::InvalidArgument("parts of tensors need format 1.2".into()));
        }
        Ok(Self { base, target, entries })
    }

    /// The base, with one tensor per entry that has one if the pair has parts.
    pub fn base(&self) -> Option<&dyn Checkpoint> {
        match &self.entries {
            Some(entries) => entries.base.as_ref().map(|base| base as &dyn Checkpoint),
            None => self.base,
        }
    }

    /// The target, with one tensor per entry.
    pub fn target(&self) -> &dyn Checkpoint {
        self.entries.as_ref().map_or(self.target, |entries| &entries.target)
    }

    /// The numbers, in the whole base, of the tensors that a tensor of [`base`](Self::base) is read from.
    pub fn base_tensors(&self, number: usize) -> Vec<usize> {
        self.base_regions(number).into_iter().map(|region| region.tensor).collect()
    }

    /// The regions of the whole base that a tensor of [`base`](Self::base) is read from.
    pub fn base_regions(&self, number: usize) -> Vec<Region> {
        let cut = self.entries.as_ref().and_then(|entries| entries.base.as_ref());
        let whole = || vec![Region { tensor: number, runs: None }];
        cut.map_or_else(whole, |base| base.regions_of(number).cloned().collect())
    }

    /// The number, in the whole target, of a tensor of [`target`](Self::target).
    pub fn target_tensor(&self, number: usize) -> usize {
        self.entries.as_ref().map_or(number, |entries| entries.target.tensor(number))
    }

    /// Whether all tensors are encoded completely. Without all of its tensors, a file cannot be rebuilt.
    pub fn is_complete(&self) -> bool {
        self.entries.as_ref().is_none_or(|entries| entries.is_complete)
    }

    /// The plans of all entries.
    pub fn plans(&self, options: &EncodeOptions) -> Result<Vec<Plan>> {
        match &self.entries {
            Some(entries) => entries.plans(options),
            None => (0..self.target.tensors().len()).map(|i| plan(self.base, self.target, i, options)).collect(),
        }
    }
}

/// Target and base as the encoder reads them: with one tensor per entry of the pair.
struct Entries<'a> {
    target: Cut<'a>,
    base: Option<Cut<'a>>,
    /// For each entry, the number of its base in `base`.
    bases: Vec<Option<usize>>,
    /// For each entry, how the lanes of its base are converted, if its base is derived.
    derived: Vec<Option<DerivedSpec>>,
    parts: Vec<Option<PartSpec>>,
    /// Whether all tensors are covered.
    is_complete: bool,
}

impl<'a> Entries<'a> {
    /// The entries of a pair; `None` if they are all tensors of the target, none is cut, and none has a derived base.
    ///
    /// # Errors
    /// [`Error::PartNotHeld`] for a part of which target or base have only some elements. [`Error::InvalidArgument`] for rectangles
    /// that are no parts of their tensors or do not nest, and for rules that cannot be followed.
    fn new(base: Option<&'a dyn Checkpoint>, target: &'a dyn Checkpoint, options: &EncodeOptions) -> Result<Option<Self>> {
        if let Some(name) = options.cuts.keys().find(|name| target.find(name).is_none()) {
            return Err(Error::InvalidArgument(format!("the target has no tensor {} to cut", Escaped(name))));
        }
        if Self::are_whole(base, target, options)? {
            return Ok(None);
        }
        let (bases, derived, parts) = (Vec::new(), Vec::new(), Vec::new());
        let mut entries = Self { target: Cut::new(target), base: base.map(Cut::new), bases, derived, parts, is_complete: true };
        for (number, info) in target.tensors().iter().enumerate() {
            lanes(info)?;
            let found = base.and_then(|base| Some((base, find_base(base, options.base_name(&info.name), info, options).found?)));
            let is_resized = |(base, found): (&dyn Checkpoint, FoundBase)| {
                found.derived.is_none() && base.tensors()[found.base].shape != info.shape
            };
            let parts = match options.cuts.get(&info.name) {
                Some(rectangles) => checked(info, rectangles)?,
                None if found.is_some_and(is_resized) => Vec::new(),
                None => options.split.parts(info)?,
            };
            let whole = Rectangle::whole(&info.shape);
            let parts = if parts.is_empty() { vec![whole.clone()] } else { parts };
            let mut covered = 0;
            for part in parts {
                if !holds_part(target, number, "target", info, &part)? {
                    continue;
                }
                covered += part.elements();
                entries.push(number, info, found, (part != whole).then_some(part))?;
            }
            entries.is_complete &= covered == whole.elements();
        }
        let is_derived = entries.derived.iter().any(Option::is_some);
        let is_cut = entries.has_parts() || is_derived || entries.parts.len() < target.tensors().len();
        Ok(is_cut.then_some(entries))
    }

    /// Whether the entries are all tensors of the target, because no option cuts them, both checkpoints hold all of their elements,
    /// and bases have the dtype of the target. Costs much less than to list the entries.
    fn are_whole(base: Option<&dyn Checkpoint>, target: &dyn Checkpoint, options: &EncodeOptions) -> Result<bool> {
        if !options.cuts.is_empty() || !options.split.is_empty() {
            return Ok(false);
        }
        for (i, info) in target.tensors().iter().enumerate() {
            lanes(info)?;
            let found = base.and_then(|base| Some((base, find_base(base, options.base_name(&info.name), info, options).found?)));
            let of_base = found.is_none_or(|(base, found)| found.derived.is_none() && base.is_whole(found.base));
            if !of_base || !target.is_whole(i) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether an entry is a part of a tensor.
    fn has_parts(&self) -> bool {
        self.parts.iter().any(Option::is_some)
    }

    fn push(
        &mut self,
        number: usize,
        info: &TensorInfo,
        found: Option<(&dyn Checkpoint, FoundBase)>,
        part: Option<Rectangle>,
    ) -> Result<()> {
        let runs = |part: &Rectangle| StridedLayout::of_rectangle(info.dtype.bits(), &info.shape, None, &part.origin, &part.extent);
        let shape = part.as_ref().map_or(&info.shape, |part| &part.extent);
        let cut = TensorInfo { shape: shape.clone(), ..info.clone() };
        self.target.push(cut, Piece::of(number, part.as_ref().map(runs)));
        let (mut entry_base, mut derived) = (None, None);
        if let (Some((base, found)), Some(cut)) = (found, self.base.as_mut()) {
            let base_info = &base.tensors()[found.base];
            let whole = || Rectangle::whole(if found.derived.is_some() { &info.shape } else { &base_info.shape });
            let needed = part.clone().unwrap_or_else(whole);
            let piece = match found.derived {
                // The base of a part is the same rectangle of a tensor of the same shape. That of a tensor may have other rows.
                None if part.is_none() || base_info.shape == info.shape => {
                    if !holds_part(base, found.base, "base", info, &needed)? {
                        return Err(not_held("base", info, &needed, Vec::new()));
                    }
                    Some(Piece::of(found.base, part.as_ref().map(runs)))
                }
                None => None,
                Some(derivation) => converted(base, found.base, derivation, info, &needed).ok().map(|converted| {
                    derived = Some(derivation.spec(base));
                    Piece::Converted(converted)
                }),
            };
            if let Some(piece) = piece {
                let dtype = info.dtype;
                cut.push(TensorInfo { shape: needed.extent, dtype, name: base_info.name.clone() }, piece);
                entry_base = Some(cut.tensors().len() - 1);
            }
        }
        self.derived.push(derived);
        self.bases.push(entry_base);
        self.parts.push(part.map(|part| PartSpec { whole: info.shape.clone(), origin: part.origin }));
        Ok(())
    }

    fn plans(&self, options: &EncodeOptions) -> Result<Vec<Plan>> {
        let base = self.base.as_ref().map(|base| base as &dyn Checkpoint);
        let plan = |(i, part): (usize, &Option<PartSpec>)| {
            let plan = plan_from(base, self.bases[i], &self.target, i, options)?;
            Ok(Plan { part: part.clone().map(Box::new), ..plan.derived_from(self.derived[i].clone()) })
        };
        self.parts.iter().enumerate().map(plan).collect()
    }
}

/// The base tensors of `base` that were found for tensors of `target` and are not used, or not as they were meant.
pub(super) fn unused_bases(
    base: &dyn Checkpoint,
    target: &dyn Checkpoint,
    options: &EncodeOptions,
    index: &ValidatedIndex,
) -> Vec<UnusedBase> {
    let unused = |info: &TensorInfo| {
        let candidates = find_base(base, options.base_name(&info.name), info, options);
        let without_base = || index.entries(&info.name).filter(|entry| entry.base_kind == BaseKind::None);
        let (Some(found), None) = (candidates.found, &candidates.unused) else { return candidates.unused };
        let refused = |derivation: Derivation| {
            without_base().find_map(|entry| converted(base, found.base, derivation, info, &entry.rectangle()).err())
        };
        let is_larger = || {
            let entries = index.entries(&info.name);
            let is_coded = |entry: Tensor<'_>| entry.chunks().any(|chunk| index.records()[chunk as usize].num_deltas.get() > 0);
            without_base().count() == entries.count() && without_base().any(is_coded)
        };
        let larger = || is_larger().then(|| (UnusedCause::Larger, "the pair is smaller without it".to_owned()));
        let (cause, reason) = found.derived.and_then(refused).or_else(larger)?;
        let (tensor, base) = (info.name.clone(), base.tensors()[found.base].name.clone());
        Some(UnusedBase { tensor, base, cause, reason })
    };
    target.tensors().iter().filter_map(unused).collect()
}

/// The derived base lanes of a part of a target tensor, or the reason why they cannot be converted.
fn converted(
    base: &dyn Checkpoint,
    base_index: usize,
    derivation: Derivation,
    info: &TensorInfo,
    part: &Rectangle,
) -> Result<ConvertedTensor, (UnusedCause, String)> {
    match derivation.converted(base_index, info, part) {
        None => Err((UnusedCause::Blocks, format!("expected parts of whole blocks, found {part}"))),
        Some(converted) if !converted.is_held(base, 0, bytes_of(info, part)) => {
            Err((UnusedCause::Held, format!("expected all elements of {part}, found only some")))
        }
        Some(converted) => Ok(converted),
    }
}

/// Size in bytes of a part of a tensor.
fn bytes_of(info: &TensorInfo, part: &Rectangle) -> usize {
    TensorInfo { shape: part.extent.clone(), ..info.clone() }.bytes() as usize
}

/// Whether a checkpoint has all elements of a part of a tensor, or none.
///
/// # Errors
/// [`Error::PartNotHeld`] if it has only some.
fn holds_part(
    checkpoint: &dyn Checkpoint,
    tensor_index: usize,
    what: &'static str,
    info: &TensorInfo,
    part: &Rectangle,
) -> Result<bool> {
    let held: Vec<_> = checkpoint.held(tensor_index).iter().filter_map(|held| held.intersection(part)).collect();
    match held.iter().fold(0, |n, held| held.elements().saturating_add(n)) {
        count if count == part.elements() => Ok(true),
        0 => Ok(false),
        _ => Err(not_held(what, info, part, held)),
    }
}

fn not_held(checkpoint: &'static str, info: &TensorInfo, part: &Rectangle, held: Vec<Rectangle>) -> Error {
    Error::PartNotHeld(Box::new(PartNotHeld::new(checkpoint, info.name.clone(), part.clone(), held)))
}

/// The rectangles of a tensor, sorted. Empty if the only one is the whole tensor.
fn checked(info: &TensorInfo, rectangles: &[Rectangle]) -> Result<Vec<Rectangle>> {
    let name = Escaped(&info.name);
    if rectangles == [Rectangle::whole(&info.shape)] {
        return Ok(Vec::new());
    }
    if rectangles.is_empty() {
        return Err(Error::InvalidArgument(format!("tensor {name} is cut into no rectangle")));
    }
    for part in rectangles {
        if let Some(fault) = part_fault(info.dtype.bits(), &info.shape, &part.origin, &part.extent) {
            let shape = &info.shape;
            return Err(Error::InvalidArgument(format!("{part} is no part of tensor {name} of {shape:?}: {fault}")));
        }
    }
    let mut sorted = rectangles.to_vec();
    sorted.sort_by(|a, b| a.origin.cmp(&b.origin));
    for pair in sorted.windows(2) {
        if !precedes((&pair[0].origin, &pair[0].extent), (&pair[1].origin, &pair[1].extent)) {
            let [a, b] = [&pair[0], &pair[1]];
            return Err(Error::InvalidArgument(format!("the cuts of tensor {name} do not nest: {a} and {b}")));
        }
    }
    Ok(sorted)
}
