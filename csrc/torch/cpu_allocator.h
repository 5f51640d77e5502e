// SPDX-License-Identifier: BSD-3-Clause
//
// cpu_allocator: counts the CPU's tensor bytes, exactly, keeps them under a budget, and can refuse.
//
// Decorates the allocator that was there. Sizes are kept in a sharded map by address, not in a header: oneDNN frees through
// the current allocator's raw deleter, so that one is handed blocks that were never ours. A block is ours if the map knows it.
//
//      live = bytes of blocks handed out and not yet freed        peak = the most that live has been since the last reset
//
//      an allocation that would pass the budget or the limit lets go of kept activations, cheapest first (device_ledger),
//      until it fits. When nothing can leave: above the limit, or above a strict budget, torch.OutOfMemoryError; above a
//      budget that is not strict it goes over, and that is counted.
//
// After a fork the child has neither.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <string>

namespace tfg {

bool install_cpu_allocator(); // false where it is installed already, or where another with a higher priority sits
bool is_cpu_allocator_installed();
bool is_counted(const c10::StorageImpl &storage); // did this allocator hand it out?
int64_t cpu_live_bytes();
int64_t cpu_peak_bytes();
void reset_cpu_peak();
int64_t take_cpu_recent_peak(); // the most that was live since it was last taken, whoever resets the other
void set_cpu_limit(int64_t limit_bytes); // negative: none

struct Budget {
    int64_t bytes = -1;      // negative: none
    int64_t base_bytes = 0;  // of tensors that this allocator did not hand out, counted as live
    bool is_strict = false;
};
void set_cpu_budget(const Budget &budget);
Budget cpu_budget();
int64_t cpu_room_bytes(); // what may still be allocated under the budget and the limit; INT64_MAX where there is neither
bool is_cpu_pressed();    // a budget is set and more than a quarter of it is live: activations are entered early, evidence is gathered

void relieve_cpu();        // where more is live than the budget or the limit allow: lets go of what can leave by now

struct OverBudget {
    int64_t n_times = 0;      // allocations above the budget
    int64_t needed_bytes = 0; // the most that was live then, with all that can leave gone: no smaller budget would have done
    std::string words;        // what the memory was made of at the first of them
};
OverBudget cpu_over_budget();
void reset_cpu_over_budget();

// For the tests: the k-th allocation from now on fails, once or from then on. Negative: none.
int64_t fail_cpu_allocation(int64_t k, bool is_lasting);

} // namespace tfg
