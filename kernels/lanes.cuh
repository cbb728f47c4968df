// Lanes: order-preserving map, zigzag and contexts (spec/tpde-format.md section 9, spec/codecs.md section 4.1).
#pragma once
#include "format.cuh"

template <int W> struct LaneOf;
template <> struct LaneOf<1> { typedef u8 type; };
template <> struct LaneOf<2> { typedef u16 type; };
template <> struct LaneOf<4> { typedef u32 type; };
template <> struct LaneOf<8> { typedef u64 type; };

// What lanes of W bytes are computed with.
template <int W> struct WideOf { typedef u32 type; };
template <> struct WideOf<8> { typedef u64 type; };

// How a dtype's lanes are read: all that depends on it but their size.
struct Order {
    u64 ordered;       // all bits set if the order-preserving map applies, else none
    u32 kind;          // CONTEXT_…
    u32 shift, mask;   // of the exponent
};

enum : u32 { CONTEXT_EXPONENT = 0, CONTEXT_SIGNED_BITS = 1, CONTEXT_BITS = 2 };

__device__ __forceinline__ Order order_of(u32 dtype) {
    switch (dtype) {
    case TPDE_F16: return {~0ull, CONTEXT_EXPONENT, 10, 31};
    case TPDE_BF16: return {~0ull, CONTEXT_EXPONENT, 7, 255};
    case TPDE_F32:
    case TPDE_C64: return {~0ull, CONTEXT_EXPONENT, 23, 255};
    case TPDE_F64: return {~0ull, CONTEXT_EXPONENT, 52, 2047};
    case TPDE_F8_E4M3:
    case TPDE_F8_E4M3FNUZ: return {~0ull, CONTEXT_EXPONENT, 3, 15};
    case TPDE_F8_E5M2:
    case TPDE_F8_E5M2FNUZ: return {~0ull, CONTEXT_EXPONENT, 2, 31};
    case TPDE_I8:
    case TPDE_I16:
    case TPDE_I32:
    case TPDE_I64: return {0, CONTEXT_SIGNED_BITS, 0, 0};
    default: return {0, CONTEXT_BITS, 0, 0};
    }
}

__device__ __forceinline__ i32 bit_count(u32 x) { return 32 - __clz(x); }
__device__ __forceinline__ i32 bit_count(u64 x) { return 64 - __clzll(x); }

// The context of a base lane.
template <int W> __device__ __forceinline__ i32 context_of(typename WideOf<W>::type u, const Order& order) {
    if (order.kind == CONTEXT_EXPONENT) return (i32)((u32)(u >> order.shift) & order.mask);
    if (order.kind == CONTEXT_SIGNED_BITS && u >> (8 * W - 1) & 1) {
        typename WideOf<W>::type all = W == 8 ? ~(typename WideOf<W>::type)0 : (typename WideOf<W>::type)((1ull << (8 * W % 64)) - 1);
        u = ~u & all;
    }
    return bit_count(u);
}

// The target lane that `delta` makes of `base`. Both have no bits above the lane's, and so has the result. `ordered`: all bits set
// if the order-preserving map applies, else none.
template <int W>
__device__ __forceinline__ typename WideOf<W>::type apply_delta(typename WideOf<W>::type base, typename WideOf<W>::type delta, typename WideOf<W>::type ordered) {
    typedef typename WideOf<W>::type T;
    constexpr int SPARE = 8 * sizeof(T) - 8 * W;
    constexpr T top = (T)1 << (8 * W - 1), all = top | (top - 1);
    T d = delta >> 1 ^ (T)0 - (delta & 1);
    // All bits set for a lane with a sign bit.
    T sign;
    if constexpr (W == 8) sign = (T)((i64)base >> 63);
    else sign = (T)((i32)(base << SPARE) >> 31);
    T now = (base ^ ((sign | top) & all & ordered)) + d;
    // The map back: what lies in the upper half had no sign bit.
    if constexpr (W == 8) sign = (T)((i64)now >> 63);
    else sign = (T)((i32)(now << SPARE) >> 31);
    return (now ^ ((~sign | top) & ordered)) & all;
}
