/* SPDX-License-Identifier: BSD-3-Clause */
#include "clip.h"

static const int64_t MAX_ELEMS = INT64_C(1) << 62;

tfg_status tfg_clip_cut(tfg_clip_tensor *tensors, int64_t n_tensors, int64_t *out_n_chunks, tfg_error *err) {
    int64_t n_chunks = 0;
    int64_t n_left = MAX_ELEMS;
    *out_n_chunks = 0;
    for (int64_t i = 0; i < n_tensors; i++) {
        const int64_t n_elems = tensors[i].n_elems;
        if (tfg_float_bytes(tensors[i].kind) == 0) {
            return tfg_fail(TFG_ERR_ARGUMENT, err, "tensor %lld: no kind of number is %d", (long long)i, (int)tensors[i].kind);
        }
        if (n_elems < 0 || n_elems > n_left) {
            return tfg_fail(TFG_ERR_ARGUMENT, err, "tensor %lld: %lld elements", (long long)i, (long long)n_elems);
        }
        if (n_elems > 0 && tensors[i].at == NULL) {
            return tfg_fail(TFG_ERR_ARGUMENT, err, "tensor %lld: %lld elements at NULL", (long long)i, (long long)n_elems);
        }
        tensors[i].first_chunk = n_chunks;
        n_chunks += n_elems / TFG_CLIP_CHUNK_ELEMS + (n_elems % TFG_CLIP_CHUNK_ELEMS != 0);
        n_left -= n_elems;
    }
    *out_n_chunks = n_chunks;
    return TFG_OK;
}

double tfg_clip_join_lanes(tfg_clip_norm norm, double *lanes, int64_t n_lanes) {
    for (int64_t n = n_lanes / 2; n > 0; n /= 2) {
        for (int64_t i = 0; i < n; i++) {
            lanes[i] = tfg_clip_join(norm, lanes[2 * i], lanes[2 * i + 1]);
        }
    }
    return lanes[0];
}

double tfg_clip_join_partials(tfg_clip_norm norm, const double *partials, int64_t n_partials) {
    double lanes[TFG_CLIP_LANES] = {0};
    for (int64_t i = 0; i < n_partials; i++) {
        double *lane = &lanes[i % TFG_CLIP_LANES];
        *lane = tfg_clip_join(norm, *lane, partials[i]);
    }
    return tfg_clip_join_lanes(norm, lanes, TFG_CLIP_LANES);
}

double tfg_clip_overflow(tfg_float kind) {
    switch (kind) {
    case TFG_FLOAT64:
        return (double)INFINITY;
    case TFG_FLOAT32:
        return 0x1.ffffffp127;
    case TFG_BFLOAT16:
        return 0x1.ffp127 - 0x1p103;
    case TFG_FLOAT16:
        return 65520.0 - 0x1p-9;
    }
    return (double)INFINITY;
}
