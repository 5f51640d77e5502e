/* SPDX-License-Identifier: BSD-3-Clause
 *
 * digest_loops: core/digest.h's fingerprint, one word after another. The CUDA kernel's oracle.
 *
 * Threads: no state.
 */
#ifndef TFG_CPU_DIGEST_LOOPS_H
#define TFG_CPU_DIGEST_LOOPS_H

#include "core/digest.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Any alignment. bytes may be NULL when size_bytes is 0. */
void tfg_cpu_digest(const void *bytes, int64_t size_bytes, uint64_t out[2]);

#ifdef __cplusplus
}
#endif
#endif
