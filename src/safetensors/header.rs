//! Parses safetensors headers and shard indexes by the rules of spec section 10.3. The rules are stricter than `serde_json`, so
//! that all readers accept the same files.

use super::foreign;
use crate::checkpoint::TensorInfo;
use crate::source::FileSource;
use safetensors::tensor::Metadata;
use serde::de::{Deserialize, Deserializer, Error as _, IntoDeserializer, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::marker::PhantomData;
use std::path::Path;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::lane::Dtype;
use tpde_core::source::Source;

/// Size, in bytes, of the length field before the header.
const LENGTH: u64 = 8;
/// Maximum size of a header in bytes, as in the safetensors crate.
const LIMIT: u64 = 100_000_000;
/// The only key of a header that is not the name of a tensor.
const METADATA: &str = "__metadata__";

/// A parsed header.
#[derive(Debug)]
pub(super) struct Header {
    /// Size, in bytes, of the length field and the header, which precede the data.
    pub content_size: u64,
    /// Size of the data in bytes.
    pub data_size: u64,
    /// Tensors in the order of their data.
    pub tensors: Vec<FileTensor>,
    /// `__metadata__`.
    pub metadata: BTreeMap<String, String>,
}

/// Returns the names of the tensors in a safetensors file, from the length field and the header of the file. The error is the
/// reason why the header is invalid.
pub(crate) fn tensor_names(content: &[u8]) -> Result<Vec<String>, String> {
    Ok(Header::parse(content)?.tensors.into_iter().map(|tensor| tensor.info.name).collect())
}

/// A tensor in a file.
#[derive(Debug)]
pub struct FileTensor {
    pub info: TensorInfo,
    /// Offset of the tensor in the data, in bytes.
    pub offset: u64,
}

impl Header {
    /// Reads and parses the header of a file, and checks that the size of the file matches it. If the file is none, the error says
    /// what it is.
    pub fn read(source: &FileSource) -> Result<Self> {
        Self::read_header(source).map_err(|error| match (&error, foreign::recognize(source)) {
            (Error::BadCheckpoint { .. }, Some(what)) => Error::bad_checkpoint(source.path(), format_args!("it is {what}")),
            _ => error,
        })
    }

    fn read_header(source: &FileSource) -> Result<Self> {
        let bad = |reason: String| Error::bad_checkpoint(source.path(), reason);
        let mut length = [0; LENGTH as usize];
        if source.size() < LENGTH {
            return Err(bad(format!("{} bytes are too few for a safetensors file", source.size())));
        }
        source.read(0, &mut length)?;
        let content_size = content_size(length).filter(|&size| size <= source.size());
        let content_size = content_size.ok_or_else(|| {
            let length = u64::from_le_bytes(length);
            bad(format!("not a safetensors file: a header of {length} bytes is longer than the file or than {LIMIT} bytes"))
        })?;
        // Parse the header as a stream, because a model with very many tensors has a large header.
        let unread = |e: std::io::Error| e.downcast().unwrap_or_else(|e| Error::io("read", source.path(), e));
        let mut json = BufReader::with_capacity(1 << 16, SourceReader { source, at: LENGTH, end: content_size });
        let start = json.fill_buf().map_err(unread)?;
        check_start(start).map_err(bad)?;
        let table = match serde_json::from_reader(json) {
            Err(e) if e.is_io() => return Err(unread(e.into())),
            table => table,
        };
        let header = Self::from_table(table, content_size).map_err(bad)?;
        let expected = header.content_size + header.data_size;
        if expected != source.size() {
            return Err(bad(format!("by its header the file has {expected} bytes, but it has {}", source.size())));
        }
        Ok(header)
    }

    /// Parses the length field and the header. The error is the reason.
    pub fn parse(content: &[u8]) -> Result<Self, String> {
        let (length, json) = content.split_first_chunk().ok_or("a header without a length")?;
        if content_size(*length) != Some(content.len() as u64) {
            return Err("the length field differs from the length of the header".into());
        }
        check_start(json)?;
        Self::from_table(serde_json::from_slice(json), content.len() as u64)
    }

    fn from_table(table: serde_json::Result<Table>, content_size: u64) -> Result<Self, String> {
        let Table { mut tensors, metadata } = table.map_err(|e| format!("bad safetensors header: {e}"))?;
        // An empty tensor may have the same offset as the next tensor. Sort it first, whatever the order in the header.
        tensors.sort_by_key(|tensor| (tensor.offset, tensor.info.bytes() > 0));
        let mut data_size = 0u64;
        for tensor in &tensors {
            if tensor.offset != data_size {
                return Err(format!("tensor {} does not begin where the one before ends", Escaped(&tensor.info.name)));
            }
            data_size = data_size.checked_add(tensor.info.bytes()).ok_or("tensors of more than 2^64 bytes")?;
        }
        Ok(Self { content_size, data_size, tensors, metadata })
    }

    /// The length field and the header of a new file with these tensors at their offsets. The error is the reason why readers
    /// would reject the file.
    pub fn compose(tensors: &[FileTensor]) -> Result<Vec<u8>, String> {
        if tensors.iter().any(|tensor| tensor.info.name == METADATA) {
            return Err(format!("a tensor is named {METADATA}, under which safetensors files keep their metadata"));
        }
        let is_overflow =
            |tensor: &&FileTensor| tensor.info.shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim)).is_none();
        if let Some(FileTensor { info, .. }) = tensors.iter().find(is_overflow) {
            let name = Escaped(&info.name);
            return Err(format!("tensor {name} is empty, but its dims {:?} are too large for safetensors readers", info.shape));
        }
        let table = tensors.iter().map(|tensor| {
            let TensorInfo { name, dtype, shape } = &tensor.info;
            let data_offsets = (tensor.offset as usize, (tensor.offset + tensor.info.bytes()) as usize);
            let shape = shape.iter().map(|&d| d as usize).collect();
            Ok((name.clone(), safetensors::tensor::TensorInfo { dtype: to_safetensors(*dtype)?, shape, data_offsets }))
        });
        let metadata = Metadata::new(None, table.collect::<Result<_, String>>()?).map_err(|e| e.to_string())?;
        let mut json = HeaderBuffer(Vec::new());
        serde_json::to_writer(&mut json, &metadata).map_err(|e| match e.is_io() {
            true => format!("the header of the {} tensors would have more than the {LIMIT} bytes that readers take", tensors.len()),
            false => e.to_string(),
        })?;
        let HeaderBuffer(mut json) = json;
        json.resize(json.len().next_multiple_of(8), b' '); // aligns the data
        let mut content = (json.len() as u64).to_le_bytes().to_vec();
        content.extend(json);
        Ok(content)
    }
}

/// Checks that a header begins with `{`, without white space or byte order mark.
fn check_start(json: &[u8]) -> Result<(), String> {
    match (json.first(), foreign::byte_order_mark(json)) {
        (Some(b'{'), _) => Ok(()),
        (_, Some(_)) => Err("a safetensors header that begins with a byte order mark, not with '{'".into()),
        _ => Err("a safetensors header that does not begin with '{'".into()),
    }
}

/// A buffer for a header. Writing more than `LIMIT` bytes fails. Escaping can make names six times as long.
struct HeaderBuffer(Vec<u8>);

impl Write for HeaderBuffer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // The limit is a multiple of 8, so padding to a multiple of 8 cannot exceed it.
        if self.0.len() + bytes.len() > LIMIT as usize {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A struct that is deserialized only from an object. A derived implementation would also accept an array of the values.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(serde::de::value::MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

/// An object whose values are strings. Repeated keys are an error.
struct Strings(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StringsVisitor;
        impl<'de> Visitor<'de> for StringsVisitor {
            type Value = Strings;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Strings, A::Error> {
                let mut strings = BTreeMap::new();
                while let Some((name, value)) = map.next_entry::<String, String>()? {
                    if strings.contains_key(&name) {
                        return Err(A::Error::custom(format_args!("{} occurs twice", Escaped(&name))));
                    }
                    strings.insert(name, value);
                }
                Ok(Strings(strings))
            }
        }
        deserializer.deserialize_map(StringsVisitor)
    }
}

/// A tensor's entry in a header. Other members, missing members and repeated members are errors.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The members of a header: tensors in the order of the header, and `__metadata__`.
struct Table {
    tensors: Vec<FileTensor>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Table {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(TableVisitor)
    }
}

struct TableVisitor;

impl<'de> Visitor<'de> for TableVisitor {
    type Value = Table;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Table, A::Error> {
        let mut tensors = Vec::new();
        let mut metadata = None;
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                let Strings(strings) = map.next_value()?;
                if metadata.replace(strings).is_some() {
                    return Err(A::Error::duplicate_field(METADATA));
                }
                continue;
            }
            let Object(Entry { dtype, shape, data_offsets: (start, end) }) = map.next_value()?;
            let bad = |what: &str| A::Error::custom(format_args!("tensor {}: {what}", Escaped(&name)));
            let dtype: Dtype = dtype.parse().map_err(|_| bad("its dtype is not known"))?;
            let bytes = dtype.lanes(&shape).map(|lanes| lanes * dtype.lane_bytes() as u64);
            if end.checked_sub(start) != bytes || bytes.is_none() {
                return Err(bad("its data is not as long as its dtype and shape say"));
            }
            tensors.push(FileTensor { info: TensorInfo { name, dtype, shape }, offset: start });
        }
        let mut names: Vec<_> = tensors.iter().map(|tensor| tensor.info.name.as_str()).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(A::Error::custom(format_args!("tensor {} occurs twice", Escaped(pair[0]))));
        }
        Ok(Table { tensors, metadata: metadata.unwrap_or_default() })
    }
}

/// A range of a file as a stream.
struct SourceReader<'a> {
    source: &'a FileSource,
    at: u64,
    end: u64,
}

impl Read for SourceReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let size = out.len().min((self.end - self.at) as usize);
        self.source.read(self.at, &mut out[..size]).map_err(|e| match e {
            Error::Io { source, .. } => source,
            other => std::io::Error::other(other),
        })?;
        self.at += size as u64;
        Ok(size)
    }
}

/// Size, in bytes, of length field and header; `None` if the header is larger than `LIMIT`.
fn content_size(length: [u8; LENGTH as usize]) -> Option<u64> {
    Some(u64::from_le_bytes(length)).filter(|&n| n <= LIMIT).map(|n| n + LENGTH)
}

/// Parses a shard index into a map from tensor name to shard name. Other members of the shard index may have any value.
pub(super) fn weight_map(path: &Path, content: &[u8]) -> Result<BTreeMap<String, String>> {
    #[derive(serde::Deserialize)]
    struct WeightMap {
        weight_map: Strings,
    }
    let bad = |reason: &dyn fmt::Display| Error::bad_checkpoint(path, format_args!("bad shard index: {reason}"));
    if let Some(encoding) = foreign::byte_order_mark(content) {
        return Err(bad(&format_args!("it begins with the byte order mark of {encoding}: save it as UTF-8 without one")));
    }
    // Check UTF-8 here, because the parser does not check strings that it skips.
    let text = std::str::from_utf8(content).map_err(|e| bad(&e))?;
    let Object(WeightMap { weight_map: Strings(map) }) = serde_json::from_str(text).map_err(|e| bad(&e))?;
    Ok(map)
}

/// The dtype of the safetensors crate, whose JSON has the same name.
fn to_safetensors(dtype: Dtype) -> Result<safetensors::Dtype, String> {
    Deserialize::deserialize(dtype.name().into_deserializer()).map_err(|e: serde::de::value::Error| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtypes_have_the_names_of_safetensors_and_their_sizes() {
        for &dtype in Dtype::ALL {
            let theirs = to_safetensors(dtype).unwrap();
            assert_eq!(serde_json::to_value(theirs).unwrap(), dtype.name());
            assert_eq!(theirs.bitsize() as u64, dtype.bits());
        }
    }

    #[test]
    fn a_header_that_cannot_be_read_is_an_io_error_and_no_bad_file() {
        use std::io::Write;
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let json = format!("{{{}}}", " ".repeat(1 << 18));
        file.write_all(&(json.len() as u64).to_le_bytes()).unwrap();
        file.write_all(json.as_bytes()).unwrap();
        let source = FileSource::open(file.path()).unwrap();
        assert!(Header::read(&source).is_ok());
        for left in [1 << 17, 9] {
            file.as_file().set_len(left).unwrap();
            let error = Header::read(&source).unwrap_err();
            assert!(matches!(error, Error::Io { .. }), "{left}: {error}");
        }
    }

    #[test]
    fn an_empty_tensor_that_readers_refuse_is_named() {
        let empty = |shape: &[u64]| {
            let info = TensorInfo { name: "hollow".into(), dtype: Dtype::U8, shape: shape.into() };
            Header::compose(&[FileTensor { info, offset: 0 }])
        };
        let reason = empty(&[1 << 40, 1 << 40, 0]).unwrap_err();
        assert!(reason.contains("hollow") && reason.contains("dims [1099511627776, 1099511627776, 0]"), "{reason}");
        empty(&[0, 1 << 40, 1 << 40]).unwrap(); // the product of the dims so far is 0
        empty(&[1 << 40, 0]).unwrap();
    }

    #[test]
    fn a_composed_header_is_read_back() {
        let info = |name: &str, shape: &[u64]| TensorInfo { name: name.into(), dtype: Dtype::Bf16, shape: shape.into() };
        let tensors = [
            FileTensor { info: info("b", &[3]), offset: 0 },
            FileTensor { info: info("a\"", &[]), offset: 6 },
            FileTensor { info: info("e", &[0]), offset: 8 },
        ];
        let content = Header::compose(&tensors).unwrap();
        let header = Header::parse(&content).unwrap();
        assert_eq!(header.data_size, 8);
        assert_eq!(header.tensors.iter().map(|t| &t.info).collect::<Vec<_>>(), tensors.iter().map(|t| &t.info).collect::<Vec<_>>());
    }
}
