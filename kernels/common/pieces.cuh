// Base lanes by pieces of 16 bytes: what a warp loads, stores and sums at once.
#pragma once
#include "common/block.cuh"

#define BLOCK_LANES 128

// What a tile of lanes of W bytes is made of (spec/codecs.md section 4.4). A thread has UNITS units, 32 units apart; unit n of thread
// t begins at lane (32·n + t)·UNIT. Units never straddle a block of lanes; tiles never straddle a row of the chunk sums.
template <int W> struct TileShape {
    static constexpr int UNIT = W == 1 ? 16 : 8;
    static constexpr int UNITS = W == 1 ? 2 : 8 / W;
    static constexpr int LANES = 32 * UNIT * UNITS;
    static constexpr int PIECE = 16 / W;                // lanes of 16 bytes
    static constexpr int PIECES = UNIT / PIECE * UNITS; // of a thread
    static constexpr int WORDS = LANES * W / 4;
    static constexpr int PER_UNIT = UNIT / PIECE;
    static constexpr int BLOCKS = LANES / BLOCK_LANES;
    // Where piece p of a thread begins, from where the thread's first unit does.
    static __device__ constexpr int lane_of(int piece) { return 32 * UNIT * (piece / PER_UNIT) + piece % PER_UNIT * PIECE; }
};

// The tiles of a chunk that lie in the chunk and its base as a whole, at multiples of 16: nearly all of them, and the first ones.
// Others go lane by lane, and touch the same sectors of memory.
template <int W> __device__ __forceinline__ u32 whole_tiles(const Chunk& chunk) {
    return ((u64)chunk.base | (u64)chunk.output) % 16 == 0 ? min(chunk.base_lanes, chunk.lanes) / TileShape<W>::LANES : 0;
}

// Base lanes of a whole tile.
template <int W> __device__ __forceinline__ void load_tile(const Chunk& chunk, u32 number, u32 thread, uint4* pieces) {
    typedef TileShape<W> Shape;
    const u8* from = chunk.base + (u64)(number * Shape::LANES + thread * Shape::UNIT) * W;
#pragma unroll
    for (int p = 0; p < Shape::PIECES; p++) pieces[p] = load_once(from + Shape::lane_of(p) * W);
}

template <int W> __device__ __forceinline__ void store_tile(const Chunk& chunk, u32 number, u32 thread, const uint4* pieces) {
    typedef TileShape<W> Shape;
    u8* to = chunk.output + (u64)(number * Shape::LANES + thread * Shape::UNIT) * W;
#pragma unroll
    for (int p = 0; p < Shape::PIECES; p++) __stcs((uint4*)(to + Shape::lane_of(p) * W), pieces[p]);
}

// The part of the sum that a thread's pieces of a tile are, without the weight of the row; those of its words are at `q`.
template <int W> __device__ __forceinline__ u64 tile_sum(const u32* q, u32 number, u32 thread, const uint4* pieces) {
    typedef TileShape<W> Shape;
    u32 word = number * Shape::WORDS;
    const u32* weights = &q[word % TPDE_ROW_WORDS + thread * (Shape::UNIT * W / 4)];
    u64 sum = 0;
#pragma unroll
    for (int p = 0; p < Shape::PIECES; p++) {
        uint4 of = *(const uint4*)(weights + Shape::lane_of(p) * W / 4);
        sum += (u64)pieces[p].x * of.x + (u64)pieces[p].y * of.y;
        sum += (u64)pieces[p].z * of.z + (u64)pieces[p].w * of.w;
    }
    return sum;
}

// A chunk in which nothing changes, or what becomes of it before it does: the base to the output if `stored`, and to the sum of each
// thread. In place no lane may be stored before all have been read.
template <int W, int THREADS> __device__ __forceinline__ u64 copy_chunk(const Chunk& chunk, bool stored) {
    typedef TileShape<W> Shape;
    u32 whole = whole_tiles<W>(chunk), thread = threadIdx.x % WARP;
    u64 sum = 0;
    for (u32 number = threadIdx.x / WARP; number * Shape::LANES < chunk.lanes; number += THREADS / WARP) {
        if (number < whole) {
            uint4 pieces[Shape::PIECES];
            load_tile<W>(chunk, number, thread, pieces);
            if (stored) store_tile<W>(chunk, number, thread, pieces);
            sum += row_weight(number * Shape::WORDS) * tile_sum<W>(WEIGHTS.q, number, thread, pieces);
        } else {
            u32 first = number * Shape::LANES;
            for (u32 at = first + thread; at < min(first + Shape::LANES, chunk.lanes); at += WARP) {
                typename WideOf<W>::type lane = load_lane<W>(chunk, at);
                sum += lane_term<W>(at, 0, lane);
                if (stored) store_lane<W>(chunk, at, lane);
            }
        }
    }
    return sum;
}
