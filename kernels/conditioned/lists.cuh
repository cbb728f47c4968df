// Applications in place: until a chunk is checked, scratch memory holds a list of its changes, its target or its base
// (kernels/README.md).
#pragma once
#include "conditioned/changes.cuh"

// One thread: acquires a slot of the scratch memory.
__device__ u32 take_slot(const Launch& launch) {
    u32 slot = multiprocessor() * 8 % launch.scratch_slots;
    while (atomicExch((u32*)launch.scratch + slot, 1) != 0) slot = slot + 1 == launch.scratch_slots ? 0 : slot + 1;
    __threadfence();
    return slot;
}

// One thread: reserves memory until the commit launch. Returns its offset in units of 256 bytes, counted from 1, or 0 if
// the memory is exhausted.
__device__ u32 reserve(const Launch& launch, u32 bytes) {
    u32 units = (bytes + 255) / 256, capacity = launch.scratch_slot_bytes / 256;
    // Does not add if the memory is exhausted, so the counter stays within 32 bits.
    if (*(volatile u32*)launch.scratch + units > capacity) return 0;
    u32 at = atomicAdd((u32*)launch.scratch, units);
    return at + units <= capacity ? at + 1 : 0;
}

// Returns the address of a slot (IN_PLACE), or of memory at a reserved offset (DRY, COMMIT).
__device__ __forceinline__ u64 slot_in(const Launch& launch, u32 slot) {
    u64 offset = launch.mode == TPDE_MODE_IN_PLACE ? (u64)slot * launch.scratch_slot_bytes : 256ull * (slot - 1);
    return launch.scratch + TPDE_SCRATCH_HEAD(launch.scratch_slots) + offset;
}

// Returns the list of a chunk, in a slot (IN_PLACE) or at a reserved offset (DRY, COMMIT).
template <int W> __device__ __forceinline__ ChangeList list_in(const Launch& launch, u32 slot, u32 changes) {
    return {(u8*)slot_in(launch, slot), changes, TPDE_LIST_LANES_AT(changes)};
}

// Acquires memory for the changes of the chunk: a slot while the block decodes (IN_PLACE), or memory until the commit
// launch (DRY). Returns false if the changes do not fit.
template <int W> __device__ __forceinline__ bool open_list(const Launch& launch) {
    Shared& shared = shared_memory();
    u32 changes = shared.chunk.num_deltas;
    bool is_dry = launch.mode == TPDE_MODE_DRY;
    if (!is_dry && TPDE_LIST_BYTES(changes, W) > launch.scratch_slot_bytes) return false;
    if (threadIdx.x == 0) {
        shared.slot = is_dry ? reserve(launch, TPDE_LIST_BYTES(changes, W)) : take_slot(launch);
        shared.list = list_in<W>(launch, shared.slot, changes);
    }
    __syncthreads();
    return !is_dry || shared.slot != 0;
}

// Returns whether the list of the changes is short. Otherwise all lanes are kept, or the chunk is decoded twice: writing
// and storing a long list takes longer.
template <int W> __device__ __forceinline__ bool has_short_list(const Chunk& chunk) {
    return TPDE_SHORT_LIST * (u64)TPDE_LIST_BYTES((u64)chunk.num_deltas, W) <= (u64)chunk.lanes * W;
}

// Acquires memory for all lanes of the chunk: a slot for those of the base while the block decodes (IN_PLACE), or memory
// for those of the target until the commit launch, which becomes the output of the chunk (DRY). Returns false if they do
// not fit.
template <int W> __device__ __forceinline__ bool open_copy(const Launch& launch) {
    Shared& shared = shared_memory();
    u32 bytes = shared.chunk.lanes * W;
    bool is_dry = launch.mode == TPDE_MODE_DRY;
    if (!is_dry && (bytes > launch.scratch_slot_bytes || shared.chunk.base_lanes < shared.chunk.lanes)) return false;
    if (threadIdx.x == 0) {
        shared.slot = is_dry ? reserve(launch, bytes) : take_slot(launch);
        u8* at = (u8*)slot_in(launch, shared.slot);
        if (!is_dry) shared.kept = at;
        else if (shared.slot != 0) shared.chunk.output.set_contiguous(at);
    }
    __syncthreads();
    return !is_dry || shared.slot != 0;
}

// All threads: stores the listed changes in the output. The checks have passed, so the list has exactly `capacity`
// changes. Each thread has several loads in flight. With one load at a time this would take as long as the decoding.
template <int W> __device__ __noinline__ void carry_out() {
    typedef typename LaneOf<W>::type Lane;
    constexpr int LOADS_IN_FLIGHT = 8;
    ChangeList list = shared_memory().list;
    Bytes output = shared_memory().chunk.output;
    for (u32 first = threadIdx.x; first < list.capacity; first += LOADS_IN_FLIGHT * THREADS) {
        u32 positions[LOADS_IN_FLIGHT];
        Lane lanes[LOADS_IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < LOADS_IN_FLIGHT; k++) {
            u32 i = min(first + k * THREADS, list.capacity - 1);
            positions[k] = __ldcg(&list.position(i));
            lanes[k] = __ldcg(&list.template lane<W>(i));
        }
#pragma unroll
        for (int k = 0; k < LOADS_IN_FLIGHT; k++) {
            if (first + k * THREADS < list.capacity) *(Lane*)output.byte(positions[k]) = lanes[k];
        }
    }
}

// All threads: copies the lanes of the chunk from a slot (IN_PLACE) or a reserved offset (COMMIT) to the output.
template <int W> __device__ __forceinline__ void store_copy(const Launch& launch, u32 slot) {
#if !FORMS_BASE // chunks whose base lanes are formed have no application in place
    Chunk& chunk = shared_memory().chunk;
    __syncthreads(); // all threads have read the chunk
    if (threadIdx.x == 0) {
        chunk.base.set_contiguous((u8*)slot_in(launch, slot));
        chunk.base_lanes = chunk.lanes;
    }
    __syncthreads();
    copy<W>(true);
#endif
}

// Called after a pass. Stores the list, or undoes the stores if a check has failed, and frees the slot (IN_PLACE). Or
// records the offset of the list or target (DRY).
template <int W> __device__ __forceinline__ void close_slot(const Launch& launch, bool is_list, u32 errors) {
    Shared& shared = shared_memory();
    if (launch.mode == TPDE_MODE_DRY) {
        if (threadIdx.x == 0 && errors == 0) ((u32*)launch.scratch)[1 + launch_index(launch)] = shared.slot;
        return;
    }
    if (is_list && errors == 0) carry_out<W>();
    if (!is_list && errors != 0) store_copy<W>(launch, shared.slot);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicExch((u32*)launch.scratch + shared.slot, 0);
    }
}
