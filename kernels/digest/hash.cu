// Hashes of memory: BLAKE3 of tensors (spec/tpde-format.md section 7).
//
// A warp hashes a piece of 32 leaves, one leaf per thread. The leaves pass through shared memory: consecutive threads load
// consecutive bytes, while each thread hashes bytes that are 1,024 apart from those of the next. The next bytes are copied
// while the current ones are hashed, so the integer units bound the speed. The last warp of 32 combines their nodes, the
// last of 32 such warps combines the results, and so on.
#include "common/rows.cuh"
#include "digest/blake3.cuh"
#include "digest/hash.cuh"

#define PIECE (PIECE_LEAVES * LEAF)
#define STAGE 128              // bytes of each leaf that a buffer has
#define STAGE_ROW (STAGE + 16) // eight threads that read 16 bytes each use all banks
#define GROUP 32               // nodes that a warp combines
#define GROUP_ENTRIES (GROUP + 1)

static_assert(TPDE_HASH_SHARED == 2 * PIECE_LEAVES * STAGE_ROW, "TPDE_HASH_SHARED");
static_assert(PIECE <= LONG_ROW, "a piece is a chunk of StridedBytes");

// A warp: finds the entry of a warp, by comparing 32 entries at a time.
__device__ __forceinline__ HashRange range_of(const Hashes& hashes, u32 warp) {
    const HashRange* ranges = (const HashRange*)hashes.ranges;
    u32 low = 0, count = hashes.count;
    while (count > 1) {
        u32 step = (count + WARP - 1) / WARP, at = threadIdx.x * step;
        bool begins = at < count && ranges[low + at].first_warp <= warp;
        u32 last = __popc(__ballot_sync(ALL_LANES, begins)) - 1;
        low += last * step;
        count = min(step, count - last * step);
    }
    return ranges[low];
}

// A piece of a range in memory.
struct Piece {
    StridedBytes bytes; // of pieces without gaps only `start` is used
    u32 size;
};

// A warp: copies bytes `at` to `at` + STAGE of all leaves to a buffer. The rest of the last leaf is filled with zeros.
template <int UNIT, bool HAS_GAPS> __device__ __forceinline__ void load(const Piece& piece, u32 at, u32 to) {
    constexpr u32 PER_ROW = STAGE / UNIT;
#pragma unroll 4
    for (u32 i = 0; i < PIECE_LEAVES * PER_ROW / WARP; i++) {
        u32 unit = WARP * i + threadIdx.x, leaf = unit / PER_ROW, column = unit % PER_ROW * UNIT;
        u32 from = leaf * LEAF + at + column, valid = from < piece.size ? min(piece.size - from, UNIT) : 0;
        const u8* source = HAS_GAPS ? piece.bytes.byte(valid ? from : 0) : piece.bytes.start + from;
        if constexpr (UNIT == 1) {
            set_shared_u8(to + leaf * STAGE_ROW + column, valid ? *source : 0);
        } else {
            copy_async<UNIT>(to + leaf * STAGE_ROW + column, source, valid);
        }
    }
}

// One thread: hashes 64 bytes from shared memory.
__device__ __forceinline__ void hash_block(u32 (&cv)[8], u32 from, u64 leaf, u32 size, u32 flags) {
    u32 m[16];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 words = shared_u32x4(from + 16 * i);
        m[4 * i] = words.x, m[4 * i + 1] = words.y, m[4 * i + 2] = words.z, m[4 * i + 3] = words.w;
    }
    compress(cv, m, leaf, size, flags);
}

// A warp: each thread hashes its leaf of a piece. `first_leaf` is the number of the leaf of thread 0 within the range.
__device__ __forceinline__ void hash_leaves(const Piece& piece, u32 alignment, bool has_gaps, u64 first_leaf,
                                            bool is_root, u32 (&cv)[8]) {
    u32 thread = threadIdx.x, buffer = shared_address(dynamic_shared_memory());
    u32 before = thread * LEAF, size = before < piece.size ? min(piece.size - before, LEAF) : 0;
    bool has_leaf = size > 0 || (thread == 0 && piece.size == 0);
    auto stage = [&](u32 at) {
        u32 to = buffer + at / STAGE % 2 * (PIECE_LEAVES * STAGE_ROW);
        if (has_gaps) {
            if (alignment % 16 == 0) load<16, true>(piece, at, to);
            else if (alignment % 4 == 0) load<4, true>(piece, at, to);
            else load<1, true>(piece, at, to);
        } else {
            if (alignment % 16 == 0) load<16, false>(piece, at, to);
            else if (alignment % 4 == 0) load<4, false>(piece, at, to);
            else load<1, false>(piece, at, to);
        }
        commit_copies();
    };
    begin(cv);
    // The first leaf is the longest.
    u32 end = max(min(piece.size, LEAF), 1);
    stage(0);
#pragma unroll 1
    for (u32 at = 0; at < end; at += LEAF_BLOCK) {
        if (at % STAGE == 0) {
            // All threads have read the other buffer.
            __syncwarp();
            if (at + STAGE < end) stage(at + STAGE);
            else commit_copies();
            wait_for_copies<1>();
            __syncwarp();
        }
        if (has_leaf && (at < size || at == 0)) {
            u32 left = size - at, row = buffer + at / STAGE % 2 * (PIECE_LEAVES * STAGE_ROW) + thread * STAGE_ROW;
            u32 last = left <= LEAF_BLOCK ? CHUNK_END | (is_root ? ROOT : 0) : 0;
            hash_block(cv, row + at % STAGE, first_leaf + thread, min(left, LEAF_BLOCK),
                       (at == 0 ? CHUNK_START : 0) | last);
        }
    }
    __syncwarp();
}

// One thread: stores or compares the hash of a range.
__device__ __forceinline__ void finish(const Hashes& hashes, u32 number, const u32 (&cv)[8]) {
    if (hashes.hashes) store_node((u32*)hashes.hashes + 8 * (u64)number, cv);
    if (!hashes.expected) return;
    const u32* expected = (const u32*)hashes.expected + 4 * (u64)number;
    u32 difference = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) difference |= cv[i] ^ expected[i];
    if (hashes.statuses) ((u32*)hashes.statuses)[number] = difference ? TPDE_HASH_DIFFERS : TPDE_HASH_EQUAL;
    if (difference && hashes.flag) *(volatile u32*)hashes.flag = 1;
}

extern "C" __global__ void __launch_bounds__(TPDE_HASH_THREADS, 24) tpde_hash(const __grid_constant__ Hashes hashes) {
    if (blockIdx.x >= hashes.warps) return;
    u32 thread = threadIdx.x, warp = hashes.first + blockIdx.x;
    HashRange range = range_of(hashes, warp);
    u32 number = range.first_piece + (warp - range.first_warp);
    u32 count = (u32)((range.bytes + PIECE - 1) / PIECE);
    u64 offset = (u64)number * PIECE;
    Piece piece;
    piece.size = (u32)min(range.bytes - offset, (u64)PIECE);
    bool has_gaps = range.row != range.pitch;
    u32 alignment = (u32)range.address;
    if (has_gaps) {
        piece.bytes.open(range.address, range.row, range.pitch, offset, piece.size);
        alignment |= (u32)range.row | (u32)range.pitch;
    } else {
        piece.bytes.start = (u8*)range.address + offset;
    }
    u32 cv[8];
    hash_leaves(piece, alignment, has_gaps, (u64)number * PIECE_LEAVES, range.bytes <= LEAF, cv);
    combine(cv, thread, (piece.size + LEAF - 1) / LEAF, count <= 1);

    // The last warp of each group of nodes combines them to a node of the level above.
    u32* level = (u32*)hashes.nodes + 8 * (u64)range.nodes;
#pragma unroll 1
    while (count > 1) {
        u32 group = number / GROUP, in_group = min(count - GROUP * group, GROUP);
        u32* entries = level + 8 * GROUP_ENTRIES * (u64)group;
        u32 is_last = 0;
        if (thread == 0) {
            store_node(entries + 8 * (1 + number % GROUP), cv);
            __threadfence();
            // Wraps to 0, so the next launch finds the counter as this one did.
            is_last = atomicInc(entries, in_group - 1) == in_group - 1;
        }
        if (!__shfl_sync(ALL_LANES, is_last, 0)) return;
        // Shuffles do not order memory. The barrier does, after the fence of the thread that counted.
        __threadfence();
        __syncwarp();
        begin(cv);
        if (thread < in_group) {
#pragma unroll
            for (int i = 0; i < 8; i++) cv[i] = __ldcg(entries + 8 * (1 + thread) + i);
        }
        number = group, count = (count + GROUP - 1) / GROUP;
        level += 8 * GROUP_ENTRIES * (u64)count;
        combine(cv, thread, in_group, count == 1);
    }
    if (thread == 0) finish(hashes, range.number, cv);
}
