// Lanes, deltas, values and tokens, as the encoder reads them.
#pragma once
#include "common/block.cuh"
#include "encode/arguments.cuh"

#define THREADS TPDE_ENCODE_THREADS
#define BLOCK_LANES 128
#define OCTET 8
#define DIRECT 64
#define EXTRA_BIAS 27

#define MAP_ENTRIES 64 // maximum number of entries of a map
#define BIT 256ull     // cost units per bit

// Number of lanes of a tile.
template <int W> __device__ constexpr u32 tile_lanes() { return W <= 2 ? 1024 : 2048 / W; }

// Lanes in global memory. Lanes past the end are 0.
struct Source {
    const u8* start;
    u32 lanes;

    template <int W> __device__ __forceinline__ typename WideOf<W>::type lane(u32 at) const {
        return at < lanes ? ((const typename LaneOf<W>::type*)start)[at] : 0;
    }
};

__device__ __forceinline__ Source base_of(const EncodeChunk& chunk) {
    return {(const u8*)chunk.base, chunk.base_lanes};
}
__device__ __forceinline__ Source target_of(const EncodeChunk& chunk) { return {(const u8*)chunk.target, chunk.lanes}; }

// Eight lanes as they are in memory.
template <int W> struct Packed {
    u32 words[2 * W];
};

// Loads eight lanes, from a multiple of eight on.
template <int W> __device__ __forceinline__ Packed<W> load_packed(const Source& source, u32 first) {
    Packed<W> packed;
    if ((u64)source.start % 16 == 0 && first + OCTET <= source.lanes) {
        const u8* from = source.start + (u64)first * W;
        if constexpr (W == 1) {
            uint2 piece = *(const uint2*)from;
            packed.words[0] = piece.x, packed.words[1] = piece.y;
        } else {
#pragma unroll
            for (int p = 0; p < W / 2; p++) {
                uint4 piece = load_once(from + 16 * p);
                packed.words[4 * p] = piece.x, packed.words[4 * p + 1] = piece.y;
                packed.words[4 * p + 2] = piece.z, packed.words[4 * p + 3] = piece.w;
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2 * W; i++) packed.words[i] = 0;
#pragma unroll
        for (int i = 0; i < OCTET; i++) {
            typename WideOf<W>::type lane = source.lane<W>(first + i);
            if constexpr (W == 8) packed.words[2 * i] = (u32)lane, packed.words[2 * i + 1] = (u32)(lane >> 32);
            else packed.words[i * W / 4] |= lane << (8 * W * i) % 32;
        }
    }
    return packed;
}

template <int W>
__device__ __forceinline__ void unpack(const Packed<W>& packed, typename WideOf<W>::type (&lanes)[OCTET]) {
#pragma unroll
    for (int i = 0; i < OCTET; i++) {
        if constexpr (W == 1) lanes[i] = packed.words[i / 4] >> 8 * (i % 4) & 0xFF;
        if constexpr (W == 2) lanes[i] = i % 2 == 0 ? packed.words[i / 2] & 0xFFFF : packed.words[i / 2] >> 16;
        if constexpr (W == 4) lanes[i] = packed.words[i];
        if constexpr (W == 8) lanes[i] = packed.words[2 * i] | (u64)packed.words[2 * i + 1] << 32;
    }
}

template <int W>
__device__ __forceinline__ void load_octet(const Source& source, u32 first, typename WideOf<W>::type (&lanes)[OCTET]) {
    unpack<W>(load_packed<W>(source, first), lanes);
}

// Returns the delta of a lane: the difference in the order-preserving map, in zigzag coding.
template <int W>
__device__ __forceinline__ typename WideOf<W>::type
delta_of(typename WideOf<W>::type base, typename WideOf<W>::type target, typename WideOf<W>::type magnitude) {
    typedef typename WideOf<W>::type T;
    T moved = (target ^ (sign_of<W>(target) & magnitude)) - (base ^ (sign_of<W>(base) & magnitude));
    T delta = moved << 1 ^ sign_of<W>(moved);
    return W == 1 ? delta & 0xFF : W == 2 ? delta & 0xFFFF : delta;
}

// Rule that turns deltas into values, see `Split` in `codec/conditioned/stats.rs`.
struct Split {
    u32 low_bits;
    u32 center;

    template <int W> __device__ __forceinline__ typename WideOf<W>::type value(typename WideOf<W>::type delta) const {
        typedef typename WideOf<W>::type T;
        if (low_bits == 0) return delta;
        return ((T)center - (delta >> low_bits)) & (((T)1 << (8 * W - low_bits)) - 1);
    }
};

// Returns the number of extra bits of a value of at least DIRECT.
__device__ __forceinline__ u32 extra_of(u32 value) { return 30 - __clz((i32)value); }
__device__ __forceinline__ u32 extra_of(u64 value) { return 62 - __clzll((i64)value); }

// Returns the token of a value, and the number of its extra bits.
template <typename T> __device__ __forceinline__ u32 token_of(T value, u32& extra) {
    extra = 0;
    if (value < DIRECT) return (u32)value;
    extra = extra_of(value);
    return 2 * (extra + EXTRA_BIAS) + (u32)(value >> extra & 1);
}
template <typename T> __device__ __forceinline__ u32 token_of(T value) {
    u32 extra;
    return token_of(value, extra);
}
__device__ __forceinline__ u32 extra_bits(u32 token) { return token < DIRECT ? 0 : token / 2 - EXTRA_BIAS; }

// Returns the number of tokens whose values fit in `bits` bits.
__device__ __forceinline__ u32 tokens_within(u32 bits) { return bits <= 6 ? 1u << bits : DIRECT + 2 * (bits - 6); }

// Returns the index of a base lane's context, counted from `first` on.
template <int W>
__device__ __forceinline__ u32 context_index(typename WideOf<W>::type base, const Order& order, u32 first) {
    return (u32)min(max(context_of<W>(base, order) - (i32)first, 0), 255);
}

// Returns the mask of the changed lanes of a block, 32 lanes per word.
__device__ __forceinline__ uint4 block_mask(const EncodeChunk& chunk, u32 block) {
    return ((const uint4*)chunk.masks)[block];
}

__device__ __forceinline__ u32 blocks_of(const EncodeChunk& chunk) {
    return (chunk.lanes + BLOCK_LANES - 1) / BLOCK_LANES;
}
__device__ __forceinline__ u32 parts_of(const EncodeChunk& chunk) {
    return (chunk.lanes + TPDE_ENCODE_PART - 1) / TPDE_ENCODE_PART;
}

// Finds the chunk of a part. `first` is the field of a chunk that counts the parts before it.
__device__ __forceinline__ u32 chunk_of(const Encode& encode, u32 EncodeChunk::* first, u32 part) {
    const EncodeChunk* chunks = (const EncodeChunk*)encode.chunks;
    u32 begin = 0, end = encode.count;
    // The last chunk that begins at or before the part. Chunks without parts come before the chunk with the part.
    while (end - begin > 1) {
        u32 middle = (begin + end) / 2;
        if (chunks[middle].*first <= part) begin = middle;
        else end = middle;
    }
    return begin;
}

__device__ __forceinline__ EncodeState& state_of(const EncodeChunk& chunk) { return *(EncodeState*)chunk.state; }

// Calls `f.run<W>()` for lanes of W bytes.
template <typename F> __device__ __forceinline__ void with_width(u32 lane_log2, F f) {
    switch (lane_log2) {
    case 0: f.template run<1>(); break;
    case 1: f.template run<2>(); break;
    case 2: f.template run<4>(); break;
    default: f.template run<8>(); break;
    }
}
