/* SPDX-License-Identifier: BSD-3-Clause
 *
 * launch: the kernels' doors. C, and no header of CUDA's: any C or C++ file may include this.
 *
 * Each does on the device what its twin in csrc/cpu does, with the same arguments less the stream, and gives the same bits.
 * A launcher only launches: on the caller's stream and current device, without allocating, waiting or asking the device anything.
 * Pointers named at, bytes, partials, ... are device memory, borrowed until the stream has passed; lists are host memory, read before
 * the call returns. TFG_ERR_CUDA with the runtime's name for the error; TFG_ERR_ARGUMENT as the twin.
 *
 * State: compiled by nvcc 13.0 for sm_80, sm_90 and sm_120; their source runs on the host in tests/core under ASan and UBSan.
 *        Not run on a GPU yet, so no figure is given for any of them.
 *
 * Threads: no state.
 */
#ifndef TFG_CUDA_LAUNCH_H
#define TFG_CUDA_LAUNCH_H

#include "core/clip.h"
#include "core/staging.h"
#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *tfg_cuda_stream;

/* partials: one double per chunk of the list that tfg_clip_cut has cut. */
TFG_CHECKED tfg_status tfg_cuda_clip_partials(tfg_clip_norm norm, const tfg_clip_tensor *tensors, int64_t n_tensors, double *partials,
                                              tfg_cuda_stream stream, tfg_error *err);

/* From all partials the total (infinite from `overflow` on) and the coefficient, one double each. */
TFG_CHECKED tfg_status tfg_cuda_clip_finish(tfg_clip_norm norm, const double *partials, int64_t n_partials, double max_norm,
                                            double overflow, double *total, double *coefficient, tfg_cuda_stream stream,
                                            tfg_error *err);

/* Reads the coefficient on the device. Where it is 1, no element is read or written. */
TFG_CHECKED tfg_status tfg_cuda_clip_scale(const double *coefficient, const tfg_clip_tensor *tensors, int64_t n_tensors,
                                           tfg_cuda_stream stream, tfg_error *err);

/* core/digest.h's fingerprint; out: two words. 0 <= size_bytes <= 2^47. */
TFG_CHECKED tfg_status tfg_cuda_digest(const void *bytes, int64_t size_bytes, uint64_t *out, tfg_cuda_stream stream, tfg_error *err);

/* 0 <= n_elems <= 2^42. */
TFG_CHECKED tfg_status tfg_cuda_bits_pack(const uint8_t *bytes, int64_t n_elems, uint8_t *packed, int32_t *is_odd,
                                          tfg_cuda_stream stream, tfg_error *err);
TFG_CHECKED tfg_status tfg_cuda_bits_unpack(const uint8_t *packed, int64_t n_elems, uint8_t *bytes, tfg_cuda_stream stream,
                                            tfg_error *err);

/* views: laid by tfg_staging_lay; buffer: device memory, or host memory that the device can reach. */
TFG_CHECKED tfg_status tfg_cuda_staging_gather(const tfg_staging_view *views, int64_t n_views, void *buffer, tfg_cuda_stream stream,
                                               tfg_error *err);
TFG_CHECKED tfg_status tfg_cuda_staging_scatter(const tfg_staging_view *views, int64_t n_views, const void *buffer,
                                                tfg_cuda_stream stream, tfg_error *err);

#ifdef __cplusplus
}
#endif
#endif
