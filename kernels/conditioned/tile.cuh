// A tile: 1 or 2 KiB of base lanes that one warp loads, and the queue of its coded lanes (spec/codecs.md section 4.4).
#pragma once
#include "conditioned/payload.cuh"
#include "common/pieces.cuh"
#include "conditioned/tables.cuh"

#define TILE_BYTES 2048
#define TILE_LANES 1024

// One tile per warp, in shared memory.
struct alignas(16) Tile {
    u8 lanes[TILE_BYTES];
    u64 no_lane;          // 0; threads without a lane in a step read it
    u16 no_entry;         // queue entry that these threads read
    u16 exceptions;       // number of exceptions of the tile, if it is marked
    u32 exceptions_begin; // index of the first one
    // The coded lanes: byte offset in the tile in bits 0 to 11, index of the map in bits 12 and up. NO_ENTRY for two steps
    // follows.
    u16 queue[TILE_LANES + 2 * WARP];
    u32 masks[TILE_LANES / 32]; // bit masks of the coded lanes
    u32 excepted[TILE_LANES / 32];
};

#define QUEUE_MAP 12
#define NO_ENTRY (MAPS << QUEUE_MAP | TILE_BYTES)
static_assert(TPDE_OFFSET_OF(Tile, no_lane) == TILE_BYTES, "NO_ENTRY refers to no_lane");

// One thread: initialises the tile before its first use.
__device__ __forceinline__ void open_tile(Tile& tile) {
    tile.no_lane = 0;
    tile.no_entry = NO_ENTRY;
}

// Copies the pieces of a tile from shared memory to registers, and back.
template <int W> __device__ __forceinline__ void read_tile(const Tile& tile, u32 thread, uint4* pieces) {
    typedef TileShape<W> Shape;
    const u8* from = tile.lanes + thread * Shape::UNIT * W;
#pragma unroll
    for (int p = 0; p < Shape::PIECES; p++) pieces[p] = *(const uint4*)(from + Shape::lane_of(p) * W);
}

template <int W> __device__ __forceinline__ void write_tile(Tile& tile, u32 thread, const uint4* pieces) {
    typedef TileShape<W> Shape;
    u8* to = tile.lanes + thread * Shape::UNIT * W;
#pragma unroll
    for (int p = 0; p < Shape::PIECES; p++) *(uint4*)(to + Shape::lane_of(p) * W) = pieces[p];
}

// Assignment of classes to base lanes.
struct Classes {
    i32 first;
    Order order;
    Entry none;        // entry of class 0, for lanes that are not coded
    bool by_threshold; // see Parts::thresholds
    bool holes;        // some lanes below a threshold are not coded
};

// A warp: computes the masks of the coded lanes of a complete tile. ACTIVE is false for chunks without activities, which
// are the majority.
template <int W, bool ACTIVE>
__device__ __forceinline__ void mark_pieces(const Parts& parts, u32 bits, u32 activities, u32 thread,
                                            const uint4* pieces, Tile& tile) {
    typedef TileShape<W> Shape;
    u32 threshold = parts.thresholds[0];
#pragma unroll
    for (int n = 0; n < Shape::UNITS; n++) {
        u32 mask = 0;
        if (ACTIVE)
            threshold = parts.thresholds[activities >> ((32 * n + thread) * Shape::UNIT / BLOCK_LANES * bits) &
                                         ((1u << bits) - 1)];
#pragma unroll
        for (int i = 0; i < Shape::PER_UNIT; i++)
            mask |= lanes_below<W>(threshold, pieces[n * Shape::PER_UNIT + i]) << (i * Shape::PIECE);
        if (Shape::UNIT == 16) {
            ((u16*)tile.masks)[32 * n + thread] = (u16)mask;
        } else {
            ((u8*)tile.masks)[32 * n + thread] = (u8)mask;
        }
    }
}

// Returns the activity of row `thread` of the tile.
__device__ __forceinline__ u32 activity_of_row(u32 bits, u32 activities, u32 thread) {
    return activities >> (thread / 4 * bits) & ((1u << bits) - 1);
}

// A warp: fills the queue. Thread i passes the mask of row i. Returns the number of coded lanes.
template <int W> __device__ __forceinline__ u32 queue_rows(u32 mask, u32 activity, u32 thread, Tile& tile) {
    typedef TileShape<W> Shape;
    u32 end = __popc(mask);
#pragma unroll
    for (u32 by = 1; by < WARP; by *= 2) end = add_from_before(end, by);
    u32 count = __shfl_sync(ALL_LANES, end, WARP - 1), queue = shared_address(tile.queue),
        to = queue + 2 * (end - __popc(mask));
    u32 first = 32 * W * thread | activity << QUEUE_MAP;
    if (count < Shape::LANES / 4) {
        for (; mask; mask &= mask - 1, to += 2) set_shared_u16(to, first + W * (__ffs((i32)mask) - 1));
    } else {
#pragma unroll
        for (u32 i = 0; i < 32; i++) {
            if (mask >> i & 1) {
                set_shared_u16(to, first + W * i);
                to += 2;
            }
        }
    }
    set_shared_u16(queue + 2 * (count + thread), NO_ENTRY);
    set_shared_u16(queue + 2 * (count + WARP + thread), NO_ENTRY);
    __syncwarp();
    return count;
}
