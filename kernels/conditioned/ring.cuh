// Several warps decode one segment: warp i of n decodes tiles i, i + n, i + 2n, … and hands the stream over to the next
// warp (spec/codecs.md section 4.5).
#pragma once
#include "conditioned/changes.cuh"

struct Ring {
    u32 member, count;
    u32 handoff; // shared-memory address of the StreamHandoff
    u32 own_barrier, next_barrier;
};

// Returns the ring of this warp for 2^log2 segments. The code has no branches, so the compiler can prove that the result
// is uniform.
__device__ __forceinline__ Ring open_ring(u32 log2) {
    u32 warp = uniform(threadIdx.x / WARP), rings_log2 = min(log2, WARPS_LOG2), first = warp & ((1u << rings_log2) - 1);
    u32 handoff = shared_address(&shared_memory().handoffs[first % (WARPS / 2)]);
    return {warp >> rings_log2, (u32)WARPS >> rings_log2, handoff, 1 + warp, 1 + (warp + (1u << rings_log2)) % WARPS};
}

__device__ __forceinline__ void receive_stream(const Ring& ring, u32 thread, Stream& stream) {
    wait_at(ring.own_barrier);
    stream.state = shared_u32(ring.handoff + 4 * thread);
    stream.at = shared_u32<TPDE_OFFSET_OF(StreamHandoff, at)>(ring.handoff);
    __syncwarp(); // all threads have read the handoff before this warp overwrites it
}

__device__ __forceinline__ void hand_over_stream(const Ring& ring, u32 thread, const Stream& stream) {
    set_shared_u32(ring.handoff + 4 * thread, stream.state);
    if (stream.worst >= SYMBOL_BAD) set_shared_u32(ring.handoff + TPDE_OFFSET_OF(StreamHandoff, bad), 1);
    if (thread == 0) set_shared_u32(ring.handoff + TPDE_OFFSET_OF(StreamHandoff, at), stream.at);
    arrive_for(ring.next_barrier);
}
