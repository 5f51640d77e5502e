/* SPDX-License-Identifier: BSD-3-Clause */
#include "staging_loops.h"

#include <string.h>

static char *place(const tfg_staging_view *view, int64_t i) {
    return (char *)view->at + tfg_staging_offset_elems(view, i) * view->elem_bytes;
}

/* How many elements from the i-th on lie side by side in memory too. */
static int64_t run_elems(const tfg_staging_view *view, int64_t i) {
    const int32_t last = view->n_dims - 1;
    return view->strides_elems[last] == 1 ? view->sizes[last] - i % view->sizes[last] : 1;
}

void tfg_cpu_staging_gather(const tfg_staging_view *views, int64_t n_views, void *buffer) {
    for (const tfg_staging_view *view = views; view < views + n_views; view++) {
        char *to = (char *)buffer + view->first_byte;
        for (int64_t i = 0, n; i < view->n_elems; i += n) {
            n = run_elems(view, i);
            memcpy(to + i * view->elem_bytes, place(view, i), (size_t)(n * view->elem_bytes));
        }
    }
}

void tfg_cpu_staging_scatter(const tfg_staging_view *views, int64_t n_views, const void *buffer) {
    for (const tfg_staging_view *view = views; view < views + n_views; view++) {
        const char *from = (const char *)buffer + view->first_byte;
        for (int64_t i = 0, n; i < view->n_elems; i += n) {
            n = run_elems(view, i);
            memcpy(place(view, i), from + i * view->elem_bytes, (size_t)(n * view->elem_bytes));
        }
    }
}
