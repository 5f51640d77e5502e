// SPDX-License-Identifier: BSD-3-Clause
//
// rerun: the stock's non-reentrant checkpoint. The function runs under hooks that put a holder in place of every saved tensor; when
// backward asks for the first of them, it is called again under other hooks that collect what it saves, by position.
//
// The innermost region owns a saved tensor. A region's tensor arguments are saved before its own hooks are on, so the region around it
// owns those: to run the inner one again, the outer one runs first. A second run starts as if no region were active.
//
// The hooks are C functions: per saved tensor there is no Python frame, one small object in forward, and none in backward.
#pragma once

#include <Python.h>

namespace tfg {

// Is what autograd saves now put away by a rerun region? Then a tape would only hide it, in the first run and the second alike.
bool is_rerun_hook_on_top();

// Adds to the module: rerun(flags, function, again, on_error, arguments, keywords), elsewhere(arguments), the choice of an engine,
// StopRerun, and the flags. Once, at import.
void install_rerun(PyObject *module);

} // namespace tfg
