// The chunk that a block decodes, and operations in which all threads of the block take part.
#pragma once
#include "common/device.cuh"
#ifdef TPDE_DERIVED
#define TPDE_STRIDED
#include "common/formed.cuh"
#endif
#include "common/rows.cuh"
#include "common/sums.cuh"

#define WARP 32
#define ALL_LANES 0xFFFFFFFFu

// Kernels are compiled for tensors without gaps, with TPDE_STRIDED for tensors in rows with gaps between them, and with
// TPDE_DERIVED for tensors whose base lanes are formed, with or without gaps, out of place.
#ifdef TPDE_DERIVED
#define TPDE_ENTRY(name) name##_derived
#define TPDE_TENSOR_CODEC(codec) (codec | TPDE_DERIVED_TENSOR)
#define FORMS_BASE true
#elif defined TPDE_STRIDED
#define TPDE_ENTRY(name) name##_strided
#define TPDE_TENSOR_CODEC(codec) (codec | TPDE_STRIDED_TENSOR)
#else
#define TPDE_ENTRY(name) name
#define TPDE_TENSOR_CODEC(codec) codec
#endif
#ifndef FORMS_BASE
#define FORMS_BASE false
#endif

// The bytes of a chunk in base or output.
#ifdef TPDE_STRIDED
typedef StridedBytes Bytes;
#else
struct Bytes {
    u8* start; // first byte of the chunk
    __device__ __forceinline__ u8* byte(u32 at) const { return start + at; }
    template <int W> __device__ __forceinline__ typename LaneOf<W>::type* lane(u32 at) const {
        return (typename LaneOf<W>::type*)start + at;
    }
    __device__ __forceinline__ Bytes skip(u64 by) const { return {start + by}; }
    __device__ __forceinline__ void set_contiguous(u8* from) { start = from; }
    __device__ __forceinline__ u64 alignment() const { return (u64)start; }
};
#endif

#if FORMS_BASE
typedef FormedLanes BaseLanes;
#else
typedef Bytes BaseLanes;
#endif

// A chunk and its part of the tensor. Positions and sizes within a chunk fit in 32 bits.
struct Chunk {
    BaseLanes base;
    Bytes output;
    const u8* payload; // address is a multiple of 16
    u32 lanes;
    u32 base_lanes; // number of base lanes; lanes from this index on count as zero
    u32 size;       // size of the payload in bytes, without padding
    u32 num_deltas;
    u32 crc32;
    u32 number;
    u64 base_sum, target_sum;
};

__device__ __forceinline__ u32 launch_index(const Launch& launch) { return launch.first + blockIdx.x; }

// Finds the chunk of this block and its tensor. Returns false if this kernel does not decode the chunk.
__device__ __forceinline__ bool chunk_of_block(const Launch& launch, u16 codec, Chunk& chunk, DeviceTensor& tensor) {
    if (blockIdx.x >= launch.count) return false;
    chunk.number = launch.order ? ((const u32*)launch.order)[launch_index(launch)] : launch_index(launch);
    tensor = ((const DeviceTensor*)launch.tensors)[((const u32*)launch.chunk_tensors)[chunk.number]];
    if (tensor.codec != TPDE_TENSOR_CODEC(codec)) return false;
    ChunkMetadata record = ((const ChunkMetadata*)launch.chunks)[chunk.number];
    ChunkSums sums = ((const ChunkSums*)launch.sums)[chunk.number];
    u64 first = record.output_offset, left = tensor.lanes - first, size = 1ull << tensor.chunk_lanes_log2;
    u64 base_left = tensor.base_lanes > first ? tensor.base_lanes - first : 0;
    chunk.lanes = (u32)(left < size ? left : size);
    chunk.base_lanes = (u32)(base_left < chunk.lanes ? base_left : chunk.lanes);
#ifdef TPDE_STRIDED
    TensorRows rows = ((const TensorRows*)launch.rows)[((const u32*)launch.chunk_tensors)[chunk.number]];
    u64 offset = first << tensor.lane_log2;
#if FORMS_BASE
    TensorForm form = ((const TensorForm*)launch.forms)[((const u32*)launch.chunk_tensors)[chunk.number]];
    chunk.base.open(tensor, rows, form, first, chunk.lanes);
#else
    chunk.base.open(tensor.base, rows.base_row, rows.base_pitch, offset, chunk.lanes << tensor.lane_log2);
#endif
    chunk.output.open(tensor.output, rows.output_row, rows.output_pitch, offset, chunk.lanes << tensor.lane_log2);
#else
    chunk.base.start = (u8*)tensor.base + (first << tensor.lane_log2);
    chunk.output.start = (u8*)tensor.output + (first << tensor.lane_log2);
#endif
    chunk.payload = (const u8*)(launch.blob + record.blob_offset);
    chunk.size = record.compressed_size;
    chunk.num_deltas = record.num_deltas;
    chunk.crc32 = record.crc32;
    chunk.base_sum = sums.base_sum;
    chunk.target_sum = sums.target_sum;
    return true;
}

// The bit of a status word in a mask of errors.
__device__ __forceinline__ u32 error(u32 status) { return 1u << status; }

// One thread: writes the status word of the chunk: the number of the lowest error bit, or 0.
__device__ __forceinline__ void report(const Launch& launch, const Chunk& chunk, u32 errors) {
    ((u32*)launch.statuses)[chunk.number] = errors ? __ffs((i32)errors) - 1 : 0;
    if (errors && launch.mode == TPDE_MODE_DRY) *(volatile u32*)launch.flag = 1;
}

__device__ __forceinline__ bool commit_is_off(const Launch& launch) {
    return launch.mode == TPDE_MODE_COMMIT && *(const volatile u32*)launch.flag != 0;
}

// Loads and stores a lane in shared memory.
template <int W> __device__ __forceinline__ typename WideOf<W>::type shared_lane(u32 at) {
    if constexpr (W == 1) return shared_u8(at);
    if constexpr (W == 2) return shared_u16(at);
    if constexpr (W == 4) return shared_u32(at);
    if constexpr (W == 8) {
        uint2 lane = shared_u32x2(at);
        return lane.x | (u64)lane.y << 32;
    }
}
template <int W> __device__ __forceinline__ void set_shared_lane(u32 at, typename WideOf<W>::type lane) {
    if constexpr (W == 1) set_shared_u8(at, lane);
    if constexpr (W == 2) set_shared_u16(at, lane);
    if constexpr (W == 4) set_shared_u32(at, lane);
    if constexpr (W == 8) set_shared_u64(at, lane);
}

// Returns the `x` of thread 0. All threads of the warp pass equal values. The shuffle proves that to the compiler.
__device__ __forceinline__ u32 uniform(u32 x) { return __shfl_sync(ALL_LANES, x, 0); }

// ---- Payload. Reads stay inside the payload and its padding ----

__device__ __forceinline__ u32 padded(u32 size) { return (size + 15) & ~15u; }

// Loads SIZE <= 8 bytes at any alignment. The caller checks the bounds.
template <int SIZE> __device__ __forceinline__ u64 unaligned(const u8* payload, u32 at) {
    u64 value = 0;
#pragma unroll
    for (int i = 0; i < SIZE; i++) value |= (u64)payload[at + i] << (8 * i);
    return value;
}

// ---- Lanes in global memory ----

template <int W> __device__ __forceinline__ typename WideOf<W>::type load_lane(const Chunk& chunk, u32 at) {
#if FORMS_BASE
    return at < chunk.base_lanes ? chunk.base.lane<W>(at) : 0;
#else
    return at < chunk.base_lanes ? *chunk.base.lane<W>(at) : 0;
#endif
}

template <int W> __device__ __forceinline__ void store_lane(const Chunk& chunk, u32 at, typename WideOf<W>::type lane) {
    *chunk.output.lane<W>(at) = (typename LaneOf<W>::type)lane;
}

// ---- Totals of the block ----

// Sums and errors of a block, in shared memory.
struct Totals {
    u64 base_sum, target_sum;
    u32 changed, errors;
};

__device__ __forceinline__ u64 warp_sum(u64 x) {
    for (int by = 16; by; by /= 2) x += __shfl_xor_sync(ALL_LANES, x, by);
    return x;
}

// All threads: adds the values of each thread to the totals. A barrier must precede the next read of the totals.
__device__ __forceinline__ void add_to(Totals& totals, u64 base_sum, u64 target_sum, u32 changed, u32 errors) {
    base_sum = warp_sum(base_sum);
    target_sum = warp_sum(target_sum);
    changed = __reduce_add_sync(ALL_LANES, changed);
    errors = __reduce_or_sync(ALL_LANES, errors);
    if (threadIdx.x % WARP == 0) {
        atomicAdd(&totals.base_sum, base_sum);
        atomicAdd(&totals.target_sum, target_sum);
        atomicAdd(&totals.changed, changed);
        atomicOr(&totals.errors, errors);
    }
}

// Returns all errors of the block, including wrong sums. `totals.target_sum` holds target sum - base sum, modulo 2^64.
__device__ __forceinline__ u32 errors_of(const Totals& totals, const Chunk& chunk) {
    u32 errors = totals.errors;
    if (totals.base_sum != chunk.base_sum) errors |= error(TPDE_STATUS_CHUNK_BASE_SUM);
    if (totals.changed != chunk.num_deltas) errors |= error(TPDE_STATUS_PAYLOAD_DELTAS);
    if (totals.base_sum + totals.target_sum != chunk.target_sum) errors |= error(TPDE_STATUS_CHUNK_TARGET_SUM);
    return errors;
}
