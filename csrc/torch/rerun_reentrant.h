// SPDX-License-Identifier: BSD-3-Clause
//
// rerun reentrant: the stock's reentrant checkpoint, one node of the graph. The function runs without recording; backward calls it
// again on detached arguments, with recording, and runs a backward of its own through what that made.
//
//      forward    x ──[ no_grad: f ]──> y                       the node is y's grad_fn, x is saved
//      backward   x' = x detached ──> f ──> y'; backward(y', dy); hands on x'.grad
//
// What cannot work so is refused: autograd.grad and backward(inputs=…), which the inner backward could not honour; create_graph=True,
// since the gradients it hands on have no graph; forward-mode derivatives. Tensors inside containers take no part.
//
// Law: arguments are saved before the function runs, so one that it changes in place itself is refused in backward as well.
#pragma once

#include <Python.h>

namespace tfg {

// Adds to the module: rerun_reentrant(flags, function, again, arguments). Once, at import.
void install_rerun_reentrant(PyObject *module);

} // namespace tfg
