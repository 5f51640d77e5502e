/* SPDX-License-Identifier: BSD-3-Clause
 *
 * digest: the arithmetic of a fingerprint that thousands of threads can make at once. For device memory; csrc/cpu/fingerprint.h is the
 * one for host memory. The two are never compared with each other.
 *
 * Picture (bytes that are missing at the end of the last row are zero)
 *
 *      chunk    16 rows of 512 words of 8 bytes; the words below each other are a lane
 *      lane     state <- (rotl(state, 29) + word) * P                    one to one in the state, and one to one in the word
 *      low      sum over all lanes of scatter(state ^ place * R)         place: chunk * 512 + lane
 *      high     sum over all lanes of scatter(state * S + place * Q)     both: plus one for the size
 *
 * Laws: sums do not depend on the order, so any threads give the same bits. Bytes of one size that differ in a single lane differ in
 * both halves, for certain; else they agree with a chance of about 2^-64 or less. Not a secret-keeper.
 */
#ifndef TFG_CORE_DIGEST_H
#define TFG_CORE_DIGEST_H

#include <stdint.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TFG_DIGEST_LANES = 512, TFG_DIGEST_ROWS = 16, TFG_DIGEST_ROW_BYTES = 8 * TFG_DIGEST_LANES,
       TFG_DIGEST_CHUNK_BYTES = TFG_DIGEST_ROWS * TFG_DIGEST_ROW_BYTES };

/* Odd, with bits evenly spread. */
#define TFG_DIGEST_P UINT64_C(0xd1342543de82ef95)
#define TFG_DIGEST_Q UINT64_C(0xaf251af3b0f025b5)
#define TFG_DIGEST_R UINT64_C(0xb564ef22ec7aece5)
#define TFG_DIGEST_S UINT64_C(0xf7c2ebc08f67f2b5)

TFG_ANYWHERE static inline uint64_t tfg_digest_absorb(uint64_t state, uint64_t word) {
    return ((state << 29 | state >> 35) + word) * TFG_DIGEST_P;
}

TFG_ANYWHERE static inline uint64_t tfg_digest_scatter(uint64_t word) {
    word = (word ^ word >> 32) * TFG_DIGEST_Q;
    word = (word ^ word >> 29) * TFG_DIGEST_R;
    return word ^ word >> 32;
}

/* What a lane adds to each half. */
TFG_ANYWHERE static inline uint64_t tfg_digest_low(uint64_t state, uint64_t place) {
    return tfg_digest_scatter(state ^ place * TFG_DIGEST_R);
}

TFG_ANYWHERE static inline uint64_t tfg_digest_high(uint64_t state, uint64_t place) {
    return tfg_digest_scatter(state * TFG_DIGEST_S + place * TFG_DIGEST_Q);
}

#ifdef __cplusplus
}
#endif
#endif
