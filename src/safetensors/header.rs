//! Safetensors headers and shard indexes, parsed.

use crate::checkpoint::TensorInfo;
use crate::error::{Error, Result};
use crate::lane::Dtype;
use crate::source::{FileSource, Source};
use safetensors::tensor::Metadata;
use std::collections::BTreeMap;
use std::path::Path;

/// Bytes of the header's length, before the header.
const LENGTH: u64 = 8;
/// Most bytes of a header, as in the safetensors crate.
const LIMIT: u64 = 100_000_000;

/// A header, and what it says of the file.
#[derive(Debug)]
pub(super) struct Header {
    /// Bytes before the data: the length and the header.
    pub content_size: u64,
    /// Bytes of data.
    pub data_size: u64,
    /// Tensors in the order of their data.
    pub tensors: Vec<Placed>,
}

/// A tensor in a file.
#[derive(Debug)]
pub(super) struct Placed {
    pub info: TensorInfo,
    /// First byte in the data.
    pub offset: u64,
}

impl Header {
    /// Reads and parses the header of a file, and compares it with the file's length.
    pub fn read(source: &FileSource) -> Result<Self> {
        let bad = |reason: String| Error::bad_checkpoint(source.path(), reason);
        let mut length = [0; LENGTH as usize];
        if source.size() < LENGTH {
            return Err(bad(format!("{} bytes are too few for a safetensors file", source.size())));
        }
        source.read(0, &mut length)?;
        let content_size = content_size(length).filter(|&size| size <= source.size());
        let content_size = content_size.ok_or_else(|| bad("no safetensors file: the length of its header is impossible".into()))?;
        let mut content = vec![0; content_size as usize];
        source.read(0, &mut content)?;
        let header = Self::parse(&content).map_err(bad)?;
        let expected = header.content_size + header.data_size;
        if expected != source.size() {
            return Err(bad(format!("the header tells of a file of {expected} bytes, this one has {}", source.size())));
        }
        Ok(header)
    }

    /// Parses the content of a file before its data; says what is wrong with it otherwise.
    pub fn parse(content: &[u8]) -> Result<Self, String> {
        let (length, json) = content.split_first_chunk().ok_or("a header without a length")?;
        if content_size(*length) != Some(content.len() as u64) {
            return Err("the length of the header is not what it says".into());
        }
        let metadata: Metadata = serde_json::from_slice(json).map_err(|e| format!("bad safetensors header: {e}"))?;
        let Keys(keys) = serde_json::from_slice(json).map_err(|e| format!("bad safetensors header: {e}"))?;
        if keys != metadata.offset_keys().len() + usize::from(metadata.metadata().is_some()) {
            return Err("a name is twice in the header".into());
        }
        let mut tensors = Vec::new();
        let mut data_size = 0;
        for name in metadata.offset_keys() {
            let Some(info) = metadata.info(&name) else { continue };
            let (start, end) = info.data_offsets;
            let dtype = from_safetensors(info.dtype).ok_or_else(|| format!("dtype {} is not known", info.dtype))?;
            let shape: Vec<u64> = info.shape.iter().map(|&d| d as u64).collect();
            let info = TensorInfo { name, dtype, shape };
            // The crate has checked this too; what follows relies on it.
            if start as u64 != data_size || end < start || info.bytes() != (end - start) as u64 {
                return Err(format!("tensor {} does not lie where its shape says", crate::error::Escaped(&info.name)));
            }
            data_size = end as u64;
            tensors.push(Placed { info, offset: start as u64 });
        }
        Ok(Self { content_size: content.len() as u64, data_size, tensors })
    }

    /// The content of a new file that holds these tensors, each at the offset given beside it.
    pub fn compose(tensors: &[Placed]) -> Result<Vec<u8>, String> {
        let table = tensors.iter().map(|placed| {
            let TensorInfo { name, dtype, shape } = &placed.info;
            let data_offsets = (placed.offset as usize, (placed.offset + placed.info.bytes()) as usize);
            let shape = shape.iter().map(|&d| d as usize).collect();
            (name.clone(), safetensors::tensor::TensorInfo { dtype: to_safetensors(*dtype), shape, data_offsets })
        });
        let metadata = Metadata::new(None, table.collect()).map_err(|e| e.to_string())?;
        let mut json = serde_json::to_vec(&metadata).map_err(|e| e.to_string())?;
        json.resize(json.len().next_multiple_of(8), b' '); // readers like their data aligned
        let mut content = (json.len() as u64).to_le_bytes().to_vec();
        content.extend(json);
        Ok(content)
    }
}

/// How many keys an object has, repeated ones included, of which a map keeps but one.
struct Keys(usize);

impl<'de> serde::Deserialize<'de> for Keys {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Count;
        impl<'de> serde::de::Visitor<'de> for Count {
            type Value = Keys;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
                let mut count = 0;
                while map.next_entry::<serde::de::IgnoredAny, serde::de::IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Keys(count))
            }
        }
        deserializer.deserialize_map(Count)
    }
}

/// Bytes of length and header; `None` beyond the limit.
fn content_size(length: [u8; LENGTH as usize]) -> Option<u64> {
    Some(u64::from_le_bytes(length)).filter(|&n| n <= LIMIT).map(|n| n + LENGTH)
}

/// Tensor name to shard name, as a shard index says.
pub(super) fn weight_map(path: &Path, content: &[u8]) -> Result<BTreeMap<String, String>> {
    #[derive(serde::Deserialize)]
    struct ShardIndex {
        weight_map: BTreeMap<String, String>,
    }
    let index: ShardIndex =
        serde_json::from_slice(content).map_err(|e| Error::bad_checkpoint(path, format_args!("bad shard index: {e}")))?;
    Ok(index.weight_map)
}

macro_rules! dtypes {
    ($($theirs:ident = $ours:ident,)+) => {
        fn from_safetensors(dtype: safetensors::Dtype) -> Option<Dtype> {
            match dtype { $(safetensors::Dtype::$theirs => Some(Dtype::$ours),)+ _ => None }
        }

        fn to_safetensors(dtype: Dtype) -> safetensors::Dtype {
            match dtype { $(Dtype::$ours => safetensors::Dtype::$theirs,)+ }
        }
    };
}

dtypes! {
    BOOL = Bool, U8 = U8, I8 = I8, U16 = U16, I16 = I16, U32 = U32, I32 = I32, U64 = U64, I64 = I64,
    F16 = F16, BF16 = Bf16, F32 = F32, F64 = F64, C64 = C64,
    F8_E4M3 = F8E4m3, F8_E5M2 = F8E5m2, F8_E4M3FNUZ = F8E4m3Fnuz, F8_E5M2FNUZ = F8E5m2Fnuz, F8_E8M0 = F8E8m0,
    F4 = F4, F6_E2M3 = F6E2m3, F6_E3M2 = F6E3m2,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtypes_have_the_names_of_safetensors_and_their_sizes() {
        for &dtype in Dtype::ALL {
            let theirs = to_safetensors(dtype);
            assert_eq!(from_safetensors(theirs), Some(dtype));
            assert_eq!(serde_json::to_value(theirs).unwrap(), dtype.name());
            assert_eq!(theirs.bitsize() as u64, dtype.bits());
        }
    }

    #[test]
    fn a_composed_header_is_read_back() {
        let info = |name: &str, shape: &[u64]| TensorInfo { name: name.into(), dtype: Dtype::Bf16, shape: shape.into() };
        let tensors = [
            Placed { info: info("b", &[3]), offset: 0 },
            Placed { info: info("a\"", &[]), offset: 6 },
            Placed { info: info("e", &[0]), offset: 8 },
        ];
        let content = Header::compose(&tensors).unwrap();
        let header = Header::parse(&content).unwrap();
        assert_eq!(header.data_size, 8);
        assert_eq!(header.tensors.iter().map(|t| &t.info).collect::<Vec<_>>(), tensors.iter().map(|t| &t.info).collect::<Vec<_>>());
    }
}
