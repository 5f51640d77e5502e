/* SPDX-License-Identifier: BSD-3-Clause
 *
 * floats: the four kinds of numbers that loops and kernels read, and the two that a C compiler may not know.
 *
 * Law (rounding mode: to nearest): to float is exact, also for subnormals; from float rounds to nearest, ties to even, overflow to infinity. A NaN stays a NaN
 * of its sign, quiet. A process that flushes subnormal floats to zero gets the same bits.
 */
#ifndef TFG_CORE_FLOATS_H
#define TFG_CORE_FLOATS_H

#include <stdint.h>
#include <string.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tfg_float {
    TFG_FLOAT64 = 0,
    TFG_FLOAT32 = 1,
    TFG_BFLOAT16 = 2, /* upper half of a float32 */
    TFG_FLOAT16 = 3,  /* 1 sign, 5 exponent, 10 fraction */
} tfg_float;

/* 0 for what is not in the list. */
TFG_ANYWHERE static inline int64_t tfg_float_bytes(tfg_float kind) {
    return kind == TFG_FLOAT64 ? 8 : kind == TFG_FLOAT32 ? 4 : kind == TFG_BFLOAT16 || kind == TFG_FLOAT16 ? 2 : 0;
}

TFG_ANYWHERE static inline float tfg_float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

TFG_ANYWHERE static inline uint32_t tfg_bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

TFG_ANYWHERE static inline float tfg_float_of_bfloat16(uint16_t bits) {
    return tfg_float_of_bits((uint32_t)bits << 16);
}

TFG_ANYWHERE static inline uint16_t tfg_bfloat16_of_float(float value) {
    const uint32_t bits = tfg_bits_of_float(value);
    const uint32_t rounded = (bits + 0x7fffU + (bits >> 16 & 1U)) >> 16;
    const uint32_t quiet = bits >> 16 | 0x40U;
    return (uint16_t)((bits & 0x7fffffffU) > 0x7f800000U ? quiet : rounded);
}

/* No branch, so that a loop over it can be vectorised. */
TFG_ANYWHERE static inline float tfg_float_of_float16(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000U) << 16;
    const uint32_t exponent = bits & 0x7c00U;
    const uint32_t shifted = (uint32_t)(bits & 0x7fffU) << 13;
    const uint32_t normal = shifted + (112U << 23);
    const uint32_t unbounded = shifted + (224U << 23); /* infinity and NaN */
    /* 2^-14 + fraction * 2^-24, less 2^-14: exact, and neither number is subnormal. */
    const float tiny = tfg_float_of_bits((113U << 23) + shifted) - tfg_float_of_bits(113U << 23);
    const uint32_t finite = exponent == 0 ? tfg_bits_of_float(tiny) : normal;
    return tfg_float_of_bits(sign | (exponent == 0x7c00U ? unbounded : finite));
}

TFG_ANYWHERE static inline uint16_t tfg_float16_of_float(float value) {
    const uint32_t bits = tfg_bits_of_float(value);
    const uint32_t sign = bits >> 16 & 0x8000U;
    const uint32_t size = bits & 0x7fffffffU;
    if (size > 0x7f800000U) {
        return (uint16_t)(sign | 0x7e00U | (size >> 13 & 0x3ffU));
    }
    if (size >= 0x477ff000U) { /* 65520: the least that rounds to infinity */
        return (uint16_t)(sign | 0x7c00U);
    }
    if (size < 0x38800000U) { /* below 2^-14: a multiple of 2^-24, and the addition rounds to it */
        const float half = tfg_float_of_bits(126U << 23);
        return (uint16_t)(sign | (tfg_bits_of_float(tfg_float_of_bits(size) + half) - (126U << 23)));
    }
    return (uint16_t)(sign | (size + 0xfffU + (size >> 13 & 1U) - (112U << 23)) >> 13);
}

#ifdef __cplusplus
}
#endif
#endif
