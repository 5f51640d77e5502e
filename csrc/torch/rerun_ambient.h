// SPDX-License-Identifier: BSD-3-Clause
//
// rerun ambient: what a function found around it when it ran first and must find again when it is run again: the CPU generator's
// state and the autocast state of every device type. (Other devices' generators and `with torch.device` are Python's: tfg/rerun.py.)
//
// Law: whatever way the second run ends, the state of the thread that asked for it is as before.
#pragma once

#include <Python.h>

#include <ATen/autocast_mode.h>

#include <array>
#include <optional>

#include "rng.h"

namespace tfg {

struct AutocastState {
    static constexpr size_t n_devices = std::tuple_size_v<std::remove_cv_t<decltype(at::autocast::_AUTOCAST_SUPPORTED_DEVICES)>>;
    std::array<at::ScalarType, n_devices> dtypes;
    uint32_t enabled = 0; // one bit per device type
    bool is_caching = true;

    static AutocastState now();
    void apply() const;
    bool operator==(const AutocastState &) const = default;
};

struct RerunAmbient {
    explicit RerunAmbient(bool preserves_rng);

    AutocastState autocast;
    std::optional<RngState> rng;
};

// While it lives the thread is as it was when `ambient` was taken, with grad mode on and the compiler's frame evaluation off.
class AsInForward {
  public:
    explicit AsInForward(const RerunAmbient &ambient);
    ~AsInForward();
    AsInForward(const AsInForward &) = delete;

  private:
    AutocastState own_;
    std::optional<BorrowDefaultGenerator> generator_;
    at::AutoGradMode grad_mode_;
    bool is_nested_; // counted as an autocast block: what it casts and caches goes when the outermost block ends
};

// Dynamo must neither compile nor trace what runs inside: a second run through another graph would save other tensors. Needs the
// GIL, at both ends; an error that is set stays set.
class WithoutDynamo {
  public:
    WithoutDynamo();
    ~WithoutDynamo();
    WithoutDynamo(const WithoutDynamo &) = delete;

  private:
    PyObject *before_ = nullptr;
};

} // namespace tfg
