// Decodes a segment, tile by tile.
#pragma once
#include "conditioned/low_bits.cuh"
#include "conditioned/with_base.cuh"

// Returns the number of leading tiles that have a fast path.
template <int W, int HOW> __device__ __forceinline__ u32 fast_tiles() {
    const Chunk& chunk = shared_memory().chunk;
    const Parts& parts = shared_memory().parts;
    if (W == 8 || HOW == SLOWLY) return 0;
    if (HOW != LOW_BITS) return complete_tiles<W>(chunk);
    bool coded = true;
    for (u32 a = 0; a < 1u << parts.activity_bits; a++)
        coded &= entry_of<W>(shared_memory(), a, 0).x != shared_memory().classes.none.x;
    // Chunks without a base have no base lane to look up. Low bits are read one word at a time, plus one extra bit, so
    // 8 bytes after them must be readable.
    bool fast = coded && shared_memory().classes.by_threshold && parts.low_bits != 0 && parts.states == WARP &&
                chunk.output.alignment() % 16 == 0 && parts.sizes_at + 8 <= padded(chunk.size) && parts.exceptions == 0;
    return fast ? chunk.lanes / TileShape<W>::LANES : 0;
}

template <int W, int HOW, int EXTRA>
__device__ __forceinline__ void decode_segment(u32 segment, const Ring& ring, u32 store, Sums& sums) {
    typedef TileShape<W> Shape;
    Shared& shared = shared_memory();
    const Chunk& chunk = shared.chunk;
    const Parts& parts = shared.parts;
    u32 tiles = (chunk.lanes + Shape::LANES - 1) / Shape::LANES;
    u32 begin = uniform(segment * tiles >> parts.segments_log2),
        end = uniform((segment + 1) * tiles >> parts.segments_log2);
    u32 fast = uniform(min(end, fast_tiles<W, HOW>()));
    Work work = {open_stream(chunk, parts, segment), ring, sums};
    work.shared_at = uniform(shared_address(&shared));
    work.tile_at = uniform(shared_address(&tile_of_warp()));
    work.thread = __shfl_sync(ALL_LANES, threadIdx.x % WARP, threadIdx.x % WARP);
    work.before = (1u << work.thread) - 1;
    work.states = uniform(parts.states);
    work.bits = uniform(parts.activity_bits);
    work.number = begin + ring.member;
    work.has_extra = false;
    bool decodes_last = (end - 1 - work.number) % ring.count == 0; // this warp decodes the last tile of the segment
    bool shared_stream = ring.count > 1, more = fast != end;
    Marker marker = open_marker(chunk, parts, begin * Shape::LANES);
    u32 next = uniform(marker.next / Shape::LANES); // next tile with exceptions
    work.receives = shared_stream && ring.member != 0;
    auto open = [&](bool hands_over) {
        work.hands_over = shared_stream && hands_over;
        work.marked = false;
        if (next <= work.number) {
            u32 first = work.number * Shape::LANES;
            marker = mark_exceptions(marker, chunk, parts, first, first + Shape::LANES, work.tile());
            work.marked = uniform(marker.marked);
            next = uniform(marker.next / Shape::LANES);
        }
    };
    if constexpr (W != 8 && HOW != SLOWLY) {
        uint4 pieces[Shape::PIECES] = {};
        StagedWords words;
        if (HOW == LOW_BITS && work.number < fast) {
            // All lanes are coded, so the queue is unused. Its memory holds the staged words.
            static_assert(sizeof(Tile::queue) >= 2 * STAGED_BYTES - 1,
                          "an aligned window fits, wherever the queue begins");
            words.at = (shared_address(work.tile().queue) + STAGED_BYTES - 1) & ~(STAGED_BYTES - 1);
            words.open(work.stream);
        }
#if !FORMS_BASE
        if (HOW != LOW_BITS && work.number < fast) load_tile<W>(chunk, work.number, work.thread, pieces);
#endif
#pragma unroll 1
        for (; work.number < fast; work.number += ring.count) {
            open(work.number + 1 < fast || more);
            if constexpr (HOW == LOW_BITS) decode_without_base<W>(work, words, store);
            else decode_tile<W, HOW, EXTRA>(work, pieces, fast, store);
            work.receives = shared_stream;
        }
    }
#pragma unroll 1
    for (; work.number < end; work.number += ring.count) {
        open(work.number + 1 < end);
        Slow slow = {work.stream, 0, 0, 0, 0};
        slow = decode_slowly<W>(slow, work.number, work.marked, store, ring, work.receives, work.hands_over);
        work.stream = slow.stream;
        work.sums.base += slow.base;
        work.sums.target += slow.target;
        work.sums.changed += slow.changed;
        work.sums.errors |= slow.errors;
        work.receives = shared_stream;
    }
    sums = work.sums;
    if (decodes_last) {
        if (ring.count > 1 && shared_u32<TPDE_OFFSET_OF(StreamHandoff, bad)>(ring.handoff))
            sums.errors |= error(TPDE_STATUS_PAYLOAD_DELTAS);
        else sums.errors |= finish_stream(work.stream);
    }
}

template <int W, int HOW, int EXTRA> __device__ __noinline__ void decode(u32 store) {
    u32 log2 = uniform(shared_memory().parts.segments_log2), rounds = log2 > WARPS_LOG2 ? 1u << (log2 - WARPS_LOG2) : 1;
    Ring ring = open_ring(log2);
    Sums own = {};
    u32 segment = uniform(threadIdx.x / WARP) & ((1u << log2) - 1);
    for (u32 round = 0; round < rounds; round++, segment += WARPS)
        decode_segment<W, HOW, EXTRA>(segment, ring, store, own);
    add_to(shared_memory().totals, own.base, own.target, own.changed, own.errors);
}
