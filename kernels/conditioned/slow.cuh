// A tile lane by lane, whatever its lanes are: where the base ends, memory is not aligned, for integers, and where low bits are stored
// for lanes that are not all coded (spec/codecs.md sections 4.4 to 4.6).
#pragma once
#include "conditioned/ring.cuh"

// What goes on from tile to tile. By value, so that it can stay in registers everywhere else.
struct Slow {
    Stream stream;
    u64 base, target; // added to the sums
    u32 changed, errors;
};

// The bits that a value has with low bits, all of them low ones.
template <int W> __device__ __forceinline__ typename WideOf<W>::type high_mask(u32 low_bits) {
    typedef typename WideOf<W>::type T;
    return low_bits == 8 * W ? 0 : ((T)1 << (8 * W - low_bits) % (8 * sizeof(T))) - 1;
}

// The delta of a coded lane with low bits, without them.
template <int W> __device__ __forceinline__ typename WideOf<W>::type high_bits(typename WideOf<W>::type value, typename WideOf<W>::type mask) {
    typedef typename WideOf<W>::type T;
    return (((T)shared_memory().parts.center - value) & mask) << shared_memory().parts.low_bits % (8 * sizeof(T));
}

// A warp: the lanes of a tile, their masks, and the part of the base's sum of each thread. Lanes outside the chunk and the base are
// zeros, and those outside the chunk not coded.
template <int W> __device__ __forceinline__ u64 gather_tile(u32 number, Tile& tile) {
    typedef typename WideOf<W>::type T;
    Shared& shared = shared_memory();
    const Chunk& chunk = shared.chunk;
    u64 sum = 0;
#pragma unroll 1
    for (u32 i = 0; i < TileShape<W>::LANES / 32; i++) {
        u32 place = 32 * i + threadIdx.x % WARP, at = number * TileShape<W>::LANES + place;
        bool inside = at < chunk.lanes;
        T lane = inside ? load_lane<W>(chunk, at) : 0;
        sum += lane_term<W>(at, 0, lane);
        set_shared_lane<W>(shared_address(tile.lanes) + place * W, lane);
        Entry entry = class_of<W>(activity_of(chunk, shared.parts, min(at, chunk.lanes - 1)), lane);
        u32 mask = __ballot_sync(ALL_LANES, inside && entry.x != shared.classes.none.x);
        if (threadIdx.x % WARP == 0) tile.masks[i] = mask;
    }
    __syncwarp();
    return sum;
}

// A warp. `marked`: some lanes of the tile are excepted. The stream is taken before the first step and passed on after the last one.
template <int W> __device__ __noinline__ Slow decode_slowly(Slow slow, u32 number, bool marked, u32 store, Ring ring, bool takes, bool passes) {
    typedef typename WideOf<W>::type T;
    typedef TileShape<W> Shape;
    Shared& shared = shared_memory();
    const Chunk& chunk = shared.chunk;
    const Parts& parts = shared.parts;
    Tile& tile = tile_of_warp();
    u32 thread = threadIdx.x % WARP, before = (1u << thread) - 1, low_bits = parts.low_bits, states = uniform(parts.states);
    T magnitude = (T)shared.classes.order.magnitude;
    u32 first = number * Shape::LANES, lanes = shared_address(tile.lanes), queue = shared_address(tile.queue);
    slow.base += gather_tile<W>(number, tile);
    u32 mask = thread < Shape::LANES / 32 ? tile.masks[thread] : 0;
    u32 activities = activities_of_tile(chunk.payload + parts.activities_at, parts.activity_bits, number, Shape::BLOCKS);
    u32 count = uniform(queue_rows<W>(mask, activity_of_row(parts.activity_bits, activities, thread), thread, tile));
    if (takes) take_turn(ring, thread, slow.stream);
    DirectWords words;
#pragma unroll 1
    for (u32 done = 0; done < count; done += states) {
        u32 queued = thread < states ? shared_u16(queue + 2 * (done + thread)) : NO_ENTRY, place = queued % (1u << QUEUE_MAP);
        bool is_lane = place != TILE_BYTES;
        T base = shared_lane<W>(lanes + place);
        Entry entry = is_lane ? class_of<W>(queued >> QUEUE_MAP, base) : shared.classes.none;
        T moved = decode_step<W, READS_EXTRA>(slow.stream, words, entry, before, low_bits != 0);
        if (low_bits != 0 && is_lane) {
            moved = difference_of<W>(high_bits<W>(moved, high_mask<W>(low_bits)) | low_bits_of<W>(chunk, parts, first + place / W));
        }
        if (is_lane) set_shared_lane<W>(lanes + place, move_lane<W>(base, moved, magnitude));
    }
    if (passes) pass_turn(ring, thread, slow.stream);
    __syncwarp();
#pragma unroll 1
    for (u32 i = 0; i < Shape::LANES / 32; i++) {
        u32 place = 32 * i + thread, at = first + place;
        bool inside = at < chunk.lanes, coded = tile.masks[place / 32] >> place % 32 & 1;
        T lane = shared_lane<W>(lanes + place * W), base = inside ? load_lane<W>(chunk, at) : 0;
        if (inside && !coded && low_bits != 0) lane = move_lane<W>(base, difference_of<W>(low_bits_of<W>(chunk, parts, at)), magnitude);
        bool changed = inside && lane != base;
        if (changed) {
            slow.changed++;
            slow.target += lane_term<W>(at, base, lane);
            // Where a lane is not coded `except` sees to it.
            if (marked && coded && is_excepted(tile, place)) slow.errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
        }
        if (store == STORE_LIST) {
            list_changes<W>(shared, thread, before, changed, at * W, lane);
        } else if (inside && (store == STORE_ALL || (changed && store == STORE_CHANGES))) {
            store_lane<W>(chunk, at, lane);
        }
    }
    __syncwarp();
    return slow;
}
