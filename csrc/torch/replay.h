// SPDX-License-Identifier: BSD-3-Clause
//
// replay: makes a value again that was let go.
//
// The core's closure says which operators, in which order. They run below autograd and autocast, on the thread that asks,
// under the ambient switches and random state they ran under before. In-place writes go to private storages, in order: a value
// that anyone else can still want is copied first, a live storage is never written. What other handles want and lies on the
// way is put back; temporaries die after their last reader.
#pragma once

#include "held_tape.h"

namespace tfg {

// The storage of a handle's value. No lock and no GIL is held by the caller. Throws Error where an external it needs was
// changed, or where a first replay differs from what the forward made.
StoragePtr materialise(const std::shared_ptr<Tape> &tape, int32_t value);

} // namespace tfg
