// The coded lanes of a chunk and its exceptions (spec/codecs.md section 4.4).
#pragma once
#include "encode/lanes.cuh"

#define MAPS 4

// The maps of a chunk, in shared memory. Contexts past the entries have class 0.
struct CodedShared {
    u16 entries[MAPS][MAP_ENTRIES + 4]; // class << 8 | number of its tokens before the first absent one; 0 for class 0
};

// Assignment of classes to base lanes.
struct Classes {
    Order order;
    u32 first, activity_bits;
    const u16* levels;
    const CodedShared& shared;

    // Returns the index of the map of a block.
    __device__ __forceinline__ u32 map_index(u32 block) const {
        u32 level = activity_bits == 0 ? 0 : levels[block];
        return activity_bits == 1 ? min(level, 1) : level;
    }
    // Returns the entry of a base lane in a map.
    template <int W> __device__ __forceinline__ u32 entry_of(u32 map, typename WideOf<W>::type base) const {
        return shared.entries[map][min(max(context_of<W>(base, order) - (i32)first, 0), MAP_ENTRIES)];
    }
};

// `count` threads, from thread `thread` on: copy the maps to shared memory. A barrier must follow.
__device__ __forceinline__ Classes open_classes(const EncodeChunk& chunk, const EncodeState& state,
                                                const EncodeTables& tables, CodedShared& shared, u32 thread,
                                                u32 count) {
    constexpr u32 ROW = MAP_ENTRIES + 4;
    for (u32 i = thread; i < MAPS * ROW; i += count) {
        u32 class_number = i % ROW < MAP_ENTRIES ? state.classes[i / ROW][i % ROW] : 0;
        shared.entries[i / ROW][i % ROW] = class_number ? (u16)(class_number << 8 | tables.present[class_number]) : 0;
    }
    return {order_of(chunk.dtype), state.first_context, state.activity_bits, (const u16*)chunk.levels, shared};
}

// Returns the mask of those of eight lanes that are in the chunk.
__device__ __forceinline__ u32 lanes_inside(const EncodeChunk& chunk, u32 at) {
    if (at >= chunk.lanes) return 0;
    return chunk.lanes - at < OCTET ? (1u << (chunk.lanes - at)) - 1 : 0xFF;
}

// A warp: returns whether a comparison with `thresholds`, one per map, tells which lanes are coded.
template <int W>
__device__ __forceinline__ bool find_thresholds(const Classes& classes, u32 thread, u32 (&thresholds)[MAPS]) {
    if (W == 8 || classes.order.kind != CONTEXT_EXPONENT) return false;
    bool holes = false;
#pragma unroll
    for (u32 m = 0; m < MAPS; m++) {
        const u16* map = classes.shared.entries[m];
        u32 low = __ballot_sync(ALL_LANES, map[thread] != 0), high = __ballot_sync(ALL_LANES, map[WARP + thread] != 0);
        u64 coded = low | (u64)high << 32;
        holes |= (coded & (coded + 1)) != 0;
        thresholds[m] = threshold_of(coded, classes.first, classes.order);
    }
    return !holes;
}

// Returns the mask of those of eight lanes whose magnitude is below `threshold`.
template <int W> __device__ __forceinline__ u32 octet_below(u32 threshold, const Packed<W>& packed) {
    const u32* words = packed.words;
    u32 mask = 0;
    if constexpr (W == 1) mask = lanes_below<W>(threshold, {words[0], words[1], 0, 0}) & 0xFF;
    if constexpr (W == 2) mask = lanes_below<W>(threshold, {words[0], words[1], words[2], words[3]});
    if constexpr (W == 4) {
        mask = lanes_below<W>(threshold, {words[0], words[1], words[2], words[3]}) |
               lanes_below<W>(threshold, {words[4], words[5], words[6], words[7]}) << 4;
    }
    return mask;
}

// A warp: returns the number of exceptions of a tile with low bits, in all threads together. All of its lanes have values.
template <int W>
__device__ __noinline__ u32 count_exceptions(const EncodeChunk& chunk, const Classes& classes,
                                             const EncodeTables& tables, Split split, u32 tile) {
    typedef typename WideOf<W>::type T;
    constexpr u32 TILE = tile_lanes<W>();
    Source base = base_of(chunk), target = target_of(chunk);
    u32 exceptions = 0;
#pragma unroll 1
    for (u32 i = threadIdx.x % WARP; i < TILE; i += WARP) {
        u32 at = tile * TILE + i;
        if (at >= chunk.lanes) break;
        T from = base.lane<W>(at);
        u32 entry = classes.entry_of<W>(classes.map_index(at / BLOCK_LANES), from);
        u32 token = token_of(split.value<W>(delta_of<W>(from, target.lane<W>(at), (T)classes.order.magnitude)));
        exceptions += entry == 0 || (token >= (entry & 0xFF) && tables.entries[(entry & 0xFF00) | token] == 0);
    }
    return exceptions;
}

// All threads: finds the coded lanes of a part, and counts those of each tile. Counts the exceptions too, if there are low
// bits: then it depends on them whether there are streams.
template <int W>
__device__ __forceinline__ void count_part(const EncodeChunk& chunk, EncodeState& state, const EncodeTables& tables,
                                           u32 part, CodedShared& shared) {
    typedef typename WideOf<W>::type T;
    constexpr u32 TILE = tile_lanes<W>(), ROUNDS = TILE / (WARP * OCTET);
    Classes classes = open_classes(chunk, state, tables, shared, threadIdx.x, THREADS);
    __syncthreads();
    u32 thread = threadIdx.x % WARP, thresholds[MAPS];
    bool by_threshold = find_thresholds<W>(classes, thread, thresholds);
    Source base = base_of(chunk);
    Split split = {chunk.low_bits, state.center};
    u32 end = min((part + 1) * TPDE_ENCODE_PART, chunk.lanes), coded = 0, exceptions = 0;
    u32 padded_end = blocks_of(chunk) * BLOCK_LANES;
    // A warp per tile.
    for (u32 tile = part * (TPDE_ENCODE_PART / TILE) + threadIdx.x / WARP; tile * TILE < end; tile += THREADS / WARP) {
        u32 in_tile = 0;
        // The loads of all rounds precede the first use.
        Packed<W> bases[ROUNDS];
#pragma unroll
        for (u32 round = 0; round < ROUNDS; round++)
            bases[round] = load_packed<W>(base, tile * TILE + (round * WARP + thread) * OCTET);
#pragma unroll
        for (u32 round = 0; round < ROUNDS; round++) {
            u32 at = tile * TILE + (round * WARP + thread) * OCTET, inside = lanes_inside(chunk, at), mask = 0;
            if (at >= padded_end) continue;
            u32 map = inside ? classes.map_index(at / BLOCK_LANES) : 0;
            if (by_threshold) {
                u32 threshold = map & 1   ? map & 2 ? thresholds[3] : thresholds[1]
                                  : map & 2 ? thresholds[2]
                                          : thresholds[0];
                mask = octet_below<W>(threshold, bases[round]);
            } else {
                T from[OCTET];
                unpack<W>(bases[round], from);
#pragma unroll
                for (int i = 0; i < OCTET; i++) mask |= (u32)(classes.entry_of<W>(map, from[i]) != 0) << i;
            }
            mask &= inside;
            ((u8*)chunk.coded)[at / OCTET] = (u8)mask;
            in_tile += __popc(mask);
        }
        if (chunk.low_bits != 0) exceptions += count_exceptions<W>(chunk, classes, tables, split, tile);
        in_tile = __reduce_add_sync(ALL_LANES, in_tile);
        if (thread == 0) ((u16*)chunk.tiles)[tile] = (u16)in_tile;
        coded += in_tile;
    }
    exceptions = __reduce_add_sync(ALL_LANES, exceptions);
    if (thread == 0) {
        atomicAdd(&state.coded, coded);
        if (exceptions != 0) atomicAdd(&state.exceptions, exceptions);
    }
}
