// SPDX-License-Identifier: BSD-3-Clause
//
// policy: selective checkpointing. A region may carry a Python callable that is asked, operator by operator while the region is
// taped, whether the results are to be kept. What it keeps is a root of the tape: held, and replays start from it. There is no
// dispatch mode and no second store, so any number of backwards may follow.
//
//      policy(op, args, kwargs, results) -> bool      op: the OpOverload; arguments as a dispatch mode would see them, those that
//                                                     have their default left out at the end
#pragma once

#include <ATen/core/stack.h>
#include <Python.h>

#include <vector>

#include "rules.h"

namespace tfg {

using Arguments = std::vector<c10::IValue>;

Arguments arguments_of(const Rule &rule, const torch::jit::Stack &stack);

// Takes the GIL. Throws what the policy raises.
bool wants_results(PyObject *policy, const c10::OperatorHandle &op, const Arguments &arguments, const torch::jit::Stack &stack);

} // namespace tfg
