// SPDX-License-Identifier: BSD-3-Clause
#include "stats.h"

namespace tfg {

namespace {
std::mutex mutex;
std::deque<Stats> &all() {
    static auto *instance = new std::deque<Stats>;
    return *instance;
}
} // namespace

int64_t new_key(std::string label) {
    std::lock_guard<std::mutex> lock(mutex);
    all().emplace_back().label = std::move(label);
    return static_cast<int64_t>(all().size()) - 1;
}

Stats &stats_of(int64_t key) {
    std::lock_guard<std::mutex> lock(mutex);
    return all().at(static_cast<size_t>(key));
}

} // namespace tfg
