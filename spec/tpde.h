/* tpde.h: the fixed layouts of the TPDE pair format, version 1.3, in C11 and C++11.
 *
 * tpde-format.md and codecs.md are the norm; this restates their tables. All integers are little-endian: on another
 * machine, swap them after reading. These structs say where bytes lie and check nothing: read
 * section 13 of the format before you trust what they hold.
 */
#ifndef TPDE_H
#define TPDE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define TPDE_ASSERT(condition, text) static_assert(condition, text)
#else
#define TPDE_ASSERT(condition, text) _Static_assert(condition, text)
#endif

#define TPDE_OFFSET(type, field, offset) \
    TPDE_ASSERT(offsetof(struct type, field) == (offset), #type "." #field " lies at " #offset)
#define TPDE_SIZE(type, size) TPDE_ASSERT(sizeof(struct type) == (size), #type " has " #size " bytes")

/* Magics, as the eight bytes of the file and as the u64 that they are when read little-endian. */
#define TPDE_INDEX_MAGIC "\x89TPI\r\n\x1A\n"
#define TPDE_BLOB_MAGIC "\x89TPB\r\n\x1A\n"
#define TPDE_INDEX_MAGIC_U64 UINT64_C(0x0A1A0A0D49505489)
#define TPDE_BLOB_MAGIC_U64 UINT64_C(0x0A1A0A0D42505489)

#define TPDE_VERSION_MAJOR 1
#define TPDE_VERSION_MINOR 3
#define TPDE_INDEX_HEADER_SIZE 256
#define TPDE_BLOB_HEADER_SIZE 64
#define TPDE_PAIR_DIGEST_SIZE 32
#define TPDE_PAYLOAD_DIGEST_SIZE 16
#define TPDE_INDEX_SIZE_MIN 352
#define TPDE_SECTION_ALIGN 8
#define TPDE_PAYLOAD_ALIGN 16

/* Bits of required_features, section 12.1. */
#define TPDE_FEATURE_DIGESTS UINT64_C(0x1)
#define TPDE_FEATURE_PAYLOAD_LIST UINT64_C(0x2)
#define TPDE_FEATURE_PARTS UINT64_C(0x4)
#define TPDE_FEATURE_DERIVED UINT64_C(0x10)

#define TPDE_CHUNK_COUNT_MAX UINT32_C(0x7FFFFFFF)
#define TPDE_TENSOR_COUNT_MAX UINT32_C(0x01000000)
#define TPDE_FILE_COUNT_MAX UINT32_C(0x00010000)
#define TPDE_NAME_SIZE_MAX 4096
#define TPDE_FILE_NAME_SIZE_MAX 255
#define TPDE_RANK_MAX 32
#define TPDE_CHUNK_LANES_LOG2_MIN 12
#define TPDE_CHUNK_BYTES_MAX UINT32_C(0x00400000)
#define TPDE_WINDOW_SIZE_MAX UINT32_C(0x08000000)

/* Codec conditioned, section 4 of codecs.md. */
#define TPDE_CONDITIONED_HEADER_SIZE 16
#define TPDE_CONDITIONED_BLOCK_LANES 128
#define TPDE_CONDITIONED_TILE_BLOCKS(lane_bytes) ((lane_bytes) < 2 ? 8 : 16 / (lane_bytes))
#define TPDE_CONDITIONED_STATES_LOG2_MAX 5
#define TPDE_CONDITIONED_SEGMENTS_LOG2_MAX 5
#define TPDE_CONDITIONED_ACTIVITY_BITS_MAX 2
#define TPDE_CONDITIONED_CONTEXT_COUNT_MAX 64
#define TPDE_CONDITIONED_CLASS_COUNT_MAX 15
#define TPDE_CONDITIONED_TOKEN_COUNT_MAX 180
#define TPDE_CONDITIONED_FREQUENCY_SUM 4096
#define TPDE_CONDITIONED_STATE_MIN UINT32_C(0x00010000)
#define TPDE_CONDITIONED_SET_COUNT_MAX 65535

/* Section 13.4: the most that a limit should be by default, on the length of the index and on the expanded size of a section. */
#define TPDE_LIMIT_INDEX_SIZE UINT64_C(0x40000000)
#define TPDE_LIMIT_SECTION_SIZE UINT64_C(0x10000000)

/* Order of the section entries. */
enum {
    TPDE_SECTION_CHUNKS = 0,
    TPDE_SECTION_SUMS = 1,
    TPDE_SECTION_DIGESTS = 2,
    TPDE_SECTION_TENSORS = 3,
    TPDE_SECTION_FILES = 4,
    TPDE_SECTION_TABLES = 5,
    TPDE_SECTION_COUNT = 6
};

enum {
    TPDE_BOOL = 0, TPDE_U8 = 1, TPDE_I8 = 2, TPDE_U16 = 3, TPDE_I16 = 4, TPDE_U32 = 5, TPDE_I32 = 6,
    TPDE_U64 = 7, TPDE_I64 = 8, TPDE_F16 = 16, TPDE_BF16 = 17, TPDE_F32 = 18, TPDE_F64 = 19,
    TPDE_C64 = 20, TPDE_F8_E4M3 = 32, TPDE_F8_E5M2 = 33, TPDE_F8_E4M3FNUZ = 34,
    TPDE_F8_E5M2FNUZ = 35, TPDE_F8_E8M0 = 36, TPDE_F4 = 48, TPDE_F6_E2M3 = 49, TPDE_F6_E3M2 = 50
};

/* Field part of a TensorEntry, section 8.4. */
enum { TPDE_PART_WHOLE = 0, TPDE_PART_FIRST = 1, TPDE_PART_FURTHER = 2 };

enum { TPDE_BASE_NONE = 0, TPDE_BASE_SAME = 1, TPDE_BASE_PREFIX = 2, TPDE_BASE_CAST = 3, TPDE_BASE_DEQUANTISED = 4 };

/* Field form of a DerivedParam, section 8.5. */
enum { TPDE_FORM_FP8_BLOCKS = 1, TPDE_FORM_MXFP4 = 2, TPDE_FORM_MXFP4_TRANSPOSED = 3 };

enum { TPDE_CODEC_RAW = 0, TPDE_CODEC_ZSTD = 1, TPDE_CODEC_CONDITIONED = 2 };

/* First byte of the content of a payload of codec zstd. */
enum {
    TPDE_LAYOUT_PLANES = 0,
    TPDE_LAYOUT_GAPS = 1,
    TPDE_LAYOUT_ELIAS_DELTA = 2,
    TPDE_LAYOUT_NIBBLE_GAPS = 3,
    TPDE_LAYOUT_NIBBLE_PLANES = 4
};

enum {
    TPDE_FILE_SAFETENSORS = 0,
    TPDE_FILE_SAFETENSORS_OF_BASE = 1,
    TPDE_FILE_VERBATIM = 2,
    TPDE_FILE_VERBATIM_OF_BASE = 3
};

/* Index header, section 5. */
struct SectionEntry {
    uint64_t offset;
    uint64_t stored_size;
    uint64_t expanded_size;
};
TPDE_OFFSET(SectionEntry, offset, 0);
TPDE_OFFSET(SectionEntry, stored_size, 8);
TPDE_OFFSET(SectionEntry, expanded_size, 16);
TPDE_SIZE(SectionEntry, 24);

struct IndexHeader {
    uint8_t magic[8];
    uint16_t version_major;
    uint16_t version_minor;
    uint32_t header_size;
    uint64_t required_features;
    uint64_t optional_features;
    uint64_t index_size;
    uint64_t blob_size;
    uint32_t chunk_count;
    uint32_t tensor_count;
    uint32_t file_count;
    uint32_t reserved;
    struct SectionEntry sections[TPDE_SECTION_COUNT];
    uint8_t payload_root[32]; /* with TPDE_FEATURE_DIGESTS, else zero */
    uint8_t reserved2[12];
    uint32_t header_crc32;
};
TPDE_OFFSET(IndexHeader, magic, 0);
TPDE_OFFSET(IndexHeader, version_major, 8);
TPDE_OFFSET(IndexHeader, version_minor, 10);
TPDE_OFFSET(IndexHeader, header_size, 12);
TPDE_OFFSET(IndexHeader, required_features, 16);
TPDE_OFFSET(IndexHeader, optional_features, 24);
TPDE_OFFSET(IndexHeader, index_size, 32);
TPDE_OFFSET(IndexHeader, blob_size, 40);
TPDE_OFFSET(IndexHeader, chunk_count, 48);
TPDE_OFFSET(IndexHeader, tensor_count, 52);
TPDE_OFFSET(IndexHeader, file_count, 56);
TPDE_OFFSET(IndexHeader, reserved, 60);
TPDE_OFFSET(IndexHeader, sections, 64);
TPDE_OFFSET(IndexHeader, payload_root, 208);
TPDE_OFFSET(IndexHeader, reserved2, 240);
TPDE_OFFSET(IndexHeader, header_crc32, 252);
TPDE_SIZE(IndexHeader, TPDE_INDEX_HEADER_SIZE);

/* Section chunks: the record of a chunk, section 6. */
struct ChunkMetadata {
    uint64_t blob_offset;
    uint32_t compressed_size;
    uint32_t uncompressed_size;
    uint32_t num_deltas;
    uint32_t crc32;
    uint64_t output_offset; /* in lanes */
};
TPDE_OFFSET(ChunkMetadata, blob_offset, 0);
TPDE_OFFSET(ChunkMetadata, compressed_size, 8);
TPDE_OFFSET(ChunkMetadata, uncompressed_size, 12);
TPDE_OFFSET(ChunkMetadata, num_deltas, 16);
TPDE_OFFSET(ChunkMetadata, crc32, 20);
TPDE_OFFSET(ChunkMetadata, output_offset, 24);
TPDE_SIZE(ChunkMetadata, 32);

/* Section sums, section 6.1. With TPDE_FEATURE_PAYLOAD_LIST, one PayloadDigest per chunk follows, section 7.2. */
struct ChunkSums {
    uint64_t base_sum;
    uint64_t target_sum;
};
TPDE_OFFSET(ChunkSums, base_sum, 0);
TPDE_OFFSET(ChunkSums, target_sum, 8);
TPDE_SIZE(ChunkSums, 16);

struct PayloadDigest {
    uint8_t digest[TPDE_PAYLOAD_DIGEST_SIZE];
};
TPDE_SIZE(PayloadDigest, TPDE_PAYLOAD_DIGEST_SIZE);

/* Section digests: first the roots, then one TensorDigests per entry of the tensor table, section 7. */
struct RootDigests {
    uint8_t base_root[32];
    uint8_t target_root[32];
};
TPDE_OFFSET(RootDigests, base_root, 0);
TPDE_OFFSET(RootDigests, target_root, 32);
TPDE_SIZE(RootDigests, 64);

struct TensorDigests {
    uint8_t base_digest[16];
    uint8_t target_digest[16];
};
TPDE_OFFSET(TensorDigests, base_digest, 0);
TPDE_OFFSET(TensorDigests, target_digest, 16);
TPDE_SIZE(TensorDigests, 32);

/* Section tensors: the entries, then all dims, then all names, section 8. The dims of an entry are its shape; with
 * TPDE_PART_FIRST its shape, origins and extents; with TPDE_PART_FURTHER its origins and extents, section 8.4. */
struct TensorEntry {
    uint32_t name_size; /* 0 with TPDE_PART_FURTHER, as is base_name_size */
    uint32_t base_name_size;
    uint16_t dtype;
    uint16_t rank;
    uint16_t base_kind;
    uint16_t codec;
    uint8_t chunk_lanes_log2;
    uint8_t part; /* with TPDE_FEATURE_PARTS, else zero */
    uint8_t reserved[2];
    uint32_t tables_size;
    uint32_t first_chunk;
    uint32_t chunk_count;
    uint64_t base_param; /* with TPDE_BASE_CAST and TPDE_BASE_DEQUANTISED a DerivedParam */
};
TPDE_OFFSET(TensorEntry, name_size, 0);
TPDE_OFFSET(TensorEntry, base_name_size, 4);
TPDE_OFFSET(TensorEntry, dtype, 8);
TPDE_OFFSET(TensorEntry, rank, 10);
TPDE_OFFSET(TensorEntry, base_kind, 12);
TPDE_OFFSET(TensorEntry, codec, 14);
TPDE_OFFSET(TensorEntry, chunk_lanes_log2, 16);
TPDE_OFFSET(TensorEntry, part, 17);
TPDE_OFFSET(TensorEntry, reserved, 18);
TPDE_OFFSET(TensorEntry, tables_size, 20);
TPDE_OFFSET(TensorEntry, first_chunk, 24);
TPDE_OFFSET(TensorEntry, chunk_count, 28);
TPDE_OFFSET(TensorEntry, base_param, 32);
TPDE_SIZE(TensorEntry, 40);

/* Field base_param of a derived base, section 8.5. */
struct DerivedParam {
    uint16_t base_dtype;
    uint8_t form; /* 0 with TPDE_BASE_CAST */
    uint8_t reserved;
    uint32_t scales_name_size; /* 0 with TPDE_BASE_CAST */
};
TPDE_OFFSET(DerivedParam, base_dtype, 0);
TPDE_OFFSET(DerivedParam, form, 2);
TPDE_OFFSET(DerivedParam, reserved, 3);
TPDE_OFFSET(DerivedParam, scales_name_size, 4);
TPDE_SIZE(DerivedParam, 8);

/* Section files: the entries, then all names, then the stored contents, section 10. */
struct FileEntry {
    uint16_t kind;
    uint16_t reserved;
    uint32_t name_size;
    uint64_t content_size;
    uint8_t content_digest[16];
    uint64_t reserved2;
};
TPDE_OFFSET(FileEntry, kind, 0);
TPDE_OFFSET(FileEntry, reserved, 2);
TPDE_OFFSET(FileEntry, name_size, 4);
TPDE_OFFSET(FileEntry, content_size, 8);
TPDE_OFFSET(FileEntry, content_digest, 16);
TPDE_OFFSET(FileEntry, reserved2, 32);
TPDE_SIZE(FileEntry, 40);

/* Blob header, section 11. */
struct BlobHeader {
    uint8_t magic[8];
    uint16_t version_major;
    uint16_t version_minor;
    uint32_t header_size;
    uint64_t blob_size;
    uint8_t pair_digest[TPDE_PAIR_DIGEST_SIZE];
    uint32_t reserved;
    uint32_t header_crc32;
};
TPDE_OFFSET(BlobHeader, magic, 0);
TPDE_OFFSET(BlobHeader, version_major, 8);
TPDE_OFFSET(BlobHeader, version_minor, 10);
TPDE_OFFSET(BlobHeader, header_size, 12);
TPDE_OFFSET(BlobHeader, blob_size, 16);
TPDE_OFFSET(BlobHeader, pair_digest, 24);
TPDE_OFFSET(BlobHeader, reserved, 56);
TPDE_OFFSET(BlobHeader, header_crc32, 60);
TPDE_SIZE(BlobHeader, TPDE_BLOB_HEADER_SIZE);

/* Codec conditioned: the first bytes of a payload, section 4.4 of codecs.md, which names the pieces that follow. */
struct ConditionedHeader {
    uint8_t low_bits; /* stored as they are, of each lane's delta */
    uint8_t states_log2; /* of a stream */
    uint8_t segments_log2; /* of the chunk */
    uint8_t activity_bits; /* of a block; there are 1 << activity_bits maps */
    uint16_t first_context; /* lower contexts count as this one */
    uint8_t context_count; /* entries of a map, 4 bits each */
    uint8_t reserved;
    uint32_t exception_count;
    uint32_t center; /* what coded values are taken from, if low_bits is not 0 */
};
TPDE_OFFSET(ConditionedHeader, low_bits, 0);
TPDE_OFFSET(ConditionedHeader, states_log2, 1);
TPDE_OFFSET(ConditionedHeader, segments_log2, 2);
TPDE_OFFSET(ConditionedHeader, activity_bits, 3);
TPDE_OFFSET(ConditionedHeader, first_context, 4);
TPDE_OFFSET(ConditionedHeader, context_count, 6);
TPDE_OFFSET(ConditionedHeader, reserved, 7);
TPDE_OFFSET(ConditionedHeader, exception_count, 8);
TPDE_OFFSET(ConditionedHeader, center, 12);
TPDE_SIZE(ConditionedHeader, TPDE_CONDITIONED_HEADER_SIZE);

#undef TPDE_OFFSET
#undef TPDE_SIZE
#undef TPDE_ASSERT

#endif
