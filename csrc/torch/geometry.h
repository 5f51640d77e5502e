// SPDX-License-Identifier: BSD-3-Clause
//
// geometry: what a tensor is apart from its bytes. Decisions are about storages; a tensor is a storage seen through sizes,
// strides, an offset and a dtype, and can be made again from those at any time.
//
// Plain tensor: dense, strided, on the CPU, no conj or neg bit, no subclass, no symbolic size. Everything else is opaque
// to tfg: it is kept, and an operator that touches it is never replayed.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>

namespace tfg {

using StoragePtr = c10::intrusive_ptr<c10::StorageImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct Geometry {
    c10::SmallVector<int64_t, 5> sizes_elems, strides_elems;
    int64_t offset_elems = 0;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
};

// nullptr where the tensor is not plain.
c10::StorageImpl *plain_storage(const at::Tensor &tensor);

// Memory that torch's allocator did not hand out (NumPy, DLPack, mmap) can change without a trace.
bool came_from_torch(const c10::StorageImpl &storage);

Geometry geometry_of(const at::Tensor &tensor);

at::Tensor tensor_from(const StoragePtr &storage, c10::IntArrayRef sizes_elems, c10::IntArrayRef strides_elems,
                       int64_t offset_elems, c10::ScalarType dtype);

// A copy of the whole storage, from torch's allocator, at the same address modulo 64: the bits of matrix kernels may depend
// on alignment.
StoragePtr copy_storage(const c10::StorageImpl &source);

// True if the elements of the tensor are exactly the bytes of its storage, each once.
bool covers_storage(const at::Tensor &tensor);

} // namespace tfg
