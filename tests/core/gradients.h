/* SPDX-License-Identifier: BSD-3-Clause
 *
 * gradients: lists of tensors of all kinds and awkward sizes, with random elements, for the loops and the kernels alike.
 * Each lies in a heap block of its own that ends with it, so that the sanitizer sees an element too many; `skew` elements before it
 * are never touched and take the alignment away.
 */
#ifndef TFG_TEST_GRADIENTS_H
#define TFG_TEST_GRADIENTS_H

#include <math.h>
#include <string.h>

#include "core/clip.h"
#include "random_tape.h"

enum { MAX_GRADIENTS = 400 };

typedef struct gradients {
    tfg_clip_tensor tensors[MAX_GRADIENTS];
    void *blocks[MAX_GRADIENTS];
    int64_t n_tensors;
    int64_t n_chunks;
} gradients;

static inline void put_element(const tfg_clip_tensor *tensor, int64_t i, double value) {
    switch (tensor->kind) {
    case TFG_FLOAT64:
        ((double *)tensor->at)[i] = value;
        return;
    case TFG_FLOAT32:
        ((float *)tensor->at)[i] = (float)value;
        return;
    case TFG_BFLOAT16:
        ((uint16_t *)tensor->at)[i] = tfg_bfloat16_of_float((float)value);
        return;
    case TFG_FLOAT16:
        ((uint16_t *)tensor->at)[i] = tfg_float16_of_float((float)value);
        return;
    }
}

static inline double get_element(const tfg_clip_tensor *tensor, int64_t i) {
    switch (tensor->kind) {
    case TFG_FLOAT64:
        return ((const double *)tensor->at)[i];
    case TFG_FLOAT32:
        return (double)((const float *)tensor->at)[i];
    case TFG_BFLOAT16:
        return (double)tfg_float_of_bfloat16(((const uint16_t *)tensor->at)[i]);
    case TFG_FLOAT16:
        return (double)tfg_float_of_float16(((const uint16_t *)tensor->at)[i]);
    }
    return 0;
}

/* Between -2 and 2, with few bits in common. */
static inline double random_element(random_source *random) {
    return ldexp((double)(int64_t)random_word(random), -62);
}

static inline void gradients_add(gradients *list, random_source *random, tfg_float kind, int64_t n_elems, int64_t skew) {
    tfg_clip_tensor *tensor = &list->tensors[list->n_tensors];
    const int64_t size = tfg_float_bytes(kind);
    char *block = malloc((size_t)((n_elems + skew) * size + (n_elems + skew == 0)));
    *tensor = (tfg_clip_tensor){.at = block + skew * size, .n_elems = n_elems, .kind = kind};
    list->blocks[list->n_tensors++] = block;
    for (int64_t i = 0; i < n_elems; i++) {
        put_element(tensor, i, random_element(random));
    }
    CHECK_EQ(tfg_clip_cut(list->tensors, list->n_tensors, &list->n_chunks, NULL), TFG_OK);
}

static inline void gradients_free(gradients *list) {
    for (int64_t i = 0; i < list->n_tensors; i++) {
        free(list->blocks[i]);
    }
    memset(list, 0, sizeof *list);
}

/* The same elements in blocks of their own, skewed alike. */
static inline void gradients_copy(gradients *to, const gradients *from) {
    *to = *from;
    for (int64_t i = 0; i < from->n_tensors; i++) {
        const tfg_clip_tensor *tensor = &from->tensors[i];
        const size_t skew_bytes = (size_t)((char *)tensor->at - (char *)from->blocks[i]);
        const size_t size_bytes = (size_t)(tensor->n_elems * tfg_float_bytes(tensor->kind));
        to->blocks[i] = malloc(skew_bytes + size_bytes + (skew_bytes + size_bytes == 0));
        to->tensors[i].at = (char *)to->blocks[i] + skew_bytes;
        memcpy(to->tensors[i].at, tensor->at, size_bytes);
    }
}

static inline int gradients_same(const gradients *left, const gradients *right) {
    for (int64_t i = 0; i < left->n_tensors; i++) {
        const size_t size_bytes = (size_t)(left->tensors[i].n_elems * tfg_float_bytes(left->tensors[i].kind));
        if (memcmp(left->tensors[i].at, right->tensors[i].at, size_bytes) != 0) {
            return 0;
        }
    }
    return 1;
}

/* Sizes at which rows, chunks and vectors end, or do not. */
static const int64_t AWKWARD_ELEMS[] = {0, 1, 2, 3, 5, 127, 1023, 1024, 1025, 4096, 4099, 8191, 65535, 65536, 65537, 133337};
enum { N_AWKWARD = sizeof AWKWARD_ELEMS / sizeof AWKWARD_ELEMS[0] };

/* All kinds in turn, over all awkward sizes, aligned and not. */
static inline void gradients_awkward(gradients *list, random_source *random) {
    for (int i = 0; i < N_AWKWARD; i++) {
        for (int kind = 0; kind < 4; kind++) {
            gradients_add(list, random, (tfg_float)kind, AWKWARD_ELEMS[i], random_below(random, 4));
        }
    }
}
#endif
