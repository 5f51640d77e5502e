/* SPDX-License-Identifier: BSD-3-Clause */
#include <string.h>

#include "closure.h"
#include "failing_allocator.h"
#include "random_tape.h"

enum { MAX_VALUES = 30000 };

static random_source source;
static failing_allocator heap;

/* What is live, and how often each value was asked about. */
static bool is_there[MAX_VALUES];
static int32_t n_asked[MAX_VALUES];

static bool is_live(void *ctx, int32_t value) {
    CHECK(ctx == is_there);
    n_asked[value]++;
    return is_there[value];
}

static tfg_status find(tfg_closure *closure, const tfg_tape *tape, const int32_t *wanted, int32_t n_wanted,
                       tfg_error *err) {
    memset(n_asked, 0, sizeof n_asked);
    return tfg_closure_find(closure, tape, wanted, n_wanted, is_live, is_there, err);
}

static bool is_write(const tfg_tape_view *view, int32_t op, int32_t value) {
    return view->values[value].producer == op;
}

/* ---- the definition, by enumeration ------------------------------------------------------------------------------- */

/* Is `value` live or written by an operator of the set? */
static bool is_had(const tfg_tape_view *view, uint32_t set, int32_t value) {
    for (int32_t op = 0; op < view->n_ops; op++) {
        if ((set >> op & 1) != 0 && is_write(view, op, value)) {
            return true;
        }
    }
    return is_there[value];
}

static bool is_closed(const tfg_tape_view *view, uint32_t set, const int32_t *wanted, int32_t n_wanted) {
    for (int32_t i = 0; i < n_wanted; i++) {
        if (!is_had(view, set, wanted[i])) {
            return false;
        }
    }
    for (int32_t op = 0; op < view->n_ops; op++) {
        const tfg_op *o = &view->ops[op];
        for (int32_t i = 0; (set >> op & 1) != 0 && i < o->n_reads; i++) {
            if (!is_had(view, set, view->refs[o->first_ref + i])) {
                return false;
            }
        }
        if ((set >> op & 1) != 0 && (o->flags & TFG_OP_PINNED) != 0) {
            return false;
        }
    }
    return true;
}

/* The smallest closed set of operators, as bits; false if none is closed. Several of the same size would be a
 * contradiction: the smallest is unique. */
static bool smallest_closed_set(const tfg_tape_view *view, const int32_t *wanted, int32_t n_wanted, uint32_t *out) {
    int best = 99;
    int32_t n_best = 0;
    for (uint32_t set = 0; set < UINT32_C(1) << view->n_ops; set++) {
        const int n_members = __builtin_popcount(set);
        if (n_members <= best && is_closed(view, set, wanted, n_wanted)) {
            n_best = n_members < best ? 1 : n_best + 1;
            best = n_members;
            *out = set;
        }
    }
    CHECK(n_best <= 1);
    return n_best == 1;
}

static void compare_with_enumeration(tfg_closure *closure, const tfg_tape *tape, const int32_t *wanted, int32_t n_wanted) {
    tfg_tape_view view;
    tfg_tape_look(tape, &view);
    uint32_t expected = 0;
    const bool is_reachable = smallest_closed_set(&view, wanted, n_wanted, &expected);
    tfg_error err = {{0}};
    CHECK_EQ(find(closure, tape, wanted, n_wanted, &err), is_reachable ? TFG_OK : TFG_ERR_UNREACHABLE);
    int32_t n_ops;
    const int32_t *ops = tfg_closure_ops(closure, &n_ops);
    uint32_t found = 0;
    for (int32_t i = 0; i < n_ops; i++) {
        CHECK(i == 0 || ops[i] > ops[i - 1]); /* tape order, each once */
        found |= UINT32_C(1) << ops[i];
    }
    CHECK_EQ(found, expected);
    CHECK((err.text[0] == '\0') == is_reachable);
    for (int32_t value = 0; value < view.n_values; value++) {
        CHECK(n_asked[value] <= 1);
    }
}

static int32_t random_question(const tfg_tape *tape, int32_t *wanted, int32_t one_live_in) {
    tfg_tape_view view;
    tfg_tape_look(tape, &view);
    const int32_t n_wanted = view.n_values == 0 ? 0 : random_below(&source, 4);
    for (int32_t i = 0; i < n_wanted; i++) {
        wanted[i] = view.n_values - 1 - random_below(&source, view.n_values < 6 ? view.n_values : 6);
    }
    for (int32_t value = 0; value < view.n_values; value++) {
        is_there[value] = view.values[value].producer == TFG_NONE ? !random_one_in(&source, 20)
                                                                 : random_one_in(&source, one_live_in);
    }
    return n_wanted;
}

static void test_closure_is_the_smallest_closed_set_on_random_tapes(void) {
    const tfg_allocator allocator = failing_allocator_init(&heap);
    tfg_tape *tape;
    tfg_closure *closure;
    CHECK_EQ(tfg_tape_create(&allocator, &tape), TFG_OK);
    CHECK_EQ(tfg_closure_create(&allocator, &closure), TFG_OK);
    int32_t n_reached = 0;
    int32_t n_long = 0;
    for (int round = 0; round < 4000; round++) {
        tfg_tape_view view;
        tfg_tape_reset(tape);
        do {
            random_step(&source, tape);
            CHECK_LAWS(tape);
            tfg_tape_look(tape, &view);
        } while (view.n_ops < 3 + round % 7);
        for (int question = 0; question < 3; question++) {
            int32_t wanted[4];
            int32_t n_ops;
            compare_with_enumeration(closure, tape, wanted, random_question(tape, wanted, 2 + question * 4));
            tfg_closure_ops(closure, &n_ops);
            n_reached += n_ops > 0;
            n_long += n_ops > 3;
        }
    }
    CHECK(n_reached > 2000 && n_long > 200); /* the random tapes are worth something */
    tfg_closure_destroy(closure);
    tfg_tape_destroy(tape);
    CHECK_EQ(heap.n_live_blocks, 0);
    CHECK_EQ(heap.n_wrong_sizes, 0);
}

/* ---- long tapes against a fixpoint over a byte per operator -------------------------------------------------------- */

static bool want_fixpoint(const tfg_tape_view *view, const int32_t *wanted, int32_t n_wanted, uint8_t *is_in) {
    bool is_reachable = true;
    uint8_t *is_wanted = calloc((size_t)view->n_values + 1, 1);
    for (int32_t i = 0; i < n_wanted; i++) {
        is_wanted[wanted[i]] = 1;
    }
    memset(is_in, 0, (size_t)view->n_ops);
    for (bool is_moving = true; is_moving;) {
        is_moving = false;
        for (int32_t value = 0; value < view->n_values; value++) {
            const int32_t producer = view->values[value].producer;
            if (!is_wanted[value] || is_there[value]) {
                continue;
            }
            if (producer == TFG_NONE || (view->ops[producer].flags & TFG_OP_PINNED) != 0) {
                is_reachable = false;
            } else if (!is_in[producer]) {
                is_moving = true;
                is_in[producer] = 1;
                for (int32_t i = 0; i < view->ops[producer].n_reads; i++) {
                    is_wanted[view->refs[view->ops[producer].first_ref + i]] = 1;
                }
            }
        }
    }
    free(is_wanted);
    return is_reachable;
}

static void test_closure_matches_fixpoint_on_long_tapes(void) {
    const tfg_allocator allocator = failing_allocator_init(&heap);
    tfg_tape *tape;
    tfg_closure *closure;
    CHECK_EQ(tfg_tape_create(&allocator, &tape), TFG_OK);
    CHECK_EQ(tfg_closure_create(&allocator, &closure), TFG_OK);
    int32_t n_sparse = 0;
    int32_t n_dense = 0;
    for (int round = 0; round < 60; round++) {
        tfg_tape_reset(tape);
        for (int32_t step = 0; step < 1500; step++) {
            random_step(&source, tape);
        }
        CHECK_LAWS(tape);
        tfg_tape_view view;
        tfg_tape_look(tape, &view);
        uint8_t *is_in = malloc((size_t)view.n_ops);
        for (int question = 0; question < 8; question++) {
            int32_t wanted[4];
            const int32_t n_wanted = random_question(tape, wanted, question < 2 ? 3 : 100);
            for (int32_t i = 0; question % 2 == 0 && i < n_wanted; i++) {
                wanted[i] = random_below(&source, view.n_values); /* far apart */
            }
            for (int32_t value = 0; value < view.n_values; value++) { /* what cannot be made is mostly there */
                const int32_t producer = view.values[value].producer;
                is_there[value] |= producer == TFG_NONE || (view.ops[producer].flags & TFG_OP_PINNED) != 0;
            }
            const bool is_reachable = want_fixpoint(&view, wanted, n_wanted, is_in);
            CHECK_EQ(find(closure, tape, wanted, n_wanted, NULL), is_reachable ? TFG_OK : TFG_ERR_UNREACHABLE);
            int32_t n_ops;
            const int32_t *ops = tfg_closure_ops(closure, &n_ops);
            int32_t n_expected = 0;
            for (int32_t op = 0; op < view.n_ops; op++) {
                if (is_in[op]) {
                    CHECK(n_expected < n_ops && ops[n_expected] == op);
                    n_expected++;
                }
            }
            CHECK_EQ(n_ops, n_expected);
            n_sparse += n_ops > 3 && ops[n_ops - 1] - ops[0] >= 8 * n_ops;
            n_dense += n_ops > 3 && ops[n_ops - 1] - ops[0] < 8 * n_ops;
        }
        free(is_in);
    }
    CHECK(n_sparse > 5 && n_dense > 5); /* both ways of putting in order were taken */
    tfg_closure_destroy(closure);
    tfg_tape_destroy(tape);
}

/* ---- by hand ------------------------------------------------------------------------------------------------------- */

typedef struct chain {
    tfg_tape *tape;
    tfg_closure *closure;
} chain;

static int32_t append(tfg_tape *tape, int32_t read, int32_t write, uint32_t flags) {
    const tfg_op_args args = {&read, &write, 1, 1, flags, 1};
    int32_t op = TFG_NONE;
    CHECK_EQ(tfg_tape_append(tape, &args, &op, NULL), TFG_OK);
    return op;
}

/* x external (value 0); h = f(x) (1); h.add_(1) (2); y = exp(h) (3). is_there: x only. */
static chain chain_new(void) {
    const tfg_allocator allocator = failing_allocator_init(&heap);
    chain c;
    int32_t storage;
    CHECK_EQ(tfg_tape_create(&allocator, &c.tape), TFG_OK);
    CHECK_EQ(tfg_closure_create(&allocator, &c.closure), TFG_OK);
    CHECK_EQ(tfg_tape_add_storage(c.tape, 1, TFG_STORAGE_EXTERNAL, &storage), TFG_OK);
    CHECK_EQ(tfg_tape_add_storage(c.tape, 1, 0, &storage), TFG_OK);
    CHECK_EQ(tfg_tape_add_storage(c.tape, 1, 0, &storage), TFG_OK);
    append(c.tape, 0, 1, 0);
    append(c.tape, 1, 1, TFG_OP_RANDOM);
    append(c.tape, 1, 2, 0);
    memset(is_there, 0, sizeof is_there);
    is_there[0] = true;
    return c;
}

static void chain_done(chain *c) {
    tfg_closure_destroy(c->closure);
    tfg_tape_destroy(c->tape);
    CHECK_EQ(heap.n_live_blocks, 0);
    CHECK_EQ(heap.n_wrong_sizes, 0);
}

static void expect_ops(const tfg_closure *closure, const int32_t *expected, int32_t n_expected) {
    int32_t n_ops;
    const int32_t *ops = tfg_closure_ops(closure, &n_ops);
    CHECK_EQ(n_ops, n_expected);
    for (int32_t i = 0; i < n_ops && i < n_expected; i++) {
        CHECK_EQ(ops[i], expected[i]);
    }
}

static void test_closure_is_exact_on_epochs(void) {
    chain c = chain_new();
    const int32_t all[] = {0, 1, 2};
    const int32_t h_before = 1, h_after = 2, y = 3;
    expect_ops(c.closure, NULL, 0); /* before any search */
    CHECK_EQ(find(c.closure, c.tape, &y, 1, NULL), TFG_OK);
    expect_ops(c.closure, all, 3);
    CHECK_EQ(find(c.closure, c.tape, &h_before, 1, NULL), TFG_OK);
    expect_ops(c.closure, all, 1);
    is_there[h_after] = true; /* the storage is there, but at its later epoch */
    CHECK_EQ(find(c.closure, c.tape, &h_before, 1, NULL), TFG_OK);
    expect_ops(c.closure, all, 1);
    CHECK_EQ(find(c.closure, c.tape, &y, 1, NULL), TFG_OK);
    expect_ops(c.closure, all + 2, 1);
    CHECK_EQ(find(c.closure, c.tape, &h_after, 1, NULL), TFG_OK);
    expect_ops(c.closure, NULL, 0);
    CHECK_EQ(find(c.closure, c.tape, NULL, 0, NULL), TFG_OK);
    expect_ops(c.closure, NULL, 0);
    chain_done(&c);
}

static void test_closure_says_what_is_out_of_reach_and_why(void) {
    chain c = chain_new();
    tfg_error err;
    const int32_t y = 3, outside = 4, negative = -1;
    is_there[0] = false;
    CHECK_EQ(find(c.closure, c.tape, &y, 1, &err), TFG_ERR_UNREACHABLE);
    CHECK(strcmp(err.text, "value 0 (storage 0, epoch 0) is gone and has no producer") == 0);
    expect_ops(c.closure, NULL, 0);
    is_there[0] = true;
    tfg_tape_flag_op(c.tape, 1, TFG_OP_PINNED);
    CHECK_EQ(find(c.closure, c.tape, &y, 1, &err), TFG_ERR_UNREACHABLE);
    CHECK(strcmp(err.text, "value 2 (storage 1, epoch 1) is gone and its operator 1 is pinned") == 0);
    CHECK_EQ(find(c.closure, c.tape, &outside, 1, &err), TFG_ERR_ARGUMENT);
    CHECK(strcmp(err.text, "wanted value 4 of 4") == 0);
    CHECK_EQ(find(c.closure, c.tape, &negative, 1, NULL), TFG_ERR_ARGUMENT);
    CHECK_EQ(find(c.closure, c.tape, &y, -1, NULL), TFG_ERR_ARGUMENT);
    CHECK_EQ(find(c.closure, c.tape, NULL, 1, NULL), TFG_ERR_ARGUMENT);
    CHECK_EQ(tfg_closure_find(c.closure, c.tape, &y, 1, NULL, NULL, NULL), TFG_ERR_ARGUMENT);
    chain_done(&c);
}

/* A warm scratch asks for nothing, and an old search's stamps mean nothing to the next, whatever the tape. */
static void test_closure_scratch_is_reusable_and_warm(void) {
    chain c = chain_new();
    const int32_t all[] = {0, 1, 2};
    const int32_t y = 3;
    CHECK_EQ(find(c.closure, c.tape, &y, 1, NULL), TFG_OK);
    const int64_t n_requests = heap.n_requests;
    for (int i = 0; i < 10; i++) {
        CHECK_EQ(find(c.closure, c.tape, &y, 1, NULL), TFG_OK);
        expect_ops(c.closure, all, 3);
    }
    CHECK_EQ(heap.n_requests, n_requests);
    chain_done(&c);
}

/* Fresh memory that happens to look like the stamps of the next search. */
static void test_closure_is_not_fooled_by_garbage(void) {
    const int32_t all[] = {0, 1, 2};
    const int32_t y = 3;
    for (uint64_t garbage = 0; garbage < 3; garbage++) {
        chain c = chain_new();
        heap.garbage = garbage;
        CHECK_EQ(find(c.closure, c.tape, &y, 1, NULL), TFG_OK);
        expect_ops(c.closure, all, 3);
        chain_done(&c);
    }
}

static void test_closure_survives_every_failing_allocation(void) {
    const int32_t all[] = {0, 1, 2};
    const int32_t y = 3;
    for (int32_t k = 0; k < 3; k++) {
        chain c = chain_new();
        heap.fail_at = heap.n_requests + k;
        CHECK_EQ(find(c.closure, c.tape, &y, 1, NULL), TFG_ERR_MEMORY);
        expect_ops(c.closure, NULL, 0);
        CHECK_LAWS(c.tape);
        CHECK_EQ(find(c.closure, c.tape, &y, 1, NULL), TFG_OK);
        expect_ops(c.closure, all, 3);
        const tfg_allocator allocator = {failing_resize, &heap};
        tfg_closure *second = c.closure;
        heap.fail_at = heap.n_requests;
        CHECK_EQ(tfg_closure_create(&allocator, &second), TFG_ERR_MEMORY);
        CHECK(second == NULL);
        chain_done(&c);
    }
    tfg_closure_destroy(NULL);
}

int main(int argc, char **argv) {
    source.state = random_seed(argc, argv);
    RUN(test_closure_is_exact_on_epochs);
    RUN(test_closure_says_what_is_out_of_reach_and_why);
    RUN(test_closure_scratch_is_reusable_and_warm);
    RUN(test_closure_is_not_fooled_by_garbage);
    RUN(test_closure_survives_every_failing_allocation);
    RUN(test_closure_is_the_smallest_closed_set_on_random_tapes);
    RUN(test_closure_matches_fixpoint_on_long_tapes);
    return check_finish();
}
