//! Encodes all tensors, and assembles the pair in their order.

use super::assembly::Assembly;
use super::blob::Blob;
use super::chunks::{self, Analysis, Tables};
use super::digests::Digests;
use super::job::{Job, unsupported};
use super::limits::{Limits, WORKERS};
use super::session::{Session, SessionGuard};
use super::source::Source;
use super::train;
use super::waves::Waves;
use crate::runtime::driver::{EnterGuard, RawEvent};
use crate::runtime::stream::Stream;
use std::sync::OnceLock;
use tpde::internals::{Plan, Selection, check_holdable, check_options, report};
use tpde::{Checkpoint, CodecChoice, EncodeOptions, EncodeReport};
use tpde_core::codec::Codec;
use tpde_core::error::{Error, Result};
use tpde_core::format::FormatVersion;
use tpde_core::writer::{FileSpec, Finished, PairBuilder};

/// Encodes into `builder`. `files` describes the files that readers rebuild, if all tensors are encoded.
pub(super) fn encode<W: Blob>(job: &Job<'_>, files: Vec<FileSpec>, builder: PairBuilder<W>) -> Result<(Finished<W>, EncodeReport)> {
    let (base, target, options) = (job.base, job.target, job.options);
    let base_checkpoint = base.map(|base| base as &dyn Checkpoint);
    check_options(base_checkpoint, target, options)?;
    check_supported(job)?;
    let selection = Selection::new(base_checkpoint, target, options)?;
    let mut plans = selection.plans(options)?;
    let files = if selection.is_complete() { files } else { Vec::new() };
    check_holdable(selection.base(), selection.target(), &plans, &files)?;
    let source = Source::new(base, target, &selection, &plans)?;

    let device = &target.device().inner;
    let cx = device.context.enter()?;
    // What the caller queues later is not waited for, also not by the threads that begin later.
    let after = job.after.map(|stream| mark(&cx, stream)).transpose()?;
    let known = [job.base_digests, job.target_digests];
    let finished = {
        // While tables are trained, the memory of the first thread may grow to what the others cannot use.
        let memory = job.memory(device);
        let expected = memory.blob_bytes;
        let mut others: Vec<_> = (1..WORKERS).map(|_| job.memory(device)).collect();
        let of_others = job.limits.in_training().memory;
        others.iter_mut().for_each(|memory| memory.shrink(of_others));
        let in_training = Limits { memory: WORKERS as u64 * job.limits.memory - (WORKERS as u64 - 1) * of_others, ..job.limits };
        let session = Session::new(target, &cx, after.as_ref(), in_training, memory)?;
        let _drained = SessionGuard(&session);
        let digests = Digests::new(&session, job.limits, &source, &selection, &plans, known)?;
        if options.codec == CodecChoice::Device {
            train::choose(&session, &source, job, &mut plans)?;
        }
        let plans = &plans;
        let assembly = Assembly {
            job,
            selection: &selection,
            source: &source,
            plans,
            builder,
            begun: 0,
            ended: 0,
            added: 0,
            expected,
            digests,
        };
        let jobs: Vec<_> = plans.iter().enumerate().flat_map(|(i, plan)| chunks_of(i, plan)).collect();
        let waves = waves(&jobs, &source, job.limits);
        let train = |queued: &mut dyn FnMut()| {
            let mut first = None;
            if options.codec != CodecChoice::Device {
                train::train(&session, &source, job, plans, queued, || {
                    first = waves.first().map(|jobs| Analysis::of_wave(&session, &source, jobs)).transpose()?;
                    Ok(())
                })?;
            }
            let choices = plans.iter().filter_map(|plan| plan.choice.get().map(|choice| (plan, choice)));
            let coded = choices.filter(|(_, of)| of.codec == Codec::Conditioned).map(|(plan, of)| (plan, of.from_base));
            Ok((Tables::upload(&session, coded)?, first))
        };
        let waves = Waves { job, after: after.as_ref(), source: &source, tables: OnceLock::new(), waves: &waves };
        waves.encode(&session, others, train, assembly, files)?
    };
    let bases = plans.iter().filter_map(|plan| plan.base).flat_map(|i| selection.base_tensors(i as usize));
    let report = report(&finished, base_checkpoint, target, options, bases);
    Ok((finished, report))
}

/// Marks the work that is queued on a stream so far.
fn mark(cx: &EnterGuard<'_>, stream: &Stream) -> Result<RawEvent> {
    let event = RawEvent::new(cx, false)?;
    event.record(cx, stream.raw())?;
    Ok(event)
}

/// Divides chunks into waves.
fn waves<'s, 'a>(jobs: &'s [chunks::ChunkJob<'a>], source: &Source, limits: Limits) -> Vec<&'s [chunks::ChunkJob<'a>]> {
    let bytes_of = |(_, plan, number): &chunks::ChunkJob<'_>| {
        let first = number << plan.chunk_lanes_log2;
        (plan.lanes - first).min(1 << plan.chunk_lanes_log2) * plan.width()
    };
    let lanes = limits.wave_bytes(jobs.iter().map(bytes_of).sum());
    let (mut waves, mut rest) = (Vec::new(), jobs);
    // Waves end at multiples of their size, counted from the first one, so that the last one is about as large as the others.
    let (mut done, mut end) = (0, lanes);
    while !rest.is_empty() {
        let (mut count, mut memory) = (0, 0);
        for job in rest {
            memory += chunks::memory_of_all(source, std::slice::from_ref(job));
            let after = done + bytes_of(job);
            if count > 0 && (after > end || memory > limits.wave) {
                break;
            }
            (done, count) = (after, count + 1);
        }
        // A wave that ends early, for lack of memory, does not make the next one larger.
        end = if memory > limits.wave { done + lanes } else { end.max(done) + lanes };
        let (now, after) = rest.split_at(count);
        waves.push(now);
        rest = after;
    }
    waves
}

/// The chunks of a tensor.
fn chunks_of(i: usize, plan: &Plan) -> impl Iterator<Item = chunks::ChunkJob<'_>> {
    (0..plan.lanes.div_ceil(1 << plan.chunk_lanes_log2)).map(move |number| (i, plan, number))
}

/// Checks that a device can encode with these options.
pub(super) fn check_codec(options: &EncodeOptions) -> Result<()> {
    if matches!(options.codec, CodecChoice::Device | CodecChoice::Only(Codec::Conditioned | Codec::Raw)) {
        return Ok(());
    }
    let found = options.codec.name();
    Err(unsupported(&format!("expected codec device, conditioned or raw, found {found}: a device does not compress with zstd")))
}

fn check_supported(job: &Job<'_>) -> Result<()> {
    let options = job.options;
    check_codec(options)?;
    if options.format == FormatVersion::V1_1 && !(job.base_digests.is_empty() && job.target_digests.is_empty()) {
        return Err(unsupported(
            "format 1.1 with known digests; its roots need whole hashes: leave the digests out, or use format 1.2",
        ));
    }
    match job.base {
        Some(base) if !std::sync::Arc::ptr_eq(&base.device().inner, &job.target.device().inner) => {
            Err(Error::InvalidArgument("base and target are on two devices".into()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi;
    use crate::rows::Rows;
    use crate::runtime::memory::DeviceSlice;
    use tpde::Favor;
    use tpde_core::format::{BaseKind, MAX_CHUNK_BYTES, MIN_CHUNK_LANES_LOG2};
    use tpde_core::lane::Dtype;

    /// A tensor of 3 GiB and its base, with or without gaps between rows.
    fn tensor(dtype: Dtype, chunk_lanes_log2: u8, rows: Option<Rows>) -> (Plan, Source) {
        let bytes = 3 << 30;
        // SAFETY: nothing is done with the memory.
        let memory = unsafe { DeviceSlice::from_raw(256, bytes / 64 * rows.map_or(64, |rows| rows.pitch)) };
        let plan = Plan {
            target: 0,
            base: Some(0),
            base_kind: BaseKind::Same,
            dtype,
            chunk_lanes_log2,
            decode_cost: Favor::Ratio.decode_cost(1 << chunk_lanes_log2),
            lanes: bytes / dtype.lane_bytes() as u64,
            tables: Default::default(),
            derived: None,
            part: None,
            choice: Default::default(),
        };
        (plan, Source::of_one(memory, rows))
    }

    /// Waves are about equally large, also with chunks that do not divide them and with short tensors.
    #[test]
    fn waves_are_even() {
        for (lanes, tensors, expected) in [(33 << 19, 1, [17, 16]), (1 << 10, 200_000, [100_000, 100_000])] {
            let plans: Vec<_> = (0..tensors)
                .map(|_| {
                    let (plan, _) = tensor(Dtype::F32, 19, None);
                    Plan { lanes, ..plan }
                })
                .collect();
            let (_, source) = tensor(Dtype::F32, 19, None);
            let jobs: Vec<_> = plans.iter().flat_map(|plan| chunks_of(0, plan)).collect();
            let limits = Limits { lanes: 1 << 30, wave: 1 << 40, ..Limits::default() };
            let waves = waves(&jobs, &source, limits);
            let mut sizes: Vec<_> = waves.iter().map(|wave| wave.len()).collect();
            sizes.sort_by_key(|size| std::cmp::Reverse(*size));
            assert_eq!(sizes, expected, "{tensors} tensors of {lanes} lanes");
        }
    }

    /// Waves of large tensors, with the sizes that are used outside of tests.
    #[test]
    fn memory_is_within_its_bound() {
        const MIB: u64 = 1 << 20;
        let limits = Limits::default();
        // Besides, digests need about 10 bytes per KiB of two batches, and memory for converted lanes. Sizes are rounded up.
        let workers = WORKERS as u64;
        assert!(workers * limits.memory + 2 * limits.hashed / 950 + limits.converted + 2 * 5 * MIB <= 512 * MIB);
        assert!(limits.converted.is_multiple_of(crate::hashes::PIECE));
        // While a wave is analysed, and while streams are written that overflow: 16 MiB are for the streams of one chunk.
        assert!(limits.scratch + limits.wave.max(limits.ahead) + 8 * MIB <= limits.memory);
        assert!(limits.scratch + limits.wave + limits.payloads + 8 * MIB <= limits.memory);
        assert!(limits.wave.max(limits.ahead) + 2 * (limits.payloads + 16 * MIB) <= limits.memory);
        // While a sample is taken: besides, the counts of its groups.
        let counts = 2 * u64::from(abi::ENCODE_GROUPS) * 8 * (1 + 180);
        assert!(limits.scratch + limits.wave + counts + 16 * MIB <= workers * limits.memory - (limits.memory - limits.memory / 8));

        for dtype in [Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F64] {
            let width = dtype.lane_bytes() as u64;
            for (lanes_log2, rows) in
                [(MIN_CHUNK_LANES_LOG2, None), ((MAX_CHUNK_BYTES / width).ilog2() as u8, None), (18, Some(Rows::new(64, 72)))]
            {
                let (plan, source) = tensor(dtype, lanes_log2, rows);
                let jobs: Vec<_> = chunks_of(0, &plan).collect();
                let waves = waves(&jobs, &source, limits);
                assert!(waves.len() > 1);
                assert_eq!(waves.iter().map(|wave| wave.len()).sum::<usize>(), jobs.len());
                for wave in waves {
                    let describe =
                        |_| abi::EncodeChunk { lanes: 1 << lanes_log2, lane_log2: width.ilog2() as u8, ..Default::default() };
                    let mut chunks: Vec<_> = wave.iter().map(describe).collect();
                    let memory = chunks::analysis_memory(&mut chunks);
                    let copies = if rows.is_some() { (2 * width * chunks.len() as u64) << lanes_log2 } else { 0 };
                    let lists = 4 * size_of_val(&chunks[..]) as u64;
                    let all = memory.bytes + memory.states + copies + lists;
                    assert!(all <= limits.wave, "{dtype}, chunks of 2^{lanes_log2} lanes: {all} bytes for {} chunks", chunks.len());
                }
            }
        }
    }
}
