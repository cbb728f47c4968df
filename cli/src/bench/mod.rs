//! `tpde bench`: compares the library with XOR and zstd, on the same tensors in the same run.
//!
//! All data is in memory. The contenders alternate within each run, so that a slower phase of the machine affects all of them. A
//! warm-up run, which is not counted, allocates their buffers and contexts. Every rebuilt result is compared with the target.

mod contenders;
#[cfg(feature = "cuda")]
mod gpu;
mod median;
mod memory;
#[cfg(feature = "cuda")]
mod placed;
mod repeated;

use super::common::Common;
use super::device::{DeviceArgs, DeviceName, open_cuda};
use super::inputs::{CodecArgs, open};
use super::text::{self, BOLD, JsonPath};
use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use contenders::{Contender, Form, Ours, Peer};
use median::median;
use repeated::RepeatedCheckpoint;
use serde::Serialize;
use std::fmt;
use std::path::PathBuf;
use std::time::Instant;
use tpde::{Checkpoint, EncodeOptions, MemoryCheckpoint, SafetensorsCheckpoint, TensorInfo};

/// Compare speed and ratio with XOR and zstd, in memory
///
/// The peers encode each tensor as one zstd frame: base XOR target at level 1, the byte planes of base XOR target at level 3, and
/// the target at level 3 with the base as its prefix, as zstd --patch-from does with whole files. Columns with
/// digests include the time for BLAKE3 of all base and target tensors, for every contender.
///
/// With --device cuda: times to encode the target on the device, from device memory to pinned memory (not codec zstd); times to
/// rebuild it, out of place and in place, from payloads in device memory, in pinned memory and in host memory; and times to copy it
/// instead. Measures the codecs conditioned, raw and zstd, or only --codec, which may be device. Checkpoints are then read as
/// needed, so they can be larger than memory.
#[derive(Args)]
pub struct Bench {
    /// Base checkpoint: a .safetensors file, or a folder of such files. On the CPU, both checkpoints are read into memory
    #[arg(value_name = "BASE")]
    base: PathBuf,
    /// Target checkpoint
    #[arg(value_name = "TARGET")]
    target: PathBuf,
    /// Number of measured runs; the results are medians. On a device, slow measurements have fewer runs, but at least 3
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Repeat every tensor N times along its first dimension
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    repeat: u64,
    /// Size of a slice in bytes: payloads are copied to the device slice by slice, while earlier slices are decoded [default: by
    /// size]
    #[arg(long, value_name = "N")]
    slice_bytes: Option<u64>,
    /// Also measure matrices whose rows have gaps between them, as slices of columns have: each row is followed by a gap of its
    /// size. Needs device memory for four more copies of the target
    #[arg(long)]
    gaps: bool,
    /// Measure only this on the CPU, without digests
    #[arg(long, value_name = "TASK", conflicts_with = "device")]
    only: Option<Only>,
    /// Store the digest of each payload in the index, as `tpde encode --payload-digests` does
    #[arg(long)]
    payload_digests: bool,
    #[command(flatten)]
    codec: CodecArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Results on the CPU or on a device.
#[derive(Serialize)]
#[serde(untagged)]
pub enum BenchOutput {
    Cpu(CpuReport),
    #[cfg(feature = "cuda")]
    Gpu(gpu::GpuReport),
}

impl fmt::Display for BenchOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BenchOutput::Cpu(report) => report.fmt(f),
            #[cfg(feature = "cuda")]
            BenchOutput::Gpu(report) => report.fmt(f),
        }
    }
}

/// Results on the CPU.
#[derive(Serialize)]
pub struct CpuReport {
    base: JsonPath,
    target: JsonPath,
    base_bytes: u64,
    target_bytes: u64,
    tensors: usize,
    threads: usize,
    runs: u32,
    contenders: Vec<Measurement>,
}

#[derive(Serialize)]
struct Measurement {
    name: String,
    stored_bytes: u64,
    ratio: Option<f64>,
    encode: Option<Timing>,
    decode: Option<Timing>,
    encode_with_digests: Option<Timing>,
    decode_with_digests: Option<Timing>,
}

#[derive(Serialize)]
struct Timing {
    seconds: f64,
    gb_per_second: f64,
    /// Speed relative to XOR and zstd at level 1.
    to_xor_zstd_1: f64,
    all_seconds: Vec<f64>,
}

/// The timed tasks, in order.
const TASKS: [Task; 4] = [
    Task { decodes: false, digests: false },
    Task { decodes: true, digests: false },
    Task { decodes: false, digests: true },
    Task { decodes: true, digests: true },
];

#[derive(Clone, Copy)]
struct Task {
    decodes: bool,
    digests: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Only {
    Encode,
    Decode,
}

/// A checkpoint read into memory.
struct LoadedCheckpoint {
    infos: Vec<TensorInfo>,
    data: Vec<Vec<u8>>,
}

impl LoadedCheckpoint {
    fn read(checkpoint: &dyn Checkpoint) -> tpde::Result<Self> {
        let infos = checkpoint.tensors().to_vec();
        let read = |(place, info): (usize, &TensorInfo)| {
            let mut bytes = vec![0; info.bytes() as usize];
            checkpoint.read(place, 0, &mut bytes).map(|()| bytes)
        };
        let data = infos.iter().enumerate().map(read).collect::<tpde::Result<Vec<_>>>()?;
        Ok(Self { infos, data })
    }

    fn checkpoint(&self) -> tpde::Result<MemoryCheckpoint<'_>> {
        MemoryCheckpoint::new(self.infos.iter().cloned().zip(self.data.iter().map(Vec::as_slice)))
    }

    fn bytes(&self) -> u64 {
        self.data.iter().map(|bytes| bytes.len() as u64).sum()
    }
}

impl Bench {
    fn options(&self) -> EncodeOptions {
        self.codec.options().payload_digests(self.payload_digests)
    }

    pub fn run(&self, common: &Common) -> anyhow::Result<BenchOutput> {
        self.bench(common).with_context(|| format!("bench {} {}", text::path(&self.base), text::path(&self.target)))
    }

    fn bench(&self, common: &Common) -> anyhow::Result<BenchOutput> {
        self.device.check()?;
        if let DeviceName::Cuda(ordinal) = self.device.device {
            // The device is opened first: if it does not exist, the command fails before checkpoints are read.
            return self.bench_cuda(open_cuda(ordinal)?);
        }
        let (base, target) = self.open()?;
        memory::check(memory_needed(&base, &target))?;
        let (base, target) = (LoadedCheckpoint::read(&base)?, LoadedCheckpoint::read(&target)?);
        let (base_checkpoint, target_checkpoint) = (base.checkpoint()?, target.checkpoint()?);
        let ours = Ours::new(&base_checkpoint, &target_checkpoint, self.options())?;
        let peer = |form, level| Peer::new(ours.pair().index(), &base_checkpoint, &target.data, form, level);
        let (xor, planes, patch) = (peer(Form::Xor, 1)?, peer(Form::Planes, 3)?, peer(Form::Patch, 3)?);
        let mut contenders: [Box<dyn Contender>; 4] = [Box::new(ours), Box::new(xor), Box::new(planes), Box::new(patch)];

        let mut outputs: Vec<Vec<u8>> = target.data.iter().map(|bytes| vec![0; bytes.len()]).collect();
        let mut times = [const { [const { Vec::new() }; TASKS.len()] }; 4];
        let bar = common.bar("bench", u64::from(self.runs + 1) * target.bytes());
        for run in 0..=self.runs {
            for (at, task) in TASKS.into_iter().enumerate().filter(|(_, task)| run == 0 || task.is_in(self.only)) {
                for (contender, times) in contenders.iter_mut().zip(&mut times) {
                    let seconds = task.time(&mut **contender, &target.data, &mut outputs)?;
                    times[at].extend(seconds.filter(|_| run > 0));
                }
            }
            bar.inc(target.bytes());
        }
        bar.finish_and_clear();

        let target_bytes = target.bytes();
        let reference: [f64; TASKS.len()] = std::array::from_fn(|at| median(&times[1][at]));
        let measured = contenders.iter().zip(times).map(|(contender, times)| {
            let mut timings = times.into_iter().zip(reference).map(|(all_seconds, reference)| {
                let seconds = median(&all_seconds);
                let gb_per_second = text::speed(target_bytes, seconds);
                (!all_seconds.is_empty()).then(|| Timing {
                    seconds,
                    gb_per_second,
                    to_xor_zstd_1: reference / seconds,
                    all_seconds,
                })
            });
            let mut next = || timings.next().flatten();
            let stored_bytes = contender.stored_bytes();
            Measurement {
                name: contender.name(),
                stored_bytes,
                ratio: text::ratio(target_bytes, stored_bytes),
                encode: next(),
                decode: next(),
                encode_with_digests: next(),
                decode_with_digests: next(),
            }
        });
        Ok(BenchOutput::Cpu(CpuReport {
            base: JsonPath(self.base.clone()),
            target: JsonPath(self.target.clone()),
            base_bytes: base.bytes(),
            target_bytes,
            tensors: target.data.len(),
            threads: rayon::current_num_threads(),
            runs: self.runs,
            contenders: measured.collect(),
        }))
    }

    fn open(&self) -> tpde::Result<(RepeatedCheckpoint<SafetensorsCheckpoint>, RepeatedCheckpoint<SafetensorsCheckpoint>)> {
        Ok((RepeatedCheckpoint::new(open(&self.base)?, self.repeat)?, RepeatedCheckpoint::new(open(&self.target)?, self.repeat)?))
    }

    #[cfg(feature = "cuda")]
    fn bench_cuda(&self, device: tpde_cuda::Device) -> anyhow::Result<BenchOutput> {
        let (base, target) = self.open()?;
        let settings = gpu::Settings {
            runs: self.runs,
            slice_bytes: self.slice_bytes,
            gaps: self.gaps,
            #[cfg(feature = "nvcomp")]
            nvcomp: self.device.trust.then(tpde_cuda::Nvcomp::load).transpose()?,
        };
        gpu::bench(&device, &base, &target, &self.options(), settings).map(BenchOutput::Gpu)
    }

    #[cfg(not(feature = "cuda"))]
    fn bench_cuda(&self, device: super::device::NoCuda) -> anyhow::Result<BenchOutput> {
        match device {}
    }
}

impl Task {
    fn is_in(self, only: Option<Only>) -> bool {
        only.is_none_or(|only| !self.digests && self.decodes == (only == Only::Decode))
    }

    /// Returns the seconds that a contender takes, or `None` if the contender does not support this task.
    fn time(self, contender: &mut dyn Contender, target: &[Vec<u8>], outputs: &mut [Vec<u8>]) -> anyhow::Result<Option<f64>> {
        if !self.decodes {
            let start = Instant::now();
            return Ok(contender.encode(self.digests)?.then(|| start.elapsed().as_secs_f64()));
        }
        // Overwrites the result of the previous contender, and ensures that all pages exist before the time is measured.
        outputs.iter_mut().for_each(|output| output.fill(0xA5));
        let start = Instant::now();
        contender.decode(self.digests, outputs)?;
        let seconds = start.elapsed().as_secs_f64();
        ensure!(*outputs == *target, "{} has not rebuilt the target", contender.name());
        Ok(Some(seconds))
    }
}

/// Returns the memory needed for contenders and checkpoints, in bytes.
fn memory_needed(base: &dyn Checkpoint, target: &dyn Checkpoint) -> u64 {
    let bytes = |checkpoint: &dyn Checkpoint| checkpoint.tensors().iter().map(TensorInfo::bytes).fold(0, u64::saturating_add);
    let largest = target.tensors().iter().map(TensorInfo::bytes).max().unwrap_or(0);
    // 9 × target: the target, its rebuilt copy, two buffers per peer, and at most one target for the two pairs.
    let copies = bytes(target).saturating_mul(9);
    // Each thread of each of the three peers has the XOR of one tensor.
    let threads = largest.saturating_mul(3 * rayon::current_num_threads() as u64);
    bytes(base).saturating_add(copies).saturating_add(threads)
}

impl fmt::Display for CpuReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{BOLD}{} from {}{BOLD:#}: {} in {}, medians of {} on {}",
            text::path(&self.target),
            text::path(&self.base),
            text::bytes(self.target_bytes),
            text::counted(self.tensors as u64, "tensor"),
            text::counted(self.runs.into(), "run"),
            text::counted(self.threads as u64, "thread"),
        )?;
        writeln!(f, "GB/s of target, and times the speed of XOR + zstd-1; every result equals the target bit for bit\n")?;
        let header = ["", "ratio", "encode", "decode", "encode, digests", "decode, digests"];
        let timing = |timing: &Option<Timing>| match timing {
            None => "–".to_owned(),
            Some(t) => format!("{:.2} ({:.2}x)", t.gb_per_second, t.to_xor_zstd_1),
        };
        let row = |contender: &Measurement| {
            vec![
                contender.name.clone(),
                text::times(contender.ratio),
                timing(&contender.encode),
                timing(&contender.decode),
                timing(&contender.encode_with_digests),
                timing(&contender.decode_with_digests),
            ]
        };
        text::table(f, 1, &header, self.contenders.iter().map(row))
    }
}
