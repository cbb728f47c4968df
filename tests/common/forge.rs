//! Forges a blob that passes every check that is not cryptographic. CRC-32 and chunk sums are linear, so changes to a payload can
//! be chosen that cancel out in both. Also corrects the CRC of a changed payload.

use tpde::ValidatedIndex;

/// Row weight of a word (section 6.1), computed as the specification states.
fn row_weight(word: usize) -> u32 {
    let mut z = (word as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 32) as u32 | 1
}

/// Changes the blob of a pair of one U32 tensor in one chunk of codec `raw`, with at most 1,024 lanes, all of them changed.
/// Updates `target` to what the forged pair decodes to. The unchanged index fits the forged blob.
pub fn forge(index: &ValidatedIndex, blob: &mut [u8], target: &mut [u8]) {
    let record = index.records()[0];
    let lanes = record.num_deltas.get() as usize;
    assert!(index.records().len() == 1 && lanes <= 1024 && target.len() == 4 * lanes, "a pair of another kind");
    let payload = &mut blob[record.blob_offset.get() as usize..][..record.compressed_size.get() as usize];
    let crc = crc32fast::hash(payload);

    // A move of words a and b adds Q[b] to word a and subtracts Q[a] from word b, so Q[a]·a + Q[b]·b stays the same. Moves of
    // different words change different bits, so their effects on the CRC combine by XOR. Of 33 moves, some subset has no effect.
    let feasible = (0..lanes - 1).step_by(2).filter_map(|a| {
        let up = word(target, a).checked_add(row_weight(a + 1))?;
        let down = word(target, a + 1).checked_sub(row_weight(a))?;
        let moved = [(a, up), (a + 1, down)];
        moved.iter().all(|&(at, new)| new != base_word(payload, lanes, target, at)).then_some(moved)
    });
    let moves: Vec<_> = feasible.take(33).collect();
    assert_eq!(moves.len(), 33, "too few words can be moved");
    let mut basis: Vec<(u32, u64)> = Vec::new();
    let subset = moves.iter().enumerate().find_map(|(i, change)| {
        let (mut copy, mut scratch) = (payload.to_vec(), target.to_vec());
        apply(&mut copy, lanes, &mut scratch, change);
        let (mut effect, mut subset) = (crc32fast::hash(&copy) ^ crc, 1u64 << i);
        for &(vector, of) in &basis {
            // Each basis vector has a different leading bit.
            if effect & (1 << vector.ilog2()) != 0 {
                (effect, subset) = (effect ^ vector, subset ^ of);
            }
        }
        basis.extend((effect != 0).then_some((effect, subset)));
        basis.sort_unstable_by(|a, b| b.cmp(a));
        (effect == 0).then_some(subset)
    });
    let subset = subset.expect("33 vectors of 32 bits are linearly dependent");
    for (i, change) in moves.iter().enumerate() {
        if subset & (1 << i) != 0 {
            apply(payload, lanes, target, change);
        }
    }
}

/// Writes new target words, and their deltas from the base.
fn apply(payload: &mut [u8], lanes: usize, target: &mut [u8], change: &[(usize, u32)]) {
    for &(at, new) in change {
        let difference = new.wrapping_sub(base_word(payload, lanes, target, at)) as i32;
        let delta = ((difference << 1) ^ (difference >> 31)) as u32;
        payload[4 * (lanes + at)..][..4].copy_from_slice(&delta.to_le_bytes());
        target[4 * at..][..4].copy_from_slice(&new.to_le_bytes());
    }
}

/// The base lane at index `at`. The payload holds all positions first, then the deltas.
fn base_word(payload: &[u8], lanes: usize, target: &[u8], at: usize) -> u32 {
    let delta = word(payload, lanes + at);
    word(target, at).wrapping_sub((delta >> 1) ^ (delta & 1).wrapping_neg())
}

/// A little-endian word of 32 bits.
fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[4 * at..][..4].try_into().unwrap())
}

/// Corrects the CRC of a payload and everything that depends on it: digests of payloads, the pair digest and the header of the blob.
pub fn repair(index: &mut [u8], blob: &mut [u8], chunk: usize) {
    let payload = |index: &[u8], chunk: usize| {
        let record = 256 + 32 * chunk;
        let place = u64::from_le_bytes(index[record..record + 8].try_into().unwrap()) as usize;
        let size = u32::from_le_bytes(index[record + 8..record + 12].try_into().unwrap()) as usize;
        place..place + size
    };
    let crc = crc32fast::hash(&blob[payload(index, chunk)]).to_le_bytes();
    index[256 + 32 * chunk..][20..24].copy_from_slice(&crc);
    let features = index[16];
    if features & 1 != 0 {
        let count = u32::from_le_bytes(index[48..52].try_into().unwrap()) as usize;
        let digest = |chunk| match &blob[payload(index, chunk)] {
            [] => [0; 16],
            payload => *blake3::hash(payload).as_bytes().first_chunk().unwrap(),
        };
        let list: Vec<[u8; 16]> = (0..count).map(digest).collect();
        index[208..240].copy_from_slice(blake3::hash(list.as_flattened()).as_bytes());
        if features & 2 != 0 {
            index[256 + 48 * count..][..16 * count].copy_from_slice(list.as_flattened());
        }
        let crc = crc32fast::hash(&index[..252]).to_le_bytes();
        index[252..256].copy_from_slice(&crc);
    }
    let (body, digest) = index.split_last_chunk_mut::<32>().unwrap();
    *digest = *blake3::hash(body).as_bytes();
    blob[24..56].copy_from_slice(digest);
    let crc = crc32fast::hash(&blob[..60]).to_le_bytes();
    blob[60..64].copy_from_slice(&crc);
}
