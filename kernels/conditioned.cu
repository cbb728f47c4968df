// Codec `conditioned` (spec/codecs.md section 4): a block decodes a chunk, applies it to its base lanes and checks it. Each warp takes
// segments of its own, or where segments are few turns at one.
#include "decoder.cuh"
#ifndef BLOCKS_SM
#define BLOCKS_SM 3
#endif

// Whether the chunk's lanes are floats without low bits.
__device__ __forceinline__ bool is_plain(const Shared& shared) { return shared.classes.by_threshold && shared.parts.low_bits == 0; }

// The part of a slot that a warp has for its changes.
template <int W> __device__ __forceinline__ List open_list(const Launch& launch) {
    u32 warp = threadIdx.x / WARP, capacity = launch.scratch_slot_bytes / (WARPS * (u32)sizeof(Change<W>));
    u64 slot = launch.scratch + TPDE_SCRATCH_HEAD(launch.scratch_slots) + (u64)shared_memory().slot * launch.scratch_slot_bytes;
    return {(u8*)(slot + (u64)warp * capacity * sizeof(Change<W>)), capacity, 0};
}

template <int W, int HOW> __device__ __noinline__ void decode(u32 store, List& list, Sums& sums) {
    u32 log2 = uniform(shared_memory().parts.segments_log2), rounds = log2 > WARPS_LOG2 ? 1u << (log2 - WARPS_LOG2) : 1;
    Ring ring = open_ring(log2);
    Sums own = {};
    List changes = list;
    u32 segment = uniform(threadIdx.x / WARP) & ((1u << log2) - 1);
    for (u32 round = 0; round < rounds; round++, segment += WARPS) decode_segment<W, HOW>(segment, ring, store, changes, own);
    if (HOW == TO_LIST) own.changed = threadIdx.x % WARP == 0 ? changes.count : 0;
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
            class_of<W>(activity_of(shared.chunk, shared.parts, at), base).x == shared.classes.none.x) {
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
    if (threadIdx.x < WARPS / 2) shared.turns[threadIdx.x].bad = 0;
    if (threadIdx.x % WARP == 0) open_tile(shared.tiles[threadIdx.x / WARP]);
    __syncthreads();
    Sums sums;
    if (W == 8 || !is_plain(shared)) decode<W, LOW_BITS>(store, list, sums);
    else if (store == STORE_ALL) decode<W, TO_TILE>(store, list, sums);
    else if (store == STORE_LIST) decode<W, TO_LIST>(store, list, sums);
    else decode<W, TO_OUTPUT>(store, list, sums);
    if (list.count > list.capacity) atomicExch(&shared.fits, 0);
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
    // Contexts before the first of a map share its first entry, and those past the last are not coded; lanes of 8 bytes have the
    // entries themselves.
    auto number_of = [&](u32 i) {
        u32 entry = W == 8 ? i % MAP : (u32)max((i32)(i % MAP) - parts.first_context, 0);
        return i / MAP < 1u << parts.activity_bits && entry < 64 ? map_entry(chunk, parts, i / MAP, entry, classes, errors) : 0;
    };
    u32 used = 0;
    // All entries are looked at, whether contexts have them or not.
    for (u32 i = thread; i < MAPS * 64; i += THREADS) {
        if (i / 64 < 1u << parts.activity_bits) used |= 1u << map_entry(chunk, parts, i / 64, i % 64, classes, errors);
    }
    atomicOr(&shared.used, used);
    __syncthreads();
    Lookup lookup = make_lookup<THREADS>(launch, tables, shared.used, 8 * W, parts.low_bits, shared_address(&shared + 1), (u32*)shared.tiles);
    for (u32 i = thread; i <= MAPS * MAP; i += THREADS) shared.maps[i] = class_entry(launch, tables, lookup, number_of(i));
    if (thread < WARP) errors |= find_streams(chunk, parts);
    __syncthreads();
    if (errors) atomicOr(&shared.totals.errors, errors);
    if (thread < WARP) {
        bool holes = false;
        for (u32 a = 0; a < MAPS; a++) {
            // Errors of entries are known by now.
            auto is_coded = [&](u32 entry) {
                u32 none = 0;
                return a < 1u << parts.activity_bits && map_entry(chunk, parts, a, entry, classes, none) != 0;
            };
            u32 low = __ballot_sync(ALL_LANES, is_coded(thread)), high = __ballot_sync(ALL_LANES, is_coded(32 + thread));
            u64 coded = low | (u64)high << 32;
            u32 count = bit_count(coded);
            holes |= (coded & (coded + 1)) != 0;
            // Contexts past the last of the dtype would shift out of 64 bits.
            u64 threshold = count ? (u64)min(parts.first_context + count, order.mask + 1) << order.shift : 0;
            if (thread == 0) parts.thresholds[a] = (u32)threshold;
        }
        if (thread == 0) {
            shared.classes = {parts.first_context, order, make_uint2(lookup.buckets, lookup.symbols), order.kind == CONTEXT_EXPONENT, holes};
        }
    }
    __syncthreads();
    return shared.totals.errors;
}

template <int W> __device__ __noinline__ u64 copy(bool stored) { return copy_chunk<W, THREADS>(shared_memory().chunk, stored); }

template <int W> __device__ __forceinline__ u32 run(const Launch& launch, u32 tables, u32 dtype) {
    Shared& shared = shared_memory();
    const Chunk& chunk = shared.chunk;
    u32 all = launch.mode == TPDE_MODE_OUT_OF_PLACE || chunk.base_lanes < chunk.lanes ? STORE_ALL : STORE_CHANGES;
    bool checked_first = launch.mode == TPDE_MODE_IN_PLACE;
    u32 store = launch.mode == TPDE_MODE_DRY ? STORE_NONE : all;
    if (chunk.num_deltas == 0) {
        if (threadIdx.x == 0) shared.totals = {};
        __syncthreads();
        u64 sum = copy<W>(!checked_first && store == STORE_ALL);
        add_to(shared.totals, sum, 0, 0, 0);
        __syncthreads();
        u32 errors = errors_of(shared.totals, chunk);
        if (checked_first && errors == 0 && store == STORE_ALL) copy<W>(true);
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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_SM) tpde_conditioned(const __grid_constant__ Launch launch) {
#ifdef TIMES
    u64 t0; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
#endif
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
#ifdef TIMES
    u64 t1; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t1));
    if (threadIdx.x == 0 && launch.mode == TPDE_MODE_DRY) { u64* t = (u64*)launch.scratch + 4 * blockIdx.x; t[0] = t0; t[1] = t1; t[2] = shared.chunk.number; t[3] = multiprocessor() | (u64)shared.parts.segments << 32; }
#endif
}
