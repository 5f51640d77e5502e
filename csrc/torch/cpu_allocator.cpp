// SPDX-License-Identifier: BSD-3-Clause
#include "cpu_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <mutex>

namespace tfg {

namespace {

std::atomic<int64_t> live{0}, peak{0}, limit{INT64_MAX};

struct Shard {
    std::mutex mutex;
    ska::flat_hash_map<void *, int64_t> sizes_bytes;
};
constexpr size_t n_shards = 64;
std::array<Shard, n_shards> &shards() {
    static auto *all = new std::array<Shard, n_shards>;
    return *all;
}
Shard &shard_of(void *block) { return shards()[(reinterpret_cast<uintptr_t>(block) >> 6) * 0x9E3779B97F4A7C15u >> 58]; }

c10::Allocator *inner = nullptr;
c10::DeleterFnPtr inner_deleter = nullptr;

void note(void *block, int64_t size_bytes) {
    Shard &shard = shard_of(block);
    std::lock_guard<std::mutex> lock(shard.mutex);
    shard.sizes_bytes[block] = size_bytes;
}

void forget(void *block) {
    Shard &shard = shard_of(block);
    std::lock_guard<std::mutex> lock(shard.mutex);
    auto it = shard.sizes_bytes.find(block);
    if (it == shard.sizes_bytes.end()) return; // made before we were installed
    live -= it->second;
    shard.sizes_bytes.erase(it);
}

void release(void *block) {
    if (block) forget(block);
    inner_deleter(block);
}

// Claims the bytes, or throws with nothing claimed.
void claim(int64_t size_bytes) {
    const int64_t now = live.fetch_add(size_bytes) + size_bytes;
    if (now > limit.load()) {
        live -= size_bytes;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "tfg: CPU out of memory. Tried to allocate ", size_bytes, " bytes; ", now - size_bytes,
                         " bytes are live, the limit is ", limit.load(), " bytes (tfg.cpu.set_memory_limit)");
    }
    int64_t seen = peak.load();
    while (now > seen && !peak.compare_exchange_weak(seen, now)) {
    }
}

struct CountingAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t size_bytes) override {
        if (size_bytes == 0) return inner->allocate(0);
        const auto size = static_cast<int64_t>(size_bytes);
        claim(size);
        c10::DataPtr block;
        try {
            block = inner->allocate(size_bytes);
        } catch (...) {
            live -= size;
            throw;
        }
        if (block.get() == block.get_context() && block.compare_exchange_deleter(inner_deleter, &release))
            note(block.get(), size);
        else
            live -= size; // not a block we can follow
        return block;
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *to, const void *from, std::size_t size_bytes) const override { inner->copy_data(to, from, size_bytes); }
};

void before_fork() {
    for (Shard &shard : shards()) shard.mutex.lock();
}
void after_fork() {
    for (Shard &shard : shards()) shard.mutex.unlock();
}
void in_child() {
    after_fork();
    limit = INT64_MAX;
}

bool is_installed = false;

} // namespace

bool install_cpu_allocator() {
    if (is_installed) return false;
    inner = c10::GetCPUAllocator();
    inner_deleter = inner->raw_deleter();
    if (!inner_deleter) return false;
    static auto *ours = new CountingAllocator;
    constexpr uint8_t priority = 10;
    c10::SetCPUAllocator(ours, priority);
    is_installed = c10::GetCPUAllocator() == ours;
    if (is_installed) pthread_atfork(&before_fork, &after_fork, &in_child);
    return is_installed;
}

bool is_cpu_allocator_installed() { return is_installed; }
int64_t cpu_live_bytes() { return live.load(); }
int64_t cpu_peak_bytes() { return peak.load(); }
void reset_cpu_peak() { peak = live.load(); }
void set_cpu_limit(int64_t limit_bytes) { limit = limit_bytes < 0 ? INT64_MAX : limit_bytes; }

} // namespace tfg
