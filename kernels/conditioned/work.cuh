// State of a warp that passes from tile to tile.
#pragma once
#include "conditioned/slow.cuh"

// Ways to decode and store a tile.
enum : int {
    TO_LIST,   // fast path; appends changes to the list (STORE_LIST)
    TO_OUTPUT, // fast path; stores each change on its own (other STORE_…)
    TO_TILE,   // fast path; writes changes to the tile in shared memory, and stores the whole tile (STORE_ALL)
    KEEP_TILE, // the same; first copies the base lanes of the tile to the slot (STORE_AND_KEEP)
    LOW_BITS,  // fast path without a base: floats with low bits, all lanes coded
    SLOWLY,    // general path, lane by lane
};

struct Work {
    Stream stream;
    Ring ring;
    Sums sums;
    u32 shared_at, tile_at;    // shared-memory addresses; without these fields the compiler would recompute them
    u32 thread, before;        // index in the warp; mask of the threads with lower indexes
    u32 states, bits;          // states per stream; activity bits
    u32 number;                // index of the tile
    bool receives, hands_over; // whether the previous warp passes the stream to this tile, and this tile to the next
    bool marked;               // some lanes of the tile have exceptions
    bool has_extra;            // the previous tile had extra bits

    __device__ __forceinline__ Shared& shared() const { return *(Shared*)shared_pointer(shared_at); }
    __device__ __forceinline__ Tile& tile() const { return *(Tile*)shared_pointer(tile_at); }
};
