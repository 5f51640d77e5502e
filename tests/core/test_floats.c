/* SPDX-License-Identifier: BSD-3-Clause */
#include <math.h>

#include "check.h"
#include "floats.h"
#include "random_tape.h"

static random_source source;

/* ---- the slow, obvious twins: arithmetic on the parts, and a search among all sixteen-bit numbers ------------------ */

/* fraction_bits: 10 or 7. Exact in a double. */
static double slow_value(uint16_t bits, int fraction_bits) {
    const int exponent_bits = 15 - fraction_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1);
    const int fraction = bits & ((1 << fraction_bits) - 1);
    const double sign = bits >> 15 ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1) {
        return fraction == 0 ? sign * (double)INFINITY : (double)NAN;
    }
    if (exponent == 0) {
        return sign * ldexp(fraction, 1 - bias - fraction_bits);
    }
    return sign * ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

/* The nearest of all, the even one of two; beyond the largest the next step counts as infinity. Of positive numbers. */
static uint16_t slow_nearest(float value, int fraction_bits) {
    const uint16_t infinity = (uint16_t)(((1 << (15 - fraction_bits)) - 1) << fraction_bits);
    uint16_t low = 0;
    uint16_t high = infinity;
    while (high - low > 1) {
        const uint16_t middle = (uint16_t)((low + high) / 2);
        if (slow_value(middle, fraction_bits) <= (double)value) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const double below = slow_value(low, fraction_bits);
    const double step = below - slow_value((uint16_t)(low - (low > 0)), fraction_bits);
    const double above = high == infinity ? below + step : slow_value(high, fraction_bits);
    const double rest = (double)value - below;
    const double gap = above - (double)value;
    return rest < gap || (rest == gap && low % 2 == 0) ? low : high;
}

static int same_bits(float left, double right) {
    if (isnan(right)) {
        return isnan(left);
    }
    return (double)left == right && !signbit(left) == !signbit(right);
}

static void test_every_sixteen_bit_number_is_read_exactly(void) {
    for (int32_t bits = 0; bits <= UINT16_MAX; bits++) {
        CHECK(same_bits(tfg_float_of_float16((uint16_t)bits), slow_value((uint16_t)bits, 10)));
        CHECK(same_bits(tfg_float_of_bfloat16((uint16_t)bits), slow_value((uint16_t)bits, 7)));
    }
}

static void test_every_sixteen_bit_number_comes_back(void) {
    for (int32_t bits = 0; bits <= UINT16_MAX; bits++) {
        const float half = tfg_float_of_float16((uint16_t)bits);
        const float brain = tfg_float_of_bfloat16((uint16_t)bits);
        CHECK_EQ(tfg_float16_of_float(half), isnan(half) ? bits | 0x200 : bits);
        CHECK_EQ(tfg_bfloat16_of_float(brain), isnan(brain) ? bits | 0x40 : bits);
    }
}

static void check_rounding(uint32_t bits) {
    const float value = tfg_float_of_bits(bits & 0x7fffffffU);
    if (isnan(value)) {
        CHECK(isnan(tfg_float_of_float16(tfg_float16_of_float(value))));
        CHECK(isnan(tfg_float_of_bfloat16(tfg_bfloat16_of_float(value))));
        return;
    }
    const uint16_t half = isinf(value) ? 0x7c00 : slow_nearest(value, 10);
    const uint16_t brain = isinf(value) ? 0x7f80 : slow_nearest(value, 7);
    CHECK_EQ(tfg_float16_of_float(value), half);
    CHECK_EQ(tfg_float16_of_float(-value), half | 0x8000);
    CHECK_EQ(tfg_bfloat16_of_float(value), brain);
    CHECK_EQ(tfg_bfloat16_of_float(-value), brain | 0x8000);
}

/* All sixteen-bit numbers, what lies half way between neighbours, and one float to either side of each. */
static void test_rounding_is_to_the_nearest_and_to_even(void) {
    for (int32_t bits = 0; bits < 0x7c00; bits++) {
        const float low = tfg_float_of_float16((uint16_t)bits);
        const float step = tfg_float_of_float16((uint16_t)(bits + (bits < 0x7bff))) - low;
        const uint32_t middle = tfg_bits_of_float(low + step / 2);
        for (uint32_t beside = 0; beside < 3; beside++) {
            check_rounding(tfg_bits_of_float(low) + beside - (bits > 0));
            check_rounding(middle + beside - (middle > 0));
        }
    }
    for (uint32_t upper = 0; upper <= 0x7f80; upper++) {
        check_rounding(upper << 16 | 0x7fff);
        check_rounding(upper << 16 | 0x8000);
        check_rounding(upper << 16 | 0x8001);
    }
    for (uint32_t beside = 0; beside < 5; beside++) {
        check_rounding(0x477ff000U + beside - 2); /* 65520 */
    }
}

static void test_random_floats_round_as_the_slow_twin(void) {
    for (int i = 0; i < 300000; i++) {
        const uint32_t word = (uint32_t)random_word(&source);
        check_rounding(word);
        check_rounding((word & 0x0fffffffU) + 0x33000000U); /* where float16 begins and ends */
    }
}

static void test_kinds_have_their_sizes(void) {
    CHECK_EQ(tfg_float_bytes(TFG_FLOAT64), 8);
    CHECK_EQ(tfg_float_bytes(TFG_FLOAT32), 4);
    CHECK_EQ(tfg_float_bytes(TFG_BFLOAT16), 2);
    CHECK_EQ(tfg_float_bytes(TFG_FLOAT16), 2);
}

int main(int argc, char **argv) {
    source.state = random_seed(argc, argv);
    RUN(test_every_sixteen_bit_number_is_read_exactly);
    RUN(test_every_sixteen_bit_number_comes_back);
    RUN(test_rounding_is_to_the_nearest_and_to_even);
    RUN(test_random_floats_round_as_the_slow_twin);
    RUN(test_kinds_have_their_sizes);
    return check_finish();
}
