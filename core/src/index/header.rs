//! Header, sections and pair digest (spec section 5; section 13, steps 1 to 3).

use crate::codec::zstd::Expander;
use crate::error::{Error, Result, Rule, hex};
use crate::format::*;
use crate::limits::Limits;
use crate::prelude::*;
use alloc::borrow::Cow;
use binrw::BinRead;
use binrw::io::Cursor;

/// Size of the smallest index in bytes: header, two roots, pair digest.
const MIN_INDEX_SIZE: u64 = INDEX_HEADER_SIZE as u64 + ROOTS_SIZE + PAIR_DIGEST_SIZE;
/// log2 of the maximum window size, in bytes, that a section's zstd frame may require.
const WINDOW_LOG_MAX: u32 = 27;

/// Maximum size of an expanded section in bytes, even if the caller's limits are larger. Offsets in sections have 32 bits.
const SECTION_SIZE_MAX: u64 = u32::MAX as u64;

/// Step 1, for a file of `found` bytes. `bytes` contains at least the header, or the whole file if the file is shorter.
pub(super) fn parse(bytes: &[u8], found: u64, limits: &Limits) -> Result<IndexHeader> {
    limits.check_index_size(found)?;
    let magic = bytes.get(..8).unwrap_or(bytes);
    Rule::HeaderMagic.check(INDEX_MAGIC.starts_with(magic), hex(&INDEX_MAGIC), hex(magic))?;
    let at_least = || format!("at least {MIN_INDEX_SIZE} bytes");
    Rule::HeaderIndexSize.check(found >= u64::from(INDEX_HEADER_SIZE), at_least(), found)?;
    let header = IndexHeader::read(&mut Cursor::new(bytes)).map_err(|e| Rule::HeaderIndexSize.broken("a header", e))?;
    Rule::HeaderVersionMajor.check_eq(VERSION_MAJOR, header.version_major)?;
    Rule::HeaderHeaderSize.check_eq(INDEX_HEADER_SIZE, header.header_size)?;
    let crc = crc32fast::hash(&bytes[..INDEX_HEADER_CRC_SPAN]);
    Rule::HeaderCrc32.check(crc == header.header_crc32, format_args!("{:08x}", header.header_crc32), format_args!("{crc:08x}"))?;
    let unknown = header.required_features & !KNOWN_REQUIRED_FEATURES;
    Rule::HeaderRequiredFeatures.check(unknown == 0, "no unknown bit", format_args!("{unknown:#x}"))?;
    check_features(&header)?;
    Rule::HeaderChunkCount.check(header.chunk_count <= MAX_CHUNKS, format_args!("at most {MAX_CHUNKS}"), header.chunk_count)?;
    Rule::HeaderTensorCount.check(
        header.tensor_count <= MAX_TENSORS,
        format_args!("at most {MAX_TENSORS}"),
        header.tensor_count,
    )?;
    Rule::HeaderFileCount.check(header.file_count <= MAX_FILES, format_args!("at most {MAX_FILES}"), header.file_count)?;
    Rule::HeaderIndexSize.check(found >= MIN_INDEX_SIZE, at_least(), found)?;
    Rule::HeaderIndexSize.check_eq(header.index_size, found)?;
    check_sections(&header)?;
    for entry in [Section::Tensors, Section::Files, Section::Tables].map(|section| header.section(section)) {
        let limit = limits.section_size.min(SECTION_SIZE_MAX);
        Error::check_limit("expanded size of a section", limit, entry.expanded_size)?;
    }
    Ok(header)
}

/// Checks that the header has the fields that its feature bits require, and that reserved bytes are zero.
fn check_features(header: &IndexHeader) -> Result<()> {
    let has_digests = header.has(FEATURE_DIGESTS);
    let bits = format!("{:#x}", header.required_features);
    Rule::HeaderRequiredFeatures.check(has_digests || !header.has(FEATURE_PAYLOAD_LIST), "bit 1 only with bit 0", &bits)?;
    let has_list = header.has(FEATURE_PAYLOAD_LIST);
    Rule::HeaderRequiredFeatures.check(has_list || !header.has(FEATURE_PARTS), "bit 2 only with bit 1", &bits)?;
    let has_root = header.payload_root != [0; 32];
    Rule::HeaderRequiredFeatures.check(has_root || !has_digests, "a payload root with bit 0", "zeros")?;
    let zeros = (has_digests || !has_root) && header.reserved_0 == 0 && header.reserved_1 == [0; 12];
    Rule::HeaderReserved.check(zeros, "zeros", "other bytes")
}

fn check_sections(header: &IndexHeader) -> Result<()> {
    let chunks = u64::from(header.chunk_count);
    let broken = |section: Section, what: &str, expected: u64, found: u64| {
        Rule::HeaderSections.broken(format_args!("{what} of section {section} {expected}"), found)
    };
    let mut end = u64::from(INDEX_HEADER_SIZE);
    for &section in Section::ALL {
        let entry = header.section(section);
        let overflow = || broken(section, "end within", header.index_size, entry.stored_size);
        let offset = end.checked_next_multiple_of(SECTION_ALIGN).ok_or_else(overflow)?;
        if entry.offset != offset {
            return Err(broken(section, "offset", offset, entry.offset));
        }
        let fixed = match section {
            Section::Chunks => Some(32 * chunks),
            Section::Sums if header.has(FEATURE_PAYLOAD_LIST) => Some(32 * chunks),
            Section::Sums => Some(16 * chunks),
            Section::Digests => Some(ROOTS_SIZE + 32 * u64::from(header.tensor_count)),
            _ => None,
        };
        match fixed {
            Some(size) if entry.stored_size != size => return Err(broken(section, "stored size", size, entry.stored_size)),
            Some(size) if entry.expanded_size != size => return Err(broken(section, "expanded size", size, entry.expanded_size)),
            None if entry.stored_size > entry.expanded_size => {
                return Err(broken(section, "stored size at most", entry.expanded_size, entry.stored_size));
            }
            _ => {}
        }
        end = offset.checked_add(entry.stored_size).filter(|&e| e <= header.index_size).ok_or_else(overflow)?;
    }
    let size = end.checked_next_multiple_of(SECTION_ALIGN).and_then(|e| e.checked_add(PAIR_DIGEST_SIZE));
    Rule::HeaderIndexSize.check_eq(size.unwrap_or(u64::MAX), header.index_size)
}

/// The hash of an index without its last bytes, which store it as the pair digest; `None` if there are too few bytes.
pub(super) fn pair_digest(bytes: &[u8]) -> Option<[u8; 32]> {
    let body = bytes.len().checked_sub(PAIR_DIGEST_SIZE as usize)?;
    Some(*crate::digest::of(&bytes[..body]).as_bytes())
}

/// Step 2. `digest` is the [`pair_digest`] of `bytes`.
pub(super) fn check_digest(bytes: &[u8], digest: &[u8; 32]) -> Result<()> {
    let stored = &bytes[bytes.len() - PAIR_DIGEST_SIZE as usize..];
    Rule::IndexDigest.check(digest == stored, hex(stored), hex(digest))
}

/// First half of step 3.
pub(super) fn check_padding(bytes: &[u8], header: &IndexHeader) -> Result<()> {
    let ends = Section::ALL.iter().map(|s| {
        let entry = header.section(*s);
        (entry.offset + entry.stored_size) as usize
    });
    let starts = Section::ALL[1..].iter().map(|s| header.section(*s).offset as usize);
    let digest = bytes.len() - PAIR_DIGEST_SIZE as usize;
    for ((end, start), section) in ends.zip(starts.chain([digest])).zip(Section::ALL) {
        let zeros = bytes[end..start].iter().all(|&b| b == 0);
        Rule::SectionPadding.check(zeros, format_args!("zeros after section {section}"), "other bytes")?;
    }
    Ok(())
}

/// Second half of step 3: expands a compressible section.
pub(super) fn expand<'a>(bytes: &'a [u8], header: &IndexHeader, section: Section, frames: &mut Expander) -> Result<Cow<'a, [u8]>> {
    let entry = header.section(section);
    let frame = stored(bytes, header, section);
    if entry.stored_size == entry.expanded_size {
        return Ok(Cow::Borrowed(frame));
    }
    let size = entry.expanded_size as usize; // at most limits.section_size
    let broken = |found: &dyn core::fmt::Display| {
        Rule::SectionFrame
            .broken(format_args!("section {} to be one zstd frame that expands to {size} bytes", section.name()), found)
    };
    frames.expand_to_vec(frame, size, WINDOW_LOG_MAX).map(Cow::Owned).map_err(|found| broken(&found))
}

/// The stored bytes of a section. They are within `bytes`, because [`parse`] has checked the header.
pub(super) fn stored<'a>(bytes: &'a [u8], header: &IndexHeader, section: Section) -> &'a [u8] {
    let entry = header.section(section);
    &bytes[entry.offset as usize..][..entry.stored_size as usize]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::lane::Dtype;
    use binrw::BinWrite;

    #[test]
    fn a_tiny_file_cannot_ask_for_much() {
        let limits = Limits { index_size: 100, ..Limits::default() };
        assert!(matches!(parse(&[0; 101], 101, &limits), Err(Error::Limit { limit: 100, found: 101, .. })));
        assert_eq!(parse(&[], 0, &limits).unwrap_err().rule(), Some(Rule::HeaderIndexSize));
        assert_eq!(parse(b"\x89TPB", 4, &limits).unwrap_err().rule(), Some(Rule::HeaderMagic));
    }

    /// The index of an empty pair, with a wrong header: it says that this section expands to `size` bytes.
    fn with_expanded_size(section: Section, size: u64) -> Vec<u8> {
        let mut bytes = crate::writer::sample::empty().as_bytes().to_vec();
        let mut header = IndexHeader::read(&mut Cursor::new(&bytes)).unwrap();
        header.sections[section as usize].expanded_size = size;
        header.write(&mut Cursor::new(&mut bytes)).unwrap();
        header.header_crc32 = crc32fast::hash(&bytes[..INDEX_HEADER_CRC_SPAN]);
        header.write(&mut Cursor::new(&mut bytes)).unwrap();
        bytes
    }

    /// An index without tensors and chunks, truncated or padded to `size` bytes, with a matching header.
    fn of_size(size: usize) -> Vec<u8> {
        let mut bytes = with_expanded_size(Section::Tables, 0);
        bytes.resize(size, 0);
        let mut header = IndexHeader::read(&mut Cursor::new(&bytes)).unwrap();
        header.index_size = size as u64;
        header.file_count = 0;
        header.sections = [256, 256, 256, 320, 320, 320].map(|offset| SectionEntry { offset, stored_size: 0, expanded_size: 0 });
        let digests = &mut header.sections[Section::Digests as usize];
        (digests.stored_size, digests.expanded_size) = (64, 64);
        header.write(&mut Cursor::new(&mut bytes)).unwrap();
        header.header_crc32 = crc32fast::hash(&bytes[..INDEX_HEADER_CRC_SPAN]);
        header.write(&mut Cursor::new(&mut bytes)).unwrap();
        bytes
    }

    fn parse_all(bytes: &[u8], limits: &Limits) -> Result<IndexHeader> {
        parse(bytes, bytes.len() as u64, limits)
    }

    #[test]
    fn an_index_has_room_for_header_roots_and_digest() {
        let limits = Limits::default();
        for size in [256, 257, 287, 288, 319, 320, 351] {
            assert_eq!(parse_all(&of_size(size), &limits).unwrap_err().rule(), Some(Rule::HeaderIndexSize), "{size} bytes");
        }
        assert_eq!(parse_all(&of_size(352), &limits).unwrap().index_size, 352);
    }

    #[test]
    fn limits_allow_what_is_as_large_as_they_are() {
        let index = of_size(352);
        let limits = Limits { index_size: 352, section_size: 0 };
        parse_all(&index, &limits).unwrap();
        let limits = Limits { index_size: 351, ..limits };
        assert!(matches!(parse_all(&index, &limits), Err(Error::Limit { limit: 351, found: 352, .. })));
        for section in [Section::Tensors, Section::Files, Section::Tables] {
            let index = with_expanded_size(section, 1000);
            let limits = |section_size| Limits { section_size, ..Limits::default() };
            parse_all(&index, &limits(1000)).unwrap();
            assert!(
                matches!(parse_all(&index, &limits(999)), Err(Error::Limit { limit: 999, found: 1000, .. })),
                "{}",
                section.name()
            );
        }
    }

    #[test]
    fn places_in_a_section_fit_in_32_bits_whatever_the_limits() {
        let limits = Limits { index_size: u64::MAX, section_size: u64::MAX };
        for section in [Section::Tensors, Section::Files, Section::Tables] {
            let parse = |bytes: Vec<u8>| parse(&bytes, bytes.len() as u64, &limits);
            parse(with_expanded_size(section, u32::MAX.into())).unwrap();
            let refused = parse(with_expanded_size(section, 1 << 32));
            assert!(matches!(refused, Err(Error::Limit { limit: 0xFFFF_FFFF, found: 0x1_0000_0000, .. })), "{}", section.name());
        }
    }

    #[test]
    fn sections_of_known_sizes_have_them() {
        let index = crate::writer::sample::of_chunk(Codec::Raw, Dtype::U8, &[6], &[7]);
        let header = index.header();
        check_sections(header).unwrap();
        for section in [Section::Chunks, Section::Sums, Section::Digests] {
            let sizes = header.section(section);
            for (stored, expanded) in [(8, 8), (0, 8), (8, 0)] {
                // Move the later sections too, so that only the size is wrong.
                let mut header = *header;
                header.sections[section as usize].stored_size = sizes.stored_size + stored;
                header.sections[section as usize].expanded_size = sizes.expanded_size + expanded;
                header.sections[section as usize + 1..].iter_mut().for_each(|entry| entry.offset += stored);
                header.index_size += stored;
                let refused = check_sections(&header).unwrap_err();
                assert_eq!(refused.rule(), Some(Rule::HeaderSections), "{} {stored} {expanded}", section.name());
            }
        }
    }
}
