//! `tpde verify`: checks a pair, and whether it fits a base and a target.

use super::common::Common;
use super::device::DeviceArgs;
use super::inputs::{EMPTY, ExpectArgs, OpenPair, last_of, open, read_pair};
#[cfg(feature = "mmap")]
use super::inputs::{MapArgs, map_pair};
use super::text::{self, BAD, GOOD, JsonPath};
use anyhow::Context;
use clap::Args;
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};
use tpde::{Authenticity, BaseKind, Checkpoint, Error, PayloadDigests, Result, Source, Verification, VerifyReport};

/// Check a pair, and whether it fits a base or a target
///
/// Alone: every rule of the index, and the CRC-32 of every payload. From format 1.2 on, also the digest of all payloads,
/// which is part of the pair digest: a forged payload is refused. For a pair of format 1.0 or 1.1, the check finds damage, not
/// forgery: a payload can be changed without changing its CRC-32 or the pair digest. With --base or --no-base: rebuilds every
/// tensor without writing it and compares all digests; a forged payload is refused. Also plans the files as apply does: where
/// both succeed, apply does too. The content of a stored shard index is not checked. With a target: compares a checkpoint with
/// the target's digests, and its files byte for byte; this does not check payloads. A pair that is sound but whose target cannot
/// be written as files ends with exit code 1. Several pairs are verified as apply applies them, one after the other.
#[derive(Args)]
pub struct Verify {
    /// Pair: its name, or the path of either file. Several pairs are a chain, in the order in which they are applied, and need
    /// --base or --no-base
    #[arg(value_name = "PAIR", required = true)]
    pub pairs: Vec<PathBuf>,
    /// A checkpoint that should be the base, of several pairs that of the first
    #[arg(long, value_name = "BASE")]
    pub base: Option<PathBuf>,
    /// The pair needs no base: rebuild its tensors without one
    #[arg(long, conflicts_with = "base")]
    pub no_base: bool,
    /// A checkpoint that should be the target, of several pairs that of the last
    #[arg(long, value_name = "TARGET")]
    pub target: Option<PathBuf>,
    #[command(flatten)]
    pub expect: ExpectArgs,
    #[cfg(feature = "mmap")]
    #[command(flatten)]
    pub map: MapArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// The checks that were made and passed.
#[derive(Serialize)]
pub struct VerifyOutput {
    pair: JsonPath,
    /// Number of pairs, of which `pair` is the last.
    pairs: usize,
    #[serde(skip)]
    needs_base: bool,
    #[serde(flatten)]
    found: Verification,
}

impl Verify {
    pub fn run(&self, common: &Common) -> anyhow::Result<VerifyOutput> {
        self.verify(common).with_context(|| format!("verify {}", text::path(self.last())))
    }

    /// The pair whose target is verified.
    fn last(&self) -> &Path {
        self.pairs.last().map_or(Path::new(""), PathBuf::as_path)
    }

    fn verify(&self, common: &Common) -> Result<VerifyOutput> {
        #[cfg(feature = "mmap")]
        if self.map.mmap {
            return self.check(map_pair, common);
        }
        self.check(read_pair, common)
    }

    fn check<B: Source>(&self, open_pair: OpenPair<B>, common: &Common) -> Result<VerifyOutput> {
        let pairs = self.expect.open_chain(self.pairs.iter().map(PathBuf::as_path), open_pair)?;
        if pairs.len() > 1 && self.base.is_none() && !self.no_base {
            return Err(Error::InvalidArgument("several pairs are verified as a chain, which needs --base or --no-base".into()));
        }
        self.device.check_pairs(pairs.len())?;
        let device = self.device.open()?;
        let base = self.base.as_deref().map(open).transpose()?;
        let target = self.target.as_deref().map(open).transpose()?;
        let (pair, chain) = last_of(base.as_ref().map_or(&EMPTY, |base| base as &dyn Checkpoint), &pairs)?;
        let mut verify = tpde::Verify::new(pair);
        if base.is_some() || pairs.len() > 1 {
            verify = verify.base(&chain);
        } else if self.no_base {
            verify = verify.without_base();
        }
        if let Some(target) = &target {
            verify = verify.target(target);
        }
        if let Some(device) = &device {
            verify = verify.on(&**device);
        }
        let bar = common.bar("verify", verify.progress_bytes());
        let found = verify.progress(|bytes| bar.inc(bytes)).run();
        let found = found.map_err(|error| error.in_step(pairs.len(), pairs.len(), self.last()))?;
        bar.finish_and_clear();
        let needs_base = pair.index().tensors().any(|tensor| tensor.base_kind != BaseKind::None);
        Ok(VerifyOutput { pair: JsonPath(self.last().to_owned()), pairs: pairs.len(), needs_base, found })
    }
}

impl VerifyOutput {
    /// The reason why `apply` cannot write the target of a sound pair.
    pub fn refused(&self) -> Option<String> {
        self.found.not_writable.as_ref().map(|reason| format!("{} is sound, but not writable: {reason}", text::path(&self.pair.0)))
    }
}

impl fmt::Display for VerifyOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let VerifyReport { tensors, chunks, stored_bytes, base_checked, target_checked, payload_digests, .. } = self.found.checked;
        match self.found.not_writable {
            None => writeln!(f, "{GOOD}sound{GOOD:#} {}", text::path(&self.pair))?,
            Some(_) => writeln!(f, "{GOOD}sound{GOOD:#}, {BAD}not writable{BAD:#} {}", text::path(&self.pair))?,
        }
        let tell = |checked: bool, right: &str, option: &str| {
            if checked { right.to_owned() } else { format!("not compared ({option})") }
        };
        text::facts(
            f,
            &[
                (
                    "pair",
                    format!(
                        "{}, {}, {}: structure and CRC-32 of all payloads are right",
                        text::bytes(stored_bytes),
                        text::counted(tensors, "tensor"),
                        text::counted(chunks, "chunk")
                    ),
                ),
                (
                    "forgery",
                    match (self.found.payload_authenticity, payload_digests) {
                        (Authenticity::Checked, PayloadDigests::All) => "excluded: the pair digest covers the payloads",
                        (Authenticity::Checked, _) => "excluded: the payloads give tensors with the digests of the pair",
                        _ => "not excluded: digests of rebuilt tensors were not compared (--base or --no-base)",
                    }
                    .into(),
                ),
                (
                    "base",
                    match self.needs_base {
                        true => tell(base_checked, "is the one that the pair was made from", "--base BASE does it"),
                        false => "not needed".into(),
                    },
                ),
                ("payload", text::payload_digests(payload_digests).into()),
                ("target", tell(target_checked, "has the digests of the pair", "--base, --no-base or --target does it")),
                (
                    "files",
                    match (&self.found.not_writable, self.found.writable) {
                        (Some(reason), _) => format!("apply cannot write them: {reason}"),
                        (None, Some(_)) => "apply can write them".into(),
                        (None, None) => "not known: no tensor was rebuilt (--base or --no-base)".into(),
                    },
                ),
            ],
        )
    }
}
