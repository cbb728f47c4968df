// A warp that decodes a stream: its threads are the states (spec/codecs.md section 4.5).
//
// Nothing here ends early: a stream that is wrong gives wrong values within its bounds, and the errors say so at the end.
#pragma once
#include "payload.cuh"
#include "tables.cuh"

struct Stream {
    const u16* words;  // the payload
    u32 at, end;       // next word, and where the stream ends
    u32 state;
    u32 bad;           // SYMBOL_BAD once a value does not fit
    bool refused;      // too short, or a state that is none
};

__device__ __forceinline__ Stream open_stream(const Chunk& chunk, const Parts& parts, u32 segment) {
    Stream stream;
    u32 lane = threadIdx.x % WARP, begin = parts.streams[segment];
    stream.words = (const u16*)chunk.payload;
    stream.end = parts.streams[segment + 1];
    stream.state = 1u << 16;
    stream.bad = 0;
    bool fits = stream.end - begin >= 2 * parts.states;
    stream.at = fits ? begin + 2 * parts.states : stream.end;
    if (fits && lane < parts.states) stream.state = __ldg(stream.words + begin + 2 * lane) | (u32)__ldg(stream.words + begin + 2 * lane + 1) << 16;
    stream.refused = !fits || __any_sync(ALL_LANES, stream.state < 1u << 16);
    return stream;
}

// Makes `state` the state, after a word if it needs one.
__device__ __forceinline__ void renormalize(Stream& stream, u32 state, u32 before) {
    bool needy = state < 1u << 16;
    u32 mask = __ballot_sync(ALL_LANES, needy), place = stream.at + __popc(mask & before);
    u32 word = 0;
    if (needy && place < stream.end) word = __ldg(stream.words + place);
    stream.state = needy ? state << 16 | word : state;
    stream.at += __popc(mask);
}

// Where the look-up lies in shared memory, and what of it is in registers.
struct LookupAddress {
    u32 buckets, symbols, shift, tokens;
    const u32* set; // its symbols in global memory, if they are not in shared memory
};

__device__ __forceinline__ Symbol symbol_at(const LookupAddress& lookup, u32 at) {
    if (lookup.set != nullptr) return make_symbol(__ldg(lookup.set + at / 8), lookup.tokens);
    return shared_u32x2(lookup.symbols + at);
}

// Decodes a step: a value for each thread that is `on`, whose lane has class `entry` of a map. The others have the entry of any
// class, and may look up what they like.
template <int W>
__device__ __forceinline__ typename WideOf<W>::type decode_step(Stream& stream, const LookupAddress& lookup, u32 entry, bool on, u32 before) {
    typedef typename WideOf<W>::type T;
    u32 slot = stream.state & 0xFFF;
    u32 at = (entry >> 16) + 8 * shared_u8(lookup.buckets + (entry & 0xFFFF) + (slot >> lookup.shift));
    Symbol symbol = symbol_at(lookup, at);
    u32 offset = slot - (symbol.x & 0xFFFF);
    while (__any_sync(ALL_LANES, on && offset >= symbol.x >> 16)) {
        if (on && offset >= symbol.x >> 16) {
            symbol = symbol_at(lookup, at += 8);
            offset = slot - (symbol.x & 0xFFFF);
        }
    }
    u32 next = (symbol.x >> 16) * (stream.state >> TPDE_FREQUENCY_SUM_LOG2) + offset;
    renormalize(stream, on ? next : stream.state, before);
    u32 extra = on ? symbol.y & 63 : 0;
    if (on) stream.bad |= symbol.y;
    T value = (T)(symbol.y >> 8 & 255) << extra;
    for (u32 done = 0; __any_sync(ALL_LANES, extra > done); done += 16) {
        u32 now = extra > done ? min(extra - done, 16) : 0;
        value |= (T)(stream.state & ((1u << now) - 1)) << done;
        renormalize(stream, stream.state >> now, before);
    }
    return on ? value : 0;
}

// The errors of a stream that has come to its end.
__device__ __forceinline__ u32 finish_stream(const Stream& stream) {
    bool wrong = stream.refused || stream.at != stream.end || stream.state != 1u << 16;
    return (wrong ? error(TPDE_STATUS_PAYLOAD_STREAM) : 0) | (stream.bad & SYMBOL_BAD ? error(TPDE_STATUS_PAYLOAD_DELTAS) : 0);
}
