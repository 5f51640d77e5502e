// SPDX-License-Identifier: BSD-3-Clause
//
// rerun call: what is needed to call a function again: the callable, its arguments, and what it found around it.
//
// Words: a *tensor argument* is a positional argument that is itself a tensor. It is held as autograd holds a saved tensor, so a
// change in place is noticed, and hooks (an outer region's, a user's) see it. Everything else, tensors inside containers and
// keyword arguments too, is held as it is.
//
// Law: Python objects here are released under the GIL, which whoever destroys a SavedCall holds.
#pragma once

#include <Python.h>

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "rerun_ambient.h"

namespace tfg {

struct SavedCall {
    // `arguments`: a tuple; `keywords`: a dict or nullptr. Runs pack hooks, and throws what they raise.
    SavedCall(PyObject *function, PyObject *arguments, PyObject *keywords, bool preserves_rng);

    // The positional arguments as a new tuple, tensors unpacked. May run anything: hooks, an outer region. Throws what they raise,
    // and core's error for a tensor that was changed in place.
    pybind11::tuple unpacked() const;

    // Calls with these arguments, as in the forward. The result, or nullptr with Python's error set.
    PyObject *again(const pybind11::tuple &arguments) const;

    void release(); // forget it all: it will not be called again

    pybind11::object function, keywords;
    pybind11::tuple others; // None where a tensor stood
    std::vector<size_t> places;                            // where the tensor arguments stood
    std::vector<torch::autograd::SavedVariable> tensors;   // one for each place
    RerunAmbient ambient;
};

// An error of Python's, set, as the C++ exception that carries it through autograd.
[[noreturn]] void throw_python_error();

} // namespace tfg
