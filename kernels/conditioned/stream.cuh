// A warp that decodes a stream: its threads are the states (spec/codecs.md section 4.5).
//
// Nothing here ends early: a stream that is wrong gives wrong values within its bounds, and the errors say so at the end.
#pragma once
#include "conditioned/payload.cuh"
#include "conditioned/tables.cuh"

struct Stream {
    const u16* words;  // the payload
    u32 at, end;       // next word, and where the stream ends
    u32 last;          // last word of the payload and its padding
    u32 state;
    i32 worst;         // the greatest `y` of a symbol with extra bits
    bool refused;      // too short, or a state that is none
};

__device__ __forceinline__ Stream open_stream(const Chunk& chunk, const Parts& parts, u32 segment) {
    Stream stream;
    u32 lane = threadIdx.x % WARP, begin = parts.streams[segment];
    stream.words = (const u16*)chunk.payload;
    stream.end = parts.streams[segment + 1];
    stream.last = padded(chunk.size) / 2 - 1;
    stream.state = 1u << 16;
    stream.worst = 0;
    bool fits = stream.end - begin >= 2 * parts.states;
    stream.at = fits ? begin + 2 * parts.states : stream.end;
    if (fits && lane < parts.states) stream.state = __ldg(stream.words + begin + 2 * lane) | (u32)__ldg(stream.words + begin + 2 * lane + 1) << 16;
    stream.refused = !fits || __any_sync(ALL_LANES, stream.state < 1u << 16);
    return stream;
}

// The word at `place`; past the payload, any. `at` of a stream grows by at most 160 a step, which fits.
__device__ __forceinline__ u32 word_at(const Stream& stream, u32 place) { return __ldg(stream.words + min(place, stream.last)); }

#define STAGED_BYTES (4 * 4 * WARP)

// Where `decode_step` takes words from: as they lie in global memory, ...
struct DirectWords {
    __device__ __forceinline__ u32 word(const Stream& stream, u32 place) const { return word_at(stream, place); }
    __device__ __forceinline__ void jumped(const Stream&) {}
};

// ... or from STAGED_BYTES of shared memory, at a multiple of as many, that a warp has to itself. Every word of a stream is new to the
// first-level cache where it has many: whoever waits for them waits for the second one.
struct StagedWords {
    u32 at;       // shared address
    u32 end;      // what lies there: the 2·UNIT words before, each where its number says
    uint2 coming; // the words behind: each thread has four of UNIT
    static constexpr u32 UNIT = 4 * WARP;

    __device__ __forceinline__ void load(const Stream& stream) {
        coming = __ldg((const uint2*)(stream.words + min(end + 4 * (threadIdx.x % WARP), stream.last - 3)));
    }
    // A warp: there are UNIT words at least, or four steps without extra bits.
    __device__ __forceinline__ void fill(const Stream& stream) {
        while (__any_sync(ALL_LANES, end < stream.at + UNIT)) {
            __syncwarp();
            set_shared_u64(at + 2 * (end % (2 * UNIT)) + 8 * (threadIdx.x % WARP), coming.x | (u64)coming.y << 32);
            end += UNIT;
            load(stream);
            __syncwarp();
        }
    }
    __device__ __forceinline__ void open(const Stream& stream) {
        end = stream.at & ~(UNIT - 1);
        load(stream);
        fill(stream);
    }
    __device__ __forceinline__ u32 word(const Stream&, u32 place) const { return shared_u16(at | 2 * place % STAGED_BYTES); }
    // Extra bits were read.
    __device__ __forceinline__ void jumped(const Stream& stream) { fill(stream); }
};

// The difference that a value stands for; it is 0 if the value is.
template <int W> __device__ __forceinline__ typename WideOf<W>::type difference_of(typename WideOf<W>::type value) {
    return value >> 1 ^ (typename WideOf<W>::type)0 - (value & 1);
}

// What a step makes of symbols with extra bits. Without them nothing branches, and steps are interleaved.
enum : int {
    NO_EXTRA,   // there are none
    SEES_EXTRA, // nothing: Stream::worst says that there was one
    READS_EXTRA,
};

// Decodes a step: what a lane with `entry` is to be moved by, for each thread; or the value, as the symbols were made for.
template <int W, int EXTRA, typename Words>
__device__ __forceinline__ typename WideOf<W>::type decode_step(Stream& stream, Words& words, Entry entry, u32 before, bool with_low_bits) {
    typedef typename WideOf<W>::type T;
    u32 state = stream.state;
    u32 bucket = shared_u16(entry.x | state / 4 % BUCKET_BYTES & ~1u);
    Symbol symbol = shared_u32x2(entry.y + 8 * symbol_of(bucket, state));
    // With x the state, d = f - 4,096 and q = x / 4,096 without its fraction: x + d·q - cum. What d·65,536 adds symbol.x takes off.
    state = state - symbol.x + (u32)((i32)symbol.x >> 16) * ((state >> TPDE_FREQUENCY_SUM_LOG2) + (1u << 16));
    bool first = state < 1u << 16, with = EXTRA == READS_EXTRA && (i32)symbol.y >= SYMBOL_EXTRA;
    if (EXTRA == SEES_EXTRA) stream.worst = max(stream.worst, (i32)symbol.y);
    u32 firsts = __ballot_sync(ALL_LANES, first);
    u32 word = words.word(stream, stream.at + __popc(firsts & before));
    stream.at += __popc(firsts);
    T moved = (T)(i32)symbol.y;
    if constexpr (W == 8) moved = (T)(i64)(i32)symbol.y;
    if (EXTRA != READS_EXTRA || !__any_sync(ALL_LANES, with)) {
        if (first) state = state << 16 | word;
    } else {
        stream.worst = max(stream.worst, (i32)symbol.y);
        // Who needs another word is known before this one is there: a state that gets a word has more than 16 bits then.
        u32 extra = with ? symbol.y & 63 : 0, now = W > 2 ? min(extra, 16) : extra, widened = first ? state << 16 : state;
        bool second = widened >> now < 1u << 16;
        u32 seconds = __ballot_sync(ALL_LANES, second);
        u32 other = word_at(stream, stream.at + __popc(seconds & before));
        stream.at += __popc(seconds);
        state = first ? widened | word : widened;
        T value;
        if constexpr (W <= 2) {
            // The state without the bits that stay in it, and what they are appended to in their place.
            value = state + (((symbol.y >> 16 & 3) - (state >> now)) << now);
        } else {
            value = (T)(symbol.y >> 16 & 3) << extra | (T)(state & ((1u << now) - 1));
        }
        state >>= now;
        state = second ? state << 16 | other : state;
        if constexpr (W > 2) {
            for (u32 done = 16; __any_sync(ALL_LANES, extra > done); done += 16) {
                now = extra > done ? min(extra - done, 16) : 0;
                value |= (T)(state & ((1u << now) - 1)) << done;
                state >>= now;
                bool needy = state < 1u << 16;
                u32 mask = __ballot_sync(ALL_LANES, needy);
                word = word_at(stream, stream.at + __popc(mask & before));
                state = needy ? state << 16 | word : state;
                stream.at += __popc(mask);
            }
        }
        words.jumped(stream);
        if (with) moved = with_low_bits ? value : difference_of<W>(value);
    }
    stream.state = state;
    return moved;
}

// The frequency of the value 0 in the class of an entry, if it comes first there, as tokens ascend; else 0.
__device__ __forceinline__ u32 zeros_of(Entry entry) {
    Symbol symbol = shared_u32x2(entry.y);
    return symbol.y == 0 ? (1u << TPDE_FREQUENCY_SUM_LOG2) + (u32)((i32)symbol.x >> 16) : 0;
}

// A warp: a step of values that are all 0, and for which no state needs a word: most steps, where changes are rare. It takes no look-up.
// False if it is another one, and nothing was done.
__device__ __forceinline__ bool skip_step(Stream& stream, u32 zeros) {
    u32 slot = stream.state % (1u << TPDE_FREQUENCY_SUM_LOG2), next = zeros * (stream.state >> TPDE_FREQUENCY_SUM_LOG2) + slot;
    if (!__all_sync(ALL_LANES, slot < zeros && next >= 1u << 16)) return false;
    stream.state = next;
    return true;
}

// The errors of a stream that has come to its end.
__device__ __forceinline__ u32 finish_stream(const Stream& stream) {
    // After a value that does not fit the stream is read wrong, and its end says nothing.
    if (__any_sync(ALL_LANES, stream.worst >= SYMBOL_BAD)) return error(TPDE_STATUS_PAYLOAD_DELTAS);
    bool wrong = stream.refused || stream.at != stream.end || stream.state != 1u << 16;
    return wrong ? error(TPDE_STATUS_PAYLOAD_STREAM) : 0;
}
