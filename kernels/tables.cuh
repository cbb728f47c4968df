// Table sets and tokens (spec/codecs.md sections 4.2 and 4.3): small in global memory, larger in shared memory.
#pragma once
#include "block.cuh"

#define BUCKETS 16384      // bytes of the buckets of all classes
#define SYMBOLS_SHARED 512 // symbols that shared memory has room for; sets with more are looked up in global memory

// A token with a frequency, ready for use: `cum` in the low half of x and the frequency in its high half; in y the number of extra
// bits in bits 0 to 5, what they are appended to in bits 8 to 15, and SYMBOL_BAD for a token whose values do not fit.
typedef uint2 Symbol;
#define SYMBOL_BAD 0x80000000u

// A class of a map: in bits 0 to 15 its first bucket, above the bytes of the symbols before its own.
#define CLASS_NONE 0xFFFFFFFFu

// Slots are in buckets of 2^`shift`, and a bucket names the symbol of its first slot, counted from the first of its class: from
// there the right one is at most 2^shift − 1 symbols on, as each has a slot of its own.
struct Lookup {
    u32 shift;
    u32 classes;
    u32 tokens;     // tokens whose values fit
    bool shared;    // symbols are in shared memory; otherwise in global memory alone
    const u32* set; // in global memory
};

__device__ __forceinline__ Symbol make_symbol(u32 packed, u32 tokens) {
    u32 token = packed >> 24, cum = packed & 0xFFF, frequency = (packed >> 12 & 0xFFF) + 1;
    u32 extra = token < 16 ? 0 : token / 2 - 5, lead = token < 16 ? token : 2 + token % 2;
    return make_uint2(cum | frequency << 16, token < tokens ? extra | lead << 8 : SYMBOL_BAD);
}

// The look-up of set `tables` for values of `bits` bits, the same in every thread. A barrier must follow.
template <int THREADS> __device__ Lookup make_lookup(const Launch& launch, u32 tables, u32 bits, u8* buckets, Symbol* symbols) {
    Lookup lookup = {0, 0, bits <= 4 ? 1u << bits : 16 + 2 * (bits - 4), true, nullptr};
    if (tables == TPDE_NO_TABLES) return lookup;
    lookup.set = (const u32*)launch.tables + tables;
    lookup.classes = __ldg(lookup.set);
    lookup.shift = lookup.classes <= 4 ? 0 : lookup.classes <= 8 ? 1 : 2;
    const u32* packed = lookup.set + lookup.classes + 2;
    u32 count = __ldg(lookup.set + lookup.classes + 1) - (lookup.classes + 2);
    lookup.shared = count <= SYMBOLS_SHARED;
    if (lookup.shared) {
        for (u32 i = threadIdx.x; i < count; i += THREADS) symbols[i] = make_symbol(__ldg(packed + i), lookup.tokens);
    }
    u32 shift = lookup.shift, lane = threadIdx.x % WARP;
    for (u32 row = threadIdx.x / WARP; row < lookup.classes; row += THREADS / WARP) {
        u32 begin = __ldg(lookup.set + 1 + row), end = __ldg(lookup.set + 2 + row);
        u32 ahead = 0;
        u8* of_class = buckets + (row << (TPDE_FREQUENCY_SUM_LOG2 - shift));
        for (u32 at = begin; at < end; at++) {
            // A load for each thread, once for 32 symbols.
            if ((at - begin) % WARP == 0) ahead = at + lane < end ? __ldg(lookup.set + at + lane) : 0;
            u32 symbol = __shfl_sync(ALL_LANES, ahead, (at - begin) % WARP), first = symbol & 0xFFF, last = first + (symbol >> 12 & 0xFFF);
            // The buckets whose first slot is one of these.
            for (u32 i = ((first + (1u << shift) - 1) >> shift) + lane; i <= last >> shift; i += WARP) of_class[i] = (u8)(at - begin);
        }
    }
    return lookup;
}

// A map's entry for class `number`, which the set has.
__device__ __forceinline__ u32 class_entry(const Lookup& lookup, u32 number) {
    if (number == 0) return CLASS_NONE;
    u32 symbols = __ldg(lookup.set + number) - (lookup.classes + 2);
    return (number - 1) << (TPDE_FREQUENCY_SUM_LOG2 - lookup.shift) | symbols * 8 << 16;
}
