// SPDX-License-Identifier: BSD-3-Clause
#include "clipping.h"

#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/clip_loops.h"
#include "error.h"
#include "recorder.h"

#ifdef TFG_WITH_CUDA
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "cuda/launch.h"
#endif

namespace tfg {

namespace {

constexpr int64_t min_elems_a_thread = 32768; // below, waking a thread takes longer than it saves

const c10::DispatchKeySet &dense_keys() {
    using c10::DispatchKey;
    static const c10::DispatchKeySet keys =
        c10::DispatchKeySet({DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU, DispatchKey::CUDA,
                             DispatchKey::AutogradCUDA, DispatchKey::AutocastCUDA, DispatchKey::ADInplaceOrView});
    return keys;
}

std::optional<tfg_float> kind_of(c10::ScalarType dtype) {
    switch (dtype) {
    case c10::ScalarType::Double: return TFG_FLOAT64;
    case c10::ScalarType::Float: return TFG_FLOAT32;
    case c10::ScalarType::BFloat16: return TFG_BFLOAT16;
    case c10::ScalarType::Half: return TFG_FLOAT16;
    default: return std::nullopt;
    }
}

// A mode, a transform, a tracer or a region of ours wants to see the operators.
bool is_watched() {
    return current_region() || at::impl::torch_function_mode_enabled() || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
           c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
           c10::InferenceMode::is_enabled() || torch::jit::tracer::isTracing();
}

bool is_dense(const at::Tensor &gradient) {
    const c10::TensorImpl *impl = gradient.unsafeGetTensorImpl();
    return (impl->key_set().raw_repr() & ~dense_keys().raw_repr()) == 0 && impl->has_storage() && impl->layout() == c10::kStrided &&
           !impl->has_symbolic_sizes_strides() && !gradient.is_inference() && gradient.is_non_overlapping_and_dense() &&
           !gradient._fw_grad(/*level=*/0).defined() && kind_of(gradient.scalar_type());
}

// Two of them share a byte: then torch's order of products decides.
bool overlap(const std::vector<tfg_clip_tensor> &tensors) {
    std::vector<std::pair<const char *, const char *>> spans;
    spans.reserve(tensors.size());
    for (const tfg_clip_tensor &each : tensors) {
        const char *begin = static_cast<const char *>(each.at);
        if (each.n_elems > 0) spans.emplace_back(begin, begin + each.n_elems * tfg_float_bytes(each.kind));
    }
    std::sort(spans.begin(), spans.end());
    for (size_t i = 1; i < spans.size(); ++i)
        if (spans[i].first < spans[i - 1].second) return true;
    return false;
}

struct Gradients {
    std::vector<at::Tensor> tensors;
    std::vector<tfg_clip_tensor> views; // of `tensors`, in their order
    c10::Device device = c10::kCPU;
    c10::ScalarType norm_dtype = c10::ScalarType::Undefined;
    int64_t n_elems = 0, n_chunks = 0;

    // False where they are not for us.
    bool take(PyObject *list, tfg_clip_norm norm) {
        const Py_ssize_t n = PyList_GET_SIZE(list);
        for (Py_ssize_t i = 0; i < n; ++i) {
            PyObject *object = PyList_GET_ITEM(list, i);
            if (!THPVariable_CheckExact(object) || !add(THPVariable_Unpack(object))) return false;
            if (norm == TFG_CLIP_LARGEST && views.back().n_elems == 0) return false; // torch raises
        }
        if (overlap(views)) return false;
        tfg_error words = {};
        check(tfg_clip_cut(views.data(), static_cast<int64_t>(views.size()), &n_chunks, &words), &words);
        return true;
    }

    // To be called before the elements are written: a copy-on-write storage gets bytes of its own, a watcher is told.
    void open_for_writing() {
        for (size_t i = 0; i < tensors.size(); ++i) views[i].at = tensors[i].mutable_data_ptr();
    }

    void bump_versions() const {
        for (const at::Tensor &each : tensors) each.unsafeGetTensorImpl()->bump_version();
    }

  private:
    bool add(const at::Tensor &gradient) {
        if (!gradient.defined() || !is_dense(gradient)) return false;
        if (tensors.empty()) device = gradient.device();
        if (gradient.device() != device || (!device.is_cpu() && !(device.is_cuda() && has_cuda_kernels()))) return false;
        norm_dtype = tensors.empty() ? gradient.scalar_type() : c10::promoteTypes(norm_dtype, gradient.scalar_type());
        n_elems += gradient.numel();
        tensors.push_back(gradient);
        views.push_back({const_cast<void *>(gradient.const_data_ptr()), gradient.numel(), 0, *kind_of(gradient.scalar_type())});
        return true;
    }
};

// run(first_chunk, end_chunk) over all chunks, on torch's threads.
template <typename Run> void over_chunks(const Gradients &given, const Run &run) {
    const int64_t grain = 1 + given.n_chunks * min_elems_a_thread / std::max<int64_t>(given.n_elems, 1);
    at::parallel_for(0, given.n_chunks, grain, run);
}

std::optional<at::Tensor> clip_on_cpu(Gradients &given, tfg_clip_norm norm, double max_norm, bool is_strict) {
    const int64_t n = static_cast<int64_t>(given.views.size());
    std::vector<double> partials(static_cast<size_t>(given.n_chunks));
    over_chunks(given, [&](int64_t first, int64_t end) {
        tfg_cpu_clip_partials(norm, given.views.data(), n, first, end, partials.data());
    });
    const double joined = tfg_clip_join_partials(norm, partials.data(), given.n_chunks);
    const double total = tfg_clip_total(norm, joined, tfg_clip_overflow(*kind_of(given.norm_dtype)));
    if (is_strict && !std::isfinite(total)) return std::nullopt;
    const double coefficient = tfg_clip_coefficient(max_norm, total);
    if (coefficient != 1.0) {
        given.open_for_writing();
        over_chunks(given, [&](int64_t first, int64_t end) { tfg_cpu_clip_scale(coefficient, given.views.data(), n, first, end); });
    }
    given.bump_versions();
    // Not scalar_tensor of the dtype: that one refuses what rounds to infinity.
    return at::scalar_tensor(total, at::kDouble).to(given.norm_dtype);
}

#ifdef TFG_WITH_CUDA
// Everything stays on the device: the second pass reads the coefficient there.
std::optional<at::Tensor> clip_on_cuda(Gradients &given, tfg_clip_norm norm, double max_norm, bool is_strict) {
    const c10::OptionalDeviceGuard guard(given.device);
    const c10::impl::VirtualGuardImpl runtime(given.device.type());
    auto *stream = static_cast<tfg_cuda_stream>(runtime.getStreamNativeHandle(runtime.getStream(given.device)));
    const auto doubles = at::TensorOptions().dtype(at::kDouble).device(given.device);
    const at::Tensor partials = at::empty({given.n_chunks}, doubles);
    const at::Tensor result = at::empty({2}, doubles); // total, coefficient
    double *total = static_cast<double *>(result.mutable_data_ptr());
    const int64_t n = static_cast<int64_t>(given.views.size());
    auto *sums = static_cast<double *>(partials.mutable_data_ptr());
    tfg_error words = {};
    check(tfg_cuda_clip_partials(norm, given.views.data(), n, sums, stream, &words), &words);
    check(tfg_cuda_clip_finish(norm, sums, given.n_chunks, max_norm, tfg_clip_overflow(*kind_of(given.norm_dtype)), total, total + 1,
                               stream, &words), &words);
    if (is_strict && !std::isfinite(result[0].item<double>())) return std::nullopt;
    given.open_for_writing();
    check(tfg_cuda_clip_scale(total + 1, given.views.data(), n, stream, &words), &words);
    given.bump_versions();
    return result[0].to(given.norm_dtype, /*non_blocking=*/false, /*copy=*/true);
}
#endif

} // namespace

bool has_cuda_kernels() {
#ifdef TFG_WITH_CUDA
    return true;
#else
    return false;
#endif
}

std::optional<at::Tensor> clip_gradients(PyObject *gradients, tfg_clip_norm norm, double max_norm, bool is_strict) {
    Gradients given;
    if (is_watched() || !given.take(gradients, norm)) return std::nullopt;
    const pybind11::gil_scoped_release no_gil;
#ifdef TFG_WITH_CUDA
    if (given.device.is_cuda()) return clip_on_cuda(given, norm, max_norm, is_strict);
#endif
    return clip_on_cpu(given, norm, max_norm, is_strict);
}

} // namespace tfg
