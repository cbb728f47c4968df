// Arguments of the kernel of digests.cu; `cuda/src/application/digests.rs` has the same structs.
#pragma once
#include "common/format.cuh"

// Up to 32 consecutive leaves of a payload, hashed by as many threads of a warp. A leaf has 1,024 bytes, the last leaf of
// a payload 1 to 1,024. Only the last piece of a payload has fewer than 32 leaves.
struct DigestPiece {
    u32 chunk;      // chunk index
    u32 first_leaf; // a multiple of 32
    u8 thread;      // thread of the warp for the first leaf
    u8 leaves;      // 1 to 32
    u16 reserved;   // 0
    u32 nodes;      // payloads of several pieces: index in `Digests::nodes`; others: unused
};
TPDE_OFFSET(DigestPiece, chunk, 0);
TPDE_OFFSET(DigestPiece, first_leaf, 4);
TPDE_OFFSET(DigestPiece, thread, 8);
TPDE_OFFSET(DigestPiece, leaves, 9);
TPDE_OFFSET(DigestPiece, reserved, 10);
TPDE_OFFSET(DigestPiece, nodes, 12);
TPDE_SIZE(DigestPiece, 16);

// The parameter of `tpde_digests`, passed by value. Each block is a warp.
struct Digests {
    u64 chunks; // const ChunkMetadata*: records of the stored payloads
    u64 blob;   // address of `blob_offset` 0, a multiple of 16
    u64 pieces; // const DigestPiece*: by warp, then by thread
    u64 warps;  // const u32*: first piece of each warp, then the number of pieces
    u64 nodes;  // u32[8] each: for a payload of n > 1 pieces, a counter in the first word, then n nodes; counters are 0
    u64 expected; // const u32*: digest of each payload, 4 words per record; 0: store digests in `found`
    u64 found;    // u32*: as `expected`
    u64 root;     // const u32*: TPDE_DIGESTS_OF_LIST: expected hash of the list, 8 words
    u64 statuses; // u32*: one per record
    u64 flag;     // u32*: set to 1 if a digest differs; 0: no flag
    u32 first;    // block b hashes the pieces of warp first + b
    u32 count;    // number of warps; further blocks of the grid do nothing
    u32 flags;
    u32 records; // TPDE_DIGESTS_OF_LIST: number of status words to set if the hash differs
};
TPDE_OFFSET(Digests, chunks, 0);
TPDE_OFFSET(Digests, blob, 8);
TPDE_OFFSET(Digests, pieces, 16);
TPDE_OFFSET(Digests, warps, 24);
TPDE_OFFSET(Digests, nodes, 32);
TPDE_OFFSET(Digests, expected, 40);
TPDE_OFFSET(Digests, found, 48);
TPDE_OFFSET(Digests, root, 56);
TPDE_OFFSET(Digests, statuses, 64);
TPDE_OFFSET(Digests, flag, 72);
TPDE_OFFSET(Digests, first, 80);
TPDE_OFFSET(Digests, count, 84);
TPDE_OFFSET(Digests, flags, 88);
TPDE_OFFSET(Digests, records, 92);
TPDE_SIZE(Digests, 96);

enum : u32 {
    // The only payload is the payload list. Its whole hash is compared with `root`. If it differs, all status words are
    // TPDE_STATUS_HEADER_PAYLOAD_ROOT.
    TPDE_DIGESTS_OF_LIST = 1,
};

#define TPDE_DIGESTS_THREADS 32
