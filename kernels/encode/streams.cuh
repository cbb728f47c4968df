// Encoding of streams (spec/codecs.md section 4.5), from the last step to the first.
//
// If there are many segments, a warp encodes a segment. Otherwise the warps of a block take the tiles of a segment in turn:
// each lists a tile, waits for the states of the tile behind it, and hands them on. So only the encoding itself is serial.
#pragma once
#include "encode/coded.cuh"

#define STREAM_THREADS TPDE_ENCODE_STREAM_THREADS
#define STREAM_WARPS (STREAM_THREADS / WARP)
#define RANS_LOWER_BOUND (1u << 16)

// The coded lanes of a tile, in order.
struct alignas(16) Queue {
    u8 values[2048];          // lanes of the dtype's width: values whose tokens have extra bits
    u16 indexes[1024 + WARP]; // class << 8 | token, then zeros
    u32 exceptions[WARP];     // mask of the exceptions of each row of 32 lanes
};

struct StreamShared {
    CodedShared coded[STREAM_WARPS];
    Queue queues[STREAM_WARPS];
    // The stream, as one warp hands it to the next.
    u32 states[WARP];
    i32 next; // index of the first word written so far
};

// A stream that a warp writes from its end. A thread per state.
struct Stream {
    u16* words;
    i32 floor; // words below this index are not written
    i32 next;  // below `floor` after an overflow
    u32 state;
    u32 before; // mask of the threads before this one

    // Threads whose state is `full` write its low word, if there is room.
    __device__ __forceinline__ void renormalize(bool full) {
        u32 mask = __ballot_sync(ALL_LANES, full);
        next -= __popc(mask);
        i32 at = next + __popc(mask & before);
        if (full && at >= floor) words[at] = (u16)state;
        if (full) state >>= 16;
    }
};

// Coded lanes in the queue, before they are classified: the place in the tile in the low bits, then the map.
#define QUEUE_MAP 12
#define QUEUE_CHANGED 0x8000 // the lane may have changed
#define DENSE 16             // coded lanes per row of 32 lanes from which on a tile is queued row by row

// A warp: puts the coded lanes of a tile into the queue, and returns their number.
template <int W>
__device__ __forceinline__ u32 queue_tile(const EncodeChunk& chunk, const Classes& classes, u32 tile, Queue& queue) {
    constexpr u32 ROWS = tile_lanes<W>() / 32;
    u32 thread = threadIdx.x % WARP, row = tile * ROWS + thread, coded = 0, changed = 0, map = 0;
    if (thread < ROWS && row * 32 < chunk.lanes) {
        coded = ((const u32*)chunk.coded)[row];
        if (chunk.low_bits == 0) changed = ((const u32*)chunk.masks)[row];
        map = classes.map_index(row / (BLOCK_LANES / 32));
    }
    queue.exceptions[thread] = changed & ~coded;
    if (chunk.again || chunk.low_bits != 0) changed = ~0u;
    u32 own = __popc(coded), sum = own;
#pragma unroll
    for (u32 by = 1; by < WARP; by *= 2) sum = add_from_before(sum, by);
    u32 count = __shfl_sync(ALL_LANES, sum, WARP - 1), place = sum - own, first = 32 * thread | map << QUEUE_MAP;
    if (count < DENSE * ROWS) {
        for (u32 rest = coded; rest; rest &= rest - 1, place++) {
            u32 i = __ffs((i32)rest) - 1;
            queue.indexes[place] = (u16)(first + i | (changed >> i & 1) * QUEUE_CHANGED);
        }
    } else {
        // Row by row: the threads write to adjacent places. Above, threads of full rows write to few banks of shared memory.
        u32 before = (1u << thread) - 1;
        for (u32 r = 0; r < ROWS; r++) {
            u32 of_row = __shfl_sync(ALL_LANES, coded, (i32)r), changes = __shfl_sync(ALL_LANES, changed, (i32)r);
            u32 start = __shfl_sync(ALL_LANES, place, (i32)r), lane = __shfl_sync(ALL_LANES, first, (i32)r) + thread;
            if (of_row >> thread & 1) {
                queue.indexes[start + __popc(of_row & before)] = (u16)(lane | (changes >> thread & 1) * QUEUE_CHANGED);
            }
        }
    }
    queue.indexes[count + thread] = 0;
    __syncwarp();
    return count;
}

// A warp: replaces the `count` lanes in the queue by what encodes them. Lanes whose class lacks the token of their value
// have value 0: they are exceptions.
template <int W>
__device__ __forceinline__ void classify_queue(const EncodeChunk& chunk, const Classes& classes,
                                               const EncodeTables& tables, Split split, u32 tile, u32 count,
                                               Queue& queue) {
    typedef typename WideOf<W>::type T;
    typedef typename LaneOf<W>::type Lane;
    constexpr u32 LOADS_IN_FLIGHT = 4, TILE = tile_lanes<W>();
    const Lane* base = (const Lane*)chunk.base + (u64)tile * TILE;
    const Lane* target = (const Lane*)chunk.target + (u64)tile * TILE;
    const u64* entries = tables.entries;
    u32 with_base = tile * TILE < chunk.base_lanes ? min(chunk.base_lanes - tile * TILE, TILE) : 0;
    Lane* values = (Lane*)queue.values;
    u32 thread = threadIdx.x % WARP;
    for (u32 first = 0; first < count; first += LOADS_IN_FLIGHT * WARP) {
        u32 queued[LOADS_IN_FLIGHT];
        T from[LOADS_IN_FLIGHT], to[LOADS_IN_FLIGHT];
#pragma unroll
        for (u32 k = 0; k < LOADS_IN_FLIGHT; k++) {
            u32 place = first + k * WARP + thread;
            queued[k] = place < count ? queue.indexes[place] : 0;
        }
#pragma unroll
        for (u32 k = 0; k < LOADS_IN_FLIGHT; k++) {
            u32 lane = queued[k] % TILE;
            from[k] = 0, to[k] = 0;
            if (lane < with_base) from[k] = __ldg(base + lane);
            if (queued[k] & QUEUE_CHANGED) to[k] = __ldg(target + lane);
        }
#pragma unroll
        for (u32 k = 0; k < LOADS_IN_FLIGHT; k++) {
            u32 place = first + k * WARP + thread, lane = queued[k] % TILE;
            if (place >= count) continue;
            u32 entry = classes.entry_of<W>(queued[k] >> QUEUE_MAP & (MAPS - 1), from[k]), token = 0;
            if (queued[k] & QUEUE_CHANGED) {
                T value = split.value<W>(delta_of<W>(from[k], to[k], (T)classes.order.magnitude));
                token = token_of(value);
                if (token >= DIRECT) values[place] = (Lane)value;
            }
            u32 index = (entry & 0xFF00) | token;
            if (token >= max(entry & 0xFF, 1) && entries[index] == 0) {
                index = entry & 0xFF00;
                atomicOr(&queue.exceptions[lane / 32], 1u << lane % 32);
            }
            queue.indexes[place] = (u16)index;
        }
    }
    __syncwarp();
}

// A warp: writes the masks of the exceptions of a tile, and returns the number of those of its thread.
template <int W> __device__ __forceinline__ u32 put_exceptions(const EncodeChunk& chunk, u32 tile, const Queue& queue) {
    constexpr u32 ROWS = tile_lanes<W>() / 32;
    u32 thread = threadIdx.x % WARP, row = tile * ROWS + thread;
    if (chunk.low_bits != 0 || thread >= ROWS || row * 32 >= chunk.lanes) return 0;
    ((u32*)chunk.masks)[row] = queue.exceptions[thread];
    return __popc(queue.exceptions[thread]);
}

// A warp: encodes the steps of a tile, from the last to the first.
template <int W>
__device__ __forceinline__ void encode_tile(const EncodeTables& tables, const Queue& queue, u32 count, u32 states_log2,
                                            Stream& stream) {
    u32 thread = threadIdx.x % WARP;
    const typename LaneOf<W>::type* values = (const typename LaneOf<W>::type*)queue.values;
    bool has_state = thread < 1u << states_log2;
    // Threads without a lane have index 0, whose entry is 0.
    auto index_of = [&](u32 step) -> u32 { return has_state ? queue.indexes[(step << states_log2) + thread] : 0; };
    u32 step = (count + (1u << states_log2) - 1) >> states_log2;
    if (step == 0) return;
    // Entries are loaded a step ahead, and indexes two.
    u32 index = index_of(step - 1), index_ahead = step > 1 ? index_of(step - 2) : 0;
    u64 entry = __ldg(&tables.entries[index]);
    while (step-- > 0) {
        u32 token = index & 0xFF;
        u64 now = entry;
        index = index_ahead;
        entry = __ldg(&tables.entries[index]);
        index_ahead = step > 1 ? index_of(step - 2) : 0;
        if (__any_sync(ALL_LANES, token >= DIRECT)) {
            typename WideOf<W>::type value = 0;
            u32 extra = extra_bits(token);
            if (extra) value = values[(step << states_log2) + thread];
            for (u32 round = (__reduce_max_sync(ALL_LANES, extra) + 15) / 16; round-- > 0;) {
                u32 bits = extra > 16 * round ? min(extra - 16 * round, 16) : 0;
                stream.renormalize(bits != 0 && stream.state >> (32 - bits) != 0);
                stream.state = stream.state << bits | ((u32)(value >> 16 * round) & ((1u << bits) - 1));
            }
        }
        u32 slots = (u32)now, inverse = (u32)(now >> 32), frequency = (slots >> 12) + 1, start = slots & 0xFFF;
        bool is_coded = inverse != 0;
        stream.renormalize(is_coded && stream.state >> 20 >= frequency);
        // The estimate of the quotient is at most 1 too small.
        u32 quotient = __umulhi(stream.state, inverse), rest = stream.state - quotient * frequency;
        if (rest >= frequency) quotient++, rest -= frequency;
        if (is_coded) stream.state = (quotient << 12) + rest + start;
    }
    __syncwarp(); // all threads have read the queue before it is filled again
}

// A warp: fetches the lanes of a tile into L2, those of the base with `fetches[0]`, those of the target with `fetches[1]`.
template <int W>
__device__ __forceinline__ void prefetch_tile(const EncodeChunk& chunk, u32 tile, u32 thread,
                                              const bool (&fetches)[2]) {
    constexpr u32 LINE = 128, BYTES = tile_lanes<W>() * W, LINES = BYTES / LINE;
    bool is_target = thread >= 16;
    u64 at = (u64)tile * BYTES + LINE * (thread % 16);
    if (thread % 16 >= LINES || at >= (u64)(is_target ? chunk.lanes : chunk.base_lanes) * W) return;
    if (is_target ? fetches[1] : fetches[0]) prefetch_l2((const u8*)(is_target ? chunk.target : chunk.base) + at);
}

// A warp: encodes a segment of a chunk, or its share of the segment if the `warps` warps of the block encode it.
template <int W>
__device__ __forceinline__ void encode_segment(const EncodeChunk& chunk, EncodeState& state, const EncodeTables& tables,
                                               u32 segment, u32 warps, StreamShared& shared) {
    constexpr u32 TILE = tile_lanes<W>();
    u32 warp = uniform(threadIdx.x / WARP), thread = threadIdx.x % WARP;
    u32 tiles = (chunk.lanes + TILE - 1) / TILE, segments = 1u << chunk.segments_log2;
    u32 first = (u32)((u64)segment * tiles / segments), end = (u32)((u64)(segment + 1) * tiles / segments);
    Classes classes = open_classes(chunk, state, tables, shared.coded[warp], thread, WARP);
    // The room of a segment follows from the number of coded lanes before it.
    u32 before = 0, inside = 0, exceptions = 0;
    const u16* coded = (const u16*)chunk.tiles;
    for (u32 tile = thread; tile < end; tile += WARP) (tile < first ? before : inside) += coded[tile];
    before = __reduce_add_sync(ALL_LANES, before), inside = __reduce_add_sync(ALL_LANES, inside);
    __syncwarp();
    u32 states = 1u << chunk.states_log2;
    u32 start = (u32)((u64)before * chunk.words_scale / 256) + segment * TPDE_ENCODE_SPARE;
    u32 capacity = (u32)((u64)(before + inside) * chunk.words_scale / 256) + (segment + 1) * TPDE_ENCODE_SPARE;
    Split split = {chunk.low_bits, state.center};
    // Memory is read in sectors of 32 bytes. Whole tiles are fetched ahead only if most of their sectors are needed.
    const bool fetches[2] = {state.coded * (32 / W) >= chunk.lanes / 2,
                             chunk.low_bits != 0 || state.changed * (32 / W) >= chunk.lanes / 2};
    Stream stream = {(u16*)chunk.words, (i32)(start + 2 * states), (i32)capacity, RANS_LOWER_BOUND, (1u << thread) - 1};
    for (u32 turn = warps == 1 ? 0 : warp; turn < end - first; turn += warps) {
        u32 tile = end - 1 - turn;
        Queue& queue = shared.queues[warp];
        u32 count = queue_tile<W>(chunk, classes, tile, queue);
        if (turn + warps < end - first) prefetch_tile<W>(chunk, tile - warps, thread, fetches);
        classify_queue<W>(chunk, classes, tables, split, tile, count, queue);
        exceptions += put_exceptions<W>(chunk, tile, queue);
        if (warps != 1 && turn != 0) {
            wait_at(1 + warp);
            stream.state = shared.states[thread], stream.next = shared.next;
            __syncwarp(); // all threads have read before this warp writes
        }
        encode_tile<W>(tables, queue, count, chunk.states_log2, stream);
        if (tile == first) {
            if (stream.next < stream.floor) {
                if (thread == 0) atomicOr(&state.overflow, 1);
                break;
            }
            // The states precede the words.
            u32 at = (u32)stream.next - 2 * states;
            if (thread < states) {
                stream.words[at + 2 * thread] = (u16)stream.state;
                stream.words[at + 2 * thread + 1] = (u16)(stream.state >> 16);
            }
            if (thread == 0) state.stream_at[segment] = at, state.stream_words[segment] = capacity - at;
        } else if (warps != 1) {
            shared.states[thread] = stream.state;
            if (thread == 0) shared.next = stream.next;
            arrive_for(1 + (warp + 1) % STREAM_WARPS);
        }
    }
    exceptions = __reduce_add_sync(ALL_LANES, exceptions);
    if (thread == 0 && exceptions != 0) atomicAdd(&state.exceptions, exceptions);
}
