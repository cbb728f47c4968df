// The fast path for a complete tile of floats without a base. All lanes are coded and have low bits (spec/codecs.md
// sections 4.4 to 4.6).
#pragma once
#include "conditioned/work.cuh"

// Low bits of a thread's lanes, loaded for four rows of 32 lanes at a time. lane() combines them with a decoded value.
// The base is 0, so the lane is the delta rotated right by one bit: its lowest bit is the sign.
template <int W> struct LowBits {
    typedef typename WideOf<W>::type T;
    const u32* words;
    u32 count, shift, mask;
    T center, high;

    __device__ __forceinline__ void open(const Chunk& chunk, const Parts& parts, u32 at) {
        u64 bit = 8ull * parts.low_at + (u64)at * parts.low_bits;
        words = (const u32*)chunk.payload + bit / 32;
        count = parts.low_bits;
        shift = bit % 32;
        mask = ~0u >> (32 - count);
        center = (T)parts.center;
        high = high_mask<W>(count);
    }
    // The low bits of consecutive rows are `count` words apart, at the same bit offset.
    __device__ __forceinline__ void next(u32* rows) {
#pragma unroll
        for (int i = 0; i < 4; i++, words += count)
            rows[i] = __funnelshift_r(__ldg(words), __ldg(words + 1), shift) & mask;
    }
    __device__ __forceinline__ T lane(T value, u32 low) const {
        T delta = ((center - value) & high) << count % (8 * sizeof(T)) | low;
        return delta >> 1 | delta << (8 * W - 1);
    }
};

// LowBits for BF16 with 8 low bits, where the low and the high part are bytes.
struct LowBytes {
    const u8* bytes;
    u32 center;

    __device__ __forceinline__ void open(const Chunk& chunk, const Parts& parts, u32 at) {
        bytes = chunk.payload + parts.low_at + at;
        center = parts.center;
    }
    __device__ __forceinline__ void next(u32* rows) {
#pragma unroll
        for (int i = 0; i < 4; i++) rows[i] = __ldg(bytes + 32 * i);
        bytes += BLOCK_LANES;
    }
    // Both halves of the word hold the delta, so a shift rotates it. The upper half of the result is arbitrary.
    __device__ __forceinline__ u32 lane(u32 value, u32 low) const {
        return permute_bytes(low, center - value, 0x4040) >> 1;
    }
};

// A warp: decodes the lanes of a tile into shared memory.
template <int W, int EXTRA, typename Low>
__device__ __forceinline__ void decode_blocks(Work& work, StagedWords& words, u32 activities) {
    typedef typename WideOf<W>::type T;
    typedef TileShape<W> Shape;
    Shared& shared = work.shared();
    u32 thread = work.thread, lanes = shared_address(work.tile().lanes) + thread * W;
    Low low;
    low.open(shared.chunk, shared.parts, work.number * Shape::LANES + thread);
    u32 rows[4], prefetched[4];
    low.next(prefetched);
    Entry entry = entry_of<W>(shared, 0, 0);
#pragma unroll 1
    for (u32 block = 0; block < Shape::BLOCKS; block++) {
#pragma unroll
        for (int i = 0; i < 4; i++) rows[i] = prefetched[i];
        // Loads the low bits of the next block while this block is decoded.
        if (block + 1 < Shape::BLOCKS) low.next(prefetched);
        words.fill(work.stream);
        if (work.bits) entry = entry_of<W>(shared, activities >> block * work.bits & ((1u << work.bits) - 1), 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            T lane = low.lane(decode_step<W, EXTRA>(work.stream, words, entry, work.before, true), rows[i]);
            count_if(work.sums.changed, lane != 0);
            set_shared_lane<W>(lanes + 32 * W * i, lane);
        }
        lanes += BLOCK_LANES * W;
    }
}

// A warp: decodes the lanes of a tile without extra bits, which lanes of 2 bytes rarely have. If the tile has extra
// bits, decodes it again with them. The next tile is then decoded with extra bits at once.
template <int W, typename Low>
__device__ __forceinline__ void decode_blocks_twice(Work& work, StagedWords& words, u32 activities) {
    Stream before = work.stream;
    u32 changed = work.sums.changed;
    if (!work.has_extra) {
        work.stream.worst = 0;
        decode_blocks<W, SEES_EXTRA, Low>(work, words, activities);
        work.has_extra = __any_sync(ALL_LANES, work.stream.worst >= SYMBOL_EXTRA);
        work.stream.worst = before.worst;
        if (!work.has_extra) return;
        work.stream = before;
        work.sums.changed = changed;
        words.open(work.stream);
    }
    work.stream.worst = 0;
    decode_blocks<W, READS_EXTRA, Low>(work, words, activities);
    work.has_extra = __any_sync(ALL_LANES, work.stream.worst >= SYMBOL_EXTRA);
    work.stream.worst = max(work.stream.worst, before.worst);
}

// A warp: decodes and stores a tile of floats without a base, all of which are coded.
template <int W> __device__ __forceinline__ void decode_without_base(Work& work, StagedWords& words, u32 store) {
    typedef TileShape<W> Shape;
    Shared& shared = work.shared();
    const Chunk& chunk = shared.chunk;
    Tile& tile = work.tile();
    u32 thread = work.thread;
    u32 activities =
        activities_of_tile(chunk.payload + shared.parts.activities_at, work.bits, work.number, Shape::BLOCKS);
    if (work.receives) {
        receive_stream(work.ring, thread, work.stream);
        words.open(work.stream);
    }
    if (W == 2 && uniform(shared.parts.low_bits) == 8) {
        if constexpr (W == 2) decode_blocks_twice<W, LowBytes>(work, words, activities);
    } else {
        decode_blocks<W, READS_EXTRA, LowBits<W>>(work, words, activities);
    }
    if (work.hands_over) hand_over_stream(work.ring, thread, work.stream);
    __syncwarp();
    uint4 pieces[Shape::PIECES];
    read_tile<W>(tile, thread, pieces);
    if (store != STORE_NONE) store_tile<W>(chunk, work.number, thread, pieces);
    work.sums.target +=
        row_weight(work.number * Shape::WORDS) * tile_sum<W>(shared.weights, work.number, thread, pieces);
    __syncwarp();
}
