// What C++ has no words for: inline PTX, each piece a function with a name. No other file has any, so that everything else can be
// compiled for a processor too (../emulator/README.md); what stands for these functions there is in emulator/device.h.
#pragma once
#include "common/format.cuh"

#ifdef TPDE_EMULATED
#include "emulator/device.h"
#else

// ---- Shared memory ----

// The dynamic shared memory of the block, at a multiple of 1,024.
__device__ __forceinline__ void* dynamic_shared_memory() {
    extern __shared__ __align__(1024) uint4 dynamic_shared[];
    return dynamic_shared;
}

// Shared memory by address: 32 bits, and constants stay in the instruction.
__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
__device__ __forceinline__ void* shared_pointer(u32 at) { return __cvta_shared_to_generic(at); }

template <u32 OFFSET = 0> __device__ __forceinline__ u32 shared_u8(u32 at) {
    u32 value;
    asm volatile("ld.shared.u8 %0, [%1+%2];" : "=r"(value) : "r"(at), "n"(OFFSET));
    return value;
}
template <u32 OFFSET = 0> __device__ __forceinline__ u32 shared_u16(u32 at) {
    u32 value;
    asm volatile("{.reg .u16 half; ld.shared.u16 half, [%1+%2]; cvt.u32.u16 %0, half;}" : "=r"(value) : "r"(at), "n"(OFFSET));
    return value;
}
template <u32 OFFSET = 0> __device__ __forceinline__ u32 shared_u32(u32 at) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(value) : "r"(at), "n"(OFFSET));
    return value;
}
template <u32 OFFSET = 0> __device__ __forceinline__ uint2 shared_u32x2(u32 at) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2+%3];" : "=r"(value.x), "=r"(value.y) : "r"(at), "n"(OFFSET));
    return value;
}
__device__ __forceinline__ void set_shared_u8(u32 at, u32 value) {
    asm volatile("{.reg .u16 half; cvt.u16.u32 half, %1; st.shared.u8 [%0], half;}" ::"r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void set_shared_u16(u32 at, u32 value) {
    asm volatile("{.reg .u16 half; cvt.u16.u32 half, %1; st.shared.u16 [%0], half;}" ::"r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void set_shared_u32(u32 at, u32 value) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory"); }
__device__ __forceinline__ void set_shared_u64(u32 at, u64 value) { asm volatile("st.shared.u64 [%0], %1;" ::"r"(at), "l"(value) : "memory"); }

// Thread 0 of a warp adds to a word, and gets what was there; for the others the result is of no use. To the compiler each thread has
// an address of its own: it would gather the threads first, which is work for nothing where one adds.
__device__ __forceinline__ u32 first_adds_to_shared(u32 thread, u32 at, u32 value) {
    u32 before = 0;
    asm volatile("{.reg .pred p; setp.eq.u32 p, %1, 0; @p atom.shared.add.u32 %0, [%2], %3;}" : "+r"(before) : "r"(thread), "r"(at + 4 * thread), "r"(value) : "memory");
    return before;
}

// ---- Global memory ----

// For what is read once: it must not push from the first-level cache what is read again and again.
__device__ __forceinline__ uint4 load_once(const void* from) {
    uint4 piece;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w) : "l"(from));
    return piece;
}

// A line of 128 bytes that will be read soon.
__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }

// ---- What threads do together ----

// All threads of a warp: `x`, and that of the thread `by` before, if there is one: two instructions, where a shuffle and a choice are
// three.
__device__ __forceinline__ u32 add_from_before(u32 x, u32 by) {
    u32 sum = x;
    asm volatile("{.reg .pred p; .reg .u32 from; shfl.sync.up.b32 from|p, %1, %2, 0, 0xFFFFFFFF; @p add.u32 %0, %0, from;}" : "+r"(sum) : "r"(x), "r"(by));
    return sum;
}

// Barriers of two warps, numbered from 1 to 15: one arrives and goes on, the other waits, and sees what the first had written. All
// threads of a warp.
__device__ __forceinline__ void arrive_for(u32 barrier) { asm volatile("bar.arrive %0, 64;" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void wait_at(u32 barrier) { asm volatile("bar.sync %0, 64;" ::"r"(barrier) : "memory"); }

// ---- The rest ----

// Four bytes of `low` and `high`, by the digits of `selector`; one from 8 on repeats the byte's top bit.
__device__ __forceinline__ u32 permute_bytes(u32 low, u32 high, u32 selector) {
    u32 value;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(value) : "r"(low), "r"(high), "r"(selector));
    return value;
}

// ~a & b | c: one instruction.
__device__ __forceinline__ u32 not_and_or(u32 a, u32 b, u32 c) {
    u32 value;
    asm("lop3.b32 %0, %1, %2, %3, 0xAE;" : "=r"(value) : "r"(a), "r"(b), "r"(c)); // of 0xF0, 0xCC, 0xAA
    return value;
}

// Adds 1 if `counted`: an instruction, where a selection would be three.
__device__ __forceinline__ void count_if(u32& count, bool counted) {
    asm("{.reg .pred p; setp.ne.u32 p, %1, 0; @p add.u32 %0, %0, 1;}" : "+r"(count) : "r"((u32)counted));
}

// The multiprocessor that the thread is on, by number.
__device__ __forceinline__ u32 multiprocessor() {
    u32 number;
    asm("mov.u32 %0, %%smid;" : "=r"(number));
    return number;
}

#endif
