//! `tpde fold` and `tpde revert`: make one pair of a chain of pairs, forward or back.

use super::common::Common;
use super::device::{DeviceName, open_cuda};
use super::encode::{EncodeOutput, NewPair, PairArgs};
use super::inputs::{ChainArgs, OpenedChain, jobs, read_pair};
use super::text;
use anyhow::Context;
use clap::Args;
use tpde::{Chain, Encode, FileSource, Result};

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
    /// Device that applies the pairs and encodes: cpu, cuda or cuda:N. A CUDA device needs --codec device, conditioned or raw, and memory
    /// for two checkpoints, or three if tensors change names, dtypes or shapes
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceName,
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
    pub fn run(&self, common: &Common) -> anyhow::Result<EncodeOutput> {
        self.fold(common).with_context(|| format!("fold {} to {}", self.chain.shown(), text::path(&self.made.output)))
    }

    fn fold(&self, common: &Common) -> Result<EncodeOutput> {
        let opened = self.chain.open(read_pair)?;
        let chain = Chain::new(opened.base(), &opened.pairs)?;
        let written = match self.device {
            DeviceName::Cpu => self.made.write(Encode::fold(&chain).options(self.made.options()), "fold", common)?,
            DeviceName::Cuda(ordinal) => self.fold_on(&open_cuda(ordinal)?, &chain, &opened, common)?,
        };
        Ok(EncodeOutput::new(written, !self.chain.no_base))
    }

    /// Copies the base to a device, and applies the pairs and encodes there.
    #[cfg(feature = "cuda")]
    fn fold_on(
        &self,
        device: &tpde_cuda::Device,
        chain: &Chain<'_, FileSource>,
        opened: &OpenedChain,
        common: &Common,
    ) -> Result<NewPair> {
        use tpde::Checkpoint;
        use tpde_cuda::{DeviceCheckpoint, Rebuild};
        let options = self.made.options();
        tpde_cuda::Encode::check_fold(chain, &options, &self.made.output, self.made.force)?;
        let size = |checkpoint: &dyn Checkpoint| checkpoint.tensors().iter().map(|tensor| tensor.bytes()).sum::<u64>();
        let steps = opened.pairs.iter().map(|pair| pair.index().tensor_bytes().1).sum::<u64>();
        self.made.timed(size(chain.base()) + steps + size(chain), "fold", common, |bar| {
            let done = |bytes| bar.inc(bytes);
            let base = DeviceCheckpoint::upload_watched(device, chain.base(), &done)?;
            let last = Rebuild::new(chain, &base).progress(done).run()?;
            let encode = tpde_cuda::Encode::fold(chain, &base, &last).options(options);
            encode.overwrite(self.made.force).progress(done).to_path(&self.made.output)
        })
    }

    #[cfg(not(feature = "cuda"))]
    fn fold_on(&self, device: &super::device::NoCuda, _: &Chain<'_, FileSource>, _: &OpenedChain, _: &Common) -> Result<NewPair> {
        match *device {}
    }
}

impl Revert {
    pub fn run(&self, common: &Common) -> anyhow::Result<EncodeOutput> {
        self.revert(common).with_context(|| format!("revert {} to {}", self.chain.shown(), text::path(&self.made.output)))
    }

    fn revert(&self, common: &Common) -> Result<EncodeOutput> {
        let opened = self.chain.open(read_pair)?;
        let chain = Chain::new(opened.base(), &opened.pairs)?;
        let written = self.made.write(Encode::revert(&chain).options(self.made.options()), "revert", common)?;
        Ok(EncodeOutput::new(written, true))
    }
}
