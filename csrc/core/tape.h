/* SPDX-License-Identifier: BSD-3-Clause
 *
 * tape: the append-only record of one forward, as integers.
 *
 * Words
 *   storage  the bytes behind one or more tensors. Views are geometry and never appear here.
 *   value    what a storage holds between two writes. A storage has one value per epoch; an operator that
 *            writes in place ends one value and begins the next. (Not "tensor": several tensors share a value.)
 *   operator reads values, writes values. `cost_ns` is what running it again takes.
 *   handle   someone (autograd) who will ask for a value again. Only counted here.
 *   external a storage whose first value came from outside: no operator on this tape made it.
 *   opaque   a storage whose bytes may change without a record (a raw pointer to it is out). Never relied on.
 *
 * Picture: h = x * 2; h.add_(1); y = h.exp()
 *
 *      storages   x (external)      h                     y
 *      values     v0 (x, epoch 0)   v1 (h, 0)  v2 (h, 1)  v3 (y, 0)
 *      operators  mul: v0 -> v1     add_: v1 -> v2        exp: v2 -> v3
 *
 * Laws (tfg_tape_check proves them)
 *   - an operator reads only values older than every value it writes: order on the tape is a topological order;
 *   - each value has at most one producer; the values of a storage form a chain with rising epochs,
 *     and the storage's `current` is its last;
 *   - the writes of operator o name o as their producer, and every produced value is in its producer's writes;
 *   - handle counts are never negative.
 *
 * Cost: append is amortised O(reads + writes), and asks for no memory once warm: reset keeps what was grown.
 * Threads: not thread-safe; distinct tapes are independent.
 */
#ifndef TFG_CORE_TAPE_H
#define TFG_CORE_TAPE_H

#include <stdbool.h>
#include <stdint.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TFG_NONE = -1 };

/* Why an operator may not run again is the torch room's knowledge; here it is one bit. */
enum tfg_op_flag {
    TFG_OP_PINNED = 1 << 0, /* never replayed: what it wrote can only be kept */
    TFG_OP_RANDOM = 1 << 1, /* draws random numbers: replayable, with its generator state put back */
};

enum tfg_storage_flag {
    TFG_STORAGE_EXTERNAL = 1 << 0,
    TFG_STORAGE_OPAQUE = 1 << 1,
};

/* What settling a span of the tape decided about a value; see keep.h. */
enum tfg_value_state {
    TFG_VALUE_UNSETTLED = 0,
    TFG_VALUE_ROOT,      /* there is a strong reference to it, and replays may start from it */
    TFG_VALUE_DERIVABLE, /* can be made again from roots */
    TFG_VALUE_LOST,      /* can not be made again, and nobody promised to hold it */
};

typedef struct tfg_value {
    int32_t storage;
    int32_t epoch;
    int32_t producer; /* operator, or TFG_NONE: external, or written by someone who was not recorded */
    int32_t previous; /* the storage's value before this one, or TFG_NONE */
    int32_t n_handles;
    uint8_t state; /* enum tfg_value_state */
    uint8_t is_needed; /* set by tfg_keep_prune */
} tfg_value;

typedef struct tfg_storage {
    int64_t size_bytes;
    int32_t current; /* its last value, or TFG_NONE before the first write of a fresh storage */
    int32_t n_handles; /* over all its values */
    uint32_t flags; /* enum tfg_storage_flag */
} tfg_storage;

typedef struct tfg_op {
    int64_t cost_ns;
    int32_t first_ref; /* refs[first_ref ..]: n_reads value ids, then n_writes value ids */
    int32_t n_reads;
    int32_t n_writes;
    uint32_t flags; /* enum tfg_op_flag */
} tfg_op;

typedef struct tfg_tape tfg_tape;

/* Read-only window on the arrays; good until the next call that changes the tape. */
typedef struct tfg_tape_view {
    const tfg_op *ops;
    const tfg_value *values;
    const tfg_storage *storages;
    const int32_t *refs;
    int32_t n_ops;
    int32_t n_values;
    int32_t n_storages;
    int32_t n_refs;
} tfg_tape_view;

/* One operator to append. Arrays name storages; a storage may stand in both (an in-place write reads the value
 * it ends) and twice in one. */
typedef struct tfg_op_args {
    const int32_t *read_storages;
    const int32_t *write_storages;
    int32_t n_reads;
    int32_t n_writes;
    uint32_t flags;
    int64_t cost_ns;
} tfg_op_args;

/* The allocator is copied; its ctx must outlive the tape. *out is NULL on failure. TFG_ERR_MEMORY. */
TFG_CHECKED tfg_status tfg_tape_create(const tfg_allocator *allocator, tfg_tape **out);
void tfg_tape_destroy(tfg_tape *tape); /* NULL is fine */

/* Forgets everything and keeps the memory. */
void tfg_tape_reset(tfg_tape *tape);

/* A storage seen for the first time. External: also begins its value of epoch 0 (state ROOT). Fresh (flags 0): has no
 * value until an operator writes it. size_bytes >= 0. TFG_ERR_MEMORY, TFG_ERR_ARGUMENT, TFG_ERR_FULL; the tape is then
 * as before. */
TFG_CHECKED tfg_status tfg_tape_add_storage(tfg_tape *tape, int64_t size_bytes, uint32_t flags, int32_t *out_storage);

/* Appends one operator: it reads the current value of each read storage (each must have one) and begins a new value in
 * each write storage (a storage named twice is written once). The new values are UNSETTLED.
 * TFG_ERR_MEMORY, TFG_ERR_ARGUMENT, TFG_ERR_FULL; the tape is then as before. */
TFG_CHECKED tfg_status tfg_tape_append(tfg_tape *tape, const tfg_op_args *args, int32_t *out_op, tfg_error *err);

/* Someone wrote the storage without an operator on this tape: begins a value without producer. With is_opaque the
 * storage is opaque from now on. The new value is a ROOT unless the storage is opaque (then LOST).
 * TFG_ERR_MEMORY, TFG_ERR_ARGUMENT, TFG_ERR_FULL; the tape is then as before. */
TFG_CHECKED tfg_status tfg_tape_foreign_write(tfg_tape *tape, int32_t storage, bool is_opaque);

/* A handle on a value is made or dies. Here and below an id that is not on the tape is ignored. More releases than holds
 * leave a negative count, for tfg_tape_check to find. */
void tfg_tape_hold(tfg_tape *tape, int32_t value);
void tfg_tape_release(tfg_tape *tape, int32_t value);

/* Flags of an operator may be added later (a replay was found to differ: PINNED). */
void tfg_tape_flag_op(tfg_tape *tape, int32_t op, uint32_t flags);

void tfg_tape_look(const tfg_tape *tape, tfg_tape_view *out);

/* Proves the laws above. O(size). TFG_ERR_BROKEN with the law in err. */
TFG_CHECKED tfg_status tfg_tape_check(const tfg_tape *tape, tfg_error *err);

/* For the other rooms of the core (keep.c): the arrays, writable. */
tfg_value *tfg_tape_values(tfg_tape *tape);

#ifdef __cplusplus
}
#endif
#endif
