// The parts of a payload of codec `conditioned` (spec/codecs.md section 4.4).
#pragma once
#include "common/pieces.cuh"

#define MAPS 4
#define SEGMENTS_MAX 32

// The parsed header and the offsets of the parts. In shared memory, written by one thread.
struct Parts {
    u32 low_bits, states, segments, segments_log2, activity_bits;
    i32 first_context;
    u32 contexts, exceptions, center;
    u32 maps_at, activities_at, positions_at, deltas_at, low_at, sizes_at, streams_at;
    // One threshold per activity, for floats of up to 4 bytes. A lane is coded if its magnitude is below the threshold
    // and its class is not 0.
    u32 thresholds[MAPS];
    // Start of the stream of each segment, and end of the last stream, in 16-bit words of the payload.
    u32 streams[SEGMENTS_MAX + 1];
};

// One thread: parses the header and computes the offsets of the parts. Sizes fit in 32 bits: a chunk has at most 4 MiB,
// and `exceptions` is compared with the number of lanes before its use.
template <int W> __device__ u32 parse_header(const Chunk& chunk, Parts& parts) {
    if (chunk.size < sizeof(ConditionedHeader)) return error(TPDE_STATUS_PAYLOAD_SIZE);
    ConditionedHeader header = *(const ConditionedHeader*)chunk.payload;
    u32 blocks = (chunk.lanes + BLOCK_LANES - 1) / BLOCK_LANES,
        tiles = (chunk.lanes + TileShape<W>::LANES - 1) / TileShape<W>::LANES;
    if (header.low_bits > 8 * W || header.states_log2 > 5 || header.segments_log2 > 5 ||
        1u << header.segments_log2 > tiles || header.activity_bits > 2 || header.context_count < 1 ||
        header.context_count > 64 || header.reserved != 0 || header.exception_count > chunk.num_deltas) {
        return error(TPDE_STATUS_PAYLOAD_HEADER);
    }
    u32 center_bits = header.low_bits == 0 ? 0 : 8 * W - header.low_bits;
    if (center_bits < 32 && header.center >> center_bits != 0) return error(TPDE_STATUS_PAYLOAD_HEADER);
    parts.low_bits = header.low_bits;
    parts.states = 1u << header.states_log2;
    parts.segments = 1u << header.segments_log2;
    parts.segments_log2 = header.segments_log2;
    parts.activity_bits = header.activity_bits;
    parts.first_context = header.first_context;
    parts.contexts = header.context_count;
    parts.exceptions = header.exception_count;
    parts.center = header.center;
    u32 activity_bits = blocks * header.activity_bits, low_bits = chunk.lanes * header.low_bits;
    parts.maps_at = sizeof(ConditionedHeader);
    parts.activities_at = parts.maps_at + ((header.context_count + 1u) / 2 << header.activity_bits);
    parts.positions_at = parts.activities_at + (activity_bits + 7) / 8;
    parts.deltas_at = parts.positions_at + 4 * parts.exceptions;
    parts.low_at = parts.deltas_at + W * parts.exceptions;
    parts.sizes_at = parts.low_at + (low_bits + 7) / 8;
    u32 end = parts.sizes_at + 4 * (parts.segments - 1);
    parts.streams_at = (end + 1) & ~1u;
    if (parts.streams_at > chunk.size || (chunk.size - parts.streams_at) % 2 != 0)
        return error(TPDE_STATUS_PAYLOAD_SIZE);
    bool clean = (activity_bits % 8 == 0 || chunk.payload[parts.positions_at - 1] >> activity_bits % 8 == 0) &&
                 (low_bits % 8 == 0 || chunk.payload[parts.sizes_at - 1] >> low_bits % 8 == 0) &&
                 (end == parts.streams_at || chunk.payload[end] == 0);
    return clean ? 0 : error(TPDE_STATUS_PAYLOAD_SIZE);
}

// One warp: computes the start of each stream. Thread i handles segment i.
__device__ __forceinline__ u32 find_streams(const Chunk& chunk, Parts& parts) {
    u32 lane = threadIdx.x % WARP, words = (chunk.size - parts.streams_at) / 2, last = parts.segments - 1;
    u32 size = lane < last ? (u32)unaligned<4>(chunk.payload, parts.sizes_at + 4 * lane) : 0;
    // The clamp keeps the prefix sum within 32 bits. A clamped size still fails the check below.
    size = min(size, words + 1);
    for (u32 by = 1; by < WARP; by *= 2) {
        u32 other = __shfl_up_sync(ALL_LANES, size, by);
        if (lane >= by) size += other;
    }
    u32 begin = parts.streams_at / 2, end = min(size, words);
    if (lane < last) parts.streams[lane + 1] = begin + end;
    if (lane == 0) parts.streams[0] = begin;
    __syncwarp();
    if (lane == last) parts.streams[parts.segments] = begin + words;
    return __any_sync(ALL_LANES, size > words) ? error(TPDE_STATUS_PAYLOAD_SIZE) : 0;
}

// All threads: returns the class of entry `at` of map `map`. Reports an error if the class exceeds `classes`.
__device__ __forceinline__ u32 map_entry(const Chunk& chunk, const Parts& parts, u32 map, u32 at, u32 classes,
                                         u32& errors) {
    u32 size = (parts.contexts + 1) / 2;
    if (at >= 2 * size) return 0;
    u32 number = chunk.payload[parts.maps_at + map * size + at / 2] >> (4 * (at % 2)) & 15;
    if (number > (at < parts.contexts ? classes : 0)) {
        errors |= error(TPDE_STATUS_PAYLOAD_CLASSES);
        return 0;
    }
    return number;
}

// Returns the activity of the block that contains lane `at`.
__device__ __forceinline__ u32 activity_of(const Chunk& chunk, const Parts& parts, u32 at) {
    if (parts.activity_bits == 0) return 0;
    u32 bit = at / BLOCK_LANES * parts.activity_bits;
    return chunk.payload[parts.activities_at + bit / 8] >> bit % 8 & ((1u << parts.activity_bits) - 1);
}

// Returns the activities of a tile, the first in the low bits. `blocks` is a power of two, at most 8. Bits past the last
// block are arbitrary. Their bytes are in bounds, because other parts or padding follow.
__device__ __forceinline__ u32 activities_of_tile(const u8* activities, u32 activity_bits, u32 tile, u32 blocks) {
    if (activity_bits == 0) return 0;
    u32 bit = tile * blocks * activity_bits;
    u32 low = activities[bit / 8], high = blocks * activity_bits > 8 ? activities[bit / 8 + 1] : 0;
    return (low | high << 8) >> bit % 8;
}

// Returns the position of an exception, or past the last exception a position that no lane has.
__device__ __forceinline__ u32 exception_position(const Chunk& chunk, const Parts& parts, u32 exception) {
    return exception < parts.exceptions ? (u32)unaligned<4>(chunk.payload, parts.positions_at + 4 * exception)
                                        : 0xFFFFFFFFu;
}

// Returns the delta of an exception, in zigzag coding.
template <int W>
__device__ __forceinline__ typename WideOf<W>::type exception_delta(const Chunk& chunk, const Parts& parts,
                                                                    u32 exception) {
    return (typename WideOf<W>::type)unaligned<W>(chunk.payload, parts.deltas_at + W * exception);
}

// Returns the low bits of lane `at`. Word indexes are clamped, because the last word may be past the payload.
template <int W>
__device__ __forceinline__ typename WideOf<W>::type low_bits_of(const Chunk& chunk, const Parts& parts, u32 at) {
    const u32* words = (const u32*)chunk.payload;
    u32 count = parts.low_bits, bit = at * count + 8 * (parts.low_at % 4), word = parts.low_at / 4 + bit / 32;
    u32 last = padded(chunk.size) / 4 - 1;
    u32 a = __ldg(words + min(word, last)), b = __ldg(words + min(word + 1, last));
    if constexpr (W == 8) {
        u32 c = __ldg(words + min(word + 2, last));
        u64 bits = (u64)__funnelshift_r(b, c, bit % 32) << 32 | __funnelshift_r(a, b, bit % 32);
        return count == 64 ? bits : bits & ((1ull << count) - 1);
    } else {
        u32 bits = __funnelshift_r(a, b, bit % 32);
        return count == 32 ? bits : bits & ((1u << count) - 1);
    }
}
