// A block of threads on a processor. Each thread is a fiber with its own stack. When a thread waits, another thread runs.
// A seed determines the random schedule of warps and threads of each block.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulator {

struct Index {
    unsigned x, y, z;
};

// A line in the source of a kernel.
struct SourceLocation {
    const char* file;
    int line;
};
#define EMULATOR_HERE emulator::SourceLocation location = {__builtin_FILE(), __builtin_LINE()}

// Operations of several threads of a warp together.
enum class WarpOperation : uint8_t {
    SYNC,
    BALLOT,
    SHUFFLE,
    MATCH_ANY,
    MATCH_ALL,
    ADD,
    MIN,
    MAX,
    MIN_SIGNED,
    MAX_SIGNED,
    AND,
    OR,
    XOR,
    ACTIVE,
    BARRIER,
    BARRIER_ARRIVE,
};

// Indexes of the running thread.
extern Index thread_index, block_index, block_size, grid_size;

// Waits until all threads of `mask` have reached the same operation, and returns its result. `argument` is the source
// lane of a shuffle, or the number of a barrier.
uint64_t run_warp_operation(WarpOperation operation, uint32_t mask, uint64_t value, uint64_t argument,
                            SourceLocation location);

// Arrives at a barrier of `threads` threads, a multiple of the warp size. 0 means all threads that have not ended.
// Returns the sum of the values.
uint32_t barrier(uint32_t id, uint32_t threads, bool wait, uint32_t value, SourceLocation location);

// Yields to other threads, at random or if `always`. Called in polling loops.
void pause(bool always = false);

// Starts an asynchronous copy, like `cp.async`.
void begin_copy(void* to, const void* from, uint32_t size, uint32_t zeros, SourceLocation location);
void commit_copies();
// Returns the next copy of all groups except the last `pending` groups.
struct Copy {
    void* to;
    const void* from;
    uint32_t size, zeros;
};
bool next_copy(uint32_t pending, Copy& copy);

// Dynamic shared memory. Shared addresses count from its start.
extern unsigned char dynamic_memory[];

// Prints a message about the thread and aborts.
[[noreturn]] void fail(SourceLocation location, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Runs a grid, one block after another.
struct Configuration {
    unsigned blocks, threads, shared;
    uint64_t seed;
};
void launch(const Configuration& configuration, void (*kernel)(const void*), const void* parameter);

// Prints the running block and thread, for error messages.
void describe_thread();

} // namespace emulator
