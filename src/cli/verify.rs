//! `tpde verify`: is a pair whole, and does it fit a base and a target?

use super::Common;
use super::device::DeviceArgs;
use super::inputs::open;
use super::text::{self, GOOD, JsonPath};
use anyhow::Context;
use clap::Args;
use serde::Serialize;
use std::fmt;
use std::path::PathBuf;
use tpde::reader::VerifyReport;
use tpde::{Apply, Pair, Result};

/// Check a pair, and whether it fits a base or a target
///
/// Alone: every rule of the index, and the CRC-32 of every payload. That finds damage, not forgery: a payload can be changed
/// without changing its CRC-32 or the pair digest. With a base: rebuilds every tensor without writing it and compares all
/// digests; a forged payload is refused. With a target: compares a checkpoint with the target's digests, which says nothing
/// more of the payloads.
#[derive(Args)]
pub struct Verify {
    /// The pair: its name, or either file
    #[arg(value_name = "PAIR")]
    pub pair: PathBuf,
    /// A checkpoint that should be the base
    #[arg(long, value_name = "BASE")]
    pub base: Option<PathBuf>,
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
}

/// Whether the payloads were shown to give the target that the index names.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Authenticity {
    /// The tensors that they give were compared with the target digests.
    Checked,
    /// Their CRC-32 was compared, which somebody who changes a payload can keep.
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
        let mut verified = match &self.base {
            None => pair.verify()?,
            Some(base) => {
                let base = open(base)?;
                let bar = common.bar("rebuild", bytes);
                let progress = |bytes| bar.inc(bytes);
                let mut apply = Apply::new(&pair, &base).progress(&progress);
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
            bar.finish_and_clear();
            verified.target_checked = true;
        }
        // Comparing a given target says nothing of the payloads.
        let payload_authenticity = if verified.base_checked { Authenticity::Checked } else { Authenticity::NotChecked };
        Ok(Report { pair: JsonPath(self.pair.clone()), verified, payload_authenticity })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let VerifyReport { tensors, chunks, stored_bytes, base_checked, target_checked } = self.verified;
        writeln!(f, "{GOOD}sound{GOOD:#} {}", text::path(&self.pair))?;
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
                        Authenticity::NotChecked => "not excluded: digests of rebuilt tensors were not compared (--base BASE)",
                    }
                    .into(),
                ),
                ("base", tell(base_checked, "is the one that the pair was made from", "--base BASE does it")),
                ("target", tell(target_checked, "has the digests of the pair", "--base or --target does it")),
            ],
        )
    }
}
