//! The entries of a pair with parts: which rectangles of which tensors.

use super::options::EncodeOptions;
use super::plan::{Plan, is_prefix, plan_from};
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::cut::{Cut, Piece};
use crate::error::{Error, Escaped, Result};
use crate::rectangle::{Rectangle, Runs, part_fault, precedes};
use crate::writer::PartSpec;

/// Target and base as the encoder reads them: with one tensor per entry of the pair.
pub(super) struct Entries<'a> {
    pub target: Cut<'a>,
    pub base: Option<Cut<'a>>,
    /// For each entry, the number of its base in `base`.
    bases: Vec<Option<usize>>,
    parts: Vec<Option<PartSpec>>,
    /// Whether all tensors are covered.
    pub is_complete: bool,
}

impl<'a> Entries<'a> {
    /// The entries of a pair; `None` if no tensor is cut.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for rectangles that are no parts of their tensors or do not nest, and for rules that cannot be
    /// followed.
    pub fn new(base: Option<&'a dyn Checkpoint>, target: &'a dyn Checkpoint, options: &EncodeOptions) -> Result<Option<Self>> {
        if options.cuts.is_empty() && options.split.is_empty() {
            return Ok(None);
        }
        if let Some(name) = options.cuts.keys().find(|name| target.find(name).is_none()) {
            return Err(Error::InvalidArgument(format!("the target has no tensor {} to cut", Escaped(name))));
        }
        let mut entries =
            Self { target: Cut::new(target), base: base.map(Cut::new), bases: Vec::new(), parts: Vec::new(), is_complete: true };
        for (number, info) in target.tensors().iter().enumerate() {
            let base_name = options.renamed.get(&info.name).unwrap_or(&info.name);
            let found = base.and_then(|base| Some((base, base.find(base_name)?)));
            let resized = found.is_some_and(|(base, i)| {
                let base = &base.tensors()[i];
                base.dtype == info.dtype && is_prefix(&base.shape, &info.shape)
            });
            let parts = match options.cuts.get(&info.name) {
                Some(rectangles) => checked(info, rectangles)?,
                None if resized => Vec::new(),
                None => options.split.parts(info)?,
            };
            if parts.is_empty() {
                entries.push(number, info, found, None);
            }
            let elements = |extent: &[u64]| extent.iter().product::<u64>();
            let covered = parts.iter().map(|part| elements(&part.extent)).sum::<u64>();
            entries.is_complete &= parts.is_empty() || covered == elements(&info.shape);
            for part in parts {
                entries.push(number, info, found, Some(part));
            }
        }
        Ok(entries.parts.iter().any(Option::is_some).then_some(entries))
    }

    fn push(&mut self, number: usize, info: &TensorInfo, found: Option<(&dyn Checkpoint, usize)>, part: Option<Rectangle>) {
        let runs = |part: &Rectangle| Runs::new(info.dtype.bits(), &info.shape, &part.origin, &part.extent);
        let shape = part.as_ref().map_or(&info.shape, |part| &part.extent);
        let cut = TensorInfo { shape: shape.clone(), ..info.clone() };
        self.target.push(cut, Piece { tensor: number, runs: part.as_ref().map(runs) });
        let base = found.map(|(base, i)| (i, &base.tensors()[i]));
        // The base of a part is the same rectangle of a tensor of the same dtype and shape.
        let base = base.filter(|(_, base)| part.is_none() || (base.dtype, &base.shape) == (info.dtype, &info.shape));
        self.bases.push(base.zip(self.base.as_mut()).map(|((i, base), cut)| {
            let shape = part.as_ref().map_or(&base.shape, |part| &part.extent);
            cut.push(TensorInfo { shape: shape.clone(), ..base.clone() }, Piece { tensor: i, runs: part.as_ref().map(runs) });
            cut.tensors().len() - 1
        }));
        self.parts.push(part.map(|part| PartSpec { whole: info.shape.clone(), origin: part.origin }));
    }

    /// The plans of all entries.
    pub fn plans(&self, options: &EncodeOptions) -> Result<Vec<Plan>> {
        let base = self.base.as_ref().map(|base| base as &dyn Checkpoint);
        let plan = |(i, part): (usize, &Option<PartSpec>)| {
            let plan = plan_from(base, self.bases[i], &self.target, i, options)?;
            Ok(Plan { part: part.clone().map(Box::new), ..plan })
        };
        self.parts.iter().enumerate().map(plan).collect()
    }
}

/// The rectangles of a tensor, sorted. Empty if the only one is the whole tensor.
fn checked(info: &TensorInfo, rectangles: &[Rectangle]) -> Result<Vec<Rectangle>> {
    let name = Escaped(&info.name);
    let shown = |part: &Rectangle| format!("{:?} + {:?}", part.origin, part.extent);
    if rectangles == [Rectangle::whole(&info.shape)] {
        return Ok(Vec::new());
    }
    if rectangles.is_empty() {
        return Err(Error::InvalidArgument(format!("tensor {name} is cut into no rectangle")));
    }
    for part in rectangles {
        if let Some(fault) = part_fault(info.dtype.bits(), &info.shape, &part.origin, &part.extent) {
            let shape = &info.shape;
            return Err(Error::InvalidArgument(format!("{} is no part of tensor {name} of {shape:?}: {fault}", shown(part))));
        }
    }
    let mut sorted = rectangles.to_vec();
    sorted.sort_by(|a, b| a.origin.cmp(&b.origin));
    for pair in sorted.windows(2) {
        if !precedes((&pair[0].origin, &pair[0].extent), (&pair[1].origin, &pair[1].extent)) {
            return Err(Error::InvalidArgument(format!(
                "the cuts of tensor {name} do not nest: {} and {}",
                shown(&pair[0]),
                shown(&pair[1])
            )));
        }
    }
    Ok(sorted)
}
