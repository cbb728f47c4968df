// The decoding of a segment, tile by tile (spec/codecs.md sections 4.4 to 4.6).
#pragma once
#include "slow.cuh"

// How tiles are decoded.
enum : int {
    TO_LIST,   // STORE_LIST
    TO_OUTPUT, // each change on its own, with any other
    TO_TILE,   // to the tile, which leaves as a whole
    LOW_BITS,  // the same, for floats with low bits and without a base, all of them coded; and what is decoded slowly anyway: integers,
               // and lanes of 8 bytes, which are too rare for code of their own
};

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

// What a warp has in hand, from tile to tile.
struct Work {
    Stream stream;
    Ring ring;
    Sums sums;
    u32 shared_at, tile_at;   // shared addresses: what the compiler cannot work out again, it keeps
    u32 thread, before;       // of the warp; a mask of those before
    u32 states, bits;         // of the payload
    u32 number;               // of the tile
    bool takes, passes;       // the stream: from the warp before, to the next one
    bool marked;              // some lanes of the tile are excepted
    bool extra;               // the tile before had extra bits

    __device__ __forceinline__ Shared& shared() const { return *(Shared*)shared_pointer(shared_at); }
    __device__ __forceinline__ Tile& tile() const { return *(Tile*)shared_pointer(tile_at); }
};

// The low bits of the lanes that a thread has, four rows of 32 lanes at a time, and what they and a value make of a lane: the delta,
// whose lowest bit is the sign, as the base is 0.
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
    // They lie `count` words apart, at the same bit.
    __device__ __forceinline__ void next(u32* rows) {
#pragma unroll
        for (int i = 0; i < 4; i++, words += count) rows[i] = __funnelshift_r(__ldg(words), __ldg(words + 1), shift) & mask;
    }
    __device__ __forceinline__ T lane(T value, u32 low) const {
        T delta = ((center - value) & high) << count % (8 * sizeof(T)) | low;
        return delta >> 1 | delta << (8 * W - 1);
    }
};

// The same where they are bytes, and so is the rest: BF16.
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
    // The delta twice, so that a shift turns it; the upper half is of no use.
    __device__ __forceinline__ u32 lane(u32 value, u32 low) const { return permute_bytes(low, center - value, 0x4040) >> 1; }
};

// A warp: the lanes of a tile of floats without a base, all of them coded, to shared memory.
template <int W, int EXTRA, typename Low> __device__ __forceinline__ void decode_blocks(Work& work, StagedWords& words, u32 activities) {
    typedef typename WideOf<W>::type T;
    typedef TileShape<W> Shape;
    Shared& shared = work.shared();
    u32 thread = work.thread, lanes = shared_address(work.tile().lanes) + thread * W;
    Low low;
    low.open(shared.chunk, shared.parts, work.number * Shape::LANES + thread);
    u32 rows[4], coming[4];
    low.next(coming);
    Entry entry = entry_of<W>(shared, 0, 0);
#pragma unroll 1
    for (u32 block = 0; block < Shape::BLOCKS; block++) {
#pragma unroll
        for (int i = 0; i < 4; i++) rows[i] = coming[i];
        // Low bits arrive while the block before is decoded.
        if (block + 1 < Shape::BLOCKS) low.next(coming);
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

// The same, the first time as if there were no extra bits. Lanes of 2 bytes rarely have any: where a tile has, it is decoded again, and so is
// the next one at once.
template <int W, typename Low> __device__ __forceinline__ void decode_blocks_twice(Work& work, StagedWords& words, u32 activities) {
    Stream before = work.stream;
    u32 changed = work.sums.changed;
    if (!work.extra) {
        work.stream.worst = 0;
        decode_blocks<W, SEES_EXTRA, Low>(work, words, activities);
        work.extra = __any_sync(ALL_LANES, work.stream.worst >= SYMBOL_EXTRA);
        work.stream.worst = before.worst;
        if (!work.extra) return;
        work.stream = before;
        work.sums.changed = changed;
        words.open(work.stream);
    }
    work.stream.worst = 0;
    decode_blocks<W, READS_EXTRA, Low>(work, words, activities);
    work.extra = __any_sync(ALL_LANES, work.stream.worst >= SYMBOL_EXTRA);
    work.stream.worst = max(work.stream.worst, before.worst);
}

// A warp: a tile of floats without a base, all of them coded.
template <int W> __device__ __forceinline__ void decode_without_base(Work& work, StagedWords& words, u32 store) {
    typedef TileShape<W> Shape;
    Shared& shared = work.shared();
    const Chunk& chunk = shared.chunk;
    Tile& tile = work.tile();
    u32 thread = work.thread;
    u32 activities = activities_of_tile(chunk.payload + shared.parts.activities_at, work.bits, work.number, Shape::BLOCKS);
    if (work.takes) {
        take_turn(work.ring, thread, work.stream);
        words.open(work.stream);
    }
    if (W == 2 && uniform(shared.parts.low_bits) == 8) {
        if constexpr (W == 2) decode_blocks_twice<W, LowBytes>(work, words, activities);
    } else {
        decode_blocks<W, READS_EXTRA, LowBits<W>>(work, words, activities);
    }
    if (work.passes) pass_turn(work.ring, thread, work.stream);
    __syncwarp();
    uint4 pieces[Shape::PIECES];
    read_tile<W>(tile, thread, pieces);
    if (store != STORE_NONE) store_tile<W>(chunk, work.number, thread, pieces);
    work.sums.target += row_weight(work.number * Shape::WORDS) * tile_sum<W>(shared.weights, work.number, thread, pieces);
    __syncwarp();
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
        u32 blocks = uniform(coded.blocks);
#pragma unroll 1
        while (blocks) {
            u32 row = __ffs((i32)blocks) - 1, map = work.bits ? activities >> (row / 4 * work.bits) & ((1u << work.bits) - 1) : 0;
            u32 place = (32 * row + thread) * W;
            blocks ^= 15u << row;
            T bases[4];
            Entry entries[4];
#pragma unroll
            for (int i = 0; i < 4; i++) bases[i] = shared_lane<W>(lanes + place + 32 * W * i);
#pragma unroll
            for (int i = 0; i < 4; i++) entries[i] = entry_of<W>(shared, map, (i32)((u32)(bases[i] >> shift) & mask));
#pragma unroll
            for (int i = 0; i < 4; i++) apply(true, place + 32 * W * i, bases[i], decode_step<W, EXTRA>(work.stream, words, entries[i], work.before, false));
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

// What of a chunk is decoded fast: its first tiles.
template <int W, int HOW> __device__ __forceinline__ u32 fast_tiles() {
    const Chunk& chunk = shared_memory().chunk;
    const Parts& parts = shared_memory().parts;
    if (W == 8) return 0;
    if (HOW != LOW_BITS) return whole_tiles<W>(chunk);
    bool coded = true;
    for (u32 a = 0; a < 1u << parts.activity_bits; a++) coded &= entry_of<W>(shared_memory(), a, 0).x != shared_memory().classes.none.x;
    // Low bits are read by the word, and a bit further.
    bool fast = coded && shared_memory().classes.by_threshold && parts.low_bits != 0 && parts.states == WARP && chunk.base_lanes == 0 &&
                (u64)chunk.output % 16 == 0 && parts.sizes_at + 8 <= padded(chunk.size) && parts.exceptions == 0;
    return fast ? chunk.lanes / TileShape<W>::LANES : 0;
}

template <int W, int HOW, int EXTRA> __device__ __forceinline__ void decode_segment(u32 segment, const Ring& ring, u32 store, Sums& sums) {
    typedef TileShape<W> Shape;
    Shared& shared = shared_memory();
    const Chunk& chunk = shared.chunk;
    const Parts& parts = shared.parts;
    u32 tiles = (chunk.lanes + Shape::LANES - 1) / Shape::LANES;
    u32 begin = uniform(segment * tiles >> parts.segments_log2), end = uniform((segment + 1) * tiles >> parts.segments_log2);
    u32 fast = uniform(min(end, fast_tiles<W, HOW>()));
    Work work = {open_stream(chunk, parts, segment), ring, sums};
    work.shared_at = uniform(shared_address(&shared));
    work.tile_at = uniform(shared_address(&tile_of_warp()));
    work.thread = __shfl_sync(ALL_LANES, threadIdx.x % WARP, threadIdx.x % WARP);
    work.before = (1u << work.thread) - 1;
    work.states = uniform(parts.states);
    work.bits = uniform(parts.activity_bits);
    work.number = begin + ring.member;
    work.extra = false;
    bool ends = (end - 1 - work.number) % ring.count == 0; // the segment's last tile is this warp's
    bool shares = ring.count > 1, more = fast != end;
    Marker marker = open_marker(chunk, parts, begin * Shape::LANES);
    u32 next = uniform(marker.next / Shape::LANES); // tile with exceptions
    work.takes = shares && ring.member != 0;
    auto open = [&](bool passes) {
        work.passes = shares && passes;
        work.marked = false;
        if (next <= work.number) {
            u32 first = work.number * Shape::LANES;
            marker = mark_exceptions(marker, chunk, parts, first, first + Shape::LANES, work.tile().excepted);
            work.marked = uniform(marker.marked);
            next = uniform(marker.next / Shape::LANES);
        }
    };
    if constexpr (W != 8) {
        uint4 pieces[Shape::PIECES] = {};
        StagedWords words;
        if (HOW == LOW_BITS && work.number < fast) {
            // The queue's memory, as all lanes are coded.
            static_assert(sizeof(Tile::queue) >= 2 * STAGED_BYTES - 1, "room at a multiple, wherever the queue begins");
            words.at = (shared_address(work.tile().queue) + STAGED_BYTES - 1) & ~(STAGED_BYTES - 1);
            words.open(work.stream);
        }
        if (HOW != LOW_BITS && work.number < fast) load_tile<W>(chunk, work.number, work.thread, pieces);
#pragma unroll 1
        for (; work.number < fast; work.number += ring.count) {
            open(work.number + 1 < fast || more);
            if constexpr (HOW == LOW_BITS) decode_without_base<W>(work, words, store);
            else decode_tile<W, HOW, EXTRA>(work, pieces, fast, store);
            work.takes = shares;
        }
    }
#pragma unroll 1
    for (; work.number < end; work.number += ring.count) {
        open(work.number + 1 < end);
        Slow slow = {work.stream, 0, 0, 0, 0};
        slow = decode_slowly<W>(slow, work.number, work.marked, store, ring, work.takes, work.passes);
        work.stream = slow.stream;
        work.sums.base += slow.base;
        work.sums.target += slow.target;
        work.sums.changed += slow.changed;
        work.sums.errors |= slow.errors;
        work.takes = shares;
    }
    sums = work.sums;
    if (ends) {
        if (ring.count > 1 && shared_u32<TPDE_OFFSET_OF(Turn, bad)>(ring.turn)) sums.errors |= error(TPDE_STATUS_PAYLOAD_DELTAS);
        else sums.errors |= finish_stream(work.stream);
    }
}
