// SPDX-License-Identifier: BSD-3-Clause
#include "proof.h"

#include <c10/util/flat_hash_map.h>

#include <mutex>
#include <shared_mutex>

namespace tfg {

namespace {
std::shared_mutex mutex;
ska::flat_hash_map<uint64_t, Belief> &beliefs() {
    static auto *instance = new ska::flat_hash_map<uint64_t, Belief>;
    return *instance;
}
} // namespace

uint64_t proof_site(int64_t key, int32_t ordinal, uint64_t op_id) {
    return (static_cast<uint64_t>(key) << 40) ^ (static_cast<uint64_t>(static_cast<uint32_t>(ordinal)) << 16) ^ op_id;
}

Belief belief_in(uint64_t site) {
    std::shared_lock<std::shared_mutex> lock(mutex);
    auto it = beliefs().find(site);
    return it == beliefs().end() ? Belief::UNKNOWN : it->second;
}

void believe(uint64_t site, Belief belief) {
    std::unique_lock<std::shared_mutex> lock(mutex);
    Belief &known = beliefs()[site];
    if (known != Belief::DISTRUSTED) known = belief; // of two micro-batches one may have agreed by chance
}

Stress &stress() {
    static Stress modes;
    return modes;
}

} // namespace tfg
