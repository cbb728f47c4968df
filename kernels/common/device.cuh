// Inline PTX, wrapped in functions. No other file contains inline PTX, so all other files also compile for a processor
// (emulator/README.md). There, emulator/device.h implements the same functions.
#pragma once
#include "common/format.cuh"

#ifdef TPDE_EMULATED
#include "emulator/device.h"
#else

// ---- Shared memory ----

// Returns the dynamic shared memory of the block, aligned to 1,024 bytes.
__device__ __forceinline__ void* dynamic_shared_memory() {
    extern __shared__ __align__(1024) uint4 dynamic_shared[];
    return dynamic_shared;
}

// Shared memory is accessed by 32-bit address, so constant offsets become part of the instruction.
__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
__device__ __forceinline__ void* shared_pointer(u32 at) { return __cvta_shared_to_generic(at); }

template <u32 OFFSET = 0> __device__ __forceinline__ u32 shared_u8(u32 at) {
    u32 value;
    asm volatile("ld.shared.u8 %0, [%1+%2];" : "=r"(value) : "r"(at), "n"(OFFSET));
    return value;
}
template <u32 OFFSET = 0> __device__ __forceinline__ u32 shared_u16(u32 at) {
    u32 value;
    asm volatile("{.reg .u16 half; ld.shared.u16 half, [%1+%2]; cvt.u32.u16 %0, half;}"
                 : "=r"(value)
                 : "r"(at), "n"(OFFSET));
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
template <u32 OFFSET = 0> __device__ __forceinline__ uint4 shared_u32x4(u32 at) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4+%5];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(at), "n"(OFFSET));
    return value;
}
__device__ __forceinline__ void set_shared_u8(u32 at, u32 value) {
    asm volatile("{.reg .u16 half; cvt.u16.u32 half, %1; st.shared.u8 [%0], half;}" ::"r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void set_shared_u16(u32 at, u32 value) {
    asm volatile("{.reg .u16 half; cvt.u16.u32 half, %1; st.shared.u16 [%0], half;}" ::"r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void set_shared_u32(u32 at, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void set_shared_u64(u32 at, u64 value) {
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(at), "l"(value) : "memory");
}

// Thread 0 of a warp adds `value` to a word and gets the previous value. Other threads must ignore the result. The
// address depends on the thread. With a uniform address the compiler would first add up the values of the warp, which
// costs instructions.
__device__ __forceinline__ u32 first_adds_to_shared(u32 thread, u32 at, u32 value) {
    u32 before = 0;
    asm volatile("{.reg .pred p; setp.eq.u32 p, %1, 0; @p atom.shared.add.u32 %0, [%2], %3;}"
                 : "+r"(before)
                 : "r"(thread), "r"(at + 4 * thread), "r"(value)
                 : "memory");
    return before;
}

// ---- Asynchronous copies from global to shared memory ----

// Copies `size` of SIZE bytes (4, 8 or 16) and fills the rest with zeros. Both addresses are multiples of SIZE. Only
// `size` bytes are read.
template <int SIZE> __device__ __forceinline__ void copy_async(u32 to, const void* from, u32 size) {
    if constexpr (SIZE == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(SIZE), "r"(size)
                     : "memory");
    }
}
// Ends a group of copies of this thread.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups of this thread but the last PENDING.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- Global memory ----

// Loads data that is read once, without displacing reused data from the L1 cache.
__device__ __forceinline__ uint4 load_once(const void* from) {
    uint4 piece;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                 : "l"(from));
    return piece;
}

// Prefetches a line of 128 bytes into the L1 cache.
__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }

// Prefetches a line of 128 bytes into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// ---- Warps and barriers ----

// One step of a prefix sum over a warp: returns x plus the `x` of thread t - `by`, for threads t >= `by`. Takes two
// instructions; a shuffle and a select take three.
__device__ __forceinline__ u32 add_from_before(u32 x, u32 by) {
    u32 sum = x;
    asm volatile(
        "{.reg .pred p; .reg .u32 from; shfl.sync.up.b32 from|p, %1, %2, 0, 0xFFFFFFFF; @p add.u32 %0, %0, from;}"
        : "+r"(sum)
        : "r"(x), "r"(by));
    return sum;
}

// Named barriers 1 to 15, each for two warps. The first warp arrives and continues. The second warp waits, and then
// sees the writes that the first warp made before it arrived. All threads of a warp must call these functions.
__device__ __forceinline__ void arrive_for(u32 barrier) {
    asm volatile("bar.arrive %0, 64;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_at(u32 barrier) { asm volatile("bar.sync %0, 64;" ::"r"(barrier) : "memory"); }

// ---- Arithmetic ----

// Selects four of the eight bytes of `low` and `high`, one per hexadecimal digit of `selector`. A digit of 8 or more
// replicates the sign bit of byte digit - 8.
__device__ __forceinline__ u32 permute_bytes(u32 low, u32 high, u32 selector) {
    u32 value;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(value) : "r"(low), "r"(high), "r"(selector));
    return value;
}

// Returns ~a & b | c, in one instruction.
__device__ __forceinline__ u32 not_and_or(u32 a, u32 b, u32 c) {
    u32 value;
    asm("lop3.b32 %0, %1, %2, %3, 0xAE;" : "=r"(value) : "r"(a), "r"(b), "r"(c)); // 0xAE = ~0xF0 & 0xCC | 0xAA
    return value;
}

// Adds 1 to `count` if `counted`, with one predicated instruction. The compiler uses three.
__device__ __forceinline__ void count_if(u32& count, bool counted) {
    asm("{.reg .pred p; setp.ne.u32 p, %1, 0; @p add.u32 %0, %0, 1;}" : "+r"(count) : "r"((u32)counted));
}

// Returns the number of the multiprocessor that runs this thread.
__device__ __forceinline__ u32 multiprocessor() {
    u32 number;
    asm("mov.u32 %0, %%smid;" : "=r"(number));
    return number;
}

#endif
