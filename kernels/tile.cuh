// A tile: 1 or 2 KiB of base lanes that one warp loads, and the places of those that are coded.
#pragma once
#include "payload.cuh"
#include "tables.cuh"

// What a tile of lanes of W bytes is made of. A thread has UNITS units, 32 units apart; unit n of thread t begins at lane
// (32·n + t)·UNIT. Units never straddle a block of lanes, a segment, or a row of the chunk sums; nor do tiles straddle a row.
template <int W> struct TileShape {
    static constexpr int UNIT = W == 1 ? 16 : 8;
    static constexpr int UNITS = W == 1 ? 2 : 8 / W;
    static constexpr int LANES = 32 * UNIT * UNITS;
    static constexpr int PIECE = 16 / W;                // lanes of 16 bytes
    static constexpr int PIECES = UNIT / PIECE * UNITS; // of a thread
    // First lane of piece p of thread t.
    static __device__ __forceinline__ u32 lane_of(int piece, u32 thread) {
        constexpr int per_unit = UNIT / PIECE;
        return (32 * (piece / per_unit) + thread) * UNIT + piece % per_unit * PIECE;
    }
};

#define TILE_BYTES 2048
#define TILE_LANES 1024

// In shared memory, one a warp.
struct alignas(16) Tile {
    u8 lanes[TILE_BYTES];
    u16 queue[TILE_LANES];  // places in the tile of its coded lanes
    u32 masks[TILE_LANES / 32];
    u32 excepted[TILE_LANES / 32]; // of the warp that decodes
    u32 count, padding[3];
};

// Lanes of a segment, and the tiles that they lie in: tiles count from the chunk's first lane.
struct Range {
    u32 first, end;
};

__device__ __forceinline__ Range segment_range(const Chunk& chunk, u32 segments, u32 segment) {
    u32 blocks = (chunk.lanes + BLOCK_LANES - 1) / BLOCK_LANES;
    u32 end = (segment + 1) * blocks / segments * BLOCK_LANES;
    return {segment * blocks / segments * BLOCK_LANES, min(end, chunk.lanes)};
}

// Base lanes of tile `tile`, zeros outside the segment.
template <int W> __device__ __forceinline__ void load_tile(const Chunk& chunk, Range range, u32 tile, uint4* pieces) {
    typedef TileShape<W> Shape;
#pragma unroll
    for (int p = 0; p < Shape::PIECES; p++) {
        u32 at = tile * Shape::LANES + Shape::lane_of(p, threadIdx.x % WARP);
        pieces[p] = make_uint4(0, 0, 0, 0);
        if (at >= range.first && at < range.end) pieces[p] = load_piece<W>(chunk.base, at, chunk.base_lanes);
    }
}

template <int W> __device__ __forceinline__ void store_tile(const Chunk& chunk, Range range, u32 tile, const uint4* pieces) {
    typedef TileShape<W> Shape;
#pragma unroll
    for (int p = 0; p < Shape::PIECES; p++) {
        u32 at = tile * Shape::LANES + Shape::lane_of(p, threadIdx.x % WARP);
        if (at >= range.first && at < range.end) store_piece<W>(chunk.output, at, range.end, pieces[p]);
    }
}

template <int W> __device__ __forceinline__ u64 tile_sum(u32 tile, const uint4* pieces) {
    typedef TileShape<W> Shape;
    u64 sum = 0;
#pragma unroll
    for (int p = 0; p < Shape::PIECES; p++) {
        sum += sum_in_row((tile * Shape::LANES + Shape::lane_of(p, threadIdx.x % WARP)) * W / 4, pieces[p]);
    }
    return sum * row_weight(tile * (Shape::LANES * W / 4));
}

template <int W> __device__ __forceinline__ typename WideOf<W>::type lane_of_piece(uint4 piece, int k) {
    u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
    if constexpr (W == 8) {
        return words[2 * k] | (u64)words[2 * k + 1] << 32;
    } else {
        return words[k * W / 4] >> (k * W % 4 * 8) & (u32)((1ull << (8 * W)) - 1);
    }
}

// What a payload's maps make of a base lane: where its class is looked up.
struct Classes {
    const u32* maps; // shared: MAP entries for each activity
    i32 first;
    Order order;
    bool by_threshold; // see Parts::thresholds
};

template <int W> __device__ __forceinline__ u32 class_of(const Classes& classes, u32 activity, typename WideOf<W>::type base) {
    i32 index = min(max(context_of<W>(base, classes.order) - classes.first, 0), MAP - 1);
    return classes.maps[activity * MAP + index];
}

// Bits for the coded lanes of 16 bytes.
template <int W> __device__ __forceinline__ u32 coded_lanes(const Classes& classes, const Parts& parts, u32 activity, uint4 piece) {
    if (classes.by_threshold) {
        u32 threshold = parts.thresholds[activity];
        if constexpr (W == 2) {
            // The top bit of each half says that the magnitude is below the threshold; nothing is borrowed from one by the other.
            u32 from = (0x7FFF + threshold) * 0x10001;
            u32 a = from - (piece.x & 0x7FFF7FFF), b = from - (piece.y & 0x7FFF7FFF);
            u32 c = from - (piece.z & 0x7FFF7FFF), d = from - (piece.w & 0x7FFF7FFF);
            // Bytes of all bits or none: the permutation repeats the top bits of the bytes 1, 3, 5 and 7.
            u32 low, high;
            asm("prmt.b32 %0, %1, %2, 0xFDB9;" : "=r"(low) : "r"(a), "r"(b));
            asm("prmt.b32 %0, %1, %2, 0xFDB9;" : "=r"(high) : "r"(c), "r"(d));
            return __dp4a((low & 0x08040201) | (high & 0x80402010), 0x01010101u, 0u);
        }
        if constexpr (W == 4) {
            u32 mask = 0;
#pragma unroll
            for (int k = 0; k < 4; k++) mask |= (u32)((lane_of_piece<4>(piece, k) & 0x7FFFFFFF) < threshold) << k;
            return mask;
        }
    }
    u32 mask = 0;
#pragma unroll
    for (int k = 0; k < 16 / W; k++) mask |= (u32)(class_of<W>(classes, activity, lane_of_piece<W>(piece, k)) != CLASS_NONE) << k;
    return mask;
}

// A warp: the tile's masks of coded lanes, whose bits are as many as lanes before `range.end`, then the queue. Begins and ends
// with the warp in step.
template <int W>
__device__ __forceinline__ void fill_tile(
    const Chunk& chunk, const Parts& parts, const Classes& classes, Range range, u32 number, const uint4* pieces, Tile& tile) {
    typedef TileShape<W> Shape;
    constexpr int PER_UNIT = Shape::UNIT / Shape::PIECE;
    u32 thread = threadIdx.x % WARP;
#pragma unroll
    for (int p = 0; p < Shape::PIECES; p++) *(uint4*)&tile.lanes[Shape::lane_of(p, thread) * W] = pieces[p];
#pragma unroll
    for (int n = 0; n < Shape::UNITS; n++) {
        u32 place = Shape::lane_of(n * PER_UNIT, thread), at = number * Shape::LANES + place;
        u32 mask = 0;
        if (at >= range.first && at < range.end) {
            u32 activity = activity_of(chunk, parts, at);
#pragma unroll
            for (int i = 0; i < PER_UNIT; i++) {
                mask |= coded_lanes<W>(classes, parts, activity, pieces[n * PER_UNIT + i]) << (i * Shape::PIECE);
            }
            if (range.end - at < Shape::UNIT) mask &= (1u << (range.end - at)) - 1;
        }
        if (Shape::UNIT == 16) {
            ((u16*)tile.masks)[place / 16] = (u16)mask;
        } else {
            ((u8*)tile.masks)[place / 8] = (u8)mask;
        }
    }
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
        for (; mask; mask &= mask - 1) tile.queue[rank++] = (u16)(32 * thread + __ffs((i32)mask) - 1);
    } else {
        u32 before = (1u << thread) - 1;
#pragma unroll 4
        for (u32 i = 0; i < Shape::LANES / 32; i++) {
            u32 word = __shfl_sync(ALL_LANES, mask, i), begin = __shfl_sync(ALL_LANES, rank, i);
            if (word >> thread & 1) tile.queue[begin + __popc(word & before)] = (u16)(32 * i + thread);
        }
    }
    if (thread == 0) tile.count = count;
    __syncwarp();
}
