/* SPDX-License-Identifier: BSD-3-Clause
 *
 * clip_loops: the gradients' partials, and the gradients scaled, a range of chunks at a time. The CUDA kernels' oracle: the order
 * of every sum is core/clip.h's, so the bits of a partial are the same here and there.
 *
 * Each number of the chunks' range is made from its chunk alone: ranges may run on different threads, in any order.
 * Bytes moved: the norm reads each element once, scaling reads and writes it. Both wait for memory.
 *
 * Threads: no state. Distinct ranges write distinct places.
 */
#ifndef TFG_CPU_CLIP_LOOPS_H
#define TFG_CPU_CLIP_LOOPS_H

#include "core/clip.h"

#ifdef __cplusplus
extern "C" {
#endif

/* partials[chunk] for each chunk of [first_chunk, end_chunk). tensors: cut by tfg_clip_cut. Elements have their natural alignment. */
void tfg_cpu_clip_partials(tfg_clip_norm norm, const tfg_clip_tensor *tensors, int64_t n_tensors, int64_t first_chunk,
                           int64_t end_chunk, double *partials);

/* Multiplies the elements of these chunks: float64 in float64, the others in float32 by the coefficient rounded to float32, the
 * product rounded once to the element's kind. Where that coefficient is 1, nothing is written. */
void tfg_cpu_clip_scale(double coefficient, const tfg_clip_tensor *tensors, int64_t n_tensors, int64_t first_chunk,
                        int64_t end_chunk);

#ifdef __cplusplus
}
#endif
#endif
