// SPDX-License-Identifier: BSD-3-Clause
#include "rerun.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include "rerun_frame.h"

namespace py = pybind11;

namespace tfg {

namespace {

PyObject *stop_class = nullptr; // an Exception: `except Exception` and always-called module hooks see the end of a second run
PyObject *identity = nullptr;   // unpack for what a second run saves itself

// The pack hook of a run: a callable. From torch 2.14 selective contexts look below a checkpoint's own hooks for the user's; that asks
// for two attributes, `_checkpoint_internal` and, while the hook is on the stack, `_user_hooks`: the pair below it.
struct PackHook {
    PyObject_HEAD
    vectorcallfunc call;
    std::shared_ptr<Frame> frame;
    std::shared_ptr<Pass> pass; // null in the first run
    PyObject *pack_below, *unpack_below;
};

PyTypeObject holder_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject pack_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

template <typename Object> Object *make(PyTypeObject &type) {
    auto *object = reinterpret_cast<Object *>(type.tp_alloc(&type, 0));
    if (!object) throw_python_error();
    return object;
}

void free_object(PyObject *object) { Py_TYPE(object)->tp_free(object); }

void holder_dealloc(PyObject *object) {
    auto *self = reinterpret_cast<Holder *>(object);
    if (self->frame && self->position != SIZE_MAX) self->frame->note_dead(self->position);
    self->frame.~shared_ptr();
    free_object(object);
}

void pack_dealloc(PyObject *object) {
    auto *self = reinterpret_cast<PackHook *>(object);
    self->frame.~shared_ptr();
    self->pass.~shared_ptr();
    Py_XDECREF(self->pack_below);
    Py_XDECREF(self->unpack_below);
    free_object(object);
}

// ----------------------------------------------------------------------------------------------------------------- the hooks
PyObject *call_pack(PyObject *self, PyObject *const *given, size_t n_given, PyObject *names);

// A pair of hooks on top while it lives; what was pushed and forgotten above it goes with it.
class HooksOnTop {
  public:
    HooksOnTop(const std::shared_ptr<Frame> &frame, const std::shared_ptr<Pass> &pass, PyObject *unpack) : hook_(make<PackHook>(pack_type)) {
        new (&hook_->frame) std::shared_ptr<Frame>(frame);
        new (&hook_->pass) std::shared_ptr<Pass>(pass);
        hook_->call = &call_pack;
        owner_ = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject *>(hook_));
        at::SavedTensorDefaultHooks::lazy_initialize();
        depth_ = at::SavedTensorDefaultHooks::get_tls_state().stack.size();
        if (const auto below = at::SavedTensorDefaultHooks::get_hooks(true)) {
            hook_->pack_below = py::handle(below->first.ptr(getPyInterpreter())).inc_ref().ptr();
            hook_->unpack_below = py::handle(below->second.ptr(getPyInterpreter())).inc_ref().ptr();
        }
        at::SavedTensorDefaultHooks::push_hooks(c10::SafePyObject(owner_.inc_ref().ptr(), getPyInterpreter()),
                                                c10::SafePyObject(py::handle(unpack).inc_ref().ptr(), getPyInterpreter()));
    }
    ~HooksOnTop() {
        while (at::SavedTensorDefaultHooks::get_tls_state().stack.size() > depth_) at::SavedTensorDefaultHooks::pop_hooks();
        Py_CLEAR(hook_->pack_below);
        Py_CLEAR(hook_->unpack_below);
    }
    HooksOnTop(const HooksOnTop &) = delete;

  private:
    PackHook *hook_;
    py::object owner_;
    size_t depth_ = 0;
};

PyObject *pack_first(const std::shared_ptr<Frame> &frame, PyObject *variable) {
    auto *holder = make<Holder>(holder_type);
    new (&holder->frame) std::shared_ptr<Frame>(frame);
    holder->position = SIZE_MAX;
    const py::object owned = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject *>(holder));
    frame->note_saved(holder, THPVariable_Unpack(variable));
    return owned.inc_ref().ptr();
}

PyObject *stop(Pass &pass) {
    pass.is_stopped = true;
    PyErr_SetString(stop_class, "all that backward needs is there: this second run of a checkpointed function ends here");
    return nullptr;
}

PyObject *pack_again(Frame &frame, Pass &pass, PyObject *variable) {
    const at::Tensor &tensor = THPVariable_Unpack(variable);
    // Without its graph: that of the second run dies with the run. A tensor without one is served as the object that it is.
    const at::Tensor value = tensor.requires_grad() ? at::Tensor(tensor.tensor_data()) : tensor;
    if (pass.is_done) return THPVariable_Wrap(value); // hooks that outlived their run, copied to another thread
    const size_t position = pass.n_saved++;
    if (position >= frame.holders.size()) {
        if (frame.stops_early) return stop(pass); // the function caught the first one and went on
        if (frame.is_forward_done)
            throw_checkpoint_error("torch.utils.checkpoint: trying to save more tensors during recomputation than during the original "
                                   "forward pass. The forward saved " + std::to_string(frame.holders.size()) + ".");
        pass.is_of_unfinished = true;
        return THPVariable_Wrap(value);
    }
    if (frame.holders[position] && position < pass.places.size())
        pass.places[position] = {value, frame.version_to_expect(pass, position, tensor)};
    if (frame.stops_early && pass.n_saved == frame.holders.size()) return stop(pass);
    return THPVariable_Wrap(value);
}

PyObject *call_pack(PyObject *self, PyObject *const *given, size_t n_given, PyObject *names) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(PyVectorcall_NARGS(n_given) == 1 && !names && THPVariable_Check(given[0]), "a pack hook takes one tensor");
    auto *hook = reinterpret_cast<PackHook *>(self);
    return hook->pass ? pack_again(*hook->frame, *hook->pass, given[0]) : pack_first(hook->frame, given[0]);
    END_HANDLE_TH_ERRORS
}

PyObject *get_is_internal(PyObject *, void *) { Py_RETURN_TRUE; }

PyObject *get_below(PyObject *self, void *) {
    auto *hook = reinterpret_cast<PackHook *>(self);
    if (!hook->pack_below) Py_RETURN_NONE;
    return PyTuple_Pack(2, hook->pack_below, hook->unpack_below);
}

PyGetSetDef pack_attributes[] = {{"_checkpoint_internal", &get_is_internal, nullptr, nullptr, nullptr},
                                 {"_user_hooks", &get_below, nullptr, nullptr, nullptr},
                                 {nullptr, nullptr, nullptr, nullptr, nullptr}};

// ------------------------------------------------------------------------------------------------------------- the second run
// One run under hooks; false with Python's error set. Once `pass` is stopped, its end by the stop is as good as any.
bool call_again(const std::shared_ptr<Frame> &frame, const std::shared_ptr<Pass> &pass) {
    const py::tuple arguments = frame->call.unpacked();
    const HooksOnTop hooks(frame, pass, identity);
    PyObject *result = frame->call.again(arguments);
    if (!result && pass->is_stopped && PyErr_ExceptionMatches(stop_class)) {
        PyErr_Clear();
        return true;
    }
    Py_XDECREF(result);
    return result != nullptr;
}

Pass &run_again(const std::shared_ptr<Frame> &frame, const Scope &scope) {
    TORCH_CHECK(!frame->is_running_here(scope), "tfg.checkpoint: a saved tensor of a checkpointed function was asked for while that "
                "function is being run again to make it. Does it read its own graph?");
    const std::shared_ptr<Pass> pass = frame->begin(scope);
    try {
        if (!call_again(frame, pass)) throw_python_error();
        pass->is_done = true;
        frame->check(*pass);
    } catch (...) {
        pass->is_done = true;
        frame->end(pass.get());
        throw;
    }
    return *pass;
}

[[noreturn]] void throw_handed_out_before(const Scope &scope) {
    std::string words = "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already unpacked once. ";
    if (scope.exec_group_ref)
        words += "Performing two backward calls that overlap is not allowed while under the torch.utils.checkpoint.GraphExecGroup context: "
                 "what one of them used up the other would need. ";
    throw_checkpoint_error(words + "A backward of your own must read ctx.saved_tensors only once; tfg.engine(\"replay\") has no such limit.");
}

PyObject *hand_out(const Holder &holder) {
    const std::shared_ptr<Frame> frame = holder.frame;
    const Scope scope = Scope::now();
    Pass *pass = frame->find(scope, holder.position);
    if (!pass) pass = &run_again(frame, scope);
    Pass::Place &place = pass->places[holder.position];
    if (place.is_handed_out) throw_handed_out_before(scope);
    TORCH_INTERNAL_ASSERT(place.tensor.defined(), "tfg.checkpoint: position ", holder.position, " was not made");
    if (place.version->has_moved()) {
        std::ostringstream what;
        what << place.tensor.toString() << " " << place.tensor.sizes();
        place.version->refuse(what.str());
    }
    place.is_handed_out = true;
    at::Tensor tensor = std::move(place.tensor);
    if (scope.is_nobodys()) frame->end(pass);
    return THPVariable_Wrap(std::move(tensor));
}

// A CheckpointError that is set is handed to the frame's `on_error`, which raises a fuller one.
void explain(const Frame &frame) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback) PyException_SetTraceback(value, traceback);
    const py::object owned_type = py::reinterpret_steal<py::object>(type), owned = py::reinterpret_steal<py::object>(value);
    const py::object owned_traceback = py::reinterpret_steal<py::object>(traceback);
    if (PyErr_GivenExceptionMatches(type, checkpoint_error_class().ptr())) Py_XDECREF(PyObject_CallOneArg(frame.on_error.ptr(), value));
    if (!PyErr_Occurred()) PyErr_Restore(owned_type.inc_ref().ptr(), owned.inc_ref().ptr(), owned_traceback.inc_ref().ptr());
}

PyObject *unpack_unexplained(const Holder &holder) {
    HANDLE_TH_ERRORS
    return hand_out(holder);
    END_HANDLE_TH_ERRORS
}

PyObject *unpack(PyObject *, PyObject *object) {
    if (Py_TYPE(object) != &holder_type) {
        PyErr_SetString(PyExc_TypeError, "tfg: not a holder");
        return nullptr;
    }
    const auto owned = py::reinterpret_borrow<py::object>(object); // a nested backward may let go of it
    const auto &holder = *reinterpret_cast<Holder *>(object);
    PyObject *tensor = unpack_unexplained(holder);
    if (!tensor && holder.frame->on_error) {
        HANDLE_TH_ERRORS
        explain(*holder.frame);
        END_HANDLE_TH_ERRORS
    }
    return tensor;
}

PyObject *same(PyObject *, PyObject *object) {
    Py_INCREF(object);
    return object;
}

// --------------------------------------------------------------------------------------------------------------- the first run
PyMethodDef unpack_method = {"tfg_unpack_holder", &unpack, METH_O, "the saved tensor, from a second run of the function"};
PyMethodDef identity_method = {"tfg_same", &same, METH_O, "what it is given"};
PyObject *unpack_function = nullptr;

PyObject *run_first(const std::shared_ptr<Frame> &frame, PyObject *function, PyObject *arguments, PyObject *keywords) {
    const HooksOnTop hooks(frame, nullptr, unpack_function);
    const WithEngine engine(frame->call.ambient.engine);
    const WithoutDynamo without_dynamo;
    PyObject *result = PyObject_Call(function, arguments, keywords);
    frame->is_forward_done = result != nullptr;
    return result;
}

// rerun(flags, function, again, on_error, arguments, keywords): `again` is what a second run calls, None for `function`.
PyObject *rerun(PyObject *, PyObject *const *given, Py_ssize_t n_given) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(n_given == 6, "rerun(flags, function, again, on_error, arguments, keywords) got ", n_given, " arguments");
    PyObject *function = given[1], *again = given[2], *on_error = given[3], *arguments = given[4], *keywords = given[5];
    if (!c10::GradMode::is_enabled()) return PyObject_Call(function, arguments, keywords);
    const long flags = PyLong_AsLong(given[0]);
    if (flags == -1 && PyErr_Occurred()) return nullptr;
    const auto frame = std::make_shared<Frame>(flags, again == Py_None ? function : again, arguments, keywords);
    if (on_error != Py_None) frame->on_error = py::reinterpret_borrow<py::object>(on_error);
    return run_first(frame, function, arguments, keywords);
    END_HANDLE_TH_ERRORS
}

// elsewhere(arguments): the types of the devices other than the CPU that tensors in it lie on, as a tuple of names. Looks into tuples,
// lists and dicts, not deeper than `most_levels`: one may hold itself.
constexpr int most_levels = 16;

void note_devices(PyObject *value, int level, std::vector<c10::DeviceType> &found) {
    if (THPVariable_Check(value)) {
        const auto type = THPVariable_Unpack(value).device().type();
        if (type != c10::DeviceType::CPU && type != c10::DeviceType::Meta && std::find(found.begin(), found.end(), type) == found.end())
            found.push_back(type);
    } else if (level < most_levels && PyDict_Check(value)) {
        PyObject *key, *item;
        for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item);) note_devices(item, level + 1, found);
    } else if (level < most_levels && (PyTuple_Check(value) || PyList_Check(value))) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) note_devices(PySequence_Fast_GET_ITEM(value, i), level + 1, found);
    }
}

PyObject *elsewhere(PyObject *, PyObject *value) {
    HANDLE_TH_ERRORS
    std::vector<c10::DeviceType> found;
    note_devices(value, 0, found);
    py::tuple names(found.size());
    for (size_t i = 0; i < found.size(); ++i) names[i] = c10::DeviceTypeName(found[i], /*lower_case=*/true);
    return names.release().ptr();
    END_HANDLE_TH_ERRORS
}

PyMethodDef elsewhere_method = {"elsewhere", &elsewhere, METH_O, "elsewhere(arguments): types of devices, not the CPU, that tensors in it are on"};
PyMethodDef rerun_method = {"rerun", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&rerun)), METH_FASTCALL,
                            "rerun(flags, function, again, on_error, arguments, keywords): a call whose function runs again in backward"};

void ready(PyTypeObject &type, const char *name, Py_ssize_t size_bytes, unsigned long flags, destructor dealloc) {
    type.tp_name = name;
    type.tp_basicsize = size_bytes;
    type.tp_flags = Py_TPFLAGS_DEFAULT | flags;
    type.tp_dealloc = dealloc;
    if (PyType_Ready(&type) < 0) throw_python_error();
}

PyObject *engine(PyObject *, PyObject *) { return PyLong_FromLong(static_cast<long>(engine_here())); }

template <void (*choose)(Engine)> PyObject *choose_by_number(PyObject *, PyObject *number) {
    HANDLE_TH_ERRORS
    const long wanted = PyLong_AsLong(number);
    if (wanted == -1 && PyErr_Occurred()) return nullptr;
    TORCH_CHECK_VALUE(wanted >= 0 && wanted <= static_cast<long>(Engine::INSIDE_RERUN), "no engine ", wanted);
    choose(static_cast<Engine>(wanted));
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyMethodDef engine_methods[] = {
    {"engine", &engine, METH_NOARGS, "the engine of this thread: REPLAY, RERUN, or INSIDE_RERUN, where it follows from a region around"},
    {"choose_engine", &choose_by_number<&choose_engine>, METH_O, "for this thread"},
    {"choose_default_engine", &choose_by_number<&choose_default_engine>, METH_O, "for threads that have not chosen"},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

bool is_rerun_hook_on_top() {
    const auto &stack = at::SavedTensorDefaultHooks::get_tls_state().stack;
    return !stack.empty() && Py_TYPE(stack.top().first.ptr(getPyInterpreter())) == &pack_type;
}

void install_rerun(PyObject *module) {
    ready(holder_type, "tfg._C.Holder", sizeof(Holder), 0, &holder_dealloc);
    pack_type.tp_vectorcall_offset = offsetof(PackHook, call);
    pack_type.tp_call = &PyVectorcall_Call;
    pack_type.tp_getset = pack_attributes;
    ready(pack_type, "tfg._C.PackHook", sizeof(PackHook), Py_TPFLAGS_HAVE_VECTORCALL, &pack_dealloc);
    identity = PyCFunction_New(&identity_method, nullptr);
    unpack_function = PyCFunction_New(&unpack_method, nullptr);
    stop_class = PyErr_NewException("tfg._C.StopRerun", PyExc_Exception, nullptr);
    Py_INCREF(stop_class);
    PyModule_AddObject(module, "StopRerun", stop_class);
    PyModule_AddObject(module, "rerun", PyCFunction_New(&rerun_method, nullptr));
    PyModule_AddObject(module, "elsewhere", PyCFunction_New(&elsewhere_method, nullptr));
    PyModule_AddFunctions(module, engine_methods);
    PyModule_AddIntConstant(module, "REPLAY", static_cast<long>(Engine::REPLAY));
    PyModule_AddIntConstant(module, "RERUN", static_cast<long>(Engine::RERUN));
    PyModule_AddIntConstant(module, "INSIDE_RERUN", static_cast<long>(Engine::INSIDE_RERUN));
    PyModule_AddIntConstant(module, "PRESERVE_RNG", PRESERVE_RNG);
    PyModule_AddIntConstant(module, "CHECK_METADATA", CHECK_METADATA);
    PyModule_AddIntConstant(module, "EARLY_STOP", EARLY_STOP);
}

} // namespace tfg
