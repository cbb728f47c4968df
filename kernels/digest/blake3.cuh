// BLAKE3: the compression function, and the tree within a warp. Each thread of a warp hashes one leaf.
#pragma once
#include "common/block.cuh"

#define LEAF 1024
#define LEAF_BLOCK 64
#define PIECE_LEAVES 32 // hashed by a warp

enum : u32 { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };

__host__ __device__ constexpr u32 initial_word(int i) {
    constexpr u32 words[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                              0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
    return words[i];
}

// Index of message word i in a round: the permutation of BLAKE3, applied `round` times.
__host__ __device__ constexpr int message_word(int round, int i) {
    constexpr int permutation[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    for (; round > 0; round--) i = permutation[i];
    return i;
}

__device__ __forceinline__ u32 rotate(u32 x, int by) {
    if (by == 16) return permute_bytes(x, x, 0x1032);
    if (by == 8) return permute_bytes(x, x, 0x0321);
    return __funnelshift_r(x, x, by);
}

__device__ __forceinline__ void mix(u32& a, u32& b, u32& c, u32& d, u32 x, u32 y) {
    a = a + b + x, d = rotate(d ^ a, 16), c = c + d, b = rotate(b ^ c, 12);
    a = a + b + y, d = rotate(d ^ a, 8), c = c + d, b = rotate(b ^ c, 7);
}

// One round with compile-time indexes of the message words.
template <int ROUND> __device__ __forceinline__ void mix_round(u32 (&v)[16], const u32 (&m)[16]) {
#define WORD(i) m[message_word(ROUND, i)]
    mix(v[0], v[4], v[8], v[12], WORD(0), WORD(1));
    mix(v[1], v[5], v[9], v[13], WORD(2), WORD(3));
    mix(v[2], v[6], v[10], v[14], WORD(4), WORD(5));
    mix(v[3], v[7], v[11], v[15], WORD(6), WORD(7));
    mix(v[0], v[5], v[10], v[15], WORD(8), WORD(9));
    mix(v[1], v[6], v[11], v[12], WORD(10), WORD(11));
    mix(v[2], v[7], v[8], v[13], WORD(12), WORD(13));
    mix(v[3], v[4], v[9], v[14], WORD(14), WORD(15));
#undef WORD
}

// The compression function: replaces the chaining value by that of the block `m`.
__device__ __forceinline__ void compress(u32 (&cv)[8], const u32 (&m)[16], u64 counter, u32 size, u32 flags) {
    u32 v[16];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = cv[i];
#pragma unroll
    for (int i = 0; i < 4; i++) v[8 + i] = initial_word(i);
    v[12] = (u32)counter, v[13] = (u32)(counter >> 32), v[14] = size, v[15] = flags;
    mix_round<0>(v, m), mix_round<1>(v, m), mix_round<2>(v, m), mix_round<3>(v, m);
    mix_round<4>(v, m), mix_round<5>(v, m), mix_round<6>(v, m);
#pragma unroll
    for (int i = 0; i < 8; i++) cv[i] = v[i] ^ v[8 + i];
}

__device__ __forceinline__ void begin(u32 (&cv)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) cv[i] = initial_word(i);
}

// A warp: combines the nodes of consecutive threads in pairs, until the first of `count` threads has their common node.
// `rank` is the index of the thread among them. An odd node moves up unchanged, which gives the tree of BLAKE3.
__device__ __forceinline__ void combine(u32 (&cv)[8], u32 rank, u32 count, bool is_root) {
#pragma unroll 1
    for (u32 by = 1; __any_sync(ALL_LANES, count > by); by *= 2) {
        u32 m[16];
#pragma unroll
        for (int i = 0; i < 8; i++) m[i] = cv[i], m[8 + i] = __shfl_down_sync(ALL_LANES, cv[i], by);
        if (rank % (2 * by) == 0 && rank + by < count) {
            begin(cv);
            compress(cv, m, 0, LEAF_BLOCK, PARENT | (is_root && 2 * by >= count ? ROOT : 0));
        }
    }
}

__device__ __forceinline__ void store_node(u32* node, const u32 (&cv)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) node[i] = cv[i];
}
