// Codec `conditioned` (spec/codecs.md section 4): a block decodes a chunk, applies it to its base lanes and checks it.
//
// Few segments: some warps of the block decode, one a segment, and the others look for coded lanes in the base and hand them over
// tile by tile. Many segments, or low bits: each warp takes segments of its own, and does both.
#include "crc.cuh"
#include "decoder.cuh"

#define THREADS TPDE_CONDITIONED_THREADS
#define WARPS (THREADS / WARP)

struct alignas(16) Shared {
    Tile tiles[WARPS];
    Symbol symbols[SYMBOLS_SHARED];
    u8 buckets[BUCKETS];
    u32 maps[4 * MAP];
    Chunk chunk;
    Parts parts;
    Lookup lookup;
    Classes classes;
    List list;
    Totals totals;
    u32 listed, slot;
};

static_assert(CRC_SHARED <= sizeof(Tile) * WARPS, "the CRC works where the tiles will be");
static_assert(sizeof(Shared) <= TPDE_CONDITIONED_SHARED, "room in dynamic shared memory");

// ---- Barriers between a warp that looks for coded lanes and the one that decodes them ----

__device__ __forceinline__ void barrier_wait(u32 id) { barrier_sync(id, 2 * WARP); }
__device__ __forceinline__ void barrier_arrive(u32 id) { barrier_arrive(id, 2 * WARP); }
#define BARRIER_FULL(warp) (1 + (warp))
#define BARRIER_EMPTY(warp) (8 + (warp))

// What a thread adds to the sums of the chunk.
struct Sums {
    u64 base, target;
    u32 changed, errors;
};

// All that the threads of a block know lies in shared memory: no thread has registers for it.
__device__ __forceinline__ Shared& shared_memory() {
    return *(Shared*)dynamic_shared_memory();
}

// Whether some warps search for others.
__device__ __forceinline__ bool is_searched(const Parts& parts) { return parts.segments <= WARPS / 2 && parts.low_bits == 0; }

template <int W> __device__ __forceinline__ Decoding<W> decoding(const Shared& shared, const Tile& marks, u32 store) {
    const Lookup& lookup = shared.lookup;
    Decoding<W> with;
    with.lookup = {shared_address(shared.buckets), shared_address(shared.symbols), lookup.shift, lookup.tokens,
        lookup.shared ? nullptr : lookup.set + lookup.classes + 2};
    with.maps = shared_address(shared.maps);
    with.marks = shared_address(marks.excepted);
    with.classes = shared.classes;
    with.states = shared.parts.states;
    with.activity_bits = shared.parts.activity_bits;
    with.store = store;
    return with;
}

// Looks for the coded lanes of every `share`-th tile of a segment.
template <int W> __device__ __noinline__ u64 search(u32 store, u32 segment, u32 place, u32 share, u32 barrier) {
    u64 base_sum = 0;
    typedef TileShape<W> Shape;
    Shared& shared = shared_memory();
    Range range = segment_range(shared.chunk, shared.parts.segments, segment);
    u32 first = range.first / Shape::LANES, end = (range.end + Shape::LANES - 1) / Shape::LANES;
    Tile& tile = shared.tiles[barrier];
    const Classes& classes = shared.classes;
    u32 maps = shared_address(shared.maps);
    const u8* activities_at = shared.chunk.payload + shared.parts.activities_at;
    u32 turns = 0;
    for (u32 number = first + place; number < end; number += share, turns++) {
        u32 activities = activities_of_tile(activities_at, shared.parts.activity_bits, number, Shape::BLOCKS);
        if (classes.by_threshold && is_whole<W>(shared.chunk, range, number)) {
            uint4 pieces[Shape::PIECES];
            load_tile<W>(shared.chunk, number, pieces);
            if (store == STORE_ALL) store_tile<W>(shared.chunk, number, pieces);
            base_sum += tile_sum<W>(number, pieces);
            if (turns) barrier_wait(BARRIER_EMPTY(barrier));
            write_tile<W>(tile, pieces);
            mark_tile<W>(shared.parts, classes, maps, activities, pieces, tile);
        } else {
            if (turns) barrier_wait(BARRIER_EMPTY(barrier));
            base_sum += gather_tile<W>(shared.chunk, shared.parts, classes, maps, range, number, activities, store == STORE_ALL, tile);
        }
        queue_tile<W>(tile, activities);
        barrier_arrive(BARRIER_FULL(barrier));
    }
    return base_sum;
}

// Decodes a segment whose tiles `share` other warps prepare.
template <int W> __device__ __noinline__ void decode(u32 store, u32 segment, u32 share, u32 barriers, Sums& sums) {
    typedef TileShape<W> Shape;
    Shared& shared = shared_memory();
    Range range = segment_range(shared.chunk, shared.parts.segments, segment);
    u32 first = range.first / Shape::LANES, end = (range.end + Shape::LANES - 1) / Shape::LANES;
    Decoder<W> decoder = {};
    open_segment<W>(decoder, shared.chunk, shared.parts, segment, range.first);
    Decoding<W> with = decoding<W>(shared, shared.tiles[WARPS - 1 - segment], store);
    for (u32 number = first, turn = 0; number < end; number++) {
        u32 barrier = barriers + turn;
        turn = turn + 1 == share ? 0 : turn + 1;
        barrier_wait(BARRIER_FULL(barrier));
        decode_tile<W, false, false>(decoder, with, shared.chunk, shared.parts, number, number + 1 == end, shared.tiles[barrier],
            shared.list, &shared.listed);
        if (number + share < end) barrier_arrive(BARRIER_EMPTY(barrier));
    }
    sums.target += decoder.target_sum;
    sums.changed += decoder.changed;
    sums.errors |= decoder.errors | finish_stream(decoder.stream);
}

// Lanes that are not coded have their low bits alone.
template <int W> __device__ __forceinline__ u32 apply_low_bits(Range range, u32 number, Tile& tile) {
    Shared& shared = shared_memory();
    typedef TileShape<W> Shape;
    typedef typename LaneOf<W>::type Lane;
    u32 changed = 0;
    for (u32 place = threadIdx.x % WARP; place < Shape::LANES; place += WARP) {
        u32 at = number * Shape::LANES + place;
        if (at < range.first || at >= range.end || tile.masks[place / 32] >> place % 32 & 1) continue;
        typename WideOf<W>::type delta = low_bits_of<W>(shared.chunk, shared.parts, at), base = ((Lane*)tile.lanes)[place];
        changed += delta != 0;
        ((Lane*)tile.lanes)[place] = (Lane)apply_delta<W>(base, delta, (typename WideOf<W>::type)shared.classes.order.ordered);
    }
    __syncwarp();
    return changed;
}

// Whether a warp that works alone may take a tile by pieces.
template <int W> __device__ __forceinline__ bool is_fast(const Shared& shared, Range range, u32 number) {
    return shared.parts.low_bits == 0 && shared.classes.by_threshold && is_whole<W>(shared.chunk, range, number);
}

// The two ends of a tile of a warp that works alone. Calls, so that the decoding between them has the registers to itself.
template <int W> __device__ __noinline__ u64 begin_tile(Range range, u32 number) {
    typedef TileShape<W> Shape;
    Shared& shared = shared_memory();
    Tile& tile = shared.tiles[threadIdx.x / WARP];
    const Parts& parts = shared.parts;
    u32 maps = shared_address(shared.maps);
    u32 activities = activities_of_tile(shared.chunk.payload + parts.activities_at, parts.activity_bits, number, Shape::BLOCKS);
    u64 sum;
    if (is_fast<W>(shared, range, number)) {
        uint4 pieces[Shape::PIECES];
        load_tile<W>(shared.chunk, number, pieces);
        write_tile<W>(tile, pieces);
        sum = tile_sum<W>(number, pieces);
        mark_tile<W>(parts, shared.classes, maps, activities, pieces, tile);
    } else {
        sum = gather_tile<W>(shared.chunk, parts, shared.classes, maps, range, number, activities, false, tile);
    }
    queue_tile<W>(tile, activities);
    return sum;
}

// What the target's sum has more than the base's, which was `of_base`.
template <int W> __device__ __noinline__ u64 end_tile(Range range, u32 number, u32 store, u64 of_base) {
    typedef TileShape<W> Shape;
    Shared& shared = shared_memory();
    Tile& tile = shared.tiles[threadIdx.x / WARP];
    __syncwarp();
    if (store == STORE_CHANGES || !is_fast<W>(shared, range, number)) {
        return scatter_tile<W>(shared.chunk, range, number, store != STORE_NONE, store == STORE_ALL, tile);
    }
    uint4 pieces[Shape::PIECES];
    read_tile<W>(tile, pieces);
    u64 sum = tile_sum<W>(number, pieces) - of_base;
    if (store == STORE_ALL) store_tile<W>(shared.chunk, number, pieces);
    __syncwarp();
    return sum;
}

// Works on a segment alone.
template <int W, bool LOW_BITS> __device__ __noinline__ void decode_alone(u32 store, u32 segment, Sums& sums) {
    typedef TileShape<W> Shape;
    Shared& shared = shared_memory();
    Range range = segment_range(shared.chunk, shared.parts.segments, segment);
    u32 end = (range.end + Shape::LANES - 1) / Shape::LANES, changed = 0;
    Tile& tile = shared.tiles[threadIdx.x / WARP];
    Decoder<W> decoder = {};
    open_segment<W>(decoder, shared.chunk, shared.parts, segment, range.first);
    Decoding<W> with = decoding<W>(shared, tile, store);
    u64 base_sum = 0, target_sum = 0;
    for (u32 number = range.first / Shape::LANES; number < end; number++) {
        u64 of_base = begin_tile<W>(range, number);
        base_sum += of_base;
        if (LOW_BITS) changed += apply_low_bits<W>(range, number, tile);
        decode_tile<W, true, LOW_BITS>(decoder, with, shared.chunk, shared.parts, number, number + 1 == end, tile, shared.list, &shared.listed);
        target_sum += end_tile<W>(range, number, store, of_base);
    }
    sums.base += base_sum;
    sums.target += target_sum + decoder.target_sum;
    sums.changed += changed + decoder.changed;
    sums.errors |= decoder.errors | finish_stream(decoder.stream);
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
        T target = apply_delta<W>(base, delta, (typename WideOf<W>::type)shared.classes.order.ordered);
        if (delta == 0) sums.errors |= error(TPDE_STATUS_PAYLOAD_DELTAS);
        if (shared.parts.low_bits != 0 && low_bits_of<W>(shared.chunk, shared.parts, at) != 0 &&
            class_of<W>(shared_address(shared.maps), shared.classes, activity_of(shared.chunk, shared.parts, at), base) == CLASS_NONE) {
            sums.errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
        }
        sums.changed++;
        sums.target += lane_term<W>(at, base, target);
        if (store) store_lane<W>(shared.chunk, at, target);
    }
}

// One pass over the chunk. Returns its errors, the same in every thread.
template <int W> __device__ __forceinline__ u32 pass(u32 store) {
    Shared& shared = shared_memory();
    u32 warp = threadIdx.x / WARP, segments = shared.parts.segments;
    Totals& totals = shared.totals;
    __syncthreads();
    if (threadIdx.x == 0) {
        totals = {};
        shared.listed = 0;
    }
    __syncthreads();
    Sums sums = {};
    if (is_searched(shared.parts)) {
        // The decoding warps of the blocks of a multiprocessor should not all be in the same quarter of it.
        u32 role = (warp - shared.chunk.number) % WARPS, share = WARPS / segments - 1;
        if (role < segments) {
            decode<W>(store, role, share, role * share, sums);
        } else {
            u32 searcher = role - segments;
            sums.base += search<W>(store, searcher / share, searcher % share, share, searcher);
        }
    } else {
        for (u32 segment = warp; segment < segments; segment += WARPS) {
            if (shared.parts.low_bits == 0) decode_alone<W, false>(store, segment, sums);
            else decode_alone<W, true>(store, segment, sums);
        }
    }
    // Exceptions are stored after everything else.
    __syncthreads();
    except<W>(store == STORE_ALL || store == STORE_CHANGES, sums);
    add_to(totals, sums.base, sums.target, sums.changed, sums.errors);
    __syncthreads();
    return errors_of(totals, shared.chunk);
}

// One thread: takes a slot of the scratch memory.
__device__ u32 take_slot(const Launch& launch) {
    u32 slot = multiprocessor() * 8 % launch.scratch_slots;
    while (atomicExch((u32*)launch.scratch + slot, 1) != 0) slot = slot + 1 == launch.scratch_slots ? 0 : slot + 1;
    __threadfence();
    return slot;
}

// In place with one reading of the base, changes are kept until the sums are right.
template <int W> __device__ __forceinline__ void open_list(const Launch& launch) {
    Shared& shared = shared_memory();
    shared.slot = take_slot(launch);
    u8* slot = (u8*)launch.scratch + TPDE_SCRATCH_HEAD(launch.scratch_slots) + (u64)shared.slot * launch.scratch_slot_bytes;
    u32 count = shared.chunk.num_deltas;
    shared.list = {slot, slot + (4 * (u64)count + 7) / 8 * 8, count};
}

template <int W> __device__ __noinline__ void carry_out_list(const Launch& launch, bool right) {
    typedef typename LaneOf<W>::type Lane;
    Shared& shared = shared_memory();
    if (right) {
        // All changes are accounted for, so the list has those that are not exceptions.
        u32 count = shared.chunk.num_deltas - shared.parts.exceptions;
        const u32* positions = (const u32*)shared.list.positions;
        const Lane* lanes = (const Lane*)shared.list.lanes;
        for (u32 i = threadIdx.x; i < count; i += THREADS) store_lane<W>(shared.chunk, positions[i], lanes[i]);
        Sums sums = {};
        except<W>(true, sums);
    }
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
    if (thread == 0) shared.totals.errors = parse_header<W>(chunk, parts);
    __syncthreads();
    if (shared.totals.errors) return shared.totals.errors;
    Lookup lookup = make_lookup<THREADS>(launch, tables, 8 * W - parts.low_bits, shared.buckets, shared.symbols);
    for (u32 i = thread; i < 4 * MAP; i += THREADS) {
        u32 number = i / MAP < 1u << parts.activity_bits ? map_entry(chunk, parts, i / MAP, i % MAP, lookup.classes, errors) : 0;
        shared.maps[i] = class_entry(lookup, number);
    }
    if (thread < WARP) errors |= find_streams(chunk, parts);
    __syncthreads();
    if (errors) atomicOr(&shared.totals.errors, errors);
    if (thread < WARP) {
        bool holes = false;
        for (u32 a = 0; a < 4; a++) {
            u32 low = __ballot_sync(ALL_LANES, shared.maps[a * MAP + thread] != CLASS_NONE);
            u32 high = __ballot_sync(ALL_LANES, shared.maps[a * MAP + 32 + thread] != CLASS_NONE);
            u64 coded = low | (u64)high << 32;
            u32 count = bit_count(coded);
            holes |= (coded & (coded + 1)) != 0;
            // Contexts past the last of the dtype would shift out of 64 bits.
            u64 threshold = count ? (u64)min(parts.first_context + count, order.mask + 1) << order.shift : 0;
            if (thread == 0) parts.thresholds[a] = (u32)(W == 8 ? threshold >> 32 : threshold);
        }
        if (thread == 0) {
            shared.lookup = lookup;
            shared.classes = {parts.first_context, order, order.kind == CONTEXT_EXPONENT, holes};
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
    u64 bytes = (4 * (u64)chunk.num_deltas + 7) / 8 * 8 + (u64)W * chunk.num_deltas;
    bool fits = launch.scratch_slots != 0 && bytes <= launch.scratch_slot_bytes && is_searched(shared.parts);
    bool listed = checked_first && store == STORE_CHANGES && fits;
    if (listed && threadIdx.x == 0) open_list<W>(launch);
    u32 now = listed ? STORE_LIST : checked_first ? STORE_NONE : store;
    for (;;) {
        errors = pass<W>(now);
        if (now == STORE_LIST) carry_out_list<W>(launch, errors == 0);
        if (!checked_first || errors || now == STORE_LIST || now == store) return errors;
        now = store;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) tpde_conditioned(const __grid_constant__ Launch launch) {
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
