// SPDX-License-Identifier: BSD-3-Clause
#include "prices.h"

#include <c10/util/flat_hash_map.h>

#include <bit>
#include <mutex>

#include "core/cut.h"
#include "error.h"
#include "fork.h"
#include "host_memory.h"

namespace tfg {

namespace {

// A span's values, numbered in the order in which its operators name them: the same for the same structure.
struct Structure {
    std::vector<tfg_cut_op> ops;
    std::vector<tfg_cut_node> nodes;
    std::vector<int32_t> refs;
    std::vector<int32_t> values; // node -> value
    uint64_t hash = 0;
    int64_t wanted_bytes = 0;

    void mix(uint64_t word) { hash = (hash ^ word) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29; }
    tfg_cut_graph graph() const {
        return {ops.data(),  nodes.data(), refs.data(), static_cast<int32_t>(ops.size()), static_cast<int32_t>(nodes.size()),
                static_cast<int32_t>(refs.size())};
    }
};

// What was made before the span is there as far as the span's prices go.
tfg_cut_node node_of(const Tape &tape, const tfg_tape_view &view, int32_t value, int32_t first_op) {
    const tfg_value &v = view.values[value];
    const tfg_storage &storage = view.storages[v.storage];
    tfg_cut_node node = {};
    node.size_bytes = storage.size_bytes;
    node.is_root = v.state != TFG_VALUE_DERIVABLE || v.producer < first_op;
    node.is_wanted = !node.is_root && storage.current == value && tape.slots[static_cast<size_t>(v.storage)].place.is_somewhere();
    return node;
}

Structure structure_of(const Tape &tape, int32_t first_op) {
    const auto view = tape.look();
    Structure found;
    std::vector<int32_t> node_of_value(static_cast<size_t>(view.n_values), TFG_NONE);
    for (int32_t o = first_op; o < view.n_ops; ++o) {
        const tfg_op &op = view.ops[o];
        found.ops.push_back({op.cost_ns, static_cast<int32_t>(found.refs.size()), op.n_reads, op.n_writes});
        const uint64_t kind = tape.records[static_cast<size_t>(o)].rule->id;
        found.mix(kind << 16 ^ static_cast<uint64_t>(op.n_reads) << 8 ^ static_cast<uint64_t>(op.n_writes));
        for (int32_t i = 0; i < op.n_reads + op.n_writes; ++i) {
            const int32_t value = view.refs[op.first_ref + i];
            int32_t &node = node_of_value[static_cast<size_t>(value)];
            if (node == TFG_NONE) {
                node = static_cast<int32_t>(found.nodes.size());
                found.nodes.push_back(node_of(tape, view, value, first_op));
                found.values.push_back(value);
                const tfg_cut_node &made = found.nodes.back();
                found.mix(uint64_t{1} << 40 | made.is_root | static_cast<uint64_t>(made.is_wanted) << 1);
                if (made.is_wanted) found.wanted_bytes += made.size_bytes;
            }
            found.refs.push_back(node);
            found.mix(static_cast<uint64_t>(node));
        }
    }
    found.mix(static_cast<uint64_t>(std::bit_width(static_cast<uint64_t>(found.wanted_bytes))));
    return found;
}

struct Priced {
    std::vector<double> by_node;
    uint64_t n_seen = 0;
};

struct Book {
    std::mutex mutex;
    ska::flat_hash_map<uint64_t, Priced> by_structure;

    Book() { hold_across_fork(mutex); }
};
Book &book() {
    static auto *instance = new Book;
    return *instance;
}

// Costs settle over the first sights (the blocks of a stack share them), so the prices are worked out again at each doubling.
constexpr uint64_t works_out_last_at = 64;

std::vector<double> work_out(const Structure &structure) {
    struct Scratch {
        tfg_cut *cut = nullptr;
        Scratch() { check(tfg_cut_create(&host_memory, &cut)); }
        ~Scratch() { tfg_cut_destroy(cut); }
    };
    thread_local Scratch scratch;
    const tfg_cut_graph graph = structure.graph();
    std::vector<double> prices(structure.nodes.size());
    tfg_error words = {};
    check(tfg_cut_prices(scratch.cut, &graph, prices.data(), &words), &words);
    return prices;
}

std::vector<double> prices_of(const Structure &structure) {
    {
        std::lock_guard<std::mutex> lock(book().mutex);
        Priced &known = book().by_structure[structure.hash];
        ++known.n_seen;
        const bool is_due = std::has_single_bit(known.n_seen) && known.n_seen <= works_out_last_at;
        if (!is_due && known.by_node.size() == structure.nodes.size()) return known.by_node;
    }
    std::vector<double> prices = work_out(structure);
    std::lock_guard<std::mutex> lock(book().mutex);
    book().by_structure[structure.hash].by_node = prices;
    return prices;
}

} // namespace

void price_span(Tape &tape, int32_t first_op) {
    const auto view = tape.look();
    if (view.n_ops - first_op > most_ops) return;
    const Structure structure = structure_of(tape, first_op);
    if (structure.wanted_bytes == 0) return;
    const std::vector<double> prices = prices_of(structure);
    for (size_t node = 0; node < structure.nodes.size(); ++node) {
        if (!structure.nodes[node].is_wanted) continue;
        Slot &slot = tape.slots[static_cast<size_t>(view.values[structure.values[node]].storage)];
        slot.price_ns_per_byte = prices[node];
        reprice(slot.place, prices[node]);
    }
}

} // namespace tfg
