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

// Costs of the contexts of each group.
struct Fits {
    // Cost of a context, then of all contexts up to it: by class - 1; of extra bits and time; of exceptions.
    u64 sums[GROUPS][CONTEXTS][CLASSES + 2];
    Fit own[GROUPS][CONTEXTS];    // of a context
    Fit shared[GROUPS][CONTEXTS]; // of all contexts up to it
    Tail tails[VARIANTS][CONTEXTS + 1];
};

struct ChooseScratch {
    // By row and class - 1: cost of the counts. The last column is the number of extra bits.
    u64 costs[ROWS][16];
    u32 values[ROWS], others[ROWS]; // number of counts, and of those of other tokens than 0
    // Counts are not needed any more when fits are made.
    union {
        StatsScratch stats;
        Fits fits;
    };
};
static_assert(sizeof(ChooseScratch) <= TPDE_ENCODE_SCRATCH, "TPDE_ENCODE_SCRATCH");

struct Best {
    u64 cost;
    u32 first, option;
};

struct ChooseShared {
    StatsShared stats;
    u32 present[GROUPS][CONTEXTS / 32];
    u32 lowest[OPTIONS], last[OPTIONS], seen[OPTIONS];
    Best best[WARPS];
    Best chosen[2];
    u32 holes, bits;
};

// Returns the fit of lanes with these costs per class. `rest` is the cost of extra bits and time.
__device__ __forceinline__ Fit fit_of(const EncodeTables& tables, u32 low_bits, const u64* costs, u64 rest,
                                      u64 uncoded) {
    Fit fit = {uncoded, NEVER, 0, 0};
    for (u32 k = 0; k < CLASSES; k++) {
        if (costs[k] + rest < fit.coded && (low_bits != 0 || tables.entries[(k + 1) << 8] != 0)) {
            fit.coded = costs[k] + rest;
            fit.class_number = k + 1;
        }
    }
    return fit;
}

// All threads: the costs of each row of counts.
__device__ __forceinline__ void sum_rows(const EncodeTables& tables, const Stats& stats, ChooseScratch& scratch,
                                         const StatsShared& shared) {
    // 16 threads per row, one per class. The last one counts.
    u32 k = threadIdx.x % 16;
    for (u32 row = threadIdx.x / 16; row < ROWS; row += THREADS / 16) {
        if (!has_counts(shared, row)) continue;
        const u32* counts = &scratch.stats.counts[row * stats.tokens];
        u64 sum = 0;
        u32 values = 0;
        for (u32 token = 0; token < stats.tokens; token++) {
            u32 count = counts[token];
            sum += (u64)count * (k < CLASSES ? tables.costs[token][k] : extra_bits(token));
            values += count;
        }
        scratch.costs[row][k] = sum;
        if (k == CLASSES) scratch.values[row] = values, scratch.others[row] = values - counts[0];
    }
    __syncthreads();
}

// All threads: the fits of all groups and contexts.
__device__ __forceinline__ void fit_contexts(const EncodeChunk& chunk, const EncodeTables& tables,
                                             ChooseScratch& scratch, ChooseShared& shared) {
    u32 exception_cost = (u32)(8 * (4 + (1u << chunk.lane_log2)) * BIT);
    for (u32 i = threadIdx.x; i < GROUPS * CONTEXTS / 32; i += THREADS)
        shared.present[i / (CONTEXTS / 32)][i % (CONTEXTS / 32)] = 0;
    if (threadIdx.x < OPTIONS) {
        shared.lowest[threadIdx.x] = CONTEXTS;
        shared.last[threadIdx.x] = shared.seen[threadIdx.x] = 0;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < GROUPS * CONTEXTS; i += THREADS) {
        u32 group = i / CONTEXTS, context = i % CONTEXTS, lanes = 0, values = 0, others = 0;
        u64 costs[16] = {};
        for (u32 level = first_level(group); level < end_level(group); level++) {
            u32 row = level * CONTEXTS + context;
            lanes += shared.stats.lanes[row];
            if (!has_counts(shared.stats, row)) continue;
            values += scratch.values[row], others += scratch.others[row];
            for (u32 k = 0; k < 16; k++) costs[k] += scratch.costs[row][k];
        }
        bool present = lanes != 0 || values != 0;
        // The lanes that were counted without a value have value 0.
        u32 zeros = lanes > values ? lanes - values : 0;
        u64 rest = costs[CLASSES] * BIT, uncoded = 0;
        if (chunk.low_bits == 0) {
            rest += (u64)(values + zeros) * chunk.lane_cost;
            uncoded = (u64)others * exception_cost;
        }
        for (u32 k = 0; k < CLASSES; k++) {
            costs[k] += (u64)zeros * tables.costs[0][k];
            scratch.fits.sums[group][context][k] = costs[k];
        }
        scratch.fits.sums[group][context][CLASSES] = rest;
        scratch.fits.sums[group][context][CLASSES + 1] = uncoded;
        Fit fit = {};
        if (present) fit = fit_of(tables, chunk.low_bits, costs, rest, chunk.low_bits == 0 ? uncoded : NEVER);
        scratch.fits.own[group][context] = fit;
        u32 option = group == 0 ? 0 : group < 3 ? 1 : 2;
        if (present) atomicOr(&shared.present[group][context / 32], 1u << context % 32);
        if (fit.coded < fit.uncoded) {
            atomicMin(&shared.lowest[option], context);
            atomicMax(&shared.last[option], context);
        }
        if (fit.occurs()) atomicMax(&shared.seen[option], context + 1);
    }
    __syncthreads();
    if (threadIdx.x < OPTIONS && shared.lowest[threadIdx.x] == CONTEXTS) shared.lowest[threadIdx.x] = 0;
    // Sums up to each context.
    if (threadIdx.x < GROUPS * (CLASSES + 2)) {
        u32 group = threadIdx.x / (CLASSES + 2), k = threadIdx.x % (CLASSES + 2);
        u64 sum = 0;
        for (u32 context = 0; context < CONTEXTS; context++) {
            sum += scratch.fits.sums[group][context][k];
            scratch.fits.sums[group][context][k] = sum;
        }
    } else if (threadIdx.x >= THREADS - VARIANTS) {
        u32 variant = threadIdx.x - (THREADS - VARIANTS), group = variant / 2;
        bool holes = variant % 2;
        Tail* tails = scratch.fits.tails[variant];
        Tail after = {};
        tails[CONTEXTS] = after;
        for (u32 context = CONTEXTS; context-- > 0;) {
            Fit fit = scratch.fits.own[group][context];
            u64 coded = fit.cost_between(holes) + after.cost, uncoded = fit.uncoded + after.uncoded;
            bool is_coded = coded < uncoded;
            after = {is_coded ? coded : uncoded, uncoded, fit.coded + after.all,
                     is_coded ? max(after.end, context + 1) : 0, 0};
            tails[context] = after;
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < GROUPS * CONTEXTS; i += THREADS) {
        u32 group = i / CONTEXTS, context = i % CONTEXTS;
        u32 below = 0;
        for (u32 word = 0; word <= context / 32; word++) {
            u32 mask = word < context / 32 ? ~0u : ~0u >> (31 - context % 32);
            below |= shared.present[group][word] & mask;
        }
        const u64* sums = scratch.fits.sums[group][context];
        Fit fit = {};
        if (below)
            fit = fit_of(tables, chunk.low_bits, sums, sums[CLASSES], chunk.low_bits == 0 ? sums[CLASSES + 1] : NEVER);
        scratch.fits.shared[group][context] = fit;
    }
    __syncthreads();
}

// The entries of a map whose first context is `first`.
struct MapEnd {
    u64 cost;
    u32 end;
    bool in_rows;
};

__device__ __forceinline__ MapEnd map_end(const ChooseScratch& scratch, u32 group, bool holes, u32 first,
                                          u32 last_end) {
    Fit fit = scratch.fits.shared[group][first];
    Tail tail = scratch.fits.tails[2 * group + holes][first + 1];
    u64 coded = fit.cost_between(holes) + tail.cost, uncoded = fit.uncoded + tail.uncoded, all = fit.coded + tail.all;
    bool in_rows = coded < uncoded && all - coded <= coded / IN_ROWS && last_end <= first + MAP_ENTRIES;
    u32 end = in_rows ? last_end : coded < uncoded ? max(tail.end, first + 1) : 0;
    return {in_rows ? all : min(coded, uncoded), end, in_rows};
}

// End of maps that code all lanes.
__device__ __forceinline__ u32 last_end_of(u32 seen) { return min(CONTEXTS, seen == 0 ? 1 : seen + UNSEEN); }

// Cost of the maps of an option, if their first context is `first`; ~0 if they are too long. Sets the number of entries.
__device__ __forceinline__ u64 maps_cost(const ChooseScratch& scratch, const ChooseShared& shared, u32 option,
                                         bool holes, u32 first, u32& count) {
    u64 cost = 0;
    u32 maps = 1u << option, last_end = last_end_of(shared.seen[option]);
    count = 1;
    for (u32 m = 0; m < maps; m++) {
        MapEnd map = map_end(scratch, first_group(option) + m, holes, first, last_end);
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
__device__ __forceinline__ void choose_maps(const Stats& stats, const ChooseScratch& scratch, ChooseShared& shared) {
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
            if (candidate) best.cost = maps_cost(scratch, shared, option, holes, first, count);
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
__device__ __forceinline__ void make_map(const ChooseScratch& scratch, const ChooseShared& shared, const Best& chosen,
                                         u32 m, u8* classes) {
    u32 group = first_group(chosen.option) + m, first = chosen.first;
    bool holes = shared.holes;
    MapEnd map = map_end(scratch, group, holes, first, last_end_of(shared.seen[chosen.option]));
    auto fit = [&](u32 context) -> const Fit& {
        return context == first ? scratch.fits.shared[group][context] : scratch.fits.own[group][context];
    };
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
                                       ChooseScratch& scratch, ChooseShared& shared) {
    Stats stats = gather_stats<W>(chunk, state, scratch.stats, shared.stats);
    sum_rows(tables, stats, scratch, shared.stats);
    fit_contexts(chunk, tables, scratch, shared);
    choose_maps(stats, scratch, shared);
    const Best& chosen = shared.chosen[shared.holes];
    for (u32 i = threadIdx.x; i < 4 * MAP_ENTRIES; i += THREADS) state.classes[i / MAP_ENTRIES][i % MAP_ENTRIES] = 0;
    __syncthreads();
    if (threadIdx.x < 1u << chosen.option) make_map(scratch, shared, chosen, threadIdx.x, state.classes[threadIdx.x]);
    if (threadIdx.x == 0) {
        u32 count;
        maps_cost(scratch, shared, chosen.option, shared.holes, chosen.first, count);
        state.cost = chosen.cost;
        state.center = stats.split.center;
        state.first_context = (u16)(stats.first + chosen.first);
        state.context_count = (u8)count;
        state.activity_bits = (u8)chosen.option;
    }
    __syncthreads();
}
