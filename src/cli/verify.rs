//! `tpde verify`: is a pair whole, and does it fit a base and a target?

use super::Common;
use super::device::DeviceArgs;
use super::inputs::{check_needs_no_base, open};
use super::text::{self, BAD, GOOD, JsonPath};
use anyhow::Context;
use clap::Args;
use serde::Serialize;
use std::fmt;
use std::path::PathBuf;
use tpde::error::Rule;
use tpde::reader::VerifyReport;
use tpde::safetensors::{check_target_files, check_writable};
use tpde::source::Source;
use tpde::{Apply, Checkpoint, Error, MemoryCheckpoint, Pair, Result, SafetensorsCheckpoint};

/// Check a pair, and whether it fits a base or a target
///
/// Alone: every rule of the index, and the CRC-32 of every payload. That finds damage, not forgery: a payload can be changed
/// without changing its CRC-32 or the pair digest. With --base or --no-base: rebuilds every tensor without writing it and compares
/// all digests; a forged payload is refused. Also plans the files as apply does: where both succeed, apply does too. With a target:
/// compares a checkpoint with the target's digests, and its files byte for byte; this does not check payloads. A
/// pair that is sound but whose target cannot be written as files ends with exit code 1.
#[derive(Args)]
pub struct Verify {
    /// The pair: its name, or either file
    #[arg(value_name = "PAIR")]
    pub pair: PathBuf,
    /// A checkpoint that should be the base
    #[arg(long, value_name = "BASE")]
    pub base: Option<PathBuf>,
    /// The pair needs no base: rebuild its tensors without one
    #[arg(long, conflicts_with = "base")]
    pub no_base: bool,
    /// A checkpoint that should be the target
    #[arg(long, value_name = "TARGET")]
    pub target: Option<PathBuf>,
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// What was looked at, and found right.
#[derive(Serialize)]
pub struct Report {
    pair: JsonPath,
    #[serde(flatten)]
    verified: VerifyReport,
    payload_authenticity: Authenticity,
    /// Whether `apply` can write the target as files; unknown unless its tensors were rebuilt.
    writable: Option<bool>,
    /// Why it cannot.
    not_writable: Option<String>,
}

/// Whether the payloads were shown to give the target that the index names.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Authenticity {
    /// The tensors that they give were compared with the target digests.
    Checked,
    /// Only their CRC-32 was compared. A forged payload can preserve it.
    NotChecked,
}

impl Verify {
    pub fn run(&self, common: &Common) -> anyhow::Result<Report> {
        self.verify(common).with_context(|| format!("verify {}", text::path(&self.pair)))
    }

    fn verify(&self, common: &Common) -> Result<Report> {
        let pair = Pair::open(&self.pair)?;
        let bytes = pair.index().tensor_bytes().1;
        let device = self.device.open()?;
        let base = self.base.as_deref().map(open).transpose()?;
        let nothing = MemoryCheckpoint::default();
        if self.no_base {
            check_needs_no_base(&pair, &[])?;
        }
        let from: Option<&dyn Checkpoint> = match &base {
            Some(base) => Some(base),
            None => self.no_base.then_some(&nothing),
        };
        let mut verified = match from {
            None => pair.verify()?,
            Some(base) => {
                let bar = common.bar("rebuild", bytes);
                let progress = |bytes| bar.inc(bytes);
                let mut apply = Apply::new(&pair, base).progress(&progress);
                if let Some(device) = &device {
                    apply = apply.on(&**device);
                }
                let verified = apply.verify()?;
                bar.finish_and_clear();
                verified
            }
        };
        if let Some(target) = &self.target {
            let target = open(target)?;
            let bar = common.bar("compare", bytes);
            pair.index().check_target(&target, &|bytes| bar.inc(bytes))?;
            check_target_files(pair.index(), &target)?;
            bar.finish_and_clear();
            verified.target_checked = true;
        }
        // Comparing a given target says nothing of the payloads.
        let payload_authenticity = if verified.base_checked { Authenticity::Checked } else { Authenticity::NotChecked };
        verified.base_checked &= !self.no_base;
        let (writable, not_writable) = writable(&pair, base.as_ref(), from.is_some())?;
        Ok(Report { pair: JsonPath(self.pair.clone()), verified, payload_authenticity, writable, not_writable })
    }
}

/// Whether the target of a sound pair can be written as files, and why not. Payloads that were not decoded leave that open.
fn writable<B: Source>(
    pair: &Pair<B>,
    base: Option<&SafetensorsCheckpoint>,
    is_rebuilt: bool,
) -> Result<(Option<bool>, Option<String>)> {
    match check_writable(pair.index(), base) {
        Ok(()) => Ok((is_rebuilt.then_some(true), None)),
        Err(e) if base.is_none() && e.rule() == Some(Rule::BaseFile) => Ok((None, None)),
        Err(e @ (Error::Invalid(_) | Error::NotWritable { .. })) => Ok((Some(false), Some(e.to_string()))),
        Err(e) => Err(e),
    }
}

impl Report {
    /// Why `apply` cannot write the target, though the pair is sound.
    pub fn refused(&self) -> Option<String> {
        self.not_writable.as_ref().map(|reason| format!("{} is sound, but not writable: {reason}", text::path(&self.pair.0)))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let VerifyReport { tensors, chunks, stored_bytes, base_checked, target_checked } = self.verified;
        match self.not_writable {
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
                    match self.payload_authenticity {
                        Authenticity::Checked => "excluded: the payloads give tensors with the digests of the pair",
                        Authenticity::NotChecked => {
                            "not excluded: digests of rebuilt tensors were not compared (--base or --no-base)"
                        }
                    }
                    .into(),
                ),
                ("base", tell(base_checked, "is the one that the pair was made from", "--base BASE does it")),
                ("target", tell(target_checked, "has the digests of the pair", "--base, --no-base or --target does it")),
                (
                    "files",
                    match (&self.not_writable, self.writable) {
                        (Some(reason), _) => format!("apply cannot write them: {reason}"),
                        (None, Some(_)) => "apply can write them".into(),
                        (None, None) => "not known: no tensor was rebuilt (--base or --no-base)".into(),
                    },
                ),
            ],
        )
    }
}
