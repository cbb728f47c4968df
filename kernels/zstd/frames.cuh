// Arguments of the kernels of frames.cu; `cuda/src/application/frames.rs` has the same struct.
#pragma once
#include "common/format.cuh"

// The parameter of `tpde_frames_check` and `tpde_frames_expand`, passed by value. Unless noted, arrays have `count`
// elements in the order of `order`.
struct Frames {
    u64 stored;        // const ChunkMetadata*: the whole index map, or a copy with other offsets
    u64 expanded;      // const ChunkMetadata*: the same chunks, as payloads of codec `raw`
    u64 chunk_tensors; // const u32*: tensor index of each record
    u64 tensors;       // const DeviceTensor*
    u64 blob;          // address of `blob_offset` 0 of `stored`
    u64 payloads;      // address of `blob_offset` 0 of `expanded`
    u64 order;         // const u32*: chunk indexes; all have a payload
    u64 statuses;      // u32*: one per record, zeroed by the host
    u64 frames;        // u64*: addresses of the frames, written by tpde_frames_check
    u64 frame_bytes;   // u64*: sizes of the frames, written by tpde_frames_check
    u64 contents;      // const u64*: addresses of the expanded contents
    u64 content_bytes; // const u64*: sizes of the expanded contents, written by nvCOMP
    u64 outcomes;      // const u32*: status words of nvCOMP, 0 for success
    u64 substitute;    // address of a valid frame that replaces damaged ones
    u32 substitute_bytes;
    u32 count;   // number of chunks, one block each
    u64 digests; // as `Launch::digests`
};
TPDE_OFFSET(Frames, stored, 0);
TPDE_OFFSET(Frames, expanded, 8);
TPDE_OFFSET(Frames, chunk_tensors, 16);
TPDE_OFFSET(Frames, tensors, 24);
TPDE_OFFSET(Frames, blob, 32);
TPDE_OFFSET(Frames, payloads, 40);
TPDE_OFFSET(Frames, order, 48);
TPDE_OFFSET(Frames, statuses, 56);
TPDE_OFFSET(Frames, frames, 64);
TPDE_OFFSET(Frames, frame_bytes, 72);
TPDE_OFFSET(Frames, contents, 80);
TPDE_OFFSET(Frames, content_bytes, 88);
TPDE_OFFSET(Frames, outcomes, 96);
TPDE_OFFSET(Frames, substitute, 104);
TPDE_OFFSET(Frames, substitute_bytes, 112);
TPDE_OFFSET(Frames, count, 116);
TPDE_OFFSET(Frames, digests, 120);
TPDE_SIZE(Frames, 128);

// Further status words, in addition to those of format.cuh.
enum : u32 {
    TPDE_STATUS_PAYLOAD_FRAME = 16,
    TPDE_STATUS_PAYLOAD_LAYOUT = 17,
};

#define TPDE_FRAMES_THREADS 256

#define TPDE_LAYOUT_PLANES 0
#define TPDE_LAYOUT_GAPS 1
#define TPDE_LAYOUT_ELIAS_DELTA 2
#define TPDE_LAYOUT_NIBBLE_GAPS 3
#define TPDE_LAYOUT_NIBBLE_PLANES 4
