/* SPDX-License-Identifier: BSD-3-Clause
 *
 * closure: which operators must run, in which order, to make wanted values again.
 *
 * The closure of a set of wanted values is the smallest set of operators such that each wanted value is live or
 * written by one of them, and each value that one of them reads is live or written by one of them. Every value has
 * one producer, so the set is unique: plain reachability that stops at live values. Run in tape order it is right:
 * an operator that writes in place comes after every reader of the value it ends.
 *
 * Example: wanted {y}, live {x}, tape  a = f(x); b = g(a); y = h(b, x)   ->   f, g, h
 *
 * Cost: O(k log k) for k operators in the closure and their references; memory is the caller's scratch, kept warm.
 * Threads: a scratch belongs to one call at a time; the tape is only read.
 */
#ifndef TFG_CORE_CLOSURE_H
#define TFG_CORE_CLOSURE_H

#include "tape.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tfg_closure tfg_closure; /* scratch and result, reusable */

/* Asked once per value that the search meets: is it there right now? */
typedef bool (*tfg_is_live_fn)(void *ctx, int32_t value);

TFG_CHECKED tfg_status tfg_closure_create(const tfg_allocator *allocator, tfg_closure **out);
void tfg_closure_destroy(tfg_closure *closure); /* NULL is fine */

/* Finds the operators for `wanted` (value ids; duplicates are fine). The result stays good until the next find.
 * TFG_ERR_UNREACHABLE: err names the value, and why (no producer, or a pinned one). TFG_ERR_MEMORY, TFG_ERR_ARGUMENT. */
TFG_CHECKED tfg_status tfg_closure_find(tfg_closure *closure, const tfg_tape *tape, const int32_t *wanted, int32_t n_wanted,
                                        tfg_is_live_fn is_live, void *ctx, tfg_error *err);

/* Operators in tape order. */
const int32_t *tfg_closure_ops(const tfg_closure *closure, int32_t *out_n_ops);

#ifdef __cplusplus
}
#endif
#endif
