// Changed lanes: the change list, the sums and the exceptions (spec/codecs.md section 4.6).
#pragma once
#include "conditioned/stream.cuh"
#include "conditioned/shared.cuh"

// Destination of the target lanes in a pass over the chunk.
enum : u32 {
    STORE_NONE = 0,
    STORE_ALL = 1,      // all lanes of the output
    STORE_CHANGES = 2,  // changed lanes only, in place
    STORE_LIST = 3,     // changed lanes, in a list that is applied after all checks
    STORE_AND_KEEP = 4, // all lanes of the output, in place; a slot keeps the base, to undo the stores
};

// Returns whether a pass stores whole tiles. Exceptions are then applied in the tiles (`except_tile`). Otherwise all threads
// apply them after the last tile (`except`), which is faster where each change is stored on its own.
__device__ __forceinline__ bool stores_tiles(u32 store) { return store == STORE_ALL || store == STORE_AND_KEEP; }

// A warp: appends the changes of its threads to the list of the chunk. Changes beyond the capacity of the list are
// counted but not stored.
template <int W>
__device__ __forceinline__ void list_changes(Shared& shared, u32 thread, u32 before, bool changed, u32 position,
                                             typename WideOf<W>::type lane) {
    u32 mask = __ballot_sync(ALL_LANES, changed);
    u32 first = first_adds_to_shared(thread, shared_address(&shared.listed), __popc(mask));
    u32 i = __shfl_sync(ALL_LANES, first, 0) + __popc(mask & before);
    ChangeList list = shared.list;
    if (changed && i < list.capacity) {
        list.position(i) = position;
        list.template lane<W>(i) = (typename LaneOf<W>::type)lane;
    }
}

// Contribution of a thread to the totals of the chunk.
struct Sums {
    u64 base, target;
    u32 changed, errors;
};

// Cursor of a warp in the ascending list of exceptions.
struct Marker {
    u32 exception, next; // first exception at or after the tile, and its position
    bool marked;         // some lanes of the tile have exceptions
};

__device__ __forceinline__ Marker open_marker(const Chunk& chunk, const Parts& parts, u32 first) {
    u32 begin = 0, end = parts.exceptions;
    while (begin < end) {
        u32 middle = (begin + end) / 2;
        if (exception_position(chunk, parts, middle) < first) begin = middle + 1;
        else end = middle;
    }
    return {begin, exception_position(chunk, parts, begin), false};
}

// A warp: finds the exceptions of a tile, which has the lanes `first..end`.
__device__ __noinline__ Marker mark_exceptions(Marker marker, const Chunk& chunk, const Parts& parts, u32 first,
                                               u32 end, Tile& tile) {
    u32 thread = threadIdx.x % WARP, count, begin = marker.exception;
    tile.excepted[thread] = 0;
    __syncwarp();
    do {
        u32 position = exception_position(chunk, parts, marker.exception + thread), at = position - first;
        if (position >= first && position < end) atomicOr(&tile.excepted[at / 32], 1u << at % 32);
        begin += __popc(__ballot_sync(ALL_LANES, position < first));
        count = __popc(__ballot_sync(ALL_LANES, position < end));
        marker.exception += count;
    } while (count == WARP);
    // A damaged list that does not ascend can have more exceptions than the tile has lanes.
    count = min(marker.exception - begin, end - first);
    if (thread == 0) {
        tile.exceptions = (u16)count;
        tile.exceptions_begin = begin;
    }
    __syncwarp();
    return {marker.exception, exception_position(chunk, parts, marker.exception), count != 0};
}

// A warp: applies the exceptions of a marked tile, whose first lane is `first`. If one of these lanes has another change, the
// decoder of the tile reports it. If the list is damaged, `except` reports it.
template <int W> __device__ __noinline__ void except_tile(u32 first) {
    typedef typename WideOf<W>::type T;
    const Chunk& chunk = shared_memory().chunk;
    const Parts& parts = shared_memory().parts;
    Tile& tile = tile_of_warp();
    u32 lanes = shared_address(tile.lanes), begin = tile.exceptions_begin, end = begin + tile.exceptions;
    for (u32 i = begin + threadIdx.x % WARP; i < end; i += WARP) {
        u32 at = exception_position(chunk, parts, i) - first;
        if (at >= TileShape<W>::LANES) continue; // the list does not ascend
        T base = shared_lane<W>(lanes + W * at), delta = exception_delta<W>(chunk, parts, i);
        set_shared_lane<W>(lanes + W * at, apply_delta<W>(base, delta, (T)shared_memory().classes.order.magnitude));
    }
}

// Returns whether a lane of a marked tile has an exception.
__device__ __forceinline__ bool is_excepted(const Tile& tile, u32 lane) {
    return tile.excepted[lane / 32] >> lane % 32 & 1;
}
