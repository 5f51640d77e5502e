/* SPDX-License-Identifier: BSD-3-Clause */
#include "putback.h"

#include <stdbool.h>
#include <string.h>

__extension__ typedef unsigned __int128 uint128;

/* The path, and what has been decided about it. */
typedef struct putback_choice {
    const int64_t *size_bytes;
    const int64_t *cost_ns;
    uint8_t *is_kept;
    int32_t n;
    int64_t room_bytes; /* still to be given out */
} putback_choice;

static tfg_status add_up(const char *name, const int64_t *numbers, int32_t n, int64_t *out_sum, tfg_error *err) {
    *out_sum = 0;
    for (int32_t i = 0; i < n; i++) {
        if (numbers[i] < 0 || numbers[i] > INT64_MAX - *out_sum) {
            return tfg_fail(TFG_ERR_ARGUMENT, err, "%s[%d]: wanted 0 to %lld, got %lld", name, i,
                            (long long)(INT64_MAX - *out_sum), (long long)numbers[i]);
        }
        *out_sum += numbers[i];
    }
    return TFG_OK;
}

static bool keep_if_it_fits(putback_choice *choice, int32_t i) {
    if (choice->size_bytes[i] > choice->room_bytes) {
        return false;
    }
    choice->is_kept[i] = 1;
    choice->room_bytes -= choice->size_bytes[i];
    return true;
}

/* Gives the end half the room. Returns how many values stand before it. */
static int32_t keep_end(putback_choice *choice) {
    const int64_t set_aside_bytes = choice->room_bytes - choice->room_bytes / 2;
    int32_t n_rest = choice->n;
    choice->room_bytes -= set_aside_bytes;
    while (n_rest > 0 && keep_if_it_fits(choice, n_rest - 1)) {
        n_rest--;
    }
    choice->room_bytes += set_aside_bytes;
    return n_rest;
}

/* Each value that stays cuts the way from the one before it to the end into equal parts anew: as many as there is room
 * for values of the usual size, and one more. A value stays once the way since then is a part long; one that is twice
 * the usual size, once it is two parts long. */
static void keep_evenly(putback_choice *choice, int32_t n_rest) {
    int64_t rest_bytes = 0;
    /* The way from the last one that stayed to the end. */
    int64_t left_ns = n_rest < choice->n ? choice->cost_ns[n_rest] : 0;
    for (int32_t i = 0; i < n_rest; i++) {
        rest_bytes += choice->size_bytes[i];
        left_ns += choice->cost_ns[i];
    }
    const int64_t usual_bytes = rest_bytes / n_rest + (rest_bytes % n_rest != 0);
    int64_t since_ns = 0;
    for (int32_t i = 0; i < n_rest; i++) {
        since_ns += choice->cost_ns[i];
        const uint128 n_parts = (uint128)(choice->room_bytes / usual_bytes) + 1;
        const bool is_due = (uint128)since_ns * n_parts * (uint128)usual_bytes >=
                            (uint128)left_ns * (uint128)choice->size_bytes[i];
        if (is_due && keep_if_it_fits(choice, i)) {
            left_ns -= since_ns;
            since_ns = 0;
        }
    }
}

/* Sizes that differ leave remnants. Backward comes from the end, so it finds those first. */
static void keep_what_still_fits(putback_choice *choice, int32_t n_rest) {
    for (int32_t i = n_rest - 1; i >= 0; i--) {
        if (choice->is_kept[i] == 0) {
            (void)keep_if_it_fits(choice, i);
        }
    }
}

tfg_status tfg_putback_choose(const int64_t *size_bytes, const int64_t *cost_ns, int32_t n, int64_t room_bytes,
                              uint8_t *out_is_kept, tfg_error *err) {
    int64_t all_bytes, all_ns;
    if (n < 0 || (n > 0 && (size_bytes == NULL || cost_ns == NULL || out_is_kept == NULL))) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "%d values, or an array of them is missing", n);
    }
    TFG_TRY(add_up("size_bytes", size_bytes, n, &all_bytes, err));
    TFG_TRY(add_up("cost_ns", cost_ns, n, &all_ns, err));
    if (n == 0) {
        return TFG_OK;
    }
    putback_choice choice = {size_bytes, cost_ns, out_is_kept, n, room_bytes < 0 ? 0 : room_bytes};
    const bool do_all_fit = all_bytes <= choice.room_bytes;
    memset(out_is_kept, do_all_fit, (size_t)n);
    if (do_all_fit) {
        return TFG_OK;
    }
    const int32_t n_rest = keep_end(&choice); /* at least one: not all fit */
    keep_evenly(&choice, n_rest);
    keep_what_still_fits(&choice, n_rest);
    return TFG_OK;
}
