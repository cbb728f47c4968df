//! Errors, with the expected value, the value found, and the location.

mod merge;
mod text;

use crate::prelude::*;
use crate::rectangle::Rectangle;
use core::fmt;
#[cfg(feature = "std")]
use std::{
    io,
    path::{Path, PathBuf},
};
use text::{Text, bounded};

pub use merge::{Conflict, NotMergeable};
pub use text::{Escaped, MESSAGE_CHARS, SHOWN_CHARS};
#[doc(hidden)]
pub use text::{List, hex};

/// The result type of this crate.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// The error type of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call of the operating system failed.
    #[cfg(feature = "std")]
    #[error("cannot {action} {}: {source}", Escaped(&path.display().to_string()))]
    Io {
        /// The attempted action: a verb, as in `open`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A pair violates the spec, or its bytes are damaged.
    #[error(transparent)]
    Invalid(#[from] Box<Invalid>),
    /// The index does not have the pair digest that the caller expects. Nothing else of the pair was read.
    #[error("not the expected pair: expected an index with pair digest {expected}, found {found}")]
    UnexpectedPair {
        /// The expected digest, hexadecimal.
        expected: String,
        /// The digest of the index, hexadecimal, or the reason why it has none.
        found: String,
    },
    /// The base differs from the base of the pair.
    #[error("wrong base: {}{} has digest {found}, but the pair was made from {expected}", At(tensor, *chunk), BaseOf(tensor, base))]
    WrongBase {
        /// Name of the first tensor of the pair whose base differs.
        tensor: String,
        /// Name of the base tensor.
        base: String,
        /// Index, in the index map, of the first chunk whose base sum differs. `None` if the digest shows the difference.
        chunk: Option<u32>,
        /// The rule: `chunk.base_sum` or `tensor.base_digest`.
        rule: Rule,
        /// Digest in the index, hexadecimal.
        expected: String,
        /// Digest of the supplied tensor, hexadecimal.
        found: String,
    },
    /// The base equals the target of the pair: the pair was already applied.
    #[error("already applied: the base is the target of this pair")]
    AlreadyApplied {
        /// As for [`Error::WrongBase`].
        tensor: String,
        /// As for [`Error::WrongBase`].
        chunk: Option<u32>,
        /// As for [`Error::WrongBase`].
        rule: Rule,
    },
    /// A file or folder is not a valid checkpoint.
    #[cfg(feature = "std")]
    #[error("{}: {}", Escaped(&path.display().to_string()), Text(reason))]
    BadCheckpoint {
        /// The file or folder.
        path: PathBuf,
        /// The reason why it is not a valid checkpoint.
        reason: String,
    },
    /// An input changed while it was being read. Reading it again may succeed.
    #[error("{} changed while it was being read", Escaped(what))]
    Changed {
        /// The file or payload that changed.
        what: String,
    },
    /// A pair is valid, but no safetensors reader would open its target if it were written as files.
    #[error("the target cannot be written as files: {reason}")]
    NotWritable {
        /// The property that readers would refuse.
        reason: String,
    },
    /// Two pairs contradict each other, so they cannot be merged.
    #[error(transparent)]
    NotMergeable(#[from] Box<NotMergeable>),
    /// A value in a file exceeds the reader's limits.
    #[error("{what} is {found}, above the reader's limit of {limit}")]
    Limit {
        /// The bounded quantity.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// The value in the file.
        found: u64,
    },
    /// A step of a chain does not fit the version before it, or its pair is damaged.
    #[error("step {number} of the chain, {}: {source}", Escaped(pair))]
    Step {
        /// Number of the step, from 1.
        number: usize,
        /// The pair: its path, or its number.
        pair: String,
        /// The error of this step.
        source: Box<Error>,
    },
    /// An application in place failed after it had changed a tensor.
    #[error("application in place failed after {} of {total} chunks were written; the tensors are now a mixture of base and target: {source}", written.len())]
    Poisoned {
        /// Indexes of the written chunks in the index map, ascending.
        written: Vec<u32>,
        /// Number of chunks of the tensors to change.
        total: u32,
        /// The first failure.
        source: Box<Error>,
    },
    /// Slices have only some lanes of a chunk that is needed. Nothing was decoded.
    #[error("tensor {}, chunk {chunk}: {}", Escaped(tensor), Text(reason))]
    NotHeld {
        /// Name of the tensor.
        tensor: String,
        /// Index of the chunk in the index map.
        chunk: u32,
        /// The lanes that are needed, and the parts with which a pair would fit.
        reason: String,
    },
    /// A checkpoint has only some elements of a part to be encoded. Nothing was encoded.
    #[error(transparent)]
    PartNotHeld(#[from] Box<PartNotHeld>),
    /// The pair has only some parts of a tensor, and lacks elements that are needed. Nothing was decoded.
    #[error("the pair lacks the elements {missing} of tensor {}", Escaped(tensor))]
    Incomplete {
        /// Name of the tensor.
        tensor: String,
        /// The first elements that the pair lacks.
        missing: Rectangle,
    },
    /// The requested device, or a working driver for it, is missing.
    #[error("no CUDA device: {}", Text(_0))]
    NoDevice(String),
    /// A requested library is missing or unusable.
    #[error("{library} cannot be used: {}", Text(reason))]
    NoLibrary {
        /// Name of the library.
        library: &'static str,
        /// The error of the system.
        reason: String,
    },
    /// A call of the device's driver failed, or work on the device failed.
    #[error("cannot {action}: {}", Text(reason))]
    Device {
        /// The attempted action: a verb, as in `open`.
        action: &'static str,
        /// The error of the driver.
        reason: String,
    },
    /// The caller cancelled the work.
    #[error("cancelled")]
    Cancelled,
    /// An argument of a call is wrong: a name, a range, a size, or options that contradict each other.
    #[error("{}", Text(_0))]
    InvalidArgument(String),
}

/// A tensor of a pair, and a chunk.
struct At<'a>(&'a str, Option<u32>);

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor {}", Escaped(self.0))?;
        self.1.map_or(Ok(()), |chunk| write!(f, ", chunk {chunk}"))
    }
}

/// The base tensor of a tensor.
struct BaseOf<'a>(&'a str, &'a str);

impl fmt::Display for BaseOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 == self.1 {
            true => write!(f, ": the base"),
            false => write!(f, ": base tensor {}", Escaped(self.1)),
        }
    }
}

/// A name that no codec, dtype, layout or other named value has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no {what} is named {found}: expected {}", allowed.join(", "))]
#[non_exhaustive]
pub struct UnknownName {
    /// The kind of value, as in `codec`.
    pub what: &'static str,
    /// The unknown name, with invisible characters escaped, and cut if it is long.
    pub found: String,
    /// All valid names.
    pub allowed: Vec<&'static str>,
}

impl UnknownName {
    #[doc(hidden)]
    pub fn new(what: &'static str, found: &str, allowed: Vec<&'static str>) -> Self {
        Self { what, found: Escaped(found).to_string(), allowed }
    }
}

impl From<UnknownName> for Error {
    fn from(error: UnknownName) -> Self {
        Self::InvalidArgument(error.to_string())
    }
}

/// A checkpoint has only some elements of a part that is to be encoded.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartNotHeld {
    /// The checkpoint that lacks elements: `target` or `base`.
    pub checkpoint: &'static str,
    /// Name of the tensor in the target.
    pub tensor: String,
    /// The part. All of the tensor if the tensor is not cut.
    pub part: Rectangle,
    /// The rectangles of the part that the checkpoint has. The tensor can be encoded if it is cut at them.
    pub held: Vec<Rectangle>,
}

impl PartNotHeld {
    #[doc(hidden)]
    pub fn new(checkpoint: &'static str, tensor: String, part: Rectangle, held: Vec<Rectangle>) -> Self {
        Self { checkpoint, tensor, part, held }
    }
}

impl fmt::Display for PartNotHeld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { checkpoint, tensor, part, held } = self;
        let tensor = Escaped(tensor);
        if held.is_empty() {
            return write!(f, "tensor {tensor}: the {checkpoint} has no element of {part}");
        }
        let held = bounded(format_args!("{}", List(held)));
        write!(f, "tensor {tensor}: of {part} the {checkpoint} has only {held}. Cut the tensor there")
    }
}

impl core::error::Error for PartNotHeld {}

/// A violated rule of the spec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at}{rule}: expected {}, found {} (spec section {})", Text(expected), Text(found), rule.section())]
#[non_exhaustive]
pub struct Invalid {
    /// The rule.
    pub rule: Rule,
    /// Location in the pair.
    pub at: Location,
    /// The value or property that the rule requires.
    pub expected: String,
    /// The value or property of the bytes.
    pub found: String,
}

/// Location of an error. Absent parts are not printed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Location {
    /// The pair, if it is one of the inputs of a merge: its path, or `pair` and its number from 1.
    pub pair: Option<String>,
    /// Name of the tensor.
    pub tensor: Option<String>,
    /// Index of the entry in the tensor table, if the name is not known.
    pub entry: Option<usize>,
    /// Index of the chunk in the index map.
    pub chunk: Option<u32>,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(pair) = &self.pair {
            write!(f, "{}, ", Escaped(pair))?;
        }
        if let Some(tensor) = &self.tensor {
            write!(f, "tensor {}, ", Escaped(tensor))?;
        }
        if let Some(entry) = self.entry {
            write!(f, "tensor #{entry}, ")?;
        }
        if let Some(chunk) = self.chunk {
            write!(f, "chunk {chunk}, ")?;
        }
        Ok(())
    }
}

macro_rules! rules {
    ($($variant:ident = $id:literal in $section:literal,)+) => {
        /// The rules of the spec for the bytes of a pair.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[expect(missing_docs, reason = "each rule is documented by the spec under its id")]
        pub enum Rule { $($variant,)+ }

        impl Rule {
            /// All rules.
            pub const ALL: &[Rule] = &[$(Rule::$variant,)+];
            /// The id in the spec.
            pub const fn id(self) -> &'static str { match self { $(Rule::$variant => $id,)+ } }
            /// The section of the spec: of `codecs.md` if it has the prefix `C`, else of `tpde-format.md`.
            pub const fn section(self) -> &'static str { match self { $(Rule::$variant => $section,)+ } }
        }
    };
}

rules! {
    HeaderMagic = "header.magic" in "5",
    HeaderVersionMajor = "header.version_major" in "5",
    HeaderHeaderSize = "header.header_size" in "5",
    HeaderCrc32 = "header.crc32" in "5",
    HeaderRequiredFeatures = "header.required_features" in "5",
    HeaderPayloadRoot = "header.payload_root" in "5",
    HeaderReserved = "header.reserved" in "5",
    HeaderChunkCount = "header.chunk_count" in "5",
    HeaderTensorCount = "header.tensor_count" in "5",
    HeaderFileCount = "header.file_count" in "5",
    HeaderIndexSize = "header.index_size" in "5",
    HeaderSections = "header.sections" in "5",
    IndexDigest = "index.digest" in "5",
    SectionPadding = "section.padding" in "5",
    SectionFrame = "section.frame" in "5",
    TensorsSize = "tensors.size" in "8",
    TensorName = "tensor.name" in "8",
    TensorNameOrder = "tensor.name_order" in "8",
    TensorBaseName = "tensor.base_name" in "8",
    TensorDtype = "tensor.dtype" in "8",
    TensorRank = "tensor.rank" in "8",
    TensorShape = "tensor.shape" in "8",
    TensorBaseKind = "tensor.base_kind" in "8.2",
    TensorBaseParam = "tensor.base_param" in "8.2",
    TensorScalesName = "tensor.scales_name" in "8.5",
    TensorCodec = "tensor.codec" in "8",
    TensorChunkLanes = "tensor.chunk_lanes" in "8",
    TensorReserved = "tensor.reserved" in "8",
    TensorPart = "tensor.part" in "8.4",
    TensorPartOrder = "tensor.part_order" in "8.4",
    TensorTablesSize = "tensor.tables_size" in "8",
    TensorTables = "tensor.tables" in "C4.2",
    TensorFirstChunk = "tensor.first_chunk" in "8",
    TensorChunkCount = "tensor.chunk_count" in "8",
    DigestNone = "digest.none" in "7",
    TensorBaseDigest = "tensor.base_digest" in "7",
    FilesSize = "files.size" in "10",
    FileKind = "file.kind" in "10",
    FileReserved = "file.reserved" in "10",
    FileName = "file.name" in "10",
    FileContentSize = "file.content_size" in "10",
    FileContentDigest = "file.content_digest" in "10",
    FileTensors = "file.tensors" in "10",
    RecordNumDeltas = "record.num_deltas" in "6",
    RecordEmpty = "record.empty" in "6",
    RecordSizes = "record.sizes" in "6",
    RecordBlobOffset = "record.blob_offset" in "6",
    RecordOutputOffset = "record.output_offset" in "6",
    RecordSums = "record.sums" in "6.1",
    RecordBlobSize = "record.blob_size" in "6",
    BlobBlobSize = "blob.blob_size" in "11",
    BlobMagic = "blob.magic" in "11",
    BlobVersionMajor = "blob.version_major" in "11",
    BlobHeaderSize = "blob.header_size" in "11",
    BlobCrc32 = "blob.crc32" in "11",
    BlobReserved = "blob.reserved" in "11",
    BlobVersionMinor = "blob.version_minor" in "11",
    BlobPairDigest = "blob.pair_digest" in "11",
    PayloadCrc32 = "payload.crc32" in "6",
    PayloadDigest = "payload.digest" in "7.2",
    PayloadPadding = "payload.padding" in "11",
    PayloadFrame = "payload.frame" in "C3",
    PayloadLayout = "payload.layout" in "C3",
    PayloadSize = "payload.size" in "C3",
    PayloadPositions = "payload.positions" in "C1",
    PayloadDeltas = "payload.deltas" in "C1",
    PayloadHeader = "payload.header" in "C4.4",
    PayloadClasses = "payload.classes" in "C4.4",
    PayloadStream = "payload.stream" in "C4.5",
    ChunkBaseSum = "chunk.base_sum" in "6.1",
    ChunkTargetSum = "chunk.target_sum" in "6.1",
    BaseTensor = "base.tensor" in "8.2",
    BaseFile = "base.file" in "10",
    TensorTargetDigest = "tensor.target_digest" in "7",
    DigestBaseRoot = "digest.base_root" in "7",
    DigestTargetRoot = "digest.target_root" in "7",
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

impl Rule {
    /// The error of a violation of this rule.
    #[cold]
    pub fn broken(self, expected: impl fmt::Display, found: impl fmt::Display) -> Error {
        Error::Invalid(Box::new(Invalid {
            rule: self,
            at: Location::default(),
            expected: bounded(expected),
            found: bounded(found),
        }))
    }

    /// Returns the error of a violation unless the two values are equal.
    pub fn check_eq<T: PartialEq + fmt::Display>(self, expected: T, found: T) -> Result<()> {
        if expected == found { Ok(()) } else { Err(self.broken(expected, found)) }
    }

    /// Returns the error of a violation unless `ok` is true.
    pub fn check(self, ok: bool, expected: impl fmt::Display, found: impl fmt::Display) -> Result<()> {
        if ok { Ok(()) } else { Err(self.broken(expected, found)) }
    }
}

impl Error {
    /// [`Error::WrongBase`] as [`Error::AlreadyApplied`]. Other errors are unchanged.
    pub fn into_already_applied(self) -> Self {
        match self {
            Error::WrongBase { tensor, chunk, rule, .. } => Error::AlreadyApplied { tensor, chunk, rule },
            _ => self,
        }
    }

    /// The rule of the spec whose violation caused this error, if any.
    pub fn rule(&self) -> Option<Rule> {
        match self {
            Error::Invalid(invalid) => Some(invalid.rule),
            Error::WrongBase { rule, .. } | Error::AlreadyApplied { rule, .. } => Some(*rule),
            Error::Poisoned { source, .. } | Error::Step { source, .. } => source.rule(),
            _ => None,
        }
    }

    /// Names a pair of a chain of `count` pairs in an error about its bytes or its base: [`Error::Invalid`], [`Error::Limit`],
    /// [`Error::WrongBase`] and [`Error::AlreadyApplied`] become [`Error::Step`]. Other errors are unchanged, and so are all errors if
    /// `count` is 1.
    #[cfg(feature = "std")]
    #[must_use]
    pub fn in_step(self, number: usize, count: usize, pair: &Path) -> Self {
        match self {
            Error::Invalid(_) | Error::Limit { .. } | Error::WrongBase { .. } | Error::AlreadyApplied { .. } if count > 1 => {
                Error::Step { number, pair: pair.display().to_string(), source: Box::new(self) }
            }
            _ => self,
        }
    }

    #[cfg(feature = "std")]
    #[doc(hidden)]
    pub fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Error::Io { action, path: path.to_owned(), source }
    }

    #[cfg(feature = "std")]
    #[doc(hidden)]
    pub fn bad_checkpoint(path: &Path, reason: impl fmt::Display) -> Self {
        Error::BadCheckpoint { path: path.to_owned(), reason: bounded(reason) }
    }

    /// Adds the pair, one of the inputs of a merge, to the location of an [`Error::Invalid`]. Other errors are unchanged.
    pub fn in_pair(self, pair: &str) -> Self {
        self.located(|at| _ = at.pair.get_or_insert_with(|| pair.to_owned()))
    }

    /// Adds the tensor's name to the location of an [`Error::Invalid`], unless it has one. Other errors are unchanged.
    pub fn in_tensor(self, name: &str) -> Self {
        self.located(|at| _ = at.tensor.get_or_insert_with(|| name.to_owned()))
    }

    /// Adds the index of a tensor's entry to the location of an [`Error::Invalid`]. Other errors are unchanged.
    pub fn in_entry(self, entry: usize) -> Self {
        self.located(|at| at.entry = Some(entry))
    }

    /// Adds the chunk to the location of an [`Error::Invalid`], unless it has one. Other errors are unchanged.
    pub fn in_chunk(self, chunk: u32) -> Self {
        self.located(|at| _ = at.chunk.get_or_insert(chunk))
    }

    fn located(mut self, change: impl FnOnce(&mut Location)) -> Self {
        if let Error::Invalid(invalid) = &mut self {
            change(&mut invalid.at);
        }
        self
    }

    /// Returns [`Error::Limit`] if `found` is above `limit`.
    #[doc(hidden)]
    pub fn check_limit(what: &'static str, limit: u64, found: u64) -> Result<()> {
        if found > limit { Err(Error::Limit { what, limit, found }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_cut_whatever_they_are_made_of() {
        struct Endless;
        impl fmt::Display for Endless {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                loop {
                    f.write_str("\u{1b}[31m")?;
                }
            }
        }
        let long = "\u{9b}".repeat(1 << 20);
        let errors = [
            Rule::TensorShape.broken(Endless, Endless).in_tensor(&long),
            Error::bad_checkpoint(Path::new(&long), Endless),
            Error::BadCheckpoint { path: PathBuf::from(&long), reason: long.clone() },
            Error::InvalidArgument(long.clone()),
            Error::Device { action: "work", reason: long.clone() },
            Error::Invalid(Box::new(Invalid {
                rule: Rule::TensorName,
                at: Location { pair: Some(long.clone()), tensor: Some(long.clone()), ..Location::default() },
                expected: long.clone(),
                found: long,
            })),
        ];
        for error in errors {
            let message = error.to_string();
            assert!(message.chars().count() < 2 * MESSAGE_CHARS + 3 * SHOWN_CHARS, "{message}");
            assert!(!message.chars().any(char::is_control), "{message}");
        }
    }

    #[test]
    fn rule_ids_are_unique() {
        let mut ids: Vec<_> = Rule::ALL.iter().map(|r| r.id()).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), Rule::ALL.len());
    }
}
