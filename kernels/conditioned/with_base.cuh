// The fast path for a complete tile of floats with a base and without low bits (spec/codecs.md sections 4.4 to 4.6).
#pragma once
#include "conditioned/work.cuh"

// The coded lanes of a tile.
struct CodedLanes {
    u32 blocks;    // if `by_block`: bit mask of the coded rows of 32 lanes; the four rows of a block have equal bits
    u32 count;     // if not `by_block`: number of lanes in the queue
    bool by_block; // every block is either entirely coded or not coded at all
};

// Each thread: clears the bits of lanes of class 0 in the mask of its row. The mask has all lanes below a threshold. If
// `Classes::holes` is set, some of these have class 0.
template <int W> __device__ __noinline__ u32 without_holes(u32 activity, u32 mask) {
    u32 lanes = shared_address(tile_of_warp().lanes) + 32 * W * (threadIdx.x % WARP);
    for (u32 rest = mask; rest; rest &= rest - 1) {
        Entry entry = class_of<W>(activity, shared_lane<W>(lanes + W * (__ffs((i32)rest) - 1)));
        if (entry.x == shared_memory().classes.none.x) mask ^= rest & (0u - rest);
    }
    return mask;
}

// A warp: finds the coded lanes of a complete tile, whose pieces are also in shared memory. Starts and ends with the
// warp converged. `in_rows`: the caller can decode steps of whole rows of 32 lanes.
template <int W>
__device__ __forceinline__ CodedLanes find_coded(Shared& shared, u32 bits, u32 activities, u32 thread, bool in_rows,
                                                 const uint4* pieces, Tile& tile) {
    constexpr u32 ROWS = TileShape<W>::LANES / 32;
    if (bits) mark_pieces<W, true>(shared.parts, bits, activities, thread, pieces, tile);
    else mark_pieces<W, false>(shared.parts, bits, activities, thread, pieces, tile);
    __syncwarp();
    u32 mask = thread < ROWS ? tile.masks[thread] : 0, activity = bits ? activity_of_row(bits, activities, thread) : 0;
    if (uniform(shared.classes.holes)) mask = without_holes<W>(activity, mask);
    u32 full = __ballot_sync(ALL_LANES, mask == ~0u), rows = __ballot_sync(ALL_LANES, mask != 0);
    if (in_rows && full == rows && (rows & 0x11111111) * 15 == rows) return {rows, 0, true};
    return {0, queue_rows<W>(mask, activity, thread, tile), false};
}

// A warp: decodes a complete tile, whose base lanes are in `pieces`. On return `pieces` holds the base lanes of the next
// tile of the warp, if that tile is before tile `end`. A derived base is formed here instead: forming it ahead would need
// more registers.
template <int W, int HOW, int EXTRA>
__device__ __forceinline__ void decode_tile(Work& work, uint4* pieces, u32 end, u32 store) {
    typedef typename WideOf<W>::type T;
    typedef typename LaneOf<W>::type Lane;
    typedef TileShape<W> Shape;
    constexpr bool IN_TILE = HOW == TO_TILE || HOW == KEEP_TILE;
    Shared& shared = work.shared();
    const Chunk& chunk = shared.chunk;
    Tile& tile = work.tile();
    u32 thread = work.thread, lanes = shared_address(tile.lanes), first = work.number * Shape::LANES;
    u32 activities =
        activities_of_tile(chunk.payload + shared.parts.activities_at, work.bits, work.number, Shape::BLOCKS);
    u64 row = row_weight(work.number * Shape::WORDS);
#if FORMS_BASE
    form_tile<W>(chunk, work.number, thread,
                 [&](u32 by, uint4 piece) { *(uint4*)(tile.lanes + (thread * Shape::UNIT + by) * W) = piece; });
    read_tile<W>(tile, thread, pieces);
#endif
    u64 base_sum = row * tile_sum<W>(shared.weights, work.number, thread, pieces);
    if (!FORMS_BASE) write_tile<W>(tile, thread, pieces);
    if constexpr (HOW == KEEP_TILE) {
        u8* kept = shared.kept + (first + thread * Shape::UNIT) * W;
#pragma unroll
        for (int p = 0; p < Shape::PIECES; p++) __stcs((uint4*)(kept + Shape::lane_of(p) * W), pieces[p]);
    }
    CodedLanes coded =
        find_coded<W>(shared, work.bits, activities, thread, work.states == WARP && !work.marked, pieces, tile);
    // Loads the next tile while this tile is decoded.
#if !FORMS_BASE
    if (work.number + work.ring.count < end) load_tile<W>(chunk, work.number + work.ring.count, thread, pieces);
    // Prefetches the tile after the next into L2. Where changes are rare, DRAM takes longer than the decoding of a tile.
    u32 later = work.number + 2 * work.ring.count;
    if (thread < Shape::LANES * W / 128 && later < end)
        prefetch_l2(chunk.base.byte(later * Shape::LANES * W + 128 * thread));
#endif
    // Prefetches the words of the stream for this tile and the next, because base lanes evict them from L1. If several
    // warps share a stream, each warp needs few words and no prefetch.
    if (work.ring.count == 1 && thread < 5)
        prefetch(work.stream.words + min(work.stream.at + 64 * thread, work.stream.last));
    work.sums.base += base_sum;
    u64 gained = 0, lost = 0; // terms of the sum, before multiplication by the row weight
    DirectWords words;
    u32 shift = shared.classes.order.shift, mask = shared.classes.order.mask;
    T magnitude = (T)shared.classes.order.magnitude;
    // Applies the difference `moved` to the lane at byte offset `at` of the tile. `in_rows`: every thread has a lane.
    auto apply = [&](bool in_rows, u32 at, T base, T moved) {
        u32 position = first * W + at;
        bool changed = moved != 0;
        count_if(work.sums.changed, changed);
        if constexpr (IN_TILE) {
            if (in_rows || changed) set_shared_lane<W>(lanes + at, move_lane_in<W>(base, moved, magnitude));
        } else {
            T target = move_lane<W>(base, moved, magnitude);
            u32 q = shared.weights[position / 4 % TPDE_ROW_WORDS], by = 8 * (position % 4);
            gained += (u64)q * (u32)(target << by);
            lost += (u64)q * (u32)(base << by);
            if (HOW == TO_LIST) list_changes<W>(shared, thread, work.before, changed, position, target);
            else if (changed && store == STORE_CHANGES) *(Lane*)chunk.output.byte(position) = (Lane)target;
        }
        return changed;
    };
    if (coded.by_block) {
        if (work.receives) receive_stream(work.ring, work.thread, work.stream);
        u32 blocks = uniform(coded.blocks), at;
        T bases[4];
        Entry entries[4];
        auto take_block = [&] {
            u32 row = __ffs((i32)blocks) - 1,
                map = work.bits ? activities >> (row / 4 * work.bits) & ((1u << work.bits) - 1) : 0;
            at = (32 * row + thread) * W;
            blocks ^= 15u << row;
#pragma unroll
            for (int i = 0; i < 4; i++) bases[i] = shared_lane<W>(lanes + at + 32 * W * i);
#pragma unroll
            for (int i = 0; i < 4; i++) entries[i] = entry_of<W>(shared, map, (i32)((u32)(bases[i] >> shift) & mask));
        };
        auto decode_row = [&](int i) {
            apply(true, at + 32 * W * i, bases[i],
                  decode_step<W, EXTRA>(work.stream, words, entries[i], work.before, false));
        };
        // Changes are so rare that many rows have no change.
        if (EXTRA == NO_EXTRA && chunk.num_deltas < chunk.lanes / 40) {
#pragma unroll 1
            while (blocks) {
                take_block();
                u32 frequencies[4];
#pragma unroll
                for (int i = 0; i < 4; i++) frequencies[i] = zero_frequency(entries[i]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (!skip_step(work.stream, frequencies[i])) decode_row(i);
                }
            }
        }
#pragma unroll 1
        while (blocks) {
            take_block();
#pragma unroll
            for (int i = 0; i < 4; i++) decode_row(i);
        }
        if (work.hands_over) hand_over_stream(work.ring, work.thread, work.stream);
    } else {
        // Threads without a state read NO_ENTRY.
        bool is_state = thread < work.states;
        u32 from = is_state ? shared_address(tile.queue) + 2 * thread : shared_address(&tile.no_entry),
            stride = is_state ? 2 * work.states : 0;
        u32 at;
        T base;
        Entry entry;
        auto fetch = [&] {
            u32 queued = shared_u16(from);
            from += stride;
            at = queued % (1u << QUEUE_MAP);
            base = shared_lane<W>(lanes + at);
            entry = entry_of<W>(shared, queued >> QUEUE_MAP, (i32)((u32)(base >> shift) & mask));
        };
        u32 count = uniform(coded.count);
        fetch();
        if (work.receives) receive_stream(work.ring, work.thread, work.stream);
        if (count == 0 && work.hands_over) hand_over_stream(work.ring, work.thread, work.stream);
#pragma unroll 1
        for (u32 done = 0; done < count;) {
            u32 current_at = at;
            T current_base = base;
            Entry current_entry = entry;
            done += work.states;
            fetch();
            T moved = decode_step<W, EXTRA>(work.stream, words, current_entry, work.before, false);
            // The next warp receives the stream before this warp applies the lanes of the last step.
            if (work.hands_over && done >= count) hand_over_stream(work.ring, work.thread, work.stream);
            bool changed = apply(false, current_at, current_base, moved);
            if (work.marked && changed && is_excepted(tile, current_at / W))
                work.sums.errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
        }
    }
    if constexpr (IN_TILE) {
        __syncwarp();
        if (work.marked) {
            except_tile<W>(first);
            if (thread == 0) work.sums.changed += tile.exceptions;
            __syncwarp();
        }
        uint4 out[Shape::PIECES];
        read_tile<W>(tile, thread, out);
        if (store != STORE_NONE) store_tile<W>(chunk, work.number, thread, out);
        work.sums.target += row * tile_sum<W>(shared.weights, work.number, thread, out) - base_sum;
    } else {
        work.sums.target += row * (gained - lost);
    }
    __syncwarp();
}
