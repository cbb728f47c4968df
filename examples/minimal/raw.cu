// A CUDA consumer of TPDE pairs: `raw PAIR [BASE] OUT` rebuilds the target of PAIR.tpde-index and PAIR.tpde-blob.
//
// One block of threads decodes one chunk, from its record as it is in the index. Comments name sections of spec/tpde-format.md.
// In scope: codec `raw`, whole tensors of base kinds `none` and `same`, out of place, a base and a target of one safetensors file
// each. A pair without files gives the bytes of its tensors, one after the other. `conditioned.cu` adds a codec.
// Exit codes: 0 rebuilt, 1 refused, with the rule that is broken, 2 error of the system, 3 out of scope.
//
//     nvcc -std=c++17 -Ispec examples/minimal/raw.cu -o raw -lblake3 -lzstd
#include "host.h" // bytes, hashes, zstd frames, safetensors headers, files
#ifdef __CUDACC__
#define LAUNCH(kernel, blocks, threads, argument) kernel<<<blocks, threads>>>(argument)
#else
#include "emulate.h" // runs kernels on a processor, for tests
#endif
void need_cuda(cudaError_t error) { if (error != cudaSuccess) throw Failure{2, cudaGetErrorString(error)}; }

const char* const CODECS[] = {"codec `raw`", "codec `zstd`", "codec `conditioned`"};

struct Tensor { TensorEntry entry; Bytes name, base_name, base; Dtype dtype; Shape shape; uint64_t bytes, begin; };
struct Chunk { uint64_t begin; uint32_t lanes, lane_bytes, dtype, codec, tensor; }; // begin: of its bytes in base and target

struct Pair {
    IndexHeader header;
    Bytes data, section[TPDE_SECTION_COUNT], records, sums, digests, blob, head; // head: that of the target's file
    string expanded[TPDE_SECTION_COUNT], target;
    std::vector<Tensor> tensors; // base and target are their bytes, in this order
    std::vector<Chunk> chunks;   // one per record
    std::vector<Placed> places;  // where the target's file has the tensors
    FileEntry file = {};
    uint64_t target_bytes = 0;
    bool has_digests, has_list;

    ChunkMetadata record(uint64_t c) { return at<ChunkMetadata>(records, c); }
    Bytes payload(uint64_t c) { return blob.substr(record(c).blob_offset, record(c).compressed_size); }
    Bytes listed(uint64_t c) { return sums.substr(16 * (header.chunk_count + c), 16); }
    void at_chunk(uint64_t c) { where = ", tensor " + string(tensors[chunks[c].tensor].name) + ", chunk " + to_string(c); }

    // ---- The index: steps 1 to 6 of section 13.1, but for 4.13 ----

    void open_index(Bytes bytes, uint32_t codecs) {
        data = bytes;
        read_header(), read_sections(), read_tensors(codecs), check_digests(), read_file(), read_records();
    }

    void read_header() {
        need(data.size() <= TPDE_LIMIT_INDEX_SIZE, "limit");
        need(data.substr(0, 8) == Bytes(TPDE_INDEX_MAGIC, std::min<size_t>(data.size(), 8)), "header.magic");
        need(data.size() >= TPDE_INDEX_HEADER_SIZE, "header.index_size");
        header = at<IndexHeader>(data);
        need(header.version_major == 1, "header.version_major");
        need(header.header_size == TPDE_INDEX_HEADER_SIZE, "header.header_size");
        need(header.header_crc32 == crc32(data.substr(0, 252)), "header.crc32");
        auto has = [&](uint64_t features) { return (header.required_features & features) != 0; };
        const bool root = !is_zero(data.substr(208, 32)), parts = has(TPDE_FEATURE_PARTS);
        has_digests = has(TPDE_FEATURE_DIGESTS), has_list = has(TPDE_FEATURE_PAYLOAD_LIST);
        const bool fits = root >= has_digests && has_digests >= has_list && has_list >= parts; // each needs the one before
        need(fits && !has(~uint64_t(0x17)), "header.required_features");
        need(!header.reserved && is_zero(data.substr(240, 12)) && has_digests >= root, "header.reserved");
        need_scope(!parts, "feature `parts`"), need_scope(!has(TPDE_FEATURE_DERIVED), "feature `derived`");
        need(header.chunk_count <= TPDE_CHUNK_COUNT_MAX, "header.chunk_count");
        need(header.tensor_count <= TPDE_TENSOR_COUNT_MAX, "header.tensor_count");
        need(header.file_count <= TPDE_FILE_COUNT_MAX, "header.file_count");
        need(header.index_size == data.size() && data.size() >= TPDE_INDEX_SIZE_MIN, "header.index_size");
    }

    void read_sections() {
        const uint64_t chunk_count = header.chunk_count, tensor_count = header.tensor_count;
        const uint64_t sizes[] = {32 * chunk_count, (has_list ? 32 : 16) * chunk_count, 64 + 32 * tensor_count};
        uint64_t end = TPDE_INDEX_HEADER_SIZE;
        for (int i = 0; i < TPDE_SECTION_COUNT; i++) {
            const SectionEntry& s = header.sections[i];
            need(s.offset == align(end, 8) && s.stored_size <= s.expanded_size, "header.sections");
            need(i > TPDE_SECTION_DIGESTS || (s.stored_size == sizes[i] && s.expanded_size == sizes[i]), "header.sections");
            need(s.offset <= data.size() && s.stored_size <= data.size() - s.offset, "header.sections");
            end = s.offset + s.stored_size;
        }
        need(data.size() == align(end, 8) + TPDE_PAIR_DIGEST_SIZE, "header.index_size");
        for (int i = 3; i < TPDE_SECTION_COUNT; i++) need(header.sections[i].expanded_size <= TPDE_LIMIT_SECTION_SIZE, "limit");
        need(blake3(data.substr(0, data.size() - 32)) == data.substr(data.size() - 32), "index.digest");
        for (int i = 0; i < TPDE_SECTION_COUNT; i++) {
            const SectionEntry& s = header.sections[i];
            need(is_zero(data.substr(s.offset + s.stored_size, -s.stored_size % 8)), "section.padding");
            section[i] = data.substr(s.offset, s.stored_size);
            if (s.stored_size < s.expanded_size) section[i] = expanded[i] = expand(section[i], s.expanded_size);
        }
        records = section[TPDE_SECTION_CHUNKS], sums = section[TPDE_SECTION_SUMS], digests = section[TPDE_SECTION_DIGESTS];
    }

    void read_tensors(uint32_t codecs) { // section 8
        Bytes names = section[TPDE_SECTION_TENSORS], before;
        const Bytes entries = take(names, sizeof(TensorEntry) * header.tensor_count, "tensors.size");
        uint64_t dim_count = 0, chunk_count = 0, tables = 0;
        for (uint32_t i = 0; i < header.tensor_count; i++) dim_count += at<TensorEntry>(entries, i).rank;
        Bytes dims = take(names, 8 * dim_count, "tensors.size");
        for (uint32_t i = 0; i < header.tensor_count; i++) {
            Tensor t = {};
            const TensorEntry& e = t.entry = at<TensorEntry>(entries, i);
            where = "";
            need(e.name_size >= 1 && e.name_size <= TPDE_NAME_SIZE_MAX, "tensor.name");
            t.name = take(names, e.name_size, "tensors.size");
            need(is_name(t.name), "tensor.name"), where = ", tensor " + string(t.name);
            need(before < t.name, "tensor.name_order"), need(e.base_name_size <= TPDE_NAME_SIZE_MAX, "tensor.base_name");
            before = t.name, t.base_name = take(names, e.base_name_size, "tensors.size");
            need(is_name(t.base_name) && t.base_name != t.name, "tensor.base_name");
            t.dtype = find_dtype([&](const Dtype& d) { return d.code == e.dtype; }, "tensor.dtype");
            need(e.rank <= TPDE_RANK_MAX, "tensor.rank");
            for (int k = 0; k < e.rank; k++) t.shape.push_back(at<uint64_t>(take(dims, 8, "tensors.size")));
            t.bytes = bytes_of(t.shape, t.dtype, "tensor.shape");
            need(e.base_kind <= TPDE_BASE_PREFIX, "tensor.base_kind"), need(e.base_kind || t.base_name.empty(), "tensor.base_name");
            need(e.codec <= TPDE_CODEC_CONDITIONED, "tensor.codec");
            const uint64_t chunk_bytes = uint64_t(t.dtype.lane_bytes) << (e.chunk_lanes_log2 & 31);
            need(e.chunk_lanes_log2 >= 12 && e.chunk_lanes_log2 < 32 && chunk_bytes <= TPDE_CHUNK_BYTES_MAX, "tensor.chunk_lanes");
            need(!e.part && !e.reserved[0] && !e.reserved[1], "tensor.reserved");
            need(!e.tables_size || e.codec == TPDE_CODEC_CONDITIONED, "tensor.tables_size");
            need(e.first_chunk == chunk_count, "tensor.first_chunk");
            need(e.chunk_count == t.bytes / chunk_bytes + (t.bytes % chunk_bytes > 0), "tensor.chunk_count");
            need_scope(e.base_kind != TPDE_BASE_PREFIX, "base kind `prefix`"), need(!e.base_param, "tensor.base_param");
            need_scope(codecs >> e.codec & 1, CODECS[e.codec]);
            t.begin = target_bytes, target_bytes += t.bytes, chunk_count += e.chunk_count, tables += e.tables_size;
            if (t.base_name.empty()) t.base_name = t.name;
            tensors.push_back(t);
        }
        where = "";
        need(names.empty(), "tensors.size"), need(tables == section[TPDE_SECTION_TABLES].size(), "tensor.tables_size");
        need(chunk_count == header.chunk_count, "header.chunk_count");
    }

    void check_digests() { // sections 7 and 7.2
        string bases, targets;
        need(!has_list || blake3(sums.substr(sums.size() / 2)) == data.substr(208, 32), "header.payload_root");
        for (uint64_t i = 0; i < tensors.size(); i++) {
            where = ", tensor " + string(tensors[i].name);
            need(tensors[i].entry.base_kind || is_zero(digests.substr(64 + 32 * i, 16)), "digest.none");
            bases += digests.substr(64 + 32 * i, 16), targets += digests.substr(80 + 32 * i, 16);
        }
        where = "";
        need(!has_digests || blake3(bases) == digests.substr(0, 32), "digest.base_root");
        need(!has_digests || blake3(targets) == digests.substr(32, 32), "digest.target_root");
    }

    void read_file() { // section 10.1
        Bytes rest = section[TPDE_SECTION_FILES], entries = take(rest, sizeof(FileEntry) * header.file_count, "files.size");
        need_scope(header.file_count <= 1, "several files");
        if (header.file_count == 1) {
            file = at<FileEntry>(entries);
            need(file.kind <= TPDE_FILE_VERBATIM_OF_BASE, "file.kind"), need(!file.reserved && !file.reserved2, "file.reserved");
            need_scope(!file.name_size, "a file with a name"), need(file.kind <= TPDE_FILE_SAFETENSORS_OF_BASE, "file.name");
            need(file.content_size >= 8, "file.content_size");
            if (file.kind == TPDE_FILE_SAFETENSORS) head = take(rest, file.content_size, "files.size");
            need(file.kind || blake3(head, 16) == entries.substr(16, 16), "file.content_digest");
        }
        need(rest.empty(), "files.size");
    }

    void read_records() { // section 6
        uint64_t blob_offset = TPDE_BLOB_HEADER_SIZE;
        for (uint32_t i = 0; i < tensors.size(); i++) {
            const Tensor& t = tensors[i];
            const uint64_t w = t.dtype.lane_bytes, all = t.bytes / w, most = uint64_t(1) << t.entry.chunk_lanes_log2;
            for (uint64_t first = 0; first < all; first += most) {
                const uint64_t c = chunks.size(), lanes = std::min(most, all - first);
                chunks.push_back({t.begin + first * w, uint32_t(lanes), uint32_t(w), t.dtype.code, t.entry.codec, i});
                at_chunk(c);
                const ChunkMetadata r = record(c);
                const ChunkSums s = at<ChunkSums>(sums, c);
                const uint64_t n = r.num_deltas, size = r.compressed_size, full = r.uncompressed_size;
                const bool is_raw = t.entry.codec == TPDE_CODEC_RAW;
                need(n <= lanes, "record.num_deltas"), need((n && size) || (!n && !size && !full && !r.crc32), "record.empty");
                need(!n || full == (is_raw ? align(4 * n, w) + w * n : w * lanes), "record.sizes");
                need(size <= full + full / 64 + 64 && (!is_raw || size == full), "record.sizes");
                need(!has_list || is_zero(listed(c)) == !n, "payload.digest");
                need(r.blob_offset == blob_offset, "record.blob_offset"), need(r.output_offset == first, "record.output_offset");
                need((t.entry.base_kind || !s.base_sum) && (n || s.base_sum == s.target_sum), "record.sums");
                blob_offset = align(blob_offset + size, TPDE_PAYLOAD_ALIGN);
            }
        }
        where = "";
        need(header.blob_size == blob_offset, "record.blob_size");
    }

    // ---- The blob: section 11, and payloads as they are stored, steps 10.1, 10.2 and 12.1 of section 13.1 ----

    void open_blob(Bytes bytes) {
        need(bytes.size() >= TPDE_BLOB_HEADER_SIZE, "blob.blob_size"), blob = bytes;
        const BlobHeader h = at<BlobHeader>(blob);
        need(blob.substr(0, 8) == TPDE_BLOB_MAGIC, "blob.magic"), need(blob.size() == header.blob_size, "blob.blob_size");
        need(h.version_major == 1, "blob.version_major"), need(h.header_size == TPDE_BLOB_HEADER_SIZE, "blob.header_size");
        need(h.header_crc32 == crc32(blob.substr(0, 60)), "blob.crc32"), need(!h.reserved, "blob.reserved");
        need(h.version_minor == header.version_minor, "blob.version_minor"), need(h.blob_size == blob.size(), "blob.blob_size");
        need(blob.substr(24, 32) == data.substr(data.size() - 32), "blob.pair_digest");
        string list;
        for (uint64_t c = 0; c < chunks.size(); c++) {
            at_chunk(c);
            const string digest = payload(c).empty() ? string(16, 0) : blake3(payload(c), 16);
            need(crc32(payload(c)) == record(c).crc32, "payload.crc32");
            need(!has_list || digest == listed(c), "payload.digest");
            need(is_zero(blob.substr(record(c).blob_offset + payload(c).size(), -payload(c).size() % 16)), "payload.padding");
            list += digest;
        }
        where = "";
        need(!has_digests || blake3(list) == data.substr(208, 32), "header.payload_root");
    }

    // ---- Base and file: sections 8.2 and 10.1, steps 8.2 and 12.4 of section 13.1 ----

    static Placed find(const Head& head, Bytes name, const Tensor& t, const char* rule) {
        const auto found = head.tensors.find(name);
        need(found != head.tensors.end() && found->second.dtype.code == t.dtype.code && found->second.shape == t.shape, rule);
        return found->second;
    }

    void open_base(Bytes base) {
        const uint64_t text = base.size() < 8 ? 0 : std::min<uint64_t>(at<uint64_t>(base), base.size() - 8);
        const Bytes base_head = base.substr(0, 8 + text), base_data = base.substr(base_head.size());
        const Head of_base = base.data() ? read_head(base_head, "base.file") : Head();
        need(of_base.data_size == base_data.size(), "base.file");
        for (Tensor& t : tensors) {
            if (t.entry.base_kind == TPDE_BASE_NONE) continue;
            where = ", tensor " + string(t.name);
            const Placed place = find(of_base, t.base_name, t, "base.tensor");
            t.base = base_data.substr(place.begin, place.size);
        }
        where = "";
        if (file.kind == TPDE_FILE_SAFETENSORS_OF_BASE) head = base_head;
    }

    void place_tensors() {
        if (header.file_count == 0) {
            for (const Tensor& t : tensors) places.push_back({t.dtype, t.shape, t.begin, t.bytes});
            return;
        }
        need(head.size() == file.content_size && blake3(head, 16) == Bytes((char*)file.content_digest, 16), "base.file");
        const Head of_target = read_head(head, "file.tensors");
        need(of_target.tensors.size() == tensors.size(), "file.tensors");
        for (const Tensor& t : tensors) places.push_back(find(of_target, t.name, t, "file.tensors"));
    }

    void check_tensors() { // steps 12.2 and 12.3
        string bases, targets;
        for (uint64_t i = 0; i < tensors.size(); i++) {
            const Tensor& t = tensors[i];
            bases += t.entry.base_kind ? blake3(t.base) : string(32, 0);
            targets += blake3(Bytes(target).substr(t.begin, t.bytes));
            where = ", tensor " + string(t.name);
            need(bases.substr(32 * i, 16) == digests.substr(64 + 32 * i, 16), "tensor.base_digest");
            need(targets.substr(32 * i, 16) == digests.substr(80 + 32 * i, 16), "tensor.target_digest");
        }
        where = "";
        need(has_digests || blake3(bases) == digests.substr(0, 32), "digest.base_root");
        need(has_digests || blake3(targets) == digests.substr(32, 32), "digest.target_root");
    }
};

// ---- The device: steps 8 to 11 of section 13.1 ----

enum Status : uint32_t { OK, BASE_SUM, HEADER, CLASSES, SIZE, STREAM, POSITIONS, DELTAS, TARGET_SUM };
const char* const RULES[] = {"", "chunk.base_sum", "payload.header", "payload.classes", "payload.size", "payload.stream",
                             "payload.positions", "payload.deltas", "chunk.target_sum"};

struct Launch {
    const ChunkMetadata* records; // the sections `chunks` and `sums`, as they are
    const ChunkSums* sums;
    const Chunk* chunks;
    const uint8_t *blob, *base; // zeros are the base of tensors of kind `none`
    uint8_t* target;
    uint32_t* status; // one per chunk
};

__device__ uint64_t load(const uint8_t* from, uint32_t size) { // little-endian, at any address
    uint64_t value = 0;
    for (uint32_t i = size; i-- > 0;) value = value << 8 | from[i];
    return value;
}
__device__ void store(uint8_t* to, uint64_t value, uint32_t size) {
    for (uint32_t i = 0; i < size; i++) to[i] = uint8_t(value >> 8 * i);
}

__device__ uint64_t mix(uint64_t i) { // section 6.1
    uint64_t h = (i + 1) * 0x9E3779B97F4A7C15;
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9, h = (h ^ h >> 27) * 0x94D049BB133111EB;
    return h ^ h >> 31;
}
// Adds the sum of a chunk. It is linear, so each byte is added alone, shifted to its place in its word.
__device__ void add_sum(const uint8_t* bytes, uint32_t size, unsigned long long* sum) {
    uint64_t part = 0;
    for (uint32_t i = threadIdx.x; i < size; i += blockDim.x)
        part += (mix(1024 + i / 4096) | 1) * (mix(i / 4 % 1024) >> 32 | 1) * (uint64_t(bytes[i]) << 8 * (i % 4));
    atomicAdd(sum, part);
}

__device__ uint64_t apply_delta(uint64_t u, uint64_t delta, uint32_t b, bool is_ordered) { // section 9
    const uint64_t top = uint64_t(1) << (b - 1), mask = top | (top - 1), d = delta >> 1 ^ (0 - (delta & 1));
    if (!is_ordered) return (u + d) & mask;
    const uint64_t x = ((u & top ? mask - u : u + top) + d) & mask;
    return x & top ? x - top : mask - x;
}

// Section 2 of codecs.md. Puts deltas where the target lanes will be; all threads of a block call it.
__device__ void decode_raw(const Launch& launch, const Chunk& chunk, const ChunkMetadata& record, uint32_t* status) {
    const uint32_t n = record.num_deltas, w = chunk.lane_bytes, deltas_at = (4 * n + w - 1) / w * w;
    const uint8_t* payload = launch.blob + record.blob_offset;
    for (uint32_t i = 4 * n + threadIdx.x; i < deltas_at; i += blockDim.x) if (payload[i]) atomicMax(status, POSITIONS);
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        const uint64_t position = load(payload + 4 * i, 4);
        const bool ascends = i == 0 || position > load(payload + 4 * (i - 1), 4);
        if (position >= chunk.lanes || !ascends) atomicMax(status, POSITIONS);
        else store(launch.target + chunk.begin + w * position, load(payload + deltas_at + w * i, w), w);
    }
}
__device__ void decode(const Launch& launch, const Chunk& chunk, const ChunkMetadata& record, uint32_t* status);

__global__ void apply(Launch launch) {
    __shared__ uint32_t status, changed;
    __shared__ unsigned long long base_sum, target_sum;
    const ChunkMetadata record = launch.records[blockIdx.x];
    const ChunkSums sums = launch.sums[blockIdx.x];
    const Chunk chunk = launch.chunks[blockIdx.x];
    const uint32_t w = chunk.lane_bytes, bytes = w * chunk.lanes;
    const bool is_ordered = chunk.dtype >= TPDE_F16 && chunk.dtype <= TPDE_F8_E5M2FNUZ; // section 8.1
    const uint8_t* base = launch.base + chunk.begin;
    uint8_t* target = launch.target + chunk.begin; // zeros, then deltas, then target lanes
    if (threadIdx.x == 0) status = OK, changed = 0, base_sum = target_sum = 0;
    __syncthreads();
    add_sum(base, bytes, &base_sum);
    __syncthreads();
    if (record.num_deltas && base_sum == sums.base_sum) decode(launch, chunk, record, &status);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < chunk.lanes; i += blockDim.x) {
        const uint64_t delta = load(target + w * i, w);
        if (delta) atomicAdd(&changed, 1);
        store(target + w * i, apply_delta(load(base + w * i, w), delta, 8 * w, is_ordered), w);
    }
    __syncthreads();
    add_sum(target, bytes, &target_sum);
    __syncthreads();
    uint32_t result = target_sum == sums.target_sum ? OK : TARGET_SUM;
    if (changed != record.num_deltas) result = DELTAS;
    if (status != OK) result = status;
    if (base_sum != sums.base_sum) result = BASE_SUM; // a wrong base can break any rule of the payload
    if (threadIdx.x == 0) launch.status[blockIdx.x] = result;
}

// A copy on the device, or zeros if there are no bytes. It is freed when the program ends.
template <class T> T* upload(const void* bytes, uint64_t size) {
    void* copy = nullptr;
    need_cuda(cudaMalloc(&copy, std::max<size_t>(size, 1)));
    need_cuda(bytes ? cudaMemcpy(copy, bytes, size, cudaMemcpyHostToDevice) : cudaMemset(copy, 0, size));
    return (T*)copy;
}

void rebuild(Pair& pair) {
    const uint64_t count = pair.chunks.size(), bytes = pair.target_bytes;
    size_t free_bytes, all_bytes;
    need_cuda(cudaMemGetInfo(&free_bytes, &all_bytes));
    need(2 * bytes + pair.blob.size() < free_bytes, "limit"); // section 13.4: a short index can describe terabytes
    uint8_t* base = upload<uint8_t>(nullptr, bytes);
    for (const Tensor& t : pair.tensors)
        need_cuda(cudaMemcpy(base + t.begin, t.base.data(), t.base.size(), cudaMemcpyHostToDevice));
    const Launch launch = {upload<ChunkMetadata>(pair.records.data(), sizeof(ChunkMetadata) * count),
                           upload<ChunkSums>(pair.sums.data(), sizeof(ChunkSums) * count),
                           upload<Chunk>(pair.chunks.data(), sizeof(Chunk) * count),
                           upload<uint8_t>(pair.blob.data(), pair.blob.size()), base,
                           upload<uint8_t>(nullptr, bytes), upload<uint32_t>(nullptr, sizeof(uint32_t) * count)};
    if (count) LAUNCH(apply, count, 256, launch);
    need_cuda(cudaGetLastError());
    std::vector<uint32_t> status(count);
    pair.target.resize(bytes);
    need_cuda(cudaMemcpy(status.data(), launch.status, 4 * count, cudaMemcpyDeviceToHost));
    need_cuda(cudaMemcpy(pair.target.data(), launch.target, bytes, cudaMemcpyDeviceToHost));
    for (uint64_t c = 0; c < count; c++) pair.at_chunk(c), need(status[c] == OK, RULES[status[c]]);
    where = "";
}

// `codecs` has a bit per codec in scope; `read_tables` makes step 4.13.
int run(int count, char** arguments, uint32_t codecs, void (*read_tables)(const Pair&)) {
    if (count < 3 || count > 4) return fprintf(stderr, "usage: %s PAIR [BASE] OUT\n", arguments[0]), 2;
    try {
        Pair pair;
        const string stem = arguments[1];
        pair.open_index(map_file(stem + ".tpde-index"), codecs);
        read_tables(pair);
        pair.open_blob(map_file(stem + ".tpde-blob"));
        pair.open_base(count == 4 ? map_file(arguments[2]) : Bytes());
        pair.place_tensors();
        rebuild(pair);
        pair.check_tensors();
        write_file(arguments[count - 1], pair.head, pair.places, pair.target);
        return 0;
    } catch (const Failure& failure) {
        for (char c : failure.text) putc(uint8_t(c) < ' ' ? '?' : c, stderr); // a name can hold commands for a terminal
        return putc('\n', stderr), failure.exit_code;
    } catch (const std::bad_alloc&) {
        return fprintf(stderr, "not enough memory\n"), 2;
    }
}

#ifndef TPDE_CONDITIONED
__device__ void decode(const Launch& l, const Chunk& c, const ChunkMetadata& r, uint32_t* status) { decode_raw(l, c, r, status); }
int main(int count, char** arguments) { return run(count, arguments, 1 << TPDE_CODEC_RAW, [](const Pair&) {}); }
#endif
