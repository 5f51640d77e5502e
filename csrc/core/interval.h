/* SPDX-License-Identifier: BSD-3-Clause
 *
 * interval: the method's formula for how many blocks make a segment. Numbers in, number out.
 *
 *      interval = min(n_blocks, max(low, min(high, round(n_layers / sqrt(seq_len)))))      halves away from zero
 *
 * Source: the TF/TG recipe. For the usual lengths the quotient is below `low` (32 layers, 512 tokens: 1.4), so the
 * formula alone nearly always answers `low`.
 */
#ifndef TFG_CORE_INTERVAL_H
#define TFG_CORE_INTERVAL_H

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* n_layers, seq_len, low, n_blocks >= 1 and high >= low; else TFG_ERR_ARGUMENT with the value in err.
 * Exact for every 63-bit input: no rounding of the square root decides a tie wrongly. */
TFG_CHECKED tfg_status tfg_interval_dynamic(int64_t n_layers, int64_t seq_len, int64_t low, int64_t high, int64_t n_blocks,
                                            int64_t *out_interval, tfg_error *err);

#ifdef __cplusplus
}
#endif
#endif
