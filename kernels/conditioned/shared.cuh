// Shared memory of a block of codec `conditioned`. State that is common to all threads is here to save registers.
#pragma once
#include "common/crc.cuh"
#include "conditioned/tile.cuh"

#define THREADS TPDE_CONDITIONED_THREADS
static_assert(THREADS == TPDE_WITHOUT_BASE_THREADS, "both kernels use this code");
#define WARPS (THREADS / WARP)
#define WARPS_LOG2 3
static_assert(WARPS == 1 << WARPS_LOG2, "segments are divided evenly among warps");

// State of a stream between two tiles, if several warps decode the stream.
struct StreamHandoff {
    u32 states[WARP];
    u32 at, bad;
};

// Changes of a chunk that are not yet stored: byte offsets in the chunk, then lanes.
struct ChangeList {
    u8* changes;
    u32 capacity, lanes_at;

    __device__ __forceinline__ u32& position(u32 i) const { return ((u32*)changes)[i]; }
    template <int W> __device__ __forceinline__ typename LaneOf<W>::type& lane(u32 i) const {
        return ((typename LaneOf<W>::type*)(changes + lanes_at))[i];
    }
};

struct alignas(BUCKET_BYTES) Shared {
    Tile tiles[WARPS];
    u32 weights[TPDE_ROW_WORDS];
    Entry maps[MAPS * MAP + 1]; // MAP entries per activity, then the entry for threads without a lane
    StreamHandoff handoffs[WARPS / 2];
    Chunk chunk;
    Parts parts;
    Classes classes;
    Totals totals;
    ChangeList list;
    u8* kept; // slot with the base lanes of a chunk that is stored before it is checked
    u32 slot, listed, used;
    u32 extra; // whether any class in use has symbols with extra bits

    template <int W> __device__ __forceinline__ typename LaneOf<W>::type& kept_lane(u32 at) const {
        return ((typename LaneOf<W>::type*)kept)[at];
    }
};

static_assert(CRC_SHARED <= sizeof(Tile) * WARPS, "the CRC uses the memory of the tiles as scratch");
static_assert(sizeof(Shared) <= (MAP == 1 ? TPDE_WITHOUT_BASE_SHARED : TPDE_CONDITIONED_SHARED),
              "fits in dynamic shared memory");

// Returns the start of the dynamic shared memory. The tables follow the struct.
__device__ __forceinline__ Shared& shared_memory() { return *(Shared*)dynamic_shared_memory(); }
__device__ __forceinline__ Tile& tile_of_warp() { return shared_memory().tiles[uniform(threadIdx.x / WARP)]; }

// Returns the element of map `map` for a context. Lanes of up to 4 bytes have one element per context. Lanes of 8 bytes
// have too many contexts for that. They have 64 elements, from `first_context` on, and one for all contexts above.
template <int W> __device__ __forceinline__ Entry entry_of(const Shared& shared, u32 map, i32 context) {
    if (W == 8) context = min(max(context - shared.classes.first, 0), 64);
    return shared_u32x2(shared_address(shared.maps) + 8 * (MAP * map + (u32)context));
}

template <int W> __device__ __forceinline__ Entry class_of(u32 map, typename WideOf<W>::type base) {
    return entry_of<W>(shared_memory(), map, context_of<W>(base, shared_memory().classes.order));
}
