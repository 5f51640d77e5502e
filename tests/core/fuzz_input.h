/* SPDX-License-Identifier: BSD-3-Clause
 *
 * fuzz_input: a fuzz target's bytes, read one by one; zeros follow the last. What fails aborts, as a fuzzer expects.
 */
#ifndef TFG_TEST_FUZZ_INPUT_H
#define TFG_TEST_FUZZ_INPUT_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "status.h"

typedef struct fuzz_input {
    const uint8_t *next;
    const uint8_t *end;
} fuzz_input;

#define REQUIRE(condition)                                                  \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                        \
        }                                                                   \
    } while (0)

static inline fuzz_input fuzz_input_init(const uint8_t *bytes, size_t size_bytes) {
    return (fuzz_input){bytes, size_bytes == 0 ? bytes : bytes + size_bytes};
}

static inline uint8_t fuzz_byte(fuzz_input *input) {
    return input->next < input->end ? *input->next++ : 0;
}

/* Mostly a good index, counted from the end; sometimes one just outside. */
static inline int32_t fuzz_index_below(fuzz_input *input, int32_t n) {
    const int32_t given = fuzz_byte(input);
    return given >= 250 || n == 0 ? (given % 2 == 0 ? n : -1) : n - 1 - given % n;
}

/* The structure's own check of its laws. */
static inline void fuzz_require_laws(tfg_status status, const tfg_error *err) {
    if (status != TFG_OK) {
        fprintf(stderr, "%s\n", err->text);
        abort();
    }
}
#endif
