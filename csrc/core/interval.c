/* SPDX-License-Identifier: BSD-3-Clause */
#include "interval.h"

#include <stdbool.h>

__extension__ typedef unsigned __int128 uint128;

/* Does n_layers / sqrt(seq_len) round to r or more?  r - 1/2 <= L / sqrt(S)  <=>  (2r - 1)^2 <= floor(4 L^2 / S).
 * With 1 <= r, L < 2^63 both sides stay below 2^128. */
static bool rounds_to_at_least(int64_t r, int64_t n_layers, int64_t seq_len) {
    const uint128 odd = (uint128)r * 2 - 1;
    return odd * odd <= (uint128)n_layers * (uint128)n_layers * 4 / (uint128)seq_len;
}

static tfg_status check_count(const char *name, int64_t given, tfg_error *err) {
    if (given < 1) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "%s: wanted a count of at least 1, got %lld", name, (long long)given);
    }
    return TFG_OK;
}

tfg_status tfg_interval_dynamic(int64_t n_layers, int64_t seq_len, int64_t low, int64_t high, int64_t n_blocks,
                                int64_t *out_interval, tfg_error *err) {
    TFG_TRY(check_count("n_layers", n_layers, err));
    TFG_TRY(check_count("seq_len", seq_len, err));
    TFG_TRY(check_count("low", low, err));
    TFG_TRY(check_count("n_blocks", n_blocks, err));
    if (high < low) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "high: wanted at least low = %lld, got %lld", (long long)low,
                        (long long)high);
    }
    int64_t reached = low;
    int64_t ceiling = high;
    while (reached < ceiling) {
        const int64_t middle = reached + (ceiling - reached - 1) / 2 + 1;
        if (rounds_to_at_least(middle, n_layers, seq_len)) {
            reached = middle;
        } else {
            ceiling = middle - 1;
        }
    }
    *out_interval = reached < n_blocks ? reached : n_blocks;
    return TFG_OK;
}
