// Runs the kernels on cases, and compares status words and memory. README.md describes the case files.
#include "block.h"
#include <algorithm>
#include <array>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>
#include "common/format.cuh"
#include "digest/digests.cuh"
#include "digest/hash.cuh"

extern "C" void tpde_raw(Launch);
extern "C" void tpde_conditioned(Launch);
extern "C" void tpde_without_base(Launch);
extern "C" void tpde_raw_strided(Launch);
extern "C" void tpde_conditioned_strided(Launch);
extern "C" void tpde_without_base_strided(Launch);
extern "C" void tpde_raw_derived(Launch);
extern "C" void tpde_conditioned_derived(Launch);
extern "C" void tpde_digests(Digests);
extern "C" void tpde_hash(Hashes);
extern "C" const char* __asan_default_options() {
    return "detect_leaks=0:detect_stack_use_after_return=0:print_legend=0";
}
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1"; }
extern "C" const char* __tsan_default_options() {
    return "report_thread_leaks=0:exitcode=66:halt_on_error=1:report_signal_unsafe=0:history_size=4";
}
extern "C" void __sanitizer_set_death_callback(void (*)()) __attribute__((weak));
extern "C" void* __asan_get_report_address() __attribute__((weak));
extern "C" void __asan_poison_memory_region(const volatile void*, size_t) __attribute__((weak));
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t) __attribute__((weak));

namespace {

typedef std::vector<u8> Bytes;

// ---- Cases ----

struct ChunkCase {
    DeviceTensor tensor;
    ChunkMetadata record;
    ChunkSums sums;
    u32 statuses; // bit mask of the correct status words
    Bytes payload, digest, base, target;
    TensorForm form;      // without addresses; `columns` is 0 unless the base is derived
    Bytes source, scales; // the whole base tensor and the whole tensor of scales of a derived base

    bool is_derived() const { return form.columns != 0; }
    u32 width() const { return 1u << tensor.lane_log2; }
    u32 lanes() const { return (u32)std::min(tensor.lanes - record.output_offset, (u64)1 << tensor.chunk_lanes_log2); }
};

// A range of memory to be hashed. `row` is 0 without gaps.
struct RangeCase {
    Bytes bytes, hash;
    u32 row, gap, shift;
};

struct Case {
    std::string name;
    u32 flags;
    std::vector<u32> tables;
    std::vector<ChunkCase> chunks;
    std::vector<RangeCase> ranges;
};

struct Reader {
    const u8 *at, *end;

    void take(void* to, size_t size) {
        if ((size_t)(end - at) < size) {
            fprintf(stderr, "a case file is truncated\n");
            exit(2);
        }
        if (size) memcpy(to, at, size);
        at += size;
    }
    template <class T> T number() {
        T value;
        take(&value, sizeof value);
        return value;
    }
    template <class T> std::vector<T> list() {
        std::vector<T> values(number<u32>());
        take(values.data(), values.size() * sizeof(T));
        return values;
    }
};

std::vector<Case> read_cases(const char* path) {
    FILE* file = fopen(path, "rb");
    if (!file) {
        perror(path);
        exit(2);
    }
    Bytes bytes;
    u8 part[1 << 16];
    for (size_t n; (n = fread(part, 1, sizeof part, file)) > 0;) bytes.insert(bytes.end(), part, part + n);
    fclose(file);
    Reader reader = {bytes.data(), bytes.data() + bytes.size()};
    std::vector<Case> cases;
    while (reader.at != reader.end) {
        Case one;
        std::vector<u8> name = reader.list<u8>();
        one.name.assign(name.begin(), name.end());
        one.flags = reader.number<u32>();
        one.tables = reader.list<u32>();
        one.chunks.resize(reader.number<u32>());
        for (ChunkCase& chunk : one.chunks) {
            chunk.tensor = reader.number<DeviceTensor>();
            chunk.record = reader.number<ChunkMetadata>();
            chunk.sums = reader.number<ChunkSums>();
            chunk.statuses = reader.number<u32>();
            chunk.payload = reader.list<u8>();
            chunk.digest = reader.list<u8>();
            chunk.base = reader.list<u8>();
            chunk.target = reader.list<u8>();
            chunk.form = reader.number<TensorForm>();
            chunk.source = reader.list<u8>();
            chunk.scales = reader.list<u8>();
        }
        one.ranges.resize(reader.number<u32>());
        for (RangeCase& range : one.ranges) {
            range.bytes = reader.list<u8>();
            range.hash = reader.list<u8>();
            range.row = reader.number<u32>();
            range.gap = reader.number<u32>();
            range.shift = reader.number<u32>();
        }
        cases.push_back(std::move(one));
    }
    return cases;
}

// ---- Messages ----

const char* status_name(u32 status) {
    const char* names[] = {"ok",
                           "payload.crc32",
                           "payload.padding",
                           "payload.size",
                           "payload.header",
                           "payload.classes",
                           "chunk.base_sum",
                           "payload.stream",
                           "payload.positions",
                           "payload.deltas",
                           "chunk.target_sum"};
    return status < sizeof names / sizeof *names ? names[status]
           : status == TPDE_STATUS_NOT_RUN       ? "not run"
                                                 : "no status";
}

std::string status_names(u32 mask) {
    std::string names;
    for (u32 status = 0; status < 32; status++) {
        if (mask >> status & 1)
            names += (names.empty() ? "" : " or ") + std::to_string(status) + " " + status_name(status);
    }
    return names;
}

enum Mode { OUT_OF_PLACE, LISTED, TWICE, CHECKED, MODES };
const char* const MODE_NAMES[] = {"out", "listed", "twice", "checked"};
const char* const MODE_TEXTS[] = {"out of place", "in place, scratch memory", "in place, no scratch memory",
                                  "in place, all checked"};

// Progress of a run, in memory that all processes share.
struct Progress {
    u32 next; // index of the next case
    u32 failures;
    u64 runs, chunks, refused;
    char current[500];
};
Progress* progress;
bool current_failed;

__attribute__((format(printf, 1, 2))) void wrong(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (!current_failed) fprintf(stderr, "WRONG  %s\n", progress->current);
    fprintf(stderr, "    ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    current_failed = true;
}

// ---- Memory of a launch ----

// Rows of a chunk in memory, in bytes. The first byte of the chunk is in column `first`.
struct Rows {
    u64 row = TPDE_ENDLESS_ROW, pitch = TPDE_ENDLESS_ROW, first = 0;

    bool has_gaps() const { return row != pitch; }
    u64 at(u64 byte) const { return byte + (first + byte) / row * (pitch - row); }
    // Calls `each` with the beginning and the end of each gap before byte `size`.
    template <class F> void each_gap(u64 size, F each) const {
        for (u64 byte = row - first; has_gaps() && byte < size; byte += row) each(at(byte) - (pitch - row), at(byte));
    }
};

// A buffer between canaries, which are also in the gaps between rows. For the address sanitizer the memory on both sides
// and in the gaps is poisoned. The data begins `shift` bytes past a multiple of 64.
class Buffer {
    u8* all;
    size_t shift, content_size, size_;
    Rows rows;
    Bytes before;

public:
    std::string name;
    u8* data;
    // All existing buffers, for messages.
    static std::vector<const Buffer*> buffers;

    Buffer(std::string name, const Bytes& bytes, size_t size, size_t shift, Rows rows = {})
        : shift(shift), content_size(size), size_(size ? rows.at(size - 1) + 1 : 0), rows(rows), name(std::move(name)) {
        if (posix_memalign((void**)&all, 64, shift + size_ + GUARD)) abort();
        data = all + shift;
        memset(all, 0xC5, shift);
        memset(data + size_, 0xC5, GUARD);
        memset(data, 0xA5, size_);
        if (rows.has_gaps()) {
            for (size_t i = 0; i < std::min(bytes.size(), size); i++) data[rows.at(i)] = bytes[i];
        } else if (!bytes.empty()) {
            memcpy(data, bytes.data(), std::min(bytes.size(), size));
        }
        rows.each_gap(size, [&](u64 begin, u64 end) { memset(data + begin, 0xC5, end - begin); });
        before.assign(data, data + size_);
        if (__asan_poison_memory_region) {
            // The sanitizer has a granularity of 8 bytes, so up to 7 bytes before the data stay accessible, and so does the
            // end of a gap.
            __asan_poison_memory_region(all, shift / 8 * 8);
            __asan_poison_memory_region(data + size_, GUARD);
            rows.each_gap(size, [&](u64 begin, u64 end) { __asan_poison_memory_region(data + begin, end - begin); });
        }
        buffers.push_back(this);
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() {
        buffers.erase(std::find(buffers.begin(), buffers.end(), this));
        free(all);
    }

    // Compares byte by byte: the gaps are poisoned for functions of the C library.
    bool is_untouched() const {
        for (size_t i = 0; i < before.size(); i++) {
            if (data[i] != before[i]) return false;
        }
        return true;
    }
    bool has_canaries() {
        if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(all, shift + size_ + GUARD);
        auto is_canary = [](u8 byte) { return byte == 0xC5; };
        bool whole = std::all_of(all, data, is_canary) && std::all_of(data + size_, data + size_ + GUARD, is_canary);
        rows.each_gap(content_size,
                      [&](u64 begin, u64 end) { whole = whole && std::all_of(data + begin, data + end, is_canary); });
        return whole;
    }
    // Returns the bytes without the gaps.
    Bytes content() const {
        Bytes bytes(content_size);
        for (size_t i = 0; i < content_size; i++) bytes[i] = data[rows.at(i)];
        return bytes;
    }

    // Prints the position of an address in or near the buffer. Returns false if the address is elsewhere.
    bool describe(const void* address) const {
        i64 at = (i64)((u64)address - (u64)data);
        if (at < -(i64)shift - 64 || at >= (i64)(size_ + GUARD + 64)) return false;
        fprintf(stderr, "    the address is byte %lld of %s, which has %zu\n", at, name.c_str(), size_);
        return true;
    }

    static constexpr size_t GUARD = 64;
};
std::vector<const Buffer*> Buffer::buffers;

void last_words() {
    fprintf(stderr, "BROKEN %s\n", progress->current);
    emulator::describe_thread();
    if (const void* address = __asan_get_report_address ? __asan_get_report_address() : nullptr) {
        i64 in_shared = (i64)((u64)address - (u64)emulator::dynamic_memory);
        if (in_shared >= 0 && in_shared < 228 << 10)
            fprintf(stderr, "    the address is byte %lld of the dynamic shared memory\n", in_shared);
        for (const Buffer* buffer : Buffer::buffers) {
            if (buffer->describe(address)) break;
        }
    }
}

void report_timeout(int) {
    fprintf(stderr, "timed out\n");
    last_words();
    _exit(3);
}

struct Options {
    std::vector<const char*> names;
    std::vector<u32> shifts = {0}, rows = {0};
    u32 modes = (1 << MODES) - 1;
    u64 seed = 1;
    bool here = false, list = false;
    u32 most = 20;
};

void compare_lanes(const char* what, const u8* actual, const Bytes& expected, u32 width) {
    auto lane = [&](const u8* at) {
        u64 value = 0;
        memcpy(&value, at, width);
        return (unsigned long long)value;
    };
    size_t first = expected.size(), count = 0;
    for (size_t i = 0; i + width <= expected.size(); i += width) {
        if (memcmp(actual + i, &expected[i], width) == 0) continue;
        if (!count++) first = i;
    }
    if (!count) return;
    wrong("%s: %zu of %zu lanes differ; lane %zu is %0*llx, expected %0*llx", what, count, expected.size() / width,
          first / width, (int)(2 * width), lane(actual + first), (int)(2 * width), lane(&expected[first]));
}

// Returns the size of the shared memory for the largest table set of the case, as the host computes it.
u32 bytes_of_tables(const Case& one) {
    u32 bytes = TPDE_CONDITIONED_TABLES(0, 0);
    for (const ChunkCase& chunk : one.chunks) {
        if (chunk.tensor.tables == TPDE_NO_TABLES) continue;
        const u32* set = &one.tables[chunk.tensor.tables];
        u32 classes = set[0], symbols = set[classes + 1] - (classes + 2);
        bytes = std::max<u32>(bytes, TPDE_CONDITIONED_TABLES(classes, symbols));
    }
    return bytes;
}

// Runs all kernels of a codec, for tensors with these bits in their codec. Each kernel skips the chunks of the others.
void run(u32 codec, u32 bits, const Launch& launch, u32 table_bytes, u64 seed) {
    typedef void (*Kernel)(const void*);
    auto kernel = [bits](Kernel plain, Kernel strided, Kernel derived) {
        return bits == TPDE_STRIDED_TENSOR ? strided : bits == TPDE_DERIVED_TENSOR ? derived : plain;
    };
    Kernel raw = kernel([](const void* launch) { tpde_raw(*(const Launch*)launch); },
                        [](const void* launch) { tpde_raw_strided(*(const Launch*)launch); },
                        [](const void* launch) { tpde_raw_derived(*(const Launch*)launch); });
    Kernel conditioned = kernel([](const void* launch) { tpde_conditioned(*(const Launch*)launch); },
                                [](const void* launch) { tpde_conditioned_strided(*(const Launch*)launch); },
                                [](const void* launch) { tpde_conditioned_derived(*(const Launch*)launch); });
    Kernel without_base =
        kernel([](const void* launch) { tpde_without_base(*(const Launch*)launch); },
               [](const void* launch) { tpde_without_base_strided(*(const Launch*)launch); }, nullptr);
    u32 blocks = launch.count + 1;
    if (codec != TPDE_CODEC_CONDITIONED) {
        emulator::launch({blocks, TPDE_RAW_THREADS, TPDE_RAW_SHARED, seed}, raw, &launch);
        return;
    }
    emulator::launch({blocks, TPDE_CONDITIONED_THREADS, TPDE_CONDITIONED_SHARED + table_bytes, seed}, conditioned,
                     &launch);
    if (without_base)
        emulator::launch({blocks, TPDE_WITHOUT_BASE_THREADS, TPDE_WITHOUT_BASE_SHARED + table_bytes, seed},
                         without_base, &launch);
}

u64 mix(u64 x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

// Chooses rows for a chunk of `size` bytes that begins at byte `offset` of its tensor.
Rows choose_rows(u64 random, u64 offset, u64 size, u32 width) {
    u64 lanes = 1 + random / 8 % 40, gap = 1 + random / 512 % 9, row, pitch;
    bool is_aligned = random / 4096 % 2;
    switch (random % 8) {
    case 0: row = width; break;         // one lane
    case 1: row = width * lanes; break; // of any length
    case 2: row = 16 * lanes; break;    // of whole pieces, with gaps of any length
    case 3: row = offset + size; break; // the chunk ends with its row
    case 4:
    case 5: row = 16 * lanes, is_aligned = true; break;                     // the fast path
    case 6: row = offset + (size + 31) / 32 * 16, is_aligned = true; break; // one end in the chunk
    default: return {};
    }
    pitch = row + (is_aligned ? 16 : width) * gap;
    return {row, pitch, offset % row};
}

template <class T> Bytes bytes_of(const std::vector<T>& values) {
    return values.empty() ? Bytes() : Bytes((const u8*)values.data(), (const u8*)(values.data() + values.size()));
}

// Distributes the leaves of payloads to warps, as plan/digests.rs does.
struct DigestPlan {
    std::vector<DigestPiece> pieces;
    std::vector<u32> warps;
    u32 nodes = 0;

    DigestPlan(const Case& one, u64 seed) {
        std::vector<DigestPiece> open;
        u32 used = 0;
        auto close = [&] {
            if (open.empty()) return;
            warps.push_back((u32)pieces.size());
            pieces.insert(pieces.end(), open.begin(), open.end());
            open.clear();
            used = 0;
        };
        for (u32 i = 0; i < one.chunks.size(); i++) {
            u32 leaves = (one.chunks[i].record.compressed_size + 1023) / 1024, count = (leaves + 31) / 32;
            for (u32 first = 0; first < leaves; first += 32) {
                u32 in_piece = std::min(leaves - first, 32u);
                if (used + in_piece > 32 || seed % 3 == 0) close();
                open.push_back({i, first, (u8)used, (u8)in_piece, 0, count > 1 ? nodes : 0xFFFFFFFF});
                used += in_piece;
            }
            if (count > 1) nodes += 1 + count;
        }
        close();
        warps.push_back((u32)pieces.size());
    }
};

// Hashes all payloads twice: with their digests, of which one may be wrong, and without. `records` has their addresses.
void run_digests(const Case& one, const Buffer& records, u64 seed) {
    u32 count = (u32)one.chunks.size();
    DigestPlan plan(one, seed);
    Bytes digests;
    for (const ChunkCase& chunk : one.chunks) {
        if (chunk.digest.size() != (chunk.record.compressed_size ? 16u : 0u))
            wrong("a digest of %zu bytes", chunk.digest.size());
        digests.insert(digests.end(), chunk.digest.begin(), chunk.digest.end());
        digests.resize(digests.size() + 16 - chunk.digest.size());
    }
    Buffer pieces("the pieces", bytes_of(plan.pieces), sizeof(DigestPiece) * plan.pieces.size(), 0);
    Buffer warps("the warps", bytes_of(plan.warps), 4 * plan.warps.size(), 0);
    Buffer nodes("the nodes", Bytes(32 * plan.nodes), 32 * plan.nodes, 0);
    Bytes changed = digests;
    u32 bad = (u32)(seed / 8 % (count + 1));
    if (bad < count) changed[16 * bad + seed / 64 % 16] ^= 1 << seed % 8;
    Buffer expected("the digests", changed, 16 * count, 0), found("the list", Bytes(16 * count), 16 * count, 0);
    Digests parameter = {};
    parameter.chunks = (u64)records.data;
    parameter.pieces = (u64)pieces.data;
    parameter.warps = (u64)warps.data;
    parameter.nodes = (u64)nodes.data;
    parameter.count = (u32)plan.warps.size() - 1;
    auto kernel = [](const void* digests) { tpde_digests(*(const Digests*)digests); };
    auto launch = [&](u32 first, u32 warps) {
        parameter.first = first;
        parameter.count = warps;
        emulator::launch({warps + 1, TPDE_DIGESTS_THREADS, 0, seed}, kernel, &parameter);
    };
    for (bool compares : {true, false}) {
        Buffer statuses("the status words", Bytes(4 * count, 0xFF), 4 * count, 0), flag("the flag", Bytes(4), 4, 0);
        parameter.expected = compares ? (u64)expected.data : 0;
        parameter.found = compares ? 0 : (u64)found.data;
        parameter.statuses = (u64)statuses.data;
        parameter.flag = seed % 5 ? (u64)flag.data : 0;
        u32 all = (u32)plan.warps.size() - 1, half = seed % 4 ? all : all / 2;
        launch(0, half);
        launch(half, all - half);
        for (u32 i = 0; i < count; i++) {
            bool exists = one.chunks[i].record.compressed_size > 0, is_bad = compares && i == bad;
            u32 status = ((const u32*)statuses.data)[i], right = !exists  ? TPDE_STATUS_NOT_RUN
                                                                 : is_bad ? (u32)TPDE_STATUS_PAYLOAD_DIGEST
                                                                          : (u32)TPDE_STATUS_OK;
            if (status != right) wrong("status %u of the digest of payload %u, expected %u", status, i, right);
        }
        bool fails = compares && bad < count && one.chunks[bad].record.compressed_size > 0;
        if (*(const u32*)flag.data != (fails && parameter.flag ? 1 : 0))
            wrong("the flag is %u after digests", *(const u32*)flag.data);
        if (!statuses.has_canaries() || !flag.has_canaries()) wrong("written outside of status words or flag");
    }
    if (memcmp(found.data, digests.data(), digests.size()) != 0) wrong("the list of digests differs");
    if (!pieces.is_untouched() || !warps.is_untouched() || !expected.is_untouched() || !records.is_untouched())
        wrong("an argument was written");
    if (!nodes.has_canaries() || !found.has_canaries()) wrong("written outside of nodes or list");
}

// Hashes all ranges twice: the second launch finds the nodes as the first one left them. Some ranges are in several parts.
void run_hashes(const Case& one, u64 seed) {
    constexpr u64 PIECE = 32 << 10;
    u32 count = (u32)one.ranges.size();
    std::vector<std::unique_ptr<Buffer>> memory;
    std::vector<HashRange> entries;
    Bytes hashes, digests;
    u32 nodes = 0;
    for (u32 i = 0; i < count; i++) {
        const RangeCase& range = one.ranges[i];
        if (range.hash.size() != 32) wrong("a hash of %zu bytes", range.hash.size());
        hashes.insert(hashes.end(), range.hash.begin(), range.hash.end());
        digests.insert(digests.end(), range.hash.begin(), range.hash.begin() + 16);
        Rows rows;
        if (range.row) rows = {range.row, (u64)range.row + range.gap, 0};
        std::string name = "range " + std::to_string(i);
        memory.emplace_back(new Buffer(name, range.bytes, range.bytes.size(), range.shift, rows));
        u32 pieces = std::max<u32>(1, (u32)((range.bytes.size() + PIECE - 1) / PIECE));
        HashRange entry = {(u64)memory[i]->data, range.bytes.size(), rows.row, rows.pitch, 0, 0, nodes, i};
        for (u32 level = pieces; level > 1; level = (level + 31) / 32) nodes += 33 * ((level + 31) / 32);
        for (u32 first = 0, next; first < pieces; first = next) {
            next = mix(seed + i + first) % 3 ? pieces : first + 1 + (u32)(mix(seed - first) % (pieces - first));
            entry.first_piece = first;
            entry.first_warp = next - first; // replaced by the sum of those before
            entries.push_back(entry);
        }
    }
    for (size_t i = entries.size(); i > 1; i--) std::swap(entries[i - 1], entries[mix(seed * 7 + i) % i]);
    u32 warps = 0;
    for (HashRange& entry : entries) {
        u32 own = entry.first_warp;
        entry.first_warp = warps;
        warps += own;
    }
    u32 bad = (u32)(seed / 8 % (count + 1));
    if (bad < count) digests[16 * bad + seed / 64 % 16] ^= 1 << seed % 8;
    Buffer ranges("the ranges", bytes_of(entries), sizeof(HashRange) * entries.size(), 0);
    Buffer expected("the digests", digests, digests.size(), 0);
    Buffer node_memory("the nodes", Bytes(32 * (size_t)nodes), 32 * (size_t)nodes, 0);
    for (u32 launch_number = 0; launch_number < 2; launch_number++) {
        Buffer found("the hashes", Bytes(hashes.size()), hashes.size(), 0), flag("the flag", Bytes(4), 4, 0);
        Buffer statuses("the status words", Bytes(4 * count, 0xFF), 4 * count, 0);
        bool compares = launch_number == 0 || seed % 2, stores = launch_number == 1 || seed % 3;
        Hashes parameter = {};
        parameter.ranges = (u64)ranges.data;
        parameter.nodes = (u64)node_memory.data;
        parameter.hashes = stores ? (u64)found.data : 0;
        parameter.expected = compares ? (u64)expected.data : 0;
        parameter.statuses = (u64)statuses.data;
        parameter.flag = seed % 5 ? (u64)flag.data : 0;
        parameter.count = (u32)entries.size();
        auto kernel = [](const void* hashes) { tpde_hash(*(const Hashes*)hashes); };
        // One launch, or two.
        u32 half = seed % 4 ? warps : warps / 2;
        for (u32 first : {0u, half}) {
            parameter.first = first;
            parameter.warps = first ? warps - half : half;
            emulator::launch({parameter.warps + 1, TPDE_HASH_THREADS, TPDE_HASH_SHARED, seed + launch_number}, kernel,
                             &parameter);
            if (half == warps) break;
        }
        for (u32 i = 0; i < count; i++) {
            size_t size = one.ranges[i].bytes.size();
            u32 status = ((const u32*)statuses.data)[i],
                right = !compares ? TPDE_STATUS_NOT_RUN : (u32)(i == bad ? TPDE_HASH_DIFFERS : TPDE_HASH_EQUAL);
            if (status != right) wrong("status %u of range %u of %zu bytes, expected %u", status, i, size, right);
            if (stores && memcmp(found.data + 32 * i, &hashes[32 * i], 32) != 0)
                wrong("the hash of range %u of %zu bytes differs", i, size);
        }
        if (*(const u32*)flag.data != (compares && bad < count && parameter.flag ? 1 : 0))
            wrong("the flag is %u after hashes", *(const u32*)flag.data);
        if (!stores && !found.is_untouched()) wrong("hashes were stored");
        if (!statuses.has_canaries() || !flag.has_canaries() || !found.has_canaries())
            wrong("written outside of hashes, status words or flag");
    }
    for (auto& range : memory) {
        if (!range->is_untouched() || !range->has_canaries()) wrong("%s was written", range->name.c_str());
    }
    if (!ranges.is_untouched() || !expected.is_untouched() || !node_memory.has_canaries())
        wrong("an argument was written");
}

// Runs all chunks of a case in one launch. Each chunk has its own buffers, so that an access to another chunk's data is
// detected.
// `rows`: not 0 for strided tensors.
void run_case(const Case& one, Mode mode, u32 shift, u32 rows, u64 seed) {
    u32 count = (u32)one.chunks.size();
    bool in_place = mode != OUT_OF_PLACE;
    std::vector<std::unique_ptr<Buffer>> payloads, bases, scales, outputs;
    std::vector<TensorForm> forms(count);
    std::vector<DeviceTensor> tensors(count);
    std::vector<TensorRows> tensor_rows(count);
    std::vector<Rows> base_rows(count), output_rows(count);
    std::vector<ChunkMetadata> records(count);
    std::vector<ChunkSums> sums(count);
    std::vector<u32> chunk_tensors(count), order(count), statuses(count, TPDE_STATUS_NOT_RUN);
    for (u32 i = 0; i < count; i++) {
        const ChunkCase& chunk = one.chunks[i];
        u32 width = chunk.width();
        size_t size = (size_t)chunk.lanes() * width;
        std::string suffix = " of chunk " + std::to_string(i);
        payloads.emplace_back(
            new Buffer("the payload" + suffix, chunk.payload, chunk.payload.size(), 16 * ((i + shift) % 8)));
        // Base and output are offset by whole lanes, by equal or different numbers of lanes.
        u32 output_shift = shift ? (i * 5 + shift) % 17 : 0,
            base_shift = shift % 2 ? (output_shift + 16 / width * (i % 3)) % 24
                         : shift   ? i % 17
                                   : 0;
        DeviceTensor& tensor = tensors[count - 1 - i] = chunk.tensor;
        records[i] = chunk.record;
        u64 random = mix(rows * 0x9E3779B97F4A7C15ull + seed * 64 + i), before = chunk.record.output_offset * width;
        if (rows) {
            // Some chunks are more than 2^32 bytes behind the beginning of their tensor.
            u64 lanes_before = random >> 60 < 4 && !chunk.is_derived() ? 1ull << 34 : 0;
            records[i].output_offset += lanes_before;
            tensor.lanes += lanes_before;
            tensor.base_lanes += tensor.base_lanes ? lanes_before : 0;
            before += lanes_before * width;
            output_rows[i] = choose_rows(random, before, size, width);
            base_rows[i] = in_place ? output_rows[i] : choose_rows(random >> 20, before, size, width);
            if (!chunk.is_derived() && (base_rows[i].has_gaps() || output_rows[i].has_gaps()))
                tensor.codec |= TPDE_STRIDED_TENSOR;
        }
        if (chunk.is_derived()) {
            // The whole base tensor, and the whole tensor of scales. Rows of scales of `fp8_blocks` are rows of blocks.
            tensor.codec |= TPDE_DERIVED_TENSOR;
            bool is_fp8 = chunk.form.form == TPDE_FORM_FP8_BLOCKS;
            u64 across = (chunk.form.columns + 127) / 128 * 4;
            u32 lane = chunk.form.base_dtype == TPDE_F32                           ? 4
                       : chunk.form.base_dtype < 16 || chunk.form.base_dtype >= 32 ? 1
                                                                                   : 2;
            Rows rows_of_scales;
            base_rows[i] = rows ? choose_rows(random >> 20, 0, chunk.source.size(), lane) : Rows();
            if (rows && is_fp8 && random >> 40 & 1) rows_of_scales = {across, across + 4 * (random >> 41 & 7), 0};
            if (rows && !is_fp8 && !chunk.scales.empty())
                rows_of_scales = choose_rows(random >> 30, 0, chunk.scales.size(), 1);
            bases.emplace_back(new Buffer("the base tensor" + suffix, chunk.source, chunk.source.size(),
                                          base_shift * lane, base_rows[i]));
            scales.emplace_back(new Buffer("the scales" + suffix, chunk.scales, chunk.scales.size(),
                                           is_fp8 ? 4 * base_shift : base_shift, rows_of_scales));
            outputs.emplace_back(new Buffer("the output" + suffix, {}, size, output_shift * width, output_rows[i]));
            forms[count - 1 - i] = chunk.form;
            forms[count - 1 - i].scales = (u64)scales.back()->data;
            forms[count - 1 - i].scales_row = rows_of_scales.row;
            forms[count - 1 - i].scales_pitch = rows_of_scales.pitch;
        } else if (in_place) {
            outputs.emplace_back(
                new Buffer("the lanes" + suffix, chunk.base, size, output_shift * width, output_rows[i]));
        } else {
            bases.emplace_back(
                new Buffer("the base" + suffix, chunk.base, chunk.base.size(), base_shift * width, base_rows[i]));
            outputs.emplace_back(new Buffer("the output" + suffix, {}, size, output_shift * width, output_rows[i]));
        }
        // Only the chunk has memory. The address of the tensor plus the offset of the chunk is the address of the chunk.
        auto tensor_of = [before](const Buffer& buffer, const Rows& rows) {
            return (u64)buffer.data - before - before / rows.row * (rows.pitch - rows.row);
        };
        tensor.base =
            chunk.is_derived() ? (u64)bases[i]->data : tensor_of(*(in_place ? outputs[i] : bases[i]), base_rows[i]);
        tensor.output = tensor_of(*outputs[i], output_rows[i]);
        tensor_rows[count - 1 - i] = {base_rows[i].row, base_rows[i].pitch, output_rows[i].row, output_rows[i].pitch};
        records[i].blob_offset = (u64)payloads[i]->data;
        sums[i] = chunk.sums;
        chunk_tensors[i] = count - 1 - i;
        order[i] = (i + seed) % count;
    }
    // Uploaded arrays, of exact size. They must not be written.
    Buffer uploads[] = {{"the records", bytes_of(records), 32 * count, 0},
                        {"the sums", bytes_of(sums), 16 * count, 0},
                        {"the numbers of tensors", bytes_of(chunk_tensors), 4 * count, 0},
                        {"the tensors", bytes_of(tensors), 48 * count, 0},
                        {"the table sets", bytes_of(one.tables), 4 * one.tables.size(), 0},
                        {"the order", bytes_of(order), 4 * count, 0},
                        {"the rows", bytes_of(tensor_rows), sizeof(TensorRows) * count, 0},
                        {"the forms", bytes_of(forms), sizeof(TensorForm) * count, 0}};
    Buffer status_words("the status words", bytes_of(statuses), 4 * count, 0), flag("the flag", Bytes(4), 4, 0);
    // Scratch memory for the lists or targets of all chunks between two launches: no memory, enough for nearly all, or
    // enough for few.
    const bool is_checked = mode == CHECKED;
    // Often the memory has exactly the size of all of them, which detects an overrun.
    u32 most = 256, all_kept = 256;
    for (const ChunkCase& chunk : one.chunks) {
        u32 list = TPDE_LIST_BYTES(chunk.record.num_deltas, chunk.width()), target = chunk.lanes() * chunk.width();
        bool is_list = TPDE_SHORT_LIST * (u64)list <= target && chunk.base.size() >= target;
        u32 kept = ((is_list ? list : target) + 255) / 256 * 256;
        most = std::max(most, kept);
        all_kept += kept;
    }
    if (count) all_kept -= 256;
    const bool exact = (seed >> 6 ^ shift >> 4) & 1;
    const u32 slots = is_checked ? (seed % 4 ? (u32)count + 1 : 0) : 1 + seed % 3;
    const u32 slot_bytes = is_checked ? (exact      ? all_kept
                                         : seed % 3 ? 1 << 20
                                                    : 2048)
                           : exact    ? most
                           : seed % 5 ? 32768
                                      : 512;
    Bytes zeros(TPDE_SCRATCH_HEAD(slots));
    Buffer scratch("the scratch memory", zeros, zeros.size() + (is_checked ? 1 : slots) * slot_bytes, 0);

    if (mode == OUT_OF_PLACE && count > 0) run_digests(one, uploads[0], seed);
    if (mode == OUT_OF_PLACE && !one.ranges.empty()) {
        snprintf(progress->current, sizeof progress->current, "%s (--seed %llu)", one.name.c_str(),
                 (unsigned long long)seed);
        run_hashes(one, seed);
    }

    Launch launch = {};
    launch.chunks = (u64)uploads[0].data;
    launch.sums = (u64)uploads[1].data;
    launch.chunk_tensors = (u64)uploads[2].data;
    launch.tensors = (u64)uploads[3].data;
    launch.tables = (u64)uploads[4].data;
    launch.statuses = (u64)status_words.data;
    launch.flag = (u64)flag.data;
    launch.order = shift % 2 ? (u64)uploads[5].data : 0;
    launch.rows = rows || !scales.empty() ? (u64)uploads[6].data : 0;
    launch.forms = scales.empty() ? 0 : (u64)uploads[7].data;
    launch.count = count;
    launch.flags = one.flags;
    if (mode == LISTED || is_checked) {
        launch.scratch = (u64)scratch.data;
        launch.scratch_slots = slots;
        launch.scratch_slot_bytes = slot_bytes;
    }
    auto launch_all = [&](u32 launch_mode) {
        launch.mode = launch_mode;
        // At random also runs the kernels of a codec without chunks. They must do nothing.
        for (u32 kernels : {TPDE_CODEC_RAW | 0u, TPDE_CODEC_CONDITIONED | 0u, TPDE_CODEC_RAW | TPDE_STRIDED_TENSOR,
                            TPDE_CODEC_CONDITIONED | TPDE_STRIDED_TENSOR, TPDE_CODEC_RAW | TPDE_DERIVED_TENSOR,
                            TPDE_CODEC_CONDITIONED | TPDE_DERIVED_TENSOR}) {
            u32 codec = kernels & ~(TPDE_STRIDED_TENSOR | TPDE_DERIVED_TENSOR);
            bool any = std::any_of(tensors.begin(), tensors.end(),
                                   [&](const DeviceTensor& tensor) { return tensor.codec == kernels; });
            // Kernels for derived bases run out of place only.
            bool is_possible = kernels == codec + TPDE_DERIVED_TENSOR ? !in_place : true;
            if (!any && (seed % 16 != 0 || !is_possible)) continue;
            // One launch, or two.
            for (u32 first = 0, next; first < count; first = next) {
                next = seed % 8 == 1 && first == 0 && count > 1 ? count / 2 : count;
                launch.first = first;
                launch.count = next - first;
                run(codec, kernels - codec, launch, bytes_of_tables(one), seed + launch_mode);
            }
        }
    };
    auto status_of = [&](u32 i) { return ((const u32*)status_words.data)[i]; };
    auto is_valid = [&] {
        return std::all_of(one.chunks.begin(), one.chunks.end(), [](const ChunkCase& c) { return c.statuses & 1; });
    };
    auto at = [&](u32 i) {
        const ChunkCase& chunk = one.chunks[i];
        snprintf(progress->current, sizeof progress->current,
                 "%s, %s (--mode %s --shift %u --rows %u --seed %llu), chunk %u (codec %u, dtype %u, %u lanes of %u "
                 "bytes, %u of them in the base; rows of %lld bytes, pitch %lld, in the base %lld and %lld)",
                 one.name.c_str(), MODE_TEXTS[mode], MODE_NAMES[mode], shift, rows, (unsigned long long)seed, i,
                 chunk.tensor.codec, chunk.tensor.dtype, chunk.lanes(), chunk.width(),
                 (u32)(chunk.base.size() / chunk.width()), output_rows[i].row, output_rows[i].pitch, base_rows[i].row,
                 base_rows[i].pitch);
    };
    auto all = [&] {
        snprintf(progress->current, sizeof progress->current, "%s, %s (--mode %s --shift %u --rows %u --seed %llu)",
                 one.name.c_str(), MODE_TEXTS[mode], MODE_NAMES[mode], shift, rows, (unsigned long long)seed);
    };
    all();
    if (mode == OUT_OF_PLACE) launch_all(TPDE_MODE_OUT_OF_PLACE);
    if (mode == LISTED || mode == TWICE) launch_all(TPDE_MODE_IN_PLACE);
    if (mode == CHECKED) {
        launch_all(TPDE_MODE_DRY);
        for (u32 i = 0; i < count; i++) {
            at(i);
            if (!outputs[i]->is_untouched()) wrong("a dry launch has written to the tensor");
        }
        all();
        if (*(const u32*)flag.data != (is_valid() ? 0 : 1))
            wrong("the flag is %u after a dry launch", *(const u32*)flag.data);
        launch_all(TPDE_MODE_COMMIT);
    } else if (!flag.is_untouched()) {
        wrong("the flag was written");
    }

    for (const Buffer& upload : uploads) {
        if (!upload.is_untouched()) wrong("%s were written", upload.name.c_str());
    }
    if (!is_checked && !std::all_of(scratch.data, scratch.data + zeros.size(), [](u8 byte) { return byte == 0; }))
        wrong("slots of the scratch memory were not returned");
    if (!scratch.has_canaries()) wrong("written outside of the scratch memory");
    for (u32 i = 0; i < count; i++) {
        const ChunkCase& chunk = one.chunks[i];
        at(i);
        u32 status = status_of(i);
        bool expected = status < 32 && chunk.statuses >> status & 1;
        if (!expected)
            wrong("status %u %s, expected %s", status, status_name(status), status_names(chunk.statuses).c_str());
        bool stored = mode == CHECKED ? *(const u32*)flag.data == 0 : status == 0;
        if (stored && !chunk.target.empty())
            compare_lanes("target", outputs[i]->content().data(), chunk.target, chunk.width());
        if (!stored && in_place && !outputs[i]->is_untouched()) wrong("written although refused");
        if (!in_place && !bases[i]->is_untouched()) wrong("the base was written");
        if (!payloads[i]->is_untouched()) wrong("the payload was written");
        progress->refused += status != 0;
        if (!outputs[i]->has_canaries() || (!in_place && !bases[i]->has_canaries()))
            wrong("written outside of the chunk");
    }
    for (const auto& buffer : scales) {
        if (!buffer->is_untouched() || !buffer->has_canaries()) wrong("%s were written", buffer->name.c_str());
    }
    progress->runs++;
    progress->chunks += count;
}

bool is_chosen(const Case& one, const Options& options) {
    return options.names.empty() || std::any_of(options.names.begin(), options.names.end(), [&](const char* name) {
               return one.name.find(name) != std::string::npos;
           });
}

// Runs the remaining cases. Stops early after too many failures.
void run_cases(const std::vector<Case>& cases, const Options& options) {
    while (progress->next < cases.size() && progress->failures < options.most) {
        u32 number = progress->next++;
        const Case& one = cases[number];
        if (!is_chosen(one, options)) continue;
        for (u32 rows : options.rows) {
            for (u32 shift : options.shifts) {
                for (u32 mode = 0; mode < MODES; mode++) {
                    if (!(options.modes >> mode & 1)) continue;
                    // A derived base is applied out of place only.
                    bool is_derived = std::any_of(one.chunks.begin(), one.chunks.end(),
                                                  [](const ChunkCase& chunk) { return chunk.is_derived(); });
                    if (is_derived && mode != OUT_OF_PLACE) continue;
                    current_failed = false;
                    alarm(60);
                    u64 seed = options.seed + number * 64 + mode * 16 + shift;
                    run_case(one, (Mode)mode, shift, rows, options.here ? options.seed : seed);
                    progress->failures += current_failed;
                }
            }
        }
    }
    alarm(0);
}

// Forwards the messages of a process. The sanitizers do not find the source lines of all kernels. If a line ends in an
// address, addr2line translates it.
void forward_messages(FILE* from) {
    char self[4096] = {}, line[8192];
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) self[0] = 0;
    const char* name = strrchr(self, '/');
    std::string mark = std::string(name ? name + 1 : self) + "+0x";
    while (fgets(line, sizeof line, from)) {
        char* at = self[0] && strstr(line, "    #") ? strstr(line, mark.c_str()) : nullptr;
        if (!at) {
            fputs(line, stderr);
            continue;
        }
        unsigned long long address = strtoull(at + mark.size() - 2, nullptr, 16);
        while (at > line && *at != '(') at--;
        // A return address is behind the call.
        char command[8192];
        snprintf(command, sizeof command, "addr2line -sie '%s' 0x%llx 2>/dev/null", self,
                 strstr(line, "#0 ") ? address : address - 1);
        // Inlined functions give several lines, innermost first.
        std::string places;
        char place[1024];
        if (FILE* answer = popen(command, "r")) {
            while (fgets(place, sizeof place, answer)) {
                place[strcspn(place, " \n")] = 0;
                if (place[0] != '?') places += (places.empty() ? "" : " < ") + std::string(place);
            }
            pclose(answer);
        }
        if (!places.empty()) fprintf(stderr, "%.*s%s\n", (int)(at - line), line, places.c_str());
        else fputs(line, stderr);
    }
}

const char USAGE[] =
    "emulator [--mode out|listed|twice|checked]... [--shift N]... [--rows N]... [--seed N] [--list] [--here] [--most "
    "N] "
    "FILE... [-- NAME...]\n"
    "Runs the cases of the files, or those with a NAME in their names, in every mode, and compares statuses and "
    "lanes.\n"
    "  --shift   offset of tensors from an alignment of 64 bytes, in lanes (approximate); may be repeated\n"
    "  --rows    0: tensors without gaps; other numbers: tensors in rows with gaps, chosen by the number; may be "
    "repeated\n"
    "  --seed    of the schedule of warps and threads, and of the initial content of shared memory\n"
    "  --here    exactly this seed and no child process, for a debugger\n"
    "  --most    stop after this many failures (20)\n";

Options parse(int count, char** words, std::vector<const char*>& files) {
    Options options;
    auto usage = [] {
        fputs(USAGE, stderr);
        exit(2);
    };
    bool names = false, first_shift = true, first_rows = true, first_mode = true;
    for (int i = 1; i < count; i++) {
        std::string word = words[i];
        auto value = [&]() -> const char* {
            if (i + 1 == count) usage();
            return words[++i];
        };
        if (names) options.names.push_back(words[i]);
        else if (word == "--") names = true;
        else if (word == "--here") options.here = true;
        else if (word == "--list") options.list = true;
        else if (word == "--seed") options.seed = strtoull(value(), nullptr, 0);
        else if (word == "--most") options.most = (u32)atoi(value());
        else if (word == "--shift") {
            if (first_shift) options.shifts.clear();
            first_shift = false;
            options.shifts.push_back((u32)atoi(value()));
        } else if (word == "--rows") {
            if (first_rows) options.rows.clear();
            first_rows = false;
            options.rows.push_back((u32)atoi(value()));
        } else if (word == "--mode") {
            std::string mode = value();
            auto mode_name = std::find(MODE_NAMES, MODE_NAMES + MODES, mode);
            if (mode_name == MODE_NAMES + MODES) usage();
            if (first_mode) options.modes = 0;
            first_mode = false;
            options.modes |= 1u << (mode_name - MODE_NAMES);
        } else if (word[0] == '-') usage();
        else files.push_back(words[i]);
    }
    if (files.empty()) usage();
    return options;
}

} // namespace

int main(int count, char** words) {
    std::vector<const char*> files;
    Options options = parse(count, words, files);
    std::vector<Case> cases;
    for (const char* file : files) {
        for (Case& one : read_cases(file)) cases.push_back(std::move(one));
    }
    if (options.list) {
        for (const Case& one : cases) {
            if (is_chosen(one, options)) printf("%s (%zu chunks)\n", one.name.c_str(), one.chunks.size());
        }
        return 0;
    }
    progress = (Progress*)mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(last_words);
    signal(SIGALRM, report_timeout);
    signal(SIGABRT, [](int) {
        last_words();
        _exit(3);
    });
    if (options.here) {
        run_cases(cases, options);
    } else {
        // Each process runs cases until a case ends it. Then a new process continues.
        while (progress->next < cases.size() && progress->failures < options.most) {
            fflush(nullptr);
            int ends[2];
            if (pipe(ends) != 0) abort();
            pid_t child = fork();
            if (child == 0) {
                dup2(ends[1], STDERR_FILENO);
                close(ends[0]);
                close(ends[1]);
                run_cases(cases, options);
                fflush(nullptr);
                _exit(0);
            }
            close(ends[1]);
            FILE* messages = fdopen(ends[0], "r");
            forward_messages(messages);
            fclose(messages);
            int status = 0;
            waitpid(child, &status, 0);
            if (status != 0) progress->failures++;
        }
    }
    if (progress->failures == 0 && progress->runs == 0) {
        printf("no case matches the given names\n");
        return 2;
    }
    printf("%llu runs of %llu chunks, %llu of them refused; %u wrong%s\n", (unsigned long long)progress->runs,
           (unsigned long long)progress->chunks, (unsigned long long)progress->refused, progress->failures,
           progress->failures >= options.most ? ", the rest not run" : "");
    return progress->failures != 0;
}
