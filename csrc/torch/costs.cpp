// SPDX-License-Identifier: BSD-3-Clause
#include "costs.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>

namespace tfg {

int64_t smooth_cost(const Rule &rule, int64_t returned_bytes, int64_t measured_ns) {
    thread_local ska::flat_hash_map<uint64_t, int64_t> costs_ns;
    const uint64_t kind = (static_cast<uint64_t>(returned_bytes) * 0x9E3779B97F4A7C15u) ^ rule.id;
    const auto [it, is_new] = costs_ns.emplace(kind, measured_ns);
    int64_t &cost_ns = it->second;
    if (!is_new) cost_ns += (std::min(measured_ns, 4 * cost_ns) - cost_ns) / 8;
    return cost_ns;
}

} // namespace tfg
