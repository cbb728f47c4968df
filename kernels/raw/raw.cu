// Codec `raw` (spec/codecs.md section 2): a block copies a chunk, applies its changes and checks it.
#include "common/crc.cuh"
#include "common/pieces.cuh"

#define THREADS TPDE_RAW_THREADS

struct RawShared {
    u32 crc[CRC_SHARED / 4];
    Totals totals;
    Chunk chunk;
};

// All threads: applies the changes. If positions ascend strictly, no two threads change the same lane. If not, threads may
// race for a lane, but the chunk gets an error. In place, nothing is stored before all positions are checked.
template <int W>
__device__ __forceinline__ void apply_changes(const Chunk& chunk, u64 magnitude, bool stored, u64& sum, u32& errors) {
    typedef typename WideOf<W>::type T;
    const u32* positions = (const u32*)chunk.payload;
    const typename LaneOf<W>::type* deltas =
        (const typename LaneOf<W>::type*)(chunk.payload + (4 * chunk.num_deltas + W - 1) / W * W);
    for (u32 i = threadIdx.x; i < chunk.num_deltas; i += THREADS) {
        u32 at = positions[i];
        T delta = deltas[i];
        if (at >= chunk.lanes || (i > 0 && at <= positions[i - 1])) {
            errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
            continue;
        }
        if (delta == 0) errors |= error(TPDE_STATUS_PAYLOAD_DELTAS);
        T base = load_lane<W>(chunk, at), target = apply_delta<W>(base, delta, (T)magnitude);
        sum += lane_term<W>(at, base, target);
        if (stored) store_lane<W>(chunk, at, target);
    }
}

// Checks the size of the payload and the padding between positions and deltas. Returns equal errors in all threads.
template <int W> __device__ __forceinline__ u32 check_size(const Chunk& chunk) {
    u64 deltas_at = (4 * (u64)chunk.num_deltas + W - 1) / W * W;
    if (deltas_at + (u64)W * chunk.num_deltas > chunk.size) return error(TPDE_STATUS_PAYLOAD_SIZE);
    bool clean = deltas_at == 4 * (u64)chunk.num_deltas || ((const u32*)chunk.payload)[chunk.num_deltas] == 0;
    return clean ? 0 : error(TPDE_STATUS_PAYLOAD_POSITIONS);
}

template <int W> __device__ __noinline__ u32 run(const Launch& launch, u64 magnitude, RawShared& shared) {
    const Chunk& chunk = shared.chunk;
    bool stores_all = launch.mode == TPDE_MODE_OUT_OF_PLACE || chunk.base_lanes < chunk.lanes,
         checked_first = launch.mode == TPDE_MODE_IN_PLACE;
    bool stored = launch.mode == TPDE_MODE_OUT_OF_PLACE || launch.mode == TPDE_MODE_COMMIT;
    if (chunk.num_deltas != 0) {
        u32 errors = check_payload<THREADS>(launch, chunk, shared.crc);
        if (errors == 0) errors = check_size<W>(chunk);
        if (errors) return errors;
    }
    for (;;) {
        if (threadIdx.x == 0) shared.totals = {};
        __syncthreads();
        u64 base_sum = copy_chunk<W, THREADS>(chunk, stored && stores_all), target_sum = 0;
        u32 errors = 0;
        __syncthreads();
        apply_changes<W>(chunk, magnitude, stored, target_sum, errors);
        add_to(shared.totals, base_sum, target_sum, 0, errors);
        __syncthreads();
        if (threadIdx.x == 0) shared.totals.changed = chunk.num_deltas;
        __syncthreads();
        errors = errors_of(shared.totals, chunk);
        if (!checked_first || stored || errors) return errors;
        stored = true;
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) TPDE_ENTRY(tpde_raw)(const __grid_constant__ Launch launch) {
    __shared__ RawShared shared;
    Chunk chunk;
    DeviceTensor tensor;
    if (!chunk_of_block(launch, TPDE_CODEC_RAW, chunk, tensor) || commit_is_off(launch)) return;
    if (threadIdx.x == 0) shared.chunk = chunk;
    __syncthreads();
    u64 magnitude = order_of(tensor.dtype).magnitude;
    u32 errors;
    if constexpr (FORMS_BASE) {
        errors = tensor.lane_log2 == 1 ? run<2>(launch, magnitude, shared) : run<4>(launch, magnitude, shared);
    } else {
        switch (tensor.lane_log2) {
        case 0: errors = run<1>(launch, magnitude, shared); break;
        case 1: errors = run<2>(launch, magnitude, shared); break;
        case 2: errors = run<4>(launch, magnitude, shared); break;
        default: errors = run<8>(launch, magnitude, shared); break;
        }
    }
    if (threadIdx.x == 0) report(launch, shared.chunk, errors);
}
