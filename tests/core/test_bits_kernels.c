/* SPDX-License-Identifier: BSD-3-Clause */
#include <string.h>

#include "bits_loops.h"
#include "check.h"
#include "cuda/launch.h"
#include "cuda_order.h"
#include "random_tape.h"

static random_source source;
static const int64_t AWKWARD_ELEMS[] = {0, 1, 7, 8, 9, 63, 2047, 2048, 2049, 4999};
enum { N_AWKWARD = sizeof AWKWARD_ELEMS / sizeof AWKWARD_ELEMS[0] };

/* Both ways, loops and kernels, from blocks that end with the last element; the bits are looked at one by one. */
static void check_mask(int64_t n_elems, int64_t skew, int64_t odd_at) {
    const int64_t n_packed = (n_elems + 7) / 8;
    uint8_t *block = malloc((size_t)(n_elems + skew + (n_elems + skew == 0)));
    uint8_t *back_block = malloc((size_t)(n_elems + skew + (n_elems + skew == 0)));
    uint8_t *packed = malloc((size_t)(n_packed + (n_packed == 0)));
    uint8_t *expected = malloc((size_t)(n_packed + (n_packed == 0)));
    uint8_t *bytes = block + skew;
    uint8_t *back = back_block + skew;
    int32_t is_odd = 7;
    int32_t expected_is_odd = 7;
    for (int64_t i = 0; i < n_elems; i++) {
        bytes[i] = i == odd_at ? (uint8_t)(2 + random_below(&source, 254)) : (uint8_t)random_below(&source, 2);
    }
    tfg_cpu_bits_pack(bytes, n_elems, expected, &expected_is_odd);
    CHECK_EQ(tfg_cuda_bits_pack(bytes, n_elems, packed, &is_odd, NULL, NULL), TFG_OK);
    CHECK_EQ(expected_is_odd, odd_at >= 0);
    CHECK_EQ(is_odd, expected_is_odd);
    CHECK(memcmp(packed, expected, (size_t)n_packed) == 0);
    for (int64_t i = 0; i < 8 * n_packed; i++) {
        CHECK_EQ(packed[i / 8] >> (i % 8) & 1, i < n_elems ? bytes[i] & 1 : 0);
    }
    CHECK_EQ(tfg_cuda_bits_unpack(packed, n_elems, back, NULL, NULL), TFG_OK);
    CHECK(odd_at >= 0 || memcmp(back, bytes, (size_t)n_elems) == 0);
    memset(back, 9, (size_t)n_elems);
    tfg_cpu_bits_unpack(packed, n_elems, back);
    CHECK(odd_at >= 0 || memcmp(back, bytes, (size_t)n_elems) == 0);
    free(block);
    free(back_block);
    free(packed);
    free(expected);
}

static void test_masks_come_back_bit_for_bit(void) {
    for (int i = 0; i < N_AWKWARD; i++) {
        for (int64_t skew = 0; skew < 9; skew += 1 + i % 3) {
            check_mask(AWKWARD_ELEMS[i], skew, -1);
        }
    }
}

static void test_a_byte_that_is_no_boolean_is_seen_anywhere(void) {
    for (int trial = 0; trial < 20; trial++) {
        const int64_t n_elems = 1 + random_below(&source, 3000);
        check_mask(n_elems, trial % 2, random_below(&source, (int32_t)n_elems));
    }
}

static void test_sizes_that_no_grid_holds_are_refused(void) {
    tfg_error err;
    int32_t is_odd;
    CHECK_EQ(tfg_cuda_bits_pack(NULL, -1, NULL, &is_odd, NULL, &err), TFG_ERR_ARGUMENT);
    CHECK(strstr(err.text, "-1") != NULL);
    CHECK_EQ(tfg_cuda_bits_unpack(NULL, INT64_MAX, NULL, NULL, &err), TFG_ERR_ARGUMENT);
}

int main(int argc, char **argv) {
    source.state = random_seed(argc, argv);
    RUN_IN_EVERY_ORDER(test_masks_come_back_bit_for_bit);
    RUN(test_a_byte_that_is_no_boolean_is_seen_anywhere);
    RUN(test_sizes_that_no_grid_holds_are_refused);
    return check_finish();
}
