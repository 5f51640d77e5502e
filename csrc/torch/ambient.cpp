// SPDX-License-Identifier: BSD-3-Clause
#include "ambient.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace tfg {

namespace {

using at::Float32Backend;
using at::Float32Op;

constexpr int precision_bits = 3;
struct PrecisionSwitch {
    Float32Backend backend;
    Float32Op op;
};
constexpr PrecisionSwitch precision_switches[] = {
    {Float32Backend::GENERIC, Float32Op::ALL},   {Float32Backend::MKLDNN, Float32Op::ALL}, {Float32Backend::MKLDNN, Float32Op::MATMUL},
    {Float32Backend::MKLDNN, Float32Op::CONV}, {Float32Backend::MKLDNN, Float32Op::RNN},
};
constexpr int n_precisions = sizeof(precision_switches) / sizeof(*precision_switches);
enum Switch { GRAD, DETERMINISTIC, WARN_ONLY, FILL_UNINITIALISED, MKLDNN, MKLDNN_DETERMINISTIC, NNPACK, N_SWITCHES };

uint32_t float_control_now() {
#if defined(__SSE__)
    return _mm_getcsr() & ~0x3fu; // without the sticky exception bits
#else
    return 0;
#endif
}

void set_float_control(uint32_t control) {
#if defined(__SSE__)
    _mm_setcsr(control);
#endif
    (void)control;
}

// Only where it differs: to set one makes it explicit, and what inherited from it stops following.
void apply_precision(int i, uint64_t wanted, uint64_t differ) {
    const int shift = N_SWITCHES + i * precision_bits;
    constexpr uint64_t mask = (1 << precision_bits) - 1;
    if ((differ >> shift & mask) == 0) return;
    at::globalContext().setFloat32Precision(precision_switches[i].backend, precision_switches[i].op,
                                            static_cast<at::Float32Precision>(wanted >> shift & mask));
}

void apply(const Ambient &wanted, const Ambient &now) {
    auto &context = at::globalContext();
    const uint64_t differ = wanted.switches ^ now.switches;
    const auto is_on = [&](Switch bit) { return (wanted.switches >> bit & 1) != 0; };
    const auto differs = [&](Switch bit) { return (differ >> bit & 1) != 0; };
    if (differs(GRAD)) c10::GradMode::set_enabled(is_on(GRAD));
    if (differs(DETERMINISTIC) || differs(WARN_ONLY)) context.setDeterministicAlgorithms(is_on(DETERMINISTIC), is_on(WARN_ONLY));
    if (differs(FILL_UNINITIALISED)) context.setDeterministicFillUninitializedMemory(is_on(FILL_UNINITIALISED));
    if (differs(MKLDNN)) context.setUserEnabledMkldnn(is_on(MKLDNN));
    if (differs(MKLDNN_DETERMINISTIC)) context.setDeterministicMkldnn(is_on(MKLDNN_DETERMINISTIC));
    if (differs(NNPACK)) context.setUserEnabledNNPACK(is_on(NNPACK));
    for (int i = 0; i < n_precisions; ++i) apply_precision(i, wanted.switches, differ);
    if (wanted.n_threads != now.n_threads) at::set_num_threads(wanted.n_threads);
    if (wanted.float_control != now.float_control) set_float_control(wanted.float_control);
    if (wanted.default_dtype != now.default_dtype) c10::set_default_dtype(c10::scalarTypeToTypeMeta(wanted.default_dtype));
}

Ambient without_precisions() {
    const auto &context = at::globalContext();
    const bool bits[N_SWITCHES] = {c10::GradMode::is_enabled(),
                                   context.deterministicAlgorithms(),
                                   context.deterministicAlgorithmsWarnOnly(),
                                   context.deterministicFillUninitializedMemory(),
                                   context.userEnabledMkldnn(),
                                   context.deterministicMkldnn(),
                                   context.userEnabledNNPACK()};
    Ambient ambient;
    for (int bit = 0; bit < N_SWITCHES; ++bit) ambient.switches |= uint64_t{bits[bit]} << bit;
    ambient.n_threads = at::get_num_threads();
    ambient.float_control = float_control_now();
    ambient.default_dtype = c10::get_default_dtype_as_scalartype();
    return ambient;
}

} // namespace

Ambient ambient_now() {
    Ambient ambient = without_precisions();
    int shift = N_SWITCHES;
    for (const auto &each : precision_switches) {
        ambient.switches |= static_cast<uint64_t>(at::globalContext().float32Precision(each.backend, each.op)) << shift;
        shift += precision_bits;
    }
    return ambient;
}

Ambient ambient_now(const Ambient &last) {
    Ambient ambient = without_precisions();
    ambient.switches |= last.switches & ~((uint64_t{1} << N_SWITCHES) - 1);
    return ambient;
}

RestoreAmbient::RestoreAmbient(const Ambient &wanted) : own_(ambient_now()), is_changed_(!(own_ == wanted)) {
    if (is_changed_) apply(wanted, own_);
}

RestoreAmbient::~RestoreAmbient() {
    if (is_changed_) apply(own_, ambient_now());
}

} // namespace tfg
