// SPDX-License-Identifier: BSD-3-Clause
#include "costs.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>

namespace tfg {

namespace {

struct Cost {
    int64_t ns;
    int n_cold = 0; // measurements until the least of them was trusted
};
constexpr int n_cold_calls = 8;

} // namespace

int64_t smooth_cost(const Rule &rule, int64_t returned_bytes, int64_t measured_ns) {
    thread_local ska::flat_hash_map<uint64_t, Cost> costs;
    const uint64_t kind = (static_cast<uint64_t>(returned_bytes) * 0x9E3779B97F4A7C15u) ^ rule.id;
    Cost &cost = costs.emplace(kind, Cost{measured_ns}).first->second;
    if (cost.n_cold < n_cold_calls) {
        cost.ns = std::min(cost.ns, measured_ns);
        cost.n_cold += 1;
    } else {
        cost.ns += (std::min(measured_ns, 4 * cost.ns) - cost.ns) / 8;
    }
    return cost.ns;
}

} // namespace tfg
