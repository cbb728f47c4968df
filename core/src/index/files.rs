//! File table (spec section 10; section 13, step 5).

use super::view::TargetFile;
use crate::digest;
use crate::error::{Escaped, Result, Rule, hex};
use crate::format::*;
use crate::prelude::*;
use alloc::collections::BTreeMap;
use binrw::BinRead;
use binrw::io::Cursor;
use core::ops::Range;

#[derive(Debug)]
pub(super) struct FileTable {
    rows: Vec<Row>,
    /// Names of all files, then stored contents.
    bytes: Vec<u8>,
}

#[derive(Debug)]
struct Row {
    kind: FileKind,
    name: Range<usize>,
    content: Range<usize>,
    content_size: u64,
    content_digest: [u8; DIGEST_SIZE],
}

impl FileTable {
    pub(super) fn parse(section: &[u8], header: &IndexHeader) -> Result<Self> {
        let count = header.file_count as usize;
        let too_small =
            |what: &str| Rule::FilesSize.broken(format_args!("space for {what}"), format_args!("{} bytes", section.len()));
        let (entries, bytes) = section.split_at_checked(count * FileEntry::SIZE).ok_or_else(|| too_small("the entries"))?;
        let mut cursor = Cursor::new(entries);
        let mut rows: Vec<Row> = Vec::with_capacity(count);
        let mut names = FileNames::default();
        let mut at = 0;
        for _ in 0..count {
            let entry = FileEntry::read(&mut cursor).map_err(|e| Rule::FilesSize.broken("an entry", e))?;
            let kind = FileKind::from_code(entry.kind).ok_or_else(|| Rule::FileKind.broken("a known code", entry.kind))?;
            Rule::FileReserved.check(entry.reserved_0 == 0 && entry.reserved_1 == 0, "zeros", "other bytes")?;
            let limit = MAX_FILE_NAME_SIZE;
            Rule::FileName.check(entry.name_size <= limit, format_args!("at most {limit} bytes"), entry.name_size)?;
            let header_length = if kind.has_tensors() { 8 } else { 0 };
            Rule::FileContentSize.check(
                entry.content_size >= header_length,
                format_args!("at header_length {header_length}"),
                entry.content_size,
            )?;
            let name = at..at + entry.name_size as usize;
            let text = bytes.get(name.clone()).ok_or_else(|| too_small("the names"))?;
            names.add(text, kind, count)?;
            at = name.end;
            rows.push(Row { kind, name, content: 0..0, content_size: entry.content_size, content_digest: entry.content_digest });
        }
        for row in rows.iter_mut().filter(|row| row.kind.is_stored()) {
            let end =
                usize::try_from(row.content_size).ok().and_then(|size| at.checked_add(size)).filter(|&end| end <= bytes.len());
            row.content = at..end.ok_or_else(|| too_small("the contents"))?;
            at = row.content.end;
            let digest = digest::short(&digest::of(&bytes[row.content.clone()]));
            Rule::FileContentDigest.check(digest == row.content_digest, hex(&digest), hex(&row.content_digest))?;
        }
        Rule::FilesSize.check(at == bytes.len(), "nothing after the contents", format_args!("{} bytes", bytes.len() - at))?;
        Ok(Self { rows, bytes: bytes.to_vec() })
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = TargetFile<'_>> {
        self.rows.iter().map(|row| TargetFile {
            // The name is ASCII, because `FileNames` has checked it.
            name: core::str::from_utf8(&self.bytes[row.name.clone()]).unwrap_or_default(),
            kind: row.kind,
            content_size: row.content_size,
            content_digest: row.content_digest,
            content: row.kind.is_stored().then(|| &self.bytes[row.content.clone()]),
        })
    }
}

/// Checks the names of a pair's files, in the order of the table.
#[derive(Default)]
pub struct FileNames {
    before: Vec<u8>,
    folded: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl FileNames {
    /// Checks the next name, for a file of this kind. The pair has `count` files.
    ///
    /// # Errors
    /// [`Rule::FileName`].
    pub fn add(&mut self, name: &[u8], kind: FileKind, count: usize) -> Result<()> {
        let text = String::from_utf8_lossy(name);
        let shown = Escaped(&text);
        if name.is_empty() {
            return Rule::FileName.check(
                count == 1 && kind.has_tensors(),
                "a name, or one safetensors file without a name",
                "none",
            );
        }
        Rule::FileName.check(is_file_name(&text, kind), "letters, digits, . _ - and the extension of the kind", &shown)?;
        let (expected, before) = ("a name greater than the previous one", String::from_utf8_lossy(&self.before));
        Rule::FileName.check(*self.before < *name, expected, format_args!("{shown} after {}", Escaped(&before)))?;
        self.before = name.to_vec();
        match self.folded.insert(name.to_ascii_lowercase(), name.to_vec()) {
            None => Ok(()),
            Some(other) => {
                let other = String::from_utf8_lossy(&other);
                let expected = "a name that differs from all others in lower case too";
                Err(Rule::FileName.broken(expected, format_args!("{shown} beside {}", Escaped(&other))))
            }
        }
    }
}

/// Whether a file of this kind may have this name (section 10). Valid names contain no path separator and do not begin with a dot.
pub fn is_file_name(name: &str, kind: FileKind) -> bool {
    let ending = if kind.has_tensors() { ".safetensors" } else { ".safetensors.index.json" };
    !name.starts_with('.')
        && name.len() <= MAX_FILE_NAME_SIZE as usize
        && name.ends_with(ending)
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_no_paths_and_end_as_their_kind() {
        let long = |size: usize, ending: &str| "n".repeat(size - ending.len()) + ending;
        for (name, kind, fits) in [
            ("model.safetensors", FileKind::Safetensors, true),
            ("a-B_9.safetensors", FileKind::SafetensorsOfBase, true),
            ("model.safetensors.index.json", FileKind::Verbatim, true),
            ("model.safetensors.index.json", FileKind::VerbatimOfBase, true),
            ("model.safetensors", FileKind::Verbatim, false),
            ("model.safetensors.index.json", FileKind::Safetensors, false),
            (".safetensors", FileKind::Safetensors, false),
            (".model.safetensors", FileKind::Safetensors, false),
            ("a/model.safetensors", FileKind::Safetensors, false),
            ("model\\0.safetensors", FileKind::Safetensors, false),
            ("mod\u{e9}l.safetensors", FileKind::Safetensors, false),
            ("model.bin", FileKind::Safetensors, false),
            (&long(255, ".safetensors"), FileKind::Safetensors, true),
            (&long(256, ".safetensors"), FileKind::Safetensors, false),
        ] {
            assert_eq!(is_file_name(name, kind), fits, "{name} of kind {kind}");
        }
    }
}
