// Several warps at one segment: each has every so many-th tile, and hands the stream to the next one (spec/codecs.md section 4.5).
#pragma once
#include "conditioned/changes.cuh"

struct Ring {
    u32 member, count;
    u32 turn;       // shared address
    u32 mine, next; // barriers
};

// That of a warp for `segments` segments, 2^log2. Without branches the compiler sees that it is the same in all threads.
__device__ __forceinline__ Ring open_ring(u32 log2) {
    u32 warp = uniform(threadIdx.x / WARP), few = min(log2, WARPS_LOG2), first = warp & ((1u << few) - 1);
    u32 turn = shared_address(&shared_memory().turns[first % (WARPS / 2)]);
    return {warp >> few, (u32)WARPS >> few, turn, 1 + warp, 1 + (warp + (1u << few)) % WARPS};
}

__device__ __forceinline__ void take_turn(const Ring& ring, u32 thread, Stream& stream) {
    wait_at(ring.mine);
    stream.state = shared_u32(ring.turn + 4 * thread);
    stream.at = shared_u32<TPDE_OFFSET_OF(Turn, at)>(ring.turn);
    __syncwarp(); // before this warp writes there
}

__device__ __forceinline__ void pass_turn(const Ring& ring, u32 thread, const Stream& stream) {
    set_shared_u32(ring.turn + 4 * thread, stream.state);
    if (stream.worst >= SYMBOL_BAD) set_shared_u32(ring.turn + TPDE_OFFSET_OF(Turn, bad), 1);
    if (thread == 0) set_shared_u32(ring.turn + TPDE_OFFSET_OF(Turn, at), stream.at);
    arrive_for(ring.next);
}
