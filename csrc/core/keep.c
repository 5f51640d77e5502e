/* SPDX-License-Identifier: BSD-3-Clause */
#include "keep.h"

static bool is_opaque(const tfg_storage *storage) {
    return (storage->flags & TFG_STORAGE_OPAQUE) != 0;
}

static bool is_external(const tfg_storage *storage) {
    return (storage->flags & TFG_STORAGE_EXTERNAL) != 0;
}

/* May an operator that reads this value run again? */
static bool is_available(const tfg_tape_view *view, int32_t value) {
    const tfg_value *v = &view->values[value];
    const tfg_storage *storage = &view->storages[v->storage];
    if (is_opaque(storage)) {
        return false;
    }
    return v->state == TFG_VALUE_DERIVABLE || (v->state == TFG_VALUE_ROOT && storage->current == value);
}

static bool is_replayable(const tfg_tape_view *view, const tfg_op *op) {
    if ((op->flags & TFG_OP_PINNED) != 0) {
        return false;
    }
    for (int32_t i = 0; i < op->n_reads; i++) {
        if (!is_available(view, view->refs[op->first_ref + i])) {
            return false;
        }
    }
    return true;
}

/* The tape holds its externals, so what one holds last is there. */
static bool is_held_external(const tfg_tape_view *view, int32_t value) {
    const tfg_storage *s = &view->storages[view->values[value].storage];
    return is_external(s) && !is_opaque(s) && s->current == value;
}

tfg_status tfg_keep_settle(tfg_tape *tape, int32_t first_op) {
    tfg_tape_view view;
    tfg_tape_look(tape, &view);
    if (first_op < 0 || first_op > view.n_ops) {
        return TFG_ERR_ARGUMENT;
    }
    tfg_value *values = tfg_tape_values(tape);
    for (int32_t o = first_op; o < view.n_ops; o++) {
        const tfg_op *op = &view.ops[o];
        const bool is_derivable = is_replayable(&view, op);
        for (int32_t i = 0; i < op->n_writes; i++) {
            const int32_t value = view.refs[op->first_ref + op->n_reads + i];
            tfg_value *v = &values[value];
            if (v->state == TFG_VALUE_ROOT || v->state == TFG_VALUE_DERIVABLE) {
                continue; /* promised before, and may have been let go on that promise */
            }
            if (is_derivable && !is_external(&view.storages[v->storage])) {
                v->state = TFG_VALUE_DERIVABLE;
            } else {
                v->state = v->n_handles > 0 || is_held_external(&view, value) ? TFG_VALUE_ROOT : TFG_VALUE_LOST;
            }
        }
    }
    return TFG_OK;
}

bool tfg_keep_is_droppable(const tfg_tape *tape, int32_t storage) {
    tfg_tape_view view;
    tfg_tape_look(tape, &view);
    if (storage < 0 || storage >= view.n_storages) {
        return false;
    }
    const tfg_storage *s = &view.storages[storage];
    if (is_opaque(s) || is_external(s)) {
        return false;
    }
    if (s->current == TFG_NONE) {
        return true;
    }
    const tfg_value *current = &view.values[s->current];
    if (current->state == TFG_VALUE_ROOT || current->n_handles != s->n_handles) {
        return false; /* relied on; or a handle asks for an older value */
    }
    return s->n_handles == 0 || current->state == TFG_VALUE_DERIVABLE;
}

void tfg_keep_prune(tfg_tape *tape) {
    tfg_tape_view view;
    tfg_tape_look(tape, &view);
    tfg_value *values = tfg_tape_values(tape);
    for (int32_t value = 0; value < view.n_values; value++) {
        values[value].is_needed = values[value].state == TFG_VALUE_DERIVABLE && values[value].n_handles > 0;
    }
    for (int32_t o = view.n_ops - 1; o >= 0; o--) { /* readers come after producers, so backwards one pass is enough */
        const tfg_op *op = &view.ops[o];
        const int32_t *reads = &view.refs[op->first_ref];
        const int32_t *writes = reads + op->n_reads;
        bool is_needed = false;
        for (int32_t i = 0; i < op->n_writes; i++) {
            is_needed |= values[writes[i]].is_needed && values[writes[i]].state != TFG_VALUE_ROOT;
        }
        for (int32_t i = 0; is_needed && i < op->n_reads; i++) {
            values[reads[i]].is_needed = 1;
        }
    }
}
