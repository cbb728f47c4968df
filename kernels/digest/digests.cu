// Payload digests: BLAKE3 of payloads as stored (spec/tpde-format.md section 7.2).
//
// The leaves of BLAKE3 are hashed by one thread each. A warp hashes 32 leaves of one or more payloads, and combines the
// leaves of each payload by shuffles. If a payload has more leaves, its warps store their nodes, and the last of these
// warps combines the nodes. A block is a single warp with few registers, so it fits on a multiprocessor beside the blocks
// of the decoding kernels.
#include "common/block.cuh"
#include "digest/digests.cuh"

#define LEAF 1024
#define LEAF_BLOCK 64
#define PIECE_LEAVES 32

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
__device__ __forceinline__ void compress(u32 (&cv)[8], const u32 (&m)[16], u32 counter, u32 size, u32 flags) {
    u32 v[16];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = cv[i];
#pragma unroll
    for (int i = 0; i < 4; i++) v[8 + i] = initial_word(i);
    v[12] = counter, v[13] = 0, v[14] = size, v[15] = flags;
    mix_round<0>(v, m), mix_round<1>(v, m), mix_round<2>(v, m), mix_round<3>(v, m);
    mix_round<4>(v, m), mix_round<5>(v, m), mix_round<6>(v, m);
#pragma unroll
    for (int i = 0; i < 8; i++) cv[i] = v[i] ^ v[8 + i];
}

__device__ __forceinline__ void begin(u32 (&cv)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) cv[i] = initial_word(i);
}

// Loads up to 64 bytes of a payload. Bytes past `size` are zero. Reads stay inside the payload and its padding.
__device__ __forceinline__ void load_block(const u8* from, u32 size, u32 (&m)[16]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        uint4 piece = 16 * i < size ? __ldg((const uint4*)from + i) : uint4{0, 0, 0, 0};
        m[4 * i] = piece.x, m[4 * i + 1] = piece.y, m[4 * i + 2] = piece.z, m[4 * i + 3] = piece.w;
    }
    if (size >= LEAF_BLOCK) return;
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        u32 valid = size > 4 * i ? size - 4 * i : 0;
        if (valid < 4) m[i] &= (1u << 8 * valid) - 1;
    }
}

// One thread: hashes a leaf of `size` bytes.
__device__ __forceinline__ void hash_leaf(const u8* from, u32 size, u32 leaf, bool is_root, u32 (&cv)[8]) {
    begin(cv);
#pragma unroll 1
    for (u32 at = 0; at < size; at += LEAF_BLOCK) {
        u32 m[16], left = size - at;
        load_block(from + at, left, m);
        u32 flags = (at == 0 ? CHUNK_START : 0) | (left <= LEAF_BLOCK ? CHUNK_END | (is_root ? ROOT : 0) : 0);
        compress(cv, m, leaf, min(left, LEAF_BLOCK), flags);
    }
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

// A warp: combines the `count` nodes of a payload, 32 at a time. Thread 0 gets the hash of the payload.
__device__ __noinline__ void combine_nodes(u32* nodes, u32 count, u32 (&cv)[8]) {
    u32 thread = threadIdx.x;
    for (;;) {
        u32 batches = (count + WARP - 1) / WARP;
#pragma unroll 1
        for (u32 batch = 0; batch < batches; batch++) {
            u32 first = batch * WARP, in_batch = min(count - first, WARP);
            begin(cv);
            if (thread < in_batch) {
#pragma unroll
                for (int i = 0; i < 8; i++) cv[i] = __ldcg(nodes + 8 * (first + thread) + i);
            }
            combine(cv, thread, thread < in_batch ? in_batch : 0, batches == 1);
            // All nodes of the batch have been read. Its result replaces a node of this or an earlier batch.
            if (thread == 0 && batches > 1) store_node(nodes + 8 * batch, cv);
            __threadfence();
            __syncwarp();
        }
        if (batches == 1) return;
        count = batches;
    }
}

// One thread: compares or stores the hash of a payload.
__device__ __forceinline__ void finish(const Digests& digests, u32 chunk, const u32 (&cv)[8]) {
    u32* statuses = (u32*)digests.statuses;
    bool of_list = digests.flags & TPDE_DIGESTS_OF_LIST;
    if (!of_list && !digests.expected) {
        for (int i = 0; i < 4; i++) ((u32*)digests.found)[4 * (u64)chunk + i] = cv[i];
        statuses[chunk] = TPDE_STATUS_OK;
        return;
    }
    const u32* expected = of_list ? (const u32*)digests.root : (const u32*)digests.expected + 4 * (u64)chunk;
    u32 difference = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i < 4 || of_list) difference |= cv[i] ^ expected[i];
    }
    if (of_list) {
        for (u32 i = 0; difference && i < digests.records; i++) statuses[i] = TPDE_STATUS_HEADER_PAYLOAD_ROOT;
    } else {
        statuses[chunk] = difference ? (u32)TPDE_STATUS_PAYLOAD_DIGEST : (u32)TPDE_STATUS_OK;
    }
    if (difference && digests.flag) *(volatile u32*)digests.flag = 1;
}

extern "C" __global__ void __launch_bounds__(TPDE_DIGESTS_THREADS)
    tpde_digests(const __grid_constant__ Digests digests) {
    if (blockIdx.x >= digests.count) return;
    u32 thread = threadIdx.x, warp = digests.first + blockIdx.x;
    const u32* warps = (const u32*)digests.warps;
    u32 first = warps[warp], count = warps[warp + 1] - first;

    // Each thread finds the piece of its leaf. Pieces are in ascending order of threads.
    DigestPiece piece = ((const DigestPiece*)digests.pieces)[first + min(thread, count - 1)];
    u32 starts = __reduce_or_sync(ALL_LANES, thread < count ? 1u << piece.thread : 0);
    u32 own = __popc(starts & (~0u >> (31 - thread))) - 1;
    piece = ((const DigestPiece*)digests.pieces)[first + own];

    ChunkMetadata record = ((const ChunkMetadata*)digests.chunks)[piece.chunk];
    u32 size = record.compressed_size, rank = thread - piece.thread, leaf = piece.first_leaf + rank;
    bool is_alone = size <= PIECE_LEAVES * LEAF;
    u32 cv[8];
    begin(cv);
    if (rank < piece.leaves) {
        const u8* from = (const u8*)(digests.blob + record.blob_offset) + (u64)leaf * LEAF;
        hash_leaf(from, min(size - leaf * LEAF, LEAF), leaf, size <= LEAF, cv);
    }
    __syncwarp();
    combine(cv, rank, rank < piece.leaves ? piece.leaves : 0, is_alone);
    bool is_first = rank == 0;
    if (is_first && is_alone) finish(digests, piece.chunk, cv);

    // Payloads of several pieces: the last warp combines the nodes of all.
    bool is_last = false;
    u32 pieces = (size + PIECE_LEAVES * LEAF - 1) / (PIECE_LEAVES * LEAF);
    u32* counter = (u32*)digests.nodes + 8 * (u64)piece.nodes;
    if (is_first && !is_alone) {
        store_node(counter + 8 * (u64)(1 + piece.first_leaf / PIECE_LEAVES), cv);
        __threadfence();
        // Wraps to 0, so the next launch finds the counter as this one did.
        is_last = atomicInc(counter, pieces - 1) == pieces - 1;
    }
#pragma unroll 1
    for (u32 rest = __ballot_sync(ALL_LANES, is_last); rest; rest &= rest - 1) {
        u32 from = __ffs((i32)rest) - 1, nodes = __shfl_sync(ALL_LANES, piece.nodes, from);
        u32 node_count = __shfl_sync(ALL_LANES, pieces, from), chunk = __shfl_sync(ALL_LANES, piece.chunk, from);
        // Votes and shuffles do not order memory. The barrier does, after the fence of the thread that counted.
        __threadfence();
        __syncwarp();
        combine_nodes((u32*)digests.nodes + 8 * (u64)(nodes + 1), node_count, cv);
        if (thread == 0) finish(digests, chunk, cv);
    }
}
