/* SPDX-License-Identifier: BSD-3-Clause */
#include <string.h>

#include "closure.h"
#include "failing_allocator.h"
#include "keep.h"
#include "random_tape.h"

enum { MAX_VALUES = 2000 };

static random_source source;
static failing_allocator heap;

static tfg_tape_view look(const tfg_tape *tape) {
    tfg_tape_view view;
    tfg_tape_look(tape, &view);
    return view;
}

/* ---- the definitions, slowly --------------------------------------------------------------------------------------- */

static bool has_flag(const tfg_tape_view *view, int32_t storage, uint32_t flag) {
    return (view->storages[storage].flags & flag) != 0;
}

static bool is_start(const tfg_tape_view *view, int32_t value) {
    const tfg_value *v = &view->values[value];
    return v->state == TFG_VALUE_ROOT && view->storages[v->storage].current == value &&
           !has_flag(view, v->storage, TFG_STORAGE_OPAQUE);
}

/* Roots that some settling could lean on: when one is overwritten, the torch room puts its bytes aside first. They are
 * there for what was promised before the write, and for nothing that is promised later. (Nothing can be put aside before
 * a write that is not recorded; keep does not tell the two apart, so here it counts as if.) Of the tape at hand. */
static uint8_t is_relied_on[MAX_VALUES];

static void rely_on_starts(const tfg_tape_view *view) {
    for (int32_t value = 0; value < view->n_values; value++) {
        is_relied_on[value] |= is_start(view, value);
    }
}

/* The rule of one value, given the states of what its operator reads. */
static uint8_t ruled_state(const tfg_tape_view *view, int32_t value, uint8_t before) {
    const tfg_value *v = &view->values[value];
    const tfg_op *op = &view->ops[v->producer];
    bool is_derivable = (op->flags & TFG_OP_PINNED) == 0;
    for (int32_t i = 0; i < op->n_reads; i++) {
        const int32_t read = view->refs[op->first_ref + i];
        const tfg_value *r = &view->values[read];
        is_derivable &= is_start(view, read) || (r->state == TFG_VALUE_DERIVABLE &&
                                                 !has_flag(view, r->storage, TFG_STORAGE_OPAQUE));
    }
    if (before == TFG_VALUE_ROOT || before == TFG_VALUE_DERIVABLE) {
        return before;
    }
    const bool is_external = has_flag(view, v->storage, TFG_STORAGE_EXTERNAL);
    const bool is_held = is_external && view->storages[v->storage].current == value &&
                         !has_flag(view, v->storage, TFG_STORAGE_OPAQUE);
    return is_derivable && !is_external ? TFG_VALUE_DERIVABLE : v->n_handles > 0 || is_held ? TFG_VALUE_ROOT : TFG_VALUE_LOST;
}

static bool is_droppable_by_definition(const tfg_tape_view *view, int32_t storage) {
    bool is_droppable = !has_flag(view, storage, TFG_STORAGE_OPAQUE | TFG_STORAGE_EXTERNAL);
    for (int32_t value = 0; value < view->n_values; value++) {
        const tfg_value *v = &view->values[value];
        if (v->storage != storage) {
            continue;
        }
        const bool is_current = view->storages[storage].current == value;
        is_droppable &= v->n_handles == 0 || (is_current && v->state == TFG_VALUE_DERIVABLE);
        is_droppable &= !(is_current && v->state == TFG_VALUE_ROOT);
    }
    return is_droppable;
}

/* All that can be made from what is_made says is there, running any operator that may run, until nothing new comes.
 * Knows nothing of states. */
static void make_all(const tfg_tape_view *view, uint8_t *is_made) {
    for (bool is_moving = true; is_moving;) {
        is_moving = false;
        for (int32_t o = 0; o < view->n_ops; o++) {
            const tfg_op *op = &view->ops[o];
            bool can_run = (op->flags & TFG_OP_PINNED) == 0;
            for (int32_t i = 0; i < op->n_reads; i++) {
                can_run &= is_made[view->refs[op->first_ref + i]] != 0;
            }
            for (int32_t i = op->n_reads; can_run && i < op->n_reads + op->n_writes; i++) {
                uint8_t *made = &is_made[view->refs[op->first_ref + i]];
                is_moving |= !*made;
                *made = 1;
            }
        }
    }
}

/* When everything droppable is gone: what was promised before can still be made, from what is kept or was put aside; and
 * each value of the span that is promised now, or has a handle and is not kept, can be made from what is kept and from
 * the promises before. `before` are the states from before this settling. */
static void check_law(const tfg_tape *tape, int32_t first_op, const uint8_t *before) {
    static uint8_t is_made_before[MAX_VALUES], is_made[MAX_VALUES];
    const tfg_tape_view view = look(tape);
    for (int32_t value = 0; value < view.n_values; value++) {
        const bool is_kept = is_start(&view, value) && !tfg_keep_is_droppable(tape, view.values[value].storage);
        is_made_before[value] = is_kept || is_relied_on[value];
        is_made[value] = is_kept || before[value] == TFG_VALUE_DERIVABLE;
    }
    make_all(&view, is_made_before);
    make_all(&view, is_made);
    for (int32_t value = 0; value < view.n_values; value++) {
        const tfg_value *v = &view.values[value];
        const bool is_in_span = v->producer == TFG_NONE || v->producer >= first_op;
        const bool is_asked_for = v->n_handles > 0 && tfg_keep_is_droppable(tape, v->storage);
        CHECK(before[value] != TFG_VALUE_DERIVABLE || is_made_before[value]);
        CHECK(is_made[value] || !is_in_span || (v->state != TFG_VALUE_DERIVABLE && !is_asked_for));
    }
}

static void follow(const tfg_tape_view *view, int32_t value, uint8_t *is_followed) {
    const tfg_value *v = &view->values[value];
    if (is_followed[value]) {
        return;
    }
    is_followed[value] = 1;
    if (v->state != TFG_VALUE_ROOT && v->producer != TFG_NONE) {
        const tfg_op *op = &view->ops[v->producer];
        for (int32_t i = 0; i < op->n_reads; i++) {
            follow(view, view->refs[op->first_ref + i], is_followed);
        }
    }
}

static void check_prune(tfg_tape *tape) {
    static uint8_t is_followed[MAX_VALUES];
    tfg_keep_prune(tape);
    CHECK_LAWS(tape);
    const tfg_tape_view view = look(tape);
    memset(is_followed, 0, sizeof is_followed);
    for (int32_t value = 0; value < view.n_values; value++) {
        if (view.values[value].state == TFG_VALUE_DERIVABLE && view.values[value].n_handles > 0) {
            follow(&view, value, is_followed);
        }
    }
    for (int32_t value = 0; value < view.n_values; value++) {
        CHECK_EQ(view.values[value].is_needed, is_followed[value]);
    }
}

/* ---- random tapes, settled in spans -------------------------------------------------------------------------------- */

static void settle_and_check(tfg_tape *tape, int32_t first_op) {
    static uint8_t before[MAX_VALUES];
    tfg_tape_view view = look(tape);
    CHECK(view.n_values <= MAX_VALUES);
    for (int32_t value = 0; value < view.n_values; value++) {
        before[value] = view.values[value].state;
    }
    CHECK_EQ(tfg_keep_settle(tape, first_op), TFG_OK);
    CHECK_LAWS(tape);
    for (int32_t value = 0; value < view.n_values; value++) {
        const bool is_in_span = view.values[value].producer >= first_op && view.values[value].producer != TFG_NONE;
        CHECK_EQ(view.values[value].state, is_in_span ? ruled_state(&view, value, before[value]) : before[value]);
    }
    for (int32_t storage = 0; storage < view.n_storages; storage++) {
        CHECK_EQ(tfg_keep_is_droppable(tape, storage), is_droppable_by_definition(&view, storage));
    }
    check_law(tape, first_op, before);
    rely_on_starts(&view);
}

static bool is_start_live(void *ctx, int32_t value) {
    return is_start(ctx, value) || is_relied_on[value];
}

/* What is said to be derivable, closure can reach from roots, put aside or not, within what prune marked. */
static void check_with_closure(tfg_closure *closure, const tfg_tape *tape, int32_t *n_found) {
    tfg_tape_view view = look(tape);
    for (int32_t value = 0; value < view.n_values; value++) {
        if (view.values[value].state != TFG_VALUE_DERIVABLE || view.values[value].n_handles == 0) {
            continue;
        }
        CHECK_EQ(tfg_closure_find(closure, tape, &value, 1, is_start_live, &view, NULL), TFG_OK);
        int32_t n_ops;
        const int32_t *ops = tfg_closure_ops(closure, &n_ops);
        *n_found += n_ops > 2;
        for (int32_t i = 0; i < n_ops; i++) {
            const tfg_op *op = &view.ops[ops[i]];
            for (int32_t r = 0; r < op->n_reads; r++) {
                CHECK(view.values[view.refs[op->first_ref + r]].is_needed);
            }
        }
    }
}

static void test_keep_follows_its_definition_on_random_tapes(void) {
    const tfg_allocator allocator = failing_allocator_init(&heap);
    tfg_tape *tape;
    tfg_closure *closure;
    int32_t n_states[4] = {0};
    int32_t n_found = 0;
    int32_t n_put_aside = 0;
    CHECK_EQ(tfg_tape_create(&allocator, &tape), TFG_OK);
    CHECK_EQ(tfg_closure_create(&allocator, &closure), TFG_OK);
    for (int round = 0; round < 1500; round++) {
        int32_t span_start = 0;
        tfg_tape_reset(tape);
        memset(is_relied_on, 0, sizeof is_relied_on);
        for (int32_t step = 0; step < 20 + round % 60; step++) {
            random_step(&source, tape);
            CHECK_LAWS(tape);
            if (random_one_in(&source, 15)) {
                settle_and_check(tape, random_one_in(&source, 2) ? span_start : 0);
                check_prune(tape);
                span_start = look(tape).n_ops;
            }
        }
        settle_and_check(tape, 0);
        check_prune(tape);
        check_with_closure(closure, tape, &n_found);
        settle_and_check(tape, 0); /* twice changes nothing that check_law would mind */
        const tfg_tape_view view = look(tape);
        for (int32_t value = 0; value < view.n_values; value++) {
            n_states[view.values[value].state]++;
            n_put_aside += is_relied_on[value] && !is_start(&view, value);
        }
    }
    CHECK(n_states[TFG_VALUE_ROOT] > 1000 && n_states[TFG_VALUE_DERIVABLE] > 1000 && n_states[TFG_VALUE_LOST] > 1000);
    CHECK_EQ(n_states[TFG_VALUE_UNSETTLED], 0);
    CHECK(n_found > 500);
    CHECK(n_put_aside > 500);
    tfg_closure_destroy(closure);
    tfg_tape_destroy(tape);
    CHECK_EQ(heap.n_live_blocks, 0);
}

/* ---- by hand ------------------------------------------------------------------------------------------------------- */

static int32_t append(tfg_tape *tape, int32_t read, int32_t write, uint32_t flags) {
    const tfg_op_args args = {&read, &write, 1, 1, flags, 1};
    int32_t op = TFG_NONE;
    CHECK_EQ(tfg_tape_append(tape, &args, &op, NULL), TFG_OK);
    return look(tape).values[look(tape).n_values - 1].producer == op ? look(tape).n_values - 1 : TFG_NONE;
}

enum { X, H, Y, Z, N_STORAGES };

/* x external (value 0), and three fresh storages. */
static tfg_tape *tape_new(void) {
    const tfg_allocator allocator = failing_allocator_init(&heap);
    tfg_tape *tape;
    int32_t storage;
    memset(is_relied_on, 0, sizeof is_relied_on);
    CHECK_EQ(tfg_tape_create(&allocator, &tape), TFG_OK);
    for (int32_t i = 0; i < N_STORAGES; i++) {
        CHECK_EQ(tfg_tape_add_storage(tape, 1, i == X ? TFG_STORAGE_EXTERNAL : 0, &storage), TFG_OK);
    }
    return tape;
}

static uint8_t state_of(const tfg_tape *tape, int32_t value) {
    return look(tape).values[value].state;
}

static void settle(tfg_tape *tape) {
    settle_and_check(tape, 0);
}

static void test_keep_lets_go_of_a_plain_chain(void) {
    tfg_tape *tape = tape_new();
    const int32_t h = append(tape, X, H, 0);
    const int32_t y = append(tape, H, Y, TFG_OP_RANDOM);
    tfg_tape_hold(tape, 0);
    tfg_tape_hold(tape, h);
    tfg_tape_hold(tape, y);
    settle(tape);
    CHECK_EQ(state_of(tape, h), TFG_VALUE_DERIVABLE);
    CHECK_EQ(state_of(tape, y), TFG_VALUE_DERIVABLE);
    CHECK(!tfg_keep_is_droppable(tape, X));
    CHECK(tfg_keep_is_droppable(tape, H));
    CHECK(tfg_keep_is_droppable(tape, Y));
    CHECK(tfg_keep_is_droppable(tape, Z)); /* never written */
    CHECK(!tfg_keep_is_droppable(tape, -1));
    CHECK(!tfg_keep_is_droppable(tape, N_STORAGES));
    tfg_tape_destroy(tape);
}

static void test_keep_keeps_what_a_pinned_operator_wrote(void) {
    tfg_tape *tape = tape_new();
    const int32_t h = append(tape, X, H, TFG_OP_PINNED);
    const int32_t y = append(tape, H, Y, 0);
    const int32_t z = append(tape, Y, Z, 0);
    tfg_tape_hold(tape, y);
    tfg_tape_hold(tape, z);
    settle(tape); /* nobody asks for h: lost, so y is the root */
    CHECK_EQ(state_of(tape, h), TFG_VALUE_LOST);
    CHECK_EQ(state_of(tape, y), TFG_VALUE_ROOT);
    CHECK_EQ(state_of(tape, z), TFG_VALUE_DERIVABLE);
    CHECK(tfg_keep_is_droppable(tape, H));
    CHECK(!tfg_keep_is_droppable(tape, Y));
    tfg_tape_hold(tape, h);
    tfg_tape_release(tape, y);
    settle(tape); /* once a root, always a root, with or without a handle */
    CHECK_EQ(state_of(tape, h), TFG_VALUE_ROOT);
    CHECK_EQ(state_of(tape, y), TFG_VALUE_ROOT);
    CHECK(!tfg_keep_is_droppable(tape, Y));
    tfg_tape_destroy(tape);
}

static void test_keep_serves_an_overwritten_save_as_it_is(void) {
    tfg_tape *tape = tape_new();
    const int32_t h = append(tape, X, H, 0);
    const int32_t h_after = append(tape, H, H, 0);
    tfg_tape_hold(tape, h);
    settle(tape);
    CHECK_EQ(state_of(tape, h_after), TFG_VALUE_DERIVABLE);
    CHECK(!tfg_keep_is_droppable(tape, H));
    tfg_tape_release(tape, h);
    CHECK(tfg_keep_is_droppable(tape, H));
    tfg_tape_destroy(tape);
}

/* A root that was overwritten before anyone settled is nowhere: what read it cannot be made again. */
static void test_keep_does_not_rely_on_an_overwritten_root(void) {
    tfg_tape *tape = tape_new();
    const int32_t y = append(tape, X, Y, 0);
    tfg_tape_hold(tape, y);
    append(tape, X, X, 0);
    settle(tape);
    CHECK_EQ(state_of(tape, y), TFG_VALUE_ROOT);
    CHECK(!tfg_keep_is_droppable(tape, Y));
    tfg_tape_destroy(tape);
}

/* Overwritten after: y may have been let go of, so its promise stands. It is none to z, which came too late, but one to
 * what reads y. */
static void test_keep_stands_by_its_promise_when_a_root_is_overwritten(void) {
    tfg_tape *tape = tape_new();
    const int32_t y = append(tape, X, Y, 0);
    tfg_tape_hold(tape, y);
    settle(tape);
    CHECK_EQ(state_of(tape, y), TFG_VALUE_DERIVABLE);
    const int32_t z = append(tape, X, Z, 0);
    const int32_t h = append(tape, Y, H, 0);
    tfg_tape_hold(tape, z);
    tfg_tape_hold(tape, h);
    append(tape, X, X, 0);
    for (int times = 0; times < 2; times++) {
        settle(tape);
        CHECK_EQ(state_of(tape, y), TFG_VALUE_DERIVABLE);
        CHECK_EQ(state_of(tape, z), TFG_VALUE_ROOT);
        CHECK_EQ(state_of(tape, h), TFG_VALUE_DERIVABLE);
        CHECK(tfg_keep_is_droppable(tape, Y));
        CHECK(!tfg_keep_is_droppable(tape, Z));
        CHECK(tfg_keep_is_droppable(tape, H));
    }
    tfg_tape_destroy(tape);
}

/* A cache that is written twice, in whatever way: nobody makes the first value again, and the last one is held. */
static void test_keep_relies_on_an_externals_last_value(void) {
    tfg_tape *tape = tape_new();
    append(tape, X, H, 0);
    const int32_t between = append(tape, H, X, 0);
    const int32_t y = append(tape, X, Y, 0);
    const int32_t last = append(tape, X, X, TFG_OP_PINNED);
    const int32_t z = append(tape, X, Z, 0);
    tfg_tape_hold(tape, y);
    tfg_tape_hold(tape, z);
    settle(tape);
    CHECK_EQ(state_of(tape, between), TFG_VALUE_LOST);
    CHECK_EQ(state_of(tape, y), TFG_VALUE_ROOT);
    CHECK_EQ(state_of(tape, last), TFG_VALUE_ROOT);
    CHECK_EQ(state_of(tape, z), TFG_VALUE_DERIVABLE);
    CHECK(!tfg_keep_is_droppable(tape, X));
    append(tape, H, X, 0);
    CHECK(!tfg_keep_is_droppable(tape, X)); /* settled or not */
    tfg_tape_destroy(tape);
}

static void test_keep_never_relies_on_an_opaque_storage(void) {
    tfg_tape *tape = tape_new();
    append(tape, X, H, 0);
    const int32_t y = append(tape, H, Y, 0);
    tfg_tape_hold(tape, y);
    CHECK_EQ(tfg_tape_foreign_write(tape, H, true), TFG_OK);
    settle(tape);
    CHECK_EQ(state_of(tape, y), TFG_VALUE_ROOT);
    CHECK(!tfg_keep_is_droppable(tape, H));
    CHECK(!tfg_keep_is_droppable(tape, Y));
    tfg_tape_destroy(tape);
}

static void test_keep_prune_stops_at_roots(void) {
    tfg_tape *tape = tape_new();
    const int32_t h = append(tape, X, H, TFG_OP_PINNED);
    const int32_t y = append(tape, H, Y, 0);
    const int32_t z = append(tape, Y, Z, 0);
    tfg_tape_hold(tape, h);
    tfg_tape_hold(tape, z);
    settle(tape);
    tfg_keep_prune(tape);
    const tfg_tape_view view = look(tape);
    CHECK_EQ(view.values[0].is_needed, 0); /* behind the root h */
    CHECK_EQ(view.values[h].is_needed, 1);
    CHECK_EQ(view.values[y].is_needed, 1);
    CHECK_EQ(view.values[z].is_needed, 1);
    tfg_tape_release(tape, z);
    tfg_keep_prune(tape);
    CHECK_EQ(view.values[h].is_needed, 0);
    CHECK_EQ(view.values[z].is_needed, 0);
    CHECK_EQ(tfg_keep_settle(tape, 4), TFG_ERR_ARGUMENT);
    CHECK_EQ(tfg_keep_settle(tape, -1), TFG_ERR_ARGUMENT);
    CHECK_EQ(tfg_keep_settle(tape, 3), TFG_OK);
    tfg_tape_destroy(tape);
}

int main(int argc, char **argv) {
    source.state = random_seed(argc, argv);
    RUN(test_keep_lets_go_of_a_plain_chain);
    RUN(test_keep_keeps_what_a_pinned_operator_wrote);
    RUN(test_keep_serves_an_overwritten_save_as_it_is);
    RUN(test_keep_does_not_rely_on_an_overwritten_root);
    RUN(test_keep_stands_by_its_promise_when_a_root_is_overwritten);
    RUN(test_keep_relies_on_an_externals_last_value);
    RUN(test_keep_never_relies_on_an_opaque_storage);
    RUN(test_keep_prune_stops_at_roots);
    RUN(test_keep_follows_its_definition_on_random_tapes);
    return check_finish();
}
