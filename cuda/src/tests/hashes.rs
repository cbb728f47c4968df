//! Hashes of device memory, compared with those of the processor.

use super::super::{DeviceSlice, Hashes, Rows};
use super::cases::Random;
use super::stand_in;
use tpde::Error;

/// Returns `bytes` random bytes.
fn random_bytes(random: &mut Random, bytes: usize) -> Vec<u8> {
    let mut content: Vec<u8> = (0..bytes.div_ceil(8)).flat_map(|_| random.bits().to_le_bytes()).collect();
    content.truncate(bytes);
    content
}

#[test]
#[ignore = "needs a CUDA device"]
fn hashes_are_those_of_the_processor_for_any_length_alignment_and_rows() {
    let device = super::device();
    let random = &mut Random(23);
    // More than 32 KiB has several pieces, more than 1 MiB two levels of nodes, more than 32 MiB three.
    let boundaries = [0, 64, 1024, 2048, 32 << 10, 64 << 10, 1 << 20];
    let mut sizes: Vec<usize> = boundaries.into_iter().flat_map(|at: usize| at.saturating_sub(1)..=at + 1).collect();
    for _ in 0..40 {
        let most = 1 << (6 + random.below(15));
        sizes.push(random.below(most));
    }
    sizes.push((33 << 20) + 5);
    let mut content = random_bytes(random, (33 << 20) + 4096);
    let memory = device.alloc(content.len() as u64).unwrap();
    device.write(&memory, &content).unwrap();
    let (mut ranges, mut expected) = (Vec::new(), Vec::new());
    for size in sizes {
        let start = random.below(64) + random.below(content.len() - 64 - size) / 64 * 64;
        ranges.push((memory.slice(start as u64, size as u64).unwrap(), None));
        expected.push(*blake3::hash(&content[start..][..size]).as_bytes());
    }
    for row in [1, 2, 3, 16, 48, 64, 1000, 4096, 33_000, 100_001] {
        for unit in [1, 4, 16] {
            let (row, pitch) = (row * unit, row * unit + unit * (1 + random.below(9)));
            let rows = 1 + random.below((1 << 20) / pitch + 1);
            let start = random.below(1 << 16) * unit;
            let all = (rows - 1) * pitch + row;
            ranges.push((memory.slice(start as u64, all as u64).unwrap(), Some(Rows::new(row as u64, pitch as u64))));
            let mut hasher = blake3::Hasher::new();
            (0..rows).for_each(|n| _ = hasher.update(&content[start + n * pitch..][..row]));
            expected.push(*hasher.finalize().as_bytes());
        }
    }
    let stream = device.stream().unwrap();
    let hashes = Hashes::queue(&stream, &ranges).unwrap();
    // A fill that is queued behind the hashes does not change them.
    stream.fill(&memory, 7).unwrap();
    let later = Hashes::queue(&stream, &ranges[..1]).unwrap();
    assert_eq!(hashes.on_device().bytes(), 32 * expected.len() as u64);
    for (n, (found, expected)) in hashes.wait().unwrap().iter().zip(&expected).enumerate() {
        assert!(found == expected, "range {n}, {:?}: {:?}", ranges[n].1, ranges[n].0);
    }
    content.fill(7);
    let same = &content[..ranges[0].0.bytes() as usize];
    assert_eq!(later.wait().unwrap(), [*blake3::hash(same).as_bytes()]);
    assert!(Hashes::queue(&stream, &[]).unwrap().wait().unwrap().is_empty());
}

#[test]
#[ignore = "needs a CUDA device"]
fn rows_that_do_not_fill_their_memory_are_refused() {
    let device = super::device();
    let memory = device.alloc(1000).unwrap();
    let stream = device.stream().unwrap();
    for (row, pitch) in [(0, 0), (0, 10), (10, 0), (10, 9), (1001, 1001), (10, 300), (10, u64::MAX)] {
        let refused = Hashes::queue(&stream, &[(memory.clone(), Some(Rows::new(row, pitch)))]);
        assert!(matches!(refused, Err(Error::InvalidArgument(_))), "rows of {row}, {pitch} apart: {refused:?}");
    }
    // SAFETY: refused, so nothing is done with the memory.
    let slice = unsafe { DeviceSlice::from_raw(u64::MAX - 9, 100) };
    assert!(matches!(Hashes::queue(&stream, &[(slice, None)]), Err(Error::InvalidArgument(_))));
}

/// Prints the speed of hashing long ranges.
#[test]
#[ignore = "needs a CUDA device"]
fn speed_of_hashes() {
    let device = super::device();
    let bytes: u64 = if stand_in::is_used() { 1 << 20 } else { 1 << 30 };
    let memory = device.alloc(bytes + 256).unwrap();
    let stream = device.stream().unwrap();
    stream.fill(&memory, 0x5A).unwrap();
    let whole = |start| vec![(memory.slice(start, bytes).unwrap(), None)];
    let in_rows = vec![(memory.slice(0, bytes - 128).unwrap(), Some(Rows::new(8192 - 128, 8192)))];
    let parts = |size: u64| (0..bytes / size).map(|n| (memory.slice(n * size, size).unwrap(), None)).collect::<Vec<_>>();
    for (what, ranges, hashed) in [
        ("one range, at a multiple of 16", whole(0), bytes),
        ("one range, at a multiple of 4", whole(4), bytes),
        ("one range, at an odd address", whole(1), bytes),
        ("rows with gaps", in_rows, bytes / 8192 * (8192 - 128)),
        ("ranges of 64 KiB", parts(64 << 10), bytes),
        ("ranges of 1 MiB", parts(1 << 20), bytes),
    ] {
        let mut seconds: Vec<f64> = (0..9)
            .map(|_| {
                let start = stream.record().unwrap();
                let hashes = Hashes::queue(&stream, &ranges).unwrap();
                let end = stream.record().unwrap();
                hashes.wait().unwrap();
                end.wait().unwrap();
                end.since(&start).unwrap()
            })
            .collect();
        seconds.sort_by(f64::total_cmp);
        let (gib, speed) = (bytes as f64 / f64::from(1 << 30), hashed as f64 / seconds[4] / 1e9);
        eprintln!("BLAKE3 of {gib} GiB, {what}: {:.3} ms, {speed:.0} GB/s", seconds[4] * 1e3);
    }
}
