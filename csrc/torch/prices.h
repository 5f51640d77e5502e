// SPDX-License-Identifier: BSD-3-Clause
//
// prices: in which order the kept storages of a region leave. A minimum cut over the region's operators (core/cut.h) says at which
// price, in ns of replay per byte freed, each would be dropped, chains that share a prefix counted once. Blocks and steps repeat, so
// it is worked out once per structure and magnitude of bytes, and looked up by hash from then on.
//
// Structure: kinds of operators, who reads what, which values backward asks for. A new length with the same structure finds the prices
// of the nearest magnitude: nothing is planned again. Before a region has closed, and in regions of more than `most_ops` operators, an
// operator's cost by the bytes it made serves instead.
#pragma once

#include "held_tape.h"

namespace tfg {

constexpr int32_t most_ops = 600;

// Gives the span's entries their prices on the ledger. Under the tape's lock.
void price_span(Tape &tape, int32_t first_op);

} // namespace tfg
