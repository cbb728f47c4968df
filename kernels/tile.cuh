// A tile: 1 or 2 KiB of base lanes that one warp loads, and the places of those that are coded.
#pragma once
#include "payload.cuh"
#include "pieces.cuh"
#include "tables.cuh"

#define TILE_BYTES 2048
#define TILE_LANES 1024

// In shared memory, one a warp.
struct alignas(16) Tile {
    u8 lanes[TILE_BYTES];
    u16 queue[TILE_LANES];  // places in the tile of its coded lanes
    u32 masks[TILE_LANES / 32];
    u32 excepted[TILE_LANES / 32]; // of the warp that decodes
    u32 count;
    u32 activities; // of its blocks of lanes, as activities_of_tile() gives them
    u32 padding[2];
};

__device__ __forceinline__ Range segment_range(const Chunk& chunk, u32 segments, u32 segment) {
    u32 blocks = (chunk.lanes + BLOCK_LANES - 1) / BLOCK_LANES;
    u32 end = (segment + 1) * blocks / segments * BLOCK_LANES;
    return {segment * blocks / segments * BLOCK_LANES, min(end, chunk.lanes)};
}

// The pieces of a tile from shared memory, and back.
template <int W> __device__ __forceinline__ void read_tile(const Tile& tile, uint4* pieces) {
    typedef TileShape<W> Shape;
    const u8* from = tile.lanes + threadIdx.x % WARP * Shape::UNIT * W;
#pragma unroll
    for (int p = 0; p < Shape::PIECES; p++) pieces[p] = *(const uint4*)(from + Shape::lane_of(p) * W);
}

template <int W> __device__ __forceinline__ void write_tile(Tile& tile, const uint4* pieces) {
    typedef TileShape<W> Shape;
    u8* to = tile.lanes + threadIdx.x % WARP * Shape::UNIT * W;
#pragma unroll
    for (int p = 0; p < Shape::PIECES; p++) *(uint4*)(to + Shape::lane_of(p) * W) = pieces[p];
}

// What a payload's maps make of a base lane: where its class is looked up.
struct Classes {
    i32 first;
    Order order;
    bool by_threshold; // see Parts::thresholds
    bool holes;
};

// The entry of the maps at shared address `maps`.
template <int W> __device__ __forceinline__ u32 class_of(u32 maps, const Classes& classes, u32 activity, typename WideOf<W>::type base) {
    i32 index = min(max(context_of<W>(base, classes.order) - classes.first, 0), MAP - 1);
    return shared_u32(maps + 4 * (activity * MAP + index));
}

// Lanes of 16 bytes whose magnitude is below `threshold`, by their order-preserving bits alone; for F64 it is the high word's.
template <int W> __device__ __forceinline__ u32 lanes_below(u32 threshold, uint4 piece) {
    if constexpr (W <= 2) {
        // The top bit of each lane says that it is below; nothing is borrowed from one lane by the next.
        constexpr u32 ones = W == 1 ? 0x01010101 : 0x10001, magnitude = W == 1 ? 0x7F7F7F7F : 0x7FFF7FFF;
        u32 from = (threshold + (W == 1 ? 0x7F : 0x7FFF)) * ones;
        u32 a = from - (piece.x & magnitude), b = from - (piece.y & magnitude);
        u32 c = from - (piece.z & magnitude), d = from - (piece.w & magnitude);
        if constexpr (W == 1) {
            u32 low = __dp4a(a >> 7 & ones, 0x08040201u, 0u) | __dp4a(b >> 7 & ones, 0x80402010u, 0u);
            u32 high = __dp4a(c >> 7 & ones, 0x08040201u, 0u) | __dp4a(d >> 7 & ones, 0x80402010u, 0u);
            return low | high << 8;
        } else {
            // Bytes of all bits or none: the permutation repeats the top bits of the bytes 1, 3, 5 and 7.
            u32 low = permute_bytes(a, b, 0xFDB9), high = permute_bytes(c, d, 0xFDB9);
            return __dp4a((low & 0x08040201) | (high & 0x80402010), 0x01010101u, 0u);
        }
    } else if constexpr (W == 4) {
        return (u32)((piece.x & 0x7FFFFFFF) < threshold) | (u32)((piece.y & 0x7FFFFFFF) < threshold) << 1 |
               (u32)((piece.z & 0x7FFFFFFF) < threshold) << 2 | (u32)((piece.w & 0x7FFFFFFF) < threshold) << 3;
    } else {
        return (u32)((piece.y & 0x7FFFFFFF) < threshold) | (u32)((piece.w & 0x7FFFFFFF) < threshold) << 1;
    }
}

// A warp: the masks of coded lanes of a tile on the fast path.
template <int W>
__device__ __forceinline__ void mark_tile(const Parts& parts, const Classes& classes, u32 maps, u32 activities, const uint4* pieces, Tile& tile) {
    typedef TileShape<W> Shape;
    u32 thread = threadIdx.x % WARP, bits = parts.activity_bits, threshold = parts.thresholds[0];
#pragma unroll
    for (int n = 0; n < Shape::UNITS; n++) {
        u32 mask = 0;
        if (bits) {
            threshold = parts.thresholds[activities >> ((32 * n + thread) * Shape::UNIT / BLOCK_LANES * bits) & ((1u << bits) - 1)];
        }
#pragma unroll
        for (int i = 0; i < Shape::PER_UNIT; i++) mask |= lanes_below<W>(threshold, pieces[n * Shape::PER_UNIT + i]) << (i * Shape::PIECE);
        if (Shape::UNIT == 16) {
            ((u16*)tile.masks)[32 * n + thread] = (u16)mask;
        } else {
            ((u8*)tile.masks)[32 * n + thread] = (u8)mask;
        }
    }
    __syncwarp();
    if (classes.holes && thread < Shape::LANES / 32) {
        u32 mask = tile.masks[thread], activity = activities >> (thread / 4 * bits) & ((1u << bits) - 1);
        for (u32 rest = mask; rest; rest &= rest - 1) {
            u32 place = 32 * thread + __ffs((i32)rest) - 1;
            u32 entry = class_of<W>(maps, classes, activity, shared_lane<W>(shared_address(tile.lanes) + place * W));
            if (entry == CLASS_NONE) mask ^= rest & (0u - rest);
        }
        tile.masks[thread] = mask;
    }
}

// A warp: the lanes of any tile, their masks, and the part of the base's sum of each thread. Lanes outside the segment and the base
// are zeros and not coded.
template <int W>
__device__ __noinline__ u64 gather_tile(
    const Chunk& chunk, const Parts& parts, const Classes& classes, u32 maps, Range range, u32 number, u32 activities, bool copy, Tile& tile) {
    typedef typename WideOf<W>::type T;
    u32 thread = threadIdx.x % WARP, bits = parts.activity_bits;
    u64 sum = 0;
#pragma unroll 1
    for (u32 i = 0; i < TileShape<W>::LANES / 32; i++) {
        u32 place = 32 * i + thread, at = number * TileShape<W>::LANES + place;
        bool inside = at >= range.first && at < range.end;
        T lane = inside ? load_lane<W>(chunk, at) : 0;
        if (inside && copy) store_lane<W>(chunk, at, lane);
        sum += lane_term<W>(at, 0, lane);
        set_shared_lane<W>(shared_address(tile.lanes) + place * W, lane);
        u32 activity = activities >> (i / 4 * bits) & ((1u << bits) - 1);
        u32 mask = __ballot_sync(ALL_LANES, inside && class_of<W>(maps, classes, activity, lane) != CLASS_NONE);
        if (thread == 0) tile.masks[i] = mask;
    }
    __syncwarp();
    return sum;
}

// A warp: what the target's sum has more than the base's; and if `stored`, the lanes of any tile to the output, all of them or those
// that change.
template <int W> __device__ __noinline__ u64 scatter_tile(const Chunk& chunk, Range range, u32 number, bool stored, bool all, const Tile& tile) {
    typedef typename WideOf<W>::type T;
    u64 sum = 0;
#pragma unroll 1
    for (u32 place = threadIdx.x % WARP; place < TileShape<W>::LANES; place += WARP) {
        u32 at = number * TileShape<W>::LANES + place;
        if (at < range.first || at >= range.end) continue;
        T lane = shared_lane<W>(shared_address(tile.lanes) + place * W), base = load_lane<W>(chunk, at);
        if (lane != base) sum += lane_term<W>(at, base, lane);
        if (stored && (all || lane != base)) store_lane<W>(chunk, at, lane);
    }
    __syncwarp();
    return sum;
}

// A warp: the queue, from the masks. Begins and ends with the warp in step.
template <int W> __device__ __forceinline__ void queue_tile(Tile& tile, u32 activities) {
    typedef TileShape<W> Shape;
    u32 thread = threadIdx.x % WARP;
    __syncwarp();
    u32 mask = thread < Shape::LANES / 32 ? tile.masks[thread] : 0;
    u32 end = __popc(mask);
#pragma unroll
    for (u32 by = 1; by < WARP; by *= 2) {
        u32 other = __shfl_up_sync(ALL_LANES, end, by);
        if (thread >= by) end += other;
    }
    u32 count = __shfl_sync(ALL_LANES, end, WARP - 1), rank = end - __popc(mask);
    if (count < Shape::LANES / 4) {
        u32 to = shared_address(tile.queue) + 2 * rank;
        for (; mask; mask &= mask - 1, to += 2) set_shared_lane<2>(to, 32 * thread + __ffs((i32)mask) - 1);
    } else {
        u32 before = (1u << thread) - 1, to = shared_address(tile.queue);
#pragma unroll 4
        for (u32 i = 0; i < Shape::LANES / 32; i++) {
            u32 word = __shfl_sync(ALL_LANES, mask, i), begin = __shfl_sync(ALL_LANES, rank, i);
            if (word >> thread & 1) set_shared_lane<2>(to + 2 * (begin + __popc(word & before)), 32 * i + thread);
        }
    }
    if (thread == 0) {
        tile.count = count;
        tile.activities = activities;
    }
    __syncwarp();
}
