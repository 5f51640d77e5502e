// SPDX-License-Identifier: BSD-3-Clause
//
// bits_kernels: boolean storages, eight elements a byte, and back. Reference: csrc/cpu/bits_loops.c.
//
// Who does what: one thread eight elements and their byte, so that a warp reads 256 bytes and writes 32, or the other way round.
// Bytes: 9 for 8 elements. Numbers: exact.
// History: not run on a GPU yet.
#include "device.h"

static constexpr int N_THREADS = 256;
static constexpr uint64_t LOW_BITS = UINT64_C(0x0101010101010101);
static constexpr uint64_t GATHER = UINT64_C(0x0102040810204080); // bit 8 i of a word moves to bit 56 + i

static __device__ inline int64_t my_byte() {
    return static_cast<int64_t>(blockIdx.x) * N_THREADS + threadIdx.x;
}

static __global__ void __launch_bounds__(N_THREADS) bits_pack_kernel(const uint8_t *bytes, int64_t n_elems, uint8_t *packed,
                                                                     int32_t *is_odd) {
    const int64_t first = my_byte() * 8;
    if (first >= n_elems) {
        return;
    }
    uint64_t word = 0;
    if (is_aligned<uint64_t>(bytes) && first + 8 <= n_elems) {
        word = *reinterpret_cast<const uint64_t *>(bytes + first);
    } else {
        for (int i = 0; i < 8 && first + i < n_elems; i++) {
            word |= static_cast<uint64_t>(bytes[first + i]) << (8 * i);
        }
    }
    packed[first / 8] = static_cast<uint8_t>((word & LOW_BITS) * GATHER >> 56);
    if ((word & ~LOW_BITS) != 0) {
        *is_odd = 1; // whoever comes, it is the same
    }
}

// Spreads bit i to byte i: eight copies of the byte, of each its own bit; what is not zero carries into the byte's highest bit, no further.
static __device__ inline uint64_t spread(uint8_t byte) {
    const uint64_t own = byte * LOW_BITS & UINT64_C(0x8040201008040201);
    return (own + UINT64_C(0x7f7f7f7f7f7f7f7f)) >> 7 & LOW_BITS;
}

static __global__ void __launch_bounds__(N_THREADS) bits_unpack_kernel(const uint8_t *packed, int64_t n_elems, uint8_t *bytes) {
    const int64_t first = my_byte() * 8;
    if (first >= n_elems) {
        return;
    }
    const uint64_t word = spread(packed[first / 8]);
    if (is_aligned<uint64_t>(bytes) && first + 8 <= n_elems) {
        *reinterpret_cast<uint64_t *>(bytes + first) = word;
        return;
    }
    for (int i = 0; i < 8 && first + i < n_elems; i++) {
        bytes[first + i] = static_cast<uint8_t>(word >> (8 * i));
    }
}

static tfg_status count_blocks(int64_t n_elems, int64_t *out_n_blocks, tfg_error *err) {
    const int64_t elems_a_block = N_THREADS * 8;
    *out_n_blocks = n_elems / elems_a_block + (n_elems % elems_a_block != 0);
    return n_elems >= 0 && *out_n_blocks <= MAX_BLOCKS
               ? TFG_OK
               : tfg_fail(TFG_ERR_ARGUMENT, err, "bits: %lld elements", static_cast<long long>(n_elems));
}

tfg_status tfg_cuda_bits_pack(const uint8_t *bytes, int64_t n_elems, uint8_t *packed, int32_t *is_odd, tfg_cuda_stream stream,
                              tfg_error *err) {
    int64_t n_blocks;
    TFG_TRY(count_blocks(n_elems, &n_blocks, err));
    (void)cudaMemsetAsync(is_odd, 0, sizeof *is_odd, stream); // an error is the runtime's last one too
    if (n_blocks > 0) {
        TFG_LAUNCH(bits_pack_kernel, n_blocks, N_THREADS, stream, bytes, n_elems, packed, is_odd);
    }
    return launched("bits_pack", err);
}

tfg_status tfg_cuda_bits_unpack(const uint8_t *packed, int64_t n_elems, uint8_t *bytes, tfg_cuda_stream stream, tfg_error *err) {
    int64_t n_blocks;
    TFG_TRY(count_blocks(n_elems, &n_blocks, err));
    if (n_blocks > 0) {
        TFG_LAUNCH(bits_unpack_kernel, n_blocks, N_THREADS, stream, packed, n_elems, bytes);
    }
    return launched("bits_unpack", err);
}
