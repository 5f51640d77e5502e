// SPDX-License-Identifier: BSD-3-Clause
//
// rerun ambient: what a function found around it when it ran first and must find again when it is run again: the CPU generator's
// state, the autocast state of every device type, and the engine that regions inside it use. (Other devices' generators and
// `with torch.device` are Python's: tfg/rerun.py.)
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

// Which engine tfg.checkpoint takes on this thread. Inside a function whose saves are matched by position, calls take rerun in both
// runs: another engine in the second than in the first would save other tensors, which may well look the same.
enum class Engine : int { REPLAY, RERUN, INSIDE_RERUN };

Engine engine_here();
void choose_engine(Engine engine);      // for this thread
void choose_default_engine(Engine engine); // for threads that have not chosen

struct RerunAmbient {
    explicit RerunAmbient(bool preserves_rng);

    AutocastState autocast;
    Engine engine;
    std::optional<RngState> rng;
};

class WithEngine {
  public:
    explicit WithEngine(Engine engine) : before_(engine_here()) { choose_engine(engine); }
    ~WithEngine() { choose_engine(before_); }
    WithEngine(const WithEngine &) = delete;

  private:
    Engine before_;
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
    WithEngine engine_;
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
