// Chunk sums (spec/tpde-format.md section 6.1).
#pragma once
#include "common/lanes.cuh"

__host__ __device__ constexpr u64 mix(u64 x) {
    u64 z = (x + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

struct SumWeights {
    u32 q[TPDE_ROW_WORDS];
    u64 p[TPDE_ROW_WORDS];
};

__host__ __device__ constexpr SumWeights make_weights() {
    SumWeights weights{};
    for (u32 i = 0; i < TPDE_ROW_WORDS; i++) {
        weights.q[i] = (u32)(mix(i) >> 32) | 1;
        weights.p[i] = mix(TPDE_ROW_WORDS + i) | 1;
    }
    return weights;
}

// 12 KiB, which all blocks of a multiprocessor read through its L1 cache.
__device__ const SumWeights WEIGHTS alignas(16) = make_weights();

// Returns the weight of the row of word `at`. A chunk has at most TPDE_ROW_WORDS rows (4 MiB). Words past that get the
// weight of another row, which is harmless, because lanes outside the chunk count as zero.
__device__ __forceinline__ u64 row_weight(u32 at) { return WEIGHTS.p[at / TPDE_ROW_WORDS % TPDE_ROW_WORDS]; }

// Returns the change of the sum when lane `at` changes, before multiplication by the row weight.
template <int W>
__device__ __forceinline__ u64 term_in_row(u32 at, typename WideOf<W>::type from, typename WideOf<W>::type to) {
    u32 word = at * W / 4 % TPDE_ROW_WORDS;
    if constexpr (W == 8) {
        uint2 q = *(const uint2*)&WEIGHTS.q[word];
        return q.x * ((to & 0xFFFFFFFF) - (from & 0xFFFFFFFF)) + q.y * ((to >> 32) - (from >> 32));
    } else {
        u32 shift = 8 * (at * W % 4);
        return WEIGHTS.q[word] * (((u64)to << shift) - ((u64)from << shift));
    }
}

template <int W>
__device__ __forceinline__ u64 lane_term(u32 at, typename WideOf<W>::type from, typename WideOf<W>::type to) {
    return row_weight(at * W / 4) * term_in_row<W>(at, from, to);
}
