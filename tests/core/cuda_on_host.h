// SPDX-License-Identifier: BSD-3-Clause
//
// cuda_on_host: the words of CUDA that csrc/cuda uses, so that the kernels' own sources compile as C++ and run on the CPU under the
// sanitizers. Given to the compiler with -include.
//
// How: blocks run one after another. The threads of a block are fibres of one system thread; each runs until it waits (__syncthreads, a
// shuffle) or ends, then the next one runs. Whoever runs next is decided by `cuda_order`: forwards, backwards or shuffled, so that a
// missing barrier gives different numbers in one of them. It is an error, with words and an exit, if a block waits for threads that
// have left, or if warps disagree about what they wait for.
//
// Picture   ready -> running -> at a barrier ----- all of the block are there ----> ready
//                            -> at a shuffle ----- all of the warp are there -----> ready
//                            -> gone
//
// What it can not show: memory that is slow, reordered or torn between real threads, anything of the hardware's.
// Threads: one launch at a time.
#pragma once

#ifndef TFG_CUDA_ON_HOST
#error "compile with -DTFG_CUDA_ON_HOST"
#endif

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#include <sanitizer/common_interface_defs.h>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(n_threads)

struct CUstream_st; // NOLINT: the runtime's name
using cudaStream_t = CUstream_st *;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };

enum CudaOrder { CUDA_FORWARDS, CUDA_BACKWARDS, CUDA_SHUFFLED };
inline CudaOrder cuda_order = CUDA_FORWARDS;
inline cudaError_t cuda_last_error = cudaSuccess;
inline int64_t cuda_n_launches = 0, cuda_n_error_reads = 0;

inline cudaError_t cudaGetLastError() {
    const cudaError_t error = cuda_last_error;
    cuda_last_error = cudaSuccess;
    cuda_n_error_reads++;
    return error;
}

inline const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaSuccess ? "cudaSuccess" : "cudaErrorInvalidConfiguration";
}

inline cudaError_t cudaMemsetAsync(void *at, int value, size_t size_bytes, cudaStream_t) {
    memset(at, value, size_bytes);
    return cudaSuccess;
}

namespace cuda_on_host {

enum class State { READY, AT_BARRIER, AT_SHUFFLE, GONE };
constexpr int MAX_THREADS = 1024, WARP_THREADS = 32;
constexpr size_t STACK_BYTES = 64 << 10;

struct Index {
    unsigned x, y = 0, z = 0;
};

struct Fibre {
    ucontext_t context;
    char *stack;
    void *sanitizer_stack;
    State state;
    Index index;
    unsigned n_shuffles;
    uint64_t offered[2]; // of this shuffle and the one before: a thread may be one ahead of its warp
};

struct Block {
    Fibre fibres[MAX_THREADS];
    ucontext_t scheduler;
    void *scheduler_sanitizer_stack;
    const void *scheduler_bottom;
    size_t scheduler_bytes;
    int n_threads, running;
    Index index, grid;
    const std::function<void()> *body;
};
inline Block block;

[[noreturn]] inline void fail(const char *words) {
    fprintf(stderr, "cuda_on_host: %s (block %u, thread %d)\n", words, block.index.x, block.running);
    exit(1);
}

inline Fibre &self() { return block.fibres[block.running]; }

inline void leave(State state) {
    Fibre &me = self();
    me.state = state;
    __sanitizer_start_switch_fiber(state == State::GONE ? nullptr : &me.sanitizer_stack, block.scheduler_bottom, block.scheduler_bytes);
    swapcontext(&me.context, &block.scheduler);
    __sanitizer_finish_switch_fiber(me.sanitizer_stack, &block.scheduler_bottom, &block.scheduler_bytes);
}

inline void enter() {
    __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_bottom, &block.scheduler_bytes);
    (*block.body)();
    leave(State::GONE);
}

inline void resume(int thread) {
    block.running = thread;
    Fibre &fibre = block.fibres[thread];
    __sanitizer_start_switch_fiber(&block.scheduler_sanitizer_stack, fibre.stack, STACK_BYTES);
    swapcontext(&block.scheduler, &fibre.context);
    __sanitizer_finish_switch_fiber(block.scheduler_sanitizer_stack, nullptr, nullptr);
}

inline bool all_are(int first, int end, State state) {
    for (int i = first; i < end; i++) {
        if (block.fibres[i].state != state) return false;
    }
    return true;
}

inline void release(int first, int end) {
    for (int i = first; i < end; i++) block.fibres[i].state = State::READY;
}

// Whoever waits for a company that is complete goes on. False: nobody does.
inline bool release_complete() {
    bool any = false;
    for (int first = 0; first < block.n_threads; first += WARP_THREADS) {
        const int end = first + WARP_THREADS < block.n_threads ? first + WARP_THREADS : block.n_threads;
        if (all_are(first, end, State::AT_SHUFFLE)) {
            release(first, end);
            any = true;
        }
    }
    if (all_are(0, block.n_threads, State::AT_BARRIER)) {
        release(0, block.n_threads);
        any = true;
    }
    return any;
}

// The i-th to run. 769 is prime: every thread of a block that has not a multiple of as many comes once.
inline int in_order(int i) {
    switch (cuda_order) {
    case CUDA_FORWARDS: return i;
    case CUDA_BACKWARDS: return block.n_threads - 1 - i;
    case CUDA_SHUFFLED: return static_cast<int>((static_cast<int64_t>(i) * 769 + 131) % block.n_threads);
    }
    return i;
}

inline void start(int thread) {
    Fibre &fibre = block.fibres[thread];
    if (!fibre.stack) fibre.stack = static_cast<char *>(malloc(STACK_BYTES));
    fibre.state = State::READY;
    fibre.index = {static_cast<unsigned>(thread)};
    fibre.n_shuffles = 0;
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack;
    fibre.context.uc_stack.ss_size = STACK_BYTES;
    fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, enter, 0);
}

inline void run_block() {
    for (int i = 0; i < block.n_threads; i++) start(i);
    while (!all_are(0, block.n_threads, State::GONE)) {
        bool any = false;
        for (int i = 0; i < block.n_threads; i++) {
            const int thread = in_order(i);
            if (block.fibres[thread].state != State::READY) continue;
            resume(thread);
            any = true;
        }
        if (!release_complete() && !any) fail("threads wait for others that do not come");
    }
}

inline void launch(int64_t n_blocks, int64_t n_threads, const std::function<void()> &body) {
    cuda_n_launches++;
    if (n_blocks < 1 || n_blocks > 0x7fffffff || n_threads < 1 || n_threads > MAX_THREADS) {
        cuda_last_error = cudaErrorInvalidConfiguration;
        return;
    }
    block.n_threads = static_cast<int>(n_threads);
    block.grid = {static_cast<unsigned>(n_blocks), 1, 1};
    block.body = &body;
    for (int64_t i = 0; i < n_blocks; i++) {
        block.index = {static_cast<unsigned>(cuda_order == CUDA_BACKWARDS ? n_blocks - 1 - i : i)};
        run_block();
    }
}

// What thread `lane` of this warp offers in the same shuffle.
template <typename T> T exchanged(T value, int lane) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    const int first = block.running / WARP_THREADS * WARP_THREADS;
    if (first + WARP_THREADS > block.n_threads) fail("a shuffle in a warp that is not whole");
    const unsigned parity = self().n_shuffles++ % 2;
    memcpy(&self().offered[parity], &value, sizeof value);
    leave(State::AT_SHUFFLE);
    memcpy(&value, &block.fibres[first + lane].offered[parity], sizeof value);
    return value;
}

} // namespace cuda_on_host

#define threadIdx (cuda_on_host::self().index)
#define blockIdx (cuda_on_host::block.index)
#define gridDim (cuda_on_host::block.grid)

inline void __syncthreads() { cuda_on_host::leave(cuda_on_host::State::AT_BARRIER); }

template <typename T> T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
    if (mask != 0xffffffffU) cuda_on_host::fail("a shuffle of part of a warp");
    return cuda_on_host::exchanged(value, (cuda_on_host::block.running % cuda_on_host::WARP_THREADS) ^ lane_mask);
}

inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long value) {
    const unsigned long long before = *at;
    *at = before + value;
    return before;
}

#define TFG_LAUNCH(kernel, n_blocks, n_threads, stream, ...) \
    ((void)(stream), cuda_on_host::launch(n_blocks, n_threads, [&] { kernel(__VA_ARGS__); }))
