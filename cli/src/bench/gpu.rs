//! `tpde bench --device cuda`: measures the times to encode a target and to rebuild it on a device, and the time to copy it.
//!
//! Device times are measured between events on the stream; wall times, from the call to the end of the wait. Each row is the
//! median of several runs. After each row, the result is compared with the target. The copies are timed in the same process.

use super::median::median;
use super::placed::{PIECE, Placement, pieces};
use crate::text::{self, BOLD};
use anyhow::ensure;
use rayon::prelude::*;
use serde::Serialize;
use std::fmt;
use std::iter;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use tpde::{BaseKind, Checkpoint, Codec, CodecChoice, Encode, EncodeOptions, FormatVersion, InPlace, Pair, ValidatedIndex};
use tpde_cuda::{
    self, Application, ApplyPlan, Binding, Device, DeviceCheckpoint, DeviceIndex, DeviceSlice, Encoder, FirstCall, Hashes, Mode,
    Payloads, PinnedBuffer, Stream,
};

/// Results of all measurements.
#[derive(Serialize)]
pub struct GpuReport {
    pub device: String,
    pub first_call: FirstCall,
    pub target_bytes: u64,
    pub tensors: usize,
    pub lanes: u64,
    /// Lanes that differ from the base.
    pub changed: u64,
    pub threads: usize,
    pub runs: u32,
    /// Times to copy the uncompressed target, and to hash it.
    pub dense: Vec<Row>,
    pub pairs: Vec<OfPair>,
}

/// Results for one codec, or for profile `device`.
#[derive(Serialize)]
pub struct OfPair {
    pub codec: String,
    pub ratio: Option<f64>,
    pub stored_bytes: u64,
    pub chunks: u32,
    pub encode_seconds: f64,
    pub rows: Vec<Row>,
}

/// The digests that an application compares.
#[derive(Clone, Copy)]
struct Checks {
    payloads: bool,
    targets: bool,
}

impl Checks {
    const NOTHING: Self = Self { payloads: false, targets: false };
    const PAYLOADS: Self = Self { payloads: true, targets: false };
    const TARGETS: Self = Self { payloads: false, targets: true };
    const ALL: Self = Self { payloads: true, targets: true };
}

/// Time of one way to get the target.
#[derive(Serialize)]
pub struct Row {
    pub what: String,
    /// Where the payloads, or the target itself, are at the start.
    pub from: &'static str,
    /// `device` for events on the stream, `wall` for the clock of the host.
    pub clock: &'static str,
    pub seconds: f64,
    pub gb_per_second: f64,
    pub all_seconds: Vec<f64>,
}

/// Settings of the measurements.
pub struct Settings {
    pub runs: u32,
    pub slice_bytes: Option<u64>,
    /// Whether matrices are also rebuilt in memory with gaps between their rows.
    pub gaps: bool,
    /// Set if nvCOMP may expand frames; otherwise only the CPU does.
    #[cfg(feature = "nvcomp")]
    pub nvcomp: Option<tpde_cuda::Nvcomp>,
}

/// The base and the output in device memory, and the target, with which results are compared.
struct Fixture<'a> {
    device: &'a Device,
    stream: Stream,
    settings: Settings,
    target: &'a dyn Checkpoint,
    target_bytes: u64,
    memory: Memory,
    /// The same with gaps between the rows of matrices.
    with_gaps: Option<Memory>,
}

/// Device memory of a base and of an output, with the same layout.
struct Memory {
    placed: Placement,
    /// Base tensors at the places of their target tensors.
    base: DeviceSlice,
    output: DeviceSlice,
}

/// The runs of a row end after this many seconds, but there are at least `LEAST_RUNS`.
const ENOUGH: f64 = 3.0;
const LEAST_RUNS: usize = 3;
const MODES: [(&str, Mode); 3] = [
    ("out of place", Mode::OutOfPlace),
    ("in place, chunk by chunk", Mode::InPlace(InPlace::ChunkByChunk)),
    ("in place, all checked", Mode::InPlace(InPlace::AllChecked)),
];
/// Names of the clocks: events on the stream, and the host's clock.
const DEVICE: &str = "device";
const WALL: &str = "wall";
/// Bytes of a piece that one thread processes at a time.
const PART: usize = 1 << 20;
/// Fills memory that nothing may write, or that nothing has written yet.
const GAP: u8 = 0xA5;
/// Maximum size in bytes of the pinned memory from which the target is copied. A larger target is copied in several pieces.
const PINNED: u64 = 1 << 30;

pub fn bench(
    device: &Device,
    base: &dyn Checkpoint,
    target: &dyn Checkpoint,
    options: &EncodeOptions,
    settings: Settings,
) -> anyhow::Result<GpuReport> {
    let target_bytes = target.tensors().iter().map(|info| info.bytes()).sum();
    ensure!(target_bytes > 0, "the target has no bytes");
    let memory = |placed: Placement| -> anyhow::Result<Memory> {
        Ok(Memory { base: device.alloc(placed.bytes)?, output: device.alloc(placed.bytes)?, placed })
    };
    let fixture = Fixture {
        device,
        stream: device.stream()?,
        target,
        target_bytes,
        memory: memory(Placement::dense(target.tensors()))?,
        with_gaps: settings.gaps.then(|| memory(Placement::with_gaps(target.tensors()))).transpose()?,
        settings,
    };
    fixture.load(base)?;
    let dense = fixture.dense()?;
    let (mut lanes, mut changed) = (0, 0);
    let mut pairs = Vec::new();
    // Not `auto`: it codes some tensors with zstd to save a few bytes, and then not all payloads can stay in device memory.
    let codecs = match options.codec {
        CodecChoice::Auto => vec![Codec::Conditioned.into(), Codec::Raw.into(), Codec::Zstd.into()],
        codec => vec![codec],
    };
    for codec in codecs {
        let layout = options.layout.filter(|_| codec == CodecChoice::Only(Codec::Zstd));
        let options = options.clone().codec(codec).layout(layout);
        let start = Instant::now();
        let (pair, report) = Encode::new(target).base(base).options(options.clone()).to_memory()?;
        let encode_seconds = start.elapsed().as_secs_f64();
        lanes = report.tensors.iter().map(|tensor| tensor.lanes).sum();
        changed = report.tensors.iter().map(|tensor| tensor.changed).sum();
        let encoded = fixture.encode(&pair, base, &options)?;
        let mut of_pair = fixture.pair(codec, pair, encode_seconds)?;
        of_pair.rows.splice(0..0, encoded);
        pairs.push(of_pair);
    }
    Ok(GpuReport {
        device: device.name(),
        first_call: device.first_call(),
        target_bytes: fixture.target_bytes,
        tensors: target.tensors().len(),
        lanes,
        changed,
        threads: rayon::current_num_threads(),
        runs: fixture.settings.runs,
        dense,
        pairs,
    })
}

impl Fixture<'_> {
    /// Copies base tensors to the device, for target tensors with a base of the same name.
    fn load(&self, base: &dyn Checkpoint) -> anyhow::Result<()> {
        let mut piece = self.device.pinned(PIECE)?;
        for memory in self.memories() {
            self.stream.fill(&memory.base, GAP)?;
        }
        self.stream.record()?.wait()?;
        for (number, info) in self.target.tensors().iter().enumerate() {
            let Some(place) = base.find(&info.name) else { continue };
            let same = base.tensors()[place] == *info;
            ensure!(same, "a base tensor has another dtype or shape than its target tensor: only bench on the CPU supports this");
            for (offset, size) in pieces(info.bytes()) {
                let piece = &mut piece[..size];
                let read = |(i, part): (usize, &mut [u8])| base.read(place, offset + (i * PART) as u64, part);
                piece.par_chunks_mut(PART).enumerate().try_for_each(read)?;
                for memory in self.memories() {
                    memory.placed.write(self.device, &memory.base, number, offset, piece, GAP)?;
                }
            }
        }
        Ok(self.stream.record()?.wait()?)
    }

    fn memories(&self) -> impl Iterator<Item = &Memory> {
        iter::once(&self.memory).chain(&self.with_gaps)
    }

    /// Measures copies of the uncompressed target, from pinned memory and within the device, and the hashes of all tensors.
    fn dense(&self) -> anyhow::Result<Vec<Row>> {
        let within = self.timed("copy", "device memory", DEVICE, || {
            let start = self.stream.record()?;
            self.stream.copy(&self.memory.output, &self.memory.base)?;
            let end = self.stream.record()?;
            end.wait()?;
            Ok(end.since(&start)?)
        })?;
        let bytes = self.memory.output.bytes();
        // All pieces have the same size. The last one may overlap the one before.
        let step = bytes.div_ceil(bytes.div_ceil(PINNED).max(1));
        let mut pinned = self.device.pinned(step as usize)?;
        self.device.read(&self.memory.base.slice(0, step)?, &mut pinned)?;
        let pinned = Arc::new(pinned);
        let to_device = self.timed("copy", "pinned memory", WALL, || {
            let start = Instant::now();
            for at in (0..bytes).step_by(step as usize) {
                self.stream.copy_in(&self.memory.output.slice(at.min(bytes - step), step)?, &pinned)?;
            }
            self.stream.record()?.wait()?;
            Ok(start.elapsed().as_secs_f64())
        })?;
        let memory = |number| Ok((self.memory.placed.tensor(&self.memory.output, number)?, None));
        let tensors = (0..self.target.tensors().len()).map(memory).collect::<tpde::Result<Vec<_>>>()?;
        let hashes = self.timed("BLAKE3 of all tensors", "device memory", DEVICE, || {
            let start = self.stream.record()?;
            let hashes = Hashes::queue(&self.stream, &tensors)?;
            let end = self.stream.record()?;
            hashes.wait()?;
            end.wait()?;
            Ok(end.since(&start)?)
        })?;
        Ok(vec![within, to_device, hashes])
    }

    /// Encodes on the device, from device memory to pinned memory. There are no rows for codec `zstd`, which a device cannot encode.
    fn encode(&self, pair: &Pair<Vec<u8>>, base: &dyn Checkpoint, options: &EncodeOptions) -> anyhow::Result<Vec<Row>> {
        if tpde_cuda::Encode::check_options(options).is_err() {
            return Ok(Vec::new());
        }
        let target = DeviceCheckpoint::upload(self.device, self.target)?;
        let bases = self.target.tensors().iter().enumerate().filter(|(_, info)| base.find(&info.name).is_some());
        let bases = bases.map(|(number, info)| Ok((info.clone(), self.memory.placed.tensor(&self.memory.base, number)?)));
        let base = DeviceCheckpoint::new(self.device, bases.collect::<tpde::Result<Vec<_>>>()?)?;
        let encoder = Encoder::new();
        let whole = || pair.index().tensors().filter(|tensor| tensor.part.is_none());
        let mut rows = Vec::new();
        for (what, base_is_known, target_is_known) in [
            ("encode, all digests", false, false),
            ("encode, digests of targets", true, false),
            ("encode, digests given", true, true),
        ] {
            if base_is_known && options.format == FormatVersion::V1_1 {
                continue; // roots of format 1.1 need hashes of 32 bytes
            }
            let mut encode = tpde_cuda::Encode::new(&target).base(&base).options(options.clone()).encoder(&encoder);
            if base_is_known {
                let with_base = whole().filter(|tensor| tensor.base_kind != BaseKind::None);
                encode = encode.base_digests(with_base.map(|tensor| (tensor.base_name.to_owned(), *tensor.base_digest())));
            }
            if target_is_known {
                encode = encode.target_digests(whole().map(|tensor| (tensor.name.to_owned(), *tensor.target_digest())));
            }
            rows.push(self.timed(what, "device memory", WALL, || {
                let start = Instant::now();
                let (encoded, _) = encode.to_pinned()?;
                let seconds = start.elapsed().as_secs_f64();
                let is_same = encoded.index().as_bytes() == pair.index().as_bytes() && encoded.blob()[..] == pair.blob()[..];
                ensure!(is_same, "{what}: the pair differs from that of the CPU");
                Ok(seconds)
            })?);
        }
        Ok(rows)
    }

    fn pair(&self, codec: CodecChoice, pair: Pair<Vec<u8>>, encode_seconds: f64) -> anyhow::Result<OfPair> {
        let index = DeviceIndex::upload(self.device, pair.index())?;
        let mut pinned = self.device.pinned(pair.blob().len())?;
        pinned.copy_from_slice(pair.blob());
        let pinned = Arc::new(pinned);
        let on_device = self.device.alloc(pair.blob().len() as u64)?;
        let mut rows = vec![self.payloads_alone(&on_device, &pinned)?];
        let (pinned, on_device, host) = (Payloads::Pinned(pinned), Payloads::Device(on_device), Payloads::Host(pair.blob()));
        let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
        let has_zstd = pair.index().tensors().any(|tensor| tensor.codec == Codec::Zstd);
        #[cfg(feature = "nvcomp")]
        let trusted = match self.settings.nvcomp.as_ref().filter(|_| has_zstd) {
            Some(nvcomp) => Some(index.trust(nvcomp)?), // this process made the pair, so it is trusted
            None => None,
        };
        for (name, mode) in MODES {
            let bindings = self.bindings(&self.memory, pair.index(), &index, mode)?;
            let mut measure =
                |what: &str, index: &DeviceIndex, from, payloads: &Payloads<'_>, clock, compared: Checks| -> anyhow::Result<()> {
                    let plan = match self.settings.slice_bytes {
                        Some(bytes) => ApplyPlan::in_slices(index, &bindings, mode, payloads.clone(), bytes)?,
                        None => ApplyPlan::new(index, &bindings, mode, payloads.clone())?,
                    };
                    let application = Application::prepare(plan.payload_digests(compared.payloads).digests(compared.targets))?;
                    rows.push(self.timed(what, from, clock, || self.launch(&self.memory, &application, mode, clock))?);
                    self.compare(&self.memory, codec)
                };
            let on_device_or_pinned =
                [("device memory", &on_device, DEVICE), ("pinned memory", &pinned, DEVICE), ("pinned memory", &pinned, WALL)];
            if !has_zstd {
                for (from, payloads, clock) in on_device_or_pinned {
                    measure(name, &index, from, payloads, clock, Checks::PAYLOADS)?;
                }
                if pair.index().has_payload_root() {
                    let what = format!("{name}, payload digests not compared");
                    measure(&what, &index, "device memory", &on_device, DEVICE, Checks::NOTHING)?;
                }
                for (digests, compared) in [("digests of targets", Checks::TARGETS), ("all digests", Checks::ALL)] {
                    measure(&format!("{name}, {digests}"), &index, "device memory", &on_device, DEVICE, compared)?;
                }
                measure(&format!("{name}, all digests"), &index, "pinned memory", &pinned, WALL, Checks::ALL)?;
            }
            measure(name, &index, "host memory", &host, WALL, Checks::PAYLOADS)?;
            measure(&format!("{name}, all digests"), &index, "host memory", &host, WALL, Checks::ALL)?;
            if has_zstd && rayon::current_num_threads() > 1 {
                let what = format!("{name}, one thread");
                one_thread.install(|| measure(&what, &index, "host memory", &host, WALL, Checks::PAYLOADS))?;
            }
            #[cfg(feature = "nvcomp")]
            if let Some(trusted) = &trusted {
                for (from, payloads, clock) in on_device_or_pinned {
                    measure(&format!("{name}, nvCOMP"), trusted, from, payloads, clock, Checks::PAYLOADS)?;
                }
            }
        }
        if !has_zstd {
            rows.extend(self.rows_with_gaps(codec, &pair, &index, &on_device)?);
        }
        rows.extend(self.files_opened_anew(codec, &pair)?);
        let stored_bytes = pair.index().size() + pair.index().blob_size();
        Ok(OfPair {
            codec: codec.name().to_owned(),
            ratio: text::ratio(self.target_bytes, stored_bytes),
            stored_bytes,
            chunks: pair.index().chunk_count(),
            encode_seconds,
            rows,
        })
    }

    fn payloads_alone(&self, on_device: &DeviceSlice, pinned: &Arc<PinnedBuffer>) -> anyhow::Result<Row> {
        self.timed("payloads alone", "pinned memory", DEVICE, || {
            let start = self.stream.record()?;
            self.stream.copy_in(on_device, pinned)?;
            let end = self.stream.record()?;
            end.wait()?;
            Ok(end.since(&start)?)
        })
    }

    /// Rows for memory with gaps between the rows of matrices, if the settings ask for them.
    fn rows_with_gaps(
        &self,
        codec: CodecChoice,
        pair: &Pair<Vec<u8>>,
        index: &DeviceIndex,
        payloads: &Payloads<'_>,
    ) -> anyhow::Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (name, mode) in MODES {
            let Some(memory) = &self.with_gaps else { continue };
            let bindings = self.bindings(memory, pair.index(), index, mode)?;
            let application = Application::prepare(ApplyPlan::new(index, &bindings, mode, payloads.clone())?.digests(false))?;
            let what = format!("{name}, rows with gaps");
            rows.push(self.timed(&what, "device memory", DEVICE, || self.launch(memory, &application, mode, DEVICE))?);
            self.compare(memory, codec)?;
        }
        Ok(rows)
    }

    fn files_opened_anew(&self, codec: CodecChoice, pair: &Pair<Vec<u8>>) -> anyhow::Result<Vec<Row>> {
        let files = tpde::TemporaryFolder::create()?;
        std::fs::write(files.path().join("pair.tpde-index"), pair.index().as_bytes())?;
        std::fs::write(files.path().join("pair.tpde-blob"), pair.blob())?;
        let path = files.path().join("pair");
        let mut rows = Vec::new();
        for (name, mode) in MODES {
            for (what, compared) in [(name.to_owned(), Checks::PAYLOADS), (format!("{name}, all digests"), Checks::ALL)] {
                rows.push(self.timed(&what, "files, opened anew", WALL, || self.open_and_launch(&path, mode, compared))?);
                self.compare(&self.memory, codec)?;
            }
        }
        Ok(rows)
    }

    /// Binds tensors. Out of place, bases are in the base's memory, and targets in the output's. In place, both are in the
    /// output's memory.
    fn bindings(&self, memory: &Memory, pair: &ValidatedIndex, index: &DeviceIndex, mode: Mode) -> anyhow::Result<Vec<Binding>> {
        let mut bindings = Vec::new();
        for (number, tensor) in pair.tensors().enumerate() {
            let output = memory.placed.tensor(&memory.output, number)?;
            let base = match (mode, tensor.base_kind) {
                (Mode::OutOfPlace, BaseKind::Same) => Some(memory.placed.tensor(&memory.base, number)?),
                _ => None,
            };
            ensure!(
                index.find_part(tensor.name, &tensor.rectangle()) == Some(tensor.place),
                "the index on the device is not the index of the pair"
            );
            let has_base = base.is_some();
            let mut binding = match mode {
                Mode::OutOfPlace => Binding::out_of_place(tensor.place, base, output),
                _ => Binding::in_place(tensor.place, output),
            };
            if let Some(rows) = memory.placed.rows(number) {
                binding = binding.output_rows(rows);
                if has_base {
                    binding = binding.base_rows(rows);
                }
            }
            bindings.push(binding);
        }
        Ok(bindings)
    }

    /// In place: copies the base to the output again. Out of place: fills the output with a constant.
    fn restore(&self, memory: &Memory, mode: Mode) -> anyhow::Result<()> {
        match mode {
            Mode::OutOfPlace => self.stream.fill(&memory.output, GAP)?,
            _ => self.stream.copy(&memory.output, &memory.base)?,
        }
        Ok(self.stream.record()?.wait()?)
    }

    /// Compares the output with the target, and gaps between rows with what they were filled with.
    fn compare(&self, memory: &Memory, codec: CodecChoice) -> anyhow::Result<()> {
        let codec = codec.name();
        let mut found = self.device.pinned(PIECE)?;
        for (number, info) in self.target.tensors().iter().enumerate() {
            for (offset, size) in pieces(info.bytes()) {
                let unchanged = memory.placed.read(self.device, &memory.output, number, offset, &mut found[..size], GAP)?;
                ensure!(unchanged, "tensor {}: codec {codec} changed a gap between rows", info.name);
                let check = |scratch: &mut Vec<u8>, (i, found): (usize, &[u8])| -> anyhow::Result<()> {
                    let target = self.target.bytes(number, offset + (i * PART) as u64, found.len(), scratch)?;
                    ensure!(found == target, "tensor {} was not rebuilt from codec {codec}", info.name);
                    Ok(())
                };
                found[..size].par_chunks(PART).enumerate().map_init(Vec::new, check).collect::<anyhow::Result<()>>()?;
            }
        }
        Ok(())
    }

    /// Seconds from the launch of an application to its end.
    fn launch(&self, memory: &Memory, application: &Application<'_>, mode: Mode, clock: &str) -> anyhow::Result<f64> {
        self.restore(memory, mode)?;
        if clock == WALL {
            let start = Instant::now();
            application.launch(&self.stream)?.wait()?;
            return Ok(start.elapsed().as_secs_f64());
        }
        let start = self.stream.record()?;
        let pending = application.launch(&self.stream)?;
        let end = self.stream.record()?;
        pending.wait()?;
        end.wait()?;
        Ok(end.since(&start)?)
    }

    /// Seconds to do everything from a path: open the pair, upload its index, and launch. The files are in the page cache, and
    /// payloads are copied in slices.
    fn open_and_launch(&self, path: &Path, mode: Mode, compared: Checks) -> anyhow::Result<f64> {
        self.restore(&self.memory, mode)?;
        let start = Instant::now();
        let pair = Pair::open(path)?;
        let index = DeviceIndex::upload(self.device, pair.index())?;
        let payloads = Payloads::Host(pair.blob());
        let plan = ApplyPlan::new(&index, &self.bindings(&self.memory, pair.index(), &index, mode)?, mode, payloads)?;
        let plan = plan.payload_digests(compared.payloads).digests(compared.targets);
        Application::prepare(plan)?.launch(&self.stream)?.wait()?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn timed(
        &self,
        what: &str,
        from: &'static str,
        clock: &'static str,
        mut run: impl FnMut() -> anyhow::Result<f64>,
    ) -> anyhow::Result<Row> {
        let begin = Instant::now();
        let has_time = || begin.elapsed().as_secs_f64() < ENOUGH;
        run()?;
        if has_time() {
            run()?;
        }
        let mut all_seconds = Vec::new();
        while all_seconds.len() < self.settings.runs as usize && (all_seconds.len() < LEAST_RUNS || has_time()) {
            all_seconds.push(run()?);
        }
        let seconds = median(&all_seconds);
        let gb_per_second = text::speed(self.target_bytes, seconds);
        Ok(Row { what: what.to_owned(), from, clock, seconds, gb_per_second, all_seconds })
    }
}

impl fmt::Display for GpuReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = |duration: std::time::Duration| format!("{:.0} ms", duration.as_secs_f64() * 1e3);
        writeln!(
            f,
            "{BOLD}{}{BOLD:#}: {} in {}, medians of {}",
            self.device,
            text::bytes(self.target_bytes),
            text::counted(self.tensors as u64, "tensor"),
            text::counted(self.runs.into(), "run"),
        )?;
        let FirstCall { context, kernels, memory, .. } = self.first_call;
        writeln!(
            f,
            "every result equals the target bit for bit; before the first: context {}, kernels {}, pinned memory {}\n",
            milliseconds(context),
            milliseconds(kernels),
            milliseconds(memory)
        )?;
        let header = ["codec", "ratio", "", "from", "clock", "ms", "GB/s of target"];
        let row = |codec: &str, ratio: Option<f64>, row: &Row| {
            vec![
                codec.to_owned(),
                if codec.is_empty() { String::new() } else { text::times(ratio) },
                row.what.clone(),
                row.from.to_owned(),
                row.clock.to_owned(),
                format!("{:.3}", row.seconds * 1e3),
                format!("{:.1}", row.gb_per_second),
            ]
        };
        let mut rows: Vec<_> = self.dense.iter().map(|dense| row("", None, dense)).collect();
        for pair in &self.pairs {
            rows.extend(pair.rows.iter().map(|of| row(&pair.codec, pair.ratio, of)));
        }
        text::table(f, 1, &header, rows.into_iter())
    }
}
