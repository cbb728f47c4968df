//! `--device`: what decodes.

use clap::Args;
use std::str::FromStr;
#[cfg(not(feature = "cuda"))]
use tpde::Error;
use tpde::Result;
use tpde::delta::Accelerator;

/// What decodes.
#[derive(Args)]
pub struct DeviceArgs {
    /// What decodes: cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceName,
}

/// A device by its name.
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
    /// The device, opened; none for the processor.
    pub fn open(&self) -> Result<Option<Box<dyn Accelerator>>> {
        match self.device {
            DeviceName::Cpu => Ok(None),
            DeviceName::Cuda(ordinal) => Ok(Some(Box::new(open_cuda(ordinal)?))),
        }
    }
}

/// Opens a CUDA device.
#[cfg(feature = "cuda")]
pub fn open_cuda(ordinal: u32) -> Result<tpde::cuda::Device> {
    let device = tpde::cuda::Device::open(ordinal)?;
    tracing::info!(name = device.name(), first_call = ?device.first_call(), "device");
    Ok(device)
}

/// Says that there is none.
#[cfg(not(feature = "cuda"))]
pub fn open_cuda(_: u32) -> Result<NoCuda> {
    Err(Error::NoDevice("this program was built without the feature cuda".into()))
}

/// What a build without CUDA has in place of a device: nothing.
#[cfg(not(feature = "cuda"))]
pub enum NoCuda {}

#[cfg(not(feature = "cuda"))]
impl Accelerator for NoCuda {
    fn rebuild(&self, _: &tpde::delta::Work<'_>, _: &mut dyn FnMut(usize, &[u8]) -> Result<()>) -> Result<()> {
        match *self {}
    }
}
