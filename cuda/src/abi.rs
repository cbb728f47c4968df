//! The Rust side of `kernels/common/format.cuh`: structs of a launch, modes and status words.

use tpde_core::error::Rule;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The source of the header. Its numeric constants are parsed from it at compile time.
pub(super) const FORMAT: &str = include_str!("../kernels/common/format.cuh");

/// A tensor of a launch: `DeviceTensor` of `format.cuh`.
#[derive(Debug, Clone, Copy, Default, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct DeviceTensor {
    pub base: u64,
    pub output: u64,
    pub lanes: u64,
    pub base_lanes: u64,
    pub first_chunk: u32,
    pub tables: u32,
    pub dtype: u16,
    pub codec: u16,
    pub lane_log2: u8,
    pub chunk_lanes_log2: u8,
    pub reserved: u16,
}

/// Rows of a strided tensor of a launch: `TensorRows` of `format.cuh`.
#[derive(Debug, Clone, Copy, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct TensorRows {
    pub base_row: u64,
    pub base_pitch: u64,
    pub output_row: u64,
    pub output_pitch: u64,
}

/// How the base lanes of a tensor are converted: `TensorForm` of `format.cuh`.
#[derive(Debug, Clone, Copy, Default, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct TensorForm {
    pub scales: u64,
    pub scales_row: u64,
    pub scales_pitch: u64,
    pub columns: u64,
    pub depth: u64,
    pub base_dtype: u16,
    pub form: u8,
    pub reserved: [u8; 5],
}

/// Bit of [`DeviceTensor::codec`]: only the kernels for strided tensors decode the tensor.
pub(super) const STRIDED_TENSOR: u16 = 0x8000;

/// Bit of [`DeviceTensor::codec`]: only the kernels for derived bases decode the tensor.
pub(super) const DERIVED_TENSOR: u16 = 0x4000;

/// Size of a row, and pitch, that stand for memory without gaps: one row without an end.
pub(super) const ENDLESS_ROW: u64 = 1 << 62;

/// The parameter of a decoding kernel: `Launch` of `format.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Launch {
    pub chunks: u64,
    pub sums: u64,
    pub chunk_tensors: u64,
    pub tensors: u64,
    pub tables: u64,
    pub blob: u64,
    pub statuses: u64,
    pub flag: u64,
    pub order: u64,
    pub scratch: u64,
    pub first: u32,
    pub count: u32,
    pub mode: u32,
    pub flags: u32,
    pub scratch_slots: u32,
    pub scratch_slot_bytes: u32,
    pub digests: u64,
    pub rows: u64,
    pub forms: u64,
}

/// Modes of a launch.
pub(super) mod mode {
    pub const DRY: u32 = 0;
    pub const OUT_OF_PLACE: u32 = 1;
    pub const IN_PLACE: u32 = 2;
    pub const COMMIT: u32 = 3;
}

/// Payloads are already checked: kernels skip CRC and padding.
pub(super) const FLAG_NO_CRC: u32 = 1;
pub(super) const NO_TABLES: u32 = u32::MAX;
pub(super) const STATUS_OK: u32 = 0;
pub(super) const STATUS_NOT_RUN: u32 = u32::MAX;

/// Threads per block of the kernels in `zstd/frames.cu`.
#[cfg(feature = "nvcomp")]
pub(super) const FRAMES_THREADS: u32 = 256;

/// Threads per block of `tpde_digests`.
pub(super) const DIGESTS_THREADS: u32 = 32;

/// Threads and shared memory per block of `tpde_hash`.
pub(super) const HASH_THREADS: u32 = 32;
pub(super) const HASH_SHARED: u32 = 9216;

/// Threads per block of `tpde_encode_form`.
pub(super) const FORM_THREADS: u32 = 256;

pub(super) const RAW_THREADS: u32 = defined("TPDE_RAW_THREADS");
pub(super) const RAW_SHARED: u32 = defined("TPDE_RAW_SHARED");
pub(super) const CONDITIONED_THREADS: u32 = defined("TPDE_CONDITIONED_THREADS");
pub(super) const CONDITIONED_SHARED: u32 = defined("TPDE_CONDITIONED_SHARED");
pub(super) const WITHOUT_BASE_THREADS: u32 = defined("TPDE_WITHOUT_BASE_THREADS");
pub(super) const WITHOUT_BASE_SHARED: u32 = defined("TPDE_WITHOUT_BASE_SHARED");

/// The source of the header of the encoder's arguments.
const ENCODE: &str = include_str!("../kernels/encode/arguments.cuh");
pub(super) const ENCODE_THREADS: u32 = defined_in(ENCODE, "TPDE_ENCODE_THREADS");
pub(super) const ENCODE_STREAM_THREADS: u32 = defined_in(ENCODE, "TPDE_ENCODE_STREAM_THREADS");
pub(super) const ENCODE_PART: u32 = defined_in(ENCODE, "TPDE_ENCODE_PART");
pub(super) const ENCODE_SPARE: u32 = defined_in(ENCODE, "TPDE_ENCODE_SPARE");
pub(super) const ENCODE_MAGNITUDES: u32 = defined_in(ENCODE, "TPDE_ENCODE_MAGNITUDES");
pub(super) const ENCODE_GROUPS: u32 = defined_in(ENCODE, "TPDE_ENCODE_GROUPS");
pub(super) const ENCODE_ROWS: u32 = defined_in(ENCODE, "TPDE_ENCODE_ROWS");
pub(super) const ENCODE_CHOOSE_SCRATCH: u32 = defined_in(ENCODE, "TPDE_ENCODE_CHOOSE_SCRATCH");

/// A chunk to encode: `EncodeChunk` of `arguments.cuh`.
#[derive(Debug, Clone, Copy, Default, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct EncodeChunk {
    pub base: u64,
    pub target: u64,
    pub masks: u64,
    pub coded: u64,
    pub levels: u64,
    pub tiles: u64,
    pub words: u64,
    pub payload: u64,
    pub state: u64,
    pub lanes: u32,
    pub base_lanes: u32,
    pub first_part: u32,
    pub first_segment: u32,
    pub words_scale: u32,
    pub tables: u32,
    pub lane_cost: u32,
    pub payload_size: u32,
    pub dtype: u16,
    pub lane_log2: u8,
    pub low_bits: u8,
    pub form: u8,
    pub states_log2: u8,
    pub segments_log2: u8,
    pub again: u8,
}

/// Forms of a payload.
pub(super) mod form {
    pub const NONE: u8 = 0;
    pub const CODED: u8 = 1;
    pub const LISTED: u8 = 2;
    pub const PLAIN: u8 = 3;
    pub const RAW: u8 = 4;
}

/// What the kernels find out about a chunk: `EncodeState` of `arguments.cuh`.
#[derive(Debug, Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct EncodeState {
    pub base_sum: u64,
    pub target_sum: u64,
    pub cost: u64,
    pub changed: u32,
    pub largest: u32,
    pub center: u32,
    pub coded: u32,
    pub exceptions: u32,
    pub overflow: u32,
    pub crc32: u32,
    pub first_context: u16,
    pub context_count: u8,
    pub activity_bits: u8,
    pub stream_words: [u32; 32],
    pub stream_at: [u32; 32],
    pub classes: [[u8; 64]; 4],
}

/// The parameter of the encoder's kernels: `Encode` of `arguments.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Encode {
    pub chunks: u64,
    pub tables: u64,
    pub scratch: u64,
    pub groups: u64,
    pub rows: u64,
    pub found: u64,
    pub count: u32,
    pub parts: u32,
    pub tokens: u32,
    pub first_alone: u32,
    pub slot_bytes: u32,
    pub reserved: u32,
}

/// `TPDE_CONDITIONED_TABLES`: size of the shared memory for a table set in bytes, in addition to [`CONDITIONED_SHARED`] or
/// [`WITHOUT_BASE_SHARED`].
pub(super) const fn conditioned_tables(classes: u32, symbols: u32) -> u32 {
    (classes + 1) * 1024 + (symbols + 1) * 8
}

/// [`conditioned_tables`] for the largest possible table set.
pub(super) const CONDITIONED_TABLES_MAX: u32 = {
    let classes = defined("TPDE_CLASS_COUNT_MAX");
    conditioned_tables(classes, classes * defined("TPDE_TOKEN_COUNT_MAX"))
};

/// Status words and their rules.
const RULES: [(u32, Rule); 12] = [
    (1, Rule::PayloadCrc32),
    (2, Rule::PayloadPadding),
    (3, Rule::PayloadSize),
    (4, Rule::PayloadHeader),
    (5, Rule::PayloadClasses),
    (6, Rule::ChunkBaseSum),
    (7, Rule::PayloadStream),
    (8, Rule::PayloadPositions),
    (9, Rule::PayloadDeltas),
    (10, Rule::ChunkTargetSum),
    (11, Rule::PayloadDigest),
    (12, Rule::HeaderPayloadRoot),
];

/// Further status words of the frame kernels, in `frames.cuh`.
pub(super) const FRAME_RULES: [(u32, Rule); 2] = [(16, Rule::PayloadFrame), (17, Rule::PayloadLayout)];

/// Returns the rule of a status word.
pub(super) fn rule(status: u32) -> Option<Rule> {
    RULES.iter().chain(&FRAME_RULES).find(|(code, _)| *code == status).map(|(_, rule)| *rule)
}

/// Returns the status word of a rule that decoding kernels report.
pub(super) const fn status_of(rule: Rule) -> u32 {
    let mut i = 0;
    while RULES[i].1 as u32 != rule as u32 {
        i += 1;
    }
    RULES[i].0
}

/// `TPDE_SCRATCH_HEAD`: size of the head of the scratch memory in bytes.
pub(super) fn scratch_head(slots: u32) -> u64 {
    (u64::from(slots) * 4).next_multiple_of(256)
}

/// `TPDE_LIST_BYTES`, rounded up to [`LIST_STEP`]: size of a list of `changes` changes in bytes.
pub(super) fn list_bytes(changes: u64, lane_log2: u8) -> u64 {
    (changes.next_multiple_of(2) * 4 + (changes << lane_log2)).next_multiple_of(LIST_STEP)
}

/// `TPDE_SHORT_LIST`: whether a chunk keeps a list of its changes, and not all its lanes. The kernel
/// compares the size before it is rounded up, so it may keep a list where this says no. A list needs less memory than all lanes.
pub(super) fn is_short_list(list_bytes: u64, lane_bytes: u64) -> bool {
    u64::from(const { defined("TPDE_SHORT_LIST") }) * list_bytes <= lane_bytes
}

/// Granularity of the size of a list of changes, in bytes.
pub(super) const LIST_STEP: u64 = 256;

/// [`defined_in`] for `format.cuh`.
const fn defined(name: &str) -> u32 {
    defined_in(FORMAT, name)
}

/// Parses the number in `#define NAME number` of a header, at compile time.
const fn defined_in(text: &str, name: &str) -> u32 {
    let (text, name) = (text.as_bytes(), name.as_bytes());
    let define = b"#define ";
    let mut at = 0;
    while at + define.len() + name.len() < text.len() {
        if is_at(text, at, define) && is_at(text, at + define.len(), name) && text[at + define.len() + name.len()] == b' ' {
            let mut number = 0;
            let mut digit = at + define.len() + name.len() + 1;
            while text[digit].is_ascii_digit() {
                number = 10 * number + (text[digit] - b'0') as u32;
                digit += 1;
            }
            return number;
        }
        // Skip to the next line.
        while text[at] != b'\n' {
            at += 1;
        }
        at += 1;
    }
    panic!("the header does not define this")
}

const fn is_at(text: &[u8], at: usize, part: &[u8]) -> bool {
    let mut i = 0;
    while i < part.len() {
        if at + i >= text.len() || text[at + i] != part[i] {
            return false;
        }
        i += 1;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::mem::offset_of;
    use tpde_core::codec::Codec;
    use tpde_core::derived::BaseForm;
    use tpde_core::format::{ChunkMetadata, ChunkSums, ConditionedHeader};
    use tpde_core::lane::Dtype;

    /// The header of the specification, which has the layouts of the index.
    const HEADER: &str = include_str!("../../spec/tpde.h");

    /// Parses `TPDE_OFFSET(type, field, n)` and `TPDE_SIZE(type, n)` of a header. The keys are `type.field` and `type`. The
    /// compiler of the header asserts the numbers.
    fn layouts(header: &str) -> BTreeMap<String, usize> {
        let number = |text: &str| text.parse().unwrap_or_else(|_| define(header, text) as usize);
        let mut layouts = BTreeMap::new();
        for line in header.lines() {
            let Some((macro_name, rest)) = line.strip_suffix(");").and_then(|line| line.split_once('(')) else { continue };
            let parts: Vec<_> = rest.split(',').map(str::trim).collect();
            match (macro_name, &parts[..]) {
                ("TPDE_OFFSET", [of, field, at]) => layouts.insert(format!("{of}.{field}"), number(at)),
                ("TPDE_SIZE", [of, size]) => layouts.insert((*of).to_owned(), number(size)),
                _ => None,
            };
        }
        layouts
    }

    /// Returns the number in `#define NAME number` of a header.
    fn define(header: &str, name: &str) -> u32 {
        let defines = header.lines().filter_map(|line| line.strip_prefix("#define ")?.strip_prefix(name)?.strip_prefix(' '));
        let mut numbers = defines.map(|rest| rest.split_whitespace().next().and_then(|number| number.parse().ok()));
        numbers.next().flatten().unwrap_or_else(|| panic!("{name} is not defined as a number"))
    }

    /// Parses `NAME = number` in the enumerations of a header.
    fn constants(header: &str) -> BTreeMap<String, u32> {
        let words = header.split([',', '{', '}', '\n']);
        let parse = |word: &str| {
            let (name, number) = word.split_once(" = ")?;
            let name = name.trim().strip_prefix("TPDE_")?;
            let number = number.trim().trim_end_matches('u');
            let number = number.strip_prefix("0x").map_or_else(|| number.parse().ok(), |n| u32::from_str_radix(n, 16).ok())?;
            Some((name.to_owned(), number))
        };
        words.filter_map(parse).collect()
    }

    macro_rules! ours {
        ($($type:ident { $($field:ident),+ $(,)? })+) => {
            [$(
                (stringify!($type).to_owned(), size_of::<$type>()),
                $((format!("{}.{}", stringify!($type), stringify!($field)), offset_of!($type, $field)),)+
            )+]
        };
    }

    #[test]
    fn structs_are_those_of_the_kernels() {
        let ours = ours! {
            ChunkMetadata { blob_offset, compressed_size, uncompressed_size, num_deltas, crc32, output_offset }
            ChunkSums { base_sum, target_sum }
            ConditionedHeader {
                low_bits, states_log2, segments_log2, activity_bits, first_context, context_count, reserved, exception_count, center,
            }
            DeviceTensor {
                base, output, lanes, base_lanes, first_chunk, tables, dtype, codec, lane_log2, chunk_lanes_log2, reserved,
            }
            TensorRows { base_row, base_pitch, output_row, output_pitch }
            TensorForm { scales, scales_row, scales_pitch, columns, depth, base_dtype, form, reserved }
            Launch {
                chunks, sums, chunk_tensors, tensors, tables, blob, statuses, flag, order, scratch, first, count, mode, flags,
                scratch_slots, scratch_slot_bytes, digests, rows, forms,
            }
        };
        assert_eq!(BTreeMap::from(ours), layouts(FORMAT));
    }

    #[test]
    fn structs_of_the_encoder_are_those_of_its_kernels() {
        let mut ours = BTreeMap::from(ours! {
            EncodeChunk {
                base, target, masks, coded, levels, tiles, words, payload, state, lanes, base_lanes, first_part, first_segment,
                words_scale, tables, lane_cost, payload_size, dtype, lane_log2, low_bits, form, states_log2, segments_log2,
                again,
            }
            EncodeState {
                base_sum, target_sum, cost, changed, largest, center, coded, exceptions, overflow, crc32, first_context,
                context_count, activity_bits, stream_words, stream_at, classes,
            }
            Encode { chunks, tables, scratch, groups, rows, found, count, parts, tokens, first_alone, slot_bytes, reserved }
        });
        let entries = 16 << 8;
        ours.insert("EncodeTables.entries".into(), 0);
        ours.insert("EncodeTables.costs".into(), 8 * entries);
        let present = 8 * entries + 4 * 16 * define(FORMAT, "TPDE_TOKEN_COUNT_MAX") as usize;
        ours.insert("EncodeTables.present".into(), present);
        ours.insert("EncodeTables".into(), present + 4 * 16);
        assert_eq!(ours, layouts(ENCODE));
        let forms =
            [("NONE", form::NONE), ("CODED", form::CODED), ("LISTED", form::LISTED), ("PLAIN", form::PLAIN), ("RAW", form::RAW)];
        let forms = forms.map(|(name, code)| (format!("FORM_{name}"), u32::from(code)));
        assert_eq!(BTreeMap::from(forms), constants(ENCODE));
        assert_eq!(ENCODE_GROUPS, 32 * ENCODE_MAGNITUDES);
    }

    #[test]
    fn kernels_read_files_by_the_layouts_of_the_specification() {
        let (kernels, spec) = (layouts(FORMAT), layouts(HEADER));
        let of = |layouts: &BTreeMap<String, usize>, name: &str| -> BTreeMap<String, usize> {
            let is_its = |key: &str| key.split('.').next() == Some(name);
            layouts.iter().filter(|(key, _)| is_its(key)).map(|(key, at)| (key.clone(), *at)).collect()
        };
        // Structs that only the host passes to kernels are not in the specification.
        let of_launches = ["DeviceTensor", "TensorRows", "TensorForm", "Launch"];
        let shared: Vec<_> = kernels.keys().filter(|key| !key.contains('.') && !of_launches.contains(&&***key)).collect();
        assert_eq!(shared, ["ChunkMetadata", "ChunkSums", "ConditionedHeader"]);
        for name in shared {
            assert_eq!(of(&kernels, name), of(&spec, name), "{name}");
        }
        let spec = constants(HEADER);
        let is_of_files = |name: &str| !["MODE_", "FLAG_", "STATUS_"].iter().any(|prefix| name.starts_with(prefix));
        let codes: Vec<_> = constants(FORMAT).into_iter().filter(|(name, _)| is_of_files(name)).collect();
        assert!(codes.len() > 20);
        for (name, code) in codes {
            assert_eq!(spec.get(&name), Some(&code), "TPDE_{name}");
        }
        for name in ["CLASS_COUNT_MAX", "TOKEN_COUNT_MAX"] {
            assert_eq!(define(FORMAT, &format!("TPDE_{name}")), define(HEADER, &format!("TPDE_CONDITIONED_{name}")), "{name}");
        }
        assert_eq!(1 << define(FORMAT, "TPDE_FREQUENCY_SUM_LOG2"), define(HEADER, "TPDE_CONDITIONED_FREQUENCY_SUM"));
    }

    #[test]
    fn constants_are_those_of_the_kernels() {
        let theirs = constants(FORMAT);
        let mut ours = BTreeMap::new();
        for dtype in Dtype::ALL {
            ours.insert(dtype.name().to_owned(), u32::from(dtype.code()));
        }
        for codec in Codec::ALL {
            ours.insert(format!("CODEC_{}", codec.name().to_uppercase()), u32::from(codec.code()));
        }
        for form in BaseForm::ALL {
            ours.insert(format!("FORM_{}", form.name().to_uppercase()), u32::from(form.code()));
        }
        for (name, value) in [
            ("MODE_DRY", mode::DRY),
            ("MODE_OUT_OF_PLACE", mode::OUT_OF_PLACE),
            ("MODE_IN_PLACE", mode::IN_PLACE),
            ("MODE_COMMIT", mode::COMMIT),
            ("FLAG_NO_CRC", FLAG_NO_CRC),
            ("STATUS_OK", STATUS_OK),
            ("STATUS_NOT_RUN", STATUS_NOT_RUN),
        ] {
            ours.insert(name.to_owned(), value);
        }
        for (code, rule) in RULES {
            ours.insert(format!("STATUS_{}", rule.id().replace('.', "_").to_uppercase()), code);
        }
        assert_eq!(ours, theirs);
        assert!(FORMAT.contains("#define TPDE_NO_TABLES 0xFFFFFFFFu"));
        assert_eq!(NO_TABLES, 0xFFFF_FFFF);
        assert!(FORMAT.contains("#define TPDE_STRIDED_TENSOR 0x8000u") && FORMAT.contains("#define TPDE_ENDLESS_ROW (1ull << 62)"));
        assert!(FORMAT.contains("#define TPDE_DERIVED_TENSOR 0x4000u"));
        assert_eq!((STRIDED_TENSOR, DERIVED_TENSOR, ENDLESS_ROW), (0x8000, 0x4000, 1 << 62));
        assert!(FORMAT.contains("((((u64)(slots) * 4) + 255) / 256 * 256)"));
        assert!(FORMAT.contains("#define TPDE_LIST_LANES_AT(n) (((n) + 1) / 2 * 8)\n"));
        assert!(FORMAT.contains("#define TPDE_LIST_BYTES(n, width) (TPDE_LIST_LANES_AT(n) + (n) * (width))\n"));
        for (changes, lane_log2, bytes) in [(1, 0, 256), (28, 3, 512), (42, 1, 256), (43, 1, 512), (4 << 20, 0, 20 << 20)] {
            assert_eq!(list_bytes(changes, lane_log2), bytes, "{changes} changes of lanes of 2^{lane_log2} bytes");
        }
        assert_eq!([0, 1, 64, 65].map(scratch_head), [0, 256, 256, 512]);
    }
}
