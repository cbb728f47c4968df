//! Properties of all pairs of checkpoints and all options: every way of applying restores the target bit for bit, and only the
//! right base is accepted.

use proptest::prelude::*;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use tpde::{
    Apply, BaseKind, Checkpoint, Codec, CodecChoice, Dtype, Encode, EncodeOptions, Error, Favor, InPlace, Layout, Limits,
    MemoryCheckpoint, Pair, Result, Rule, Sink, Source, Tensor, TensorInfo, TensorMut, ValidatedIndex, Verify, Watch,
};
use tpde_core::codec::{ChunkEncoder, Coding};
use tpde_core::sums::chunk_sum;
use tpde_core::writer::{PairBuilder, TensorSpec};

/// A tensor with its bytes.
type Held = (TensorInfo, Vec<u8>);

/// Two checkpoints, and the options for their pair.
#[derive(Debug, Clone)]
struct Case {
    base: Vec<Held>,
    target: Vec<Held>,
    options: EncodeOptions,
}

/// The base of a target tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Origin {
    Nothing,
    OtherDtype,
    Same,
    Renamed,
    /// A base with a different number of rows: `eighths` eighths of the target's rows, plus `more`.
    Rows {
        eighths: u64,
        more: u64,
        renamed: bool,
    },
    /// As [`Origin::Renamed`], and a second target tensor has the same base.
    Tied,
}

/// How lanes change.
#[derive(Debug, Clone, Copy)]
enum Change {
    Steps,
    Bits,
    Specials,
}

#[derive(Debug, Clone)]
struct Recipe {
    dtype: Dtype,
    /// Number of lanes, as whole chunks plus `more`.
    chunks: u64,
    more: i64,
    rank: usize,
    from: Origin,
    change: Change,
    /// Number of changed lanes per 1,024.
    density: u64,
    seed: u64,
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 5
    }

    /// A lane of `width` bytes: random bits or, if `special`, a zero, infinity, subnormal, or NaN with or without payload.
    fn lane(&mut self, width: usize, special: bool) -> [u8; 8] {
        let any = self.next() ^ self.next() << 32;
        if !special {
            return any.to_le_bytes();
        }
        let bits = 8 * width as u32;
        let (exponent, sign) = ([4, 8, 8, 11][width.ilog2() as usize], self.next() & 1);
        let mantissa = bits - 1 - exponent;
        let exponent = if self.next() & 1 == 0 { 0 } else { (1 << exponent) - 1 };
        let payload = [0, 1, 1 << (mantissa - 1), any & ((1 << mantissa) - 1)][self.next() as usize % 4];
        (sign << (bits - 1) | exponent << mantissa | payload).to_le_bytes()
    }

    fn bytes(&mut self, size: usize, width: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(size + 8);
        while bytes.len() < size {
            let special = self.next().is_multiple_of(4);
            bytes.extend(&self.lane(width, special)[..width]);
        }
        bytes
    }
}

/// Minimum number of elements that fill whole bytes.
fn unit(dtype: Dtype) -> u64 {
    match dtype.bits() {
        4 => 2,
        6 => 4,
        _ => 1,
    }
}

impl Recipe {
    fn shape(&self, chunk_lanes: u64) -> Vec<u64> {
        let lanes = (self.chunks * chunk_lanes).saturating_add_signed(self.more);
        let unit = unit(self.dtype);
        let elements = lanes * 8 * self.dtype.lane_bytes() as u64 / self.dtype.bits() / unit * unit;
        match self.rank {
            0 if unit == 1 => vec![],
            0 | 1 => vec![elements],
            2 => vec![elements / unit, unit],
            3 => vec![elements / unit / 3, 3 * unit],
            4 => vec![2, elements / 2 / unit, unit],
            _ => vec![[0, 1 << 40][self.rank % 2], 0, 1 << 60],
        }
    }

    fn cook(&self, i: usize, case: &mut Case) {
        let mut random = Random(self.seed | 1);
        let width = self.dtype.lane_bytes();
        let info = TensorInfo { name: format!("layer.{i}"), dtype: self.dtype, shape: self.shape(case.options.chunk_lanes) };
        let mut base = info.clone();
        match self.from {
            Origin::OtherDtype => base.dtype = if self.dtype == Dtype::I8 { Dtype::U8 } else { Dtype::I8 },
            Origin::Rows { eighths, more, .. } if !base.shape.is_empty() => {
                base.shape[0] = (base.shape[0] * eighths / 8 + more) / unit(self.dtype) * unit(self.dtype);
            }
            _ => {}
        }
        if matches!(self.from, Origin::Renamed | Origin::Rows { renamed: true, .. } | Origin::Tied) {
            base.name = format!("was.{i}");
            case.options.renamed.insert(info.name.clone(), base.name.clone());
        }
        let base_bytes = random.bytes(base.bytes() as usize, width)[..base.bytes() as usize].to_vec();
        let targets = if self.from == Origin::Tied { 2 } else { 1 };
        for twin in 0..targets {
            let mut info = info.clone();
            if twin == 1 {
                info.name = format!("head.{i}");
                case.options.renamed.insert(info.name.clone(), base.name.clone());
            }
            let mut bytes = base_bytes.clone();
            bytes.resize(info.bytes() as usize, 0);
            for lane in bytes.chunks_mut(width).filter(|_| self.density > 0) {
                if random.next() % 1024 < self.density {
                    match self.change {
                        Change::Steps => lane[0] = lane[0].wrapping_add(random.next() as u8 % 9),
                        Change::Bits => lane.copy_from_slice(&random.lane(width, false)[..width]),
                        Change::Specials => lane.copy_from_slice(&random.lane(width, true)[..width]),
                    }
                }
            }
            case.target.push((info, bytes));
        }
        if self.from != Origin::Nothing {
            case.base.push((base, base_bytes));
        }
    }
}

fn recipe(from: impl Strategy<Value = Origin>) -> impl Strategy<Value = Recipe> {
    let dtype = proptest::sample::select(Dtype::ALL);
    let change = proptest::sample::select(&[Change::Steps, Change::Bits, Change::Specials][..]);
    let density = prop_oneof![Just(0), Just(1), Just(20), 0..1025u64, Just(1024)];
    let more = prop_oneof![-1..2i64, 0..70i64, Just(-4096)];
    (dtype, 0..4u64, more, 0..7usize, from, change, density, any::<u64>()).prop_map(
        |(dtype, chunks, more, rank, from, change, density, seed)| Recipe {
            dtype,
            chunks,
            more,
            rank,
            from,
            change,
            density,
            seed,
        },
    )
}

fn any_base() -> impl Strategy<Value = Origin> {
    let rows = (0..17u64, 0..3u64, any::<bool>()).prop_map(|(eighths, more, renamed)| Origin::Rows { eighths, more, renamed });
    let others = [Origin::Nothing, Origin::OtherDtype, Origin::Same, Origin::Same, Origin::Renamed, Origin::Tied];
    prop_oneof![5 => proptest::sample::select(others.to_vec()), 2 => rows]
}

fn case_of(from: impl Strategy<Value = Origin>) -> impl Strategy<Value = Case> {
    let layouts: Vec<_> = Layout::ALL.iter().map(|&layout| (Codec::Zstd.into(), Some(layout))).collect();
    let codecs: Vec<_> = CodecChoice::ALL.iter().map(|&codec| (codec, None)).collect();
    let ways = prop_oneof![
        7 => proptest::sample::select(codecs),
        3 => proptest::sample::select(layouts)
    ];
    let chunk_lanes = prop_oneof![3 => Just(1 << 12), 1 => (12..17u32).prop_map(|log2| 1u64 << log2)];
    let favor = proptest::sample::select(Favor::ALL);
    (proptest::collection::vec(recipe(from), 0..5), ways, chunk_lanes, favor).prop_map(
        |(recipes, (codec, layout), chunk_lanes, favor)| {
            let options = EncodeOptions::default().codec(codec).layout(layout).chunk_lanes(chunk_lanes).favor(favor);
            let mut case = Case { base: Vec::new(), target: Vec::new(), options };
            for (i, recipe) in recipes.iter().enumerate() {
                recipe.cook(i, &mut case);
            }
            case.target.sort_by(|a, b| a.0.name.cmp(&b.0.name));
            case
        },
    )
}

/// An end of a range: a number of chunks, plus or minus some units of elements.
fn end_of_range() -> impl Strategy<Value = (u64, i64)> {
    (0..5u64, prop_oneof![-1..2i64, -5000..5000i64])
}

fn memory(held: &[Held]) -> MemoryCheckpoint<'_> {
    MemoryCheckpoint::new(held.iter().map(|(info, bytes)| (info.clone(), &bytes[..]))).unwrap()
}

fn encode(case: &Case) -> Pair<Vec<u8>> {
    Encode::new(&memory(&case.target)).base(&memory(&case.base)).options(case.options.clone()).to_memory().unwrap().0
}

fn slices(buffers: &mut [Vec<u8>]) -> Vec<&mut [u8]> {
    buffers.iter_mut().map(|buffer| &mut buffer[..]).collect()
}

/// Contents before a change in place: the base lanes, or a constant for tensors without a base. Tensors with another number of
/// rows are left out.
fn in_place_of<'a, B: Source>(pair: &'a Pair<B>, base: &[Held]) -> Vec<(&'a str, Vec<u8>)> {
    let tensors = pair.index().tensors().filter(|tensor| tensor.base_kind != BaseKind::Prefix);
    let lanes = tensors.map(|tensor| match tensor.base_kind {
        BaseKind::None => (tensor.name, vec![0xA5; tensor.bytes() as usize]),
        _ => (tensor.name, base.iter().find(|(info, _)| info.name == tensor.base_name).unwrap().1.clone()),
    });
    lanes.collect()
}

fn tensors_mut<'a>(lanes: &'a mut [(&str, Vec<u8>)]) -> Vec<TensorMut<'a>> {
    lanes.iter_mut().map(|(name, bytes)| TensorMut { name, bytes }).collect()
}

fn target_of<'a>(case: &'a Case, name: &str) -> &'a [u8] {
    &case.target.iter().find(|(info, _)| info.name == name).unwrap().1
}

struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Sink for Buffers {
    fn write(&self, place: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.0.lock().unwrap()[place][offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

/// A blob that records which parts are read.
struct Watched {
    bytes: Vec<u8>,
    reads: Mutex<Vec<(u64, usize)>>,
}

impl Source for Watched {
    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.reads.lock().unwrap().push((offset, out.len()));
        out.copy_from_slice(&self.bytes[offset as usize..][..out.len()]);
        Ok(())
    }
}

/// Flips a bit in one of the base tensors that the pair reads. Returns the changed base and the name of that tensor.
fn wrong_base(case: &Case, pair: &Pair<Vec<u8>>, at: usize) -> Option<(Vec<Held>, String)> {
    let used: Vec<_> = pair.index().tensors().filter(|tensor| tensor.base_bytes() > 0).map(|tensor| tensor.base_name).collect();
    let name = used.get(at % used.len().max(1))?.to_string();
    let mut base = case.base.clone();
    let bytes = &mut base.iter_mut().find(|(info, _)| info.name == name).unwrap().1;
    let at = at % bytes.len();
    bytes[at] ^= 1 << (at % 8);
    Some((base, name))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_way_of_applying_gives_the_target(case in case_of(any_base())) {
        let (base, target) = (memory(&case.base), memory(&case.target));
        let (pair, report) = Encode::new(&target).base(&base).options(case.options.clone()).to_memory().unwrap();
        pair.verify().unwrap();
        Verify::new(&pair).target(&target).run().unwrap();
        for (tensor, (info, bytes)) in report.tensors.iter().zip(&case.target) {
            prop_assert_eq!(&tensor.name, &info.name);
            let found = pair.index().find(&info.name).unwrap();
            let base = case.base.iter().find(|(base, _)| found.base_kind != BaseKind::None && base.name == found.base_name);
            let mut before = base.map_or(Vec::new(), |(_, bytes)| bytes.clone());
            before.resize(bytes.len(), 0);
            let width = info.dtype.lane_bytes();
            let changed = before.chunks(width).zip(bytes.chunks(width)).filter(|(before, after)| before != after).count();
            prop_assert_eq!(tensor.changed, changed as u64);
        }

        let apply = Apply::new(&pair).base(&base);
        apply.verify().unwrap();
        let mut outputs: Vec<_> = case.target.iter().map(|(_, bytes)| vec![0xA5; bytes.len()]).collect();
        apply.to_buffers(&mut slices(&mut outputs)).unwrap();
        prop_assert!(outputs.iter().eq(case.target.iter().map(|(_, bytes)| bytes)));
        let sink = Buffers(Mutex::new(case.target.iter().map(|(_, bytes)| vec![0xA5; bytes.len()]).collect()));
        apply.to_sink(&sink).unwrap();
        prop_assert!(sink.0.into_inner().unwrap() == outputs);
        for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
            let mut lanes = in_place_of(&pair, &case.base);
            Apply::new(&pair).in_place(tensors_mut(&mut lanes), mode).unwrap();
            for (name, bytes) in &lanes {
                prop_assert!(bytes == target_of(&case, name), "{mode:?} {name}");
            }
        }
    }

    #[test]
    fn a_range_reads_the_payloads_of_its_chunks_and_no_others(
        case in case_of(any_base()),
        from in end_of_range(),
        to in end_of_range(),
    ) {
        let pair = encode(&case);
        let index = ValidatedIndex::parse(pair.index().as_bytes().to_vec(), &Limits::default()).unwrap();
        let pair = Pair::new(index, Watched { bytes: pair.blob().clone(), reads: Mutex::default() }).unwrap();
        let base = memory(&case.base);
        for (info, bytes) in &case.target {
            let (bits, unit) = (info.dtype.bits(), unit(info.dtype));
            let units = bytes.len() as u64 * 8 / bits / unit;
            let chunk_units = case.options.chunk_lanes * 8 * info.dtype.lane_bytes() as u64 / bits / unit;
            let place = |(chunks, more): (u64, i64)| (chunks * chunk_units).saturating_add_signed(more).min(units);
            let (from, to) = (place(from), place(to));
            let elements = from.min(to) * unit..from.max(to) * unit;
            pair.blob().reads.lock().unwrap().clear();
            let range = Apply::new(&pair).base(&base).range(&info.name, elements.clone()).unwrap();
            let bytes_of = |elements: &Range<u64>| (elements.start * bits / 8) as usize..(elements.end * bits / 8) as usize;
            prop_assert!(range == bytes[bytes_of(&elements)]);

            let tensor = pair.index().find(&info.name).unwrap();
            let width = info.dtype.lane_bytes() as u64;
            let mut expected = Vec::new();
            for record in &pair.index().records()[tensor.first_chunk as usize..][..tensor.chunk_count as usize] {
                let start = record.output_offset.get() * width;
                let end = start + tensor.chunk_lanes * width;
                let wanted = bytes_of(&elements);
                if record.num_deltas.get() > 0 && start < wanted.end as u64 && (wanted.start as u64) < end && !wanted.is_empty() {
                    expected.push((record.blob_offset.get(), record.compressed_size.get().next_multiple_of(16) as usize));
                }
            }
            // Threads read in any order.
            let mut reads = pair.blob().reads.lock().unwrap();
            reads.sort_unstable();
            prop_assert_eq!(&*reads, &expected);
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_byte(case in case_of(any_base())) {
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| encode(&case))
        };
        let (one, two) = (with(1), with(2));
        prop_assert!(one.index().as_bytes() == two.index().as_bytes());
        prop_assert!(one.blob() == two.blob());
    }

    /// The sizes of table sets, of tensor entries and of ways that are clearly larger are only estimated by the choice.
    #[test]
    fn codec_auto_takes_the_smallest(case in case_of(any_base())) {
        let with = |codec| {
            let options = case.options.clone().codec(codec).layout(None).chunk_lanes(1 << 16);
            encode(&Case { options, ..case.clone() })
        };
        let size = |codec| {
            let pair = with(codec);
            pair.index().size() + pair.blob().len() as u64
        };
        let named: Vec<_> = Codec::ALL.iter().map(|&codec| (codec, size(codec.into()))).collect();
        for choice in [CodecChoice::Auto, CodecChoice::Device] {
            let known = |codec| choice == CodecChoice::Auto || codec != Codec::Zstd;
            let pair = with(choice);
            prop_assert!(pair.index().tensors().all(|tensor| known(tensor.codec)));
            let best = named.iter().filter(|(codec, _)| known(*codec)).map(|(_, size)| *size).min().unwrap_or_default();
            let size = pair.index().size() + pair.blob().len() as u64;
            prop_assert!(size <= best + best / 16 + 128, "{:?}: {} bytes, {}", choice, size, best);
        }
    }

    #[test]
    fn another_base_is_refused_by_the_tensor_that_it_is_the_base_of(case in case_of(any_base()), at: usize) {
        let pair = encode(&case);
        let Some((base, name)) = wrong_base(&case, &pair, at) else { return Ok(()) };
        // A flipped bit may turn the base into the target.
        prop_assume!(base.iter().all(|(_, bytes)| case.target.iter().all(|(_, target)| bytes != target)));
        let is_wrong = |error: Error| {
            let Error::WrongBase { tensor, base, chunk, rule, .. } = error else { return false };
            let Some(entry) = pair.index().find(&tensor) else { return false };
            let in_tensor = chunk.map_or(rule == Rule::TensorBaseDigest, |chunk| {
                rule == Rule::ChunkBaseSum && entry.chunks().contains(&chunk)
            });
            base == name && entry.base_name == name && in_tensor
        };
        prop_assert!(Apply::new(&pair).base(&memory(&base)).verify().is_err_and(is_wrong));
        let mut outputs: Vec<_> = case.target.iter().map(|(_, bytes)| vec![0; bytes.len()]).collect();
        prop_assert!(Apply::new(&pair).base(&memory(&base)).to_buffers(&mut slices(&mut outputs)).is_err_and(is_wrong));

        let before = in_place_of(&pair, &base);
        let mut lanes = before.clone();
        let used_in_place = pair.index().tensors().any(|tensor| tensor.base_kind == BaseKind::Same && tensor.base_name == name);
        match Apply::new(&pair).in_place(tensors_mut(&mut lanes), InPlace::AllChecked) {
            Ok(_) => prop_assert!(!used_in_place),
            Err(error) => prop_assert!(used_in_place && is_wrong(error) && lanes == before),
        }
    }

    #[test]
    fn the_target_as_base_is_called_applied_already(case in case_of(Just(Origin::Same))) {
        let pair = encode(&case);
        // A tensor coded without its base cannot detect a wrong one.
        let has_base = |i: usize| pair.index().tensors().nth(i).is_some_and(|tensor| tensor.base_kind != BaseKind::None);
        let mut tensors = case.base.iter().zip(&case.target).enumerate();
        let changed = tensors.any(|(i, ((_, base), (_, target)))| base != target && has_base(i));
        let is_right = |again: Result<()>| if changed { matches!(again, Err(Error::AlreadyApplied { .. })) } else { again.is_ok() };
        let again = Apply::new(&pair).base(&memory(&case.target)).verify().map(|_| ());
        prop_assert!(is_right(again));
        let mut before = in_place_of(&pair, &case.target);
        before.iter_mut().for_each(|(name, lanes)| lanes.copy_from_slice(target_of(&case, name)));
        let mut lanes = before.clone();
        let again = Apply::new(&pair).in_place(tensors_mut(&mut lanes), InPlace::AllChecked).map(|_| ());
        prop_assert!(is_right(again));
        prop_assert!(lanes == before);
        let again = Apply::new(&pair).in_place(tensors_mut(&mut lanes), InPlace::ChunkByChunk).map(|_| ());
        // Chunks that need no base may already have been written.
        let written = changed && matches!(again, Err(Error::Poisoned { .. }));
        prop_assert!(written || is_right(again));
        prop_assert!(lanes == before);
    }

    #[test]
    fn changes_are_what_differs(case in case_of(any_base())) {
        let pair = encode(&case);
        let base = memory(&case.base);
        let apply = Apply::new(&pair).base(&base);
        for tensor in pair.index().tensors() {
            let target = target_of(&case, tensor.name);
            let mut old = vec![0; target.len()];
            if let (Some(place), true) = (base.find(tensor.base_name), tensor.base_kind != BaseKind::None) {
                let present = (tensor.base_bytes() as usize).min(old.len());
                base.read(place, 0, &mut old[..present]).unwrap();
            }
            let size = tensor.element_bytes();
            let changes = apply.changes(tensor.name).unwrap();
            let differing = old.chunks(size).zip(target.chunks(size)).enumerate().filter(|(_, (old, new))| old != new);
            let (positions, values): (Vec<_>, Vec<_>) = differing.map(|(i, (_, new))| (i as u64, new)).unzip();
            prop_assert_eq!(changes.positions, positions);
            prop_assert_eq!(changes.values, values.concat());
        }
    }

    /// A watcher can cancel any work, and cancelled work leaves the state that its mode promises.
    #[test]
    fn work_that_is_cancelled_ends(case in case_of(any_base()), after in 0u32..4) {
        struct Stop { after: u32, asked: AtomicU32 }
        impl Watch for Stop {
            fn done(&self, _: u64) -> Result<()> {
                if self.asked.fetch_add(1, Ordering::Relaxed) >= self.after { Err(Error::Cancelled) } else { Ok(()) }
            }
        }
        let stop = || Stop { after, asked: AtomicU32::new(0) };
        // Work is cancelled exactly if it called the watcher often enough.
        let is_right = |stop: &Stop, outcome: Result<()>| match outcome {
            Ok(()) => stop.asked.load(Ordering::Relaxed) <= after,
            Err(Error::Cancelled) => stop.asked.load(Ordering::Relaxed) > after,
            Err(_) => false,
        };
        let pair = encode(&case);
        let (base, target) = (memory(&case.base), memory(&case.target));
        let watch = stop();
        prop_assert!(is_right(&watch, Apply::new(&pair).base(&base).watch(&watch).verify().map(|_| ())));
        let watch = stop();
        prop_assert!(is_right(&watch, pair.verify_with(&watch).map(|_| ())));
        let watch = stop();
        prop_assert!(is_right(&watch, Verify::new(&pair).target(&target).watch(&watch).run().map(|_| ())));
        let watch = stop();
        let encoded = Encode::new(&target).base(&base).options(case.options.clone()).watch(&watch).to_memory();
        prop_assert!(is_right(&watch, encoded.map(|_| ())));

        let before = in_place_of(&pair, &case.base);
        let mut lanes = before.clone();
        let watch = stop();
        let outcome = Apply::new(&pair).watch(&watch).in_place(tensors_mut(&mut lanes), InPlace::AllChecked).map(|_| ());
        prop_assert!(outcome.is_ok() || lanes == before);
        prop_assert!(is_right(&watch, outcome));
        let mut lanes = before.clone();
        let watch = stop();
        match Apply::new(&pair).watch(&watch).in_place(tensors_mut(&mut lanes), InPlace::ChunkByChunk) {
            Err(Error::Poisoned { source, .. }) => prop_assert!(matches!(*source, Error::Cancelled)),
            outcome => prop_assert!(is_right(&watch, outcome.map(|_| ()))),
        }
    }

    /// Mode `AllChecked` changes no byte. Mode `ChunkByChunk` reports which chunks hold the target; all others are unchanged.
    #[test]
    fn a_failure_in_place_is_told_exactly(case in case_of(any_base()), at: usize, flip in 1u8..) {
        let pair = encode(&case);
        let before = in_place_of(&pair, &case.base);
        let tensors: Vec<Tensor<'_>> = before.iter().map(|(name, _)| pair.index().find(name).unwrap()).collect();
        let records = pair.index().records();
        let is_stored = |chunk: &u32| records[*chunk as usize].num_deltas.get() > 0;
        let stored: Vec<u32> = tensors.iter().flat_map(Tensor::chunks).filter(is_stored).collect();
        prop_assume!(!stored.is_empty());
        let damaged = stored[at % stored.len()];
        let record = &records[damaged as usize];
        let mut blob = pair.blob().clone();
        blob[record.blob_offset.get() as usize + at % record.compressed_size.get() as usize] ^= flip;
        let index = ValidatedIndex::parse(pair.index().as_bytes().to_vec(), &Limits::default()).unwrap();
        let pair = Pair::new(index, blob).unwrap();
        let is_right = |error: &Error| match error {
            Error::Invalid(invalid) => invalid.rule == Rule::PayloadCrc32 && invalid.at.chunk == Some(damaged),
            _ => false,
        };

        let mut lanes = before.clone();
        let error = Apply::new(&pair).in_place(tensors_mut(&mut lanes), InPlace::AllChecked).unwrap_err();
        prop_assert!(is_right(&error) && lanes == before, "{error}");

        let (written, error) = match Apply::new(&pair).in_place(tensors_mut(&mut lanes), InPlace::ChunkByChunk).unwrap_err() {
            Error::Poisoned { written, source, .. } => (written, *source),
            error => (Vec::new(), error),
        };
        prop_assert!(is_right(&error) && !written.contains(&damaged), "{error}");
        for ((name, lanes), (_, before)) in lanes.iter().zip(&before) {
            let tensor = pair.index().find(name).unwrap();
            for chunk in tensor.chunks() {
                let (range, width) = (tensor.chunk_range(chunk), tensor.lane_bytes());
                let bytes = range.start as usize * width..range.end as usize * width;
                let expected = if written.contains(&chunk) { target_of(&case, name) } else { before };
                prop_assert!(lanes[bytes.clone()] == expected[bytes], "{name}, chunk {chunk}, written {written:?}");
            }
        }
    }
}

/// More data than is processed at once: tensors of several dtypes, whose tables come from samples of all of them.
#[test]
fn the_number_of_threads_changes_no_byte_of_large_tensors() {
    let mut case = Case { base: Vec::new(), target: Vec::new(), options: EncodeOptions::default() };
    case.options.chunk_lanes = 1 << 18;
    for (i, (dtype, chunks, from, density)) in [
        (Dtype::Bf16, 64, Origin::Same, 15),
        (Dtype::F32, 20, Origin::Same, 300),
        (Dtype::Bf16, 4, Origin::Nothing, 0),
        (Dtype::I8, 9, Origin::Rows { eighths: 5, more: 1, renamed: false }, 40),
    ]
    .into_iter()
    .enumerate()
    {
        let recipe = Recipe { dtype, chunks, more: 77, rank: 2, from, change: Change::Steps, density, seed: i as u64 };
        recipe.cook(i, &mut case);
    }
    assert!(case.target.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() > 50 << 20);
    for codec in [CodecChoice::Auto, CodecChoice::Device, Codec::Conditioned.into()] {
        case.options.codec = codec;
        let with = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| encode(&case));
        let one = with(1);
        for threads in [2, 5] {
            let more = with(threads);
            assert!(one.index().as_bytes() == more.index().as_bytes(), "{codec:?}, {threads} threads");
            assert!(one.blob() == more.blob(), "{codec:?}, {threads} threads");
        }
        let mut outputs: Vec<_> = case.target.iter().map(|(_, bytes)| vec![0xA5; bytes.len()]).collect();
        Apply::new(&one).base(&memory(&case.base)).to_buffers(&mut slices(&mut outputs)).unwrap();
        assert!(outputs.iter().eq(case.target.iter().map(|(_, bytes)| bytes)));
    }
}

/// A checkpoint with one tensor that is too large for memory.
struct Endless([TensorInfo; 1]);

fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

impl Checkpoint for Endless {
    fn tensors(&self) -> &[TensorInfo] {
        &self.0
    }

    fn read(&self, place: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        assert!(offset + out.len() as u64 <= self.0[place].bytes(), "a read past the end of the base");
        out.iter_mut().zip(offset..).for_each(|(byte, offset)| *byte = byte_at(offset));
        Ok(())
    }
}

/// Offsets, lanes and bytes beyond 32 bits, near the ends of base and target and near the 32-bit boundary.
#[test]
fn tensors_beyond_32_bits_are_located_and_decoded() {
    const COLUMNS: u64 = 1 << 16;
    for dtype in [Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F64, Dtype::C64, Dtype::F4] {
        let rows = (1 << 17) + 5;
        for (base_kind, base_rows) in [(BaseKind::None, 0), (BaseKind::Prefix, rows - 3), (BaseKind::Prefix, rows + 9)] {
            let shape = vec![rows, COLUMNS];
            let width = dtype.lane_bytes();
            let lanes = dtype.lanes(&shape).unwrap();
            assert!(rows * COLUMNS > 1 << 33);
            let chunk_lanes_log2 = 22 - width.ilog2() as u8;
            let chunk_lanes = 1u64 << chunk_lanes_log2;
            let base_info = TensorInfo { name: "w".into(), dtype, shape: vec![base_rows, COLUMNS] };
            let base_bytes = if base_kind == BaseKind::None { 0 } else { base_info.bytes() };
            let lane_before = |lane: u64| {
                (lane * width as u64..(lane + 1) * width as u64).map(|at| if at < base_bytes { byte_at(at) } else { 0 })
            };
            let last = lanes.div_ceil(chunk_lanes) - 1;
            // The last lane of the last chunk changes. Of the other chunks, only those decoded below get sums.
            let decoded =
                [0, ((1 << 32) - 1) / chunk_lanes, (1 << 32) / chunk_lanes, base_bytes / width as u64 / chunk_lanes, last];

            let spec = TensorSpec {
                name: "w".into(),
                base_name: None,
                dtype,
                shape,
                part: None,
                base_kind,
                base_param: base_rows,
                derived: None,
                codec: Codec::Zstd,
                tables: None,
                chunk_lanes_log2,
            };
            let mut builder = PairBuilder::new(Vec::new(), "memory".into(), Default::default()).unwrap();
            builder.begin_tensor(&spec);
            for chunk in 0..=last {
                let (mut payload, mut encoded, mut sums) = (Vec::new(), Default::default(), (0, 0));
                if decoded.contains(&chunk) {
                    let base: Vec<u8> = (chunk * chunk_lanes..lanes.min((chunk + 1) * chunk_lanes)).flat_map(lane_before).collect();
                    let mut target = base.clone();
                    if chunk == last {
                        *target.last_mut().unwrap() ^= 0x55;
                        let mut encoder = ChunkEncoder::new().unwrap();
                        encoded = encoder.encode(Coding::Zstd(None), dtype, &base, &target, &mut payload).unwrap();
                    }
                    sums = (chunk_sum(&base), chunk_sum(&target));
                }
                builder.chunk(&payload, encoded, sums.0, sums.1).unwrap();
            }
            let digest = blake3::hash(b"");
            builder.end_tensor((base_kind != BaseKind::None).then_some(digest), digest);
            let pair = Pair::try_from(builder.finish().unwrap()).unwrap();

            let tensor = pair.index().find("w").unwrap();
            assert_eq!((tensor.lanes, u64::from(tensor.chunk_count)), (lanes, last + 1));
            assert_eq!(tensor.chunk_range(last as u32), last * chunk_lanes..lanes);
            assert_eq!(tensor.base_bytes(), base_bytes);
            let base = Endless([base_info]);
            let elements = rows * COLUMNS;
            let element_of = |lane: u64| lane * 8 * width as u64 / dtype.bits();
            let around = |element: u64| element.saturating_sub(6) / 2 * 2..(element + 6).min(elements) / 2 * 2;
            let ends = [0, element_of(1 << 32), element_of(base_bytes / width as u64).min(elements), elements];
            for range in ends.map(around) {
                let (found, chunks) = tensor.locate(range.clone()).unwrap();
                let expected: Vec<u64> = (found.start / chunk_lanes..=(found.end - 1) / chunk_lanes).collect();
                assert!(chunks.clone().map(u64::from).eq(expected), "{dtype} {range:?} {chunks:?}");
                let mut expected: Vec<u8> = found.clone().flat_map(lane_before).collect();
                if found.end == lanes {
                    *expected.last_mut().unwrap() ^= 0x55;
                }
                assert_eq!(Apply::new(&pair).base(&base).range("w", range).unwrap(), expected);
            }
            assert!(tensor.locate(elements - 2..elements + 2).is_err());
            assert!(tensor.locate(0..u64::MAX).is_err());
        }
    }
}
