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
constexpr size_t STACK = 256 << 10, PAGE = 4096, DYNAMIC = 228 << 10;

Index thread_index, block_index, block_size, grid_size;
alignas(1024) unsigned char dynamic_memory[DYNAMIC];

namespace {

// ---- Fibers ----

#ifdef __x86_64__
typedef void* Context;
// Pushes the callee-saved registers, saves the stack pointer in *from, and resumes `to`.
extern "C" void emulator_switch(Context* from, Context to);
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

// Operation that a thread waits for, and its result.
struct Wait {
    uint64_t value, argument, result;
    uint32_t mask;
    uint32_t count; // number of threads of a barrier
    SourceLocation location;
    WarpOperation operation;
};

struct Thread {
    Context context;
    Index index;
    unsigned number;
    void* fiber; // handle of this fiber in the thread sanitizer
    // Pending copies, and the number of copies in each committed group.
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
Wait waits[THREADS];
Warp warps[WARPS];
Barrier barriers[BARRIERS];
unsigned char* stacks;
Context scheduler;
Thread* current;
void (*kernel_now)(const void*);
const void* parameter_now;
unsigned threads_now, live;
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

// Runs a thread until it waits.
void resume(Thread& thread) {
    current = &thread;
    thread_index = thread.index;
    warp_of(thread).ready &= ~bit_of(thread);
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(thread.fiber, 1);
    switch_context(scheduler, thread.context);
    current = nullptr;
}

void stop() {
    Thread& me = *current;
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(scheduler_fiber, 1);
    switch_context(me.context, scheduler);
}

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
    for_each(lanes, [&](unsigned lane) { barrier.sum += (uint32_t)waits[w * WARP + lane].value; });
    if (wait) barrier.waiting |= 1u << w;
    else free_lanes(warps[w], lanes);
    uint32_t expected = first.count ? first.count : live;
    if (barrier.arrived > expected)
        fail(first.location, "barrier %u expects %u threads, but %u have arrived", (unsigned)first.argument, expected,
             barrier.arrived);
    if (barrier.arrived == expected) complete(barrier);
}

void finish(unsigned w, uint32_t lanes) {
    Wait* all = &waits[w * WARP];
    const Wait& first = all[__builtin_ctz(lanes)];
    auto fold = [&](auto f) {
        uint64_t x = first.value;
        for_each(lanes & (lanes - 1), [&](unsigned lane) { x = f(x, all[lane].value); });
        for_each(lanes, [&](unsigned lane) { all[lane].result = x; });
    };
    switch (first.operation) {
    case WarpOperation::BARRIER:
    case WarpOperation::BARRIER_ARRIVE: arrive(w, lanes, first); return;
    case WarpOperation::SYNC: break;
    case WarpOperation::BALLOT: {
        uint32_t ballot = 0;
        for_each(lanes, [&](unsigned lane) { ballot |= (uint32_t)(all[lane].value != 0) << lane; });
        for_each(lanes, [&](unsigned lane) { all[lane].result = ballot; });
        break;
    }
    case WarpOperation::ACTIVE: for_each(lanes, [&](unsigned lane) { all[lane].result = lanes; }); break;
    case WarpOperation::SHUFFLE:
        // A shuffle from a lane outside of the mask gives an undefined value.
        for_each(lanes, [&](unsigned lane) {
            all[lane].result = lanes >> all[lane].argument & 1 ? all[all[lane].argument].value : draw();
        });
        break;
    case WarpOperation::MATCH_ANY:
        for_each(lanes, [&](unsigned lane) {
            uint32_t same = 0;
            for_each(lanes, [&](unsigned other) { same |= (uint32_t)(all[other].value == all[lane].value) << other; });
            all[lane].result = same;
        });
        break;
    case WarpOperation::MATCH_ALL: {
        bool same = true;
        for_each(lanes, [&](unsigned lane) { same &= all[lane].value == first.value; });
        for_each(lanes, [&](unsigned lane) { all[lane].result = same ? first.mask : 0; });
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

// `lane` waits for `other`. Fails if `other` waits for `lane` too, but at a different operation.
void compare(unsigned w, unsigned lane, unsigned other) {
    const Wait &a = waits[w * WARP + lane], &b = waits[w * WARP + other];
    bool same = a.operation == b.operation && a.mask == b.mask && a.location.line == b.location.line &&
                a.count == b.count && (a.operation < WarpOperation::BARRIER || a.argument == b.argument);
    if (same || !(b.mask >> lane & 1)) return;
    fail(a.location, "%s with mask %08x; but lane %u of the warp is at %s:%d, at %s with mask %08x",
         name_of(a.operation), a.mask, other, b.location.file, b.location.line, name_of(b.operation), b.mask);
}

// Completes the operation of a waiting thread once all its threads have arrived.
void try_finish(unsigned w, unsigned lane) {
    Warp& warp = warps[w];
    uint32_t lanes = waits[w * WARP + lane].mask & ~warp.ended, others = lanes & warp.waiting & ~(1u << lane);
    if ((warp.waiting & lanes) == lanes) {
        for_each(others, [&](unsigned other) { compare(w, lane, other); });
        finish(w, lanes);
    } else if (others) {
        // All lanes that arrived earlier agree, so a comparison with one lane is enough.
        compare(w, lane, (unsigned)__builtin_ctz(others));
    }
}

// Waits for the operation of the current thread to complete.
void wait_for_warp() {
    Thread& me = *current;
    Warp& warp = warp_of(me);
    warp.waiting |= bit_of(me);
    try_finish(me.number / WARP, me.number % WARP);
    if (warp.ready & bit_of(me)) warp.ready &= ~bit_of(me);
    else stop();
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
        if (warp.waiting) try_finish(me.number / WARP, (unsigned)__builtin_ctz(warp.waiting));
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
        make_context(threads[i].context, stack + PAGE, entry);
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
    const unsigned warps_now = (threads_now + WARP - 1) / WARP;
    for (unsigned w = 0; w < warps_now; w++) {
        uint32_t lanes = threads_now - w * WARP >= WARP ? ~0u : (1u << threads_now % WARP) - 1;
        warps[w] = {lanes, 0, ~lanes};
    }
    for (unsigned i = 0; i < threads_now; i++) {
        threads[i].index = {i % block_size.x, i / block_size.x, 0};
        threads[i].copies.clear();
        threads[i].groups.clear();
        threads[i].uncommitted = 0;
        if (__tsan_create_fiber && !threads[i].fiber) threads[i].fiber = __tsan_create_fiber(0);
    }
    release(&begin_of_block);
    while (live) {
        uint32_t ready = 0;
        for (unsigned w = 0; w < warps_now; w++) ready |= (uint32_t)(warps[w].ready != 0) << w;
        if (!ready) fail({"kernel", 0}, "deadlock: all threads wait for others");
        uint64_t random = draw();
        // Picks a random ready warp, and runs its threads in ascending or descending order from a random one.
        for (unsigned skip = random % (unsigned)__builtin_popcount(ready); skip; skip--) ready &= ready - 1;
        unsigned w = (unsigned)__builtin_ctz(ready), from = random >> 32 & 31;
        bool forwards = random >> 40 & 1;
        for (unsigned i = 0; i < WARP; i++) {
            unsigned lane = (forwards ? from + i : from - i) % WARP;
            if (warps[w].ready >> lane & 1) resume(threads[w * WARP + lane]);
        }
    }
    acquire(&end_of_block);
}

} // namespace

uint64_t run_warp_operation(WarpOperation operation, uint32_t mask, uint64_t value, uint64_t argument,
                            SourceLocation location) {
    Thread& me = *current;
    if (!(mask & bit_of(me)))
        fail(location, "%s with mask %08x, which lacks the calling thread", name_of(operation), mask);
    waits[me.number] = {value, argument, 0, mask, 0, location, operation};
    // Of the warp operations, only __syncwarp orders memory.
    bool ordered = operation == WarpOperation::SYNC && orders(location);
    if (ordered) release(&warp_of(me));
    wait_for_warp();
    if (ordered) acquire(&warp_of(me));
    return waits[me.number].result;
}

uint32_t barrier(uint32_t id, uint32_t count, bool wait, uint32_t value, SourceLocation location) {
    Thread& me = *current;
    if (id >= BARRIERS || count % WARP || count > threads_now)
        fail(location, "invalid barrier: id %u, %u threads", id, count);
    waits[me.number] = {
        value, id, 0, ~0u, count, location, wait ? WarpOperation::BARRIER : WarpOperation::BARRIER_ARRIVE};
    bool ordered = orders(location);
    if (ordered) release(&barriers[id]);
    wait_for_warp();
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
    Thread& me = *current;
    if ((size + zeros != 4 && size + zeros != 8 && size + zeros != 16) || (uintptr_t)to % (size + zeros) ||
        (uintptr_t)from % (size + zeros)) {
        fail(location, "invalid copy of %u bytes and %u zeros from %p to %p", size, zeros, from, to);
    }
    me.copies.push_back({to, from, size, zeros});
    me.uncommitted++;
}

void commit_copies() {
    current->groups.push_back(current->uncommitted);
    current->uncommitted = 0;
}

bool next_copy(uint32_t pending, Copy& copy) {
    Thread& me = *current;
    while (me.groups.size() > pending && me.groups.front() == 0) me.groups.pop_front();
    if (me.groups.size() <= pending) return false;
    me.groups.front()--;
    copy = me.copies.front();
    me.copies.pop_front();
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
            const Wait& wait = waits[i];
            auto same = [&](const Wait& other) {
                return wait.operation == other.operation && wait.location.line == other.location.line &&
                       wait.mask == other.mask && wait.argument == other.argument;
            };
            for (next = i + 1; next < threads_now && ended(i) == ended(next) && (ended(i) || same(waits[next]));)
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
