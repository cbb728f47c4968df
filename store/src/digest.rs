//! The digests and uploads that name objects.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// A BLAKE3 digest. In manifests and names, 64 hexadecimal digits in lower case.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(*blake3::Hasher::new().update_rayon(bytes).finalize().as_bytes())
    }

    /// The digest of a range of a file.
    pub(crate) fn of_range(file: &File, range: Range<u64>) -> io::Result<Self> {
        let mut hasher = blake3::Hasher::new();
        let mut buffer = [0; 1 << 16];
        let mut offset = range.start;
        while offset < range.end {
            let size = (range.end - offset).min(buffer.len() as u64);
            let bytes = &mut buffer[..size as usize];
            file.read_exact_at(bytes, offset)?;
            hasher.update(bytes);
            offset += size;
        }
        Ok(Self(*hasher.finalize().as_bytes()))
    }

    /// The digest of these digits.
    pub(crate) fn parse(digits: &str) -> Option<Self> {
        let is_lower = !digits.bytes().any(|byte| byte.is_ascii_uppercase());
        blake3::Hash::from_hex(digits).ok().filter(|_| is_lower).map(|hash| Self(*hash.as_bytes()))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let digits = String::deserialize(deserializer)?;
        Self::parse(&digits).ok_or_else(|| de::Error::custom("expected 64 hexadecimal digits in lower case"))
    }
}

/// The call that has uploaded an object: 32 random hexadecimal digits in lower case. It is part of the object's name, so two calls
/// never write the same object.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UploadId(u128);

impl UploadId {
    pub(crate) fn new() -> Self {
        Self(random())
    }

    /// The id of these digits.
    pub(crate) fn parse(digits: &str) -> Option<Self> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_id = digits.len() == 32 && digits.bytes().all(is_digit);
        u128::from_str_radix(digits, 16).ok().filter(|_| is_id).map(Self)
    }
}

impl fmt::Display for UploadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for UploadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for UploadId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for UploadId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let digits = String::deserialize(deserializer)?;
        Self::parse(&digits).ok_or_else(|| de::Error::custom("expected 32 hexadecimal digits in lower case"))
    }
}

thread_local! {
    /// In tests, the state of the generator that a thread uses instead of the system's.
    static SEED: std::cell::Cell<Option<u64>> = const { std::cell::Cell::new(None) };
}

/// Makes all ids that this thread draws from now on a function of `seed`.
pub(crate) fn seed_ids(seed: u64) {
    SEED.set(Some(seed));
}

/// A random number for an id.
pub(crate) fn random() -> u128 {
    let Some(seed) = SEED.get() else { return rand::random() };
    SEED.set(Some(seed.wrapping_add(1)));
    let hash = blake3::hash(&seed.to_le_bytes());
    hash.as_bytes()[..16].iter().fold(0, |number, byte| number << 8 | u128::from(*byte))
}
