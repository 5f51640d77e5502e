/* SPDX-License-Identifier: BSD-3-Clause */
#include <string.h>

#include "check.h"
#include "fingerprint.h"
#include "random_tape.h"

static random_source source;

/* ---- the slow, obvious twin: one byte, one word, one lane at a time ---------------------------------------------- */

static const uint64_t P = 0xc2b2ae3d27d4eb4fU, Q = 0x9e3779b185ebca87U, R = 0x165667b19e3779f9U, S = 0x27d4eb2f165667c5U;

static uint64_t turned_left(uint64_t word, int n_bits) {
    for (int i = 0; i < n_bits; i++) {
        word = word * 2 + (word >> 63);
    }
    return word;
}

/* Bytes past the end are zero. */
static uint64_t word_at(const unsigned char *bytes, size_t size_bytes, size_t first) {
    unsigned char word_bytes[8] = {0};
    for (size_t i = 0; i < 8 && first + i < size_bytes; i++) {
        word_bytes[i] = bytes[first + i];
    }
    uint64_t word;
    memcpy(&word, word_bytes, 8);
    return word;
}

static uint64_t scattered(uint64_t word) {
    word ^= word >> 33;
    word *= P;
    word ^= word >> 29;
    word *= R;
    return word ^ word >> 32;
}

static void slow_fingerprint(const void *bytes, size_t size_bytes, uint64_t out[2]) {
    uint64_t lanes[4] = {P, Q, R, S};
    for (size_t block = 0; block < size_bytes; block += 32) {
        for (size_t lane = 0; lane < 4; lane++) {
            lanes[lane] += word_at(bytes, size_bytes, block + 8 * lane) * P;
            lanes[lane] = turned_left(lanes[lane], 31) * Q;
        }
    }
    out[0] = size_bytes * R;
    out[1] = size_bytes * S;
    for (size_t lane = 0; lane < 4; lane++) {
        out[0] = turned_left(out[0] ^ scattered(lanes[lane]), 27) * Q + R;
        out[1] = turned_left(out[1] + scattered(lanes[lane]) * S, 37) * P + Q;
    }
    out[0] = scattered(out[0]);
    out[1] = scattered(out[1]);
}

static void fill(unsigned char *bytes, size_t size_bytes) {
    for (size_t i = 0; i < size_bytes; i++) {
        bytes[i] = (unsigned char)random_below(&source, 256);
    }
}

/* Every size to 300 at every alignment; heap blocks of the exact size, so that a byte too many is seen. */
static void test_fingerprint_matches_its_slow_twin(void) {
    for (size_t size_bytes = 0; size_bytes <= 300; size_bytes++) {
        for (size_t offset = 0; offset < 16; offset++) {
            unsigned char *bytes = malloc(offset + size_bytes + (offset + size_bytes == 0));
            uint64_t fast[2];
            uint64_t slow[2];
            fill(bytes, offset + size_bytes);
            tfg_cpu_fingerprint(bytes + offset, size_bytes, fast);
            slow_fingerprint(bytes + offset, size_bytes, slow);
            CHECK_EQ(fast[0], slow[0]);
            CHECK_EQ(fast[1], slow[1]);
            free(bytes);
        }
    }
}

static void test_fingerprint_of_nothing_is_defined(void) {
    uint64_t none[2];
    uint64_t empty[2];
    tfg_cpu_fingerprint(NULL, 0, none);
    tfg_cpu_fingerprint("", 0, empty);
    CHECK_EQ(none[0], empty[0]);
    CHECK_EQ(none[1], empty[1]);
}

static void test_fingerprint_sees_every_single_bit(void) {
    enum { SIZE_BYTES = 203 };
    unsigned char bytes[SIZE_BYTES];
    uint64_t before[2];
    uint64_t after[2];
    fill(bytes, SIZE_BYTES);
    tfg_cpu_fingerprint(bytes, SIZE_BYTES, before);
    for (int bit = 0; bit < SIZE_BYTES * 8; bit++) {
        bytes[bit / 8] = (unsigned char)(bytes[bit / 8] ^ 1 << bit % 8);
        tfg_cpu_fingerprint(bytes, SIZE_BYTES, after);
        CHECK(before[0] != after[0]);
        CHECK(before[1] != after[1]);
        bytes[bit / 8] = (unsigned char)(bytes[bit / 8] ^ 1 << bit % 8);
    }
}

static void test_fingerprint_sees_length_even_of_zeros(void) {
    enum { MAX_BYTES = 200 };
    const unsigned char zeros[MAX_BYTES] = {0};
    uint64_t seen[MAX_BYTES][2];
    for (size_t size_bytes = 0; size_bytes < MAX_BYTES; size_bytes++) {
        tfg_cpu_fingerprint(zeros, size_bytes, seen[size_bytes]);
        for (size_t shorter = 0; shorter < size_bytes; shorter++) {
            CHECK(seen[shorter][0] != seen[size_bytes][0]);
            CHECK(seen[shorter][1] != seen[size_bytes][1]);
        }
    }
}

/* Words swapped between lanes, and within a lane; floats negated, which moves only the highest bits. */
static void test_fingerprint_sees_position_and_signs(void) {
    enum { N_WORDS = 64 };
    uint64_t words[N_WORDS];
    uint64_t before[2];
    uint64_t after[2];
    fill((unsigned char *)words, sizeof words);
    tfg_cpu_fingerprint(words, sizeof words, before);
    for (int i = 0; i < N_WORDS; i++) {
        for (int j = 0; j < i; j++) {
            const uint64_t left = words[i];
            const uint64_t right = words[j];
            for (int change = 0; change < 3; change++) {
                const uint64_t signs = change == 1 ? UINT64_C(1) << 63 : UINT64_C(0x8000000080000000);
                words[i] = change == 0 ? right : left ^ signs;
                words[j] = change == 0 ? left : right ^ signs;
                tfg_cpu_fingerprint(words, sizeof words, after);
                CHECK(before[0] != after[0]);
                CHECK(before[1] != after[1]);
            }
            words[i] = left;
            words[j] = right;
        }
    }
}

/* A flipped bit turns over about half of the output's bits. */
static void test_fingerprint_spreads_changes(void) {
    unsigned char bytes[96];
    int64_t n_flips = 0;
    int64_t n_turned = 0;
    for (int round = 0; round < 20; round++) {
        uint64_t before[2];
        uint64_t after[2];
        fill(bytes, sizeof bytes);
        tfg_cpu_fingerprint(bytes, sizeof bytes, before);
        for (int bit = 0; bit < 96 * 8; bit++, n_flips++) {
            bytes[bit / 8] = (unsigned char)(bytes[bit / 8] ^ 1 << bit % 8);
            tfg_cpu_fingerprint(bytes, sizeof bytes, after);
            for (int i = 0; i < 64; i++) {
                n_turned += (int64_t)((before[0] ^ after[0]) >> i & 1);
                n_turned += (int64_t)((before[1] ^ after[1]) >> i & 1);
            }
            bytes[bit / 8] = (unsigned char)(bytes[bit / 8] ^ 1 << bit % 8);
        }
    }
    CHECK(n_turned > n_flips * 63 && n_turned < n_flips * 65);
}

int main(int argc, char **argv) {
    source.state = random_seed(argc, argv);
    RUN(test_fingerprint_matches_its_slow_twin);
    RUN(test_fingerprint_of_nothing_is_defined);
    RUN(test_fingerprint_sees_every_single_bit);
    RUN(test_fingerprint_sees_length_even_of_zeros);
    RUN(test_fingerprint_sees_position_and_signs);
    RUN(test_fingerprint_spreads_changes);
    return check_finish();
}
