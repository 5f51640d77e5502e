/* SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"
#include "clip_loops.h"
#include "gradients.h"

static random_source source;
static const double LARGE = (double)INFINITY;

/* ---- the slow, obvious twin: the words of the header, one element at a time ---------------------------------------- */

static double slow_term(tfg_clip_norm norm, double element) {
    return norm == TFG_CLIP_SQUARES ? element * element : element < 0 ? -element : element;
}

static double slow_join(tfg_clip_norm norm, double left, double right) {
    if (norm != TFG_CLIP_LARGEST) {
        return left + right;
    }
    return isnan(left) ? left : isnan(right) ? right : left < right ? right : left;
}

static double slow_pairs(tfg_clip_norm norm, const double *lanes, int64_t n_lanes) {
    if (n_lanes == 1) {
        return lanes[0];
    }
    return slow_join(norm, slow_pairs(norm, lanes, n_lanes / 2), slow_pairs(norm, lanes + n_lanes / 2, n_lanes / 2));
}

static double slow_partial(tfg_clip_norm norm, const tfg_clip_tensor *tensor, int64_t first) {
    double lanes[TFG_CLIP_LANES] = {0};
    for (int64_t i = 0; i < TFG_CLIP_CHUNK_ELEMS && first + i < tensor->n_elems; i++) {
        lanes[i % TFG_CLIP_LANES] = slow_join(norm, lanes[i % TFG_CLIP_LANES], slow_term(norm, get_element(tensor, first + i)));
    }
    return slow_pairs(norm, lanes, TFG_CLIP_LANES);
}

/* -------------------------------------------------------------------------------------------------------------------- */

static void test_partials_match_their_slow_twin(void) {
    gradients list = {0};
    gradients_awkward(&list, &source);
    double *partials = malloc((size_t)list.n_chunks * sizeof *partials);
    for (int norm = 0; norm < 3; norm++) {
        int64_t chunk = 0;
        tfg_cpu_clip_partials((tfg_clip_norm)norm, list.tensors, list.n_tensors, 0, list.n_chunks, partials);
        for (int64_t i = 0; i < list.n_tensors; i++) {
            CHECK_EQ(list.tensors[i].first_chunk, chunk);
            for (int64_t first = 0; first < list.tensors[i].n_elems; first += TFG_CLIP_CHUNK_ELEMS, chunk++) {
                CHECK_EQ(tfg_clip_find(list.tensors, list.n_tensors, chunk), i);
                const double slow = slow_partial((tfg_clip_norm)norm, &list.tensors[i], first);
                CHECK(memcmp(&partials[chunk], &slow, sizeof slow) == 0);
            }
        }
        CHECK_EQ(chunk, list.n_chunks);
    }
    free(partials);
    gradients_free(&list);
}

/* Any cut of the range into pieces, in any order. */
static void test_ranges_give_the_bits_of_the_whole(void) {
    gradients list = {0};
    gradients_awkward(&list, &source);
    const size_t size_bytes = (size_t)list.n_chunks * sizeof(double);
    double *whole = malloc(size_bytes);
    double *pieces = malloc(size_bytes);
    tfg_cpu_clip_partials(TFG_CLIP_SQUARES, list.tensors, list.n_tensors, 0, list.n_chunks, whole);
    for (int64_t step = 1; step < 9; step += 3) {
        memset(pieces, 0xff, size_bytes);
        for (int64_t end = list.n_chunks; end > 0; end -= step) {
            tfg_cpu_clip_partials(TFG_CLIP_SQUARES, list.tensors, list.n_tensors, end > step ? end - step : 0, end, pieces);
        }
        CHECK(memcmp(whole, pieces, size_bytes) == 0);
    }
    free(whole);
    free(pieces);
    gradients_free(&list);
}

static void test_partials_are_joined_as_one_chunk(void) {
    enum { N_PARTIALS = 3000 };
    double partials[N_PARTIALS];
    double lanes[TFG_CLIP_LANES] = {0};
    for (int i = 0; i < N_PARTIALS; i++) {
        partials[i] = random_element(&source);
        lanes[i % TFG_CLIP_LANES] += partials[i];
    }
    CHECK(tfg_clip_join_partials(TFG_CLIP_SIZES, partials, N_PARTIALS) == slow_pairs(TFG_CLIP_SIZES, lanes, TFG_CLIP_LANES));
    CHECK(tfg_clip_join_partials(TFG_CLIP_SQUARES, NULL, 0) == 0.0);
}

/* Against a sum in long double: the header's bound. */
static void test_the_sum_is_within_its_bound(void) {
    gradients list = {0};
    gradients_add(&list, &source, TFG_FLOAT64, 5 * TFG_CLIP_CHUNK_ELEMS + 17, 0);
    double partials[6];
    long double exact = 0;
    for (int64_t i = 0; i < list.tensors[0].n_elems; i++) {
        exact += (long double)get_element(&list.tensors[0], i) * (long double)get_element(&list.tensors[0], i);
    }
    tfg_cpu_clip_partials(TFG_CLIP_SQUARES, list.tensors, 1, 0, 6, partials);
    const long double sum = (long double)tfg_clip_join_partials(TFG_CLIP_SQUARES, partials, 6);
    CHECK(fabsl(sum - exact) <= ldexpl(exact, -44));
    gradients_free(&list);
}

static void test_a_single_odd_element_is_seen_wherever_it_is(void) {
    const double odd[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    for (int kind = 0; kind < 4; kind++) {
        gradients list = {0};
        gradients_add(&list, &source, (tfg_float)kind, 5, 1);
        gradients_add(&list, &source, (tfg_float)kind, 70001, 0);
        for (int trial = 0; trial < 40; trial++) {
            double partials[3];
            const tfg_clip_norm norm = (tfg_clip_norm)(trial % 3);
            const int64_t at = random_below(&source, 70001);
            const double before = get_element(&list.tensors[1], at);
            put_element(&list.tensors[1], at, odd[trial % 4 % 3]);
            tfg_cpu_clip_partials(norm, list.tensors, 2, 0, 3, partials);
            const double total = tfg_clip_total(norm, tfg_clip_join_partials(norm, partials, 3), LARGE);
            CHECK(isnan(odd[trial % 4 % 3]) ? isnan(total) : isinf(total));
            put_element(&list.tensors[1], at, before);
        }
        gradients_free(&list);
    }
}

/* The largest float32 everywhere: its square is far from a double's end. */
static void test_only_float64_overflows(void) {
    gradients list = {0};
    gradients_add(&list, &source, TFG_FLOAT32, 3000, 0);
    gradients_add(&list, &source, TFG_FLOAT64, 3000, 0);
    double partials[2];
    for (int64_t i = 0; i < 3000; i++) {
        put_element(&list.tensors[0], i, 0x1.fffffep127);
        put_element(&list.tensors[1], i, 1e200);
    }
    tfg_cpu_clip_partials(TFG_CLIP_SQUARES, list.tensors, 2, 0, 2, partials);
    CHECK(isfinite(partials[0]));
    CHECK(isinf(partials[1]));
    gradients_free(&list);
}

static double scaled(tfg_float kind, double element, double coefficient) {
    switch (kind) {
    case TFG_FLOAT64:
        return element * coefficient;
    case TFG_FLOAT32:
        return (double)((float)element * (float)coefficient);
    case TFG_BFLOAT16:
        return (double)tfg_float_of_bfloat16(tfg_bfloat16_of_float((float)element * (float)coefficient));
    case TFG_FLOAT16:
        return (double)tfg_float_of_float16(tfg_float16_of_float((float)element * (float)coefficient));
    }
    return 0;
}

static void test_scaling_multiplies_every_element_once(void) {
    gradients list = {0};
    gradients before = {0};
    gradients_awkward(&list, &source);
    gradients_copy(&before, &list);
    const double coefficient = 0.3712345678901;
    for (int64_t end = list.n_chunks; end > 0; end -= 3) {
        tfg_cpu_clip_scale(coefficient, list.tensors, list.n_tensors, end > 3 ? end - 3 : 0, end);
    }
    for (int64_t i = 0; i < list.n_tensors; i++) {
        for (int64_t j = 0; j < list.tensors[i].n_elems; j++) {
            CHECK(get_element(&list.tensors[i], j) ==
                  scaled(list.tensors[i].kind, get_element(&before.tensors[i], j), coefficient));
        }
    }
    gradients_free(&list);
    gradients_free(&before);
}

/* Of a signalling NaN even a product with one would change a bit. */
static void test_a_coefficient_of_one_writes_nothing(void) {
    uint16_t half = 0x7c01;
    uint16_t brain = 0x7f81;
    double wide = 1.5;
    float narrow = 1.5F;
    tfg_clip_tensor tensors[] = {{.at = &half, .n_elems = 1, .kind = TFG_FLOAT16},
                                 {.at = &brain, .n_elems = 1, .kind = TFG_BFLOAT16},
                                 {.at = &narrow, .n_elems = 1, .kind = TFG_FLOAT32},
                                 {.at = &wide, .n_elems = 1, .kind = TFG_FLOAT64}};
    int64_t n_chunks;
    CHECK_EQ(tfg_clip_cut(tensors, 4, &n_chunks, NULL), TFG_OK);
    tfg_cpu_clip_scale(1.0, tensors, 4, 0, n_chunks);
    CHECK_EQ(half, 0x7c01);
    CHECK_EQ(brain, 0x7f81);
    tfg_cpu_clip_scale(1.0 - 0x1p-30, tensors, 4, 0, n_chunks); /* 1 once it is a float */
    CHECK_EQ(half, 0x7c01);
    CHECK_EQ(brain, 0x7f81);
    CHECK(narrow == 1.5F && wide == 1.5 * (1.0 - 0x1p-30));
}

static void test_coefficient_follows_the_formula(void) {
    CHECK(tfg_clip_coefficient(1.0, 0.0) == 1.0);
    CHECK(tfg_clip_coefficient(1.0, 4.0) == 1.0 / (4.0 + 1e-6));
    CHECK(tfg_clip_coefficient(-1.0, 4.0) == -1.0 / (4.0 + 1e-6));
    CHECK(tfg_clip_coefficient(0.0, 4.0) == 0.0);
    CHECK(tfg_clip_coefficient(5.0, LARGE) == 0.0);
    CHECK(tfg_clip_coefficient(LARGE, 4.0) == 1.0);
    CHECK(isnan(tfg_clip_coefficient(LARGE, LARGE)));
    CHECK(isnan(tfg_clip_coefficient(1.0, (double)NAN)));
    CHECK(isnan(tfg_clip_coefficient((double)NAN, 1.0)));
}

/* One step below the threshold the rounded total is the largest finite number, at it infinity. */
static void test_overflow_is_where_rounding_makes_infinity(void) {
    const double narrow = tfg_clip_overflow(TFG_FLOAT32);
    const double half = tfg_clip_overflow(TFG_FLOAT16);
    const double brain = tfg_clip_overflow(TFG_BFLOAT16);
    CHECK(isinf((float)narrow) && isfinite((float)nextafter(narrow, 0)));
    CHECK_EQ(tfg_float16_of_float((float)half), 0x7c00);
    CHECK_EQ(tfg_float16_of_float((float)nextafter(half, 0)), 0x7bff);
    CHECK_EQ(tfg_bfloat16_of_float((float)brain), 0x7f80);
    CHECK_EQ(tfg_bfloat16_of_float((float)nextafter(brain, 0)), 0x7f7f);
    CHECK(isinf(tfg_clip_overflow(TFG_FLOAT64)));
    CHECK(isinf(tfg_clip_total(TFG_CLIP_SIZES, 65520.0, tfg_clip_overflow(TFG_FLOAT16))));
    CHECK(tfg_clip_total(TFG_CLIP_SQUARES, 65519.0 * 65519.0, tfg_clip_overflow(TFG_FLOAT16)) == 65519.0);
}

static void test_cut_refuses_what_is_no_tensor(void) {
    char byte;
    int64_t n_chunks = 7;
    tfg_error err;
    tfg_clip_tensor tensors[] = {{.at = &byte, .n_elems = 3, .kind = TFG_FLOAT16},
                                 {.at = &byte, .n_elems = -1, .kind = TFG_FLOAT16}};
    CHECK_EQ(tfg_clip_cut(tensors, 2, &n_chunks, &err), TFG_ERR_ARGUMENT);
    CHECK(strstr(err.text, "tensor 1") != NULL && strstr(err.text, "-1") != NULL);
    CHECK_EQ(n_chunks, 0);
    tensors[1].n_elems = INT64_C(1) << 62;
    CHECK_EQ(tfg_clip_cut(tensors, 2, &n_chunks, NULL), TFG_ERR_ARGUMENT);
    tensors[1].n_elems = (INT64_C(1) << 62) - 3;
    CHECK_EQ(tfg_clip_cut(tensors, 2, &n_chunks, NULL), TFG_OK);
    CHECK_EQ(n_chunks, 1 + (INT64_C(1) << 46));
    CHECK_EQ(tfg_clip_find(tensors, 2, n_chunks - 1), 1);
    tensors[1] = (tfg_clip_tensor){.at = NULL, .n_elems = 1, .kind = TFG_FLOAT16};
    CHECK_EQ(tfg_clip_cut(tensors, 2, &n_chunks, NULL), TFG_ERR_ARGUMENT);
    tensors[1] = (tfg_clip_tensor){.at = NULL, .n_elems = 0, .kind = TFG_FLOAT16};
    CHECK_EQ(tfg_clip_cut(tensors, 2, &n_chunks, NULL), TFG_OK);
    CHECK_EQ(tfg_clip_cut(NULL, 0, &n_chunks, NULL), TFG_OK);
    CHECK_EQ(n_chunks, 0);
}

int main(int argc, char **argv) {
    source.state = random_seed(argc, argv);
    RUN(test_partials_match_their_slow_twin);
    RUN(test_ranges_give_the_bits_of_the_whole);
    RUN(test_partials_are_joined_as_one_chunk);
    RUN(test_the_sum_is_within_its_bound);
    RUN(test_a_single_odd_element_is_seen_wherever_it_is);
    RUN(test_only_float64_overflows);
    RUN(test_scaling_multiplies_every_element_once);
    RUN(test_a_coefficient_of_one_writes_nothing);
    RUN(test_coefficient_follows_the_formula);
    RUN(test_overflow_is_where_rounding_makes_infinity);
    RUN(test_cut_refuses_what_is_no_tensor);
    return check_finish();
}
