// SPDX-License-Identifier: BSD-3-Clause
//
// handles: what autograd holds in place of a saved tensor.
//
//   Handle  (tape, value, geometry, version) where the storage has a producer on the tape; unpack serves or replays it
//   Kept    the tensor itself, as autograd would keep it: detached if it has a grad_fn; passed through an outer pair of hooks
//
// Both make core's own version check first, which hooks switch off for everything packed. When autograd is done, the object
// dies, and with it its claim on the bytes.
#pragma once

#include <Python.h>

#include "compat.h"
#include "held_tape.h"

namespace tfg {

void install_handles(); // once, at import: the two types, the two hook functions
void push_our_hooks();

// The version of a saved tensor, and the words that core uses when it has moved.
struct SavedVersion {
    c10::VariableVersion counter;
    uint32_t saved = 0;
    uint32_t output_nr = 0;
    WeakNode node;

    explicit SavedVersion(const at::Tensor &tensor);
    bool is_moved() const { return counter.enabled() && counter.current_version() != saved; }
    void check(const std::string &what) const; // throws c10::Error
};

// `variable.data = other` swaps the storage under a variable and is not dispatched. Where autograd would have saved the variable
// itself (an input, not an output), it would serve the new data: so must we. Looked at where the region ends, while the variable
// is still held, and again at unpack if it lives.
struct SavedVariableWatch {
    c10::weak_intrusive_ptr<c10::TensorImpl> variable;
    c10::StorageImpl *storage; // compared, never followed
    at::Tensor swapped;        // the data that the variable had instead

    SavedVariableWatch(const at::Tensor &tensor, c10::StorageImpl *at_pack) : variable(tensor.getIntrusivePtr()), storage(at_pack) {}
    void look(const at::Tensor &tensor);
};

} // namespace tfg
