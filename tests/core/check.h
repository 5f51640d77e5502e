/* SPDX-License-Identifier: BSD-3-Clause
 *
 * check: the whole test framework. A test is a function; main calls each through RUN and returns check_finish().
 */
#ifndef TFG_TEST_CHECK_H
#define TFG_TEST_CHECK_H

#include <stdio.h>
#include <stdlib.h>

static long check_n_passed, check_n_failed;

static inline int check_finish(void) {
    printf("%ld passed, %ld failed\n", check_n_passed, check_n_failed);
    return check_n_failed != 0;
}

static inline int check_note(int is_right, const char *file, int line, const char *what) {
    if (!is_right && check_n_failed == 20) {
        printf("giving up\n");
        exit(check_finish());
    }
    check_n_passed += is_right != 0;
    check_n_failed += is_right == 0;
    if (!is_right) {
        printf("%s:%d: %s", file, line, what);
    }
    return is_right;
}

#define CHECK(condition) (void)(check_note((condition) ? 1 : 0, __FILE__, __LINE__, #condition) || printf(" is false\n"))

/* Integers of any width up to 64 bits; prints both sides. */
#define CHECK_EQ(left, right)                                                                               \
    do {                                                                                                    \
        const long long left_ = (long long)(left), right_ = (long long)(right);                             \
        if (!check_note(left_ == right_, __FILE__, __LINE__, #left " == " #right)) {                        \
            printf(": %lld (0x%llx) against %lld (0x%llx)\n", left_, (unsigned long long)left_, right_,     \
                   (unsigned long long)right_);                                                             \
        }                                                                                                   \
    } while (0)

#define RUN(test) (test)()
#endif
