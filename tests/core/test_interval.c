/* SPDX-License-Identifier: BSD-3-Clause */
#include <stdint.h>
#include <string.h>

#include "check.h"
#include "interval.h"

static int64_t interval(int64_t n_layers, int64_t seq_len, int64_t low, int64_t high, int64_t n_blocks) {
    int64_t out = -1;
    CHECK_EQ(tfg_interval_dynamic(n_layers, seq_len, low, high, n_blocks, &out, NULL), TFG_OK);
    return out;
}

/* Oracle: the whole part f of q = L / sqrt(S) by counting, then one more if q - f >= 1/2, that is 2 L >= (2 f + 1) sqrt(S). */
static int64_t rounded_quotient(int64_t n_layers, int64_t seq_len) {
    int64_t whole = 0;
    while ((whole + 1) * (whole + 1) * seq_len <= n_layers * n_layers) {
        whole++;
    }
    return whole + (4 * n_layers * n_layers >= (2 * whole + 1) * (2 * whole + 1) * seq_len);
}

static int64_t clamped(int64_t rounded, int64_t low, int64_t high, int64_t n_blocks) {
    const int64_t capped = rounded > high ? high : rounded;
    const int64_t raised = capped < low ? low : capped;
    return raised > n_blocks ? n_blocks : raised;
}

static void test_interval_matches_exact_oracle_on_all_small_inputs(void) {
    for (int64_t n_layers = 1; n_layers <= 48; n_layers++) {
        for (int64_t seq_len = 1; seq_len <= 150; seq_len++) {
            const int64_t rounded = rounded_quotient(n_layers, seq_len);
            for (int64_t low = 1; low <= 5; low++) {
                for (int64_t high = low; high <= 13; high += 2) {
                    for (int64_t n_blocks = 1; n_blocks <= 13; n_blocks += 3) {
                        CHECK_EQ(interval(n_layers, seq_len, low, high, n_blocks), clamped(rounded, low, high, n_blocks));
                    }
                }
            }
        }
    }
}

static void test_interval_rounds_halves_away_from_zero(void) {
    CHECK_EQ(interval(5, 4, 1, 100, 100), 3);  /* 2.5 */
    CHECK_EQ(interval(7, 4, 1, 100, 100), 4);  /* 3.5 */
    CHECK_EQ(interval(9, 36, 1, 100, 100), 2); /* 1.5 */
    CHECK_EQ(interval(4, 9, 1, 100, 100), 1);  /* 1.33 */
}

static void test_interval_usually_answers_low(void) {
    CHECK_EQ(interval(32, 512, 2, 12, 32), 2);
    CHECK_EQ(interval(32, 64, 2, 12, 32), 4);
    CHECK_EQ(interval(32, 1, 2, 12, 32), 12);
    CHECK_EQ(interval(32, 1, 2, 12, 3), 3);
}

/* With seq_len = s^2, s even, n_layers = k s + s/2 is exactly k + 1/2: one layer less must round down. */
static void test_interval_decides_ties_exactly_at_any_size(void) {
    for (int64_t s = 2; s <= INT64_C(1) << 31; s *= 2) {
        for (int64_t k = 1; k <= (INT64_MAX - s) / s && k < INT64_C(1) << 61; k = k * 3 + 1) {
            const int64_t tie = k * s + s / 2;
            CHECK_EQ(interval(tie, s * s, 1, INT64_MAX, INT64_MAX), k + 1);
            CHECK_EQ(interval(tie - 1, s * s, 1, INT64_MAX, INT64_MAX), k);
        }
    }
    CHECK_EQ(interval(INT64_MAX, 1, 1, INT64_MAX, INT64_MAX), INT64_MAX);
    CHECK_EQ(interval(INT64_MAX, 4, 1, INT64_MAX, INT64_MAX), INT64_C(1) << 62); /* 2^62 - 1/2 */
    CHECK_EQ(interval(INT64_MAX, INT64_MAX, 1, INT64_MAX, INT64_MAX), 3037000500); /* sqrt(2^63 - 1) = 3037000499.97 */
    CHECK_EQ(interval(1, INT64_MAX, 1, INT64_MAX, INT64_MAX), 1);
    CHECK_EQ(interval(1, 1, INT64_MAX, INT64_MAX, INT64_MAX), INT64_MAX);
}

static void expect_refusal(int64_t n_layers, int64_t seq_len, int64_t low, int64_t high, int64_t n_blocks,
                           const char *words) {
    int64_t out = 77;
    tfg_error err = {{0}};
    CHECK_EQ(tfg_interval_dynamic(n_layers, seq_len, low, high, n_blocks, &out, &err), TFG_ERR_ARGUMENT);
    CHECK_EQ(out, 77);
    CHECK(strstr(err.text, words) != NULL);
}

static void test_interval_names_the_value_it_refuses(void) {
    expect_refusal(0, 1, 1, 1, 1, "n_layers: wanted a count of at least 1, got 0");
    expect_refusal(1, -5, 1, 1, 1, "seq_len: wanted a count of at least 1, got -5");
    expect_refusal(1, 1, 0, 1, 1, "low: wanted a count of at least 1, got 0");
    expect_refusal(1, 1, 1, 1, INT64_MIN, "n_blocks: wanted a count of at least 1, got -9223372036854775808");
    expect_refusal(1, 1, 4, 3, 1, "high: wanted at least low = 4, got 3");
}

int main(void) {
    RUN(test_interval_matches_exact_oracle_on_all_small_inputs);
    RUN(test_interval_rounds_halves_away_from_zero);
    RUN(test_interval_usually_answers_low);
    RUN(test_interval_decides_ties_exactly_at_any_size);
    RUN(test_interval_names_the_value_it_refuses);
    return check_finish();
}
