// One pass over base and target: the changed lanes and the sums of a chunk.
#pragma once
#include "encode/lanes.cuh"

// Returns the contribution of eight lanes to the chunk sum, before multiplication by the row weight.
template <int W> __device__ __forceinline__ u64 octet_sum(u32 at, const typename WideOf<W>::type (&lanes)[OCTET]) {
    const u32* weights = &WEIGHTS.q[at * W / 4 % TPDE_ROW_WORDS];
    u64 sum = 0;
#pragma unroll
    for (int i = 0; i < 2 * W; i++) {
        u32 word;
        if constexpr (W == 1)
            word = lanes[4 * i] | lanes[4 * i + 1] << 8 | lanes[4 * i + 2] << 16 | lanes[4 * i + 3] << 24;
        else if constexpr (W == 2) word = lanes[2 * i] | lanes[2 * i + 1] << 16;
        else if constexpr (W == 4) word = lanes[i];
        else word = (u32)(lanes[i / 2] >> 32 * (i % 2));
        sum += (u64)word * weights[i];
    }
    return sum;
}

// All threads: surveys a part of a chunk, and adds the results to its state.
template <int W> __device__ __forceinline__ void survey(const EncodeChunk& chunk, EncodeState& state, u32 part) {
    typedef typename WideOf<W>::type T;
    Source base = base_of(chunk), target = target_of(chunk);
    u32 end = min((part + 1) * TPDE_ENCODE_PART, blocks_of(chunk) * BLOCK_LANES), changed = 0, largest = 0;
    u64 base_sum = 0, difference = 0;
    u8* masks = (u8*)chunk.masks;
    for (u32 at = part * TPDE_ENCODE_PART + threadIdx.x * OCTET; at < end; at += THREADS * OCTET) {
        T from[OCTET], to[OCTET];
        load_octet<W>(base, at, from);
        load_octet<W>(target, at, to);
        u32 mask = 0;
#pragma unroll
        for (int i = 0; i < OCTET; i++) mask |= (u32)(from[i] != to[i]) << i;
        masks[at / OCTET] = (u8)mask;
        changed += __popc(mask);
        base_sum += row_weight(at * W / 4) * octet_sum<W>(at, from);
        if (mask) difference += row_weight(at * W / 4) * (octet_sum<W>(at, to) - octet_sum<W>(at, from));
        if constexpr (W == 8) {
            Order order = order_of(chunk.dtype);
            if (order.mask < 256) continue;
#pragma unroll
            for (int i = 0; i < OCTET; i++) {
                u32 exponent = (u32)(from[i] >> order.shift) & order.mask;
                // Infinities and NaNs do not count.
                if (exponent != order.mask) largest = max(largest, exponent);
            }
        }
    }
    base_sum = warp_sum(base_sum), difference = warp_sum(difference);
    changed = __reduce_add_sync(ALL_LANES, changed), largest = __reduce_max_sync(ALL_LANES, largest);
    if (threadIdx.x % WARP == 0) {
        atomicAdd(&state.base_sum, base_sum);
        atomicAdd(&state.target_sum, base_sum + difference);
        atomicAdd(&state.changed, changed);
        if (W == 8) atomicMax(&state.largest, largest);
    }
}
