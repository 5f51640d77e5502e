// SPDX-License-Identifier: BSD-3-Clause
//
// mutex: a mutex that nobody waits for with the GIL in hand.
//
// To count a reference of a storage that Python has touched (`untyped_storage()`) may take the GIL: the second owner keeps the Python
// object alive. Tapes, watches and the ledger count references under their mutexes. So:
//
//   law   whoever has the GIL lets go of it before it waits for one of these.
//
//      thread A: has the mutex, waits for the GIL      thread B: has the GIL, wants the mutex -> lets go of the GIL, waits, takes it back
//
// Mutexes under which integers alone move (statistics, the allocator's shards) are std::mutex.
#pragma once

#include <Python.h>

#include <mutex>

namespace tfg {

class Mutex {
  public:
    bool try_lock() { return mutex_.try_lock(); }
    void unlock() { mutex_.unlock(); }
    void lock() {
        if (mutex_.try_lock()) return;
        if (!Py_IsInitialized() || !PyGILState_Check()) return mutex_.lock();
        PyThreadState *thread = PyEval_SaveThread();
        mutex_.lock();
        PyEval_RestoreThread(thread);
    }

  private:
    std::mutex mutex_;
};

} // namespace tfg
