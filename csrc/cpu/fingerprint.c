/* SPDX-License-Identifier: BSD-3-Clause */
#include "fingerprint.h"

#include <string.h>

enum { N_LANES = 4, WORD_BYTES = 8, BLOCK_BYTES = N_LANES * WORD_BYTES };

/* Odd, with bits evenly spread. P, Q: of the words and of the lanes; the others keep the two halves apart. */
static const uint64_t P = 0xc2b2ae3d27d4eb4fU;
static const uint64_t Q = 0x9e3779b185ebca87U;
static const uint64_t R = 0x165667b19e3779f9U;
static const uint64_t S = 0x27d4eb2f165667c5U;

static inline uint64_t rotl(uint64_t word, int n_bits) {
    return (word << n_bits) | (word >> (64 - n_bits));
}

static inline uint64_t step(uint64_t lane, const unsigned char *at) {
    uint64_t word;
    memcpy(&word, at, WORD_BYTES);
    return rotl(lane + word * P, 31) * Q;
}

/* Four chains that do not wait for each other keep the multiplier busy: eight products a block, five cycles a chain.
 * Written out, because at -O2 a loop over an array of lanes goes through memory and is a third slower. */
static void absorb(uint64_t lanes[N_LANES], const unsigned char *block, size_t n_blocks) {
    uint64_t a = lanes[0];
    uint64_t b = lanes[1];
    uint64_t c = lanes[2];
    uint64_t d = lanes[3];
    for (; n_blocks > 0; n_blocks--, block += BLOCK_BYTES) {
        a = step(a, block);
        b = step(b, block + WORD_BYTES);
        c = step(c, block + 2 * WORD_BYTES);
        d = step(d, block + 3 * WORD_BYTES);
    }
    lanes[0] = a;
    lanes[1] = b;
    lanes[2] = c;
    lanes[3] = d;
}

static uint64_t scatter(uint64_t word) {
    word = (word ^ (word >> 33)) * P;
    word = (word ^ (word >> 29)) * R;
    return word ^ (word >> 32);
}

void tfg_cpu_fingerprint(const void *bytes, size_t size_bytes, uint64_t out[2]) {
    const size_t tail_bytes = size_bytes % BLOCK_BYTES;
    uint64_t lanes[N_LANES] = {P, Q, R, S};
    absorb(lanes, bytes, size_bytes / BLOCK_BYTES);
    if (tail_bytes > 0) {
        unsigned char filled[BLOCK_BYTES] = {0};
        memcpy(filled, (const unsigned char *)bytes + (size_bytes - tail_bytes), tail_bytes);
        absorb(lanes, filled, 1);
    }
    uint64_t low = size_bytes * R;
    uint64_t high = size_bytes * S;
    for (int i = 0; i < N_LANES; i++) {
        const uint64_t lane = scatter(lanes[i]);
        low = rotl(low ^ lane, 27) * Q + R;
        high = rotl(high + lane * S, 37) * P + Q;
    }
    out[0] = scatter(low);
    out[1] = scatter(high);
}
