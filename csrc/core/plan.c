/* SPDX-License-Identifier: BSD-3-Clause */
#include "plan.h"

#include <math.h>
#include <string.h>

#include "ledger.h"
#include "putback.h"

/* What sizes, costs and the base may each add up to: all that is alive, copies and base included, fits into 62 bits. */
static const int64_t most = INT64_MAX / 8;

enum { NONE = TFG_PLAN_NONE, ENDED = -2 };

typedef enum storage_state { UNMADE, ALIVE, LEFT, FREED } storage_state;

/* What the walk knows of a storage. */
typedef struct site {
    int64_t size_bytes;
    int32_t maker;    /* an operator, or NONE */
    int32_t last_use; /* the last operator of the forward that makes or reads it */
    int32_t entry;    /* on the ledger, or NONE */
    int32_t next_in_region;
    int32_t n_pins;
    int32_t n_readers; /* reads of it that are still to come in the running replay */
    storage_state state;
    bool may_leave;  /* once the forward is over with it */
    bool is_copied;  /* the running replay has a copy */
    bool comes_back; /* once the running replay has made it */
} site;

/* name, type, how many */
#define PLAN_ARRAYS(ROW)                                                                                \
    ROW(sites, site, step->n_storages)                                                                  \
    ROW(regions, int32_t, step->n_regions) /* the first storage, or ENDED */                            \
    ROW(owners, int32_t, step->n_storages) /* by entry of the ledger: the storage */                    \
    ROW(found, int32_t, step->n_ops)     /* the running replay's operators, last first */               \
    ROW(path, int32_t, step->n_storages) /* the wanted storages that it passes over, as putback asks */ \
    ROW(path_bytes, int64_t, step->n_storages)                                                          \
    ROW(path_ns, int64_t, step->n_storages)                                                             \
    ROW(path_stays, uint8_t, step->n_storages)

struct tfg_plan {
    tfg_allocator allocator;
#define PLAN_FIELD(name, type, n) \
    type *name;                   \
    int32_t name##_capacity;
    PLAN_ARRAYS(PLAN_FIELD)
    tfg_ledger *ledger;
    tfg_ledger *queue; /* a replay's operators, last first: the index stands as size, and the largest leaves first */
    const tfg_plan_step *step; /* of the running walk, as all below */
    tfg_plan_policy policy;
    tfg_plan_outcome outcome;
    int64_t alive_bytes, alive_of_kind[TFG_PLAN_N_KINDS];
    int32_t event;
    int32_t n_begun, n_passed; /* operators of the forward that have made something; that have run */
    int32_t first_in_use, end_in_use; /* READs that backward works on */
    int32_t n_found, n_path;
};

void tfg_plan_destroy(tfg_plan *plan) {
    if (plan == NULL) {
        return;
    }
    const tfg_allocator allocator = plan->allocator;
    tfg_ledger_destroy(plan->ledger);
    tfg_ledger_destroy(plan->queue);
#define PLAN_FREE_ARRAY(name, type, n)                                                                \
    if (plan->name != NULL) {                                                                         \
        allocator.resize(allocator.ctx, plan->name, (size_t)plan->name##_capacity * sizeof(type), 0); \
    }
    PLAN_ARRAYS(PLAN_FREE_ARRAY)
    allocator.resize(allocator.ctx, plan, sizeof(tfg_plan), 0);
}

tfg_status tfg_plan_create(const tfg_allocator *allocator, tfg_plan **out) {
    tfg_plan *plan = *out = allocator->resize(allocator->ctx, NULL, 0, sizeof(tfg_plan));
    if (plan == NULL) {
        return TFG_ERR_MEMORY;
    }
    memset(plan, 0, sizeof(tfg_plan));
    plan->allocator = *allocator;
    if (tfg_ledger_create(allocator, &plan->ledger) != TFG_OK || tfg_ledger_create(allocator, &plan->queue) != TFG_OK) {
        tfg_plan_destroy(plan);
        *out = NULL;
        return TFG_ERR_MEMORY;
    }
    return TFG_OK;
}

static tfg_status reserve(tfg_plan *plan, const tfg_plan_step *step) {
#define PLAN_RESERVE(name, type, n)                                                                        \
    {                                                                                                      \
        void *block = plan->name;                                                                          \
        TFG_TRY(tfg_allocator_reserve(&plan->allocator, &block, &plan->name##_capacity, n, sizeof(type))); \
        plan->name = block;                                                                                \
    }
    PLAN_ARRAYS(PLAN_RESERVE)
    return TFG_OK;
}

/* ---- is it a step? ----------------------------------------------------------------------------------------------- */

static bool is_array(const void *items, int32_t n) { return n == 0 || (n > 0 && items != NULL); }

static tfg_status check_arguments(const tfg_plan_step *step, int64_t n_tokens, const tfg_plan_policy *policy,
                                  tfg_error *err) {
    if (!is_array(step->storages, step->n_storages) || !is_array(step->ops, step->n_ops) || step->n_regions < 0 ||
        !is_array(step->refs, step->n_refs) || !is_array(step->events, step->n_events)) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "%d storages, %d operators, %d refs, %d events, %d regions, or no array",
                        step->n_storages, step->n_ops, step->n_refs, step->n_events, step->n_regions);
    }
    const int kind = (int)policy->kind;
    const long long budget_bytes = kind == TFG_PLAN_BUDGET ? policy->budget_bytes : 0, base_bytes = step->base_bytes;
    if (n_tokens < 0 || base_bytes < 0 || base_bytes > most || kind < 0 || kind > TFG_PLAN_BUDGET || budget_bytes < 0) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "%lld tokens, a base of %lld bytes, policy %d, a budget of %lld bytes",
                        (long long)n_tokens, base_bytes, kind, budget_bytes);
    }
    return TFG_OK;
}

static tfg_status take_storage(tfg_plan *plan, int32_t s, double n_tokens, int64_t *all_bytes, tfg_error *err) {
    const tfg_plan_storage *storage = &plan->step->storages[s];
    const double grown = ceil(storage->bytes_per_token * n_tokens + storage->bytes_per_token2 * n_tokens * n_tokens);
    const bool is_number = fabs(grown) <= (double)most && storage->fixed_bytes <= most && storage->fixed_bytes >= -most;
    const int64_t size_bytes = is_number ? storage->fixed_bytes + (int64_t)grown : -1;
    const int32_t region = storage->region;
    if (size_bytes < 0 || size_bytes > most - *all_bytes || storage->kind >= TFG_PLAN_N_KINDS ||
        isnan(storage->price_ns_per_byte) || region < NONE || region >= plan->step->n_regions) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "storage %d: %lld and %g bytes (wanted 0 to %lld), kind %d, price %g, "
                        "region %d of %d", s, (long long)storage->fixed_bytes, grown, (long long)(most - *all_bytes),
                        storage->kind, storage->price_ns_per_byte, region, plan->step->n_regions);
    }
    *all_bytes += size_bytes;
    plan->sites[s] = (site){.size_bytes = size_bytes, .maker = NONE, .last_use = NONE, .entry = NONE};
    if (region != NONE) {
        plan->sites[s].next_in_region = plan->regions[region];
        plan->regions[region] = s;
    }
    return TFG_OK;
}

/* Who makes what, and who is the last to use it. What has been read may not be made any more. */
static tfg_status take_op(tfg_plan *plan, int32_t o, int64_t *all_ns, tfg_error *err) {
    const tfg_plan_op *op = &plan->step->ops[o];
    const int64_t first_write = (int64_t)op->first_ref + op->n_reads, end = first_write + op->n_writes;
    if (op->cost_ns < 0 || op->cost_ns > most - *all_ns || op->first_ref < 0 || op->n_reads < 0 || op->n_writes < 0 ||
        end > plan->step->n_refs) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "operator %d: %lld ns, refs %d to %lld of %d", o, (long long)op->cost_ns,
                        op->first_ref, (long long)end, plan->step->n_refs);
    }
    *all_ns += op->cost_ns;
    for (int64_t r = op->first_ref; r < end; r++) {
        const int32_t s = plan->step->refs[r];
        if (s < 0 || s >= plan->step->n_storages || (r >= first_write && plan->sites[s].last_use != NONE)) {
            return tfg_fail(TFG_ERR_ARGUMENT, err, "operator %d: storage %d of %d%s", o, s, plan->step->n_storages,
                            r < first_write ? "" : ", which it makes, was there before");
        }
        plan->sites[s].last_use = o;
        if (r >= first_write) {
            const bool has_price = plan->step->storages[s].price_ns_per_byte < INFINITY;
            plan->sites[s].maker = o;
            plan->sites[s].may_leave = plan->step->storages[s].is_wanted && has_price && plan->sites[s].size_bytes > 0;
        }
    }
    return TFG_OK;
}

/* ---- bytes ------------------------------------------------------------------------------------------------------- */

static void add_capped(int64_t *sum, int64_t number) { *sum = number > INT64_MAX - *sum ? INT64_MAX : *sum + number; }

static void shrink(tfg_plan *plan, int32_t s) {
    plan->alive_bytes -= plan->sites[s].size_bytes;
    plan->alive_of_kind[plan->step->storages[s].kind] -= plan->sites[s].size_bytes;
}

/* It has left, or is freed. */
static void end_life(tfg_plan *plan, int32_t s, storage_state state) {
    tfg_ledger_remove(plan->ledger, plan->sites[s].entry);
    plan->sites[s].entry = NONE;
    plan->sites[s].state = state;
    add_capped(&plan->outcome.left_bytes, state == LEFT ? plan->sites[s].size_bytes : 0);
    shrink(plan, s);
}

/* What is alive, and as much more, must fit. */
static void make_room(tfg_plan *plan, int64_t more_bytes) {
    const int64_t most_before = plan->policy.budget_bytes - more_bytes;
    while (plan->alive_bytes > most_before && tfg_ledger_first(plan->ledger) != TFG_LEDGER_NONE) {
        end_life(plan, plan->owners[tfg_ledger_first(plan->ledger)], LEFT);
    }
    if (plan->alive_bytes > most_before) {
        const int64_t needed_bytes = plan->alive_bytes + more_bytes;
        plan->outcome.n_over++;
        if (needed_bytes > plan->outcome.needed_bytes) {
            plan->outcome.needed_bytes = needed_bytes;
        }
    }
}

static void allocate(tfg_plan *plan, int32_t s) {
    const int64_t size_bytes = plan->sites[s].size_bytes;
    if (size_bytes > 0) {
        make_room(plan, size_bytes);
    }
    plan->alive_bytes += size_bytes;
    plan->alive_of_kind[plan->step->storages[s].kind] += size_bytes;
    if (plan->alive_bytes > plan->outcome.peak_bytes) {
        plan->outcome.peak_bytes = plan->alive_bytes;
        plan->outcome.peak_event = plan->event;
        memcpy(plan->outcome.alive_bytes, plan->alive_of_kind, sizeof plan->alive_of_kind);
    }
}

/* Adds pins, or takes some away. */
static void pin(tfg_plan *plan, int32_t s, int32_t change) {
    site *at = &plan->sites[s];
    at->n_pins += change;
    (at->n_pins > 0 ? tfg_ledger_set_aside : tfg_ledger_set_back)(plan->ledger, at->entry);
}

/* It is alive and the forward is over with it: under a budget it may leave at any time. */
static tfg_status enter(tfg_plan *plan, int32_t s) {
    site *at = &plan->sites[s];
    const tfg_plan_storage *storage = &plan->step->storages[s];
    const double price = storage->price_ns_per_byte;
    if (plan->policy.kind == TFG_PLAN_BUDGET && at->may_leave && at->entry == NONE) {
        TFG_TRY(tfg_ledger_add(plan->ledger, at->size_bytes, price, storage->sequence, &at->entry));
        plan->owners[at->entry] = s;
        pin(plan, s, 0);
    }
    return TFG_OK;
}

/* ---- replay ------------------------------------------------------------------------------------------------------ */

static tfg_status demand(tfg_plan *plan, int32_t s, tfg_error *err) {
    int32_t entry;
    if (plan->sites[s].maker == NONE) {
        return tfg_fail(TFG_ERR_UNREACHABLE, err, "event %d: a replay reads storage %d, which is not there and has no "
                        "operator", plan->event, s);
    }
    return tfg_ledger_add(plan->queue, plan->sites[s].maker, 0, 0, &entry);
}

/* Each read is counted; at the first one the storage is pinned, or its operator looked for. */
static tfg_status find_reads(tfg_plan *plan, const tfg_plan_op *op, tfg_error *err) {
    for (int32_t i = 0; i < op->n_reads; i++) {
        const int32_t s = plan->step->refs[op->first_ref + i];
        if (plan->sites[s].n_readers++ == 0 && plan->sites[s].state == ALIVE) {
            pin(plan, s, 1);
        } else if (plan->sites[s].n_readers == 1) {
            TFG_TRY(demand(plan, s, err));
        }
    }
    return TFG_OK;
}

/* One that makes two storages may be queued twice, one right after the other. */
static tfg_status find_ops(tfg_plan *plan, int32_t wanted, tfg_error *err) {
    plan->n_found = 0;
    TFG_TRY(demand(plan, wanted, err));
    for (int32_t e = tfg_ledger_first(plan->queue); e != TFG_LEDGER_NONE; e = tfg_ledger_first(plan->queue)) {
        const int32_t o = (int32_t)tfg_ledger_size_bytes(plan->queue, e);
        tfg_ledger_remove(plan->queue, e);
        if (plan->n_found == 0 || plan->found[plan->n_found - 1] != o) {
            plan->found[plan->n_found++] = o;
            TFG_TRY(find_reads(plan, &plan->step->ops[o], err));
        }
    }
    return TFG_OK;
}

/* If all that is on the ledger left. Without a budget it is more than there can be storages. */
static int64_t room_beside(const tfg_plan *plan, int32_t wanted) {
    tfg_ledger_totals totals;
    tfg_ledger_count(plan->ledger, &totals);
    const int64_t room_bytes = plan->policy.budget_bytes - plan->alive_bytes;
    return (room_bytes < 0 ? 0 : room_bytes) + totals.kept_bytes - plan->sites[wanted].size_bytes;
}

/* Which of the wanted storages on the way come back. */
static tfg_status choose(tfg_plan *plan, int32_t wanted, tfg_error *err) {
    int64_t since_ns = 0;
    plan->n_path = 0;
    for (int32_t f = plan->n_found - 1; f >= 0; f--) {
        const tfg_plan_op *op = &plan->step->ops[plan->found[f]];
        since_ns += op->cost_ns > 0 ? op->cost_ns : 1;
        for (int32_t i = op->n_reads; i < op->n_reads + op->n_writes; i++) {
            const int32_t s = plan->step->refs[op->first_ref + i];
            if (s != wanted && plan->sites[s].state == LEFT) {
                plan->path[plan->n_path] = s;
                plan->path_bytes[plan->n_path] = plan->sites[s].size_bytes;
                plan->path_ns[plan->n_path++] = since_ns;
                since_ns = 0;
            }
        }
    }
    const int64_t room_bytes = room_beside(plan, wanted);
    TFG_TRY(tfg_putback_choose(plan->path_bytes, plan->path_ns, plan->n_path, room_bytes, plan->path_stays, err));
    for (int32_t i = 0; i < plan->n_path; i++) {
        plan->sites[plan->path[i]].comes_back = plan->path_stays[i] != 0;
    }
    plan->sites[wanted].comes_back = true;
    return TFG_OK;
}

/* A copy becomes the storage, or stays one while it is read. */
static tfg_status settle(tfg_plan *plan, int32_t s) {
    site *at = &plan->sites[s];
    if (at->comes_back) {
        at->comes_back = at->is_copied = false;
        at->state = ALIVE;
        TFG_TRY(enter(plan, s));
        pin(plan, s, at->n_readers > 0);
    } else if (at->is_copied && at->n_readers == 0) {
        at->is_copied = false;
        shrink(plan, s);
    }
    return TFG_OK;
}

static tfg_status run_op(tfg_plan *plan, const tfg_plan_op *op) {
    const int32_t *reads = plan->step->refs + op->first_ref, *writes = reads + op->n_reads;
    for (int32_t i = 0; i < op->n_writes; i++) {
        allocate(plan, writes[i]);
        plan->sites[writes[i]].is_copied = true;
    }
    for (int32_t i = 0; i < op->n_writes; i++) {
        TFG_TRY(settle(plan, writes[i]));
    }
    for (int32_t i = 0; i < op->n_reads; i++) {
        site *at = &plan->sites[reads[i]];
        if (--at->n_readers == 0 && at->state == ALIVE) {
            pin(plan, reads[i], -1);
        }
        TFG_TRY(settle(plan, reads[i]));
    }
    plan->outcome.n_ops_replayed++;
    add_capped(&plan->outcome.replayed_ns, op->cost_ns);
    return TFG_OK;
}

static tfg_status replay(tfg_plan *plan, int32_t wanted, tfg_error *err) {
    TFG_TRY(find_ops(plan, wanted, err));
    TFG_TRY(choose(plan, wanted, err));
    for (int32_t f = plan->n_found - 1; f >= 0; f--) {
        TFG_TRY(run_op(plan, &plan->step->ops[plan->found[f]]));
    }
    return TFG_OK;
}

/* ---- events ------------------------------------------------------------------------------------------------------ */

/* The forward has run all operators before this one, so it is over with what they were the last to use. */
static tfg_status pass(tfg_plan *plan, int32_t o) {
    for (; plan->n_passed < o; plan->n_passed++) {
        const tfg_plan_op *op = &plan->step->ops[plan->n_passed];
        for (int32_t i = 0; i < op->n_reads + op->n_writes; i++) {
            const int32_t s = plan->step->refs[op->first_ref + i];
            if (plan->sites[s].state == ALIVE && plan->sites[s].last_use == plan->n_passed) {
                TFG_TRY(enter(plan, s));
            }
        }
    }
    return TFG_OK;
}

static tfg_status make(tfg_plan *plan, int32_t s) {
    site *at = &plan->sites[s];
    TFG_TRY(pass(plan, at->maker));
    plan->n_begun = at->maker >= plan->n_begun ? at->maker + 1 : plan->n_begun;
    allocate(plan, s);
    at->state = ALIVE;
    return at->last_use < plan->n_passed ? enter(plan, s) : TFG_OK;
}

/* What backward worked on may leave again. */
static tfg_status end_work(tfg_plan *plan) {
    for (; plan->first_in_use < plan->end_in_use; plan->first_in_use++) {
        pin(plan, plan->step->events[plan->first_in_use].index, -1);
    }
    return pass(plan, plan->n_begun);
}

static tfg_status read_it(tfg_plan *plan, int32_t s, tfg_error *err) {
    if (plan->end_in_use != plan->event) {
        TFG_TRY(end_work(plan));
        plan->first_in_use = plan->event;
    }
    if (plan->sites[s].state == LEFT) {
        TFG_TRY(replay(plan, s, err));
    }
    plan->end_in_use = plan->event + 1;
    pin(plan, s, 1);
    return TFG_OK;
}

static tfg_status end_region(tfg_plan *plan, int32_t region) {
    int32_t s = plan->policy.kind == TFG_PLAN_LET_GO ? plan->regions[region] : NONE;
    for (; s != NONE; s = plan->sites[s].next_in_region) {
        if (plan->sites[s].may_leave && plan->sites[s].state == ALIVE) {
            end_life(plan, s, LEFT);
        }
    }
    plan->regions[region] = ENDED;
    return end_work(plan);
}

static tfg_status check_event(const tfg_plan *plan, int32_t kind, int32_t i, tfg_error *err) {
    static const char *const names[] = {"MAKE", "FREE", "READ", "END"};
    const int32_t n = kind == TFG_PLAN_END ? plan->step->n_regions : plan->step->n_storages;
    if (kind < TFG_PLAN_MAKE || kind > TFG_PLAN_END || i < 0 || i >= n) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "event %d: kind %d, index %d of %d", plan->event, kind, i, n);
    }
    const bool is_over = kind == TFG_PLAN_END ? plan->regions[i] == ENDED : plan->sites[i].state == FREED;
    const bool is_made = kind == TFG_PLAN_END || plan->sites[i].state != UNMADE;
    if (is_over || is_made != (kind != TFG_PLAN_MAKE)) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "event %d: %s of %d, which %s", plan->event, names[kind], i,
                        is_over ? "is no more" : is_made ? "was made before" : "was never made");
    }
    return TFG_OK;
}

static tfg_status walk_event(tfg_plan *plan, tfg_error *err) {
    const tfg_plan_event *event = &plan->step->events[plan->event];
    TFG_TRY(check_event(plan, event->kind, event->index, err));
    switch (event->kind) {
    case TFG_PLAN_MAKE:
        return make(plan, event->index);
    case TFG_PLAN_READ:
        return read_it(plan, event->index, err);
    case TFG_PLAN_END:
        return end_region(plan, event->index);
    default: /* FREE */
        if (plan->sites[event->index].state == ALIVE) {
            end_life(plan, event->index, FREED);
        }
        plan->sites[event->index].state = FREED;
        return TFG_OK;
    }
}

/* The base is there before the first event. */
static tfg_status begin(tfg_plan *plan, const tfg_plan_step *step, int64_t n_tokens, const tfg_plan_policy *policy,
                        tfg_error *err) {
    int64_t all_bytes = 0, all_ns = 0;
    TFG_TRY(check_arguments(step, n_tokens, policy, err));
    TFG_TRY(reserve(plan, step));
    tfg_ledger_reset(plan->ledger);
    tfg_ledger_reset(plan->queue);
    plan->step = step;
    plan->policy = *policy;
    if (policy->kind != TFG_PLAN_BUDGET || policy->budget_bytes > 4 * most) {
        plan->policy.budget_bytes = 4 * most; /* never reached */
    }
    plan->outcome = (tfg_plan_outcome){.peak_bytes = step->base_bytes, .peak_event = NONE};
    plan->alive_bytes = step->base_bytes;
    memset(plan->alive_of_kind, 0, sizeof plan->alive_of_kind);
    plan->n_begun = plan->n_passed = plan->first_in_use = plan->end_in_use = 0;
    for (int32_t r = 0; r < step->n_regions; r++) {
        plan->regions[r] = NONE;
    }
    for (int32_t s = 0; s < step->n_storages; s++) {
        TFG_TRY(take_storage(plan, s, (double)n_tokens, &all_bytes, err));
    }
    for (int32_t o = 0; o < step->n_ops; o++) {
        TFG_TRY(take_op(plan, o, &all_ns, err));
    }
    make_room(plan, 0);
    return TFG_OK;
}

static tfg_status walk(tfg_plan *plan, const tfg_plan_step *step, int64_t n_tokens, const tfg_plan_policy *policy,
                       int64_t most_over, tfg_error *err) {
    TFG_TRY(begin(plan, step, n_tokens, policy, err));
    for (plan->event = 0; plan->event < step->n_events && plan->outcome.n_over <= most_over; plan->event++) {
        TFG_TRY(walk_event(plan, err));
    }
    return TFG_OK;
}

tfg_status tfg_plan_run(tfg_plan *plan, const tfg_plan_step *step, int64_t n_tokens, const tfg_plan_policy *policy,
                        tfg_plan_outcome *out, tfg_error *err) {
    TFG_TRY(walk(plan, step, n_tokens, policy, INT64_MAX, err));
    *out = plan->outcome;
    return TFG_OK;
}

tfg_status tfg_plan_smallest_budget(tfg_plan *plan, const tfg_plan_step *step, int64_t n_tokens, int64_t *out_bytes,
                                    tfg_error *err) {
    tfg_plan_policy policy = {TFG_PLAN_KEEP_ALL, 0};
    TFG_TRY(walk(plan, step, n_tokens, &policy, 0, err));
    int64_t holds_bytes = plan->outcome.peak_bytes, passed_bytes = step->base_bytes - 1;
    policy.kind = TFG_PLAN_BUDGET;
    while (holds_bytes - passed_bytes > 1) {
        policy.budget_bytes = passed_bytes + (holds_bytes - passed_bytes) / 2;
        TFG_TRY(walk(plan, step, n_tokens, &policy, 0, err));
        if (plan->outcome.n_over == 0) {
            holds_bytes = policy.budget_bytes;
        } else {
            passed_bytes = policy.budget_bytes;
        }
    }
    *out_bytes = holds_bytes;
    return TFG_OK;
}
