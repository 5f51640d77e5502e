/* SPDX-License-Identifier: BSD-3-Clause */
#include <string.h>

#include "check.h"
#include "cuda/launch.h"
#include "cuda_order.h"
#include "digest_loops.h"
#include "random_tape.h"

static random_source source;
static const int64_t AWKWARD_BYTES[] = {0, 1, 7, 8, 15, 16, 17, 4095, 4096, 4097, 65535, 65536, 65537, 133337};
enum { N_AWKWARD = sizeof AWKWARD_BYTES / sizeof AWKWARD_BYTES[0] };

static void fill(unsigned char *bytes, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        bytes[i] = (unsigned char)random_below(&source, 256);
    }
}

static void test_kernel_matches_the_loop(void) {
    for (int i = 0; i < N_AWKWARD; i++) {
        for (int64_t skew = 0; skew < 17; skew += 1 + skew * 7) {
            const int64_t n_bytes = AWKWARD_BYTES[i];
            unsigned char *block = malloc((size_t)(n_bytes + skew + (n_bytes + skew == 0)));
            uint64_t expected[2];
            uint64_t digest[2] = {5, 5};
            fill(block, n_bytes + skew);
            tfg_cpu_digest(block + skew, n_bytes, expected);
            CHECK_EQ(tfg_cuda_digest(block + skew, n_bytes, digest, NULL, NULL), TFG_OK);
            CHECK_EQ(digest[0], expected[0]);
            CHECK_EQ(digest[1], expected[1]);
            free(block);
        }
    }
}

static void test_every_bit_is_seen_in_both_halves(void) {
    enum { N_BYTES = 4200 };
    unsigned char bytes[N_BYTES];
    uint64_t before[2];
    uint64_t after[2];
    fill(bytes, N_BYTES);
    tfg_cpu_digest(bytes, N_BYTES, before);
    for (int bit = 0; bit < N_BYTES * 8; bit += bit < 128 || bit > 4080 * 8 ? 1 : 97) {
        bytes[bit / 8] = (unsigned char)(bytes[bit / 8] ^ 1 << bit % 8);
        tfg_cpu_digest(bytes, N_BYTES, after);
        CHECK(before[0] != after[0] && before[1] != after[1]);
        bytes[bit / 8] = (unsigned char)(bytes[bit / 8] ^ 1 << bit % 8);
    }
}

/* Words that change places: in a lane, between lanes, rows and chunks. Floats negated two by two. */
static void test_places_and_signs_are_seen(void) {
    enum { N_WORDS = 20000 };
    uint64_t *words = malloc(N_WORDS * sizeof *words);
    uint64_t before[2];
    uint64_t after[2];
    fill((unsigned char *)words, N_WORDS * 8);
    tfg_cpu_digest(words, N_WORDS * 8, before);
    const int steps[] = {1, 2, TFG_DIGEST_LANES, 2 * TFG_DIGEST_LANES, TFG_DIGEST_LANES * TFG_DIGEST_ROWS, 777};
    for (int trial = 0; trial < 60; trial++) {
        const int step = steps[trial % 6];
        const int i = random_below(&source, N_WORDS - step);
        const uint64_t left = words[i];
        const uint64_t right = words[i + step];
        const uint64_t sign = UINT64_C(1) << (trial % 4 < 2 ? 63 : 31);
        words[i] = trial % 2 ? right : left ^ sign;
        words[i + step] = trial % 2 ? left : right ^ sign;
        tfg_cpu_digest(words, N_WORDS * 8, after);
        CHECK(before[0] != after[0] && before[1] != after[1]);
        words[i] = left;
        words[i + step] = right;
    }
    free(words);
}

/* In a single row the lanes' states change places as the words do: then only the place tells. */
static void test_places_are_seen_in_a_single_row(void) {
    uint64_t words[TFG_DIGEST_LANES];
    uint64_t before[2];
    uint64_t after[2];
    fill((unsigned char *)words, sizeof words);
    tfg_cpu_digest(words, sizeof words, before);
    for (int i = 1; i < TFG_DIGEST_LANES; i += 5) {
        const uint64_t first = words[0];
        words[0] = words[i];
        words[i] = first;
        tfg_cpu_digest(words, sizeof words, after);
        CHECK(before[0] != after[0] && before[1] != after[1]);
        words[i] = words[0];
        words[0] = first;
    }
}

static void test_length_is_seen_even_of_zeros(void) {
    enum { N_SIZES = 300 };
    const unsigned char zeros[N_SIZES] = {0};
    uint64_t seen[N_SIZES][2];
    for (int i = 0; i < N_SIZES; i++) {
        tfg_cpu_digest(zeros, i, seen[i]);
        for (int j = 0; j < i; j++) {
            CHECK(seen[i][0] != seen[j][0] && seen[i][1] != seen[j][1]);
        }
    }
}

static void test_sizes_that_no_grid_holds_are_refused(void) {
    tfg_error err;
    uint64_t digest[2];
    CHECK_EQ(tfg_cuda_digest(NULL, -1, digest, NULL, &err), TFG_ERR_ARGUMENT);
    CHECK_EQ(tfg_cuda_digest(NULL, INT64_MAX, digest, NULL, &err), TFG_ERR_ARGUMENT);
    CHECK(strstr(err.text, "9223372036854775807") != NULL);
}

int main(int argc, char **argv) {
    source.state = random_seed(argc, argv);
    RUN_IN_EVERY_ORDER(test_kernel_matches_the_loop);
    RUN(test_every_bit_is_seen_in_both_halves);
    RUN(test_places_and_signs_are_seen);
    RUN(test_places_are_seen_in_a_single_row);
    RUN(test_length_is_seen_even_of_zeros);
    RUN(test_sizes_that_no_grid_holds_are_refused);
    return check_finish();
}
