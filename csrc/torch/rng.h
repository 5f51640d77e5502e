// SPDX-License-Identifier: BSD-3-Clause
//
// rng: what a random operator drew from, so that its replay draws the same.
//
// The CPU generator is a Mersenne twister: its state is 2.5 KB and two cached normal samples, taken before the operator and
// compared after it; only an operator that really drew pays for keeping it.
//
// Replay: an operator whose schema has a generator argument gets a private generator. The rest borrow the default one for
// the call and put it back.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include <optional>

namespace tfg {

struct RngState {
    at::mt19937_data_pod engine;
    std::optional<float> next_float;
    std::optional<double> next_double;
};

RngState rng_state(const at::Generator &generator); // a CPU generator
void set_rng_state(const at::Generator &generator, const RngState &state);
bool same_rng_state(const RngState &a, const RngState &b);
at::Generator generator_with(const RngState &state);

// The default CPU generator holds `state` while this lives, and its own state again after.
struct BorrowDefaultGenerator {
    explicit BorrowDefaultGenerator(const RngState &state);
    ~BorrowDefaultGenerator();
    BorrowDefaultGenerator(const BorrowDefaultGenerator &) = delete;

  private:
    RngState own_;
};

} // namespace tfg
