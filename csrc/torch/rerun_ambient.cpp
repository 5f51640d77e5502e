// SPDX-License-Identifier: BSD-3-Clause
#include "rerun_ambient.h"

#include <pybind11/pybind11.h>

#include <atomic>

namespace py = pybind11;

namespace tfg {

namespace {

const auto &devices = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;

std::atomic<Engine> default_engine = Engine::REPLAY;
thread_local std::optional<Engine> chosen;

// The two functions of dynamo's frame evaluation, looked up once; null where this torch has none.
struct FrameEvaluation {
    PyObject *get = nullptr, *set = nullptr;

    FrameEvaluation() {
        try {
            const auto module = py::module_::import("torch._C._dynamo.eval_frame");
            get = py::object(module.attr("get_eval_frame_callback")).release().ptr();
            set = py::object(module.attr("set_eval_frame")).release().ptr();
        } catch (py::error_already_set &) {
            get = set = nullptr; // a build without the compiler
        }
    }
};

const FrameEvaluation &frame_evaluation() {
    static const FrameEvaluation found;
    return found;
}

} // namespace

AutocastState AutocastState::now() {
    AutocastState state;
    for (size_t i = 0; i < n_devices; ++i) {
        state.dtypes[i] = at::autocast::get_autocast_dtype(devices[i]);
        state.enabled |= uint32_t{at::autocast::is_autocast_enabled(devices[i])} << i;
    }
    state.is_caching = at::autocast::is_autocast_cache_enabled();
    return state;
}

void AutocastState::apply() const {
    for (size_t i = 0; i < n_devices; ++i) {
        at::autocast::set_autocast_enabled(devices[i], enabled >> i & 1);
        at::autocast::set_autocast_dtype(devices[i], dtypes[i]);
    }
    at::autocast::set_autocast_cache_enabled(is_caching);
}

Engine engine_here() { return chosen.value_or(default_engine.load()); }

void choose_engine(Engine engine) { chosen = engine; }

void choose_default_engine(Engine engine) { default_engine = engine; }

RerunAmbient::RerunAmbient(bool preserves_rng)
    : autocast(AutocastState::now()), engine(engine_here()) {
    if (preserves_rng) rng = rng_state(at::detail::getDefaultCPUGenerator());
}

AsInForward::AsInForward(const RerunAmbient &ambient)
    : own_(AutocastState::now()), grad_mode_(true), engine_(ambient.engine), is_nested_(ambient.autocast.enabled != 0) {
    if (ambient.rng) generator_.emplace(*ambient.rng);
    if (!(own_ == ambient.autocast)) ambient.autocast.apply();
    if (is_nested_) at::autocast::increment_nesting();
}

AsInForward::~AsInForward() {
    if (is_nested_ && at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    if (!(own_ == AutocastState::now())) own_.apply();
}

WithoutDynamo::WithoutDynamo() {
    if (!frame_evaluation().get) return;
    PyObject *now = PyObject_CallNoArgs(frame_evaluation().get);
    if (!now) throw py::error_already_set();
    if (now != Py_None) before_ = PyObject_CallOneArg(frame_evaluation().set, Py_None);
    Py_DECREF(now);
}

WithoutDynamo::~WithoutDynamo() {
    if (!before_) return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_XDECREF(PyObject_CallOneArg(frame_evaluation().set, before_));
    Py_DECREF(before_);
    PyErr_Restore(type, value, traceback);
}

} // namespace tfg
