// SPDX-License-Identifier: BSD-3-Clause
#include "make_up.h"

#include <algorithm>
#include <mutex>
#include <sstream>
#include <unordered_set>

#include "cpu_allocator.h"
#include "device_ledger.h"

namespace tfg {

namespace {

std::mutex mutex;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl>;
std::vector<WeakTensor> &parameters() {
    static auto *all = new std::vector<WeakTensor>;
    return *all;
}

void add_bytes(const at::Tensor &tensor, std::unordered_set<const void *> &seen, int64_t &bytes) {
    if (!tensor.defined() || !tensor.device().is_cpu() || !tensor.has_storage()) return;
    const c10::StorageImpl *storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    if (seen.insert(storage).second) bytes += static_cast<int64_t>(storage->nbytes());
}

} // namespace

void count_parameters_of(const std::vector<at::Tensor> &given) {
    std::lock_guard<std::mutex> lock(mutex);
    auto &all = parameters();
    all.erase(std::remove_if(all.begin(), all.end(), [](const WeakTensor &each) { return each.expired(); }), all.end());
    std::unordered_set<const c10::TensorImpl *> known; // an address is not used again while it is held weakly
    for (const WeakTensor &each : all) known.insert(each._unsafe_get_target());
    for (const at::Tensor &tensor : given)
        if (known.insert(tensor.unsafeGetTensorImpl()).second) all.emplace_back(tensor.getIntrusivePtr());
}

MakeUp make_up() {
    MakeUp found;
    std::unordered_set<const void *> seen;
    std::vector<c10::intrusive_ptr<c10::TensorImpl>> alive;
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (const WeakTensor &each : parameters())
            if (auto tensor = each.lock()) alive.push_back(std::move(tensor));
    }
    for (auto &each : alive) {
        const at::Tensor tensor(each);
        add_bytes(tensor, seen, found.parameter_bytes);
        add_bytes(tensor.grad(), seen, found.gradient_bytes);
    }
    const tfg_ledger_totals totals = ledger_totals();
    found.may_leave_bytes = totals.kept_bytes;
    found.other_bytes = std::max<int64_t>(
        0, cpu_live_bytes() + cpu_budget().base_bytes - found.parameter_bytes - found.gradient_bytes - found.may_leave_bytes);
    return found;
}

std::string make_up_words() {
    const MakeUp found = make_up();
    std::vector<std::pair<int64_t, const char *>> parts = {
        {found.parameter_bytes, "parameters"},
        {found.gradient_bytes, "gradients"},
        {found.may_leave_bytes, "activations that are in use or lean on more than they free"},
        {found.other_bytes, "other tensors (optimizer state, inputs, block inputs and what else autograd keeps by itself, temporaries)"}};
    std::stable_sort(parts.begin(), parts.end(), [](const auto &a, const auto &b) { return a.first > b.first; });
    std::ostringstream text;
    for (const auto &[bytes, what] : parts)
        if (bytes) text << (text.tellp() ? ", " : "") << bytes << " bytes of " << what;
    text << '.';
    return text.str();
}

} // namespace tfg
