// Encoding, second half: counts coded lanes and exceptions, encodes streams, and writes payloads.
#include "common/crc.cuh"
#include "encode/streams.cuh"
#include "encode/gather.cuh"

struct CountPart {
    const EncodeChunk& chunk;
    EncodeState& state;
    const EncodeTables& tables;
    u32 part;
    CodedShared& shared;
    template <int W> __device__ __forceinline__ void run() { count_part<W>(chunk, state, tables, part, shared); }
};

// A block per part.
extern "C" __global__ void __launch_bounds__(THREADS, 4) tpde_encode_count(const __grid_constant__ Encode encode) {
    __shared__ CodedShared shared;
    if (blockIdx.x >= encode.parts) return;
    u32 number = chunk_of(encode, &EncodeChunk::first_part, blockIdx.x);
    EncodeChunk chunk = ((const EncodeChunk*)encode.chunks)[number];
    EncodeState& state = state_of(chunk);
    if (state.changed == 0 || chunk.tables == TPDE_NO_TABLES) return;
    const EncodeTables& tables = ((const EncodeTables*)encode.tables)[chunk.tables];
    with_width(chunk.lane_log2, CountPart{chunk, state, tables, blockIdx.x - chunk.first_part, shared});
}

struct StreamSegment {
    const EncodeChunk& chunk;
    EncodeState& state;
    const EncodeTables& tables;
    u32 segment, warps;
    StreamShared& shared;
    template <int W> __device__ __forceinline__ void run() {
        encode_segment<W>(chunk, state, tables, segment, warps, shared);
    }
};

// A block or a warp per segment.
extern "C" __global__ void __launch_bounds__(TPDE_ENCODE_STREAM_THREADS, 8)
    tpde_encode_streams(const __grid_constant__ Encode encode) {
    __shared__ StreamShared shared;
    bool alone = blockIdx.x >= encode.first_alone;
    u32 warp = uniform(threadIdx.x / WARP), behind = blockIdx.x - encode.first_alone;
    u32 segment = alone ? encode.first_alone + behind * STREAM_WARPS + warp : blockIdx.x;
    if (segment >= encode.parts) return;
    u32 number = chunk_of(encode, &EncodeChunk::first_segment, segment);
    EncodeChunk chunk = ((const EncodeChunk*)encode.chunks)[number];
    const EncodeTables& tables = ((const EncodeTables*)encode.tables)[chunk.tables];
    u32 warps = alone ? 1 : STREAM_WARPS;
    with_width(chunk.lane_log2,
               StreamSegment{chunk, state_of(chunk), tables, segment - chunk.first_segment, warps, shared});
}

struct GatherChunk {
    const EncodeChunk& chunk;
    const EncodeState& state;
    GatherShared& shared;
    template <int W> __device__ __forceinline__ void run() { gather<W>(chunk, state, shared); }
};

// A block per chunk.
extern "C" __global__ void __launch_bounds__(THREADS) tpde_encode_gather(const __grid_constant__ Encode encode) {
    __shared__ GatherShared shared;
    if (blockIdx.x >= encode.count) return;
    EncodeChunk chunk = ((const EncodeChunk*)encode.chunks)[blockIdx.x];
    if (chunk.form == TPDE_FORM_NONE) return;
    with_width(chunk.lane_log2, GatherChunk{chunk, state_of(chunk), shared});
}

// A block per segment: copies its stream to the payload.
extern "C" __global__ void __launch_bounds__(THREADS) tpde_encode_copy(const __grid_constant__ Encode encode) {
    if (blockIdx.x >= encode.parts) return;
    u32 number = chunk_of(encode, &EncodeChunk::first_segment, blockIdx.x);
    EncodeChunk chunk = ((const EncodeChunk*)encode.chunks)[number];
    copy_stream(chunk, state_of(chunk), blockIdx.x - chunk.first_segment);
}

// A block per chunk: the CRC of its payload.
extern "C" __global__ void __launch_bounds__(THREADS) tpde_encode_crc(const __grid_constant__ Encode encode) {
    __shared__ u32 partial[CRC_SHARED / 4];
    if (blockIdx.x >= encode.count) return;
    EncodeChunk of = ((const EncodeChunk*)encode.chunks)[blockIdx.x];
    if (of.form == TPDE_FORM_NONE) return;
    Chunk chunk = {};
    chunk.payload = (const u8*)of.payload;
    chunk.size = of.payload_size;
    u32 crc = block_crc32<THREADS>(chunk, partial);
    if (threadIdx.x == 0) state_of(of).crc32 = crc;
}
