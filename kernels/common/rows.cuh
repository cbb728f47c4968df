// Bytes in rows with gaps between them.
#pragma once
#include "common/lanes.cuh"

// Longer than a chunk, and a multiple of 16.
#define LONG_ROW (1u << 24)

// The rows of a chunk. Sizes are in bytes.
struct Rows {
    u64 gap;        // between the end of a row and the beginning of the next
    u32 row;        // size of a row, at most LONG_ROW
    u32 first;      // column of the first byte of the chunk
    u32 reciprocal; // (2^32 - 1) / row
};

// The bytes of a chunk: of up to LONG_ROW consecutive bytes of a tensor.
struct StridedBytes {
    u8* start; // first byte of the chunk
    Rows rows;

    // Finds the chunk of `size` bytes from byte `offset` of its tensor on. Rows that are longer than a chunk are shortened
    // at their beginning, which the chunk does not have.
    __device__ __forceinline__ void open(u64 tensor, u64 row, u64 pitch, u64 offset, u32 size) {
        u64 number = offset / row, left = row - offset % row;
        start = (u8*)tensor + offset + number * (pitch - row);
        u32 shortened = (u32)(row < LONG_ROW ? row : LONG_ROW);
        rows = {pitch - row, shortened, shortened - (u32)left, ~0u / shortened};
        if (left >= size) rows = {0, LONG_ROW, 0, ~0u / LONG_ROW}; // no row ends within the chunk
    }
    // Returns the address of byte `at`. The reciprocal gives the number of the row, or one less.
    __device__ __forceinline__ u8* byte(u32 at) const {
        u32 column = rows.first + at, number = __umulhi(column, rows.reciprocal);
        number += column - number * rows.row >= rows.row;
        return start + at + number * rows.gap;
    }
    template <int W> __device__ __forceinline__ typename LaneOf<W>::type* lane(u32 at) const {
        return (typename LaneOf<W>::type*)byte(at * W);
    }
    // Returns the bytes from byte `by` on.
    __device__ __forceinline__ StridedBytes skip(u64 by) const {
        return {start + by, {rows.gap, rows.row, rows.first + (u32)by, rows.reciprocal}};
    }
    // Returns a multiple of 16 if every 16 bytes from a multiple of 16 on are aligned to 16 and have no gap.
    __device__ __forceinline__ u64 alignment() const { return (u64)start | rows.gap | rows.row | rows.first; }
};
