// Codec `zstd` (spec/codecs.md section 3): the kernels before and after nvCOMP, which expands the frames on the device.
//
// `tpde_frames_check` compares CRCs, so damaged frames do not reach nvCOMP. `tpde_frames_expand` converts the contents of
// frames to payloads of codec `raw` for `tpde_raw`. For any content it reads only inside the content and writes only
// inside the payload. An invalid content gives an error status and a payload that `tpde_raw` refuses.
#include "common/crc.cuh"
#include "zstd/frames.cuh"

#define THREADS TPDE_FRAMES_THREADS
#define ITEMS 4 // consecutive items per thread
#define TILE (THREADS * ITEMS)
#define FULL_NIBBLE 15u
#define WIDE 270u

// The content of a frame, and the payload of codec `raw` that is made from it.
struct Content {
    const u8* bytes;
    u32 size;
    u32 lanes;
    u32 num_deltas;
    u8* payload;
};

struct FramesShared {
    u32 crc[CRC_SHARED / 4];
    u32 warps[THREADS / WARP];
    u32 errors;
};

// All threads: returns the exclusive prefix sum over the block. `all` receives the total.
__device__ __forceinline__ u32 sum_before(u32 value, u32& all, u32* warps) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, sum = value, warps_before = 0;
    for (u32 by = 1; by < WARP; by *= 2) {
        u32 other = __shfl_up_sync(ALL_LANES, sum, by);
        if (lane >= by) sum += other;
    }
    __syncthreads();
    if (lane == WARP - 1) warps[warp] = sum;
    __syncthreads();
    all = 0;
    for (u32 i = 0; i < THREADS / WARP; i++) {
        if (i < warp) warps_before += warps[i];
        all += warps[i];
    }
    return warps_before + sum - value;
}
__device__ __forceinline__ u32 sum_of_block(u32 value, u32* warps) {
    u32 all;
    sum_before(value, all, warps);
    return all;
}

template <int W> using Wide = typename WideOf<W>::type;

// Returns lane i of `count` lanes in byte planes.
template <int W> __device__ __forceinline__ Wide<W> plane_lane(const u8* planes, u32 count, u32 i) {
    Wide<W> lane = 0;
    for (u32 byte = 0; byte < W; byte++) lane |= (Wide<W>)planes[(u64)byte * count + i] << (8 * byte);
    return lane;
}

__device__ __forceinline__ void put_position(const Content& content, u32 i, u32 position) {
    if (i < content.num_deltas) ((u32*)content.payload)[i] = position;
}
template <int W> __device__ __forceinline__ void put_delta(const Content& content, u32 i, Wide<W> delta) {
    typedef typename LaneOf<W>::type Lane;
    Lane* deltas = (Lane*)(content.payload + (4 * (u64)content.num_deltas + W - 1) / W * W);
    if (i < content.num_deltas) deltas[i] = (Lane)delta;
}

// Decodes gaps in continued bytes: calls `take(k, sum)` for gap k, with the sum of the gaps 0 to k. Returns the number
// of gaps.
template <typename Take> __device__ u32 continued(const u8* bytes, u32 size, u32* warps, const Take& take) {
    u32 count = 0, sum = 0;
#pragma unroll 1
    for (u32 tile = 0; tile < size; tile += TILE) {
        u32 first = tile + threadIdx.x * ITEMS, ends = 0, own = 0, all_ends, all;
#pragma unroll 1
        for (u32 i = first; i < first + ITEMS && i < size; i++) {
            ends += bytes[i] < 255;
            own += bytes[i];
        }
        u32 k = count + sum_before(ends, all_ends, warps), at = sum + sum_before(own, all, warps);
#pragma unroll 1
        for (u32 i = first; i < first + ITEMS && i < size; i++) {
            at += bytes[i];
            if (bytes[i] < 255) take(k++, at);
        }
        count += all_ends;
        sum += all;
    }
    return count;
}
// Returns whether the last gap is complete.
__device__ __forceinline__ bool ends(const u8* bytes, u32 size) { return size == 0 || bytes[size - 1] < 255; }

// Parts 2 and 3 of the nibble layouts: the bytes of escaped values, and the planes of wide values.
struct Escapes {
    const u8* bytes;
    const u8* planes;
    u32 count, wide;
    u32 done, wide_done; // number of escapes and of wide values that previous tiles have consumed
};

// All threads: finds the `count` escapes that begin at `at`, and moves `at` past them. Returns false if the content is
// too short.
template <int W>
__device__ bool parse_escapes(const Content& content, u64& at, u32 count, Escapes& escapes, u32* warps) {
    if (at + count > content.size) return false;
    escapes = {content.bytes + at, content.bytes + at + count, count, 0, 0, 0};
    u32 wide = 0;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < count; i += THREADS) wide += escapes.bytes[i] == 255;
    escapes.wide = sum_of_block(wide, warps);
    at += count + (u64)W * escapes.wide;
    return at <= content.size;
}

// All threads: converts the nibbles of the next tile to values. A nibble of 15 consumes an escape.
template <int W>
__device__ void unescape(const u32 (&nibbles)[ITEMS], Wide<W> (&values)[ITEMS], Escapes& escapes, u32& errors,
                         u32* warps) {
    u32 full = 0, wide = 0, all, all_wide;
    for (u32 i = 0; i < ITEMS; i++) full += nibbles[i] == FULL_NIBBLE;
    u32 escape = escapes.done + sum_before(full, all, warps);
#pragma unroll 1
    for (u32 i = 0; i < full; i++) wide += escapes.bytes[escape + i] == 255;
    u32 wide_escape = escapes.wide_done + sum_before(wide, all_wide, warps);
    for (u32 i = 0; i < ITEMS; i++) {
        values[i] = (Wide<W>)nibbles[i];
        if (nibbles[i] != FULL_NIBBLE) continue;
        u32 byte = escapes.bytes[escape++];
        u64 value = FULL_NIBBLE + byte;
        if (byte == 255) {
            u64 low = plane_lane<W>(escapes.planes, escapes.wide, wide_escape++);
            value = low + WIDE;
            if (value < low) errors |= error(TPDE_STATUS_PAYLOAD_DELTAS);
        }
        if (W < 8 && value >> (8 * W % 64)) errors |= error(TPDE_STATUS_PAYLOAD_DELTAS);
        values[i] = (Wide<W>)value;
    }
    escapes.done += all;
    escapes.wide_done += all_wide;
}

// All threads: writes the changed lanes of a tile. `count` is the number of changed lanes in previous tiles.
template <int W>
__device__ void put_changed(const Content& content, u32 first, const Wide<W> (&values)[ITEMS], u32& count, u32* warps) {
    u32 changed = 0, all;
    for (u32 i = 0; i < ITEMS; i++) changed += values[i] != 0;
    u32 index = count + sum_before(changed, all, warps);
    for (u32 i = 0; i < ITEMS; i++) {
        if (values[i] == 0) continue;
        put_position(content, index, first + i);
        put_delta<W>(content, index++, values[i]);
    }
    count += all;
}

template <int W> __device__ u32 expand_planes(const Content& content, u32* warps) {
    if (content.size != 1 + (u64)W * content.lanes) return error(TPDE_STATUS_PAYLOAD_SIZE);
    u32 count = 0;
#pragma unroll 1
    for (u32 tile = 0; tile < content.lanes; tile += TILE) {
        u32 first = tile + threadIdx.x * ITEMS;
        Wide<W> values[ITEMS];
        for (u32 i = 0; i < ITEMS; i++)
            values[i] = first + i < content.lanes ? plane_lane<W>(content.bytes + 1, content.lanes, first + i) : 0;
        put_changed<W>(content, first, values, count, warps);
    }
    return count == content.num_deltas ? 0 : error(TPDE_STATUS_PAYLOAD_DELTAS);
}

template <int W> __device__ u32 expand_gaps(const Content& content, u32* warps) {
    u32 n = content.num_deltas;
    u64 at = 1 + (u64)W * n;
    if (at > content.size) return error(TPDE_STATUS_PAYLOAD_SIZE);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < n; i += THREADS) put_delta<W>(content, i, plane_lane<W>(content.bytes + 1, n, i));
    const u8* bytes = content.bytes + at;
    u32 size = content.size - (u32)at;
    u32 count = continued(bytes, size, warps, [&](u32 k, u32 sum) { put_position(content, k, sum + k); });
    return count == n && ends(bytes, size) ? 0 : error(TPDE_STATUS_PAYLOAD_SIZE);
}

// Returns the 32 bits from bit `at` on. Bits past the end are zero.
__device__ __forceinline__ u32 peek(const u8* bytes, u32 size, u64 at) {
    u64 window = 0;
    u32 from = (u32)(at / 8);
    for (u32 i = 0; i < 5; i++) window = window << 8 | (from + i < size ? bytes[from + i] : 0);
    return (u32)(window >> (8 - at % 8));
}

// One thread: decodes the positions. Each code begins where the previous code ends, so this layout is slow here.
__device__ u32 elias_positions(const Content& content, const u8* bytes, u32 size) {
    u64 at = 0;
    u32 position = 0;
#pragma unroll 1
    for (u32 i = 0; i < content.num_deltas; i++) {
        u32 zeros = __clz((i32)peek(bytes, size, at));
        if (zeros > 4) return error(at + 5 <= 8 * (u64)size ? TPDE_STATUS_PAYLOAD_POSITIONS : TPDE_STATUS_PAYLOAD_SIZE);
        at += zeros;
        u32 bits = (peek(bytes, size, at) >> (31 - zeros)) - 1;
        at += zeros + 1;
        u32 low = (u32)((u64)peek(bytes, size, at) >> (32 - bits));
        at += bits;
        if (at > 8 * (u64)size) return error(TPDE_STATUS_PAYLOAD_SIZE);
        position += (1u << bits | low) - 1;
        put_position(content, i, position++);
    }
    bool finished = (at + 7) / 8 == size && (at % 8 == 0 || peek(bytes, size, at) >> 24 == 0);
    return finished ? 0 : error(TPDE_STATUS_PAYLOAD_SIZE);
}

template <int W> __device__ u32 expand_elias(const Content& content) {
    u32 n = content.num_deltas;
    u64 at = 1 + (u64)W * n;
    if (at > content.size) return error(TPDE_STATUS_PAYLOAD_SIZE);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < n; i += THREADS) put_delta<W>(content, i, plane_lane<W>(content.bytes + 1, n, i));
    return threadIdx.x == 0 ? elias_positions(content, content.bytes + at, content.size - (u32)at) : 0;
}

// The end of the positions array holds the prefix sums of the long gaps until they are used. The sum for token i is at
// index i or later, so previous tiles have not overwritten it.
template <int W> __device__ u32 expand_nibble_gaps(const Content& content, u32* warps) {
    u32 n = content.num_deltas, errors = 0;
    const u8* tokens = content.bytes + 1;
    u64 at = 1 + (u64)n;
    if (at > content.size) return error(TPDE_STATUS_PAYLOAD_SIZE);
    u32 full = 0, long_gaps = 0;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        full += tokens[i] >> 4 == FULL_NIBBLE;
        long_gaps += tokens[i] % 16 == FULL_NIBBLE;
    }
    full = sum_of_block(full, warps);
    long_gaps = sum_of_block(long_gaps, warps);
    Escapes escapes;
    if (!parse_escapes<W>(content, at, full, escapes, warps)) return error(TPDE_STATUS_PAYLOAD_SIZE);
    const u8* bytes = content.bytes + at;
    u32 size = content.size - (u32)at, sums_at = n - long_gaps;
    volatile u32* positions = (volatile u32*)content.payload;
    u32 count = continued(bytes, size, warps, [&](u32 k, u32 sum) {
        if (k < long_gaps) positions[sums_at + k] = sum;
    });
    if (count != long_gaps || !ends(bytes, size)) return error(TPDE_STATUS_PAYLOAD_SIZE);
    __syncthreads();

    u32 gaps_done = 0, short_done = 0,
        long_done =
            0; // previous tiles: number of long gaps, sum of the nibbles, sum of the long gaps beyond their nibbles
#pragma unroll 1
    for (u32 tile = 0; tile < n; tile += TILE) {
        u32 first = tile + threadIdx.x * ITEMS, own_gaps = 0, own_short = 0, all_gaps, all_short;
        u32 nibbles[ITEMS], positions_of_items[ITEMS];
        Wide<W> values[ITEMS];
        for (u32 i = 0; i < ITEMS; i++) {
            u32 token = first + i < n ? tokens[first + i] : 0;
            nibbles[i] = token >> 4;
            own_gaps += token % 16 == FULL_NIBBLE;
            own_short += token % 16;
        }
        u32 gaps = gaps_done + sum_before(own_gaps, all_gaps, warps),
            sum = short_done + sum_before(own_short, all_short, warps);
        for (u32 i = 0; i < ITEMS; i++) {
            u32 gap = first + i < n ? tokens[first + i] % 16 : 0;
            gaps += gap == FULL_NIBBLE;
            sum += gap;
            u32 beyond_nibbles = gaps > gaps_done ? positions[sums_at + gaps - 1] : long_done;
            positions_of_items[i] = sum + beyond_nibbles + first + i;
        }
        gaps_done += all_gaps;
        short_done += all_short;
        if (all_gaps > 0) long_done = positions[sums_at + gaps_done - 1];
        unescape<W>(nibbles, values, escapes, errors, warps); // has barriers, so all threads have read the sums
        for (u32 i = 0; i < ITEMS; i++) {
            if (first + i >= n) continue;
            Wide<W> delta = values[i] + 1;
            // delta = value + 1 must fit in a lane.
            if (W < 8 ? (u64)delta >> (8 * W % 64) != 0 : delta == 0) errors |= error(TPDE_STATUS_PAYLOAD_DELTAS);
            put_position(content, first + i, positions_of_items[i]);
            put_delta<W>(content, first + i, delta);
        }
        __syncthreads();
    }
    return errors;
}

template <int W> __device__ u32 expand_nibble_planes(const Content& content, u32* warps) {
    const u8* tokens = content.bytes + 1;
    u32 size = (content.lanes + 63) / 64 * 32, full = 0, count = 0, errors = 0;
    u64 at = 1 + (u64)size;
    if (at > content.size) return error(TPDE_STATUS_PAYLOAD_SIZE);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < size; i += THREADS)
        full += (tokens[i] % 16 == FULL_NIBBLE) + (tokens[i] >> 4 == FULL_NIBBLE);
    full = sum_of_block(full, warps);
    Escapes escapes;
    if (!parse_escapes<W>(content, at, full, escapes, warps) || at != content.size)
        return error(TPDE_STATUS_PAYLOAD_SIZE);
#pragma unroll 1
    for (u32 tile = 0; tile < 2 * size; tile += TILE) {
        u32 first = tile + threadIdx.x * ITEMS;
        u32 nibbles[ITEMS];
        Wide<W> values[ITEMS];
        for (u32 i = 0; i < ITEMS; i++) {
            u32 lane = first + i;
            nibbles[i] = lane < 2 * size ? tokens[lane / 64 * 32 + lane % 32] >> (lane % 64 / 32 * 4) & 15 : 0;
            if (lane >= content.lanes && nibbles[i] != 0) errors |= error(TPDE_STATUS_PAYLOAD_POSITIONS);
        }
        unescape<W>(nibbles, values, escapes, errors, warps);
        put_changed<W>(content, first, values, count, warps);
    }
    return count == content.num_deltas ? errors : errors | error(TPDE_STATUS_PAYLOAD_DELTAS);
}

template <int W> __device__ __noinline__ u32 expand(const Content& content, u32* warps) {
    u64 end_of_positions = 4 * (u64)content.num_deltas;
    if (threadIdx.x == 0 && end_of_positions % W != 0) *(u32*)(content.payload + end_of_positions) = 0;
    switch (content.bytes[0]) {
    case TPDE_LAYOUT_PLANES: return expand_planes<W>(content, warps);
    case TPDE_LAYOUT_GAPS: return expand_gaps<W>(content, warps);
    case TPDE_LAYOUT_ELIAS_DELTA: return expand_elias<W>(content);
    case TPDE_LAYOUT_NIBBLE_GAPS: return expand_nibble_gaps<W>(content, warps);
    case TPDE_LAYOUT_NIBBLE_PLANES: return expand_nibble_planes<W>(content, warps);
    }
    return error(TPDE_STATUS_PAYLOAD_LAYOUT);
}

extern "C" __global__ void __launch_bounds__(THREADS) tpde_frames_check(const __grid_constant__ Frames frames) {
    __shared__ FramesShared shared;
    u32 job = blockIdx.x;
    if (job >= frames.count) return;
    u32 chunk_index = ((const u32*)frames.order)[job];
    ChunkMetadata record = ((const ChunkMetadata*)frames.stored)[chunk_index];
    Launch launch = {};
    launch.digests = frames.digests;
    Chunk chunk = {};
    chunk.number = chunk_index;
    chunk.payload = (const u8*)(frames.blob + record.blob_offset);
    chunk.size = record.compressed_size;
    chunk.crc32 = record.crc32;
    u32 errors = check_payload<THREADS>(launch, chunk, shared.crc);
    if (threadIdx.x != 0) return;
    ((u32*)frames.statuses)[chunk_index] = errors ? __ffs((i32)errors) - 1 : 0;
    ((u64*)frames.frames)[job] = errors ? frames.substitute : (u64)chunk.payload;
    ((u64*)frames.frame_bytes)[job] = errors ? frames.substitute_bytes : chunk.size;
}

extern "C" __global__ void __launch_bounds__(THREADS) tpde_frames_expand(const __grid_constant__ Frames frames) {
    __shared__ FramesShared shared;
    u32 job = blockIdx.x;
    if (job >= frames.count) return;
    u32 chunk_index = ((const u32*)frames.order)[job];
    ChunkMetadata record = ((const ChunkMetadata*)frames.expanded)[chunk_index];
    DeviceTensor tensor = ((const DeviceTensor*)frames.tensors)[((const u32*)frames.chunk_tensors)[chunk_index]];
    u32* status = (u32*)frames.statuses + chunk_index;
    u64 left = tensor.lanes - record.output_offset, chunk_lanes = 1ull << tensor.chunk_lanes_log2;
    Content content;
    content.bytes = (const u8*)((const u64*)frames.contents)[job];
    content.size = ((const ChunkMetadata*)frames.stored)[chunk_index].uncompressed_size;
    content.lanes = (u32)(left < chunk_lanes ? left : chunk_lanes);
    content.num_deltas = record.num_deltas;
    content.payload = (u8*)(frames.payloads + record.blob_offset);
    u32 errors = 0;
    if (*status == 0) {
        bool complete =
            ((const u32*)frames.outcomes)[job] == 0 && ((const u64*)frames.content_bytes)[job] == content.size;
        if (!complete) {
            errors = error(TPDE_STATUS_PAYLOAD_FRAME);
        } else {
            switch (tensor.lane_log2) {
            case 0: errors = expand<1>(content, shared.warps); break;
            case 1: errors = expand<2>(content, shared.warps); break;
            case 2: errors = expand<4>(content, shared.warps); break;
            default: errors = expand<8>(content, shared.warps); break;
            }
        }
    }
    if (threadIdx.x == 0) shared.errors = 0;
    bool damaged = *status != 0;
    __syncthreads();
    if (errors) atomicOr(&shared.errors, errors);
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (shared.errors) *status = __ffs((i32)shared.errors) - 1;
    // No lane has this position, so tpde_raw refuses the payload.
    if (shared.errors || damaged) *(u32*)content.payload = 0xFFFFFFFFu;
}
