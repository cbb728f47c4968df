//! Checks a pair, a base and a target against each other. Nothing is written.

use super::accelerator::Accelerator;
use super::builder::Apply;
use super::compare::check_target;
use crate::checkpoint::Checkpoint;
use crate::reader::{Pair, PayloadDigests, VerifyReport};
use crate::safetensors::{check_target_files, outputs};
use crate::watch::{Watcher, progress_methods};
use serde::Serialize;
use tpde_core::error::{Error, Result, Rule};
use tpde_core::format::BaseKind;
use tpde_core::source::Source;

/// Checks a pair, and optionally whether it matches a base and a target.
///
/// | set | what is checked | what that excludes |
/// |---|---|---|
/// | nothing | every rule of the index, the CRC-32 of every payload, the digest over all payloads if the index has it (from format 1.2 on) | damage; with that digest also forged payloads |
/// | [`base`](Self::base) or [`without_base`](Self::without_base) | rebuilds every tensor without writing it, compares all digests, plans the files as [`Apply::to_path`] does; the content of a stored shard index is not checked | damage, forged payloads, another base |
/// | [`target`](Self::target) | compares a checkpoint with the target's digests, and its files byte for byte | another target; says nothing about payloads |
///
/// ```
/// # use tpde::{Authenticity, Dtype, Encode, MemoryCheckpoint, TensorInfo, Verify};
/// # fn main() -> tpde::Result<()> {
/// # let info = TensorInfo { name: "w".into(), dtype: Dtype::Bf16, shape: vec![3] };
/// # let base = MemoryCheckpoint::new([(info.clone(), &[1, 2, 3, 4, 5, 6][..])])?;
/// # let target = MemoryCheckpoint::new([(info, &[1, 2, 3, 4, 5, 7][..])])?;
/// let (pair, _) = Encode::new(&target).base(&base).to_memory()?;
/// assert_eq!(Verify::new(&pair).run()?.payload_authenticity, Authenticity::Checked);
/// assert!(!Verify::new(&pair).run()?.checked.target_checked);
/// assert_eq!(Verify::new(&pair).base(&base).target(&target).run()?.payload_authenticity, Authenticity::Checked);
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is checked before `run` is called"]
pub struct Verify<'a, B> {
    pair: &'a Pair<B>,
    base: Base<'a>,
    target: Option<&'a dyn Checkpoint>,
    accelerator: Option<&'a dyn Accelerator>,
    watcher: Watcher<'a>,
}

/// The base that a verification has.
#[derive(Clone, Copy)]
enum Base<'a> {
    /// No base. Payloads are read, but no tensor is rebuilt.
    Unavailable,
    NotNeeded,
    Available(&'a dyn Checkpoint),
}

/// The result of [`Verify::run`]. A damaged pair gives an error instead.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Verification {
    /// Counts, and the comparisons that were made.
    #[serde(flatten)]
    pub checked: VerifyReport,
    /// Whether the check would have detected forged payloads.
    pub payload_authenticity: Authenticity,
    /// Whether [`Apply::to_path`] can write the target as files, apart from errors of the file system. `None` if no reason
    /// against it was found but no tensor was rebuilt.
    pub writable: Option<bool>,
    /// The reason why the target cannot be written.
    pub not_writable: Option<String>,
    /// Id of the rule that the target's files break, if the reason is one.
    pub not_writable_rule: Option<&'static str>,
}

/// Whether a check shows that the payloads are those that the pair was made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Authenticity {
    /// Payloads were compared with the digests that the pair digest covers, or rebuilt tensors with the target digests. So no
    /// payload is forged, if the pair digest is authentic.
    Checked,
    /// Only the CRC-32 of payloads was compared. A forged payload can preserve it. Pairs of formats 1.0 and 1.1 have no digests
    /// of payloads.
    NotChecked,
}

impl<'a, B: Source> Verify<'a, B> {
    /// Checks the pair alone, unless options say otherwise.
    pub fn new(pair: &'a Pair<B>) -> Self {
        Self { pair, base: Base::Unavailable, target: None, accelerator: None, watcher: Watcher::Nobody }
    }

    /// Sets the checkpoint to compare with the base of the pair.
    pub fn base(mut self, base: &'a dyn Checkpoint) -> Self {
        self.base = Base::Available(base);
        self
    }

    /// Rebuilds the tensors without a base. Only for a pair that needs no base.
    pub fn without_base(mut self) -> Self {
        self.base = Base::NotNeeded;
        self
    }

    /// Sets the checkpoint to compare with the target of the pair. If it has files, they are compared too.
    pub fn target(mut self, target: &'a dyn Checkpoint) -> Self {
        self.target = Some(target);
        self
    }

    /// Rebuilds tensors on a device.
    pub fn on(mut self, device: &'a dyn Accelerator) -> Self {
        self.accelerator = Some(device);
        self
    }

    progress_methods!("[`progress_bytes`](Self::progress_bytes)");

    /// Total number of bytes that will be reported as progress.
    pub fn progress_bytes(&self) -> u64 {
        let index = self.pair.index();
        let target_bytes = index.tensor_bytes().1;
        let pair = if matches!(self.base, Base::Unavailable) { index.header().blob_size } else { target_bytes };
        pair.saturating_add(if self.target.is_some() { target_bytes } else { 0 })
    }

    /// Runs the checks. If the pair is sound but its target cannot be written as files, this succeeds, and
    /// [`Verification::not_writable`] is the reason.
    ///
    /// Cost: reads all payloads. With a base, also reads and hashes the base, and decodes and hashes the target. With a target
    /// checkpoint, also reads and hashes that checkpoint.
    ///
    /// # Errors
    /// - The errors of [`Pair::verify`] or [`Apply::verify`].
    /// - [`Error::Invalid`] with rule `tensor.target_digest`, `digest.target_root` or `file.content_digest` if the target
    ///   checkpoint is not the target of the pair.
    /// - [`Error::Invalid`] with rule `base.tensor` or `base.file` if the pair needs a base and
    ///   [`without_base`](Verify::without_base) is set.
    /// - [`Error::Io`].
    pub fn run(&self) -> Result<Verification> {
        let index = self.pair.index();
        let apply = || {
            let apply = Apply::new(self.pair).watch(&self.watcher);
            match self.accelerator {
                Some(device) => apply.on(device),
                None => apply,
            }
        };
        let (base, mut checked) = match self.base {
            Base::Unavailable => (None, self.pair.verify_with(&self.watcher)?),
            Base::NotNeeded => {
                apply().check_needs_no_base()?;
                (None, apply().verify()?)
            }
            Base::Available(base) => (Some(base), apply().base(base).verify()?),
        };
        // If no tensor of the pair has a base, nothing of the supplied base was compared.
        let needs_base = index.tensors().any(|tensor| tensor.base_kind != BaseKind::None);
        checked.base_checked = base.is_some() && needs_base;
        if let Some(target) = self.target {
            check_target(index, target, &self.watcher)?;
            if let Some(files) = target.files() {
                check_target_files(index, files)?;
            }
            checked.target_checked = true;
        }
        let is_covered = checked.payload_digests == PayloadDigests::All;
        let is_rebuilt = !matches!(self.base, Base::Unavailable);
        let refusal = match outputs(index, base.and_then(|base| base.files()), None) {
            Ok(_) => None,
            // The pair shares a header with the base, which is not available here. That says nothing about writing.
            Err(e) if !is_rebuilt && e.rule() == Some(Rule::BaseFile) => None,
            Err(e @ (Error::Invalid(_) | Error::NotWritable { .. })) => Some(e),
            Err(e) => return Err(e),
        };
        Ok(Verification {
            checked,
            payload_authenticity: if is_rebuilt || is_covered { Authenticity::Checked } else { Authenticity::NotChecked },
            writable: if refusal.is_some() { Some(false) } else { is_rebuilt.then_some(true) },
            not_writable_rule: refusal.as_ref().and_then(Error::rule).map(Rule::id),
            not_writable: refusal.map(|refusal| refusal.to_string()),
        })
    }
}
