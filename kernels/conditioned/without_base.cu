// Codec `conditioned`: chunks without a base. They have their own kernel, because it needs fewer registers and less
// shared memory. So more blocks fit on a multiprocessor.
#define MAP 1 // base lanes are 0, which has context 0 for every dtype
#include "conditioned/conditioned.cuh"

template <int W> __device__ __forceinline__ u32 pass(u32 store) {
    return run_pass<W>(store, [](u32 store) { decode<W, LOW_BITS, READS_EXTRA>(store); });
}

struct WithoutBase {
    static constexpr bool WITH_BASE = false;

    template <int W> static __device__ __forceinline__ u32 run(const Launch& launch, u32 tables, u32 dtype) {
        u32 store = launch.mode == TPDE_MODE_DRY ? STORE_NONE : STORE_ALL;
        if (shared_memory().chunk.num_deltas == 0) return copy_unchanged<W>(launch, store);
        u32 errors = open_payload<W>(launch, tables, dtype);
        if (errors) return errors;
        if (launch.mode == TPDE_MODE_IN_PLACE) {
            errors = pass<W>(STORE_NONE);
            if (errors) return errors;
        }
        return pass<W>(store);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    TPDE_ENTRY(tpde_without_base)(const __grid_constant__ Launch launch) {
    run_block<WithoutBase>(launch);
}
