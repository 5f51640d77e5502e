/* SPDX-License-Identifier: BSD-3-Clause */
#include "tape.h"

#include <string.h>

static const uint32_t OP_FLAGS = TFG_OP_PINNED | TFG_OP_RANDOM;
static const uint32_t STORAGE_FLAGS = TFG_STORAGE_EXTERNAL | TFG_STORAGE_OPAQUE;

struct tfg_tape {
    tfg_allocator allocator;
    tfg_op *ops;
    tfg_value *values;
    tfg_storage *storages;
    int32_t *refs;
    int32_t n_ops, ops_capacity;
    int32_t n_values, values_capacity;
    int32_t n_storages, storages_capacity;
    int32_t n_refs, refs_capacity;
};

/* ---- memory: each array may be ahead of the others; only counts are state --------------------------------------- */

static tfg_status reserve_ops(tfg_tape *tape, int64_t n_more) {
    void *block = tape->ops;
    TFG_TRY(tfg_allocator_reserve(&tape->allocator, &block, &tape->ops_capacity, tape->n_ops + n_more, sizeof(tfg_op)));
    tape->ops = block;
    return TFG_OK;
}

static tfg_status reserve_values(tfg_tape *tape, int64_t n_more) {
    void *block = tape->values;
    TFG_TRY(tfg_allocator_reserve(&tape->allocator, &block, &tape->values_capacity, tape->n_values + n_more,
                                  sizeof(tfg_value)));
    tape->values = block;
    return TFG_OK;
}

static tfg_status reserve_storages(tfg_tape *tape, int64_t n_more) {
    void *block = tape->storages;
    TFG_TRY(tfg_allocator_reserve(&tape->allocator, &block, &tape->storages_capacity, tape->n_storages + n_more,
                                  sizeof(tfg_storage)));
    tape->storages = block;
    return TFG_OK;
}

static tfg_status reserve_refs(tfg_tape *tape, int64_t n_more) {
    void *block = tape->refs;
    TFG_TRY(tfg_allocator_reserve(&tape->allocator, &block, &tape->refs_capacity, tape->n_refs + n_more,
                                  sizeof(int32_t)));
    tape->refs = block;
    return TFG_OK;
}

tfg_status tfg_tape_create(const tfg_allocator *allocator, tfg_tape **out) {
    *out = allocator->resize(allocator->ctx, NULL, 0, sizeof(tfg_tape));
    if (*out == NULL) {
        return TFG_ERR_MEMORY;
    }
    memset(*out, 0, sizeof(tfg_tape));
    (*out)->allocator = *allocator;
    return TFG_OK;
}

static void free_block(const tfg_allocator *allocator, void *block, size_t size_bytes) {
    if (block != NULL) {
        allocator->resize(allocator->ctx, block, size_bytes, 0);
    }
}

void tfg_tape_destroy(tfg_tape *tape) {
    if (tape == NULL) {
        return;
    }
    const tfg_allocator allocator = tape->allocator;
    free_block(&allocator, tape->ops, (size_t)tape->ops_capacity * sizeof(tfg_op));
    free_block(&allocator, tape->values, (size_t)tape->values_capacity * sizeof(tfg_value));
    free_block(&allocator, tape->storages, (size_t)tape->storages_capacity * sizeof(tfg_storage));
    free_block(&allocator, tape->refs, (size_t)tape->refs_capacity * sizeof(int32_t));
    free_block(&allocator, tape, sizeof(tfg_tape));
}

void tfg_tape_reset(tfg_tape *tape) {
    tape->n_ops = 0;
    tape->n_values = 0;
    tape->n_storages = 0;
    tape->n_refs = 0;
}

/* ---- recording -------------------------------------------------------------------------------------------------- */

static bool is_index(int32_t index, int32_t n) {
    return index >= 0 && index < n;
}

/* Room for it has been reserved. */
static int32_t begin_value(tfg_tape *tape, int32_t storage, int32_t producer, uint8_t state) {
    const int32_t previous = tape->storages[storage].current;
    const int32_t value = tape->n_values++;
    tape->values[value] = (tfg_value){
        .storage = storage,
        .epoch = previous == TFG_NONE ? 0 : tape->values[previous].epoch + 1,
        .producer = producer,
        .previous = previous,
        .state = state,
    };
    tape->storages[storage].current = value;
    return value;
}

tfg_status tfg_tape_add_storage(tfg_tape *tape, int64_t size_bytes, uint32_t flags, int32_t *out_storage) {
    *out_storage = TFG_NONE;
    if (size_bytes < 0 || (flags & ~STORAGE_FLAGS) != 0) {
        return TFG_ERR_ARGUMENT;
    }
    const bool is_external = (flags & TFG_STORAGE_EXTERNAL) != 0;
    TFG_TRY(reserve_storages(tape, 1));
    TFG_TRY(reserve_values(tape, is_external));
    const int32_t storage = tape->n_storages++;
    tape->storages[storage] = (tfg_storage){.size_bytes = size_bytes, .current = TFG_NONE, .flags = flags};
    if (is_external) {
        begin_value(tape, storage, TFG_NONE, TFG_VALUE_ROOT);
    }
    *out_storage = storage;
    return TFG_OK;
}

static tfg_status check_op_numbers(const tfg_tape *tape, const tfg_op_args *args, tfg_error *err) {
    if (args->n_reads < 0 || args->n_writes < 0) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "operator %d: %d reads and %d writes, wanted counts", tape->n_ops,
                        args->n_reads, args->n_writes);
    }
    if ((args->n_reads > 0 && args->read_storages == NULL) || (args->n_writes > 0 && args->write_storages == NULL)) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "operator %d: storages announced, none given", tape->n_ops);
    }
    if ((args->flags & ~OP_FLAGS) != 0) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "operator %d: unknown flags 0x%x", tape->n_ops, args->flags);
    }
    if (args->cost_ns < 0) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "operator %d: cost of %lld ns", tape->n_ops, (long long)args->cost_ns);
    }
    const int64_t n_refs = (int64_t)tape->n_refs + args->n_reads + args->n_writes;
    if (n_refs > INT32_MAX) {
        return tfg_fail(TFG_ERR_FULL, err, "operator %d: %lld references", tape->n_ops, (long long)n_refs);
    }
    return TFG_OK;
}

static tfg_status check_op_storages(const tfg_tape *tape, const tfg_op_args *args, tfg_error *err) {
    for (int32_t i = 0; i < args->n_reads; i++) {
        const int32_t storage = args->read_storages[i];
        if (!is_index(storage, tape->n_storages)) {
            return tfg_fail(TFG_ERR_ARGUMENT, err, "operator %d: reads storage %d of %d", tape->n_ops, storage,
                            tape->n_storages);
        }
        if (tape->storages[storage].current == TFG_NONE) {
            return tfg_fail(TFG_ERR_ARGUMENT, err, "operator %d: reads storage %d, which nobody has written",
                            tape->n_ops, storage);
        }
    }
    for (int32_t i = 0; i < args->n_writes; i++) {
        if (!is_index(args->write_storages[i], tape->n_storages)) {
            return tfg_fail(TFG_ERR_ARGUMENT, err, "operator %d: writes storage %d of %d", tape->n_ops,
                            args->write_storages[i], tape->n_storages);
        }
    }
    return TFG_OK;
}

tfg_status tfg_tape_append(tfg_tape *tape, const tfg_op_args *args, int32_t *out_op, tfg_error *err) {
    *out_op = TFG_NONE;
    TFG_TRY(check_op_numbers(tape, args, err));
    TFG_TRY(check_op_storages(tape, args, err));
    TFG_TRY(reserve_ops(tape, 1));
    TFG_TRY(reserve_values(tape, args->n_writes));
    TFG_TRY(reserve_refs(tape, (int64_t)args->n_reads + args->n_writes));

    const int32_t op = tape->n_ops++;
    const int32_t first_ref = tape->n_refs;
    for (int32_t i = 0; i < args->n_reads; i++) {
        tape->refs[tape->n_refs++] = tape->storages[args->read_storages[i]].current;
    }
    for (int32_t i = 0; i < args->n_writes; i++) {
        const int32_t storage = args->write_storages[i];
        const int32_t current = tape->storages[storage].current;
        if (current == TFG_NONE || tape->values[current].producer != op) { /* else: named twice, written once */
            tape->refs[tape->n_refs++] = begin_value(tape, storage, op, TFG_VALUE_UNSETTLED);
        }
    }
    tape->ops[op] = (tfg_op){
        .cost_ns = args->cost_ns,
        .first_ref = first_ref,
        .n_reads = args->n_reads,
        .n_writes = tape->n_refs - first_ref - args->n_reads,
        .flags = args->flags,
    };
    *out_op = op;
    return TFG_OK;
}

tfg_status tfg_tape_foreign_write(tfg_tape *tape, int32_t storage, bool is_opaque) {
    if (!is_index(storage, tape->n_storages)) {
        return TFG_ERR_ARGUMENT;
    }
    TFG_TRY(reserve_values(tape, 1));
    uint32_t *flags = &tape->storages[storage].flags;
    if (is_opaque) {
        *flags |= TFG_STORAGE_OPAQUE;
    }
    begin_value(tape, storage, TFG_NONE, (*flags & TFG_STORAGE_OPAQUE) != 0 ? TFG_VALUE_LOST : TFG_VALUE_ROOT);
    return TFG_OK;
}

static void add_handles(tfg_tape *tape, int32_t value, int32_t n_more) {
    if (is_index(value, tape->n_values)) {
        tape->values[value].n_handles += n_more;
        tape->storages[tape->values[value].storage].n_handles += n_more;
    }
}

void tfg_tape_hold(tfg_tape *tape, int32_t value) {
    add_handles(tape, value, 1);
}

void tfg_tape_release(tfg_tape *tape, int32_t value) {
    add_handles(tape, value, -1);
}

void tfg_tape_flag_op(tfg_tape *tape, int32_t op, uint32_t flags) {
    if (is_index(op, tape->n_ops)) {
        tape->ops[op].flags |= flags & OP_FLAGS;
    }
}

void tfg_tape_look(const tfg_tape *tape, tfg_tape_view *out) {
    *out = (tfg_tape_view){
        .ops = tape->ops,
        .values = tape->values,
        .storages = tape->storages,
        .refs = tape->refs,
        .n_ops = tape->n_ops,
        .n_values = tape->n_values,
        .n_storages = tape->n_storages,
        .n_refs = tape->n_refs,
    };
}

tfg_value *tfg_tape_values(tfg_tape *tape) {
    return tape->values;
}

/* ---- the laws --------------------------------------------------------------------------------------------------- */

static tfg_status check_reads(const tfg_tape *tape, int32_t op, tfg_error *err) {
    const tfg_op *o = &tape->ops[op];
    for (int32_t i = 0; i < o->n_reads; i++) {
        const int32_t read = tape->refs[o->first_ref + i];
        if (!is_index(read, tape->n_values)) {
            return tfg_fail(TFG_ERR_BROKEN, err, "operator %d reads value %d of %d", op, read, tape->n_values);
        }
        if (tape->values[read].producer >= op) {
            return tfg_fail(TFG_ERR_BROKEN, err, "operator %d reads value %d, made by the later operator %d", op, read,
                            tape->values[read].producer);
        }
        if (o->n_writes > 0 && read >= tape->refs[o->first_ref + o->n_reads]) {
            return tfg_fail(TFG_ERR_BROKEN, err, "operator %d reads value %d, younger than its write %d", op, read,
                            tape->refs[o->first_ref + o->n_reads]);
        }
    }
    return TFG_OK;
}

/* Writes rise over the whole tape, so no value is written twice. */
static tfg_status check_writes(const tfg_tape *tape, int32_t op, int32_t *last_write, tfg_error *err) {
    const tfg_op *o = &tape->ops[op];
    for (int32_t i = 0; i < o->n_writes; i++) {
        const int32_t write = tape->refs[o->first_ref + o->n_reads + i];
        if (!is_index(write, tape->n_values) || write <= *last_write) {
            return tfg_fail(TFG_ERR_BROKEN, err, "operator %d writes value %d after value %d", op, write, *last_write);
        }
        if (tape->values[write].producer != op) {
            return tfg_fail(TFG_ERR_BROKEN, err, "operator %d writes value %d, whose producer is %d", op, write,
                            tape->values[write].producer);
        }
        *last_write = write;
    }
    return TFG_OK;
}

static tfg_status check_ops(const tfg_tape *tape, int64_t *out_n_writes, tfg_error *err) {
    int64_t n_refs = 0;
    int32_t last_write = TFG_NONE;
    *out_n_writes = 0;
    for (int32_t op = 0; op < tape->n_ops; op++) {
        const tfg_op *o = &tape->ops[op];
        if (o->first_ref != n_refs || o->n_reads < 0 || o->n_writes < 0 ||
            n_refs + o->n_reads + o->n_writes > tape->n_refs) {
            return tfg_fail(TFG_ERR_BROKEN, err, "operator %d: references [%d, +%d, +%d) do not follow on %lld of %d",
                            op, o->first_ref, o->n_reads, o->n_writes, (long long)n_refs, tape->n_refs);
        }
        if ((o->flags & ~OP_FLAGS) != 0 || o->cost_ns < 0) {
            return tfg_fail(TFG_ERR_BROKEN, err, "operator %d: flags 0x%x, cost %lld ns", op, o->flags,
                            (long long)o->cost_ns);
        }
        TFG_TRY(check_writes(tape, op, &last_write, err));
        TFG_TRY(check_reads(tape, op, err));
        n_refs += o->n_reads + o->n_writes;
        *out_n_writes += o->n_writes;
    }
    if (n_refs != tape->n_refs) {
        return tfg_fail(TFG_ERR_BROKEN, err, "%d references, operators have %lld", tape->n_refs, (long long)n_refs);
    }
    return TFG_OK;
}

static tfg_status check_value(const tfg_tape *tape, int32_t value, tfg_error *err) {
    const tfg_value *v = &tape->values[value];
    if (!is_index(v->storage, tape->n_storages) || v->producer < TFG_NONE || v->producer >= tape->n_ops) {
        return tfg_fail(TFG_ERR_BROKEN, err, "value %d: storage %d of %d, producer %d of %d", value, v->storage,
                        tape->n_storages, v->producer, tape->n_ops);
    }
    if (v->n_handles < 0) {
        return tfg_fail(TFG_ERR_BROKEN, err, "value %d: %d handles", value, v->n_handles);
    }
    if (v->state > TFG_VALUE_LOST || v->is_needed > 1) {
        return tfg_fail(TFG_ERR_BROKEN, err, "value %d: state %d, is_needed %d", value, v->state, v->is_needed);
    }
    if (v->previous == TFG_NONE) {
        const bool is_begun = (tape->storages[v->storage].flags & TFG_STORAGE_EXTERNAL) == 0 || v->producer == TFG_NONE;
        if (v->epoch != 0 || !is_begun) {
            return tfg_fail(TFG_ERR_BROKEN, err, "value %d begins storage %d: epoch %d, producer %d", value, v->storage,
                            v->epoch, v->producer);
        }
        return TFG_OK;
    }
    if (!is_index(v->previous, value) || tape->values[v->previous].storage != v->storage ||
        tape->values[v->previous].epoch != v->epoch - 1) {
        return tfg_fail(TFG_ERR_BROKEN, err, "value %d (storage %d, epoch %d) does not follow on value %d", value,
                        v->storage, v->epoch, v->previous);
    }
    return TFG_OK;
}

/* check_value has shown that `previous` falls and stays within the storage, so the walk ends. */
static tfg_status check_storage(const tfg_tape *tape, int32_t storage, int64_t *n_chained, tfg_error *err) {
    const tfg_storage *s = &tape->storages[storage];
    int64_t n_handles = 0;
    if ((s->flags & ~STORAGE_FLAGS) != 0 || s->size_bytes < 0) {
        return tfg_fail(TFG_ERR_BROKEN, err, "storage %d: flags 0x%x, %lld bytes", storage, s->flags,
                        (long long)s->size_bytes);
    }
    if (s->current == TFG_NONE ? (s->flags & TFG_STORAGE_EXTERNAL) != 0
                               : !is_index(s->current, tape->n_values) || tape->values[s->current].storage != storage) {
        return tfg_fail(TFG_ERR_BROKEN, err, "storage %d: current value %d is not one of its own", storage, s->current);
    }
    for (int32_t value = s->current; value != TFG_NONE; value = tape->values[value].previous) {
        n_handles += tape->values[value].n_handles;
        *n_chained += 1;
    }
    if (n_handles != s->n_handles) {
        return tfg_fail(TFG_ERR_BROKEN, err, "storage %d: %d handles, its values have %lld", storage, s->n_handles,
                        (long long)n_handles);
    }
    return TFG_OK;
}

tfg_status tfg_tape_check(const tfg_tape *tape, tfg_error *err) {
    int64_t n_writes = 0;
    int64_t n_produced = 0;
    int64_t n_chained = 0;
    for (int32_t value = 0; value < tape->n_values; value++) {
        TFG_TRY(check_value(tape, value, err));
        n_produced += tape->values[value].producer != TFG_NONE;
    }
    TFG_TRY(check_ops(tape, &n_writes, err));
    if (n_writes != n_produced) {
        return tfg_fail(TFG_ERR_BROKEN, err, "%lld values have a producer, operators write %lld", (long long)n_produced,
                        (long long)n_writes);
    }
    for (int32_t storage = 0; storage < tape->n_storages; storage++) {
        TFG_TRY(check_storage(tape, storage, &n_chained, err));
    }
    if (n_chained != tape->n_values) { /* some value is on no chain: a `current` is not the last */
        return tfg_fail(TFG_ERR_BROKEN, err, "%d values, %lld of them on the chain of a storage", tape->n_values,
                        (long long)n_chained);
    }
    return TFG_OK;
}
