// SPDX-License-Identifier: BSD-3-Clause
//
// rerun frame: one call of a function that lets go of what autograd wants saved and is called again when that is asked for.
//
// Words
//   holder   what autograd keeps in place of a saved tensor: the frame and a position, the n-th save of the forward
//   pass     one second run of the function, for one backward; the n-th save of a pass stands for the n-th of the forward
//   scope    whose pass it is: a graph task (one backward call), a GraphExecGroup, or, outside any backward, nobody's
//
//      forward    save save save             holders 0 1 2, metadata 0 1 2; no tensor
//      backward   holder 1 asked ──> pass:   save→0 save→1 save→2 stop      then handed out, each once
//
// Laws
//   a tensor of a pass is handed out once, and given up when its holder dies or its scope ends
//   a pass counts as done only if it made every tensor that was saved, with the same shape, dtype and device
//   each run of each scope starts from nothing: a pass that failed leaves no trace
//
// Threads: everything here is touched under the GIL only, and no lock is held, so that anything may run Python. A pass belongs to
// the thread that began it; another thread that asks meanwhile makes its own.
#pragma once

#include <Python.h>

#include <memory>
#include <thread>

#include "handles.h"
#include "rerun_call.h"

namespace tfg {

struct Frame;

// What is compared between a saved tensor and its twin of a pass. Odd tensors (subclasses, symbolic sizes) keep the Python shape.
struct SavedMetadata {
    explicit SavedMetadata(const at::Tensor &tensor);
    bool operator==(const SavedMetadata &other) const; // throws where a symbolic comparison does
    std::string words() const;

    c10::SmallVector<int64_t, 4> sizes;
    c10::ScalarType dtype;
    c10::Device device;
    pybind11::object odd_shape;
};

// A parameter is the same tensor in forward and pass: as in a plain run, it must not be written in between.
struct SavedParameter {
    size_t position;
    const at::TensorImpl *tensor; // compared, never followed
    uint32_t version;
};

struct Scope {
    int64_t graph_task = -1;          // -1: not in a backward
    pybind11::object exec_group_ref; // a weak reference; empty without one

    static Scope now();
    bool same(const Scope &other) const;
    bool is_nobodys() const { return graph_task < 0 && !exec_group_ref; }
    bool is_over() const; // the exec group died
};

struct Pass {
    Pass(Scope whose, size_t n_positions);

    struct Place {
        at::Tensor tensor;
        std::optional<SavedVersion> version; // what it must still be when it is handed out
        bool is_handed_out = false;
    };
    Scope scope;
    std::thread::id owner = std::this_thread::get_id();
    size_t n_saved = 0;
    size_t n_parameters = 0; // of the frame's, passed by
    bool is_done = false;
    bool is_stopped = false;      // the stop was raised: all that is needed is there
    bool is_of_unfinished = false; // the forward was still running and the pass went beyond it: nothing to compare
    std::vector<Place> places;
};

enum RerunFlags : long {
    PRESERVE_RNG = 1,
    CHECK_METADATA = 2,
    EARLY_STOP = 4,
};

struct Holder {
    PyObject_HEAD
    std::shared_ptr<Frame> frame;
    size_t position;
};

struct Frame : std::enable_shared_from_this<Frame> {
    Frame(long flags, PyObject *function, PyObject *arguments, PyObject *keywords)
        : call(function, arguments, keywords, (flags & PRESERVE_RNG) != 0), checks_metadata((flags & CHECK_METADATA) != 0),
          stops_early((flags & EARLY_STOP) != 0) {
        if (call.ambient.engine == Engine::REPLAY) call.ambient.engine = Engine::INSIDE_RERUN;
    }

    void note_saved(Holder *holder, const at::Tensor &tensor); // the next position; the holder is borrowed until it says it died
    void note_dead(size_t position);
    // The version that a plain run would expect of what a pass saves: now's, a parameter's that of the forward.
    SavedVersion version_to_expect(Pass &pass, size_t position, const at::Tensor &tensor) const;
    Pass *find(const Scope &scope, size_t position); // a pass with something to say about this position, or nullptr
    bool is_running_here(const Scope &scope) const;
    std::shared_ptr<Pass> begin(Scope scope);
    void end(const Pass *pass);          // forget it
    void check(const Pass &pass) const;  // throws the stock's CheckpointError where a pass does not fit the forward

    SavedCall call;
    const bool checks_metadata, stops_early;
    bool is_forward_done = false;
    pybind11::object on_error; // called with a CheckpointError, to raise a fuller one; may be empty
    std::vector<Holder *> holders; // by position; null once dead
    std::vector<SavedMetadata> metadata;
    std::vector<SavedParameter> parameters;
    std::vector<std::shared_ptr<Pass>> passes;
};

pybind11::object checkpoint_error_class(); // torch.utils.checkpoint.CheckpointError

// Sets torch.utils.checkpoint.CheckpointError with these words, and throws.
[[noreturn]] void throw_checkpoint_error(const std::string &words);

} // namespace tfg
