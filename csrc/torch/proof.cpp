// SPDX-License-Identifier: BSD-3-Clause
#include "proof.h"

#include <c10/util/flat_hash_map.h>

#include <mutex>

#include "fork.h"

namespace tfg {

namespace {

struct Book {
    std::mutex mutex;
    ska::flat_hash_map<uint64_t, Belief> by_site;

    Book() { hold_across_fork(mutex); }
};
Book &book() {
    static auto *instance = new Book;
    return *instance;
}

} // namespace

uint64_t proof_site(int64_t key, int32_t ordinal, uint64_t op_id) {
    return (static_cast<uint64_t>(key) << 40) ^ (static_cast<uint64_t>(static_cast<uint32_t>(ordinal)) << 16) ^ op_id;
}

Belief belief_in(uint64_t site) {
    std::lock_guard<std::mutex> lock(book().mutex);
    auto it = book().by_site.find(site);
    return it == book().by_site.end() ? Belief::UNMET : it->second;
}

Belief believe(uint64_t site, Belief belief) {
    std::lock_guard<std::mutex> lock(book().mutex);
    Belief &known = book().by_site[site];
    const Belief before = known;
    // Of two micro-batches one may have agreed by chance; of two threads one may be late to meet it.
    if (belief > known && known != Belief::DISTRUSTED) known = belief;
    return before;
}

Stress &stress() {
    static Stress modes;
    return modes;
}

} // namespace tfg
