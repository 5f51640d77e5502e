// SPDX-License-Identifier: BSD-3-Clause
//
// host_memory: the C library's heap, as the core asks for memory. Not counted, not limited: records, not tensors.
#pragma once

#include <cstdlib>

#include "core/status.h"

namespace tfg {

inline void *resize_host(void *, void *block, size_t, size_t new_bytes) {
    if (new_bytes) return std::realloc(block, new_bytes);
    std::free(block);
    return nullptr;
}
constexpr tfg_allocator host_memory = {&resize_host, nullptr};

} // namespace tfg
