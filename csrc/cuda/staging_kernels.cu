// SPDX-License-Identifier: BSD-3-Clause
//
// staging_kernels: strided tensors into one buffer, and back, for offload. Reference: csrc/cpu/staging_loops.c.
//
// Who does what: one block a chunk, one thread an element, 256 neighbours of the buffer at once. The list of views comes with the launch.
// A view of one dimension, which is what dense tensors of any order of dimensions become, costs no division.
//
// Bytes: each is read once and written once. Numbers: exact.
// History: not run on a GPU yet.
#include "core/staging.h"

#include "device.h"

static constexpr int N_THREADS = 256;
static constexpr int64_t MAX_LISTED = 24;

struct StagingList {
    int64_t n_views;
    tfg_staging_view views[MAX_LISTED];
};
static_assert(sizeof(StagingList) + 64 <= MAX_ARGUMENT_BYTES, "a launch's arguments are to fit on every GPU");

struct alignas(16) Sixteen {
    uint64_t at[2];
};

enum class Way { GATHER, SCATTER };

template <Way WAY, typename T> static __device__ inline void move(const tfg_staging_view &view, int64_t first, void *buffer) {
    const int64_t most = first + TFG_STAGING_CHUNK_ELEMS;
    const int64_t end = most < view.n_elems ? most : view.n_elems;
    T *in_row = reinterpret_cast<T *>(static_cast<char *>(buffer) + view.first_byte);
    T *strided = static_cast<T *>(view.at);
#pragma unroll 4
    for (int64_t i = first + threadIdx.x; i < end; i += N_THREADS) {
        T &there = strided[tfg_staging_offset_elems(&view, i)];
        if (WAY == Way::GATHER) {
            in_row[i] = there;
        } else {
            there = in_row[i];
        }
    }
}

template <Way WAY>
static __global__ void __launch_bounds__(N_THREADS) staging_kernel(StagingList list, int64_t first_chunk, void *buffer) {
    const int64_t chunk = first_chunk + static_cast<int64_t>(blockIdx.x);
    const tfg_staging_view &view = list.views[tfg_staging_find(list.views, list.n_views, chunk)];
    const int64_t first = (chunk - view.first_chunk) * TFG_STAGING_CHUNK_ELEMS;
    switch (view.elem_bytes) {
    case 1:
        move<WAY, uint8_t>(view, first, buffer);
        return;
    case 2:
        move<WAY, uint16_t>(view, first, buffer);
        return;
    case 4:
        move<WAY, uint32_t>(view, first, buffer);
        return;
    case 8:
        move<WAY, uint64_t>(view, first, buffer);
        return;
    default: // tfg_staging_describe lets no other width through
        move<WAY, Sixteen>(view, first, buffer);
        return;
    }
}

template <Way WAY>
static void over_lists(const tfg_staging_view *views, int64_t n_views, void *buffer, tfg_cuda_stream stream) {
    for (int64_t first = 0; first < n_views; first += MAX_LISTED) {
        StagingList list = {};
        list.n_views = n_views - first < MAX_LISTED ? n_views - first : MAX_LISTED;
        memcpy(list.views, views + first, static_cast<size_t>(list.n_views) * sizeof *views);
        const tfg_staging_view &last = list.views[list.n_views - 1];
        const int64_t end = last.first_chunk + last.n_elems / TFG_STAGING_CHUNK_ELEMS + (last.n_elems % TFG_STAGING_CHUNK_ELEMS != 0);
        for (int64_t chunk = list.views[0].first_chunk; chunk < end; chunk += MAX_BLOCKS) {
            const int64_t n_blocks = end - chunk < MAX_BLOCKS ? end - chunk : MAX_BLOCKS;
            TFG_LAUNCH(staging_kernel<WAY>, n_blocks, N_THREADS, stream, list, chunk, buffer);
        }
    }
}

tfg_status tfg_cuda_staging_gather(const tfg_staging_view *views, int64_t n_views, void *buffer, tfg_cuda_stream stream, tfg_error *err) {
    over_lists<Way::GATHER>(views, n_views, buffer, stream);
    return launched("staging_gather", err);
}

tfg_status tfg_cuda_staging_scatter(const tfg_staging_view *views, int64_t n_views, const void *buffer, tfg_cuda_stream stream,
                                    tfg_error *err) {
    over_lists<Way::SCATTER>(views, n_views, const_cast<void *>(buffer), stream);
    return launched("staging_scatter", err);
}
