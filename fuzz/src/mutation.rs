//! Changes to the parts of a valid pair.

use crate::parts::{ChunkPart, Parts, TensorPart};
use crate::seeds::SEEDS;
use crate::{MOST_BYTES, count_changed, frame, repair_blob_header, repair_digests, tables};
use arbitrary::{Arbitrary, Unstructured};
use tpde::{Codec, Layout};
use tpde_core::codec::fuzzing::model::{self, Shape};
use tpde_core::codec::{ChunkEncoder, Coding};
use tpde_core::format::{
    FEATURE_DIGESTS, FEATURE_PARTS, FEATURE_PAYLOAD_LIST, PART_FIRST, PART_FURTHER, PART_WHOLE, VERSION_MINOR,
};

/// Least number that [`Mutation::Part`] never sets. Tensors of the seeds have smaller dims.
const MOST_DIM: u64 = 128;

/// A seed, and the changes to it.
#[derive(Arbitrary, Debug)]
pub struct Program {
    seed: u16,
    signing: u8,
    /// Changes before dependent fields are recomputed.
    before: Vec<Mutation>,
    /// Changes after dependent fields are recomputed.
    after: Vec<Mutation>,
    patches: Vec<Patch>,
}

/// A change to a number.
#[derive(Arbitrary, Debug, Clone, Copy)]
enum Number {
    Add(i8),
    Flip(u8),
    Power(u8, i8),
    Set(u64),
}

impl Number {
    fn change(self, number: u64) -> u64 {
        match self {
            Number::Add(step) => number.wrapping_add_signed(step.into()),
            Number::Flip(bit) => number ^ 1 << (bit % 64),
            Number::Power(log2, step) => (1u64 << (log2 % 64)).wrapping_add_signed((step % 3).into()),
            Number::Set(number) => number,
        }
    }
}

macro_rules! change {
    ($field:expr, $number:expr) => {
        $field = $number.change($field.into()) as _
    };
}

/// A change to some bytes.
#[derive(Arbitrary, Debug)]
enum Edit {
    Flip(u16, u8),
    Insert(u16, Vec<u8>),
    Remove(u16, u8),
    Cut(u16),
    Word(u16, u8, Number),
}

impl Edit {
    fn apply(&self, bytes: &mut Vec<u8>) {
        let at = |at: u16| usize::from(at) % (bytes.len() + 1);
        match self {
            Edit::Flip(place, flip) => {
                let place = at(*place);
                bytes.iter_mut().skip(place).take(1).for_each(|byte| *byte ^= flip);
            }
            Edit::Insert(place, more) => drop(bytes.splice(at(*place)..at(*place), more.iter().copied())),
            Edit::Remove(place, count) => {
                let place = at(*place);
                bytes.drain(place..(place + usize::from(*count)).min(bytes.len()));
            }
            Edit::Cut(size) => bytes.truncate(at(*size)),
            Edit::Word(place, log2, number) => {
                let width = 1 << (log2 % 4);
                let place = at(*place) / width * width;
                if let Some(word) = bytes.get_mut(place..place + width) {
                    let mut wide = [0; 8];
                    wide[..width].copy_from_slice(word);
                    word.copy_from_slice(&number.change(u64::from_le_bytes(wide)).to_le_bytes()[..width]);
                }
            }
        }
    }
}

/// Indices of a tensor and of a chunk in it.
#[derive(Arbitrary, Debug, Clone, Copy)]
struct Place(u8, u8);

#[derive(Arbitrary, Debug)]
enum Mutation {
    Tensor(Place, u8, Number),
    Dim(Place, Number),
    AddDim(Place, u8),
    RemoveDim(Place),
    /// An origin or an extent of a part, with values that may lie in the tensor.
    Part(Place, bool, Number),
    /// Two dimensions of a part change places.
    TurnPart(Place, u8),
    /// The cut between a part and the one before it moves along a dimension.
    MoveCut(Place, i8),
    /// A tensor or a part is cut in two along a dimension. No lane of the two changes.
    Cut(Place, u8),
    Name(Place, Edit),
    BaseName(Place, Edit),
    ScalesName(Place, Edit),
    Digest(Place, u8, u8),
    Root(u8, u8),
    Tables(Place, Edit),
    TableSet(Place, Vec<u8>),
    Record(Place, u8, Number),
    Sum(Place, u8, Number),
    Payload(Place, Edit),
    /// A header field of a payload of codec `conditioned`.
    Head(Place, u8, Number),
    /// Content bytes inside the zstd frame of a payload.
    Content(Place, Edit),
    Recode(Place, Recode),
    CopyTensor(u8, u8),
    RemoveTensor(u8),
    SwapTensors(u8, u8),
    CopyChunk(Place, u8),
    RemoveChunk(Place),
    SwapPayloads(Place, Place),
    File(u8, u8, Number),
    FileName(u8, Edit),
    FileContent(u8, Edit),
    CopyFile(u8, u8),
    RemoveFile(u8),
}

/// Encodes a payload again, for other lanes and with any choice that an encoder may make.
#[derive(Arbitrary, Debug)]
struct Recode {
    shape: Shape,
    layout: Layout,
    /// First lane, number of lanes, distance between them minus one, and the value added to each.
    changes: Vec<(u16, u16, u8, u64)>,
}

/// A change to the bytes of the index or the blob, after all other changes.
#[derive(Arbitrary, Debug)]
enum Patch {
    Header(u8, u8, Number),
    Index(u16, u8, Number),
    BlobHeader(u8, u8),
    Blob(u16, u8),
}

impl Program {
    /// Returns the index and the blob of the changed pair.
    pub fn run(&self) -> (Vec<u8>, Vec<u8>) {
        let mut parts = SEEDS[usize::from(self.seed) % SEEDS.len()].clone();
        self.before.iter().take(8).for_each(|mutation| mutation.apply(&mut parts));
        parts.derive();
        self.after.iter().take(4).for_each(|mutation| mutation.apply(&mut parts));
        let (mut index, mut blob) = parts.write();
        for patch in self.patches.iter().take(4) {
            patch.apply(&mut index, &mut blob, self.signing % 8 != 7);
        }
        (index, blob)
    }

    /// Whether sums and digests of tensors are to be corrected.
    pub fn signs_sums(&self) -> bool {
        self.signing % 8 < 6
    }
}

impl Patch {
    fn apply(&self, index: &mut Vec<u8>, blob: &mut Vec<u8>, sign: bool) {
        match self {
            Patch::Header(word, log2, number) => Edit::Word(u16::from(*word) % 63 * 4, *log2, *number).apply(index),
            Patch::Index(at, log2, number) => Edit::Word(*at, *log2, *number).apply(index),
            Patch::BlobHeader(at, flip) => return Edit::Flip(u16::from(*at) % 64, *flip).apply(blob),
            Patch::Blob(at, flip) => return Edit::Flip(*at, *flip).apply(blob),
        }
        if sign {
            repair_digests(index);
            repair_blob_header(index, blob);
        }
    }
}

fn pick<T>(items: &mut [T], which: u8) -> Option<&mut T> {
    let count = items.len().max(1);
    items.get_mut(usize::from(which) % count)
}

fn chunk(parts: &mut Parts, place: Place) -> Option<&mut ChunkPart> {
    pick(&mut pick(&mut parts.tensors, place.0)?.chunks, place.1)
}

impl Mutation {
    /// Changes the parts. Does nothing if they lack the changed part.
    fn apply(&self, parts: &mut Parts) {
        self.try_apply(parts);
    }

    fn try_apply(&self, parts: &mut Parts) -> Option<()> {
        match self {
            Mutation::Tensor(place, field, number) => {
                let entry = &mut pick(&mut parts.tensors, place.0)?.entry;
                match field % 13 {
                    0 => change!(entry.name_size, number),
                    1 => change!(entry.base_name_size, number),
                    2 => change!(entry.dtype, number),
                    3 => change!(entry.rank, number),
                    4 => change!(entry.base_kind, number),
                    5 => change!(entry.codec, number),
                    6 => change!(entry.chunk_lanes_log2, number),
                    7 => match place.1 % 3 {
                        0 => change!(entry.part, number),
                        at => change!(entry.reserved[usize::from(at) - 1], number),
                    },
                    8 => change!(entry.tables_size, number),
                    9 => change!(entry.first_chunk, number),
                    10 => change!(entry.chunk_count, number),
                    _ => change!(entry.base_param, number),
                }
            }
            Mutation::Dim(place, number) => {
                let dim = pick(&mut pick(&mut parts.tensors, place.0)?.dims, place.1)?;
                change!(*dim, number);
            }
            Mutation::AddDim(place, size) => pick(&mut parts.tensors, place.0)?.dims.push((*size).into()),
            Mutation::RemoveDim(place) => {
                pick(&mut parts.tensors, place.0)?.dims.pop()?;
            }
            Mutation::Part(place, is_extent, number) => {
                let (origins, extents) = pick(&mut parts.tensors, place.0)?.rectangle()?;
                let dim = pick(if *is_extent { extents } else { origins }, place.1)?;
                *dim = number.change(*dim) % MOST_DIM;
            }
            Mutation::TurnPart(place, other) => {
                let (origins, extents) = pick(&mut parts.tensors, place.0)?.rectangle()?;
                let [a, b] = [place.1, *other].map(|dim| usize::from(dim).checked_rem(origins.len()));
                origins.swap(a?, b?);
                extents.swap(a?, b?);
            }
            Mutation::MoveCut(place, step) => {
                let number = usize::from(place.0).checked_rem(parts.tensors.len())?;
                let (before, after) = parts.tensors.split_at_mut(number);
                let (_, before) = before.last_mut()?.rectangle()?;
                let (origins, extents) = after.first_mut()?.rectangle()?;
                let (before, origin, extent) = (pick(before, place.1)?, pick(origins, place.1)?, pick(extents, place.1)?);
                let step = i64::from(*step);
                *before = before.wrapping_add_signed(step);
                *origin = origin.wrapping_add_signed(step);
                *extent = extent.wrapping_add_signed(-step);
            }
            Mutation::Cut(place, at) => {
                let number = usize::from(place.0).checked_rem(parts.tensors.len())?;
                let sets = parts.tensors[..=number].iter().filter(|tensor| tensor.tables.len() > 2).count() as u16;
                let first = &mut parts.tensors[number];
                if first.entry.part == PART_WHOLE {
                    first.dims = [&first.dims[..], &vec![0; first.dims.len()], &first.dims].concat();
                    first.entry.part = PART_FIRST;
                }
                let mut second = first.further();
                if second.tables.len() > 2 {
                    second.tables = sets.to_le_bytes().to_vec(); // the set is stored with the first tensor that uses it
                }
                let extent = pick(first.rectangle()?.1, place.1)?;
                let at = 1 + u64::from(*at).checked_rem(extent.checked_sub(1)?)?;
                *extent = at;
                let (origins, extents) = second.rectangle()?;
                // After other mutations the lists need not have the same lengths.
                let (origin, extent) = (pick(origins, place.1)?, pick(extents, place.1)?);
                (*origin, *extent) = (origin.wrapping_add(at), extent.wrapping_sub(at));
                first.unchanged();
                second.unchanged();
                parts.tensors.insert(number + 1, second);
                parts.header.version_minor = VERSION_MINOR;
                parts.header.required_features |= FEATURE_DIGESTS | FEATURE_PAYLOAD_LIST | FEATURE_PARTS;
            }
            Mutation::Name(place, edit) => edit.apply(&mut pick(&mut parts.tensors, place.0)?.name),
            Mutation::ScalesName(place, edit) => edit.apply(&mut pick(&mut parts.tensors, place.0)?.scales_name),
            Mutation::BaseName(place, edit) => edit.apply(&mut pick(&mut parts.tensors, place.0)?.base_name),
            Mutation::Digest(place, at, flip) => *pick(&mut pick(&mut parts.tensors, place.0)?.digests, *at)? ^= flip,
            Mutation::Root(at, flip) => *pick(&mut parts.roots, *at)? ^= flip,
            Mutation::Tables(place, edit) => edit.apply(&mut pick(&mut parts.tensors, place.0)?.tables),
            Mutation::TableSet(place, bytes) => {
                let tensor = pick(&mut parts.tensors, place.0)?;
                let set = tables(&mut Unstructured::new(bytes)).ok()?;
                tensor.set = tpde_core::codec::TableSet::parse(&set).ok();
                tensor.tables = [&[0, 0], &set[..]].concat();
            }
            Mutation::Record(place, field, number) => {
                let chunk = chunk(parts, *place)?;
                match field % 4 {
                    0 => change!(chunk.uncompressed_size, number),
                    1 => change!(chunk.compressed_size, number),
                    2 => change!(chunk.num_deltas, number),
                    _ => change!(chunk.output_offset, number),
                }
            }
            Mutation::Sum(place, at, number) => {
                Edit::Word(8 * u16::from(at % 2), 3, *number).apply(&mut chunk(parts, *place)?.sums)
            }
            Mutation::Payload(place, edit) => edit.apply(&mut chunk(parts, *place)?.payload),
            Mutation::Head(place, field, number) => {
                let (at, log2) = [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (6, 0), (8, 2), (12, 2)][usize::from(field % 8)];
                Edit::Word(at, log2, *number).apply(&mut chunk(parts, *place)?.payload);
            }
            Mutation::Content(place, edit) => {
                let tensor = pick(&mut parts.tensors, place.0)?;
                let is_zstd = tensor.entry.codec == Codec::Zstd.code();
                let chunk = pick(&mut tensor.chunks, place.1).filter(|_| is_zstd)?;
                let mut content = zstd::bulk::decompress(&chunk.payload, 1 << 16).ok()?;
                edit.apply(&mut content);
                chunk.uncompressed_size = content.len() as u32;
                chunk.payload = frame(&content);
            }
            Mutation::Recode(place, recode) => recode.apply(pick(&mut parts.tensors, place.0)?, place.1)?,
            Mutation::CopyTensor(from, to) => {
                let tensor = pick(&mut parts.tensors, *from)?.clone();
                parts.tensors.insert(usize::from(*to) % (parts.tensors.len() + 1), tensor);
            }
            Mutation::RemoveTensor(which) => {
                let which = usize::from(*which).checked_rem(parts.tensors.len())?;
                parts.tensors.remove(which);
            }
            Mutation::SwapTensors(a, b) => {
                let count = parts.tensors.len();
                parts.tensors.swap(usize::from(*a).checked_rem(count)?, usize::from(*b).checked_rem(count)?);
            }
            Mutation::CopyChunk(place, to) => {
                let copy = chunk(parts, *place)?.clone();
                let chunks = &mut pick(&mut parts.tensors, place.0)?.chunks;
                chunks.insert(usize::from(*to) % (chunks.len() + 1), copy);
            }
            Mutation::RemoveChunk(place) => {
                let chunks = &mut pick(&mut parts.tensors, place.0)?.chunks;
                chunks.remove(usize::from(place.1).checked_rem(chunks.len())?);
            }
            Mutation::SwapPayloads(a, b) => {
                let other = chunk(parts, *b)?.clone();
                let one = std::mem::replace(chunk(parts, *a)?, other);
                *chunk(parts, *b)? = one;
            }
            Mutation::File(which, field, number) => {
                let entry = &mut pick(&mut parts.files, *which)?.entry;
                match field % 6 {
                    0 => change!(entry.kind, number),
                    1 => change!(entry.reserved_0, number),
                    2 => change!(entry.name_size, number),
                    3 => change!(entry.content_size, number),
                    4 => change!(entry.content_digest[0], number),
                    _ => change!(entry.reserved_1, number),
                }
            }
            Mutation::FileName(which, edit) => edit.apply(&mut pick(&mut parts.files, *which)?.name),
            Mutation::FileContent(which, edit) => edit.apply(&mut pick(&mut parts.files, *which)?.content),
            Mutation::CopyFile(from, to) => {
                let file = pick(&mut parts.files, *from)?.clone();
                parts.files.insert(usize::from(*to) % (parts.files.len() + 1), file);
            }
            Mutation::RemoveFile(which) => {
                let which = usize::from(*which).checked_rem(parts.files.len())?;
                parts.files.remove(which);
            }
        }
        Some(())
    }
}

impl TensorPart {
    /// A copy of a part that can follow it.
    fn further(&self) -> Self {
        let mut copy = self.clone();
        (copy.name, copy.base_name, copy.entry.part) = (Vec::new(), Vec::new(), PART_FURTHER);
        if self.entry.part == PART_FIRST {
            copy.dims.drain(..self.dims.len() / 3);
        }
        copy
    }

    /// Replaces the chunks by chunks in which no lane changes, of base lanes that are zero.
    fn unchanged(&mut self) -> Option<()> {
        let dtype = self.dtype()?;
        let bytes = dtype.lanes(self.rectangle()?.1)? as usize * dtype.lane_bytes();
        let chunk_bytes = dtype.lane_bytes() << (self.entry.chunk_lanes_log2 % 32);
        let base = vec![0; bytes.min(MOST_BYTES as usize)];
        let chunk = |base: &[u8]| ChunkPart {
            uncompressed_size: 0,
            compressed_size: 0,
            num_deltas: 0,
            output_offset: 0,
            sums: vec![0; 16],
            payload: Vec::new(),
            base: base.to_vec(),
        };
        self.chunks = base.chunks(chunk_bytes).map(chunk).collect();
        Some(())
    }
}

impl Recode {
    fn apply(&self, tensor: &mut TensorPart, which: u8) -> Option<()> {
        let (dtype, codec) = (tensor.dtype()?, Codec::from_code(tensor.entry.codec)?);
        let chunk = pick(&mut tensor.chunks, which)?;
        let (base, width) = (&chunk.base[..], dtype.lane_bytes());
        let lanes = base.len() / width;
        if !base.len().is_multiple_of(width) || lanes == 0 {
            return None;
        }
        let mut target = base.to_vec();
        for (first, count, step, change) in self.changes.iter().take(8) {
            let places = (usize::from(*first) % lanes..lanes).step_by(usize::from(*step) + 1).take((*count).into());
            for lane in places {
                let lane = &mut target[lane * width..(lane + 1) * width];
                lane.iter_mut().zip(change.to_le_bytes()).for_each(|(byte, change)| *byte = byte.wrapping_add(change));
            }
        }
        let num_deltas = count_changed(dtype, base, &target);
        let mut payload = Vec::new();
        let mut uncompressed_size = base.len() as u32;
        match codec {
            _ if num_deltas == 0 => uncompressed_size = 0,
            Codec::Conditioned => {
                let classes = tensor.set.as_ref().map_or(0, |set| set.classes().len());
                let shape = self.shape.clone().bounded(dtype, lanes, classes);
                payload = model::encode(dtype, tensor.set.as_ref(), &shape, base, &target)?;
            }
            _ => {
                let coding = if codec == Codec::Raw { Coding::Raw } else { Coding::Zstd(Some(self.layout)) };
                let encoded =
                    ChunkEncoder::new().and_then(|mut encoder| encoder.encode(coding, dtype, base, &target, &mut payload));
                uncompressed_size = encoded.expect("lanes that can be encoded").uncompressed_size;
            }
        }
        (chunk.uncompressed_size, chunk.num_deltas, chunk.payload) = (uncompressed_size, num_deltas, payload);
        Some(())
    }
}
