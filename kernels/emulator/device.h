// Implements the functions of device.cuh for a processor. Included by device.cuh, after cuda.h and format.cuh.
#pragma once

// ---- Shared memory. Addresses count from the start of the dynamic memory; variables before it have negative ones ----

inline void* dynamic_shared_memory() { return emulator::dynamic_memory; }
inline u32 shared_address(const void* pointer) { return (u32)((const u8*)pointer - emulator::dynamic_memory); }
inline void* shared_pointer(u32 at) { return emulator::dynamic_memory + (i32)at; }

template <u32 OFFSET = 0> u32 shared_u8(u32 at, EMULATOR_HERE) {
    return emulator::shared_at<u8>((i64)(i32)at + OFFSET, location);
}
template <u32 OFFSET = 0> u32 shared_u16(u32 at, EMULATOR_HERE) {
    return emulator::shared_at<u16>((i64)(i32)at + OFFSET, location);
}
template <u32 OFFSET = 0> u32 shared_u32(u32 at, EMULATOR_HERE) {
    return emulator::shared_at<u32>((i64)(i32)at + OFFSET, location);
}
template <u32 OFFSET = 0> u64 shared_u64(u32 at, EMULATOR_HERE) {
    return emulator::shared_at<u64>((i64)(i32)at + OFFSET, location);
}
template <u32 OFFSET = 0> uint2 shared_u32x2(u32 at, EMULATOR_HERE) {
    return emulator::shared_at<uint2>((i64)(i32)at + OFFSET, location);
}
template <u32 OFFSET = 0> uint4 shared_u32x4(u32 at, EMULATOR_HERE) {
    return emulator::shared_at<uint4>((i64)(i32)at + OFFSET, location);
}
inline void set_shared_u8(u32 at, u32 value, EMULATOR_HERE) { emulator::set_shared(at, (u8)value, location); }
inline void set_shared_u16(u32 at, u32 value, EMULATOR_HERE) { emulator::set_shared(at, (u16)value, location); }
inline void set_shared_u32(u32 at, u32 value, EMULATOR_HERE) { emulator::set_shared(at, value, location); }
inline void set_shared_u64(u32 at, u64 value, EMULATOR_HERE) { emulator::set_shared(at, value, location); }
inline void set_shared_u32x2(u32 at, uint2 value, EMULATOR_HERE) { emulator::set_shared(at, value, location); }
inline void set_shared_u32x4(u32 at, uint4 value, EMULATOR_HERE) { emulator::set_shared(at, value, location); }

inline u32 first_adds_to_shared(u32 thread, u32 at, u32 value) {
    return thread == 0 ? atomicAdd((u32*)shared_pointer(at), value) : 0;
}

// ---- Asynchronous copies from global to shared memory. The bytes appear when a thread waits for the copy ----

template <int SIZE> inline void copy_async(u32 to, const void* from, EMULATOR_HERE) {
    memset(shared_pointer(to), 0x5C, SIZE);
    emulator::begin_copy(shared_pointer(to), from, SIZE, 0, location);
}
// Copies `size` bytes and fills the rest with zeros.
template <int SIZE> inline void copy_async(u32 to, const void* from, u32 size, EMULATOR_HERE) {
    memset(shared_pointer(to), 0x5C, SIZE);
    if (size > SIZE) emulator::fail(location, "invalid copy: %u bytes, at most %d allowed", size, SIZE);
    emulator::begin_copy(shared_pointer(to), from, size, SIZE - size, location);
}
inline void commit_copies() { emulator::commit_copies(); }
template <int PENDING> inline void wait_for_copies() {
    emulator::Copy copy;
    while (emulator::next_copy(PENDING, copy)) {
        memcpy(copy.to, copy.from, copy.size);
        memset((u8*)copy.to + copy.size, 0, copy.zeros);
    }
}

// ---- Global memory ----

inline uint4 load_once(const void* from) { return *(const uint4*)from; }
inline void prefetch(const void*) {}
inline void prefetch_l2(const void*) {}

// ---- Warps and barriers ----

inline u32 add_from_before(u32 x, u32 by, EMULATOR_HERE) {
    u32 from = __shfl_up_sync(~0u, x, by, 32, location);
    return threadIdx.x % 32 >= by ? x + from : x;
}
inline void arrive_for(u32 barrier, EMULATOR_HERE) { emulator::barrier(barrier, 64, false, 0, location); }
inline void wait_at(u32 barrier, EMULATOR_HERE) { emulator::barrier(barrier, 64, true, 0, location); }

// ---- Arithmetic ----

inline u32 permute_bytes(u32 low, u32 high, u32 selector) {
    u64 bytes = (u64)high << 32 | low;
    u32 value = 0;
    for (int i = 0; i < 4; i++) {
        u32 digit = selector >> 4 * i & 15, byte = (u32)(bytes >> 8 * (digit & 7) & 255);
        value |= (digit < 8 ? byte : byte & 128 ? 255 : 0) << 8 * i;
    }
    return value;
}

inline u32 not_and_or(u32 a, u32 b, u32 c) { return ~a & b | c; }

inline void count_if(u32& count, bool counted) { count += counted; }

// Kernels must be correct with any number, because blocks run on all multiprocessors of a device.
inline u32 multiprocessor() { return blockIdx.x * 7 + 3; }
