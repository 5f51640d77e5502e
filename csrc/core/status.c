/* SPDX-License-Identifier: BSD-3-Clause */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>

enum { FIRST_CAPACITY = 16 };

const char *tfg_status_name(tfg_status status) {
    switch (status) {
#define ROW(code, name, sentence) \
    case name:                    \
        return #name;
        TFG_STATUS_TABLE(ROW)
#undef ROW
    }
    return "unknown status";
}

const char *tfg_status_sentence(tfg_status status) {
    switch (status) {
#define ROW(code, name, sentence) \
    case name:                    \
        return sentence;
        TFG_STATUS_TABLE(ROW)
#undef ROW
    }
    return "unknown status";
}

tfg_status tfg_fail(tfg_status status, tfg_error *err, const char *format, ...) {
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        vsnprintf(err->text, sizeof err->text, format, args);
        va_end(args);
    }
    return status;
}

tfg_status tfg_allocator_reserve(const tfg_allocator *allocator, void **block, int32_t *capacity, int64_t n_wanted,
                                 size_t item_bytes) {
    if (n_wanted <= *capacity) {
        return TFG_OK;
    }
    if (n_wanted > INT32_MAX) {
        return TFG_ERR_FULL;
    }
    int64_t grown = *capacity < FIRST_CAPACITY ? FIRST_CAPACITY : (int64_t)*capacity * 2;
    grown = grown < n_wanted ? n_wanted : grown;
    grown = grown > INT32_MAX ? INT32_MAX : grown;
    void *moved = allocator->resize(allocator->ctx, *block, (size_t)*capacity * item_bytes, (size_t)grown * item_bytes);
    if (moved == NULL) {
        return TFG_ERR_MEMORY;
    }
    *block = moved;
    *capacity = (int32_t)grown;
    return TFG_OK;
}
