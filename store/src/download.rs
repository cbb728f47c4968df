//! Downloads of stored files into local ones. Each segment is compared with its digest.

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::local::LocalFolder;
use crate::manifest::{Segment, Stored, StoredPair};
use crate::remote::{Remote, no_memory};
use crate::wanted::WantedTensors;
use rustix::fs::SeekFrom;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use tpde::{FileSource, OpenOptions, Pair, ValidatedIndex, Watch};

/// Ranges with a smaller gap between them are read by one request.
const GAP: u64 = 1 << 20;
/// The bytes of a blob's header (spec section 11).
const HEADER: Range<u64> = 0..64;
/// Endings of the files of a pair.
const INDEX: &str = "tpde-index";
const BLOB: &str = "tpde-blob";
/// Maximum size of an index that is read into memory.
const MAX_INDEX: u64 = 16 << 30;

/// Compares the digest of a segment.
pub(crate) fn check_segment(segment: &Segment, bytes: Vec<u8>) -> Result<Vec<u8>> {
    let digest = Digest::of(&bytes);
    if digest != segment.digest {
        let expected = format!("{} bytes that hash to its name", segment.bytes);
        return Err(Error::Damaged { object: segment.object(), expected, found: format!("bytes that hash to {digest}") });
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
    let start = |(_, segment): &(u64, Segment)| remote.get_segment(segment, None);
    remote.each(placed, start, |(offset, segment), found| done(offset, check_segment(&segment, found?)?))
}

/// An error of reading one of several files or pairs.
pub(crate) struct ReadFailure {
    /// Which one.
    pub at: usize,
    pub error: Error,
}

/// Writes stored files into a folder. Segments that a file has already, from an interrupted call, are not read again. Segments of all
/// files are read concurrently.
fn to_files(remote: &Remote, folder: &LocalFolder, files: &[(&Stored, String)], watch: &dyn Watch) -> Result<(), ReadFailure> {
    let mut missing = Vec::new();
    for (at, (stored, name)) in files.iter().enumerate() {
        let found = missing_segments(stored, folder, name, watch).map_err(|error| ReadFailure { at, error })?;
        missing.extend(found.into_iter().map(|(offset, segment)| (at, offset, segment)));
    }
    let mut last = 0;
    let start = |(_, _, segment): &(usize, u64, Segment)| remote.get_segment(segment, None);
    let written = remote.each(missing, start, |(at, offset, segment), found| {
        last = at;
        let bytes = check_segment(&segment, found?)?;
        watch.done(0)?;
        let name = &files[at].1;
        folder.file(name)?.write_all_at(&bytes, offset).map_err(|e| Error::io("write", &folder.path().join(name), e))
    });
    written.map_err(|error| ReadFailure { at: last, error })
}

/// The segments that a file lacks, with their offsets. The file is only cut, never extended: its size is that of what was read.
fn missing_segments(stored: &Stored, folder: &LocalFolder, name: &str, watch: &dyn Watch) -> Result<Vec<(u64, Segment)>> {
    let path = folder.path().join(name);
    let file = folder.file(name)?;
    let held = file.metadata().map_err(|e| Error::io("look at", &path, e))?.len();
    if held > stored.bytes {
        file.set_len(stored.bytes).map_err(|e| Error::io("write", &path, e))?;
    }
    let (mut missing, mut offset) = (Vec::new(), 0);
    for segment in &stored.segments {
        let range = offset..offset + segment.bytes;
        offset = range.end;
        let mut is_held = false;
        if range.end <= held && is_written(&file, &range) {
            watch.done(0)?;
            is_held = Digest::of_range(&file, range.clone()).map_err(|e| Error::io("read", &path, e))? == segment.digest;
        }
        if !is_held {
            missing.push((range.start, *segment));
        }
    }
    Ok(missing)
}

/// Whether a file has no hole in a range, as far as the file system tells. Reading a hole would take long and find nothing.
fn is_written(file: &File, range: &Range<u64>) -> bool {
    rustix::fs::seek(file, SeekFrom::Hole(range.start)).map_or(true, |hole| hole >= range.end)
}

/// The pairs that were read from a store, in a folder.
pub(crate) struct Cache<'a> {
    pub remote: &'a Remote,
    pub folder: &'a LocalFolder,
    pub watch: &'a dyn Watch,
}

impl Cache<'_> {
    /// Path of a pair, without endings.
    pub fn stem(&self, pair: &StoredPair) -> PathBuf {
        self.folder.path().join(pair.digest.to_string())
    }

    fn open(&self, pair: &StoredPair) -> Result<Pair<FileSource>> {
        Ok(Pair::open_with(self.stem(pair), &OpenOptions::default().expect(pair.digest.0), &|_| {})?)
    }

    fn path(&self, pair: &StoredPair, ending: &str) -> PathBuf {
        self.folder.path().join(name(pair, ending))
    }

    /// The index of a pair, which gives the size of its blob.
    fn read_index(&self, pair: &StoredPair) -> Result<ValidatedIndex> {
        let bytes = FileSource::open(self.path(pair, INDEX))?.read_all("size of the index", MAX_INDEX)?;
        let index = ValidatedIndex::parse_with(bytes, &OpenOptions::default().expect(pair.digest.0))?;
        check_sizes(pair, &index)?;
        Ok(index)
    }

    /// A pair with all its payloads.
    pub fn whole(&self, pair: &StoredPair) -> Result<Pair<FileSource>> {
        Ok(self.all_whole(&[pair]).map_err(|failed| failed.error)?.remove(0))
    }

    /// Pairs with all their payloads.
    fn all_whole(&self, pairs: &[&StoredPair]) -> Result<Vec<Pair<FileSource>>, ReadFailure> {
        let files: Vec<_> =
            pairs.iter().flat_map(|pair| [(&pair.index, name(pair, INDEX)), (&pair.blob, name(pair, BLOB))]).collect();
        to_files(self.remote, self.folder, &files, self.watch).map_err(|failed| ReadFailure { at: failed.at / 2, ..failed })?;
        pairs.iter().enumerate().map(|(at, pair)| self.open(pair).map_err(|error| ReadFailure { at, error })).collect()
    }

    /// The wanted payloads of a pair that are not in its blob here, and what these chunks are made from.
    fn missing(&self, pair: &StoredPair, index: &ValidatedIndex, wanted: &WantedTensors) -> Result<(MissingRanges, WantedTensors)> {
        let held = self.held(pair)?;
        let mut scratch = Vec::new();
        let mut missing = MissingRanges { ranges: held.is_none().then_some(HEADER).into_iter().collect(), chunks: Vec::new() };
        let entries: Vec<_> = index.tensors().map(|entry| (entry, wanted.chunks(&entry))).collect();
        for (_, chunks) in &entries {
            for &number in chunks {
                let chunk = index.chunk(number);
                let end = chunk.blob_offset + u64::from(chunk.compressed_size).next_multiple_of(16);
                let range = chunk.blob_offset..end;
                // Compares CRC-32 and digest.
                let mut is_held = || match &held {
                    Some((held, file)) => is_written(file, &range) && held.payload(number, &mut scratch).is_ok(),
                    None => false,
                };
                if chunk.compressed_size > 0 && !is_held() {
                    missing.ranges.push(range);
                    missing.chunks.push(number);
                }
            }
        }
        Ok((missing, WantedTensors::bases(&entries)))
    }

    /// Pairs with the payloads of the chunks that have wanted elements of the last one, and of what these are made from in the pairs
    /// before. Other payloads are zeros, and reading them is an error. Payloads that an earlier call has read are not read again.
    fn all_partial(&self, pairs: &[&StoredPair], select: Select<'_>) -> Result<Vec<Pair<FileSource>>, ReadFailure> {
        let indexes: Vec<_> = pairs.iter().map(|pair| (&pair.index, name(pair, INDEX))).collect();
        to_files(self.remote, self.folder, &indexes, self.watch)?;
        let mut all: Vec<MissingRanges> = Vec::new();
        let mut wanted: Option<WantedTensors> = None;
        for (at, pair) in pairs.iter().enumerate().rev() {
            let failed = |error| ReadFailure { at, error };
            let index = self.read_index(pair).map_err(failed)?;
            let of_pair = wanted.map_or_else(|| select(&index), Ok).map_err(failed)?;
            let (missing, bases) = self.missing(pair, &index, &of_pair).map_err(failed)?;
            wanted = Some(bases);
            all.push(missing);
        }
        all.reverse();
        self.ranges(pairs, &all)?;
        let open = |(at, (pair, missing)): (usize, (&&StoredPair, MissingRanges))| {
            let open = || {
                let (opened, mut scratch) = (self.open(pair)?, Vec::new());
                for chunk in missing.chunks {
                    opened.payload(chunk, &mut scratch)?;
                }
                Ok(opened)
            };
            open().map_err(|error| ReadFailure { at, error })
        };
        pairs.iter().zip(all).enumerate().map(open).collect()
    }

    /// The pair and its blob, if an earlier call has read the blob or ranges of it. The index was read, and has confirmed its size.
    fn held(&self, pair: &StoredPair) -> Result<Option<(Pair<FileSource>, File)>> {
        let blob = self.folder.file(&name(pair, BLOB))?;
        if blob.metadata().is_ok_and(|metadata| metadata.len() == 0) {
            return Ok(None);
        }
        self.set_size(pair, &blob)?;
        Ok(self.open(pair).ok().map(|pair| (pair, blob)))
    }

    fn set_size(&self, pair: &StoredPair, blob: &File) -> Result<()> {
        blob.set_len(pair.blob.bytes).map_err(|e| Error::io("write", &self.path(pair, BLOB), e))
    }

    /// Writes ranges of blobs to their files.
    fn ranges(&self, pairs: &[&StoredPair], missing: &[MissingRanges]) -> Result<(), ReadFailure> {
        let mut requests = Vec::new();
        for (at, (pair, missing)) in pairs.iter().zip(missing).enumerate() {
            requests
                .extend(cut(&pair.blob, &missing.ranges).into_iter().map(|(offset, segment, range)| (at, offset, segment, range)));
        }
        let mut last = 0;
        let start =
            |(_, _, segment, range): &(usize, u64, Segment, Range<u64>)| self.remote.get_segment(segment, Some(range.clone()));
        let written = self.remote.each(requests, start, |(at, offset, _, range), found| {
            last = at;
            let bytes = found?;
            self.watch.done(0)?;
            let file = self.folder.file(&name(pairs[at], BLOB))?;
            file.write_all_at(&bytes, offset + range.start).map_err(|e| Error::io("write", &self.path(pairs[at], BLOB), e))
        });
        written.map_err(|error| ReadFailure { at: last, error })?;
        for (at, pair) in pairs.iter().enumerate() {
            let set_size = || self.set_size(pair, &self.folder.file(&name(pair, BLOB))?);
            set_size().map_err(|error| ReadFailure { at, error })?;
        }
        Ok(())
    }
}

/// Name of a file of a pair in a cache.
fn name(pair: &StoredPair, ending: &str) -> String {
    format!("{}.{ending}", pair.digest)
}

/// Reads the index of a pair into memory.
pub(crate) fn index_of(remote: &Remote, pair: &StoredPair) -> Result<ValidatedIndex> {
    let mut bytes = Vec::new();
    each_segment(remote, &pair.index, |_, segment| {
        bytes.try_reserve(segment.len()).map_err(|_| no_memory("an index"))?;
        bytes.extend_from_slice(&segment);
        Ok(())
    })?;
    let index = ValidatedIndex::parse_with(bytes, &OpenOptions::default().expect(pair.digest.0))?;
    check_sizes(pair, &index)?;
    Ok(index)
}

/// Checks that manifest and index state the same size of the blob.
fn check_sizes(pair: &StoredPair, index: &ValidatedIndex) -> Result<()> {
    let (expected, found) = (index.blob_size(), pair.blob.bytes);
    if found == expected {
        return Ok(());
    }
    Err(Error::manifest(&format!("pair {}", pair.digest), format_args!("expected a blob of {expected} bytes, found {found}")))
}

/// What is read of a blob: ranges, and the chunks whose payloads are in them.
struct MissingRanges {
    ranges: Vec<Range<u64>>,
    chunks: Vec<u32>,
}

/// Says what is wanted of the tensors of a pair.
pub(crate) type Select<'a> = &'a dyn Fn(&ValidatedIndex) -> Result<WantedTensors>;

/// Reads the pairs of a route from the store: whole, or with the payloads of what is wanted of the last one, and of what that is made
/// from in the pairs before.
pub(crate) fn fetch_pairs(
    cache: &Cache<'_>,
    pairs: &[&StoredPair],
    select: Option<Select<'_>>,
) -> Result<Vec<Pair<FileSource>>, ReadFailure> {
    match select {
        Some(select) => cache.all_partial(pairs, select),
        None => cache.all_whole(pairs),
    }
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
        let segment = |bytes| Segment { digest: Digest([0; 32]), bytes, upload: None };
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
