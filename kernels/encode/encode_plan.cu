// Encoding, first half: surveys chunks, gathers samples for training, and chooses activities and maps.
#include "encode/survey.cuh"
#include "encode/choose.cuh"

struct SurveyPart {
    const EncodeChunk& chunk;
    EncodeState& state;
    u32 part;
    template <int W> __device__ __forceinline__ void run() { survey<W>(chunk, state, part); }
};

// A block per part.
extern "C" __global__ void __launch_bounds__(THREADS, 4) tpde_encode_survey(const __grid_constant__ Encode encode) {
    if (blockIdx.x >= encode.parts) return;
    u32 number = chunk_of(encode, &EncodeChunk::first_part, blockIdx.x);
    EncodeChunk chunk = ((const EncodeChunk*)encode.chunks)[number];
    with_width(chunk.lane_log2, SurveyPart{chunk, state_of(chunk), blockIdx.x - chunk.first_part});
}

struct ChooseChunk {
    const EncodeChunk& chunk;
    EncodeState& state;
    const EncodeTables& tables;
    u32* counts;
    ChooseScratch& scratch;
    ChooseShared& shared;
    template <int W> __device__ __forceinline__ void run() { choose<W>(chunk, state, tables, counts, scratch, shared); }
};

// Blocks take chunks in turn: there are as many blocks as there is scratch memory for.
extern "C" __global__ void __launch_bounds__(THREADS, 4) tpde_encode_choose(const __grid_constant__ Encode encode) {
    __shared__ ChooseShared shared;
    ChooseScratch& scratch = *(ChooseScratch*)(encode.scratch + (u64)blockIdx.x * encode.slot_bytes);
    u32* counts = (u32*)(&scratch + 1);
    for (u32 number = blockIdx.x; number < encode.count; number += gridDim.x) {
        EncodeChunk chunk = ((const EncodeChunk*)encode.chunks)[number];
        EncodeState& state = state_of(chunk);
        if (state.changed == 0 || chunk.tables == TPDE_NO_TABLES) continue;
        const EncodeTables& tables = ((const EncodeTables*)encode.tables)[chunk.tables];
        with_width(chunk.lane_log2, ChooseChunk{chunk, state, tables, counts, scratch, shared});
    }
}

// Returns the magnitude of a token's values: linear for small tokens, logarithmic for large ones.
__device__ __forceinline__ u32 magnitude_of(u32 token) {
    u64 value = token < DIRECT ? token : (u64)(2 + (token & 1)) << extra_bits(token);
    if (value < 8) return (u32)value;
    u32 log2 = 63 - __clzll((i64)value);
    return 2 + 2 * log2 + (u32)(value >> (log2 - 1) & 1);
}

// A warp: adds the counts of a context, in a range of levels, to its group.
__device__ __forceinline__ void add_to_group(const Encode& encode, const u32* counts, const StatsShared& shared,
                                             u32 context, u32 first, u32 end) {
    u32 thread = threadIdx.x % WARP, lanes = 0, rows = 0;
    for (u32 level = first; level < end; level++) {
        lanes += shared.lanes[level * CONTEXTS + context];
        rows |= (u32)has_counts(shared, level * CONTEXTS + context) << level;
    }
    if (lanes == 0 && rows == 0) return;
    u32 values = 0, others = 0;
    u64 magnitudes = 0;
    auto count = [&](u32 token) {
        u32 sum = 0;
        for (u32 level = first; level < end; level++) {
            if (rows >> level & 1) sum += counts[(level * CONTEXTS + context) * encode.tokens + token];
        }
        return sum;
    };
    for (u32 token = thread; token < encode.tokens; token += WARP) {
        u32 n = count(token);
        values += n;
        if (token != 0) others += n;
        magnitudes += (u64)n * magnitude_of(token);
    }
    values = __reduce_add_sync(ALL_LANES, values), others = __reduce_add_sync(ALL_LANES, others);
    magnitudes = warp_sum(magnitudes);
    if (others == 0) return;
    u32 zeros = lanes > values ? lanes - values : 0, log2_lanes = log2_of(values + zeros);
    u32 rate = min(2 * (log2_lanes - min(log2_of(others), log2_lanes)) / 256, 31);
    u32 group = rate * TPDE_ENCODE_MAGNITUDES + (u32)(4 * magnitudes / others);
    u64* groups = (u64*)encode.groups + (u64)group * encode.tokens;
    for (u32 token = thread; token < encode.tokens; token += WARP) {
        u32 n = count(token) + (token == 0 ? zeros : 0);
        if (n) atomicAdd(&groups[token], (u64)n);
    }
}

struct SamplePiece {
    const Encode& encode;
    const EncodeChunk& chunk;
    EncodeState& state;
    u32* counts;
    StatsShared& shared;
    template <int W> __device__ __forceinline__ void run() {
        Stats stats = gather_stats<W>(chunk, state, counts, shared);
        // If many lanes change, the encoder distinguishes blocks by activity. The sample does the same.
        bool by_level = 16 * state.changed >= chunk.lanes;
        u32 groups = by_level ? LEVELS : 1;
        for (u32 i = threadIdx.x / WARP; i < groups * CONTEXTS; i += WARPS) {
            u32 first = by_level ? i / CONTEXTS : 0, end = by_level ? first + 1 : LEVELS;
            add_to_group(encode, counts, shared, i % CONTEXTS, first, end);
        }
        __syncthreads();
        for (u32 i = threadIdx.x / WARP; i < shared.row_count; i += WARPS) clear_row(stats, counts, shared.row_list[i]);
        __syncthreads();
    }
};

// Blocks take pieces of tensors in turn. Pieces of tensors without changes are no samples, unless they have low bits.
extern "C" __global__ void __launch_bounds__(THREADS, 4) tpde_encode_sample(const __grid_constant__ Encode encode) {
    __shared__ StatsShared shared;
    u32* counts = (u32*)(encode.scratch + (u64)blockIdx.x * encode.slot_bytes + TPDE_ENCODE_CHOOSE_SCRATCH);
    for (u32 number = blockIdx.x; number < encode.count; number += gridDim.x) {
        EncodeChunk chunk = ((const EncodeChunk*)encode.chunks)[number];
        EncodeState& state = state_of(chunk);
        if (threadIdx.x == 0 && state.changed != 0) atomicAdd((u32*)encode.found + 1, state.changed);
        if (state.changed == 0 && chunk.low_bits == 0) continue;
        with_width(chunk.lane_log2, SamplePiece{encode, chunk, state, counts, shared});
    }
}

// A warp per group: lists the groups that have counts.
extern "C" __global__ void __launch_bounds__(THREADS) tpde_encode_groups(const __grid_constant__ Encode encode) {
    u32 group = blockIdx.x * WARPS + threadIdx.x / WARP, thread = threadIdx.x % WARP;
    if (group >= TPDE_ENCODE_GROUPS) return;
    const u64* counts = (const u64*)encode.groups + (u64)group * encode.tokens;
    bool any = false;
    for (u32 token = thread; token < encode.tokens; token += WARP) any |= counts[token] != 0;
    if (!__any_sync(ALL_LANES, any)) return;
    u32 place = 0;
    if (thread == 0) place = atomicAdd((u32*)encode.found, 1);
    place = __shfl_sync(ALL_LANES, place, 0);
    u64* row = (u64*)encode.rows + (u64)place * (1 + encode.tokens);
    if (thread == 0) row[0] = group;
    for (u32 token = thread; token < encode.tokens; token += WARP) row[1 + token] = counts[token];
}
