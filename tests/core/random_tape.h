/* SPDX-License-Identifier: BSD-3-Clause
 *
 * random_tape: pseudo-random numbers, and random calls on a tape: externals, fresh and in-place writes, pinned
 * operators, foreign writes, handles. The caller checks the tape after each step.
 */
#ifndef TFG_TEST_RANDOM_TAPE_H
#define TFG_TEST_RANDOM_TAPE_H

#include "check.h"
#include "tape.h"

typedef struct random_source {
    uint64_t state;
} random_source;

/* splitmix64 */
static inline uint64_t random_word(random_source *random) {
    uint64_t word = random->state += 0x9e3779b97f4a7c15U;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9U;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebU;
    return word ^ (word >> 31);
}

static inline int32_t random_below(random_source *random, int32_t n) {
    return (int32_t)(random_word(random) % (uint64_t)n);
}

static inline bool random_one_in(random_source *random, int32_t n) {
    return random_below(random, n) == 0;
}

/* The first argument, or a fixed number: printed, so that a red run can be had again. */
static inline uint64_t random_seed(int argc, char **argv) {
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 20240229;
    printf("%s: seed %llu\n", argv[0], (unsigned long long)seed);
    return seed;
}

#define CHECK_LAWS(tape)                                      \
    do {                                                      \
        tfg_error laws_ = {{0}};                              \
        CHECK_EQ(tfg_tape_check(tape, &laws_), TFG_OK);       \
        if (laws_.text[0] != '\0') {                          \
            printf("    %s\n", laws_.text);                   \
        }                                                     \
    } while (0)

static inline int32_t random_storage(random_source *random, const tfg_tape *tape, bool is_written) {
    tfg_tape_view view;
    tfg_tape_look(tape, &view);
    for (int32_t tries = 0; view.n_storages > 0 && tries < 20; tries++) {
        const int32_t near = random_one_in(random, 3) ? view.n_storages : 4; /* mostly recent ones: long chains */
        const int32_t back = random_below(random, near < view.n_storages ? near : view.n_storages);
        const int32_t storage = view.n_storages - 1 - back;
        if (!is_written || view.storages[storage].current != TFG_NONE) {
            return storage;
        }
    }
    return TFG_NONE;
}

static inline void random_append(random_source *random, tfg_tape *tape) {
    int32_t reads[4];
    int32_t writes[3];
    tfg_op_args args = {.read_storages = reads, .write_storages = writes, .cost_ns = random_below(random, 100)};
    const int32_t n_reads = random_below(random, 4);
    for (int32_t i = 0; i < n_reads; i++) {
        const int32_t storage = random_storage(random, tape, true);
        if (storage != TFG_NONE) {
            reads[args.n_reads++] = storage;
        }
    }
    const int32_t n_writes = random_one_in(random, 4) ? random_below(random, 4) : 1;
    for (int32_t i = 0; i < n_writes; i++) {
        int32_t storage = TFG_NONE;
        if (random_one_in(random, 3)) {
            storage = args.n_reads > 0 ? reads[random_below(random, args.n_reads)] : random_storage(random, tape, false);
        }
        if (storage == TFG_NONE) {
            CHECK_EQ(tfg_tape_add_storage(tape, random_below(random, 1000), 0, &storage), TFG_OK);
        }
        writes[args.n_writes++] = storage;
    }
    if (random_one_in(random, 8)) {
        args.flags |= TFG_OP_PINNED;
    }
    if (random_one_in(random, 8)) {
        args.flags |= TFG_OP_RANDOM;
    }
    int32_t op;
    CHECK_EQ(tfg_tape_append(tape, &args, &op, NULL), TFG_OK);
}

static inline void random_handle(random_source *random, tfg_tape *tape) {
    tfg_tape_view view;
    tfg_tape_look(tape, &view);
    if (view.n_values > 0) {
        const int32_t value = random_below(random, view.n_values);
        if (view.values[value].n_handles > 0 && random_one_in(random, 2)) {
            tfg_tape_release(tape, value);
        } else {
            tfg_tape_hold(tape, value);
        }
    }
}

static inline void random_step(random_source *random, tfg_tape *tape) {
    int32_t storage;
    switch (random_below(random, 12)) {
    case 0:
        CHECK_EQ(tfg_tape_add_storage(tape, 8, TFG_STORAGE_EXTERNAL, &storage), TFG_OK);
        break;
    case 1:
        storage = random_one_in(random, 3) ? random_storage(random, tape, false) : TFG_NONE;
        if (storage != TFG_NONE) {
            CHECK_EQ(tfg_tape_foreign_write(tape, storage, random_one_in(random, 2)), TFG_OK);
        }
        break;
    case 2:
    case 3:
    case 4:
        random_handle(random, tape);
        break;
    default:
        random_append(random, tape);
    }
}
#endif
