// SPDX-License-Identifier: BSD-3-Clause
//
// stats: what happened, per block or call site, for the report. Bytes and counts since the last reset.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include "rules.h"

namespace tfg {

struct Stats {
    std::string label;
    std::atomic<int64_t> regions{0}, ops_taped{0}, ops_replayed{0}, saved_bytes{0}, kept_bytes{0}, dropped_bytes{0}, replay_ns{0},
        unproven{0}, evictions{0}, evicted_bytes{0}, replayed_again{0};
    std::array<std::atomic<int64_t>, static_cast<size_t>(Why::COUNT)> kept_why{};

    // For the proof: the device's evictions when a region of this key last began, and how many began since without another.
    std::atomic<int64_t> evictions_before{-1};
    std::atomic<int32_t> n_calm{0};
};

int64_t new_key(std::string label); // keys are never reused
Stats &stats_of(int64_t key);       // throws std::out_of_range for a key that was never made

} // namespace tfg
