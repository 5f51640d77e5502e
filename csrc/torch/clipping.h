// SPDX-License-Identifier: BSD-3-Clause
//
// clipping: one norm over many gradients, and the gradients scaled in place.
//
// For us are plain gradients (dense, strided, float64, float32, bfloat16, float16, elements side by side in memory in whatever
// order of dimensions) that do not overlap and lie all on the CPU, or all on one CUDA device if this binary has the kernels.
// Everything else is torch's: sparse, complex, DTensor and other subclasses, several devices, inference tensors, forward-mode
// tangents, a dispatch mode or a transform that wants to see the operators, a region of ours that records them.
//
// CPU    the GIL is released; chunks are spread by at::parallel_for; nothing to clip: nothing is written
// CUDA   no synchronisation, unless a norm that is not finite is to be an error. Compiled and run on the host, not yet on a GPU.
//
// Every gradient's version moves, clipped or not, as torch's own in-place product moves it.
#pragma once

#include <Python.h>

#include <ATen/ATen.h>

#include <optional>

#include "core/clip.h"

namespace tfg {

// gradients: a list of tensors, not empty. nullopt, with nothing touched: they are torch's to clip; also where is_strict and the norm is
// not finite, so that torch raises in its own words. Else the norm, of the dtype that torch's would have.
std::optional<at::Tensor> clip_gradients(PyObject *gradients, tfg_clip_norm norm, double max_norm, bool is_strict);

bool has_cuda_kernels(); // was this binary built with them?

} // namespace tfg
