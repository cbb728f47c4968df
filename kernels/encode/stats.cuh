// Statistics of a chunk: the number of occurrences of each token, by context and by level of activity. They are those of
// `codec/conditioned/stats.rs`.
#pragma once
#include "encode/lanes.cuh"

#define LEVELS 4
#define CONTEXTS 256
#define ROWS TPDE_ENCODE_ROWS
#define SAMPLE_LANES (1u << 14)
#define SAMPLE_CHANGES (1u << 13)
#define SCORE_MAX (15 * BLOCK_LANES)
#define WARPS (THREADS / WARP)

// Returns the sampling stride for `count` items, if about `enough` items suffice.
__device__ __forceinline__ u32 stride_of(u32 count, u32 enough) {
    return min(1u << (31 - __clz((i32)max(count / enough, 1))), 16);
}

// Returns the index of the sampled item in a group of `stride` items.
__device__ __forceinline__ u32 sample_offset(u32 group, u32 stride) {
    return (u32)((u64)group * 0x9E3779B97F4A7C15ull >> 36) % stride;
}

struct StatsShared {
    u32 lanes[ROWS];     // number of lanes by level and context
    u32 rows[ROWS / 32]; // bit mask of the levels and contexts that have counts
    u32 center, low, middle;
    u32 row_count;
    union {
        u32 bins[2048];     // histogram of high bits, then of scores
        u16 row_list[ROWS]; // the rows that have counts, in any order
    };
};

// The statistics of a chunk, uniform in the block.
struct Stats {
    Split split;
    Order order;
    u32 first, tokens, blocks;
};

// A warp: calls `f(lane, base, target)` for the lanes of a block.
template <int W, typename F> __device__ __forceinline__ void each_lane(const EncodeChunk& chunk, u32 block, F f) {
    Source base = base_of(chunk), target = target_of(chunk);
#pragma unroll
    for (u32 i = 0; i < BLOCK_LANES / WARP; i++) {
        u32 at = block * BLOCK_LANES + i * WARP + threadIdx.x % WARP;
        if (at < chunk.lanes) f(i, base.lane<W>(at), target.lane<W>(at));
    }
}

// All threads: chooses the center of the values from a sample.
template <int W>
__device__ __forceinline__ void find_center(const EncodeChunk& chunk, Stats& stats, StatsShared& shared) {
    typedef typename WideOf<W>::type T;
    u32 bins = 1u << min(8 * W - stats.split.low_bits, 11), stride = stride_of(chunk.lanes, SAMPLE_LANES);
    for (u32 i = threadIdx.x; i < bins; i += THREADS) shared.bins[i] = 0;
    __syncthreads();
    for (u32 group = threadIdx.x / WARP; group * stride < stats.blocks; group += WARPS) {
        u32 block = group * stride + sample_offset(group, stride);
        if (block >= stats.blocks) continue;
        each_lane<W>(chunk, block, [&](u32, T base, T target) {
            T high = delta_of<W>(base, target, (T)stats.order.magnitude) >> stats.split.low_bits;
            atomicAdd(&shared.bins[high < bins ? (u32)high : bins - 1], 1);
        });
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        // At most 1/1024 of the lanes are above the center.
        u32 above = chunk.lanes / stride / 1024, center = bins - 1;
        for (; center > 0 && shared.bins[center] <= above; center--) above -= shared.bins[center];
        shared.center = center;
    }
    __syncthreads();
    stats.split.center = shared.center;
}

// All threads: sets the level of each block.
template <int W>
__device__ __forceinline__ void find_levels(const EncodeChunk& chunk, const Stats& stats, StatsShared& shared) {
    typedef typename WideOf<W>::type T;
    bool zero_apart = stats.split.low_bits == 0;
    u32 score_max = zero_apart ? BLOCK_LANES : SCORE_MAX;
    u16* levels = (u16*)chunk.levels;
    for (u32 i = threadIdx.x; i <= score_max; i += THREADS) shared.bins[i] = 0;
    __syncthreads();
    if (zero_apart) {
        for (u32 block = threadIdx.x; block < stats.blocks; block += THREADS) {
            uint4 mask = block_mask(chunk, block);
            u32 score = __popc(mask.x) + __popc(mask.y) + __popc(mask.z) + __popc(mask.w);
            levels[block] = (u16)score;
            if (score) atomicAdd(&shared.bins[score], 1);
        }
    } else {
        for (u32 block = threadIdx.x / WARP; block < stats.blocks; block += WARPS) {
            u32 score = 0;
            each_lane<W>(chunk, block, [&](u32, T base, T target) {
                T delta = delta_of<W>(base, target, (T)stats.order.magnitude);
                score += min(token_of(stats.split.value<W>(delta)), 15);
            });
            score = __reduce_add_sync(ALL_LANES, score);
            if (threadIdx.x % WARP == 0) {
                levels[block] = (u16)score;
                atomicAdd(&shared.bins[score], 1);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        // A warp finds the scores at one third and at two thirds of the sorted scores.
        u32 total = 0, before = 0;
        for (u32 i = threadIdx.x; i <= score_max; i += WARP) total += shared.bins[i];
        total = __reduce_add_sync(ALL_LANES, total);
        u32 thirds[2] = {total / 3, (u32)((u64)total * 2 / 3)}, found[2] = {0, 0};
        for (u32 first = 0; first <= score_max; first += WARP) {
            u32 i = first + threadIdx.x, own = i <= score_max ? shared.bins[i] : 0, sum = own;
            for (u32 by = 1; by < WARP; by *= 2) sum = add_from_before(sum, by);
            sum += before;
            for (int k = 0; k < 2; k++) {
                // Rank `thirds[k]`, counted from 1, is the score of this thread.
                u32 here = __ballot_sync(ALL_LANES, thirds[k] != 0 && thirds[k] <= sum && thirds[k] > sum - own);
                if (here) found[k] = first + __ffs((i32)here) - 1;
            }
            before = __shfl_sync(ALL_LANES, sum, WARP - 1);
        }
        if (threadIdx.x == 0) shared.low = found[0], shared.middle = found[1];
    }
    __syncthreads();
    for (u32 block = threadIdx.x; block < stats.blocks; block += THREADS) {
        u32 score = levels[block];
        levels[block] = zero_apart && score == 0 ? 0 : (u16)(1 + (score > shared.low) + (score > shared.middle));
    }
    __syncthreads();
}

// All threads: gathers the statistics of a chunk with `changed` changed lanes. Begins and ends with a barrier. `counts` has
// ROWS rows of `tokens` token counts, which are zero before and must be zero again after the chunk.
template <int W>
__device__ __forceinline__ Stats gather_stats(const EncodeChunk& chunk, const EncodeState& state, u32* counts,
                                              StatsShared& shared) {
    typedef typename WideOf<W>::type T;
    Stats stats;
    stats.split = {chunk.low_bits, 0};
    stats.order = order_of(chunk.dtype);
    stats.first = stats.order.mask >= CONTEXTS ? (u32)max((i32)state.largest - (CONTEXTS - 2), 0) : 0;
    stats.tokens = tokens_within(8 * W - chunk.low_bits);
    stats.blocks = blocks_of(chunk);
    __syncthreads();
    for (u32 i = threadIdx.x; i < ROWS; i += THREADS) shared.lanes[i] = 0;
    for (u32 i = threadIdx.x; i < ROWS / 32; i += THREADS) shared.rows[i] = 0;
    if (threadIdx.x == 0) shared.row_count = 0;
    __syncthreads();
    if (chunk.low_bits != 0) find_center<W>(chunk, stats, shared);
    find_levels<W>(chunk, stats, shared);

    u32 change_stride = stride_of(state.changed, SAMPLE_CHANGES),
        lane_stride = max(stride_of(chunk.lanes, SAMPLE_LANES), change_stride), every = lane_stride / change_stride;
    const u16* levels = (const u16*)chunk.levels;
    auto count = [&](u32 row, T base, T target) {
        u32 token = token_of(stats.split.value<W>(delta_of<W>(base, target, (T)stats.order.magnitude)));
        atomicOr(&shared.rows[row / 32], 1u << row % 32);
        atomicAdd(&counts[row * stats.tokens + token], change_stride);
    };
    // Lanes are counted only in blocks in which changes are counted too. A warp per block.
    for (u32 sample = threadIdx.x / WARP; sample * lane_stride < stats.blocks; sample += WARPS) {
        u32 group = sample * every + sample_offset(sample, every);
        u32 block = group * change_stride + sample_offset(group, change_stride);
        if (block >= stats.blocks) continue;
        uint4 mask = {~0u, ~0u, ~0u, ~0u};
        if (chunk.low_bits == 0) mask = block_mask(chunk, block);
        u32 level = levels[block], words[4] = {mask.x, mask.y, mask.z, mask.w};
        each_lane<W>(chunk, block, [&](u32 i, T base, T target) {
            u32 row = level * CONTEXTS + context_index<W>(base, stats.order, stats.first);
            atomicAdd(&shared.lanes[row], lane_stride);
            if (words[i] >> threadIdx.x % WARP & 1) count(row, base, target);
        });
    }
    // The values of the other blocks: a thread per 32 lanes. Each thread has several loads in flight: with one load at a time
    // this would take half of the kernel's time.
    Source base = base_of(chunk), target = target_of(chunk);
    constexpr u32 LOADS_IN_FLIGHT = 4;
    for (u32 i = threadIdx.x; i / 4 * change_stride < stats.blocks; i += LOADS_IN_FLIGHT * THREADS) {
        u32 firsts[LOADS_IN_FLIGHT], masks[LOADS_IN_FLIGHT], rest = 0;
#pragma unroll
        for (u32 k = 0; k < LOADS_IN_FLIGHT; k++) {
            u32 group = (i + k * THREADS) / 4, block = group * change_stride + sample_offset(group, change_stride);
            firsts[k] = block * BLOCK_LANES + i % 4 * 32, masks[k] = 0;
            if (group * change_stride >= stats.blocks || block >= stats.blocks ||
                group % every == sample_offset(group / every, every))
                continue;
            if (chunk.low_bits == 0) masks[k] = ((const u32*)chunk.masks)[firsts[k] / 32];
            else if (firsts[k] < chunk.lanes) masks[k] = ~0u >> (32 - min(chunk.lanes - firsts[k], 32));
        }
#pragma unroll
        for (u32 k = 0; k < LOADS_IN_FLIGHT; k++) rest |= masks[k];
        while (rest) {
            T from[LOADS_IN_FLIGHT], to[LOADS_IN_FLIGHT];
            u32 level[LOADS_IN_FLIGHT];
            rest = 0;
#pragma unroll
            for (u32 k = 0; k < LOADS_IN_FLIGHT; k++) {
                if (masks[k] == 0) continue;
                u32 at = firsts[k] + __ffs((i32)masks[k]) - 1;
                from[k] = base.lane<W>(at), to[k] = target.lane<W>(at), level[k] = levels[at / BLOCK_LANES];
            }
#pragma unroll
            for (u32 k = 0; k < LOADS_IN_FLIGHT; k++) {
                if (masks[k] == 0) continue;
                count(level[k] * CONTEXTS + context_index<W>(from[k], stats.order, stats.first), from[k], to[k]);
                masks[k] &= masks[k] - 1;
                rest |= masks[k];
            }
        }
    }
    __syncthreads();
    for (u32 row = threadIdx.x; row < ROWS; row += THREADS) {
        if (shared.rows[row / 32] >> row % 32 & 1) shared.row_list[atomicAdd(&shared.row_count, 1)] = (u16)row;
    }
    __syncthreads();
    return stats;
}

// A warp: sets the counts of a row to zero.
__device__ __forceinline__ void clear_row(const Stats& stats, u32* counts, u32 row) {
    for (u32 token = threadIdx.x % WARP; token < stats.tokens; token += WARP) counts[row * stats.tokens + token] = 0;
}

__device__ __forceinline__ bool has_counts(const StatsShared& shared, u32 row) {
    return shared.rows[row / 32] >> row % 32 & 1;
}

// Returns log2 of x in 256ths, rounded down, as `codec/conditioned/cost.rs` does. `x` is not 0.
__device__ __forceinline__ u32 log2_of(u64 x) {
    u32 whole = 63 - __clzll((i64)x), fraction = 0;
    u64 mantissa = whole >= 31 ? x >> (whole - 31) : x << (31 - whole);
    for (int i = 0; i < 8; i++) {
        mantissa = mantissa * mantissa >> 31;
        u32 carry = (u32)(mantissa >> 32);
        fraction = fraction << 1 | carry;
        mantissa >>= carry;
    }
    return whole * 256 + fraction;
}
