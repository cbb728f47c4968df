// What nvCOMP makes of the differences that `tpde bench --device cuda` measures, and the limit of copying, for the same records.
//
//     nvcc -O3 -std=c++17 -arch=native -I$NVCOMP/include benches/nvcomp.cu -o nvcomp -ldl -Xlinker $NVCOMP/lib64/libnvcomp.so.6
//     nvcomp BASE.safetensors TARGET.safetensors TIMES [RUNS]
//
// $NVCOMP is the folder nvidia/libnvcomp of the PyPI wheel nvidia-libnvcomp-cu13. All tensors must be BF16. They are joined to one
// run of lanes, which is repeated TIMES times, each time with its own payloads, in chunks of 64 Ki lanes. A delta is the distance from base to
// target in units in the last place, zigzag. Layouts:
//
//     planes      the deltas of all lanes, low bytes and then high bytes, applied out of place
//     positions   of the changed lanes alone: positions in the chunk (u16), then deltas (u16); applied in place
//     gaps        the same with the lanes between two changes in place of positions, all by byte planes; applied in place
//
// A time is that of decompression and application, between events, the median of RUNS; everything is in device memory. Nothing is
// checked in that time, which favours the peer; afterwards every result is compared with the target bit for bit. Frames are those
// of libzstd at level 3, ANS payloads are made by nvCOMP. One JSON object goes to stdout.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <nvcomp/ans.h>
#include <nvcomp/version.h>
#include <nvcomp/zstd.h>
#include <string>
#include <thread>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef std::vector<u8> Bytes;

#define CHECK(call)                                                                                                  \
    do {                                                                                                             \
        int code = (int)(call);                                                                                      \
        if (code != 0) {                                                                                             \
            fprintf(stderr, "%s:%d: %s gave %d\n", __FILE__, __LINE__, #call, code);                                 \
            exit(1);                                                                                                 \
        }                                                                                                            \
    } while (0)

const u32 CHUNK = 65536, THREADS = 256;

// ---- Lanes ----

// Bit patterns of floats in the order of their values.
__host__ __device__ inline u32 ordered(u32 lane) { return lane & 0x8000 ? 0xFFFF - lane : lane + 0x8000; }
__host__ __device__ inline u32 unordered(u32 place) { return place & 0x8000 ? place - 0x8000 : 0xFFFF - place; }
__host__ __device__ inline u16 moved(u16 base, u32 delta) {
    u32 distance = delta >> 1 ^ (0u - (delta & 1));
    return (u16)unordered((ordered(base) + distance) & 0xFFFF);
}
inline u16 delta_of(u16 base, u16 target) {
    int16_t distance = (int16_t)(ordered(target) - ordered(base));
    return (u16)(distance << 1 ^ distance >> 15);
}

// ---- Kernels ----

__global__ void copy(const uint4* from, uint4* to, u64 count) {
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += step) to[i] = from[i];
}

__global__ void differences(const u16* a, const u16* b, u64 count, unsigned long long* found) {
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += step)
        if (a[i] != b[i]) atomicAdd(found, 1ull);
}

struct Place {
    const u8* content;
    u64 first; // lane
    u32 lanes, changes;
};

__global__ void apply_planes(const Place* places, const u16* base, u16* output) {
    Place place = places[blockIdx.x];
    for (u32 i = threadIdx.x; i < place.lanes; i += THREADS) {
        u32 delta = place.content[i] | place.content[place.lanes + i] << 8;
        output[place.first + i] = moved(base[place.first + i], delta);
    }
}

__global__ void apply_positions(const Place* places, u16* output) {
    Place place = places[blockIdx.x];
    const u16* positions = (const u16*)place.content;
    for (u32 i = threadIdx.x; i < place.changes; i += THREADS) {
        u64 at = place.first + positions[i];
        output[at] = moved(output[at], positions[place.changes + i]);
    }
}

__global__ void apply_gaps(const Place* places, u16* output) {
    __shared__ u32 warps[THREADS / 32];
    Place place = places[blockIdx.x];
    u32 n = place.changes, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 before = 0; // lanes behind the change before this tile
    for (u32 tile = 0; tile < n; tile += THREADS) {
        u32 i = tile + threadIdx.x;
        u32 sum = i < n ? (place.content[i] | place.content[n + i] << 8) + 1 : 0;
        for (u32 by = 1; by < 32; by *= 2) {
            u32 left = __shfl_up_sync(~0u, sum, by);
            if (lane >= by) sum += left;
        }
        if (lane == 31) warps[warp] = sum;
        __syncthreads();
        u32 all = 0;
        for (u32 w = 0; w < THREADS / 32; w++) {
            if (w == warp) sum += all;
            all += warps[w];
        }
        if (i < n) {
            u64 at = place.first + before + sum - 1;
            output[at] = moved(output[at], place.content[2 * n + i] | place.content[3 * n + i] << 8);
        }
        before += all;
        __syncthreads();
    }
}

// ---- Host ----

std::vector<u16> read_lanes(const char* path) {
    FILE* file = fopen(path, "rb");
    u64 header = 0;
    if (!file || fread(&header, 8, 1, file) != 1) {
        fprintf(stderr, "cannot read %s\n", path);
        exit(1);
    }
    fseek(file, 0, SEEK_END);
    u64 size = ftell(file) - 8 - header;
    std::vector<u16> lanes(size / 2);
    fseek(file, 8 + header, SEEK_SET);
    if (fread(lanes.data(), 2, lanes.size(), file) != lanes.size()) exit(1);
    fclose(file);
    return lanes;
}

template <typename T> T* to_device(const std::vector<T>& from) {
    T* to;
    CHECK(cudaMalloc(&to, from.size() * sizeof(T) + 16));
    CHECK(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
    return to;
}
template <typename T> T* on_device(u64 count) {
    T* memory;
    CHECK(cudaMalloc(&memory, count * sizeof(T) + 16));
    return memory;
}

void in_parallel(u64 count, const std::function<void(u64)>& work) {
    u64 threads = std::max(1u, std::thread::hardware_concurrency());
    std::vector<std::thread> running;
    for (u64 t = 0; t < threads; t++)
        running.emplace_back([=] {
            for (u64 i = t; i < count; i += threads) work(i);
        });
    for (auto& thread : running) thread.join();
}

// Milliseconds between events around `run`, the median; `before` is not timed.
float median(int runs, const std::function<void()>& before, const std::function<void()>& run) {
    cudaEvent_t start, end;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = -2; i < runs; i++) {
        before();
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaEventRecord(start));
        run();
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        float milliseconds;
        CHECK(cudaEventElapsedTime(&milliseconds, start, end));
        if (i >= 0) times.push_back(milliseconds);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

typedef size_t Bound(size_t);
typedef size_t Compress(void*, size_t, const void*, size_t, int);

struct Chunk {
    u64 first;
    u32 lanes, changes;
    Bytes content, frame;
};

enum Layout { PLANES, POSITIONS, GAPS };
const char* LAYOUTS[] = {"planes", "positions", "gaps"};

void put16(Bytes& out, u32 value) {
    out.push_back((u8)value);
    out.push_back((u8)(value >> 8));
}

Chunk make_chunk(Layout layout, const std::vector<u16>& base, const std::vector<u16>& target, u64 first) {
    Chunk chunk{first, (u32)std::min<u64>(CHUNK, base.size() - first), 0, {}, {}};
    std::vector<u16> deltas(chunk.lanes), gaps, positions, changed;
    u32 next = 0;
    for (u32 i = 0; i < chunk.lanes; i++) {
        deltas[i] = delta_of(base[first + i], target[first + i]);
        if (deltas[i] == 0) continue;
        positions.push_back((u16)i);
        gaps.push_back((u16)(i - next));
        changed.push_back(deltas[i]);
        next = i + 1;
    }
    chunk.changes = (u32)changed.size();
    auto planes = [&](const std::vector<u16>& values) {
        for (int shift : {0, 8})
            for (u16 value : values) chunk.content.push_back((u8)(value >> shift));
    };
    if (layout == PLANES) planes(deltas);
    if (layout == POSITIONS)
        for (auto* values : {&positions, &changed})
            for (u16 value : *values) put16(chunk.content, value);
    if (layout == GAPS) planes(gaps), planes(changed);
    return chunk;
}

struct Bed {
    int times, runs;
    std::vector<u16> base_lanes, target_lanes;
    u64 lanes; // of all copies
    u16 *base, *target, *output;

    double speed(double milliseconds) const { return 2.0 * lanes / milliseconds / 1e6; }

    void measure(Layout layout, Compress* compress, Bound* bound);
    void row(Layout layout, const char* codec, u64 stored, float all, float decompression, const Place* places, u32 count) const;
    void apply(Layout layout, const Place* places, u32 count) const {
        if (layout == PLANES) apply_planes<<<count, THREADS>>>(places, base, output);
        if (layout == POSITIONS) apply_positions<<<count, THREADS>>>(places, output);
        if (layout == GAPS) apply_gaps<<<count, THREADS>>>(places, output);
    }
    void restore(Layout layout) const {
        if (layout == PLANES) CHECK(cudaMemset(output, 0xA5, 2 * lanes));
        else CHECK(cudaMemcpy(output, base, 2 * lanes, cudaMemcpyDeviceToDevice));
    }
    void compare(const char* what) const {
        unsigned long long* found = on_device<unsigned long long>(1);
        CHECK(cudaMemset(found, 0, 8));
        differences<<<1024, 256>>>(output, target, lanes, found);
        unsigned long long count;
        CHECK(cudaMemcpy(&count, found, 8, cudaMemcpyDeviceToHost));
        CHECK(cudaFree(found));
        if (count) {
            fprintf(stderr, "%s: %llu lanes differ from the target\n", what, count);
            exit(1);
        }
    }
};

void Bed::measure(Layout layout, Compress* compress, Bound* bound) {
    std::vector<Chunk> chunks((base_lanes.size() + CHUNK - 1) / CHUNK);
    in_parallel(chunks.size(), [&](u64 i) {
        chunks[i] = make_chunk(layout, base_lanes, target_lanes, i * CHUNK);
        Chunk& chunk = chunks[i];
        chunk.frame.resize(bound(chunk.content.size()));
        chunk.frame.resize(compress(chunk.frame.data(), chunk.frame.size(), chunk.content.data(), chunk.content.size(), 3));
    });
    // A chunk without changes has no payload. Out of place it would still be copied, so there it has one.
    if (layout != PLANES)
        chunks.erase(std::remove_if(chunks.begin(), chunks.end(), [](const Chunk& chunk) { return chunk.changes == 0; }), chunks.end());

    u32 count = (u32)chunks.size() * times;
    u64 contents = 0, frames = 0, largest = 0;
    for (const Chunk& chunk : chunks) {
        contents += (chunk.content.size() + 15) / 16 * 16;
        frames += (chunk.frame.size() + 15) / 16 * 16;
        largest = std::max<u64>(largest, chunk.content.size());
    }
    Bytes one_of_each(frames);
    u8 *content = on_device<u8>(contents * times), *frame = on_device<u8>(frames * times);
    std::vector<void*> content_at, frame_at;
    std::vector<size_t> content_bytes, frame_bytes;
    std::vector<Place> places;
    u64 stored = 0;
    for (int time = 0; time < times; time++) {
        u64 in = 0, out = 0;
        for (const Chunk& chunk : chunks) {
            memcpy(&one_of_each[in], chunk.frame.data(), chunk.frame.size());
            content_at.push_back(content + time * contents + out);
            frame_at.push_back(frame + time * frames + in);
            content_bytes.push_back(chunk.content.size());
            frame_bytes.push_back(chunk.frame.size());
            places.push_back({(u8*)content_at.back(), time * base_lanes.size() + chunk.first, chunk.lanes, chunk.changes});
            in += (chunk.frame.size() + 15) / 16 * 16;
            out += (chunk.content.size() + 15) / 16 * 16;
            stored += chunk.frame.size();
        }
        CHECK(cudaMemcpy(frame + time * frames, one_of_each.data(), frames, cudaMemcpyHostToDevice));
    }
    void **d_content = to_device(content_at), **d_frame = to_device(frame_at);
    size_t *d_content_bytes = to_device(content_bytes), *d_frame_bytes = to_device(frame_bytes), *d_found = on_device<size_t>(count);
    Place* d_places = to_device(places);
    nvcompStatus_t* statuses = on_device<nvcompStatus_t>(count);
    auto measured = [&](const char* codec, u64 stored, const std::function<void()>& decompress) {
        CHECK(cudaMemset(content, 0xA5, contents * times));
        float all = median(runs, [&] { restore(layout); }, [&] { decompress(); apply(layout, d_places, count); });
        std::vector<nvcompStatus_t> found(count);
        CHECK(cudaMemcpy(found.data(), statuses, count * sizeof(nvcompStatus_t), cudaMemcpyDeviceToHost));
        for (nvcompStatus_t status : found) CHECK(status);
        compare(codec);
        float alone = median(runs, [] {}, decompress);
        row(layout, codec, stored, all, alone, d_places, count);
    };

    size_t temporary;
    {
        auto options = nvcompBatchedZstdDecompressDefaultOpts;
        CHECK(nvcompBatchedZstdDecompressGetTempSize(count, largest, options, &temporary, contents * times, 0));
        u8* memory = on_device<u8>(temporary);
        measured("zstd", stored, [&] {
            CHECK(nvcompBatchedZstdDecompressAsync(d_frame, d_frame_bytes, d_content_bytes, d_found, count, memory, temporary, d_content,
                                                   options, statuses, 0));
        });
        CHECK(cudaFree(memory));
    }
    { // The contents are there now, from the frames.
        auto options = nvcompBatchedANSCompressDefaultOpts;
        size_t most;
        CHECK(nvcompBatchedANSCompressGetTempSize(count, largest, options, &temporary, contents * times, 0));
        CHECK(nvcompBatchedANSCompressGetMaxOutputChunkSize(largest, options, &most));
        most = (most + 255) / 256 * 256;
        u8 *memory = on_device<u8>(temporary), *payload = on_device<u8>(most * count);
        std::vector<void*> payload_at;
        for (u32 i = 0; i < count; i++) payload_at.push_back(payload + i * most);
        void** d_payload = to_device(payload_at);
        size_t* d_payload_bytes = on_device<size_t>(count);
        CHECK(nvcompBatchedANSCompressAsync(d_content, d_content_bytes, largest, count, memory, temporary, d_payload, d_payload_bytes,
                                            options, statuses, 0));
        std::vector<size_t> payload_bytes(count);
        CHECK(cudaMemcpy(payload_bytes.data(), d_payload_bytes, count * sizeof(size_t), cudaMemcpyDeviceToHost));
        CHECK(cudaFree(memory));
        stored = 0;
        for (size_t bytes : payload_bytes) stored += bytes;
        auto back = nvcompBatchedANSDecompressDefaultOpts;
        CHECK(nvcompBatchedANSDecompressGetTempSize(count, largest, back, &temporary, contents * times, 0));
        memory = on_device<u8>(temporary);
        measured("ANS", stored, [&] {
            CHECK(nvcompBatchedANSDecompressAsync(d_payload, d_payload_bytes, d_content_bytes, d_found, count, memory, temporary,
                                                  d_content, back, statuses, 0));
        });
        for (void* gone : {(void*)memory, (void*)payload, (void*)d_payload, (void*)d_payload_bytes}) CHECK(cudaFree(gone));
    }
    for (void* gone : {(void*)content, (void*)frame, (void*)d_content, (void*)d_frame, (void*)d_content_bytes, (void*)d_frame_bytes,
                       (void*)d_found, (void*)d_places, (void*)statuses})
        CHECK(cudaFree(gone));
}

void Bed::row(Layout layout, const char* codec, u64 stored, float all, float decompression, const Place* places, u32 count) const {
    float application = median(runs, [&] { restore(layout); }, [&] { apply(layout, places, count); });
    static const char* separator = "";
    printf("%s\n  {\"layout\": \"%s\", \"codec\": \"%s\", \"in_place\": %s, \"ratio\": %.3f, \"chunks\": %u, \"seconds\": %.9f, "
           "\"gb_per_second\": %.1f, \"decompression_seconds\": %.9f, \"application_seconds\": %.9f}",
           separator, LAYOUTS[layout], codec, layout == PLANES ? "false" : "true", 2.0 * lanes / stored, count, all / 1e3, speed(all),
           decompression / 1e3, application / 1e3);
    separator = ",";
}

int main(int count, char** arguments) {
    if (count < 4) {
        fprintf(stderr, "nvcomp BASE.safetensors TARGET.safetensors TIMES [RUNS]\n");
        return 2;
    }
    void* library = dlopen("libzstd.so.1", RTLD_NOW);
    Compress* compress = library ? (Compress*)dlsym(library, "ZSTD_compress") : nullptr;
    Bound* bound = library ? (Bound*)dlsym(library, "ZSTD_compressBound") : nullptr;
    if (!compress || !bound) {
        fprintf(stderr, "libzstd.so.1 is not on this system\n");
        return 1;
    }
    Bed bed;
    bed.times = atoi(arguments[3]);
    bed.runs = count > 4 ? atoi(arguments[4]) : 9;
    bed.base_lanes = read_lanes(arguments[1]);
    bed.target_lanes = read_lanes(arguments[2]);
    u64 each = bed.base_lanes.size();
    if (bed.target_lanes.size() != each) {
        fprintf(stderr, "base and target have other sizes\n");
        return 1;
    }
    bed.lanes = each * bed.times;
    bed.base = on_device<u16>(bed.lanes);
    bed.target = on_device<u16>(bed.lanes);
    bed.output = on_device<u16>(bed.lanes);
    for (int time = 0; time < bed.times; time++) {
        CHECK(cudaMemcpy(bed.base + time * each, bed.base_lanes.data(), 2 * each, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(bed.target + time * each, bed.target_lanes.data(), 2 * each, cudaMemcpyHostToDevice));
    }
    int multiprocessors;
    CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    u64 pieces = bed.lanes / 8;
    float by_kernel = 1e9;
    for (int blocks : {8, 16, 32}) {
        float time = median(bed.runs, [] {}, [&] { copy<<<multiprocessors * blocks, 256>>>((uint4*)bed.base, (uint4*)bed.output, pieces); });
        by_kernel = std::min(by_kernel, time);
    }
    float by_driver = median(bed.runs, [] {}, [&] {
        CHECK(cudaMemcpyAsync(bed.output, bed.base, 2 * bed.lanes, cudaMemcpyDeviceToDevice, 0));
    });
    u32 empty = 0;
    float launch = median(bed.runs, [] {}, [&] { copy<<<1, 32>>>((uint4*)bed.base, (uint4*)bed.output, empty); });
    printf("{\"nvcomp\": \"%d.%d.%d\", \"target_bytes\": %llu, \"runs\": %d, \"copy_kernel_seconds\": %.9f, \"copy_driver_seconds\": %.9f, "
           "\"copy_gb_per_second\": %.1f, \"empty_launch_seconds\": %.9f, \"rows\": [",
           NVCOMP_VER_MAJOR, NVCOMP_VER_MINOR, NVCOMP_VER_PATCH, (unsigned long long)(2 * bed.lanes), bed.runs, by_kernel / 1e3,
           by_driver / 1e3, bed.speed(std::min(by_kernel, by_driver)), launch / 1e3);
    for (Layout layout : {PLANES, POSITIONS, GAPS}) bed.measure(layout, compress, bound);
    printf("]}\n");
    CHECK(cudaGetLastError());
    return 0;
}
