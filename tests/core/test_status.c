/* SPDX-License-Identifier: BSD-3-Clause */
#include <limits.h>

#include "check.h"
#include "failing_allocator.h"

static void test_status_numbers_are_stable(void) {
    CHECK_EQ(TFG_OK, 0);
    CHECK_EQ(TFG_ERR_MEMORY, 1);
    CHECK_EQ(TFG_ERR_ARGUMENT, 2);
    CHECK_EQ(TFG_ERR_UNREACHABLE, 3);
    CHECK_EQ(TFG_ERR_BROKEN, 4);
    CHECK_EQ(TFG_ERR_FULL, 5);
    CHECK_EQ(TFG_ERR_UNSUPPORTED, 6);
    CHECK_EQ(TFG_ERR_CUDA, 7);
}

static void test_status_has_a_name_and_a_sentence_per_row(void) {
#define ROW(code, name, sentence)                           \
    CHECK(strcmp(tfg_status_name(name), #name) == 0);       \
    CHECK(strcmp(tfg_status_sentence(name), sentence) == 0);
    TFG_STATUS_TABLE(ROW)
#undef ROW
    const tfg_status unknown = (tfg_status)8;
    CHECK(strcmp(tfg_status_name(unknown), "unknown status") == 0);
    CHECK(strcmp(tfg_status_sentence(unknown), "unknown status") == 0);
}

static void test_fail_writes_words_and_returns_its_status(void) {
    tfg_error err;
    CHECK_EQ(tfg_fail(TFG_ERR_FULL, &err, "value %d of %s", 7, "x"), TFG_ERR_FULL);
    CHECK(strcmp(err.text, "value 7 of x") == 0);
    CHECK_EQ(tfg_fail(TFG_ERR_MEMORY, NULL, "nobody listens %d", 1), TFG_ERR_MEMORY);
}

static void test_fail_cuts_long_words(void) {
    tfg_error err;
    char words[2 * sizeof err.text];
    memset(words, 'w', sizeof words);
    words[sizeof words - 1] = '\0';
    CHECK_EQ(tfg_fail(TFG_ERR_BROKEN, &err, "%s", words), TFG_ERR_BROKEN);
    CHECK_EQ(strlen(err.text), sizeof err.text - 1);
}

static int n_calls_after_try;

static tfg_status try_then_count(tfg_status inner) {
    TFG_TRY(inner);
    n_calls_after_try++;
    return TFG_OK;
}

static void test_try_forwards_failures_only(void) {
    CHECK_EQ(try_then_count(TFG_ERR_ARGUMENT), TFG_ERR_ARGUMENT);
    CHECK_EQ(n_calls_after_try, 0);
    CHECK_EQ(try_then_count(TFG_OK), TFG_OK);
    CHECK_EQ(n_calls_after_try, 1);
}

static void test_reserve_doubles_and_keeps_contents(void) {
    failing_allocator heap;
    const tfg_allocator allocator = failing_allocator_init(&heap);
    void *block = NULL;
    int32_t capacity = 0;
    for (int32_t n = 1; n <= 1000; n++) {
        CHECK_EQ(tfg_allocator_reserve(&allocator, &block, &capacity, n, sizeof(int32_t)), TFG_OK);
        CHECK(capacity >= n);
        ((int32_t *)block)[n - 1] = n;
    }
    for (int32_t n = 1; n <= 1000; n++) {
        CHECK_EQ(((int32_t *)block)[n - 1], n);
    }
    CHECK(heap.n_requests <= 7); /* 16, 32 ... 1024 */
    CHECK_EQ(tfg_allocator_reserve(&allocator, &block, &capacity, 5000, sizeof(int32_t)), TFG_OK);
    CHECK_EQ(capacity, 5000);
    allocator.resize(allocator.ctx, block, (size_t)capacity * sizeof(int32_t), 0);
    CHECK_EQ(heap.n_live_blocks, 0);
    CHECK_EQ(heap.n_wrong_sizes, 0);
}

static void *record_request(void *ctx, void *block, size_t old_bytes, size_t new_bytes) {
    (void)block;
    (void)old_bytes;
    *(size_t *)ctx = new_bytes;
    return NULL;
}

static void test_reserve_fails_without_a_trace(void) {
    size_t asked_bytes = 0;
    const tfg_allocator allocator = {record_request, &asked_bytes};
    int32_t item = 5;
    void *block = &item;
    int32_t capacity = INT32_MAX - 5;
    CHECK_EQ(tfg_allocator_reserve(&allocator, &block, &capacity, (int64_t)INT32_MAX + 1, 4), TFG_ERR_FULL);
    CHECK_EQ(asked_bytes, 0);
    CHECK_EQ(tfg_allocator_reserve(&allocator, &block, &capacity, INT32_MAX - 2, 4), TFG_ERR_MEMORY);
    CHECK_EQ(asked_bytes, (size_t)INT32_MAX * 4); /* doubling stops at what an index can name */
    CHECK(block == &item);
    CHECK_EQ(capacity, INT32_MAX - 5);
}

int main(void) {
    RUN(test_status_numbers_are_stable);
    RUN(test_status_has_a_name_and_a_sentence_per_row);
    RUN(test_fail_writes_words_and_returns_its_status);
    RUN(test_fail_cuts_long_words);
    RUN(test_try_forwards_failures_only);
    RUN(test_reserve_doubles_and_keeps_contents);
    RUN(test_reserve_fails_without_a_trace);
    return check_finish();
}
