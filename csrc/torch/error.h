// SPDX-License-Identifier: BSD-3-Clause
//
// error: tfg.Error on the C++ side, and the one way a status of the core becomes an exception.
//
// Bad arguments are ValueError or TypeError; tensor memory is torch.OutOfMemoryError, the tape's own is MemoryError (std::bad_alloc);
// Error is for what is ours.
#pragma once

#include <stdexcept>
#include <string>

#include "core/status.h"

namespace tfg {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Throws std::bad_alloc for TFG_ERR_MEMORY, Error with the words for every other failure.
inline void check(tfg_status status, const tfg_error *words = nullptr) {
    if (status == TFG_OK) return;
    if (status == TFG_ERR_MEMORY) throw std::bad_alloc();
    std::string text = std::string("tfg: ") + tfg_status_sentence(status);
    if (words && words->text[0]) text += std::string(": ") + words->text;
    throw Error(text);
}

} // namespace tfg
