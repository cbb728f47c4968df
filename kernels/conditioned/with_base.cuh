// A whole tile of floats that have a base, and no low bits (spec/codecs.md sections 4.4 to 4.6).
#pragma once
#include "conditioned/work.cuh"

// The coded lanes of a tile.
struct Coded {
    u32 blocks; // if `whole`: a bit for each row of 32 lanes, but the same for all of a block
    u32 count;  // if not: in the queue
    bool whole; // all lanes of a block, or none
};

// A thread of a warp: takes the lanes that are not coded from the 32 of its mask.
template <int W> __device__ __noinline__ u32 without_holes(u32 activity, u32 mask) {
    u32 lanes = shared_address(tile_of_warp().lanes) + 32 * W * (threadIdx.x % WARP);
    for (u32 rest = mask; rest; rest &= rest - 1) {
        Entry entry = class_of<W>(activity, shared_lane<W>(lanes + W * (__ffs((i32)rest) - 1)));
        if (entry.x == shared_memory().classes.none.x) mask ^= rest & (0u - rest);
    }
    return mask;
}

// A warp: which lanes of a whole tile are coded; its pieces are in shared memory too. Begins and ends with the warp in step. `in_rows`:
// whether steps may be rows of 32 lanes.
template <int W> __device__ __forceinline__ Coded find_coded(Shared& shared, u32 bits, u32 activities, u32 thread, bool in_rows, const uint4* pieces, Tile& tile) {
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

// A warp: a whole tile, whose base lanes are in `pieces`; then those are of its next one, if that is before tile `end`.
template <int W, int HOW, int EXTRA> __device__ __forceinline__ void decode_tile(Work& work, uint4* pieces, u32 end, u32 store) {
    typedef typename WideOf<W>::type T;
    typedef typename LaneOf<W>::type Lane;
    typedef TileShape<W> Shape;
    Shared& shared = work.shared();
    const Chunk& chunk = shared.chunk;
    Tile& tile = work.tile();
    u32 thread = work.thread, lanes = shared_address(tile.lanes), first = work.number * Shape::LANES;
    u32 activities = activities_of_tile(chunk.payload + shared.parts.activities_at, work.bits, work.number, Shape::BLOCKS);
    u64 row = row_weight(work.number * Shape::WORDS);
    u64 of_base = row * tile_sum<W>(shared.weights, work.number, thread, pieces);
    write_tile<W>(tile, thread, pieces);
    Coded coded = find_coded<W>(shared, work.bits, activities, thread, work.states == WARP && !work.marked, pieces, tile);
    // The next lanes arrive while these are decoded.
    if (work.number + work.ring.count < end) load_tile<W>(chunk, work.number + work.ring.count, thread, pieces);
    // So do the words of this tile and the next, for which other base lanes leave little room in the first-level cache. Where warps
    // share a stream there are few words.
    if (work.ring.count == 1 && thread < 5) prefetch(work.stream.words + min(work.stream.at + 64 * thread, work.stream.last));
    work.sums.base += of_base;
    u64 gained = 0, lost = 0; // terms of the sum without the weight of the row
    DirectWords words;
    u32 shift = shared.classes.order.shift, mask = shared.classes.order.mask;
    T magnitude = (T)shared.classes.order.magnitude;
    // A lane at `place` of the tile, in bytes. `in_rows`: every thread has one.
    auto apply = [&](bool in_rows, u32 place, T base, T moved) {
        u32 position = first * W + place;
        bool changed = moved != 0;
        count_if(work.sums.changed, changed);
        if constexpr (HOW == TO_TILE) {
            if (in_rows || changed) set_shared_lane<W>(lanes + place, move_lane_in<W>(base, moved, magnitude));
        } else {
            T target = move_lane<W>(base, moved, magnitude);
            u32 q = shared.weights[position / 4 % TPDE_ROW_WORDS], by = 8 * (position % 4);
            gained += (u64)q * (u32)(target << by);
            lost += (u64)q * (u32)(base << by);
            if (HOW == TO_LIST) list_changes<W>(shared, thread, work.before, changed, position, target);
            else if (changed && store == STORE_CHANGES) *(Lane*)(chunk.output + position) = (Lane)target;
        }
        return changed;
    };
    if (coded.whole) {
        if (work.takes) take_turn(work.ring, work.thread, work.stream);
        u32 blocks = uniform(coded.blocks), place;
        T bases[4];
        Entry entries[4];
        auto take_block = [&] {
            u32 row = __ffs((i32)blocks) - 1, map = work.bits ? activities >> (row / 4 * work.bits) & ((1u << work.bits) - 1) : 0;
            place = (32 * row + thread) * W;
            blocks ^= 15u << row;
#pragma unroll
            for (int i = 0; i < 4; i++) bases[i] = shared_lane<W>(lanes + place + 32 * W * i);
#pragma unroll
            for (int i = 0; i < 4; i++) entries[i] = entry_of<W>(shared, map, (i32)((u32)(bases[i] >> shift) & mask));
        };
        auto decode_row = [&](int i) {
            apply(true, place + 32 * W * i, bases[i], decode_step<W, EXTRA>(work.stream, words, entries[i], work.before, false));
        };
        // So few changes that there is none in many a row.
        if (EXTRA == NO_EXTRA && chunk.num_deltas < chunk.lanes / 40) {
#pragma unroll 1
            while (blocks) {
                take_block();
                u32 zeros[4];
#pragma unroll
                for (int i = 0; i < 4; i++) zeros[i] = zeros_of(entries[i]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (!skip_step(work.stream, zeros[i])) decode_row(i);
                }
            }
        }
#pragma unroll 1
        while (blocks) {
            take_block();
#pragma unroll
            for (int i = 0; i < 4; i++) decode_row(i);
        }
        if (work.passes) pass_turn(work.ring, work.thread, work.stream);
    } else {
        // Threads that are no states have no lanes.
        bool is_state = thread < work.states;
        u32 from = is_state ? shared_address(tile.queue) + 2 * thread : shared_address(&tile.no_entry), stride = is_state ? 2 * work.states : 0;
        u32 place;
        T base;
        Entry entry;
        auto fetch = [&] {
            u32 queued = shared_u16(from);
            from += stride;
            place = queued % (1u << QUEUE_MAP);
            base = shared_lane<W>(lanes + place);
            entry = entry_of<W>(shared, queued >> QUEUE_MAP, (i32)((u32)(base >> shift) & mask));
        };
        u32 count = uniform(coded.count);
        fetch();
        if (work.takes) take_turn(work.ring, work.thread, work.stream);
        if (count == 0 && work.passes) pass_turn(work.ring, work.thread, work.stream);
#pragma unroll 1
        for (u32 done = 0; done < count;) {
            u32 at = place;
            T of = base;
            Entry now = entry;
            done += work.states;
            fetch();
            T moved = decode_step<W, EXTRA>(work.stream, words, now, work.before, false);
            // Whoever is next need not wait until this warp has done with the last step's lanes.
            if (work.passes && done >= count) pass_turn(work.ring, work.thread, work.stream);
            bool changed = apply(false, at, of, moved);
            if (work.marked && changed && is_excepted(tile, at / W)) work.sums.errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
        }
    }
    if constexpr (HOW == TO_TILE) {
        __syncwarp();
        uint4 out[Shape::PIECES];
        read_tile<W>(tile, thread, out);
        if (store != STORE_NONE) store_tile<W>(chunk, work.number, thread, out);
        work.sums.target += row * tile_sum<W>(shared.weights, work.number, thread, out) - of_base;
    } else {
        work.sums.target += row * (gained - lost);
    }
    __syncwarp();
}
