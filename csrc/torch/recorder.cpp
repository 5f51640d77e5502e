// SPDX-License-Identifier: BSD-3-Clause
#include "recorder.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/library.h>

#include "compat.h"
#include "costs.h"
#include "cpu_allocator.h"
#include "error.h"
#include "handles.h"
#include "peak.h"
#include "policy.h"
#include "prices.h"

namespace tfg {

namespace {

constexpr c10::DispatchKey recorder_key = c10::DispatchKey::Fake;

thread_local Region *current = nullptr;

using torch::jit::Stack;
using Ids = c10::SmallVector<int32_t, 8>;

// One operator while it is being taken down.
struct Draft {
    Tape &tape;
    const Rule &rule;
    std::unique_lock<Mutex> &lock; // of the tape; not held while the kernel runs
    Why why;
    // Where the arenas stood, to take the draft back.
    size_t n_arguments, n_tensors, n_dims, n_constants, n_outputs;
    Ids reads, writes; // storages; on the stack for all but list operators
    c10::SmallVector<c10::StorageImpl *, 8> read_only, written;
    bool is_committed = false;

    Draft(Tape &t, const Rule &r, std::unique_lock<Mutex> &l)
        : tape(t), rule(r), lock(l), why(r.why), n_arguments(t.arguments.size()), n_tensors(t.tensors.size()), n_dims(t.dims.size()),
          n_constants(t.constants.size()), n_outputs(t.outputs.size()) {}

    ~Draft() {
        if (is_committed) return;
        if (!lock.owns_lock()) lock.lock();
        take_back();
    }
    Draft(const Draft &) = delete;

    void doubt(Why reason) {
        if (why == Why::NONE) why = reason;
    }
    void take_back_arguments() {
        tape.arguments.resize(n_arguments, Argument{ArgumentKind::CONSTANT, 0, 0});
        tape.tensors.resize(n_tensors);
        tape.dims.resize(n_dims);
        tape.constants.resize(n_constants);
    }
    void take_back() {
        take_back_arguments();
        tape.outputs.resize(n_outputs);
    }
};

int32_t current_value(const Tape &tape, int32_t slot) { return tape.look().storages[slot].current; }

// A tensor argument: its storage is found or comes to be an external; what is known about it may pin the operator.
TensorRef take_tensor(Draft &draft, const at::Tensor &tensor, bool is_written) {
    TensorRef none;
    if (!tensor.defined()) {
        none.is_undefined = true;
        return none;
    }
    c10::StorageImpl *storage = plain_storage(tensor);
    if (!storage) {
        draft.doubt(Why::ODD_TENSOR);
        return none;
    }
    Tape &tape = draft.tape;
    const int32_t id = tape.find_or_add_external(tensor, storage);
    const auto view = tape.look();
    const tfg_storage &known = view.storages[id];
    Slot &slot = tape.slots[static_cast<size_t>(id)];
    if (known.flags & TFG_STORAGE_OPAQUE) draft.doubt(Why::OPAQUE_INPUT);
    if (is_written) {
        tape.take_back(id); // a handle may ask for what it holds now: then it stays
        draft.writes.push_back(id);
        draft.written.push_back(storage);
        if (known.flags & TFG_STORAGE_EXTERNAL) draft.doubt(Why::WRITES_OUTSIDE);
        tape.put_aside_relied(id);
        const bool is_whole = draft.rule.overwrites && covers_storage(tensor);
        if (slot.is_garbage && !is_whole) draft.doubt(Why::UNINITIALISED);
        slot.is_garbage = false;
    } else {
        draft.read_only.push_back(storage);
        if (slot.is_garbage) draft.doubt(Why::UNINITIALISED);
    }
    draft.reads.push_back(id);
    return tape.reference(tensor, known.current);
}

void take_constant(Draft &draft, const c10::IValue &value) {
    draft.tape.arguments.push_back({ArgumentKind::CONSTANT, static_cast<int32_t>(draft.tape.constants.size()), 1});
    draft.tape.constants.push_back(value);
}

void take_list(Draft &draft, const c10::IValue &value, bool is_written) {
    Tape &tape = draft.tape;
    const bool is_optional = value.isOptionalTensorList();
    std::vector<TensorRef> refs;
    if (is_optional) {
        for (const std::optional<at::Tensor> &each : value.toOptionalTensorList())
            refs.push_back(each ? take_tensor(draft, *each, is_written) : TensorRef());
    } else {
        for (const at::Tensor &each : value.toTensorList()) refs.push_back(take_tensor(draft, each, is_written));
    }
    tape.arguments.push_back({is_optional ? ArgumentKind::OPTIONAL_TENSOR_LIST : ArgumentKind::TENSOR_LIST,
                              static_cast<int32_t>(tape.tensors.size()), static_cast<int32_t>(refs.size())});
    tape.tensors.insert(tape.tensors.end(), refs.begin(), refs.end());
}

bool is_batch_statistics(const Draft &draft, const Stack &stack, size_t first, int32_t i) {
    const Rule &rule = draft.rule;
    if (!(rule.statistics_arguments >> i & 1)) return false;
    if (rule.training_argument < 0) return true;
    return stack[first + static_cast<size_t>(rule.training_argument)].toBool();
}

// In training, batch norm writes its running statistics and its results do not depend on them: the replay gets none, or, where
// the schema insists on a tensor, a private copy.
void take_statistics(Draft &draft, const c10::IValue &value) {
    if (!value.isTensor() || !value.toTensor().defined()) return take_constant(draft, value);
    const at::Tensor &tensor = value.toTensor();
    c10::StorageImpl *storage = plain_storage(tensor);
    if (!storage) {
        draft.doubt(Why::ODD_TENSOR);
        return take_constant(draft, c10::IValue());
    }
    const int32_t id = draft.tape.find_or_add_external(tensor, storage);
    draft.tape.take_back(id);
    draft.tape.put_aside_relied(id);
    draft.writes.push_back(id);
    draft.written.push_back(storage);
    if (draft.rule.written_arguments == 0) return take_constant(draft, c10::IValue());
    take_constant(draft, tensor_from(copy_storage(*storage), tensor.sizes(), tensor.strides(), tensor.storage_offset(), tensor.scalar_type()));
}

void take_argument(Draft &draft, const Stack &stack, size_t first, int32_t i) {
    const c10::IValue &value = stack[first + static_cast<size_t>(i)];
    const bool is_written = draft.rule.writes_everything || (i < 64 && (draft.rule.written_arguments >> i & 1));
    if (i < 64 && is_batch_statistics(draft, stack, first, i)) return take_statistics(draft, value);
    if (value.isTensor()) {
        const at::Tensor &tensor = value.toTensor();
        if (tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number()) return take_constant(draft, value);
        const TensorRef ref = take_tensor(draft, tensor, is_written);
        draft.tape.arguments.push_back({ArgumentKind::TENSOR, static_cast<int32_t>(draft.tape.tensors.size()), 1});
        draft.tape.tensors.push_back(ref);
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
        take_list(draft, value, is_written);
    } else if (value.isGenericDict() || value.isObject() || value.isCapsule() || value.isPyObject()) {
        draft.doubt(Why::ODD_TENSOR);
        take_constant(draft, c10::IValue());
    } else if (value.isGenerator()) {
        take_constant(draft, c10::IValue()); // the replay brings its own
    } else {
        take_constant(draft, value.isList() ? value.deepcopy() : value);
    }
}

void take_arguments(Draft &draft, const Stack &stack) {
    const size_t first = stack.size() - static_cast<size_t>(draft.rule.n_arguments);
    for (int32_t i = 0; i < draft.rule.n_arguments; ++i) take_argument(draft, stack, first, i);
}

// A returned tensor: fresh (this operator made its bytes), or a storage that is known.
void take_output(Draft &draft, const at::Tensor &tensor, Ids &fresh, size_t return_index) {
    Tape &tape = draft.tape;
    int32_t &place = tape.outputs[draft.n_outputs + return_index];
    c10::StorageImpl *storage = tensor.defined() ? plain_storage(tensor) : nullptr;
    if (!storage) return;
    int32_t id = tape.find(storage);
    const bool is_known = id != TFG_NONE;
    if (!is_known) {
        id = tape.add_fresh(storage);
        if (!came_from_torch(*storage)) check(tfg_tape_foreign_write(tape.core, id, true));
        tape.slots.back().is_covered = covers_storage(tensor);
        if (storage->nbytes() && draft.rule.makes_garbage) tape.slots.back().is_garbage = true;
        fresh.push_back(id);
    } else if (std::find(fresh.begin(), fresh.end(), id) == fresh.end()) {
        return; // an argument handed back
    }
    place = id; // a storage for now; a value once the operator is appended
}

void take_outputs(Draft &draft, const Stack &stack, Ids &fresh) {
    const size_t n = static_cast<size_t>(draft.rule.n_returns);
    draft.tape.outputs.resize(draft.n_outputs + n, TFG_NONE);
    for (size_t i = 0; i < n; ++i) {
        const c10::IValue &value = stack[stack.size() - n + i];
        if (value.isTensor()) {
            take_output(draft, value.toTensor(), fresh, i);
        } else if (value.isTensorList()) {
            // Lists of fresh tensors (foreach, splits that copy): one return, several storages.
            draft.doubt(value.toTensorList().empty() ? Why::NONE : Why::ODD_TENSOR);
            for (const at::Tensor &each : value.toTensorList()) {
                Ids found;
                take_output(draft, each, found, i);
                fresh.append(found.begin(), found.end());
            }
            draft.tape.outputs[draft.n_outputs + i] = TFG_NONE;
        }
    }
}

int32_t note_ambient(Tape &tape, const Rule &rule) {
    const Ambient now = rule.is_pointwise && !tape.ambients.empty() ? ambient_now(tape.ambients.back()) : ambient_now();
    if (tape.ambients.empty() || !(tape.ambients.back() == now)) tape.ambients.push_back(now);
    return static_cast<int32_t>(tape.ambients.size()) - 1;
}

void resolve_dtype(Draft &draft, const Stack &stack) {
    const Rule &rule = draft.rule;
    if (rule.takes_tensors || rule.dtype_argument < 0 || rule.n_returns != 1 || !stack.back().isTensor()) return;
    const Argument &argument = draft.tape.arguments[draft.n_arguments + static_cast<size_t>(rule.dtype_argument)];
    c10::IValue &dtype = draft.tape.constants[static_cast<size_t>(argument.first)];
    if (dtype.isNone()) dtype = stack.back().toTensor().scalar_type();
}

void gather_fingerprints(Draft &draft, const Stack &stack) {
    const size_t n = static_cast<size_t>(draft.rule.n_returns);
    for (size_t i = 0; i < n; ++i) {
        const c10::IValue &value = stack[stack.size() - n + i];
        if (!value.isTensor() || !value.toTensor().defined()) continue;
        c10::StorageImpl *storage = plain_storage(value.toTensor());
        if (!storage || !covers_storage(value.toTensor()) || draft.rule.makes_garbage) continue;
        const int32_t id = draft.tape.find(storage);
        if (id != TFG_NONE) draft.tape.fingerprints[current_value(draft.tape, id)] = fingerprint_of(*storage);
    }
}

// Appends to the core half of the tape. The values that the operator brings are known from then on.
void append(const Draft &draft, const Ids &fresh, uint32_t flags, int64_t cost_ns) {
    Ids writes = draft.writes;
    writes.append(fresh.begin(), fresh.end());
    tfg_op_args args = {};
    args.read_storages = draft.reads.data();
    args.n_reads = static_cast<int32_t>(draft.reads.size());
    args.write_storages = writes.data();
    args.n_writes = static_cast<int32_t>(writes.size());
    args.flags = flags;
    args.cost_ns = cost_ns;
    int32_t op_index;
    tfg_error words;
    check(tfg_tape_append(draft.tape.core, &args, &op_index, &words), &words);
    auto &outputs = draft.tape.outputs;
    for (size_t i = draft.n_outputs; i < outputs.size(); ++i)
        if (outputs[i] != TFG_NONE) outputs[i] = current_value(draft.tape, outputs[i]);
}

void note_writes(const Draft &draft) {
    Tape &tape = draft.tape;
    for (const int32_t id : draft.writes) {
        Slot &slot = tape.slots[static_cast<size_t>(id)];
        slot.accesses_seen = slot.watch->n_accesses.load();
        // A large external that regions write (a scratch buffer, a cache) will be written again: nothing may lean on it.
        const tfg_storage known = tape.look().storages[id];
        const bool is_scratch = (known.flags & TFG_STORAGE_EXTERNAL) && static_cast<size_t>(known.size_bytes) > put_aside_bytes;
        // A kernel may grow the storage of an `out=` argument: what the tape knows of it no longer holds.
        const StoragePtr live = slot.live();
        const bool is_resized = !live || live->nbytes() != static_cast<size_t>(known.size_bytes);
        if (is_scratch || is_resized || !slot.watch->can_see) check(tfg_tape_foreign_write(tape.core, id, true));
    }
}

// Appends the operator to both halves of the tape. All of the torch half that may fail for want of memory comes before the core's.
void commit(Region &region, Draft &draft, const c10::OperatorHandle &op, const Stack &stack, std::unique_ptr<RngState> rng,
            int32_t ambient, int64_t cost_ns) {
    Tape &tape = draft.tape;
    Ids fresh;
    take_outputs(draft, stack, fresh);
    if (fresh.empty() && draft.writes.empty()) return;
    resolve_dtype(draft, stack);
    const uint64_t site = proof_site(region.key, region.ordinal++, draft.rule.id);
    const Belief belief = draft.why == Why::NONE ? belief_in(site) : Belief::DISTRUSTED;
    if (belief == Belief::DISTRUSTED) draft.doubt(Why::MISMATCH);
    const bool is_pinned = draft.why != Why::NONE;
    make_room_for_one(tape.records);
    make_room_for_one(tape.rngs);
    append(draft, fresh, (is_pinned ? TFG_OP_PINNED : 0) | (rng ? TFG_OP_RANDOM : 0), cost_ns);
    if (is_pinned) draft.take_back_arguments();
    Record record{op,   &draft.rule, region.key, site, static_cast<int32_t>(draft.n_arguments), is_pinned ? 0 : draft.rule.n_arguments,
                  static_cast<int32_t>(draft.n_outputs), TFG_NONE, ambient, draft.why};
    if (rng && !is_pinned) {
        record.rng = static_cast<int32_t>(tape.rngs.size());
        tape.rngs.push_back(std::move(rng));
    }
    tape.records.push_back(std::move(record));
    draft.is_committed = true;
    note_writes(draft);
    if (draft.why == Why::POLICY)
        for (const int32_t id : fresh) tape.hold_for_good(id);
    region.stats.ops_taped += 1;
    if (is_pinned) return;
    if (belief == Belief::UNMET && believe(site, Belief::UNKNOWN) == Belief::UNMET) region.stats.unproven += 1;
    if (belief == Belief::UNMET || (belief == Belief::UNKNOWN && !tape.is_calm) || stress().verify) gather_fingerprints(draft, stack);
}

// What a failed or opaque operator may have written can not be relied on.
void distrust_writes(Draft &draft) {
    for (const int32_t id : draft.writes) check(tfg_tape_foreign_write(draft.tape.core, id, true));
}

void rearm(Draft &draft) {
    for (const int32_t id : draft.reads) draft.tape.slots[static_cast<size_t>(id)].watch->arm();
}

// Of the tensors that an operator returned: together with its kind, what its cost goes by.
int64_t stack_bytes(const Stack &stack, const Rule &rule) {
    int64_t bytes = 0;
    for (size_t i = stack.size() - static_cast<size_t>(rule.n_returns); i < stack.size(); ++i)
        if (c10::StorageImpl *storage = stack[i].isTensor() ? plain_storage(stack[i].toTensor()) : nullptr)
            bytes += static_cast<int64_t>(storage->nbytes());
    return bytes;
}

at::Generator generator_for(const Rule &rule, const Stack &stack) {
    if (rule.generator_argument >= 0) {
        const auto &value = stack[stack.size() - static_cast<size_t>(rule.n_arguments - rule.generator_argument)];
        if (value.isGenerator()) return value.toGenerator();
    }
    return at::detail::getDefaultCPUGenerator();
}

void disarm_for_lazy_clone(const Stack &stack, const Rule &rule) {
    const auto &value = stack[stack.size() - static_cast<size_t>(rule.n_arguments)];
    if (c10::StorageImpl *storage = value.isTensor() ? plain_storage(value.toTensor()) : nullptr)
        if (storage->has_materializer()) storage->clear_materializer();
}

void ask_policy(Region &region, const c10::OperatorHandle &op, const Arguments &given, const Stack &stack, Draft &draft) {
    try {
        if (wants_results(region.policy, op, given, stack)) draft.doubt(Why::POLICY);
    } catch (...) {
        draft.lock.lock();
        distrust_writes(draft);
        throw;
    }
}

void record(Region &region, const c10::OperatorHandle &op, c10::DispatchKeySet below, Stack *stack) {
    const Rule &rule = rule_of(op);
    Tape &tape = *region.tape;
    Graveyard dead;
    const bool is_pressed = tape.keeps && is_cpu_pressed();
    if (is_pressed) region.release_saved_inputs();
    std::unique_lock<Mutex> lock(tape.mutex);
    if (is_pressed) tape.settle_so_far(dead);
    Draft draft(tape, rule, lock);
    take_arguments(draft, *stack);
    if (rule.is_lazy_clone) disarm_for_lazy_clone(*stack, rule);
    const int32_t ambient = note_ambient(tape, rule);
    std::unique_ptr<RngState> rng;
    at::Generator generator;
    if (rule.is_random && draft.why == Why::NONE) {
        generator = generator_for(rule, *stack);
        if (generator.device().is_cpu()) rng = std::make_unique<RngState>(rng_state(generator));
    }
    lock.unlock();
    const Arguments given = region.policy ? arguments_of(rule, *stack) : Arguments();
    const NowDoing doing(Phase::FORWARD, op.schema().name().c_str(), region.key);
    const Stopwatch clock(tape.keeps);
    try {
        // An operator of another library may write what it says it reads: then the watch must count.
        const c10::ArrayRef<c10::StorageImpl *> read_only = draft.read_only, nothing;
        RecordedKernel kernel(rule.why == Why::FOREIGN_OPERATOR ? nothing : read_only, draft.written);
        op.redispatchBoxed(below, stack);
    } catch (...) {
        lock.lock();
        distrust_writes(draft);
        throw;
    }
    if (region.policy) ask_policy(region, op, given, *stack, draft);
    const int64_t cost_ns = tape.keeps ? smooth_cost(rule, stack_bytes(*stack, rule), clock.elapsed_ns()) : 0;
    if (rng && same_rng_state(*rng, rng_state(generator))) rng.reset();
    lock.lock();
    rearm(draft);
    commit(region, draft, op, *stack, std::move(rng), ambient, cost_ns);
    if (rule.why == Why::RESHAPES_STORAGE || rule.why == Why::COLLECTIVE) distrust_writes(draft);
    if (stress().drop) tape.settle(region.first_op, region.key, dead);
    lock.unlock();
}

void fallback(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
    c10::impl::ExcludeDispatchKeyGuard once(recorder_key);
    const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, recorder_key);
    if (current)
        record(*current, op, below, stack);
    else
        op.redispatchBoxed(below, stack);
}

} // namespace

Region *current_region() { return current; }

// A tracer that makes a graph of proxies: what the tape brought back would be a constant of that graph.
static bool is_traced() {
    using c10::impl::TorchDispatchModeKey;
    return c10::impl::TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value() ||
           c10::impl::TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FUNCTIONAL).has_value();
}

bool can_record() {
    using c10::impl::tls_is_dispatch_key_excluded;
    using c10::impl::tls_is_dispatch_key_included;
    return c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() && at::SavedTensorDefaultHooks::is_enabled() &&
           !tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
           !tls_is_dispatch_key_excluded(recorder_key) && !is_traced() && !at::SavedTensorDefaultHooks::get_tls_state().is_tracing;
}

// Has this key been seen often enough without an eviction? (proof.h)
static bool is_calm_now(Stats &stats) {
    const int64_t now = n_evictions();
    if (stats.evictions_before.exchange(now) != now || stress().drop || stress().verify) stats.n_calm = 0;
    return stats.n_calm.fetch_add(1) >= calm_after_regions;
}

Region::Region(std::shared_ptr<Tape> on, int64_t k, bool own)
    : tape(std::move(on)), key(k), stats(stats_of(k)), is_own_tape(own), parent(current) {
    if (!parent) {
        at::SavedTensorDefaultHooks::lazy_initialize();
        hook_depth = at::SavedTensorDefaultHooks::get_tls_state().stack.size();
        if (auto pair = at::SavedTensorDefaultHooks::get_hooks(true)) {
            outer_pack = pair->first.ptr(getPyInterpreter());
            outer_unpack = pair->second.ptr(getPyInterpreter());
            Py_INCREF(outer_pack);
            Py_INCREF(outer_unpack);
        }
        push_our_hooks();
    } else {
        hook_depth = 0;
    }
    {
        std::lock_guard<Mutex> lock(tape->mutex);
        tape->n_regions += 1;
        tape->stats = &stats;
        is_parent_calm = tape->is_calm;
        tape->is_calm = tape->keeps && is_calm_now(stats);
        tape->wants_evidence |= tape->is_calm;
        first_op = tape->look().n_ops;
    }
    stats.regions += 1;
    if (tape->keeps) note_moment(Phase::FORWARD, key);
    current = this;
    c10::impl::tls_set_dispatch_key_included(recorder_key, true);
}

void Region::look_at_saved_inputs() {
    for (auto &[tensor, watch] : saved_inputs) watch->look(tensor);
    saved_inputs.clear();
}

void Region::release_saved_inputs() {
    std::vector<at::Tensor> dying; // dies last: a tensor's end may run Python
    for (Region *each = this; each; each = each->parent) {
        auto &held = each->saved_inputs;
        if (held.size() > few_saved_inputs && held.size() < 2 * each->n_still_held) continue;
        size_t n_held = 0;
        for (auto &entry : held) {
            if (!is_held_once(entry.first)) {
                std::swap(held[n_held++], entry);
                continue;
            }
            entry.second->look(entry.first);
            dying.push_back(std::move(entry.first));
        }
        held.resize(n_held);
        each->n_still_held = n_held;
    }
}

void Region::let_go() {
    look_at_saved_inputs();
    {
        Graveyard dead;
        std::lock_guard<Mutex> lock(tape->mutex);
        tape->settle(first_op, key, dead);
        if (tape->keeps) price_span(*tape, first_op);
    }
    if (tape->keeps) {
        relieve_cpu();
        note_moment(Phase::FORWARD, key);
    }
}

Region::~Region() {
    current = parent;
    look_at_saved_inputs(); // still there after an exception
    if (!parent) {
        c10::impl::tls_set_dispatch_key_included(recorder_key, false);
        while (at::SavedTensorDefaultHooks::get_tls_state().stack.size() > hook_depth) at::SavedTensorDefaultHooks::pop_hooks();
        Py_XDECREF(outer_pack);
        Py_XDECREF(outer_unpack);
    }
    Graveyard dead;
    std::lock_guard<Mutex> lock(tape->mutex);
    tape->n_regions -= 1;
    if (parent) tape->stats = &parent->stats, tape->is_calm = is_parent_calm;
    if (is_own_tape) {
        tape->is_closed = true;
        tape->prune(dead);
    }
    tape->clear_if_idle(dead);
}

void install_recorder() {
    if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(recorder_key))
        throw Error("tfg: the dispatch key Fake is taken in this process by another library or a newer torch; tfg can not record");
    static auto *library = new torch::Library(torch::Library::IMPL, "_", recorder_key, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    skip_views(recorder_key);
}

} // namespace tfg
