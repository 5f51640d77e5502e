// SPDX-License-Identifier: BSD-3-Clause
//
// watch: notices writes that no recorder saw.
//
// torch calls a storage's materialiser once, just before it gives out a mutable pointer: to NumPy, DLPack, ctypes, Triton,
// or to an in-place operator outside every region. A Watch counts those accesses. A tape that relies on a storage notes the
// count; when it has moved, the bytes may have too.
//
// The materialiser also fires inside some recorded kernels on arguments that are only read. While a thread is inside a
// recorded kernel, it lists that operator's storages; a firing on one that is only read is not counted.
//
// When a counted access hits a storage that a handle waits for, the watch takes a strong reference: autograd would serve
// the changed bytes, and so must we. The bytes' fingerprint before the access is noted, so that a refill with the same
// bytes (a sharding engine) is no change.
//
// Threads: the registry has one mutex, held for look-ups only; a Watch's own numbers are atomic or under that mutex.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "geometry.h"

namespace tfg {

constexpr size_t put_aside_bytes = 64 << 10; // storages up to this size are put aside rather than only noted

using Fingerprint = std::array<uint64_t, 2>;
Fingerprint fingerprint_of(const c10::StorageImpl &storage);

// What a storage held just before an access that was counted.
struct Before {
    uint32_t count;
    std::optional<Fingerprint> bytes; // not for a recorded write: the recorder puts aside what its own tape needs
    StoragePtr copy;                  // where the storage is small and a tape leaned on it
};

struct Watch final : c10::intrusive_ptr_target {
    explicit Watch(StoragePtr storage);

    void arm(); // cheap when armed already; not possible while copy-on-write owns the slot (can_see is then false)
    StoragePtr share_copy(); // the bytes as they are now, one copy for all tapes that ask while they stay the same
    std::optional<Before> before(uint32_t count) const; // just before access number `count` + 1

    std::atomic<uint32_t> n_accesses{0};
    std::atomic<int32_t> n_handles{0};
    std::atomic<int64_t> relied_on_at{-1}; // the count at which a tape last leaned on the bytes
    bool can_see = false;

    void release_resources() override; // the last owner is gone: out of the registry, off the storage

  private:
    friend void on_mutable_access(c10::StorageImpl *);
    c10::StorageImpl *address_;
    WeakStorage weak_; // keeps the address from being used again
    StoragePtr pinned_;
    std::optional<WeakStorage> copy_;
    std::vector<Before> before_;
};

using WatchPtr = c10::intrusive_ptr<Watch>;

// The storage's watch, made and armed at first sight.
WatchPtr watch(const StoragePtr &storage);

// While alive: accesses of these storages by this thread are the recorded operator's own. Those it only reads are not counted.
struct RecordedKernel {
    RecordedKernel(c10::ArrayRef<c10::StorageImpl *> read_only, c10::ArrayRef<c10::StorageImpl *> written);
    ~RecordedKernel();
    RecordedKernel(const RecordedKernel &) = delete;

    const c10::ArrayRef<c10::StorageImpl *> read_only, written;

  private:
    const RecordedKernel *outer_;
};

} // namespace tfg
