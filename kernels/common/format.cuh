// The layouts that kernels and host share (spec/tpde-format.md sections 6 to 8), and what a launch is told.
//
// The Rust types of the same names must agree: `tpde_layout` (layout.cu) reports sizes, offsets and constants of this file, and
// a test compares them. Another compares what files hold with spec/tpde.h. README.md says how to launch.
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

// ---- From the index, as it lies there ----

struct ChunkMetadata {
    u64 blob_offset;
    u32 compressed_size;
    u32 uncompressed_size;
    u32 num_deltas;
    u32 crc32;
    u64 output_offset; // in lanes
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

// Codes of dtypes and codecs that kernels tell apart; the others are plain lanes.
enum : u16 {
    TPDE_BOOL = 0, TPDE_U8 = 1, TPDE_I8 = 2, TPDE_U16 = 3, TPDE_I16 = 4, TPDE_U32 = 5, TPDE_I32 = 6, TPDE_U64 = 7, TPDE_I64 = 8,
    TPDE_F16 = 16, TPDE_BF16 = 17, TPDE_F32 = 18, TPDE_F64 = 19, TPDE_C64 = 20,
    TPDE_F8_E4M3 = 32, TPDE_F8_E5M2 = 33, TPDE_F8_E4M3FNUZ = 34, TPDE_F8_E5M2FNUZ = 35, TPDE_F8_E8M0 = 36,
    TPDE_F4 = 48, TPDE_F6_E2M3 = 49, TPDE_F6_E3M2 = 50,
};

enum : u16 { TPDE_CODEC_RAW = 0, TPDE_CODEC_ZSTD = 1, TPDE_CODEC_CONDITIONED = 2 };

// ---- From the host ----

// A tensor of the launch. Pointers are aligned to the lanes and no more.
struct DeviceTensor {
    u64 base;             // base lanes; not read at or past `base_lanes`
    u64 output;           // `lanes` lanes; equal to `base` in place
    u64 lanes;
    u64 base_lanes;       // base lanes that exist, at most `lanes`; those beyond are zero. 0 for base kind `none`
    u32 first_chunk;      // number of its first record
    u32 tables;           // `conditioned`: where its table set begins, in words of `Launch::tables`; or TPDE_NO_TABLES
    u16 dtype;
    u16 codec;            // the kernel of another codec leaves the tensor alone. `zstd` has no kernel: see TPDE_CODEC_RAW in README.md
    u8 lane_log2;         // log2 of the bytes of a lane, 0 to 3
    u8 chunk_lanes_log2;
    u16 reserved;         // 0
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

// What a launch does with the target lanes.
enum : u32 {
    TPDE_MODE_DRY = 0,          // decode and check, store nothing; set the flag if anything fails
    TPDE_MODE_OUT_OF_PLACE = 1, // write all lanes of the output, which overlaps no base
    TPDE_MODE_IN_PLACE = 2,     // chunk by chunk: store the changes once all checks of the chunk have passed
    TPDE_MODE_COMMIT = 3,       // in place, after a dry launch with the same flag: nothing if the flag is set, else store
};

enum : u32 {
    TPDE_FLAG_NO_CRC = 1, // payloads were checked before: leave `crc32` and padding alone
};

// The parameter of every kernel that decodes, passed by value. Addresses are of the device's global memory.
struct Launch {
    u64 chunks;        // const ChunkMetadata*: the whole index map, or a copy with other payloads
    u64 sums;          // const ChunkSums*: one a record
    u64 chunk_tensors; // const u32*: the tensor of each record
    u64 tensors;       // const DeviceTensor*
    u64 tables;        // const u32*: table sets, see README.md
    u64 blob;          // address at which `blob_offset` 0 would be, a multiple of 16; only payloads launched need be there
    u64 statuses;      // u32*: one a record
    u64 flag;          // u32*: DRY sets it to 1 where a chunk fails, COMMIT reads it; zeroed by the host before DRY
    u64 order;         // const u32*: numbers of the chunks by their places; 0: the number is the place
    u64 scratch;       // see README.md; 0: none
    u32 first;         // place of the first chunk to do
    u32 count;         // blocks of the grid; a block at or past it does nothing
    u32 mode;
    u32 flags;
    u32 scratch_slots;      // IN_PLACE: as many; DRY and COMMIT: places of all launches, and one; 0: no scratch memory
    u32 scratch_slot_bytes; // IN_PLACE: of each; DRY and COMMIT: of the memory for changes; a multiple of 256
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
TPDE_SIZE(Launch, 104);

// ---- Status words ----

// 0, or what is wrong with a chunk, named as the rules of the spec. Where several checks fail, the least code that was found is
// reported. The host fills the words with TPDE_STATUS_NOT_RUN before a launch (COMMIT after DRY excepted).
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
    TPDE_STATUS_NOT_RUN = 0xFFFFFFFFu,
};

// ---- Launch configuration ----

// Threads of a block and bytes of dynamic shared memory, by kernel. More than 48 KiB must be allowed first
// (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES).
#define TPDE_RAW_THREADS 256
#define TPDE_RAW_SHARED 0
#define TPDE_CONDITIONED_THREADS 256
#define TPDE_CONDITIONED_SHARED 50176
#define TPDE_WITHOUT_BASE_THREADS 256
#define TPDE_WITHOUT_BASE_SHARED 41984
// and on top of that, for the table set of the launch with most: `classes` and `symbols` of it, see README.md.
#define TPDE_CONDITIONED_TABLES(classes, symbols) (((classes) + 1) * 1024 + ((symbols) + 1) * 8)

// Bytes before the first slot of scratch memory of n slots: a word for each, rounded up to 256.
#define TPDE_SCRATCH_HEAD(slots) ((((u64)(slots) * 4) + 255) / 256 * 256)
// A list of n changes of lanes of `width` bytes: the positions as words, then the lanes. From DRY to COMMIT it takes a multiple of 256.
#define TPDE_LIST_LANES_AT(n) (((n) + 1) / 2 * 8)
#define TPDE_LIST_BYTES(n, width) (TPDE_LIST_LANES_AT(n) + (n) * (width))

#define TPDE_ROW_WORDS 1024          // words of a row of the chunk sums
#define TPDE_FREQUENCY_SUM_LOG2 12   // log2 of the sum of a class's frequencies
#define TPDE_CLASS_COUNT_MAX 15
#define TPDE_TOKEN_COUNT_MAX 180

#define TPDE_LAYOUT_WORDS 62 // of the report of tpde_layout, in the order of layout.cu
