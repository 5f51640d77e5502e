// SPDX-License-Identifier: BSD-3-Clause
#include "fork.h"

#include <pthread.h>

#include <mutex>
#include <vector>

namespace tfg {

namespace {

struct Handles {
    std::mutex mutex;
    std::vector<ForkHandle> all;
};
Handles &handles() {
    static auto *instance = new Handles;
    return *instance;
}

void before_fork() {
    handles().mutex.lock();
    for (const ForkHandle &each : handles().all) each.lock(each.mutex);
}

void after_fork() {
    for (const ForkHandle &each : handles().all) each.unlock(each.mutex);
    handles().mutex.unlock();
}

} // namespace

void add_fork_handle(ForkHandle handle) {
    static const int registered = pthread_atfork(&before_fork, &after_fork, &after_fork);
    (void)registered;
    std::lock_guard<std::mutex> lock(handles().mutex);
    handles().all.push_back(handle);
}

} // namespace tfg
