//! `--device`: selects the CPU or a CUDA device for decoding.

use clap::Args;
use std::str::FromStr;
use tpde::{Accelerator, Error, Result};

/// Decoding device.
#[derive(Args)]
pub struct DeviceArgs {
    /// Decoding device: cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceName,
    /// Trust the author of the pair, and let nvCOMP expand payloads of codec zstd on the device
    ///
    /// A malicious payload can then take over the process. The system's loader must find libnvcomp.so.6.
    #[cfg(feature = "nvcomp")]
    #[arg(long)]
    pub trust: bool,
}

/// A device, parsed from its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceName {
    Cpu,
    Cuda(u32),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ordinal = |text: &str| text.strip_prefix("cuda:").and_then(|n| n.parse().ok());
        match text {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => ordinal(text).map(Self::Cuda).ok_or_else(|| "not one of cpu, cuda, cuda:N".to_owned()),
        }
    }
}

impl DeviceArgs {
    /// Refuses options that only a device supports.
    pub fn check(&self) -> Result<()> {
        #[cfg(feature = "nvcomp")]
        if self.trust && self.device == DeviceName::Cpu {
            return Err(Error::InvalidArgument("--trust requires a CUDA device: add --device cuda".into()));
        }
        Ok(())
    }

    /// Refuses a device for several pairs.
    pub fn check_pairs(&self, count: usize) -> Result<()> {
        if count > 1 && self.device != DeviceName::Cpu {
            return Err(Error::InvalidArgument(format!(
                "{count} pairs are applied on the processor: fold them first, or leave out --device"
            )));
        }
        Ok(())
    }

    /// Opens the device; `None` for the CPU.
    pub fn open(&self) -> Result<Option<Box<dyn Accelerator>>> {
        self.check()?;
        match self.device {
            DeviceName::Cpu => Ok(None),
            #[cfg(feature = "nvcomp")]
            DeviceName::Cuda(ordinal) if self.trust => {
                let (device, nvcomp) = (open_cuda(ordinal)?, tpde_cuda::Nvcomp::load()?);
                Ok(Some(Box::new(tpde_cuda::NvcompDevice { device, nvcomp })))
            }
            DeviceName::Cuda(ordinal) => Ok(Some(Box::new(open_cuda(ordinal)?))),
        }
    }
}

/// Opens a CUDA device.
#[cfg(feature = "cuda")]
pub fn open_cuda(ordinal: u32) -> Result<tpde_cuda::Device> {
    let device = tpde_cuda::Device::open(ordinal)?;
    tracing::info!(name = device.name(), first_call = ?device.first_call(), "device");
    Ok(device)
}

/// The error of a build without CUDA.
#[cfg(not(feature = "cuda"))]
pub fn open_cuda(_: u32) -> Result<NoCuda> {
    Err(Error::NoDevice("this program was built without the feature cuda".into()))
}

/// Stands in for a device in a build without CUDA. It has no values.
#[cfg(not(feature = "cuda"))]
pub enum NoCuda {}

#[cfg(not(feature = "cuda"))]
impl Accelerator for NoCuda {
    fn rebuild(&self, _: &tpde::Work<'_>, _: &mut dyn FnMut(usize, &[u8]) -> Result<()>) -> Result<tpde::PayloadDigests> {
        match *self {}
    }
}
