//! Chains of pairs on a device: several steps, applied in place in one commit.

use super::application::Application;
use super::application::outcome::Pending;
use super::index::DeviceIndex;
use super::plan::ApplyPlan;
use super::plan::binding::Binding;
use super::plan::payloads::{Mode, Payloads};
use super::runtime::memory::DeviceSlice;
use super::runtime::stream::Stream;
use super::slices::TensorSlice;
use std::collections::VecDeque;
use std::ops::Range;
use tpde::InPlace;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::lane::Dtype;
use tpde_core::layout::relation;

/// Default size of the memory in which steps are checked, in bytes.
const SCRATCH_BYTES: u64 = 128 << 20;

/// Alignment of slices in this memory.
const ALIGN: u64 = 256;

/// Maximum number of groups whose launches are queued. More would hold the payloads of more groups at the same time.
const GROUPS_IN_FLIGHT: usize = 2;

/// A pair of a chain: its index on the device, and the source of its payloads.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ChainStep<'a> {
    /// The index.
    pub index: DeviceIndex,
    /// The payloads.
    pub payloads: Payloads<'a>,
}

impl<'a> ChainStep<'a> {
    /// A step from an uploaded index and the payloads of its pair.
    pub fn new(index: &DeviceIndex, payloads: Payloads<'a>) -> Self {
        Self { index: index.clone(), payloads }
    }
}

/// Applies the pairs of a chain to slices in place. The slices take the last target at once: nothing is written before all steps
/// of all slices are checked.
///
/// Slices are processed in groups that fit in scratch memory. The first step rebuilds a group there, the others change it there.
/// Every step compares the CRCs of payloads, the base sums and the target sums, and digests of payloads where the index has one
/// per payload. The last step compares the digests of those targets of which all chunks are decoded. If all groups pass, all steps are done again, and the last
/// one writes the slices. Both passes compare sums and CRCs. If payloads come from a file, which could change between the passes,
/// both passes also compare digests. If all slices fit in scratch memory and have no gaps between rows, there is no second pass:
/// the targets are copied from there.
///
/// Each tensor has one name in all steps, and in each step its base has the dtype and shape of its target.
///
/// Cost: two decodings per step, or one and a copy, and one hash of the slices. Scratch memory: 128 MiB, or the largest slice if that is larger.
/// A single step is an application with [`InPlace::AllChecked`], without this memory.
#[derive(Debug)]
#[must_use = "nothing is applied before `run` is called"]
pub struct ApplyChain<'a> {
    steps: &'a [ChainStep<'a>],
    slices: &'a [TensorSlice<'a>],
    scratch_bytes: u64,
    scratch: Option<DeviceSlice>,
    compares_targets: bool,
}

/// Slices that are in scratch memory at the same time.
struct Group<'a> {
    held: &'a [TensorSlice<'a>],
    /// The same elements in scratch memory, without gaps between rows.
    scratch: Vec<TensorSlice<'a>>,
}

/// A queued step and its number.
type QueuedStep = (usize, Pending);

impl<'a> ApplyChain<'a> {
    /// Takes the steps in the order in which they are applied, and the slices to change.
    pub fn new(steps: &'a [ChainStep<'a>], slices: &'a [TensorSlice<'a>]) -> Self {
        Self { steps, slices, scratch_bytes: SCRATCH_BYTES, scratch: None, compares_targets: true }
    }

    /// Sets the size of the scratch memory in bytes. It is at least that of the largest slice.
    pub fn scratch_bytes(self, bytes: u64) -> Self {
        Self { scratch_bytes: bytes, ..self }
    }

    /// Sets scratch memory of the caller: [`ApplyChain::bytes`] bytes, aligned to 256. Work on the stream of [`ApplyChain::run`] may
    /// use the memory, and nothing else uses it until that call returns.
    pub fn scratch(self, memory: DeviceSlice) -> Self {
        Self { scratch: Some(memory), ..self }
    }

    /// Returns the size of the scratch memory in bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a slice is of a tensor that the last step lacks.
    pub fn bytes(&self) -> Result<u64> {
        Ok(self.steps.last().filter(|_| self.steps.len() > 1).map_or(Ok((0, 0)), |last| self.limits(last))?.1)
    }

    /// Maximum size of a group, and size of the scratch memory, in bytes.
    fn limits(&self, last: &ChainStep<'_>) -> Result<(u64, u64)> {
        let (mut largest, mut all) = (0, 0);
        for slice in self.slices {
            let bytes = bytes_of(&last.index, slice)?.saturating_add(ALIGN - 1) / ALIGN * ALIGN;
            (largest, all) = (bytes.max(largest), bytes.saturating_add(all));
        }
        let limit = self.scratch_bytes.max(largest);
        Ok((limit, limit.min(all)))
    }

    /// Sets whether the digests of the last targets are compared. The default is true.
    pub fn digests(self, compared: bool) -> Self {
        Self { compares_targets: compared, ..self }
    }

    /// Applies all steps in the order of the stream, and waits for the outcome.
    ///
    /// # Errors
    /// - [`Error::Step`] with the number of the step whose check failed, as [`Pending::wait`]. Nothing was written.
    /// - [`Error::InvalidArgument`] if there is no step, if slices and steps do not fit, see [`TensorSlice::in_place`] and
    ///   [`ApplyPlan::new`], if the stream is of another device, or if the caller's scratch memory is too small. Nothing was written.
    /// - [`Error::Poisoned`] if the second pass or the copy fails: the device or the source of payloads failed, or payloads have changed.
    /// - [`Error::Device`] if memory or the driver fails. Nothing was written.
    pub fn run(&self, stream: &Stream) -> Result<()> {
        let Some((last, _)) = self.steps.split_last() else {
            return Err(Error::InvalidArgument("no step is given".into()));
        };
        // Overlaps of slices, and slices that the pair lacks, are found before any work.
        let tensors = TensorSlice::in_place(&last.index, self.slices)?;
        let mode = Mode::InPlace(InPlace::AllChecked);
        let plan = ApplyPlan::new(&last.index, &tensors, mode, last.payloads.clone())?.digests(self.compares_targets);
        if self.steps.len() == 1 {
            return Application::prepare(plan)?.launch(stream)?.wait().map_err(|error| step(1, error));
        }
        let held = distinct(&last.index, self.slices)?;
        let bytes = held.iter().map(|slice| bytes_of(&last.index, slice)).collect::<Result<Vec<_>>>()?;
        let (limit, needed) = self.limits(last)?;
        let scratch = match &self.scratch {
            Some(memory) => memory.reserve(needed, &last.index.device().inner)?,
            None => last.index.device().alloc(needed)?,
        };
        let groups = groups(&held, &bytes, limit, &scratch)?;
        self.pass(&groups, stream, false).map_err(|(_, error)| error)?;
        if let [only] = &groups[..]
            && only.held.iter().all(|slice| slice.pitch.is_none())
        {
            return copy(only, stream).map_err(|error| self.poisoned(&tensors, &groups, error));
        }
        self.pass(&groups, stream, true).map_err(|(written, error)| self.poisoned(&tensors, &groups[..written], error))
    }

    /// Does all steps of all groups. The last step `writes` the slices, or changes scratch memory as the others do. An error comes
    /// with the number of groups that may have been written. Also after an error, no work is still running.
    fn pass(&self, groups: &[Group<'_>], stream: &Stream, writes: bool) -> Result<(), (usize, Error)> {
        let mut in_flight = VecDeque::new();
        let wait = |steps: Vec<QueuedStep>| steps.into_iter().try_for_each(|(number, one)| one.wait().map_err(|e| step(number, e)));
        let mut pass = || {
            for (n, group) in groups.iter().enumerate() {
                if in_flight.len() == GROUPS_IN_FLIGHT {
                    in_flight.pop_front().map_or(Ok(()), wait).map_err(|error| (n, error))?;
                }
                in_flight.push_back(self.queue(group, stream, writes).map_err(|error| (n + 1, error))?);
            }
            in_flight.drain(..).try_for_each(wait).map_err(|error| (groups.len(), error))
        };
        pass().inspect_err(|_| {
            // Steps of later groups, and those before a step that was not queued, may use the memory of the caller.
            _ = stream.record().and_then(|end| end.wait());
        })
    }

    /// Queues all steps of a group.
    fn queue(&self, group: &Group<'_>, stream: &Stream, writes: bool) -> Result<Vec<QueuedStep>> {
        let can_change = self.steps.iter().any(|one| can_change(&one.payloads));
        let launches = launches(self.steps.len(), writes, can_change);
        let queue = |one: &ChainStep<'a>, launch: &StepLaunch| {
            let memory = |place| if place == Place::Slices { group.held } else { &group.scratch[..] };
            let (from, to) = (memory(launch.from), memory(launch.to));
            let (tensors, mode) = match launch.from == launch.to {
                true => (TensorSlice::in_place(&one.index, to), Mode::InPlace(InPlace::ChunkByChunk)),
                false => (TensorSlice::out_of_place(&one.index, to, from), Mode::OutOfPlace),
            };
            let plan = ApplyPlan::new(&one.index, &tensors?, mode, one.payloads.clone())?;
            let plan = if launch.to == Place::Scratch { plan.in_scratch() } else { plan };
            let plan = plan.digests(launch.compares_targets && self.compares_targets).payload_digests(launch.compares_payloads);
            Application::prepare(plan)?.launch(stream)
        };
        let queued = (1..).zip(self.steps.iter().zip(&launches));
        queued.map(|(number, (one, launch))| Ok((number, queue(one, launch).map_err(|error| step(number, error))?))).collect()
    }

    /// The error of a second pass that failed, after these groups may have been written.
    fn poisoned(&self, tensors: &[Binding], groups: &[Group<'_>], source: Error) -> Error {
        let Some(last) = self.steps.last() else { return source };
        let chunks_of = |tensors: &[Binding]| -> Vec<u32> {
            tensors.iter().filter_map(|one| Some(one.chunks(last.index.tensor(one.tensor).ok()?))).flatten().collect()
        };
        let written = groups.iter().filter_map(|group| TensorSlice::in_place(&last.index, group.held).ok());
        let mut written: Vec<u32> = written.flat_map(|tensors| chunks_of(&tensors)).collect();
        written.sort_unstable();
        Error::Poisoned { written, total: chunks_of(tensors).len() as u32, source: Box::new(source) }
    }
}

/// Memory of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Slices,
    Scratch,
}

/// A step of a group: where it takes its base from, and where it puts its target. It is in place if both are the same.
#[derive(Debug, PartialEq, Eq)]
struct StepLaunch {
    from: Place,
    to: Place,
    compares_payloads: bool,
    compares_targets: bool,
}

/// The launches of a pass over `steps` steps, for each group. The first pass checks, and leaves the targets in scratch memory. The
/// second one writes them; it compares digests again if payloads can change between the passes.
fn launches(steps: usize, writes: bool, can_change: bool) -> Vec<StepLaunch> {
    let compares_payloads = !writes || can_change;
    let launch = |number: usize| {
        let is_last = number == steps;
        StepLaunch {
            from: if number == 1 { Place::Slices } else { Place::Scratch },
            to: if is_last && writes && number > 1 { Place::Slices } else { Place::Scratch },
            compares_payloads,
            compares_targets: is_last && compares_payloads,
        }
    };
    (1..=steps).map(launch).collect()
}

/// The slices without those whose memory an earlier one has, as of tied weights. Their targets are equal, which was checked. If both
/// were written, the second one would take the new target of the first one for its base.
fn distinct<'a>(index: &DeviceIndex, slices: &[TensorSlice<'a>]) -> Result<Vec<TensorSlice<'a>>> {
    let layouts = slices.iter().map(|slice| Ok(slice.layout(dtype_of(index, slice)?))).collect::<Result<Vec<_>>>()?;
    // Memory that overlaps otherwise was refused before.
    let first_of = relation(&layouts).unwrap_or_else(|_| (0..slices.len()).collect());
    Ok((0..).zip(slices).filter(|(i, _)| first_of[*i] == *i).map(|(_, slice)| slice.clone()).collect())
}

fn groups<'s, 'a: 's>(slices: &'s [TensorSlice<'a>], bytes: &[u64], limit: u64, scratch: &DeviceSlice) -> Result<Vec<Group<'s>>> {
    let mut groups = Vec::new();
    for range in ranges(bytes, limit) {
        let mut at = 0;
        let mut placed = Vec::with_capacity(range.len());
        for (slice, bytes) in slices[range.clone()].iter().zip(&bytes[range.clone()]) {
            placed.push(TensorSlice::new(slice.name, slice.rectangle.clone(), scratch.slice(at, *bytes)?));
            at += bytes.next_multiple_of(ALIGN);
        }
        groups.push(Group { held: &slices[range], scratch: placed });
    }
    Ok(groups)
}

/// Copies the targets of a group to its slices, none of which has gaps between rows, and waits, also after an error.
fn copy(group: &Group<'_>, stream: &Stream) -> Result<()> {
    let mut copies = group.held.iter().zip(&group.scratch).filter(|(held, _)| held.memory.bytes() != 0);
    let queued = copies.try_for_each(|(held, scratch)| stream.copy(&held.memory, &scratch.memory));
    let waited = stream.record().and_then(|end| end.wait());
    queued.and(waited)
}

/// The error of a step. Scratch memory that is a mixture harms nobody, so the cause of [`Error::Poisoned`] is the error.
fn step(number: usize, error: Error) -> Error {
    let source = match error {
        Error::Poisoned { source, .. } => source,
        Error::Invalid(_) => Box::new(error),
        _ => return error,
    };
    Error::Step { number, pair: format!("pair {number}"), source }
}

/// Whether payloads can change while they are borrowed, as those of a file.
fn can_change(payloads: &Payloads<'_>) -> bool {
    match payloads {
        Payloads::Host(source) => source.in_memory().is_none(),
        Payloads::Kept(source) => source.in_memory().is_none(),
        Payloads::Pinned(_) | Payloads::Device(_) | Payloads::Parts(_) => false,
    }
}

/// Ranges of consecutive slices that fit in `limit` bytes, each at least one slice.
fn ranges(bytes: &[u64], limit: u64) -> Vec<Range<usize>> {
    let (mut ranges, mut start, mut used) = (Vec::new(), 0, 0u64);
    for (n, bytes) in bytes.iter().enumerate() {
        let bytes = bytes.next_multiple_of(ALIGN);
        if n > start && used + bytes > limit {
            ranges.push(start..n);
            (start, used) = (n, 0);
        }
        used += bytes;
    }
    if start < bytes.len() {
        ranges.push(start..bytes.len());
    }
    ranges
}

/// Size of a slice without gaps between its rows.
fn bytes_of(index: &DeviceIndex, slice: &TensorSlice<'_>) -> Result<u64> {
    let bits = dtype_of(index, slice)?.bits();
    Ok(slice.rectangle.extent.iter().fold(bits, |bits, &extent| bits.saturating_mul(extent)) / 8)
}

fn dtype_of(index: &DeviceIndex, slice: &TensorSlice<'_>) -> Result<Dtype> {
    let entry = index.entries(slice.name).next();
    let entry = entry.ok_or_else(|| Error::InvalidArgument(format!("no tensor {} in the pair", Escaped(slice.name))))?;
    Ok(index.tensor(entry)?.dtype)
}

#[cfg(test)]
mod tests {
    use super::{launches, ranges};

    /// Both passes, as text: where each step takes its base from, where it puts its target, and which digests are compared.
    #[test]
    fn a_chain_writes_once_and_after_all_checks() {
        let text = |steps, writes, can_change| -> Vec<String> {
            let text = |launch: &super::StepLaunch| {
                let payloads = if launch.compares_payloads { ", payload digests" } else { "" };
                let targets = if launch.compares_targets { ", target digests" } else { "" };
                format!("{:?} to {:?}{payloads}{targets}", launch.from, launch.to)
            };
            launches(steps, writes, can_change).iter().map(text).collect()
        };
        let checked = [
            "Slices to Scratch, payload digests",
            "Scratch to Scratch, payload digests",
            "Scratch to Scratch, payload digests, target digests",
        ];
        assert_eq!(text(3, false, false), checked);
        assert_eq!(text(3, false, true), checked);
        assert_eq!(text(3, true, false), ["Slices to Scratch", "Scratch to Scratch", "Scratch to Slices"]);
        let again = [
            "Slices to Scratch, payload digests",
            "Scratch to Scratch, payload digests",
            "Scratch to Slices, payload digests, target digests",
        ];
        assert_eq!(text(3, true, true), again);
        assert_eq!(text(2, true, false), ["Slices to Scratch", "Scratch to Slices"]);
    }

    #[test]
    fn groups_fit_in_the_limit_and_cover_all_slices() {
        for (bytes, limit, expected) in [
            (&[][..], 512, &[][..]),
            (&[1, 256, 100], 512, &[0..2, 2..3]),
            (&[600, 1, 1, 1], 512, &[0..1, 1..3, 3..4]),
            (&[0, 0, 512, 1], 512, &[0..3, 3..4]),
        ] {
            assert_eq!(ranges(bytes, limit), expected, "{bytes:?}");
        }
    }
}
