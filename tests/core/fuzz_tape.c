/* SPDX-License-Identifier: BSD-3-Clause
 *
 * fuzz_tape: bytes as calls on a tape; the laws are proven after each. Property: no input breaks one, leaks, or makes
 * a failed call leave a trace. Each call is one byte (kind, modulo N_CALLS), then its arguments, a byte each; past the
 * end all bytes are 0.
 */
#include <stdio.h>

#include "closure.h"
#include "failing_allocator.h"
#include "fuzz_input.h"
#include "keep.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size_bytes);

enum call { ADD_STORAGE, APPEND, FOREIGN_WRITE, HOLD, RELEASE, FLAG_OP, SETTLE, PRUNE, FIND, RESET, FAIL_SOON, N_CALLS };

typedef struct machine {
    fuzz_input input;
    failing_allocator heap;
    tfg_tape *tape;
    tfg_closure *closure;
} machine;

static uint8_t byte(machine *m) {
    return fuzz_byte(&m->input);
}

static int32_t index_below(machine *m, int32_t n) {
    return fuzz_index_below(&m->input, n);
}

static bool is_counted_alike(const tfg_tape_view *left, const tfg_tape_view *right) {
    return left->n_ops == right->n_ops && left->n_values == right->n_values &&
           left->n_storages == right->n_storages && left->n_refs == right->n_refs;
}

static void append(machine *m, const tfg_tape_view *view) {
    int32_t storages[8];
    const int32_t n_reads = byte(m) % 5;
    const int32_t n_writes = byte(m) % 4;
    for (int32_t i = 0; i < n_reads + n_writes; i++) {
        storages[i] = index_below(m, view->n_storages);
    }
    const uint8_t flags = byte(m);
    const tfg_op_args args = {storages, storages + n_reads, n_reads, n_writes, flags % 5, flags};
    int32_t op;
    tfg_error err;
    const tfg_status status = tfg_tape_append(m->tape, &args, &op, &err);
    tfg_tape_view now;
    tfg_tape_look(m->tape, &now);
    REQUIRE(status == TFG_OK ? op == view->n_ops && now.n_ops == op + 1 : op == TFG_NONE && is_counted_alike(view, &now));
    REQUIRE(status == TFG_OK || status == TFG_ERR_ARGUMENT || (status == TFG_ERR_MEMORY && m->heap.fail_at >= 0));
}

typedef struct live_set {
    const tfg_tape_view *view;
    uint8_t pattern;
} live_set;

static bool is_live(void *ctx, int32_t value) {
    const live_set *live = ctx;
    return live->view->values[value].producer == TFG_NONE ? live->pattern < 200 : (value * 7 + 3) % 11 == live->pattern % 16;
}

/* The answer is in tape order, pins nothing, and is closed: each read is live or written by a member before. */
static void check_found(machine *m, const tfg_tape_view *view, live_set *live) {
    int32_t n_ops;
    const int32_t *ops = tfg_closure_ops(m->closure, &n_ops);
    for (int32_t i = 0; i < n_ops; i++) {
        const tfg_op *op = &view->ops[ops[i]];
        REQUIRE(i == 0 || ops[i] > ops[i - 1]);
        REQUIRE((op->flags & TFG_OP_PINNED) == 0);
        for (int32_t r = 0; r < op->n_reads; r++) {
            const int32_t read = view->refs[op->first_ref + r];
            bool is_had = is_live(live, read);
            for (int32_t j = 0; j < i; j++) {
                is_had |= view->values[read].producer == ops[j];
            }
            REQUIRE(is_had);
        }
    }
}

static void find(machine *m, const tfg_tape_view *view) {
    live_set live = {view, byte(m)};
    int32_t wanted[3];
    const int32_t n_wanted = byte(m) % 4;
    for (int32_t i = 0; i < n_wanted; i++) {
        wanted[i] = index_below(m, view->n_values);
    }
    tfg_error err;
    const tfg_status status = tfg_closure_find(m->closure, m->tape, wanted, n_wanted, is_live, &live, &err);
    REQUIRE(status != TFG_ERR_BROKEN && status != TFG_ERR_FULL);
    check_found(m, view, &live);
}

/* The law of keep.h, for the span just settled. */
static void settle(machine *m, const tfg_tape_view *view) {
    const int32_t first_op = index_below(m, view->n_ops + 1);
    const tfg_status status = tfg_keep_settle(m->tape, first_op);
    REQUIRE(status == (first_op >= 0 && first_op <= view->n_ops ? TFG_OK : TFG_ERR_ARGUMENT));
    for (int32_t value = 0; status == TFG_OK && value < view->n_values; value++) {
        const tfg_value *v = &view->values[value];
        if (v->producer >= first_op && v->n_handles > 0) {
            REQUIRE(v->state == TFG_VALUE_ROOT || v->state == TFG_VALUE_DERIVABLE);
            REQUIRE(v->state == TFG_VALUE_DERIVABLE || !tfg_keep_is_droppable(m->tape, v->storage));
        }
    }
}

static void one_call(machine *m) {
    tfg_tape_view view;
    tfg_tape_look(m->tape, &view);
    int32_t id = 0;
    switch ((enum call)(byte(m) % N_CALLS)) {
    case ADD_STORAGE:
        id = byte(m);
        (void)!tfg_tape_add_storage(m->tape, id - 1, (uint32_t)id % 5, &id);
        REQUIRE(id == TFG_NONE || id == view.n_storages);
        break;
    case APPEND:
        append(m, &view);
        break;
    case FOREIGN_WRITE:
        id = index_below(m, view.n_storages);
        (void)!tfg_tape_foreign_write(m->tape, id, byte(m) % 4 == 0);
        break;
    case HOLD:
        tfg_tape_hold(m->tape, index_below(m, view.n_values));
        break;
    case RELEASE:
        id = index_below(m, view.n_values);
        if (id >= 0 && id < view.n_values && view.values[id].n_handles > 0) {
            tfg_tape_release(m->tape, id);
        }
        break;
    case FLAG_OP:
        id = index_below(m, view.n_ops);
        tfg_tape_flag_op(m->tape, id, byte(m));
        break;
    case SETTLE:
        settle(m, &view);
        break;
    case PRUNE:
        tfg_keep_prune(m->tape);
        break;
    case FIND:
        find(m, &view);
        break;
    case RESET:
        if (byte(m) % 8 == 0) { /* seldom, or nothing gets long */
            tfg_tape_reset(m->tape);
        }
        break;
    case FAIL_SOON:
        m->heap.fail_at = m->heap.n_requests + byte(m) % 4;
        break;
    case N_CALLS:
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size_bytes) {
    machine m = {.input = fuzz_input_init(bytes, size_bytes)};
    const tfg_allocator allocator = failing_allocator_init(&m.heap);
    REQUIRE(tfg_tape_create(&allocator, &m.tape) == TFG_OK);
    REQUIRE(tfg_closure_create(&allocator, &m.closure) == TFG_OK);
    while (m.input.next < m.input.end) {
        one_call(&m);
        tfg_error err = {{0}};
        fuzz_require_laws(tfg_tape_check(m.tape, &err), &err);
    }
    tfg_closure_destroy(m.closure);
    tfg_tape_destroy(m.tape);
    REQUIRE(m.heap.n_live_blocks == 0 && m.heap.n_wrong_sizes == 0);
    return 0;
}
