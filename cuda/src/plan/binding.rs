//! Bindings of tensors to memory, and the checks of lengths, alignment and overlaps.

use crate::abi::{DERIVED_TENSOR, DeviceTensor, STRIDED_TENSOR};
use crate::index::{TensorOnDevice, tensor_at};
use crate::rows::Rows;
use crate::runtime::kernels::Variant;
use crate::runtime::memory::DeviceSlice;
use std::ops::Range;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::format::BaseKind;
use tpde_core::layout::{StridedLayout, first_shared, relation};
use tpde_core::rectangle::Rectangle;

/// An entry of a pair, which is a tensor or a part of one, and its memory. Addresses are aligned to the lanes of the tensor.
///
/// [`TensorSlice`](crate::TensorSlice) makes bindings for slices of tensors.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Binding {
    /// Index of the entry in the pair; see [`DeviceIndex::find`](crate::DeviceIndex::find).
    pub tensor: usize,
    /// The base tensor. `None` in place, and for base kinds without a base. Of a derived base, the tensor of another dtype from
    /// which base lanes are formed, unless [`formed`](Self#structfield.formed) is set.
    pub base: Option<DeviceSlice>,
    /// The memory of the target. In place it holds the base before the application.
    pub output: DeviceSlice,
    /// Rows of the base, if it has gaps. The memory then reaches from the first byte of the first row to the last byte of the
    /// last row. Rows and pitch are multiples of the size of a lane.
    pub base_rows: Option<Rows>,
    /// Rows of the output, as for the base.
    pub output_rows: Option<Rows>,
    /// The tensor of scales of a quantised base, base kind `dequantised`.
    pub scales: Option<DeviceSlice>,
    /// Rows of the scales, as for the base.
    pub scales_rows: Option<Rows>,
    /// Whether `base` has the lanes of a derived base as they are formed, in the dtype of the target.
    pub formed: bool,
    /// The kernels for the tensor. Set by [`check`].
    pub(crate) variant: Variant,
    /// The chunks to decode, if the memory lacks others. Set by [`TensorSlice`](crate::TensorSlice).
    pub(crate) portion: Option<Portion>,
}

/// Some chunks of an entry, in memory that has these chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Portion {
    /// Ranges of chunks in the index map, ascending.
    pub chunks: Vec<Range<u32>>,
    pub output: Extension,
    pub base: Option<Extension>,
    /// The entry and the memory that it was made for. They are compared again, because callers can change the fields of a binding.
    pub of: PortionOf,
}

/// The entry and the memory of a portion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PortionOf {
    tensor: usize,
    rectangle: Rectangle,
    chunks: Range<u32>,
    chunk_lanes_log2: u8,
    memory: Vec<(u64, u64, Option<Rows>)>,
}

impl PortionOf {
    pub fn new(tensor: &TensorOnDevice, binding: &Binding) -> Self {
        Self {
            tensor: binding.tensor,
            rectangle: tensor.rectangle.clone(),
            chunks: tensor.chunks(),
            chunk_lanes_log2: tensor.device.chunk_lanes_log2,
            memory: memory_of(binding),
        }
    }
}

/// Memory of some lanes of an entry, extended to all lanes: where the entry would begin, modulo 2^64, and its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extension {
    pub start: u64,
    pub rows: Option<Rows>,
}

impl Binding {
    /// Binds a tensor that is rebuilt from `base` in `output`.
    pub fn out_of_place(tensor: usize, base: Option<DeviceSlice>, output: DeviceSlice) -> Self {
        let (base_rows, output_rows, scales, scales_rows) = (None, None, None, None);
        Self {
            tensor,
            base,
            output,
            base_rows,
            output_rows,
            scales,
            scales_rows,
            formed: false,
            variant: Variant::Plain,
            portion: None,
        }
    }

    /// Binds a tensor that is changed in place.
    pub fn in_place(tensor: usize, memory: DeviceSlice) -> Self {
        Self::out_of_place(tensor, None, memory)
    }

    /// Sets [`base_rows`](Self#structfield.base_rows).
    #[must_use]
    pub fn base_rows(mut self, rows: Rows) -> Self {
        self.base_rows = Some(rows);
        self
    }

    /// Sets [`output_rows`](Self#structfield.output_rows).
    #[must_use]
    pub fn output_rows(mut self, rows: Rows) -> Self {
        self.output_rows = Some(rows);
        self
    }

    /// Sets [`scales`](Self#structfield.scales) and [`scales_rows`](Self#structfield.scales_rows).
    #[must_use]
    pub fn scales(mut self, scales: DeviceSlice, rows: Option<Rows>) -> Self {
        (self.scales, self.scales_rows) = (Some(scales), rows);
        self
    }

    /// Sets [`formed`](Self#structfield.formed).
    #[must_use]
    pub fn formed(self) -> Self {
        Self { formed: true, ..self }
    }

    /// The codec in the kernels' table: with the bit of the kernels for this binding.
    pub(crate) fn codec(&self, tensor: &DeviceTensor) -> u16 {
        tensor.codec
            | match self.variant {
                Variant::Plain => 0,
                Variant::Strided => STRIDED_TENSOR,
                Variant::Derived => DERIVED_TENSOR,
            }
    }

    /// The chunks to decode, which are all of the entry or some.
    pub(crate) fn chunks(&self, tensor: &TensorOnDevice) -> impl Iterator<Item = u32> + Clone + use<'_> {
        let (whole, some) = match &self.portion {
            None => (Some(tensor.chunks()), &[][..]),
            Some(portion) => (None, &portion.chunks[..]),
        };
        whole.into_iter().chain(some.iter().cloned()).flatten()
    }

    /// Where the lanes of the entry are written, and its rows.
    pub(crate) fn output_at(&self) -> Extension {
        let whole = Extension { start: self.output.address(), rows: self.output_rows };
        self.portion.as_ref().map_or(whole, |portion| portion.output)
    }

    /// Where the lanes of the base are read out of place, and their rows.
    pub(crate) fn base_at(&self) -> Extension {
        let whole = Extension { start: self.base.as_ref().map_or(0, DeviceSlice::address), rows: self.base_rows };
        self.portion.as_ref().and_then(|portion| portion.base).unwrap_or(whole)
    }

    /// The memory that is read out of place, with its rows.
    fn sources(&self) -> impl Iterator<Item = (&DeviceSlice, Option<Rows>)> {
        let base = self.base.iter().map(|base| (base, self.base_rows));
        base.chain(self.scales.iter().map(|scales| (scales, self.scales_rows)))
    }

    fn layout(&self) -> StridedLayout {
        layout_of(&self.output, self.output_rows)
    }
}

/// The addresses of memory that begins and ends with a row.
fn layout_of(memory: &DeviceSlice, rows: Option<Rows>) -> StridedLayout {
    match rows.filter(|_| memory.bytes() > 0) {
        Some(Rows { bytes, pitch }) => StridedLayout::new(memory.address(), bytes, [((memory.bytes() - bytes) / pitch + 1, pitch)]),
        None => StridedLayout::contiguous(memory.address(), memory.bytes()),
    }
}

/// Checks lengths, alignment and overlaps, and returns the bindings sorted by tensor. Rows without gaps between them are left out.
/// Two bindings may share memory only if they are the same tensor, or equal tensors under several names. Then only one binding is
/// returned and decoded.
pub(crate) fn check(tensors: &[TensorOnDevice], bindings: &[Binding], in_place: bool) -> Result<Vec<Binding>> {
    let mut bindings = bindings.to_vec();
    bindings.sort_by_key(|binding| binding.tensor);
    for binding in &mut bindings {
        check_lengths(tensor_at(tensors, binding.tensor)?, binding, in_place)?;
    }
    let layouts: Vec<_> = bindings.iter().map(Binding::layout).collect();
    let overlapping = |[a, b]: [usize; 2]| {
        let name = |i: usize| tensor_at(tensors, bindings[i].tensor).map(|tensor| Escaped(&tensor.name));
        match (name(a), name(b)) {
            (Ok(a), Ok(b)) => Error::InvalidArgument(format!("the memory for tensor {b} overlaps that for tensor {a}")),
            (Err(error), _) | (_, Err(error)) => error,
        }
    };
    let first_of = relation(&layouts).map_err(overlapping)?;
    for (i, &first) in first_of.iter().enumerate().filter(|(i, first)| i != *first) {
        let (binding, before) = (&bindings[i], &bindings[first]);
        let (tensor, other) = (tensor_at(tensors, binding.tensor)?, tensor_at(tensors, before.tensor)?);
        let is_equal = tensor.digests == other.digests && tensor.device.dtype == other.device.dtype;
        let is_same = binding.tensor == before.tensor || is_equal && tensor.base_kind == other.base_kind;
        if !is_same || memory_of(binding) != memory_of(before) || binding.portion != before.portion {
            return Err(overlapping([first, i]));
        }
    }
    if !in_place {
        check_bases(tensors, &bindings, &layouts)?;
    }
    let mut number = 0..;
    bindings.retain(|_| number.next().is_some_and(|i| first_of[i] == i));
    let mut kept = bindings;
    if let Some(pair) = kept.windows(2).find(|pair| pair[0].tensor == pair[1].tensor && pair[0].output.bytes() > 0) {
        let name = &tensor_at(tensors, pair[0].tensor)?.name;
        return Err(Error::InvalidArgument(format!("tensor {} is bound twice, to different memory", Escaped(name))));
    }
    kept.dedup_by_key(|binding| binding.tensor);
    Ok(kept)
}

/// Address, size and rows of output, base and scales.
fn memory_of(binding: &Binding) -> Vec<(u64, u64, Option<Rows>)> {
    let all = std::iter::once((&binding.output, binding.output_rows)).chain(binding.sources());
    all.map(|(slice, rows)| (slice.address(), slice.bytes(), rows)).collect()
}

/// Checks the alignment of memory that was cut from slices.
fn check_portion(name: &Escaped<'_>, extension: Extension, lane: u64) -> Result<()> {
    let Extension { start, rows } = extension;
    if start.is_multiple_of(lane) && rows.is_none_or(|rows| rows.pitch.is_multiple_of(lane)) {
        return Ok(());
    }
    let pitch = rows.map_or(0, |rows| rows.pitch);
    Err(Error::InvalidArgument(format!(
        "the memory of tensor {name} is at {start:#x} modulo {lane}, with a pitch of {pitch} bytes: expected multiples of {lane}"
    )))
}

/// Checks memory for `bytes` bytes of lanes of `lane` bytes, and removes rows without gaps between them.
fn check_memory(
    name: &Escaped<'_>,
    what: &str,
    memory: &DeviceSlice,
    rows: &mut Option<Rows>,
    (bytes, lane): (u64, u64),
) -> Result<()> {
    let mut expected = bytes;
    if let Some(Rows { bytes: row, pitch }) = rows.filter(|_| bytes > 0) {
        if row == 0 || !bytes.is_multiple_of(row) || pitch < row || !row.is_multiple_of(lane) || !pitch.is_multiple_of(lane) {
            return Err(Error::InvalidArgument(format!(
                "{what} of tensor {name}: rows of {row} bytes with a pitch of {pitch}, expected rows that divide {bytes} bytes, a \
                 pitch of at least a row, and multiples of {lane}"
            )));
        }
        let gaps = (bytes / row - 1).checked_mul(pitch - row);
        let too_far = || Error::InvalidArgument(format!("{what} of tensor {name}: rows with a pitch of {pitch} bytes"));
        expected = gaps.and_then(|gaps| gaps.checked_add(bytes)).ok_or_else(too_far)?;
    }
    if memory.bytes() != expected {
        return Err(Error::InvalidArgument(format!("{what} of tensor {name} has {} bytes, expected {expected}", memory.bytes())));
    }
    if bytes > 0 && !memory.address().is_multiple_of(lane) {
        return Err(Error::InvalidArgument(format!(
            "{what} of tensor {name} at {:#x} is not aligned to {lane} bytes",
            memory.address()
        )));
    }
    // A single row has no gap either.
    *rows = rows.filter(|_| expected > bytes);
    memory.end().map(|_| ())
}

fn check_lengths(tensor: &TensorOnDevice, binding: &mut Binding, in_place: bool) -> Result<()> {
    let name = Escaped(&tensor.name);
    let lane = 1 << tensor.device.lane_log2;
    let plain_or_strided = |binding: &Binding| {
        let rows = [binding.output_at().rows, binding.base_at().rows];
        if rows.iter().any(Option::is_some) { Variant::Strided } else { Variant::Plain }
    };
    if let Some(portion) = &binding.portion {
        if portion.of != PortionOf::new(tensor, binding) {
            return Err(Error::InvalidArgument(format!("the slice of tensor {name} was bound to another pair or other memory")));
        }
        // The lengths are those of slices, which were checked.
        [Some(portion.output), portion.base].into_iter().flatten().try_for_each(|one| check_portion(&name, one, lane))?;
    } else {
        check_memory(&name, "the memory", &binding.output, &mut binding.output_rows, (tensor.bytes, lane))?;
    }
    let derived = tensor.derived.as_ref().filter(|_| !binding.formed && !in_place && tensor.base_bytes > 0);
    let scales = derived.and_then(|derived| derived.scales.as_ref());
    if scales.is_none() {
        (binding.scales, binding.scales_rows) = (None, None);
    }
    if in_place {
        if binding.base.is_some() {
            return Err(Error::InvalidArgument(format!("tensor {name} is changed in place, so its binding cannot have a base")));
        }
        binding.base_rows = None;
        let reason = match tensor.base_kind {
            BaseKind::None | BaseKind::Same => {
                binding.variant = plain_or_strided(binding);
                return Ok(());
            }
            BaseKind::Prefix => "changes its number of rows",
            BaseKind::Cast | BaseKind::Dequantised => "has a base of another dtype",
        };
        return Err(Error::InvalidArgument(format!("tensor {name} {reason}, which cannot be done in place")));
    }
    if let Some(portion) = &binding.portion {
        if portion.base.is_none() && tensor.base_kind != BaseKind::None && tensor.base_bytes > 0 {
            return Err(Error::InvalidArgument(format!("the binding of tensor {name} has no base")));
        }
        binding.variant = plain_or_strided(binding);
        return Ok(());
    }
    match (&binding.base, tensor.base_kind) {
        (_, BaseKind::None) => binding.base_rows = None,
        (Some(base), _) => {
            let (what, bytes, lane) = match derived {
                Some(derived) => ("the base", derived.base.bytes(), derived.base.dtype.lane_bytes() as u64),
                None if tensor.derived.is_some() => ("the memory of formed base lanes", tensor.base_bytes, lane),
                None => ("the base", tensor.base_bytes, lane),
            };
            check_memory(&name, what, base, &mut binding.base_rows, (bytes, lane))?;
        }
        (None, _) if tensor.base_bytes == 0 => {}
        (None, _) => return Err(Error::InvalidArgument(format!("the binding of tensor {name} has no base"))),
    }
    if let Some((_, scales)) = scales {
        let missing = || Error::InvalidArgument(format!("the binding of tensor {name} has no scales"));
        let memory = binding.scales.as_ref().ok_or_else(missing)?;
        let bytes = (scales.bytes(), scales.dtype.lane_bytes() as u64);
        check_memory(&name, "the memory of scales", memory, &mut binding.scales_rows, bytes)?;
    }
    binding.variant = if derived.is_some() { Variant::Derived } else { plain_or_strided(binding) };
    Ok(())
}

/// Checks that no output overlaps a base, out of place: blocks read bases while other blocks write outputs. `outputs` are the layouts
/// of the outputs.
fn check_bases(tensors: &[TensorOnDevice], bindings: &[Binding], outputs: &[StridedLayout]) -> Result<()> {
    let (mut numbers, mut sources) = (Vec::new(), Vec::new());
    for (i, binding) in bindings.iter().enumerate() {
        if tensor_at(tensors, binding.tensor)?.base_kind != BaseKind::None {
            sources.extend(binding.sources().map(|(memory, rows)| layout_of(memory, rows)));
            numbers.resize(sources.len(), i);
        }
    }
    let Some([output, source]) = first_shared(outputs, &sources) else { return Ok(()) };
    let name = Escaped(&tensor_at(tensors, bindings[numbers[source]].tensor)?.name);
    let other = Escaped(&tensor_at(tensors, bindings[output].tensor)?.name);
    Err(Error::InvalidArgument(format!(
        "the memory for tensor {other} overlaps the base of tensor {name}, but the application is out of place"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{all_on_device, tables_of};
    use tpde::{Dtype, Encode, MemoryCheckpoint, TensorInfo};

    const START: u64 = 0x7f00_0000_0000;

    /// Returns tensors with these names and numbers of lanes. A lane has two bytes. All digests differ.
    fn tensors(lanes: &[(&str, u64)]) -> Vec<TensorOnDevice> {
        let infos = lanes.iter().map(|(name, n)| TensorInfo { name: (*name).into(), dtype: Dtype::U16, shape: vec![*n] });
        let infos: Vec<_> = infos.collect();
        let bytes = |first: usize| -> Vec<Vec<u8>> {
            lanes.iter().enumerate().map(|(i, (_, n))| vec![(first + i) as u8; 2 * *n as usize]).collect()
        };
        let (base, target) = (bytes(1), bytes(101));
        let [base, target] = [&base, &target]
            .map(|all| MemoryCheckpoint::new(infos.iter().cloned().zip(all.iter().map(|bytes| &bytes[..]))).unwrap());
        let (pair, _) = Encode::new(&target).base(&base).to_memory().unwrap();
        all_on_device(pair.index(), &tables_of(pair.index().table_sets()).unwrap().0)
    }

    /// Returns a slice of fictitious memory, from `at` to `end`.
    fn slice(at: u64, end: u64) -> DeviceSlice {
        // SAFETY: nothing is done with the memory.
        unsafe { DeviceSlice::from_raw(START + at, end - at) }
    }

    fn refused(tensors: &[TensorOnDevice], given: &[Binding], in_place: bool) -> String {
        match check(tensors, given, in_place) {
            Err(Error::InvalidArgument(why)) => why,
            other => panic!("{given:?}: {other:?}"),
        }
    }

    #[test]
    fn an_empty_output_between_two_that_overlap_does_not_hide_that() {
        // Sorted by address, the empty tensors are between the two that overlap.
        let tensors = tensors(&[("a", 50), ("b", 50), ("e", 0), ("f", 0)]);
        let empty = |tensor, at| Binding::in_place(tensor, slice(at, at));
        let given = [Binding::in_place(0, slice(0, 100)), empty(2, 30), empty(3, 98), Binding::in_place(1, slice(98, 198))];
        assert!(refused(&tensors, &given, true).contains("overlaps"));
        let out_of_place = |binding: &Binding| {
            let base = slice(1000 + 1000 * binding.tensor as u64, 1000 + 1000 * binding.tensor as u64 + binding.output.bytes());
            Binding::out_of_place(binding.tensor, Some(base), binding.output.clone())
        };
        assert!(refused(&tensors, &given.clone().map(|binding| out_of_place(&binding)), false).contains("overlaps"));
        // Adjacent outputs are accepted, with empty outputs at any address.
        let given = [Binding::in_place(0, slice(0, 100)), empty(2, 30), empty(3, 100), Binding::in_place(1, slice(100, 200))];
        let bound: Vec<_> = check(&tensors, &given, true).unwrap().iter().map(|binding| binding.tensor).collect();
        assert_eq!(bound, [0, 1, 2, 3]);
    }

    #[test]
    fn an_output_in_a_base_is_refused_with_empty_ones_between() {
        let tensors = tensors(&[("a", 50), ("e", 0)]);
        let empty = |at| Binding::out_of_place(1, None, slice(at, at));
        for (base, output) in [(0, 98), (98, 0), (0, 0)] {
            let bound = Binding::out_of_place(0, Some(slice(base, base + 100)), slice(output, output + 100));
            assert!(refused(&tensors, &[bound, empty(99)], false).contains("overlaps the base"), "{base} {output}");
        }
        let bound = Binding::out_of_place(0, Some(slice(0, 100)), slice(100, 200));
        check(&tensors, &[bound, empty(99)], false).unwrap();
    }

    #[test]
    fn a_tensor_is_bound_once() {
        let tensors = tensors(&[("a", 50), ("e", 0)]);
        let (here, there) = (Binding::in_place(0, slice(0, 100)), Binding::in_place(0, slice(100, 200)));
        assert!(refused(&tensors, &[here.clone(), there], true).contains("twice"));
        let empty = [slice(0, 0), slice(7, 7)].map(|memory| Binding::in_place(1, memory));
        let bound = check(&tensors, &[&[here.clone(), here][..], &empty].concat(), true).unwrap();
        assert_eq!(bound.len(), 2);
    }

    #[test]
    fn memory_that_wraps_around_is_refused() {
        let tensors = tensors(&[("a", 50)]);
        // SAFETY: nothing is done with the memory.
        let memory = unsafe { DeviceSlice::from_raw(u64::MAX - 97, 100) };
        refused(&tensors, &[Binding::in_place(0, memory)], true);
        refused(&tensors, &[Binding::in_place(1, slice(0, 100))], true);
        refused(&tensors, &[Binding::in_place(0, slice(0, 98))], true);
        refused(&tensors, &[Binding::in_place(0, slice(1, 101))], true);
    }
}
