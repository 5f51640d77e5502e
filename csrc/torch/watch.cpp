// SPDX-License-Identifier: BSD-3-Clause
#include "watch.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstring>

#include "cpu/fingerprint.h"
#include "fork.h"
#include "mutex.h"

namespace tfg {

namespace {

struct Registry {
    Mutex mutex;
    ska::flat_hash_map<c10::StorageImpl *, c10::weak_intrusive_ptr<Watch>> by_address;

    Registry() { hold_across_fork(mutex); }
};

Registry &registry() {
    static auto *instance = new Registry; // never destroyed: storages may outlive static destructors
    return *instance;
}

thread_local const RecordedKernel *kernel = nullptr;

bool is_in(c10::ArrayRef<c10::StorageImpl *> list, c10::StorageImpl *storage) {
    return std::find(list.begin(), list.end(), storage) != list.end();
}

} // namespace

Fingerprint fingerprint_of(const c10::StorageImpl &storage) {
    Fingerprint result;
    tfg_cpu_fingerprint(storage.data(), storage.nbytes(), result.data());
    return result;
}

void on_mutable_access(c10::StorageImpl *storage) {
    const bool is_written = kernel && is_in(kernel->written, storage);
    if (kernel && !is_written && is_in(kernel->read_only, storage)) return;
    c10::intrusive_ptr<Watch> found;
    Registry &all = registry();
    {
        std::lock_guard<Mutex> lock(all.mutex);
        auto it = all.by_address.find(storage);
        if (it == all.by_address.end()) return;
        found = it->second.lock();
    }
    if (!found) return;
    Before before{found->n_accesses.load(), std::nullopt, nullptr};
    if (!is_written) before.bytes = fingerprint_of(*storage);
    if (found->relied_on_at == before.count && storage->nbytes() <= put_aside_bytes) before.copy = copy_storage(*storage);
    std::lock_guard<Mutex> lock(all.mutex);
    if (before.bytes || before.copy) found->before_.push_back(std::move(before));
    found->n_accesses.fetch_add(1);
    if (found->n_handles.load() > 0) found->pinned_ = found->weak_.lock();
}

Watch::Watch(StoragePtr storage) : address_(storage.get()), weak_(storage) {}

void Watch::release_resources() {
    StoragePtr alive, pinned;
    std::vector<Before> before;
    {
        Registry &all = registry();
        std::lock_guard<Mutex> lock(all.mutex);
        auto it = all.by_address.find(address_);
        if (it != all.by_address.end() && it->second._unsafe_get_target() == this) all.by_address.erase(it);
        alive = weak_.lock();
        pinned = std::move(pinned_);
        before = std::move(before_);
    }
    if (alive && can_see && alive->has_materializer()) alive->clear_materializer();
}

void Watch::arm() {
    if (StoragePtr storage = weak_.lock(); storage && can_see && !storage->has_materializer())
        storage->set_materializer(&on_mutable_access);
}

StoragePtr Watch::share_copy() {
    StoragePtr storage, known;
    {
        std::lock_guard<Mutex> lock(registry().mutex);
        storage = weak_.lock();
        if (copy_) known = copy_->lock();
    }
    if (known && known->nbytes() == storage->nbytes() && std::memcmp(known->data(), storage->data(), known->nbytes()) == 0) return known;
    StoragePtr fresh = copy_storage(*storage);
    std::lock_guard<Mutex> lock(registry().mutex);
    copy_.emplace(fresh);
    return fresh;
}

std::optional<Before> Watch::before(uint32_t count) const {
    std::lock_guard<Mutex> lock(registry().mutex);
    for (const Before &each : before_)
        if (each.count == count) return each;
    return std::nullopt;
}

WatchPtr watch(const StoragePtr &storage) {
    Registry &all = registry();
    std::lock_guard<Mutex> lock(all.mutex);
    auto it = all.by_address.find(storage.get());
    if (it != all.by_address.end())
        if (WatchPtr known = it->second.lock()) return known;
    auto fresh = c10::make_intrusive<Watch>(storage);
    fresh->can_see = !storage->has_materializer();
    if (fresh->can_see) storage->set_materializer(&on_mutable_access);
    if (it != all.by_address.end()) all.by_address.erase(it);
    all.by_address.emplace(storage.get(), c10::weak_intrusive_ptr<Watch>(fresh));
    return fresh;
}

RecordedKernel::RecordedKernel(c10::ArrayRef<c10::StorageImpl *> reads, c10::ArrayRef<c10::StorageImpl *> writes)
    : read_only(reads), written(writes), outer_(kernel) {
    kernel = this;
}

RecordedKernel::~RecordedKernel() { kernel = outer_; }

} // namespace tfg
