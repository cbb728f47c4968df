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
    __device__ __forceinline__ Scale scale_of_block(u32 at) const {
        u64 column, row = position(at, column), across = (form.columns + 127) / 128;
        u64 number = row / 128 * across + column / 128;
        return Scale(__ldg((const u32*)far_byte(form.scales, form.scales_row, form.scales_pitch, 4 * number)));
    }

    // `mxfp4_transposed`: calls `each` for COUNT lanes of a row.
    template <int COUNT, typename Each> __device__ __forceinline__ void transposed(u32 at, Each each) const {
        u64 column, row = position(at, column), expert = row / form.depth, k = row % form.depth;
        u64 blocks = form.depth / 32, number = (expert * form.columns + column) * blocks + k / 32;
#pragma unroll
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
        case TPDE_FORM_FP8_BLOCKS: return scaled<W>(*bytes.byte(at), scale_of_block(at));
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

    // Returns the 16 bytes of lanes from lane `at` on, which is a multiple of their number.
    template <int W> __device__ __forceinline__ uint4 piece(u32 at) const {
        u32 words[4] = {};
        if constexpr (W == 4) {
            if (form.form == TPDE_FORM_CAST) {
                uint2 lanes = __ldg((const uint2*)bytes.byte(2 * at));
#pragma unroll
                for (int i = 0; i < 4; i++) words[i] = converted<4>((i < 2 ? lanes.x : lanes.y) >> i % 2 * 16 & 0xFFFF);
            } else {
                u32 lanes = __ldg((const u32*)bytes.byte(at));
                Scale scale = scale_of_block(at);
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
            } else if (form.form == TPDE_FORM_CAST || form.form == TPDE_FORM_FP8_BLOCKS) {
                uint2 lanes = __ldg((const uint2*)bytes.byte(at));
                Scale scale = form.form == TPDE_FORM_CAST ? Scale(0) : scale_of_block(at);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    u32 lane = (i < 4 ? lanes.x : lanes.y) >> 8 * (i % 4) & 0xFF;
                    set(i, form.form == TPDE_FORM_CAST ? converted<2>(lane) : scaled<2>(lane, scale));
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
