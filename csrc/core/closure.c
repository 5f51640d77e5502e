/* SPDX-License-Identifier: BSD-3-Clause */
#include "closure.h"

#include <string.h>

/* A stamp equal to the current search's number means: met in this search. 64 bits never come round. */
struct tfg_closure {
    tfg_allocator allocator;
    uint64_t search;
    uint64_t *op_stamps;
    uint64_t *value_stamps;
    int32_t *ops; /* found so far; from `n_followed` on, their reads are still to be looked at */
    int32_t n_ops;
    int32_t op_stamps_capacity, value_stamps_capacity, ops_capacity;
};

/* One search's arguments, together. */
typedef struct question {
    tfg_tape_view view;
    tfg_is_live_fn is_live;
    void *ctx;
} question;

tfg_status tfg_closure_create(const tfg_allocator *allocator, tfg_closure **out) {
    *out = allocator->resize(allocator->ctx, NULL, 0, sizeof(tfg_closure));
    if (*out == NULL) {
        return TFG_ERR_MEMORY;
    }
    memset(*out, 0, sizeof(tfg_closure));
    (*out)->allocator = *allocator;
    return TFG_OK;
}

static void free_block(const tfg_allocator *allocator, void *block, size_t size_bytes) {
    if (block != NULL) {
        allocator->resize(allocator->ctx, block, size_bytes, 0);
    }
}

void tfg_closure_destroy(tfg_closure *closure) {
    if (closure == NULL) {
        return;
    }
    const tfg_allocator allocator = closure->allocator;
    free_block(&allocator, closure->op_stamps, (size_t)closure->op_stamps_capacity * sizeof(uint64_t));
    free_block(&allocator, closure->value_stamps, (size_t)closure->value_stamps_capacity * sizeof(uint64_t));
    free_block(&allocator, closure->ops, (size_t)closure->ops_capacity * sizeof(int32_t));
    free_block(&allocator, closure, sizeof(tfg_closure));
}

static tfg_status reserve_stamps(const tfg_allocator *allocator, uint64_t **stamps, int32_t *capacity, int32_t n) {
    const int32_t n_before = *capacity;
    void *block = *stamps;
    TFG_TRY(tfg_allocator_reserve(allocator, &block, capacity, n, sizeof(uint64_t)));
    *stamps = block;
    if (*capacity > n_before) {
        memset(*stamps + n_before, 0, (size_t)(*capacity - n_before) * sizeof(uint64_t));
    }
    return TFG_OK;
}

static tfg_status reserve(tfg_closure *closure, int32_t n_ops, int32_t n_values) {
    const tfg_allocator *allocator = &closure->allocator;
    void *block = closure->ops;
    TFG_TRY(tfg_allocator_reserve(allocator, &block, &closure->ops_capacity, n_ops, sizeof(int32_t)));
    closure->ops = block;
    TFG_TRY(reserve_stamps(allocator, &closure->op_stamps, &closure->op_stamps_capacity, n_ops));
    return reserve_stamps(allocator, &closure->value_stamps, &closure->value_stamps_capacity, n_values);
}

/* Sees to it that `value` is live or its producer is in the list. */
static tfg_status demand(tfg_closure *closure, const question *q, int32_t value, tfg_error *err) {
    if (closure->value_stamps[value] == closure->search) {
        return TFG_OK;
    }
    closure->value_stamps[value] = closure->search;
    if (q->is_live(q->ctx, value)) {
        return TFG_OK;
    }
    const tfg_value *v = &q->view.values[value];
    if (v->producer == TFG_NONE) {
        return tfg_fail(TFG_ERR_UNREACHABLE, err, "value %d (storage %d, epoch %d) is gone and has no producer", value,
                        v->storage, v->epoch);
    }
    if ((q->view.ops[v->producer].flags & TFG_OP_PINNED) != 0) {
        return tfg_fail(TFG_ERR_UNREACHABLE, err, "value %d (storage %d, epoch %d) is gone and its operator %d is pinned",
                        value, v->storage, v->epoch, v->producer);
    }
    if (closure->op_stamps[v->producer] != closure->search) {
        closure->op_stamps[v->producer] = closure->search;
        closure->ops[closure->n_ops++] = v->producer;
    }
    return TFG_OK;
}

static tfg_status search(tfg_closure *closure, const question *q, const int32_t *wanted, int32_t n_wanted,
                         tfg_error *err) {
    for (int32_t i = 0; i < n_wanted; i++) {
        if (wanted[i] < 0 || wanted[i] >= q->view.n_values) {
            return tfg_fail(TFG_ERR_ARGUMENT, err, "wanted value %d of %d", wanted[i], q->view.n_values);
        }
        TFG_TRY(demand(closure, q, wanted[i], err));
    }
    for (int32_t n_followed = 0; n_followed < closure->n_ops; n_followed++) {
        const tfg_op *op = &q->view.ops[closure->ops[n_followed]];
        for (int32_t i = 0; i < op->n_reads; i++) {
            TFG_TRY(demand(closure, q, q->view.refs[op->first_ref + i], err));
        }
    }
    return TFG_OK;
}

/* ---- tape order ------------------------------------------------------------------------------------------------- */

static void sift_down(int32_t *heap, int32_t root, int32_t n) {
    const int32_t moving = heap[root];
    for (int64_t child = 2 * (int64_t)root + 1; child < n; child = 2 * (int64_t)root + 1) {
        if (child + 1 < n && heap[child + 1] > heap[child]) {
            child++;
        }
        if (heap[child] <= moving) {
            break;
        }
        heap[root] = heap[child];
        root = (int32_t)child;
    }
    heap[root] = moving;
}

static void heap_sort(int32_t *items, int32_t n) {
    for (int32_t root = n / 2 - 1; root >= 0; root--) {
        sift_down(items, root, n);
    }
    for (int32_t last = n - 1; last > 0; last--) {
        const int32_t largest = items[0];
        items[0] = items[last];
        items[last] = largest;
        sift_down(items, 0, last);
    }
}

/* Found operators usually lie close together: then their stamps, read in order, are the sorted list. */
static void put_in_tape_order(tfg_closure *closure) {
    enum { SPARSE = 8 };
    int32_t first = INT32_MAX;
    int32_t last = -1;
    for (int32_t i = 0; i < closure->n_ops; i++) {
        first = closure->ops[i] < first ? closure->ops[i] : first;
        last = closure->ops[i] > last ? closure->ops[i] : last;
    }
    if ((int64_t)last - first >= (int64_t)closure->n_ops * SPARSE) {
        heap_sort(closure->ops, closure->n_ops);
        return;
    }
    for (int32_t op = first, n = 0; n < closure->n_ops; op++) {
        if (closure->op_stamps[op] == closure->search) {
            closure->ops[n++] = op;
        }
    }
}

tfg_status tfg_closure_find(tfg_closure *closure, const tfg_tape *tape, const int32_t *wanted, int32_t n_wanted,
                            tfg_is_live_fn is_live, void *ctx, tfg_error *err) {
    question q = {.is_live = is_live, .ctx = ctx};
    tfg_tape_look(tape, &q.view);
    closure->n_ops = 0;
    closure->search++;
    if (n_wanted < 0 || (n_wanted > 0 && wanted == NULL) || is_live == NULL) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "%d wanted values, or nobody to say what is live", n_wanted);
    }
    TFG_TRY(reserve(closure, q.view.n_ops, q.view.n_values));
    const tfg_status status = search(closure, &q, wanted, n_wanted, err);
    if (status != TFG_OK) {
        closure->n_ops = 0;
        return status;
    }
    put_in_tape_order(closure);
    return TFG_OK;
}

const int32_t *tfg_closure_ops(const tfg_closure *closure, int32_t *out_n_ops) {
    *out_n_ops = closure->n_ops;
    return closure->ops;
}
