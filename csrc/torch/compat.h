// SPDX-License-Identifier: BSD-3-Clause
//
// compat: the one place that knows how torch versions differ. Supported: 2.13 to 2.15.
//
//   since 2.13  autograd nodes are held by intrusive_ptr; StorageImpl has a materialiser slot; C++20
//               a tensor and its Python object own each other while the tensor has other owners: neither count is 1 then
#pragma once

#include <Python.h>

#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 13 || TORCH_VERSION_MINOR > 15
#error "tfg builds against torch 2.13 to 2.15"
#endif

namespace tfg {

using WeakNode = c10::weak_intrusive_ptr<torch::autograd::Node>;
using StrongNode = c10::intrusive_ptr<torch::autograd::Node>;

// Is this reference the only one, its Python object aside, if nobody holds that either? (The object lives as long as we hold the
// tensor; its count is read without the GIL, and whoever would raise it had to hold it.)
inline bool is_held_once(const at::Tensor &tensor) {
    if (tensor.use_count() == 1) return true;
    const PyObject *object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
    return tensor.use_count() == 2 && object && Py_REFCNT(const_cast<PyObject *>(object)) == 1;
}

} // namespace tfg
