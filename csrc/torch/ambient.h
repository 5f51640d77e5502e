// SPDX-License-Identifier: BSD-3-Clause
//
// ambient: the global switches that a kernel reads. They are part of what an operator ran under: noted when they differ
// from the last operator's, put back around its replay.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace tfg {

struct Ambient {
    uint64_t switches = 0; // one bit or field each: deterministic, mkldnn, precisions, grad mode, …
    int32_t n_threads = 0;
    uint32_t float_control = 0; // rounding and denormals, where the processor has such a register
    c10::ScalarType default_dtype = c10::ScalarType::Float;

    bool operator==(const Ambient &) const = default;
};

Ambient ambient_now();
// The same, with the matrix precisions, which are slow to read, taken over from `last`: for operators that do not look at them.
Ambient ambient_now(const Ambient &last);

// Makes `wanted` true while it lives; does nothing where it is true already.
struct RestoreAmbient {
    explicit RestoreAmbient(const Ambient &wanted);
    ~RestoreAmbient();
    RestoreAmbient(const RestoreAmbient &) = delete;

  private:
    Ambient own_;
    bool is_changed_;
};

} // namespace tfg
