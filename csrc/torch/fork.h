// SPDX-License-Identifier: BSD-3-Clause
//
// fork: process-wide mutexes are held across a fork, so that the child, which has one thread, finds them free and what they guard whole.
// Each is a leaf (nobody takes a second one under it), so the order in which they are taken does not matter. No std::shared_mutex: glibc
// knows a writer by its thread id, and the child's is another.
#pragma once

namespace tfg {

struct ForkHandle {
    void *mutex;
    void (*lock)(void *);
    void (*unlock)(void *);
};
void add_fork_handle(ForkHandle handle);

// From then on, for good: `mutex` is never destroyed.
template <typename AnyMutex> void hold_across_fork(AnyMutex &mutex) {
    add_fork_handle({&mutex, [](void *each) { static_cast<AnyMutex *>(each)->lock(); },
                     [](void *each) { static_cast<AnyMutex *>(each)->unlock(); }});
}

} // namespace tfg
