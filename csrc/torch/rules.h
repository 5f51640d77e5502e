// SPDX-License-Identifier: BSD-3-Clause
//
// rules: what tfg knows about an operator, worked out once from its schema and a few short tables of names.
//
// Trusted: aten operators are functions of their recorded arguments and the ambient switches, except those in the tables of
// rules.cpp. Everything else is kept: an operator of another library is never replayed.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace tfg {

// Why results are kept; the words are in why_words().
enum class Why : uint8_t {
    NONE,
    FOREIGN_OPERATOR,
    COLLECTIVE,
    NOT_DETERMINISTIC,
    HIDDEN_WRITE,
    WRITES_OUTSIDE,
    OPAQUE_INPUT,
    UNINITIALISED,
    ODD_TENSOR,
    RESHAPES_STORAGE,
    OUTSIDE_CHANGED,
    LOST_INPUT,
    MISMATCH,
    POLICY,
    COUNT,
};
const char *why_words(Why why);

struct Rule {
    std::optional<c10::FunctionSchema> schema; // none for torch's own: a library's may go, and another come at its address
    Why why = Why::NONE;                 // not NONE: never replayed
    bool is_random = false;              // may draw from a generator
    int32_t generator_argument = -1;     // index of the schema's generator argument
    bool makes_garbage = false;          // returns memory that nobody wrote: empty and kin
    bool overwrites = false;             // writes its first argument without reading it: fill_, copy_, bernoulli_, …
    bool is_lazy_clone = false;
    bool is_pointwise = false; // torch's tag: reads no matrix precision
    bool takes_tensors = false;
    int32_t dtype_argument = -1;         // a factory's optional dtype
    uint64_t written_arguments = 0;      // bit i: the schema writes argument i (i < 64)
    bool writes_everything = false;      // a schema that hides its writes: every tensor argument counts as written
    uint64_t statistics_arguments = 0;   // batch norm: running statistics, left out of a replay in training
    int32_t training_argument = -1;
    int32_t n_arguments = 0, n_returns = 0;
    uint64_t id = 0; // for the proof: the same for the same operator in one process
};

const Rule &rule_of(const c10::OperatorHandle &op);

// Takes pure views off the recorder's key: geometry needs no record.
void skip_views(c10::DispatchKey key);

} // namespace tfg
