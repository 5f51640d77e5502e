// SPDX-License-Identifier: BSD-3-Clause
//
// held_tape: the C++ half of a tape. The core holds integers; here, at the same indices, are the storages and the boxed arguments.
//
//   core storage i  <->  slots[i]   who holds the bytes: strong (kept), the ledger (kept, and may leave at any moment), weak (seen)
//   core operator i <->  records[i] the operator's handle and where its arguments lie in the arenas below
//
// Arenas (constants, arguments, tensors, dims) are appended to and never shrink before the tape is cleared, so recording asks
// for no memory once warm. Cleared tapes are kept for the next region.
//
// Two policies. A tape that lets go drops everything droppable where a region ends. A tape that keeps enters it on the device's
// ledger, from where it leaves only under pressure; it holds no tensor from outside but parameters, until a drop leans on one.
//
// Ownership: handles own the tape; the tape owns storages, never a tensor with a graph behind it.
// Threads: `mutex` guards everything. Under it no operator runs and no storage dies: what is to be released is moved into a Graveyard,
// which dies after the lock. Small storages may be copied under it, and bytes fingerprinted; the GIL may be waited for (mutex.h).
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/flat_hash_map.h>

#include <memory>
#include <vector>

#include "ambient.h"
#include "core/closure.h"
#include "core/keep.h"
#include "core/tape.h"
#include "device_ledger.h"
#include "mutex.h"
#include "proof.h"
#include "rng.h"
#include "rules.h"
#include "stats.h"
#include "watch.h"

namespace tfg {

struct TensorRef {
    int32_t value = TFG_NONE; // TFG_NONE: an undefined tensor
    int32_t first_dim = 0, n_dims = 0;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    bool is_undefined = false; // an undefined tensor, as against None
    int64_t offset_elems = 0;
};

enum class ArgumentKind : uint8_t { CONSTANT, TENSOR, TENSOR_LIST, OPTIONAL_TENSOR_LIST };

struct Argument {
    ArgumentKind kind;
    int32_t first; // constant's or tensor's index
    int32_t count;
};

struct Record {
    c10::OperatorHandle op;
    const Rule *rule;
    int64_t key;   // whose statistics
    uint64_t site; // for the proof
    int32_t first_argument, n_arguments;
    int32_t first_output; // outputs[first_output + i]: the value that return i brings, or TFG_NONE
    int32_t rng = TFG_NONE, ambient = TFG_NONE;
    Why why;

    std::string rule_name() const { return op.schema().name(); }
};

// The bytes of an external that is not put aside, and the backward (graph task) that compared them last.
struct ReliedOn {
    Fingerprint bytes;
    int64_t compared_in = -1;
};

struct Slot {
    StoragePtr strong;
    WeakStorage weak;
    WatchPtr watch;
    uint32_t accesses_seen = 0;
    c10::VariableVersion version; // externals only
    uint32_t version_seen = 0;
    bool is_garbage = false;  // some bytes were never written
    bool is_parameter = false;
    bool is_noted = false;    // in held_since
    bool is_covered = false;  // no byte of it but its first tensor's: its fingerprint says something
    bool is_saved = false; // autograd keeps it too: put aside only when it is about to change
    Place place;               // on the device's ledger: the strong reference lies there
    int64_t sequence = 0;      // when it was first entered there
    double price_ns_per_byte = 0;
    uint64_t source_bit = 0;   // its bit in the masks, where replays start from it
    int64_t replayed_in = -1;  // the backward (graph task) that last made it again

    explicit Slot(WeakStorage w) : weak(std::move(w)) {}
    StoragePtr live() const { return strong ? strong : weak.lock(); }
};

// So that the push_back to come can not fail.
template <typename Element> void make_room_for_one(std::vector<Element> &all) {
    if (all.size() == all.capacity()) all.reserve(2 * all.size() + 8);
}

class Tape : public std::enable_shared_from_this<Tape> {
  public:
    static std::shared_ptr<Tape> make();
    ~Tape();
    Tape(const Tape &) = delete;

    // -- recording -------------------------------------------------------------------------------------
    int32_t find(c10::StorageImpl *storage) const; // slot, or TFG_NONE
    int32_t find_or_add_external(const at::Tensor &tensor, c10::StorageImpl *storage);
    int32_t add_fresh(c10::StorageImpl *storage);
    void notice_foreign_writes(int32_t slot); // compares the watch; a moved one makes the storage opaque
    TensorRef reference(const at::Tensor &tensor, int32_t value);
    void hold_for_good(int32_t slot); // until the tape is cleared, as if a handle waited for it
    void note_held(int32_t slot);     // once, until the next settling

    // -- letting go ----------------------------------------------------------------------------------
    void settle(int32_t first_op, int64_t key, Graveyard &dead); // settles, then drops what is droppable
    void drop_slot(int32_t slot, Graveyard &dead);
    void prune(Graveyard &dead);
    void clear(Graveyard &dead);
    void clear_if_idle(Graveyard &dead);
    void put_aside_relied(int32_t slot); // before a recorded write to a root that settled values lean on
    void drop_put_back(Graveyard &dead);

    // -- keeping -------------------------------------------------------------------------------------------------------
    void settle_so_far(Graveyard &dead);     // inside a region, under pressure: what has been made so far may leave
    void enter(int32_t slot, Stats &stats, double price_factor = 1); // onto the ledger
    void take_back(int32_t slot);            // off the ledger: it is kept for good
    StoragePtr withdraw_slot(int32_t slot);  // gives up its place; nullptr where it has left, what it held is noted then
    void find_masks(int32_t first_op);
    void note_evidence();                    // fingerprints of what replays would read from outside
    void notice_dead_sources();              // a tensor from outside that nobody holds any more: what leans on it is kept
    void compare_fingerprint(int32_t value); // first sight: bytes that are not what the producer left were written by someone unseen
    bool is_any_droppable() const;
    Why why_kept(int32_t slot) const;

    // -- asking -------------------------------------------------------------------------------------------------------
    tfg_tape_view look() const;
    bool is_live(int32_t value) const;
    StoragePtr source(int32_t value) const; // nullptr where it is not live

    mutable Mutex mutex;
    tfg_tape *core = nullptr;
    tfg_closure *closure = nullptr;
    std::vector<Slot> slots;
    std::vector<Record> records;
    std::vector<Argument> arguments;
    std::vector<TensorRef> tensors;
    std::vector<int64_t> dims;
    std::vector<c10::IValue> constants;
    std::vector<int32_t> outputs;
    std::vector<std::unique_ptr<RngState>> rngs;
    std::vector<Ambient> ambients;
    ska::flat_hash_map<c10::StorageImpl *, int32_t> by_storage;
    ska::flat_hash_map<int32_t, Fingerprint> fingerprints; // value -> bytes, where the proof is still wanted
    ska::flat_hash_map<int32_t, StoragePtr> copies;        // value -> its bytes, put aside before they could change
    ska::flat_hash_map<int32_t, ReliedOn> external_bytes; // value of an external -> what it held when it was first relied on
    std::vector<int32_t> held_since; // slots that got a handle since the region began
    std::vector<int32_t> put_back;   // slots that a replay brought back
    int64_t n_handles = 0;
    int32_t n_regions = 0; // running now
    bool is_closed = false;
    bool is_pruned = false;
    bool trusts_parameters = false; // a sharding engine frees and refills them: trusted to their version
    bool keeps = false;     // the policy; else it lets go
    bool is_calm = false;   // of the region that runs now: see proof.h
    bool wants_evidence = false; // a calm region has run on it
    Stats *stats = nullptr; // of the region that runs now, or ran last
    Share share;
    std::vector<uint64_t> masks; // value -> the sources behind it, where it is derivable
    int32_t n_settled = 0;       // operators that settle_so_far has been through
    int32_t n_relied_on = 0;     // slots that a settling has seen: settled values may lean on them
    size_t n_entered = 0;        // of held_since
    int32_t n_compared = 0;      // values whose fingerprints have been compared
    bool keeps_all = false; // settles, lets go of nothing by itself: the tests choose what is dropped
    int64_t graph_task = -1; // the backward that a drop_put_back is queued for

  private:
    Tape();
    static void recycle(Tape *tape);
};

} // namespace tfg
