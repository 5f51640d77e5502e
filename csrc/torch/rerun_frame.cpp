// SPDX-License-Identifier: BSD-3-Clause
#include "rerun_frame.h"

#include <c10/core/AutogradState.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace tfg {

namespace {

const char *const tip =
    "\nTip: debug=True, or `with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):` around the forward, adds the operators of "
    "both runs to this error. Under torch.compile with dynamic shapes the second run may have picked another graph than the first: "
    "name the varying sizes with torch._dynamo.mark_dynamic(), or keep the order of graphs with "
    "torch._C._dynamo.eval_frame._set_lru_cache(False).";

// Lives in the graph task: when that is gone, by whatever way, so is what the pass made and nobody asked for.
struct EndOfTask {
    std::weak_ptr<Frame> frame;
    std::weak_ptr<Pass> pass;

    EndOfTask(std::weak_ptr<Frame> of, std::weak_ptr<Pass> which) : frame(std::move(of)), pass(std::move(which)) {}
    EndOfTask(const EndOfTask &) = delete;
    ~EndOfTask() {
        if (!Py_IsInitialized()) return;
        py::gil_scoped_acquire gil;
        const auto alive = frame.lock();
        const auto over = pass.lock();
        if (alive && over) alive->end(over.get());
    }
};

bool is_odd(const at::Tensor &tensor) {
    const at::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    return impl->is_python_dispatch() || impl->has_symbolic_sizes_strides();
}

} // namespace

// ------------------------------------------------------------------------------------------------------------------ metadata
SavedMetadata::SavedMetadata(const at::Tensor &tensor) : dtype(tensor.scalar_type()), device(tensor.device()) {
    if (is_odd(tensor))
        odd_shape = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)).attr("shape");
    else if (!tensor.is_nested())
        sizes = tensor.sizes();
}

bool SavedMetadata::operator==(const SavedMetadata &other) const {
    if (dtype != other.dtype || device != other.device || !odd_shape != !other.odd_shape) return false;
    return odd_shape ? odd_shape.equal(other.odd_shape) : sizes == other.sizes;
}

std::string SavedMetadata::words() const {
    std::ostringstream text;
    text << "shape ";
    if (odd_shape)
        text << py::str(odd_shape).cast<std::string>();
    else
        text << c10::IntArrayRef(sizes);
    text << ", dtype torch." << torch::getTHPDtype(dtype)->name << ", device " << device;
    return text.str();
}

// --------------------------------------------------------------------------------------------------------------------- scope
Scope Scope::now() {
    Scope scope;
    const auto &group = c10::AutogradState::get_tls_state().get_graph_exec_group();
    if (group.has_value())
        scope.exec_group_ref = py::weakref(py::handle(group->ptr(getPyInterpreter())));
    else
        scope.graph_task = torch::autograd::get_current_graph_task_id();
    return scope;
}

bool Scope::same(const Scope &other) const {
    if (!exec_group_ref != !other.exec_group_ref) return false;
    return exec_group_ref ? exec_group_ref.is(other.exec_group_ref) : graph_task >= 0 && graph_task == other.graph_task;
}

bool Scope::is_over() const { return exec_group_ref && exec_group_ref().is_none(); }

Pass::Pass(Scope whose, size_t n_positions) : scope(std::move(whose)), places(n_positions) {}

// --------------------------------------------------------------------------------------------------------------------- frame
void Frame::note_saved(Holder *holder, const at::Tensor &tensor) {
    if (checks_metadata) metadata.emplace_back(tensor);
    if (tensor.is_leaf() && tensor.requires_grad() && !tensor.is_inference())
        parameters.push_back({holders.size(), tensor.unsafeGetTensorImpl(), static_cast<uint32_t>(tensor._version())});
    holder->position = holders.size();
    holders.push_back(holder);
}

void Frame::note_dead(size_t position) {
    std::vector<at::Tensor> dying; // dies last: a tensor's end may run Python
    holders[position] = nullptr;
    for (const auto &pass : passes)
        if (position < pass->places.size()) dying.push_back(std::move(pass->places[position].tensor));
}

SavedVersion Frame::version_to_expect(Pass &pass, size_t position, const at::Tensor &tensor) const {
    SavedVersion version(tensor);
    while (pass.n_parameters < parameters.size() && parameters[pass.n_parameters].position < position) pass.n_parameters += 1;
    if (pass.n_parameters == parameters.size()) return version;
    const SavedParameter &first = parameters[pass.n_parameters];
    if (first.position == position && first.tensor == tensor.unsafeGetTensorImpl()) version.saved = first.version;
    return version;
}

Pass *Frame::find(const Scope &scope, size_t position) {
    Pass *found = nullptr;
    for (const auto &pass : passes) {
        if (!pass->is_done || !pass->scope.same(scope) || position >= pass->places.size()) continue;
        if (pass->places[position].tensor.defined()) return pass.get();
        found = pass.get();
    }
    return found;
}

bool Frame::is_running_here(const Scope &scope) const {
    for (const auto &pass : passes)
        if (!pass->is_done && pass->owner == std::this_thread::get_id() && pass->scope.same(scope)) return true;
    return false;
}

std::shared_ptr<Pass> Frame::begin(Scope scope) {
    std::vector<std::shared_ptr<Pass>> dying;
    for (size_t i = passes.size(); i-- > 0;)
        if (passes[i]->scope.is_over()) {
            dying.push_back(std::move(passes[i]));
            passes.erase(passes.begin() + static_cast<std::ptrdiff_t>(i));
        }
    auto pass = std::make_shared<Pass>(std::move(scope), holders.size());
    passes.push_back(pass);
    if (pass->scope.graph_task >= 0) {
        auto end = std::make_shared<EndOfTask>(weak_from_this(), pass);
        torch::autograd::Engine::get_default_engine().queue_callback([end] {});
    }
    return pass;
}

void Frame::end(const Pass *pass) {
    for (size_t i = 0; i < passes.size(); ++i)
        if (passes[i].get() == pass) {
            const std::shared_ptr<Pass> dying = std::move(passes[i]);
            passes.erase(passes.begin() + static_cast<std::ptrdiff_t>(i));
            return;
        }
}

void Frame::check(const Pass &pass) const {
    if (pass.is_of_unfinished) return;
    if (pass.n_saved != holders.size())
        throw_checkpoint_error("torch.utils.checkpoint: A different number of tensors was saved during the original forward and "
                               "recomputation.\nThe forward saved " + std::to_string(holders.size()) + ", calling the function again " +
                               std::to_string(pass.n_saved) + ": it did not do what it did before." + tip);
    std::string words;
    for (size_t i = 0; checks_metadata && i < holders.size(); ++i) {
        if (!holders[i]) continue;
        const SavedMetadata again(pass.places[i].tensor);
        if (!(metadata[i] == again))
            words += "tensor at position " + std::to_string(i) + ":\nsaved metadata: " + metadata[i].words() +
                     "\nrecomputed metadata: " + again.words() + "\n";
    }
    if (!words.empty())
        throw_checkpoint_error("torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than during "
                               "the forward pass.\n" + words + tip);
}

py::object checkpoint_error_class() { return py::module_::import("torch.utils.checkpoint").attr("CheckpointError"); }

void throw_checkpoint_error(const std::string &words) {
    PyErr_SetString(checkpoint_error_class().ptr(), words.c_str());
    throw_python_error();
}

} // namespace tfg
