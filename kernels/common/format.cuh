// Structs and constants shared by the kernels and the host (spec/tpde-format.md sections 6 to 8).
//
// The Rust types of the same names must match. One test compares them with the sizes, offsets and constants that
// `tpde_layout` (layout.cu) reports. Another test compares them with spec/tpde.h. kernels/README.md describes a launch.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#ifdef __CUDACC_RTC__
#define TPDE_OFFSET_OF(type, field) __INTADDR__(&((type*)0)->field) // NVRTC has no offsetof
#else
#define TPDE_OFFSET_OF(type, field) __builtin_offsetof(type, field)
#endif
#define TPDE_OFFSET(type, field, offset) static_assert(TPDE_OFFSET_OF(type, field) == (offset), #type "." #field)
#define TPDE_SIZE(type, size) static_assert(sizeof(type) == (size), #type)

// ---- Records of the index ----

struct ChunkMetadata {
    u64 blob_offset;
    u32 compressed_size;
    u32 uncompressed_size;
    u32 num_deltas;
    u32 crc32;
    u64 output_offset; // first lane of the chunk, counted from the start of the tensor
};
TPDE_OFFSET(ChunkMetadata, blob_offset, 0);
TPDE_OFFSET(ChunkMetadata, compressed_size, 8);
TPDE_OFFSET(ChunkMetadata, uncompressed_size, 12);
TPDE_OFFSET(ChunkMetadata, num_deltas, 16);
TPDE_OFFSET(ChunkMetadata, crc32, 20);
TPDE_OFFSET(ChunkMetadata, output_offset, 24);
TPDE_SIZE(ChunkMetadata, 32);

struct ChunkSums {
    u64 base_sum;
    u64 target_sum;
};
TPDE_OFFSET(ChunkSums, base_sum, 0);
TPDE_OFFSET(ChunkSums, target_sum, 8);
TPDE_SIZE(ChunkSums, 16);

// The first bytes of a payload of codec `conditioned` (spec/codecs.md section 4.4).
struct ConditionedHeader {
    u8 low_bits;
    u8 states_log2;
    u8 segments_log2;
    u8 activity_bits;
    u16 first_context;
    u8 context_count;
    u8 reserved;
    u32 exception_count;
    u32 center;
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
TPDE_SIZE(ConditionedHeader, 16);

// Codes of dtypes and codecs. Kernels distinguish floats and signed integers. All other dtypes are unsigned lanes.
// clang-format off: one row per group of dtypes
enum : u16 {
    TPDE_BOOL = 0, TPDE_U8 = 1, TPDE_I8 = 2, TPDE_U16 = 3, TPDE_I16 = 4, TPDE_U32 = 5, TPDE_I32 = 6, TPDE_U64 = 7, TPDE_I64 = 8,
    TPDE_F16 = 16, TPDE_BF16 = 17, TPDE_F32 = 18, TPDE_F64 = 19, TPDE_C64 = 20,
    TPDE_F8_E4M3 = 32, TPDE_F8_E5M2 = 33, TPDE_F8_E4M3FNUZ = 34, TPDE_F8_E5M2FNUZ = 35, TPDE_F8_E8M0 = 36,
    TPDE_F4 = 48, TPDE_F6_E2M3 = 49, TPDE_F6_E3M2 = 50,
};
// clang-format on

enum : u16 { TPDE_CODEC_RAW = 0, TPDE_CODEC_ZSTD = 1, TPDE_CODEC_CONDITIONED = 2 };

// ---- Arguments of a launch ----

// A tensor of the launch. `base` and `output` are aligned to the size of a lane.
struct DeviceTensor {
    u64 base;   // base lanes; not read at or past `base_lanes`. Of a derived base, the base tensor
    u64 output; // `lanes` lanes; equal to `base` for an application in place
    u64 lanes;
    u64 base_lanes;  // number of base lanes, at most `lanes`; further lanes count as zero. 0 for base kind `none`
    u32 first_chunk; // index of its first record
    u32 tables;      // `conditioned`: offset of its table set in words of `Launch::tables`; or TPDE_NO_TABLES
    u16 dtype;
    u16 codec;    // kernels of other codecs skip the tensor. `zstd` has no decoding kernel, see kernels/README.md.
                  // With TPDE_STRIDED_TENSOR, only kernels for strided tensors decode it, with
                  // TPDE_DERIVED_TENSOR only kernels for derived bases
    u8 lane_log2; // log2 of the bytes per lane, 0 to 3
    u8 chunk_lanes_log2;
    u16 reserved; // 0
};
TPDE_OFFSET(DeviceTensor, base, 0);
TPDE_OFFSET(DeviceTensor, output, 8);
TPDE_OFFSET(DeviceTensor, lanes, 16);
TPDE_OFFSET(DeviceTensor, base_lanes, 24);
TPDE_OFFSET(DeviceTensor, first_chunk, 32);
TPDE_OFFSET(DeviceTensor, tables, 36);
TPDE_OFFSET(DeviceTensor, dtype, 40);
TPDE_OFFSET(DeviceTensor, codec, 42);
TPDE_OFFSET(DeviceTensor, lane_log2, 44);
TPDE_OFFSET(DeviceTensor, chunk_lanes_log2, 45);
TPDE_OFFSET(DeviceTensor, reserved, 46);
TPDE_SIZE(DeviceTensor, 48);

#define TPDE_NO_TABLES 0xFFFFFFFFu
// Bit of `DeviceTensor::codec`: base, output or both are rows with gaps between them.
#define TPDE_STRIDED_TENSOR 0x8000u
// Bit of `DeviceTensor::codec`: base lanes are formed from a tensor of another dtype. Base and output may have gaps.
#define TPDE_DERIVED_TENSOR 0x4000u

// Rows of a strided tensor, in bytes. All are multiples of the size of a lane, and a pitch is at least the size of its row.
// Memory without gaps is one row of TPDE_ENDLESS_ROW bytes.
struct TensorRows {
    u64 base_row;   // bytes of base lanes per row
    u64 base_pitch; // distance between the beginnings of rows
    u64 output_row, output_pitch;
};
TPDE_OFFSET(TensorRows, base_row, 0);
TPDE_OFFSET(TensorRows, base_pitch, 8);
TPDE_OFFSET(TensorRows, output_row, 16);
TPDE_OFFSET(TensorRows, output_pitch, 24);
TPDE_SIZE(TensorRows, 32);

#define TPDE_ENDLESS_ROW (1ull << 62) // longer than any tensor

// Codes of `TensorForm::form`, as in an index.
enum : u8 { TPDE_FORM_FP8_BLOCKS = 1, TPDE_FORM_MXFP4 = 2, TPDE_FORM_MXFP4_TRANSPOSED = 3 };
#define TPDE_FORM_CAST 0 // base kind `cast`

// How the base lanes of a tensor are formed (spec section 8.5). Rows are those of `TensorRows`; of the base, they are rows
// of the base tensor. Addresses are aligned to the elements.
struct TensorForm {
    u64 scales;       // the tensor of scales, unless `form` is a cast
    u64 scales_row;   // bytes of scales per row
    u64 scales_pitch; // distance between the beginnings of rows
    u64 columns;      // `fp8_blocks` and `mxfp4_transposed`: length of the last dimension of the target, at least 1
    u64 depth;        // `mxfp4_transposed`: length of the dimension before, at least 1
    u16 base_dtype;
    u8 form;
    u8 reserved[5]; // 0
};
TPDE_OFFSET(TensorForm, scales, 0);
TPDE_OFFSET(TensorForm, scales_row, 8);
TPDE_OFFSET(TensorForm, scales_pitch, 16);
TPDE_OFFSET(TensorForm, columns, 24);
TPDE_OFFSET(TensorForm, depth, 32);
TPDE_OFFSET(TensorForm, base_dtype, 40);
TPDE_OFFSET(TensorForm, form, 42);
TPDE_OFFSET(TensorForm, reserved, 43);
TPDE_SIZE(TensorForm, 48);

// Modes of a launch: which lanes it stores, and when.
enum : u32 {
    TPDE_MODE_DRY = 0,          // decode and check, store nothing; set the flag if anything fails
    TPDE_MODE_OUT_OF_PLACE = 1, // write all lanes of the output, which does not overlap any base
    TPDE_MODE_IN_PLACE = 2,     // per chunk: store the changes after all checks of the chunk have passed
    TPDE_MODE_COMMIT = 3,       // in place, after a dry launch with the same flag: store, unless the flag is set
};

enum : u32 {
    TPDE_FLAG_NO_CRC = 1, // CRC and padding of the payloads are already checked: skip both
};

// The parameter of every decoding kernel, passed by value. Addresses are in global memory.
struct Launch {
    u64 chunks;        // const ChunkMetadata*: the index map, or a copy with other payload offsets and sizes
    u64 sums;          // const ChunkSums*: one per record
    u64 chunk_tensors; // const u32*: tensor index of each record
    u64 tensors;       // const DeviceTensor*
    u64 tables;        // const u32*: table sets, see kernels/README.md
    u64 blob;          // address of blob offset 0, a multiple of 16; only the payloads of this launch must be present
    u64 statuses;      // u32*: one per record
    u64 flag;          // u32*: zeroed by the host; DRY sets it to 1 if a chunk fails, COMMIT reads it
    u64 order;         // const u32*: chunk indexes in launch order; 0: ascending from 0
    u64 scratch;       // scratch memory, see kernels/README.md; 0: no scratch memory
    u32 first;         // block b decodes chunk order[first + b]
    u32 count;         // blocks with a chunk; further blocks of the grid do nothing
    u32 mode;
    u32 flags;
    u32 scratch_slots;      // IN_PLACE: number of slots; DRY, COMMIT: 1 + chunks of all launches; 0: no scratch memory
    u32 scratch_slot_bytes; // IN_PLACE: size of a slot; DRY, COMMIT: size of the memory behind the head; a multiple of 256
    u64 digests; // const u32*: status words of tpde_digests; payloads with another word than 0 are refused; 0: none
    u64 rows;    // const TensorRows*: one per tensor; kernels for strided tensors and for derived bases read it
    u64 forms;   // const TensorForm*: one per tensor; kernels for derived bases read it
};
TPDE_OFFSET(Launch, chunks, 0);
TPDE_OFFSET(Launch, sums, 8);
TPDE_OFFSET(Launch, chunk_tensors, 16);
TPDE_OFFSET(Launch, tensors, 24);
TPDE_OFFSET(Launch, tables, 32);
TPDE_OFFSET(Launch, blob, 40);
TPDE_OFFSET(Launch, statuses, 48);
TPDE_OFFSET(Launch, flag, 56);
TPDE_OFFSET(Launch, order, 64);
TPDE_OFFSET(Launch, scratch, 72);
TPDE_OFFSET(Launch, first, 80);
TPDE_OFFSET(Launch, count, 84);
TPDE_OFFSET(Launch, mode, 88);
TPDE_OFFSET(Launch, flags, 92);
TPDE_OFFSET(Launch, scratch_slots, 96);
TPDE_OFFSET(Launch, scratch_slot_bytes, 100);
TPDE_OFFSET(Launch, digests, 104);
TPDE_OFFSET(Launch, rows, 112);
TPDE_OFFSET(Launch, forms, 120);
TPDE_SIZE(Launch, 128);

// ---- Status words ----

// Result of a chunk: 0, or the code of the violated rule of the spec. If several checks fail, the lowest code is
// reported. The host sets the words to TPDE_STATUS_NOT_RUN before a launch, except before a COMMIT after a DRY.
enum : u32 {
    TPDE_STATUS_OK = 0,
    TPDE_STATUS_PAYLOAD_CRC32 = 1,
    TPDE_STATUS_PAYLOAD_PADDING = 2,
    TPDE_STATUS_PAYLOAD_SIZE = 3,
    TPDE_STATUS_PAYLOAD_HEADER = 4,
    TPDE_STATUS_PAYLOAD_CLASSES = 5,
    TPDE_STATUS_CHUNK_BASE_SUM = 6,
    TPDE_STATUS_PAYLOAD_STREAM = 7,
    TPDE_STATUS_PAYLOAD_POSITIONS = 8,
    TPDE_STATUS_PAYLOAD_DELTAS = 9,
    TPDE_STATUS_CHUNK_TARGET_SUM = 10,
    TPDE_STATUS_PAYLOAD_DIGEST = 11,
    TPDE_STATUS_HEADER_PAYLOAD_ROOT = 12,
    TPDE_STATUS_NOT_RUN = 0xFFFFFFFFu,
};

// ---- Launch configuration ----

// Threads per block and size of the dynamic shared memory in bytes, per kernel. The host must request sizes above
// 48 KiB first (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES).
#define TPDE_RAW_THREADS 256
#define TPDE_RAW_SHARED 0
#define TPDE_CONDITIONED_THREADS 256
#define TPDE_CONDITIONED_SHARED 50176
#define TPDE_WITHOUT_BASE_THREADS 256
#define TPDE_WITHOUT_BASE_SHARED 41984
// Additional shared memory in bytes for a table set with `classes` classes and `symbols` symbols (kernels/README.md). The
// largest set of the launch counts.
#define TPDE_CONDITIONED_TABLES(classes, symbols) (((classes) + 1) * 1024 + ((symbols) + 1) * 8)

// Size of the head of the scratch memory in bytes: one word per slot, rounded up to 256. The first slot follows it.
#define TPDE_SCRATCH_HEAD(slots) ((((u64)(slots) * 4) + 255) / 256 * 256)
// A list of n changes: n positions (u32), then n lanes of `width` bytes. A list that is kept from DRY to COMMIT takes a
// multiple of 256 bytes.
#define TPDE_LIST_LANES_AT(n) (((n) + 1) / 2 * 8)
#define TPDE_LIST_BYTES(n, width) (TPDE_LIST_LANES_AT(n) + (n) * (width))

// A list is short if it takes at most 1/TPDE_SHORT_LIST of the bytes of its chunk. Other chunks keep all their lanes.
#define TPDE_SHORT_LIST 4

#define TPDE_ROW_WORDS 1024        // words per row of the chunk sums
#define TPDE_FREQUENCY_SUM_LOG2 12 // log2 of the sum of the frequencies of a class
#define TPDE_CLASS_COUNT_MAX 15
#define TPDE_TOKEN_COUNT_MAX 180

#define TPDE_LAYOUT_WORDS 81 // number of words that tpde_layout writes
