// Arithmetic on lanes: order-preserving map, zigzag coding and contexts (spec/tpde-format.md section 9,
// spec/codecs.md section 4.1).
#pragma once
#include "common/device.cuh"

template <int W> struct LaneOf;
template <> struct LaneOf<1> {
    typedef u8 type;
};
template <> struct LaneOf<2> {
    typedef u16 type;
};
template <> struct LaneOf<4> {
    typedef u32 type;
};
template <> struct LaneOf<8> {
    typedef u64 type;
};

// The register type for arithmetic on lanes of W bytes.
template <int W> struct WideOf {
    typedef u32 type;
};
template <> struct WideOf<8> {
    typedef u64 type;
};

// Order and contexts of the lanes of a dtype.
struct Order {
    u64 magnitude;   // mask of the order-preserving map, see move_lane()
    u32 kind;        // CONTEXT_…
    u32 shift, mask; // exponent = lane >> shift & mask
};

enum : u32 { CONTEXT_EXPONENT = 0, CONTEXT_SIGNED_BITS = 1, CONTEXT_BITS = 2 };

__device__ __forceinline__ Order order_of(u32 dtype) {
    switch (dtype) {
    case TPDE_F16: return {0x7FFF, CONTEXT_EXPONENT, 10, 31};
    case TPDE_BF16: return {0x7FFF, CONTEXT_EXPONENT, 7, 255};
    case TPDE_F32:
    case TPDE_C64: return {0x7FFFFFFF, CONTEXT_EXPONENT, 23, 255};
    case TPDE_F64: return {~0ull >> 1, CONTEXT_EXPONENT, 52, 2047};
    case TPDE_F8_E4M3:
    case TPDE_F8_E4M3FNUZ: return {0x7F, CONTEXT_EXPONENT, 3, 15};
    case TPDE_F8_E5M2:
    case TPDE_F8_E5M2FNUZ: return {0x7F, CONTEXT_EXPONENT, 2, 31};
    case TPDE_I8:
    case TPDE_I16:
    case TPDE_I32:
    case TPDE_I64: return {0, CONTEXT_SIGNED_BITS, 0, 0};
    default: return {0, CONTEXT_BITS, 0, 0};
    }
}

__device__ __forceinline__ i32 bit_count(u32 x) { return 32 - __clz(x); }
__device__ __forceinline__ i32 bit_count(u64 x) { return 64 - __clzll(x); }

// Returns the context of a base lane.
template <int W> __device__ __forceinline__ i32 context_of(typename WideOf<W>::type u, const Order& order) {
    if (order.kind == CONTEXT_EXPONENT) return (i32)((u32)(u >> order.shift) & order.mask);
    if (order.kind == CONTEXT_SIGNED_BITS && u >> (8 * W - 1) & 1) {
        typename WideOf<W>::type all =
            W == 8 ? ~(typename WideOf<W>::type)0 : (typename WideOf<W>::type)((1ull << (8 * W % 64)) - 1);
        u = ~u & all;
    }
    return bit_count(u);
}

// Returns all ones if the top bit of the lane is set, else 0.
template <int W> __device__ __forceinline__ typename WideOf<W>::type sign_of(typename WideOf<W>::type lane) {
    if constexpr (W == 8) return (u64)((i64)lane >> 63);
    else if constexpr (W == 4) return (u32)((i32)lane >> 31);
    else return permute_bytes(lane, 0, W == 2 ? 0x9999 : 0x8888);
}

// Returns the bit mask of the lanes in a piece whose magnitude is below `threshold`.
template <int W> __device__ __forceinline__ u32 lanes_below(u32 threshold, uint4 piece) {
    if constexpr (W <= 2) {
        // Subtracts all lanes of a word at once. The top bit of each difference is set if the lane is below the
        // threshold. No lane borrows from the next lane.
        constexpr u32 ones = W == 1 ? 0x01010101 : 0x10001, magnitude = W == 1 ? 0x7F7F7F7F : 0x7FFF7FFF;
        u32 from = (threshold + (W == 1 ? 0x7F : 0x7FFF)) * ones;
        u32 a = from - (piece.x & magnitude), b = from - (piece.y & magnitude);
        u32 c = from - (piece.z & magnitude), d = from - (piece.w & magnitude);
        if constexpr (W == 1) {
            u32 low = __dp4a(a >> 7 & ones, 0x08040201u, 0u) | __dp4a(b >> 7 & ones, 0x80402010u, 0u);
            u32 high = __dp4a(c >> 7 & ones, 0x08040201u, 0u) | __dp4a(d >> 7 & ones, 0x80402010u, 0u);
            return low | high << 8;
        } else {
            // Extends the sign bits of bytes 1, 3, 5 and 7 to whole bytes.
            u32 low = permute_bytes(a, b, 0xFDB9), high = permute_bytes(c, d, 0xFDB9);
            return __dp4a((low & 0x08040201) | (high & 0x80402010), 0x01010101u, 0u);
        }
    } else {
        return (u32)((piece.x & 0x7FFFFFFF) < threshold) | (u32)((piece.y & 0x7FFFFFFF) < threshold) << 1 |
               (u32)((piece.z & 0x7FFFFFFF) < threshold) << 2 | (u32)((piece.w & 0x7FFFFFFF) < threshold) << 3;
    }
}

// Adds the difference `moved` to the lane `base` in the order-preserving map, modulo 2^(8·W). For dtypes with that map
// `magnitude` has all bits below the top bit set. For other dtypes it is 0. This variant of the map keeps the top bit,
// so it is its own inverse. It differs from the map of the spec by a constant, which cancels in a difference.
// move_lane_in leaves arbitrary bits above the lane.
template <int W>
__device__ __forceinline__ typename WideOf<W>::type
move_lane_in(typename WideOf<W>::type base, typename WideOf<W>::type moved, typename WideOf<W>::type magnitude) {
    typename WideOf<W>::type now = (base ^ (sign_of<W>(base) & magnitude)) + moved;
    return now ^ (sign_of<W>(now) & magnitude);
}
template <int W>
__device__ __forceinline__ typename WideOf<W>::type
move_lane(typename WideOf<W>::type base, typename WideOf<W>::type moved, typename WideOf<W>::type magnitude) {
    typename WideOf<W>::type now = move_lane_in<W>(base, moved, magnitude);
    return W == 1 ? now & 0xFF : W == 2 ? now & 0xFFFF : now;
}

// Applies a delta in zigzag coding to the lane `base`.
template <int W>
__device__ __forceinline__ typename WideOf<W>::type
apply_delta(typename WideOf<W>::type base, typename WideOf<W>::type delta, typename WideOf<W>::type magnitude) {
    typedef typename WideOf<W>::type T;
    return move_lane<W>(base, delta >> 1 ^ (T)0 - (delta & 1), magnitude);
}

// Returns the magnitude below which lanes are coded, if the coded entries of a map, a bit each in `coded`, are its first
// ones.
__device__ __forceinline__ u32 threshold_of(u64 coded, u32 first_context, const Order& order) {
    // The clamp is necessary: a context past the last context of the dtype would shift out of the lane.
    u64 end = coded ? min(first_context + (u32)bit_count(coded), order.mask + 1) : 0;
    return (u32)(end << order.shift); // unused for lanes of 8 bytes
}
