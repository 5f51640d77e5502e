// SPDX-License-Identifier: BSD-3-Clause
//
// costs: what an operator takes, in ns, measured where measuring is free: the clock around its call while it is taped. Smoothed per
// kind of operator and bytes returned, so that one disturbed call does not set a price.
#pragma once

#include <chrono>
#include <cstdint>

#include "rules.h"

namespace tfg {

class Stopwatch {
  public:
    explicit Stopwatch(bool is_wanted) {
        if (is_wanted) start_ = std::chrono::steady_clock::now();
    }
    int64_t elapsed_ns() const { return std::chrono::nanoseconds(std::chrono::steady_clock::now() - start_).count(); }

  private:
    std::chrono::steady_clock::time_point start_;
};

// Takes one more measurement in and returns the smoothed cost: the least of the first eight, since first calls are slow and would make
// early operators of a chain look dear; later ones move it by an eighth, and a call that took more than four times as long counts as
// four times. Each thread has a table of its own.
int64_t smooth_cost(const Rule &rule, int64_t returned_bytes, int64_t measured_ns);

} // namespace tfg
