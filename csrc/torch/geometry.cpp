// SPDX-License-Identifier: BSD-3-Clause
#include "geometry.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>

namespace tfg {

static const c10::DispatchKeySet &plain_keys() {
    static const c10::DispatchKeySet keys = c10::DispatchKeySet(
        {c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutocastCPU});
    return keys;
}

c10::StorageImpl *plain_storage(const at::Tensor &tensor) {
    const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    if (!tensor.defined() || !impl->has_storage()) return nullptr;
    const c10::DispatchKeySet keys = impl->key_set();
    if ((keys.raw_repr() & ~plain_keys().raw_repr()) != 0 || !keys.has(c10::DispatchKey::CPU)) return nullptr;
    if (impl->has_symbolic_sizes_strides() || impl->layout() != c10::kStrided) return nullptr;
    return impl->unsafe_storage().unsafeGetStorageImpl();
}

bool came_from_torch(const c10::StorageImpl &storage) {
    return const_cast<c10::StorageImpl &>(storage).allocator() != nullptr || storage.nbytes() == 0;
}

Geometry geometry_of(const at::Tensor &tensor) {
    Geometry geometry;
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    geometry.sizes_elems.assign(sizes.begin(), sizes.end());
    geometry.strides_elems.assign(strides.begin(), strides.end());
    geometry.offset_elems = tensor.storage_offset();
    geometry.dtype = tensor.scalar_type();
    return geometry;
}

at::Tensor tensor_from(const StoragePtr &storage, c10::IntArrayRef sizes_elems, c10::IntArrayRef strides_elems,
                       int64_t offset_elems, c10::ScalarType dtype) {
    at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes_elems, strides_elems, offset_elems);
    return tensor;
}

namespace {
void free_shifted(void *context) { delete static_cast<c10::DataPtr *>(context); }
} // namespace

StoragePtr copy_storage(const c10::StorageImpl &source) {
    const size_t size_bytes = source.nbytes();
    const auto misalignment = reinterpret_cast<uintptr_t>(source.data()) % 64;
    c10::Allocator *allocator = c10::GetCPUAllocator();
    c10::DataPtr block = allocator->allocate(size_bytes + misalignment);
    if (misalignment) {
        char *shifted = static_cast<char *>(block.get()) + misalignment;
        block = {shifted, new c10::DataPtr(std::move(block)), &free_shifted, c10::Device(c10::kCPU)};
    }
    if (size_bytes) std::memcpy(block.mutable_get(), source.data(), size_bytes);
    return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size_bytes, std::move(block), allocator,
                                                 /*resizable=*/misalignment == 0);
}

bool covers_storage(const at::Tensor &tensor) {
    return tensor.storage_offset() == 0 && tensor.nbytes() == tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes() &&
           tensor.is_non_overlapping_and_dense();
}

} // namespace tfg
