// Encoding of streams (spec/codecs.md section 4.5), from the last step to the first. The warps of a block take the tiles of
// a segment in turn: each prepares a tile, waits for the states of the tile behind it, and hands them on. So only the
// encoding itself is serial.
#pragma once
#include "encode/coded.cuh"

#define STREAM_THREADS TPDE_ENCODE_STREAM_THREADS
#define STREAM_WARPS (STREAM_THREADS / WARP)
#define RANS_LOWER_BOUND (1u << 16)

// The coded lanes of a tile, in order.
struct alignas(16) Queue {
    u8 values[2048]; // lanes of the dtype's width
    u8 classes[1024];
};

struct StreamShared {
    CodedShared coded;
    Queue queues[STREAM_WARPS];
    // The stream, as one warp hands it to the next.
    u32 states[WARP];
    u32 next; // index of the first word written so far
    u32 start, end, overflow;
};

// A stream that a warp writes from its end. A thread per state.
struct Stream {
    u16* words;
    u32 floor; // words below this index are not written
    u32 next;
    u32 state;
    bool overflow;

    // Threads whose state is `full` write its low word.
    __device__ __forceinline__ void renormalize(bool full) {
        u32 mask = __ballot_sync(ALL_LANES, full), count = __popc(mask);
        if (next - floor < count) {
            overflow = true;
        } else {
            next -= count;
            if (full) words[next + __popc(mask & ((1u << threadIdx.x % WARP) - 1))] = (u16)state;
        }
        if (full) state >>= 16;
    }
};

// A warp: lists the coded lanes of a tile, and returns their number. Lanes whose class lacks the token of their value have
// value 0: they are exceptions.
template <int W>
__device__ __forceinline__ u32 list_tile(const EncodeChunk& chunk, const Classes& classes, const EncodeTables& tables,
                                         Split split, u32 tile, Queue& queue) {
    typedef typename WideOf<W>::type T;
    constexpr u32 TILE = tile_lanes<W>();
    Source base = base_of(chunk), target = target_of(chunk);
    u32 count = 0, thread = threadIdx.x % WARP;
    typename LaneOf<W>::type* values = (typename LaneOf<W>::type*)queue.values;
    for (u32 first = tile * TILE; first < min((tile + 1) * TILE, chunk.lanes); first += WARP * OCTET) {
        u32 at = first + thread * OCTET, mask = 0;
        T from[OCTET];
        u32 class_numbers[OCTET];
        if (at < chunk.lanes) {
            load_octet<W>(base, at, from);
            const u8* map = classes.map_of(at / BLOCK_LANES);
#pragma unroll
            for (int i = 0; i < OCTET; i++) {
                class_numbers[i] = at + i < chunk.lanes ? classes.class_of<W>(map, from[i]) : 0;
                mask |= (u32)(class_numbers[i] != 0) << i;
            }
        }
        u32 own = __popc(mask), sum = own;
#pragma unroll
        for (u32 by = 1; by < WARP; by *= 2) sum = add_from_before(sum, by);
        u32 place = count + sum - own;
        count += __shfl_sync(ALL_LANES, sum, WARP - 1);
        if (mask == 0) continue;
        T to[OCTET];
        load_octet<W>(target, at, to);
#pragma unroll
        for (int i = 0; i < OCTET; i++) {
            if (!(mask >> i & 1)) continue;
            T value = split.value<W>(delta_of<W>(from[i], to[i], (T)classes.order.magnitude));
            if (value != 0 && tables.entries[class_numbers[i] << 8 | token_of(value)] == 0) value = 0;
            values[place] = (typename LaneOf<W>::type)value;
            queue.classes[place] = (u8)class_numbers[i];
            place++;
        }
    }
    __syncwarp();
    return count;
}

// A warp: encodes the steps of a tile, from the last to the first.
template <int W>
__device__ __forceinline__ void encode_tile(const EncodeTables& tables, const Queue& queue, u32 count, u32 states_log2,
                                            Stream& stream) {
    typedef typename WideOf<W>::type T;
    u32 thread = threadIdx.x % WARP, states = 1u << states_log2;
    const typename LaneOf<W>::type* values = (const typename LaneOf<W>::type*)queue.values;
    T value = 0;
    u64 entry = 0;
    u32 extra = 0;
    // Loads the lane of this thread in a step, and its table entry. Threads without a lane have entry 0.
    auto load = [&](u32 step) {
        u32 i = (step << states_log2) + thread;
        value = 0, entry = 0, extra = 0;
        if (thread < states && i < count) {
            value = values[i];
            entry = __ldg(&tables.entries[(u32)queue.classes[i] << 8 | token_of(value, extra)]);
        }
    };
    u32 step = (count + states - 1) >> states_log2;
    if (step != 0) load(step - 1);
    while (step-- > 0) {
        T value_now = value;
        u64 entry_now = entry;
        u32 extra_now = extra;
        if (step != 0) load(step - 1);
        u32 most = __reduce_max_sync(ALL_LANES, extra_now);
        for (u32 round = (most + 15) / 16; round-- > 0;) {
            u32 bits = extra_now > 16 * round ? min(extra_now - 16 * round, 16) : 0;
            stream.renormalize(bits != 0 && stream.state >> (32 - bits) != 0);
            stream.state = stream.state << bits | ((u32)(value_now >> 16 * round) & ((1u << bits) - 1));
        }
        u32 slots = (u32)entry_now, frequency = (slots >> 12 & 0xFFF) + 1, start = slots & 0xFFF;
        stream.renormalize(entry_now != 0 && stream.state >> 20 >= frequency);
        if (entry_now != 0) {
            // The estimate of the quotient is at most 1 too small.
            u32 quotient = __umulhi(stream.state, (u32)(entry_now >> 32)), rest = stream.state - quotient * frequency;
            if (rest >= frequency) quotient++, rest -= frequency;
            stream.state = (quotient << 12) + rest + start;
        }
    }
    __syncwarp(); // all threads have read the queue before it is filled again
}

// All threads: encodes a segment of a chunk.
template <int W>
__device__ __forceinline__ void encode_segment(const EncodeChunk& chunk, EncodeState& state, const EncodeTables& tables,
                                               u32 segment, StreamShared& shared) {
    constexpr u32 TILE = tile_lanes<W>();
    u32 warp = uniform(threadIdx.x / WARP), thread = threadIdx.x % WARP;
    u32 tiles = (chunk.lanes + TILE - 1) / TILE, segments = 1u << chunk.segments_log2;
    u32 first = (u32)((u64)segment * tiles / segments), end = (u32)((u64)(segment + 1) * tiles / segments);
    if (threadIdx.x == 0) shared.start = shared.end = shared.overflow = 0;
    Classes classes = open_classes<STREAM_THREADS>(chunk, state, shared.coded);
    // The room of a segment follows from the number of coded lanes before it.
    u32 before = 0, inside = 0;
    const u16* coded = (const u16*)chunk.tiles;
    for (u32 tile = threadIdx.x; tile < end; tile += STREAM_THREADS) (tile < first ? before : inside) += coded[tile];
    before = __reduce_add_sync(ALL_LANES, before), inside = __reduce_add_sync(ALL_LANES, inside);
    if (thread == 0) {
        atomicAdd(&shared.start, before);
        atomicAdd(&shared.end, inside);
    }
    __syncthreads();
    u32 start_lanes = shared.start, end_lanes = start_lanes + shared.end, states = 1u << chunk.states_log2;
    u32 start = (u32)((u64)start_lanes * chunk.words_scale / 256) + segment * TPDE_ENCODE_SPARE;
    u32 capacity = (u32)((u64)end_lanes * chunk.words_scale / 256) + (segment + 1) * TPDE_ENCODE_SPARE;
    Split split = {chunk.low_bits, state.center};
    Stream stream = {(u16*)chunk.words, start + 2 * states, capacity, RANS_LOWER_BOUND, false};
    for (u32 turn = warp; turn < end - first; turn += STREAM_WARPS) {
        u32 tile = end - 1 - turn;
        u32 count = list_tile<W>(chunk, classes, tables, split, tile, shared.queues[warp]);
        if (turn != 0) {
            wait_at(1 + warp);
            stream.state = shared.states[thread], stream.next = shared.next;
            __syncwarp(); // all threads have read before this warp writes
        }
        encode_tile<W>(tables, shared.queues[warp], count, chunk.states_log2, stream);
        if (tile != first) {
            shared.states[thread] = stream.state;
            if (thread == 0) shared.next = stream.next;
            arrive_for(1 + (warp + 1) % STREAM_WARPS);
        } else {
            // The states precede the words.
            u32 at = stream.next - 2 * states;
            if (thread < states) {
                stream.words[at + 2 * thread] = (u16)stream.state;
                stream.words[at + 2 * thread + 1] = (u16)(stream.state >> 16);
            }
            if (thread == 0) state.stream_at[segment] = at, state.stream_words[segment] = capacity - at;
        }
    }
    if (__any_sync(ALL_LANES, stream.overflow) && thread == 0) atomicOr(&state.overflow, 1);
}
