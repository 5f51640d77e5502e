/* SPDX-License-Identifier: BSD-3-Clause */
#include "digest_loops.h"

#include <string.h>

/* Bytes past the end are zero. */
static uint64_t word_at(const unsigned char *bytes, int64_t size_bytes, int64_t first) {
    const int64_t n_left = size_bytes - first;
    uint64_t word = 0;
    if (n_left > 0) {
        memcpy(&word, bytes + first, (size_t)(n_left < 8 ? n_left : 8));
    }
    return word;
}

void tfg_cpu_digest(const void *bytes, int64_t size_bytes, uint64_t out[2]) {
    out[0] = tfg_digest_low((uint64_t)size_bytes, ~UINT64_C(0));
    out[1] = tfg_digest_high((uint64_t)size_bytes, ~UINT64_C(0));
    for (int64_t first = 0; first < size_bytes; first += TFG_DIGEST_CHUNK_BYTES) {
        const int64_t n_left = size_bytes - first;
        const int64_t chunk_bytes = n_left < TFG_DIGEST_CHUNK_BYTES ? n_left : TFG_DIGEST_CHUNK_BYTES;
        const uint64_t first_place = (uint64_t)(first / TFG_DIGEST_CHUNK_BYTES * TFG_DIGEST_LANES);
        for (int64_t lane = 0; lane < TFG_DIGEST_LANES; lane++) {
            uint64_t state = 0;
            for (int64_t row = 0; row < chunk_bytes; row += TFG_DIGEST_ROW_BYTES) {
                state = tfg_digest_absorb(state, word_at(bytes, size_bytes, first + row + 8 * lane));
            }
            out[0] += tfg_digest_low(state, first_place + (uint64_t)lane);
            out[1] += tfg_digest_high(state, first_place + (uint64_t)lane);
        }
    }
}
