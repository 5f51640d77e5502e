// SPDX-License-Identifier: BSD-3-Clause
//
// recorder: writes down the operators of a region while they run.
//
// A boxed fallback on a dispatch key below autograd and autocast, included in thread-local state only inside a region. It
// excludes itself around the redispatch, so exactly the outermost operator below autograd is recorded, and costs nothing
// outside. A region is a span of one thread: the dispatch key, a pair of saved-tensor hooks and `current()` are set on entry
// and put back on every path out.
#pragma once

#include <Python.h>

#include "held_tape.h"

namespace tfg {

struct Region {
    Region(std::shared_ptr<Tape> tape, int64_t key, bool is_own_tape);
    ~Region();
    void let_go(); // at the regular end or after an exception: settle, drop
    void look_at_saved_inputs(); // whose `.data` was swapped? Then they are no longer held
    // Under pressure: those that nobody else holds any more can not be swapped any more, and need not be held. Few are looked at
    // each time, many when they have doubled.
    void release_saved_inputs();
    Region(const Region &) = delete;

    std::shared_ptr<Tape> tape;
    int64_t key;
    Stats &stats;
    int32_t first_op;
    int32_t ordinal = 0;
    bool is_own_tape;
    size_t hook_depth;
    PyObject *policy = nullptr; // selective checkpointing: borrowed from the caller of the region
    PyObject *outer_pack = nullptr, *outer_unpack = nullptr; // a pair that was active when the region began
    Region *parent;
    bool is_parent_calm = false;
    std::vector<std::pair<at::Tensor, std::shared_ptr<struct SavedVariableWatch>>> saved_inputs; // held until the region ends
    size_t n_still_held = 0; // of them, when they were last released
    static constexpr size_t few_saved_inputs = 16;
};

// This thread's innermost region, or nullptr.
Region *current_region();

// True where a region would have something to record: grad mode on, no inference mode, no functorch transform or graph
// tracer, hooks allowed, and not inside an operator that is being recorded.
bool can_record();

// Once, at import. Throws Error in one line where the dispatch key is taken.
void install_recorder();

} // namespace tfg
