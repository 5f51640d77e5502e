// SPDX-License-Identifier: BSD-3-Clause
#include "policy.h"

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace tfg {

namespace {

bool has_default(const c10::Argument &argument, const c10::IValue &value) {
    if (!argument.default_value() || value.isTensor()) return false;
    return *argument.default_value() == value;
}

std::pair<py::tuple, py::dict> as_python(const c10::FunctionSchema &schema, const Arguments &values) {
    const auto &arguments = schema.arguments();
    size_t n_positional = 0;
    py::dict keywords;
    for (size_t i = 0; i < values.size(); ++i) {
        if (has_default(arguments[i], values[i])) continue;
        if (arguments[i].kwarg_only())
            keywords[arguments[i].name().c_str()] = torch::jit::toPyObject(values[i]);
        else
            n_positional = i + 1;
    }
    py::tuple positional(n_positional);
    for (size_t i = 0; i < n_positional; ++i) positional[i] = torch::jit::toPyObject(values[i]);
    return {positional, keywords};
}

} // namespace

Arguments arguments_of(const Rule &rule, const torch::jit::Stack &stack) {
    return {stack.end() - rule.n_arguments, stack.end()};
}

bool wants_results(PyObject *policy, const c10::OperatorHandle &op, const Arguments &arguments, const torch::jit::Stack &stack) {
    py::gil_scoped_acquire gil;
    const auto [positional, keywords] = as_python(op.schema(), arguments);
    const size_t n = op.schema().returns().size();
    py::object results = py::none();
    if (n == 1) results = torch::jit::toPyObject(stack.back());
    if (n > 1) {
        py::tuple all(n);
        for (size_t i = 0; i < n; ++i) all[i] = torch::jit::toPyObject(stack[stack.size() - n + i]);
        results = all;
    }
    const py::handle overload = torch::detail::getTorchApiFunction(op);
    return py::handle(policy)(overload, positional, keywords, results).cast<bool>();
}

} // namespace tfg
