//! Tensors that are bound to a pair on a device.

use crate::memory::{Place, SliceMemory, UnownedTensors};
use crate::pair;
use crate::read_ahead::ReadAhead;
use crate::run::Steering;
use std::collections::HashMap;
use std::sync::Arc;
use tpde::{Apply, BaseKind, Error, Escaped, FileSource, Result, Tensor};
use tpde_core::layout::{StridedLayout, relation};
use tpde_cuda::{Binding, DeviceCheckpoint, DeviceIndex, DeviceSlice, Mode, TensorSlice};

/// The tensors that a pair is bound to, or the slices of tensors.
pub struct BoundTensors {
    pub pair: Arc<tpde::Pair<FileSource>>,
    pub index: DeviceIndex,
    pub mode: Mode,
    /// Whether these are whole tensors. Those that share memory are bound once.
    pub is_whole: bool,
    /// Memory without its owners: the Python half makes sure that it is still valid when the application runs.
    pub tensors: UnownedTensors,
    pub base: UnownedTensors,
    /// The payloads, if they are being read. The first launch waits for them.
    pub ahead: Option<ReadAhead>,
}

/// The memory of tensors on the device.
pub fn on_device<'a>(tensors: impl IntoIterator<Item = &'a SliceMemory>) -> Vec<TensorSlice<'a>> {
    // SAFETY: `tpde/_memory/torch_tensors.py` has checked that these are PyTorch tensors on this device, and the caller holds them until the
    // streams that use them have finished.
    tensors.into_iter().map(|tensor| unsafe { tensor.on_device() }).collect()
}

impl BoundTensors {
    /// Of the tensors, those that are wanted: each memory once.
    pub fn wanted<'a>(&self, tensors: &'a [SliceMemory]) -> Result<Vec<&'a SliceMemory>> {
        let index = self.pair.index();
        let mut wanted = vec![true; tensors.len()];
        if self.is_whole {
            let once = pair::each_memory_once(&self.pair, tensors.iter().map(|tensor| &tensor.0))?;
            wanted.iter_mut().enumerate().for_each(|(i, wanted)| *wanted = once.contains(&i));
        } else {
            for tensor in tensors {
                let name = tensor.0.name();
                pair::check_type(&tensor.0, &index.find(name).ok_or_else(|| pair::unknown(name))?)?;
            }
        }
        Ok(tensors.iter().zip(wanted).filter_map(|(tensor, wanted)| wanted.then_some(tensor)).collect())
    }

    /// Binds tensors to their bases.
    pub fn bindings(&self) -> Result<Vec<Binding>> {
        if let Some(bindings) = self.plain_bindings() {
            return Ok(bindings);
        }
        let (tensors, base) = (self.tensors.slices(), self.base.slices());
        let wanted = self.wanted(&tensors)?;
        let slices = on_device(wanted.iter().copied());
        if self.mode != Mode::OutOfPlace {
            return TensorSlice::in_place(&self.index, &slices);
        }
        self.check_bases(&wanted, &base)?;
        TensorSlice::out_of_place(&self.index, &slices, &on_device(&*base))
    }

    /// As [`BoundTensors::bindings`], but faster: tensors are found by the index of their entry. `None` if a tensor is in parts, shares
    /// memory, or has a base of another dtype or shape.
    fn plain_bindings(&self) -> Option<Vec<Binding>> {
        let index = self.pair.index();
        let UnownedTensors::Plain { expected, places } = &self.tensors else { return None };
        let entries = expected.iter().map(|one| Some(index.tensor(one.entry?))).collect::<Option<Vec<_>>>()?;
        let spans: Vec<_> = places.iter().map(|&(at, size)| StridedLayout::contiguous(at as u64, size as u64)).collect();
        let first_of = relation(&spans).ok()?;
        first_of.iter().enumerate().all(|(i, first)| i == *first).then_some(())?;
        let bases: HashMap<_, _> = match &self.base {
            UnownedTensors::Plain { expected, places } => {
                expected.iter().zip(places).map(|base| (base.0.name.as_str(), base)).collect()
            }
            UnownedTensors::Slices(_) => HashMap::new(),
        };
        // SAFETY: as in `on_device`.
        let memory = |&(address, size): &Place| unsafe { DeviceSlice::from_raw(address as u64, size as u64) };
        let binding = |(tensor, place): (&Tensor<'_>, &Place)| {
            let source = match tensor.base_kind {
                _ if self.mode != Mode::OutOfPlace || tensor.base_bytes() == 0 => None,
                BaseKind::Same => {
                    let (base, place) = *bases.get(tensor.base_name)?;
                    let is_alike = (base.dtype, base.shape.as_deref()) == (tensor.dtype, Some(tensor.whole_shape()));
                    Some(is_alike.then(|| memory(place))?)
                }
                _ => return None,
            };
            Some(Binding::out_of_place(tensor.place, source, memory(place)))
        };
        entries.iter().zip(places).map(binding).collect()
    }

    /// Checks dtypes and trailing dims of the bases of tensors.
    fn check_bases(&self, tensors: &[&SliceMemory], base: &[SliceMemory]) -> Result<()> {
        let bases: HashMap<_, _> = base.iter().map(|base| (base.0.name(), &base.0)).collect();
        for tensor in tensors {
            for entry in self.pair.index().entries(tensor.0.name()) {
                let base = entry.base_shape().map(|shape| (entry.base_name, entry.base_dtype(), shape));
                for (name, dtype, shape) in base.into_iter().chain(entry.scales()) {
                    let Some(base) = bases.get(name) else { continue };
                    if base.dtype()? == dtype && base.shape().get(1..) == shape.get(1..) {
                        continue;
                    }
                    let (name, found, found_shape) = (Escaped(base.name()), base.dtype()?, base.shape());
                    let target = format!("{} is {} {:?}", Escaped(entry.name), entry.dtype, entry.whole_shape());
                    return Err(Error::InvalidArgument(format!(
                        "base tensor {name} is {found} {found_shape:?}, but target tensor {target}: expected {dtype} {shape:?}"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Size of the elements in bytes.
    pub fn size(&self) -> u64 {
        self.tensors.size()
    }

    /// Replaces `error` by "wrong base" or "already applied" if that is its cause.
    pub fn explain(&self, error: Error, steering: &Steering) -> Error {
        let in_place = self.mode != Mode::OutOfPlace;
        let (tensors, base) = (self.tensors.slices(), self.base.slices());
        let held = if in_place { &tensors } else { &base };
        let mut names = std::collections::HashSet::new();
        let slices = held.iter().filter(|slice| !self.is_whole || names.insert(slice.0.name())).map(|slice| {
            // SAFETY: as in `on_device`. Each read waits for its copy.
            Ok((slice.0.dtype()?, slice.0.shape().to_vec(), unsafe { slice.on_device() }))
        });
        let slices: Result<Vec<_>> = slices.collect();
        let lying = match slices.and_then(|slices| DeviceCheckpoint::of_slices(self.index.device(), slices)) {
            Ok(lying) => lying,
            Err(error) => return error,
        };
        let names: Vec<_> = tensors.iter().map(|slice| slice.0.name()).collect();
        let apply = Apply::new(&self.pair).base(&lying).tensors(|name| names.contains(&name)).watch(steering);
        if in_place { apply.explain_in_place(error) } else { apply.explain(error) }
    }
}
