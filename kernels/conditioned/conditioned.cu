// Codec `conditioned`: chunks of which all or some lanes have a base.
#define MAP 256 // contexts of lanes of up to 4 bytes
#include "conditioned/conditioned.cuh"
#include "conditioned/lists.cuh"

// Returns whether the lanes of the chunk are floats without low bits.
__device__ __forceinline__ bool is_plain(const Shared& shared) {
    return shared.classes.by_threshold && shared.parts.low_bits == 0;
}

// TO_TILE and KEEP_TILE are exactly the passes for which stores_tiles() is true.
template <int W, int EXTRA> __device__ __forceinline__ void decode_plain(u32 store) {
    if (FORMS_BASE || store == STORE_ALL) decode<W, TO_TILE, EXTRA>(store);
    else if (store == STORE_LIST) decode<W, TO_LIST, EXTRA>(store);
    else if (store == STORE_AND_KEEP) decode<W, KEEP_TILE, EXTRA>(store);
    else decode<W, TO_OUTPUT, EXTRA>(store);
}

template <int W> __device__ __forceinline__ u32 pass(u32 store) {
    return run_pass<W>(store, [](u32 store) {
        const Shared& shared = shared_memory();
        if (W == 8 || !is_plain(shared)) decode<W, SLOWLY, READS_EXTRA>(store);
        // Chunks without extra bits are common only for lanes of 2 bytes. Other widths have no specialised code, to keep
        // the kernel small.
        else if (W == 2 && !shared.extra) decode_plain<W, W == 2 ? NO_EXTRA : READS_EXTRA>(store);
        else decode_plain<W, READS_EXTRA>(store);
    });
}

struct WithBase {
    static constexpr bool WITH_BASE = true;

    template <int W> static __device__ __forceinline__ u32 run(const Launch& launch, u32 tables, u32 dtype) {
        Shared& shared = shared_memory();
        const Chunk& chunk = shared.chunk;
        if constexpr (FORMS_BASE) {
            if (chunk.num_deltas == 0) return copy_unchanged<W>(launch, STORE_ALL);
            u32 errors = open_payload<W>(launch, tables, dtype);
            return errors ? errors : pass<W>(STORE_ALL);
        }
        bool is_out_of_place = launch.mode == TPDE_MODE_OUT_OF_PLACE;
        bool is_list = uniform(chunk.base_lanes == chunk.lanes && has_short_list<W>(chunk)) != 0;
        u32 store_in_full = is_out_of_place || !is_list ? STORE_ALL : STORE_CHANGES;
        u32 store = launch.mode == TPDE_MODE_DRY ? STORE_NONE : store_in_full;
        if (chunk.num_deltas == 0) return copy_unchanged<W>(launch, store);
        bool kept = !is_out_of_place && launch.scratch_slots != 0;
        if (kept && launch.mode == TPDE_MODE_COMMIT) {
            u32 offset = uniform(((const u32*)launch.scratch)[1 + launch_index(launch)]);
            if (offset != 0) {
                if (is_list) {
                    if (threadIdx.x == 0) shared.list = list_in<W>(launch, offset, chunk.num_deltas);
                    __syncthreads();
                    carry_out<W>();
                } else {
                    store_copy<W>(launch, offset);
                }
                return 0;
            }
            kept = false;
        }
        u32 errors = open_payload<W>(launch, tables, dtype);
        if (errors) return errors;
        kept = kept && (is_list ? is_plain(shared) && open_list<W>(launch) : open_copy<W>(launch));
        kept = uniform(kept) != 0;
        // One call per way to store, instead of one call with a computed `store`. So `store` of the last call depends on
        // the mode and the record, but not on the payload.
        if (kept && is_list) {
            errors = pass<W>(STORE_LIST);
            close_slot<W>(launch, true, errors);
            return errors;
        }
        if (launch.mode == TPDE_MODE_IN_PLACE && !kept) {
            errors = pass<W>(STORE_NONE);
            if (errors) return errors;
        }
        // In place and kept, the chunk is stored before it is checked, and restored from the slot if a check fails.
        u32 kept_store = launch.mode == TPDE_MODE_DRY ? STORE_ALL : STORE_AND_KEEP;
        errors = pass<W>(kept ? kept_store : store);
        if (kept) close_slot<W>(launch, false, errors);
        return errors;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    TPDE_ENTRY(tpde_conditioned)(const __grid_constant__ Launch launch) {
    run_block<WithBase>(launch);
}
