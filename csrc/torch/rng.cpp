// SPDX-License-Identifier: BSD-3-Clause
#include "rng.h"

#include <cstring>
#include <mutex>

namespace tfg {

RngState rng_state(const at::Generator &generator) {
    auto *impl = at::check_generator<at::CPUGeneratorImpl>(generator);
    std::lock_guard<std::mutex> lock(impl->mutex_);
    return {impl->engine().data(), impl->next_float_normal_sample(), impl->next_double_normal_sample()};
}

void set_rng_state(const at::Generator &generator, const RngState &state) {
    auto *impl = at::check_generator<at::CPUGeneratorImpl>(generator);
    std::lock_guard<std::mutex> lock(impl->mutex_);
    at::mt19937 engine;
    engine.set_data(state.engine);
    impl->set_engine(engine);
    impl->set_next_float_normal_sample(state.next_float);
    impl->set_next_double_normal_sample(state.next_double);
}

bool same_rng_state(const RngState &a, const RngState &b) {
    return a.engine.left_ == b.engine.left_ && a.engine.next_ == b.engine.next_ && a.engine.seed_ == b.engine.seed_ &&
           a.next_float == b.next_float && a.next_double == b.next_double &&
           std::memcmp(a.engine.state_.data(), b.engine.state_.data(), sizeof(a.engine.state_)) == 0;
}

at::Generator generator_with(const RngState &state) {
    at::Generator generator = at::detail::createCPUGenerator();
    set_rng_state(generator, state);
    return generator;
}

BorrowDefaultGenerator::BorrowDefaultGenerator(const RngState &state) : own_(rng_state(at::detail::getDefaultCPUGenerator())) {
    set_rng_state(at::detail::getDefaultCPUGenerator(), state);
}

BorrowDefaultGenerator::~BorrowDefaultGenerator() { set_rng_state(at::detail::getDefaultCPUGenerator(), own_); }

} // namespace tfg
