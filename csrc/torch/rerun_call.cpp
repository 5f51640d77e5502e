// SPDX-License-Identifier: BSD-3-Clause
#include "rerun_call.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace tfg {

SavedCall::SavedCall(PyObject *callable, PyObject *arguments, PyObject *named, bool preserves_rng)
    : function(py::reinterpret_borrow<py::object>(callable)), others(static_cast<size_t>(PyTuple_GET_SIZE(arguments))),
      ambient(preserves_rng) {
    if (named && PyDict_GET_SIZE(named)) keywords = py::reinterpret_borrow<py::object>(named);
    const size_t n = others.size();
    tensors.reserve(n);
    for (size_t i = 0; i < n; ++i) {
        PyObject *argument = PyTuple_GET_ITEM(arguments, i);
        if (THPVariable_Check(argument)) {
            places.push_back(i);
            tensors.emplace_back(THPVariable_Unpack(argument), /*is_output=*/false);
            argument = Py_None;
        }
        others[i] = py::reinterpret_borrow<py::object>(argument);
    }
}

py::tuple SavedCall::unpacked() const {
    py::tuple arguments(others.size());
    for (size_t i = 0; i < others.size(); ++i) arguments[i] = others[i];
    for (size_t i = 0; i < places.size(); ++i)
        arguments[places[i]] = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensors[i].unpack()));
    return arguments;
}

PyObject *SavedCall::again(const py::tuple &arguments) const {
    const AsInForward as_in_forward(ambient);
    const WithoutDynamo without_dynamo;
    return PyObject_Call(function.ptr(), arguments.ptr(), keywords.ptr());
}

void SavedCall::release() {
    // Moved out first: the end of an object may run Python, which must not find us half empty.
    const py::object dying_function = std::move(function), dying_keywords = std::move(keywords), dying_others = std::move(others);
    std::vector<torch::autograd::SavedVariable> dying = std::move(tensors);
    tensors.clear();
    places.clear();
}

void throw_python_error() {
    python_error error;
    error.persist();
    throw error;
}

} // namespace tfg
