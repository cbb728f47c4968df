// Bytes in rows with gaps between them.
#pragma once
#include "common/lanes.cuh"

// Longer than a chunk, and a multiple of 16.
#define LONG_ROW (1u << 24)

// The bytes of a chunk: of up to LONG_ROW consecutive bytes of a tensor. Sizes are in bytes.
struct alignas(16) StridedBytes {
    u8* start;  // first byte of the chunk
    u64 gap;    // between the end of a row and the beginning of the next
    u32 first;  // column of the first byte of the chunk, plus 1
    u32 factor; // column c is in row c / row = ((c + 1) * factor) >> (32 + shift)
    u32 shift;
    u32 row; // size of a row, at most LONG_ROW

    // Sets the rows. The division is exact for c < 2^25: d = 2^(32 + shift) - factor * row is between 1 and row, so the
    // quotient is (c + 1) / row less (c + 1) * d / (row * 2^(32 + shift)), which is more than 0 and at most 1 / row,
    // because row < 2^(shift + 1).
    __device__ __forceinline__ void set_rows(u64 gap_bytes, u32 row_bytes, u32 column) {
        gap = gap_bytes;
        row = row_bytes;
        first = column + 1;
        shift = 31 - __clz((i32)row);
        factor = (u32)(((1ull << (32 + shift)) - 1) / row);
    }
    // Finds the chunk of `size` bytes from byte `offset` of its tensor on. Rows that are longer than a chunk are shortened
    // at their beginning, which the chunk does not have.
    __device__ __forceinline__ void open(u64 tensor, u64 row_bytes, u64 pitch, u64 offset, u32 size) {
        u64 number = offset / row_bytes, left = row_bytes - offset % row_bytes;
        start = (u8*)tensor + offset + number * (pitch - row_bytes);
        u32 shortened = (u32)(row_bytes < LONG_ROW ? row_bytes : LONG_ROW);
        if (left >= size) set_rows(0, LONG_ROW, 0); // no row ends within the chunk
        else set_rows(pitch - row_bytes, shortened, shortened - (u32)left);
    }
    // Sets bytes without gaps.
    __device__ __forceinline__ void set_contiguous(u8* from) {
        start = from;
        set_rows(0, LONG_ROW, 0);
    }
    // Returns the row of byte `at`, counted from the row of the first byte.
    __device__ __forceinline__ u32 row_of(u32 at) const { return __umulhi(first + at, factor) >> shift; }
    // Returns the address of byte `at`.
    __device__ __forceinline__ u8* byte(u32 at) const { return start + at + row_of(at) * gap; }
    template <int W> __device__ __forceinline__ typename LaneOf<W>::type* lane(u32 at) const {
        return (typename LaneOf<W>::type*)byte(at * W);
    }
    // Returns the bytes from byte `by` on.
    __device__ __forceinline__ StridedBytes skip(u64 by) const {
        return {start + by, gap, first + (u32)by, factor, shift, row};
    }
    // Returns a multiple of 16 if every 16 bytes from a multiple of 16 on are aligned to 16 and have no gap.
    __device__ __forceinline__ u64 alignment() const { return (u64)start | gap | row | (first - 1); }
};
