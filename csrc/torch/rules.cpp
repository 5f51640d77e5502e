// SPDX-License-Identifier: BSD-3-Clause
#include "rules.h"

#include <ATen/core/enum_tag.h>
#include <c10/util/flat_hash_map.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_set>

#include "fork.h"

namespace tfg {

namespace {

using Names = std::unordered_set<std::string_view>;

// torch calls these non-deterministic on the CPU, or they return memory that they did not write in full (a workspace, a padded table).
const Names not_deterministic = {"aten::put_", "aten::put", "aten::max_unpool2d", "aten::max_unpool3d", "aten::_embedding_bag",
                                 "aten::_embedding_bag_forward_only", "aten::mkldnn_rnn_layer", "aten::_ctc_loss",
                                 "aten::linalg_lstsq", "aten::rrelu_with_noise", "aten::rrelu_with_noise_functional"};

// A write that the schema does not show, other than batch norm's.
const Names hidden_write = {"aten::miopen_batch_norm", "aten::cudnn_batch_norm", "aten::_fused_moving_avg_obs_fq_helper",
                            "aten::_thnn_fused_lstm_cell", "aten::record_stream", "aten::_index_put_impl_"};

const Names reshapes_storage = {"aten::set_",     "aten::resize_",      "aten::resize_as_",  "aten::_resize_output_",
                                "aten::set_data", "aten::swap_tensors", "aten::resize_as_sparse_"};

const Names makes_garbage = {"aten::empty",         "aten::empty_like", "aten::empty_strided",      "aten::new_empty",
                             "aten::empty_permuted", "aten::new_empty_strided", "aten::empty_quantized", "aten::_empty_affine_quantized"};

const Names overwrites = {"aten::fill_",      "aten::zero_",     "aten::copy_",        "aten::bernoulli_", "aten::normal_",
                          "aten::uniform_",   "aten::random_",   "aten::exponential_", "aten::cauchy_",    "aten::geometric_",
                          "aten::log_normal_"};

const Names views = {"alias",     "as_strided",     "detach",     "diagonal",        "expand",           "permute",   "select",
                     "slice",     "split",          "split_with_sizes", "squeeze",   "t",                "transpose", "unbind",
                     "unfold",    "unsqueeze",      "view",       "view_as_real",    "view_as_complex",  "_reshape_alias",
                     "_unsafe_view", "_conj",       "_neg_view"};

bool is_collective(std::string_view space) {
    return space == "c10d" || space == "_c10d_functional" || space == "_c10d_functional_autograd" || space == "symm_mem" ||
           space == "fsdp";
}

void read_arguments(const c10::FunctionSchema &schema, Rule &rule) {
    const auto &arguments = schema.arguments();
    rule.n_arguments = static_cast<int32_t>(arguments.size());
    rule.n_returns = static_cast<int32_t>(schema.returns().size());
    for (size_t i = 0; i < arguments.size(); ++i) {
        const auto &argument = arguments[i];
        const std::string type = argument.type()->str();
        if (type.find("Tensor") != std::string::npos) rule.takes_tensors = true;
        if (type.find("Generator") != std::string::npos) rule.generator_argument = static_cast<int32_t>(i);
        if (argument.name() == "dtype") rule.dtype_argument = static_cast<int32_t>(i);
        if (argument.alias_info() && argument.alias_info()->isWrite() && i < 64) rule.written_arguments |= uint64_t{1} << i;
    }
}

void read_batch_norm(const std::string &name, const c10::FunctionSchema &schema, Rule &rule) {
    if (name != "aten::native_batch_norm" && name != "aten::_native_batch_norm_legit" && name != "aten::_batch_norm_with_update")
        return;
    for (int32_t i = 0; i < rule.n_arguments; ++i) {
        const auto &argument = schema.arguments()[static_cast<size_t>(i)];
        if (argument.name() == "running_mean" || argument.name() == "running_var") rule.statistics_arguments |= uint64_t{1} << i;
        if (argument.name() == "training") rule.training_argument = i;
    }
}

Rule make_rule(const c10::OperatorHandle &op, uint64_t id) {
    const auto &schema = op.schema();
    const std::string &name = schema.name();
    Rule rule;
    rule.id = id;
    read_arguments(schema, rule);
    read_batch_norm(name, schema, rule);
    rule.is_random = rule.generator_argument >= 0 || op.hasTag(at::Tag::nondeterministic_seeded);
    rule.is_pointwise = op.hasTag(at::Tag::pointwise);
    rule.makes_garbage = makes_garbage.count(name) != 0;
    rule.overwrites = overwrites.count(name) != 0;
    rule.is_lazy_clone = name == "aten::_lazy_clone";
    const std::string space = name.substr(0, name.find(':'));
    if (is_collective(space)) {
        rule.why = Why::COLLECTIVE;
        rule.writes_everything = true;
    } else if (space != "aten" && space != "prims") {
        rule.why = Why::FOREIGN_OPERATOR;
    } else if (not_deterministic.count(name)) {
        rule.why = Why::NOT_DETERMINISTIC;
    } else if (hidden_write.count(name) || name.find("fake_quant") != std::string::npos) {
        rule.why = Why::HIDDEN_WRITE;
    } else if (reshapes_storage.count(name) || rule.is_lazy_clone) {
        rule.why = Why::RESHAPES_STORAGE;
    }
    return rule;
}

} // namespace

const char *why_words(Why why) {
    static const char *words[] = {"replayable",
                                  "operator of another library",
                                  "collective",
                                  "not deterministic",
                                  "writes what its schema hides",
                                  "writes a tensor from outside",
                                  "reads memory others can write",
                                  "memory not written in full",
                                  "not a plain tensor",
                                  "changes a storage",
                                  "a tensor from outside changed",
                                  "an input is gone",
                                  "its replay differed",
                                  "chosen by a policy"};
    static_assert(sizeof(words) / sizeof(*words) == static_cast<size_t>(Why::COUNT));
    return words[static_cast<size_t>(why)];
}

static bool is_for(const Rule &rule, const c10::FunctionSchema &schema) { return !rule.schema || *rule.schema == schema; }

namespace {
struct Book {
    std::mutex mutex;
    std::unordered_map<const c10::FunctionSchema *, Rule *> by_schema;
    uint64_t n_rules = 0;

    Book() { hold_across_fork(mutex); }
};
} // namespace

const Rule &rule_of(const c10::OperatorHandle &op) {
    static auto *all = new Book;
    thread_local ska::flat_hash_map<const c10::FunctionSchema *, const Rule *> seen;
    const c10::FunctionSchema *key = &op.schema();
    auto it = seen.find(key);
    if (it != seen.end() && is_for(*it->second, *key)) return *it->second;
    std::lock_guard<std::mutex> lock(all->mutex);
    auto &slot = all->by_schema[key];
    if (!slot || !is_for(*slot, *key)) {
        slot = new Rule(make_rule(op, all->n_rules++)); // the old one stays: tapes point at it
        if (key->name().rfind("aten::", 0) != 0) slot->schema = *key;
    }
    seen[key] = slot;
    return *slot;
}

void skip_views(c10::DispatchKey key) {
    static auto *library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    for (const auto &name : c10::Dispatcher::singleton().getAllOpNames()) {
        if (name.name.rfind("aten::", 0) != 0 || !views.count(std::string_view(name.name).substr(6))) continue;
        if (name.overload_name == "out") continue;
        const std::string full = name.overload_name.empty() ? name.name.substr(6) : name.name.substr(6) + "." + name.overload_name;
        library->impl(full.c_str(), torch::CppFunction::makeFallthrough());
    }
}

} // namespace tfg
