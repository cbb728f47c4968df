//! `tpde fold` and `tpde revert`: make one pair of a chain of pairs, forward or back.

use super::common::Common;
use super::encode::{PairArgs, Report};
use super::inputs::{ChainArgs, jobs};
use super::text;
use anyhow::Context;
use clap::Args;
use tpde::{Chain, Checkpoint, Encode, Result};

/// Make one pair of a chain of pairs
///
/// The pairs are applied one after the other: each is made from the target of the one before. The result leads from BASE to the
/// target of the last pair. With the same options it has the same bytes as a pair that is encoded from the two checkpoints. No
/// checkpoint is written. Renamed tensors are followed. Without --split, tensors are cut into parts as in the last pair.
#[derive(Args)]
#[command(override_usage = "tpde fold [OPTIONS] BASE PAIR... -o OUT\n       tpde fold [OPTIONS] --no-base PAIR... -o OUT")]
#[command(after_long_help = jobs())]
pub struct Fold {
    #[command(flatten)]
    pub chain: ChainArgs,
    #[command(flatten)]
    pub made: PairArgs,
}

/// Make the pair that leads back from the target of a pair to its base
///
/// Several pairs are applied one after the other. The result leads from the target of the last pair to BASE. No checkpoint is
/// written. Renamed tensors are followed. Without --split, tensors are cut into parts as in the last pair.
#[derive(Args)]
#[command(override_usage = "tpde revert [OPTIONS] BASE PAIR... -o OUT\n       tpde revert [OPTIONS] --no-base PAIR... -o OUT")]
#[command(after_long_help = jobs())]
pub struct Revert {
    #[command(flatten)]
    pub chain: ChainArgs,
    #[command(flatten)]
    pub made: PairArgs,
}

impl Fold {
    pub fn run(&self, common: &Common) -> anyhow::Result<Report> {
        self.fold(common).with_context(|| format!("fold {} to {}", self.chain.shown(), text::path(&self.made.output)))
    }

    fn fold(&self, common: &Common) -> Result<Report> {
        let opened = self.chain.open()?;
        let chain = Chain::new(opened.base(), &opened.pairs)?;
        let written = self.made.write(Encode::fold(&chain).options(self.made.options()), "fold", common)?;
        let base = (!self.chain.no_base).then(|| opened.base());
        Ok(Report::new(written, base, &chain.renamed()))
    }
}

impl Revert {
    pub fn run(&self, common: &Common) -> anyhow::Result<Report> {
        self.revert(common).with_context(|| format!("revert {} to {}", self.chain.shown(), text::path(&self.made.output)))
    }

    fn revert(&self, common: &Common) -> Result<Report> {
        let opened = self.chain.open()?;
        let chain = Chain::new(opened.base(), &opened.pairs)?;
        let written = self.made.write(Encode::revert(&chain).options(self.made.options()), "revert", common)?;
        Ok(Report::new(written, Some(&chain as &dyn Checkpoint), &chain.renamed_back()))
    }
}
