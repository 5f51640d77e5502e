// SPDX-License-Identifier: BSD-3-Clause
#include "module.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "clipping.h"
#include "core/interval.h"
#include "cpu_allocator.h"
#include "error.h"
#include "handles.h"
#include "make_up.h"
#include "peak.h"
#include "recorder.h"
#include "rerun.h"
#include "rerun_reentrant.h"

namespace py = pybind11;

namespace tfg {

namespace {

bool is_enabled = true;
PyObject *error = nullptr;
PyObject *parameter = nullptr;

struct PyTape {
    std::shared_ptr<Tape> tape = Tape::make();
    void close() const {
        Graveyard dead;
        std::lock_guard<Mutex> lock(tape->mutex);
        if (tape->is_closed) return;
        tape->is_closed = true;
        tape->prune(dead);
    }
};

// For the tests: what could be let go of now, and letting go of just some of it.
std::vector<int32_t> droppable(const PyTape &self) {
    std::lock_guard<Mutex> lock(self.tape->mutex);
    std::vector<int32_t> ids;
    for (int32_t id = 0; id < static_cast<int32_t>(self.tape->slots.size()); ++id)
        if (self.tape->slots[static_cast<size_t>(id)].strong && tfg_keep_is_droppable(self.tape->core, id)) ids.push_back(id);
    return ids;
}

void drop(const PyTape &self, const std::vector<int32_t> &ids) {
    Graveyard dead;
    std::lock_guard<Mutex> lock(self.tape->mutex);
    for (const int32_t id : ids) {
        if (id < 0 || static_cast<size_t>(id) >= self.tape->slots.size()) throw py::index_error("no storage " + std::to_string(id));
        self.tape->drop_slot(id, dead);
    }
}

// One region around function(*args, **kwargs). The result, or nullptr with Python's error set.
PyObject *call_in_region(const std::shared_ptr<Tape> &on, bool is_own_tape, int64_t key, PyObject *function, PyObject *args,
                         PyObject *kwargs, PyObject *policy) {
    Region region(on, key, is_own_tape);
    region.policy = policy;
    PyObject *result = PyObject_Call(function, args, kwargs);
    if (result) {
        try {
            region.let_go();
        } catch (...) {
            Py_DECREF(result);
            throw;
        }
    }
    return result;
}

// How a region without a segment's tape treats what it saves.
enum Policy : long {
    BY_BUDGET = 0,        // keeps where its device has a budget, else lets go
    LET_GO = 1,           // lets go of everything at its end, whatever the budget
    KEEP = 4,             // keeps, also where there is no budget
    TRUST_PARAMETERS = 2, // a sharding engine frees and refills the parameters; to be or-ed
};

std::shared_ptr<Tape> new_tape(long policy) {
    auto tape = Tape::make();
    tape->keeps = (policy & KEEP) || (!(policy & LET_GO) && cpu_budget().bytes >= 0);
    tape->trusts_parameters = (policy & TRUST_PARAMETERS) != 0;
    return tape;
}

// run(tape, key, function, args, kwargs[, selection]); tape: a segment's, or the policy of one of the region's own; selection: see
// policy.h
PyObject *run(PyObject *, PyObject *const *given, Py_ssize_t n_given) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(n_given == 5 || n_given == 6, "run(tape, key, function, args, kwargs[, selection]) got ", n_given, " arguments");
    PyObject *function = given[2], *args = given[3], *kwargs = given[4], *policy = n_given == 6 ? given[5] : nullptr;
    if (!is_enabled || !can_record() || is_rerun_hook_on_top()) return PyObject_Call(function, args, kwargs);
    const int64_t key = PyLong_AsLongLong(given[1]);
    if (key == -1 && PyErr_Occurred()) return nullptr;
    try {
        if (Region *outer = current_region()) return call_in_region(outer->tape, false, key, function, args, kwargs, policy);
        if (PyLong_CheckExact(given[0])) return call_in_region(new_tape(PyLong_AsLong(given[0])), true, key, function, args,
                                                                     kwargs, policy);
        const auto &segment = py::handle(given[0]).cast<PyTape &>().tape;
        TORCH_CHECK_VALUE(!segment->is_closed, "this tape is closed");
        return call_in_region(segment, false, key, function, args, kwargs, policy);
    } catch (const Error &failure) {
        PyErr_SetString(error, failure.what());
        return nullptr;
    }
    END_HANDLE_TH_ERRORS
}

py::dict stats_dict(int64_t key) {
    const Stats &stats = stats_of(key);
    py::dict why, out;
    for (size_t i = 1; i < stats.kept_why.size(); ++i)
        if (const int64_t bytes = stats.kept_why[i].load()) why[why_words(static_cast<Why>(i))] = bytes;
    out["label"] = stats.label;
    out["regions"] = stats.regions.load();
    out["ops_taped"] = stats.ops_taped.load();
    out["ops_replayed"] = stats.ops_replayed.load();
    out["saved_bytes"] = stats.saved_bytes.load();
    out["kept_bytes"] = stats.kept_bytes.load();
    out["dropped_bytes"] = stats.dropped_bytes.load();
    out["replay_ns"] = stats.replay_ns.load();
    out["evictions"] = stats.evictions.load();
    out["evicted_bytes"] = stats.evicted_bytes.load();
    out["replayed_again"] = stats.replayed_again.load();
    out["unproven"] = stats.unproven.load();
    out["kept_why"] = why;
    return out;
}

void reset_stats(int64_t key) {
    Stats &stats = stats_of(key);
    for (auto *number : {&stats.regions, &stats.ops_taped, &stats.ops_replayed, &stats.saved_bytes, &stats.kept_bytes, &stats.dropped_bytes,
                         &stats.replay_ns, &stats.evictions, &stats.evicted_bytes, &stats.replayed_again})
        *number = 0;
    for (auto &number : stats.kept_why) number = 0;
}

int64_t dynamic_interval(int64_t total_layers, int64_t seq_len, int64_t low, int64_t high, int64_t n_blocks) {
    int64_t interval = 0;
    tfg_error words = {};
    if (tfg_interval_dynamic(total_layers, seq_len, low, high, n_blocks, &interval, &words) != TFG_OK)
        throw py::value_error(words.text);
    return interval;
}

// Says by hand that a tensor was written by something tfg can not see.
void mutated(const at::Tensor &tensor) {
    if (c10::StorageImpl *storage = plain_storage(tensor)) storage->mutable_data();
}

PyMethodDef run_method = {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run)), METH_FASTCALL,
                          "run(tape or policy, key, function, args, kwargs): one region"};

void add_memory(py::module_ &m) {
    m.def("install_allocator", &install_cpu_allocator);
    m.def("is_allocator_installed", &is_cpu_allocator_installed);
    m.def("live_bytes", &cpu_live_bytes);
    m.def("peak_bytes", &cpu_peak_bytes);
    m.def("reset_peak", &reset_cpu_peak);
    m.def("take_recent_peak", &take_cpu_recent_peak);
    m.def("set_limit", &set_cpu_limit);
    m.def("set_budget", [](int64_t bytes, bool is_strict, int64_t base_bytes) { set_cpu_budget({bytes, base_bytes, is_strict}); },
          py::arg("bytes"), py::arg("is_strict"), py::arg("base_bytes") = 0);
    m.def("budget", [] { return cpu_budget().bytes; });
    m.def("is_counted", [](const at::Tensor &tensor) {
        c10::StorageImpl *storage = plain_storage(tensor);
        return storage != nullptr && is_counted(*storage);
    });
    m.def("over_budget", [] {
        const OverBudget over = cpu_over_budget();
        return py::make_tuple(over.n_times, over.needed_bytes, over.words);
    });
    m.def("count_parameters_of", &count_parameters_of);
    m.def("make_up", [] {
        const MakeUp found = make_up();
        py::dict out;
        out["parameters"] = found.parameter_bytes;
        out["gradients"] = found.gradient_bytes;
        out["activations_kept"] = found.may_leave_bytes;
        out["other"] = found.other_bytes;
        return out;
    });
    m.def("peak_place", [] {
        const Peak peak = last_peak();
        py::dict out;
        out["live_bytes"] = peak.live_bytes;
        out["kept_bytes"] = peak.kept_bytes;
        out["phase"] = phase_word(peak.phase);
        out["what"] = peak.what;
        out["block"] = peak.key < 0 ? "" : stats_of(peak.key).label;
        return out;
    });
    m.def("step_begins", [] { note_moment(Phase::STEP_BEGINS, -1); });
    m.def("samples", [] {
        py::list out;
        for (const Sample &each : samples())
            out.append(py::make_tuple(each.at_ns, each.live_bytes, each.kept_bytes, phase_word(each.phase)));
        return out;
    });
    m.def("evict", [](int64_t wanted_bytes) {
        Graveyard victims;
        return evict(wanted_bytes, victims);
    });
    m.def("fail_allocation", &fail_cpu_allocation, py::arg("k"), py::arg("is_lasting") = false);
}

// The norm, or None where torch's function is to do it: see clipping.h.
std::optional<at::Tensor> clip(const py::list &gradients, double norm_type, double max_norm, bool is_strict) {
    if (norm_type == 2.0) return clip_gradients(gradients.ptr(), TFG_CLIP_SQUARES, max_norm, is_strict);
    if (norm_type == 1.0) return clip_gradients(gradients.ptr(), TFG_CLIP_SIZES, max_norm, is_strict);
    if (norm_type == std::numeric_limits<double>::infinity()) return clip_gradients(gradients.ptr(), TFG_CLIP_LARGEST, max_norm, is_strict);
    return std::nullopt;
}

void add_tape(py::module_ &m) {
    py::class_<PyTape>(m, "Tape")
        .def(py::init<>())
        .def("close", &PyTape::close)
        .def_property_readonly("n_ops", [](const PyTape &self) { return self.tape->look().n_ops; })
        .def_property_readonly("n_handles", [](const PyTape &self) { return self.tape->n_handles; })
        .def_property("keeps_all", [](const PyTape &self) { return self.tape->keeps_all; },
                      [](PyTape &self, bool keeps) { self.tape->keeps_all = keeps; })
        .def("droppable", &droppable)
        .def("drop", &drop)
        .def("check", [](const PyTape &self) {
            tfg_error words = {};
            std::lock_guard<Mutex> lock(self.tape->mutex);
            check(tfg_tape_check(self.tape->core, &words), &words);
        });
}

} // namespace

PyObject *error_class() { return error; }
PyObject *parameter_class() { return parameter; }

PYBIND11_MODULE(_C, m) {
    error = PyErr_NewExceptionWithDoc("tfg.Error", "What tfg itself refuses, or finds wrong.", PyExc_RuntimeError, nullptr);
    m.add_object("Error", py::handle(error));
    py::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const Error &failure) {
            PyErr_SetString(error, failure.what());
        }
    });
    parameter = py::object(py::module_::import("torch.nn.parameter").attr("Parameter")).release().ptr();
    install_recorder();
    install_handles();
    install_rerun(m.ptr());
    install_rerun_reentrant(m.ptr());
    PyObject *run_function = PyCFunction_New(&run_method, nullptr);
    m.add_object("run", py::reinterpret_steal<py::object>(run_function));
    m.def("new_key", &new_key);
    m.def("stats", &stats_dict);
    m.def("reset_stats", &reset_stats);
    m.def("in_region", [] { return current_region() != nullptr; });
    m.def("mutated", &mutated);
    m.def("set_enabled", [](bool enabled) { is_enabled = enabled; });
    m.def("set_stress", [](bool drop, bool verify) { stress() = {drop, verify}; });
    m.def("dynamic_interval", &dynamic_interval);
    m.def("clip", &clip);
    m.def("has_cuda_kernels", &has_cuda_kernels);
    m.attr("BY_BUDGET") = static_cast<int>(BY_BUDGET);
    m.attr("LET_GO") = static_cast<int>(LET_GO);
    m.attr("KEEP") = static_cast<int>(KEEP);
    m.attr("TRUST_PARAMETERS") = static_cast<int>(TRUST_PARAMETERS);
    m.attr("BUILT_TORCH") = TFG_BUILT_TORCH;
    add_memory(m);
    add_tape(m);
}

} // namespace tfg
