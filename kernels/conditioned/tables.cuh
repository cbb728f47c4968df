// Table sets and tokens (spec/codecs.md sections 4.2 and 4.3). Sets are packed in global memory and expanded in shared
// memory.
#pragma once
#include "common/block.cuh"

// A token with frequency f, unpacked.
// x: `cum` in the low half, f - 4,096 in the high half.
// y: one of three ranges, which ascend as signed numbers.
//    - Token without extra bits: the difference, or the value if there are low bits.
//    - Token with extra bits: SYMBOL_EXTRA, plus the number of extra bits in bits 0 to 5, and the leading bits in bits 16
//      and 17.
//    - Token whose values do not fit the lane: SYMBOL_BAD.
typedef uint2 Symbol;
#define SYMBOL_EXTRA 0x40000000
#define SYMBOL_BAD 0x60000000
#define TOKEN_VALUES 64

__device__ __forceinline__ Symbol make_symbol(u32 packed, u32 tokens, bool with_low_bits) {
    u32 token = packed >> 24, cum = packed & 0xFFF, d = (packed >> 12 & 0xFFF) + 1 - (1u << TPDE_FREQUENCY_SUM_LOG2);
    u32 y = with_low_bits ? token : token >> 1 ^ (0u - (token & 1));
    if (token >= TOKEN_VALUES) y = SYMBOL_EXTRA | (token - TOKEN_VALUES) / 2 + 5 | (2 + token % 2) << 16;
    if (token >= tokens) y = SYMBOL_BAD;
    return make_uint2(cum | d << 16, y);
}

// Returns the number of tokens for values of `bits` bits.
__device__ __forceinline__ u32 tokens_within(u32 bits) {
    return bits <= 6 ? 1u << bits : TOKEN_VALUES + 2 * (bits - 6);
}

// The 4,096 slots of a class form buckets of eight. Bits 8 and up of a bucket are the index of the symbol of its first
// slot, counted from the first symbol of the class. Bit i, 1 to 7, is set if a new symbol begins at slot i.
#define BUCKETS (1u << (TPDE_FREQUENCY_SUM_LOG2 - 3))
#define BUCKET_BYTES (2 * BUCKETS)

// Returns the index of the symbol of the slot. The slot is in the low bits of the state.
__device__ __forceinline__ u32 symbol_of(u32 bucket, u32 state) {
    return (bucket >> 8) + __popc(__funnelshift_l(0, bucket, not_and_or(state, 7, 24)));
}

// An expanded table set in shared memory: the buckets of class 0, whose slots all decode to value 0, then the buckets of
// the other classes, then the symbols. The buckets of a class are aligned to their size.
struct Lookup {
    u32 classes;
    u32 buckets, symbols; // shared-memory addresses for class 0
};

// Returns the number of classes of set `tables`.
__device__ __forceinline__ u32 class_count(const Launch& launch, u32 tables) {
    return tables == TPDE_NO_TABLES ? 0 : __ldg((const u32*)launch.tables + tables);
}

// A warp: builds the buckets of a class from its symbols. `begins` is scratch memory of one bit per slot.
__device__ __forceinline__ void make_buckets(const Symbol* symbols, u32 count, u32* begins, u32* buckets, u32& extra) {
    u32 thread = threadIdx.x % WARP;
    uint4* mine = (uint4*)begins + thread;
    *mine = make_uint4(0, 0, 0, 0);
    __syncwarp();
    for (u32 i = thread; i < count; i += WARP) {
        u32 slot = symbols[i].x & 0xFFFF;
        if ((i32)symbols[i].y >= SYMBOL_EXTRA) atomicOr(&extra, 1u);
        atomicOr(&begins[slot / 32], 1u << slot % 32);
    }
    __syncwarp();
    uint4 bits = *mine;
    u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
    u32 end = __popc(bits.x) + __popc(bits.y) + __popc(bits.z) + __popc(bits.w), before = end;
#pragma unroll
    for (u32 by = 1; by < WARP; by *= 2) end = add_from_before(end, by);
    before = end - before;
    // A slot belongs to the last symbol that begins at or before it.
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 two = words[i / 2] >> i % 2 * 16, first = before + (two & 1) - 1, second = before + __popc(two & 0x1FF) - 1;
        buckets[8 * thread + i] = first << 8 | (two & 0xFE) | second << 24 | (two & 0xFE00) << 8;
        before += __popc(two & 0xFFFF);
    }
    __syncwarp();
}

// All threads: expands the classes in bit mask `used` of table set `tables` to shared-memory address `at`, a multiple of
// BUCKET_BYTES. The expanded set takes TPDE_CONDITIONED_TABLES bytes. Lanes have `bits` bits, of which `low_bits` are low
// bits. `work` has 512 bytes of scratch memory per warp. Sets `extra` if a symbol has extra bits. A barrier must follow.
template <int THREADS>
__device__ __noinline__ Lookup make_lookup(const Launch& launch, u32 tables, u32 used, u32 bits, u32 low_bits, u32 at,
                                           u32* work, u32& extra) {
    Lookup lookup = {class_count(launch, tables), at, 0};
    lookup.symbols = lookup.buckets + (lookup.classes + 1) * BUCKET_BYTES;
    u32* buckets = (u32*)shared_pointer(lookup.buckets);
    Symbol* symbols = (Symbol*)shared_pointer(lookup.symbols);
    for (u32 i = threadIdx.x; i < BUCKETS / 2; i += THREADS) buckets[i] = 0;
    if (threadIdx.x == 0) symbols[0] = make_uint2(0, 0);
    if (lookup.classes == 0) return lookup;
    const u32* set = (const u32*)launch.tables + tables;
    const u32* packed = set + lookup.classes + 2;
    u32 count = __ldg(set + lookup.classes + 1) - (lookup.classes + 2), tokens = tokens_within(bits - low_bits);
    for (u32 i = threadIdx.x; i < count; i += THREADS)
        symbols[1 + i] = make_symbol(__ldg(packed + i), tokens, low_bits != 0);
    __syncthreads();
    for (u32 number = 1 + threadIdx.x / WARP; number <= lookup.classes; number += THREADS / WARP) {
        if (!(used >> number & 1)) continue;
        u32 begin = __ldg(set + number) - (lookup.classes + 1), end = __ldg(set + number + 1) - (lookup.classes + 1);
        make_buckets(symbols + begin, end - begin, work + threadIdx.x / WARP * (BUCKETS * 8 / 32),
                     buckets + number * (BUCKETS / 2), extra);
    }
    return lookup;
}

// A map entry: shared-memory addresses of the buckets (x) and the symbols (y) of a class. Decoding with class 0 keeps the
// state and yields value 0.
typedef uint2 Entry;

__device__ __forceinline__ Entry class_entry(const Launch& launch, u32 tables, const Lookup& lookup, u32 number) {
    if (number == 0) return make_uint2(lookup.buckets, lookup.symbols);
    u32 first = __ldg((const u32*)launch.tables + tables + number) - (lookup.classes + 1);
    return make_uint2(lookup.buckets + number * BUCKET_BYTES, lookup.symbols + 8 * first);
}
