// SPDX-License-Identifier: BSD-3-Clause
//
// device: the few words of CUDA that kernels here use, and what all launchers share. For .cu files only.
//
// The same sources compile a second time as plain C++ (tests/core/cuda_on_host.h gives the words; TFG_CUDA_ON_HOST is then set) and run
// on the CPU under the sanitizers. So: no dynamic shared memory, no word that is not in that header, and TFG_LAUNCH instead of <<< >>>.
#pragma once

#ifndef TFG_CUDA_ON_HOST
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define TFG_LAUNCH(kernel, n_blocks, n_threads, stream, ...) \
    kernel<<<static_cast<unsigned>(n_blocks), static_cast<unsigned>(n_threads), 0, stream>>>(__VA_ARGS__)
#endif

#include <stdint.h>

#include "core/floats.h"
#include "launch.h"

static constexpr int WARP = 32;
static constexpr unsigned WHOLE_WARP = 0xffffffffU;
static constexpr int64_t MAX_BLOCKS = 0x7fffffff; // of a grid's first dimension
static constexpr size_t MAX_ARGUMENT_BYTES = 4096; // of a kernel, on every GPU

// Four neighbouring elements, read and written at once where they lie right for it.
template <typename T> struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) Four {
    T at[4];
};

template <typename T> static __device__ inline bool is_aligned(const void *address) {
    return reinterpret_cast<uintptr_t>(address) % alignof(T) == 0;
}

// One instruction on the device, the core's integer arithmetic elsewhere: the same numbers.
static __device__ inline float float_of_float16(uint16_t bits) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(bits));
#else
    return tfg_float_of_float16(bits);
#endif
}

static __device__ inline uint16_t float16_of_float(float value) {
#ifdef __CUDA_ARCH__
    return __half_as_ushort(__float2half_rn(value));
#else
    return tfg_float16_of_float(value);
#endif
}

// The last call of every launcher.
static inline tfg_status launched(const char *what, tfg_error *err) {
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? TFG_OK : tfg_fail(TFG_ERR_CUDA, err, "%s: %s", what, cudaGetErrorName(error));
}
