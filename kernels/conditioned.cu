// Codec `conditioned` (spec/codecs.md section 4): a block decodes a chunk, applies it to its base lanes and checks it. Each warp takes
// segments of its own.
#include "crc.cuh"
#include "decoder.cuh"

#define THREADS TPDE_CONDITIONED_THREADS
#define WARPS (THREADS / WARP)

struct alignas(BUCKET_BYTES) Shared {
    Tile tiles[WARPS];
    u32 weights[TPDE_ROW_WORDS];
    Entry maps[5 * MAP];
    Chunk chunk;
    Parts parts;
    Classes classes;
    Totals totals;
    u32 slot, used, fits;
};

static_assert(CRC_SHARED <= sizeof(Tile) * WARPS, "the CRC works where the tiles will be");
static_assert(sizeof(Shared) <= TPDE_CONDITIONED_SHARED, "room in dynamic shared memory");

// All that the threads of a block know lies in shared memory: no thread has registers for it. The tables follow.
__device__ __forceinline__ Shared& shared_memory() {
    return *(Shared*)dynamic_shared_memory();
}

// Whether the chunk's lanes are floats without low bits.
__device__ __forceinline__ bool is_plain(const Shared& shared) { return shared.classes.by_threshold && shared.parts.low_bits == 0; }

// The part of a slot that a warp has for its changes; where segments are fewer than warps, the first warps have it all.
template <int W> __device__ __forceinline__ List open_list(const Launch& launch) {
    u32 warp = threadIdx.x / WARP, lists = min(shared_memory().parts.segments, WARPS);
    u32 capacity = warp < lists ? launch.scratch_slot_bytes / (lists * (u32)sizeof(Change<W>)) : 0;
    u64 slot = launch.scratch + TPDE_SCRATCH_HEAD(launch.scratch_slots) + (u64)shared_memory().slot * launch.scratch_slot_bytes;
    return {(u8*)(slot + (u64)warp * capacity * sizeof(Change<W>)), capacity, 0};
}

template <int W, int HOW> __device__ __noinline__ void decode(u32 store, List& list, Sums& sums) {
    Shared& shared = shared_memory();
    const Chunk chunk = shared.chunk;
    const Classes classes = shared.classes;
    u32 warp = uniform(threadIdx.x / WARP);
    Sums own = {};
    List changes = list;
    for (u32 segment = warp; segment < uniform(shared.parts.segments); segment += WARPS) {
        decode_segment<W, HOW>(chunk, shared.parts, classes, shared.weights, segment, store, shared.tiles[warp], changes, own);
    }
    if (HOW == TO_LIST && threadIdx.x % WARP == 0) own.changed = changes.count;
    list = changes;
    sums = own;
}

// All threads: the changes that are listed in the payload. They are for lanes that have none yet, so their base is still there.
template <int W> __device__ __noinline__ void except(bool store, Sums& sums) {
    Shared& shared = shared_memory();
    typedef typename WideOf<W>::type T;
    for (u32 i = threadIdx.x; i < shared.parts.exceptions; i += THREADS) {
        u32 at = exception_position(shared.chunk, shared.parts, i);
        if (at >= shared.chunk.lanes || (i > 0 && at <= exception_position(shared.chunk, shared.parts, i - 1))) {
            sums.errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
            continue;
        }
        T delta = (T)unaligned<W>(shared.chunk.payload, shared.parts.deltas_at + W * i), base = load_lane<W>(shared.chunk, at);
        T target = apply_delta<W>(base, delta, (typename WideOf<W>::type)shared.classes.order.magnitude);
        if (delta == 0) sums.errors |= error(TPDE_STATUS_PAYLOAD_DELTAS);
        if (shared.parts.low_bits != 0 && low_bits_of<W>(shared.chunk, shared.parts, at) != 0 &&
            class_of<W>(shared.classes, activity_of(shared.chunk, shared.parts, at), base).x == shared.classes.none) {
            sums.errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
        }
        sums.changed++;
        sums.target += lane_term<W>(at, base, target);
        if (store) store_lane<W>(shared.chunk, at, target);
    }
}

// One pass over the chunk. Returns its errors, the same in every thread.
template <int W> __device__ __forceinline__ u32 pass(u32 store, List& list) {
    Shared& shared = shared_memory();
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.totals = {};
        shared.fits = 1;
    }
    __syncthreads();
    Sums sums;
    if (!is_plain(shared)) decode<W, ANY_LANES>(store, list, sums);
    else if (store == STORE_ALL) decode<W, TO_TILE>(store, list, sums);
    else if (store == STORE_LIST) decode<W, TO_LIST>(store, list, sums);
    else decode<W, TO_OUTPUT>(store, list, sums);
    if (list.count > list.capacity) shared.fits = 0;
    // Exceptions are stored after everything else.
    __syncthreads();
    except<W>(store == STORE_ALL || store == STORE_CHANGES, sums);
    add_to(shared.totals, sums.base, sums.target, sums.changed, sums.errors);
    __syncthreads();
    return errors_of(shared.totals, shared.chunk);
}

// One thread: takes a slot of the scratch memory.
__device__ u32 take_slot(const Launch& launch) {
    u32 slot = multiprocessor() * 8 % launch.scratch_slots;
    while (atomicExch((u32*)launch.scratch + slot, 1) != 0) slot = slot + 1 == launch.scratch_slots ? 0 : slot + 1;
    __threadfence();
    return slot;
}

// In place with one reading of the base: changes are kept until the sums are right. False if they did not fit, and all is as it was.
template <int W> __device__ __forceinline__ bool pass_with_list(const Launch& launch, u32& errors) {
    Shared& shared = shared_memory();
    typedef typename LaneOf<W>::type Lane;
    if (threadIdx.x == 0) shared.slot = take_slot(launch);
    __syncthreads();
    List list = open_list<W>(launch);
    errors = pass<W>(STORE_LIST, list);
    bool carried = errors == 0 && shared.fits;
    if (carried) {
        // Few loads at a time would take as long as the decoding.
#pragma unroll 4
        for (u32 i = threadIdx.x % WARP; i < list.count; i += WARP) {
            Change<W> change = list.template at<W>(i);
            *(Lane*)(shared.chunk.output + change.position) = (Lane)change.lane;
        }
        Sums sums = {};
        __syncthreads();
        except<W>(true, sums);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicExch((u32*)launch.scratch + shared.slot, 0);
    }
    return carried || errors;
}

// Header, maps and tables: errors, the same in every thread.
template <int W> __device__ __forceinline__ u32 open_payload(const Launch& launch, u32 tables, u32 dtype) {
    Shared& shared = shared_memory();
    const Chunk& chunk = shared.chunk;
    Parts& parts = shared.parts;
    u32 thread = threadIdx.x;
    u32 errors = check_payload<THREADS>(launch, chunk, (u32*)shared.tiles);
    if (errors) return errors;
    Order order = order_of(dtype);
    if (thread == 0) {
        shared.totals.errors = parse_header<W>(chunk, parts);
        shared.used = 0;
    }
    for (u32 i = thread; i < TPDE_ROW_WORDS; i += THREADS) shared.weights[i] = WEIGHTS.q[i];
    __syncthreads();
    if (shared.totals.errors) return shared.totals.errors;
    u32 classes = class_count(launch, tables);
    auto number_of = [&](u32 i) { return i / MAP < 1u << parts.activity_bits ? map_entry(chunk, parts, i / MAP, i % MAP, classes, errors) : 0; };
    u32 used = 0;
    for (u32 i = thread; i < 4 * MAP; i += THREADS) used |= 1u << number_of(i);
    atomicOr(&shared.used, used);
    __syncthreads();
    Lookup lookup = make_lookup<THREADS>(launch, tables, shared.used, 8 * W - parts.low_bits, shared_address(&shared + 1));
    u32 none = lookup.buckets;
    for (u32 i = thread; i < 5 * MAP; i += THREADS) shared.maps[i] = class_entry(launch, tables, lookup, number_of(i));
    if (thread < WARP) errors |= find_streams(chunk, parts);
    __syncthreads();
    if (errors) atomicOr(&shared.totals.errors, errors);
    if (thread < WARP) {
        bool holes = false;
        for (u32 a = 0; a < 4; a++) {
            u32 low = __ballot_sync(ALL_LANES, shared.maps[a * MAP + thread].x != none);
            u32 high = __ballot_sync(ALL_LANES, shared.maps[a * MAP + 32 + thread].x != none);
            u64 coded = low | (u64)high << 32;
            u32 count = bit_count(coded);
            holes |= (coded & (coded + 1)) != 0;
            // Contexts past the last of the dtype would shift out of 64 bits.
            u64 threshold = count ? (u64)min(parts.first_context + count, order.mask + 1) << order.shift : 0;
            if (thread == 0) parts.thresholds[a] = (u32)(W == 8 ? threshold >> 32 : threshold);
        }
        if (thread == 0) {
            shared.classes = {parts.first_context, order, shared_address(shared.maps), none, order.kind == CONTEXT_EXPONENT, holes};
        }
    }
    __syncthreads();
    return shared.totals.errors;
}

template <int W> __device__ __forceinline__ u32 run(const Launch& launch, u32 tables, u32 dtype) {
    Shared& shared = shared_memory();
    const Chunk& chunk = shared.chunk;
    u32 all = launch.mode == TPDE_MODE_OUT_OF_PLACE || chunk.base_lanes < chunk.lanes ? STORE_ALL : STORE_CHANGES;
    bool checked_first = launch.mode == TPDE_MODE_IN_PLACE;
    u32 store = launch.mode == TPDE_MODE_DRY ? STORE_NONE : all;
    if (chunk.num_deltas == 0) {
        if (threadIdx.x == 0) shared.totals = {};
        __syncthreads();
        u64 sum = copy_chunk<W, THREADS>(chunk, !checked_first && store == STORE_ALL);
        add_to(shared.totals, sum, 0, 0, 0);
        __syncthreads();
        u32 errors = errors_of(shared.totals, chunk);
        if (checked_first && errors == 0 && store == STORE_ALL) copy_chunk<W, THREADS>(chunk, true);
        return errors;
    }
    u32 errors = open_payload<W>(launch, tables, dtype);
    if (errors) return errors;
    List none = {};
    if (!checked_first) return pass<W>(store, none);
    if (store == STORE_CHANGES && launch.scratch_slots != 0 && is_plain(shared)) {
        if (pass_with_list<W>(launch, errors)) return errors;
    } else {
        errors = pass<W>(STORE_NONE, none);
        if (errors) return errors;
    }
    return pass<W>(store, none);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) tpde_conditioned(const __grid_constant__ Launch launch) {
    Shared& shared = shared_memory();
    Chunk chunk;
    DeviceTensor tensor;
    if (!chunk_of_block(launch, TPDE_CODEC_CONDITIONED, chunk, tensor) || commit_is_off(launch)) return;
    if (threadIdx.x == 0) shared.chunk = chunk;
    __syncthreads();
    u32 errors;
    switch (tensor.lane_log2) {
    case 0: errors = run<1>(launch, tensor.tables, tensor.dtype); break;
    case 1: errors = run<2>(launch, tensor.tables, tensor.dtype); break;
    case 2: errors = run<4>(launch, tensor.tables, tensor.dtype); break;
    default: errors = run<8>(launch, tensor.tables, tensor.dtype); break;
    }
    if (threadIdx.x == 0) report(launch, shared.chunk, errors);
}
