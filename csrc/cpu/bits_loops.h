/* SPDX-License-Identifier: BSD-3-Clause
 *
 * bits_loops: boolean storages (masks of dropout and ReLU), eight elements a byte. The CUDA kernels' oracle.
 *
 *      element i  <->  bit i % 8 of byte i / 8; bits past the end are zero
 *
 * Law: unpacking what was packed gives the same bytes, if all of them were 0 or 1. A torch.bool made by reinterpreting memory may hold
 * others: then *is_odd says so, and the bytes must be kept instead.
 * Threads: no state.
 */
#ifndef TFG_CPU_BITS_LOOPS_H
#define TFG_CPU_BITS_LOOPS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* packed: (n_elems + 7) / 8 bytes. *is_odd becomes 0 or 1. */
void tfg_cpu_bits_pack(const uint8_t *bytes, int64_t n_elems, uint8_t *packed, int32_t *is_odd);
void tfg_cpu_bits_unpack(const uint8_t *packed, int64_t n_elems, uint8_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
