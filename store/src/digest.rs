//! The digests that name objects.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;

/// A BLAKE3 digest. In manifests and names, 64 hexadecimal digits in lower case.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(*blake3::Hasher::new().update_rayon(bytes).finalize().as_bytes())
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
