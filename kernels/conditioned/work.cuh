// The state of a warp while it decodes, carried from tile to tile.
#pragma once
#include "conditioned/slow.cuh"

// How tiles are decoded and stored.
enum : int {
    TO_LIST,   // fast path; changes go to the list (STORE_LIST)
    TO_OUTPUT, // fast path; each change is stored on its own (other STORE_…)
    TO_TILE,   // fast path; changes go to the tile, which is stored as a whole
    LOW_BITS,  // fast path without a base: floats with low bits, all lanes coded
    SLOWLY,    // general path, lane by lane
};

struct Work {
    Stream stream;
    Ring ring;
    Sums sums;
    u32 shared_at, tile_at;   // shared addresses; kept here, because the compiler would recompute them
    u32 thread, before;       // index in the warp; mask of the threads below
    u32 states, bits;         // states per stream; activity bits
    u32 number;               // index of the tile
    bool receives, hands_over;       // the stream is received from the previous warp, handed over to the next
    bool marked;              // some lanes of the tile have exceptions
    bool has_extra;               // the previous tile had extra bits

    __device__ __forceinline__ Shared& shared() const { return *(Shared*)shared_pointer(shared_at); }
    __device__ __forceinline__ Tile& tile() const { return *(Tile*)shared_pointer(tile_at); }
};
