/* SPDX-License-Identifier: BSD-3-Clause */
#include "clip_loops.h"

enum { LANES = TFG_CLIP_LANES, ROWS = 4 };

/* One function per kind and norm: `norm` and `load` are constants in each, so that the inner loops are straight lines.
 * Four rows at a time: a lane is read and written once for four elements; its additions stay in their order. */
#define DEFINE_PARTIAL(name, type, load)                                                                  \
    static inline void name(tfg_clip_norm norm, const type *at, int64_t n_elems, double *lanes) {         \
        for (; n_elems >= ROWS * LANES; n_elems -= ROWS * LANES, at += ROWS * LANES) {                    \
            for (int64_t i = 0; i < LANES; i++) {                                                         \
                double lane = lanes[i];                                                                   \
                for (int64_t row = 0; row < ROWS; row++) {                                                \
                    lane = tfg_clip_join(norm, lane, tfg_clip_term(norm, (double)load(at[row * LANES + i]))); \
                }                                                                                         \
                lanes[i] = lane;                                                                          \
            }                                                                                             \
        }                                                                                                 \
        for (; n_elems > 0; n_elems -= LANES, at += LANES) {                                              \
            const int64_t n_row = n_elems < LANES ? n_elems : LANES;                                      \
            for (int64_t i = 0; i < n_row; i++) {                                                         \
                lanes[i] = tfg_clip_join(norm, lanes[i], tfg_clip_term(norm, (double)load(at[i])));       \
            }                                                                                             \
        }                                                                                                 \
    }

#define AS_IT_IS(element) (element)
DEFINE_PARTIAL(partial_float64, double, AS_IT_IS)
DEFINE_PARTIAL(partial_float32, float, AS_IT_IS)
DEFINE_PARTIAL(partial_bfloat16, uint16_t, tfg_float_of_bfloat16)
DEFINE_PARTIAL(partial_float16, uint16_t, tfg_float_of_float16)

static inline void add_up(tfg_clip_norm norm, tfg_float kind, const void *at, int64_t n_elems, double *lanes) {
    switch (kind) {
    case TFG_FLOAT64:
        partial_float64(norm, at, n_elems, lanes);
        return;
    case TFG_FLOAT32:
        partial_float32(norm, at, n_elems, lanes);
        return;
    case TFG_BFLOAT16:
        partial_bfloat16(norm, at, n_elems, lanes);
        return;
    case TFG_FLOAT16:
        partial_float16(norm, at, n_elems, lanes);
        return;
    }
}

static void add_up_by(tfg_clip_norm norm, tfg_float kind, const void *at, int64_t n_elems, double *lanes) {
    switch (norm) {
    case TFG_CLIP_SQUARES:
        add_up(TFG_CLIP_SQUARES, kind, at, n_elems, lanes);
        return;
    case TFG_CLIP_SIZES:
        add_up(TFG_CLIP_SIZES, kind, at, n_elems, lanes);
        return;
    case TFG_CLIP_LARGEST:
        add_up(TFG_CLIP_LARGEST, kind, at, n_elems, lanes);
        return;
    }
}

/* The least power of two that holds them all: lanes beyond are zero, and to join zeros changes no bit. */
static int64_t lanes_in_use(int64_t n_elems) {
    int64_t n = 1;
    while (n < n_elems && n < LANES) {
        n *= 2;
    }
    return n;
}

static void *chunk_at(const tfg_clip_tensor *tensor, int64_t chunk, int64_t *out_n_elems) {
    const int64_t first = (chunk - tensor->first_chunk) * TFG_CLIP_CHUNK_ELEMS;
    const int64_t n_left = tensor->n_elems - first;
    *out_n_elems = n_left < TFG_CLIP_CHUNK_ELEMS ? n_left : TFG_CLIP_CHUNK_ELEMS;
    return (char *)tensor->at + first * tfg_float_bytes(tensor->kind);
}

void tfg_cpu_clip_partials(tfg_clip_norm norm, const tfg_clip_tensor *tensors, int64_t n_tensors, int64_t first_chunk,
                           int64_t end_chunk, double *partials) {
    double lanes[LANES];
    for (int64_t chunk = first_chunk; chunk < end_chunk; chunk++) {
        const tfg_clip_tensor *tensor = &tensors[tfg_clip_find(tensors, n_tensors, chunk)];
        int64_t n_elems;
        const void *at = chunk_at(tensor, chunk, &n_elems);
        const int64_t n_lanes = lanes_in_use(n_elems);
        memset(lanes, 0, (size_t)n_lanes * sizeof *lanes);
        add_up_by(norm, tensor->kind, at, n_elems, lanes);
        partials[chunk] = tfg_clip_join_lanes(norm, lanes, n_lanes);
    }
}

static void scale(tfg_float kind, void *at, int64_t n_elems, double coefficient) {
    const float narrow = (float)coefficient;
    double *doubles = at;
    float *floats = at;
    uint16_t *halves = at;
    switch (kind) {
    case TFG_FLOAT64:
        for (int64_t i = 0; i < n_elems; i++) {
            doubles[i] *= coefficient;
        }
        return;
    case TFG_FLOAT32:
        for (int64_t i = 0; i < n_elems; i++) {
            floats[i] *= narrow;
        }
        return;
    case TFG_BFLOAT16:
        for (int64_t i = 0; i < n_elems; i++) {
            halves[i] = tfg_bfloat16_of_float(tfg_float_of_bfloat16(halves[i]) * narrow);
        }
        return;
    case TFG_FLOAT16:
        for (int64_t i = 0; i < n_elems; i++) {
            halves[i] = tfg_float16_of_float(tfg_float_of_float16(halves[i]) * narrow);
        }
        return;
    }
}

void tfg_cpu_clip_scale(double coefficient, const tfg_clip_tensor *tensors, int64_t n_tensors, int64_t first_chunk,
                        int64_t end_chunk) {
    for (int64_t chunk = first_chunk; chunk < end_chunk; chunk++) {
        const tfg_clip_tensor *tensor = &tensors[tfg_clip_find(tensors, n_tensors, chunk)];
        int64_t n_elems;
        void *at = chunk_at(tensor, chunk, &n_elems);
        if ((tensor->kind == TFG_FLOAT64 ? coefficient : (double)(float)coefficient) != 1.0) {
            scale(tensor->kind, at, n_elems, coefficient);
        }
    }
}
