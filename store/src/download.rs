//! Downloads of stored files into local ones. Each segment is compared with its digest.

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::manifest::{MAX_SEGMENT, Segment, Stored, StoredPair};
use crate::names;
use crate::remote::Remote;
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tpde::{BaseKind, FileSource, OpenOptions, Pair, Rectangle, Tensor, ValidatedIndex, Watch};

/// Ranges with a smaller gap between them are read by one request.
const GAP: u64 = 1 << 20;
/// The bytes of a blob's header (spec section 11).
const HEADER: Range<u64> = 0..64;
/// Maximum size of an index that is read into memory.
const MAX_INDEX: u64 = 16 << 30;

/// Reads a segment, and compares its size and digest.
pub(crate) fn check_segment(segment: &Segment, found: Option<Vec<u8>>) -> Result<Vec<u8>> {
    let damaged = |found: String| Error::Damaged {
        digest: segment.digest,
        expected: format!("{} bytes that hash to its name", segment.bytes),
        found,
    };
    let bytes = found.ok_or_else(|| damaged("no such object".into()))?;
    if bytes.len() as u64 != segment.bytes {
        return Err(damaged(format!("{} bytes", bytes.len())));
    }
    let digest = Digest::of(&bytes);
    if digest != segment.digest {
        return Err(damaged(format!("bytes that hash to {digest}")));
    }
    Ok(bytes)
}

/// Checks all segments, and passes each on with its offset.
pub(crate) fn each_segment(remote: &Remote, stored: &Stored, mut done: impl FnMut(u64, Vec<u8>) -> Result<()>) -> Result<()> {
    let mut offset = 0;
    let placed = stored.segments.iter().map(|segment| {
        offset += segment.bytes;
        (offset - segment.bytes, *segment)
    });
    fetch(remote, placed.collect(), &mut done)
}

fn fetch(remote: &Remote, placed: Vec<(u64, Segment)>, done: &mut dyn FnMut(u64, Vec<u8>) -> Result<()>) -> Result<()> {
    let start = |(_, segment): &(u64, Segment)| remote.get(names::object(&segment.digest), None, MAX_SEGMENT);
    Remote::each(placed, start, |(offset, segment), found| done(offset, check_segment(&segment, found)?))
}

/// Writes a stored file to `path`. Segments that the file has already, from an interrupted call, are not read again. The
/// caller syncs the file if that matters.
pub(crate) fn to_file(remote: &Remote, stored: &Stored, path: &Path, watch: &dyn Watch) -> Result<()> {
    let file = open(path)?;
    let held = file.metadata().map_err(|e| Error::io("look at", path, e))?.len();
    file.set_len(stored.bytes).map_err(|e| Error::io("write", path, e))?;
    let mut missing = Vec::new();
    let mut offset = 0;
    let mut buffer = Vec::new();
    for segment in &stored.segments {
        let mut is_held = false;
        if offset + segment.bytes <= held {
            buffer.resize(segment.bytes as usize, 0);
            file.read_exact_at(&mut buffer, offset).map_err(|e| Error::io("read", path, e))?;
            is_held = Digest::of(&buffer) == segment.digest;
        }
        if !is_held {
            missing.push((offset, *segment));
        }
        offset += segment.bytes;
    }
    fetch(remote, missing, &mut |offset, bytes| {
        watch.done(0)?;
        file.write_all_at(&bytes, offset).map_err(|e| Error::io("write", path, e))
    })
}

fn open(path: &Path) -> Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).open(path).map_err(|e| Error::io("create", path, e))
}

/// What the tensors and parts of a pair are made from: names of base tensors, with the parts of them, or `None` for all.
#[derive(Default)]
struct Bases(HashMap<String, Vec<Option<Rectangle>>>);

impl Bases {
    fn add(&mut self, tensor: &Tensor<'_>) {
        if tensor.base_kind != BaseKind::None {
            // The base of a part is the same part of a tensor of the same shape, unless it is formed otherwise.
            let part = (tensor.base_kind == BaseKind::Same).then(|| tensor.rectangle());
            self.0.entry(tensor.base_name.to_owned()).or_default().push(part);
        }
    }

    /// Whether something is made from this tensor or part.
    fn have(&self, tensor: &Tensor<'_>) -> bool {
        let meets = |part: &Option<Rectangle>| part.as_ref().is_none_or(|part| part.intersection(&tensor.rectangle()).is_some());
        self.0.get(tensor.name).is_some_and(|parts| parts.iter().any(meets))
    }
}

/// The pairs that were read from a store, in a folder.
pub(crate) struct Cache<'a> {
    pub remote: &'a Remote,
    pub folder: &'a Path,
    pub watch: &'a dyn Watch,
}

impl Cache<'_> {
    /// Path of a pair, without endings.
    pub fn stem(&self, pair: &StoredPair) -> PathBuf {
        self.folder.join(pair.digest.to_string())
    }

    fn open(&self, pair: &StoredPair) -> Result<Pair<FileSource>> {
        Ok(Pair::open_with(self.stem(pair), &OpenOptions::default().expect(pair.digest.0), &|_| {})?)
    }

    /// The index of a pair.
    pub fn index(&self, pair: &StoredPair) -> Result<ValidatedIndex> {
        let path = self.stem(pair).with_extension("tpde-index");
        to_file(self.remote, &pair.index, &path, self.watch)?;
        let bytes = FileSource::open(&path)?.read_all("size of the index", MAX_INDEX)?;
        Ok(ValidatedIndex::parse_with(bytes, &OpenOptions::default().expect(pair.digest.0))?)
    }

    /// A pair with all its payloads.
    pub fn whole(&self, pair: &StoredPair) -> Result<Pair<FileSource>> {
        to_file(self.remote, &pair.index, &self.stem(pair).with_extension("tpde-index"), self.watch)?;
        to_file(self.remote, &pair.blob, &self.stem(pair).with_extension("tpde-blob"), self.watch)?;
        self.open(pair)
    }

    /// A pair with the payloads of the tensors and parts that are wanted. Other payloads are zeros, and reading them is an error.
    /// Payloads that an earlier call has read are not read again. Returns also what the wanted ones are made from.
    fn partial(&self, pair: &StoredPair, is_wanted: &dyn Fn(&Tensor<'_>) -> bool) -> Result<(Pair<FileSource>, Bases)> {
        let index = self.index(pair)?;
        let held = self.held(pair);
        let mut scratch = Vec::new();
        let mut ranges: Vec<_> = held.is_none().then_some(HEADER).into_iter().collect();
        let mut bases = Bases::default();
        for tensor in index.tensors().filter(is_wanted) {
            for (number, chunk) in tensor.chunks().map(|number| (number, index.chunk(number))) {
                // Compares CRC-32 and digest.
                let mut is_held = || held.as_ref().is_some_and(|held| held.payload(number, &mut scratch).is_ok());
                if chunk.compressed_size > 0 && !is_held() {
                    let end = chunk.blob_offset + u64::from(chunk.compressed_size).next_multiple_of(16);
                    ranges.push(chunk.blob_offset..end);
                }
            }
            bases.add(&tensor);
        }
        self.ranges(&pair.blob, &ranges, &self.stem(pair).with_extension("tpde-blob"))?;
        Ok((self.open(pair)?, bases))
    }

    /// The pair, if an earlier call has read its blob or ranges of it.
    fn held(&self, pair: &StoredPair) -> Option<Pair<FileSource>> {
        let blob = self.stem(pair).with_extension("tpde-blob");
        let is_here = blob.metadata().is_ok_and(|blob| blob.len() == pair.blob.bytes);
        if is_here { self.open(pair).ok() } else { None }
    }

    /// Writes ranges of a stored file to `path`. Payloads are compared with their digests when they are decoded.
    fn ranges(&self, stored: &Stored, ranges: &[Range<u64>], path: &Path) -> Result<()> {
        let file = open(path)?;
        file.set_len(stored.bytes).map_err(|e| Error::io("write", path, e))?;
        let start = |(_, segment, range): &(u64, Segment, Range<u64>)| {
            self.remote.get(names::object(&segment.digest), Some(range.clone()), MAX_SEGMENT)
        };
        Remote::each(cut(stored, ranges), start, |(offset, segment, range), found| {
            self.watch.done(0)?;
            let bytes = found.unwrap_or_default();
            if bytes.len() as u64 != range.end - range.start {
                let expected = format!("bytes {range:?} of {}", segment.bytes);
                return Err(Error::Damaged { digest: segment.digest, expected, found: format!("{} bytes", bytes.len()) });
            }
            file.write_all_at(&bytes, offset + range.start).map_err(|e| Error::io("write", path, e))
        })
    }
}

/// Reads the pairs of a route from the store: whole, or with the payloads of wanted tensors and parts, and of what these are made
/// from in the pairs before.
pub(crate) fn fetch_pairs(
    cache: &Cache<'_>,
    route: &[StoredPair],
    is_wanted: Option<&dyn Fn(&Tensor<'_>) -> bool>,
) -> Result<Vec<Pair<FileSource>>> {
    let Some(is_wanted) = is_wanted else {
        return route.iter().map(|pair| cache.whole(pair)).collect();
    };
    let mut pairs = Vec::new();
    let mut bases: Option<Bases> = None;
    for pair in route.iter().rev() {
        let wanted = |tensor: &Tensor<'_>| bases.as_ref().map_or_else(|| is_wanted(tensor), |bases| bases.have(tensor));
        let (opened, next) = cache.partial(pair, &wanted)?;
        bases = Some(next);
        pairs.push(opened);
    }
    pairs.reverse();
    Ok(pairs)
}

/// Cuts ranges of a file at its segments, after joining those with small gaps. Gives the offset of the segment in the file, the
/// segment, and the range in it.
fn cut(stored: &Stored, ranges: &[Range<u64>]) -> Vec<(u64, Segment, Range<u64>)> {
    let mut sorted: Vec<_> = ranges.iter().filter(|range| range.start < range.end).cloned().collect();
    sorted.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in sorted {
        match joined.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(GAP) => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    let mut requests = Vec::new();
    let mut begin = 0;
    for segment in &stored.segments {
        let end = begin + segment.bytes;
        let from = joined.partition_point(|range| range.end <= begin);
        for range in joined[from..].iter().take_while(|range| range.start < end) {
            requests.push((begin, *segment, range.start.max(begin) - begin..range.end.min(end) - begin));
        }
        begin = end;
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined_over_small_gaps_and_cut_at_segments() {
        let segment = |bytes| Segment { digest: Digest([0; 32]), bytes };
        let stored = Stored { bytes: 10 << 20, segments: vec![segment(4 << 20), segment(4 << 20), segment(2 << 20)] };
        let requests = |ranges: &[(u64, u64)]| -> Vec<(u64, u64)> {
            let ranges: Vec<_> = ranges.iter().map(|&(start, end)| start..end).collect();
            cut(&stored, &ranges).into_iter().map(|(offset, _, range)| (offset + range.start, offset + range.end)).collect()
        };
        const M: u64 = 1 << 20;
        assert_eq!(requests(&[(0, 64), (100, 200)]), [(0, 200)]);
        assert_eq!(requests(&[(3 * M, 3 * M), (2 * M, 3 * M)]), [(2 * M, 3 * M)]);
        assert_eq!(requests(&[(3 * M, 9 * M)]), [(3 * M, 4 * M), (4 * M, 8 * M), (8 * M, 9 * M)]);
        assert_eq!(requests(&[(5, 6), (M + 7, 2 * M)]), [(5, 6), (M + 7, 2 * M)]);
    }
}
