// Base lanes in pieces of 16 bytes. A thread loads, stores and sums whole pieces.
#pragma once
#include "common/block.cuh"

#define BLOCK_LANES 128

// Shape of a tile of lanes of W bytes (spec/codecs.md section 4.4). Each thread has UNITS units of UNIT lanes. Unit n
// of thread t begins at lane (32·n + t)·UNIT. Units never straddle a block of lanes; tiles never straddle a row of the
// chunk sums.
template <int W> struct TileShape {
    static constexpr int UNIT = W == 1 ? 16 : 8;
    static constexpr int UNITS = W == 1 ? 2 : 8 / W;
    static constexpr int LANES = 32 * UNIT * UNITS;
    static constexpr int PIECE = 16 / W;                // lanes per piece of 16 bytes
    static constexpr int PIECES = UNIT / PIECE * UNITS; // pieces per thread
    static constexpr int WORDS = LANES * W / 4;
    static constexpr int PER_UNIT = UNIT / PIECE;
    static constexpr int BLOCKS = LANES / BLOCK_LANES;
    // Offset of a piece from the first unit of its thread, in lanes.
    static __device__ constexpr int lane_of(int piece) {
        return 32 * UNIT * (piece / PER_UNIT) + piece % PER_UNIT * PIECE;
    }
};

// Returns the number of leading tiles that are complete in both chunk and base, or 0 if base or output, or their
// rows, are not aligned to 16 bytes. The remaining tiles are processed lane by lane. That touches the same memory sectors.
template <int W> __device__ __forceinline__ u32 complete_tiles(const Chunk& chunk) {
#if FORMS_BASE
    bool whole = chunk.base.has_pieces<W>() && chunk.output.alignment() % 16 == 0;
    return whole ? chunk.lanes / TileShape<W>::LANES : 0;
#else
    return (chunk.base.alignment() | chunk.output.alignment()) % 16 == 0
               ? min(chunk.base_lanes, chunk.lanes) / TileShape<W>::LANES
               : 0;
#endif
}

#if FORMS_BASE
// Forms the base lanes of a complete tile, and calls `each` for each piece and its offset from the first unit of its thread.
template <int W, typename Each>
__device__ __forceinline__ void form_tile(const Chunk& chunk, u32 number, u32 thread, Each each) {
    typedef TileShape<W> Shape;
    u32 first = number * Shape::LANES + thread * Shape::UNIT;
#pragma unroll 2
    for (int p = 0; p < Shape::PIECES; p++) each(Shape::lane_of(p), chunk.base.piece<W>(first + Shape::lane_of(p)));
}
#else
// Loads the base lanes of a complete tile.
template <int W> __device__ __forceinline__ void load_tile(const Chunk& chunk, u32 number, u32 thread, uint4* pieces) {
    typedef TileShape<W> Shape;
    Bytes from = chunk.base.skip((u64)(number * Shape::LANES + thread * Shape::UNIT) * W);
#pragma unroll
    for (int p = 0; p < Shape::PIECES; p++) pieces[p] = load_once(from.byte(Shape::lane_of(p) * W));
}
#endif

template <int W>
__device__ __forceinline__ void store_tile(const Chunk& chunk, u32 number, u32 thread, const uint4* pieces) {
    typedef TileShape<W> Shape;
    Bytes to = chunk.output.skip((u64)(number * Shape::LANES + thread * Shape::UNIT) * W);
#pragma unroll
    for (int p = 0; p < Shape::PIECES; p++) __stcs((uint4*)to.byte(Shape::lane_of(p) * W), pieces[p]);
}

// Returns the contribution of a thread's pieces to the chunk sum, before multiplication by the row weight. `q` points to
// the word weights of the row.
template <int W> __device__ __forceinline__ u64 tile_sum(const u32* q, u32 number, u32 thread, const uint4* pieces) {
    typedef TileShape<W> Shape;
    u32 word = number * Shape::WORDS;
    const u32* weights = &q[word % TPDE_ROW_WORDS + thread * (Shape::UNIT * W / 4)];
    u64 sum = 0;
#pragma unroll
    for (int p = 0; p < Shape::PIECES; p++) {
        uint4 weight = *(const uint4*)(weights + Shape::lane_of(p) * W / 4);
        sum += (u64)pieces[p].x * weight.x + (u64)pieces[p].y * weight.y;
        sum += (u64)pieces[p].z * weight.z + (u64)pieces[p].w * weight.w;
    }
    return sum;
}

// Sums the base lanes before any change is applied, and copies them to the output if `stored`. Returns each thread's
// part of the sum. In place, the copy leaves the base lanes unchanged and clears the lanes past them.
template <int W, int THREADS> __device__ __forceinline__ u64 copy_chunk(const Chunk& chunk, bool stored) {
    typedef TileShape<W> Shape;
    u32 complete = complete_tiles<W>(chunk), thread = threadIdx.x % WARP;
    u64 sum = 0;
    for (u32 number = threadIdx.x / WARP; number * Shape::LANES < chunk.lanes; number += THREADS / WARP) {
        if (number < complete) {
#if FORMS_BASE
            u32 first = thread * Shape::UNIT, word = number * Shape::WORDS % TPDE_ROW_WORDS;
            u64 part = 0;
            form_tile<W>(chunk, number, thread, [&](u32 by, uint4 piece) {
                uint4 weight = *(const uint4*)&WEIGHTS.q[word + (first + by) * W / 4];
                part += (u64)piece.x * weight.x + (u64)piece.y * weight.y;
                part += (u64)piece.z * weight.z + (u64)piece.w * weight.w;
                if (stored) __stcs((uint4*)chunk.output.byte((number * Shape::LANES + first + by) * W), piece);
            });
            sum += row_weight(number * Shape::WORDS) * part;
#else
            uint4 pieces[Shape::PIECES];
            load_tile<W>(chunk, number, thread, pieces);
            if (stored) store_tile<W>(chunk, number, thread, pieces);
            sum += row_weight(number * Shape::WORDS) * tile_sum<W>(WEIGHTS.q, number, thread, pieces);
#endif
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
