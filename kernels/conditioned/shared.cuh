// What a block of a kernel for codec `conditioned` keeps in shared memory. All that its threads know in common lies there: no thread
// has registers for it.
#pragma once
#include "common/crc.cuh"
#include "conditioned/tile.cuh"

#define THREADS TPDE_CONDITIONED_THREADS
static_assert(THREADS == TPDE_WITHOUT_BASE_THREADS, "they share their code");
#define WARPS (THREADS / WARP)
#define WARPS_LOG2 3
static_assert(WARPS == 1 << WARPS_LOG2, "warps share segments evenly");

// A stream between two tiles, where several warps decode it.
struct Turn {
    u32 states[WARP];
    u32 at, bad;
};

// Changes of a chunk that wait for its checks: positions, in bytes of the chunk, then lanes.
struct List {
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
    Entry maps[MAPS * MAP + 1]; // a map of MAP contexts, as the kernel has it, for each activity, and the entry of no lane
    Turn turns[WARPS / 2];
    Chunk chunk;
    Parts parts;
    Classes classes;
    Totals totals;
    List list;
    u32 slot, listed, used;
    u32 extra; // some symbols that may come have extra bits
};

static_assert(CRC_SHARED <= sizeof(Tile) * WARPS, "the CRC works where the tiles will be");
static_assert(sizeof(Shared) <= (MAP == 1 ? TPDE_WITHOUT_BASE_SHARED : TPDE_CONDITIONED_SHARED), "room in dynamic shared memory");

// The tables follow.
__device__ __forceinline__ Shared& shared_memory() { return *(Shared*)dynamic_shared_memory(); }
__device__ __forceinline__ Tile& tile_of_warp() { return shared_memory().tiles[uniform(threadIdx.x / WARP)]; }

// The entry of map `map` for a context. A map has an entry for each context but for lanes of 8 bytes, whose contexts are too many.
template <int W> __device__ __forceinline__ Entry entry_of(const Shared& shared, u32 map, i32 context) {
    if (W == 8) context = min(max(context - shared.classes.first, 0), 64);
    return shared_u32x2(shared_address(shared.maps) + 8 * (MAP * map + (u32)context));
}

template <int W> __device__ __forceinline__ Entry class_of(u32 map, typename WideOf<W>::type base) {
    return entry_of<W>(shared_memory(), map, context_of<W>(base, shared_memory().classes.order));
}
