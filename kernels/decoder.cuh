// The decoding of a segment's coded lanes, tile by tile (spec/codecs.md sections 4.5 and 4.6).
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

// Changes that wait for the checks: positions, then target lanes, as in a payload of codec `raw`.
struct List {
    u8* positions;
    u8* lanes;
    u32 capacity;
};

template <int W> struct Decoder {
    typedef typename WideOf<W>::type T;
    Stream stream;
    // A coded lane in the hands of each thread: its lane of the chunk, its base, its entry of a map. The first `waiting` threads
    // have theirs from the tiles before: too few for a step.
    u32 position, entry;
    T base;
    bool excepted;     // an exception is for it
    u32 waiting;
    u32 exception;     // first one that is not before the tile, and its position
    u32 next_exception;
    u32 listed;
    // Of this thread.
    u64 target_sum;    // terms of changes
    u32 changed, errors;
};

template <int W> __device__ __forceinline__ void open_segment(Decoder<W>& decoder, const Chunk& chunk, const Parts& parts, u32 segment, u32 first) {
    decoder.stream = open_stream(chunk, parts, segment);
    decoder.waiting = 0;
    decoder.excepted = false;
    u32 begin = 0, end = parts.exceptions;
    while (begin < end) {
        u32 middle = (begin + end) / 2;
        if (exception_position(chunk, parts, middle) < first) begin = middle + 1;
        else end = middle;
    }
    decoder.exception = begin;
    decoder.next_exception = exception_position(chunk, parts, begin);
}

// Marks the lanes of the tile that exceptions are for. False if there are none.
template <int W>
__device__ __forceinline__ bool mark_exceptions(Decoder<W>& decoder, const Chunk& chunk, const Parts& parts, u32 first, u32 end, u32 address) {
    if (decoder.next_exception >= end) return false;
    u32 thread = threadIdx.x % WARP;
    u32* marks = (u32*)shared_pointer(address);
    marks[thread] = 0;
    __syncwarp();
    u32 count;
    do {
        u32 position = exception_position(chunk, parts, decoder.exception + thread);
        bool inside = position >= first && position < end;
        if (inside) atomicOr(&marks[(position - first) / 32], 1u << (position - first) % 32);
        count = __popc(__ballot_sync(ALL_LANES, inside));
        decoder.exception += count;
    } while (count == WARP);
    decoder.next_exception = exception_position(chunk, parts, decoder.exception);
    __syncwarp();
    return true;
}

// What a decoding warp holds in registers while it works on a segment.
template <int W> struct Decoding {
    LookupAddress lookup;
    u32 maps, marks;   // shared addresses
    Classes classes;
    u32 states, activity_bits;
    u32 store;
};

// Decodes as many coded lanes of a tile as fill steps, or all of them in the segment's last. With IN_TILE target lanes go to the
// tile, but for those that were put off: their tile is gone, and they are on their own.
template <int W, bool IN_TILE, bool LOW_BITS>
__device__ __forceinline__ void decode_tile(
    Decoder<W>& decoder, const Decoding<W>& with, const Chunk& chunk, const Parts& parts, u32 number, bool last, const Tile& tile,
    const List& list, u32* listed) {
    typedef typename WideOf<W>::type T;
    typedef typename LaneOf<W>::type Lane;
    typedef TileShape<W> Shape;
    u32 thread = threadIdx.x % WARP, before = (1u << thread) - 1, states = with.states, first = number * Shape::LANES;
    u32 waiting = decoder.waiting, available = waiting + tile.count;
    bool marked = mark_exceptions(decoder, chunk, parts, first, first + Shape::LANES, with.marks);
    u32 lanes = shared_address(tile.lanes), queue = shared_address(tile.queue), activities = tile.activities;
    u32 late = waiting; // threads below it have lanes of tiles before

    // The lane of the thread in a step, by its number among those that wait and those of the tile. What is not there is looked up
    // all the same, and left.
    u32 activity_mask = (1u << with.activity_bits) - 1;
    auto fetch = [&](u32 i) {
        u32 place = shared_u16(queue + 2 * ((i - waiting) % TILE_LANES)) % Shape::LANES;
        T base = shared_lane<W>(lanes + place * W);
        u32 activity = activities >> (place / BLOCK_LANES * with.activity_bits) & activity_mask;
        u32 entry = class_of<W>(with.maps, with.classes, activity, base);
        bool taken = thread < states && i >= waiting && i < available;
        decoder.position = taken ? first + place : decoder.position;
        decoder.base = taken ? base : decoder.base;
        decoder.entry = taken ? entry : decoder.entry;
    };
    // Whether an exception is for the lane of the thread.
    auto is_excepted = [&](u32 at) { return shared_u32(with.marks + (at - first) / 32 * 4) >> (at - first) % 32 & 1; };
    fetch(thread);
    u32 done = 0; // lanes of the steps before
    bool careful = marked || __any_sync(ALL_LANES, late > thread && decoder.excepted);
    // Terms of the sum without the weight of the row, which is the tile's.
    u64 gained = 0, lost = 0;
    while (last ? done < available : done + states <= available) {
        bool on = thread < states && done + thread < available;
        u32 at = decoder.position, entry = decoder.entry, q = 0;
        T from = decoder.base;
        if (!IN_TILE && W != 8) q = WEIGHTS.q[at * W / 4 % TPDE_ROW_WORDS];
        fetch(done + states + thread);
        T delta = decode_step<W>(decoder.stream, with.lookup, entry, on, before);
        if (LOW_BITS && on) {
            u32 bits = parts.low_bits;
            T high = bits == 8 * W ? 0 : ((T)parts.center - delta) & (((T)1 << (8 * W - bits) % (8 * sizeof(T))) - 1);
            delta = (bits == 8 * W ? 0 : high << bits) | low_bits_of<W>(chunk, parts, at);
        }
        bool changed = delta != 0;
        T target = apply_delta<W>(from, delta, (T)with.classes.order.ordered);
        decoder.changed += changed;
        if (careful && changed && (thread < late ? decoder.excepted : marked && is_excepted(at))) decoder.errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
        if (IN_TILE) {
            if (changed && thread >= late) set_shared_lane<W>(lanes + (at - first) * W, target);
        } else if (W != 8) {
            if (thread >= late) {
                u32 shift = 8 * (at * W % 4);
                gained += (u64)q * (u32)(target << shift);
                lost += (u64)q * (u32)(from << shift);
            }
        }
        // F64 has two words a lane, and is rare.
        if (changed && (thread < late || (W == 8 && !IN_TILE))) decoder.target_sum += lane_term<W>(at, from, target);
        if (!IN_TILE && with.store == STORE_LIST) {
            u32 mask = __ballot_sync(ALL_LANES, changed), count = __popc(mask), begin = decoder.listed;
            if (parts.segments > 1) {
                if (thread == 0 && count) begin = atomicAdd(listed, count);
                begin = __shfl_sync(ALL_LANES, begin, 0);
            }
            decoder.listed += count;
            u32 i = begin + __popc(mask & before);
            if (changed && i < list.capacity) {
                ((u32*)list.positions)[i] = at;
                ((Lane*)list.lanes)[i] = (Lane)target;
            }
        } else if (changed && with.store != STORE_NONE && (!IN_TILE || thread < late)) {
            store_lane<W>(chunk, at, target);
        }
        late = 0;
        done += states;
    }
    if (!IN_TILE && W != 8) decoder.target_sum += row_weight(number * Shape::WORDS) * (gained - lost);
    decoder.waiting = available - min(available, done);
    if (thread >= late) decoder.excepted = marked && thread < decoder.waiting && is_excepted(decoder.position);
}
