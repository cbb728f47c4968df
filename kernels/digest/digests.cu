// Payload digests: BLAKE3 of payloads as stored (spec/tpde-format.md section 7.2).
//
// The leaves of BLAKE3 are hashed by one thread each. A warp hashes 32 leaves of one or more payloads, and combines the
// leaves of each payload by shuffles. If a payload has more leaves, its warps store their nodes, and the last of these
// warps combines the nodes. A block is a single warp with few registers, so it fits on a multiprocessor beside the blocks
// of the decoding kernels.
#include "digest/blake3.cuh"
#include "digest/digests.cuh"

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
