//! Tensors on a device, between canaries, compared with the expected content afterwards.

use super::super::{Application, ApplyPlan, Binding, Device, DeviceIndex, DeviceSlice, Mode, Payloads, Rows};
use super::derived::{formed_of, sources_of};
use std::ops::Range;
use std::sync::Arc;
use tpde::{Checkpoint, Pair};
use tpde_core::codec::Codec;
use tpde_core::error::Result;
use tpde_core::format::BaseKind;
use tpde_core::index::{Tensor, ValidatedIndex};

/// Filler between tensors, and of unwritten memory.
const CANARY: u8 = 0xC5;
const POISON: u8 = 0xA5;

/// Source of the payloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    Host,
    Pinned,
    Device,
}

/// Memory of a tensor in the image.
#[derive(Clone)]
struct Place {
    start: usize,
    bytes: usize,
    /// Equal rows, and the distance between their beginnings.
    row: usize,
    pitch: usize,
}

impl Place {
    /// The rows, as ranges of the image.
    fn rows(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let Self { start, bytes, row, pitch } = *self;
        (0..bytes / row.max(1)).map(move |n| start + n * pitch..start + n * pitch + row)
    }

    fn content(&self, image: &[u8]) -> Vec<u8> {
        self.rows().flat_map(|row| image[row].iter().copied()).collect()
    }
}

/// Tensors of a pair on a device.
pub struct Laid {
    pub bindings: Vec<Binding>,
    image: Vec<u8>,
    outputs: Vec<Place>,
    memory: DeviceSlice,
}

/// The base lanes of an entry of a pair, from the checkpoint with its base tensor.
pub fn base_of(tensor: &Tensor<'_>, base: &dyn Checkpoint) -> Vec<u8> {
    if let Some(formed) = formed_of(tensor, base) {
        return formed;
    }
    let mut bytes = vec![0; tensor.base_bytes() as usize];
    if tensor.base_kind != BaseKind::None {
        let place = base.find(tensor.base_name).unwrap();
        match tensor.layout() {
            None => base.read(place, 0, &mut bytes).unwrap(),
            Some(runs) => runs.try_each(0, bytes.len(), |at, range| base.read(place, at, &mut bytes[range])).unwrap(),
        }
    }
    bytes
}

impl Laid {
    /// Copies all tensors of a pair to the device. `skew` is their offset from an alignment of 16 bytes, in lanes. In place,
    /// tensors that change their number of rows, or have a derived base, are left out.
    pub fn new(device: &Device, index: &ValidatedIndex, base: &dyn Checkpoint, in_place: bool, skew: usize) -> Self {
        Self::in_rows(device, index, base, in_place, skew, false)
    }

    /// [`Laid::new`], where `has_gaps` with gaps between the rows of most bases and outputs.
    pub fn in_rows(
        device: &Device,
        index: &ValidatedIndex,
        base: &dyn Checkpoint,
        in_place: bool,
        skew: usize,
        has_gaps: bool,
    ) -> Self {
        let mut image = Vec::new();
        let mut places = Vec::new();
        let mut put = |bytes: &[u8], lane: usize, n: usize| {
            image.resize((image.len() + 64).next_multiple_of(16) + (skew + n) % 17 * lane, CANARY);
            let (mut row, mut pitch) = (bytes.len(), bytes.len());
            if has_gaps && (skew + n) % 5 != 4 && !bytes.is_empty() {
                // The shortest rows from a length on that divide the tensor.
                let lanes = bytes.len() / lane;
                let shortest = [1, 3, 64, 1000][(skew + n) % 4];
                row = (shortest..lanes).find(|row| lanes.is_multiple_of(*row)).unwrap_or(1) * lane;
                pitch = row + [lane, 16, 3 * lane, 48][(skew + n / 4) % 4];
            }
            let place = Place { start: image.len(), bytes: bytes.len(), row, pitch };
            for row in bytes.chunks(row.max(1)) {
                image.resize(place.start + (image.len() - place.start).next_multiple_of(pitch.max(1)), CANARY);
                image.extend_from_slice(row);
            }
            place
        };
        for (n, tensor) in index.tensors().enumerate() {
            let old = base_of(&tensor, base);
            let poison = vec![POISON; tensor.bytes() as usize];
            let lane = tensor.lane_bytes();
            match tensor.base_kind {
                BaseKind::Prefix | BaseKind::Cast | BaseKind::Dequantised if in_place => {}
                BaseKind::None => places.push((tensor.place, None, None, put(&poison, lane, n))),
                _ if in_place => places.push((tensor.place, None, None, put(&old, lane, n))),
                BaseKind::Cast | BaseKind::Dequantised => {
                    let Some((derived, lanes, scales)) = sources_of(&tensor, base) else { continue };
                    let base = put(&lanes, derived.base.dtype.lane_bytes(), n + 5);
                    let scales = derived.scales.map(|(_, of)| put(&scales, of.dtype.lane_bytes(), n + 2));
                    places.push((tensor.place, Some(base), scales, put(&poison, lane, n)));
                }
                _ => {
                    let base = put(&old, lane, n + 5);
                    places.push((tensor.place, Some(base), None, put(&poison, lane, n)));
                }
            }
        }
        image.resize(image.len() + 300, CANARY);
        let memory = device.alloc(image.len() as u64).unwrap();
        device.write(&memory, &image).unwrap();
        let memory_of = |place: &Place| {
            let end = place.rows().last().map_or(place.start, |row| row.end);
            let slice = memory.slice(place.start as u64, (end - place.start) as u64).unwrap();
            (slice, Some(Rows::new(place.row as u64, place.pitch as u64)).filter(|_| has_gaps))
        };
        let bindings = places.iter().map(|(tensor, base, scales, output)| {
            let (base, base_rows) = base.as_ref().map(memory_of).unzip();
            let (scales, scales_rows) = scales.as_ref().map(memory_of).unzip();
            let (base_rows, scales_rows) = (base_rows.flatten(), scales_rows.flatten());
            let (output, output_rows) = memory_of(output);
            Binding { base_rows, output_rows, scales, scales_rows, ..Binding::out_of_place(*tensor, base, output) }
        });
        let bindings = bindings.collect();
        Self { bindings, image, outputs: places.into_iter().map(|(.., output)| output).collect(), memory }
    }

    /// Checks canaries and bases, and returns the current outputs by tensor index.
    pub fn outputs(&mut self, device: &Device) -> Vec<(usize, Vec<u8>)> {
        let mut now = vec![0; self.image.len()];
        device.read(&self.memory, &mut now).unwrap();
        for row in self.outputs.iter().flat_map(Place::rows) {
            self.image[row.clone()].copy_from_slice(&now[row]);
        }
        if let Some(at) = (0..now.len()).find(|&i| now[i] != self.image[i]) {
            panic!("byte {at}, which is part of no output, has changed to {:#x}", now[at]);
        }
        self.bindings.iter().zip(&self.outputs).map(|(binding, output)| (binding.tensor, output.content(&now))).collect()
    }

    /// Changes a bit near the end of the base of a tensor.
    pub fn spoil(&self, device: &Device, tensor: usize) {
        let binding = self.bindings.iter().find(|binding| binding.tensor == tensor).unwrap();
        let base = binding.base.as_ref().unwrap_or(&binding.output);
        let lane = base.slice(base.bytes() - 8, 8).unwrap();
        let mut bytes = [0; 8];
        device.read(&lane, &mut bytes).unwrap();
        bytes[4] ^= 1;
        device.write(&lane, &bytes).unwrap();
    }

    /// Restores the initial content, or the content at the last call of [`Laid::outputs`].
    pub fn restore(&self, device: &Device) {
        device.write(&self.memory, &self.image).unwrap();
    }

    /// Makes the content the same as that of another image of the same tensors.
    pub fn restore_from(&mut self, device: &Device, other: &Self) {
        self.image.copy_from_slice(&other.image);
        self.restore(device);
    }

    /// Returns whether the outputs have their initial content.
    pub fn is_untouched(&self, device: &Device) -> bool {
        let mut now = vec![0; self.image.len()];
        device.read(&self.memory, &mut now).unwrap();
        now == self.image
    }
}

/// Returns the blob of a pair in the memory that the route requires.
pub fn payloads<'a>(device: &Device, pair: &'a Pair<Vec<u8>>, route: Route) -> Payloads<'a> {
    match route {
        Route::Host => Payloads::Host(pair.blob()),
        Route::Pinned => {
            let mut pinned = device.pinned(pair.blob().len()).unwrap();
            pinned.copy_from_slice(pair.blob());
            Payloads::Pinned(Arc::new(pinned))
        }
        Route::Device => {
            let slice = device.alloc(pair.blob().len() as u64).unwrap();
            device.write(&slice, pair.blob()).unwrap();
            Payloads::Device(slice)
        }
    }
}

/// New memory of the device with this content.
pub fn written(device: &Device, content: &[u8]) -> DeviceSlice {
    let memory = device.alloc(content.len() as u64).unwrap();
    device.write(&memory, content).unwrap();
    memory
}

/// The content of memory of the device.
pub fn read(device: &Device, memory: &DeviceSlice) -> Vec<u8> {
    let mut content = vec![0; memory.bytes() as usize];
    device.read(memory, &mut content).unwrap();
    content
}

/// Returns the routes that a pair allows.
pub fn routes(index: &ValidatedIndex) -> &'static [Route] {
    match index.tensors().any(|tensor| tensor.codec == Codec::Zstd) {
        true => &[Route::Host, Route::Pinned],
        false => &[Route::Host, Route::Pinned, Route::Device],
    }
}

/// Prepares an application in memory of the crate.
pub fn prepare<'a>(index: &DeviceIndex, tensors: &[Binding], mode: Mode, payloads: Payloads<'a>) -> Result<Application<'a>> {
    Application::prepare(ApplyPlan::new(index, tensors, mode, payloads)?)
}

/// Prepares an application in memory of the crate, with payloads in slices of about `slice_bytes` bytes.
pub fn prepare_in_slices<'a>(
    index: &DeviceIndex,
    tensors: &[Binding],
    mode: Mode,
    payloads: Payloads<'a>,
    slice_bytes: u64,
) -> Result<Application<'a>> {
    Application::prepare(ApplyPlan::in_slices(index, tensors, mode, payloads, slice_bytes)?)
}

/// Applies a pair, and returns the outputs.
pub fn apply(
    device: &Device,
    index: &DeviceIndex,
    pair: &Pair<Vec<u8>>,
    base: &dyn Checkpoint,
    mode: Mode,
    route: Route,
    skew: usize,
) -> (Result<()>, Vec<(usize, Vec<u8>)>) {
    // Every third case has gaps between rows.
    let mut laid = Laid::in_rows(device, pair.index(), base, mode != Mode::OutOfPlace, skew, skew % 3 == 2);
    let stream = device.stream().unwrap();
    // Every other case has several slices.
    let slice = if skew.is_multiple_of(2) { 4096 } else { 1 << 20 };
    let outcome = prepare_in_slices(index, &laid.bindings, mode, payloads(device, pair, route), slice)
        .and_then(|application| application.launch(&stream)?.wait());
    if mode == Mode::InPlace(tpde::InPlace::AllChecked) && outcome.is_err() {
        assert!(laid.is_untouched(device), "written although {outcome:?}");
    }
    (outcome, laid.outputs(device))
}
