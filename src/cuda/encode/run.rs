//! Encodes all tensors, and assembles the pair in their order.

use super::assembly::Assembly;
use super::blob::Blob;
use super::chunks::{self, Limits, Tables};
use super::digests::Digests;
use super::job::{Job, unsupported};
use super::session::{Drained, Memory, Session};
use super::source::Source;
use super::train;
use super::waves::Waves;
use crate::checkpoint::Checkpoint;
use crate::codec::Codec;
use crate::encode::{CodecChoice, EncodeOptions, EncodeReport};
use crate::encode::{Plan, Selection, check_holdable, check_options, report};
use crate::error::{Error, Escaped, Result};
use crate::format::FormatVersion;
use crate::writer::{FileSpec, Finished, PairBuilder};

/// Encodes into `builder`. `files` describes the files that readers rebuild, if all tensors are encoded.
pub(super) fn encode<W: Blob>(job: &Job<'_>, files: Vec<FileSpec>, builder: PairBuilder<W>) -> Result<(Finished<W>, EncodeReport)> {
    let (base, target, options) = (job.base, job.target, job.options);
    let base_checkpoint = base.map(|base| base as &dyn Checkpoint);
    check_options(base_checkpoint, target, options)?;
    check_supported(job)?;
    let selection = Selection::new(base_checkpoint, target, options)?;
    if let Some(name) = selection.first_derived() {
        let name = Escaped(name);
        return Err(unsupported(&format!("the base of tensor {name} has another dtype: encode on the processor")));
    }
    let mut plans = selection.plans(options)?;
    let files = if selection.is_complete() { files } else { Vec::new() };
    check_holdable(selection.base(), selection.target(), &plans, &files)?;
    let source = Source::new(base, target, &selection, &plans)?;

    let device = &target.device().inner;
    let cx = device.context.enter()?;
    let known = [job.base_digests, job.target_digests];
    let finished = {
        let memory = job.encoder.map_or_else(Memory::default, |encoder| encoder.take(device));
        let session = Session::new(target, &cx, job.after, memory)?;
        let _drained = Drained(&session);
        let digests = Digests::new(&session, job.limits.hashed, &source, &selection, &plans, known)?;
        train::train(&session, &source, options, &mut plans, job.watcher)?;
        let tables = Tables::upload(&session, &plans)?;
        let memory = session.take_memory()?;
        let expected = memory.blob_bytes;
        let mut assembly =
            Assembly { job, selection: &selection, source: &source, plans: &plans, builder, begun: 0, added: 0, expected, digests };
        let jobs: Vec<_> = plans.iter().enumerate().flat_map(|(i, plan)| chunks_of(i, plan)).collect();
        let waves = Waves { job, source: &source, tables: &tables, waves: waves(&jobs, &source, job.limits) };
        waves.encode(&session, memory, &mut assembly)?;
        assembly.finish(files)?
    };
    let bases = plans.iter().filter_map(|plan| plan.base).map(|i| selection.base_tensor(i as usize));
    let report = report(&finished, base_checkpoint, bases);
    Ok((finished, report))
}

/// Size of the lanes of a wave, for `total` bytes of lanes in all: waves have about the same size.
fn wave_bytes(total: u64, limits: Limits) -> u64 {
    total.div_ceil(total.div_ceil(limits.lanes.max(1)).max(1))
}

/// Divides chunks into waves.
fn waves<'s, 'a>(jobs: &'s [chunks::Job<'a>], source: &Source, limits: Limits) -> Vec<&'s [chunks::Job<'a>]> {
    let lanes = wave_bytes(jobs.iter().map(|(_, plan, _)| plan.width() << plan.chunk_lanes_log2).sum(), limits);
    let (mut waves, mut rest) = (Vec::new(), jobs);
    while !rest.is_empty() {
        let (mut bytes, mut copied) = (0, 0);
        let count = rest.iter().take_while(|(_, plan, _)| {
            let is_first = bytes == 0;
            bytes += plan.width() << plan.chunk_lanes_log2;
            copied += source.copied_per_lane(plan) << plan.chunk_lanes_log2;
            is_first || (bytes <= lanes && copied <= limits.copies)
        });
        let (now, after) = rest.split_at(count.count());
        waves.push(now);
        rest = after;
    }
    waves
}

/// The chunks of a tensor.
fn chunks_of(i: usize, plan: &Plan) -> impl Iterator<Item = chunks::Job<'_>> {
    (0..plan.lanes.div_ceil(1 << plan.chunk_lanes_log2)).map(move |number| (i, plan, number))
}

/// Checks that a device can encode with these options.
pub(super) fn check_codec(options: &EncodeOptions) -> Result<()> {
    if matches!(options.codec, CodecChoice::Only(Codec::Conditioned | Codec::Raw)) {
        return Ok(());
    }
    Err(unsupported(&format!("expected codec conditioned or raw for all tensors, found {}", options.codec.name())))
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
