// Writes payloads (spec/codecs.md sections 2 and 4.4).
#pragma once
#include "encode/coded.cuh"
#include "encode/streams.cuh"

#define WARPS (THREADS / WARP)
#define HEADER_BYTES 16

struct GatherShared {
    u32 counts[WARPS];
};

__device__ __forceinline__ void put(u8* to, u64 value, u32 bytes) {
    for (u32 i = 0; i < bytes; i++) to[i] = (u8)(value >> 8 * i);
}

// All threads: lists positions and deltas of the lanes that masks select. `mask_of(block)` returns the mask of a block.
template <int W, typename F>
__device__ __forceinline__ void put_lanes(const EncodeChunk& chunk, u8* positions, u8* deltas, GatherShared& shared,
                                          F mask_of) {
    typedef typename WideOf<W>::type T;
    Source base = base_of(chunk), target = target_of(chunk);
    T magnitude = (T)order_of(chunk.dtype).magnitude;
    u32 blocks = blocks_of(chunk), done = 0, thread = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (u32 first = 0; first < blocks; first += THREADS) {
        u32 block = first + threadIdx.x;
        uint4 mask = block < blocks ? mask_of(block) : uint4{0, 0, 0, 0};
        u32 own = __popc(mask.x) + __popc(mask.y) + __popc(mask.z) + __popc(mask.w), sum = own;
#pragma unroll
        for (u32 by = 1; by < WARP; by *= 2) sum = add_from_before(sum, by);
        if (thread == WARP - 1) shared.counts[warp] = sum;
        __syncthreads();
        u32 place = done + sum - own;
        for (u32 w = 0; w < WARPS; w++) {
            if (w < warp) place += shared.counts[w];
            done += shared.counts[w];
        }
        u32 words[4] = {mask.x, mask.y, mask.z, mask.w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            for (u32 left = words[i]; left; left &= left - 1, place++) {
                u32 at = block * BLOCK_LANES + 32 * i + __ffs((i32)left) - 1;
                put(positions + 4 * (u64)place, at, 4);
                put(deltas + W * (u64)place, delta_of<W>(base.lane<W>(at), target.lane<W>(at), magnitude), W);
            }
        }
        __syncthreads();
    }
}

// Returns the mask of the changed lanes of a block, from the lanes.
template <int W> __device__ __forceinline__ uint4 compare_block(const EncodeChunk& chunk, u32 block) {
    typedef typename WideOf<W>::type T;
    Source base = base_of(chunk), target = target_of(chunk);
    u32 words[4] = {0, 0, 0, 0};
    for (u32 i = 0; i < BLOCK_LANES / OCTET; i++) {
        T from[OCTET], to[OCTET];
        load_octet<W>(base, block * BLOCK_LANES + i * OCTET, from);
        load_octet<W>(target, block * BLOCK_LANES + i * OCTET, to);
        u32 mask = 0;
#pragma unroll
        for (int k = 0; k < OCTET; k++) mask |= (u32)(from[k] != to[k]) << k;
        words[i / 4] |= mask << 8 * (i % 4);
    }
    return {words[0], words[1], words[2], words[3]};
}

// One thread: the header of codec `conditioned`.
__device__ __forceinline__ void put_header(u8* to, ConditionedHeader header) {
    const u8* bytes = (const u8*)&header;
    for (u32 i = 0; i < sizeof header; i++) to[i] = bytes[i];
}

// All threads: ends a payload without coded lanes with its state. `at` bytes precede the padding.
__device__ __forceinline__ void end_uncoded(u8* payload, u32 at) {
    if (threadIdx.x != 0) return;
    if (at % 2) payload[at++] = 0;
    put(payload + at, RANS_LOWER_BOUND, 4);
}

// All threads: a payload of codec `conditioned` with tables.
template <int W>
__device__ __forceinline__ void put_coded(const EncodeChunk& chunk, const EncodeState& state, u8* payload,
                                          GatherShared& shared) {
    typedef typename WideOf<W>::type T;
    u32 count = state.context_count, bits = state.activity_bits, maps = 1u << bits, exceptions = state.exceptions;
    if (threadIdx.x == 0) {
        put_header(payload, {chunk.low_bits, chunk.states_log2, chunk.segments_log2, (u8)bits, state.first_context,
                             (u8)count, 0, exceptions, state.center});
    }
    u32 at = HEADER_BYTES, map_bytes = (count + 1) / 2;
    for (u32 i = threadIdx.x; i < maps * map_bytes; i += THREADS) {
        const u8* map = state.classes[i / map_bytes];
        u32 entry = 2 * (i % map_bytes);
        payload[at + i] = (u8)(map[entry] | (entry + 1 < count ? map[entry + 1] << 4 : 0));
    }
    at += maps * map_bytes;

    u32 blocks = blocks_of(chunk), activity_bytes = (blocks * bits + 7) / 8;
    const u16* levels = (const u16*)chunk.levels;
    for (u32 i = threadIdx.x; i < activity_bytes; i += THREADS) {
        u32 per_byte = 8 / bits, byte = 0;
        for (u32 k = 0; k < per_byte && i * per_byte + k < blocks; k++) {
            u32 level = levels[i * per_byte + k];
            byte |= (bits == 1 ? min(level, 1) : level) << k * bits;
        }
        payload[at + i] = (u8)byte;
    }
    at += activity_bytes;

    if (exceptions != 0) {
        put_lanes<W>(chunk, payload + at, payload + at + 4 * exceptions, shared,
                     [&](u32 block) { return block_mask(chunk, block); });
    }
    at += (4 + W) * exceptions;

    if (chunk.low_bits != 0) {
        Source base = base_of(chunk), target = target_of(chunk);
        T magnitude = (T)order_of(chunk.dtype).magnitude, low = ((T)1 << chunk.low_bits) - 1;
        u32 low_bytes = (u32)(((u64)chunk.lanes * chunk.low_bits + 7) / 8);
        for (u32 i = threadIdx.x; i < low_bytes; i += THREADS) {
            // The lanes that share this byte.
            u64 bit = (u64)i * 8;
            u32 byte = 0;
            for (u32 lane = (u32)(bit / chunk.low_bits); lane < chunk.lanes && (u64)lane * chunk.low_bits < bit + 8;
                 lane++) {
                T delta = delta_of<W>(base.lane<W>(lane), target.lane<W>(lane), magnitude) & low;
                u64 first = (u64)lane * chunk.low_bits;
                byte |= first >= bit ? (u32)delta << (first - bit) : (u32)(delta >> (bit - first));
            }
            payload[at + i] = (u8)byte;
        }
        at += low_bytes;
    }

    u32 segments = 1u << chunk.segments_log2;
    if (threadIdx.x + 1 < segments) put(payload + at + 4 * threadIdx.x, state.stream_words[threadIdx.x], 4);
    at += 4 * (segments - 1);
    if (at % 2 && threadIdx.x == 0) payload[at] = 0;
}

// All threads: copies a stream to its place in the payload. Streams are at the end.
__device__ __forceinline__ void copy_stream(const EncodeChunk& chunk, const EncodeState& state, u32 segment) {
    u32 after = 0, words = state.stream_words[segment];
    for (u32 s = segment; s < 1u << chunk.segments_log2; s++) after += state.stream_words[s];
    const u16* from = (const u16*)chunk.words + state.stream_at[segment];
    u16* to = (u16*)(chunk.payload + chunk.payload_size - 2 * after);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < words; i += THREADS) to[i] = from[i];
}

// All threads: writes the payload of a chunk, and its padding.
template <int W>
__device__ __forceinline__ void gather(const EncodeChunk& chunk, const EncodeState& state, GatherShared& shared) {
    typedef typename WideOf<W>::type T;
    u8* payload = (u8*)chunk.payload;
    u32 thread = threadIdx.x, changed = state.changed;
    if (thread < 16 && chunk.payload_size + thread < padded(chunk.payload_size))
        payload[chunk.payload_size + thread] = 0;
    ConditionedHeader header = {};
    header.context_count = 1;
    switch (chunk.form) {
    case TPDE_FORM_CODED: put_coded<W>(chunk, state, payload, shared); return;
    case TPDE_FORM_LISTED: {
        header.exception_count = changed;
        if (thread == 0) put_header(payload, header), payload[HEADER_BYTES] = 0;
        u8* positions = payload + HEADER_BYTES + 1;
        put_lanes<W>(chunk, positions, positions + 4 * changed, shared,
                     [&](u32 block) { return compare_block<W>(chunk, block); });
        end_uncoded(payload, HEADER_BYTES + 1 + (4 + W) * changed);
        return;
    }
    case TPDE_FORM_PLAIN: {
        header.low_bits = 8 * W;
        if (thread == 0) put_header(payload, header), payload[HEADER_BYTES] = 0;
        Source base = base_of(chunk), target = target_of(chunk);
        T magnitude = (T)order_of(chunk.dtype).magnitude;
        for (u32 at = thread; at < chunk.lanes; at += THREADS) {
            put(payload + HEADER_BYTES + 1 + W * at, delta_of<W>(base.lane<W>(at), target.lane<W>(at), magnitude), W);
        }
        end_uncoded(payload, HEADER_BYTES + 1 + W * chunk.lanes);
        return;
    }
    default: {
        u32 deltas_at = (4 * changed + W - 1) / W * W;
        if (thread < deltas_at - 4 * changed) payload[4 * changed + thread] = 0;
        put_lanes<W>(chunk, payload, payload + deltas_at, shared, [&](u32 block) { return block_mask(chunk, block); });
    }
    }
}
