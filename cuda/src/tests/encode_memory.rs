//! The device memory of an encoding.

use super::super::encode::{Limits, STEP, WORKERS};
use super::super::{DeviceCheckpoint, Encode, TensorSlice, abi};
use super::cases::{Random, random_lanes};
use super::encode::compare;
use super::stand_in;
use tpde::internals::low_bits;
use tpde::{Codec, EncodeOptions, MemoryCheckpoint, Rectangle, TensorInfo};
use tpde_core::codec::conditioned::tokens_within;
use tpde_core::lane::Dtype;

/// Size in bytes of a table set on the device.
const TABLES: u64 = 44_352;
/// Size in bytes of the memory for digests of two tensors of less than 1 MiB.
const DIGESTS: u64 = 4096;
const COLUMNS: u64 = 60;

/// A matrix on the device whose rows have gaps, so that its lanes are copied.
fn with_gaps(info: &TensorInfo, bytes: &[u8]) -> DeviceCheckpoint {
    let (device, row) = (super::device(), info.shape[1] as usize * info.dtype.lane_bytes());
    let mut content = bytes.chunks(row).flat_map(|row| row.iter().copied().chain([0xEE; 8])).collect::<Vec<_>>();
    content.truncate(content.len() - 8);
    let memory = device.alloc(content.len() as u64).unwrap();
    device.write(&memory, &content).unwrap();
    let slice = TensorSlice::new(&info.name, Rectangle::whole(&info.shape), memory).pitch(row as u64 + 8);
    DeviceCheckpoint::of_slices(device, [(info.dtype, info.shape.clone(), slice)]).unwrap()
}

/// With lanes of each width, in rows and not, and when all streams overflow: several waves need no more memory than one.
#[test]
#[ignore = "needs a CUDA device"]
fn device_memory_is_within_its_bound() {
    if !stand_in::is_used() {
        return println!("skipped: only the stand-in for the driver counts the memory");
    }
    for (dtype, rows) in [(Dtype::U8, 600), (Dtype::Bf16, 400), (Dtype::F32, 350), (Dtype::F64, 350)] {
        let info = TensorInfo { name: "t".into(), dtype, shape: vec![rows, COLUMNS] };
        let (base, target) = random_lanes(&mut Random(rows), dtype, (rows * COLUMNS) as usize, 2);
        let checkpoint = |bytes| MemoryCheckpoint::new([(info.clone(), bytes)]).unwrap();
        let (on_host, base_on_host) = (checkpoint(&target[..]), checkpoint(&base[..]));
        let (copied, base_copied) = (with_gaps(&info, &target), with_gaps(&info, &base));
        let device = super::device();
        let [whole, base_whole] = [&on_host, &base_on_host].map(|c| DeviceCheckpoint::upload(device, c).unwrap());
        let options = EncodeOptions::default().codec(Codec::Conditioned).chunk_lanes(1 << 12);
        let (expected, _) = tpde::Encode::new(&on_host).base(&base_on_host).options(options.clone()).to_memory().unwrap();

        let tokens = tokens_within(8 * dtype.lane_bytes() as u32 - low_bits(dtype, true)) as u32;
        let slot = u64::from(abi::ENCODE_CHOOSE_SCRATCH + 4 * abi::ENCODE_ROWS * tokens);
        let payloads = 1 << 14;
        // Memory of a wave: for two chunks, for one whose lanes are copied, and for all.
        let copies = (2 * dtype.lane_bytes() as u64) << 12;
        for (what, target, base, wave, room) in [
            ("whole", &whole, &base_whole, 1 << 12, 320),
            ("in rows", &copied, &base_copied, copies + (1 << 12), 320),
            ("no room", &whole, &base_whole, 1 << 14, 1),
        ] {
            // The sizes of the wave and of lists are rounded up.
            let memory = slot + wave + 2 * (payloads + STEP) + TABLES + 10 * STEP;
            let limits = Limits { wave, ahead: wave, payloads, memory, room, scratch: 1, ..Limits::default() };
            let (before, _) = stand_in::device_memory();
            // Training needs memory for the counts of a sample, which is freed for the first wave.
            let in_waves = std::sync::Mutex::new(Vec::new());
            let progress = |bytes| {
                if bytes > 0 {
                    in_waves.lock().unwrap().push(stand_in::device_memory().1);
                }
            };
            let encode = Encode::new(target).base(base).options(options.clone()).limits(limits).progress(progress);
            let (found, _) = encode.to_memory().unwrap();
            compare(&expected, &found, what);
            let in_waves = in_waves.lock().unwrap();
            assert!(in_waves.len() > 2, "{dtype}, {what}: {} payloads", in_waves.len());
            let most = in_waves.iter().skip(1).max().unwrap() - before;
            // Payloads of a few ranges of each thread exist at a time, in memory whose size is rounded up too.
            let bound = WORKERS as u64 * memory + found.blob().len() as u64 + 10 * STEP + DIGESTS;
            assert!(most <= bound, "{dtype}, {what}: {most} bytes of device memory, expected at most {bound}");
        }
    }
}
