// Base lanes that are formed from tensors of another dtype (spec/tpde-format.md section 8.5).
#pragma once
#include "common/floats.cuh"
#include "common/rows.cuh"

// The base of a chunk. Sizes of the base are in bytes of the base tensor.
struct FormedLanes {
    StridedBytes bytes; // of the base tensor, for the lanes of the chunk; unless `mxfp4_transposed`
    // `mxfp4`: bytes of scales for the lanes of the chunk. `fp8_blocks` and `mxfp4_transposed`: rows of the target, of
    // which only `row_of` is used.
    StridedBytes rows;
    u64 first_row, first_column; // of the first lane of the chunk
    u64 base, base_row, base_pitch;
    TensorForm form;
    u16 dtype;

    // Finds the base of a chunk of `lanes` lanes from lane `first` on.
    __device__ __forceinline__ void open(const DeviceTensor& tensor, const TensorRows& memory, const TensorForm& how,
                                         u64 first, u32 lanes) {
        form = how;
        dtype = tensor.dtype;
        base = tensor.base;
        base_row = memory.base_row;
        base_pitch = memory.base_pitch;
        first_row = first / form.columns;
        first_column = first % form.columns;
        u32 bits = form.form >= TPDE_FORM_MXFP4 ? 4 : form.base_dtype == TPDE_F32 ? 32 : form.base_dtype < 32 ? 16 : 8;
        if (form.form != TPDE_FORM_MXFP4_TRANSPOSED)
            bytes.open(base, base_row, base_pitch, first * bits / 8, (u32)((u64)lanes * bits / 8));
        if (form.form == TPDE_FORM_MXFP4)
            rows.open(form.scales, form.scales_row, form.scales_pitch, first / 32, lanes / 32);
        else rows.open(0, form.columns, form.columns, first, lanes);
    }

    // The row of lane `at` of the chunk in the target, and its column. No row ends between two lanes of a piece.
    __device__ __forceinline__ u64 position(u32 at, u64& column) const {
        u32 row = rows.row_of(at);
        column = row ? rows.first - 1 + at - row * rows.row : first_column + at;
        return first_row + row;
    }

    // Byte `at` of memory in rows.
    static __device__ __forceinline__ const u8* far_byte(u64 start, u64 row, u64 pitch, u64 at) {
        return (const u8*)start + (row == TPDE_ENDLESS_ROW ? at : at / row * pitch + at % row);
    }

    // `fp8_blocks`: the scale of a lane.
    __device__ __forceinline__ u32 scale_of_block(u32 at) const {
        u64 column, row = position(at, column), across = (form.columns + 127) / 128;
        u64 number = row / 128 * across + column / 128;
        return __ldg((const u32*)far_byte(form.scales, form.scales_row, form.scales_pitch, 4 * number));
    }

    // A warp: `fp8_blocks`, the eight lanes of each thread, as 16-bit lanes. Rows are multiples of 64 lanes, so eight threads have
    // one scale. They compute one product each, and every lane is one of these, with another exponent and sign.
    template <class To> __device__ __forceinline__ void scale_piece(uint2 lanes, u32 scale, u32* words) const {
        u32 thread = threadIdx.x % 32;
        LeastProduct<To> own(thread, scale);
        if (!__all_sync(0xFFFFFFFF, own.is_exact)) {
#pragma unroll 1
            for (u32 i = 0; i < 8; i++) set_half(words, i, scaled<2>(byte_of(lanes, i), Scale(scale)));
            return;
        }
        // With the exponent 0 of a lane. Two products per word, then their lower and their upper bytes.
        u32 product = own.lane - (1u << To::MANTISSA), other = __shfl_xor_sync(0xFFFFFFFF, product, 1), pairs[4];
        u32 pair = thread % 2 ? other | product << 16 : product | other << 16;
#pragma unroll
        for (u32 i = 0; i < 4; i++) pairs[i] = __shfl_sync(0xFFFFFFFF, pair, (thread & 24) + 2 * i);
        u32 low[2] = {permute_bytes(pairs[0], pairs[1], 0x6420), permute_bytes(pairs[2], pairs[3], 0x6420)};
        u32 high[2] = {permute_bytes(pairs[0], pairs[1], 0x7531), permute_bytes(pairs[2], pairs[3], 0x7531)};
        u32 others = 0; // a bit per lane that is zero, subnormal or NaN
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 four = i ? lanes.y : lanes.x, exponents = four & 0x78787878, signs = four & 0x80808080;
            u32 mantissas = four & 0x07070707, selector = permute_bytes(mantissas | mantissas >> 4, 0, 0x4420);
            u32 of_low = permute_bytes(low[0], low[1], selector), of_high = permute_bytes(high[0], high[1], selector);
            u32 normal = exponents + 0x78787878 & 0x80808080, nan = (four & 0x7F7F7F7F) + 0x01010101 & 0x80808080;
            others |= ((normal ^ 0x80808080) | nan) >> (i ? 3 : 7);
            words[2 * i] =
                permute_bytes(of_low, of_high, 0x5140) + (permute_bytes(exponents, 0, 0x4140) << (To::MANTISSA - 3)) ^
                permute_bytes(signs, 0, 0x1404);
            words[2 * i + 1] =
                permute_bytes(of_low, of_high, 0x7362) + (permute_bytes(exponents, 0, 0x4342) << (To::MANTISSA - 3)) ^
                permute_bytes(signs, 0, 0x3424);
        }
        // They are rare.
#pragma unroll 1
        for (; others; others &= others - 1) {
            u32 bit = __ffs((i32)others) - 1, i = bit / 8 | (bit & 4);
            set_half(words, i, scaled<2>(byte_of(lanes, i), Scale(scale)));
        }
    }

    static __device__ __forceinline__ u32 byte_of(uint2 lanes, u32 i) {
        return (i < 4 ? lanes.x : lanes.y) >> i % 4 * 8 & 0xFF;
    }

    // Sets half `i` of four words. The index is not known to the compiler, and the words stay in registers.
    static __device__ __forceinline__ void set_half(u32* words, u32 i, u32 half) {
#pragma unroll
        for (u32 w = 0; w < 4; w++) {
            if (i / 2 == w) words[w] = permute_bytes(words[w], half, i % 2 ? 0x5410 : 0x3254);
        }
    }

    // `mxfp4_transposed`: calls `each` for COUNT lanes of a row.
    template <int COUNT, typename Each> __device__ __forceinline__ void transposed(u32 at, Each each) const {
        u64 column, row = position(at, column), expert = row / form.depth, k = row % form.depth;
        u64 blocks = form.depth / 32, number = (expert * form.columns + column) * blocks + k / 32;
        if (base_row == TPDE_ENDLESS_ROW && form.scales_row == TPDE_ENDLESS_ROW) {
            const u8 *bytes_at = (const u8*)base + 16 * number + k % 32 / 2,
                     *scales_at = (const u8*)form.scales + number;
            u32 nibbles[COUNT], scales[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; i++, bytes_at += 16 * blocks, scales_at += blocks) {
                nibbles[i] = __ldg(bytes_at);
                scales[i] = __ldg(scales_at);
            }
#pragma unroll
            for (int i = 0; i < COUNT; i++) each(i, microscaled(nibbles[i] >> k % 2 * 4 & 15, scales[i]));
            return;
        }
#pragma unroll 1
        for (int i = 0; i < COUNT; i++, number += blocks) {
            u32 nibbles = __ldg(far_byte(base, base_row, base_pitch, 16 * number + k % 32 / 2));
            u32 scale = __ldg(far_byte(form.scales, form.scales_row, form.scales_pitch, number));
            each(i, microscaled(nibbles >> k % 2 * 4 & 15, scale));
        }
    }

    // Converts a lane of the base tensor to W bytes.
    template <int W> __device__ __forceinline__ u32 converted(u32 lane) const {
        if constexpr (W == 4) return form.base_dtype == TPDE_BF16 ? cast<BF16, F32>(lane) : cast<F16, F32>(lane);
        bool to_bf16 = dtype == TPDE_BF16;
        if (form.base_dtype == TPDE_F32) return to_bf16 ? cast<F32, BF16>(lane) : cast<F32, F16>(lane);
        if (form.base_dtype == TPDE_F8_E4M3) return to_bf16 ? cast<E4M3, BF16>(lane) : cast<E4M3, F16>(lane);
        return to_bf16 ? cast<E5M2, BF16>(lane) : cast<E5M2, F16>(lane);
    }

    // The product of a lane of the base tensor and a scale, in W bytes.
    template <int W> __device__ __forceinline__ u32 scaled(u32 lane, const Scale& scale) const {
        u32 exact = product(lane, scale);
        if constexpr (W == 4) return exact;
        return dtype == TPDE_BF16 ? cast<F32, BF16>(exact) : cast<F32, F16>(exact);
    }

    // Returns lane `at` of the chunk.
    template <int W> __device__ __forceinline__ u32 lane(u32 at) const {
        switch (form.form) {
        case TPDE_FORM_CAST: {
            if (W == 4) return converted<W>(*bytes.template lane<2>(at));
            return converted<W>(form.base_dtype == TPDE_F32 ? *bytes.template lane<4>(at) : *bytes.byte(at));
        }
        case TPDE_FORM_FP8_BLOCKS: return scaled<W>(*bytes.byte(at), Scale(scale_of_block(at)));
        case TPDE_FORM_MXFP4: return microscaled(*bytes.byte(at / 2) >> at % 2 * 4 & 15, *rows.byte(at / 32));
        default: {
            u32 only = 0;
            transposed<1>(at, [&](int, u32 lane) { only = lane; });
            return only;
        }
        }
    }

    // Whether pieces of 16 bytes of lanes can be formed from whole vectors of the base tensor.
    template <int W> __device__ __forceinline__ bool has_pieces() const {
        u32 count = 16 / W, size = form.form == TPDE_FORM_MXFP4  ? count / 2
                                   : form.base_dtype == TPDE_F32 ? 16
                                                                 : count * (form.base_dtype < 32 ? 2 : 1);
        if (form.form == TPDE_FORM_MXFP4_TRANSPOSED) return form.columns % count == 0;
        if (form.form == TPDE_FORM_FP8_BLOCKS && form.columns % count != 0) return false;
        return bytes.alignment() % size == 0;
    }

    // A warp, of consecutive pieces: returns the 16 bytes of lanes from lane `at` on, which is a multiple of their number.
    template <int W> __device__ __forceinline__ uint4 piece(u32 at) const {
        u32 words[4] = {};
        if constexpr (W == 4) {
            if (form.form == TPDE_FORM_CAST) {
                uint2 lanes = __ldg((const uint2*)bytes.byte(2 * at));
#pragma unroll
                for (int i = 0; i < 4; i++) words[i] = converted<4>((i < 2 ? lanes.x : lanes.y) >> i % 2 * 16 & 0xFFFF);
            } else {
                u32 lanes = __ldg((const u32*)bytes.byte(at));
                Scale scale(scale_of_block(at));
#pragma unroll
                for (int i = 0; i < 4; i++) words[i] = scaled<4>(lanes >> 8 * i & 0xFF, scale);
            }
        } else {
            auto set = [&](int i, u32 lane) { words[i / 2] = i % 2 ? words[i / 2] | lane << 16 : lane; };
            if (form.form == TPDE_FORM_CAST && form.base_dtype == TPDE_F32) {
                uint4 low = load_once(bytes.byte(4 * at)), high = load_once(bytes.byte(4 * at + 16));
                u32 lanes[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                for (int i = 0; i < 8; i++)
                    set(i, dtype == TPDE_BF16 ? cast<F32, BF16>(lanes[i]) : cast<F32, F16>(lanes[i]));
            } else if (form.form == TPDE_FORM_CAST) {
                uint2 lanes = __ldg((const uint2*)bytes.byte(at));
#pragma unroll
                for (int i = 0; i < 8; i++) set(i, converted<2>(byte_of(lanes, i)));
            } else if (form.form == TPDE_FORM_FP8_BLOCKS) {
                uint2 lanes = __ldg((const uint2*)bytes.byte(at));
                u32 scale = scale_of_block(at);
                if (form.columns % 64 == 0) {
                    if (dtype == TPDE_BF16) scale_piece<BF16>(lanes, scale, words);
                    else scale_piece<F16>(lanes, scale, words);
                } else {
#pragma unroll 1
                    for (u32 i = 0; i < 8; i++) set_half(words, i, scaled<2>(byte_of(lanes, i), Scale(scale)));
                }
            } else if (form.form == TPDE_FORM_MXFP4) {
                u32 nibbles = __ldg((const u32*)bytes.byte(at / 2)), scale = __ldg(rows.byte(at / 32));
#pragma unroll
                for (int i = 0; i < 8; i++) set(i, microscaled(nibbles >> 4 * i & 15, scale));
            } else {
                transposed<8>(at, set);
            }
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
};
