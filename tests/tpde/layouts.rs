//! Each binary layout is defined three times: a table of the spec, a Rust type, and a struct of `spec/tpde.h`. Registries and
//! constants are in all three too. These tests compare them. The assertions inside the header are checked by a C compiler.

use binrw::BinRead;
use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::Path;
use tpde::{BaseForm, Codec, Dtype, Layout};
use tpde_core::format::*;
use zerocopy::{FromBytes, IntoBytes};

fn spec(file: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("spec").join(file)).unwrap()
}

/// Offset of each field of each C struct, from the assertions of the header: struct name to field name to offset.
fn c_structs() -> BTreeMap<String, BTreeMap<String, usize>> {
    let mut structs: BTreeMap<String, BTreeMap<String, usize>> = BTreeMap::new();
    for line in spec("tpde.h").lines() {
        let Some(args) = line.strip_prefix("TPDE_OFFSET(").and_then(|rest| rest.strip_suffix(");")) else { continue };
        let [name, field, offset] = args.split(", ").collect::<Vec<_>>()[..] else { panic!("{line}") };
        structs.entry(name.into()).or_default().insert(field.into(), offset.parse().unwrap());
    }
    structs
}

/// The offset tables in a text of the spec, in order: field name to offset and size.
fn spec_tables(text: &str) -> Vec<BTreeMap<String, (usize, usize)>> {
    let mut tables: Vec<BTreeMap<_, _>> = Vec::new();
    for line in text.lines() {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let [_, offset, size, field, ..] = cells[..] else { continue };
        if (offset, size) == ("offset", "size") {
            tables.push(BTreeMap::new());
        }
        if let (Ok(offset), Ok(size), Some(name)) = (offset.parse(), size.parse(), field.strip_prefix('`')) {
            tables.last_mut().unwrap().insert(name.split('`').next().unwrap().to_owned(), (offset, size));
        }
    }
    tables
}

/// Compares the fields of a Rust struct with the spec and the C header. The struct was read from bytes that equal their offsets.
fn check(name: &str, table: &BTreeMap<String, (usize, usize)>, fields: &[(&str, Vec<u8>)]) {
    let c = &c_structs()[name];
    let named: Vec<_> = fields.iter().map(|(field, _)| *field).collect();
    assert!(table.keys().all(|field| named.contains(&field.as_str())), "{name}: {table:?} is not {named:?}");
    for (field, bytes) in fields {
        let (offset, size) = table.get(*field).unwrap_or_else(|| panic!("{name}.{field} is not in the spec"));
        assert_eq!(bytes.len(), *size, "{name}.{field}");
        assert_eq!(usize::from(bytes[0]), *offset, "{name}.{field}");
        assert_eq!(c.get(*field), Some(offset), "{name}.{field} of tpde.h");
    }
}

macro_rules! fields {
    ($value:ident: $($field:ident),+ $(; $($array:ident),+)?) => {
        [$((stringify!($field), $value.$field.to_le_bytes().to_vec()),)+ $($((stringify!($array), $value.$array.to_vec()),)+)?]
    };
}

#[test]
fn spec_crate_and_c_header_have_the_same_layouts() {
    let place: [u8; 256] = std::array::from_fn(|i| i as u8);
    let text = spec("tpde-format.md");
    let tables = spec_tables(&text[..text.find("\n## 14.").unwrap()]);
    let [header, section, record, sums, _digests, tensor, derived, file, blob] = &tables[..] else {
        panic!("{} tables", tables.len())
    };

    let v = IndexHeader::read(&mut Cursor::new(&place)).unwrap();
    let mut fields =
        Vec::from(fields!(v: version_major, version_minor, header_size, required_features, optional_features, index_size,
        blob_size, chunk_count, tensor_count, file_count, header_crc32; magic, payload_root));
    let sections = v.sections.iter().flat_map(|s| [s.offset, s.stored_size, s.expanded_size]).flat_map(u64::to_le_bytes);
    fields.push(("sections", sections.collect()));
    check("IndexHeader", header, &fields);

    let v = SectionEntry::read(&mut Cursor::new(&place)).unwrap();
    check("SectionEntry", section, &fields!(v: offset, stored_size, expanded_size));

    let v = ChunkMetadata::ref_from_prefix(&place).unwrap().0;
    let fields = [
        ("blob_offset", v.blob_offset.as_bytes().to_vec()),
        ("compressed_size", v.compressed_size.as_bytes().to_vec()),
        ("uncompressed_size", v.uncompressed_size.as_bytes().to_vec()),
        ("num_deltas", v.num_deltas.as_bytes().to_vec()),
        ("crc32", v.crc32.as_bytes().to_vec()),
        ("output_offset", v.output_offset.as_bytes().to_vec()),
    ];
    check("ChunkMetadata", record, &fields);

    let v = ChunkSums::ref_from_prefix(&place).unwrap().0;
    check("ChunkSums", sums, &[("base_sum", v.base_sum.as_bytes().to_vec()), ("target_sum", v.target_sum.as_bytes().to_vec())]);

    let v = TensorDigests::ref_from_prefix(&place).unwrap().0;
    let c = &c_structs()["TensorDigests"];
    assert_eq!(usize::from(v.base_digest[0]), c["base_digest"]);
    assert_eq!(usize::from(v.target_digest[0]), c["target_digest"]);

    let v = TensorEntry::read(&mut Cursor::new(&place)).unwrap();
    let fields = fields!(v: name_size, base_name_size, dtype, rank, base_kind, codec, chunk_lanes_log2, part, tables_size,
        first_chunk, chunk_count, base_param);
    check("TensorEntry", tensor, &fields);

    let v = DerivedParam::from_bits(u64::from_le_bytes(place[..8].try_into().unwrap()));
    assert_eq!(v.to_bits().to_le_bytes(), place[..8]);
    assert_eq!(v.reserved, place[3]);
    check("DerivedParam", derived, &fields!(v: base_dtype, form, scales_name_size));

    let v = FileEntry::read(&mut Cursor::new(&place)).unwrap();
    check("FileEntry", file, &fields!(v: kind, name_size, content_size; content_digest));

    let v = BlobHeader::read(&mut Cursor::new(&place)).unwrap();
    let fields = fields!(v: version_major, version_minor, header_size, blob_size, header_crc32; magic, pair_digest);
    check("BlobHeader", blob, &fields);

    // The first table is of codec `raw`. Its offsets are formulas, not numbers.
    let tables = spec_tables(&spec("codecs.md"));
    let [_, header] = &tables[..] else { panic!("{} tables", tables.len()) };
    let v = ConditionedHeader::ref_from_prefix(&place).unwrap().0;
    let mut fields = Vec::from(fields!(v: low_bits, states_log2, segments_log2, activity_bits, context_count));
    fields.extend([
        ("first_context", v.first_context.as_bytes().to_vec()),
        ("exception_count", v.exception_count.as_bytes().to_vec()),
        ("center", v.center.as_bytes().to_vec()),
    ]);
    check("ConditionedHeader", header, &fields);
}

/// The value of a `#define` or an `enum` constant of the C header.
fn c_number(name: &str) -> u64 {
    let text = spec("tpde.h");
    let number = |text: &str| {
        let text = text.trim().trim_start_matches("UINT32_C(").trim_start_matches("UINT64_C(").trim_end_matches(')');
        text.strip_prefix("0x").map_or_else(|| text.parse().ok(), |hex| u64::from_str_radix(hex, 16).ok())
    };
    let defined = text.lines().find_map(|line| line.strip_prefix("#define ")?.strip_prefix(name)?.strip_prefix(' '));
    let listed = || text.split([',', '{', '}']).find_map(|item| item.trim().strip_prefix(name)?.trim().strip_prefix('='));
    defined.or_else(listed).and_then(number).unwrap_or_else(|| panic!("tpde.h has no {name}"))
}

#[test]
fn registries_and_constants_agree() {
    let (format, codecs) = (spec("tpde-format.md"), spec("codecs.md"));
    let c_name = |prefix: &str, name: &str| format!("TPDE_{prefix}{}", name.replace('-', "_").to_uppercase());
    for &dtype in Dtype::ALL {
        assert_eq!(c_number(&c_name("", dtype.name())), u64::from(dtype.code()));
        assert!(format.contains(&format!("| {} | {} | {} |", dtype.code(), dtype.name(), dtype.bits())), "{dtype}");
    }
    for &kind in BaseKind::ALL {
        assert_eq!(c_number(&c_name("BASE_", kind.name())), u64::from(kind.code()));
        assert!(format.contains(&format!("| {} | `{}` |", kind.code(), kind.name())));
    }
    for &form in BaseForm::ALL {
        assert_eq!(c_number(&c_name("FORM_", form.name())), u64::from(form.code()));
        assert!(format.contains(&format!("| {} | `{}` |", form.code(), form.name())));
    }
    for &kind in FileKind::ALL {
        assert!(format.contains(&format!("| {} | {} |", kind.code(), kind.name())));
    }
    for &codec in Codec::ALL {
        assert_eq!(c_number(&c_name("CODEC_", codec.name())), u64::from(codec.code()));
        assert!(codecs.contains(&format!("| {} | `{}` |", codec.code(), codec.name())));
    }
    for &layout in Layout::ALL {
        assert_eq!(c_number(&c_name("LAYOUT_", layout.name())), u64::from(layout.code()));
        assert!(codecs.contains(&format!("| {} | `{}` |", layout.code(), layout.name())));
    }
    for (name, value) in [
        ("TPDE_VERSION_MAJOR", u64::from(VERSION_MAJOR)),
        ("TPDE_VERSION_MINOR", VERSION_MINOR.into()),
        ("TPDE_FEATURE_DIGESTS", FEATURE_DIGESTS),
        ("TPDE_FEATURE_PAYLOAD_LIST", FEATURE_PAYLOAD_LIST),
        ("TPDE_FEATURE_PARTS", FEATURE_PARTS),
        ("TPDE_FEATURE_DERIVED", FEATURE_DERIVED),
        ("TPDE_PART_WHOLE", PART_WHOLE.into()),
        ("TPDE_PART_FIRST", PART_FIRST.into()),
        ("TPDE_PART_FURTHER", PART_FURTHER.into()),
        ("TPDE_INDEX_HEADER_SIZE", INDEX_HEADER_SIZE.into()),
        ("TPDE_BLOB_HEADER_SIZE", BLOB_HEADER_SIZE.into()),
        ("TPDE_PAIR_DIGEST_SIZE", PAIR_DIGEST_SIZE),
        ("TPDE_SECTION_ALIGN", SECTION_ALIGN),
        ("TPDE_PAYLOAD_ALIGN", PAYLOAD_ALIGN),
        ("TPDE_CHUNK_COUNT_MAX", MAX_CHUNKS.into()),
        ("TPDE_TENSOR_COUNT_MAX", MAX_TENSORS.into()),
        ("TPDE_FILE_COUNT_MAX", MAX_FILES.into()),
        ("TPDE_NAME_SIZE_MAX", MAX_NAME_SIZE.into()),
        ("TPDE_FILE_NAME_SIZE_MAX", MAX_FILE_NAME_SIZE.into()),
        ("TPDE_RANK_MAX", MAX_RANK.into()),
        ("TPDE_CHUNK_LANES_LOG2_MIN", MIN_CHUNK_LANES_LOG2.into()),
        ("TPDE_CHUNK_BYTES_MAX", MAX_CHUNK_BYTES),
        ("TPDE_LIMIT_INDEX_SIZE", tpde::Limits::default().index_size),
        ("TPDE_LIMIT_SECTION_SIZE", tpde::Limits::default().section_size),
    ] {
        assert_eq!(c_number(name), value, "{name}");
    }
    let limits = tpde::Limits::default();
    assert!(format.contains(&format!("| length of the index | 256 MiB | {} GiB |", limits.index_size >> 30)));
    assert!(limits.index_size >= 256 << 20 && limits.section_size >= 64 << 20);
    assert!(format.contains(&format!("of `tables`, each | 64 MiB | {} MiB |", limits.section_size >> 20)));
    assert_eq!(c_number("TPDE_INDEX_MAGIC_U64"), u64::from_le_bytes(INDEX_MAGIC));
    assert_eq!(c_number("TPDE_BLOB_MAGIC_U64"), u64::from_le_bytes(BLOB_MAGIC));
}

/// The bounds of codec `conditioned` as stated in the spec. Whether the crate keeps them is tested by its vectors.
#[test]
fn bounds_of_codec_conditioned_agree() {
    assert_eq!(c_number("TPDE_CONDITIONED_HEADER_SIZE"), size_of::<ConditionedHeader>() as u64);
    let text = spec("codecs.md");
    for (name, before, after) in [
        ("HEADER_SIZE", "| header | ", " |"),
        ("BLOCK_LANES", "Lanes are grouped into *blocks* of ", " lanes,"),
        ("STATES_LOG2_MAX", "| `states_log2` | 0 to ", ";"),
        ("SEGMENTS_LOG2_MAX", "| `segments_log2` | 0 to ", ","),
        ("ACTIVITY_BITS_MAX", "| `activity_bits` | 0 to ", ";"),
        ("CONTEXT_COUNT_MAX", "| `context_count` | 1 to ", ";"),
        ("CLASS_COUNT_MAX", "| classes | 1 | *K*, 1 to ", " |"),
        ("TOKEN_COUNT_MAX", "tokens | 1 | *T*, 1 to ", " |"),
        ("FREQUENCY_SUM", "those of a class MUST add up to ", "."),
        ("STATE_MIN", "`u32` each and at least ", ","),
        ("SET_COUNT_MAX", "a pair MUST have at most ", " sets."),
    ] {
        let number = c_number(&format!("TPDE_CONDITIONED_{name}"));
        let words = match name {
            "STATE_MIN" => format!("2^{}", number.ilog2()),
            _ if number < 1000 => number.to_string(),
            _ => format!("{},{:03}", number / 1000, number % 1000),
        };
        assert!(text.contains(&format!("{before}{words}{after}")), "{name} is {words}");
    }
    for row in ["| 1, 2 | 8 | 1,024 |", "| 4 | 4 | 512 |", "| 8 | 2 | 256 |"] {
        assert!(text.contains(row), "tiles: {row}");
    }
    let blocks = "#define TPDE_CONDITIONED_TILE_BLOCKS(lane_bytes) ((lane_bytes) < 2 ? 8 : 16 / (lane_bytes))";
    assert!(spec("tpde.h").contains(blocks), "that gives 8, 8, 4 and 2");
}
