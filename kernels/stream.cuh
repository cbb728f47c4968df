// A warp that decodes a stream: its threads are the states (spec/codecs.md section 4.5).
//
// Nothing here ends early: a stream that is wrong gives wrong values within its bounds, and the errors say so at the end.
#pragma once
#include "payload.cuh"
#include "tables.cuh"

struct Stream {
    const u16* words;  // the payload
    u32 at, end;       // next word, and where the stream ends
    u32 last;          // last word of the payload and its padding
    u32 state;
    u32 bad;           // SYMBOL_BAD once a value does not fit
    bool refused;      // too short, or a state that is none
};

__device__ __forceinline__ Stream open_stream(const Chunk& chunk, const Parts& parts, u32 segment) {
    Stream stream;
    u32 lane = threadIdx.x % WARP, begin = parts.streams[segment];
    stream.words = (const u16*)chunk.payload;
    stream.end = parts.streams[segment + 1];
    stream.last = padded(chunk.size) / 2 - 1;
    stream.state = 1u << 16;
    stream.bad = 0;
    bool fits = stream.end - begin >= 2 * parts.states;
    stream.at = fits ? begin + 2 * parts.states : stream.end;
    if (fits && lane < parts.states) stream.state = __ldg(stream.words + begin + 2 * lane) | (u32)__ldg(stream.words + begin + 2 * lane + 1) << 16;
    stream.refused = !fits || __any_sync(ALL_LANES, stream.state < 1u << 16);
    return stream;
}

// The word at `place`; past the payload, any. `at` of a stream grows by at most 64 a step, which fits.
__device__ __forceinline__ u32 word_at(const Stream& stream, u32 place) { return __ldg(stream.words + min(place, stream.last)); }

// Where the look-up lies in shared memory, and what of it is in registers.
struct LookupAddress {
    u32 buckets, symbols, shift, tokens;
    const u32* set; // its symbols in global memory, if they are not in shared memory
};

// A call, so that sets that fit in shared memory pay no more than a branch for those that do not.
__device__ __noinline__ Symbol symbol_in_global_memory(const u32* set, u32 at, u32 tokens) { return make_symbol(__ldg(set + at / 8), tokens); }

__device__ __forceinline__ Symbol symbol_at(const LookupAddress& lookup, u32 at) {
    if (lookup.set != nullptr) return symbol_in_global_memory(lookup.set, at, lookup.tokens);
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
    u32 state = on ? (symbol.x >> 16) * (stream.state >> TPDE_FREQUENCY_SUM_LOG2) + offset : stream.state;
    u32 rest = on ? symbol.y : 0;
    stream.bad |= rest;
    // The words for tokens come first, then those for extra bits. Who needs one of the latter is known before the former are read:
    // a state that gets a word will have more than 16 bits, whatever the word.
    u32 extra = rest & 63, now = W <= 2 ? extra : min(extra, 16);
    bool first = state < 1u << 16, second = state >> now < (first ? 1u : 1u << 16);
    u32 firsts = __ballot_sync(ALL_LANES, first), seconds = __ballot_sync(ALL_LANES, second);
    u32 middle = stream.at + __popc(firsts);
    u32 a = word_at(stream, stream.at + __popc(firsts & before)), b = word_at(stream, middle + __popc(seconds & before));
    stream.at = middle + __popc(seconds);
    state = first ? state << 16 | a : state;
    T value = (T)(rest >> 8 & 255) << extra | (T)(state & ((1u << now) - 1));
    state >>= now;
    state = second ? state << 16 | b : state;
    if constexpr (W > 2) {
        for (u32 done = 16; __any_sync(ALL_LANES, extra > done); done += 16) {
            now = extra > done ? min(extra - done, 16) : 0;
            value |= (T)(state & ((1u << now) - 1)) << done;
            state >>= now;
            bool needy = state < 1u << 16;
            u32 mask = __ballot_sync(ALL_LANES, needy);
            u32 word = word_at(stream, stream.at + __popc(mask & before));
            state = needy ? state << 16 | word : state;
            stream.at += __popc(mask);
        }
    }
    stream.state = state;
    return value;
}

// The errors of a stream that has come to its end.
__device__ __forceinline__ u32 finish_stream(const Stream& stream) {
    // After a value that does not fit the stream is read wrong, and its end says nothing.
    if (__any_sync(ALL_LANES, stream.bad & SYMBOL_BAD)) return error(TPDE_STATUS_PAYLOAD_DELTAS);
    bool wrong = stream.refused || stream.at != stream.end || stream.state != 1u << 16;
    return wrong ? error(TPDE_STATUS_PAYLOAD_STREAM) : 0;
}
