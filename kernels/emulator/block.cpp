#include "block.h"
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>
#ifndef __x86_64__
#include <ucontext.h>
#endif
// Start and end of the section with the `__shared__` variables. Null if no kernel has such variables.
extern "C" {
extern unsigned char __start_shared_memory[] __attribute__((weak));
extern unsigned char __stop_shared_memory[] __attribute__((weak));

// Functions of the sanitizers. The functions of a sanitizer are present if the kernels were compiled with it. This file
// is not instrumented.
void __asan_poison_memory_region(const volatile void*, size_t) __attribute__((weak));
void __asan_unpoison_memory_region(const volatile void*, size_t) __attribute__((weak));
void* __tsan_get_current_fiber() __attribute__((weak));
void* __tsan_create_fiber(unsigned) __attribute__((weak));
void __tsan_switch_to_fiber(void*, unsigned) __attribute__((weak));
void __tsan_acquire(void*) __attribute__((weak));
void __tsan_release(void*) __attribute__((weak));
void __sanitizer_print_stack_trace() __attribute__((weak));
}

namespace emulator {

constexpr unsigned THREADS = 1024, WARP = 32, WARPS = THREADS / WARP, BARRIERS = 16;
constexpr size_t STACK = 256 << 10, PAGE = 4096, LINE = 64, DYNAMIC = 228 << 10;

Index thread_index, block_index, block_size, grid_size;
alignas(1024) unsigned char dynamic_memory[DYNAMIC];

namespace {

// ---- Fibers ----

#ifdef __x86_64__
typedef void* Context;
// Pushes the callee-saved registers, saves the stack pointer in *from, and resumes `to`.
extern "C" void emulator_switch(Context* from, Context to);
// `run_next` has the only call for threads, so the processor predicts the `ret`.
asm(R"(
.text
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");
void make_context(Context& context, unsigned char* stack, void (*entry)()) {
    void** top = (void**)(stack + STACK);
    *--top = nullptr; // return address of the entry, which never returns
    *--top = (void*)entry;
    top -= 6;
    memset(top, 0, 6 * sizeof *top);
    context = top;
}
void switch_context(Context& from, Context& to) { emulator_switch(&from, to); }
#else
typedef ucontext_t Context;
void make_context(Context& context, unsigned char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
#endif

// Operation that a thread waits for.
struct Wait {
    SourceLocation location;
    uint32_t mask;
    uint32_t count; // number of threads of a barrier
    uint64_t argument;
    WarpOperation operation;
};

// What the lanes of a warp wait for. Lanes that wait at the same operation have equal keys.
struct Waits {
    uint64_t places[WARP], barriers[WARP]; // keys
    uint64_t values[WARP], results[WARP];
    Wait waits[WARP];
};

struct Thread {
    Context context;
    Index index;
    unsigned number;
    void* fiber; // handle of this fiber in the thread sanitizer
};

// Pending copies of a thread, and the number of copies in each committed group.
struct Copies {
    std::deque<Copy> copies;
    std::deque<size_t> groups;
    size_t uncommitted;
};

// Masks of lanes by state.
struct Warp {
    uint32_t ready, waiting, ended;
};

struct Barrier {
    uint32_t arrived, expected, sum, result;
    uint32_t warps;   // mask of the warps that have arrived
    uint32_t waiting; // mask of the arrived warps that wait
};

Thread threads[THREADS];
Copies copies_of_threads[THREADS];
Waits waits_of_warps[WARPS];
Warp warps[WARPS];
Barrier barriers[BARRIERS];
unsigned char* stacks;
Context scheduler; // what launches blocks
Thread* current;
// Ready threads of a warp, which run in ascending or descending order of their lanes, from a random one. `passed` of the
// 32 lanes have had their turn.
struct Sweep {
    unsigned warp, from, passed;
    bool forwards;
} sweep;
void (*kernel_now)(const void*);
const void* parameter_now;
unsigned threads_now, warps_now, live;
uint64_t random_state;
void* scheduler_fiber;
char begin_of_block, end_of_block;

uint64_t draw() {
    uint64_t z = random_state += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

Warp& warp_of(const Thread& thread) { return warps[thread.number / WARP]; }
uint32_t bit_of(const Thread& thread) { return 1u << thread.number % WARP; }
const Wait& wait_of(unsigned thread) { return waits_of_warps[thread / WARP].waits[thread % WARP]; }

// Returns the next thread to run, or null if all have ended.
Thread* next() {
    for (;;) {
        uint32_t ready = warps[sweep.warp].ready;
        // The lane after `passed` others in the order of the sweep becomes bit 0, or bit 31 if lanes descend.
        if (sweep.passed < WARP && ready) {
            unsigned by = sweep.forwards ? sweep.from : sweep.from + 1;
            ready = ready >> by % WARP | ready << (WARP - by) % WARP;
            ready = sweep.forwards ? ready >> sweep.passed << sweep.passed : ready << sweep.passed >> sweep.passed;
            if (ready) {
                unsigned turn = (unsigned)(sweep.forwards ? __builtin_ctz(ready) : __builtin_clz(ready));
                sweep.passed = turn + 1;
                unsigned lane = (sweep.forwards ? sweep.from + turn : sweep.from - turn) % WARP;
                return &threads[sweep.warp * WARP + lane];
            }
        }
        if (!live) return nullptr;
        uint32_t all = 0;
        for (unsigned w = 0; w < warps_now; w++) all |= (uint32_t)(warps[w].ready != 0) << w;
        if (!all) {
            current = nullptr;
            fail({"kernel", 0}, "deadlock: all threads wait for others");
        }
        // Picks a random ready warp.
        uint64_t random = draw();
        for (unsigned skip = random % (unsigned)__builtin_popcount(all); skip; skip--) all &= all - 1;
        sweep = {(unsigned)__builtin_ctz(all), (unsigned)(random >> 32 & 31), 0, (random >> 40 & 1) != 0};
    }
}

// Runs the next thread, or returns to the launch if all have ended. Returns when the thread that was running is the next.
void run_next(Context& from) {
    Thread* before = current;
    current = next();
    if (current) {
        thread_index = current->index;
        warp_of(*current).ready &= ~bit_of(*current);
        if (current == before) return;
    }
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(current ? current->fiber : scheduler_fiber, 1);
    switch_context(from, current ? current->context : scheduler);
}

void stop() { run_next(current->context); }

// Memory order for the thread sanitizer: every release happens before every later acquire of the same address.
void release(void* at) {
    if (__tsan_release) __tsan_release(at);
}
void acquire(void* at) {
    if (__tsan_acquire) __tsan_acquire(at);
}

// Whether a barrier or __syncwarp orders memory. Not the one at TPDE_UNORDERED, a location like "streams.cuh:146": a test
// takes its effect away, and expects that a race is found.
bool orders(SourceLocation location) {
    static const char* unordered = getenv("TPDE_UNORDERED");
    if (!unordered) return true;
    const char* name = strrchr(location.file, '/');
    return unordered != std::string(name ? name + 1 : location.file) + ":" + std::to_string(location.line);
}

// ---- Warp operations and barriers ----

const char* name_of(WarpOperation operation) {
    const char* names[] = {"__syncwarp",       "a ballot",     "a shuffle", "__match_any_sync",
                           "__match_all_sync", "a sum",        "a minimum", "a maximum",
                           "a minimum",        "a maximum",    "an AND",    "an OR",
                           "an XOR",           "__activemask", "a barrier", "an arrival at a barrier"};
    return names[(int)operation];
}

template <class F> void for_each(uint32_t mask, F f) {
    for (; mask; mask &= mask - 1) f((unsigned)__builtin_ctz(mask));
}

void free_lanes(Warp& warp, uint32_t mask) {
    warp.waiting &= ~mask;
    warp.ready |= mask;
}

void complete(Barrier& barrier) {
    barrier.result = barrier.sum;
    for_each(barrier.waiting, [](unsigned w) { free_lanes(warps[w], warps[w].waiting); });
    barrier = {0, 0, 0, barrier.result, 0, 0};
}

// A warp arrives at a barrier.
void arrive(unsigned w, uint32_t lanes, const Wait& first) {
    Barrier& barrier = barriers[first.argument];
    bool wait = first.operation == WarpOperation::BARRIER;
    if (barrier.warps >> w & 1)
        fail(first.location, "warp %u arrives at barrier %u twice before it completes", w, (unsigned)first.argument);
    if (barrier.warps && barrier.expected != first.count) {
        fail(first.location, "barrier %u: this call expects %u threads, an earlier call expects %u",
             (unsigned)first.argument, first.count, barrier.expected);
    }
    barrier.expected = first.count;
    barrier.arrived += first.count ? WARP : (unsigned)__builtin_popcount(lanes);
    barrier.warps |= 1u << w;
    for_each(lanes, [&](unsigned lane) { barrier.sum += (uint32_t)waits_of_warps[w].values[lane]; });
    if (wait) barrier.waiting |= 1u << w;
    else free_lanes(warps[w], lanes);
    uint32_t expected = first.count ? first.count : live;
    if (barrier.arrived > expected)
        fail(first.location, "barrier %u expects %u threads, but %u have arrived", (unsigned)first.argument, expected,
             barrier.arrived);
    if (barrier.arrived == expected) complete(barrier);
}

void finish(unsigned w, uint32_t lanes) {
    Waits& all = waits_of_warps[w];
    const Wait& first = all.waits[__builtin_ctz(lanes)];
    const uint64_t* values = all.values;
    uint64_t* results = all.results;
    auto give = [&](uint64_t result) { for_each(lanes, [&](unsigned lane) { results[lane] = result; }); };
    auto fold = [&](auto f) {
        uint64_t x = values[__builtin_ctz(lanes)];
        for_each(lanes & (lanes - 1), [&](unsigned lane) { x = f(x, values[lane]); });
        give(x);
    };
    switch (first.operation) {
    case WarpOperation::BARRIER:
    case WarpOperation::BARRIER_ARRIVE: arrive(w, lanes, first); return;
    case WarpOperation::SYNC: break;
    case WarpOperation::BALLOT: {
        uint32_t ballot = 0;
        for_each(lanes, [&](unsigned lane) { ballot |= (uint32_t)(values[lane] != 0) << lane; });
        give(ballot);
        break;
    }
    case WarpOperation::ACTIVE: give(lanes); break;
    case WarpOperation::SHUFFLE:
        // A shuffle from a lane outside of the mask gives an undefined value.
        for_each(lanes, [&](unsigned lane) {
            uint64_t from = all.waits[lane].argument;
            results[lane] = lanes >> from & 1 ? values[from] : draw();
        });
        break;
    case WarpOperation::MATCH_ANY:
        for_each(lanes, [&](unsigned lane) {
            uint32_t same = 0;
            for_each(lanes, [&](unsigned other) { same |= (uint32_t)(values[other] == values[lane]) << other; });
            results[lane] = same;
        });
        break;
    case WarpOperation::MATCH_ALL: {
        bool same = true;
        for_each(lanes, [&](unsigned lane) { same &= values[lane] == values[__builtin_ctz(lanes)]; });
        give(same ? first.mask : 0);
        break;
    }
    case WarpOperation::ADD: fold([](uint64_t a, uint64_t b) { return a + b; }); break;
    case WarpOperation::MIN: fold([](uint64_t a, uint64_t b) { return std::min(a, b); }); break;
    case WarpOperation::MAX: fold([](uint64_t a, uint64_t b) { return std::max(a, b); }); break;
    case WarpOperation::MIN_SIGNED:
        fold([](uint64_t a, uint64_t b) { return (uint64_t)std::min((int64_t)a, (int64_t)b); });
        break;
    case WarpOperation::MAX_SIGNED:
        fold([](uint64_t a, uint64_t b) { return (uint64_t)std::max((int64_t)a, (int64_t)b); });
        break;
    case WarpOperation::AND: fold([](uint64_t a, uint64_t b) { return a & b; }); break;
    case WarpOperation::OR: fold([](uint64_t a, uint64_t b) { return a | b; }); break;
    case WarpOperation::XOR: fold([](uint64_t a, uint64_t b) { return a ^ b; }); break;
    }
    free_lanes(warps[w], lanes);
}

// `lane` waits for `other`, which waits at another operation. Fails if `other` waits for `lane` too.
void differ(unsigned w, unsigned lane, unsigned other) {
    const Wait &a = waits_of_warps[w].waits[lane], &b = waits_of_warps[w].waits[other];
    if (!(b.mask >> lane & 1)) return;
    fail(a.location, "%s with mask %08x; but lane %u of the warp is at %s:%d, at %s with mask %08x",
         name_of(a.operation), a.mask, other, b.location.file, b.location.line, name_of(b.operation), b.mask);
}

// Completes the operation of a waiting thread, whose key is given, once all its threads have arrived.
void try_finish(unsigned w, unsigned lane, uint32_t mask, uint64_t place, uint64_t barrier) {
    const Waits& all = waits_of_warps[w];
    const Warp& warp = warps[w];
    uint32_t lanes = mask & ~warp.ended, others = lanes & warp.waiting & ~(1u << lane);
    bool complete = (warp.waiting & lanes) == lanes;
    // All lanes that arrived earlier agree, so a comparison with one lane is enough until all have arrived.
    for_each(complete ? others : others & -others, [&](unsigned other) {
        if (all.places[other] != place || all.barriers[other] != barrier) differ(w, lane, other);
    });
    if (complete) finish(w, lanes);
}

// Waits for an operation of the current thread to complete. Returns its result.
inline uint64_t wait_for_warp(WarpOperation operation, uint32_t mask, uint64_t value, uint64_t argument, uint32_t count,
                              SourceLocation location) {
    const unsigned w = current->number / WARP, lane = current->number % WARP;
    Waits& all = waits_of_warps[w];
    uint64_t place = (uint64_t)operation << 56 | (uint64_t)location.line << 32 | mask;
    uint64_t barrier = operation >= WarpOperation::BARRIER ? argument << 32 | count : 0;
    all.places[lane] = place;
    all.barriers[lane] = barrier;
    all.values[lane] = value;
    Wait& wait = all.waits[lane];
    wait.location = location;
    wait.mask = mask;
    wait.count = count;
    wait.argument = argument;
    wait.operation = operation;
    warps[w].waiting |= 1u << lane;
    try_finish(w, lane, mask, place, barrier);
    if (warps[w].ready >> lane & 1) warps[w].ready &= ~(1u << lane);
    else stop();
    return all.results[lane];
}

[[noreturn]] void entry() {
    for (;;) {
        acquire(&begin_of_block);
        kernel_now(parameter_now);
        release(&end_of_block);
        Thread& me = *current;
        Warp& warp = warp_of(me);
        warp.ended |= bit_of(me);
        live--;
        // Other threads may have waited for this one.
        if (warp.waiting) {
            const unsigned w = me.number / WARP, lane = (unsigned)__builtin_ctz(warp.waiting);
            const Waits& all = waits_of_warps[w];
            try_finish(w, lane, all.waits[lane].mask, all.places[lane], all.barriers[lane]);
        }
        for (Barrier& barrier : barriers) {
            if (barrier.warps && barrier.expected == 0 && barrier.arrived == live) complete(barrier);
        }
        stop();
    }
}

void prepare() {
    if (stacks) return;
    stacks = (unsigned char*)mmap(nullptr, THREADS * (STACK + PAGE), PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) abort();
    for (unsigned i = 0; i < THREADS; i++) {
        // A guard page precedes each stack.
        unsigned char* stack = stacks + i * (STACK + PAGE);
        mprotect(stack, PAGE, PROT_NONE);
        // Stacks begin at different offsets in their pages, or the same lines of all would compete for one set of a cache.
        make_context(threads[i].context, stack + PAGE - i % WARP * 2 * LINE, entry);
        threads[i].number = i;
    }
}

void run_block(unsigned shared) {
    // The initial content of shared memory is undefined: fill it with noise.
    auto noise = [](unsigned char* at, unsigned char* end) {
        for (; at + 8 <= end; at += 8) {
            uint64_t word = draw();
            memcpy(at, &word, 8);
        }
    };
    noise(dynamic_memory, dynamic_memory + shared);
    if (__asan_poison_memory_region) {
        __asan_unpoison_memory_region(dynamic_memory, shared);
        __asan_poison_memory_region(dynamic_memory + shared, DYNAMIC - shared);
    }
    noise(__start_shared_memory, __stop_shared_memory);
    memset(barriers, 0, sizeof barriers);
    live = threads_now;
    warps_now = (threads_now + WARP - 1) / WARP;
    for (unsigned w = 0; w < warps_now; w++) {
        uint32_t lanes = threads_now - w * WARP >= WARP ? ~0u : (1u << threads_now % WARP) - 1;
        warps[w] = {lanes, 0, ~lanes};
    }
    for (unsigned i = 0; i < threads_now; i++) {
        threads[i].index = {i % block_size.x, i / block_size.x, 0};
        Copies& copies = copies_of_threads[i];
        copies.copies.clear();
        copies.groups.clear();
        copies.uncommitted = 0;
        if (__tsan_create_fiber && !threads[i].fiber) threads[i].fiber = __tsan_create_fiber(0);
    }
    release(&begin_of_block);
    sweep.passed = WARP;
    run_next(scheduler);
    acquire(&end_of_block);
}

} // namespace

uint64_t run_warp_operation(WarpOperation operation, uint32_t mask, uint64_t value, uint64_t argument,
                            SourceLocation location) {
    Thread& me = *current;
    if (!(mask & bit_of(me)))
        fail(location, "%s with mask %08x, which lacks the calling thread", name_of(operation), mask);
    // Of the warp operations, only __syncwarp orders memory.
    bool ordered = operation == WarpOperation::SYNC && orders(location);
    if (ordered) release(&warp_of(me));
    uint64_t result = wait_for_warp(operation, mask, value, argument, 0, location);
    if (ordered) acquire(&warp_of(me));
    return result;
}

uint32_t barrier(uint32_t id, uint32_t count, bool wait, uint32_t value, SourceLocation location) {
    if (id >= BARRIERS || count % WARP || count > threads_now)
        fail(location, "invalid barrier: id %u, %u threads", id, count);
    bool ordered = orders(location);
    if (ordered) release(&barriers[id]);
    wait_for_warp(wait ? WarpOperation::BARRIER : WarpOperation::BARRIER_ARRIVE, ~0u, value, id, count, location);
    if (!wait) return 0;
    if (ordered) acquire(&barriers[id]);
    return barriers[id].result;
}

void pause(bool always) {
    if (!always && draw() % 8) return;
    warp_of(*current).ready |= bit_of(*current);
    stop();
}

void begin_copy(void* to, const void* from, uint32_t size, uint32_t zeros, SourceLocation location) {
    Copies& mine = copies_of_threads[current->number];
    if ((size + zeros != 4 && size + zeros != 8 && size + zeros != 16) || (uintptr_t)to % (size + zeros) ||
        (uintptr_t)from % (size + zeros)) {
        fail(location, "invalid copy of %u bytes and %u zeros from %p to %p", size, zeros, from, to);
    }
    mine.copies.push_back({to, from, size, zeros});
    mine.uncommitted++;
}

void commit_copies() {
    Copies& mine = copies_of_threads[current->number];
    mine.groups.push_back(mine.uncommitted);
    mine.uncommitted = 0;
}

bool next_copy(uint32_t pending, Copy& copy) {
    Copies& mine = copies_of_threads[current->number];
    while (mine.groups.size() > pending && mine.groups.front() == 0) mine.groups.pop_front();
    if (mine.groups.size() <= pending) return false;
    mine.groups.front()--;
    copy = mine.copies.front();
    mine.copies.pop_front();
    return true;
}

void describe_thread() {
    if (current)
        fprintf(stderr, "    block %u, thread %u: warp %u, lane %u\n", block_index.x, current->number,
                current->number / WARP, current->number % WARP);
}

void fail(SourceLocation location, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout);
    fprintf(stderr, "%s:%d: ", location.file, location.line);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    if (current && __sanitizer_print_stack_trace) __sanitizer_print_stack_trace();
    if (!current) {
        // Prints where each thread waits, with threads at the same operation grouped.
        for (unsigned i = 0, next; i < threads_now; i = next) {
            auto ended = [](unsigned j) { return (warps[j / WARP].ended >> j % WARP & 1) != 0; };
            const Wait& wait = wait_of(i);
            auto same = [&](const Wait& other) {
                return wait.operation == other.operation && wait.location.line == other.location.line &&
                       wait.mask == other.mask && wait.argument == other.argument;
            };
            for (next = i + 1; next < threads_now && ended(i) == ended(next) && (ended(i) || same(wait_of(next)));)
                next++;
            if (ended(i)) fprintf(stderr, "    threads %u to %u have ended\n", i, next - 1);
            else
                fprintf(stderr, "    threads %u to %u at %s:%d: %s, mask %08x\n", i, next - 1, wait.location.file,
                        wait.location.line, name_of(wait.operation), wait.mask);
        }
    }
    abort();
}

void launch(const Configuration& configuration, void (*kernel)(const void*), const void* parameter) {
    prepare();
    // Launches may come from several threads of the process, one after the other.
    if (__tsan_get_current_fiber) scheduler_fiber = __tsan_get_current_fiber();
    kernel_now = kernel;
    parameter_now = parameter;
    threads_now = configuration.threads;
    random_state = configuration.seed;
    block_size = {configuration.threads, 1, 1};
    grid_size = {configuration.blocks, 1, 1};
    for (unsigned block = 0; block < configuration.blocks; block++) {
        block_index = {block, 0, 0};
        run_block(configuration.shared);
    }
}

} // namespace emulator
