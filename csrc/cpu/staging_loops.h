/* SPDX-License-Identifier: BSD-3-Clause
 *
 * staging_loops: strided tensors into one buffer, and back. The CUDA kernels' oracle, and what moves them on the host.
 *
 * views: laid by tfg_staging_lay. buffer: at a multiple of 16 bytes, of the size it said; the bytes between two views are not touched.
 * Threads: no state.
 */
#ifndef TFG_CPU_STAGING_LOOPS_H
#define TFG_CPU_STAGING_LOOPS_H

#include "core/staging.h"

#ifdef __cplusplus
extern "C" {
#endif

void tfg_cpu_staging_gather(const tfg_staging_view *views, int64_t n_views, void *buffer);
void tfg_cpu_staging_scatter(const tfg_staging_view *views, int64_t n_views, const void *buffer);

#ifdef __cplusplus
}
#endif
#endif
