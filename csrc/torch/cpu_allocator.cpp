// SPDX-License-Identifier: BSD-3-Clause
#include "cpu_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include "device_ledger.h"
#include "fork.h"
#include "make_up.h"
#include "peak.h"

namespace tfg {

namespace {

std::atomic<int64_t> live{0}, peak{0}, recent_peak{0}, limit{INT64_MAX};
std::atomic<int64_t> budget{INT64_MAX}, base{0}; // INT64_MAX: none
std::atomic<bool> is_strict{false};
std::atomic<int64_t> n_over{0}, needed{0};
std::atomic<int64_t> fails_in{-1}; // allocations until the one that fails
std::atomic<bool> fails_on{false};
std::atomic<int64_t> n_failed{0}; // since a failure was last asked for

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

// Whether it rose.
bool raise_to(std::atomic<int64_t> &most, int64_t value) {
    int64_t seen = most.load();
    while (value > seen)
        if (most.compare_exchange_weak(seen, value)) return true;
    return false;
}

void note_live(int64_t now) {
    raise_to(recent_peak, now);
    if (raise_to(peak, now)) note_peak(now);
}

void fail_if_asked(int64_t size_bytes) {
    if (fails_in.load() < 0) return;
    const int64_t left = fails_in.fetch_sub(1);
    if (left == 0 && fails_on.load()) fails_in = 0;
    if (left == 0) n_failed += 1;
    TORCH_CHECK_WITH(OutOfMemoryError, left != 0, "tfg: CPU out of memory. Tried to allocate ", size_bytes,
                     " bytes; this failure was asked for by a test");
}

int64_t ceiling() {
    const int64_t under_budget = budget.load() == INT64_MAX ? INT64_MAX : budget.load() - base.load();
    return std::min(under_budget, limit.load());
}

[[noreturn]] void refuse(int64_t size_bytes, int64_t now) {
    const bool is_limit = now > limit.load();
    TORCH_CHECK_WITH(OutOfMemoryError, false, "tfg: CPU out of memory. Tried to allocate ", size_bytes, " bytes; ", now - size_bytes,
                     " bytes are live, the ", is_limit ? "limit" : "budget", " is ", is_limit ? limit.load() : budget.load(), " bytes (",
                     is_limit ? "tfg.cpu.set_memory_limit" : "tfg.set_budget", "). Nothing that could be made again is left to let go of: ",
                     make_up_words(), " An estimate of the smallest budget that would have done until here: ", now + base.load(), " bytes.");
}

std::mutex words_mutex;
std::string &words_of_first_over() {
    static auto *words = new std::string;
    return *words;
}

void go_over(int64_t now) {
    raise_to(needed, now + base.load());
    if (n_over.fetch_add(1) > 0) return;
    std::string words = make_up_words();
    std::lock_guard<std::mutex> lock(words_mutex);
    words_of_first_over() = std::move(words);
}

// Claims the bytes, or throws with nothing claimed.
void claim(int64_t size_bytes) {
    fail_if_asked(size_bytes);
    while (true) {
        const int64_t most = ceiling();
        int64_t now, seen = live.load(); // never more than there is: other threads would be refused for what is refused here
        do now = seen + size_bytes;
        while (now <= most && !live.compare_exchange_weak(seen, now));
        if (now <= most) return note_live(now);
        Graveyard victims;
        if (evict(now - most, victims) > 0) continue; // the victims die here, and their blocks with them
        if (now > limit.load() || is_strict.load()) refuse(size_bytes, now);
        live += size_bytes;
        go_over(now);
        return note_live(now);
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
            note(block.get(), size);
        } catch (...) {
            live -= size;
            throw;
        }
        const bool is_followed = block.get() == block.get_context() && block.compare_exchange_deleter(inner_deleter, &release);
        if (!is_followed) forget(block.get());
        return block;
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *to, const void *from, std::size_t size_bytes) const override { inner->copy_data(to, from, size_bytes); }
};

void in_child() { limit = budget = INT64_MAX; }

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
    if (is_installed) {
        for (Shard &shard : shards()) hold_across_fork(shard.mutex);
        pthread_atfork(nullptr, nullptr, &in_child);
    }
    return is_installed;
}

bool is_cpu_allocator_installed() { return is_installed; }
int64_t cpu_live_bytes() { return live.load(); }
int64_t cpu_peak_bytes() { return peak.load(); }
int64_t take_cpu_recent_peak() { return recent_peak.exchange(live.load()); }
void reset_cpu_peak() {
    peak = live.load();
    forget_peak();
}
void set_cpu_limit(int64_t limit_bytes) { limit = limit_bytes < 0 ? INT64_MAX : limit_bytes; }

bool is_counted(const c10::StorageImpl &storage) {
    void *block = const_cast<void *>(storage.data());
    Shard &shard = shard_of(block);
    std::lock_guard<std::mutex> lock(shard.mutex);
    return shard.sizes_bytes.count(block) != 0;
}

void set_cpu_budget(const Budget &wanted) {
    base = wanted.base_bytes;
    is_strict = wanted.is_strict;
    budget = wanted.bytes < 0 ? INT64_MAX : wanted.bytes;
    reset_cpu_over_budget();
}

Budget cpu_budget() { return {budget.load() == INT64_MAX ? -1 : budget.load(), base.load(), is_strict.load()}; }

int64_t cpu_room_bytes() {
    const int64_t most = ceiling();
    return most == INT64_MAX ? INT64_MAX : std::max<int64_t>(0, most - live.load());
}

bool is_cpu_pressed() {
    const int64_t bytes = budget.load(std::memory_order_relaxed);
    return bytes != INT64_MAX && live.load(std::memory_order_relaxed) + base.load(std::memory_order_relaxed) > bytes / 4;
}

void relieve_cpu() {
    const int64_t excess = live.load() - ceiling();
    if (excess <= 0) return;
    Graveyard victims;
    evict(excess, victims);
}

OverBudget cpu_over_budget() {
    std::lock_guard<std::mutex> lock(words_mutex);
    return {n_over.load(), needed.load(), words_of_first_over()};
}
void reset_cpu_over_budget() { n_over = needed = 0; }

int64_t fail_cpu_allocation(int64_t k, bool is_lasting) {
    fails_on = is_lasting;
    fails_in = k;
    return n_failed.exchange(0);
}

} // namespace tfg
