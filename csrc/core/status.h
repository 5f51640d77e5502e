/* SPDX-License-Identifier: BSD-3-Clause
 *
 * status: how every fallible function of the core answers, and where it gets host memory.
 *
 * Words
 *   status     a small number; TFG_OK is 0. The table below is the documentation: code, name, sentence.
 *   error      optional words beside the status: what was wanted, what was given. Lives on the caller's stack.
 *   allocator  the only source of host memory. Handed in, so that tests can make the k-th request fail.
 *
 * Threads: nothing here has state.
 */
#ifndef TFG_CORE_STATUS_H
#define TFG_CORE_STATUS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TFG_STATUS_TABLE(ROW)                                                      \
    ROW(0, TFG_OK, "ok")                                                           \
    ROW(1, TFG_ERR_MEMORY, "the host allocator had nothing left")                  \
    ROW(2, TFG_ERR_ARGUMENT, "an argument is outside its range")                   \
    ROW(3, TFG_ERR_UNREACHABLE, "a wanted value can be neither found nor made")    \
    ROW(4, TFG_ERR_BROKEN, "a law of the structure does not hold")                 \
    ROW(5, TFG_ERR_FULL, "more entries than a 32-bit index can name")              \
    ROW(6, TFG_ERR_UNSUPPORTED, "nothing here knows how to do this")               \
    ROW(7, TFG_ERR_CUDA, "the CUDA runtime refused")

typedef enum tfg_status {
#define TFG_STATUS_ROW(code, name, sentence) name = code,
    TFG_STATUS_TABLE(TFG_STATUS_ROW)
#undef TFG_STATUS_ROW
} tfg_status;

#if defined(__GNUC__)
#define TFG_CHECKED __attribute__((warn_unused_result))
#define TFG_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define TFG_CHECKED
#define TFG_PRINTF(fmt, args)
#endif

/* A function that kernels on a device may call too. */
#if defined(__CUDACC__)
#define TFG_ANYWHERE __host__ __device__
#else
#define TFG_ANYWHERE
#endif

/* Words beside a status. May be NULL wherever it is asked for. */
typedef struct tfg_error {
    char text[240];
} tfg_error;

/* resize(ctx, NULL, 0, n) allocates, resize(ctx, p, old, n) grows or shrinks, resize(ctx, p, old, 0) frees.
 * Returns NULL when there is no memory (the old block is then untouched) and when n is 0. */
typedef struct tfg_allocator {
    void *(*resize)(void *ctx, void *block, size_t old_bytes, size_t new_bytes);
    void *ctx;
} tfg_allocator;

/* "TFG_ERR_MEMORY" and the sentence of the table; "unknown status" for anything else. Static strings. */
const char *tfg_status_name(tfg_status status);
const char *tfg_status_sentence(tfg_status status);

/* Writes the words (cut at the buffer's end) and returns `status`, so that a failure is one line. */
tfg_status tfg_fail(tfg_status status, tfg_error *err, const char *format, ...) TFG_PRINTF(3, 4);

/* Makes room for n_wanted items in an array that grows by doubling. *block and *capacity change together or not at all;
 * what is new is not initialised. TFG_ERR_MEMORY, TFG_ERR_FULL. */
TFG_CHECKED tfg_status tfg_allocator_reserve(const tfg_allocator *allocator, void **block, int32_t *capacity,
                                             int64_t n_wanted, size_t item_bytes);

/* Forwards a failure. The only macro that hides control flow. */
#define TFG_TRY(expr)                          \
    do {                                       \
        const tfg_status tfg_try_ = (expr);    \
        if (tfg_try_ != TFG_OK) {              \
            return tfg_try_;                   \
        }                                      \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
