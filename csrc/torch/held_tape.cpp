// SPDX-License-Identifier: BSD-3-Clause
#include "held_tape.h"

#include "cpu_allocator.h"
#include "error.h"
#include "fork.h"
#include "host_memory.h"
#include "module.h"

namespace tfg {

namespace {

// Cleared tapes wait here with their memory. Never destroyed: handles may outlive static destructors.
struct Pool {
    std::mutex mutex;
    std::vector<Tape *> warm;

    Pool() { hold_across_fork(mutex); }
};
Pool &pool() {
    static auto *instance = new Pool;
    return *instance;
}
constexpr size_t pool_tapes = 64;
constexpr size_t always_held_bytes = 256; // a scalar or an empty tensor from outside costs less than not to be able to replay

} // namespace

void Tape::recycle(Tape *tape) {
    {
        Graveyard dead;
        tape->clear(dead);
    }
    tape->is_closed = tape->trusts_parameters = tape->keeps = false;
    {
        std::lock_guard<std::mutex> lock(pool().mutex);
        if (pool().warm.size() < pool_tapes) {
            pool().warm.push_back(tape);
            return;
        }
    }
    delete tape;
}

std::shared_ptr<Tape> Tape::make() {
    Tape *tape = nullptr;
    {
        std::lock_guard<std::mutex> lock(pool().mutex);
        if (!pool().warm.empty()) {
            tape = pool().warm.back();
            pool().warm.pop_back();
        }
    }
    return std::shared_ptr<Tape>(tape ? tape : new Tape, &Tape::recycle);
}

Tape::Tape() {
    check(tfg_tape_create(&host_memory, &core));
    check(tfg_closure_create(&host_memory, &closure));
}

Tape::~Tape() {
    tfg_closure_destroy(closure);
    tfg_tape_destroy(core);
}

tfg_tape_view Tape::look() const {
    tfg_tape_view view;
    tfg_tape_look(core, &view);
    return view;
}

int32_t Tape::find(c10::StorageImpl *storage) const {
    auto it = by_storage.find(storage);
    return it == by_storage.end() ? TFG_NONE : it->second;
}

// The weak reference in the slot keeps the address from being used again, so a hit is the same storage. All that may fail comes first:
// both halves of the tape grow, or neither.
static int32_t add_slot(Tape &tape, c10::StorageImpl *storage, uint32_t flags) {
    StoragePtr pointer = StoragePtr::reclaim_copy(storage);
    Slot slot{WeakStorage(pointer)};
    slot.watch = watch(pointer);
    slot.accesses_seen = slot.watch->n_accesses.load();
    make_room_for_one(tape.slots);
    const auto place = tape.by_storage.emplace(storage, static_cast<int32_t>(tape.slots.size())).first;
    int32_t id;
    const tfg_status status = tfg_tape_add_storage(tape.core, static_cast<int64_t>(storage->nbytes()), flags, &id);
    if (status != TFG_OK) tape.by_storage.erase(place);
    check(status);
    tape.slots.push_back(std::move(slot));
    return id;
}

int32_t Tape::add_fresh(c10::StorageImpl *storage) { return add_slot(*this, storage, 0); }

// A frozen parameter does not require grad; its Python class says what it is.
static bool is_parameter_object(const at::Tensor &tensor) {
    PyObject *object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
    return object && reinterpret_cast<PyObject *>(Py_TYPE(object)) == parameter_class();
}

int32_t Tape::find_or_add_external(const at::Tensor &tensor, c10::StorageImpl *storage) {
    int32_t id = find(storage);
    if (id != TFG_NONE) {
        notice_foreign_writes(id);
        return id;
    }
    const at::Tensor owner = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
    const bool is_parameter = (owner.requires_grad() && owner.is_leaf()) || is_parameter_object(owner);
    const uint32_t opaque = is_parameter || came_from_torch(*storage) ? 0 : static_cast<uint32_t>(TFG_STORAGE_OPAQUE);
    id = add_slot(*this, storage, TFG_STORAGE_EXTERNAL | opaque);
    Slot &slot = slots.back();
    if (is_parameter || !keeps || storage->nbytes() <= always_held_bytes) slot.strong = slot.weak.lock();
    slot.is_parameter = is_parameter;
    if (!tensor.is_inference()) {
        slot.version = tensor.unsafeGetTensorImpl()->version_counter();
        slot.version_seen = slot.version.current_version();
    }
    return id;
}

void Tape::notice_foreign_writes(int32_t id) {
    Slot &slot = slots[static_cast<size_t>(id)];
    const uint32_t now = slot.watch->n_accesses.load();
    if (now == slot.accesses_seen || (trusts_parameters && slot.is_parameter)) return;
    if (const int32_t current = look().storages[id].current; current != TFG_NONE && !copies.count(current))
        if (auto before = slot.watch->before(slot.accesses_seen); before && before->copy) copies[current] = before->copy;
    slot.accesses_seen = now;
    take_back(id);
    check(tfg_tape_foreign_write(core, id, /*is_opaque=*/true));
}

TensorRef Tape::reference(const at::Tensor &tensor, int32_t value) {
    TensorRef ref;
    ref.value = value;
    ref.first_dim = static_cast<int32_t>(dims.size());
    ref.n_dims = static_cast<int32_t>(tensor.dim());
    ref.dtype = tensor.scalar_type();
    ref.offset_elems = tensor.storage_offset();
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    dims.insert(dims.end(), sizes.begin(), sizes.end());
    dims.insert(dims.end(), strides.begin(), strides.end());
    return ref;
}

void Tape::hold_for_good(int32_t id) {
    Slot &slot = slots[static_cast<size_t>(id)];
    tfg_tape_hold(core, look().storages[id].current);
    if (!slot.strong) slot.strong = slot.weak.lock();
    note_held(id);
}

void Tape::note_held(int32_t id) {
    Slot &slot = slots[static_cast<size_t>(id)];
    if (!slot.is_noted) held_since.push_back(id);
    slot.is_noted = true;
}

StoragePtr Tape::source(int32_t value) const {
    const auto view = look();
    const tfg_value &v = view.values[value];
    const tfg_storage &storage = view.storages[v.storage];
    const Slot &slot = slots[static_cast<size_t>(v.storage)];
    if (auto copy = copies.find(value); copy != copies.end()) return copy->second;
    if (storage.current != value) return nullptr;
    StoragePtr live = slot.live();
    if (!live || live->nbytes() != static_cast<size_t>(storage.size_bytes)) return nullptr;
    const bool is_external = (storage.flags & TFG_STORAGE_EXTERNAL) != 0;
    const uint32_t accesses = slot.watch->n_accesses.load();
    bool is_same = accesses == slot.accesses_seen;
    const bool is_trusted = trusts_parameters && slot.is_parameter;
    if (is_external && (is_trusted || !slot.watch->can_see) && slot.version.enabled())
        is_same = slot.version.current_version() == slot.version_seen;
    if (!is_same) {
        const auto before = slot.watch->before(slot.accesses_seen);
        if (before && before->copy) return before->copy;
        is_same = before && before->bytes && *before->bytes == fingerprint_of(*live);
    }
    return is_same ? live : nullptr;
}

bool Tape::is_live(int32_t value) const { return source(value) != nullptr; }

// ------------------------------------------------------------------------------------------------------------- letting go

void Tape::drop_slot(int32_t id, Graveyard &dead) {
    Slot &slot = slots[static_cast<size_t>(id)];
    if (!tfg_keep_is_droppable(core, id)) return;
    if (StoragePtr held = slot.place.is_somewhere() ? withdraw_slot(id) : std::move(slot.strong)) dead.push_back(std::move(held));
}

// Before anything is dropped that leans on externals: small ones are put aside (counters, masks and scales change often); the bytes of
// large ones and of parameters are noted, since someone may hold a raw pointer to them from before (a NumPy view). Roots of our own get
// only a mark: they are put aside, where small, when someone is about to write them.
static void rely_on_externals(Tape &tape) {
    tfg_keep_prune(tape.core);
    const auto view = tape.look();
    for (int32_t id = 0; id < view.n_storages; ++id) {
        const tfg_storage &storage = view.storages[id];
        Slot &slot = tape.slots[static_cast<size_t>(id)];
        if ((storage.flags & TFG_STORAGE_OPAQUE) || storage.current == TFG_NONE || !view.values[storage.current].is_needed) continue;
        if (!(storage.flags & TFG_STORAGE_EXTERNAL)) {
            if (view.values[storage.current].state == TFG_VALUE_ROOT) slot.watch->relied_on_at = slot.accesses_seen;
            continue;
        }
        if (slot.is_parameter && tape.trusts_parameters) continue;
        if (!slot.strong || tape.copies.count(storage.current) || tape.external_bytes.count(storage.current)) continue;
        slot.watch->relied_on_at = slot.accesses_seen;
        if (slot.is_parameter || slot.is_saved || static_cast<size_t>(storage.size_bytes) > put_aside_bytes) {
            tape.external_bytes[storage.current] = {fingerprint_of(*slot.strong)};
            continue;
        }
        tape.copies[storage.current] = slot.watch->share_copy();
    }
}

// First sight: bytes that are not what the producer left were written by someone unseen.
void Tape::compare_fingerprint(int32_t value) {
    auto noted = fingerprints.find(value);
    if (noted == fingerprints.end()) return;
    const auto view = look();
    const int32_t id = view.values[value].storage;
    const tfg_storage &storage = view.storages[id];
    if (storage.current != value || (storage.flags & TFG_STORAGE_OPAQUE)) return;
    StoragePtr live = slots[static_cast<size_t>(id)].live();
    if (!live || fingerprint_of(*live) == noted->second) return;
    take_back(id);
    check(tfg_tape_foreign_write(core, id, /*is_opaque=*/true));
}

void Tape::settle(int32_t first_op, int64_t key, Graveyard &dead) {
    Stats &of_region = stats_of(key);
    first_op = std::min(first_op, n_settled); // of a region around this one: what comes after leans on it
    for (size_t id = 0; id < slots.size(); ++id) notice_foreign_writes(static_cast<int32_t>(id));
    if (!fingerprints.empty())
        for (int32_t value = 0, n = look().n_values; value < n; ++value) compare_fingerprint(value);
    if (keeps) notice_dead_sources();
    check(tfg_keep_settle(core, first_op));
    n_relied_on = static_cast<int32_t>(slots.size()); // from here on, a write that is recorded puts the old value aside first
    if (keeps) {
        find_masks(first_op);
        if (!is_calm) note_evidence();
    } else if (is_any_droppable()) {
        rely_on_externals(*this);
    }
    n_settled = look().n_ops;
    if (keeps_all) return;
    for (const int32_t id : held_since) {
        const bool is_entered = slots[static_cast<size_t>(id)].place.is_somewhere();
        if (!slots[static_cast<size_t>(id)].strong && !is_entered) continue;
        const int64_t size_bytes = look().storages[id].size_bytes;
        if (is_entered)
            ; // under pressure, before the region's end
        else if (keeps)
            enter(id, of_region);
        else
            drop_slot(id, dead);
        const Slot &slot = slots[static_cast<size_t>(id)];
        if (!slot.strong && !keeps) of_region.dropped_bytes += size_bytes;
        if (slot.strong || keeps) of_region.kept_bytes += size_bytes;
        if (slot.strong) of_region.kept_why[static_cast<size_t>(why_kept(id))] += size_bytes;
    }
    for (const int32_t id : held_since) slots[static_cast<size_t>(id)].is_noted = false;
    held_since.clear();
    n_entered = 0;
    if (keeps && stress().drop) evict(std::numeric_limits<int64_t>::max(), dead);
}

bool Tape::is_any_droppable() const {
    for (const int32_t id : held_since)
        if (tfg_keep_is_droppable(core, id)) return true;
    return false;
}

Why Tape::why_kept(int32_t id) const {
    const auto view = look();
    const int32_t current = view.storages[id].current;
    const int32_t producer = current == TFG_NONE ? TFG_NONE : view.values[current].producer;
    if (producer == TFG_NONE) return Why::OUTSIDE_CHANGED;
    const Why why = records[static_cast<size_t>(producer)].why;
    return why == Why::NONE ? Why::LOST_INPUT : why;
}

void Tape::prune(Graveyard &dead) {
    if (is_pruned) return;
    is_pruned = true;
    tfg_keep_prune(core);
    const auto view = look();
    for (int32_t id = 0; id < view.n_storages; ++id) {
        Slot &slot = slots[static_cast<size_t>(id)];
        bool is_needed = view.storages[id].n_handles > 0;
        for (int32_t v = view.storages[id].current; v != TFG_NONE; v = view.values[v].previous) {
            is_needed |= view.values[v].is_needed != 0;
            auto copy = copies.find(v);
            if (copy == copies.end() || (v == view.storages[id].current && view.storages[id].n_handles)) continue;
            if (!view.values[v].is_needed) dead.push_back(std::move(copy->second)), copies.erase(copy);
        }
        const int32_t last = view.storages[id].current;
        const bool is_put_aside = last != TFG_NONE && view.storages[id].n_handles == 0 && copies.count(last);
        if (slot.strong && (!is_needed || is_put_aside)) dead.push_back(std::move(slot.strong));
    }
}

void Tape::put_aside_relied(int32_t id) {
    Slot &slot = slots[static_cast<size_t>(id)];
    const int32_t current = look().storages[id].current;
    if (current == TFG_NONE || copies.count(current)) return;
    if (id >= n_relied_on || look().values[current].state != TFG_VALUE_ROOT) return; // what is derivable can be made again
    const bool has_bit = slot.source_bit != 0; // a parameter has none: it is held, and any drop may lean on it
    if (keeps && !(has_bit ? must_put_aside(share, slot.source_bit) : slot.is_parameter)) return;
    if (slot.live() && source(current)) copies[current] = copy_storage(*slot.live());
}

void Tape::drop_put_back(Graveyard &dead) {
    for (const int32_t id : put_back) drop_slot(id, dead);
    put_back.clear();
    graph_task = -1;
}

void Tape::clear(Graveyard &dead) {
    std::optional<Fingerprint> evidence;
    for (Slot &slot : slots) {
        if (slot.strong) dead.push_back(std::move(slot.strong));
        if (slot.place.is_somewhere())
            if (StoragePtr kept = withdraw(slot.place, evidence)) dead.push_back(std::move(kept));
    }
    clear_share(share, dead);
    for (auto &[value, copy] : copies) dead.push_back(std::move(copy));
    copies.clear();
    tfg_tape_reset(core);
    slots.clear(), records.clear(), arguments.clear(), tensors.clear(), dims.clear(), constants.clear(), outputs.clear();
    rngs.clear(), ambients.clear(), by_storage.clear(), fingerprints.clear(), external_bytes.clear(), held_since.clear(), put_back.clear();
    masks.clear();
    n_handles = 0;
    n_settled = n_compared = n_relied_on = 0;
    n_entered = 0;
    is_pruned = keeps_all = is_calm = wants_evidence = false;
    graph_task = -1;
}

void Tape::clear_if_idle(Graveyard &dead) {
    if (n_handles == 0 && n_regions == 0 && !slots.empty()) clear(dead);
}

} // namespace tfg
