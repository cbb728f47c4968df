// The coded lanes of a chunk and its exceptions (spec/codecs.md section 4.4).
#pragma once
#include "encode/lanes.cuh"

#define MAPS 4

// The maps of a chunk, in shared memory. Contexts past the entries have class 0.
struct CodedShared {
    u8 classes[MAPS][MAP_ENTRIES + 4];
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
    // Sets the classes of eight base lanes, and returns a mask of the coded lanes.
    template <int W>
    __device__ __forceinline__ u32 classify(const u8* map, const typename WideOf<W>::type (&base)[OCTET],
                                            u32 (&class_numbers)[OCTET]) const {
        u32 coded = 0;
        auto set = [&](int i, i32 context) {
            class_numbers[i] = map[min(max(context - (i32)first, 0), MAP_ENTRIES)];
            coded |= (u32)(class_numbers[i] != 0) << i;
        };
        if (order.kind == CONTEXT_EXPONENT) {
#pragma unroll
            for (int i = 0; i < OCTET; i++) set(i, (i32)((u32)(base[i] >> order.shift) & order.mask));
        } else {
#pragma unroll
            for (int i = 0; i < OCTET; i++) set(i, context_of<W>(base[i], order));
        }
        return coded;
    }
};

// `count` threads, from thread `thread` on: copy the maps to shared memory. A barrier must follow.
__device__ __forceinline__ Classes open_classes(const EncodeChunk& chunk, const EncodeState& state, CodedShared& shared,
                                                u32 thread, u32 count) {
    constexpr u32 ROW = MAP_ENTRIES + 4;
    for (u32 i = thread; i < MAPS * ROW; i += count)
        shared.classes[i / ROW][i % ROW] = i % ROW < MAP_ENTRIES ? state.classes[i / ROW][i % ROW] : 0;
    return {order_of(chunk.dtype), state.first_context, state.activity_bits, (const u16*)chunk.levels, shared};
}

// Returns the mask of those of eight lanes that are in the chunk.
__device__ __forceinline__ u32 lanes_inside(const EncodeChunk& chunk, u32 at) {
    if (at >= chunk.lanes) return 0;
    return chunk.lanes - at < OCTET ? (1u << (chunk.lanes - at)) - 1 : 0xFF;
}

// All threads: counts the coded lanes of each tile of a part, and turns masks of changed lanes into masks of exceptions.
template <int W>
__device__ __forceinline__ void count_part(const EncodeChunk& chunk, EncodeState& state, const EncodeTables& tables,
                                           u32 part, CodedShared& shared) {
    typedef typename WideOf<W>::type T;
    constexpr u32 TILE = tile_lanes<W>();
    Classes classes = open_classes(chunk, state, shared, threadIdx.x, THREADS);
    __syncthreads();
    Source base = base_of(chunk), target = target_of(chunk);
    Split split = {chunk.low_bits, state.center};
    u32 end = min((part + 1) * TPDE_ENCODE_PART, chunk.lanes), coded = 0, exceptions = 0;
    u8* masks = (u8*)chunk.masks;
    // A warp per tile.
    for (u32 tile = part * (TPDE_ENCODE_PART / TILE) + threadIdx.x / WARP; tile * TILE < end; tile += THREADS / WARP) {
        u32 in_tile = 0;
#pragma unroll
        for (u32 round = 0; round < TILE / (WARP * OCTET); round++) {
            u32 at = tile * TILE + (round * WARP + threadIdx.x % WARP) * OCTET, inside = lanes_inside(chunk, at);
            u32 valued = 0, coded_mask = 0, exception_mask = 0;
            T from[OCTET] = {};
            u32 class_numbers[OCTET] = {};
            if (inside) {
                load_octet<W>(base, at, from);
                valued = chunk.low_bits == 0 ? masks[at / OCTET] : inside;
                coded_mask = classes.classify<W>(classes.map_of(at / BLOCK_LANES), from, class_numbers) & inside;
            }
            auto is_missing = [&](T from, T to, u32 class_number) {
                u32 token = token_of(split.value<W>(delta_of<W>(from, to, (T)classes.order.magnitude)));
                return class_number == 0 || tables.entries[class_number << 8 | token] == 0;
            };
            if (__reduce_max_sync(ALL_LANES, __popc(valued)) <= SPARSE) {
                for (u32 rest = valued; rest; rest &= rest - 1) {
                    u32 i = __ffs((i32)rest) - 1;
                    bool missing = is_missing(pick(from, i), target.lane<W>(at + i), pick(class_numbers, i));
                    exception_mask |= (u32)missing << i;
                }
            } else if (valued) {
                T to[OCTET];
                load_octet<W>(target, at, to);
#pragma unroll
                for (int i = 0; i < OCTET; i++)
                    exception_mask |= (u32)is_missing(from[i], to[i], class_numbers[i]) << i;
                exception_mask &= valued;
            }
            in_tile += __popc(coded_mask);
            exceptions += __popc(exception_mask);
            if (inside && (chunk.low_bits != 0 || valued != exception_mask)) masks[at / OCTET] = (u8)exception_mask;
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
