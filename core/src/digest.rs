//! BLAKE3 hashes of tensors, computed chunk by chunk (spec section 7).
//!
//! BLAKE3 hashes a tree. The size of a chunk is a power of two of at least 4 KiB, so a chunk is a subtree. Threads can therefore
//! hash the chunks of a tensor in any order. The combined result is the ordinary hash of the tensor.

#![forbid(unsafe_code)]

use blake3::hazmat::{HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};
use blake3::{Hash, Hasher};

use crate::format::DIGEST_SIZE;

/// Minimum size, in bytes, of input that several threads hash.
#[cfg(feature = "rayon")]
const PARALLEL: usize = 1 << 20;

/// Hashes bytes in memory. With feature `rayon`, large input is hashed by all threads.
pub fn of(bytes: &[u8]) -> Hash {
    #[cfg(feature = "rayon")]
    if bytes.len() >= PARALLEL {
        return Hasher::new().update_rayon(bytes).finalize();
    }
    blake3::hash(bytes)
}

/// Returns BLAKE3-128 as defined by the spec.
pub fn short(hash: &Hash) -> [u8; DIGEST_SIZE] {
    *hash.as_bytes().first_chunk().unwrap_or(&[0; DIGEST_SIZE])
}

/// The digest of a payload in the payload list. Hashes on the calling thread.
pub fn of_payload(payload: &[u8]) -> [u8; DIGEST_SIZE] {
    if payload.is_empty() { [0; DIGEST_SIZE] } else { short(&blake3::hash(payload)) }
}

/// The payload root of a payload list.
pub fn payload_root(list: &[[u8; DIGEST_SIZE]]) -> [u8; 32] {
    *of(list.as_flattened()).as_bytes()
}

/// Hasher of a piece of a whole. The result is a chaining value for [`combine`], or the final hash if the piece is the whole.
///
/// All pieces except the last have the same length, a power of two of at least 1 KiB.
#[derive(Clone)]
pub struct PieceHasher {
    hasher: Hasher,
    whole: u64,
}

impl PieceHasher {
    /// Creates the hasher of the piece that begins at byte `offset` of a whole of `whole` bytes.
    pub fn new(offset: u64, whole: u64) -> Self {
        let mut hasher = Hasher::new();
        hasher.set_input_offset(offset);
        Self { hasher, whole }
    }

    /// Adds the next bytes of the piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
    }

    /// Returns the hash of the piece.
    pub fn finish(self) -> [u8; 32] {
        if self.hasher.count() == self.whole { *self.hasher.finalize().as_bytes() } else { self.hasher.finalize_non_root() }
    }
}

/// Same as [`PieceHasher`], for a piece in memory.
pub fn of_piece(bytes: &[u8], offset: u64, whole: u64) -> [u8; 32] {
    let mut hasher = PieceHasher::new(offset, whole);
    hasher.update(bytes);
    hasher.finish()
}

/// Returns the hash of the whole, from the hashes of its pieces in order.
pub fn combine(pieces: &[[u8; 32]]) -> Hash {
    match pieces {
        [] => blake3::hash(&[]),
        [whole] => Hash::from_bytes(*whole),
        _ => {
            let (left, right) = halves(pieces);
            merge_subtrees_root(&left, &right, Mode::Hash)
        }
    }
}

fn halves(pieces: &[[u8; 32]]) -> ([u8; 32], [u8; 32]) {
    let (left, right) = pieces.split_at(pieces.len().next_power_of_two() / 2);
    (subtree(left), subtree(right))
}

fn subtree(pieces: &[[u8; 32]]) -> [u8; 32] {
    match pieces {
        [one] => *one,
        _ => {
            let (left, right) = halves(pieces);
            merge_subtrees_non_root(&left, &right, Mode::Hash)
        }
    }
}

/// Root of a list of tensors: BLAKE3 of their concatenated hashes, with zeros for a missing hash. Pairs whose header has a
/// payload root use digests of 16 bytes, others hashes of 32 bytes.
#[derive(Default)]
pub struct Root(Hasher);

impl Root {
    /// Adds the hash of the next tensor.
    pub fn add_hash(&mut self, hash: Option<&Hash>) {
        self.0.update(hash.map_or(&[0; 32][..], |hash| hash.as_bytes()));
    }

    /// Adds the digest of the next tensor.
    pub fn add(&mut self, digest: &[u8; DIGEST_SIZE]) {
        self.0.update(digest);
    }

    /// Returns the root of the tensors added so far.
    pub fn finish(&self) -> [u8; 32] {
        *self.0.finalize().as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prelude::*;

    #[test]
    fn pieces_give_the_plain_hash() {
        const PIECE: usize = 4096;
        let bytes: Vec<u8> = (0..9 * PIECE as u32 + 77).map(|i| (i % 251) as u8).collect();
        for size in
            [0, 1, 1024, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 1, 3 * PIECE, 5 * PIECE - 3, 8 * PIECE, bytes.len()]
        {
            let whole = &bytes[..size];
            let pieces: Vec<_> =
                whole.chunks(PIECE).enumerate().map(|(i, p)| of_piece(p, (i * PIECE) as u64, size as u64)).collect();
            assert_eq!(combine(&pieces), blake3::hash(whole), "{size} bytes");
        }
    }
}
