/* SPDX-License-Identifier: BSD-3-Clause
 *
 * clip: in which order gradients are added up to one norm, and by how much they are then scaled. Decides; reads no gradient.
 *
 * Words
 *   chunk        up to TFG_CLIP_CHUNK_ELEMS neighbouring elements of one tensor, in the order of memory
 *   lane         the elements of a chunk whose index in it is the same modulo TFG_CLIP_LANES, added one after another
 *   partial      one double per chunk: its lanes, joined in pairs of neighbours, the pairs in pairs, and so on
 *   total        the norm: all partials, added up as if they were the elements of one chunk
 *   coefficient  what every gradient is multiplied by
 *
 * Picture (4 lanes for 1024)
 *
 *      chunk    0 1 2 3 | 4 5 6 7 | 8 9                 lane 0: (0 + 4) + 8    lane 1: (1 + 5) + 9    lane 2: 2 + 6 ...
 *      partial  (lane 0 + lane 1) + (lane 2 + lane 3)
 *
 * Laws
 *   - The order depends on the tensors' sizes alone: any number of threads, on the CPU or on a GPU, gives the same bits. A double
 *     holds the square of every narrower number exactly; what is rounded are the sums.
 *   - Error of a sum: at most (64 + 10) roundings on the way from an element to its partial, and for n chunks n / 1024 + 11 from
 *     there: below 2^-44 of the total for 2^36 elements.
 *   - Of numbers narrower than double the total is finite if and only if all of them are.
 *   - coefficient = min(1, max_norm / (total + 1e-6)), a NaN stays. Exactly 1: nothing is to be written.
 *
 * Source: the formula is torch.nn.utils.clip_grad_norm_'s; the order of the sum is ours.
 */
#ifndef TFG_CORE_CLIP_H
#define TFG_CORE_CLIP_H

#include <math.h>
#include <stdint.h>

#include "floats.h"
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TFG_CLIP_LANES = 1024, TFG_CLIP_CHUNK_ELEMS = 65536 };

typedef enum tfg_clip_norm {
    TFG_CLIP_SQUARES = 0, /* norm type 2 */
    TFG_CLIP_SIZES = 1,   /* norm type 1: sum of absolute values */
    TFG_CLIP_LARGEST = 2, /* norm type infinity */
} tfg_clip_norm;

/* Elements one after another in memory, from `at` on; borrowed. */
typedef struct tfg_clip_tensor {
    void *at;
    int64_t n_elems;
    int64_t first_chunk; /* filled in by tfg_clip_cut */
    tfg_float kind;
} tfg_clip_tensor;

/* Fills in first_chunk of each and the number of chunks of all. An empty tensor has none. TFG_ERR_ARGUMENT: a negative size, an
 * unknown kind, a NULL with elements, or more than 2^62 elements; the words say which. */
TFG_CHECKED tfg_status tfg_clip_cut(tfg_clip_tensor *tensors, int64_t n_tensors, int64_t *out_n_chunks, tfg_error *err);

/* Index of the tensor that chunk lies in: the last non-empty one that begins at or before it. 0 <= chunk < n_chunks. O(log n). */
TFG_ANYWHERE static inline int64_t tfg_clip_find(const tfg_clip_tensor *tensors, int64_t n_tensors, int64_t chunk) {
    int64_t low = 0;
    int64_t high = n_tensors;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (tensors[middle].first_chunk <= chunk) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* What an element adds. Of float32, bfloat16 and float16 the square is exact. */
TFG_ANYWHERE static inline double tfg_clip_term(tfg_clip_norm norm, double element) {
    return norm == TFG_CLIP_SQUARES ? element * element : fabs(element);
}

/* Joins two lanes, pairs or partials. Commutative to the bit; a NaN on either side stays. */
TFG_ANYWHERE static inline double tfg_clip_join(tfg_clip_norm norm, double left, double right) {
    if (norm != TFG_CLIP_LARGEST) {
        return left + right;
    }
    return left > right || left != left ? left : right;
}

/* lanes[0 .. n_lanes) to one number, in pairs of neighbours; n_lanes is a power of two, the lanes are overwritten. */
double tfg_clip_join_lanes(tfg_clip_norm norm, double *lanes, int64_t n_lanes);

/* All partials to one number. 0 for none. */
double tfg_clip_join_partials(tfg_clip_norm norm, const double *partials, int64_t n_partials);

/* The norm of what has been joined. overflow: see below. */
TFG_ANYWHERE static inline double tfg_clip_total(tfg_clip_norm norm, double joined, double overflow) {
    const double total = norm == TFG_CLIP_SQUARES ? sqrt(joined) : joined;
    return total >= overflow ? (double)INFINITY : total;
}

/* The least double that is infinity once it is rounded to `kind` (to the sixteen-bit kinds by way of float32, as torch does): what the caller is shown and what the gradients are scaled by
 * must agree on whether there is a norm. */
double tfg_clip_overflow(tfg_float kind);

TFG_ANYWHERE static inline double tfg_clip_coefficient(double max_norm, double total) {
    const double wanted = max_norm / (total + 1e-6);
    return wanted > 1.0 ? 1.0 : wanted;
}

#ifdef __cplusplus
}
#endif
#endif
