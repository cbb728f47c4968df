// What a warp has in hand while it decodes, from tile to tile.
#pragma once
#include "conditioned/slow.cuh"

// How tiles are decoded.
enum : int {
    TO_LIST,   // STORE_LIST
    TO_OUTPUT, // each change on its own, with any other
    TO_TILE,   // to the tile, which leaves as a whole
    LOW_BITS,  // the same without a base, for floats with low bits, all of them coded; whatever else there is lane by lane
    SLOWLY,    // lane by lane
};

struct Work {
    Stream stream;
    Ring ring;
    Sums sums;
    u32 shared_at, tile_at;   // shared addresses: what the compiler cannot work out again, it keeps
    u32 thread, before;       // of the warp; a mask of those before
    u32 states, bits;         // of the payload
    u32 number;               // of the tile
    bool takes, passes;       // the stream: from the warp before, to the next one
    bool marked;              // some lanes of the tile are excepted
    bool extra;               // the tile before had extra bits

    __device__ __forceinline__ Shared& shared() const { return *(Shared*)shared_pointer(shared_at); }
    __device__ __forceinline__ Tile& tile() const { return *(Tile*)shared_pointer(tile_at); }
};
