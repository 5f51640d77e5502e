// SPDX-License-Identifier: BSD-3-Clause
//
// device_ledger: what the device keeps and may let go of at any moment, and what that leans on.
//
// Words
//   entry   a kept storage that can be made again. Its strong reference lies here, not on its tape, so that letting go needs
//           one leaf lock and no tape. The tape looks at it through a weak reference.
//   share   what one tape has here. Its sources are tensors that replays of that tape start from and that are not parameters:
//           held weakly until the first drop that needs them, then strongly until the share is cleared.
//   mask    which sources are behind an entry, one bit each; ALL_SOURCES: more than a mask can name, never an entry
//
//      allocate ── over the budget ──> evict: cheapest entry first
//                                        someone else holds it too      -> stays, looked at again next time
//                                        a source is dead or has changed -> stays for good
//                                        its sources are larger than it  -> stays, looked at again next time
//                                        else                            -> leaves; its sources are held from now on
//
// Locks: one leaf mutex. Under it nothing is released, allocated on a device or run (fingerprints aside, of what leaves unproven: the
// others would find nothing to let go of meanwhile); the GIL is not taken: a storage that Python has
// touched (`untyped_storage()`) is never evicted and never a source of an eviction, since counting its references may need the GIL.
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "core/ledger.h"
#include "stats.h"
#include "watch.h"

namespace tfg {

using Graveyard = std::vector<StoragePtr>;

constexpr uint64_t ALL_SOURCES = std::numeric_limits<uint64_t>::max();
constexpr size_t max_sources = 63;

struct Source {
    WeakStorage weak;
    WatchPtr watch;
    uint32_t accesses_seen;
    int64_t size_bytes;
    bool is_held_anyway; // autograd saved it as it is: holding it costs nothing
    StoragePtr strong;
    bool is_retired = false; // it has been written: no drop may lean on it any more
};
using Share = std::vector<Source>; // touched under the ledger's lock only

// Where a slot's reference is; `ticket` tells an old place from a new one at the same index.
struct Place {
    int32_t entry = -1;
    uint64_t ticket = 0;
    bool is_somewhere() const { return entry >= 0; }
};

struct Keeping { // what an entry is entered with
    double price_ns_per_byte;
    int64_t sequence; // order in the forward: of equal prices, what was made first is needed last and leaves first
    uint64_t mask;
    Share *share;
    Stats *stats;
    bool wants_evidence; // its tape did not fingerprint it: it is fingerprinted as it leaves
};

Place keep_on_ledger(StoragePtr storage, const Keeping &keeping); // throws std::bad_alloc, with nothing entered
// The storage, or nullptr where it has left: then `evidence` is what it held, if it was to be fingerprinted. The place is empty after.
StoragePtr withdraw(Place &place, std::optional<Fingerprint> &evidence);
void reprice(const Place &place, double price_ns_per_byte);
uint64_t add_source(Share &share, Source source); // its bit, or ALL_SOURCES where there is none left
// Before a recorded write to a source: has a drop leaned on it? Then its bytes must be put aside. If not, none will from now on.
bool must_put_aside(Share &share, uint64_t source_bit);
void clear_share(Share &share, Graveyard &dead);  // its entries have been withdrawn

// Lets go of the cheapest entries until `wanted_bytes` are free or nothing can leave; how much. The references die with `victims`.
int64_t evict(int64_t wanted_bytes, Graveyard &victims);

tfg_ledger_totals ledger_totals();
int64_t next_sequence();
int64_t n_evictions(); // since the process began

} // namespace tfg
