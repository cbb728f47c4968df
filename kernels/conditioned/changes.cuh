// What a warp does with the changes of its lanes (spec/codecs.md section 4.6).
#pragma once
#include "conditioned/stream.cuh"
#include "conditioned/shared.cuh"

// What becomes of target lanes.
enum : u32 {
    STORE_NONE = 0,
    STORE_ALL = 1,     // all lanes of the output
    STORE_CHANGES = 2, // in place
    STORE_LIST = 3,    // changes to a list that is carried out later
};

// A warp: adds the changes of some of its threads to those that wait for the checks of their chunk. What does not fit is counted, and
// lost.
template <int W>
__device__ __forceinline__ void list_changes(Shared& shared, u32 thread, u32 before, bool changed, u32 position, typename WideOf<W>::type lane) {
    u32 mask = __ballot_sync(ALL_LANES, changed);
    u32 first = first_adds_to_shared(thread, shared_address(&shared.listed), __popc(mask));
    u32 i = __shfl_sync(ALL_LANES, first, 0) + __popc(mask & before);
    List list = shared.list;
    if (changed && i < list.capacity) {
        list.position(i) = position;
        list.template lane<W>(i) = (typename LaneOf<W>::type)lane;
    }
}

// What a thread adds to the sums of the chunk.
struct Sums {
    u64 base, target;
    u32 changed, errors;
};

// Exceptions, which ascend, as a warp passes them.
struct Marker {
    u32 exception, next; // first one that is not before the tile, and its position
    bool marked;         // some lanes of the tile are excepted
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

// A warp: marks the lanes from `first` to `end`, those of a tile, that exceptions are for.
__device__ __noinline__ Marker mark_exceptions(Marker marker, const Chunk& chunk, const Parts& parts, u32 first, u32 end, u32* marks) {
    u32 thread = threadIdx.x % WARP, count, found = 0;
    marks[thread] = 0;
    __syncwarp();
    do {
        u32 position = exception_position(chunk, parts, marker.exception + thread);
        bool inside = position >= first && position < end;
        if (inside) atomicOr(&marks[(position - first) / 32], 1u << (position - first) % 32);
        found |= __ballot_sync(ALL_LANES, inside);
        count = __popc(__ballot_sync(ALL_LANES, position < end));
        marker.exception += count;
    } while (count == WARP);
    __syncwarp();
    return {marker.exception, exception_position(chunk, parts, marker.exception), found != 0};
}

// Whether an exception is for a lane of a marked tile.
__device__ __forceinline__ bool is_excepted(const Tile& tile, u32 place) { return tile.excepted[place / 32] >> place % 32 & 1; }
