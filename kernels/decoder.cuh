// The decoding of a segment, tile by tile (spec/codecs.md sections 4.4 to 4.6).
#pragma once
#include "slow.cuh"

// How tiles are decoded.
enum : int {
    TO_LIST,   // STORE_LIST
    TO_OUTPUT, // each change on its own, with any other
    TO_TILE,   // to the tile, which leaves as a whole
    LOW_BITS,  // the same, for floats with low bits and without a base, all of them coded; and what is decoded slowly anyway
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
template <int W> __device__ __forceinline__ Coded find_coded(u32 bits, u32 activities, bool in_rows, const uint4* pieces, Tile& tile) {
    constexpr u32 ROWS = TileShape<W>::LANES / 32;
    u32 thread = threadIdx.x % WARP;
    if (bits) mark_pieces<W, true>(shared_memory().parts, bits, activities, pieces, tile);
    else mark_pieces<W, false>(shared_memory().parts, bits, activities, pieces, tile);
    __syncwarp();
    u32 mask = thread < ROWS ? tile.masks[thread] : 0, activity = bits ? activity_of_row(bits, activities) : 0;
    if (uniform(shared_memory().classes.holes)) mask = without_holes<W>(activity, mask);
    u32 full = __ballot_sync(ALL_LANES, mask == ~0u), rows = __ballot_sync(ALL_LANES, mask != 0);
    if (in_rows && full == rows && (rows & 0x11111111) * 15 == rows) return {rows, 0, true};
    return {0, queue_rows<W>(mask, activity, tile), false};
}

// What of a chunk is decoded fast: its first tiles.
template <int W, int HOW> __device__ __forceinline__ u32 fast_tiles() {
    const Chunk& chunk = shared_memory().chunk;
    const Parts& parts = shared_memory().parts;
    if (HOW != LOW_BITS) return whole_tiles<W>(chunk);
    bool coded = true;
    for (u32 a = 0; a < 1u << parts.activity_bits; a++) coded &= entry_of<W>(a, 0).x != shared_memory().classes.none.x;
    // Low bits are read by the word, and a bit further.
    bool fast = coded && shared_memory().classes.by_threshold && parts.low_bits != 0 && parts.states == WARP && chunk.base_lanes == 0 &&
                (u64)chunk.output % 16 == 0 && parts.sizes_at + 12 <= padded(chunk.size) && parts.exceptions == 0;
    return fast ? chunk.lanes / TileShape<W>::LANES : 0;
}

// The low bits of the lanes that a thread has, one in each row: they lie `count` words apart, at the same bit.
template <int W> struct LowBits {
    const u32* words;
    u32 count, shift;
    typename WideOf<W>::type mask;

    __device__ __forceinline__ void open(const Chunk& chunk, const Parts& parts, u32 at) {
        u64 bit = 8ull * parts.low_at + (u64)at * parts.low_bits;
        words = (const u32*)chunk.payload + bit / 32;
        count = parts.low_bits;
        shift = bit % 32;
        mask = (typename WideOf<W>::type)0 - 1 >> (8 * sizeof mask - count);
    }
    __device__ __forceinline__ typename WideOf<W>::type next() {
        u32 a = __ldg(words), b = __ldg(words + 1), low = __funnelshift_r(a, b, shift);
        typename WideOf<W>::type bits = low;
        if constexpr (W == 8) bits |= (u64)__funnelshift_r(b, __ldg(words + 2), shift) << 32;
        words += count;
        return bits & mask;
    }
};

// The lane that a delta makes of a float that is 0: the sign is the delta's lowest bit.
template <int W> __device__ __forceinline__ typename WideOf<W>::type lane_of_delta(typename WideOf<W>::type delta) {
    return delta >> 1 | delta << (8 * W - 1);
}

template <int W, int HOW>
__device__ __forceinline__ void decode_segment(u32 segment, const Ring& ring, u32 store, List& list, Sums& sums) {
    typedef typename WideOf<W>::type T;
    typedef typename LaneOf<W>::type Lane;
    typedef TileShape<W> Shape;
    constexpr u32 LANES = Shape::LANES;
    Shared& shared = shared_memory();
    const Chunk& chunk = shared.chunk;
    const Parts& parts = shared.parts;
    Tile& tile = tile_of_warp();
    u32 thread = threadIdx.x % WARP, before = (1u << thread) - 1, states = uniform(parts.states), bits = uniform(parts.activity_bits);
    u32 lanes = shared_address(tile.lanes), tiles = (chunk.lanes + LANES - 1) / LANES;
    u32 begin = uniform(segment * tiles >> parts.segments_log2), end = uniform((segment + 1) * tiles >> parts.segments_log2);
    u32 fast = uniform(min(end, fast_tiles<W, HOW>()));
    Stream stream = open_stream(chunk, parts, segment);
    Marker marker = open_marker(chunk, parts, begin * LANES);
    uint4 pieces[Shape::PIECES] = {};
    u32 number = begin + ring.member;
    bool ends = (end - 1 - number) % ring.count == 0; // the segment's last tile is this warp's
    // Whose turn it is, and which lanes are excepted.
    bool takes, passes, marked;
    auto open_tile = [&] {
        u32 first = number * LANES;
        takes = ring.count > 1 && number != begin;
        passes = ring.count > 1 && number + 1 != end;
        marker.marked = false;
        if (uniform(marker.next) < first + LANES) marker = mark_exceptions(marker, chunk, parts, first, first + LANES, tile.excepted);
        marked = uniform(marker.marked);
    };
    auto decode_tile_slowly = [&] {
        Slow slow = {stream, 0, 0, 0, 0, list.count};
        slow = decode_slowly<W>(slow, number, marked, store, list, ring, takes, passes);
        stream = slow.stream;
        sums.base += slow.base;
        sums.target += slow.target;
        sums.changed += slow.changed;
        sums.errors |= slow.errors;
        list.count = slow.listed;
    };
    if (HOW != LOW_BITS && number < fast) load_tile<W>(chunk, number, pieces);
#pragma unroll 1
    for (; number < fast; number += ring.count) {
        open_tile();
        u32 first = number * LANES, activities = bits ? activities_of_tile(chunk.payload + parts.activities_at, bits, number, Shape::BLOCKS) : 0;
        u64 row = row_weight(number * Shape::WORDS);
        if constexpr (HOW == LOW_BITS) {
            LowBits<W> low;
            low.open(chunk, parts, first + thread);
            T mask = high_mask<W>(low.count);
            Entry entry = entry_of<W>(0, 0);
            if (takes) take_turn(ring, stream);
#pragma unroll 1
            for (u32 block = 0; block < Shape::BLOCKS; block++) {
                if (bits) entry = entry_of<W>(activities >> block * bits & ((1u << bits) - 1), 0);
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    T lower = low.next(), delta = high_bits<W>(decode_step<W>(stream, entry, before, true), mask) | lower;
                    count_if(sums.changed, delta != 0);
                    set_shared_lane<W>(lanes + (BLOCK_LANES * block + 32 * i + thread) * W, lane_of_delta<W>(delta));
                }
            }
            if (passes) pass_turn(ring, stream);
            __syncwarp();
            read_tile<W>(tile, pieces);
            if (store != STORE_NONE) store_tile<W>(chunk, number, pieces);
            sums.target += row * tile_sum<W>(shared.weights, number, pieces);
            __syncwarp();
            continue;
        }
        u64 of_base = row * tile_sum<W>(shared.weights, number, pieces);
        write_tile<W>(tile, pieces);
        Coded coded = find_coded<W>(bits, activities, states == WARP && !marked, pieces, tile);
        // The next lanes arrive while these are decoded.
        if (number + ring.count < fast) load_tile<W>(chunk, number + ring.count, pieces);
        sums.base += of_base;
        u64 gained = 0, lost = 0; // terms of the sum without the weight of the row
        u32 shift = shared.classes.order.shift, mask = shared.classes.order.mask;
        T magnitude = (T)shared.classes.order.magnitude;
        // A lane at `place` of the tile, in bytes. `in_rows`: every thread has one.
        auto apply = [&](bool in_rows, u32 place, T base, T moved) {
            u32 position = first * W + place;
            bool changed = moved != 0;
            if (HOW != TO_LIST) count_if(sums.changed, changed);
            if constexpr (HOW == TO_TILE) {
                if (in_rows || changed) set_shared_lane<W>(lanes + place, move_lane_in<W>(base, moved, magnitude));
            } else {
                T target = move_lane<W>(base, moved, magnitude);
                if constexpr (W == 8) {
                    if (changed) sums.target += lane_term<W>(position / W, base, target);
                } else {
                    u32 q = shared.weights[position / 4 % TPDE_ROW_WORDS], by = 8 * (position % 4);
                    gained += (u64)q * (u32)(target << by);
                    lost += (u64)q * (u32)(base << by);
                }
                if (HOW == TO_LIST) list.count = list_changes<W>(list, list.count, changed, position, target);
                else if (changed && store == STORE_CHANGES) *(Lane*)(chunk.output + position) = (Lane)target;
            }
            return changed;
        };
        if (coded.whole) {
            if (takes) take_turn(ring, stream);
            u32 blocks = uniform(coded.blocks);
#pragma unroll 1
            while (blocks) {
                u32 row = __ffs((i32)blocks) - 1, map = bits ? activities >> (row / 4 * bits) & ((1u << bits) - 1) : 0;
                u32 place = (32 * row + thread) * W;
                blocks ^= 15u << row;
                T bases[4];
                Entry entries[4];
#pragma unroll
                for (int i = 0; i < 4; i++) bases[i] = shared_lane<W>(lanes + place + 32 * W * i);
#pragma unroll
                for (int i = 0; i < 4; i++) entries[i] = entry_of<W>(map, (i32)((u32)(bases[i] >> shift) & mask));
#pragma unroll
                for (int i = 0; i < 4; i++) apply(true, place + 32 * W * i, bases[i], decode_step<W>(stream, entries[i], before, false));
            }
            if (passes) pass_turn(ring, stream);
        } else {
            // Threads that are no states have no lanes.
            u32 from = thread < states ? shared_address(tile.queue) + 2 * thread : shared_address(&tile.no_entry), stride = thread < states ? 2 * states : 0;
            u32 place;
            T base;
            Entry entry;
            auto fetch = [&] {
                u32 queued = shared_u16(from);
                from += stride;
                place = queued % (1u << QUEUE_MAP);
                base = shared_lane<W>(lanes + place);
                entry = entry_of<W>(queued >> QUEUE_MAP, (i32)((u32)(base >> shift) & mask));
            };
            u32 count = uniform(coded.count);
            fetch();
            if (takes) take_turn(ring, stream);
            if (count == 0 && passes) pass_turn(ring, stream);
#pragma unroll 1
            for (u32 done = 0; done < count;) {
                u32 at = place;
                T of = base;
                Entry now = entry;
                done += states;
                fetch();
                T moved = decode_step<W>(stream, now, before, false);
                // Whoever is next need not wait until this warp has done with the last step's lanes.
                if (passes && done >= count) pass_turn(ring, stream);
                bool changed = apply(false, at, of, moved);
                if (marked && changed && is_excepted(tile, at / W)) sums.errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
            }
        }
        if constexpr (HOW == TO_TILE) {
            __syncwarp();
            uint4 out[Shape::PIECES];
            read_tile<W>(tile, out);
            if (store != STORE_NONE) store_tile<W>(chunk, number, out);
            sums.target += row * tile_sum<W>(shared.weights, number, out) - of_base;
        } else if (W != 8) {
            sums.target += row * (gained - lost);
        }
        __syncwarp();
    }
#pragma unroll 1
    for (; number < end; number += ring.count) {
        open_tile();
        decode_tile_slowly();
    }
    if (ends) {
        if (ring.count > 1 && shared_u32<TPDE_OFFSET_OF(Turn, bad)>(ring.turn)) sums.errors |= error(TPDE_STATUS_PAYLOAD_DELTAS);
        else sums.errors |= finish_stream(stream);
    }
}
