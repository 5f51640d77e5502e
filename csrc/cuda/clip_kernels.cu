// SPDX-License-Identifier: BSD-3-Clause
//
// clip_kernels: the norm of many gradients and their scaling. Reference: csrc/cpu/clip_loops.c. Order of sums: csrc/core/clip.h.
//
//      partial[chunk] = joined lanes of a term of each element         element <- element * coefficient
//
// Who does what: one block a chunk, 256 threads, four neighbouring lanes a thread. A thread adds its lanes' elements row after row,
// joins its four, then warps join by shuffles and the block's eight warps through shared memory: always neighbours first, which is the
// order of the CPU's. A block finds its tensor by halving the list, which comes with the launch as its argument: nothing is copied to
// the device beforehand, and a captured graph holds the list by value.
//
// Bytes: the norm reads each element once, scaling reads and writes it once. Both are bound by memory.
// Numbers: sums in double, deterministic, to be compiled without contraction (-fmad=false): the same bits as the CPU's.
// History: not run on a GPU yet.
#include "core/clip.h"

#include "device.h"

static constexpr int N_THREADS = 256;
static constexpr int N_WARPS = N_THREADS / WARP;
static constexpr int LANES_A_THREAD = TFG_CLIP_LANES / N_THREADS;
static_assert(LANES_A_THREAD == 4, "Four is what a thread reads at once");

static constexpr int64_t MAX_LISTED = 120;

struct ClipList {
    int64_t n_tensors;
    tfg_clip_tensor tensors[MAX_LISTED];
};
static_assert(sizeof(ClipList) + 64 <= MAX_ARGUMENT_BYTES, "a launch's arguments are to fit on every GPU");

static __device__ inline double widened(double element) { return element; }
static __device__ inline double widened(float element) { return static_cast<double>(element); }

// The two sixteen-bit kinds, as types of their own.
struct Brain {
    uint16_t bits;
};
struct Half {
    uint16_t bits;
};
static __device__ inline double widened(Brain element) { return static_cast<double>(tfg_float_of_bfloat16(element.bits)); }
static __device__ inline double widened(Half element) { return static_cast<double>(float_of_float16(element.bits)); }

static __device__ inline double scaled(double element, double coefficient) { return element * coefficient; }
static __device__ inline float scaled(float element, double coefficient) { return element * static_cast<float>(coefficient); }
static __device__ inline Brain scaled(Brain element, double coefficient) {
    return {tfg_bfloat16_of_float(tfg_float_of_bfloat16(element.bits) * static_cast<float>(coefficient))};
}
static __device__ inline Half scaled(Half element, double coefficient) {
    return {float16_of_float(float_of_float16(element.bits) * static_cast<float>(coefficient))};
}

// The elements of one chunk.
struct Chunk {
    void *at;
    int64_t n_elems;
    tfg_float kind;
};

static __device__ inline Chunk find_chunk(const ClipList &list, int64_t chunk) {
    const tfg_clip_tensor &tensor = list.tensors[tfg_clip_find(list.tensors, list.n_tensors, chunk)];
    const int64_t most = TFG_CLIP_CHUNK_ELEMS;
    const int64_t first = (chunk - tensor.first_chunk) * most;
    const int64_t n_left = tensor.n_elems - first;
    return {static_cast<char *>(tensor.at) + first * tfg_float_bytes(tensor.kind), n_left < most ? n_left : most, tensor.kind};
}

template <tfg_clip_norm NORM, typename T> static __device__ inline void add_up(const Chunk &chunk, double lanes[LANES_A_THREAD]) {
    const T *at = static_cast<const T *>(chunk.at);
    const int64_t first = static_cast<int64_t>(threadIdx.x) * LANES_A_THREAD;
    int64_t i = first;
    if (is_aligned<Four<T>>(at)) {
#pragma unroll 8
        for (; i + LANES_A_THREAD <= chunk.n_elems; i += TFG_CLIP_LANES) {
            const Four<T> four = *reinterpret_cast<const Four<T> *>(at + i);
            for (int lane = 0; lane < LANES_A_THREAD; lane++) {
                lanes[lane] = tfg_clip_join(NORM, lanes[lane], tfg_clip_term(NORM, widened(four.at[lane])));
            }
        }
    }
    for (; i < chunk.n_elems; i += TFG_CLIP_LANES) {
        for (int lane = 0; lane < LANES_A_THREAD && i + lane < chunk.n_elems; lane++) {
            lanes[lane] = tfg_clip_join(NORM, lanes[lane], tfg_clip_term(NORM, widened(at[i + lane])));
        }
    }
}

// Neighbours first: threads 1, 2, 4, 8 and 16 apart, then the warps. Thread 0 has the block's.
template <tfg_clip_norm NORM> static __device__ inline double join_block(const double lanes[LANES_A_THREAD]) {
    __shared__ double warps[N_WARPS];
    double joined = tfg_clip_join(NORM, tfg_clip_join(NORM, lanes[0], lanes[1]), tfg_clip_join(NORM, lanes[2], lanes[3]));
    for (int apart = 1; apart < WARP; apart *= 2) {
        joined = tfg_clip_join(NORM, joined, __shfl_xor_sync(WHOLE_WARP, joined, apart));
    }
    if (threadIdx.x % WARP == 0) {
        warps[threadIdx.x / WARP] = joined;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int n = N_WARPS / 2; n > 0; n /= 2) {
            for (int i = 0; i < n; i++) {
                warps[i] = tfg_clip_join(NORM, warps[2 * i], warps[2 * i + 1]);
            }
        }
        joined = warps[0];
    }
    return joined;
}

template <tfg_clip_norm NORM>
static __global__ void __launch_bounds__(N_THREADS) clip_partials_kernel(ClipList list, int64_t first_chunk, double *partials) {
    const int64_t index = first_chunk + static_cast<int64_t>(blockIdx.x);
    const Chunk chunk = find_chunk(list, index);
    double lanes[LANES_A_THREAD] = {0};
    switch (chunk.kind) {
    case TFG_FLOAT64:
        add_up<NORM, double>(chunk, lanes);
        break;
    case TFG_FLOAT32:
        add_up<NORM, float>(chunk, lanes);
        break;
    case TFG_BFLOAT16:
        add_up<NORM, Brain>(chunk, lanes);
        break;
    case TFG_FLOAT16:
        add_up<NORM, Half>(chunk, lanes);
        break;
    }
    const double joined = join_block<NORM>(lanes);
    if (threadIdx.x == 0) {
        partials[index] = joined;
    }
}

// One block: all partials as the elements of one chunk.
template <tfg_clip_norm NORM>
static __global__ void __launch_bounds__(N_THREADS) clip_finish_kernel(const double *partials, int64_t n_partials, double max_norm,
                                                                       double overflow, double *total, double *coefficient) {
    double lanes[LANES_A_THREAD] = {0};
#pragma unroll 4
    for (int64_t i = static_cast<int64_t>(threadIdx.x) * LANES_A_THREAD; i < n_partials; i += TFG_CLIP_LANES) {
        for (int lane = 0; lane < LANES_A_THREAD && i + lane < n_partials; lane++) {
            lanes[lane] = tfg_clip_join(NORM, lanes[lane], partials[i + lane]);
        }
    }
    const double joined = join_block<NORM>(lanes);
    if (threadIdx.x == 0) {
        *total = tfg_clip_total(NORM, joined, overflow);
        *coefficient = tfg_clip_coefficient(max_norm, *total);
    }
}

template <typename T> static __device__ inline void scale(const Chunk &chunk, double coefficient) {
    T *at = static_cast<T *>(chunk.at);
    int64_t i = static_cast<int64_t>(threadIdx.x) * 4;
    if (is_aligned<Four<T>>(at)) {
#pragma unroll 4
        for (; i + 4 <= chunk.n_elems; i += 4 * N_THREADS) {
            Four<T> four = *reinterpret_cast<const Four<T> *>(at + i);
            for (T &element : four.at) {
                element = scaled(element, coefficient);
            }
            *reinterpret_cast<Four<T> *>(at + i) = four;
        }
    }
    for (; i < chunk.n_elems; i += 4 * N_THREADS) {
        for (int64_t j = i; j < i + 4 && j < chunk.n_elems; j++) {
            at[j] = scaled(at[j], coefficient);
        }
    }
}

static __global__ void __launch_bounds__(N_THREADS) clip_scale_kernel(const double *given, ClipList list, int64_t first_chunk) {
    const double coefficient = *given;
    if (coefficient == 1.0) {
        return;
    }
    const Chunk chunk = find_chunk(list, first_chunk + static_cast<int64_t>(blockIdx.x));
    if (chunk.kind != TFG_FLOAT64 && static_cast<float>(coefficient) == 1.0F) {
        return;
    }
    switch (chunk.kind) {
    case TFG_FLOAT64:
        scale<double>(chunk, coefficient);
        return;
    case TFG_FLOAT32:
        scale<float>(chunk, coefficient);
        return;
    case TFG_BFLOAT16:
        scale<Brain>(chunk, coefficient);
        return;
    case TFG_FLOAT16:
        scale<Half>(chunk, coefficient);
        return;
    }
}

static int64_t end_chunk(const tfg_clip_tensor &tensor) {
    return tensor.first_chunk + tensor.n_elems / TFG_CLIP_CHUNK_ELEMS + (tensor.n_elems % TFG_CLIP_CHUNK_ELEMS != 0);
}

// launch(list, first chunk, number of chunks) for each piece of the list that fits into a launch's arguments. A tensor with more chunks
// than a grid has blocks comes more than once.
template <typename Launch> static void over_lists(const tfg_clip_tensor *tensors, int64_t n_tensors, const Launch &launch) {
    for (int64_t first = 0; first < n_tensors; first += MAX_LISTED) {
        ClipList list = {};
        list.n_tensors = n_tensors - first < MAX_LISTED ? n_tensors - first : MAX_LISTED;
        memcpy(list.tensors, tensors + first, static_cast<size_t>(list.n_tensors) * sizeof *tensors);
        const int64_t end = end_chunk(list.tensors[list.n_tensors - 1]);
        for (int64_t chunk = list.tensors[0].first_chunk; chunk < end; chunk += MAX_BLOCKS) {
            launch(list, chunk, end - chunk < MAX_BLOCKS ? end - chunk : MAX_BLOCKS);
        }
    }
}

template <tfg_clip_norm NORM>
static void launch_partials(const tfg_clip_tensor *tensors, int64_t n_tensors, double *partials, tfg_cuda_stream stream) {
    over_lists(tensors, n_tensors, [&](const ClipList &list, int64_t first_chunk, int64_t n_chunks) {
        TFG_LAUNCH(clip_partials_kernel<NORM>, n_chunks, N_THREADS, stream, list, first_chunk, partials);
    });
}

tfg_status tfg_cuda_clip_partials(tfg_clip_norm norm, const tfg_clip_tensor *tensors, int64_t n_tensors, double *partials,
                                  tfg_cuda_stream stream, tfg_error *err) {
    switch (norm) {
    case TFG_CLIP_SQUARES:
        launch_partials<TFG_CLIP_SQUARES>(tensors, n_tensors, partials, stream);
        return launched("clip_partials", err);
    case TFG_CLIP_SIZES:
        launch_partials<TFG_CLIP_SIZES>(tensors, n_tensors, partials, stream);
        return launched("clip_partials", err);
    case TFG_CLIP_LARGEST:
        launch_partials<TFG_CLIP_LARGEST>(tensors, n_tensors, partials, stream);
        return launched("clip_partials", err);
    }
    return tfg_fail(TFG_ERR_UNSUPPORTED, err, "clip_partials: no norm is %d", static_cast<int>(norm));
}

tfg_status tfg_cuda_clip_finish(tfg_clip_norm norm, const double *partials, int64_t n_partials, double max_norm, double overflow,
                                double *total, double *coefficient, tfg_cuda_stream stream, tfg_error *err) {
    switch (norm) {
    case TFG_CLIP_SQUARES:
        TFG_LAUNCH(clip_finish_kernel<TFG_CLIP_SQUARES>, 1, N_THREADS, stream, partials, n_partials, max_norm, overflow, total, coefficient);
        return launched("clip_finish", err);
    case TFG_CLIP_SIZES:
        TFG_LAUNCH(clip_finish_kernel<TFG_CLIP_SIZES>, 1, N_THREADS, stream, partials, n_partials, max_norm, overflow, total, coefficient);
        return launched("clip_finish", err);
    case TFG_CLIP_LARGEST:
        TFG_LAUNCH(clip_finish_kernel<TFG_CLIP_LARGEST>, 1, N_THREADS, stream, partials, n_partials, max_norm, overflow, total, coefficient);
        return launched("clip_finish", err);
    }
    return tfg_fail(TFG_ERR_UNSUPPORTED, err, "clip_finish: no norm is %d", static_cast<int>(norm));
}

tfg_status tfg_cuda_clip_scale(const double *coefficient, const tfg_clip_tensor *tensors, int64_t n_tensors, tfg_cuda_stream stream,
                               tfg_error *err) {
    over_lists(tensors, n_tensors, [&](const ClipList &list, int64_t first_chunk, int64_t n_chunks) {
        TFG_LAUNCH(clip_scale_kernel, n_chunks, N_THREADS, stream, coefficient, list, first_chunk);
    });
    return launched("clip_scale", err);
}
