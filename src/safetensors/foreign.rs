//! Recognises files that are often given in place of a safetensors file.

use crate::source::FileSource;
use tpde_core::format::{BLOB_MAGIC, INDEX_MAGIC};
use tpde_core::source::Source;

/// Number of bytes that are looked at.
const LOOK: u64 = 512;

/// UTF-8's byte order mark.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// First bytes of files, and what they are.
const KNOWN: [(&[u8], &str); 20] = [
    (b"version https://git-lfs", "a pointer of Git LFS, without the file's data: `git lfs pull` fetches the file"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes: load it with torch.load, and save it with safetensors.torch.save_file"),
    (b"\x80\x02", PICKLE),
    (b"\x80\x03", PICKLE),
    (b"\x80\x04", PICKLE),
    (b"\x80\x05", PICKLE),
    (b"GGUF", "a GGUF file, whose tensors are quantised for llama.cpp: give the safetensors files that it was made from"),
    (b"\x89HDF\r\n", "an HDF5 file, as Keras writes: load its weights, and save them with safetensors"),
    (b"\x93NUMPY", "a NumPy array: save it with safetensors.numpy.save_file"),
    (&INDEX_MAGIC, "the index of a pair, not a checkpoint"),
    (&BLOB_MAGIC, "the blob of a pair, not a checkpoint"),
    (b"\x1f\x8b\x08", COMPRESSED),
    (b"\x28\xb5\x2f\xfd", COMPRESSED),
    (b"\xfd7zXZ", COMPRESSED),
    (b"7z\xbc\xaf", COMPRESSED),
    (b"BZh", COMPRESSED),
    (b"<?xml", "an XML document, as servers send in place of a file that they refuse: download the file again"),
    (b"<!doctype html", HTML),
    (b"<html", HTML),
    (b"{", JSON),
];
const PICKLE: &str = "a pickle, as torch.save writes: load it with torch.load, and save it with safetensors.torch.save_file";
const COMPRESSED: &str = "a compressed file: expand it";
const HTML: &str = "an HTML page: download the file itself (on a model hub, from `resolve`, not from `blob`)";
const JSON: &str = "JSON, not a safetensors file";
const SHARD_INDEX: &str = "a shard index under another name: give its folder, or name it as in model.safetensors.index.json";

/// What a file that is not a safetensors file is, if that can be seen from its first bytes, and how to get a safetensors file.
pub(super) fn recognize(file: &FileSource) -> Option<&'static str> {
    let mut start = vec![0; file.size().min(LOOK) as usize];
    file.read(0, &mut start).ok()?;
    let length = start.first_chunk().map_or(u64::MAX, |length| u64::from_le_bytes(*length));
    if length <= file.size().saturating_sub(8) && start.get(8) == Some(&b'{') {
        return None;
    }
    // A length that a header may have is no magic number of two bytes: the length 640 begins like a pickle.
    let least = if length >> 32 == 0 { 3 } else { 0 };
    let text = start.strip_prefix(BOM).unwrap_or(&start).trim_ascii_start();
    let begins = |bytes: &[u8], with: &[u8]| bytes.get(..with.len()).is_some_and(|bytes| bytes.eq_ignore_ascii_case(with));
    let (_, what) = KNOWN.iter().find(|(magic, _)| magic.len() >= least && (begins(&start, magic) || begins(text, magic)))?;
    let is_map =
        || start.windows(12).any(|bytes| bytes == b"\"weight_map\"") || start.windows(10).any(|bytes| bytes == b"\"metadata\"");
    Some(if *what == JSON && is_map() { SHARD_INDEX } else { what })
}

/// The byte order mark with which a text begins.
pub(super) fn byte_order_mark(text: &[u8]) -> Option<&'static str> {
    let marks: [(&[u8], _); 3] = [(BOM, "UTF-8"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16")];
    marks.iter().find(|(mark, _)| text.starts_with(mark)).map(|(_, encoding)| *encoding)
}
