// Arithmetic on lanes of floats, in integers (spec/tpde-format.md section 8.6). It follows src/floats.rs.
#pragma once
#include "common/format.cuh"

// Lanes of a format that are not finite.
enum Special { IEEE, ONES_ARE_NAN, FINITE };

// A format of floats: a sign, X bits of exponent and M bits of mantissa.
template <int X, int M, Special SPECIAL = IEEE> struct Float {
    static constexpr int MANTISSA = M, BIAS = (1 << (X - 1)) - 1;
    static constexpr u32 INFINITE = ((1u << X) - 1) << M, SIGN = 1u << (X + M);

    static __device__ __forceinline__ u32 sign(u32 lane) { return lane >> (X + M) & 1; }
    static __device__ __forceinline__ u32 magnitude(u32 lane) { return lane & (SIGN - 1); }
    static __device__ __forceinline__ bool is_nan(u32 lane) {
        return SPECIAL == IEEE ? magnitude(lane) > INFINITE : SPECIAL == ONES_ARE_NAN && magnitude(lane) == SIGN - 1;
    }
    static __device__ __forceinline__ bool is_infinite(u32 lane) {
        return SPECIAL == IEEE && magnitude(lane) == INFINITE;
    }
    // A finite lane is n * 2^q.
    static __device__ __forceinline__ u32 n(u32 lane) {
        return (lane & ((1u << M) - 1)) | (magnitude(lane) >> M ? 1u << M : 0);
    }
    static __device__ __forceinline__ i32 q(u32 lane) { return max((i32)(magnitude(lane) >> M), 1) - BIAS - M; }
};

typedef Float<2, 1, FINITE> E2M1;
typedef Float<4, 3, ONES_ARE_NAN> E4M3;
typedef Float<5, 2> E5M2;
typedef Float<5, 10> F16;
typedef Float<8, 7> BF16;
typedef Float<8, 23> F32;

// Returns the lane nearest to n * 2^q, ties to even. `n` has at most 28 bits.
template <class To> __device__ __forceinline__ u32 round_to(u32 sign, u32 n, i32 q) {
    constexpr int M = To::MANTISSA;
    i32 p = max(31 - __clz((i32)n) + q, 1 - To::BIAS), k = q - (p - M), down = min(-k, 31);
    // With `down` from 1 on, adds half a unit in the last place less one, and one more if the unit is odd. If `down` is
    // 30 or 31, n is below half a unit.
    u32 r = k >= 0 ? n << k : (n + (1u << (down - 1)) - 1 + (n >> down & 1)) >> down;
    // A carry out of r raises the exponent.
    u32 magnitude = ((u32)(p + To::BIAS - 1) << M) + r;
    return (sign ? To::SIGN : 0) | (n == 0 ? 0 : min(magnitude, To::INFINITE));
}

// Converts a lane. A NaN keeps its sign and the upper bits of its payload, and becomes quiet.
template <class From, class To> __device__ __forceinline__ u32 cast(u32 lane) {
    constexpr int LEFT = To::MANTISSA - From::MANTISSA;
    u32 sign = From::sign(lane) ? To::SIGN : 0, payload = lane & ((1u << From::MANTISSA) - 1);
    u32 quiet =
        To::INFINITE | 1u << (To::MANTISSA - 1) | (LEFT >= 0 ? payload << max(LEFT, 0) : payload >> max(-LEFT, 0));
    u32 finite = round_to<To>(From::sign(lane), From::n(lane), From::q(lane));
    return From::is_nan(lane) ? sign | quiet : From::is_infinite(lane) ? sign | To::INFINITE : finite;
}

// The most frequent casts need no shift by a computed distance.
template <> __device__ __forceinline__ u32 cast<F32, BF16>(u32 lane) {
    u32 rounded = (lane + 0x7FFF + (lane >> 16 & 1)) >> 16;
    return F32::is_nan(lane) ? lane >> 16 | 0x40 : rounded;
}
template <> __device__ __forceinline__ u32 cast<BF16, F32>(u32 lane) {
    return lane << 16 | (BF16::is_nan(lane) ? 0x400000u : 0);
}

// A factor of `product`, the same for all lanes of a block.
struct Scale {
    u32 sign, n;
    i32 q;
    bool is_nan, is_infinite;

    __device__ __forceinline__ explicit Scale(u32 lane)
        : sign(F32::sign(lane)), n(F32::n(lane)), q(F32::q(lane)), is_nan(F32::is_nan(lane)),
          is_infinite(F32::is_infinite(lane)) {}
};

// Multiplies a lane of F8_E4M3 by a scale, rounded to F32 once. Every NaN is 7FC00000.
__device__ __forceinline__ u32 product(u32 lane, const Scale& scale) {
    u32 n = E4M3::n(lane), sign = E4M3::sign(lane) ^ scale.sign;
    u32 finite = round_to<F32>(sign, n * scale.n, E4M3::q(lane) + scale.q);
    bool is_nan = E4M3::is_nan(lane) || scale.is_nan || (scale.is_infinite && n == 0);
    return is_nan ? 0x7FC00000u : scale.is_infinite ? sign << 31 | F32::INFINITE : finite;
}

// Products of the smallest eight normal lanes of F8_E4M3 and a scale, as lanes of To, one per thread of eight: of lane
// 8 + (thread mod 8). `is_exact`: adding e to the exponent of the lane adds e to that of the product, up to the largest lane, because
// all products are normal in F32 and in To.
template <class To> struct LeastProduct {
    u32 lane;
    bool is_exact;

    __device__ __forceinline__ LeastProduct(u32 thread, u32 scale) {
        u32 exponent = scale >> 23 & 0xFF, n = (8 | thread % 8) * (scale & 0x7FFFFF | 0x800000);
        // n has 27 or 28 bits, the product 24.
        u32 carry = n >> 27, down = 3 + carry, r = (n + (4u << carry) - 1 + (n >> down & 1)) >> down;
        u32 exact = (scale & 0x80000000) | (((exponent - 7 + carry) << 23) + r);
        lane = cast<F32, To>(exact);
        u32 magnitude = To::magnitude(lane);
        is_exact = exponent >= 7 && exponent < 255 && magnitude >= 1u << To::MANTISSA &&
                   magnitude + (14u << To::MANTISSA) < To::INFINITE;
    }
};

// Returns 2^(scale - 127) times a nibble of MXFP4.
__device__ __forceinline__ u32 microscaled(u32 nibble, u32 scale) {
    // Scales with which all numbers but zero are normal. 0.5 is 3F00; 1, 1.5, 2, 3, 4 and 6 follow from 3F80 in steps of 40.
    if (scale - 2 <= 250) {
        u32 number = nibble & 7, magnitude = 0x3F00 + (number == 1 ? 0 : number << 6) + ((scale - 127) << 7);
        return (number == 0 ? 0 : magnitude) | (nibble & 8) << 12;
    }
    return round_to<BF16>(E2M1::sign(nibble), E2M1::n(nibble), E2M1::q(nibble) + (i32)scale - 127);
}
