// SPDX-License-Identifier: BSD-3-Clause
#include "handles.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "error.h"
#include "peak.h"
#include "module.h"
#include "recorder.h"
#include "replay.h"

namespace tfg {

SavedVersion::SavedVersion(const at::Tensor &tensor) : node(StrongNode()) {
    counter = tensor.unsafeGetTensorImpl()->version_counter();
    saved = counter.enabled() ? counter.current_version() : 0;
    if (const auto &fn = tensor.grad_fn()) {
        node = WeakNode(fn);
        output_nr = static_cast<uint32_t>(tensor.output_nr());
    }
}

void SavedVersion::check(const std::string &what) const {
    if (!is_moved()) return;
    std::string text = "one of the variables needed for gradient computation has been modified by an inplace operation: [" + what + "]";
    if (StrongNode fn = node.lock()) text += ", which is output " + std::to_string(output_nr) + " of " + fn->name() + ",";
    text += " is at version " + std::to_string(counter.current_version()) + "; expected version " + std::to_string(saved) + " instead.";
    if (torch::autograd::AnomalyMode::is_enabled())
        text += " Hint: the backtrace further above shows the operation that failed to compute its gradient. The variable in question"
                " was changed in there or anywhere later. Good luck!";
    else
        text += " Hint: enable anomaly detection to find the operation that failed to compute its gradient, with"
                " torch.autograd.set_detect_anomaly(True).";
    TORCH_CHECK(false, text);
}

void SavedVariableWatch::look(const at::Tensor &tensor) {
    if (swapped.defined() || !tensor.has_storage() || tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage)
        return;
    swapped = tensor.detach();
}

namespace {

// Pack is called while the saving node is the newest: an output's grad_fn is that node, an input's is older.
bool is_saved_as_output(const at::Tensor &tensor) {
    const auto &fn = tensor.grad_fn();
    return fn && fn->sequence_nr() + 1 == at::sequence_number::peek();
}

struct Handle {
    PyObject_HEAD
    std::shared_ptr<Tape> tape;
    int32_t value;
    Geometry geometry;
    SavedVersion version;
    std::shared_ptr<SavedVariableWatch> input; // null for an output
};

struct Kept {
    PyObject_HEAD
    PyObject *packed; // an outer hook's, or a tensor of Python's
    PyObject *outer_unpack;
    at::Tensor tensor; // a detached alias, where `packed` is null
    SavedVersion version;
};

std::string describe(const Geometry &geometry) {
    std::ostringstream text;
    text << "CPU" << c10::toString(geometry.dtype) << "Type " << c10::IntArrayRef(geometry.sizes_elems);
    return text.str();
}

void handle_dealloc(PyObject *object) {
    auto *self = reinterpret_cast<Handle *>(object);
    {
        Graveyard dead;
        std::shared_ptr<Tape> tape = std::move(self->tape);
        std::lock_guard<std::mutex> lock(tape->mutex);
        tfg_tape_release(tape->core, self->value);
        tape->n_handles -= 1;
        const auto view = tape->look();
        const tfg_value &value = view.values[self->value];
        const tfg_storage &storage = view.storages[value.storage];
        Slot &slot = tape->slots[static_cast<size_t>(value.storage)];
        slot.watch->n_handles -= 1;
        // A tape that lets go promised its roots to others. One that keeps holds them as long as autograd would.
        const bool is_root = !tape->keeps && storage.current != TFG_NONE && view.values[storage.current].state == TFG_VALUE_ROOT &&
                             (!tape->is_pruned || view.values[storage.current].is_needed);
        if (storage.n_handles == 0 && !is_root) {
            if (slot.strong) dead.push_back(std::move(slot.strong));
            if (slot.place.is_somewhere())
                if (StoragePtr kept = withdraw(slot.place)) dead.push_back(std::move(kept));
        }
        tape->clear_if_idle(dead);
    }
    self->geometry.~Geometry();
    self->version.~SavedVersion();
    self->input.~shared_ptr();
    self->tape.~shared_ptr();
    Py_TYPE(object)->tp_free(object);
}

void kept_dealloc(PyObject *object) {
    auto *self = reinterpret_cast<Kept *>(object);
    Py_XDECREF(self->packed);
    Py_XDECREF(self->outer_unpack);
    self->tensor.~Tensor();
    self->version.~SavedVersion();
    Py_TYPE(object)->tp_free(object);
}

PyTypeObject handle_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject kept_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject *pack_handle(Region &region, int32_t slot_id, const at::Tensor &tensor) {
    Tape &tape = *region.tape;
    PyObject *object = handle_type.tp_alloc(&handle_type, 0);
    if (!object) throw python_error();
    auto *self = reinterpret_cast<Handle *>(object);
    Slot &slot = tape.slots[static_cast<size_t>(slot_id)];
    self->value = tape.look().storages[slot_id].current;
    new (&self->tape) std::shared_ptr<Tape>(tape.shared_from_this());
    new (&self->geometry) Geometry(geometry_of(tensor));
    new (&self->version) SavedVersion(tensor);
    new (&self->input) std::shared_ptr<SavedVariableWatch>();
    if (!is_saved_as_output(tensor)) {
        self->input = std::make_shared<SavedVariableWatch>(tensor, plain_storage(tensor));
        region.saved_inputs.emplace_back(tensor, self->input);
    }
    slot.watch->n_handles += 1;
    tfg_tape_hold(tape.core, self->value);
    tape.n_handles += 1;
    if (!slot.strong && !slot.place.is_somewhere()) slot.strong = slot.weak.lock();
    tape.note_held(slot_id);
    return object;
}

PyObject *pack_kept(PyObject *variable, const at::Tensor &tensor, const Region *region) {
    PyObject *object = kept_type.tp_alloc(&kept_type, 0);
    if (!object) throw python_error();
    auto *self = reinterpret_cast<Kept *>(object);
    self->packed = self->outer_unpack = nullptr;
    new (&self->tensor) at::Tensor();
    new (&self->version) SavedVersion(tensor);
    if (region && region->outer_pack) {
        self->version.counter = c10::VariableVersion(); // under hooks of the user's, core does not check either
        self->packed = PyObject_CallFunctionObjArgs(region->outer_pack, variable, nullptr);
        self->outer_unpack = region->outer_unpack;
        Py_INCREF(self->outer_unpack);
        if (!self->packed) {
            Py_DECREF(object);
            throw python_error();
        }
    } else if (tensor.grad_fn()) {
        self->tensor = tensor.detach();
    } else {
        Py_INCREF(variable);
        self->packed = variable;
    }
    return object;
}

PyObject *pack(PyObject *, PyObject *variable) {
    HANDLE_TH_ERRORS
    const at::Tensor &tensor = THPVariable_Unpack(variable);
    Region *region = current_region();
    while (region && region->parent) region = region->parent; // hooks belong to the outermost region
    if (Region *inner = current_region()) {
        Tape &tape = *inner->tape;
        std::lock_guard<std::mutex> lock(tape.mutex);
        c10::StorageImpl *storage = plain_storage(tensor);
        const int32_t id = storage ? tape.find(storage) : TFG_NONE;
        if (id != TFG_NONE) {
            tape.notice_foreign_writes(id);
            const tfg_storage &known = tape.look().storages[id];
            inner->stats.saved_bytes += known.n_handles == 0 ? known.size_bytes : 0;
            if (!(known.flags & (TFG_STORAGE_EXTERNAL | TFG_STORAGE_OPAQUE)) && known.current != TFG_NONE)
                return pack_handle(*inner, id, tensor);
            tape.slots[static_cast<size_t>(id)].is_saved = true;
        }
    }
    return pack_kept(variable, tensor, region);
    END_HANDLE_TH_ERRORS
}

at::Tensor serve(const Handle &handle) {
    handle.version.check(describe(handle.geometry));
    if (handle.input) {
        if (auto variable = handle.input->variable.lock()) handle.input->look(at::Tensor(variable));
        if (handle.input->swapped.defined()) return handle.input->swapped;
    }
    StoragePtr storage;
    int64_t key;
    {
        std::lock_guard<std::mutex> lock(handle.tape->mutex);
        const auto view = handle.tape->look();
        key = handle.tape->records[static_cast<size_t>(view.values[handle.value].producer)].key;
        const Slot &slot = handle.tape->slots[static_cast<size_t>(view.values[handle.value].storage)];
        storage = slot.live(); // changed bytes too, if the version did not move: as autograd would serve them
    }
    if (handle.tape->keeps) note_unpack(key);
    if (!storage) {
        pybind11::gil_scoped_release no_gil;
        storage = materialise(handle.tape, handle.value);
    }
    const Geometry &geometry = handle.geometry;
    at::Tensor tensor =
        tensor_from(storage, geometry.sizes_elems, geometry.strides_elems, geometry.offset_elems, geometry.dtype);
    tensor.unsafeGetTensorImpl()->set_version_counter(handle.version.counter);
    return tensor;
}

PyObject *unpack_kept(Kept *self) {
    if (self->outer_unpack) return PyObject_CallFunctionObjArgs(self->outer_unpack, self->packed, nullptr);
    const at::Tensor &tensor = self->packed ? THPVariable_Unpack(self->packed) : self->tensor;
    if (self->version.is_moved()) {
        std::ostringstream what;
        what << tensor.toString() << " " << tensor.sizes();
        self->version.check(what.str());
    }
    if (self->packed) {
        Py_INCREF(self->packed);
        return self->packed;
    }
    return THPVariable_Wrap(self->tensor);
}

PyObject *unpack(PyObject *, PyObject *object) {
    HANDLE_TH_ERRORS
    if (Py_TYPE(object) == &kept_type) return unpack_kept(reinterpret_cast<Kept *>(object));
    if (Py_TYPE(object) != &handle_type) throw torch::TypeError("tfg: not a handle");
    try {
        return THPVariable_Wrap(serve(*reinterpret_cast<Handle *>(object)));
    } catch (const Error &error) {
        PyErr_SetString(error_class(), error.what());
        return nullptr;
    }
    END_HANDLE_TH_ERRORS
}

PyMethodDef pack_method = {"tfg_pack", &pack, METH_O, "what autograd holds in place of a saved tensor"};
PyMethodDef unpack_method = {"tfg_unpack", &unpack, METH_O, "the saved tensor, replayed where it was let go"};
PyObject *pack_function = nullptr, *unpack_function = nullptr;

void ready(PyTypeObject &type, const char *name, Py_ssize_t size_bytes, destructor dealloc) {
    type.tp_name = name;
    type.tp_basicsize = size_bytes;
    type.tp_flags = Py_TPFLAGS_DEFAULT;
    type.tp_dealloc = dealloc;
    if (PyType_Ready(&type) < 0) throw python_error();
}

} // namespace

void install_handles() {
    ready(handle_type, "tfg._C.Handle", sizeof(Handle), &handle_dealloc);
    ready(kept_type, "tfg._C.Kept", sizeof(Kept), &kept_dealloc);
    pack_function = PyCFunction_New(&pack_method, nullptr);
    unpack_function = PyCFunction_New(&unpack_method, nullptr);
}

void push_our_hooks() {
    Py_INCREF(pack_function);
    Py_INCREF(unpack_function);
    at::SavedTensorDefaultHooks::push_hooks(c10::SafePyObject(pack_function, getPyInterpreter()),
                                            c10::SafePyObject(unpack_function, getPyInterpreter()));
}

} // namespace tfg
