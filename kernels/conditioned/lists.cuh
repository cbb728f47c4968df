// Changes in place that are kept until they may be carried out: in scratch memory, see README.md.
#pragma once
#include "conditioned/changes.cuh"

// One thread: takes a slot of the scratch memory.
__device__ u32 take_slot(const Launch& launch) {
    u32 slot = multiprocessor() * 8 % launch.scratch_slots;
    while (atomicExch((u32*)launch.scratch + slot, 1) != 0) slot = slot + 1 == launch.scratch_slots ? 0 : slot + 1;
    __threadfence();
    return slot;
}

// One thread: takes room for the changes of a chunk until the launch that commits. Returns where, in units of 256 bytes from 1 on, or 0
// if there is none left.
template <int W> __device__ u32 take_room(const Launch& launch, u32 changes) {
    u32 units = (TPDE_LIST_BYTES(changes, W) + 255) / 256, all = launch.scratch_slot_bytes / 256;
    // Who sees that there is no room does not add, so that the sum stays within 32 bits.
    if (*(volatile u32*)launch.scratch + units > all) return 0;
    u32 at = atomicAdd((u32*)launch.scratch, units);
    return at + units <= all ? at + 1 : 0;
}

// The list of the chunk in the slot or room that it has.
template <int W> __device__ __forceinline__ List list_in(const Launch& launch, u32 slot, u32 changes) {
    u64 offset = launch.mode == TPDE_MODE_IN_PLACE ? (u64)slot * launch.scratch_slot_bytes : 256ull * (slot - 1);
    return {(u8*)(launch.scratch + TPDE_SCRATCH_HEAD(launch.scratch_slots) + offset), changes, TPDE_LIST_LANES_AT(changes)};
}

// Memory for the changes of the chunk: a slot while it is decoded, or room that it has until the launch that commits. False if they do
// not fit, or there is none left.
template <int W> __device__ __forceinline__ bool open_list(const Launch& launch) {
    Shared& shared = shared_memory();
    u32 changes = shared.chunk.num_deltas;
    bool keeps = launch.mode == TPDE_MODE_DRY;
    if (!keeps && TPDE_LIST_BYTES(changes, W) > launch.scratch_slot_bytes) return false;
    if (threadIdx.x == 0) {
        shared.slot = keeps ? take_room<W>(launch, changes) : take_slot(launch);
        shared.list = list_in<W>(launch, shared.slot, changes);
    }
    __syncthreads();
    return !keeps || shared.slot != 0;
}

// All threads: as many changes as the chunk should have, which is as many as it has if its checks have passed. Few loads at a time
// would take as long as the decoding.
template <int W> __device__ __noinline__ void carry_out() {
    typedef typename LaneOf<W>::type Lane;
    constexpr int AT_ONCE = 8;
    List list = shared_memory().list;
    u8* output = shared_memory().chunk.output;
    for (u32 first = threadIdx.x; first < list.capacity; first += AT_ONCE * THREADS) {
        u32 positions[AT_ONCE];
        Lane lanes[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            u32 i = min(first + k * THREADS, list.capacity - 1);
            positions[k] = __ldcg(&list.position(i));
            lanes[k] = __ldcg(&list.template lane<W>(i));
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (first + k * THREADS < list.capacity) *(Lane*)(output + positions[k]) = lanes[k];
        }
    }
}

// After a pass: the changes are carried out, or kept for the launch that does.
template <int W> __device__ __forceinline__ void close_list(const Launch& launch, u32 errors) {
    Shared& shared = shared_memory();
    if (launch.mode == TPDE_MODE_DRY) {
        if (threadIdx.x == 0 && errors == 0) ((u32*)launch.scratch)[1 + place_of_block(launch)] = shared.slot;
        return;
    }
    if (errors == 0) carry_out<W>();
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicExch((u32*)launch.scratch + shared.slot, 0);
    }
}
