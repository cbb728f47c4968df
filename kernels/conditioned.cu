// Codec `conditioned` (spec/codecs.md section 4): a block decodes a chunk, applies it to its base lanes and checks it. Each warp takes
// segments of its own, or where segments are few turns at one.
#include "decoder.cuh"

// Whether the chunk's lanes are floats without low bits.
__device__ __forceinline__ bool is_plain(const Shared& shared) { return shared.classes.by_threshold && shared.parts.low_bits == 0; }

template <int W, int HOW, int EXTRA> __device__ __noinline__ void decode(u32 store, Sums& sums) {
    u32 log2 = uniform(shared_memory().parts.segments_log2), rounds = log2 > WARPS_LOG2 ? 1u << (log2 - WARPS_LOG2) : 1;
    Ring ring = open_ring(log2);
    Sums own = {};
    u32 segment = uniform(threadIdx.x / WARP) & ((1u << log2) - 1);
    for (u32 round = 0; round < rounds; round++, segment += WARPS) decode_segment<W, HOW, EXTRA>(segment, ring, store, own);
    sums = own;
}

// All threads: the changes that are listed in the payload. They are for lanes that have none yet, so their base is still there.
template <int W> __device__ __noinline__ void except(u32 store, Sums& sums) {
    Shared& shared = shared_memory();
    typedef typename WideOf<W>::type T;
    u32 count = uniform(shared.parts.exceptions), before = (1u << threadIdx.x % WARP) - 1;
    for (u32 first = uniform(threadIdx.x / WARP) * WARP; first < count; first += THREADS) {
        u32 i = first + threadIdx.x % WARP, at = 0;
        bool valid = i < count;
        T target = 0;
        if (valid) {
            at = exception_position(shared.chunk, shared.parts, i);
            valid = at < shared.chunk.lanes && (i == 0 || at > exception_position(shared.chunk, shared.parts, i - 1));
            if (!valid) sums.errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
        }
        if (valid) {
            T delta = (T)unaligned<W>(shared.chunk.payload, shared.parts.deltas_at + W * i), base = load_lane<W>(shared.chunk, at);
            target = apply_delta<W>(base, delta, (T)shared.classes.order.magnitude);
            if (delta == 0) sums.errors |= error(TPDE_STATUS_PAYLOAD_DELTAS);
            if (shared.parts.low_bits != 0 && low_bits_of<W>(shared.chunk, shared.parts, at) != 0 &&
                class_of<W>(activity_of(shared.chunk, shared.parts, at), base).x == shared.classes.none.x) {
                sums.errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
            }
            sums.changed++;
            sums.target += lane_term<W>(at, base, target);
            if (store == STORE_ALL || store == STORE_CHANGES) store_lane<W>(shared.chunk, at, target);
        }
        list_changes<W>(shared, threadIdx.x % WARP, before, valid && store == STORE_LIST, at * W, target);
    }
}

template <int W, int EXTRA> __device__ __forceinline__ void decode_plain(u32 store, Sums& sums) {
    if (store == STORE_ALL) decode<W, TO_TILE, EXTRA>(store, sums);
    else if (store == STORE_LIST) decode<W, TO_LIST, EXTRA>(store, sums);
    else decode<W, TO_OUTPUT, EXTRA>(store, sums);
}

// One pass over the chunk. Returns its errors, the same in every thread.
template <int W> __device__ __forceinline__ u32 pass(u32 store) {
    Shared& shared = shared_memory();
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.totals = {};
        shared.listed = 0;
    }
    if (threadIdx.x < WARPS / 2) shared.turns[threadIdx.x].bad = 0;
    if (threadIdx.x % WARP == 0) open_tile(shared.tiles[threadIdx.x / WARP]);
    __syncthreads();
    Sums sums;
    if (W == 8 || !is_plain(shared)) decode<W, LOW_BITS, READS_EXTRA>(store, sums);
    else if (W == 2 && !shared.extra) decode_plain<W, W == 2 ? NO_EXTRA : READS_EXTRA>(store, sums); // few fine-tunes have lanes that need them
    else decode_plain<W, READS_EXTRA>(store, sums);
    // Exceptions are stored after everything else.
    __syncthreads();
    except<W>(store, sums);
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
        shared.used = shared.extra = 0;
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
    Lookup lookup = make_lookup<THREADS>(launch, tables, shared.used, 8 * W, parts.low_bits, shared_address(&shared + 1), (u32*)shared.tiles, shared.extra);
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
    bool lists = all == STORE_CHANGES && launch.scratch_slots != 0 && launch.mode != TPDE_MODE_OUT_OF_PLACE;
    if (lists && launch.mode == TPDE_MODE_COMMIT) {
        u32 room = ((const u32*)launch.scratch)[1 + place_of_block(launch)];
        if (room != 0) {
            if (threadIdx.x == 0) shared.list = list_in<W>(launch, room, chunk.num_deltas);
            __syncthreads();
            carry_out<W>();
            return 0;
        }
        lists = false;
    }
    u32 errors = open_payload<W>(launch, tables, dtype);
    if (errors) return errors;
    lists = lists && is_plain(shared) && open_list<W>(launch);
    // Each pass by itself: what `store` is must not depend on what threads have read.
    if (lists) {
        errors = pass<W>(STORE_LIST);
        close_list<W>(launch, errors);
        return errors;
    }
    if (checked_first) {
        errors = pass<W>(STORE_NONE);
        if (errors) return errors;
    }
    return pass<W>(store);
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
