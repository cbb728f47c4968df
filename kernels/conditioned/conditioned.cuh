// Codec `conditioned` (spec/codecs.md section 4): code shared by the kernels for chunks with and without a base. A
// block decodes a chunk, applies it to its base lanes and checks it. Each warp decodes its own segments. If a chunk has
// fewer segments than the block has warps, several warps decode the tiles of one segment alternately.
#pragma once
#ifndef MAP
#error "define MAP, the number of contexts per map, before this header"
#endif
#include "conditioned/decoder.cuh"

// All threads: checks the list of exceptions. Applies it if the pass does not store whole tiles: such a pass stores nothing to
// the base, or stores after an earlier pass has checked the chunk.
template <int W> __device__ __noinline__ void except(u32 store) {
    typedef typename WideOf<W>::type T;
    Shared& shared = shared_memory();
    const Chunk& chunk = shared.chunk;
    const Parts& parts = shared.parts;
    u32 thread = threadIdx.x % WARP, before = (1u << thread) - 1, count = uniform(parts.exceptions);
    if (count == 0) return;
    Sums sums = {};
    for (u32 first = uniform(threadIdx.x / WARP) * WARP; first < count; first += THREADS) {
        u32 i = first + thread, at = 0;
        bool valid = i < count;
        T target = 0;
        if (valid) {
            at = exception_position(chunk, parts, i);
            valid = at < chunk.lanes && (i == 0 || at > exception_position(chunk, parts, i - 1));
            if (!valid) sums.errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
        }
        if (valid) {
            T delta = exception_delta<W>(chunk, parts, i);
            if (delta == 0) sums.errors |= error(TPDE_STATUS_PAYLOAD_DELTAS);
            valid = !stores_tiles(store);
            if (valid) {
                T base = load_lane<W>(chunk, at);
                target = apply_delta<W>(base, delta, (T)shared.classes.order.magnitude);
                sums.changed++;
                sums.target += lane_term<W>(at, base, target);
                if (store == STORE_CHANGES) store_lane<W>(chunk, at, target);
            }
        }
        list_changes<W>(shared, thread, before, valid && store == STORE_LIST, at * W, target);
    }
    add_to(shared.totals, sums.base, sums.target, sums.changed, sums.errors);
}

// Passes over the chunk once, and calls `decode` for its segments. Returns the same errors in every thread.
template <int W, typename Decode> __device__ __forceinline__ u32 run_pass(u32 store, Decode decode) {
    Shared& shared = shared_memory();
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.totals = {};
        shared.listed = 0;
    }
    if (threadIdx.x < WARPS / 2) shared.handoffs[threadIdx.x].bad = 0;
    if (threadIdx.x % WARP == 0) open_tile(shared.tiles[threadIdx.x / WARP]);
    __syncthreads();
    decode(store);
    // For STORE_CHANGES: all tiles have read their base lanes before exceptions are stored to them.
    __syncthreads();
    except<W>(store);
    __syncthreads();
    return errors_of(shared.totals, shared.chunk);
}

// Reads the header, the maps and the tables. Returns the same errors in every thread.
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
    // Contexts below `first_context` share entry 0. Contexts past the last entry are not coded. For lanes of 8 bytes the
    // map in shared memory has one element per entry instead of one per context.
    auto class_at = [&](u32 i) {
        u32 entry = W == 8 ? i % MAP : (u32)max((i32)(i % MAP) - parts.first_context, 0);
        return i / MAP < 1u << parts.activity_bits && entry < 64
                   ? map_entry(chunk, parts, i / MAP, entry, classes, errors)
                   : 0;
    };
    u32 used = 0;
    // All entries are checked, including those that no context uses.
    for (u32 i = thread; i < MAPS * 64; i += THREADS) {
        if (i / 64 < 1u << parts.activity_bits) used |= 1u << map_entry(chunk, parts, i / 64, i % 64, classes, errors);
    }
    atomicOr(&shared.used, used);
    __syncthreads();
    Lookup lookup = make_lookup<THREADS>(launch, tables, shared.used, 8 * W, parts.low_bits,
                                         shared_address(&shared + 1), (u32*)shared.tiles, shared.extra);
    for (u32 i = thread; i <= MAPS * MAP; i += THREADS)
        shared.maps[i] = class_entry(launch, tables, lookup, class_at(i));
    if (thread < WARP) errors |= find_streams(chunk, parts);
    __syncthreads();
    if (errors) atomicOr(&shared.totals.errors, errors);
    if (thread < WARP) {
        bool holes = false;
        for (u32 a = 0; a < MAPS; a++) {
            // Errors in entries have been recorded above.
            auto is_coded = [&](u32 entry) {
                u32 none = 0;
                return a < 1u << parts.activity_bits && map_entry(chunk, parts, a, entry, classes, none) != 0;
            };
            u32 low = __ballot_sync(ALL_LANES, is_coded(thread)),
                high = __ballot_sync(ALL_LANES, is_coded(32 + thread));
            u64 coded = low | (u64)high << 32;
            holes |= (coded & (coded + 1)) != 0;
            if (thread == 0) parts.thresholds[a] = threshold_of(coded, parts.first_context, order);
        }
        if (thread == 0) {
            shared.classes = {parts.first_context, order, make_uint2(lookup.buckets, lookup.symbols),
                              order.kind == CONTEXT_EXPONENT, holes};
        }
    }
    __syncthreads();
    return shared.totals.errors;
}

template <int W> __device__ __noinline__ u64 copy(bool stored) {
    return copy_chunk<W, THREADS>(shared_memory().chunk, stored);
}

// Checks the base sum of a chunk without changes, and copies the chunk if `store` is STORE_ALL. IN_PLACE copies only
// after the check.
template <int W> __device__ __forceinline__ u32 copy_unchanged(const Launch& launch, u32 store) {
    Shared& shared = shared_memory();
    bool checked_first = launch.mode == TPDE_MODE_IN_PLACE;
    if (threadIdx.x == 0) shared.totals = {};
    __syncthreads();
    u64 sum = copy<W>(!checked_first && store == STORE_ALL);
    add_to(shared.totals, sum, 0, 0, 0);
    __syncthreads();
    u32 errors = errors_of(shared.totals, shared.chunk);
    if (checked_first && errors == 0 && store == STORE_ALL) copy<W>(true);
    return errors;
}

// Decodes the chunk of this block, if it belongs to this kernel.
template <typename Kernel> __device__ __forceinline__ void run_block(const Launch& launch) {
    Shared& shared = shared_memory();
    Chunk chunk;
    DeviceTensor tensor;
    if (!chunk_of_block(launch, TPDE_CODEC_CONDITIONED, chunk, tensor) ||
        (chunk.base_lanes != 0) != Kernel::WITH_BASE || commit_is_off(launch))
        return;
    if (threadIdx.x == 0) shared.chunk = chunk;
    __syncthreads();
    u32 errors;
    if constexpr (FORMS_BASE) {
        errors = tensor.lane_log2 == 1 ? Kernel::template run<2>(launch, tensor.tables, tensor.dtype)
                                       : Kernel::template run<4>(launch, tensor.tables, tensor.dtype);
    } else {
        switch (tensor.lane_log2) {
        case 0: errors = Kernel::template run<1>(launch, tensor.tables, tensor.dtype); break;
        case 1: errors = Kernel::template run<2>(launch, tensor.tables, tensor.dtype); break;
        case 2: errors = Kernel::template run<4>(launch, tensor.tables, tensor.dtype); break;
        default: errors = Kernel::template run<8>(launch, tensor.tables, tensor.dtype); break;
        }
    }
    if (threadIdx.x == 0) report(launch, shared.chunk, errors);
}
