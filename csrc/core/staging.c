/* SPDX-License-Identifier: BSD-3-Clause */
#include "staging.h"

#include <stdbool.h>
#include <string.h>

enum { MAX_GIVEN_DIMS = 64 };

typedef struct dimension {
    int64_t size;
    int64_t stride;
} dimension;

/* Dimensions of one element carry nothing. Sorted by stride, the largest first. */
static int32_t sorted(int32_t n_dims, const int64_t *sizes, const int64_t *strides, dimension *out) {
    int32_t n = 0;
    for (int32_t i = 0; i < n_dims; i++) {
        if (sizes[i] == 1) {
            continue;
        }
        int32_t place = n++;
        for (; place > 0 && out[place - 1].stride < strides[i]; place--) {
            out[place] = out[place - 1];
        }
        out[place] = (dimension){sizes[i], strides[i]};
    }
    return n;
}

/* Each dimension steps over all that the next ones span: then no two elements meet. Stricter than need be for exotic strides. */
static bool is_apart(const dimension *dims, int32_t n) {
    int64_t span = 1;
    for (int32_t i = n - 1; i >= 0; i--) {
        if (dims[i].stride < span || dims[i].size - 1 > (INT64_MAX - span) / dims[i].stride) {
            return false;
        }
        span += (dims[i].size - 1) * dims[i].stride;
    }
    return true;
}

/* A dimension whose step is just the whole of the next one is one with it. */
static int32_t joined(dimension *dims, int32_t n) {
    int32_t kept = 0;
    for (int32_t i = 0; i < n; i++) {
        dimension *last = &dims[kept - (kept > 0)];
        if (kept > 0 && last->stride % dims[i].size == 0 && last->stride / dims[i].size == dims[i].stride) {
            last->size *= dims[i].size;
            last->stride = dims[i].stride;
        } else {
            dims[kept++] = dims[i];
        }
    }
    return kept;
}

static bool can_widen(const tfg_staging_view *view) {
    const int32_t last = view->n_dims - 1;
    bool can = view->elem_bytes < TFG_STAGING_MAX_ELEM_BYTES && view->strides_elems[last] == 1 && view->sizes[last] % 2 == 0 &&
               (uintptr_t)view->at % (uintptr_t)(2 * view->elem_bytes) == 0;
    for (int32_t dim = 0; dim < last; dim++) {
        can = can && view->strides_elems[dim] % 2 == 0;
    }
    return can;
}

static void widen(tfg_staging_view *view) {
    while (view->n_elems > 0 && can_widen(view)) {
        view->elem_bytes *= 2;
        view->n_elems /= 2;
        view->sizes[view->n_dims - 1] /= 2;
        for (int32_t dim = 0; dim < view->n_dims - 1; dim++) {
            view->strides_elems[dim] /= 2;
        }
    }
}

static bool is_a_width(int32_t elem_bytes) {
    return elem_bytes == 1 || elem_bytes == 2 || elem_bytes == 4 || elem_bytes == 8 || elem_bytes == 16;
}

static tfg_status look(int32_t elem_bytes, int32_t n_dims, const int64_t *sizes, const int64_t *strides, bool *out_is_empty,
                       tfg_error *err) {
    *out_is_empty = false;
    if (!is_a_width(elem_bytes) || n_dims < 0) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "elements of %d bytes, %d dimensions", elem_bytes, n_dims);
    }
    if (n_dims > MAX_GIVEN_DIMS) {
        return tfg_fail(TFG_ERR_UNSUPPORTED, err, "%d dimensions", n_dims);
    }
    for (int32_t i = 0; i < n_dims; i++) {
        if (sizes[i] < 0 || strides[i] < 0) {
            return tfg_fail(TFG_ERR_ARGUMENT, err, "dimension %d: size %lld, stride %lld", i, (long long)sizes[i], (long long)strides[i]);
        }
        *out_is_empty = *out_is_empty || sizes[i] == 0;
    }
    return TFG_OK;
}

tfg_status tfg_staging_describe(void *at, int32_t elem_bytes, int32_t n_dims, const int64_t *sizes, const int64_t *strides_elems,
                                tfg_staging_view *out, tfg_error *err) {
    dimension dims[MAX_GIVEN_DIMS];
    bool is_empty;
    memset(out, 0, sizeof *out);
    TFG_TRY(look(elem_bytes, n_dims, sizes, strides_elems, &is_empty, err));
    const int32_t n_sorted = is_empty ? 0 : sorted(n_dims, sizes, strides_elems, dims);
    if (!is_apart(dims, n_sorted)) {
        return tfg_fail(TFG_ERR_UNSUPPORTED, err, "elements that share memory");
    }
    const int32_t n = joined(dims, n_sorted);
    if (n > TFG_STAGING_MAX_DIMS) {
        return tfg_fail(TFG_ERR_UNSUPPORTED, err, "%d dimensions that can not be joined", n);
    }
    *out = (tfg_staging_view){.at = at, .n_elems = !is_empty, .elem_bytes = elem_bytes, .n_dims = n > 0 ? n : 1};
    out->sizes[0] = !is_empty;
    out->strides_elems[0] = 1;
    for (int32_t i = 0; i < n; i++) {
        out->n_elems *= dims[i].size;
        out->sizes[i] = dims[i].size;
        out->strides_elems[i] = dims[i].stride;
    }
    widen(out);
    return TFG_OK;
}

void tfg_staging_lay(tfg_staging_view *views, int64_t n_views, int64_t *out_buffer_bytes, int64_t *out_n_chunks) {
    int64_t n_bytes = 0;
    int64_t n_chunks = 0;
    for (int64_t i = 0; i < n_views; i++) {
        const int64_t size_bytes = views[i].n_elems * views[i].elem_bytes;
        views[i].first_byte = n_bytes;
        views[i].first_chunk = n_chunks;
        n_bytes += (size_bytes + TFG_STAGING_MAX_ELEM_BYTES - 1) / TFG_STAGING_MAX_ELEM_BYTES * TFG_STAGING_MAX_ELEM_BYTES;
        n_chunks += views[i].n_elems / TFG_STAGING_CHUNK_ELEMS + (views[i].n_elems % TFG_STAGING_CHUNK_ELEMS != 0);
    }
    *out_buffer_bytes = n_bytes;
    *out_n_chunks = n_chunks;
}
