//! What the library says to made-up requests is what an earlier implementation said: pairs of many kinds, each way to apply, merge or
//! chain them, and one fault in about half of the requests.
//!
//! `testdata/verdicts.txt` has a line per request. It was written by this generator with the library of commit `d2040aea`, of version
//! 0.2.0 of the crates: the library before its ways to apply a pair became one plan and one engine. Where today's verdict differs on
//! purpose, a remark after `#` has the verdict before, and the reason.
//!
//! Bless the table only if verdicts change on purpose, or if requests are added: `TPDE_BLESS=1 cargo test --test tpde oracle`. Review
//! each line that differs, and write a remark. Lines that stay as they are keep their remarks. Verdicts name chunks and rules, so other
//! payloads of the encoder can change only requests that damage a payload.

use crate::common::{Xorshift, forge};
use crate::derived::{cast, fp8, mxfp4};
use crate::sign;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;
use tpde::{
    Apply, ApplyReport, BaseForm, Chain, Checkpoint, Codec, CodecChoice, Dtype, Encode, EncodeOptions, Error, FormatVersion,
    FusedSlices, InPlace, Limits, MemoryCheckpoint, Merge, Pair, PayloadDigests, Rectangle, Result, Sink, Slice, SliceCheckpoint,
    SliceMut, TensorInfo, TensorMut, ValidatedIndex, Verify, VerifyReport,
};

/// Seeds of the table, and requests per seed.
const SEEDS: Range<u64> = 0..130;
const REQUESTS: usize = 8;

/// What gaps between rows hold.
const GAP: u8 = 0xE7;

/// Marks a verdict that no library may give.
const NEVER: &str = "NEVER";

type Owned = (TensorInfo, Vec<u8>);
type InMemory = Pair<Vec<u8>>;

/// A source of random choices.
struct Random(Xorshift);

impl Random {
    fn new(seed: u64) -> Self {
        let mut numbers = Xorshift(seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        (0..8).for_each(|_| _ = numbers.next());
        Self(numbers)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.0.next() >> 24) as usize % end.max(1)
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }
}

/// A target tensor.
struct Made {
    target: Owned,
    /// The tensors from which base lanes are formed.
    base: Vec<Owned>,
    /// What memory of the tensor holds before an application in place.
    before: Vec<u8>,
    /// Whether base and target have the same dtype and shape, or there is no base.
    fits: bool,
    parts: Vec<Rectangle>,
    words: String,
}

impl Made {
    fn name(&self) -> &str {
        &self.target.0.name
    }

    fn shape(&self) -> &[u64] {
        &self.target.0.shape
    }
}

/// Changes every `step`-th lane.
fn changed(bytes: &[u8], width: usize, step: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.chunks_mut(width).step_by(step).for_each(|lane| lane[0] ^= 1 + (step % 3) as u8);
    bytes
}

/// A part per rectangle that the tensor is cut into, along one dimension or two.
fn cut(random: &mut Random, shape: &[u64]) -> Vec<Rectangle> {
    let mut parts = vec![Rectangle::whole(shape)];
    let first = random.below(shape.len());
    for dim in [first, first + 1].into_iter().take(1 + random.below(2)).filter(|&dim| dim < shape.len()) {
        let ranks = 2 + random.below(2) as u64;
        let shards = |part: Rectangle| (0..ranks).filter_map(move |rank| part.shard(dim, ranks, rank)).filter(|p| p.elements() > 0);
        parts = parts.into_iter().flat_map(shards).collect();
    }
    if parts.len() > 1 { parts } else { Vec::new() }
}

fn made(random: &mut Random, i: usize, rows: u64, format: FormatVersion) -> Made {
    let name = format!("t{i}");
    let step = random.of(&[1, 7, 300, 1 << 20]);
    let (mut base, formed, kind);
    if format == FormatVersion::V1_3 && random.one_in(2) {
        let seed = random.0.next();
        let case = match random.below(4) {
            0 => cast(Dtype::F32, Dtype::Bf16, &[rows, 300], seed),
            1 => cast(Dtype::F16, Dtype::F32, &[5000], seed),
            2 => fp8(Dtype::Bf16, [131, 60], seed),
            _ => mxfp4(BaseForm::Mxfp4, [2, 64, 35], seed),
        };
        base = case.base;
        base.iter_mut().for_each(|(info, _)| info.name.replace_range(..1, &name));
        formed = (TensorInfo { name: name.clone(), ..case.formed.0 }, case.formed.1);
        kind = "derived".to_owned();
    } else {
        let dtype = random.of(&[Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F64, Dtype::F16, Dtype::I32]);
        let mut dim = |most| 1 + random.below(most) as u64;
        let shapes = [vec![dim(9000)], vec![dim(6), dim(12), dim(200)], vec![dim(2) - 1, 5], vec![], vec![rows, dim(700)]];
        let shape = shapes[random.below(9).min(4)].clone();
        let mut info = TensorInfo { name: name.clone(), dtype, shape };
        let width = dtype.lane_bytes();
        let bytes: Vec<u8> = (0..info.bytes() as usize).map(|at| (at / width * 31 + i) as u8).collect();
        formed = (info.clone(), bytes.clone());
        (base, kind) = match random.below(8) {
            0 => (Vec::new(), "none".to_owned()),
            1 if info.shape.len() > 1 && !bytes.is_empty() => {
                let (row, rows) = (bytes.len() / info.shape[0] as usize, 1 + random.below(2 * info.shape[0] as usize));
                info.shape[0] = rows as u64;
                let held = (0..rows * row).map(|at| bytes.get(at).copied().unwrap_or(9)).collect();
                (vec![(info, held)], format!("{rows} rows before"))
            }
            2 => {
                info.name = format!("b{i}");
                (vec![(info, bytes)], "renamed".to_owned())
            }
            _ => (vec![(info, bytes)], "same".to_owned()),
        };
    }
    let (info, before) = formed;
    let target = changed(&before, info.dtype.lane_bytes(), step);
    let is_cut = format >= FormatVersion::V1_2 && !before.is_empty() && !info.shape.is_empty() && random.one_in(2);
    let parts = if is_cut { cut(random, &info.shape) } else { Vec::new() };
    let mut words = format!("{name} {} {:?} {kind}", info.dtype, info.shape);
    if !parts.is_empty() {
        write!(words, " in {}", parts.len()).unwrap();
    }
    let fits = base.first().is_none_or(|(base, _)| base.shape == info.shape && base.dtype == info.dtype);
    Made { target: (info, target), base, before, fits, parts, words }
}

/// A target, its base, and the pair of both.
struct Case {
    tensors: Vec<Made>,
    pair: InMemory,
    words: String,
}

fn options(random: &mut Random, format: FormatVersion) -> (EncodeOptions, String) {
    let codec =
        random.of(&[CodecChoice::Auto, Codec::Raw.into(), Codec::Raw.into(), Codec::Conditioned.into(), Codec::Zstd.into()]);
    let lanes = random.of(&[4096, 4096, 4096, 8192, 1 << 20]);
    let list = format >= FormatVersion::V1_2 && random.one_in(3);
    let options = EncodeOptions::default().codec(codec).chunk_lanes(lanes).format(format).payload_digests(list);
    (options, format!("{}, {}, {lanes} lanes{}", format.name(), codec.name(), if list { ", list" } else { "" }))
}

fn encode(target: &[Owned], base: &[Owned], options: EncodeOptions) -> InMemory {
    Encode::new(&memory(target)).base(&memory(base)).options(options).to_memory().unwrap().0
}

fn memory(tensors: &[Owned]) -> MemoryCheckpoint<'_> {
    MemoryCheckpoint::new(tensors.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap()
}

fn case(random: &mut Random) -> Case {
    let format = random.of(&[FormatVersion::V1_1, FormatVersion::V1_2, FormatVersion::V1_3]);
    let rows = 1 + random.below(24) as u64;
    let tensors: Vec<_> = (0..1 + random.below(4)).map(|i| made(random, i, rows, format)).collect();
    let (options, mut words) = options(random, format);
    let renamed = tensors.iter().flat_map(|made| made.base.iter().map(|(base, _)| (made.name(), &base.name)));
    let renamed: Vec<_> = renamed.filter(|(_, base)| base.starts_with('b')).collect();
    let cuts = tensors.iter().filter(|made| !made.parts.is_empty()).map(|made| (made.name(), made.parts.clone()));
    let options = options.renamed(renamed).cuts(cuts);
    tensors.iter().for_each(|made| write!(words, "; {}", made.words).unwrap());
    let (target, base) = (target_of(&tensors), base_of(&tensors));
    Case { pair: encode(&target, &base, options), tensors, words }
}

fn target_of(tensors: &[Made]) -> Vec<Owned> {
    tensors.iter().map(|made| made.target.clone()).collect()
}

fn base_of(tensors: &[Made]) -> Vec<Owned> {
    tensors.iter().flat_map(|made| made.base.clone()).collect()
}

/// What is wrong with a base. Tensors are numbered as in the base.
#[derive(Clone, Copy)]
enum Wrong {
    Nothing,
    Bit { tensor: usize, at: usize, bit: usize },
    IsTarget,
    Missing(usize),
    Shape(usize),
    Dtype(usize),
    NoBase,
}

impl Wrong {
    /// A fault that a base in memory to be changed can have, or with `any`, one of a base elsewhere.
    fn new(random: &mut Random, base: &[Owned], any: bool) -> Self {
        let tensor = random.below(base.len());
        match random.below(if any { 8 } else { 4 }) {
            _ if base.is_empty() => Wrong::Nothing,
            0..3 => Wrong::Bit { tensor, at: random.below(1 << 20), bit: random.below(8) },
            3 => Wrong::IsTarget,
            4 => Wrong::Missing(tensor),
            5 => Wrong::Shape(tensor),
            6 => Wrong::Dtype(tensor),
            _ => Wrong::NoBase,
        }
    }

    fn words(self, base: &[Owned]) -> String {
        let name = |tensor: usize| &base[tensor].0.name;
        match self {
            Wrong::Nothing => String::new(),
            Wrong::Bit { tensor, .. } => format!(", a bit of base {}", name(tensor)),
            Wrong::IsTarget => ", base is target".to_owned(),
            Wrong::Missing(tensor) => format!(", no base {}", name(tensor)),
            Wrong::Shape(tensor) => format!(", shape of base {}", name(tensor)),
            Wrong::Dtype(tensor) => format!(", dtype of base {}", name(tensor)),
            Wrong::NoBase => ", no base".to_owned(),
        }
    }

    /// The wrong base; `None` if none is set.
    fn base(self, base: &[Owned], target: &[Owned]) -> Option<Vec<Owned>> {
        let mut wrong = base.to_vec();
        match self {
            Wrong::Nothing => {}
            Wrong::Bit { tensor, at, bit } => flip(&mut wrong[tensor].1, at, bit),
            Wrong::IsTarget => {
                for (info, bytes) in &mut wrong {
                    target.iter().filter(|(of_target, _)| of_target == info).for_each(|(_, target)| bytes.clone_from(target));
                }
            }
            Wrong::Missing(tensor) => _ = wrong.remove(tensor),
            Wrong::Shape(tensor) => wrong[tensor].0.shape.insert(0, 1),
            Wrong::Dtype(tensor) => {
                let info = &mut wrong[tensor].0;
                info.dtype = match info.dtype.lane_bytes() {
                    1 => Dtype::I8,
                    2 => Dtype::I16,
                    4 => Dtype::U32,
                    _ => Dtype::U64,
                };
            }
            Wrong::NoBase => return None,
        }
        Some(wrong)
    }

    /// What the memory of a tensor holds before an application in place.
    fn before(self, made: &Made, base: &[Owned]) -> Vec<u8> {
        let mut before = made.before.clone();
        match self {
            Wrong::IsTarget => before.clone_from(&made.target.1),
            Wrong::Bit { tensor, at, bit } if made.base.first().is_some_and(|(info, _)| *info == base[tensor].0) => {
                flip(&mut before, at, bit)
            }
            _ => {}
        }
        before
    }
}

fn flip(bytes: &mut [u8], at: usize, bit: usize) {
    if !bytes.is_empty() {
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
    }
}

/// Damages a payload, or gives the pair sums, digests or changes for other bytes. Returns words for it.
fn damage(random: &mut Random, pair: &InMemory, index: &mut [u8], blob: &mut [u8]) -> String {
    (0..9).find_map(|_| damage_once(random, pair, index, blob)).unwrap_or_default()
}

/// `None` if the pair has no such part.
fn damage_once(random: &mut Random, pair: &InMemory, index: &mut [u8], blob: &mut [u8]) -> Option<String> {
    let records = pair.index().records();
    let chunk = random.below(records.len());
    let entry = random.below(pair.index().tensor_count());
    let (at, bit) = (random.below(1 << 20), random.below(8));
    // Sections of the index: records, sums, digests.
    let sums = 256 + 32 * records.len();
    let digests = u64::from_le_bytes(index[112..120].try_into().unwrap()) as usize + 64;
    let stored = records.get(chunk).map(|record| {
        let (from, size) = (record.blob_offset.get() as usize, record.compressed_size.get() as usize);
        (from..from + size, from + size..from + size.next_multiple_of(16))
    });
    let mut in_index = |from: usize, size: usize| {
        flip(&mut index[from..from + size], at, bit);
        sign::repair_digests(index);
        sign::repair_blob_header(index, blob);
    };
    let has_tensor = pair.index().tensor_count() > 0;
    match (random.below(8), stored) {
        (0..3, Some((payload, _))) if !payload.is_empty() => flip(&mut blob[payload], at, bit),
        (3, Some((_, padding))) if !padding.is_empty() => {
            flip(&mut blob[padding], at, bit);
            return Some(format!(", a bit of padding {chunk}"));
        }
        (4, Some(_)) => {
            let of_target = at % 2;
            in_index(sums + 16 * chunk + 8 * of_target, 8);
            return Some(format!(", {} sum of chunk {chunk}", ["base", "target"][of_target]));
        }
        (5 | 6, _) if has_tensor => {
            let of_target = at % 2;
            in_index(digests + 32 * entry + 16 * of_target, 16);
            return Some(format!(", {} digest of entry {entry}", ["base", "target"][of_target]));
        }
        // Positions, then deltas: another delta, with the right CRC.
        (7, Some((payload, _))) if !payload.is_empty() => {
            let entry = pair.index().tensors().find(|entry| entry.chunks().contains(&(chunk as u32))).unwrap();
            if entry.codec != Codec::Raw {
                return None;
            }
            blob[payload.end - entry.lane_bytes()] ^= 64;
            forge::repair(index, blob, chunk);
            return Some(format!(", a delta of chunk {chunk}"));
        }
        _ => return None,
    }
    Some(format!(", a bit of payload {chunk}"))
}

/// Damages a pair that cannot be opened.
fn break_pair(random: &mut Random, index: &mut Vec<u8>, blob: &mut Vec<u8>) -> String {
    let (at, bit) = (random.below(1 << 20), random.below(8));
    match random.below(6) {
        0 => {
            let at = at % 256;
            flip(index, at, bit);
            format!("bit {bit} of byte {at} of the index")
        }
        1 => {
            flip(&mut index[256..], at, bit);
            "a bit of the index".to_owned()
        }
        2 => {
            let at = at % 64;
            flip(blob, at, bit);
            format!("bit {bit} of byte {at} of the blob")
        }
        3 => {
            let size = [0, 63, 255, 256, index.len() - 1][at % 5];
            index.truncate(size);
            format!("index of {}", ["0 bytes", "63 bytes", "255 bytes", "256 bytes", "a byte less"][at % 5])
        }
        4 => {
            let size = [0, 63, blob.len() - 1][at % 3];
            blob.truncate(size);
            format!("blob of {}", ["0 bytes", "63 bytes", "a byte less"][at % 3])
        }
        _ => {
            blob.push(0);
            "blob of a byte more".to_owned()
        }
    }
}

fn open(index: Vec<u8>, blob: Vec<u8>) -> Result<InMemory> {
    Pair::new(ValidatedIndex::parse(index, &Limits::default())?, blob)
}

/// A pair with some entries of another one.
fn entries(pair: &InMemory, is_wanted: impl Fn(usize) -> bool) -> Result<InMemory> {
    let next = Cell::new(0);
    let (pair, _) = Merge::new([pair]).entries(|_| is_wanted(next.replace(next.get() + 1))).to_memory()?;
    Ok(pair)
}

fn digest(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..8].to_owned()
}

fn compared(payloads: PayloadDigests) -> &'static str {
    match payloads {
        PayloadDigests::All => ", all payloads",
        PayloadDigests::EachRead => ", payloads",
        PayloadDigests::NotCompared => "",
        _ => ", payloads of another kind",
    }
}

/// The verdict of an application that gave these bytes.
fn applied(report: &ApplyReport, found: &[u8], expected: &[u8]) -> String {
    let ApplyReport { tensors, bytes, digests_checked, payload_digests, .. } = report;
    let digests = if *digests_checked { ", digests" } else { "" };
    format!("{}, {tensors} of {bytes} bytes{digests}{}", given(found, expected), compared(*payload_digests))
}

/// The verdict of a request that gave these bytes.
fn given(found: &[u8], expected: &[u8]) -> String {
    format!("ok {}{}", digest(found), if found == expected { "" } else { ", NEVER: not the target" })
}

fn verified(report: &VerifyReport) -> String {
    let VerifyReport { tensors, chunks, base_checked, target_checked, payload_digests, .. } = report;
    let [base, target] = [(base_checked, ", base"), (target_checked, ", target")].map(|(on, word)| if *on { word } else { "" });
    format!("ok {tensors} tensors, {chunks} chunks{base}{target}{}", compared(*payload_digests))
}

/// The verdict of a request that was refused, without the words of the message.
fn refused(error: &Error) -> String {
    let place = |tensor: &str, chunk: &Option<u32>| chunk.map_or(tensor.to_owned(), |chunk| format!("{tensor}/{chunk}"));
    match error {
        Error::Invalid(invalid) => {
            let at = &invalid.at;
            let tensor = at.tensor.clone().or(at.entry.map(|entry| format!("#{entry}"))).unwrap_or_default();
            let pair = at.pair.as_ref().map_or(String::new(), |pair| format!(" in {pair}"));
            format!("Invalid {} {}{pair}", invalid.rule, place(&tensor, &at.chunk)).trim_end().to_owned()
        }
        Error::WrongBase { tensor, chunk, rule, .. } => format!("WrongBase {rule} {}", place(tensor, chunk)),
        Error::AlreadyApplied { tensor, chunk, rule } => format!("AlreadyApplied {rule} {}", place(tensor, chunk)),
        Error::NotHeld { tensor, chunk, .. } => format!("NotHeld {tensor}/{chunk}"),
        Error::Incomplete { tensor, missing } => format!("Incomplete {tensor} {missing}"),
        Error::NotMergeable(refused) => format!("NotMergeable {} {}", refused.conflict.name(), refused.name),
        Error::Step { number, source, .. } => format!("Step {number} {}", refused(source)),
        Error::Poisoned { total, source, .. } => format!("Poisoned of {total} {}", refused(source)),
        Error::Io { action, source, .. } => format!("Io {action} {:?}", source.kind()),
        other => format!("{other:?}").split(|c: char| !c.is_alphanumeric()).next().unwrap().to_owned(),
    }
}

fn verdict(outcome: Result<String>) -> String {
    outcome.unwrap_or_else(|error| refused(&error))
}

/// A slice of a tensor, and the bytes of a memory from its first row to its last.
struct Placed {
    tensor: usize,
    name: String,
    rectangle: Rectangle,
    range: Range<usize>,
    pitch: Option<u64>,
}

/// A memory with slices.
struct Held {
    size: usize,
    slices: Vec<Placed>,
}

impl Held {
    /// Slices with equally many rows, side by side in each row of the memory, with `gap` bytes after them.
    fn new(tensors: &[Made], slices: &[(usize, Rectangle)], gap: usize) -> Self {
        let row = |(tensor, rectangle): &(usize, Rectangle)| {
            rectangle.extent.last().map_or(1, |&last| last as usize) * tensors[*tensor].target.0.dtype.lane_bytes()
        };
        let rows = slices[0].1.extent.split_last().map_or(1, |(_, outer)| outer.iter().product::<u64>()) as usize;
        let width: usize = slices.iter().map(row).sum();
        let pitch = width + gap;
        let mut at = 0;
        let place = |slice: &(usize, Rectangle)| {
            let (from, row) = (at, row(slice));
            at += row;
            let end = if rows == 0 || row == 0 { from } else { from + (rows - 1) * pitch + row };
            let pitch = (pitch > row && end > from).then_some(pitch as u64);
            Placed { tensor: slice.0, name: tensors[slice.0].name().into(), rectangle: slice.1.clone(), range: from..end, pitch }
        };
        let slices: Vec<_> = slices.iter().map(place).collect();
        Self { size: slices.iter().map(|slice| slice.range.end).max().unwrap(), slices }
    }

    /// The memory, if tensors have these bytes.
    fn filled(&self, tensors: &[Made], bytes: &[Vec<u8>]) -> Vec<u8> {
        let mut memory = vec![GAP; self.size];
        for slice in &self.slices {
            let info = &tensors[slice.tensor].target.0;
            let (shape, width) = (&info.shape, info.dtype.lane_bytes());
            let (origin, extent) = (&slice.rectangle.origin, &slice.rectangle.extent);
            if slice.range.is_empty() || !slice.rectangle.is_within(shape) {
                continue;
            }
            let (outer, last) = (shape.len().saturating_sub(1), extent.last().map_or(1, |&last| last as usize));
            for row in 0..extent[..outer].iter().product::<u64>() {
                let (mut rest, mut stride) = (row, shape.last().copied().unwrap_or(1));
                let mut element = origin.last().copied().unwrap_or(0);
                for dim in (0..outer).rev() {
                    element += (origin[dim] + rest % extent[dim]) * stride;
                    (rest, stride) = (rest / extent[dim], stride * shape[dim]);
                }
                let at = slice.range.start + row as usize * slice.pitch.map_or(last * width, |pitch| pitch as usize);
                let row = &bytes[slice.tensor][element as usize * width..][..last * width];
                memory.get_mut(at..at + row.len()).into_iter().for_each(|place| place.copy_from_slice(row));
            }
        }
        memory
    }

    fn of<'a>(&'a self, memory: &'a mut [u8]) -> FusedSlices<'a> {
        if let [only] = &self.slices[..] {
            let slice = SliceMut::new(&only.name, only.rectangle.clone(), memory);
            return only.pitch.into_iter().fold(slice, |slice, pitch| slice.pitch(pitch)).into();
        }
        let all = FusedSlices::new(memory);
        self.slices.iter().fold(all, |all, slice| all.slice(&slice.name, slice.rectangle.clone(), slice.range.clone(), slice.pitch))
    }
}

/// A rectangle of a tensor, which may be empty.
fn rectangle(random: &mut Random, shape: &[u64]) -> Rectangle {
    let mut rectangle = Rectangle::whole(shape);
    for (dim, &length) in shape.iter().enumerate() {
        if random.one_in(3) {
            continue;
        }
        rectangle.origin[dim] = random.below(length as usize + 1) as u64;
        rectangle.extent[dim] = random.below((length - rectangle.origin[dim]) as usize + 1) as u64;
    }
    rectangle
}

/// Memories with slices of some tensors. With `in_place`, most are of whole parts.
fn slices(random: &mut Random, tensors: &[Made], in_place: bool) -> Vec<Held> {
    let mut chosen: Vec<(usize, Rectangle)> = Vec::new();
    for (tensor, made) in tensors.iter().enumerate() {
        let skips = !random.one_in(3) && tensor + 1 < tensors.len() || in_place && !made.fits && !random.one_in(6);
        match (skips, &made.parts[..]) {
            (true, _) => {}
            (_, []) if in_place && !random.one_in(6) => chosen.push((tensor, Rectangle::whole(made.shape()))),
            (_, []) => chosen.push((tensor, rectangle(random, made.shape()))),
            (_, parts) if random.one_in(if in_place { 8 } else { 2 }) => {
                let part = &parts[random.below(parts.len())];
                let mut within = rectangle(random, &part.extent);
                within.origin.iter_mut().zip(&part.origin).for_each(|(at, from)| *at += from);
                chosen.push((tensor, within));
            }
            (_, parts) => chosen.extend(parts.iter().filter(|_| !random.one_in(3)).map(|part| (tensor, part.clone()))),
        }
    }
    if chosen.is_empty() {
        chosen.push((0, Rectangle::whole(tensors[0].shape())));
    }
    let rows = |(_, rectangle): &(usize, Rectangle)| rectangle.extent.split_last().map_or(1, |(_, outer)| outer.iter().product());
    let mut held: Vec<Held> = Vec::new();
    let mut rest = &chosen[..];
    while let Some(first) = rest.first() {
        // Neighbours with equally many rows share a memory.
        let neighbours = rest.iter().take_while(|slice| rows(slice) == rows(first)).count();
        let count = if rows(first) > 1 && random.one_in(2) { neighbours.min(3) } else { 1 };
        let width = tensors[first.0].target.0.dtype.lane_bytes();
        held.push(Held::new(tensors, &rest[..count], random.of(&[0, 0, 1, 3]) * width));
        rest = &rest[count..];
    }
    held
}

/// Makes the arguments of a request wrong. Returns words for it.
fn misplace(random: &mut Random, tensors: &[Made], held: &mut Vec<Held>) -> &'static str {
    let which = random.below(held.len());
    match random.below(5) {
        0 => {
            held[which].slices[0].name = "unknown".to_owned();
            ", unknown name"
        }
        1 if held[which].size > 0 => {
            held[which].size -= 1;
            held[which].slices.iter_mut().for_each(|slice| slice.range.end -= 1);
            ", short memory"
        }
        2 => {
            let slice = &held[which].slices[0];
            let again = Held::new(tensors, &[(slice.tensor, slice.rectangle.clone())], 0);
            held.push(again);
            ", a slice twice"
        }
        3 => {
            held[which].slices[0].rectangle.origin.iter_mut().for_each(|at| *at += 1 << 40);
            ", rectangle outside"
        }
        _ => {
            held[which].slices[0].pitch = Some(1);
            ", pitch of 1"
        }
    }
}

/// What memories with gaps say after an error: whether a byte of a gap was written.
fn gaps(held: &[Vec<u8>], memories: &[Vec<u8>]) -> &'static str {
    let is_kept = |(held, memory): (&Vec<u8>, &Vec<u8>)| held.iter().zip(memory).all(|(&gap, &found)| gap != GAP || found == GAP);
    let is_kept = held.iter().zip(memories).all(is_kept);
    if is_kept { "" } else { ", NEVER: wrote a gap" }
}

/// What the memory says after an application in place: the verdict, and whether an error left it unchanged.
fn in_place(outcome: Result<ApplyReport>, [before, after, expected]: [&[u8]; 3], mode: InPlace) -> String {
    match outcome {
        Ok(report) => applied(&report, after, expected),
        Err(error) => {
            let is_changed = if before == after { "unchanged" } else { "changed" };
            let may_change = mode == InPlace::ChunkByChunk && matches!(error, Error::Poisoned { .. });
            let never = if before == after || may_change { "" } else { NEVER };
            format!("{}, {is_changed} {never}", refused(&error)).trim_end().to_owned()
        }
    }
}

/// Whether chunks that a failed application lists have target lanes, and all others what they had before.
fn is_mixture(error: &Error, pair: &InMemory, tensors: &[&Made], before: &[Vec<u8>], after: &[Vec<u8>]) -> bool {
    let Error::Poisoned { written, .. } = error else { return true };
    tensors.iter().zip(before.iter().zip(after)).all(|(made, (before, after))| {
        pair.index().entries(made.name()).all(|entry| {
            let [before, after, target] = [before, after, &made.target.1].map(|whole| sign::part_bytes(whole, &entry));
            entry.chunks().all(|chunk| {
                let range = sign::chunk_bytes(&entry, chunk);
                after[range.clone()] == if written.contains(&chunk) { &target[..] } else { &before[..] }[range]
            })
        })
    })
}

/// Keeps what it gets.
#[derive(Default)]
struct Kept(Mutex<BTreeMap<(usize, u64), Vec<u8>>>);

impl Sink for Kept {
    fn write(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.0.lock().unwrap().insert((tensor, offset), bytes.to_vec());
        Ok(())
    }
}

/// The bytes that a pair gives its tensors and parts, in the order of its entries.
fn entries_of(pair: &InMemory, target: &[Owned], is_wanted: impl Fn(&str) -> bool) -> Vec<u8> {
    let of = |name: &str| target.iter().find(|(info, _)| info.name == name).map_or(&[][..], |(_, bytes)| bytes);
    let wanted = pair.index().tensors().filter(|entry| is_wanted(entry.name));
    wanted.flat_map(|entry| sign::part_bytes(of(entry.name), &entry)).collect()
}

fn mode_of(random: &mut Random) -> (InPlace, &'static str) {
    random.of(&[
        (InPlace::AllChecked, "all checked"),
        (InPlace::AllChecked, "all checked"),
        (InPlace::ChunkByChunk, "chunk by chunk"),
    ])
}

/// A request for one pair: words for it, and its verdict.
fn request(random: &mut Random, case: &Case, folder: &Path) -> (String, String) {
    let Case { tensors, pair, .. } = case;
    let (target, base) = (target_of(tensors), base_of(tensors));
    let (mut index, mut blob) = (pair.index().as_bytes().to_vec(), pair.blob().clone());
    let kind = random.below(20);
    if kind == 0 {
        let words = break_pair(random, &mut index, &mut blob);
        return (words, verdict(open(index, blob).map(|_| "ok".to_owned())));
    }
    // At most one fault: with two, the one that is found first may change.
    let (mut wrong, mut is_misused, mut is_partial, mut words) = (Wrong::Nothing, false, false, String::new());
    match random.below(10) {
        0..4 => {}
        4 | 5 => wrong = Wrong::new(random, &base, kind < 14),
        6 | 7 => words = damage(random, pair, &mut index, &mut blob),
        8 => is_partial = true,
        _ => is_misused = true,
    }
    words.push_str(&wrong.words(&base));
    let digests = !random.one_in(3);
    words.push_str(if digests { "" } else { ", digests off" });
    let of_base = wrong.base(&base, &target);
    let wrong_base = of_base.as_deref().map(memory);
    let mut opened = open(index, blob);
    if is_partial && kind < 19 {
        let left_out = random.below(pair.index().tensor_count());
        write!(words, ", without entry {left_out}").unwrap();
        opened = opened.and_then(|pair| entries(&pair, |entry| entry != left_out));
    }
    let pair = match &opened {
        Ok(pair) => pair,
        Err(error) => return (format!("open{words}"), refused(error)),
    };
    let mut misused = |what: &str| {
        words.push_str(if is_misused { what } else { "" });
        is_misused
    };
    let apply = wrong_base.iter().fold(Apply::new(pair).digests(digests), |apply, base| apply.base(base));
    let tensor = random.below(tensors.len());
    let made = &tensors[tensor];
    let name = if matches!(kind, 8..11) && misused(", unknown name") { "unknown" } else { made.name() };
    let bytes_of = |before: &dyn Fn(&Made) -> Vec<u8>| tensors.iter().map(before).collect::<Vec<_>>();
    let (before, after) = (bytes_of(&|made| wrong.before(made, &base)), bytes_of(&|made| made.target.1.clone()));
    let zeros = bytes_of(&|made| vec![0; made.before.len()]);
    let filled = |held: &[Held], bytes: &[Vec<u8>]| held.iter().map(|held| held.filled(tensors, bytes)).collect::<Vec<_>>();
    let all = entries_of(pair, &target, |_| true);
    let (what, verdict) = match kind {
        1 => {
            let selected = apply.tensors(|name| name != "t0");
            let found = selected.to_memory().map(|found| found.into_iter().flat_map(|(_, bytes)| bytes).collect::<Vec<_>>());
            let expected = entries_of(pair, &target, |name| name != "t0");
            ("memory but t0".to_owned(), verdict(found.map(|found| given(&found, &expected))))
        }
        2 | 3 => {
            let mut buffers: Vec<_> = pair.index().tensors().map(|entry| vec![GAP; entry.bytes() as usize]).collect();
            if misused(", short buffer") {
                buffers[0].push(0);
            }
            let mut outputs: Vec<_> = buffers.iter_mut().map(|bytes| &mut bytes[..]).collect();
            let outcome = apply.to_buffers(&mut outputs);
            ("buffers".to_owned(), verdict(outcome.map(|report| applied(&report, &buffers.concat(), &all))))
        }
        4 => {
            let kept = Kept::default();
            let outcome = apply.to_sink(&kept);
            let found = kept.0.into_inner().unwrap().into_values().collect::<Vec<_>>().concat();
            ("sink".to_owned(), verdict(outcome.map(|report| applied(&report, &found, &all))))
        }
        5 => ("verify".to_owned(), verdict(apply.verify().map(|report| verified(&report)))),
        6 => {
            let (target, base) = (memory(&target), wrong_base.as_ref());
            let verify = base.into_iter().fold(Verify::new(pair).target(&target), |verify, base| verify.base(base));
            let of = |found: tpde::Verification| {
                format!("{}, {:?}, writable {:?}", verified(&found.checked), found.payload_authenticity, found.writable)
            };
            ("verify with target".to_owned(), verdict(verify.run().map(of)))
        }
        7 => {
            let path = folder.join("file");
            _ = std::fs::remove_file(&path);
            if misused(", file exists") {
                std::fs::write(&path, "x").unwrap();
            }
            let outcome = apply.to_path(&path);
            let found = std::fs::read(&path).unwrap_or_default();
            ("file".to_owned(), verdict(outcome.map(|report| applied(&report, &found, &found))))
        }
        8 => {
            let lanes: u64 = made.shape().iter().product();
            let start = random.below(lanes as usize + 1) as u64;
            let end = start + random.below((lanes - start) as usize + 1) as u64;
            let end = if random.one_in(10) { lanes + 1 } else { end };
            let width = made.target.0.dtype.lane_bytes();
            let expected = made.target.1.get(start as usize * width..end as usize * width).unwrap_or_default();
            let found = apply.range(name, start..end).map(|found| given(&found, expected));
            (format!("range {start}..{end} of {name}"), verdict(found))
        }
        9 => {
            let found = apply.changes(name).map(|changes| {
                let bytes: Vec<_> = changes.positions.iter().flat_map(|at| at.to_le_bytes()).chain(changes.values).collect();
                format!("ok {}, {}", digest(&bytes), changes.positions.len())
            });
            (format!("changes of {name}"), verdict(found))
        }
        10 => {
            let found = apply.moves(name).map(|moves| {
                let counts: Vec<_> = moves.up.iter().chain(&moves.down).flat_map(|count| count.to_le_bytes()).collect();
                format!("ok {}, {} and {}", digest(&counts), moves.changed(), moves.unchanged)
            });
            (format!("moves of {name}"), verdict(found))
        }
        11 | 12 => {
            let mut held = slices(random, tensors, false);
            let from_slices = random.one_in(3) && of_base.is_some();
            let (expected, empty) = (filled(&held, &after), filled(&held, &zeros));
            let mut memories: Vec<_> = held.iter().map(|held| vec![GAP; held.size]).collect();
            let bases = filled(&held, &of_memory(tensors, of_base.as_deref().unwrap_or_default()));
            // A base of which only the slices are held, in the memory's layout.
            let of_slices = held.iter().zip(&bases).flat_map(|(held, memory)| {
                held.slices.iter().map(|slice| {
                    let made = &tensors[slice.tensor];
                    let info = made.base.first().map_or(&made.target.0, |(info, _)| info);
                    let part = Slice::new(info.clone(), slice.rectangle.clone(), &memory[slice.range.clone()]);
                    (made.fits && !made.base.is_empty())
                        .then(|| slice.pitch.into_iter().fold(part, |part, pitch| part.pitch(pitch)))
                })
            });
            let of_slices = SliceCheckpoint::new(of_slices.flatten()).unwrap();
            let apply = if from_slices { apply.base(&of_slices) } else { apply };
            let fault = if misused("") { misplace(random, tensors, &mut held) } else { "" };
            memories.resize_with(held.len(), || vec![GAP; held.last().unwrap().size]);
            memories.iter_mut().zip(&held).for_each(|(memory, held)| memory.truncate(held.size));
            let outcome = apply.to_slices(held.iter().zip(&mut memories).map(|(held, memory)| held.of(memory)));
            let verdict = match outcome {
                Ok(report) => applied(&report, &memories.concat(), &expected.concat()),
                Err(error) => format!("{}{}", refused(&error), gaps(&empty, &memories)),
            };
            (format!("{}{}{fault}", words_of("slices", &held), if from_slices { " from slices" } else { "" }), verdict)
        }
        13 => {
            let path = folder.join("slices");
            _ = std::fs::remove_file(&path);
            let chosen = tensors.iter().filter(|_| !random.one_in(3)).collect::<Vec<_>>();
            let chosen = chosen.into_iter().map(|made| (made.name().to_owned(), rectangle(random, made.shape())));
            let mut chosen: BTreeMap<_, _> = chosen.collect();
            if misused(", unknown name") {
                chosen.insert("unknown".into(), Rectangle::whole(&[1]));
            }
            let outcome = apply.slices_to_path(&chosen, &path);
            let found = std::fs::read(&path).unwrap_or_default();
            let names = chosen.keys().map(String::as_str).collect::<Vec<_>>().join(" ");
            (format!("file of slices {names}"), verdict(outcome.map(|report| applied(&report, &found, &found))))
        }
        14..17 => {
            let (mode, of_mode) = mode_of(random);
            let fits = |made: &&Made| made.fits || random.one_in(8);
            let mut chosen: Vec<_> = tensors.iter().filter(fits).collect();
            chosen.retain(|_| !random.one_in(4));
            if chosen.is_empty() {
                chosen.push(made);
            }
            let place = |made: &Made| tensors.iter().position(|other| other.name() == made.name()).unwrap();
            let of = |all: &[Vec<u8>]| chosen.iter().map(|made| all[place(made)].clone()).collect::<Vec<_>>();
            let (before, expected) = (of(&before), of(&after));
            let mut memories = before.clone();
            let mut names: Vec<_> = chosen.iter().map(|made| made.name()).collect();
            let words_of_names = names.join(" ");
            let mut more = before.first().cloned().unwrap_or_default();
            let mut fault = "";
            match random.below(4) {
                _ if !misused("") => {}
                0 => (names[0], fault) = ("unknown", ", unknown name"),
                1 => (_, fault) = (memories[0].push(GAP), ", long memory"),
                2 => fault = ", a tensor twice",
                _ => fault = ", not selected",
            }
            let apply = Apply::new(pair).digests(digests);
            let not_selected = names.first().filter(|_| fault == ", not selected").copied();
            let apply = if not_selected.is_some() { apply.tensors(|name| Some(name) != not_selected) } else { apply };
            let again = names.first().filter(|_| fault == ", a tensor twice").copied();
            let again = again.map(|name| TensorMut { name, bytes: &mut more });
            let all = names.iter().zip(&mut memories).map(|(&name, bytes)| TensorMut { name, bytes }).chain(again);
            let outcome = apply.in_place(all, mode);
            memories.iter_mut().zip(&before).for_each(|(memory, before)| memory.truncate(before.len()));
            let is_mixture = outcome.as_ref().err().is_none_or(|error| is_mixture(error, pair, &chosen, &before, &memories));
            let verdict = in_place(outcome, [&before.concat(), &memories.concat(), &expected.concat()], mode);
            let never = if is_mixture { "" } else { ", NEVER: chunks are not as listed" };
            (format!("in place {words_of_names}, {of_mode}{fault}"), format!("{verdict}{never}"))
        }
        17 | 18 => {
            let (mode, of_mode) = mode_of(random);
            let mut held = slices(random, tensors, true);
            let (expected, empty) = (filled(&held, &after), filled(&held, &zeros));
            let mut memories = filled(&held, &before);
            let fault = if misused("") { misplace(random, tensors, &mut held) } else { "" };
            memories.resize_with(held.len(), || vec![GAP; held.last().unwrap().size]);
            memories.iter_mut().zip(&held).for_each(|(memory, held)| memory.truncate(held.size));
            let before = memories.concat();
            let slices = held.iter().zip(&mut memories).map(|(held, memory)| held.of(memory));
            let outcome = Apply::new(pair).digests(digests).in_place_slices(slices, mode);
            let gaps = if outcome.is_err() { gaps(&empty, &memories) } else { "" };
            let verdict = in_place(outcome, [&before, &memories.concat(), &expected.concat()], mode);
            (format!("{}, {of_mode}{fault}", words_of("in place slices", &held)), format!("{verdict}{gaps}"))
        }
        _ => {
            let twice = misused(", a half twice");
            let merged = entries(pair, |entry| entry % 2 == 0).and_then(|first| {
                let second = entries(pair, |entry| (entry % 2 == 0) == twice)?;
                let (merged, report) = Merge::new([&first, &second]).to_memory()?;
                let rebuilt = Apply::new(&merged).base(&memory(&base)).to_memory()?;
                let found: Vec<u8> = rebuilt.into_iter().flat_map(|(_, bytes)| bytes).collect();
                Ok(format!("{}, {} entries, {} chunks", given(&found, &all), report.tensors, report.chunks))
            });
            ("merge of halves".to_owned(), verdict(merged))
        }
    };
    (what + &words, verdict)
}

/// The bytes of a base under the numbers of the tensors, as long as the target.
fn of_memory(tensors: &[Made], base: &[Owned]) -> Vec<Vec<u8>> {
    let of = |made: &Made| {
        let found = base.iter().find(|(info, _)| made.base.first().is_some_and(|(of_base, _)| of_base.name == info.name));
        let mut bytes = found.map_or(Vec::new(), |(_, bytes)| bytes.clone());
        bytes.resize(made.target.1.len(), 0);
        bytes
    };
    tensors.iter().map(of).collect()
}

fn words_of(what: &str, held: &[Held]) -> String {
    let names = |held: &Held| held.slices.iter().map(|slice| format!("t{}", slice.tensor)).collect::<Vec<_>>().join("+");
    format!("{what} {}", held.iter().map(names).collect::<Vec<_>>().join(" "))
}

/// Versions, and the pairs that lead from each to the next.
struct Links {
    versions: Vec<Vec<Owned>>,
    pairs: Vec<InMemory>,
}

fn links(random: &mut Random, case: Case) -> Links {
    let mut versions = vec![base_of(&case.tensors), target_of(&case.tensors)];
    let mut pairs = vec![case.pair];
    for step in 0..1 + random.below(2) {
        let mut next = versions.last().unwrap().clone();
        if next.len() > 1 && random.one_in(4) {
            next.remove(random.below(next.len()));
        }
        for (info, bytes) in &mut next {
            let width = info.dtype.lane_bytes();
            if random.one_in(5) && !bytes.is_empty() && !info.shape.is_empty() {
                bytes.extend(vec![step as u8; bytes.len() / info.shape[0] as usize]);
                info.shape[0] += 1;
            }
            *bytes = changed(bytes, width, random.of(&[3, 50, 1 << 20]));
        }
        let format = random.of(&[FormatVersion::V1_1, FormatVersion::V1_2, FormatVersion::V1_3]);
        let (options, _) = options(random, format);
        pairs.push(encode(&next, versions.last().unwrap(), options));
        versions.push(next);
    }
    Links { versions, pairs }
}

/// A request for a chain: words for it, and its verdict.
fn chain_request(random: &mut Random, links: &Links) -> (String, String) {
    let Links { versions, pairs } = links;
    let (base, last) = (&versions[0], versions.last().unwrap());
    let number = random.below(pairs.len());
    let copy = |pair: &InMemory| open(pair.index().as_bytes().to_vec(), pair.blob().clone()).unwrap();
    let mut copies: Vec<_> = pairs.iter().map(copy).collect();
    let (mut wrong, mut words) = (Wrong::Nothing, String::new());
    match random.below(8) {
        0..4 => {}
        4 => wrong = Wrong::new(random, base, true),
        5 | 6 => {
            let pair = &pairs[number];
            let (mut index, mut blob) = (pair.index().as_bytes().to_vec(), pair.blob().clone());
            write!(words, ", pair {}{}", number + 1, damage(random, pair, &mut index, &mut blob)).unwrap();
            match open(index, blob) {
                Ok(damaged) => copies[number] = damaged,
                Err(error) => return (format!("open{words}"), refused(&error)),
            }
        }
        _ if random.one_in(2) => {
            copies.remove(number);
            write!(words, ", no pair {}", number + 1).unwrap();
        }
        _ => {
            copies.push(copy(&pairs[number]));
            write!(words, ", pair {} again", number + 1).unwrap();
        }
    }
    words.push_str(&wrong.words(base));
    let of_base = wrong.base(base, &versions[1]).unwrap_or_default();
    let wrong_base = memory(&of_base);
    let bytes = |version: &[Owned]| version.iter().flat_map(|(_, bytes)| bytes.clone()).collect::<Vec<u8>>();
    let rebuilt = |pair: &InMemory, from: &dyn Checkpoint| -> Result<Vec<u8>> {
        Ok(Apply::new(pair).base(from).to_memory()?.into_iter().flat_map(|(_, bytes)| bytes).collect())
    };
    let is_complete = copies.len() == pairs.len();
    // A chain without a pair, or with one again, may be one of other versions.
    let given = |found: &[u8], expected: &[u8]| if is_complete { given(found, expected) } else { format!("ok {}", digest(found)) };
    let chain = match Chain::new(&wrong_base, &copies) {
        Ok(chain) => chain,
        Err(error) => return (format!("chain{words}"), refused(&error)),
    };
    let (what, outcome) = match random.below(5) {
        0 | 1 => {
            let read = chain.tensors().iter().enumerate().try_fold(Vec::new(), |mut all, (i, info)| -> Result<_> {
                let mut bytes = vec![0; info.bytes() as usize];
                chain.read(i, 0, &mut bytes)?;
                all.extend(bytes);
                Ok(all)
            });
            ("read", read.map(|found| given(&found, &bytes(last))))
        }
        2 => {
            let before = chain.without_last();
            let found = copies.last().map_or(Ok(Vec::new()), |pair| rebuilt(pair, &before));
            let expected = copies.last().map_or(Vec::new(), |pair| entries_of(pair, last, |_| true));
            ("last pair", found.map(|found| given(&found, &expected)))
        }
        3 => {
            let folded = Encode::fold(&chain).to_memory().and_then(|(pair, _)| rebuilt(&pair, &memory(base)));
            ("fold", folded.map(|found| given(&found, &bytes(last))))
        }
        _ => {
            let options = EncodeOptions::default().format(FormatVersion::V1_3);
            let reverted = Encode::revert(&chain).options(options).to_memory().and_then(|(pair, _)| rebuilt(&pair, &memory(last)));
            // Bytes of the base that no later version needs are not compared.
            let mut sorted = of_base.clone();
            sorted.sort_by(|a, b| a.0.name.cmp(&b.0.name));
            ("revert", reverted.map(|found| given(&found, &bytes(&sorted))))
        }
    };
    (format!("{what} of {}{words}", copies.len()), verdict(outcome))
}

/// The heading of a seed, and a line per request.
pub fn lines(seed: u64, folder: &Path) -> Vec<String> {
    // Chunk by chunk, the number of threads says what is written when a chunk fails.
    let pools = [1, 3].map(|threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
    let random = &mut Random::new(seed);
    let case = pools[0].install(|| case(random));
    let mut lines = vec![format!("{seed}: {}", case.words)];
    let mut add = |random: &mut Random, ask: &mut (dyn FnMut(&mut Random) -> (String, String) + Send)| {
        let number = lines.len();
        let seed = random.0.next();
        let mut ask = |pool: usize| {
            let said = catch_unwind(AssertUnwindSafe(|| pools[pool].install(|| ask(&mut Random::new(seed)))));
            said.unwrap_or_else(|_| ("request".to_owned(), format!("{NEVER}: panic")))
        };
        let (words, mut verdict) = ask(0);
        if !words.contains("chunk by chunk") && number % 2 == 0 {
            let (_, of_three) = ask(1);
            if of_three != verdict {
                write!(verdict, ", {NEVER}: with three threads {of_three}").unwrap();
            }
        }
        lines.push(format!("  {number} {words}: {verdict}"));
    };
    if seed % 5 == 4 {
        let links = pools[0].install(|| links(random, case));
        (0..REQUESTS).for_each(|_| add(random, &mut |random| chain_request(random, &links)));
    } else {
        (0..REQUESTS).for_each(|_| add(random, &mut |random| request(random, &case, folder)));
    }
    lines
}

fn check_possible(lines: &[String]) {
    let never: Vec<_> = lines.iter().filter(|line| line.contains(NEVER)).collect();
    assert!(never.is_empty(), "{}: {never:#?}", lines[0]);
}

/// Each line with the heading of its seed.
fn with_headings<'a>(lines: impl IntoIterator<Item = &'a str>) -> impl Iterator<Item = (&'a str, &'a str)> {
    let headed = |heading: &mut &'a str, line: &'a str| {
        if !line.starts_with(' ') {
            *heading = line;
        }
        Some((*heading, line))
    };
    lines.into_iter().scan("", headed)
}

#[test]
fn verdicts_are_those_of_the_table() {
    let folder = tempfile::tempdir().unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/verdicts.txt");
    let table = std::fs::read_to_string(&path).unwrap_or_default();
    let remark = "  # ";
    let expected: Vec<_> = table.lines().map(|line| line.split_once(remark).map_or(line, |(line, _)| line)).collect();
    let all: Vec<_> = SEEDS.map(|seed| lines(seed, folder.path())).collect();
    let found: Vec<_> = all.iter().flatten().map(String::as_str).collect();
    if std::env::var_os("TPDE_BLESS").is_some() {
        all.iter().for_each(|lines| check_possible(lines));
        let remarks = with_headings(table.lines()).filter_map(|(heading, line)| {
            let (line, why) = line.split_once(remark)?;
            Some(((heading, line), why))
        });
        let remarks: BTreeMap<_, _> = remarks.collect();
        let blessed = with_headings(found).map(|(heading, line)| {
            let why = remarks.get(&(heading, line)).map_or(String::new(), |why| format!("{remark}{why}"));
            format!("{line}{why}\n")
        });
        std::fs::write(&path, blessed.collect::<String>()).unwrap();
        return;
    }
    let mut differ = String::new();
    for ((heading, found), expected) in with_headings(found.iter().copied()).zip(&expected) {
        if found != *expected {
            writeln!(differ, "{heading}\n  expected {expected}\n  found    {found}").unwrap();
        }
    }
    assert!(differ.is_empty() && expected.len() == found.len(), "{} lines, {} in the table\n{differ}", found.len(), expected.len());
}

/// With TPDE_LONG=1 many more requests. No request panics, gives other bytes than the target's, changes memory without saying so, or
/// has another verdict with more threads.
#[test]
fn requests_have_possible_verdicts() {
    let folder = tempfile::tempdir().unwrap();
    let more = if std::env::var_os("TPDE_LONG").is_some() { 3000 } else { 20 };
    (SEEDS.end..SEEDS.end + more).for_each(|seed| check_possible(&lines(seed, folder.path())));
}
