// The decoding of a segment by a warp, tile by tile (spec/codecs.md sections 4.5 and 4.6).
#pragma once
#include "stream.cuh"
#include "tile.cuh"

// What becomes of target lanes.
enum : u32 {
    STORE_NONE = 0,
    STORE_ALL = 1,     // all lanes of the output
    STORE_CHANGES = 2, // in place
    STORE_LIST = 3,    // changes to a list that is carried out later
};

// How a warp does it.
enum : int {
    TO_LIST,   // STORE_LIST
    TO_OUTPUT, // each change on its own, with any other
    TO_TILE,   // to the tile, which leaves as a whole
    ANY_LANES, // to the tile, for integers and lanes with low bits; the others are for floats
};

// A change that waits for the checks of its chunk.
template <int W> struct alignas(W == 8 ? 16 : 8) Change {
    typename WideOf<W>::type position, lane; // the position in bytes of the chunk
};

// Those of a warp. What does not fit is counted, and lost.
struct List {
    u8* changes;
    u32 capacity, count;
    template <int W> __device__ __forceinline__ Change<W>& at(u32 i) const { return ((Change<W>*)changes)[i]; }
};

// What a thread adds to the sums of the chunk.
struct Sums {
    u64 base, target;
    u32 changed, errors;
};

// A coded lane in the hands of a thread.
template <int W> struct Coded {
    u32 position; // in bytes of the chunk
    u32 at;       // shared address of the lane in its tile
    typename WideOf<W>::type base;
    Entry entry;
};

template <bool B> struct Bool {
    static constexpr bool value = B;
};

// Exceptions, which ascend, as a warp passes them.
struct Marker {
    u32 exception, next; // first one that is not before the tile, and its position
};

__device__ __forceinline__ Marker open_marker(const Chunk& chunk, const Parts& parts, u32 first) {
    u32 begin = 0, end = parts.exceptions;
    while (begin < end) {
        u32 middle = (begin + end) / 2;
        if (exception_position(chunk, parts, middle) < first) begin = middle + 1;
        else end = middle;
    }
    return {begin, exception_position(chunk, parts, begin)};
}

// Marks the lanes of a tile that exceptions are for.
__device__ __noinline__ Marker mark_exceptions(Marker marker, const Chunk& chunk, const Parts& parts, u32 first, u32 end, u32* marks) {
    u32 thread = threadIdx.x % WARP;
    marks[thread] = 0;
    __syncwarp();
    u32 count;
    do {
        u32 position = exception_position(chunk, parts, marker.exception + thread);
        bool inside = position >= first && position < end;
        if (inside) atomicOr(&marks[(position - first) / 32], 1u << (position - first) % 32);
        count = __popc(__ballot_sync(ALL_LANES, inside));
        marker.exception += count;
    } while (count == WARP);
    __syncwarp();
    return {marker.exception, exception_position(chunk, parts, marker.exception)};
}

// Decodes a segment.
template <int W, int HOW>
__device__ __forceinline__ void decode_segment(
    const Chunk& chunk, const Parts& parts, const Classes& classes, const u32* weights, u32 segment, u32 store, Tile& tile, List& list, Sums& sums) {
    typedef typename WideOf<W>::type T;
    typedef typename LaneOf<W>::type Lane;
    typedef TileShape<W> Shape;
    constexpr u32 LANES = Shape::LANES;
    constexpr bool IN_TILE = HOW == TO_TILE || HOW == ANY_LANES;
    u32 thread = threadIdx.x % WARP, before = (1u << thread) - 1;
    u32 states = uniform(parts.states), activity_bits = parts.activity_bits, low_bits = HOW == ANY_LANES ? parts.low_bits : 0;
    u32 lanes = shared_address(tile.lanes), queue = shared_address(tile.queue), marks = shared_address(tile.excepted);
    T magnitude = (T)classes.order.magnitude;
    Range range = segment_range(chunk, parts.segments, segment);
    u32 end = uniform((range.end + LANES - 1) / LANES);
    Stream stream = open_stream(chunk, parts, segment);
    Marker marker = open_marker(chunk, parts, range.first);
    if (thread == 0) tile.nothing = QUEUE_NOTHING;
    __syncwarp();
    // The first `waiting` threads have coded lanes of the tiles before: too few for a step.
    u32 waiting = 0;
    Coded<W> coded = {};
    bool excepted = false; // an exception is for it
    auto is_fast = [&](u32 number) { return HOW != ANY_LANES && is_whole<W>(chunk, range, number); };
    auto is_excepted = [&](u32 place) { return shared_u32(marks + place / 32 * 4) >> place % 32 & 1; };
    uint4 pieces[Shape::PIECES];
    bool fast = uniform(is_fast(range.first / LANES));
    if (fast) load_tile<W>(chunk, range.first / LANES, pieces);
    for (u32 number = range.first / LANES; number < end; number++) {
        u32 first = number * LANES;
        u32 activities = activities_of_tile(chunk.payload + parts.activities_at, activity_bits, number, Shape::BLOCKS);
        u64 of_base, row = row_weight(number * Shape::WORDS);
        bool was_fast = fast;
        if (fast) {
            write_tile<W>(tile, pieces);
            of_base = row * tile_sum<W>(weights, number, pieces);
            mark_tile<W>(parts, classes, activities, pieces, tile);
        } else {
            of_base = gather_tile<W>(chunk, parts, classes, range, number, activities, tile);
        }
        sums.base += of_base;
        u32 available = waiting + queue_tile<W>(parts, activities, tile);
        // The next lanes arrive while these are decoded.
        fast = uniform(number + 1 < end && is_fast(number + 1));
        if (fast) load_tile<W>(chunk, number + 1, pieces);
        if (HOW == ANY_LANES && low_bits != 0) sums.changed += apply_low_bits<W>(chunk, parts, range, number, magnitude, tile);
        bool marked = uniform(marker.next < first + LANES);
        if (marked) marker = mark_exceptions(marker, chunk, parts, first, first + LANES, tile.excepted);
        // The coded lane of the thread in the next step; past the last one, or in a thread that is no state, it is of no class.
        bool is_state = thread < states;
        u32 from = is_state ? queue + 2 * (thread - waiting) : queue + 2 * (TILE_LANES + 2 * WARP), stride = is_state ? 2 * states : 0;
        auto fetch = [&] {
            u32 queued = shared_u16(from), place = queued % (1u << QUEUE_MAP);
            from += stride;
            coded.at = lanes + place;
            coded.base = shared_lane<W>(coded.at);
            if constexpr (HOW == ANY_LANES) coded.entry = class_of<W>(classes, queued >> QUEUE_MAP, coded.base);
            else coded.entry = class_of_context(classes, queued >> QUEUE_MAP, (i32)((u32)(coded.base >> classes.order.shift) & classes.order.mask));
            coded.position = first * W + place;
        };
        u32 late = waiting;
        if (thread >= late) fetch();
        else from += stride;
        u32 left = uniform(number + 1 == end ? available : available & ~(states - 1)), done = 0;
        u64 gained = 0, lost = 0; // terms of the sum without the weight of the row, which is the tile's
        auto step = [&](auto careful) {
            Coded<W> now = coded;
            fetch();
            T moved = decode_step<W>(stream, now.entry, before);
            if (HOW == ANY_LANES && low_bits != 0 && now.entry.x != classes.none) {
                // The value, from the difference that it would be.
                T value = moved << 1 ^ sign_of<W == 8 ? 8 : 4>(moved);
                T high = low_bits == 8 * W ? 0 : ((T)parts.center - value) & (((T)1 << (8 * W - low_bits) % (8 * sizeof(T))) - 1);
                moved = difference_of<W>((low_bits == 8 * W ? 0 : high << low_bits) | low_bits_of<W>(chunk, parts, now.position / W));
            }
            bool changed = moved != 0;
            T target = move_lane<W>(now.base, moved, magnitude);
            if (HOW != TO_LIST) count_if(sums.changed, changed);
            if constexpr (decltype(careful)::value) {
                bool put_off = thread < late;
                if (changed && (put_off ? excepted : marked && is_excepted(now.position / W - first))) {
                    sums.errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
                }
                if (changed && put_off) {
                    u64 term = lane_term<W>(now.position / W, now.base, target);
                    // Below, the weight of this tile's row is going to be taken.
                    if (!IN_TILE && W != 8) term -= term_in_row<W>(now.position / W, now.base, target) * row;
                    if (IN_TILE || W != 8) sums.target += term;
                    if (IN_TILE && store != STORE_NONE) store_lane<W>(chunk, now.position / W, target);
                }
                late = 0;
            }
            if constexpr (IN_TILE) {
                if (changed) set_shared_lane<W>(now.at, target);
            } else {
                if constexpr (W == 8) {
                    if (changed) sums.target += lane_term<W>(now.position / W, now.base, target);
                } else {
                    u32 q = weights[now.position / 4 % TPDE_ROW_WORDS], shift = 8 * (now.position % 4);
                    gained += (u64)q * (u32)(target << shift);
                    lost += (u64)q * (u32)(now.base << shift);
                }
                if (HOW == TO_LIST) {
                    u32 mask = __ballot_sync(ALL_LANES, changed), i = list.count + __popc(mask & before);
                    list.count += __popc(mask);
                    if (changed && i < list.capacity) list.template at<W>(i) = {now.position, target};
                } else if (changed && store == STORE_CHANGES) {
                    *(Lane*)(chunk.output + now.position) = (Lane)target;
                }
            }
            done += states;
        };
        // The first step may have lanes of tiles before.
        bool special = __any_sync(ALL_LANES, late != 0 || marked);
        if (special) {
#pragma unroll 1
            do {
                if (done >= left) break;
                step(Bool<true>{});
            } while (marked);
        }
#pragma unroll 1
        while (done < left) step(Bool<false>{});
        if (!IN_TILE && W != 8) sums.target += row * (gained - lost);
        waiting = available - left;
        if (thread >= late) excepted = marked && thread < waiting && is_excepted(coded.position / W - first);
        coded.at = shared_address(&tile.put_off);
        if (IN_TILE) sums.target += end_tile<W>(chunk, weights, row, range, number, store != STORE_NONE, was_fast, of_base, tile);
        __syncwarp();
    }
    sums.errors |= finish_stream(stream);
}
