/* SPDX-License-Identifier: BSD-3-Clause */
#include "bits_loops.h"

/* The low bits of eight bytes, gathered in the highest byte of a product: bit 8 i moves to bit 56 + i. (Little-endian.) */
static const uint64_t LOW_BITS = UINT64_C(0x0101010101010101);
static const uint64_t GATHER = UINT64_C(0x0102040810204080);

static uint8_t packed_word(uint64_t word) {
    return (uint8_t)((word & LOW_BITS) * GATHER >> 56);
}

void tfg_cpu_bits_pack(const uint8_t *bytes, int64_t n_elems, uint8_t *packed, int32_t *is_odd) {
    uint64_t seen = 0;
    for (int64_t i = 0; i < n_elems; i += 8) {
        uint64_t word = 0;
        for (int64_t j = 0; j < 8 && i + j < n_elems; j++) {
            word |= (uint64_t)bytes[i + j] << (8 * j);
        }
        seen |= word;
        packed[i / 8] = packed_word(word);
    }
    *is_odd = (seen & ~LOW_BITS) != 0;
}

void tfg_cpu_bits_unpack(const uint8_t *packed, int64_t n_elems, uint8_t *bytes) {
    for (int64_t i = 0; i < n_elems; i++) {
        bytes[i] = packed[i / 8] >> (i % 8) & 1;
    }
}
