// The built-ins of CUDA C++ for the compiler of a processor: keywords, types, variables and functions for kernels.
// Included before the source of a kernel.
#pragma once
#include "block.h"
#include <cstring>
#include <type_traits>

#define TPDE_EMULATED 1

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static __attribute__((section("shared_memory")))
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __builtin_assume(...)

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size
#define warpSize 32

// ---- Vectors ----

#define EMULATOR_VECTORS(name, type, two, four)                                                                        \
    struct alignas(two) name##2 { type x, y; };                                                                        \
    struct name##3 { type x, y, z; };                                                                                  \
    struct alignas(four) name##4 { type x, y, z, w; };                                                                 \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                                   \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                                        \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATOR_VECTORS(char, signed char, 2, 4)
EMULATOR_VECTORS(uchar, unsigned char, 2, 4)
EMULATOR_VECTORS(short, short, 4, 8)
EMULATOR_VECTORS(ushort, unsigned short, 4, 8)
EMULATOR_VECTORS(int, int, 8, 16)
EMULATOR_VECTORS(uint, unsigned, 8, 16)
EMULATOR_VECTORS(longlong, long long, 16, 16)
EMULATOR_VECTORS(ulonglong, unsigned long long, 16, 16)
EMULATOR_VECTORS(float, float, 8, 16)
#undef EMULATOR_VECTORS

// ---- Warp operations ----

namespace emulator {

template <class T> uint64_t bits_of(T value) {
    static_assert(sizeof(T) <= 8, "a value of up to 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T> T value_of(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline unsigned lane() { return thread_index.x % 32; }
template <class T> T shuffle(uint32_t mask, T value, uint64_t from, SourceLocation location) {
    return value_of<T>(run_warp_operation(WarpOperation::SHUFFLE, mask, bits_of(value), from, location));
}

} // namespace emulator

inline void __syncwarp(unsigned mask = ~0u, EMULATOR_HERE) {
    emulator::run_warp_operation(emulator::WarpOperation::SYNC, mask, 0, 0, location);
}
inline unsigned __activemask(EMULATOR_HERE) {
    return 1u << emulator::lane();
    (void)location;
}
inline unsigned __ballot_sync(unsigned mask, int yes, EMULATOR_HERE) {
    return (unsigned)emulator::run_warp_operation(emulator::WarpOperation::BALLOT, mask, yes != 0, 0, location);
}
inline int __any_sync(unsigned mask, int yes, EMULATOR_HERE) { return __ballot_sync(mask, yes, location) != 0; }
inline int __all_sync(unsigned mask, int yes, EMULATOR_HERE) { return __ballot_sync(mask, !yes, location) == 0; }

template <class T> T __shfl_sync(unsigned mask, T value, int from, int width = 32, EMULATOR_HERE) {
    unsigned first = emulator::lane() & ~(unsigned)(width - 1);
    return emulator::shuffle(mask, value, first | ((unsigned)from & (unsigned)(width - 1)), location);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATOR_HERE) {
    unsigned lane = emulator::lane(), first = lane & ~(unsigned)(width - 1);
    return emulator::shuffle(mask, value, lane - first >= by ? lane - by : lane, location);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATOR_HERE) {
    unsigned lane = emulator::lane(), end = (lane & ~(unsigned)(width - 1)) + (unsigned)width;
    return emulator::shuffle(mask, value, lane + by < end ? lane + by : lane, location);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int by, int width = 32, EMULATOR_HERE) {
    unsigned lane = emulator::lane(), other = lane ^ (unsigned)by,
             end = (lane & ~(unsigned)(width - 1)) + (unsigned)width;
    return emulator::shuffle(mask, value, other < end ? other : lane, location);
}

template <class T> unsigned __match_any_sync(unsigned mask, T value, EMULATOR_HERE) {
    return (unsigned)emulator::run_warp_operation(emulator::WarpOperation::MATCH_ANY, mask, emulator::bits_of(value), 0,
                                                  location);
}
template <class T> unsigned __match_all_sync(unsigned mask, T value, int* all, EMULATOR_HERE) {
    unsigned same = (unsigned)emulator::run_warp_operation(emulator::WarpOperation::MATCH_ALL, mask,
                                                           emulator::bits_of(value), 0, location);
    *all = same != 0;
    return same;
}

#define EMULATOR_REDUCE(name, type, wide, what)                                                                        \
    inline type name(unsigned mask, type value, EMULATOR_HERE) {                                                       \
        return (type)emulator::run_warp_operation(emulator::WarpOperation::what, mask, (uint64_t)(wide)value, 0,       \
                                                  location);                                                           \
    }
EMULATOR_REDUCE(__reduce_add_sync, unsigned, unsigned, ADD)
EMULATOR_REDUCE(__reduce_min_sync, unsigned, unsigned, MIN)
EMULATOR_REDUCE(__reduce_max_sync, unsigned, unsigned, MAX)
EMULATOR_REDUCE(__reduce_add_sync, int, int, ADD)
EMULATOR_REDUCE(__reduce_min_sync, int, int64_t, MIN_SIGNED)
EMULATOR_REDUCE(__reduce_max_sync, int, int64_t, MAX_SIGNED)
EMULATOR_REDUCE(__reduce_and_sync, unsigned, unsigned, AND)
EMULATOR_REDUCE(__reduce_or_sync, unsigned, unsigned, OR)
EMULATOR_REDUCE(__reduce_xor_sync, unsigned, unsigned, XOR)
#undef EMULATOR_REDUCE

// ---- Operations of a block ----

inline void __syncthreads(EMULATOR_HERE) { emulator::barrier(0, 0, true, 0, location); }
inline int __syncthreads_count(int yes, EMULATOR_HERE) {
    return (int)emulator::barrier(0, 0, true, yes != 0, location);
}
inline int __syncthreads_or(int yes, EMULATOR_HERE) { return __syncthreads_count(yes, location) != 0; }
inline int __syncthreads_and(int yes, EMULATOR_HERE) { return __syncthreads_count(!yes, location) == 0; }

inline void __threadfence_block() {}
inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emulator::pause(true); }
inline long long clock64() { return 0; }
[[noreturn]] inline void __trap(EMULATOR_HERE) { emulator::fail(location, "a trap"); }

// ---- Atomic operations. Each may yield to other threads ----

namespace emulator {
template <class T> using Same = std::common_type_t<T>; // T is not deduced from such a parameter
template <class T, class F> T update(T* at, F f) {
    pause();
    T before = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(at, &before, f(before), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return before;
}
} // namespace emulator

template <class T> T atomicAdd(T* at, emulator::Same<T> x) {
    return emulator::update(at, [x](T old) { return (T)(old + x); });
}
template <class T> T atomicSub(T* at, emulator::Same<T> x) {
    return emulator::update(at, [x](T old) { return (T)(old - x); });
}
template <class T> T atomicAnd(T* at, emulator::Same<T> x) {
    return emulator::update(at, [x](T old) { return old & x; });
}
template <class T> T atomicOr(T* at, emulator::Same<T> x) {
    return emulator::update(at, [x](T old) { return old | x; });
}
template <class T> T atomicXor(T* at, emulator::Same<T> x) {
    return emulator::update(at, [x](T old) { return old ^ x; });
}
template <class T> T atomicMin(T* at, emulator::Same<T> x) {
    return emulator::update(at, [x](T old) { return x < old ? x : old; });
}
template <class T> T atomicMax(T* at, emulator::Same<T> x) {
    return emulator::update(at, [x](T old) { return x > old ? x : old; });
}
template <class T> T atomicExch(T* at, emulator::Same<T> x) {
    return emulator::update(at, [x](T) { return x; });
}
template <class T> T atomicCAS(T* at, emulator::Same<T> from, emulator::Same<T> to) {
    return emulator::update(at, [=](T old) { return old == from ? to : old; });
}
inline unsigned atomicInc(unsigned* at, unsigned most) {
    return emulator::update(at, [most](unsigned old) { return old >= most ? 0 : old + 1; });
}

// ---- Loads and stores with cache hints. UndefinedBehaviorSanitizer checks their alignment ----

template <class T> T __ldg(const T* from) { return *from; }
template <class T> T __ldca(const T* from) { return *from; }
template <class T> T __ldcg(const T* from) { return *from; }
template <class T> T __ldcs(const T* from) { return *from; }
template <class T> T __ldlu(const T* from) { return *from; }
template <class T> T __ldcv(const T* from) { return *from; }
template <class T> void __stwb(T* to, emulator::Same<T> value) { *to = value; }
template <class T> void __stcg(T* to, emulator::Same<T> value) { *to = value; }
template <class T> void __stcs(T* to, emulator::Same<T> value) { *to = value; }
template <class T> void __stwt(T* to, emulator::Same<T> value) { *to = value; }

// ---- Shared memory by address, for device.h ----

namespace emulator {
template <class T> const T& shared_at(int64_t at, SourceLocation location) {
    if (at % (int64_t)sizeof(T))
        fail(location, "misaligned address %#llx of shared memory: the access has %zu bytes", (long long)at, sizeof(T));
    return *(const T*)(dynamic_memory + at);
}
template <class T> void set_shared(unsigned at, T value, SourceLocation location) {
    const_cast<T&>(shared_at<T>((int)at, location)) = value;
}
} // namespace emulator

// ---- Integers ----

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
    x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
    x = (x >> 4 & 0x0F0F0F0F) | (x & 0x0F0F0F0F) << 4;
    return __builtin_bswap32(x);
}
inline unsigned long long __brevll(unsigned long long x) {
    return (unsigned long long)__brev((unsigned)x) << 32 | __brev((unsigned)(x >> 32));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return (unsigned)((((unsigned long long)high << 32 | low) << (by & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (by & 31));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned by) {
    return by >= 32 ? low : __funnelshift_l(low, high, by);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned by) {
    return by >= 32 ? high : __funnelshift_r(low, high, by);
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xFFFFFF) * (b & 0xFFFFFF); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned value = 0;
    for (int i = 0; i < 4; i++) value |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return value;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    for (int i = 0; i < 4; i++) sum += (a >> 8 * i & 255) * (b >> 8 * i & 255);
    return sum;
}
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; i++) sum += (int)(signed char)(a >> 8 * i) * (signed char)(b >> 8 * i);
    return sum;
}
inline unsigned __dp2a_lo(unsigned a, unsigned b, unsigned sum) {
    return sum + (a & 65535) * (b & 255) + (a >> 16) * (b >> 8 & 255);
}
inline unsigned __dp2a_hi(unsigned a, unsigned b, unsigned sum) {
    return sum + (a & 65535) * (b >> 16 & 255) + (a >> 16) * (b >> 24);
}

// Vectors of 4 bytes or 2 halves in a word.
#define EMULATOR_PARTS(name, bits, expression)                                                                         \
    inline unsigned name(unsigned as, unsigned bs) {                                                                   \
        const unsigned ones = bits == 8 ? 0xFF : 0xFFFF;                                                               \
        unsigned result = 0;                                                                                           \
        for (int i = 0; i < 32; i += bits) {                                                                           \
            unsigned a = as >> i & ones, b = bs >> i & ones;                                                           \
            result |= (unsigned)((expression) & ones) << i;                                                            \
        }                                                                                                              \
        return result;                                                                                                 \
    }
#define EMULATOR_PARTS_OF_BOTH(name, expression)                                                                       \
    EMULATOR_PARTS(name##4, 8, expression) EMULATOR_PARTS(name##2, 16, expression)
EMULATOR_PARTS_OF_BOTH(__vadd, a + b)
EMULATOR_PARTS_OF_BOTH(__vsub, a - b)
EMULATOR_PARTS_OF_BOTH(__vcmpeq, a == b ? ones : 0)
EMULATOR_PARTS_OF_BOTH(__vcmpne, a != b ? ones : 0)
EMULATOR_PARTS_OF_BOTH(__vcmpgtu, a > b ? ones : 0)
EMULATOR_PARTS_OF_BOTH(__vcmpgeu, a >= b ? ones : 0)
EMULATOR_PARTS_OF_BOTH(__vcmpltu, a < b ? ones : 0)
EMULATOR_PARTS_OF_BOTH(__vcmpleu, a <= b ? ones : 0)
EMULATOR_PARTS_OF_BOTH(__vseteq, a == b)
EMULATOR_PARTS_OF_BOTH(__vsetne, a != b)
EMULATOR_PARTS_OF_BOTH(__vsetgtu, a > b)
EMULATOR_PARTS_OF_BOTH(__vsetgeu, a >= b)
EMULATOR_PARTS_OF_BOTH(__vsetltu, a < b)
EMULATOR_PARTS_OF_BOTH(__vsetleu, a <= b)
EMULATOR_PARTS_OF_BOTH(__vminu, a < b ? a : b)
EMULATOR_PARTS_OF_BOTH(__vmaxu, a > b ? a : b)
#undef EMULATOR_PARTS_OF_BOTH
#undef EMULATOR_PARTS

// Minimum and maximum after the usual arithmetic conversions.
template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) {
    typedef std::common_type_t<A, B> T;
    return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) {
    typedef std::common_type_t<A, B> T;
    return (T)a < (T)b ? (T)b : (T)a;
}
