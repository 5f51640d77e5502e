// SPDX-License-Identifier: BSD-3-Clause
//
// keeping: the half of a tape that keeps (held_tape.h). What is settled as droppable is entered on the device's ledger with its price,
// and with a mask of the sources behind it, so that it can leave at any moment without a look at this tape.
//
//      x (source 0)   mask (source 1)        parameters have no bit: they are held
//        │ │            │
//        │ └── a ──── b ┘                    a: mask 01    b: mask 11    c, made from a pinned operator's r: r's bit
//        └──── ...
#include "cpu_allocator.h"
#include "error.h"
#include "held_tape.h"

namespace tfg {

namespace {

// The bit of a storage that replays start from. A parameter has none, so any drop may lean on it: its watch puts its bytes aside when
// it changes outside (a leaf that requires grad may be a view of somebody's buffer).
uint64_t bit_of(Tape &tape, int32_t id) {
    Slot &slot = tape.slots[static_cast<size_t>(id)];
    const tfg_storage &storage = tape.look().storages[id];
    if ((storage.flags & TFG_STORAGE_EXTERNAL) && slot.is_parameter) {
        slot.watch->relied_on_at = slot.accesses_seen;
        return 0;
    }
    if (slot.source_bit == 0)
        slot.source_bit = add_source(tape.share, {slot.weak, slot.watch, slot.accesses_seen, storage.size_bytes, slot.is_saved, nullptr});
    return slot.source_bit;
}

uint64_t mask_of(Tape &tape, const tfg_tape_view &view, int32_t value) {
    const tfg_value &v = view.values[value];
    return v.state == TFG_VALUE_DERIVABLE ? tape.masks[static_cast<size_t>(value)] : bit_of(tape, v.storage);
}

double price_per_byte(const tfg_tape_view &view, int32_t id) {
    const int32_t producer = view.values[view.storages[id].current].producer;
    return static_cast<double>(view.ops[producer].cost_ns) / static_cast<double>(std::max<int64_t>(1, view.storages[id].size_bytes));
}

} // namespace

void Tape::find_masks(int32_t first_op) {
    const auto view = look();
    masks.resize(static_cast<size_t>(view.n_values), ALL_SOURCES);
    for (int32_t o = first_op; o < view.n_ops; ++o) {
        const tfg_op &op = view.ops[o];
        const int32_t *reads = view.refs + op.first_ref, *writes = reads + op.n_reads;
        bool is_derivable = false;
        for (int32_t i = 0; i < op.n_writes; ++i) is_derivable |= view.values[writes[i]].state == TFG_VALUE_DERIVABLE;
        if (!is_derivable) continue;
        uint64_t mask = 0;
        for (int32_t i = 0; i < op.n_reads && mask != ALL_SOURCES; ++i) mask |= mask_of(*this, view, reads[i]);
        for (int32_t i = 0; i < op.n_writes; ++i) masks[static_cast<size_t>(writes[i])] = mask;
    }
}

void Tape::enter(int32_t id, Stats &to, double price_factor) {
    Slot &slot = slots[static_cast<size_t>(id)];
    const auto view = look();
    const int32_t current = view.storages[id].current;
    if (!slot.strong || current == TFG_NONE || view.values[current].state != TFG_VALUE_DERIVABLE || !tfg_keep_is_droppable(core, id)) return;
    const uint64_t mask = !keeps ? 0 : static_cast<size_t>(current) < masks.size() ? masks[static_cast<size_t>(current)] : ALL_SOURCES;
    if (mask == ALL_SOURCES) return;
    if (wants_evidence && !slot.is_covered) return;
    if (slot.place.is_somewhere()) withdraw_slot(id);
    if (slot.sequence == 0) slot.sequence = next_sequence();
    if (slot.price_ns_per_byte == 0) slot.price_ns_per_byte = price_per_byte(view, id);
    slot.place = keep_on_ledger(slot.strong, {slot.price_ns_per_byte * price_factor, slot.sequence, mask, &share, &to, wants_evidence});
    slot.strong.reset(); // it could not leave before: an entry that someone else holds stays
}

void Tape::take_back(int32_t id) {
    Slot &slot = slots[static_cast<size_t>(id)];
    if (slot.place.is_somewhere()) slot.strong = withdraw_slot(id);
}

StoragePtr Tape::withdraw_slot(int32_t id) {
    std::optional<Fingerprint> evidence;
    StoragePtr storage = withdraw(slots[static_cast<size_t>(id)].place, evidence);
    if (evidence) fingerprints.emplace(look().storages[id].current, *evidence);
    return storage;
}

void Tape::note_evidence() {
    tfg_keep_prune(core);
    const auto view = look();
    for (int32_t id = 0; id < view.n_storages; ++id) {
        const tfg_storage &storage = view.storages[id];
        const Slot &slot = slots[static_cast<size_t>(id)];
        if (!(storage.flags & TFG_STORAGE_EXTERNAL) || (storage.flags & TFG_STORAGE_OPAQUE)) continue;
        if (!view.values[storage.current].is_needed || (slot.is_parameter && trusts_parameters)) continue;
        if (external_bytes.count(storage.current)) continue;
        if (StoragePtr live = slot.live()) external_bytes[storage.current] = {fingerprint_of(*live)};
    }
}

void Tape::notice_dead_sources() {
    const auto view = look();
    for (int32_t id = 0; id < view.n_storages; ++id) {
        const Slot &slot = slots[static_cast<size_t>(id)];
        if (!(view.storages[id].flags & TFG_STORAGE_EXTERNAL) || (view.storages[id].flags & TFG_STORAGE_OPAQUE)) continue;
        if (!slot.live()) check(tfg_tape_foreign_write(core, id, /*is_opaque=*/true));
    }
}

void Tape::settle_so_far(Graveyard &dead) {
    const int32_t n_ops = look().n_ops;
    if (n_settled == n_ops || keeps_all) return;
    if (!fingerprints.empty())
        for (const int32_t n = look().n_values; n_compared < n; ++n_compared) compare_fingerprint(n_compared);
    check(tfg_keep_settle(core, n_settled));
    find_masks(n_settled);
    n_settled = n_ops;
    n_relied_on = static_cast<int32_t>(slots.size());
    for (; n_entered < held_since.size(); ++n_entered) enter(held_since[n_entered], *stats); // what can not enter waits for the end
    if (stress().drop) evict(std::numeric_limits<int64_t>::max(), dead);
}

} // namespace tfg
