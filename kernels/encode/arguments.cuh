// Arguments of the kernels in encode/; `cuda/src/abi.rs` has the same structs.
#pragma once
#include "common/format.cuh"

// A chunk to encode. The host fills in fields as it learns them: `form`, `states_log2` to `words_scale` after
// `tpde_encode_count`, `payload` and `payload_size` after `tpde_encode_streams`.
struct EncodeChunk {
    u64 base;   // address of the first base lane; unused if `base_lanes` is 0
    u64 target; // address of the first target lane
    // u8[]: bit i of byte n is lane 8n + i. Whole blocks.
    u64 masks;   // the changed lanes, after `tpde_encode_streams` the exceptions
    u64 coded;   // the coded lanes, set by `tpde_encode_count`
    u64 levels;  // u16[]: level of activity of each block
    u64 tiles;   // u16[]: number of coded lanes of each tile
    u64 words;   // u16*: memory of the streams
    u64 payload; // u8*: a multiple of 16
    u64 state;   // EncodeState*
    u32 lanes;
    u32 base_lanes;    // lanes from this index on have base 0
    u32 first_part;    // number of parts of TPDE_ENCODE_PART lanes of all chunks before this one
    u32 first_segment; // number of segments of all chunks before this one
    u32 words_scale;   // a segment has room for words_scale / 256 words per coded lane, and TPDE_ENCODE_SPARE words
    u32 tables;        // index in `Encode::tables`
    u32 lane_cost;     // cost of decoding a coded lane, in 256ths of a bit
    u32 payload_size;  // in bytes, without padding
    u16 dtype;
    u8 lane_log2;
    u8 low_bits;
    u8 form; // TPDE_FORM_…
    u8 states_log2;
    u8 segments_log2;
    u8 again; // `tpde_encode_streams` has encoded the chunk before, so `masks` has the exceptions
};
TPDE_OFFSET(EncodeChunk, base, 0);
TPDE_OFFSET(EncodeChunk, target, 8);
TPDE_OFFSET(EncodeChunk, masks, 16);
TPDE_OFFSET(EncodeChunk, coded, 24);
TPDE_OFFSET(EncodeChunk, levels, 32);
TPDE_OFFSET(EncodeChunk, tiles, 40);
TPDE_OFFSET(EncodeChunk, words, 48);
TPDE_OFFSET(EncodeChunk, payload, 56);
TPDE_OFFSET(EncodeChunk, state, 64);
TPDE_OFFSET(EncodeChunk, lanes, 72);
TPDE_OFFSET(EncodeChunk, base_lanes, 76);
TPDE_OFFSET(EncodeChunk, first_part, 80);
TPDE_OFFSET(EncodeChunk, first_segment, 84);
TPDE_OFFSET(EncodeChunk, words_scale, 88);
TPDE_OFFSET(EncodeChunk, tables, 92);
TPDE_OFFSET(EncodeChunk, lane_cost, 96);
TPDE_OFFSET(EncodeChunk, payload_size, 100);
TPDE_OFFSET(EncodeChunk, dtype, 104);
TPDE_OFFSET(EncodeChunk, lane_log2, 106);
TPDE_OFFSET(EncodeChunk, low_bits, 107);
TPDE_OFFSET(EncodeChunk, form, 108);
TPDE_OFFSET(EncodeChunk, states_log2, 109);
TPDE_OFFSET(EncodeChunk, segments_log2, 110);
TPDE_OFFSET(EncodeChunk, again, 111);
TPDE_SIZE(EncodeChunk, 112);

// Form of a payload.
enum : u32 {
    TPDE_FORM_NONE = 0,   // no payload
    TPDE_FORM_CODED = 1,  // codec `conditioned`, with tables
    TPDE_FORM_LISTED = 2, // codec `conditioned`, all changes are exceptions
    TPDE_FORM_PLAIN = 3,  // codec `conditioned`, all deltas uncoded
    TPDE_FORM_RAW = 4,    // codec `raw`
};

// What the kernels find out about a chunk. All zero before `tpde_encode_survey`.
struct EncodeState {
    u64 base_sum, target_sum;
    u64 cost;    // estimated cost of the choice, in 256ths of a bit
    u32 changed; // number of changed lanes
    u32 largest; // largest exponent of the base lanes, if dtypes have more exponents than are counted
    u32 center;  // of the values, for chunks with low bits
    u32 coded;
    u32 exceptions; // known after `tpde_encode_streams`, for chunks with low bits after `tpde_encode_count`
    u32 overflow;   // whether a stream is larger than its room
    u32 crc32;
    u16 first_context;
    u8 context_count;
    u8 activity_bits;
    u32 stream_words[32]; // size of each stream, in words
    u32 stream_at[32];    // index of its first word in `EncodeChunk::words`
    u8 classes[4][64];    // the maps
};
TPDE_OFFSET(EncodeState, base_sum, 0);
TPDE_OFFSET(EncodeState, target_sum, 8);
TPDE_OFFSET(EncodeState, cost, 16);
TPDE_OFFSET(EncodeState, changed, 24);
TPDE_OFFSET(EncodeState, largest, 28);
TPDE_OFFSET(EncodeState, center, 32);
TPDE_OFFSET(EncodeState, coded, 36);
TPDE_OFFSET(EncodeState, exceptions, 40);
TPDE_OFFSET(EncodeState, overflow, 44);
TPDE_OFFSET(EncodeState, crc32, 48);
TPDE_OFFSET(EncodeState, first_context, 52);
TPDE_OFFSET(EncodeState, context_count, 54);
TPDE_OFFSET(EncodeState, activity_bits, 55);
TPDE_OFFSET(EncodeState, stream_words, 56);
TPDE_OFFSET(EncodeState, stream_at, 184);
TPDE_OFFSET(EncodeState, classes, 312);
TPDE_SIZE(EncodeState, 568);

// A table set as the encoder reads it.
struct EncodeTables {
    // By class << 8 | token: the first slot in bits 0 to 11, the number of slots - 1 in bits 12 to 23, and in the high word
    // min(2^32 / number, 2^32 - 1). 0 for an absent token.
    u64 entries[4096];
    u32 costs[TPDE_TOKEN_COUNT_MAX][16]; // by token and class - 1: cost of the token in 256ths of a bit
    u32 present[16];                     // by class: number of tokens before the first absent one
};
TPDE_OFFSET(EncodeTables, entries, 0);
TPDE_OFFSET(EncodeTables, costs, 32768);
TPDE_OFFSET(EncodeTables, present, 44288);
TPDE_SIZE(EncodeTables, 44352);

// The parameter of all kernels in encode/, passed by value.
struct Encode {
    u64 chunks;  // const EncodeChunk*
    u64 tables;  // const EncodeTables*
    u64 scratch; // per block of `tpde_encode_choose` and `tpde_encode_sample`: TPDE_ENCODE_CHOOSE_SCRATCH bytes, and
                 // u32[TPDE_ENCODE_ROWS][tokens], zeros before and after a launch
    u64 groups;  // u64[TPDE_ENCODE_GROUPS][tokens]: token counts of the groups of contexts of a sample
    u64 rows;    // u64[1 + tokens] each: the groups that occur, with their index in `groups`
    u64 found;   // u32[2]: number of rows, and number of changed lanes of a sample
    u32 count;   // number of chunks
    u32 parts;   // number of parts, or of segments, of all chunks
    u32 tokens;  // number of tokens of the dtype of a sample
    u32 first_alone; // from this segment on, a warp of `tpde_encode_streams` encodes a segment; before it, a block
    u32 slot_bytes;  // size of the scratch memory of a block
    u32 reserved;
};
TPDE_OFFSET(Encode, chunks, 0);
TPDE_OFFSET(Encode, tables, 8);
TPDE_OFFSET(Encode, scratch, 16);
TPDE_OFFSET(Encode, groups, 24);
TPDE_OFFSET(Encode, rows, 32);
TPDE_OFFSET(Encode, found, 40);
TPDE_OFFSET(Encode, count, 48);
TPDE_OFFSET(Encode, parts, 52);
TPDE_OFFSET(Encode, tokens, 56);
TPDE_OFFSET(Encode, first_alone, 60);
TPDE_OFFSET(Encode, slot_bytes, 64);
TPDE_OFFSET(Encode, reserved, 68);
TPDE_SIZE(Encode, 72);

#define TPDE_ENCODE_THREADS 256           // threads per block of all kernels but `tpde_encode_streams`
#define TPDE_ENCODE_STREAM_THREADS 128    // threads per block of `tpde_encode_streams`
#define TPDE_ENCODE_PART 32768            // lanes per part, the work of a block
#define TPDE_ENCODE_SPARE 128             // words that each segment has room for, besides those per coded lane
#define TPDE_ENCODE_MAGNITUDES 517        // number of mean magnitudes that groups of contexts can have
#define TPDE_ENCODE_GROUPS 16544          // 32 rates of change, with TPDE_ENCODE_MAGNITUDES each
#define TPDE_ENCODE_ROWS 1024             // contexts of all levels
#define TPDE_ENCODE_CHOOSE_SCRATCH 225280 // see ChooseScratch
