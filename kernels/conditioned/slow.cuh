// The general path: decodes a tile lane by lane, for any dtype. It covers the end of the base, unaligned memory,
// integers, and low bits in tiles where not all lanes are coded (spec/codecs.md sections 4.4 to 4.6).
#pragma once
#include "conditioned/ring.cuh"

// State that passes from tile to tile. It is passed by value, so the caller keeps it in registers.
struct Slow {
    Stream stream;
    u64 base, target; // added to the sums
    u32 changed, errors;
};

// Returns the mask of the high part of a delta: 8·W - low_bits ones.
template <int W> __device__ __forceinline__ typename WideOf<W>::type high_mask(u32 low_bits) {
    typedef typename WideOf<W>::type T;
    return low_bits == 8 * W ? 0 : ((T)1 << (8 * W - low_bits) % (8 * sizeof(T))) - 1;
}

// Returns the delta of a coded lane, with zero low bits.
template <int W>
__device__ __forceinline__ typename WideOf<W>::type high_bits(typename WideOf<W>::type value,
                                                              typename WideOf<W>::type mask) {
    typedef typename WideOf<W>::type T;
    return (((T)shared_memory().parts.center - value) & mask) << shared_memory().parts.low_bits % (8 * sizeof(T));
}

// A warp: loads the lanes of a tile and their coded masks. Returns each thread's part of the base sum. Lanes outside
// the base are zero; lanes outside the chunk are zero and not coded.
template <int W> __device__ __forceinline__ u64 gather_tile(u32 number, Tile& tile) {
    typedef typename WideOf<W>::type T;
    Shared& shared = shared_memory();
    const Chunk& chunk = shared.chunk;
    u64 sum = 0;
#pragma unroll 1
    for (u32 i = 0; i < TileShape<W>::LANES / 32; i++) {
        u32 tile_lane = 32 * i + threadIdx.x % WARP, at = number * TileShape<W>::LANES + tile_lane;
        bool inside = at < chunk.lanes;
        T lane = inside ? load_lane<W>(chunk, at) : 0;
        sum += lane_term<W>(at, 0, lane);
        set_shared_lane<W>(shared_address(tile.lanes) + tile_lane * W, lane);
        Entry entry = class_of<W>(activity_of(chunk, shared.parts, min(at, chunk.lanes - 1)), lane);
        u32 mask = __ballot_sync(ALL_LANES, inside && entry.x != shared.classes.none.x);
        if (threadIdx.x % WARP == 0) tile.masks[i] = mask;
    }
    __syncwarp();
    return sum;
}

// A warp: decodes a tile. `marked`: some lanes have exceptions. `receives`: the warp receives the stream before the first
// step. `hands_over`: the warp hands the stream over after the last step.
template <int W>
__device__ __noinline__ Slow decode_slowly(Slow slow, u32 number, bool marked, u32 store, Ring ring, bool receives,
                                           bool hands_over) {
    typedef typename WideOf<W>::type T;
    typedef TileShape<W> Shape;
    Shared& shared = shared_memory();
    const Chunk& chunk = shared.chunk;
    const Parts& parts = shared.parts;
    Tile& tile = tile_of_warp();
    u32 thread = threadIdx.x % WARP, before = (1u << thread) - 1, low_bits = parts.low_bits,
        states = uniform(parts.states);
    T magnitude = (T)shared.classes.order.magnitude;
    u32 first = number * Shape::LANES, lanes = shared_address(tile.lanes), queue = shared_address(tile.queue);
    slow.base += gather_tile<W>(number, tile);
    u32 mask = thread < Shape::LANES / 32 ? tile.masks[thread] : 0;
    u32 activities =
        activities_of_tile(chunk.payload + parts.activities_at, parts.activity_bits, number, Shape::BLOCKS);
    u32 count = uniform(queue_rows<W>(mask, activity_of_row(parts.activity_bits, activities, thread), thread, tile));
    if (receives) receive_stream(ring, thread, slow.stream);
    // Changes a lane of the tile. The same lane must not have an exception.
    auto change = [&](u32 tile_lane, T base, T moved) {
        set_shared_lane<W>(lanes + tile_lane * W, move_lane<W>(base, moved, magnitude));
        if (marked && moved != 0 && is_excepted(tile, tile_lane)) slow.errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
    };
    DirectWords words;
#pragma unroll 1
    for (u32 done = 0; done < count; done += states) {
        u32 queued = thread < states ? shared_u16(queue + 2 * (done + thread)) : NO_ENTRY,
            offset = queued % (1u << QUEUE_MAP);
        bool is_lane = offset != TILE_BYTES;
        T base = shared_lane<W>(lanes + offset);
        Entry entry = is_lane ? class_of<W>(queued >> QUEUE_MAP, base) : shared.classes.none;
        T moved = decode_step<W, READS_EXTRA>(slow.stream, words, entry, before, low_bits != 0);
        if (low_bits != 0 && is_lane) {
            moved = difference_of<W>(high_bits<W>(moved, high_mask<W>(low_bits)) |
                                     low_bits_of<W>(chunk, parts, first + offset / W));
        }
        if (is_lane) change(offset / W, base, moved);
    }
    if (hands_over) hand_over_stream(ring, thread, slow.stream);
    if (low_bits != 0) {
#pragma unroll 1
        for (u32 i = 0; i < Shape::LANES / 32; i++) {
            u32 tile_lane = 32 * i + thread, at = first + tile_lane;
            if (at < chunk.lanes && !(tile.masks[i] >> thread & 1))
                change(tile_lane, shared_lane<W>(lanes + tile_lane * W),
                       difference_of<W>(low_bits_of<W>(chunk, parts, at)));
        }
    }
    __syncwarp();
    if (marked && stores_tiles(store)) {
        except_tile<W>(first);
        __syncwarp();
    }
#pragma unroll 1
    for (u32 i = 0; i < Shape::LANES / 32; i++) {
        u32 tile_lane = 32 * i + thread, at = first + tile_lane;
        bool inside = at < chunk.lanes;
        T lane = shared_lane<W>(lanes + tile_lane * W), base = inside ? load_lane<W>(chunk, at) : 0;
        bool changed = inside && lane != base;
        if (changed) {
            slow.changed++;
            slow.target += lane_term<W>(at, base, lane);
        }
        if (store == STORE_LIST) {
            list_changes<W>(shared, thread, before, changed, at * W, lane);
        } else if (inside && store != STORE_NONE && (changed || store != STORE_CHANGES)) {
            if (store == STORE_AND_KEEP) shared.kept_lane<W>(at) = (typename LaneOf<W>::type)base;
            store_lane<W>(chunk, at, lane);
        }
    }
    __syncwarp();
    return slow;
}
