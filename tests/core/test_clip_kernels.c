/* SPDX-License-Identifier: BSD-3-Clause
 *
 * The clip kernels' own source, run on the host, against the loops: bit for bit.
 */
#include "check.h"
#include "clip_loops.h"
#include "cuda/launch.h"
#include "cuda_order.h"
#include "gradients.h"

static random_source source;

static void check_partials(const gradients *list) {
    const size_t size_bytes = (size_t)list->n_chunks * sizeof(double);
    double *expected = malloc(size_bytes + (size_bytes == 0));
    double *partials = malloc(size_bytes + (size_bytes == 0));
    for (int norm = 0; norm < 3; norm++) {
        double total = -1;
        double coefficient = -1;
        memset(partials, 0xff, size_bytes);
        tfg_cpu_clip_partials((tfg_clip_norm)norm, list->tensors, list->n_tensors, 0, list->n_chunks, expected);
        CHECK_EQ(tfg_cuda_clip_partials((tfg_clip_norm)norm, list->tensors, list->n_tensors, partials, NULL, NULL), TFG_OK);
        CHECK(memcmp(partials, expected, size_bytes) == 0);
        CHECK_EQ(tfg_cuda_clip_finish((tfg_clip_norm)norm, partials, list->n_chunks, 1.5, 1e300, &total, &coefficient, NULL, NULL),
                 TFG_OK);
        const double joined = tfg_clip_join_partials((tfg_clip_norm)norm, expected, list->n_chunks);
        CHECK(total == tfg_clip_total((tfg_clip_norm)norm, joined, 1e300));
        CHECK(coefficient == tfg_clip_coefficient(1.5, total));
    }
    free(expected);
    free(partials);
}

static void check_scale(gradients *list, double coefficient) {
    gradients expected = {0};
    gradients_copy(&expected, list);
    tfg_cpu_clip_scale(coefficient, expected.tensors, expected.n_tensors, 0, expected.n_chunks);
    CHECK_EQ(tfg_cuda_clip_scale(&coefficient, list->tensors, list->n_tensors, NULL, NULL), TFG_OK);
    CHECK(gradients_same(list, &expected));
    gradients_free(&expected);
}

static void test_kernels_match_the_loops_on_awkward_sizes(void) {
    gradients list = {0};
    gradients_awkward(&list, &source);
    check_partials(&list);
    check_scale(&list, 0.3712345678901);
    check_scale(&list, 0.0);
    gradients_free(&list);
}

/* More tensors than one launch can name; empty ones at the first seam, others at the second. */
static void test_long_lists_take_several_launches(void) {
    gradients list = {0};
    for (int i = 0; i < 299; i++) {
        const int64_t n_elems = i < 2 || (i > 117 && i < 122) ? 0 : 1 + random_below(&source, 40);
        gradients_add(&list, &source, (tfg_float)(i % 4), n_elems, i % 3);
    }
    check_partials(&list);
    cuda_launches();
    check_scale(&list, 0.5);
    CHECK_EQ(cuda_launches(), 3);
    gradients_free(&list);
}

static void test_nothing_is_launched_for_nothing(void) {
    gradients list = {0};
    double total = -1;
    double coefficient = -1;
    cuda_launches();
    check_partials(&list);
    CHECK_EQ(cuda_launches(), 3); /* the finish, once a norm: there is always a total */
    gradients_add(&list, &source, TFG_FLOAT32, 0, 0);
    check_scale(&list, 0.5);
    CHECK_EQ(cuda_launches(), 0);
    CHECK_EQ(tfg_cuda_clip_finish(TFG_CLIP_SQUARES, NULL, 0, 1.0, 1e300, &total, &coefficient, NULL, NULL), TFG_OK);
    CHECK(total == 0.0 && coefficient == 1.0);
    gradients_free(&list);
}

static void test_a_coefficient_of_one_touches_no_memory(void) {
    const double one = 1.0;
    const double nearly = 1.0 - 0x1p-30;
    tfg_clip_tensor nowhere[] = {{.at = (void *)8, .n_elems = 70000, .kind = TFG_FLOAT32},
                                 {.at = (void *)8, .n_elems = 70000, .kind = TFG_FLOAT64}};
    int64_t n_chunks;
    CHECK_EQ(tfg_clip_cut(nowhere, 2, &n_chunks, NULL), TFG_OK);
    CHECK_EQ(tfg_cuda_clip_scale(&one, nowhere, 2, NULL, NULL), TFG_OK);
    CHECK_EQ(tfg_cuda_clip_scale(&nearly, nowhere, 1, NULL, NULL), TFG_OK);
}

static void test_odd_numbers_are_seen(void) {
    const double odd[] = {(double)NAN, (double)INFINITY};
    for (int trial = 0; trial < 24; trial++) {
        gradients list = {0};
        double partials[3];
        double total;
        double coefficient;
        gradients_add(&list, &source, (tfg_float)(trial % 4), 7, 0);
        gradients_add(&list, &source, (tfg_float)(trial % 4), 65539, trial % 3);
        put_element(&list.tensors[1], random_below(&source, 65539), odd[trial % 2]);
        const tfg_clip_norm norm = (tfg_clip_norm)(trial % 3);
        CHECK_EQ(tfg_cuda_clip_partials(norm, list.tensors, 2, partials, NULL, NULL), TFG_OK);
        CHECK_EQ(tfg_cuda_clip_finish(norm, partials, 3, 1.0, 1e300, &total, &coefficient, NULL, NULL), TFG_OK);
        CHECK(trial % 2 == 0 ? isnan(total) && isnan(coefficient) : isinf(total) && coefficient == 0.0);
        gradients_free(&list);
    }
}

static void test_a_total_that_does_not_fit_is_infinite(void) {
    const double partial = 70000.0 * 70000.0;
    double total;
    double coefficient;
    CHECK_EQ(tfg_cuda_clip_finish(TFG_CLIP_SQUARES, &partial, 1, 1.0, tfg_clip_overflow(TFG_FLOAT16), &total, &coefficient, NULL, NULL),
             TFG_OK);
    CHECK(isinf(total) && coefficient == 0.0);
}

static void test_an_error_of_the_runtime_comes_back_with_its_name(void) {
    tfg_error err = {{0}};
    double partial = 1;
    double total;
    double coefficient;
    cuda_error_reads();
    cuda_fail_next();
    CHECK_EQ(tfg_cuda_clip_finish(TFG_CLIP_SIZES, &partial, 1, 1.0, 1e300, &total, &coefficient, NULL, &err), TFG_ERR_CUDA);
    CHECK(strstr(err.text, "clip_finish: cudaErrorInvalidConfiguration") != NULL);
    CHECK_EQ(cuda_error_reads(), 1);
    CHECK_EQ(tfg_cuda_clip_partials((tfg_clip_norm)7, NULL, 0, NULL, NULL, &err), TFG_ERR_UNSUPPORTED);
}

int main(int argc, char **argv) {
    source.state = random_seed(argc, argv);
    RUN_IN_EVERY_ORDER(test_kernels_match_the_loops_on_awkward_sizes);
    RUN_IN_EVERY_ORDER(test_odd_numbers_are_seen);
    RUN(test_long_lists_take_several_launches);
    RUN(test_nothing_is_launched_for_nothing);
    RUN(test_a_coefficient_of_one_touches_no_memory);
    RUN(test_a_total_that_does_not_fit_is_infinite);
    RUN(test_an_error_of_the_runtime_comes_back_with_its_name);
    return check_finish();
}
