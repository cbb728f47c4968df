// Change lists for applications in place. Scratch memory holds a list until it is applied (kernels/README.md).
#pragma once
#include "conditioned/changes.cuh"

// One thread: acquires a slot of the scratch memory.
__device__ u32 take_slot(const Launch& launch) {
    u32 slot = multiprocessor() * 8 % launch.scratch_slots;
    while (atomicExch((u32*)launch.scratch + slot, 1) != 0) slot = slot + 1 == launch.scratch_slots ? 0 : slot + 1;
    __threadfence();
    return slot;
}

// One thread: reserves memory for the changes of a chunk until the commit launch. Returns its offset in units of 256
// bytes, counted from 1, or 0 if the memory is exhausted.
template <int W> __device__ u32 reserve_list(const Launch& launch, u32 changes) {
    u32 units = (TPDE_LIST_BYTES(changes, W) + 255) / 256, capacity = launch.scratch_slot_bytes / 256;
    // Does not add if the memory is exhausted, so the counter stays within 32 bits.
    if (*(volatile u32*)launch.scratch + units > capacity) return 0;
    u32 at = atomicAdd((u32*)launch.scratch, units);
    return at + units <= capacity ? at + 1 : 0;
}

// Returns the list of a chunk, in a slot (IN_PLACE) or at a reserved offset (DRY, COMMIT).
template <int W> __device__ __forceinline__ ChangeList list_in(const Launch& launch, u32 slot, u32 changes) {
    u64 offset = launch.mode == TPDE_MODE_IN_PLACE ? (u64)slot * launch.scratch_slot_bytes : 256ull * (slot - 1);
    return {(u8*)(launch.scratch + TPDE_SCRATCH_HEAD(launch.scratch_slots) + offset), changes,
            TPDE_LIST_LANES_AT(changes)};
}

// Acquires memory for the changes of the chunk: a slot while the block decodes (IN_PLACE), or memory until the commit
// launch (DRY). Returns false if the changes do not fit.
template <int W> __device__ __forceinline__ bool open_list(const Launch& launch) {
    Shared& shared = shared_memory();
    u32 changes = shared.chunk.num_deltas;
    bool is_dry = launch.mode == TPDE_MODE_DRY;
    if (!is_dry && TPDE_LIST_BYTES(changes, W) > launch.scratch_slot_bytes) return false;
    if (threadIdx.x == 0) {
        shared.slot = is_dry ? reserve_list<W>(launch, changes) : take_slot(launch);
        shared.list = list_in<W>(launch, shared.slot, changes);
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

// Called after a pass. Applies the changes and frees the slot (IN_PLACE), or records the offset of the list (DRY).
template <int W> __device__ __forceinline__ void close_list(const Launch& launch, u32 errors) {
    Shared& shared = shared_memory();
    if (launch.mode == TPDE_MODE_DRY) {
        if (threadIdx.x == 0 && errors == 0) ((u32*)launch.scratch)[1 + launch_index(launch)] = shared.slot;
        return;
    }
    if (errors == 0) carry_out<W>();
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicExch((u32*)launch.scratch + shared.slot, 0);
    }
}
