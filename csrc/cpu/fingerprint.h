/* SPDX-License-Identifier: BSD-3-Clause
 *
 * fingerprint: 128 bits that tell whether two runs of an operator gave the same bytes.
 *
 * Not a secret-keeper: whoever wants a collision finds one. The bits depend on the machine's byte order and on this
 * file; they are compared within one process and never stored.
 *
 * Picture: 32 bytes at a time, word i of each block goes into lane i (of four); a last, short block is filled up with zeros.
 *
 *      lane[i] <- rotl(lane[i] + word[i] * P, 31) * Q          one to one in the lane, and one to one in the word
 *      out     <- both halves from all lanes and the size, each step one to one in the lane
 *
 * Law: equal bytes give equal bits, wherever they lie. Bytes of one size that differ in a single lane's final state
 * (a single word, say) differ in both halves, for certain; else they agree with a chance of about 2^-64 or less.
 * Threads: no state.
 */
#ifndef TFG_CPU_FINGERPRINT_H
#define TFG_CPU_FINGERPRINT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Any alignment. bytes may be NULL when size_bytes is 0. O(size_bytes), one pass, no memory. */
void tfg_cpu_fingerprint(const void *bytes, size_t size_bytes, uint64_t out[2]);

#ifdef __cplusplus
}
#endif
#endif
