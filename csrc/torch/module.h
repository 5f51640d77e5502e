// SPDX-License-Identifier: BSD-3-Clause
//
// module: the names of tfg._C. Registration only.
#pragma once

#include <Python.h>

namespace tfg {
PyObject *error_class();     // tfg.Error, a RuntimeError
PyObject *parameter_class(); // torch.nn.Parameter; only compared with
}
