// Decodes a stream with a warp: each thread holds one state (spec/codecs.md section 4.5).
//
// Decoding does not stop early. A damaged stream gives wrong values, and all reads stay in bounds. The errors are
// reported at the end.
#pragma once
#include "conditioned/payload.cuh"
#include "conditioned/tables.cuh"

struct Stream {
    const u16* words; // the payload
    u32 at, end;      // indexes of the next word and of the end of the stream
    u32 last;         // index of the last word, including the padding
    u32 state;
    i32 worst;    // largest `y` so far, at least of all symbols with extra bits; 0 at the start
    bool invalid; // the stream is too short, or an initial state is too small
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
    if (fits && lane < parts.states)
        stream.state = __ldg(stream.words + begin + 2 * lane) | (u32)__ldg(stream.words + begin + 2 * lane + 1) << 16;
    stream.invalid = !fits || __any_sync(ALL_LANES, stream.state < 1u << 16);
    return stream;
}

// Returns the word at index `at`, or an arbitrary word if `at` is past the payload. `Stream::at` grows by at most 160 per
// step, so it does not overflow.
__device__ __forceinline__ u32 word_at(const Stream& stream, u32 at) {
    return __ldg(stream.words + min(at, stream.last));
}

#define STAGED_BYTES (4 * 4 * WARP)

// Source of words for `decode_step`: reads from global memory.
struct DirectWords {
    __device__ __forceinline__ u32 word(const Stream& stream, u32 at) const { return word_at(stream, at); }
    __device__ __forceinline__ void jumped(const Stream&) {}
};

// Source of words for `decode_step`: an aligned ring of STAGED_BYTES in shared memory per warp. In streams with many
// words almost every direct load misses L1 and waits for L2.
struct StagedWords {
    u32 at;           // shared-memory address of the ring
    u32 end;          // the ring holds words end - 2·UNIT to end, word n at index n % (2·UNIT)
    uint2 prefetched; // the UNIT words from `end` on, four per thread
    static constexpr u32 UNIT = 4 * WARP;

    __device__ __forceinline__ void load(const Stream& stream) {
        prefetched = __ldg((const uint2*)(stream.words + min(end + 4 * (threadIdx.x % WARP), stream.last - 3)));
    }
    // A warp: makes at least UNIT words available, enough for four steps without extra bits.
    __device__ __forceinline__ void fill(const Stream& stream) {
        while (__any_sync(ALL_LANES, end < stream.at + UNIT)) {
            __syncwarp();
            set_shared_u64(at + 2 * (end % (2 * UNIT)) + 8 * (threadIdx.x % WARP),
                           prefetched.x | (u64)prefetched.y << 32);
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
    __device__ __forceinline__ u32 word(const Stream&, u32 index) const {
        return shared_u16(at | 2 * index % STAGED_BYTES);
    }
    // Called after extra bits were read, because they advance the stream.
    __device__ __forceinline__ void jumped(const Stream& stream) { fill(stream); }
};

// Zigzag decoding: returns the difference that a value encodes.
template <int W> __device__ __forceinline__ typename WideOf<W>::type difference_of(typename WideOf<W>::type value) {
    return value >> 1 ^ (typename WideOf<W>::type)0 - (value & 1);
}

// Treatment of symbols with extra bits. Steps without extra bits have no branches, so the compiler interleaves them.
enum : int {
    NO_EXTRA,   // the tables have no symbols with extra bits
    SEES_EXTRA, // does not read the bits, but records the symbol in Stream::worst
    READS_EXTRA,
};

// Decodes one step. Returns for each thread the difference of a lane with `entry`, or its value if the tables were made
// for low bits.
template <int W, int EXTRA, typename Words>
__device__ __forceinline__ typename WideOf<W>::type decode_step(Stream& stream, Words& words, Entry entry, u32 before,
                                                                bool with_low_bits) {
    typedef typename WideOf<W>::type T;
    u32 state = stream.state;
    u32 bucket = shared_u16(entry.x | state / 4 % BUCKET_BYTES & ~1u);
    Symbol symbol = shared_u32x2(entry.y + 8 * symbol_of(bucket, state));
    // x' = f·q + slot - cum, with state x, q = x / 4,096, slot = x % 4,096, computed as x + d·q - cum with d = f -
    // 4,096. Adding 2^16 to q adds d·65,536; its effect is cancelled by the high half of symbol.x.
    state = state - symbol.x + (u32)((i32)symbol.x >> 16) * ((state >> TPDE_FREQUENCY_SUM_LOG2) + (1u << 16));
    bool first = state < 1u << 16, has_extra = EXTRA == READS_EXTRA && (i32)symbol.y >= SYMBOL_EXTRA;
    if (EXTRA == SEES_EXTRA) stream.worst = max(stream.worst, (i32)symbol.y);
    u32 firsts = __ballot_sync(ALL_LANES, first);
    u32 word = words.word(stream, stream.at + __popc(firsts & before));
    stream.at += __popc(firsts);
    T moved = (T)(i32)symbol.y;
    if constexpr (W == 8) moved = (T)(i64)(i32)symbol.y;
    if (EXTRA != READS_EXTRA || !__any_sync(ALL_LANES, has_extra)) {
        if (first) state = state << 16 | word;
    } else {
        stream.worst = max(stream.worst, (i32)symbol.y);
        // The threads that need a second word are known before the first word arrives: a state that receives a word has more
        // than 16 bits.
        u32 extra = has_extra ? symbol.y & 63 : 0, low_count = W > 2 ? min(extra, 16) : extra,
            widened = first ? state << 16 : state;
        bool second = widened >> low_count < 1u << 16;
        u32 seconds = __ballot_sync(ALL_LANES, second);
        u32 second_word = word_at(stream, stream.at + __popc(seconds & before));
        stream.at += __popc(seconds);
        state = first ? widened | word : widened;
        T value;
        if constexpr (W <= 2) {
            // Replaces the state's upper bits by the token's leading bits, and keeps the extra bits below them.
            value = state + (((symbol.y >> 16 & 3) - (state >> low_count)) << low_count);
        } else {
            value = (T)(symbol.y >> 16 & 3) << extra | (T)(state & ((1u << low_count) - 1));
        }
        state >>= low_count;
        state = second ? state << 16 | second_word : state;
        if constexpr (W > 2) {
            for (u32 done = 16; __any_sync(ALL_LANES, extra > done); done += 16) {
                low_count = extra > done ? min(extra - done, 16) : 0;
                value |= (T)(state & ((1u << low_count) - 1)) << done;
                state >>= low_count;
                bool needs_word = state < 1u << 16;
                u32 mask = __ballot_sync(ALL_LANES, needs_word);
                word = word_at(stream, stream.at + __popc(mask & before));
                state = needs_word ? state << 16 | word : state;
                stream.at += __popc(mask);
            }
        }
        words.jumped(stream);
        if (has_extra) moved = with_low_bits ? value : difference_of<W>(value);
    }
    stream.state = state;
    return moved;
}

// Returns the frequency of value 0 in the class of an entry, or 0 if the class lacks value 0. Tokens ascend, so value 0
// is the first symbol.
__device__ __forceinline__ u32 zero_frequency(Entry entry) {
    Symbol symbol = shared_u32x2(entry.y);
    return symbol.y == 0 ? (1u << TPDE_FREQUENCY_SUM_LOG2) + (u32)((i32)symbol.x >> 16) : 0;
}

// A warp: performs a step in which all values are 0 and no state needs a word, without table look-ups. If changes are
// rare, most steps are of this kind. For any other step it returns false and leaves the stream unchanged.
__device__ __forceinline__ bool skip_step(Stream& stream, u32 frequency) {
    u32 slot = stream.state % (1u << TPDE_FREQUENCY_SUM_LOG2),
        next = frequency * (stream.state >> TPDE_FREQUENCY_SUM_LOG2) + slot;
    if (!__all_sync(ALL_LANES, slot < frequency && next >= 1u << 16)) return false;
    stream.state = next;
    return true;
}

// Returns the errors of a completed stream.
__device__ __forceinline__ u32 finish_stream(const Stream& stream) {
    // After a value that does not fit, the rest of the stream is misread, so its end says nothing.
    if (__any_sync(ALL_LANES, stream.worst >= SYMBOL_BAD)) return error(TPDE_STATUS_PAYLOAD_DELTAS);
    bool wrong = stream.invalid || stream.at != stream.end || stream.state != 1u << 16;
    return wrong ? error(TPDE_STATUS_PAYLOAD_STREAM) : 0;
}
