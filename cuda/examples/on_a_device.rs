//! Decodes on a CUDA device: into host memory, and into weights on the device. Without a device, prints a message and ends.
//!
//! `cargo run --package tpde-cuda --example on_a_device`

use tpde::{Apply, CodecChoice, Dtype, Encode, EncodeOptions, Error, InPlace, MemoryCheckpoint, Result, TensorInfo};
use tpde_cuda::{Application, ApplyPlan, Binding, Device, DeviceIndex, Mode, Payloads};

const LANES: u64 = 1 << 22;

fn main() -> Result<()> {
    let device = match Device::open(0) {
        Err(Error::NoDevice(reason)) => {
            println!("no CUDA device: {reason}");
            return Ok(());
        }
        device => device?,
    };
    println!("device: {}", device.name());

    let info = TensorInfo { name: "layer.weight".into(), dtype: Dtype::Bf16, shape: vec![LANES] };
    let old: Vec<u8> = (0..LANES).flat_map(|i| (0x3C00 + (i % 509) as u16).to_le_bytes()).collect();
    let mut new = old.clone();
    new.chunks_mut(2).step_by(50).for_each(|lane| lane[0] ^= 1);
    let base = MemoryCheckpoint::new([(info.clone(), &old[..])])?;
    let target = MemoryCheckpoint::new([(info, &new[..])])?;
    // Only codecs that a device decodes without the CPU.
    let options = EncodeOptions::default().codec(CodecChoice::Device);
    let (pair, _) = Encode::new(&target).base(&base).options(options).to_memory()?;

    // The device decodes instead of the CPU. Digests are compared.
    let mut rebuilt = vec![0; new.len()];
    Apply::new(&pair).base(&base).on(&device).to_buffers(&mut [&mut rebuilt])?;
    assert!(rebuilt == new);

    // Changes weights in device memory in place. CRC and chunk sums are compared, but no digests.
    let index = DeviceIndex::upload(&device, pair.index())?;
    let weights = device.alloc(old.len() as u64)?;
    device.write(&weights, &old)?;
    let tensor = index.find("layer.weight").expect("a tensor of the pair");
    let bindings = [Binding::in_place(tensor, weights.clone())];
    let plan = ApplyPlan::new(&index, &bindings, Mode::InPlace(InPlace::AllChecked), Payloads::Host(pair.blob()))?;
    let stream = device.stream()?;
    Application::prepare(plan)?.launch(&stream)?.wait()?;
    let mut found = device.pinned(new.len())?;
    device.read(&weights, &mut found)?;
    assert!(found[..] == new[..]);
    println!("{} bytes of weights are the target's, in memory of the host and of the device", new.len());
    Ok(())
}

#[test]
fn the_example_runs() {
    main().unwrap();
}
