/* SPDX-License-Identifier: BSD-3-Clause */
#include <string.h>

#include "failing_allocator.h"
#include "random_tape.h"

static random_source source;
static failing_allocator heap;

static tfg_tape *tape_new(void) {
    const tfg_allocator allocator = failing_allocator_init(&heap);
    tfg_tape *tape = NULL;
    CHECK_EQ(tfg_tape_create(&allocator, &tape), TFG_OK);
    return tape;
}

static void tape_done(tfg_tape *tape) {
    tfg_tape_destroy(tape);
    CHECK_EQ(heap.n_live_blocks, 0);
    CHECK_EQ(heap.n_wrong_sizes, 0);
}

static tfg_tape_view look(const tfg_tape *tape) {
    tfg_tape_view view;
    tfg_tape_look(tape, &view);
    return view;
}

static int32_t add(tfg_tape *tape, uint32_t flags) {
    int32_t storage = TFG_NONE;
    CHECK_EQ(tfg_tape_add_storage(tape, 64, flags, &storage), TFG_OK);
    return storage;
}

static int32_t append(tfg_tape *tape, const int32_t *reads, int32_t n_reads, const int32_t *writes, int32_t n_writes) {
    const tfg_op_args args = {
        .read_storages = reads, .write_storages = writes, .n_reads = n_reads, .n_writes = n_writes, .cost_ns = 5};
    int32_t op = TFG_NONE;
    CHECK_EQ(tfg_tape_append(tape, &args, &op, NULL), TFG_OK);
    CHECK_LAWS(tape);
    return op;
}

/* ---- a tape's contents, copied and compared ---------------------------------------------------------------------- */

typedef struct snapshot {
    tfg_tape_view view;
    void *blocks[4];
} snapshot;

static void *copied(const void *items, size_t size_bytes) {
    void *copy = malloc(size_bytes + 1);
    if (size_bytes > 0) {
        memcpy(copy, items, size_bytes);
    }
    return copy;
}

static snapshot snapshot_take(const tfg_tape *tape) {
    const tfg_tape_view v = look(tape);
    return (snapshot){v,
                      {copied(v.ops, (size_t)v.n_ops * sizeof *v.ops), copied(v.values, (size_t)v.n_values * sizeof *v.values),
                       copied(v.storages, (size_t)v.n_storages * sizeof *v.storages),
                       copied(v.refs, (size_t)v.n_refs * sizeof *v.refs)}};
}

static bool is_same(const void *left, const void *right, int32_t n, size_t item_bytes) {
    return n == 0 || memcmp(left, right, (size_t)n * item_bytes) == 0;
}

static void snapshot_check_and_free(snapshot *before, const tfg_tape *tape) {
    const tfg_tape_view now = look(tape);
    CHECK_EQ(now.n_ops, before->view.n_ops);
    CHECK_EQ(now.n_values, before->view.n_values);
    CHECK_EQ(now.n_storages, before->view.n_storages);
    CHECK_EQ(now.n_refs, before->view.n_refs);
    CHECK(is_same(now.ops, before->blocks[0], before->view.n_ops, sizeof *now.ops));
    CHECK(is_same(now.values, before->blocks[1], before->view.n_values, sizeof *now.values));
    CHECK(is_same(now.storages, before->blocks[2], before->view.n_storages, sizeof *now.storages));
    CHECK(is_same(now.refs, before->blocks[3], before->view.n_refs, sizeof *now.refs));
    for (int i = 0; i < 4; i++) {
        free(before->blocks[i]);
    }
}

/* ---- by hand ------------------------------------------------------------------------------------------------------ */

/* The header's picture: h = x * 2; h.add_(1); y = h.exp() */
static tfg_tape *tape_of_the_header(void) {
    tfg_tape *tape = tape_new();
    const int32_t x = add(tape, TFG_STORAGE_EXTERNAL);
    const int32_t h = add(tape, 0);
    const int32_t y = add(tape, 0);
    append(tape, &x, 1, &h, 1);
    append(tape, &h, 1, &h, 1);
    append(tape, &h, 1, &y, 1);
    return tape;
}

static void test_tape_records_the_picture_of_its_header(void) {
    tfg_tape *tape = tape_of_the_header();
    const tfg_tape_view view = look(tape);
    const tfg_value expected[] = {
        {.storage = 0, .epoch = 0, .producer = TFG_NONE, .previous = TFG_NONE, .state = TFG_VALUE_ROOT},
        {.storage = 1, .epoch = 0, .producer = 0, .previous = TFG_NONE},
        {.storage = 1, .epoch = 1, .producer = 1, .previous = 1},
        {.storage = 2, .epoch = 0, .producer = 2, .previous = TFG_NONE},
    };
    const int32_t refs[] = {0, 1, 1, 2, 2, 3};
    CHECK_EQ(view.n_values, 4);
    CHECK_EQ(view.n_refs, 6);
    for (int32_t i = 0; i < 4; i++) {
        CHECK_EQ(view.values[i].storage, expected[i].storage);
        CHECK_EQ(view.values[i].epoch, expected[i].epoch);
        CHECK_EQ(view.values[i].producer, expected[i].producer);
        CHECK_EQ(view.values[i].previous, expected[i].previous);
        CHECK_EQ(view.values[i].state, expected[i].state);
        CHECK_EQ(view.values[i].n_handles, 0);
        CHECK_EQ(view.values[i].is_needed, 0);
    }
    CHECK(memcmp(view.refs, refs, sizeof refs) == 0);
    CHECK_EQ(view.storages[1].current, 2);
    CHECK_EQ(view.storages[1].size_bytes, 64);
    CHECK_EQ(view.ops[1].first_ref, 2);
    CHECK_EQ(view.ops[1].cost_ns, 5);
    tape_done(tape);
}

static void test_tape_writes_a_storage_named_twice_once(void) {
    tfg_tape *tape = tape_new();
    const int32_t x = add(tape, TFG_STORAGE_EXTERNAL);
    const int32_t y = add(tape, 0);
    const int32_t reads[] = {x, x};
    const int32_t writes[] = {y, x, y, x, y};
    append(tape, reads, 2, writes, 5);
    const tfg_tape_view view = look(tape);
    CHECK_EQ(view.n_values, 3);
    CHECK_EQ(view.ops[0].n_reads, 2);
    CHECK_EQ(view.ops[0].n_writes, 2);
    CHECK_EQ(view.n_refs, 4);
    append(tape, &x, 1, &y, 1);
    CHECK_EQ(look(tape).values[3].epoch, 1);
    tape_done(tape);
}

static void test_tape_foreign_write_begins_a_value_without_producer(void) {
    tfg_tape *tape = tape_of_the_header();
    CHECK_EQ(tfg_tape_foreign_write(tape, 1, false), TFG_OK);
    CHECK_EQ(tfg_tape_foreign_write(tape, 1, true), TFG_OK);
    CHECK_EQ(tfg_tape_foreign_write(tape, 1, false), TFG_OK); /* opaque stays opaque */
    CHECK_LAWS(tape);
    const tfg_tape_view view = look(tape);
    CHECK_EQ(view.n_values, 7);
    CHECK_EQ(view.values[4].producer, TFG_NONE);
    CHECK_EQ(view.values[4].epoch, 2);
    CHECK_EQ(view.values[4].state, TFG_VALUE_ROOT);
    CHECK_EQ(view.values[5].state, TFG_VALUE_LOST);
    CHECK_EQ(view.values[6].state, TFG_VALUE_LOST);
    CHECK_EQ(view.storages[1].flags, TFG_STORAGE_OPAQUE);
    CHECK_EQ(tfg_tape_foreign_write(tape, 3, false), TFG_ERR_ARGUMENT);
    CHECK_EQ(tfg_tape_foreign_write(tape, -1, false), TFG_ERR_ARGUMENT);
    tape_done(tape);
}

static void test_tape_counts_handles_and_flags_operators(void) {
    tfg_tape *tape = tape_of_the_header();
    tfg_tape_hold(tape, 1);
    tfg_tape_hold(tape, 2);
    tfg_tape_hold(tape, 2);
    tfg_tape_release(tape, 1);
    CHECK_LAWS(tape);
    CHECK_EQ(look(tape).values[2].n_handles, 2);
    CHECK_EQ(look(tape).storages[1].n_handles, 2);
    tfg_tape_flag_op(tape, 1, TFG_OP_PINNED);
    tfg_tape_flag_op(tape, 1, TFG_OP_RANDOM | 1 << 20);
    CHECK_EQ(look(tape).ops[1].flags, TFG_OP_PINNED | TFG_OP_RANDOM);
    CHECK_EQ(look(tape).ops[0].flags, 0);
    snapshot before = snapshot_take(tape);
    tfg_tape_hold(tape, -1);
    tfg_tape_hold(tape, 4);
    tfg_tape_release(tape, 4);
    tfg_tape_flag_op(tape, -1, TFG_OP_PINNED);
    tfg_tape_flag_op(tape, 3, TFG_OP_PINNED);
    snapshot_check_and_free(&before, tape);
    tape_done(tape);
}

/* ---- refusals ----------------------------------------------------------------------------------------------------- */

static void expect_refusal(tfg_tape *tape, tfg_op_args args, tfg_status status, const char *words) {
    snapshot before = snapshot_take(tape);
    tfg_error err = {{0}};
    int32_t op = 77;
    CHECK_EQ(tfg_tape_append(tape, &args, &op, &err), status);
    CHECK_EQ(op, TFG_NONE);
    CHECK(strstr(err.text, words) != NULL);
    snapshot_check_and_free(&before, tape);
}

static void test_tape_refuses_bad_operators_and_stays_as_it_was(void) {
    tfg_tape *tape = tape_of_the_header();
    const int32_t unwritten = add(tape, 0);
    const int32_t bad[] = {0, 4};
    const int32_t negative = -1;
    expect_refusal(tape, (tfg_op_args){.n_reads = -1}, TFG_ERR_ARGUMENT, "-1 reads");
    expect_refusal(tape, (tfg_op_args){.n_writes = -2}, TFG_ERR_ARGUMENT, "-2 writes");
    expect_refusal(tape, (tfg_op_args){.n_reads = 1}, TFG_ERR_ARGUMENT, "none given");
    expect_refusal(tape, (tfg_op_args){.n_writes = 1}, TFG_ERR_ARGUMENT, "none given");
    expect_refusal(tape, (tfg_op_args){.flags = 4}, TFG_ERR_ARGUMENT, "flags 0x4");
    expect_refusal(tape, (tfg_op_args){.cost_ns = -3}, TFG_ERR_ARGUMENT, "cost of -3");
    expect_refusal(tape, (tfg_op_args){bad, NULL, 2, 0, 0, 0}, TFG_ERR_ARGUMENT, "reads storage 4 of 4");
    expect_refusal(tape, (tfg_op_args){&negative, NULL, 1, 0, 0, 0}, TFG_ERR_ARGUMENT, "reads storage -1");
    expect_refusal(tape, (tfg_op_args){NULL, bad, 0, 2, 0, 0}, TFG_ERR_ARGUMENT, "writes storage 4 of 4");
    expect_refusal(tape, (tfg_op_args){&unwritten, NULL, 1, 0, 0, 0}, TFG_ERR_ARGUMENT, "nobody has written");
    expect_refusal(tape, (tfg_op_args){bad, bad, INT32_MAX, 0, 0, 0}, TFG_ERR_FULL, "references");
    expect_refusal(tape, (tfg_op_args){bad, bad, INT32_MAX, INT32_MAX, 0, 0}, TFG_ERR_FULL, "references");
    snapshot before = snapshot_take(tape);
    int32_t storage = 77;
    CHECK_EQ(tfg_tape_add_storage(tape, -1, 0, &storage), TFG_ERR_ARGUMENT);
    CHECK_EQ(storage, TFG_NONE);
    CHECK_EQ(tfg_tape_add_storage(tape, 1, 4, &storage), TFG_ERR_ARGUMENT);
    snapshot_check_and_free(&before, tape);
    tape_done(tape);
}

/* ---- the laws can be broken, and check says which ----------------------------------------------------------------- */

#define EXPECT_BROKEN(tape, field, wrong, words)                           \
    do {                                                                   \
        tfg_error broken_ = {{0}};                                         \
        __typeof__(field) right_ = (field);                                \
        (field) = (wrong);                                                 \
        CHECK_EQ(tfg_tape_check(tape, &broken_), TFG_ERR_BROKEN);          \
        CHECK(strstr(broken_.text, words) != NULL);                        \
        CHECK_EQ(tfg_tape_check(tape, NULL), TFG_ERR_BROKEN);              \
        (field) = right_;                                                  \
        CHECK_EQ(tfg_tape_check(tape, NULL), TFG_OK);                      \
    } while (0)

static void test_tape_check_finds_each_broken_law(void) {
    tfg_tape *tape = tape_of_the_header();
    CHECK_EQ(tfg_tape_foreign_write(tape, 1, false), TFG_OK); /* value 4 */
    const int32_t h = 1;
    append(tape, &h, 1, NULL, 0); /* operator 3 only reads */
    const tfg_tape_view view = look(tape);
    tfg_value *values = tfg_tape_values(tape);
    tfg_op *ops = (tfg_op *)(uintptr_t)view.ops;
    tfg_storage *storages = (tfg_storage *)(uintptr_t)view.storages;
    int32_t *refs = (int32_t *)(uintptr_t)view.refs;

    EXPECT_BROKEN(tape, values[1].storage, 3, "storage 3 of 3");
    EXPECT_BROKEN(tape, values[1].storage, -1, "storage -1");
    EXPECT_BROKEN(tape, values[1].producer, 4, "producer 4 of 4");
    EXPECT_BROKEN(tape, values[1].producer, -2, "producer -2");
    EXPECT_BROKEN(tape, values[1].producer, TFG_NONE, "whose producer is -1");
    EXPECT_BROKEN(tape, values[4].producer, 3, "made by the later operator 3");
    EXPECT_BROKEN(tape, values[4].producer, 1, "have a producer");
    EXPECT_BROKEN(tape, values[0].producer, 0, "begins storage 0");
    EXPECT_BROKEN(tape, values[1].epoch, 1, "begins storage 1");
    EXPECT_BROKEN(tape, values[2].epoch, 2, "does not follow on value 1");
    EXPECT_BROKEN(tape, values[2].previous, 0, "does not follow on value 0");
    EXPECT_BROKEN(tape, values[2].previous, 2, "does not follow on value 2");
    EXPECT_BROKEN(tape, values[2].previous, -2, "does not follow on value -2");
    EXPECT_BROKEN(tape, values[2].n_handles, -1, "-1 handles");
    EXPECT_BROKEN(tape, values[2].n_handles, 1, "0 handles, its values have 1");
    EXPECT_BROKEN(tape, values[2].state, 4, "state 4");
    EXPECT_BROKEN(tape, values[2].is_needed, 2, "is_needed 2");
    EXPECT_BROKEN(tape, storages[1].n_handles, 3, "3 handles");
    EXPECT_BROKEN(tape, storages[1].current, 2, "on the chain");
    EXPECT_BROKEN(tape, storages[2].current, TFG_NONE, "on the chain");
    EXPECT_BROKEN(tape, storages[1].current, 3, "not one of its own");
    EXPECT_BROKEN(tape, storages[1].current, 5, "not one of its own");
    EXPECT_BROKEN(tape, storages[0].current, TFG_NONE, "not one of its own");
    EXPECT_BROKEN(tape, storages[1].size_bytes, -1, "-1 bytes");
    EXPECT_BROKEN(tape, storages[1].flags, 8, "flags 0x8");
    EXPECT_BROKEN(tape, ops[1].first_ref, 1, "do not follow on");
    EXPECT_BROKEN(tape, ops[1].n_reads, -1, "do not follow on");
    EXPECT_BROKEN(tape, ops[1].n_writes, -1, "do not follow on");
    EXPECT_BROKEN(tape, ops[3].n_writes, 1, "do not follow on");
    EXPECT_BROKEN(tape, ops[3].n_reads, 0, "references, operators have");
    EXPECT_BROKEN(tape, ops[1].flags, 4, "flags 0x4");
    EXPECT_BROKEN(tape, ops[1].cost_ns, -1, "cost -1");
    EXPECT_BROKEN(tape, refs[0], 5, "reads value 5 of 5");
    EXPECT_BROKEN(tape, refs[0], -1, "reads value -1");
    EXPECT_BROKEN(tape, refs[0], 3, "made by the later operator 2");
    EXPECT_BROKEN(tape, refs[0], 4, "younger than its write 1");
    EXPECT_BROKEN(tape, refs[3], 1, "writes value 1 after value 1");
    EXPECT_BROKEN(tape, refs[3], 3, "whose producer is 2");
    EXPECT_BROKEN(tape, refs[3], 5, "writes value 5");
    tfg_tape_release(tape, 2);
    CHECK_EQ(tfg_tape_check(tape, NULL), TFG_ERR_BROKEN); /* more releases than holds */
    tape_done(tape);
}

/* ---- random tapes against a model --------------------------------------------------------------------------------- */

/* The obvious model: per storage the list of its values' producers, in order. */
enum { MODEL_STORAGES = 400, MODEL_EPOCHS = 300 };
static struct {
    int32_t producers[MODEL_STORAGES][MODEL_EPOCHS];
    int32_t n_epochs[MODEL_STORAGES];
    int32_t n_storages;
} model;

static void model_write(int32_t storage, int32_t producer) {
    model.producers[storage][model.n_epochs[storage]++] = producer;
}

static void check_against_model(const tfg_tape *tape) {
    const tfg_tape_view view = look(tape);
    int32_t n_values = 0;
    CHECK_EQ(view.n_storages, model.n_storages);
    for (int32_t storage = 0; storage < model.n_storages; storage++) {
        int32_t value = view.storages[storage].current;
        n_values += model.n_epochs[storage];
        for (int32_t epoch = model.n_epochs[storage] - 1; epoch >= 0; epoch--) {
            CHECK_EQ(view.values[value].epoch, epoch);
            CHECK_EQ(view.values[value].producer, model.producers[storage][epoch]);
            value = view.values[value].previous;
        }
        CHECK_EQ(value, TFG_NONE);
    }
    CHECK_EQ(view.n_values, n_values);
}

static void model_step(tfg_tape *tape) {
    const int32_t kind = random_below(&source, 5);
    int32_t storage = TFG_NONE;
    if (kind == 0 || model.n_storages == 0) {
        const uint32_t flags = (uint32_t)random_below(&source, 4);
        CHECK_EQ(tfg_tape_add_storage(tape, 1, flags, &storage), TFG_OK);
        CHECK_EQ(storage, model.n_storages);
        model.n_epochs[model.n_storages++] = 0;
        if ((flags & TFG_STORAGE_EXTERNAL) != 0) {
            model_write(storage, TFG_NONE);
        }
        return;
    }
    storage = random_below(&source, model.n_storages);
    if (kind == 1) {
        CHECK_EQ(tfg_tape_foreign_write(tape, storage, random_one_in(&source, 2)), TFG_OK);
        model_write(storage, TFG_NONE);
        return;
    }
    int32_t named[6];
    int32_t last_epochs[6];
    const int32_t n_reads = random_below(&source, 4);
    const int32_t n_writes = random_below(&source, 3);
    bool is_readable = true;
    for (int32_t i = 0; i < n_reads + n_writes; i++) {
        named[i] = random_below(&source, model.n_storages);
        last_epochs[i] = model.n_epochs[named[i]] - 1;
        is_readable &= i >= n_reads || last_epochs[i] >= 0;
    }
    const tfg_op_args args = {named, named + n_reads, n_reads, n_writes, 0, 1};
    int32_t op = TFG_NONE;
    const tfg_status status = tfg_tape_append(tape, &args, &op, NULL);
    CHECK_EQ(status, is_readable ? TFG_OK : TFG_ERR_ARGUMENT);
    if (status != TFG_OK) {
        return;
    }
    const tfg_tape_view view = look(tape);
    CHECK_EQ(op, view.n_ops - 1);
    for (int32_t i = 0; i < n_reads; i++) {
        const tfg_value *read = &view.values[view.refs[view.ops[op].first_ref + i]];
        CHECK_EQ(read->storage, named[i]);
        CHECK_EQ(read->epoch, last_epochs[i]);
    }
    for (int32_t i = n_reads; i < n_reads + n_writes; i++) {
        const int32_t written = named[i];
        if (model.n_epochs[written] == 0 || model.producers[written][model.n_epochs[written] - 1] != op) {
            model_write(written, op);
        }
    }
}

static void test_tape_matches_model_on_random_programs(void) {
    tfg_tape *tape = tape_new();
    for (int round = 0; round < 60; round++) {
        const int64_t n_requests = heap.n_requests;
        model.n_storages = 0;
        tfg_tape_reset(tape);
        const int32_t n_steps = round < 3 ? 300 : 60;
        for (int32_t step = 0; step < n_steps; step++) {
            model_step(tape);
            CHECK_LAWS(tape);
            check_against_model(tape);
        }
        CHECK(round < 3 || heap.n_requests == n_requests); /* warm: reset keeps what was grown */
    }
    tape_done(tape);
}

/* ---- no memory ---------------------------------------------------------------------------------------------------- */

/* A failed call must leave no trace and must succeed when asked again. */
#define RETRIED(tape, call)                          \
    do {                                             \
        snapshot before_ = snapshot_take(tape);      \
        tfg_status status_ = (call);                 \
        if (status_ == TFG_ERR_MEMORY) {             \
            n_failed++;                              \
            snapshot_check_and_free(&before_, tape); \
            CHECK_LAWS(tape);                        \
            status_ = (call);                        \
        } else {                                     \
            for (int i_ = 0; i_ < 4; i_++) {         \
                free(before_.blocks[i_]);            \
            }                                        \
        }                                            \
        CHECK_EQ(status_, TFG_OK);                   \
    } while (0)

static int32_t n_failed;

static void grow_everything(tfg_tape *tape) {
    int32_t storage;
    int32_t op;
    for (int32_t i = 0; i < 40; i++) {
        RETRIED(tape, tfg_tape_add_storage(tape, 1, i % 3 == 0 ? TFG_STORAGE_EXTERNAL : 0, &storage));
        const int32_t reads[] = {0, i / 3 * 3};
        const tfg_op_args args = {reads, &storage, 2, 1, 0, 1};
        RETRIED(tape, tfg_tape_append(tape, &args, &op, NULL));
        RETRIED(tape, tfg_tape_foreign_write(tape, storage, false));
    }
}

static void test_tape_survives_every_failing_allocation(void) {
    int32_t n_rounds = 0;
    for (bool is_reached = true; is_reached; n_rounds++) {
        const tfg_allocator allocator = failing_allocator_init(&heap);
        heap.fail_at = n_rounds;
        n_failed = 0;
        tfg_tape *tape = (tfg_tape *)&heap;
        if (tfg_tape_create(&allocator, &tape) == TFG_ERR_MEMORY) {
            n_failed++;
            CHECK(tape == NULL);
            CHECK_EQ(tfg_tape_create(&allocator, &tape), TFG_OK);
        }
        grow_everything(tape);
        is_reached = heap.n_requests > n_rounds;
        CHECK_EQ(n_failed, is_reached);
        tape_done(tape);
    }
    CHECK(n_rounds > 10); /* each array grew at least twice */
    tfg_tape_destroy(NULL);
}

int main(int argc, char **argv) {
    source.state = random_seed(argc, argv);
    RUN(test_tape_records_the_picture_of_its_header);
    RUN(test_tape_writes_a_storage_named_twice_once);
    RUN(test_tape_foreign_write_begins_a_value_without_producer);
    RUN(test_tape_counts_handles_and_flags_operators);
    RUN(test_tape_refuses_bad_operators_and_stays_as_it_was);
    RUN(test_tape_check_finds_each_broken_law);
    RUN(test_tape_matches_model_on_random_programs);
    RUN(test_tape_survives_every_failing_allocation);
    return check_finish();
}
