// SPDX-License-Identifier: BSD-3-Clause
//
// compat: the one place that knows how torch versions differ. Supported: 2.13 to 2.15.
//
//   since 2.13  autograd nodes are held by intrusive_ptr; StorageImpl has a materialiser slot; C++20
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 13 || TORCH_VERSION_MINOR > 15
#error "tfg builds against torch 2.13 to 2.15"
#endif

namespace tfg {

using WeakNode = c10::weak_intrusive_ptr<torch::autograd::Node>;
using StrongNode = c10::intrusive_ptr<torch::autograd::Node>;

} // namespace tfg
