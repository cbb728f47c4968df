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
    bool ordered;      // the order-preserving map applies
    u8 kind;           // CONTEXT_…
    u8 shift;          // of the exponent
    u16 mask;
};

enum : u8 { CONTEXT_EXPONENT = 0, CONTEXT_SIGNED_BITS = 1, CONTEXT_BITS = 2 };

__device__ __forceinline__ Order order_of(u32 dtype) {
    switch (dtype) {
    case TPDE_F16: return {true, CONTEXT_EXPONENT, 10, 31};
    case TPDE_BF16: return {true, CONTEXT_EXPONENT, 7, 255};
    case TPDE_F32:
    case TPDE_C64: return {true, CONTEXT_EXPONENT, 23, 255};
    case TPDE_F64: return {true, CONTEXT_EXPONENT, 52, 2047};
    case TPDE_F8_E4M3:
    case TPDE_F8_E4M3FNUZ: return {true, CONTEXT_EXPONENT, 3, 15};
    case TPDE_F8_E5M2:
    case TPDE_F8_E5M2FNUZ: return {true, CONTEXT_EXPONENT, 2, 31};
    case TPDE_I8:
    case TPDE_I16:
    case TPDE_I32:
    case TPDE_I64: return {false, CONTEXT_SIGNED_BITS, 0, 0};
    default: return {false, CONTEXT_BITS, 0, 0};
    }
}

__device__ __forceinline__ i32 bit_count(u32 x) { return 32 - __clz(x); }
__device__ __forceinline__ i32 bit_count(u64 x) { return 64 - __clzll(x); }

// The context of a base lane.
template <int W> __device__ __forceinline__ i32 context_of(typename WideOf<W>::type u, const Order& order) {
    if (order.kind == CONTEXT_EXPONENT) return (i32)(u >> order.shift) & order.mask;
    if (order.kind == CONTEXT_SIGNED_BITS && u >> (8 * W - 1) & 1) {
        typename WideOf<W>::type all = W == 8 ? ~(typename WideOf<W>::type)0 : (typename WideOf<W>::type)((1ull << (8 * W % 64)) - 1);
        u = ~u & all;
    }
    return bit_count(u);
}

// The target lane that `delta` makes of `base`. Both have no bits above the lane's, and so has the result.
template <int W>
__device__ __forceinline__ typename WideOf<W>::type apply_delta(typename WideOf<W>::type base, typename WideOf<W>::type delta, bool ordered) {
    typedef typename WideOf<W>::type T;
    const T top = (T)1 << (8 * W - 1), all = top | (top - 1);
    T d = delta >> 1 ^ (T)0 - (delta & 1);
    T flip = ordered ? (base & top ? all : top) : 0;
    T now = ((base ^ flip) + d) & all;
    // The map back: what lies in the upper half had no sign bit.
    T back = ordered ? (now & top ? top : all) : 0;
    return now ^ back;
}
