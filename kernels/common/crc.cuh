// CRC-32 of a payload by all threads of a block.
//
// The payload is divided into rows of THREADS words. Zero words before the payload complete the first row. A CRC that
// starts at zero ignores them. Each thread processes one column. A step from one row to the next multiplies the
// remainder by x^(32·THREADS) mod P. That map is linear over GF(2), so it is the XOR of one table look-up per five bits
// of the remainder. A table has 32 words, one register per thread of the warp, and is read by shuffle. Shared memory
// would be slower because of bank conflicts. At the end column i is multiplied by x^(32·(THREADS − i)), and the columns
// are XORed.
#pragma once
#include "common/block.cuh"

#define CRC_POLYNOMIAL 0xEDB88320u

// Returns a·b mod P, with reflected bits.
__host__ __device__ constexpr u32 crc_multiply(u32 a, u32 b) {
    u32 product = 0;
    for (int bit = 31; bit >= 0; bit--) {
        product ^= (0u - (a >> bit & 1)) & b;
        b = b >> 1 ^ ((0u - (b & 1)) & CRC_POLYNOMIAL);
    }
    return product;
}

#define CRC_LOOKUPS 7

template <int THREADS> struct CrcConstants {
    u32 rows[CRC_LOOKUPS][32]; // [k][v] = (v << 5k)·x^(32·THREADS) mod P: product for bits 5k to 5k+4 of a word
    u32 columns[THREADS];      // [i] = x^(32·(THREADS − i)) mod P
};

template <int THREADS> __host__ __device__ constexpr CrcConstants<THREADS> make_crc_constants() {
    CrcConstants<THREADS> constants{};
    u32 word = 1u << 31; // x^0
    for (int i = 0; i < 32; i++) word = word >> 1 ^ ((0u - (word & 1)) & CRC_POLYNOMIAL);
    u32 power = word;
    for (int i = THREADS - 1; i >= 0; i--) {
        constants.columns[i] = power;
        if (i > 0) power = crc_multiply(power, word);
    }
    for (int i = 0; i < 32; i++) {
        u32 bit = crc_multiply(power, 1u << i);
        for (int value = 0; value < 32; value++) {
            if (value >> i % 5 & 1) constants.rows[i / 5][value] ^= bit;
        }
    }
    return constants;
}

template <int THREADS> __device__ const CrcConstants<THREADS> CRC = make_crc_constants<THREADS>();

// Size of the shared memory that block_crc32 uses, in bytes.
#define CRC_SHARED (4 * 32)

// All threads: returns the CRC of the payload. Starts and ends with a barrier.
template <int THREADS> __device__ u32 block_crc32(const Chunk& chunk, u32* partial) {
    constexpr u32 ROWS_PER_STEP = 8;
    u32 thread = threadIdx.x, words = uniform(chunk.size) / 4;
    u32 tables[CRC_LOOKUPS];
#pragma unroll
    for (int i = 0; i < CRC_LOOKUPS; i++) tables[i] = CRC<THREADS>.rows[i][thread % WARP];
    u32 rows = (words + ROWS_PER_STEP * THREADS - 1) / (ROWS_PER_STEP * THREADS) * ROWS_PER_STEP,
        zero_words = rows * THREADS - words;
    u32 sum = 0;
    const u32* payload = (const u32*)chunk.payload;
    u32 batch[ROWS_PER_STEP], prefetched[ROWS_PER_STEP];
    auto load = [&](u32 row) {
#pragma unroll
        for (u32 i = 0; i < ROWS_PER_STEP; i++) {
            u32 word = (row + i) * THREADS + thread;
            prefetched[i] = word >= zero_words && row < rows
                                ? __ldg(payload + (word - zero_words)) ^ (word == zero_words ? ~0u : 0)
                                : 0;
        }
    };
    load(0);
    for (u32 row = 0; row < rows; row += ROWS_PER_STEP) {
#pragma unroll
        for (u32 i = 0; i < ROWS_PER_STEP; i++) batch[i] = prefetched[i];
        // Loads the next batch while the look-ups of this batch run.
        load(row + ROWS_PER_STEP);
#pragma unroll
        for (u32 i = 0; i < ROWS_PER_STEP; i++) {
            u32 product = 0;
#pragma unroll
            for (int k = 0; k < CRC_LOOKUPS; k++) product ^= __shfl_sync(ALL_LANES, tables[k], (i32)(sum >> 5 * k));
            sum = batch[i] ^ product;
        }
    }
    __syncthreads();
    sum = __reduce_xor_sync(ALL_LANES, crc_multiply(CRC<THREADS>.columns[thread], sum));
    if (thread % WARP == 0) partial[thread / WARP] = sum;
    __syncthreads();
    u32 crc = words == 0 ? ~0u : 0;
    for (u32 i = 0; i < THREADS / WARP; i++) crc ^= partial[i];
    for (u32 at = 4 * words; at < chunk.size; at++) {
        crc ^= chunk.payload[at];
        for (int i = 0; i < 8; i++) crc = crc >> 1 ^ ((0u - (crc & 1)) & CRC_POLYNOMIAL);
    }
    __syncthreads();
    return ~crc;
}

// All threads: checks the CRC and the padding of the payload, and whether its digest differed. Returns the same errors in
// every thread.
template <int THREADS>
__device__ __noinline__ u32 check_payload(const Launch& launch, const Chunk& chunk, u32* shared) {
    if (launch.flags & TPDE_FLAG_NO_CRC) return 0;
    u32 errors = block_crc32<THREADS>(chunk, shared) != chunk.crc32 ? error(TPDE_STATUS_PAYLOAD_CRC32) : 0;
    for (u32 at = chunk.size; at < padded(chunk.size); at++) {
        if (chunk.payload[at] != 0) errors |= error(TPDE_STATUS_PAYLOAD_PADDING);
    }
    if (launch.digests && ((const u32*)launch.digests)[chunk.number] != TPDE_STATUS_OK)
        errors |= error(TPDE_STATUS_PAYLOAD_DIGEST);
    return errors;
}
