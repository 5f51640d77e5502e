/* SPDX-License-Identifier: BSD-3-Clause
 *
 * plan: what one training step will take. Nothing runs here: a recorded step is walked under a policy, and the peak is
 * read off.
 *
 * Words
 *   event    what happens to a storage in the step as it is without tfg: MAKE, FREE (its last reference dies), READ
 *            (backward asks for it); and END, of a region.
 *   operator how the forward made storages, and how one that has left is made again: from what is alive, or made again
 *            likewise. Backward's own operators are not listed.
 *   leave    a storage's bytes are let go of, and it can be made again. Only what backward wants can leave, and what
 *            has a price below infinity, an operator that makes it, and bytes.
 *   queued   under a budget: can leave at any time from now on, since the forward is over with it. The last operator
 *            that reads it has run: something of a later one is made, or backward or a region's end has come.
 *   copy     what a replay makes on its way and nobody else wants. It dies after its last reader in that replay.
 *   pinned   can not leave now: the running replay reads it, or backward asked for it and still works on it. READs in a
 *            row are one piece of work, which lasts until a READ that follows something else, or an END.
 *   over     an allocation above the budget when nothing more can leave.
 *
 * Picture: three activations of 10, each made from the one before, and a budget of 25. c is where a leaves
 *
 *      event   MAKE a   MAKE b   MAKE c   READ c   FREE c   READ b   FREE b   READ a   FREE a
 *      alive     10       20       20       20       10       10       0       10        0
 *                                 a leaves                                  is replayed
 *
 * Laws
 *   - KEEP_ALL: the peak is the greatest running sum of what is made and freed. With that as a budget nothing leaves;
 *   - the peak is never above the greater one of budget and needed_bytes;
 *   - KEEP_ALL and LET_GO: sizes above 0 that grow with the tokens give a peak that does;
 *   - same step, same outcome, everywhere.
 *
 * Example
 *
 *      tfg_plan_policy policy = {.kind = TFG_PLAN_BUDGET, .budget_bytes = 8LL << 30};
 *      status = tfg_plan_run(plan, &step, 4096, &policy, &outcome, &err);    // outcome.peak_bytes, outcome.replayed_ns
 *
 * Cost: O(step), O(log n) for each move on the ledger, and O(k log k) for a replay of k operators and their references.
 * The scratch grows to the largest step seen and stays.
 * Threads: not thread-safe; distinct scratches are independent.
 */
#ifndef TFG_CORE_PLAN_H
#define TFG_CORE_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TFG_PLAN_NONE = -1, TFG_PLAN_N_KINDS = 8 };

typedef struct tfg_plan tfg_plan; /* the scratch of the walk */

/* With T tokens it has fixed_bytes + bytes_per_token * T + bytes_per_token2 * T * T bytes, rounded up. */
typedef struct tfg_plan_storage {
    int64_t fixed_bytes; /* may be negative, as a fitted line's may; the sum may not */
    double bytes_per_token;
    double bytes_per_token2;
    double price_ns_per_byte; /* the cheapest leave first. INFINITY: never leaves */
    int64_t sequence;         /* order in which it was saved: of equal prices, the first leaves first */
    int32_t region;           /* TFG_PLAN_NONE: in none */
    uint8_t kind;             /* parameter, gradient, activation ...: the caller's, below TFG_PLAN_N_KINDS */
    bool is_wanted;           /* backward will READ it */
} tfg_plan_storage;

/* In tape order: refs[first_ref] and on are the storages it reads, then those it makes (as tfg_cut_op). */
typedef struct tfg_plan_op {
    int64_t cost_ns;
    int32_t first_ref;
    int32_t n_reads;
    int32_t n_writes;
} tfg_plan_op;

/* A storage is made and freed once at most, and a region ends once at most. What replays start from is freed after the
 * READs that lean on it. */
typedef enum tfg_plan_event_kind {
    TFG_PLAN_MAKE,
    TFG_PLAN_FREE, /* one that has left is forgotten, and frees nothing */
    TFG_PLAN_READ, /* if it has left it is replayed now; what putback chooses of the wanted storages on the way stays */
    TFG_PLAN_END,  /* of a region: with LET_GO, all of it that can leave leaves now, whoever reads it later */
} tfg_plan_event_kind;

typedef struct tfg_plan_event {
    int32_t kind;  /* a tfg_plan_event_kind */
    int32_t index; /* of the storage, or of the region */
} tfg_plan_event;

/* Borrowed for one call. */
typedef struct tfg_plan_step {
    const tfg_plan_storage *storages;
    const tfg_plan_op *ops;
    const int32_t *refs;
    const tfg_plan_event *events;
    int32_t n_storages;
    int32_t n_ops;
    int32_t n_refs;
    int32_t n_events;
    int32_t n_regions;
    int64_t base_bytes; /* alive before the step and throughout */
} tfg_plan_step;

typedef enum tfg_plan_policy_kind {
    TFG_PLAN_KEEP_ALL,
    TFG_PLAN_LET_GO, /* at the end of regions */
    TFG_PLAN_BUDGET, /* when an allocation, in a replay too, would pass the budget: cheapest first until it fits */
} tfg_plan_policy_kind;

typedef struct tfg_plan_policy {
    tfg_plan_policy_kind kind;
    int64_t budget_bytes; /* of everything alive, the base included; BUDGET alone looks at it */
} tfg_plan_policy;

typedef struct tfg_plan_outcome {
    int64_t peak_bytes;                      /* base included */
    int32_t peak_event;                      /* the first event that reached it; TFG_PLAN_NONE: the base alone */
    int64_t alive_bytes[TFG_PLAN_N_KINDS];   /* at the peak, by kind, copies included; the base is in none */
    int64_t n_ops_replayed;
    int64_t replayed_ns;
    int64_t left_bytes;   /* each time that something left */
    int64_t n_over;       /* allocations above the budget; a base above it counts as one */
    int64_t needed_bytes; /* the budget that would have held at the worst of them; 0: none */
} tfg_plan_outcome;

/* The allocator is copied; its ctx must outlive the scratch. *out is NULL on failure. TFG_ERR_MEMORY. */
TFG_CHECKED tfg_status tfg_plan_create(const tfg_allocator *allocator, tfg_plan **out);
void tfg_plan_destroy(tfg_plan *plan); /* NULL is fine */

/* Walks the step. The base, all sizes together and all costs together are below 2^60; a storage is made by one operator
 * at most, before any that reads it.
 * TFG_ERR_ARGUMENT, with what is wrong in err; TFG_ERR_UNREACHABLE: a replay needs what is not there, err names it;
 * TFG_ERR_MEMORY. *out is not touched on failure. */
TFG_CHECKED tfg_status tfg_plan_run(tfg_plan *plan, const tfg_plan_step *step, int64_t n_tokens,
                                    const tfg_plan_policy *policy, tfg_plan_outcome *out, tfg_error *err);

/* A budget that is never passed while the next smaller one is, by bisection between the base and KEEP_ALL's peak. Where
 * every greater budget holds too, as is usual, it is the smallest. Failures as above. Cost: at most 61 walks, each of
 * which stops where it goes over. */
TFG_CHECKED tfg_status tfg_plan_smallest_budget(tfg_plan *plan, const tfg_plan_step *step, int64_t n_tokens,
                                                int64_t *out_bytes, tfg_error *err);

#ifdef __cplusplus
}
#endif
#endif
