// SPDX-License-Identifier: BSD-3-Clause
#include "peak.h"

#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <mutex>
#include <typeinfo>

#include "cpu_allocator.h"
#include "device_ledger.h"
#include "fork.h"

namespace tfg {

namespace {

thread_local Phase phase_now = Phase::OUTSIDE;
thread_local const char *what_now = "";
thread_local int64_t key_now = -1, key_unpacked = -1;

constexpr size_t n_ring = 8192;

struct Book {
    std::mutex mutex;
    int64_t live_bytes = 0, kept_bytes = 0, key = -1;
    Phase phase = Phase::OUTSIDE;
    const char *what = "";              // an operator
    const std::type_info *node = nullptr; // or a backward node
    std::array<Sample, n_ring> ring;
    size_t n_samples = 0; // ever

    Book() { hold_across_fork(mutex); }
};
Book &book() {
    static auto *instance = new Book;
    return *instance;
}

int64_t now_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void take_sample(Book &all, Phase phase, int64_t key, int64_t live_bytes, int64_t kept_bytes) {
    all.ring[all.n_samples++ % n_ring] = {now_ns(), live_bytes, kept_bytes, key, phase};
}

} // namespace

const char *phase_word(Phase phase) {
    switch (phase) {
    case Phase::OUTSIDE: return "outside the blocks";
    case Phase::FORWARD: return "forward";
    case Phase::REPLAY: return "replay";
    case Phase::BACKWARD: return "backward";
    case Phase::STEP_BEGINS: return "step begins";
    }
    return "";
}

NowDoing::NowDoing(Phase phase, const char *what, int64_t key) : phase_(phase_now), what_(what_now), key_(key_now) {
    phase_now = phase, what_now = what, key_now = key;
}
NowDoing::~NowDoing() { phase_now = phase_, what_now = what_, key_now = key_; }

void note_moment(Phase phase, int64_t key) {
    const int64_t live_bytes = cpu_live_bytes(), kept_bytes = ledger_totals().kept_bytes;
    std::lock_guard<std::mutex> lock(book().mutex);
    take_sample(book(), phase, key, live_bytes, kept_bytes);
}

void note_unpack(int64_t key) {
    key_unpacked = key;
    note_moment(Phase::BACKWARD, key);
}

void note_peak(int64_t live_bytes) {
    const int64_t kept_bytes = ledger_totals().kept_bytes;
    const auto node = torch::autograd::get_current_node();
    Book &all = book();
    std::lock_guard<std::mutex> lock(all.mutex);
    if (live_bytes <= all.live_bytes) return;
    const bool is_node = phase_now == Phase::OUTSIDE && node;
    all.live_bytes = live_bytes, all.kept_bytes = kept_bytes;
    all.phase = is_node ? Phase::BACKWARD : phase_now;
    all.what = what_now;
    all.node = is_node ? &typeid(*node) : nullptr;
    all.key = is_node ? key_unpacked : key_now;
    take_sample(all, all.phase, all.key, live_bytes, kept_bytes);
}

Peak last_peak() {
    Book &all = book();
    std::lock_guard<std::mutex> lock(all.mutex);
    Peak peak{all.live_bytes, all.kept_bytes, all.phase, all.what, all.key};
    if (all.node) {
        peak.what = c10::demangle(all.node->name());
        peak.what.erase(0, peak.what.rfind(':') + 1);
    }
    return peak;
}

void forget_peak() {
    Book &all = book();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.live_bytes = all.kept_bytes = 0;
    all.phase = Phase::OUTSIDE;
    all.what = "";
    all.node = nullptr;
    all.key = -1;
}

std::vector<Sample> samples() {
    Book &all = book();
    std::lock_guard<std::mutex> lock(all.mutex);
    std::vector<Sample> found;
    const size_t first = all.n_samples > n_ring ? all.n_samples - n_ring : 0;
    for (size_t i = first; i < all.n_samples; ++i) found.push_back(all.ring[i % n_ring]);
    return found;
}

} // namespace tfg
