// The functions of the CUDA runtime that the minimal consumers call, on a processor: device memory is memory of the process, and
// blocks run on the emulator of kernels/emulator/. For tests without a device.
#pragma once
#include <memory>
#include <vector>
#include "../../kernels/emulator/cuda.h" // last: it defines macros whose names system headers use

enum cudaError_t { cudaSuccess };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };

inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaMemGetInfo(size_t* free, size_t* all) { return *free = *all = size_t(1) << 30, cudaSuccess; }

// Each allocation has its exact size, so that the sanitizer of addresses sees accesses behind it.
inline std::vector<std::unique_ptr<char[]>> device_memory;
inline cudaError_t cudaMalloc(void** memory, size_t size) {
    device_memory.emplace_back(new char[size]);
    memset(*memory = device_memory.back().get(), 0xA5, size);
    return cudaSuccess;
}
inline cudaError_t cudaMemset(void* memory, int value, size_t size) { return memset(memory, value, size), cudaSuccess; }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
    if (size > 0) memcpy(to, from, size);
    return cudaSuccess;
}
template <class T> cudaError_t cudaMemcpyToSymbol(T& symbol, const void* from, size_t size) {
    return cudaMemcpy(&symbol, from, size, cudaMemcpyHostToDevice);
}

template <auto KERNEL, class T> void launch_on_processor(unsigned blocks, unsigned threads, const T& argument) {
    emulator::launch({blocks, threads, 0, 1}, [](const void* bytes) { KERNEL(*(const T*)bytes); }, &argument);
}
#define LAUNCH(kernel, blocks, threads, argument) launch_on_processor<kernel>(blocks, threads, argument)
