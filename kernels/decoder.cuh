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
    u32 exception;     // first one that is not before the tile
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
}

// Marks the lanes of the tile that exceptions are for. False if there are none.
template <int W>
__device__ __forceinline__ bool mark_exceptions(Decoder<W>& decoder, const Chunk& chunk, const Parts& parts, u32 first, u32 end, u32* marks) {
    if (parts.exceptions == 0 || exception_position(chunk, parts, decoder.exception) >= end) return false;
    u32 thread = threadIdx.x % WARP;
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
    __syncwarp();
    return true;
}

// Decodes as many coded lanes of a tile as fill steps, or all of them in the segment's last. With IN_TILE target lanes go to the
// tile, but for those that were put off: their tile is gone, and they are on their own.
template <int W, bool IN_TILE>
__device__ __forceinline__ void decode_tile(
    Decoder<W>& decoder, const Chunk& chunk, const Parts& parts, const Classes& classes, const Lookup& lookup, u32 number, bool last,
    Tile& tile, u32* marks, u32 store, const List& list, u32* listed) {
    typedef typename WideOf<W>::type T;
    typedef typename LaneOf<W>::type Lane;
    typedef TileShape<W> Shape;
    u32 thread = threadIdx.x % WARP, before = (1u << thread) - 1, states = parts.states, first = number * Shape::LANES;
    u32 available = decoder.waiting + tile.count;
    u32 steps = last ? (available + states - 1) / states : available / states;
    bool marked = mark_exceptions(decoder, chunk, parts, first, first + Shape::LANES, marks);
    bool late = thread < decoder.waiting;

    u32 position = decoder.position, entry = decoder.entry;
    T base = decoder.base;
    bool excepted = decoder.excepted;
    auto fetch = [&](u32 step) {
        u32 i = step * states + thread;
        if (thread < states && i >= decoder.waiting && i < available) {
            u32 place = tile.queue[i - decoder.waiting];
            position = first + place;
            base = ((const Lane*)tile.lanes)[place];
            entry = class_of<W>(classes, activity_of(chunk, parts, position), base);
            excepted = marked && (marks[place / 32] >> place % 32 & 1);
        }
    };
    fetch(0);
    for (u32 step = 0; step < steps; step++) {
        bool on = thread < states && step * states + thread < available;
        u32 at = position, now = entry;
        T from = base;
        bool clash = excepted;
        fetch(step + 1);
        T delta = decode_step<W>(decoder.stream, lookup, now, on, before);
        if (parts.low_bits != 0 && on) {
            u32 bits = parts.low_bits;
            T high = bits == 8 * W ? 0 : ((T)parts.center - delta) & (((T)1 << (8 * W - bits)) - 1);
            delta = (bits == 8 * W ? 0 : high << bits) | low_bits_of<W>(chunk, parts, at);
        }
        bool changed = on && delta != 0;
        T target = apply_delta<W>(from, delta, classes.order.ordered);
        if (changed && clash) decoder.errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
        decoder.changed += changed;
        if (IN_TILE && !late) {
            if (changed) ((Lane*)tile.lanes)[at - first] = (Lane)target;
        } else {
            if (changed) {
                decoder.target_sum += lane_term<W>(at, from, target);
                if (store == STORE_ALL || store == STORE_CHANGES) store_lane<W>(chunk, at, target);
            }
            if (!IN_TILE && store == STORE_LIST) {
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
            }
        }
        late = false;
    }
    decoder.waiting = available - min(available, steps * states);
    decoder.position = position;
    decoder.entry = entry;
    decoder.base = base;
    decoder.excepted = excepted;
}
