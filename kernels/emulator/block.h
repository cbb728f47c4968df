// A block of threads on a processor. Each thread is a fiber with a stack of its own; where it waits for others, another one goes
// on. The order in which warps and threads get their turns is drawn anew for each block, from a seed.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulator {

struct Index {
    unsigned x, y, z;
};

// Where in a kernel something is done.
struct Place {
    const char* file;
    int line;
};
#define EMULATOR_HERE emulator::Place place = {__builtin_FILE(), __builtin_LINE()}

// What the threads of a warp do together.
enum class Together : uint8_t {
    SYNC, BALLOT, SHUFFLE, MATCH_ANY, MATCH_ALL, ADD, MIN, MAX, MIN_SIGNED, MAX_SIGNED, AND, OR, XOR, ACTIVE,
    BARRIER, BARRIER_ARRIVE,
};

// Of the thread that runs.
extern Index thread_index, block_index, block_size, grid_size;

// Waits until all threads of `mask` have come to the same place; what comes back depends on what they do. `argument` is the lane
// that a thread reads in a shuffle, and the number of a barrier.
uint64_t together(Together what, uint32_t mask, uint64_t value, uint64_t argument, Place place);

// A barrier of `threads` threads, whole warps; 0: all that have not ended. Returns the sum of the values.
uint32_t barrier(uint32_t id, uint32_t threads, bool wait, uint32_t value, Place place);

// Lets others go on, at times. Threads that look for something again and again come by here.
void pause(bool always = false);

// Copies that run beside the thread, as `cp.async` makes them.
void begin_copy(void* to, const void* from, uint32_t size, uint32_t zeros, Place place);
void commit_copies();
// The copies of all groups but the last `pending`.
struct Copy {
    void* to;
    const void* from;
    uint32_t size, zeros;
};
bool next_copy(uint32_t pending, Copy& copy);

// Shared memory: dynamic memory first, addresses count from its begin.
extern unsigned char dynamic_memory[];

// Ends the run with a message about the thread.
[[noreturn]] void fail(Place place, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Runs a grid, block by block.
struct Configuration {
    unsigned blocks, threads, shared;
    uint64_t seed;
};
void launch(const Configuration& configuration, void (*kernel)(const void*), const void* parameter);

// Who runs, for a message about what went wrong.
void describe_thread();

} // namespace emulator
