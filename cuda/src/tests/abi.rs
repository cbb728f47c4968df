//! The layout of shared structs, as the device compiler sees them.

use super::super::abi::{self, DeviceTensor, Launch, TensorForm, TensorRows, mode};
use std::mem::offset_of;
use tpde_core::format::{ChunkMetadata, ChunkSums, ConditionedHeader};

macro_rules! words {
    ($($type:ident { $($field:ident),+ $(,)? })+) => {
        vec![$(size_of::<$type>() as u32, $(offset_of!($type, $field) as u32,)+)+]
    };
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_device_agrees_with_every_size_offset_and_constant() {
    let device = super::device();
    let mut expected = words! {
        ChunkMetadata { blob_offset, compressed_size, uncompressed_size, num_deltas, crc32, output_offset }
        ChunkSums { base_sum, target_sum }
        ConditionedHeader {
            low_bits, states_log2, segments_log2, activity_bits, first_context, context_count, reserved, exception_count, center,
        }
        DeviceTensor { base, output, lanes, base_lanes, first_chunk, tables, dtype, codec, lane_log2, chunk_lanes_log2, reserved }
        TensorRows { base_row, base_pitch, output_row, output_pitch }
        TensorForm { scales, scales_row, scales_pitch, columns, depth, base_dtype, form, reserved }
        Launch {
            chunks, sums, chunk_tensors, tensors, tables, blob, statuses, flag, order, scratch, first, count, mode, flags,
            scratch_slots, scratch_slot_bytes, digests, rows, forms,
        }
    };
    expected.extend([abi::RAW_THREADS, abi::RAW_SHARED, abi::CONDITIONED_THREADS, abi::CONDITIONED_SHARED]);
    expected.extend([abi::WITHOUT_BASE_THREADS, abi::WITHOUT_BASE_SHARED]);
    expected.push(abi::CONDITIONED_TABLES_MAX);
    expected.extend([abi::scratch_head(100) as u32, 12, abi::STATUS_NOT_RUN]);
    expected.extend([mode::COMMIT, abi::FLAG_NO_CRC, abi::NO_TABLES, abi::STRIDED_TENSOR.into(), abi::DERIVED_TENSOR.into()]);
    assert_eq!(device.layout_report(expected.len()).unwrap(), expected);
    eprintln!("layout: {} words agree", expected.len());
}

/// With fewer streams, warps of a block would share one.
#[test]
fn a_small_chunk_has_a_stream_for_each_warp() {
    let streams = tpde::Favor::Speed.decode_cost(1 << 16).streams;
    assert_eq!([abi::CONDITIONED_THREADS, abi::WITHOUT_BASE_THREADS], [32 * streams as u32; 2]);
}
