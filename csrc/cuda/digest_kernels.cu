// SPDX-License-Identifier: BSD-3-Clause
//
// digest_kernels: 128 bits over a storage's bytes, in one pass. Reference: csrc/cpu/digest_loops.c, arithmetic: csrc/core/digest.h.
//
// Who does what: one block a chunk, 256 threads, two neighbouring lanes a thread: sixteen bytes a row at once. The lanes' sums go
// through shuffles and shared memory, and with two atomic additions a block to the result: integers, so no order shows.
//
// Bytes: each is read once. Work: one 64-bit product for eight bytes.
// History: not run on a GPU yet.
#include "core/digest.h"

#include "device.h"

static constexpr int N_THREADS = TFG_DIGEST_LANES / 2;
static constexpr int N_WARPS = N_THREADS / WARP;
static constexpr int64_t CHUNK_BYTES = TFG_DIGEST_CHUNK_BYTES;

struct alignas(16) TwoWords {
    uint64_t at[2];
};

// Sixteen bytes from `first` on, zeros past the end.
static __device__ inline TwoWords some_words(const unsigned char *bytes, int64_t size_bytes, int64_t first) {
    TwoWords words = {};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (first + i < size_bytes) {
            words.at[i / 8] |= static_cast<uint64_t>(bytes[first + i]) << (8 * (i % 8)); // little-endian, as all CUDA hosts are
        }
    }
    return words;
}

static __device__ inline uint64_t sum_warp(uint64_t sum) {
    for (int apart = 1; apart < WARP; apart *= 2) {
        sum += __shfl_xor_sync(WHOLE_WARP, sum, apart);
    }
    return sum;
}

static __device__ inline void add_atomically(uint64_t *at, uint64_t sum) {
    atomicAdd(reinterpret_cast<unsigned long long *>(at), static_cast<unsigned long long>(sum));
}

static __device__ inline void add_block(uint64_t low, uint64_t high, uint64_t *out) {
    __shared__ uint64_t warps[2][N_WARPS];
    low = sum_warp(low);
    high = sum_warp(high);
    if (threadIdx.x % WARP == 0) {
        warps[0][threadIdx.x / WARP] = low;
        warps[1][threadIdx.x / WARP] = high;
    }
    __syncthreads();
    if (threadIdx.x < 2) {
        uint64_t sum = 0;
        for (int i = 0; i < N_WARPS; i++) {
            sum += warps[threadIdx.x][i];
        }
        add_atomically(out + threadIdx.x, sum);
    }
}

static __global__ void __launch_bounds__(N_THREADS) digest_kernel(const unsigned char *bytes, int64_t size_bytes, uint64_t *out) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * CHUNK_BYTES;
    const int64_t end = first + CHUNK_BYTES < size_bytes ? first + CHUNK_BYTES : size_bytes;
    const bool is_at_once = is_aligned<TwoWords>(bytes);
    uint64_t even = 0;
    uint64_t odd = 0;
#pragma unroll 8
    for (int64_t row = first; row < end; row += TFG_DIGEST_ROW_BYTES) {
        const int64_t at = row + 16 * static_cast<int64_t>(threadIdx.x);
        const TwoWords words = is_at_once && at + 16 <= size_bytes ? *reinterpret_cast<const TwoWords *>(bytes + at)
                                                                  : some_words(bytes, size_bytes, at);
        even = tfg_digest_absorb(even, words.at[0]);
        odd = tfg_digest_absorb(odd, words.at[1]);
    }
    uint64_t low = 0;
    uint64_t high = 0;
    if (first < end) {
        const uint64_t place = static_cast<uint64_t>(blockIdx.x) * TFG_DIGEST_LANES + 2 * threadIdx.x;
        low = tfg_digest_low(even, place) + tfg_digest_low(odd, place + 1);
        high = tfg_digest_high(even, place) + tfg_digest_high(odd, place + 1);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        low += tfg_digest_low(static_cast<uint64_t>(size_bytes), ~UINT64_C(0));
        high += tfg_digest_high(static_cast<uint64_t>(size_bytes), ~UINT64_C(0));
    }
    add_block(low, high, out);
}

tfg_status tfg_cuda_digest(const void *bytes, int64_t size_bytes, uint64_t *out, tfg_cuda_stream stream, tfg_error *err) {
    if (size_bytes < 0 || size_bytes > MAX_BLOCKS * CHUNK_BYTES) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "digest: %lld bytes", static_cast<long long>(size_bytes));
    }
    const int64_t n_blocks = size_bytes == 0 ? 1 : (size_bytes - 1) / CHUNK_BYTES + 1;
    (void)cudaMemsetAsync(out, 0, 2 * sizeof *out, stream); // an error is the runtime's last one too
    TFG_LAUNCH(digest_kernel, n_blocks, N_THREADS, stream, static_cast<const unsigned char *>(bytes), size_bytes, out);
    return launched("digest", err);
}
