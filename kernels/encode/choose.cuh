// Chooses activities and maps from the statistics of a chunk, as `choose` in `codec/conditioned/choose.rs` does: the same
// sums in integers, and the same order where costs are equal.
#pragma once
#include "encode/stats.cuh"

#define CLASSES TPDE_CLASS_COUNT_MAX
#define IN_ROWS 64 // all lanes are coded if this costs at most 1/IN_ROWS more
#define UNSEEN 3
#define WITHOUT_HOLES_FRACTION 100
#define WITHOUT_HOLES_BITS (8 * 12)
#define NEVER (1ull << 52)

// Groups of levels with a map of their own: all levels; the unchanged blocks and the others; each level.
#define GROUPS 7
#define OPTIONS 3 // options o has 1 << o maps
#define VARIANTS (GROUPS * 2)

__device__ __forceinline__ u32 first_group(u32 option) { return (1u << option) - 1; }
__device__ __forceinline__ u32 first_level(u32 group) { return group < 2 ? 0 : group == 2 ? 1 : group - 3; }
__device__ __forceinline__ u32 end_level(u32 group) {
    return group == 0 || group == 2 ? LEVELS : group == 1 ? 1 : group - 2;
}

// Cost of the lanes that share a context and a group of levels.
struct Fit {
    u64 uncoded, coded;
    u32 class_number; // the cheapest class; 0 if there are no lanes
    u32 reserved;

    __device__ __forceinline__ bool occurs() const { return class_number != 0 || coded != 0; }
    // Class and cost of an entry that precedes a coded entry.
    __device__ __forceinline__ u32 class_between(bool holes) const {
        return holes && uncoded <= coded ? 0 : class_number;
    }
    __device__ __forceinline__ u64 cost_between(bool holes) const {
        return holes && uncoded <= coded ? uncoded : coded;
    }
};

// Cost of all contexts from a given context on.
struct Tail {
    u64 cost, uncoded, all;
    u32 end; // end of the coded contexts; 0 if no context is coded
    u32 reserved;
};

// Scratch memory of a block, after the counts. Only entries of contexts that occur are set.
struct ChooseScratch {
    union {
        // By row and class - 1: cost of the counts. The last column is the number of extra bits.
        u64 costs[ROWS][16];
        Tail tails[VARIANTS][CONTEXTS]; // of all contexts from it on, once the fits are known
    };
    u32 values[ROWS], others[ROWS]; // number of counts, and of those of other tokens than 0
    Fit own[GROUPS][CONTEXTS];      // of a context
    Fit shared[GROUPS][CONTEXTS];   // of all contexts up to it
};
static_assert(sizeof(ChooseScratch) == TPDE_ENCODE_CHOOSE_SCRATCH, "TPDE_ENCODE_CHOOSE_SCRATCH");

struct Best {
    u64 cost;
    u32 first, option;
};

struct ChooseShared {
    StatsShared stats;
    u32 present[GROUPS][CONTEXTS / 32];
    u32 begin, end; // range of the contexts that occur
    u32 lowest[OPTIONS], last[OPTIONS], seen[OPTIONS];
    Best best[WARPS];
    Best chosen[2];
    u32 holes, bits;
};

// The fits of all groups and contexts.
struct Fits {
    const ChooseScratch& scratch;
    u32 begin, end; // other contexts do not occur

    __device__ __forceinline__ Fit own(u32 group, u32 context) const {
        return context >= begin && context < end ? scratch.own[group][context] : Fit{};
    }
    // Of all contexts up to this one.
    __device__ __forceinline__ Fit shared(u32 group, u32 context) const {
        return context >= begin ? scratch.shared[group][min(context, end - 1)] : Fit{};
    }
    __device__ __forceinline__ Tail tail(u32 group, bool holes, u32 context) const {
        return context < end ? scratch.tails[2 * group + holes][max(context, begin)] : Tail{};
    }
};

// All threads: the costs of each row of counts. Sets the counts to zero.
__device__ __forceinline__ void sum_rows(const EncodeTables& tables, const Stats& stats, u32* counts,
                                         ChooseScratch& scratch, const StatsShared& shared) {
    // A warp per row. Half of the warp takes every second token that occurs; 15 threads have a class each, the last counts.
    u32 thread = threadIdx.x % WARP, k = thread % 16, half = thread / 16;
    for (u32 i = threadIdx.x / WARP; i < shared.row_count; i += WARPS) {
        u32 row = shared.row_list[i], values = 0, others = 0;
        u64 sum = 0;
        for (u32 first = 0; first < stats.tokens; first += WARP) {
            u32 own = first + thread < stats.tokens ? counts[row * stats.tokens + first + thread] : 0;
            values += own;
            if (first + thread != 0) others += own;
            for (u32 rest = __ballot_sync(ALL_LANES, own != 0); rest;) {
                u32 low = __ffs((i32)rest) - 1;
                rest &= rest - 1;
                u32 high = rest ? __ffs((i32)rest) - 1 : low;
                u32 token = first + (half ? high : low), count = __shfl_sync(ALL_LANES, own, half ? high : low);
                if (half && !rest) count = 0;
                rest &= rest - 1;
                sum += (u64)count * (k < CLASSES ? tables.costs[token][k] : extra_bits(token));
            }
        }
        sum += __shfl_xor_sync(ALL_LANES, sum, 16);
        values = __reduce_add_sync(ALL_LANES, values), others = __reduce_add_sync(ALL_LANES, others);
        if (half == 0) scratch.costs[row][k] = sum;
        if (thread == 0) scratch.values[row] = values, scratch.others[row] = others;
        clear_row(stats, counts, row);
    }
    __syncthreads();
}

// A warp: the fits of a group.
__device__ __forceinline__ void fit_group(const EncodeChunk& chunk, const EncodeTables& tables, ChooseScratch& scratch,
                                          ChooseShared& shared, u32 group) {
    // Half of the warp has a context, the other half all contexts up to it. A thread per class; the last has other costs.
    u32 thread = threadIdx.x % WARP, k = thread % 16, half = thread / 16;
    u32 exception_cost = (u32)(8 * (4 + (1u << chunk.lane_log2)) * BIT);
    bool is_class = k < CLASSES && (chunk.low_bits != 0 || tables.entries[(k + 1) << 8] != 0);
    u32 zero_cost = k < CLASSES ? tables.costs[0][k] : 0;
    u32 lowest = CONTEXTS, last = 0, seen = 0;
    u64 class_cost = 0, other_cost = 0, uncoded = 0;
    Fit fit = {};
    for (u32 context = shared.begin; context < shared.end; context++) {
        if (!(shared.present[group][context / 32] >> context % 32 & 1)) {
            // The context adds nothing.
            if (half == 0) fit = {};
        } else {
            u32 lanes = 0, values = 0, others = 0;
            u64 cost = 0;
            for (u32 level = first_level(group); level < end_level(group); level++) {
                u32 row = level * CONTEXTS + context;
                lanes += shared.stats.lanes[row];
                if (!has_counts(shared.stats, row)) continue;
                values += scratch.values[row], others += scratch.others[row];
                cost += scratch.costs[row][k];
            }
            // The lanes that were counted without a value have value 0.
            u32 zeros = lanes > values ? lanes - values : 0;
            u64 rest = __shfl_sync(ALL_LANES, cost, CLASSES) * BIT, exceptions = 0;
            if (chunk.low_bits == 0) {
                rest += (u64)(values + zeros) * chunk.lane_cost;
                exceptions = (u64)others * exception_cost;
            }
            cost += (u64)zeros * zero_cost;
            if (half == 0) class_cost = other_cost = uncoded = 0;
            class_cost += cost, other_cost += rest, uncoded += exceptions;
            // The cheapest class; the first one if several are.
            u64 best = is_class && class_cost + other_cost < NEVER ? class_cost + other_cost : NEVER;
            best = best << 4 | k;
            for (u32 by = 8; by; by /= 2) {
                u64 other = __shfl_xor_sync(ALL_LANES, best, (i32)by);
                if (other < best) best = other;
            }
            fit.uncoded = chunk.low_bits == 0 ? uncoded : NEVER;
            fit.coded = best >> 4;
            fit.class_number = fit.coded < NEVER ? (u32)(best & 15) + 1 : 0;
            if (half == 0) {
                if (fit.coded < fit.uncoded) lowest = min(lowest, context), last = context;
                if (fit.occurs()) seen = context + 1;
            }
        }
        if (k == 0) (half == 0 ? scratch.own : scratch.shared)[group][context] = fit;
    }
    if (thread == 0) {
        u32 option = group == 0 ? 0 : group < 3 ? 1 : 2;
        atomicMin(&shared.lowest[option], lowest);
        atomicMax(&shared.last[option], last);
        atomicMax(&shared.seen[option], seen);
    }
}

// A thread per variant: the tails of a group. They overwrite the costs of the rows.
__device__ __forceinline__ void add_tails(ChooseScratch& scratch, const ChooseShared& shared, u32 group, bool holes) {
    Tail after = {};
    for (u32 context = shared.end; context-- > shared.begin;) {
        Fit own = scratch.own[group][context];
        u64 coded = own.cost_between(holes) + after.cost, uncoded = own.uncoded + after.uncoded;
        bool is_coded = coded < uncoded;
        after = {is_coded ? coded : uncoded, uncoded, own.coded + after.all, is_coded ? max(after.end, context + 1) : 0,
                 0};
        scratch.tails[2 * group + holes][context] = after;
    }
}

// All threads: the fits of all groups and contexts.
__device__ __forceinline__ Fits fit_contexts(const EncodeChunk& chunk, const EncodeTables& tables,
                                             ChooseScratch& scratch, ChooseShared& shared) {
    static_assert(THREADS == CONTEXTS && WARPS > GROUPS, "one thread per context, one warp per group");
    u32 warp = threadIdx.x / WARP, present[GROUPS] = {};
    for (u32 level = 0; level < LEVELS; level++) {
        u32 row = level * CONTEXTS + threadIdx.x;
        u32 mask = __ballot_sync(ALL_LANES, shared.stats.lanes[row] != 0 || has_counts(shared.stats, row));
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            if (level >= first_level(group) && level < end_level(group)) present[group] |= mask;
        }
    }
    if (threadIdx.x == 0) shared.begin = CONTEXTS, shared.end = 0;
    if (threadIdx.x < OPTIONS) {
        shared.lowest[threadIdx.x] = CONTEXTS;
        shared.last[threadIdx.x] = shared.seen[threadIdx.x] = 0;
    }
    __syncthreads();
    if (threadIdx.x % WARP == 0) {
        for (u32 group = 0; group < GROUPS; group++) shared.present[group][warp] = present[group];
        if (present[0]) {
            atomicMin(&shared.begin, warp * WARP + __ffs((i32)present[0]) - 1);
            atomicMax(&shared.end, warp * WARP + 32 - __clz((i32)present[0]));
        }
    }
    __syncthreads();
    if (warp < GROUPS) fit_group(chunk, tables, scratch, shared, warp);
    __syncthreads();
    if (warp < GROUPS && threadIdx.x % WARP < 2) add_tails(scratch, shared, warp, threadIdx.x % WARP);
    if (threadIdx.x < OPTIONS && shared.lowest[threadIdx.x] == CONTEXTS) shared.lowest[threadIdx.x] = 0;
    __syncthreads();
    return {scratch, shared.begin, shared.end};
}

// The entries of a map whose first context is `first`.
struct MapEnd {
    u64 cost;
    u32 end;
    bool in_rows;
};

__device__ __forceinline__ MapEnd map_end(const Fits& fits, u32 group, bool holes, u32 first, u32 last_end) {
    Fit fit = fits.shared(group, first);
    Tail tail = fits.tail(group, holes, first + 1);
    u64 coded = fit.cost_between(holes) + tail.cost, uncoded = fit.uncoded + tail.uncoded, all = fit.coded + tail.all;
    bool in_rows = coded < uncoded && all - coded <= coded / IN_ROWS && last_end <= first + MAP_ENTRIES;
    u32 end = in_rows ? last_end : coded < uncoded ? max(tail.end, first + 1) : 0;
    return {in_rows ? all : min(coded, uncoded), end, in_rows};
}

// End of maps that code all lanes.
__device__ __forceinline__ u32 last_end_of(u32 seen) { return min(CONTEXTS, seen == 0 ? 1 : seen + UNSEEN); }

// Cost of the maps of an option, if their first context is `first`; ~0 if they are too long. Sets the number of entries.
__device__ __forceinline__ u64 maps_cost(const Fits& fits, const ChooseShared& shared, u32 option, bool holes,
                                         u32 first, u32& count) {
    u64 cost = 0;
    u32 maps = 1u << option, last_end = last_end_of(shared.seen[option]);
    count = 1;
    for (u32 m = 0; m < maps; m++) {
        MapEnd map = map_end(fits, first_group(option) + m, holes, first, last_end);
        cost += map.cost;
        if (map.end > first) count = max(count, map.end - first);
    }
    cost += (u64)maps * ((count + 1) / 2 * 2) * 4 * BIT;
    return count <= MAP_ENTRIES ? cost : ~0ull;
}

__device__ __forceinline__ bool is_less(const Best& a, const Best& b) {
    return a.cost < b.cost || (a.cost == b.cost && a.first < b.first);
}

// All threads: finds the best first context of each option, with and without holes. Then chooses between the options.
__device__ __forceinline__ void choose_maps(const Stats& stats, const Fits& fits, ChooseShared& shared) {
    u32 options = stats.blocks >= 32 ? OPTIONS : 1;
    static_assert(THREADS == CONTEXTS, "one thread per first context");
    for (u32 option = 0; option < options; option++) {
        u32 maps = 1u << option, first = threadIdx.x, present = 0;
        for (u32 m = 0; m < maps; m++) present |= shared.present[first_group(option) + m][first / 32];
        u32 lowest = shared.lowest[option];
        bool candidate =
            first <= shared.last[option] && (first == lowest || (first > lowest && (present >> first % 32 & 1)));
        for (u32 holes = 0; holes < 2; holes++) {
            Best best = {~0ull, first, option};
            u32 count;
            if (candidate) best.cost = maps_cost(fits, shared, option, holes, first, count);
            for (u32 by = 16; by; by /= 2) {
                Best other = {__shfl_xor_sync(ALL_LANES, best.cost, (i32)by),
                              __shfl_xor_sync(ALL_LANES, best.first, (i32)by), option};
                if (is_less(other, best)) best = other;
            }
            if (threadIdx.x % WARP == 0) shared.best[threadIdx.x / WARP] = best;
            __syncthreads();
            if (threadIdx.x == 0) {
                for (u32 w = 1; w < WARPS; w++) {
                    if (is_less(shared.best[w], best)) best = shared.best[w];
                }
                best.cost += (u64)stats.blocks * option * BIT;
                if (option == 0 || best.cost < shared.chosen[holes].cost) shared.chosen[holes] = best;
            }
            __syncthreads();
        }
    }
    if (threadIdx.x == 0) {
        u64 whole = shared.chosen[0].cost, holed = shared.chosen[1].cost;
        shared.holes = whole <= holed + holed / WITHOUT_HOLES_FRACTION + WITHOUT_HOLES_BITS * BIT ? 0 : 1;
    }
    __syncthreads();
}

// One thread per map: writes the classes of its entries.
__device__ __forceinline__ void make_map(const Fits& fits, const ChooseShared& shared, const Best& chosen, u32 m,
                                         u8* classes) {
    u32 group = first_group(chosen.option) + m, first = chosen.first;
    bool holes = shared.holes;
    MapEnd map = map_end(fits, group, holes, first, last_end_of(shared.seen[chosen.option]));
    auto fit = [&](u32 context) { return context == first ? fits.shared(group, context) : fits.own(group, context); };
    auto class_of = [&](const Fit& fit) { return map.in_rows ? fit.class_number : fit.class_between(holes); };
    // A context that does not occur in the sample gets the class of the next higher context that does, or else of the
    // highest.
    u32 class_number = 0;
    for (u32 context = map.end; context-- > first;) {
        if (fit(context).occurs()) {
            class_number = class_of(fit(context));
            break;
        }
    }
    for (u32 context = map.end; context-- > first;) {
        if (fit(context).occurs()) class_number = class_of(fit(context));
        classes[context - first] = (u8)class_number;
    }
}

// All threads: chooses activities and maps for a chunk that changes.
template <int W>
__device__ __forceinline__ void choose(const EncodeChunk& chunk, EncodeState& state, const EncodeTables& tables,
                                       u32* counts, ChooseScratch& scratch, ChooseShared& shared) {
    Stats stats = gather_stats<W>(chunk, state, counts, shared.stats);
    sum_rows(tables, stats, counts, scratch, shared.stats);
    Fits fits = fit_contexts(chunk, tables, scratch, shared);
    choose_maps(stats, fits, shared);
    const Best& chosen = shared.chosen[shared.holes];
    for (u32 i = threadIdx.x; i < 4 * MAP_ENTRIES; i += THREADS) state.classes[i / MAP_ENTRIES][i % MAP_ENTRIES] = 0;
    __syncthreads();
    if (threadIdx.x < 1u << chosen.option) make_map(fits, shared, chosen, threadIdx.x, state.classes[threadIdx.x]);
    if (threadIdx.x == 0) {
        u32 count;
        maps_cost(fits, shared, chosen.option, shared.holes, chosen.first, count);
        state.cost = chosen.cost;
        state.center = stats.split.center;
        state.first_context = (u16)(stats.first + chosen.first);
        state.context_count = (u8)count;
        state.activity_bits = (u8)chosen.option;
    }
    __syncthreads();
}
