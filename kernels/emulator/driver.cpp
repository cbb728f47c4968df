// A stand-in for the CUDA driver and nvCOMP (libcuda.so, libnvcomp.so.6), for tests of the host half. Device memory is
// memory of the process, and kernels run on the emulator. README.md lists its checks.
#include "block.h"
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>
#include "common/format.cuh"
#include "digest/digests.cuh"
#include "digest/hash.cuh"
#include "encode/arguments.cuh"
#include "encode/form.cuh"
#include "zstd/frames.cuh"

#ifndef ONLY_ENCODE
extern "C" void tpde_raw(Launch);
extern "C" void tpde_conditioned(Launch);
extern "C" void tpde_without_base(Launch);
extern "C" void tpde_raw_strided(Launch);
extern "C" void tpde_conditioned_strided(Launch);
extern "C" void tpde_without_base_strided(Launch);
extern "C" void tpde_raw_derived(Launch);
extern "C" void tpde_conditioned_derived(Launch);
extern "C" void tpde_digests(Digests);
extern "C" void tpde_frames_check(Frames);
extern "C" void tpde_frames_expand(Frames);
#endif
extern "C" void tpde_hash(Hashes);
extern "C" void tpde_encode_survey(Encode);
extern "C" void tpde_encode_sample(Encode);
extern "C" void tpde_encode_groups(Encode);
extern "C" void tpde_encode_choose(Encode);
extern "C" void tpde_encode_count(Encode);
extern "C" void tpde_encode_streams(Encode);
extern "C" void tpde_encode_gather(Encode);
extern "C" void tpde_encode_copy(Encode);
extern "C" void tpde_encode_crc(Encode);
extern "C" void tpde_encode_form(Form);
extern "C" void tpde_layout(u32*);
extern "C" void __asan_poison_memory_region(const volatile void*, size_t) __attribute__((weak));
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t) __attribute__((weak));

namespace {

enum Result : u32 {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_ISOLATION = 905,
    REFUSED = 999,
};

// ---- Queued operations ----

struct Stream;
struct Capture;

// Point in a stream that an event has recorded.
struct Mark {
    Stream* stream;
    Capture* capture;
    bool passed;
    double milliseconds;
};
typedef std::shared_ptr<Mark> MarkPointer;

struct Operation {
    const char* name;
    std::function<void()> run;
    MarkPointer waits_for; // the operation is ready once this mark is passed
    MarkPointer reaches;
    bool spins;                  // runs until a call waits for it
    std::function<void()> begin; // runs when the operation is queued, at each launch of its graph
};

struct Context {
    int device;
    Stream* legacy;
};

struct Stream {
    Context* context;
    std::deque<Operation> queue;
    Capture* capture;
    bool destroyed;
    bool eager; // runs ready operations at once; other streams run only operations that a call waits for
};

struct Event {
    Context* context;
    bool timed;
    MarkPointer last;
    u32 queries; // of the last mark, in vain
};

// A graph, during and after its capture: its operations in a valid order.
struct Capture {
    int mode;
    std::vector<Operation> operations;
    u64 id;
    std::vector<std::shared_ptr<void>> objects;
};

struct Function {
    std::string name;
    void (*entry)(const void*);
    size_t parameter_bytes;
    u32 shared;
};
struct Module {
    std::string text;
    std::vector<std::unique_ptr<Function>> functions;
};

struct Allocation {
    size_t bytes;
    unsigned char* pages;
    size_t page_bytes;
    bool is_freed; // a free of the allocation is queued
};

std::recursive_mutex driver_mutex;
std::vector<std::unique_ptr<Stream>> streams;
std::set<Capture*> captures; // in progress
std::map<u64, Allocation> allocations;
std::map<u64, size_t> pinned;
size_t allocated;
size_t requested, requested_most; // bytes of device memory that are allocated and not freed, now and at most
thread_local std::vector<Context*> current;
thread_local int capture_mode;
const char* running_operation = "nothing";
u64 random_state;
typedef i64 (*Expander)(const u8*, size_t, u8*, size_t);
Expander expander;

constexpr int DEVICES = 2, MULTIPROCESSORS = 4;
constexpr u8 PENDING_BYTE = 0xDC; // fills pinned memory until the copy to it runs
constexpr u32 QUERIES_MAX = 100;  // of an event, before the operations that it waits for run
constexpr size_t PAGE = 4096, ALIGN = 256, ALLOCATED_MAX = (size_t)1 << 30;

// Returns the mask of eager streams: bit n % 8 for stream n in order of creation. TPDE_STAND_IN sets it. It has no effect
// while a test selects a random order.
u32 order() {
    static const u32 order = [] {
        const char* text = getenv("TPDE_STAND_IN");
        if (text && !strcmp(text, "early")) return 255ul;
        return !text || !strcmp(text, "late") ? 0ul : strtoul(text, nullptr, 0);
    }();
    return order;
}

u64 draw() {
    u64 z = random_state += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

// In random order any ready stream may run next. While no call waits, an operation runs with probability 1 / rarity.
bool random_order = false;
u64 rarity;

double now() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// With TPDE_PAUSES=N, one call in eight sleeps, for up to N microseconds, before anything else. This varies the order in
// which threads of the host come to their calls.
void pause_at_random() {
    static const u64 longest = [] {
        const char* text = getenv("TPDE_PAUSES");
        return text ? strtoull(text, nullptr, 0) : 0;
    }();
    if (!longest) return;
    thread_local std::minstd_rand random(std::random_device{}());
    if (random() % 8 == 0) usleep((useconds_t)(random() % longest));
}

// ---- Progress ----

bool is_ready(const Stream& stream) {
    if (stream.queue.empty()) return false;
    const Operation& front = stream.queue.front();
    return !front.spins && (!front.waits_for || front.waits_for->passed);
}

void run_front(Stream& stream) {
    Operation operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    running_operation = operation.name;
    if (operation.run) operation.run();
    running_operation = "nothing";
    if (operation.reaches) {
        operation.reaches->passed = true;
        operation.reaches->milliseconds = now();
    }
}

// Runs only the operations that must precede the mark. Returns false at a kernel that spins, unless `also_spinning`.
bool run_before(const Mark& mark, bool also_spinning = true) {
    while (!mark.passed) {
        if (mark.stream->queue.empty()) abort();
        Operation& front = mark.stream->queue.front();
        if (front.spins && !also_spinning) return false;
        if (front.waits_for && !front.waits_for->passed) {
            if (!run_before(*front.waits_for, also_spinning)) return false;
        } else {
            run_front(*mark.stream);
        }
    }
    return true;
}

// Runs one ready operation of an eager stream, or of any stream if `all`.
bool run_any(bool all) {
    std::vector<Stream*> ready;
    for (auto& stream : streams) {
        if ((all || stream->eager) && is_ready(*stream)) ready.push_back(stream.get());
    }
    if (ready.empty()) return false;
    run_front(*ready[draw() % ready.size()]);
    return true;
}

void remove_destroyed_streams() {
    streams.erase(std::remove_if(streams.begin(), streams.end(),
                                 [](auto& stream) { return stream->destroyed && stream->queue.empty(); }),
                  streams.end());
}

// Makes progress after an operation was queued.
void make_progress() {
    if (random_order) {
        while (draw() % rarity == 0 && run_any(true)) {}
    }
    while (run_any(allocated > ALLOCATED_MAX)) {}
}

// Waits for the mark. In random order, other streams make progress too.
void reach(const Mark& mark) {
    while (random_order && !mark.passed && run_any(true)) {}
    run_before(mark);
}

Context* context_now() { return current.empty() ? nullptr : current.back(); }

Stream* new_stream(Context* context) {
    static u32 number;
    streams.emplace_back(new Stream{context, {}, nullptr, false, (order() >> number++ % 8 & 1) != 0});
    return streams.back().get();
}

// Returns the stream of a handle, or null if the handle is not valid in the current context.
Stream* stream_of(Stream* stream) {
    Context* context = context_now();
    if (!context) return nullptr;
    if (!stream) return context->legacy ? context->legacy : context->legacy = new_stream(context);
    return stream->context == context && !stream->destroyed ? stream : nullptr;
}

// Calls that fail, selected by a test: no call; one call that queues, creates or waits for an event; one call of any kind;
// all calls from one on, as if the context were lost; or one call of a function.
enum Refusal : u32 { REFUSES_NONE, REFUSES_QUEUEING, REFUSES_ANY, REFUSES_ALL_FROM, REFUSES_NAMED };
u32 refusal;
std::string refused_name;
std::map<std::string, u64> call_counts; // by name, since the last request
i64 calls_to_refusal;
bool has_refused = false;
std::set<std::string> refused; // names of refused calls, since the start of the process

// Discards all queued work, as a lost context does.
void lose_all() {
    for (auto& stream : streams) {
        for (Operation& operation : stream->queue) {
            if (operation.reaches) operation.reaches->passed = true;
        }
        stream->queue.clear();
    }
}

// Counts a call, and returns whether it fails.
bool is_refused(const char* name, bool queues) {
    call_counts[name]++;
    if (refusal == REFUSES_NONE || (refusal == REFUSES_QUEUEING && !queues)) return false;
    if (refusal == REFUSES_NAMED && refused_name != name) return false;
    if (calls_to_refusal > 0) return calls_to_refusal--, false;
    if (refusal == REFUSES_ALL_FROM) lose_all();
    else refusal = REFUSES_NONE;
    refused.insert(name);
    return has_refused = true;
}

Result queue(Stream* handle, Operation operation) {
    Stream* stream = stream_of(handle);
    if (!stream) return context_now() ? INVALID_HANDLE : INVALID_CONTEXT;
    if (stream->capture) {
        stream->capture->operations.push_back(std::move(operation));
        return SUCCESS;
    }
    if (operation.begin) operation.begin();
    stream->queue.push_back(std::move(operation));
    make_progress();
    return SUCCESS;
}

void wait_for_all(Stream& stream) {
    while (random_order && !stream.queue.empty() && run_any(true)) {}
    while (!stream.queue.empty()) {
        Operation& front = stream.queue.front();
        if (front.waits_for && !front.waits_for->passed) run_before(*front.waits_for);
        else run_front(stream);
    }
}

// Returns whether a capture in the process forbids this call. A thread in relaxed mode is exempt.
bool is_forbidden() {
    if (capture_mode != 0) return false;
    return std::any_of(captures.begin(), captures.end(), [](Capture* capture) { return capture->mode != 2; });
}

// ---- Memory ----

u64 allocate(size_t bytes) {
    // The allocation ends at the end of its pages, up to alignment; a guard page follows.
    size_t rounded = (bytes + ALIGN - 1) / ALIGN * ALIGN, page_bytes = (rounded + PAGE - 1) / PAGE * PAGE + PAGE;
    void* pages = mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return 0;
    unsigned char* end = (unsigned char*)pages + page_bytes - PAGE;
    memset(pages, 0xDB, page_bytes - PAGE);
    // With the address sanitizer, an allocation ends at its last byte.
    if (__asan_poison_memory_region) __asan_poison_memory_region(end - rounded + bytes, rounded - bytes);
    mprotect(end, PAGE, PROT_NONE);
    allocations[(u64)(end - rounded)] = {bytes, (unsigned char*)pages, page_bytes, false};
    allocated += page_bytes;
    requested += bytes;
    requested_most = std::max(requested_most, requested);
    return (u64)(end - rounded);
}

// Makes pages inaccessible until the process ends. Their addresses are not reused, so later accesses fault.
void forbid(void* pages, size_t bytes) {
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(pages, bytes);
    if (mmap(pages, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
        abort();
}

void release(u64 address) {
    auto allocation = allocations.find(address);
    forbid(allocation->second.pages, allocation->second.page_bytes);
    allocated -= allocation->second.page_bytes;
    allocations.erase(allocation);
}

bool is_device_memory(u64 address, size_t bytes) {
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin()) return false;
    auto allocation = std::prev(after);
    return !allocation->second.is_freed && address - allocation->first <= allocation->second.bytes &&
           bytes <= allocation->second.bytes - (address - allocation->first);
}

bool is_pinned(const void* start, size_t bytes) {
    auto after = pinned.upper_bound((u64)start);
    if (after == pinned.begin()) return false;
    auto allocation = std::prev(after);
    return (u64)start + bytes <= allocation->first + allocation->second;
}

void report_fault(int, siginfo_t* info, void*) {
    char text[200];
    int size = snprintf(text, sizeof text, "the stand-in of the driver: %s accessed %p, which is not allocated\n",
                        running_operation, info->si_addr);
    if (write(STDERR_FILENO, text, (size_t)size)) {}
    _exit(139);
}

[[noreturn]] void fail(const char* what) {
    fprintf(stderr, "the stand-in of the driver: %s\n", what);
    fflush(stderr);
    _exit(139);
}

u64 hash(const void* start, size_t bytes) {
    u64 hash = 14695981039346656037u;
    for (const u8 *at = (const u8*)start, *end = at + bytes; at != end; at++) hash = (hash ^ *at) * 1099511628211u;
    return hash;
}

void catch_faults() {
    // Installed once, after the handlers of the process.
    static bool done = [] {
        struct sigaction action = {};
        action.sa_sigaction = report_fault;
        action.sa_flags = SA_SIGINFO;
        sigaction(SIGSEGV, &action, nullptr);
        sigaction(SIGBUS, &action, nullptr);
        return true;
    }();
    (void)done;
}

// ---- Kernels ----

struct KernelEntry {
    const char* name;
    void (*entry)(const void*);
    size_t parameter_bytes;
};
#ifdef ONLY_ENCODE
void absent(const void*) { fail("this stand-in has only the kernels of the encoder and of hashes"); }
#endif
const KernelEntry KERNELS[] = {
#ifndef ONLY_ENCODE
    {"tpde_raw", [](const void* p) { tpde_raw(*(const Launch*)p); }, sizeof(Launch)},
    {"tpde_conditioned", [](const void* p) { tpde_conditioned(*(const Launch*)p); }, sizeof(Launch)},
    {"tpde_without_base", [](const void* p) { tpde_without_base(*(const Launch*)p); }, sizeof(Launch)},
    {"tpde_raw_strided", [](const void* p) { tpde_raw_strided(*(const Launch*)p); }, sizeof(Launch)},
    {"tpde_conditioned_strided", [](const void* p) { tpde_conditioned_strided(*(const Launch*)p); }, sizeof(Launch)},
    {"tpde_without_base_strided", [](const void* p) { tpde_without_base_strided(*(const Launch*)p); }, sizeof(Launch)},
    {"tpde_raw_derived", [](const void* p) { tpde_raw_derived(*(const Launch*)p); }, sizeof(Launch)},
    {"tpde_conditioned_derived", [](const void* p) { tpde_conditioned_derived(*(const Launch*)p); }, sizeof(Launch)},
    {"tpde_digests", [](const void* p) { tpde_digests(*(const Digests*)p); }, sizeof(Digests)},
    {"tpde_frames_check", [](const void* p) { tpde_frames_check(*(const Frames*)p); }, sizeof(Frames)},
    {"tpde_frames_expand", [](const void* p) { tpde_frames_expand(*(const Frames*)p); }, sizeof(Frames)},
#else
    {"tpde_raw", absent, sizeof(Launch)},
    {"tpde_conditioned", absent, sizeof(Launch)},
    {"tpde_without_base", absent, sizeof(Launch)},
    {"tpde_raw_strided", absent, sizeof(Launch)},
    {"tpde_conditioned_strided", absent, sizeof(Launch)},
    {"tpde_without_base_strided", absent, sizeof(Launch)},
    {"tpde_raw_derived", absent, sizeof(Launch)},
    {"tpde_conditioned_derived", absent, sizeof(Launch)},
    {"tpde_digests", absent, sizeof(Digests)},
    {"tpde_frames_check", absent, sizeof(Frames)},
    {"tpde_frames_expand", absent, sizeof(Frames)},
#endif
    {"tpde_hash", [](const void* p) { tpde_hash(*(const Hashes*)p); }, sizeof(Hashes)},
    {"tpde_encode_survey", [](const void* p) { tpde_encode_survey(*(const Encode*)p); }, sizeof(Encode)},
    {"tpde_encode_sample", [](const void* p) { tpde_encode_sample(*(const Encode*)p); }, sizeof(Encode)},
    {"tpde_encode_groups", [](const void* p) { tpde_encode_groups(*(const Encode*)p); }, sizeof(Encode)},
    {"tpde_encode_choose", [](const void* p) { tpde_encode_choose(*(const Encode*)p); }, sizeof(Encode)},
    {"tpde_encode_count", [](const void* p) { tpde_encode_count(*(const Encode*)p); }, sizeof(Encode)},
    {"tpde_encode_streams", [](const void* p) { tpde_encode_streams(*(const Encode*)p); }, sizeof(Encode)},
    {"tpde_encode_gather", [](const void* p) { tpde_encode_gather(*(const Encode*)p); }, sizeof(Encode)},
    {"tpde_encode_copy", [](const void* p) { tpde_encode_copy(*(const Encode*)p); }, sizeof(Encode)},
    {"tpde_encode_crc", [](const void* p) { tpde_encode_crc(*(const Encode*)p); }, sizeof(Encode)},
    {"tpde_encode_form", [](const void* p) { tpde_encode_form(*(const Form*)p); }, sizeof(Form)},
    {"tpde_layout", [](const void* p) { tpde_layout(*(u32* const*)p); }, 8},
    {"spin", nullptr, 8},
};

Context primary[DEVICES];

} // namespace

#define LOCKED                                                                                                         \
    pause_at_random();                                                                                                 \
    std::lock_guard<std::recursive_mutex> lock(driver_mutex)
#define EXPORTED extern "C" __attribute__((visibility("default")))
// Calls that may be refused begin with one of two macros: MAY_BE_REFUSED if the call queues, creates or waits, else
// MAY_FAIL. Calls that release something end with DONE: they release it even if they are refused.
#define MAY_BE_REFUSED                                                                                                 \
    if (is_refused(__func__, true)) return OUT_OF_MEMORY
#define MAY_FAIL                                                                                                       \
    if (is_refused(__func__, false)) return REFUSED
#define DONE return is_refused(__func__, false) ? REFUSED : SUCCESS

// ---- For tests ----

// Refuses calls of a `kind`, a Refusal, after `calls` more calls of that kind. Returns whether a call was refused since
// the last request.
EXPORTED int stand_in_refuses(u32 kind, i64 calls) {
    LOCKED;
    bool before = has_refused;
    has_refused = false;
    refusal = kind;
    calls_to_refusal = calls;
    call_counts.clear();
    return before;
}
// Refuses a call of a function after `calls` more calls of it.
EXPORTED int stand_in_refuses_named(const char* name, i64 calls) {
    LOCKED;
    refused_name = name;
    return stand_in_refuses(REFUSES_NAMED, calls);
}
// Calls `each` with the name of each function that was called since the last request, and the number of its calls.
EXPORTED void stand_in_counts(void (*each)(void* context, const char* name, u64 calls), void* context) {
    LOCKED;
    for (const auto& [name, calls] : call_counts) each(context, name.c_str(), calls);
}
EXPORTED int stand_in_has_refused(const char* name) {
    LOCKED;
    return refused.count(name) != 0;
}

// Returns the size of the device memory that is allocated in bytes, and the largest size since the last call. Memory whose free
// is queued does not count.
EXPORTED u64 stand_in_memory(u64* most) {
    LOCKED;
    *most = requested_most;
    return requested_most = requested;
}

// Makes all streams progress in a random order from the seed. Seed 0 selects the order of TPDE_STAND_IN.
EXPORTED void stand_in_draws(u64 seed) {
    LOCKED;
    random_order = seed != 0;
    random_state = seed;
    rarity = 2u << seed % 8;
}

// ---- Devices and contexts ----

EXPORTED u32 cuInit(u32) {
    LOCKED;
    MAY_FAIL;
    catch_faults();
    return SUCCESS;
}
EXPORTED u32 cuDriverGetVersion(int* version) {
    LOCKED;
    MAY_FAIL;
    return *version = 12040, SUCCESS;
}
EXPORTED u32 cuDeviceGetCount(int* count) {
    LOCKED;
    MAY_FAIL;
    return *count = DEVICES, SUCCESS;
}
EXPORTED u32 cuDeviceGet(int* device, int ordinal) {
    LOCKED;
    MAY_FAIL;
    if (ordinal < 0 || ordinal >= DEVICES) return INVALID_DEVICE;
    return *device = ordinal, SUCCESS;
}
EXPORTED u32 cuDeviceGetName(char* name, int length, int) {
    LOCKED;
    MAY_FAIL;
    return snprintf(name, (size_t)length, "stand-in"), SUCCESS;
}
EXPORTED u32 cuDeviceGetAttribute(int* value, int attribute, int device) {
    LOCKED;
    MAY_FAIL;
    switch (attribute) {
    case 16: *value = MULTIPROCESSORS; return SUCCESS;
    case 75: *value = 8; return SUCCESS; // compute capability
    case 76: *value = 0; return SUCCESS;
    case 115: *value = device == 0; return SUCCESS; // memory pools
    }
    return INVALID_VALUE;
}
EXPORTED u32 cuGetErrorName(u32, const char** name) {
    LOCKED;
    MAY_FAIL;
    return *name = "CUDA_ERROR", SUCCESS;
}
EXPORTED u32 cuGetErrorString(u32, const char** text) {
    LOCKED;
    MAY_FAIL;
    return *text = "refused by the stand-in of the driver", SUCCESS;
}
EXPORTED u32 cuDevicePrimaryCtxRetain(Context** context, int device) {
    LOCKED;
    MAY_FAIL;
    primary[device].device = device;
    return *context = &primary[device], SUCCESS;
}
EXPORTED u32 cuDevicePrimaryCtxRelease_v2(int) {
    LOCKED;
    DONE;
}
EXPORTED u32 cuCtxCreate_v2(Context** context, u32, int device) {
    LOCKED;
    current.push_back(*context = new Context{device, nullptr});
    return SUCCESS;
}
EXPORTED u32 cuCtxDestroy_v2(Context* context) {
    LOCKED;
    if (context_now() == context) current.pop_back();
    delete context;
    return SUCCESS;
}
EXPORTED u32 cuCtxPushCurrent_v2(Context* context) {
    LOCKED;
    MAY_FAIL;
    return current.push_back(context), SUCCESS;
}
EXPORTED u32 cuCtxPopCurrent_v2(Context** context) {
    LOCKED;
    if (current.empty()) return INVALID_CONTEXT;
    *context = current.back();
    current.pop_back();
    DONE;
}
EXPORTED u32 cuCtxSynchronize() {
    LOCKED;
    MAY_FAIL;
    for (auto& stream : streams) {
        if (stream->context == context_now()) wait_for_all(*stream);
    }
    return SUCCESS;
}
EXPORTED u32 cuCtxGetCurrent(Context** context) { return *context = context_now(), SUCCESS; }

// ---- Streams and events ----

EXPORTED u32 cuStreamCreate(Stream** stream, u32) {
    LOCKED;
    MAY_BE_REFUSED;
    if (!context_now()) return INVALID_CONTEXT;
    return *stream = new_stream(context_now()), SUCCESS;
}
EXPORTED u32 cuStreamCreateWithPriority(Stream** stream, u32, int) {
    LOCKED;
    MAY_BE_REFUSED;
    if (!context_now()) return INVALID_CONTEXT;
    return *stream = new_stream(context_now()), SUCCESS;
}
EXPORTED u32 cuStreamDestroy_v2(Stream* stream) {
    LOCKED;
    if (!stream || !stream_of(stream)) return INVALID_HANDLE;
    stream->destroyed = true;
    remove_destroyed_streams();
    DONE;
}
EXPORTED u32 cuStreamQuery(Stream* handle) {
    LOCKED;
    MAY_FAIL;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (is_forbidden() || stream->capture) return CAPTURE_UNSUPPORTED;
    return stream->queue.empty() ? SUCCESS : NOT_READY;
}
EXPORTED u32 cuStreamSynchronize(Stream* handle) {
    LOCKED;
    MAY_FAIL;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) return CAPTURE_UNSUPPORTED;
    return wait_for_all(*stream), make_progress(), SUCCESS;
}
EXPORTED u32 cuStreamIsCapturing(Stream* handle, u32* status) {
    LOCKED;
    MAY_FAIL;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    return *status = stream->capture != nullptr, SUCCESS;
}
EXPORTED u32 cuStreamGetCaptureInfo_v2(Stream* handle, u32* status, u64* id, Capture** graph, void*, void*) {
    LOCKED;
    MAY_FAIL;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    *status = stream->capture != nullptr;
    if (stream->capture) *id = stream->capture->id, *graph = stream->capture;
    return SUCCESS;
}
EXPORTED u32 cuThreadExchangeStreamCaptureMode(u32* mode) {
    LOCKED;
    if (*mode == 2) MAY_FAIL;
    u32 before = (u32)capture_mode;
    capture_mode = (int)*mode;
    *mode = before;
    // Calls that restore the previous mode succeed even if refused.
    if (capture_mode != 2) DONE;
    return SUCCESS;
}
EXPORTED u32 cuEventCreate(Event** event, u32 flags) {
    LOCKED;
    MAY_BE_REFUSED;
    if (!context_now()) return INVALID_CONTEXT;
    return *event = new Event{context_now(), (flags & 2) == 0, nullptr, 0}, SUCCESS;
}
EXPORTED u32 cuEventDestroy_v2(Event* event) {
    LOCKED;
    delete event;
    DONE;
}
EXPORTED u32 cuEventRecord(Event* event, Stream* handle) {
    LOCKED;
    MAY_BE_REFUSED;
    Stream* stream = stream_of(handle);
    if (!stream || event->context != stream->context) return INVALID_HANDLE;
    auto mark = std::make_shared<Mark>(Mark{stream, stream->capture, false, 0});
    // A graph keeps the order of capture, so the event needs no operation.
    Result result = stream->capture ? SUCCESS : queue(handle, {"an event", nullptr, nullptr, mark, false});
    if (result == SUCCESS) event->last = mark, event->queries = 0;
    return result;
}
EXPORTED u32 cuStreamWaitEvent(Stream* handle, Event* event, u32) {
    LOCKED;
    MAY_BE_REFUSED;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (!event->last) return SUCCESS;
    Capture* capture = event->last->capture;
    if (capture) {
        if (!captures.count(capture) || (stream->capture && stream->capture != capture)) return CAPTURE_ISOLATION;
        return stream->capture = capture, SUCCESS;
    }
    if (stream->capture) return CAPTURE_ISOLATION;
    return queue(handle, {"a wait", nullptr, event->last, nullptr, false});
}
EXPORTED u32 cuEventQuery(Event* event) {
    LOCKED;
    MAY_FAIL;
    if (is_forbidden()) return CAPTURE_UNSUPPORTED;
    if (!event->last) return SUCCESS;
    if (event->last->capture) return CAPTURE_UNSUPPORTED;
    // A device makes progress without a call that waits, so a host that polls an event comes to an end in every order.
    if (!event->last->passed && ++event->queries >= QUERIES_MAX) run_before(*event->last, false);
    return event->last->passed ? SUCCESS : NOT_READY;
}
EXPORTED u32 cuEventSynchronize(Event* event) {
    LOCKED;
    MAY_BE_REFUSED;
    if (!event->last) return SUCCESS;
    if (event->last->capture) return CAPTURE_UNSUPPORTED;
    return reach(*event->last), make_progress(), SUCCESS;
}
EXPORTED u32 cuEventElapsedTime(float* milliseconds, Event* start, Event* end) {
    LOCKED;
    MAY_FAIL;
    if (!start->timed || !end->timed || !start->last || !end->last) return INVALID_HANDLE;
    if (!start->last->passed || !end->last->passed) return NOT_READY;
    return *milliseconds = (float)(end->last->milliseconds - start->last->milliseconds), SUCCESS;
}

// ---- Graphs ----

EXPORTED u32 cuStreamBeginCapture_v2(Stream* handle, int mode) {
    LOCKED;
    Stream* stream = stream_of(handle);
    if (!stream || stream->capture) return INVALID_HANDLE;
    static u64 captured;
    captures.insert(stream->capture = new Capture{mode, {}, ++captured, {}});
    return SUCCESS;
}
EXPORTED u32 cuStreamEndCapture(Stream* handle, Capture** graph) {
    LOCKED;
    Stream* stream = stream_of(handle);
    if (!stream || !stream->capture) return INVALID_HANDLE;
    *graph = stream->capture;
    captures.erase(*graph);
    for (auto& other : streams) {
        if (other->capture == *graph) other->capture = nullptr;
    }
    return SUCCESS;
}
// One reference per object is enough: it moves to the graph. The graph shares it with its instances.
EXPORTED u32 cuUserObjectCreate(std::shared_ptr<void>** object, void* value, void (*destroy)(void*), u32 references,
                                u32) {
    LOCKED;
    MAY_BE_REFUSED;
    if (references != 1) return INVALID_VALUE;
    return *object = new std::shared_ptr<void>(value, destroy), SUCCESS;
}
EXPORTED u32 cuUserObjectRelease(std::shared_ptr<void>* object, u32) {
    LOCKED;
    delete object;
    DONE;
}
EXPORTED u32 cuGraphRetainUserObject(Capture* graph, std::shared_ptr<void>* object, u32, u32) {
    LOCKED;
    MAY_BE_REFUSED;
    if (!captures.count(graph)) return INVALID_HANDLE;
    graph->objects.push_back(*object);
    return delete object, SUCCESS;
}
EXPORTED u32 cuGraphInstantiateWithFlags(Capture** ready, Capture* graph, unsigned long long) {
    return *ready = new Capture(*graph), SUCCESS;
}
EXPORTED u32 cuGraphDestroy(Capture* graph) { return delete graph, SUCCESS; }
EXPORTED u32 cuGraphExecDestroy(Capture* ready) { return delete ready, SUCCESS; }
EXPORTED u32 cuGraphLaunch(Capture* ready, Stream* handle) {
    LOCKED;
    for (const Operation& operation : ready->operations) {
        if (Result result = queue(handle, operation)) return result;
    }
    return SUCCESS;
}

// ---- Memory ----

EXPORTED u32 cuMemPoolCreate(void** pool, const void*) {
    LOCKED;
    MAY_FAIL;
    return *pool = &allocations, SUCCESS;
}
EXPORTED u32 cuMemPoolDestroy(void*) {
    LOCKED;
    DONE;
}
EXPORTED u32 cuMemPoolSetAttribute(void*, int, void*) {
    LOCKED;
    MAY_FAIL;
    return SUCCESS;
}
EXPORTED u32 cuMemAlloc_v2(u64* address, size_t bytes) {
    LOCKED;
    MAY_FAIL;
    if (is_forbidden()) return CAPTURE_UNSUPPORTED;
    if (!context_now()) return INVALID_CONTEXT;
    return (*address = allocate(bytes)) ? SUCCESS : OUT_OF_MEMORY;
}
EXPORTED u32 cuMemFree_v2(u64 address) {
    LOCKED;
    if (!allocations.count(address)) return INVALID_VALUE;
    for (auto& stream : streams) wait_for_all(*stream);
    requested -= allocations[address].bytes;
    release(address);
    DONE;
}
EXPORTED u32 cuMemAllocFromPoolAsync(u64* address, size_t bytes, void*, Stream* handle) {
    LOCKED;
    MAY_BE_REFUSED;
    if (!stream_of(handle)) return INVALID_HANDLE;
    if (!(*address = allocate(bytes))) return OUT_OF_MEMORY;
    // Inaccessible until the allocation has run on its stream.
    Allocation memory = allocations[*address];
    mprotect(memory.pages, memory.page_bytes - PAGE, PROT_NONE);
    return queue(handle, {"an allocation",
                          [memory] { mprotect(memory.pages, memory.page_bytes - PAGE, PROT_READ | PROT_WRITE); },
                          nullptr, nullptr, false});
}
EXPORTED u32 cuMemFreeAsync(u64 address, Stream* handle) {
    LOCKED;
    MAY_BE_REFUSED;
    auto allocation = allocations.find(address);
    if (allocation == allocations.end() || allocation->second.is_freed) return INVALID_VALUE;
    allocation->second.is_freed = true;
    requested -= allocation->second.bytes;
    return queue(handle, {"a free", [address] { release(address); }, nullptr, nullptr, false});
}
EXPORTED u32 cuMemHostAlloc(void** start, size_t bytes, u32) {
    LOCKED;
    MAY_FAIL;
    if (is_forbidden()) return CAPTURE_UNSUPPORTED;
    if (!context_now()) return INVALID_CONTEXT;
    *start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*start == MAP_FAILED) return OUT_OF_MEMORY;
    pinned[(u64)*start] = bytes;
    return SUCCESS;
}
EXPORTED u32 cuMemFreeHost(void* start) {
    LOCKED;
    auto allocation = pinned.find((u64)start);
    if (allocation == pinned.end()) return INVALID_VALUE;
    forbid(start, allocation->second);
    pinned.erase(allocation);
    DONE;
}
EXPORTED u32 cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, Stream* handle) {
    LOCKED;
    MAY_BE_REFUSED;
    if (!is_device_memory(to, bytes)) return INVALID_VALUE;
    if (is_pinned(from, bytes)) {
        auto content = std::make_shared<u64>();
        auto run = [=] {
            if (hash(from, bytes) != *content) fail("pinned memory was modified before its copy to the device had run");
            memcpy((void*)to, from, bytes);
        };
        return queue(handle,
                     {"a copy to the device", run, nullptr, nullptr, false, [=] { *content = hash(from, bytes); }});
    }
    // Pageable memory is copied by the driver before the call returns.
    auto copy = std::make_shared<std::vector<u8>>((const u8*)from, (const u8*)from + bytes);
    return queue(handle,
                 {"a copy to the device", [=] { memcpy((void*)to, copy->data(), bytes); }, nullptr, nullptr, false});
}
EXPORTED u32 cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, Stream* handle) {
    LOCKED;
    MAY_BE_REFUSED;
    if (!is_device_memory(from, bytes)) return INVALID_VALUE;
    if (is_pinned(to, bytes)) {
        // Until the copy has run, the memory must not be read or written.
        auto run = [=] {
            if (std::any_of((u8*)to, (u8*)to + bytes, [](u8 byte) { return byte != PENDING_BYTE; }))
                fail("pinned memory was written before a copy to it had run");
            memcpy(to, (const void*)from, bytes);
        };
        return queue(handle,
                     {"a copy to the host", run, nullptr, nullptr, false, [=] { memset(to, PENDING_BYTE, bytes); }});
    }
    Result result =
        queue(handle, {"a copy to the host", [=] { memcpy(to, (const void*)from, bytes); }, nullptr, nullptr, false});
    // A copy to pageable memory returns after it has completed.
    if (result == SUCCESS) wait_for_all(*stream_of(handle));
    return result;
}
EXPORTED u32 cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, Stream* handle) {
    LOCKED;
    MAY_BE_REFUSED;
    if (!is_device_memory(to, bytes) || !is_device_memory(from, bytes) || (to < from + bytes && from < to + bytes))
        return INVALID_VALUE;
    return queue(handle, {"a copy within the device", [=] { memcpy((void*)to, (const void*)from, bytes); }, nullptr,
                          nullptr, false});
}
// `CUDA_MEMCPY2D` of the driver, for copies within the device.
struct CopyOfRows {
    size_t from_x, from_y;
    u32 from_type;
    const void* from_host;
    u64 from;
    void* from_array;
    size_t from_pitch, to_x, to_y;
    u32 to_type;
    void* to_host;
    u64 to;
    void* to_array;
    size_t to_pitch, bytes, count;
};
EXPORTED u32 cuMemcpy2DAsync_v2(const CopyOfRows* rows, Stream* handle) {
    LOCKED;
    MAY_BE_REFUSED;
    const u32 DEVICE_MEMORY = 2;
    CopyOfRows copy = *rows;
    if (copy.from_type != DEVICE_MEMORY || copy.to_type != DEVICE_MEMORY || copy.from_x || copy.from_y || copy.to_x ||
        copy.to_y || copy.from_pitch < copy.bytes || copy.to_pitch < copy.bytes || !copy.count)
        return INVALID_VALUE;
    if (!is_device_memory(copy.from, (copy.count - 1) * copy.from_pitch + copy.bytes) ||
        !is_device_memory(copy.to, (copy.count - 1) * copy.to_pitch + copy.bytes))
        return INVALID_VALUE;
    auto run = [=] {
        for (size_t n = 0; n < copy.count; n++)
            memcpy((void*)(copy.to + n * copy.to_pitch), (const void*)(copy.from + n * copy.from_pitch), copy.bytes);
    };
    return queue(handle, {"a copy of rows within the device", run, nullptr, nullptr, false});
}
EXPORTED u32 cuMemsetD8Async(u64 to, u8 byte, size_t count, Stream* handle) {
    LOCKED;
    MAY_BE_REFUSED;
    if (!is_device_memory(to, count)) return INVALID_VALUE;
    return queue(handle, {"a fill", [=] { memset((void*)to, byte, count); }, nullptr, nullptr, false});
}
EXPORTED u32 cuMemsetD32Async(u64 to, u32 word, size_t count, Stream* handle) {
    LOCKED;
    MAY_BE_REFUSED;
    if (!is_device_memory(to, 4 * count) || to % 4) return INVALID_VALUE;
    return queue(handle, {"a fill", [=] { std::fill_n((u32*)to, count, word); }, nullptr, nullptr, false});
}

// ---- Kernels ----

EXPORTED u32 cuModuleLoadDataEx(Module** module, const void* image, u32, int*, void**) {
    LOCKED;
    MAY_FAIL;
    if (is_forbidden()) return CAPTURE_UNSUPPORTED;
    if (!context_now()) return INVALID_CONTEXT;
    return *module = new Module{(const char*)image, {}}, SUCCESS;
}
EXPORTED u32 cuModuleUnload(Module* module) {
    LOCKED;
    delete module;
    DONE;
}
EXPORTED u32 cuModuleGetFunction(Function** function, Module* module, const char* name) {
    LOCKED;
    MAY_FAIL;
    auto kernel = std::find_if(std::begin(KERNELS), std::end(KERNELS),
                               [&](const KernelEntry& kernel) { return !strcmp(kernel.name, name); });
    if (kernel == std::end(KERNELS) || module->text.find(std::string(".entry ") + name + "(") == std::string::npos)
        return NOT_FOUND;
    module->functions.emplace_back(new Function{name, kernel->entry, kernel->parameter_bytes, 48 << 10});
    return *function = module->functions.back().get(), SUCCESS;
}
EXPORTED u32 cuFuncSetAttribute(Function* function, int attribute, int value) {
    LOCKED;
    MAY_FAIL;
    if (attribute != 8 || value < 0 || value > 227 << 10) return INVALID_VALUE;
    return function->shared = std::max(function->shared, (u32)value), SUCCESS;
}
EXPORTED u32 cuFuncGetAttribute(int* value, int, Function*) {
    LOCKED;
    MAY_FAIL;
    return *value = 64, SUCCESS;
}
EXPORTED u32 cuLaunchKernel(Function* function, u32 x, u32 y, u32 z, u32 threads, u32 threads_y, u32 threads_z,
                            u32 shared, Stream* handle, void** parameters, void**) {
    LOCKED;
    MAY_BE_REFUSED;
    if (x == 0 || y != 1 || z != 1 || threads == 0 || threads > 1024 || threads_y != 1 || threads_z != 1 ||
        shared > function->shared)
        return INVALID_VALUE;
    if (!function->entry) return queue(handle, {"a kernel that spins", nullptr, nullptr, nullptr, true});
    auto copy = std::make_shared<std::vector<u8>>((const u8*)parameters[0],
                                                  (const u8*)parameters[0] + function->parameter_bytes);
    auto* entry = function->entry;
    auto* kernel = std::find_if(std::begin(KERNELS), std::end(KERNELS),
                                [&](const KernelEntry& kernel) { return kernel.entry == entry; });
    auto run = [=] { emulator::launch({x, threads, shared, draw()}, entry, copy->data()); };
    return queue(handle, {kernel->name, run, nullptr, nullptr, false});
}

// ---- nvCOMP ----

// Sets the function that expands a frame. It returns the number of bytes, or a negative number if the frame is invalid.
EXPORTED void stand_in_expands_with(Expander function) { expander = function; }

struct Options {
    int backend;
    char reserved[60];
};
EXPORTED int nvcompBatchedZstdDecompressGetTempSize(size_t count, size_t, Options, size_t* bytes, size_t, void*) {
    LOCKED;
    if (is_refused(__func__, false)) return 11;
    return *bytes = 64 * count, 0;
}
EXPORTED int nvcompBatchedZstdDecompressAsync(const void* const* frames, const size_t* frame_bytes,
                                              const size_t* content_capacities, size_t* content_bytes, size_t count,
                                              void* temporary, size_t temporary_bytes, void* const* contents, Options,
                                              int* outcomes, Stream* stream) {
    LOCKED;
    if (is_refused(__func__, true)) return 11;
    if (temporary_bytes < 64 * count || !expander) return 10;
    auto run = [=] {
        memset(temporary, 0xEE, temporary_bytes);
        for (size_t i = 0; i < count; i++) {
            i64 size = expander((const u8*)frames[i], frame_bytes[i], (u8*)contents[i], content_capacities[i]);
            outcomes[i] = size < 0 ? 12 : 0;
            content_bytes[i] = size < 0 ? 0 : (size_t)size;
        }
    };
    return queue(stream, {"nvCOMP", run, nullptr, nullptr, false}) == SUCCESS ? 0 : 11;
}
