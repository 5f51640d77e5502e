/* SPDX-License-Identifier: BSD-3-Clause */
#include <math.h>
#include <string.h>

#include "failing_allocator.h"
#include "plan.h"
#include "putback.h"
#include "random_tape.h"

enum { MAX_STORAGES = 4096, MAX_OPS = 2048, MAX_REFS = 8192, MAX_EVENTS = 16384, MAX_SMALL = 96, N_RANDOM = 20000 };
enum { MAKE = TFG_PLAN_MAKE, FREE = TFG_PLAN_FREE, READ = TFG_PLAN_READ, END = TFG_PLAN_END, NONE = TFG_PLAN_NONE };
enum { PARAMETER, ACTIVATION, GRADIENT, TEMPORARY };

static random_source source;

/* ---- a step under construction ----------------------------------------------------------------------------------- */

typedef struct record {
    tfg_plan_storage storages[MAX_STORAGES];
    tfg_plan_op ops[MAX_OPS];
    int32_t refs[MAX_REFS];
    tfg_plan_event events[MAX_EVENTS];
    int32_t n_storages, n_ops, n_refs, n_events, n_regions;
    int64_t base_bytes;
} record;

static tfg_plan_step step_of(const record *r) {
    return (tfg_plan_step){r->storages,   r->ops,     r->refs,      r->events,    r->n_storages, r->n_ops,
                           r->n_refs,     r->n_events, r->n_regions, r->base_bytes};
}

static int32_t add(record *r, int64_t size_bytes, double price, bool is_wanted, uint8_t kind) {
    r->storages[r->n_storages] = (tfg_plan_storage){
        .fixed_bytes = size_bytes, .price_ns_per_byte = price, .sequence = r->n_storages, .region = NONE,
        .kind = kind, .is_wanted = is_wanted};
    return r->n_storages++;
}

static int32_t event(record *r, int32_t kind, int32_t index) {
    r->events[r->n_events] = (tfg_plan_event){kind, index};
    return r->n_events++;
}

static void begin_op(record *r, int64_t cost_ns) { r->ops[r->n_ops++] = (tfg_plan_op){cost_ns, r->n_refs, 0, 0}; }

static void reads(record *r, int32_t s) {
    r->refs[r->n_refs++] = s;
    r->ops[r->n_ops - 1].n_reads++;
}

static void writes(record *r, int32_t s) {
    r->refs[r->n_refs++] = s;
    r->ops[r->n_ops - 1].n_writes++;
}

/* One operator from one storage to another. */
static void op(record *r, int64_t cost_ns, int32_t from, int32_t to) {
    begin_op(r, cost_ns);
    reads(r, from);
    writes(r, to);
}

/* A forward of n activations, each made from the one before, the first from storage 0; then backward. */
static record *chain(record *r, int32_t n, int64_t size_bytes) {
    memset(r, 0, sizeof *r);
    add(r, 0, INFINITY, false, PARAMETER);
    event(r, MAKE, 0);
    for (int32_t i = 1; i <= n; i++) {
        op(r, 10, i - 1, add(r, size_bytes, 1, true, ACTIVATION));
        event(r, MAKE, i);
    }
    for (int32_t i = n; i >= 1; i--) {
        event(r, READ, i);
        event(r, FREE, i);
    }
    return r;
}

static tfg_status run_with(const tfg_allocator *allocator, const record *r, int64_t n_tokens, tfg_plan_policy policy,
                           tfg_plan_outcome *out, tfg_error *err) {
    tfg_plan *plan;
    const tfg_plan_step step = step_of(r);
    if (tfg_plan_create(allocator, &plan) != TFG_OK) {
        CHECK(plan == NULL);
        return TFG_ERR_MEMORY;
    }
    const tfg_status status = tfg_plan_run(plan, &step, n_tokens, &policy, out, err);
    tfg_plan_destroy(plan);
    return status;
}

static tfg_status try_run(const record *r, int64_t n_tokens, tfg_plan_policy policy, tfg_plan_outcome *out) {
    failing_allocator heap;
    const tfg_allocator allocator = failing_allocator_init(&heap);
    tfg_error err = {{0}};
    const tfg_status status = run_with(&allocator, r, n_tokens, policy, out, &err);
    CHECK_EQ(err.text[0] == '\0', status == TFG_OK);
    CHECK_EQ(heap.n_live_blocks, 0);
    CHECK_EQ(heap.n_wrong_sizes, 0);
    return status;
}

static tfg_plan_outcome run(const record *r, tfg_plan_policy policy) {
    tfg_plan_outcome out = {0};
    CHECK_EQ(try_run(r, 0, policy, &out), TFG_OK);
    return out;
}

static tfg_plan_policy keep_all(void) { return (tfg_plan_policy){TFG_PLAN_KEEP_ALL, 0}; }
static tfg_plan_policy let_go(void) { return (tfg_plan_policy){TFG_PLAN_LET_GO, 0}; }
static tfg_plan_policy budget(int64_t bytes) { return (tfg_plan_policy){TFG_PLAN_BUDGET, bytes}; }

static int64_t smallest_budget(const record *r) {
    failing_allocator heap;
    const tfg_allocator allocator = failing_allocator_init(&heap);
    const tfg_plan_step step = step_of(r);
    tfg_plan *plan;
    int64_t bytes = -1;
    CHECK_EQ(tfg_plan_create(&allocator, &plan), TFG_OK);
    CHECK_EQ(tfg_plan_smallest_budget(plan, &step, 0, &bytes, NULL), TFG_OK);
    tfg_plan_destroy(plan);
    CHECK_EQ(heap.n_live_blocks, 0);
    return bytes;
}

static void check_same(tfg_plan_outcome got, tfg_plan_outcome wanted) {
    CHECK_EQ(got.peak_bytes, wanted.peak_bytes);
    CHECK_EQ(got.peak_event, wanted.peak_event);
    CHECK_EQ(memcmp(got.alive_bytes, wanted.alive_bytes, sizeof got.alive_bytes), 0);
    CHECK_EQ(got.n_ops_replayed, wanted.n_ops_replayed);
    CHECK_EQ(got.replayed_ns, wanted.replayed_ns);
    CHECK_EQ(got.left_bytes, wanted.left_bytes);
    CHECK_EQ(got.n_over, wanted.n_over);
    CHECK_EQ(got.needed_bytes, wanted.needed_bytes);
}

/* ---- by hand ----------------------------------------------------------------------------------------------------- */

static void test_plan_draws_its_picture(void) {
    static record r;
    check_same(run(chain(&r, 3, 10), budget(25)), (tfg_plan_outcome){.peak_bytes = 20, .peak_event = 2,
               .alive_bytes = {[ACTIVATION] = 20}, .n_ops_replayed = 1, .replayed_ns = 10, .left_bytes = 10});
}

static void test_plan_says_what_lives_at_the_peak(void) {
    static record r;
    memset(&r, 0, sizeof r);
    r.base_bytes = 1000;
    const int32_t w = add(&r, 50, INFINITY, false, PARAMETER), t = add(&r, 7, INFINITY, false, TEMPORARY);
    const int32_t a = add(&r, 30, INFINITY, true, ACTIVATION), g = add(&r, 20, INFINITY, false, GRADIENT);
    event(&r, MAKE, w), event(&r, MAKE, t), event(&r, MAKE, a), event(&r, FREE, t);
    event(&r, READ, a), event(&r, MAKE, g), event(&r, FREE, a), event(&r, FREE, g), event(&r, FREE, w);
    check_same(run(&r, keep_all()), (tfg_plan_outcome){.peak_bytes = 1100, .peak_event = 5,
               .alive_bytes = {[PARAMETER] = 50, [ACTIVATION] = 30, [GRADIENT] = 20}});
    r.n_events = 0;
    check_same(run(&r, keep_all()), (tfg_plan_outcome){.peak_bytes = 1000, .peak_event = NONE});
    check_same(run(&r, budget(999)), (tfg_plan_outcome){.peak_bytes = 1000, .peak_event = NONE, .n_over = 1,
               .needed_bytes = 1000});
}

/* x -> a -> h -> b; h is the forward's alone. b's replay makes a, which stays, and h, which dies when b is there. */
static record *small_region(record *r) {
    memset(r, 0, sizeof *r);
    const int32_t x = add(r, 1, INFINITY, false, PARAMETER), a = add(r, 100, 1, true, ACTIVATION);
    const int32_t h = add(r, 1000, 1, false, TEMPORARY), b = add(r, 10, 1, true, ACTIVATION);
    const int32_t loss = add(r, 5000, INFINITY, false, TEMPORARY);
    op(r, 5, x, a), op(r, 6, a, h), op(r, 7, h, b);
    r->n_regions = 1;
    r->storages[a].region = r->storages[b].region = 0;
    event(r, MAKE, x), event(r, MAKE, a), event(r, MAKE, h), event(r, MAKE, b), event(r, FREE, h), event(r, END, 0);
    event(r, MAKE, loss), event(r, FREE, loss);
    event(r, READ, b), event(r, FREE, b), event(r, READ, a), event(r, FREE, a);
    return r;
}

static void test_plan_lets_go_at_the_end_of_a_region(void) {
    static record r;
    CHECK_EQ(run(small_region(&r), keep_all()).peak_bytes, 5111);
    tfg_plan_outcome wanted = {.peak_bytes = 5001, .peak_event = 6, .n_ops_replayed = 3, .replayed_ns = 18,
                               .left_bytes = 110, .alive_bytes = {[PARAMETER] = 1, [TEMPORARY] = 5000}};
    check_same(run(&r, let_go()), wanted);
    r.events[8] = (tfg_plan_event){READ, 0}; /* b is freed unread: only a is replayed, for itself */
    wanted.n_ops_replayed = 1, wanted.replayed_ns = 5;
    check_same(run(&r, let_go()), wanted);
}

static void test_plan_pins_what_the_forward_and_backward_work_on(void) {
    static record r;
    CHECK_EQ(run(chain(&r, 3, 10), budget(19)).needed_bytes, 20); /* an operator's input and output */
    CHECK_EQ(run(&r, budget(19)).n_over, 2);                      /* b, and c */
    CHECK_EQ(run(&r, budget(20)).n_over, 0);
    r.n_events -= 6;
    const int32_t g = add(&r, 15, INFINITY, false, GRADIENT);
    event(&r, READ, 3), event(&r, READ, 2), event(&r, MAKE, g);
    event(&r, READ, 3), event(&r, FREE, g), event(&r, READ, 1);
    CHECK_EQ(run(&r, budget(34)).n_over, 1);
    CHECK_EQ(run(&r, budget(34)).needed_bytes, 35);
    CHECK_EQ(run(&r, budget(35)).n_over, 0);
}

/* u and v come from one operator. Where only u has left, v is made again beside itself. */
static void test_plan_copies_what_a_replay_makes_beside(void) {
    static record r;
    memset(&r, 0, sizeof r);
    const int32_t x = add(&r, 1, INFINITY, false, PARAMETER), u = add(&r, 10, 1, true, ACTIVATION);
    const int32_t v = add(&r, 100, INFINITY, true, ACTIVATION), t = add(&r, 95, INFINITY, false, TEMPORARY);
    begin_op(&r, 3), reads(&r, x), writes(&r, u), writes(&r, v);
    op(&r, 1, v, add(&r, 0, INFINITY, false, TEMPORARY));
    event(&r, MAKE, x), event(&r, MAKE, u), event(&r, MAKE, v), event(&r, MAKE, 4);
    event(&r, MAKE, t), event(&r, FREE, t), event(&r, READ, u), event(&r, FREE, u);
    check_same(run(&r, budget(200)), (tfg_plan_outcome){.peak_bytes = 211, .peak_event = 6,
               .alive_bytes = {[PARAMETER] = 1, [ACTIVATION] = 210}, .n_ops_replayed = 1, .replayed_ns = 3,
               .left_bytes = 10, .n_over = 1, .needed_bytes = 211});
    r.events[6] = r.events[7], r.n_events--; /* it is freed after it has left: nothing more is freed or replayed */
    check_same(run(&r, budget(200)), (tfg_plan_outcome){.peak_bytes = 196, .peak_event = 4,
               .alive_bytes = {[PARAMETER] = 1, [ACTIVATION] = 100, [TEMPORARY] = 95}, .left_bytes = 10});
}

static void test_plan_puts_back_what_putback_chooses(void) {
    static record r;
    chain(&r, 256, 1);
    CHECK_EQ(run(&r, budget(256)).n_ops_replayed, 0);
    const tfg_plan_outcome out = run(&r, budget(10));
    CHECK_EQ(out.n_over, 0);
    CHECK(out.n_ops_replayed > 255 && out.n_ops_replayed < 6 * 256); /* with only the end kept it would be thousands */
    CHECK_EQ(smallest_budget(chain(&r, 2000, 1)), 2);
}

static void test_plan_rounds_bytes_up(void) {
    static record r;
    tfg_plan_outcome out;
    memset(&r, 0, sizeof r);
    event(&r, MAKE, add(&r, -3, INFINITY, false, PARAMETER));
    r.storages[0].bytes_per_token = 1.25, r.storages[0].bytes_per_token2 = 0.5;
    CHECK_EQ(try_run(&r, 5, keep_all(), &out), TFG_OK);
    CHECK_EQ(out.peak_bytes, 16); /* 6.25 + 12.5 - 3 */
    CHECK_EQ(try_run(&r, 0, keep_all(), &out), TFG_ERR_ARGUMENT);
}

static void test_plan_counts_as_far_as_it_says(void) {
    static record r;
    const int64_t size_bytes = INT64_MAX / 8 / 4;
    chain(&r, 4, size_bytes);
    r.base_bytes = INT64_MAX / 8;
    CHECK_EQ(run(&r, budget(INT64_MAX)).peak_bytes, r.base_bytes + 4 * size_bytes);
    CHECK_EQ(run(&r, budget(INT64_MAX)).left_bytes, 0);
    CHECK_EQ(run(&r, budget(0)).needed_bytes, r.base_bytes + 2 * size_bytes);
    CHECK_EQ(smallest_budget(&r), r.base_bytes + 2 * size_bytes);
}

/* ---- against a slow interpreter: no counters, each question is asked of the whole step --------------------------- */

enum { UNMADE, ALIVE, LEFT, FREED };

typedef struct slow {
    const record *r;
    int64_t budget_bytes;
    bool lets_go, has_ledger;
    tfg_plan_outcome out;
    int32_t state[MAX_SMALL];
    int32_t maker[MAX_SMALL];
    bool does_read[MAX_SMALL][MAX_SMALL]; /* by operator and storage */
    bool is_in_use[MAX_SMALL], is_copied[MAX_SMALL], comes_back[MAX_SMALL], has_ended[MAX_SMALL];
    bool is_replayed[MAX_SMALL]; /* by operator, of the running replay */
    int32_t at_op;               /* there; n_ops: none runs */
    int32_t n_begun, n_passed, event;
} slow;

static int64_t size_of(const slow *w, int32_t s) { return w->r->storages[s].fixed_bytes; }
static int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

/* Does an operator from `first` on, of all or of the running replay, read it? */
static bool is_read_from(const slow *w, int32_t first, int32_t s, bool in_replay) {
    bool is_read = false;
    for (int32_t o = first; o < w->r->n_ops; o++) {
        is_read |= w->does_read[o][s] && (!in_replay || w->is_replayed[o]);
    }
    return is_read;
}

static bool can_leave(const slow *w, int32_t s) { /* some time */
    const tfg_plan_storage *storage = &w->r->storages[s];
    return w->state[s] == ALIVE && storage->is_wanted && storage->price_ns_per_byte < INFINITY && size_of(w, s) > 0 &&
           w->maker[s] != NONE;
}

static bool is_on_ledger(const slow *w, int32_t s) {
    return w->has_ledger && can_leave(w, s) && w->maker[s] < w->n_passed && !is_read_from(w, w->n_passed, s, false);
}

static int64_t sum(const slow *w, int64_t *of_kind) {
    int64_t all = w->r->base_bytes;
    memset(of_kind, 0, TFG_PLAN_N_KINDS * sizeof(int64_t));
    for (int32_t s = 0; s < w->r->n_storages; s++) {
        const int64_t bytes = size_of(w, s) * ((w->state[s] == ALIVE) + w->is_copied[s]);
        all += bytes, of_kind[w->r->storages[s].kind] += bytes;
    }
    return all;
}

static void let_it_leave(slow *w, int32_t s) {
    w->state[s] = LEFT;
    w->out.left_bytes += size_of(w, s);
}

static bool drop_cheapest(slow *w) {
    int32_t best = NONE;
    for (int32_t s = 0; s < w->r->n_storages; s++) {
        const tfg_plan_storage *l = &w->r->storages[s], *b = &w->r->storages[best == NONE ? s : best];
        const bool is_better = best == NONE || l->price_ns_per_byte < b->price_ns_per_byte ||
                               (l->price_ns_per_byte <= b->price_ns_per_byte && l->sequence < b->sequence);
        const bool is_pinned = w->is_in_use[s] || is_read_from(w, w->at_op, s, true);
        best = is_on_ledger(w, s) && !is_pinned && is_better ? s : best;
    }
    if (best != NONE) {
        let_it_leave(w, best);
    }
    return best != NONE;
}

static void fit(slow *w, int64_t more_bytes) {
    int64_t of_kind[TFG_PLAN_N_KINDS];
    while (sum(w, of_kind) + more_bytes > w->budget_bytes && drop_cheapest(w)) {
    }
    const int64_t bytes = sum(w, of_kind) + more_bytes;
    w->out.n_over += bytes > w->budget_bytes;
    w->out.needed_bytes = bytes > w->budget_bytes && bytes > w->out.needed_bytes ? bytes : w->out.needed_bytes;
}

static void grow(slow *w, int32_t s, bool is_copy) {
    int64_t of_kind[TFG_PLAN_N_KINDS];
    if (size_of(w, s) > 0) {
        fit(w, size_of(w, s));
    }
    w->is_copied[s] |= is_copy;
    w->state[s] = is_copy ? w->state[s] : ALIVE;
    if (sum(w, of_kind) > w->out.peak_bytes) {
        w->out.peak_bytes = sum(w, w->out.alive_bytes);
        w->out.peak_event = w->event;
    }
}

static tfg_status slow_find(slow *w, int32_t wanted) {
    w->is_replayed[w->maker[wanted]] = true;
    for (int32_t round = 0; round < w->r->n_ops; round++) { /* one operator at least, or nothing new */
        for (int32_t s = 0; s < w->r->n_storages; s++) {
            if (w->state[s] != ALIVE && is_read_from(w, 0, s, true)) {
                if (w->maker[s] == NONE) {
                    return TFG_ERR_UNREACHABLE;
                }
                w->is_replayed[w->maker[s]] = true;
            }
        }
    }
    return TFG_OK;
}

static void slow_choose(slow *w, int32_t wanted) {
    int32_t path[MAX_SMALL], n = 0;
    int64_t bytes[MAX_SMALL], ns[MAX_SMALL], of_kind[TFG_PLAN_N_KINDS], since_ns = 0;
    uint8_t stays[MAX_SMALL];
    for (int32_t o = 0; o < w->r->n_ops; o++) {
        since_ns += !w->is_replayed[o] ? 0 : w->r->ops[o].cost_ns > 0 ? w->r->ops[o].cost_ns : 1;
        for (int32_t s = 0; s < w->r->n_storages; s++) { /* an operator's storages have rising numbers */
            if (w->maker[s] == o && w->is_replayed[o] && s != wanted && w->state[s] == LEFT) {
                path[n] = s, bytes[n] = size_of(w, s), ns[n++] = since_ns;
                since_ns = 0;
            }
        }
    }
    int64_t room_bytes = w->budget_bytes - sum(w, of_kind);
    room_bytes = (room_bytes < 0 ? 0 : room_bytes) - size_of(w, wanted);
    for (int32_t s = 0; s < w->r->n_storages; s++) {
        room_bytes += is_on_ledger(w, s) ? size_of(w, s) : 0;
    }
    CHECK_EQ(tfg_putback_choose(bytes, ns, n, room_bytes, stays, NULL), TFG_OK);
    for (int32_t i = 0; i < n; i++) {
        w->comes_back[path[i]] = stays[i] != 0;
    }
    w->comes_back[wanted] = true;
}

static tfg_status slow_replay(slow *w, int32_t wanted) {
    TFG_TRY(slow_find(w, wanted));
    slow_choose(w, wanted);
    for (w->at_op = 0; w->at_op < w->r->n_ops; w->at_op++) {
        w->out.n_ops_replayed += w->is_replayed[w->at_op];
        w->out.replayed_ns += w->is_replayed[w->at_op] ? w->r->ops[w->at_op].cost_ns : 0;
        for (int32_t s = 0; s < w->r->n_storages; s++) {
            if (w->is_replayed[w->at_op] && w->maker[s] == w->at_op) {
                grow(w, s, true);
            }
        }
        for (int32_t s = 0; s < w->r->n_storages; s++) {
            if (w->comes_back[s] && w->is_copied[s]) {
                w->comes_back[s] = w->is_copied[s] = false;
                w->state[s] = ALIVE;
            }
            w->is_copied[s] &= is_read_from(w, w->at_op + 1, s, true);
        }
    }
    memset(w->is_replayed, 0, sizeof w->is_replayed);
    return TFG_OK;
}

static tfg_status slow_event(slow *w, int32_t kind, int32_t i) {
    const int32_t n = kind == END ? w->r->n_regions : w->r->n_storages;
    if (kind < MAKE || kind > END || i < 0 || i >= n || (kind == END && w->has_ended[i]) ||
        (kind == MAKE && w->state[i] != UNMADE) ||
        ((kind == FREE || kind == READ) && w->state[i] != ALIVE && w->state[i] != LEFT)) {
        return TFG_ERR_ARGUMENT;
    }
    if (kind == END || (kind == READ && (w->event == 0 || w->r->events[w->event - 1].kind != READ))) {
        memset(w->is_in_use, 0, sizeof w->is_in_use);
        w->n_passed = w->n_begun;
    }
    if (kind == MAKE) {
        w->n_passed = larger(w->n_passed, w->maker[i]);
        w->n_begun = larger(w->n_begun, w->maker[i] + 1);
        grow(w, i, false);
    } else if (kind == FREE) {
        w->state[i] = FREED;
    } else if (kind == READ) {
        if (w->state[i] == LEFT) {
            TFG_TRY(slow_replay(w, i));
        }
        w->is_in_use[i] = true;
    }
    for (int32_t s = 0; s < w->r->n_storages && kind == END && w->lets_go; s++) {
        if (w->r->storages[s].region == i && can_leave(w, s)) {
            let_it_leave(w, s);
        }
    }
    w->has_ended[i] |= kind == END;
    return TFG_OK;
}

static tfg_status slow_run(const record *r, tfg_plan_policy policy, tfg_plan_outcome *out) {
    slow w = {.r = r, .at_op = r->n_ops, .out = {.peak_bytes = r->base_bytes, .peak_event = NONE}};
    w.lets_go = policy.kind == TFG_PLAN_LET_GO;
    w.has_ledger = policy.kind == TFG_PLAN_BUDGET;
    w.budget_bytes = w.has_ledger ? policy.budget_bytes : INT64_MAX / 2;
    memset(w.maker, 0xff, sizeof w.maker);
    for (int32_t o = 0; o < r->n_ops; o++) {
        for (int32_t i = 0; i < r->ops[o].n_reads; i++) {
            w.does_read[o][r->refs[r->ops[o].first_ref + i]] = true;
        }
        for (int32_t i = 0; i < r->ops[o].n_writes; i++) {
            w.maker[r->refs[r->ops[o].first_ref + r->ops[o].n_reads + i]] = o;
        }
    }
    fit(&w, 0);
    for (w.event = 0; w.event < r->n_events; w.event++) {
        TFG_TRY(slow_event(&w, r->events[w.event].kind, r->events[w.event].index));
    }
    *out = w.out;
    return TFG_OK;
}

/* ---- random steps ------------------------------------------------------------------------------------------------ */

typedef struct draft {
    record *r;
    bool is_there[MAX_SMALL];
    int64_t mask; /* over the sequence: an order that is not the tape's */
} draft;

static int32_t draw(draft *d, int32_t most_bytes, bool is_wanted, int32_t region, bool is_made) {
    const double price = random_one_in(&source, 4) ? INFINITY : (double)random_below(&source, 4);
    const int32_t s = add(d->r, random_one_in(&source, 8) ? 0 : random_below(&source, most_bytes), price, is_wanted,
                          (uint8_t)random_below(&source, TFG_PLAN_N_KINDS));
    d->r->storages[s].sequence ^= d->mask;
    d->r->storages[s].region = region;
    d->is_there[s] = is_made && event(d->r, MAKE, s) >= 0;
    return s;
}

static void draw_forward(draft *d) {
    const int32_t n_before = d->r->n_storages, region = random_below(&source, d->r->n_regions + 1) - 1;
    begin_op(d->r, random_one_in(&source, 2) ? 0 : random_below(&source, 20));
    for (int32_t i = random_below(&source, 4); i > 0; i--) {
        const int32_t s = n_before - 1 - random_below(&source, n_before < 5 ? n_before : 5);
        if (d->is_there[s] || random_one_in(&source, 30)) {
            reads(d->r, s);
        }
    }
    for (int32_t i = random_one_in(&source, 4) ? 2 : 1; i > 0; i--) {
        writes(d->r, draw(d, 40, !random_one_in(&source, 3), region, !random_one_in(&source, 12)));
    }
}

static void draw_backward(draft *d, int32_t n_forward) {
    for (int32_t i = random_below(&source, 4); i > 0; i--) {
        const int32_t s = random_below(&source, n_forward);
        if (d->is_there[s]) {
            event(d->r, READ, s);
        }
    }
    draw(d, 30, false, NONE, true);
}

static void draw_frees(draft *d, int32_t one_in, bool are_wanted_too) {
    for (int32_t s = 0; s < d->r->n_storages; s++) {
        if (d->is_there[s] && (are_wanted_too || !d->r->storages[s].is_wanted) && random_one_in(&source, one_in)) {
            d->is_there[s] = event(d->r, FREE, s) < 0;
        }
    }
}

static void random_step_of(record *r) {
    draft d = {.r = r, .mask = random_below(&source, 32)};
    memset(r, 0, sizeof *r);
    r->n_regions = random_below(&source, 4), r->base_bytes = random_below(&source, 20);
    draw(&d, 30, false, NONE, true);
    for (int32_t round = random_one_in(&source, 4) ? 2 : 1, region = 0; round > 0; round--) {
        for (int32_t i = random_below(&source, 12); i > 0; i--) {
            draw_forward(&d);
            draw_frees(&d, 40, random_one_in(&source, 8));
            if (region < r->n_regions && random_one_in(&source, 4)) {
                event(r, END, region++);
            }
        }
        for (int32_t i = random_below(&source, 8), n_forward = r->n_storages; i > 0; i--) {
            draw_backward(&d, n_forward);
            draw_frees(&d, 12, true);
        }
    }
    if (random_one_in(&source, 20)) {
        r->events[random_below(&source, r->n_events)] =
            (tfg_plan_event){random_below(&source, 6) - 1, random_below(&source, r->n_storages + 2) - 1};
    }
}

/* One scratch for all, whatever went wrong before. */
static void test_plan_is_the_slow_interpreter(void) {
    static record r;
    int32_t n_good = 0, n_replays = 0, n_over = 0, n_unreachable = 0;
    failing_allocator heap;
    const tfg_allocator allocator = failing_allocator_init(&heap);
    tfg_plan *plan;
    CHECK_EQ(tfg_plan_create(&allocator, &plan), TFG_OK);
    for (int32_t i = 0; i < N_RANDOM; i++) {
        tfg_plan_outcome got = {0}, wanted = {0};
        random_step_of(&r);
        CHECK(r.n_storages <= MAX_SMALL);
        const tfg_plan_step step = step_of(&r);
        const tfg_plan_policy small = budget(random_below(&source, 10 + 10 * r.n_storages));
        const tfg_plan_policy policy = i % 6 == 0 ? keep_all() : i % 6 == 1 ? let_go() : small;
        const tfg_status status = slow_run(&r, policy, &wanted);
        CHECK_EQ(tfg_plan_run(plan, &step, 0, &policy, &got, NULL), status);
        check_same(got, wanted);
        n_good += status == TFG_OK, n_unreachable += status == TFG_ERR_UNREACHABLE;
        n_replays += got.n_ops_replayed > 1, n_over += got.n_over > 0 && got.n_ops_replayed > 0;
    }
    CHECK(n_good > N_RANDOM / 2 && n_replays > N_RANDOM / 10 && n_over > N_RANDOM / 20 && n_unreachable > 10);
    tfg_plan_destroy(plan);
    CHECK_EQ(heap.n_live_blocks, 0);
}

/* ---- laws -------------------------------------------------------------------------------------------------------- */

static int64_t running_peak(const record *r) {
    int64_t alive_bytes = r->base_bytes, peak_bytes = r->base_bytes;
    for (int32_t e = 0; e < r->n_events; e++) {
        const int64_t bytes = r->events[e].kind == END ? 0 : r->storages[r->events[e].index].fixed_bytes;
        alive_bytes += r->events[e].kind == MAKE ? bytes : r->events[e].kind == FREE ? -bytes : 0;
        peak_bytes = alive_bytes > peak_bytes ? alive_bytes : peak_bytes;
    }
    return peak_bytes;
}

static void check_budget_laws(const record *r, int64_t all_bytes) {
    const tfg_plan_outcome all = run(r, budget(all_bytes));
    CHECK_EQ(all.peak_bytes, all_bytes);
    CHECK_EQ(all.n_ops_replayed + all.left_bytes + all.n_over + all.needed_bytes, 0);
    int64_t least_bytes = all_bytes + 1;
    for (int64_t bytes = all_bytes; bytes >= 0; bytes--) {
        const tfg_plan_outcome out = run(r, budget(bytes));
        CHECK(out.peak_bytes <= (bytes > out.needed_bytes ? bytes : out.needed_bytes));
        CHECK_EQ(out.n_over > 0, out.needed_bytes > bytes);
        least_bytes = out.n_over == 0 && bytes == least_bytes - 1 ? bytes : least_bytes;
    }
    const int64_t smallest_bytes = smallest_budget(r);
    CHECK(smallest_bytes <= least_bytes); /* below it some may hold and some not */
    CHECK_EQ(run(r, budget(smallest_bytes)).n_over, 0);
    CHECK(smallest_bytes == 0 || run(r, budget(smallest_bytes - 1)).n_over > 0);
}

static void check_grows_with_tokens(record *r, tfg_plan_policy policy) {
    int64_t peak_before = 0;
    for (int32_t s = 0; s < r->n_storages; s++) {
        r->storages[s].bytes_per_token = r->storages[s].fixed_bytes == 0 ? 0 : random_below(&source, 100) / 16.0;
    }
    for (int64_t n_tokens = 0; n_tokens < 60; n_tokens += 1 + random_below(&source, 9)) {
        tfg_plan_outcome out = {0};
        CHECK_EQ(try_run(r, n_tokens, policy, &out), TFG_OK);
        CHECK(out.peak_bytes >= peak_before);
        peak_before = out.peak_bytes;
    }
}

static void test_plan_keeps_its_laws(void) {
    static record r;
    for (int32_t i = 0; i < N_RANDOM / 50; i++) {
        tfg_plan_outcome out = {0};
        do {
            random_step_of(&r);
        } while (slow_run(&r, let_go(), &out) != TFG_OK || slow_run(&r, budget(0), &out) != TFG_OK);
        const int64_t all_bytes = running_peak(&r);
        CHECK_EQ(run(&r, keep_all()).peak_bytes, all_bytes);
        check_budget_laws(&r, all_bytes);
        check_grows_with_tokens(&r, i % 2 == 0 ? keep_all() : let_go());
    }
}

/* ---- what can go wrong ------------------------------------------------------------------------------------------- */

static void test_plan_survives_every_failing_request(void) {
    static record r;
    chain(&r, 40, 10);
    for (int64_t k = 0, n_requests = 1; k < n_requests; k++) {
        failing_allocator heap;
        const tfg_allocator allocator = failing_allocator_init(&heap);
        tfg_plan_outcome out = {.n_over = -1};
        CHECK_EQ(run_with(&allocator, &r, 0, budget(50), &out, NULL), TFG_OK);
        n_requests = heap.n_requests;
        CHECK(n_requests > 10 && out.n_ops_replayed > 0);
        const tfg_allocator failing = failing_allocator_init(&heap);
        heap.fail_at = k, out.n_over = -1;
        CHECK_EQ(run_with(&failing, &r, 0, budget(50), &out, NULL), TFG_ERR_MEMORY);
        CHECK_EQ(out.n_over, -1);
        CHECK_EQ(heap.n_live_blocks, 0);
    }
}

static void check_refused(const record *r, tfg_plan_policy policy, int64_t n_tokens, tfg_status wanted) {
    tfg_plan_outcome out = {.n_over = -1};
    CHECK_EQ(try_run(r, n_tokens, policy, &out), wanted);
    CHECK_EQ(out.n_over, -1);
}

static void test_plan_refuses_steps_that_are_none(void) {
    static record good, bad;
    small_region(&good);
    check_refused(&good, budget(-1), 0, TFG_ERR_ARGUMENT);
    check_refused(&good, (tfg_plan_policy){(tfg_plan_policy_kind)3, 0}, 0, TFG_ERR_ARGUMENT);
    check_refused(&good, keep_all(), -1, TFG_ERR_ARGUMENT);
#define REFUSED(change) bad = good, (void)(change), check_refused(&bad, let_go(), 1, TFG_ERR_ARGUMENT)
    REFUSED(bad.n_storages = -1);
    REFUSED(bad.n_regions = -1);
    REFUSED(bad.base_bytes = -1);
    REFUSED(bad.base_bytes = INT64_MAX);
    REFUSED(bad.storages[1].fixed_bytes = -1);
    REFUSED(bad.storages[1].fixed_bytes = INT64_MIN);
    REFUSED(bad.storages[1].fixed_bytes = INT64_MAX / 8); /* with the others too much */
    REFUSED(bad.storages[1].bytes_per_token = NAN);
    REFUSED(bad.storages[1].bytes_per_token2 = INFINITY);
    REFUSED(bad.storages[1].bytes_per_token = 1e300);
    REFUSED(bad.storages[1].price_ns_per_byte = NAN);
    REFUSED(bad.storages[1].kind = TFG_PLAN_N_KINDS);
    REFUSED(bad.storages[1].region = 1);
    REFUSED(bad.storages[1].region = -2);
    REFUSED(bad.ops[1].cost_ns = -1);
    REFUSED(bad.ops[1].cost_ns = INT64_MAX / 8);
    REFUSED(bad.ops[1].first_ref = 5);
    REFUSED(bad.ops[1].first_ref = -1);
    REFUSED(bad.ops[1].n_reads = -1);
    REFUSED(bad.ops[1].n_writes = INT32_MAX);
    REFUSED(bad.refs[2] = bad.n_storages);
    REFUSED(bad.refs[2] = -1);
    REFUSED(bad.refs[3] = 1);                            /* made twice */
    REFUSED(bad.refs[0] = 2);                            /* read before it is made */
    REFUSED(bad.events[3].kind = 4);
    REFUSED(bad.events[3].index = -1);
    REFUSED(bad.events[3].index = bad.n_storages);
    REFUSED(bad.events[5].index = 1);                    /* no such region */
    REFUSED(bad.events[6] = bad.events[5]);              /* it has ended */
    REFUSED(bad.events[3] = bad.events[2]);              /* MAKE twice */
    REFUSED(bad.events[3].kind = READ);                  /* never made */
    REFUSED(bad.events[3].kind = FREE);
    REFUSED(bad.events[10] = bad.events[9]);             /* FREE twice */
    REFUSED(event(&bad, READ, 1));                 /* after its FREE */
    REFUSED(event(&bad, MAKE, 1));
    bad = good, bad.events[7] = (tfg_plan_event){FREE, 0}; /* where b's replay starts from */
    check_refused(&bad, let_go(), 0, TFG_ERR_UNREACHABLE);
    tfg_plan_destroy(NULL);
}

int main(int argc, char **argv) {
    source = (random_source){random_seed(argc, argv)};
    RUN(test_plan_draws_its_picture);
    RUN(test_plan_says_what_lives_at_the_peak);
    RUN(test_plan_lets_go_at_the_end_of_a_region);
    RUN(test_plan_pins_what_the_forward_and_backward_work_on);
    RUN(test_plan_copies_what_a_replay_makes_beside);
    RUN(test_plan_puts_back_what_putback_chooses);
    RUN(test_plan_rounds_bytes_up);
    RUN(test_plan_counts_as_far_as_it_says);
    RUN(test_plan_is_the_slow_interpreter);
    RUN(test_plan_keeps_its_laws);
    RUN(test_plan_survives_every_failing_request);
    RUN(test_plan_refuses_steps_that_are_none);
    return check_finish();
}
