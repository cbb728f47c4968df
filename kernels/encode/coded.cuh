// The coded lanes of a chunk and its exceptions (spec/codecs.md section 4.4).
#pragma once
#include "encode/lanes.cuh"

#define MAPS 4

// The maps of a chunk, in shared memory.
struct CodedShared {
    u8 classes[MAPS][MAP_ENTRIES];
};

// Assignment of classes to base lanes.
struct Classes {
    Order order;
    u32 first, activity_bits;
    const u16* levels;
    const CodedShared& shared;

    // Returns the map of a block.
    __device__ __forceinline__ const u8* map_of(u32 block) const {
        u32 level = activity_bits == 0 ? 0 : levels[block];
        return shared.classes[activity_bits == 1 ? min(level, 1) : level];
    }
    template <int W> __device__ __forceinline__ u32 class_of(const u8* map, typename WideOf<W>::type base) const {
        u32 index = context_index<W>(base, order, first);
        return index < MAP_ENTRIES ? map[index] : 0;
    }
};

// All threads: copies the maps to shared memory. Ends with a barrier.
template <u32 COUNT>
__device__ __forceinline__ Classes open_classes(const EncodeChunk& chunk, const EncodeState& state,
                                                CodedShared& shared) {
    for (u32 i = threadIdx.x; i < MAPS * MAP_ENTRIES; i += COUNT)
        shared.classes[i / MAP_ENTRIES][i % MAP_ENTRIES] = state.classes[i / MAP_ENTRIES][i % MAP_ENTRIES];
    __syncthreads();
    return {order_of(chunk.dtype), state.first_context, state.activity_bits, (const u16*)chunk.levels, shared};
}

// All threads: counts the coded lanes of each tile of a part, and turns masks of changed lanes into masks of exceptions.
template <int W>
__device__ __forceinline__ void count_part(const EncodeChunk& chunk, EncodeState& state, const EncodeTables& tables,
                                           u32 part, CodedShared& shared) {
    typedef typename WideOf<W>::type T;
    constexpr u32 TILE = tile_lanes<W>();
    Classes classes = open_classes<THREADS>(chunk, state, shared);
    Source base = base_of(chunk), target = target_of(chunk);
    Split split = {chunk.low_bits, state.center};
    u32 end = min((part + 1) * TPDE_ENCODE_PART, chunk.lanes), coded = 0, exceptions = 0;
    u8* masks = (u8*)chunk.masks;
    // A warp per tile.
    for (u32 tile = part * (TPDE_ENCODE_PART / TILE) + threadIdx.x / WARP; tile * TILE < end; tile += THREADS / WARP) {
        u32 in_tile = 0;
        for (u32 at = tile * TILE + threadIdx.x % WARP * OCTET; at < min((tile + 1) * TILE, end); at += WARP * OCTET) {
            T from[OCTET];
            load_octet<W>(base, at, from);
            u32 inside = chunk.lanes - at < OCTET ? (1u << (chunk.lanes - at)) - 1 : 0xFF;
            u32 valued = chunk.low_bits == 0 ? masks[at / OCTET] : inside, coded_mask = 0, exception_mask = 0;
            const u8* map = classes.map_of(at / BLOCK_LANES);
            u32 class_numbers[OCTET];
#pragma unroll
            for (int i = 0; i < OCTET; i++) {
                class_numbers[i] = classes.class_of<W>(map, from[i]);
                coded_mask |= (u32)(class_numbers[i] != 0) << i;
            }
            if (valued) {
                T to[OCTET];
                load_octet<W>(target, at, to);
#pragma unroll
                for (int i = 0; i < OCTET; i++) {
                    u32 token = token_of(split.value<W>(delta_of<W>(from[i], to[i], (T)classes.order.magnitude)));
                    bool missing = class_numbers[i] == 0 || tables.entries[class_numbers[i] << 8 | token] == 0;
                    exception_mask |= (u32)missing << i;
                }
                exception_mask &= valued;
            }
            in_tile += __popc(coded_mask & inside);
            exceptions += __popc(exception_mask);
            masks[at / OCTET] = (u8)exception_mask;
        }
        in_tile = __reduce_add_sync(ALL_LANES, in_tile);
        if (threadIdx.x % WARP == 0) ((u16*)chunk.tiles)[tile] = (u16)in_tile;
        coded += in_tile;
    }
    exceptions = __reduce_add_sync(ALL_LANES, exceptions);
    if (threadIdx.x % WARP == 0) {
        atomicAdd(&state.coded, coded);
        atomicAdd(&state.exceptions, exceptions);
    }
}
