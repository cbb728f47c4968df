//! Applies the pairs of a chain to tensors in memory, in place, in one commit.

use super::view::Chain;
use crate::apply::{Apply, ApplyReport, InPlace, InPlaceRun, Item, KEPT_PAYLOADS, Plan, TensorMut, base_of, whole_tensors};
use crate::reader::Pair;
use crate::slice::{FusedSlices, Memories};
use crate::watch::{NoProgress, Progress, Watch, Watcher, progress_methods};
use std::collections::BTreeSet;
use std::path::Path;
use tpde_core::error::{Error, Escaped, Result, Rule};
use tpde_core::format::BaseKind;
use tpde_core::index::Tensor;
use tpde_core::source::Source;

/// Applies the pairs of a chain to tensors or slices in memory. They take the last target at once: nothing is written before all
/// checks of all pairs have passed.
///
/// Each tensor has one name in all pairs, and in each pair its base has the dtype and shape of its target. Other tensors of the pairs
/// are skipped.
///
/// The first pass rebuilds the last target through all pairs, as [`Chain`] does, and writes nothing. It compares CRCs and sums of all
/// pairs, the digests of their payloads from format 1.2 on, and the digests of the last targets. The second pass changes the memory,
/// pair by pair, with the checks of CRCs, sums and payloads. It compares the digests of the last targets only if a blob is a file,
/// which may change between the passes.
///
/// Cost: two decodings per pair, and one more of the earlier pairs for a tensor that a later pair describes without a base. Memory:
/// that of a [`Chain`]. A single pair is an application with [`InPlace::AllChecked`](crate::InPlace::AllChecked).
///
/// ```
/// # use tpde::{ApplyChain, Dtype, Encode, MemoryCheckpoint, TensorInfo, TensorMut};
/// # fn main() -> tpde::Result<()> {
/// let version = |bytes| MemoryCheckpoint::new([(TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![3] }, bytes)]);
/// let (base, second, third) = (version(&[1, 2, 3])?, version(&[1, 2, 4])?, version(&[1, 5, 4])?);
/// let pairs =
///     [Encode::new(&second).base(&base).to_memory()?.0, Encode::new(&third).base(&second).to_memory()?.0];
///
/// let mut weights = [1, 2, 3];
/// ApplyChain::new(&pairs).in_place([TensorMut { name: "w", bytes: &mut weights }])?;
/// assert_eq!(weights, [1, 5, 4]);
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is applied before `in_place` is called"]
pub struct ApplyChain<'a, B> {
    pairs: Vec<&'a Pair<B>>,
    digests: bool,
    watcher: Watcher<'a>,
}

impl<'a, B: Source> ApplyChain<'a, B> {
    /// Takes the pairs in the order in which they are applied.
    pub fn new(pairs: impl IntoIterator<Item = &'a Pair<B>>) -> Self {
        Self { pairs: pairs.into_iter().collect(), digests: true, watcher: Watcher::Nobody }
    }

    /// Sets whether the digests of the last targets are compared. The default is `true`.
    pub fn digests(mut self, on: bool) -> Self {
        self.digests = on;
        self
    }

    progress_methods!("the size of the tensors or slices. Nothing stops the second pass");

    /// Changes whole tensors from the first base to the last target.
    ///
    /// # Errors
    /// Nothing was written:
    /// - [`Error::Step`] with the number of the pair whose check failed; [`Error::AlreadyApplied`] if the tensors are the last target;
    /// - [`Error::InvalidArgument`] and the other errors of [`Apply::in_place`] if tensors and pairs do not fit.
    ///
    /// [`Error::Poisoned`] if the second pass fails: the source of the payloads failed, or payloads have changed. The error lists all
    /// chunks of the last pair. Each of these chunks may have been written.
    pub fn in_place<'t>(&self, tensors: impl IntoIterator<Item = TensorMut<'t>>) -> Result<ApplyReport> {
        self.run(whole_tensors(self.last()?.index(), tensors.into_iter().collect())?)
    }

    /// Changes slices of tensors, as [`ApplyChain::in_place`]. In each pair, slices must hold every chunk that they overlap completely.
    ///
    /// # Errors
    /// As for [`ApplyChain::in_place`]; [`Error::NotHeld`] and [`Error::Incomplete`] as for [`Apply::in_place_slices`].
    pub fn in_place_slices<'t>(&self, slices: impl IntoIterator<Item = impl Into<FusedSlices<'t>>>) -> Result<ApplyReport> {
        self.run(Memories::new(slices)?)
    }

    fn last(&self) -> Result<&'a Pair<B>> {
        self.pairs.last().copied().ok_or_else(|| Error::InvalidArgument("no pair is given".into()))
    }

    fn run(&self, mut memories: Memories<'_>) -> Result<ApplyReport> {
        let last = self.last()?;
        if self.pairs.len() == 1 {
            return self.step(last, InPlace::AllChecked, self.digests, &self.watcher).slices(memories);
        }
        let plans = self.pairs.iter().map(|pair| Plan::in_place(pair.index(), &memories)).collect::<Result<Vec<_>>>()?;
        plans.iter().flat_map(|plan| &plan.items).try_for_each(|item| check_name(&item.tensor))?;
        let mut report = self.check(&plans, &memories).map_err(|error| match error {
            Error::Step { number: 1, .. } if matches!(error.rule(), Some(Rule::ChunkBaseSum | Rule::TensorBaseDigest)) => {
                let step = self.step(last, InPlace::AllChecked, true, &self.watcher);
                plans.last().and_then(|plan| step.already_applied(plan, &memories)).unwrap_or(error)
            }
            error => error,
        })?;
        for (number, (pair, plan)) in (1..).zip(self.pairs.iter().zip(&plans)) {
            let digests = self.digests && number == plans.len() && self.pairs.iter().any(|pair| pair.blob().in_memory().is_none());
            let step = self.step(pair, InPlace::ChunkByChunk, digests, &|_| {});
            let compared = step.rewrite(plan, &mut memories).map_err(|error| self.poisoned(number, &plans, error))?;
            report.payload_digests = if number == 1 { compared } else { report.payload_digests.and(compared) };
        }
        Ok(report)
    }

    fn step<'s>(&self, pair: &'s Pair<B>, mode: InPlace, digests: bool, progress: Progress<'s>) -> InPlaceRun<'s, B> {
        InPlaceRun { pair, mode, digests, max_kept_bytes: KEPT_PAYLOADS, progress }
    }

    /// The first pass: rebuilds the last target and writes nothing.
    fn check(&self, plans: &[Plan<'_>], memories: &Memories<'_>) -> Result<ApplyReport> {
        for (number, pair) in (1..).zip(&self.pairs) {
            pair.authenticate(&NoProgress(&self.watcher)).map_err(|error| self.at_step(number, error))?;
        }
        let base = base_of(self.pairs[0].index(), memories)?;
        let names: BTreeSet<_> = memories.names().collect();
        let check = |number: usize, memories: &Memories<'_>, watch: &dyn Watch| {
            let before = Chain::of(&base, self.pairs[..number].iter().copied(), |name| names.contains(name))?.without_last();
            let apply = Apply::new(self.pairs[number - 1]).base(&before).digests(self.digests).watch(watch);
            apply.slices(memories, None).map_err(|error| self.at_step(number, error))
        };
        let report = check(plans.len(), memories, &self.watcher)?;
        // Tensors that a later pair describes without a base, so that their earlier versions have not been read.
        let mut replaced = BTreeSet::new();
        for (i, plan) in plans.iter().enumerate().rev() {
            let unread = memories.only(&replaced);
            if !unread.slices.is_empty() {
                check(i + 1, &unread, &NoProgress(&self.watcher))?;
            }
            let has_no_base = |item: &&Item<'_>| item.tensor.base_kind == BaseKind::None && !item.chunks.is_empty();
            replaced = plan.items.iter().filter(has_no_base).map(|item| item.tensor.name).collect();
        }
        Ok(report)
    }

    /// An error of step `number`, counted from 1.
    fn at_step(&self, number: usize, error: Error) -> Error {
        error.in_step(number, self.pairs.len(), Path::new(&self.pairs[number - 1].label(number)))
    }

    /// The error of step `number` in the second pass.
    fn poisoned(&self, number: usize, plans: &[Plan<'_>], error: Error) -> Error {
        let source = match error {
            Error::Poisoned { source, .. } => source,
            // Nothing was written.
            error if number == 1 => return self.at_step(number, error),
            error => Box::new(error),
        };
        let pair = self.pairs[number - 1].label(number);
        let mut written: Vec<_> = plans.last().iter().flat_map(|last| last.chunks()).collect();
        written.sort_unstable();
        Error::Poisoned { total: written.len() as u32, written, source: Box::new(Error::Step { number, pair, source }) }
    }
}

/// Checks that an entry has the name of its base.
fn check_name(tensor: &Tensor<'_>) -> Result<()> {
    if tensor.base_kind == BaseKind::None || tensor.name == tensor.base_name {
        return Ok(());
    }
    let (name, base) = (Escaped(tensor.name), Escaped(tensor.base_name));
    let reason = format!("tensor {name} derives from {base}: a chain in place needs one name in all pairs");
    Err(Error::InvalidArgument(reason))
}
