//! Checks of a pair, a base and a target against each other. Nothing is written.

use super::checkpoint::SafetensorsCheckpoint;
use super::output::{check_needs_no_base, check_target_files, check_writable};
use crate::checkpoint::{Checkpoint, MemoryCheckpoint};
use crate::delta::{Accelerator, Apply, Progress, check_target};
use crate::error::{Error, Result, Rule};
use crate::index::ValidatedIndex;
use crate::reader::{Pair, VerifyReport};
use crate::source::Source;
use serde::Serialize;

/// What [`verify_files`] compares a pair with.
#[derive(Clone, Copy, Default)]
pub struct VerifyOptions<'a> {
    /// The base, from which all tensors are rebuilt.
    pub base: VerifyBase<'a>,
    /// A checkpoint that should be the target.
    pub target: Option<&'a SafetensorsCheckpoint>,
    /// A device that decodes in place of the processor.
    pub accelerator: Option<&'a dyn Accelerator>,
}

/// The base of a verification.
#[derive(Debug, Clone, Copy, Default)]
pub enum VerifyBase<'a> {
    /// No base is at hand: payloads are read, but no tensor is rebuilt.
    #[default]
    Missing,
    /// The pair needs no base.
    NotNeeded,
    /// A checkpoint that should be the base.
    Files(&'a SafetensorsCheckpoint),
}

impl VerifyOptions<'_> {
    /// Bytes that [`verify_files`] reports to its progress in all.
    pub fn progress_bytes(&self, index: &ValidatedIndex) -> u64 {
        let target_bytes = index.tensor_bytes().1;
        let pair = if matches!(self.base, VerifyBase::Missing) { index.header().blob_size } else { target_bytes };
        pair.saturating_add(if self.target.is_some() { target_bytes } else { 0 })
    }
}

/// What [`verify_files`] found. The pair is sound in every case.
#[derive(Debug, Clone, Serialize)]
pub struct Verification {
    /// What was compared.
    #[serde(flatten)]
    pub checked: VerifyReport,
    /// Whether forged payloads are excluded.
    pub payload_authenticity: Authenticity,
    /// Whether [`apply_to_path`](super::apply_to_path) can write the target as files, as far as the file system allows; unknown
    /// unless its tensors were rebuilt.
    pub writable: Option<bool>,
    /// The reason if it cannot.
    pub not_writable: Option<String>,
}

/// Whether the payloads were shown to give the target that the index names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Authenticity {
    /// The rebuilt tensors were compared with the target digests, so no payload is forged.
    Checked,
    /// Only the CRC-32 of payloads was compared. A forged payload can preserve it.
    NotChecked,
}

/// Checks a pair, and whether it fits a base and a target.
///
/// Without a base: every rule of the index, and the CRC-32 of every payload. That finds damage, not forgery. With a base, or for a
/// pair that needs none: rebuilds every tensor without writing it and compares all digests, which excludes forged payloads, and
/// plans the files as [`apply_to_path`](super::apply_to_path) does; what a stored shard index says is not checked. With a target:
/// compares a checkpoint with the target's digests and its files byte for byte, which says nothing about payloads.
///
/// A sound pair whose target cannot be written as files is not an error: [`Verification::not_writable`] has the reason.
///
/// Cost: reads all payloads; with a base reads and hashes it, decodes and hashes the target; with a target reads and hashes it.
///
/// # Errors
/// As [`Pair::verify`] or [`Apply::verify`], as [`check_target`](crate::delta::check_target) and [`check_target_files`]; [`Error::Misuse`] for
/// [`VerifyBase::NotNeeded`] and a pair that needs a base.
pub fn verify_files<B: Source>(pair: &Pair<B>, options: &VerifyOptions<'_>, progress: Progress<'_>) -> Result<Verification> {
    let index = pair.index();
    let nothing = MemoryCheckpoint::default();
    let (base, files): (Option<&dyn Checkpoint>, _) = match options.base {
        VerifyBase::Missing => (None, None),
        VerifyBase::NotNeeded => {
            check_needs_no_base(index, None)?;
            (Some(&nothing), None)
        }
        VerifyBase::Files(files) => (Some(files), Some(files)),
    };
    let mut checked = match base {
        None => pair.verify_with(progress)?,
        Some(base) => {
            let mut apply = Apply::new(pair, base).progress(progress);
            if let Some(accelerator) = options.accelerator {
                apply = apply.on(accelerator);
            }
            apply.verify()?
        }
    };
    checked.base_checked = files.is_some();
    if let Some(target) = options.target {
        check_target(index, target, progress)?;
        check_target_files(index, target)?;
        checked.target_checked = true;
    }
    let is_rebuilt = base.is_some();
    let not_writable = match check_writable(index, files) {
        Ok(()) => None,
        // A header that only the base has.
        Err(e) if !is_rebuilt && e.rule() == Some(Rule::BaseFile) => None,
        Err(e @ (Error::Invalid(_) | Error::NotWritable { .. })) => Some(e.to_string()),
        Err(e) => return Err(e),
    };
    Ok(Verification {
        checked,
        payload_authenticity: if is_rebuilt { Authenticity::Checked } else { Authenticity::NotChecked },
        writable: if not_writable.is_some() { Some(false) } else { is_rebuilt.then_some(true) },
        not_writable,
    })
}
