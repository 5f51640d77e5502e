// SPDX-License-Identifier: BSD-3-Clause
#include "device_ledger.h"

#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "error.h"
#include "fork.h"
#include "host_memory.h"
#include "mutex.h"

namespace tfg {

namespace {

struct Held {
    StoragePtr storage;
    Keeping keeping{};
    uint64_t ticket = 0;
};

struct DeviceLedger {
    Mutex mutex;
    tfg_ledger *core = nullptr;
    std::vector<Held> held; // by entry
    std::vector<int32_t> passed_over; // scratch of one eviction
    ska::flat_hash_map<uint64_t, Fingerprint> evidence; // ticket -> what has left held, until its place is given up
    uint64_t last_ticket = 0;
    std::atomic<int64_t> n_evictions{0};

    DeviceLedger() {
        check(tfg_ledger_create(&host_memory, &core));
        hold_across_fork(mutex);
    }
    bool is_at(const Place &place) const {
        return place.entry >= 0 && static_cast<size_t>(place.entry) < held.size() &&
               held[static_cast<size_t>(place.entry)].ticket == place.ticket;
    }
};

DeviceLedger &ledger() {
    static auto *instance = new DeviceLedger; // never destroyed: storages may outlive static destructors
    return *instance;
}

bool is_python_s(c10::StorageImpl *storage) { return storage->pyobj_slot()->load_pyobj() != nullptr; }

enum class Verdict { LEAVES, NOT_NOW, NEVER };

// May an eviction lean on this source? Locks it into `found`.
bool can_lean_on(const Source &source, StoragePtr &found) {
    c10::StorageImpl *address = source.weak._unsafe_get_target(); // not freed while the weak reference lives
    if (source.is_retired || is_python_s(address)) return false;
    if (source.watch->n_accesses.load() != source.accesses_seen) return false;
    found = source.strong ? source.strong : source.weak.lock();
    return found && found->nbytes() == static_cast<size_t>(source.size_bytes);
}

// Are its sources there, and does it free more than they would pin? Then they are held from now on.
Verdict hold_sources(const Held &held, int64_t size_bytes, Graveyard &victims) {
    Share &share = *held.keeping.share;
    StoragePtr found[max_sources];
    int64_t pinned_bytes = 0;
    Verdict verdict = Verdict::LEAVES;
    for (size_t i = 0; i < share.size() && verdict == Verdict::LEAVES; ++i) {
        if (!(held.keeping.mask >> i & 1)) continue;
        if (!can_lean_on(share[i], found[i])) verdict = Verdict::NEVER;
        if (!share[i].strong && !share[i].is_held_anyway) pinned_bytes += share[i].size_bytes;
    }
    if (verdict == Verdict::LEAVES && pinned_bytes > size_bytes) verdict = Verdict::NOT_NOW;
    for (size_t i = 0; i < share.size(); ++i) {
        if (!found[i]) continue;
        if (verdict == Verdict::LEAVES && !share[i].strong) {
            share[i].watch->relied_on_at = share[i].accesses_seen;
            share[i].strong = std::move(found[i]);
        } else {
            victims.push_back(std::move(found[i])); // not released under the lock
        }
    }
    return verdict;
}

Verdict judge(const Held &held, int64_t size_bytes, Graveyard &victims) {
    if (is_python_s(held.storage.get()) || held.storage.use_count() > 1) return Verdict::NOT_NOW;
    return hold_sources(held, size_bytes, victims);
}

void let_go(DeviceLedger &all, int32_t entry, Graveyard &victims) {
    Held &held = all.held[static_cast<size_t>(entry)];
    if (held.keeping.wants_evidence) all.evidence[held.ticket] = fingerprint_of(*held.storage);
    held.keeping.stats->evicted_bytes += tfg_ledger_size_bytes(all.core, entry);
    held.keeping.stats->evictions += 1;
    all.n_evictions += 1;
    victims.push_back(std::move(held.storage));
    held = Held();
    tfg_ledger_remove(all.core, entry);
}

} // namespace

Place keep_on_ledger(StoragePtr storage, const Keeping &keeping) {
    DeviceLedger &all = ledger();
    std::lock_guard<Mutex> lock(all.mutex);
    Place place;
    const auto size_bytes = static_cast<int64_t>(storage->nbytes());
    check(tfg_ledger_add(all.core, size_bytes, keeping.price_ns_per_byte, keeping.sequence, &place.entry));
    try {
        if (static_cast<size_t>(place.entry) >= all.held.size()) all.held.resize(static_cast<size_t>(place.entry) + 1);
    } catch (...) {
        tfg_ledger_remove(all.core, place.entry);
        throw;
    }
    place.ticket = ++all.last_ticket;
    all.held[static_cast<size_t>(place.entry)] = {std::move(storage), keeping, place.ticket};
    return place;
}

StoragePtr withdraw(Place &place, std::optional<Fingerprint> &evidence) {
    DeviceLedger &all = ledger();
    std::lock_guard<Mutex> lock(all.mutex);
    StoragePtr storage;
    if (all.is_at(place)) {
        Held &held = all.held[static_cast<size_t>(place.entry)];
        storage = std::move(held.storage);
        held = Held();
        tfg_ledger_remove(all.core, place.entry);
    } else if (auto noted = all.evidence.find(place.ticket); noted != all.evidence.end()) {
        evidence = noted->second;
        all.evidence.erase(noted);
    }
    place = Place();
    return storage;
}

void reprice(const Place &place, double price_ns_per_byte) {
    DeviceLedger &all = ledger();
    std::lock_guard<Mutex> lock(all.mutex);
    if (all.is_at(place)) tfg_ledger_reprice(all.core, place.entry, price_ns_per_byte);
}

uint64_t add_source(Share &share, Source source) {
    std::lock_guard<Mutex> lock(ledger().mutex);
    if (share.size() >= max_sources) return ALL_SOURCES;
    share.push_back(std::move(source));
    return uint64_t{1} << (share.size() - 1);
}

bool must_put_aside(Share &share, uint64_t source_bit) {
    std::lock_guard<Mutex> lock(ledger().mutex);
    for (size_t i = 0; i < share.size(); ++i) {
        if (source_bit != uint64_t{1} << i) continue;
        share[i].is_retired = true;
        return share[i].strong != nullptr;
    }
    return false; // nothing that may be dropped leans on it
}

void clear_share(Share &share, Graveyard &dead) {
    if (share.empty()) return;
    Share taken;
    {
        std::lock_guard<Mutex> lock(ledger().mutex);
        taken.swap(share);
    }
    for (Source &source : taken)
        if (source.strong) dead.push_back(std::move(source.strong));
}

int64_t evict(int64_t wanted_bytes, Graveyard &victims) {
    DeviceLedger &all = ledger();
    std::lock_guard<Mutex> lock(all.mutex);
    all.passed_over.clear();
    int64_t freed_bytes = 0;
    for (int32_t entry; freed_bytes < wanted_bytes && (entry = tfg_ledger_first(all.core)) != TFG_LEDGER_NONE;) {
        const int64_t size_bytes = tfg_ledger_size_bytes(all.core, entry);
        const Verdict verdict = judge(all.held[static_cast<size_t>(entry)], size_bytes, victims);
        if (verdict == Verdict::LEAVES) {
            let_go(all, entry, victims);
            freed_bytes += size_bytes;
            continue;
        }
        tfg_ledger_set_aside(all.core, entry);
        if (verdict == Verdict::NOT_NOW) all.passed_over.push_back(entry);
    }
    for (const int32_t entry : all.passed_over) tfg_ledger_set_back(all.core, entry);
    return freed_bytes;
}

tfg_ledger_totals ledger_totals() {
    DeviceLedger &all = ledger();
    std::lock_guard<Mutex> lock(all.mutex);
    tfg_ledger_totals totals;
    tfg_ledger_count(all.core, &totals);
    return totals;
}

int64_t n_evictions() { return ledger().n_evictions.load(); }

int64_t next_sequence() {
    static std::atomic<int64_t> last{0};
    return ++last;
}

} // namespace tfg
