/* SPDX-License-Identifier: BSD-3-Clause
 *
 * failing_allocator: heap blocks that remember their size, and a request counter that can be told to fail once.
 *
 * Law: the old size handed in is the size asked for before. Growing always moves, so that a stale pointer is seen.
 */
#ifndef TFG_TEST_FAILING_ALLOCATOR_H
#define TFG_TEST_FAILING_ALLOCATOR_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "status.h"

typedef struct failing_allocator {
    int64_t n_requests; /* for memory; freeing is not one */
    int64_t fail_at;    /* this request (from 0) gets NULL; -1: none */
    int64_t n_live_blocks;
    int64_t n_wrong_sizes;
    uint64_t garbage; /* what each word of a fresh block holds */
} failing_allocator;

enum { BLOCK_HEADER_BYTES = 16 };

static void *failing_resize(void *ctx, void *block, size_t old_bytes, size_t new_bytes) {
    failing_allocator *self = ctx;
    unsigned char *old = block == NULL ? NULL : (unsigned char *)block - BLOCK_HEADER_BYTES;
    size_t remembered_bytes = 0;
    if (old != NULL) {
        memcpy(&remembered_bytes, old, sizeof remembered_bytes);
    }
    self->n_wrong_sizes += remembered_bytes != old_bytes;
    unsigned char *fresh = NULL;
    if (new_bytes > 0) {
        if (self->n_requests++ == self->fail_at) {
            return NULL;
        }
        fresh = malloc(BLOCK_HEADER_BYTES + new_bytes);
        for (size_t i = 0; i < new_bytes; i++) {
            fresh[BLOCK_HEADER_BYTES + i] = (unsigned char)(self->garbage >> 8 * (i % 8));
        }
        memcpy(fresh, &new_bytes, sizeof new_bytes);
        if (old != NULL) {
            memcpy(fresh + BLOCK_HEADER_BYTES, block, remembered_bytes < new_bytes ? remembered_bytes : new_bytes);
        }
        self->n_live_blocks++;
    }
    self->n_live_blocks -= old != NULL;
    free(old);
    return fresh == NULL ? NULL : fresh + BLOCK_HEADER_BYTES;
}

static inline tfg_allocator failing_allocator_init(failing_allocator *self) {
    *self = (failing_allocator){.fail_at = -1, .garbage = 0xa5a5a5a5a5a5a5a5U};
    return (tfg_allocator){failing_resize, self};
}
#endif
