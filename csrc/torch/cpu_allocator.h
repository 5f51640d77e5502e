// SPDX-License-Identifier: BSD-3-Clause
//
// cpu_allocator: counts the CPU's tensor bytes, exactly, and can refuse.
//
// Decorates the allocator that was there. Sizes are kept in a sharded map by address, not in a header: oneDNN frees through
// the current allocator's raw deleter, so that one is handed blocks that were never ours. A block is ours if the map knows it.
//
//      live = bytes of blocks handed out and not yet freed        peak = the most that live has been since the last reset
//
// After a fork the child has no limit.
#pragma once

#include <cstdint>

namespace tfg {

bool install_cpu_allocator(); // false where it is installed already, or where another with a higher priority sits
bool is_cpu_allocator_installed();
int64_t cpu_live_bytes();
int64_t cpu_peak_bytes();
void reset_cpu_peak();
void set_cpu_limit(int64_t limit_bytes); // negative: none

} // namespace tfg
