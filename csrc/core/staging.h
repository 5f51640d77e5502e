/* SPDX-License-Identifier: BSD-3-Clause
 *
 * staging: how strided tensors lie side by side in one buffer, so that one copy carries them all to the host and back. Decides where;
 * moves nothing.
 *
 * Words
 *   view     the elements of one tensor where they are: an address, sizes and strides, outermost first, largest stride first
 *   buffer   the same elements in a row, each view from a multiple of 16 bytes on
 *   element  what is moved at once: as the tensor's, or wider, up to 16 bytes, where neighbours lie right for it
 *   chunk    up to TFG_STAGING_CHUNK_ELEMS neighbouring elements of one view in the buffer
 *
 * Picture: a float32 tensor of 6 x 8 with strides 1, 6 is 6 x 8 elements of 4 bytes; turned, 8 x 6; joined, 48 in a row;
 * widened, 12 of 16 bytes.
 *
 * Laws: the elements of a view share no byte; every byte of them is in the buffer once; gather, then scatter, changes nothing.
 */
#ifndef TFG_CORE_STAGING_H
#define TFG_CORE_STAGING_H

#include <stdint.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TFG_STAGING_MAX_DIMS = 6, TFG_STAGING_MAX_ELEM_BYTES = 16, TFG_STAGING_CHUNK_ELEMS = 4096 };

typedef struct tfg_staging_view {
    void *at; /* borrowed */
    int64_t n_elems;
    int64_t first_byte;  /* of the buffer; filled in by tfg_staging_lay */
    int64_t first_chunk; /* likewise */
    int32_t elem_bytes;  /* 1, 2, 4, 8 or 16 */
    int32_t n_dims;      /* at least 1 */
    int64_t sizes[TFG_STAGING_MAX_DIMS];
    int64_t strides_elems[TFG_STAGING_MAX_DIMS];
} tfg_staging_view;

/* A tensor's view in its simplest form. TFG_ERR_ARGUMENT: elem_bytes is not one of the five, or a size or stride is negative.
 * TFG_ERR_UNSUPPORTED: elements share memory (as in an expanded tensor), or more than TFG_STAGING_MAX_DIMS dimensions are left. */
TFG_CHECKED tfg_status tfg_staging_describe(void *at, int32_t elem_bytes, int32_t n_dims, const int64_t *sizes, const int64_t *strides_elems,
                                            tfg_staging_view *out, tfg_error *err);

/* Fills in where each view lies in the buffer, and the size of the buffer and the number of chunks of all. */
void tfg_staging_lay(tfg_staging_view *views, int64_t n_views, int64_t *out_buffer_bytes, int64_t *out_n_chunks);

/* Index of the view that chunk lies in. 0 <= chunk < the number of chunks. */
TFG_ANYWHERE static inline int64_t tfg_staging_find(const tfg_staging_view *views, int64_t n_views, int64_t chunk) {
    int64_t low = 0;
    int64_t high = n_views;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (views[middle].first_chunk <= chunk) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Where the view's i-th element of the buffer's order lies, in elements from `at`. */
TFG_ANYWHERE static inline int64_t tfg_staging_offset_elems(const tfg_staging_view *view, int64_t i) {
    int64_t offset = 0;
    for (int32_t dim = view->n_dims - 1; dim > 0; dim--) {
        offset += i % view->sizes[dim] * view->strides_elems[dim];
        i /= view->sizes[dim];
    }
    return offset + i * view->strides_elems[0];
}

#ifdef __cplusplus
}
#endif
#endif
