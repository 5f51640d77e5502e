// SPDX-License-Identifier: BSD-3-Clause
#include "replay.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <chrono>
#include <limits>
#include <utility>

#include "core/putback.h"
#include "cpu_allocator.h"
#include "error.h"
#include "peak.h"

namespace tfg {

namespace {

using torch::jit::Stack;

// Everything at or above the recorder's key: autograd, autocast, modes, functorch.
c10::DispatchKeySet above_kernels() {
    return c10::DispatchKeySet(c10::DispatchKeySet::FULL) -
           c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Fake);
}

class Replay {
  public:
    Replay(const std::shared_ptr<Tape> &tape, int32_t wanted) : tape_(*tape), wanted_(wanted) {}

    StoragePtr run() {
        std::unique_lock<Mutex> lock(tape_.mutex);
        if (StoragePtr live = tape_.source(wanted_)) return live;
        plan();
        for (size_t step = 0; step < ops_.size(); ++step) run_op(lock, ops_[step]);
        StoragePtr result = private_.at(wanted_);
        bring_back(wanted_, result);
        return result;
    }

  private:
    void plan() {
        tfg_error words = {};
        const auto is_live = [](void *tape, int32_t value) { return static_cast<Tape *>(tape)->is_live(value); };
        const tfg_status status = tfg_closure_find(tape_.closure, tape_.core, &wanted_, 1, is_live, &tape_, &words);
        if (status == TFG_ERR_UNREACHABLE)
            throw Error(std::string("tfg: a saved tensor was let go and can not be made again, since a tensor from outside the region "
                                    "that its replay needs (a buffer, mask or bias that autograd itself did not save) was changed after "
                                    "the forward: ") +
                        words.text + ". Change it after backward, or pass a copy into the region.");
        check(status, &words);
        int32_t n = 0;
        const int32_t *ops = tfg_closure_ops(tape_.closure, &n);
        ops_.assign(ops, ops + n);
        const auto view = tape_.look();
        for (const int32_t o : ops_) {
            const tfg_op &op = view.ops[o];
            for (int32_t i = 0; i < op.n_reads; ++i) pin(view.refs[op.first_ref + i]);
            for (int32_t i = 0; i < op.n_writes; ++i) collect_evidence(view.values[view.refs[op.first_ref + op.n_reads + i]].storage);
        }
        choose_what_to_bring_back();
    }

    // Values on the way that other handles ask for are brought back: all, or what there could be room for if all else left. One that
    // saves a long way is dearer by as much, so that what comes after it on the way leaves first.
    void choose_what_to_bring_back() {
        const auto view = tape_.look();
        std::vector<int32_t> asked;
        std::vector<int64_t> sizes_bytes, costs_ns;
        int64_t cost_ns = 0, largest_bytes = 0;
        for (const int32_t o : ops_) {
            const tfg_op &op = view.ops[o];
            cost_ns += std::max<int64_t>(1, op.cost_ns);
            for (int32_t i = 0; i < op.n_writes; ++i) {
                const int32_t value = view.refs[op.first_ref + op.n_reads + i];
                const int64_t size_bytes = view.storages[view.values[value].storage].size_bytes;
                largest_bytes = std::max(largest_bytes, size_bytes);
                if (value == wanted_ || !is_asked_for(value)) continue;
                asked.push_back(value);
                sizes_bytes.push_back(size_bytes);
                costs_ns.push_back(std::exchange(cost_ns, 0));
            }
        }
        if (asked.empty()) return;
        std::vector<uint8_t> is_kept(asked.size(), 1);
        if (cpu_room_bytes() != std::numeric_limits<int64_t>::max()) {
            tfg_error words = {};
            check(tfg_putback_choose(sizes_bytes.data(), costs_ns.data(), static_cast<int32_t>(asked.size()),
                                     room_to_bring_back(largest_bytes), is_kept.data(), &words), &words);
        }
        int64_t way_ns = 0;
        for (size_t i = 0; i < asked.size(); ++i) {
            way_ns += costs_ns[i];
            if (!is_kept[i]) continue;
            const int64_t last_ns = std::max<int64_t>(1, view.ops[view.values[asked[i]].producer].cost_ns);
            comes_back_[asked[i]] = static_cast<double>(std::exchange(way_ns, 0)) / static_cast<double>(last_ns);
        }
    }

    // Not counted as room: what a replayed operator reads and makes, and what backward makes of the asked value.
    int64_t room_to_bring_back(int64_t largest_bytes) const {
        const auto view = tape_.look();
        const tfg_ledger_totals totals = ledger_totals();
        const int64_t own_bytes = view.storages[view.values[wanted_].storage].size_bytes;
        return std::max<int64_t>(0, cpu_room_bytes() + totals.kept_bytes - totals.aside_bytes - 2 * largest_bytes - 3 * own_bytes);
    }

    bool is_asked_for(int32_t value) const {
        const auto view = tape_.look();
        const tfg_value &v = view.values[value];
        return v.n_handles > 0 && view.storages[v.storage].current == value && !tape_.slots[static_cast<size_t>(v.storage)].live();
    }

    // What was fingerprinted as it left is compared with what is made now.
    void collect_evidence(int32_t storage) {
        const Slot &slot = tape_.slots[static_cast<size_t>(storage)];
        if (slot.place.is_somewhere() && !slot.live()) tape_.withdraw_slot(storage);
    }

    // The working set: another thread's backward may end, and let go of what is live now, between two operators of this replay.
    void pin(int32_t value) {
        if (n_readers_[value]++ > 0) return;
        if (StoragePtr live = tape_.source(value)) pinned_[value] = std::move(live);
    }

    double price_factor_of(int32_t value) const {
        auto it = comes_back_.find(value);
        return it == comes_back_.end() ? 1 : std::max(1.0, it->second);
    }

    bool is_wanted_back(int32_t value) const { return value == wanted_ || comes_back_.count(value) != 0; }

    StoragePtr storage_for(int32_t value) {
        auto it = private_.find(value);
        if (it != private_.end()) return it->second;
        const tfg_value &v = tape_.look().values[value];
        auto live = pinned_.find(value);
        if (live != pinned_.end() && is_as_relied_on(value, *live->second)) return live->second;
        throw Error("tfg: storage " + std::to_string(v.storage) + ", needed for a replay, " +
                    (v.producer == TFG_NONE ? "came from outside the region and was changed or freed after the forward"
                                            : "was changed after the forward by a write that was not recorded"));
    }

    // Compared once per backward: a raw pointer from before the region leaves no other trace.
    bool is_as_relied_on(int32_t value, const c10::StorageImpl &live) {
        auto it = tape_.external_bytes.find(value);
        if (it == tape_.external_bytes.end() || tape_.copies.count(value)) return true;
        const int64_t task = torch::autograd::get_current_graph_task_id();
        if (task >= 0 && it->second.compared_in == task) return true;
        if (fingerprint_of(live) != it->second.bytes) return false;
        it->second.compared_in = task;
        return true;
    }

    at::Tensor build(const TensorRef &ref) {
        if (ref.is_undefined || ref.value == TFG_NONE) return at::Tensor();
        auto it = for_writing_.find(ref.value);
        const StoragePtr storage = it != for_writing_.end() ? it->second : storage_for(ref.value);
        const int64_t *dims = tape_.dims.data() + ref.first_dim;
        const auto n = static_cast<size_t>(ref.n_dims);
        return tensor_from(storage, {dims, n}, {dims + n, n}, ref.offset_elems, ref.dtype);
    }

    // In-place operators get storages of their own: the value's private one where nobody else wants it, else a copy.
    void prepare_writes(const tfg_op &op) {
        const auto view = tape_.look();
        for_writing_.clear();
        for (int32_t i = 0; i < op.n_writes; ++i) {
            const int32_t written = view.refs[op.first_ref + op.n_reads + i];
            const int32_t before = view.values[written].previous;
            const bool is_external = (view.storages[view.values[written].storage].flags & TFG_STORAGE_EXTERNAL) != 0;
            if (before == TFG_NONE || is_external) continue; // external: batch norm's statistics, which a replay leaves alone
            auto it = private_.find(before);
            int32_t readers_here = 0;
            for (int32_t r = 0; r < op.n_reads; ++r) readers_here += view.refs[op.first_ref + r] == before;
            const bool is_free = it != private_.end() && n_readers_[before] == readers_here && !is_wanted_back(before) &&
                                 before != wanted_;
            for_writing_[before] = is_free ? it->second : copy_storage(*storage_for(before));
        }
    }

    void push_argument(const Argument &argument, Stack &stack) {
        const size_t first = static_cast<size_t>(argument.first);
        switch (argument.kind) {
        case ArgumentKind::CONSTANT: {
            const c10::IValue &constant = tape_.constants[first];
            stack.push_back(constant.isList() ? constant.deepcopy() : constant);
            return;
        }
        case ArgumentKind::TENSOR: {
            const TensorRef &ref = tape_.tensors[first];
            if (ref.value == TFG_NONE && !ref.is_undefined)
                stack.emplace_back();
            else
                stack.emplace_back(build(ref));
            return;
        }
        case ArgumentKind::TENSOR_LIST: {
            c10::List<at::Tensor> list;
            for (int32_t i = 0; i < argument.count; ++i) list.push_back(build(tape_.tensors[first + static_cast<size_t>(i)]));
            stack.emplace_back(std::move(list));
            return;
        }
        case ArgumentKind::OPTIONAL_TENSOR_LIST: {
            c10::List<std::optional<at::Tensor>> list;
            for (int32_t i = 0; i < argument.count; ++i) {
                const TensorRef &ref = tape_.tensors[first + static_cast<size_t>(i)];
                list.push_back(ref.value == TFG_NONE ? std::optional<at::Tensor>() : std::optional<at::Tensor>(build(ref)));
            }
            stack.emplace_back(std::move(list));
            return;
        }
        }
    }

    void call(const Record &record, const RngState *rng, const Ambient &ambient, Stack &stack) {
        c10::impl::ExcludeDispatchKeyGuard kernels_only(above_kernels());
        RestoreAmbient as_before(ambient);
        if (!rng) return record.op.callBoxed(stack);
        if (record.rule->generator_argument >= 0) {
            stack[static_cast<size_t>(record.rule->generator_argument)] = generator_with(*rng);
            return record.op.callBoxed(stack);
        }
        BorrowDefaultGenerator borrowed(*rng);
        record.op.callBoxed(stack);
    }

    void run_op(std::unique_lock<Mutex> &lock, int32_t index) {
        const Record record = tape_.records[static_cast<size_t>(index)];
        const tfg_op op = tape_.look().ops[index];
        prepare_writes(op);
        Stack stack;
        for (int32_t i = 0; i < record.n_arguments; ++i)
            push_argument(tape_.arguments[static_cast<size_t>(record.first_argument + i)], stack);
        const RngState *rng = record.rng == TFG_NONE ? nullptr : tape_.rngs[static_cast<size_t>(record.rng)].get();
        const Ambient ambient = tape_.ambients[static_cast<size_t>(record.ambient)];
        lock.unlock();
        const NowDoing doing(Phase::REPLAY, record.op.schema().name().c_str(), record.key);
        call(record, rng, ambient, stack);
        lock.lock();
        take_results(record, op, stack);
        stats_of(record.key).ops_replayed += 1;
        lock.unlock();
        stack.clear();
        released_.clear();
        lock.lock();
    }

    void take_results(const Record &record, const tfg_op &op, Stack &stack) {
        const auto view = tape_.look();
        for (int32_t i = 0; i < op.n_writes; ++i) {
            const int32_t written = view.refs[op.first_ref + op.n_reads + i];
            auto it = for_writing_.find(view.values[written].previous);
            if (view.values[written].previous != TFG_NONE && it != for_writing_.end()) adopt(record, written, it->second);
        }
        for (size_t i = 0; i < stack.size(); ++i) {
            const int32_t value = tape_.outputs[static_cast<size_t>(record.first_output) + i];
            if (value == TFG_NONE || !stack[i].isTensor()) continue;
            adopt(record, value, stack[i].toTensor().storage().getWeakStorageImpl().lock());
        }
        for_writing_.clear();
        for (int32_t i = 0; i < op.n_reads; ++i) release_reader(view.refs[op.first_ref + i]);
    }

    void adopt(const Record &record, int32_t value, const StoragePtr &storage) {
        prove(record, value, *storage);
        private_[value] = storage;
        if (value != wanted_ && is_wanted_back(value)) bring_back(value, storage);
        if (value != wanted_ && n_readers_[value] == 0) forget(value);
    }

    void release_reader(int32_t value) {
        if (--n_readers_[value] == 0 && value != wanted_) forget(value);
    }

    void forget(int32_t value) {
        if (auto live = pinned_.find(value); live != pinned_.end()) {
            released_.push_back(std::move(live->second));
            pinned_.erase(live);
        }
        auto it = private_.find(value);
        if (it == private_.end()) return;
        released_.push_back(std::move(it->second));
        private_.erase(it);
    }

    void prove(const Record &record, int32_t value, const c10::StorageImpl &storage) {
        auto it = tape_.fingerprints.find(value);
        if (it == tape_.fingerprints.end()) return;
        const bool is_proven = fingerprint_of(storage) == it->second;
        if (believe(record.site, is_proven ? Belief::PROVEN : Belief::DISTRUSTED) == Belief::UNKNOWN) stats_of(record.key).unproven -= 1;
        if (is_proven) return;
        throw Error("tfg: replaying " + record.rule_name() + " in " + stats_of(record.key).label +
                    " did not give the bits of the forward: it is not a function of its recorded inputs. Its results are kept from now "
                    "on; this backward is not valid, run the step again.");
    }

    void bring_back(int32_t value, const StoragePtr &storage) {
        const auto view = tape_.look();
        const tfg_value &v = view.values[value];
        Slot &slot = tape_.slots[static_cast<size_t>(v.storage)];
        if (v.n_handles == 0 || view.storages[v.storage].current != value || slot.live()) return;
        Stats &stats = stats_of(tape_.records[static_cast<size_t>(v.producer)].key);
        const int64_t task = torch::autograd::get_current_graph_task_id();
        if (task >= 0 && slot.replayed_in == task) stats.replayed_again += 1;
        slot.replayed_in = task;
        if (slot.place.is_somewhere()) tape_.withdraw_slot(v.storage); // it has left: only the place is given up
        tape_.by_storage.erase(slot.weak._unsafe_get_target()); // its address is free for others from here on
        slot.strong = storage;
        slot.weak = WeakStorage(storage);
        watch_from_now_on(slot, view.storages[v.storage].n_handles);
        if (tape_.keeps || cpu_room_bytes() != std::numeric_limits<int64_t>::max()) tape_.enter(v.storage, stats, price_factor_of(value));
        if (!tape_.keeps) tape_.put_back.push_back(v.storage);
    }

    // Backward may hand what came back to a writer that moves no version: it is watched as the first one was.
    void watch_from_now_on(Slot &slot, int32_t n_handles) {
        old_watches_.push_back(std::exchange(slot.watch, watch(slot.strong)));
        slot.accesses_seen = slot.watch->n_accesses.load();
        slot.watch->n_handles += n_handles;
    }

    Tape &tape_;
    int32_t wanted_;
    std::vector<int32_t> ops_;
    ska::flat_hash_map<int32_t, StoragePtr> private_, pinned_, for_writing_;
    ska::flat_hash_map<int32_t, double> comes_back_; // value -> how many times its own operator's time the way to it takes
    ska::flat_hash_map<int32_t, int32_t> n_readers_;
    Graveyard released_;
    std::vector<WatchPtr> old_watches_; // die without the lock
};

// With a fixed interval, what a retained backward brought back is dropped again when its graph task ends.
void drop_at_end_of_backward(const std::shared_ptr<Tape> &tape) {
    const int64_t task = torch::autograd::get_current_graph_task_id();
    if (task < 0 || tape->keeps) return;
    {
        std::lock_guard<Mutex> lock(tape->mutex);
        if (tape->graph_task == task) return;
        tape->graph_task = task;
    }
    torch::autograd::Engine::get_default_engine().queue_callback([weak = std::weak_ptr<Tape>(tape)] {
        Graveyard dead;
        if (std::shared_ptr<Tape> still = weak.lock()) {
            std::lock_guard<Mutex> lock(still->mutex);
            still->drop_put_back(dead);
        }
    });
}

} // namespace

StoragePtr materialise(const std::shared_ptr<Tape> &tape, int32_t value) {
    const auto start = std::chrono::steady_clock::now();
    StoragePtr result;
    int64_t key;
    {
        Replay replay(tape, value);
        result = replay.run();
        std::lock_guard<Mutex> lock(tape->mutex);
        const int32_t producer = tape->look().values[value].producer;
        key = tape->records[static_cast<size_t>(producer)].key;
    }
    const auto took = std::chrono::steady_clock::now() - start;
    stats_of(key).replay_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
    drop_at_end_of_backward(tape);
    return result;
}

} // namespace tfg
