/* SPDX-License-Identifier: BSD-3-Clause
 *
 * strided: random tensors that are permuted, sliced, sliced with steps, or scalars, each in a heap block of its own that ends with it.
 */
#ifndef TFG_TEST_STRIDED_H
#define TFG_TEST_STRIDED_H

#include <string.h>

#include "core/staging.h"
#include "random_tape.h"

enum { MAX_STRIDED = 80, STRIDED_DIMS = 5 };

typedef struct strided {
    unsigned char *block;
    int64_t block_bytes;
    int64_t first_byte; /* of the tensor in its block */
    int32_t elem_bytes;
    int32_t n_dims;
    int64_t sizes[STRIDED_DIMS];
    int64_t strides[STRIDED_DIMS];
} strided;

static inline void random_bytes(random_source *random, unsigned char *bytes, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        bytes[i] = (unsigned char)random_below(random, 256);
    }
}

/* Dense, then each dimension cut down, with a step or without, then put in any order. */
static inline strided strided_random(random_source *random, int32_t longest) {
    strided made = {.elem_bytes = 1 << random_below(random, 5), .n_dims = random_below(random, STRIDED_DIMS + 1)};
    int64_t whole = 1;
    int64_t last = 0;
    for (int32_t i = made.n_dims - 1; i >= 0; i--) {
        const int64_t size = 1 + random_below(random, longest);
        const int64_t step = 1 + random_one_in(random, 4);
        const int64_t all = (size + step - 1) / step;
        const int64_t size_kept = random_one_in(random, 3) ? 1 + random_below(random, (int32_t)all) : all;
        made.sizes[i] = random_one_in(random, 40) ? 0 : size_kept;
        made.strides[i] = whole * step;
        last += (size_kept - 1) * whole * step;
        whole *= size;
    }
    for (int32_t i = made.n_dims - 1; i > 0; i--) {
        const int32_t j = random_below(random, i + 1);
        const int64_t size = made.sizes[i];
        const int64_t stride = made.strides[i];
        made.sizes[i] = made.sizes[j];
        made.strides[i] = made.strides[j];
        made.sizes[j] = size;
        made.strides[j] = stride;
    }
    made.first_byte = random_below(random, 4) * made.elem_bytes;
    made.block_bytes = made.first_byte + (last + 1) * made.elem_bytes;
    made.block = malloc((size_t)made.block_bytes);
    random_bytes(random, made.block, made.block_bytes);
    return made;
}

static inline int64_t strided_elems(const strided *tensor) {
    int64_t n = 1;
    for (int32_t i = 0; i < tensor->n_dims; i++) {
        n *= tensor->sizes[i];
    }
    return n;
}

/* Marks the tensor's own bytes in a map of its block: the slow, obvious walk. */
static inline void strided_mark(const strided *tensor, unsigned char *map) {
    memset(map, 0, (size_t)tensor->block_bytes);
    for (int64_t i = 0; i < strided_elems(tensor); i++) {
        int64_t rest = i;
        int64_t at = tensor->first_byte;
        for (int32_t dim = tensor->n_dims - 1; dim >= 0; dim--) {
            at += rest % tensor->sizes[dim] * tensor->strides[dim] * tensor->elem_bytes;
            rest /= tensor->sizes[dim];
        }
        memset(map + at, 1, (size_t)tensor->elem_bytes);
    }
}

static inline tfg_status strided_describe(const strided *tensor, tfg_staging_view *out) {
    return tfg_staging_describe(tensor->block + tensor->first_byte, tensor->elem_bytes, tensor->n_dims, tensor->sizes, tensor->strides,
                                out, NULL);
}
#endif
