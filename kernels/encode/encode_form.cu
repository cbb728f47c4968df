// Forms base lanes from tensors of other dtypes (spec/tpde-format.md section 8.5), for the encoder.
#include "common/formed.cuh"
#include "encode/form.cuh"

#define THREADS TPDE_FORM_THREADS
#define WARP 32

// All threads: stores the lanes of a part.
template <int W> __device__ __forceinline__ void form(const FormedLanes& formed, u32 lanes, u64 output) {
    constexpr u32 PIECE = 16 / W; // lanes per piece of 16 bytes
    // Whole warps form pieces. The remaining lanes are formed one by one.
    u32 pieces = formed.has_pieces<W>() ? lanes / (WARP * PIECE) * WARP : 0;
    for (u32 i = threadIdx.x; i < pieces; i += THREADS) ((uint4*)output)[i] = formed.piece<W>(i * PIECE);
    for (u32 at = pieces * PIECE + threadIdx.x; at < lanes; at += THREADS)
        ((typename LaneOf<W>::type*)output)[at] = (typename LaneOf<W>::type)formed.lane<W>(at);
}

// A block per part.
extern "C" __global__ void __launch_bounds__(THREADS) tpde_encode_form(const __grid_constant__ Form launch) {
    __shared__ FormedLanes formed;
    if (blockIdx.x >= launch.parts) return;
    const FormRange* ranges = (const FormRange*)launch.ranges;
    // The last range that begins at or before the part.
    u32 begin = 0, end = launch.count;
    while (end - begin > 1) {
        u32 middle = (begin + end) / 2;
        if (ranges[middle].first_part <= blockIdx.x) begin = middle;
        else end = middle;
    }
    const FormRange& range = ranges[begin];
    u32 before = (blockIdx.x - range.first_part) * TPDE_FORM_PART, lanes = min(range.lanes - before, TPDE_FORM_PART);
    if (threadIdx.x == 0) {
        DeviceTensor tensor = {};
        tensor.base = range.base;
        tensor.dtype = range.dtype;
        TensorRows rows = {range.base_row, range.base_pitch, TPDE_ENDLESS_ROW, TPDE_ENDLESS_ROW};
        formed.open(tensor, rows, range.form, range.first + before, lanes);
    }
    __syncthreads();
    u64 output = range.output + ((u64)before << range.lane_log2);
    if (range.lane_log2 == 1) form<2>(formed, lanes, output);
    else form<4>(formed, lanes, output);
}
