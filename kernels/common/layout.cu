// Reports the layout of format.cuh as the device compiler sees it. A test compares the report with the Rust types.
#include "common/format.cuh"

#define SIZE(type) *out++ = (u32)sizeof(type)
#define OFFSET(type, field) *out++ = (u32)TPDE_OFFSET_OF(type, field)

// Writes TPDE_LAYOUT_WORDS words: sizes, offsets and constants.
extern "C" __global__ void tpde_layout(u32* out) {
    u32* first = out;
    SIZE(ChunkMetadata);
    OFFSET(ChunkMetadata, blob_offset), OFFSET(ChunkMetadata, compressed_size),
        OFFSET(ChunkMetadata, uncompressed_size);
    OFFSET(ChunkMetadata, num_deltas), OFFSET(ChunkMetadata, crc32), OFFSET(ChunkMetadata, output_offset);
    SIZE(ChunkSums);
    OFFSET(ChunkSums, base_sum), OFFSET(ChunkSums, target_sum);
    SIZE(ConditionedHeader);
    OFFSET(ConditionedHeader, low_bits), OFFSET(ConditionedHeader, states_log2),
        OFFSET(ConditionedHeader, segments_log2);
    OFFSET(ConditionedHeader, activity_bits), OFFSET(ConditionedHeader, first_context),
        OFFSET(ConditionedHeader, context_count);
    OFFSET(ConditionedHeader, reserved), OFFSET(ConditionedHeader, exception_count), OFFSET(ConditionedHeader, center);
    SIZE(DeviceTensor);
    OFFSET(DeviceTensor, base), OFFSET(DeviceTensor, output), OFFSET(DeviceTensor, lanes),
        OFFSET(DeviceTensor, base_lanes);
    OFFSET(DeviceTensor, first_chunk), OFFSET(DeviceTensor, tables), OFFSET(DeviceTensor, dtype),
        OFFSET(DeviceTensor, codec);
    OFFSET(DeviceTensor, lane_log2), OFFSET(DeviceTensor, chunk_lanes_log2), OFFSET(DeviceTensor, reserved);
    SIZE(TensorRows);
    OFFSET(TensorRows, base_row), OFFSET(TensorRows, base_pitch), OFFSET(TensorRows, output_row),
        OFFSET(TensorRows, output_pitch);
    SIZE(TensorForm);
    OFFSET(TensorForm, scales), OFFSET(TensorForm, scales_row), OFFSET(TensorForm, scales_pitch),
        OFFSET(TensorForm, columns);
    OFFSET(TensorForm, depth), OFFSET(TensorForm, base_dtype), OFFSET(TensorForm, form), OFFSET(TensorForm, reserved);
    SIZE(Launch);
    OFFSET(Launch, chunks), OFFSET(Launch, sums), OFFSET(Launch, chunk_tensors), OFFSET(Launch, tensors),
        OFFSET(Launch, tables);
    OFFSET(Launch, blob), OFFSET(Launch, statuses), OFFSET(Launch, flag), OFFSET(Launch, order),
        OFFSET(Launch, scratch);
    OFFSET(Launch, first), OFFSET(Launch, count), OFFSET(Launch, mode), OFFSET(Launch, flags),
        OFFSET(Launch, scratch_slots);
    OFFSET(Launch, scratch_slot_bytes), OFFSET(Launch, digests), OFFSET(Launch, rows), OFFSET(Launch, forms);
    *out++ = TPDE_RAW_THREADS, *out++ = TPDE_RAW_SHARED, *out++ = TPDE_CONDITIONED_THREADS,
    *out++ = TPDE_CONDITIONED_SHARED;
    *out++ = TPDE_WITHOUT_BASE_THREADS, *out++ = TPDE_WITHOUT_BASE_SHARED;
    *out++ = TPDE_CONDITIONED_TABLES(TPDE_CLASS_COUNT_MAX, TPDE_CLASS_COUNT_MAX * TPDE_TOKEN_COUNT_MAX);
    *out++ = (u32)TPDE_SCRATCH_HEAD(100), *out++ = TPDE_STATUS_HEADER_PAYLOAD_ROOT, *out++ = TPDE_STATUS_NOT_RUN;
    *out++ = TPDE_MODE_COMMIT, *out++ = TPDE_FLAG_NO_CRC, *out++ = TPDE_NO_TABLES;
    *out++ = TPDE_STRIDED_TENSOR, *out++ = TPDE_DERIVED_TENSOR;
    static_assert(TPDE_LAYOUT_WORDS == 7 + 3 + 10 + 12 + 5 + 9 + 20 + 15, "the words of the report");
    if (out - first != TPDE_LAYOUT_WORDS) *first = 0;
}
