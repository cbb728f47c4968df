// Table sets and tokens (spec/codecs.md sections 4.2 and 4.3): small in global memory, larger in shared memory.
#pragma once
#include "block.cuh"

// A token with a frequency, ready for use. x: `cum` in the low half and the frequency in the high half. y: without extra bits the
// value's zigzag number shifted up by 8 bits; with them SYMBOL_EXTRA, their number in bits 8 to 13, what they are appended to in
// bits 16 and 17, and SYMBOL_BAD if values do not fit.
typedef uint2 Symbol;
#define SYMBOL_EXTRA 1u
#define SYMBOL_BAD 0x80000000u

__device__ __forceinline__ i32 zigzag(u32 value) { return (i32)(value >> 1 ^ (0u - (value & 1))); }

__device__ __forceinline__ Symbol make_symbol(u32 packed, u32 tokens) {
    u32 token = packed >> 24, cum = packed & 0xFFF, frequency = (packed >> 12 & 0xFFF) + 1;
    u32 rest = SYMBOL_EXTRA | (token / 2 - 5) << 8 | (2 + token % 2) << 16;
    if (token < 16) rest = (u32)zigzag(token) << 8;
    if (token >= tokens) rest = SYMBOL_EXTRA | SYMBOL_BAD;
    return make_uint2(cum | frequency << 16, rest);
}

// Slots are in buckets of eight. A bucket has the symbol of its first slot from bit 8 up, counted from the first of its class, and
// bit i says whether a symbol begins with slot i, 1 to 7: every symbol has a slot of its own.
#define BUCKETS (1u << (TPDE_FREQUENCY_SUM_LOG2 - 3))
#define BUCKET_BYTES (2 * BUCKETS)

// The symbol of the slot that is in the low bits of a state.
__device__ __forceinline__ u32 symbol_of(u32 bucket, u32 state) { return (bucket >> 8) + __popc(bucket << (state % 8 ^ 31)); }

// What shared memory has of a table set: a class of all slots for the value 0, then the buckets of each class, then its symbols. An
// address of buckets is a multiple of their size.
struct Lookup {
    u32 classes;
    u32 buckets, symbols; // shared addresses of those of class 0
};

// Number of classes of set `tables`.
__device__ __forceinline__ u32 class_count(const Launch& launch, u32 tables) {
    return tables == TPDE_NO_TABLES ? 0 : __ldg((const u32*)launch.tables + tables);
}

// All threads: the look-up of the classes `used` of set `tables`, for values of `bits` bits, from shared address `at` on, a
// multiple of BUCKET_BYTES. A barrier must follow. See TPDE_CONDITIONED_TABLES for the room.
template <int THREADS> __device__ Lookup make_lookup(const Launch& launch, u32 tables, u32 used, u32 bits, u32 at) {
    Lookup lookup = {class_count(launch, tables), at, 0};
    lookup.symbols = lookup.buckets + (lookup.classes + 1) * BUCKET_BYTES;
    u16* buckets = (u16*)shared_pointer(lookup.buckets);
    Symbol* symbols = (Symbol*)shared_pointer(lookup.symbols);
    for (u32 i = threadIdx.x; i < BUCKETS; i += THREADS) buckets[i] = 0;
    if (threadIdx.x == 0) symbols[0] = make_uint2(1u << TPDE_FREQUENCY_SUM_LOG2 << 16, 0);
    if (lookup.classes == 0) return lookup;
    const u32* set = (const u32*)launch.tables + tables;
    const u32* packed = set + lookup.classes + 2;
    u32 count = __ldg(set + lookup.classes + 1) - (lookup.classes + 2), tokens = bits <= 4 ? 1u << bits : 16 + 2 * (bits - 4);
    for (u32 i = threadIdx.x; i < count; i += THREADS) symbols[1 + i] = make_symbol(__ldg(packed + i), tokens);
    __syncthreads();
    for (u32 number = 1; number <= lookup.classes; number++) {
        if (!(used >> number & 1)) continue;
        u32 begin = __ldg(set + number) - (lookup.classes + 1), end = __ldg(set + number + 1) - (lookup.classes + 1);
        for (u32 bucket = threadIdx.x; bucket < BUCKETS; bucket += THREADS) {
            u32 low = begin, high = end;
            while (high - low > 1) {
                u32 middle = (low + high) / 2;
                if ((symbols[middle].x & 0xFFFF) <= 8 * bucket) low = middle;
                else high = middle;
            }
            u32 begins = 0;
            for (u32 next = low + 1; next < end; next++) {
                u32 slot = (symbols[next].x & 0xFFFF) - 8 * bucket;
                if (slot >= 8) break;
                begins |= 1u << slot;
            }
            buckets[number * BUCKETS + bucket] = (u16)((low - begin) << 8 | begins);
        }
    }
    return lookup;
}

// A map's entry: shared addresses of the buckets and the symbols of a class. That of class 0 leaves a state as it is, and gives the
// value 0.
typedef uint2 Entry;

__device__ __forceinline__ Entry class_entry(const Launch& launch, u32 tables, const Lookup& lookup, u32 number) {
    if (number == 0) return make_uint2(lookup.buckets, lookup.symbols);
    u32 first = __ldg((const u32*)launch.tables + tables + number) - (lookup.classes + 1);
    return make_uint2(lookup.buckets + number * BUCKET_BYTES, lookup.symbols + 8 * first);
}
