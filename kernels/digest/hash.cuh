// Arguments of the kernel of hash.cu; `cuda/src/hashes.rs` has the same structs.
#pragma once
#include "common/format.cuh"

// Consecutive pieces of a range of memory, one warp for each. A piece has 32 KiB, the last piece of a range may be
// shorter. A range without bytes has one piece.
struct HashRange {
    u64 address; // of byte 0 of the range
    u64 bytes;   // size of the range, without gaps
    u64 row;     // size of a row, and the distance between the beginnings of rows. Without gaps both are equal
    u64 pitch;
    u32 first_warp;  // number of the warp of the first of these pieces
    u32 first_piece; // number of this piece within the range
    u32 nodes;       // ranges of several pieces: index in `Hashes::nodes`
    u32 number;      // index in `hashes`, `expected` and `statuses`
};
TPDE_OFFSET(HashRange, address, 0);
TPDE_OFFSET(HashRange, bytes, 8);
TPDE_OFFSET(HashRange, row, 16);
TPDE_OFFSET(HashRange, pitch, 24);
TPDE_OFFSET(HashRange, first_warp, 32);
TPDE_OFFSET(HashRange, first_piece, 36);
TPDE_OFFSET(HashRange, nodes, 40);
TPDE_OFFSET(HashRange, number, 44);
TPDE_SIZE(HashRange, 48);

// The parameter of `tpde_hash`, passed by value. Each block is a warp.
struct Hashes {
    u64 ranges; // const HashRange*: ascending by `first_warp`, the first at most `first`
    u64 nodes; // u32[8] each, see below. Zeros before the first launch; a launch of all pieces leaves the counters zero
    u64 hashes;   // u32*: 8 words per range; 0: hashes are not stored
    u64 expected; // const u32*: the first 4 words of the hash of each range; 0: hashes are not compared
    u64 statuses; // u32*: one per range: TPDE_HASH_EQUAL or TPDE_HASH_DIFFERS; 0: not stored
    u64 flag;     // u32*: set to 1 if a hash differs; 0: no flag
    u32 count;    // number of ranges
    u32 first;    // block b hashes the piece of warp first + b
    u32 warps;    // number of warps; further blocks of the grid do nothing
    u32 reserved; // 0
};
TPDE_OFFSET(Hashes, ranges, 0);
TPDE_OFFSET(Hashes, nodes, 8);
TPDE_OFFSET(Hashes, hashes, 16);
TPDE_OFFSET(Hashes, expected, 24);
TPDE_OFFSET(Hashes, statuses, 32);
TPDE_OFFSET(Hashes, flag, 40);
TPDE_OFFSET(Hashes, count, 48);
TPDE_OFFSET(Hashes, first, 52);
TPDE_OFFSET(Hashes, warps, 56);
TPDE_OFFSET(Hashes, reserved, 60);
TPDE_SIZE(Hashes, 64);

// Nodes of a range of n > 1 pieces: a level of n nodes, then the level above it, until a level has one node, which is not
// stored. A level is in groups of up to 32 nodes. A group takes 33 entries: a counter in the first word, then its nodes.

enum : u32 { TPDE_HASH_EQUAL = 0, TPDE_HASH_DIFFERS = 1 };

#define TPDE_HASH_THREADS 32
#define TPDE_HASH_SHARED 9216 // two buffers, each of 32 rows of 144 bytes
