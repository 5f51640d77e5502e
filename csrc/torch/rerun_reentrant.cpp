// SPDX-License-Identifier: BSD-3-Clause
#include "rerun_reentrant.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>

#include "compat.h"
#include "rerun_frame.h"

namespace py = pybind11;

namespace tfg {

namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// What a function returned: a tuple as it is, anything else as its only item.
py::tuple as_tuple(PyObject *result) {
    if (PyTuple_Check(result)) return py::reinterpret_borrow<py::tuple>(result);
    return py::make_tuple(py::handle(result));
}

struct Reentrant final : Node {
    Reentrant(PyObject *function, PyObject *arguments, bool preserves_rng) : call(function, arguments, nullptr, preserves_rng) {}

    variable_list apply(variable_list &&grads) override;
    void release_variables() override;
    std::string name() const override { return "CheckpointFunctionBackward"; }
    ~Reentrant() override {
        if (Py_IsInitialized()) release_call();
    }

    SavedCall call;
    bool is_released = false;

  private:
    void refuse() const;
    void release_call();
    py::tuple run_again(variable_list &detached) const;
};

void Reentrant::refuse() const {
    TORCH_CHECK(torch::autograd::Engine::get_default_engine().is_checkpoint_valid(),
                "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or passing an `inputs` parameter to "
                ".backward(): its own backward goes to every parameter. Use use_reentrant=False, or .backward() without `inputs`.");
    TORCH_CHECK(!c10::GradMode::is_enabled(),
                "tfg.checkpoint: use_reentrant=True has no second derivatives: backward(create_graph=True) would take its gradients for "
                "constants. Use use_reentrant=False.");
    TORCH_CHECK(!is_released, torch::autograd::ERR_BACKWARD_TWICE);
}

// Calls the function on detached arguments, which are left in `detached`.
py::tuple Reentrant::run_again(variable_list &detached) const {
    py::tuple arguments = call.unpacked();
    for (const size_t place : call.places) {
        const at::Tensor &given = THPVariable_Unpack(arguments[place].ptr());
        at::Tensor alone = given.detach();
        alone.set_requires_grad(given.requires_grad());
        arguments[place] = py::reinterpret_steal<py::object>(THPVariable_Wrap(alone));
        detached.push_back(std::move(alone));
    }
    PyObject *result = call.again(arguments);
    if (!result) throw_python_error();
    const auto owned = py::reinterpret_steal<py::object>(result);
    return as_tuple(result);
}

// The C++ backward takes a gradient of any shape for a root, and expands it.
void check_same(const torch::autograd::InputMetadata &first, const at::Tensor &again, size_t i) {
    if (first.is_same_shape(again) && first.dtype().toScalarType() == again.scalar_type() && first.device() == again.device()) return;
    throw_checkpoint_error("tfg.checkpoint: result " + std::to_string(i) + " has another shape, dtype or device than the first time when the "
                           "function is called again: " + SavedMetadata(again).words());
}

variable_list Reentrant::apply(variable_list &&grads) {
    refuse();
    variable_list detached, outputs, output_grads;
    {
        py::gil_scoped_acquire gil;
        const py::tuple results = run_again(detached);
        if (results.size() != num_inputs())
            throw_checkpoint_error("tfg.checkpoint: the function returned " + std::to_string(num_inputs()) + " values the first time and " +
                                   std::to_string(results.size()) + " when it was called again");
        for (size_t i = 0; i < results.size(); ++i) {
            if (!THPVariable_Check(results[i].ptr())) continue;
            const at::Tensor &output = THPVariable_Unpack(results[i].ptr());
            if (!output.requires_grad()) continue;
            check_same(input_metadata(i), output, i);
            outputs.push_back(output);
            output_grads.push_back(grads[i].defined() ? grads[i] : at::zeros_like(output));
        }
        TORCH_CHECK(!outputs.empty(), "none of output has requires_grad=True, this checkpoint() is not necessary: called again, the "
                    "function made nothing that backward could go through");
    }
    torch::autograd::backward(outputs, output_grads);
    variable_list result;
    for (const at::Tensor &argument : detached) result.push_back(argument.grad());
    return result;
}

void Reentrant::release_call() {
    py::gil_scoped_acquire gil;
    call.release();
}

void Reentrant::release_variables() {
    is_released = true;
    release_call();
}

// ---------------------------------------------------------------------------------------------------------------- the first run
PyObject *call_without_recording(PyObject *function, PyObject *arguments) {
    const at::AutoGradMode off(false);
    const at::AutoFwGradMode forward_off(false);
    const WithoutDynamo without_dynamo;
    return PyObject_Call(function, arguments, nullptr);
}

variable_list tensors_in(PyObject *arguments) {
    variable_list tensors;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); ++i)
        if (THPVariable_Check(PyTuple_GET_ITEM(arguments, i))) tensors.push_back(THPVariable_Unpack(PyTuple_GET_ITEM(arguments, i)));
    return tensors;
}

[[noreturn]] variable_list no_forward_mode(const variable_list &, const variable_list &) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "tfg.checkpoint: use_reentrant=True does not implement forward mode AD (jvp). Use use_reentrant=False.");
}

// The results with `node` as their history (none: they need no gradient), in the form that the function returned them in.
PyObject *with_history(const c10::intrusive_ptr<Node> &node, const variable_list &inputs, PyObject *result) {
    const py::tuple results = as_tuple(result);
    std::vector<std::optional<at::Tensor>> raw(results.size());
    for (size_t i = 0; i < results.size(); ++i)
        if (THPVariable_Check(results[i].ptr())) raw[i] = THPVariable_Unpack(results[i].ptr());
    const auto wrapped = torch::autograd::_wrap_outputs(
        inputs, {}, {}, raw, node, [](const variable_list &a, const variable_list &b) -> variable_list { no_forward_mode(a, b); }, {},
        [](const at::Tensor &tensor) { return tensor.view_as(tensor); }, false);
    py::tuple out(results.size());
    for (size_t i = 0; i < results.size(); ++i)
        out[i] = wrapped[i] ? py::reinterpret_steal<py::object>(THPVariable_Wrap(*wrapped[i])) : py::object(results[i]);
    if (PyTuple_Check(result)) return out.release().ptr();
    return py::object(out[0]).release().ptr();
}

// rerun_reentrant(flags, function, again, arguments): `again` is what a second run calls, None for `function`.
PyObject *rerun_reentrant(PyObject *, PyObject *const *given, Py_ssize_t n_given) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(n_given == 4, "rerun_reentrant(flags, function, again, arguments) got ", n_given, " arguments");
    PyObject *function = given[1], *again = given[2], *arguments = given[3];
    const long flags = PyLong_AsLong(given[0]);
    if (flags == -1 && PyErr_Occurred()) return nullptr;
    const variable_list inputs = tensors_in(arguments);
    c10::intrusive_ptr<Node> node;
    if (c10::GradMode::is_enabled() && torch::autograd::any_variable_requires_grad(inputs)) {
        node = c10::make_intrusive<Reentrant>(again == Py_None ? function : again, arguments, (flags & PRESERVE_RNG) != 0);
        node->set_next_edges(torch::autograd::collect_next_edges(inputs));
    }
    PyObject *result = call_without_recording(function, arguments);
    if (!result) return nullptr;
    const auto owned = py::reinterpret_steal<py::object>(result);
    return with_history(node, inputs, result);
    END_HANDLE_TH_ERRORS
}

PyMethodDef rerun_reentrant_method = {"rerun_reentrant",
                                      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&rerun_reentrant)), METH_FASTCALL,
                                      "rerun_reentrant(flags, function, again, arguments): one node; backward runs inside backward"};

} // namespace

void install_rerun_reentrant(PyObject *module) {
    PyModule_AddObject(module, "rerun_reentrant", PyCFunction_New(&rerun_reentrant_method, nullptr));
}

} // namespace tfg
