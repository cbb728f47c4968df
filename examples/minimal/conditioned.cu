// raw.cu with a second codec: `conditioned PAIR [BASE] OUT` decodes codec `raw`, and codec `conditioned` with lanes of up to four
// bytes. Comments name the sections of spec/codecs.md.
//
//     nvcc -std=c++17 -Ispec examples/minimal/conditioned.cu -o conditioned -lblake3 -lzstd
#define TPDE_CONDITIONED
#include "raw.cu"

// ---- Section 4.2: tables ----

struct Set { uint32_t first_class, class_count; };
struct Class { uint32_t first, token_count; }; // cum[t] of the text is sums[first + t]; after the last token follows 4,096
struct Tables { const Set* sets; const Class* classes; const uint16_t* sums; }; // one set per tensor
__device__ Tables TABLES;

void read_tables(const Pair& pair) {
    std::vector<Set> sets, owned;
    std::vector<Class> classes;
    std::vector<uint16_t> sums;
    Bytes section = pair.section[TPDE_SECTION_TABLES];
    for (const Tensor& t : pair.tensors) {
        where = ", tensor " + string(t.name);
        need_scope(t.entry.codec == TPDE_CODEC_RAW || t.dtype.lane_bytes <= 4, "codec `conditioned` with lanes of eight bytes");
        Bytes rest = take(section, t.entry.tables_size, "tensor.tables");
        auto next = [&] { return at<uint8_t>(take(rest, 1, "tensor.tables")); };
        sets.push_back({0, 0});
        if (rest.empty()) continue;
        const uint32_t number = at<uint16_t>(take(rest, 2, "tensor.tables"));
        if (rest.empty()) {
            need(number >= 1 && number <= owned.size(), "tensor.tables");
            sets.back() = owned[number - 1];
            continue;
        }
        need(number == 0, "tensor.tables");
        const Set set = sets.back() = {uint32_t(classes.size()), next()};
        need(set.class_count >= 1 && set.class_count <= TPDE_CONDITIONED_CLASS_COUNT_MAX, "tensor.tables");
        for (uint32_t k = 0; k < set.class_count; k++) {
            const uint32_t token_count = next();
            need(token_count >= 1 && token_count <= TPDE_CONDITIONED_TOKEN_COUNT_MAX, "tensor.tables");
            classes.push_back({uint32_t(sums.size()), token_count});
            uint32_t sum = 0, f = 0;
            for (uint32_t token = 0; token < token_count; token++) {
                sums.push_back(uint16_t(sum));
                f = next();
                if (f >= 128) {
                    const uint32_t high = next();
                    need(high != 0, "tensor.tables");
                    f = high << 7 | (f & 127);
                }
                sum += f;
            }
            need(f != 0 && sum == TPDE_CONDITIONED_FREQUENCY_SUM, "tensor.tables");
            sums.push_back(uint16_t(sum));
        }
        need(rest.empty(), "tensor.tables");
        owned.push_back(set);
        need(owned.size() <= TPDE_CONDITIONED_SET_COUNT_MAX, "tensor.tables");
    }
    where = "";
    const Tables tables = {upload<Set>(sets.data(), sizeof(Set) * sets.size()),
                           upload<Class>(classes.data(), sizeof(Class) * classes.size()),
                           upload<uint16_t>(sums.data(), sizeof(uint16_t) * sums.size())};
    need_cuda(cudaMemcpyToSymbol(TABLES, &tables, sizeof tables));
}

// ---- Section 4.1: contexts ----

__device__ uint32_t bit_count(uint64_t u) {
    uint32_t count = 0;
    for (; u > 0; u >>= 1) count++;
    return count;
}

__device__ uint32_t context_of(uint64_t u, const Chunk& chunk) {
    const uint64_t top = uint64_t(1) << (8 * chunk.lane_bytes - 1);
    switch (chunk.dtype) {
    case TPDE_F16: return u >> 10 & 31;
    case TPDE_BF16: return u >> 7 & 255;
    case TPDE_F32: case TPDE_C64: return u >> 23 & 255;
    case TPDE_F8_E4M3: case TPDE_F8_E4M3FNUZ: return u >> 3 & 15;
    case TPDE_F8_E5M2: case TPDE_F8_E5M2FNUZ: return u >> 2 & 31;
    case TPDE_I8: case TPDE_I16: case TPDE_I32: return bit_count(u & top ? 2 * top - 1 - u : u);
    default: return bit_count(u);
    }
}

// ---- Section 4.4: payloads ----

// Number i of a string of bits, whose numbers have `size` bits each.
__device__ uint64_t bits_at(const uint8_t* string, uint64_t i, uint32_t size) {
    uint64_t value = 0;
    for (uint32_t k = 0; k < size; k++) {
        const uint64_t bit = i * size + k;
        value |= uint64_t(string[bit / 8] >> bit % 8 & 1) << k;
    }
    return value;
}

// Whether the bits after `count` numbers, up to the end of the last byte, are zero.
__device__ bool ends_with_zeros(const uint8_t* string, uint64_t count, uint32_t size) {
    const uint32_t used = count * size % 8;
    return used == 0 || string[count * size / 8] >> used == 0;
}

struct Payload {
    const uint8_t *bytes, *maps, *activities, *exceptions, *low_bits, *sizes, *streams, *end;
    uint32_t r, states, segments, activity_bits, first_context, contexts, exception_count, center; // the header
    uint32_t tile_lanes, tiles, map_size;
};

// Finds the pieces, and checks all that is before the streams.
__device__ Status read_payload(Payload& p, const uint8_t* bytes, const Chunk& chunk, const ChunkMetadata& record) {
    const uint32_t w = chunk.lane_bytes, b = 8 * w, blocks = (chunk.lanes + 127) / 128;
    const uint32_t classes = TABLES.sets[chunk.tensor].class_count;
    p.bytes = bytes, p.end = bytes + record.compressed_size;
    p.tile_lanes = w == 4 ? 512 : 1024, p.tiles = (chunk.lanes + p.tile_lanes - 1) / p.tile_lanes;
    if (record.compressed_size < TPDE_CONDITIONED_HEADER_SIZE) return SIZE;
    p.r = bytes[0], p.activity_bits = bytes[3], p.first_context = load(bytes + 4, 2), p.contexts = bytes[6];
    p.exception_count = load(bytes + 8, 4), p.center = load(bytes + 12, 4);
    if (p.r > b || bytes[1] > 5 || bytes[2] > 5 || p.activity_bits > 2) return HEADER;
    if (p.contexts < 1 || p.contexts > 64 || bytes[7] != 0) return HEADER;
    p.states = 1u << bytes[1], p.segments = 1u << bytes[2];
    if (p.segments > p.tiles || p.exception_count > record.num_deltas) return HEADER;
    if (p.r == 0 ? p.center != 0 : uint64_t(p.center) >> (b - p.r) != 0) return HEADER;

    p.map_size = (p.contexts + 1) / 2;
    const uint64_t activities = 16 + (uint64_t(p.map_size) << p.activity_bits);
    const uint64_t exceptions = activities + (blocks * p.activity_bits + 7) / 8;
    const uint64_t low_bits = exceptions + uint64_t(4 + w) * p.exception_count;
    const uint64_t sizes = low_bits + (uint64_t(chunk.lanes) * p.r + 7) / 8;
    const uint64_t sizes_end = sizes + 4 * (p.segments - 1), streams = (sizes_end + 1) / 2 * 2;
    if (streams > record.compressed_size || (streams > sizes_end && bytes[sizes_end])) return SIZE;
    p.maps = bytes + 16, p.activities = bytes + activities, p.exceptions = bytes + exceptions, p.low_bits = bytes + low_bits;
    p.sizes = bytes + sizes, p.streams = bytes + streams;
    for (uint32_t i = 0; i < 2 * p.map_size << p.activity_bits; i++) {
        const uint32_t in_map = i % (2 * p.map_size);
        if (bits_at(p.maps, i, 4) > (in_map < p.contexts ? classes : 0)) return CLASSES;
    }
    if (!ends_with_zeros(p.activities, blocks, p.activity_bits) || !ends_with_zeros(p.low_bits, chunk.lanes, p.r)) return SIZE;
    return OK;
}

__device__ uint32_t class_of(const Payload& p, const Chunk& chunk, uint64_t u, uint32_t lane) {
    const uint32_t c = context_of(u, chunk), i = c > p.first_context ? c - p.first_context : 0;
    const uint32_t activity = bits_at(p.activities, lane / 128, p.activity_bits);
    return i < p.contexts ? bits_at(p.maps + activity * p.map_size, i, 4) : 0;
}

// ---- Section 4.5: streams. One thread decodes one segment ----

struct Stream {
    const uint8_t *next, *end;
    bool is_short;

    __device__ uint32_t refill(uint32_t x) {
        if (x >= TPDE_CONDITIONED_STATE_MIN) return x;
        if (next == end) return is_short = true, TPDE_CONDITIONED_STATE_MIN;
        next += 2;
        return x << 16 | uint32_t(load(next - 2, 2));
    }
};

__device__ Status decode_segment(const Payload& p, const Chunk& chunk, uint32_t s, const uint8_t* base, uint8_t* deltas) {
    const uint32_t w = chunk.lane_bytes, value_bits = 8 * w - p.r;
    uint64_t begin = p.streams - p.bytes, size = 0;
    for (uint32_t k = 0; k <= s; k++) begin += size, size = k + 1 < p.segments ? 2 * load(p.sizes + 4 * k, 4) : 0;
    const uint64_t all = p.end - p.bytes, end = s + 1 < p.segments ? begin + size : all;
    if (begin > end || end > all || (end - begin) % 2) return SIZE;
    if (end - begin < 4 * p.states) return STREAM;
    Stream stream = {p.bytes + begin + 4 * p.states, p.bytes + end, false};
    uint32_t x[32];
    for (uint32_t k = 0; k < p.states; k++) {
        x[k] = load(p.bytes + begin + 4 * k, 4);
        if (x[k] < TPDE_CONDITIONED_STATE_MIN) return STREAM;
    }
    for (uint32_t tile = s * p.tiles / p.segments; tile < (s + 1) * p.tiles / p.segments; tile++) {
        const uint32_t tile_end = min((tile + 1) * p.tile_lanes, chunk.lanes);
        for (uint32_t lane = tile * p.tile_lanes; lane < tile_end;) {
            uint32_t lanes[32], extra[32], done[32], count = 0; // a step
            uint64_t value[32];
            bool has_more = false;
            for (; lane < tile_end && count < p.states; lane++) { // round of tokens
                const uint32_t class_number = class_of(p, chunk, load(base + w * lane, w), lane);
                if (class_number == 0) continue;
                const Class table = TABLES.classes[TABLES.sets[chunk.tensor].first_class + class_number - 1];
                const uint16_t* sums = TABLES.sums + table.first;
                const uint32_t residue = x[count] % 4096;
                uint32_t t = 0;
                while (sums[t + 1] <= residue) t++;
                x[count] = stream.refill((sums[t + 1] - sums[t]) * (x[count] / 4096) + residue - sums[t]);
                extra[count] = t < 64 ? 0 : (t - 64) / 2 + 5, done[count] = 0;
                value[count] = t < 64 ? t : uint64_t(2 + t % 2) << extra[count];
                has_more |= extra[count] > 0;
                lanes[count++] = lane;
            }
            while (has_more) { // round of extra bits
                has_more = false;
                for (uint32_t k = 0; k < count; k++) {
                    const uint32_t m = min(extra[k], 16u);
                    if (m == 0) continue;
                    value[k] += uint64_t(x[k] & ((1u << m) - 1)) << done[k];
                    x[k] = stream.refill(x[k] >> m);
                    done[k] += m, extra[k] -= m, has_more |= extra[k] > 0;
                }
            }
            if (stream.is_short) return STREAM;
            for (uint32_t k = 0; k < count; k++) { // section 4.6
                if (value[k] >> value_bits != 0) return DELTAS;
                const uint64_t high = p.r == 0 ? value[k] : (p.center - value[k]) & ((uint64_t(1) << value_bits) - 1);
                store(deltas + w * lanes[k], high << p.r | load(deltas + w * lanes[k], w), w);
            }
        }
    }
    for (uint32_t k = 0; k < p.states; k++) if (x[k] != TPDE_CONDITIONED_STATE_MIN) return STREAM;
    return stream.next == stream.end ? OK : STREAM;
}

// ---- Section 4.6: deltas ----

__device__ void decode_conditioned(const Launch& launch, const Chunk& chunk, const ChunkMetadata& record, uint32_t* status) {
    const uint32_t w = chunk.lane_bytes;
    const uint8_t* base = launch.base + chunk.begin;
    uint8_t* deltas = launch.target + chunk.begin;
    Payload p;
    const Status found = read_payload(p, launch.blob + record.blob_offset, chunk, record); // the same in all threads
    if (found != OK) {
        atomicMax(status, found);
        return;
    }
    for (uint32_t i = threadIdx.x; i < chunk.lanes; i += blockDim.x) store(deltas + w * i, bits_at(p.low_bits, i, p.r), w);
    __syncthreads();
    if (threadIdx.x < p.segments) atomicMax(status, decode_segment(p, chunk, threadIdx.x, base, deltas));
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.exception_count; i += blockDim.x) {
        const uint64_t position = load(p.exceptions + 4 * i, 4), delta = load(p.exceptions + 4 * p.exception_count + w * i, w);
        const bool ascends = i == 0 || position > load(p.exceptions + 4 * (i - 1), 4);
        if (position >= chunk.lanes || !ascends || load(deltas + w * position, w) != 0) atomicMax(status, POSITIONS);
        else if (delta == 0) atomicMax(status, DELTAS);
        else store(deltas + w * position, delta, w);
    }
}

__device__ void decode(const Launch& launch, const Chunk& chunk, const ChunkMetadata& record, uint32_t* status) {
    if (chunk.codec == TPDE_CODEC_RAW) decode_raw(launch, chunk, record, status);
    else decode_conditioned(launch, chunk, record, status);
}

int main(int count, char** arguments) {
    return run(count, arguments, 1 << TPDE_CODEC_RAW | 1 << TPDE_CODEC_CONDITIONED, read_tables);
}
