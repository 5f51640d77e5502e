/* SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"
#include "cuda/launch.h"
#include "cuda_order.h"
#include "staging_loops.h"
#include "strided.h"

static random_source source;

/* Both buffers, and the tensors after the scatter, are the loops' byte for byte. */
static void check_list(strided *tensors, int64_t n_tensors) {
    tfg_staging_view views[MAX_STRIDED];
    int64_t buffer_bytes;
    int64_t n_chunks;
    for (int64_t i = 0; i < n_tensors; i++) {
        CHECK_EQ(strided_describe(&tensors[i], &views[i]), TFG_OK);
    }
    tfg_staging_lay(views, n_tensors, &buffer_bytes, &n_chunks);
    unsigned char *expected = calloc((size_t)buffer_bytes + 1, 1);
    unsigned char *buffer = calloc((size_t)buffer_bytes + 1, 1);
    tfg_cpu_staging_gather(views, n_tensors, expected);
    CHECK_EQ(tfg_cuda_staging_gather(views, n_tensors, buffer, NULL, NULL), TFG_OK);
    CHECK(memcmp(buffer, expected, (size_t)buffer_bytes) == 0);
    random_bytes(&source, buffer, buffer_bytes);
    CHECK_EQ(tfg_cuda_staging_scatter(views, n_tensors, buffer, NULL, NULL), TFG_OK);
    for (int64_t i = 0; i < n_tensors; i++) {
        unsigned char *scattered = malloc((size_t)tensors[i].block_bytes);
        memcpy(scattered, tensors[i].block, (size_t)tensors[i].block_bytes);
        tfg_cpu_staging_scatter(&views[i], 1, buffer);
        CHECK(memcmp(scattered, tensors[i].block, (size_t)tensors[i].block_bytes) == 0);
        free(scattered);
    }
    free(expected);
    free(buffer);
}

static void test_lists_of_strided_tensors(void) {
    for (int trial = 0; trial < 4; trial++) {
        strided tensors[MAX_STRIDED];
        const int64_t n_tensors = trial == 0 ? 1 : random_below(&source, MAX_STRIDED + 1);
        for (int64_t i = 0; i < n_tensors; i++) {
            tensors[i] = strided_random(&source, trial == 1 ? 9 : 5);
        }
        check_list(tensors, n_tensors);
        for (int64_t i = 0; i < n_tensors; i++) {
            free(tensors[i].block);
        }
    }
}

/* More than one chunk, of each width. */
static void test_long_tensors(void) {
    for (int32_t elem_bytes = 1; elem_bytes <= 16; elem_bytes *= 2) {
        strided tensor = {.elem_bytes = elem_bytes, .n_dims = 2, .sizes = {131, 67}, .strides = {70, 1}};
        tensor.block_bytes = (int64_t)elem_bytes * (130 * 70 + 67);
        tensor.block = malloc((size_t)tensor.block_bytes);
        random_bytes(&source, tensor.block, tensor.block_bytes);
        check_list(&tensor, 1);
        free(tensor.block);
    }
}

int main(int argc, char **argv) {
    source.state = random_seed(argc, argv);
    RUN_IN_EVERY_ORDER(test_lists_of_strided_tensors);
    RUN(test_long_tensors);
    return check_finish();
}
