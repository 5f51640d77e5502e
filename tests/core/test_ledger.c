/* SPDX-License-Identifier: BSD-3-Clause */
#include <math.h>
#include <string.h>

#include "failing_allocator.h"
#include "ledger.h"
#include "random_tape.h"

enum { MAX_ENTRIES = 4096 };

static random_source source;
static failing_allocator heap;

#define CHECK_LEDGER(ledger)                                  \
    do {                                                      \
        tfg_error laws_ = {{0}};                              \
        CHECK_EQ(tfg_ledger_check(ledger, &laws_), TFG_OK);   \
        if (laws_.text[0] != '\0') {                          \
            printf("    %s\n", laws_.text);                   \
        }                                                     \
    } while (0)

static tfg_ledger *ledger_new(void) {
    const tfg_allocator allocator = failing_allocator_init(&heap);
    tfg_ledger *ledger;
    CHECK_EQ(tfg_ledger_create(&allocator, &ledger), TFG_OK);
    return ledger;
}

static void ledger_end(tfg_ledger *ledger) {
    tfg_ledger_destroy(ledger);
    CHECK_EQ(heap.n_live_blocks, 0);
    CHECK_EQ(heap.n_wrong_sizes, 0);
}

static int32_t add(tfg_ledger *ledger, int64_t size_bytes, double price_ns_per_byte, int64_t sequence) {
    int32_t entry = TFG_LEDGER_NONE;
    CHECK_EQ(tfg_ledger_add(ledger, size_bytes, price_ns_per_byte, sequence, &entry), TFG_OK);
    CHECK_LEDGER(ledger);
    return entry;
}

static int32_t take_first(tfg_ledger *ledger) {
    const int32_t entry = tfg_ledger_first(ledger);
    tfg_ledger_remove(ledger, entry);
    CHECK_LEDGER(ledger);
    return entry;
}

static void check_totals(const tfg_ledger *ledger, int64_t kept_bytes, int64_t aside_bytes, int32_t n_kept,
                         int32_t n_aside) {
    tfg_ledger_totals totals;
    tfg_ledger_count(ledger, &totals);
    CHECK_EQ(totals.kept_bytes, kept_bytes);
    CHECK_EQ(totals.aside_bytes, aside_bytes);
    CHECK_EQ(totals.n_kept, n_kept);
    CHECK_EQ(totals.n_aside, n_aside);
}

/* ---- the order, by hand ------------------------------------------------------------------------------------------ */

static void test_ledger_drops_cheapest_first(void) {
    tfg_ledger *ledger = ledger_new();
    CHECK_EQ(tfg_ledger_first(ledger), TFG_LEDGER_NONE);
    const int32_t never = add(ledger, 100, INFINITY, 0);
    const int32_t dear = add(ledger, 1, 2.5, 0);
    const int32_t cheap = add(ledger, 1, 2.25, 9);
    const int32_t free_of_charge = add(ledger, 1, 0.0, 99);
    const int32_t below = add(ledger, 1, -INFINITY, 999);
    CHECK_EQ(take_first(ledger), below);
    CHECK_EQ(take_first(ledger), free_of_charge);
    CHECK_EQ(take_first(ledger), cheap);
    CHECK_EQ(take_first(ledger), dear);
    CHECK_EQ(take_first(ledger), never);
    CHECK_EQ(take_first(ledger), TFG_LEDGER_NONE);
    check_totals(ledger, 0, 0, 0, 0);
    ledger_end(ledger);
}

static void test_ledger_breaks_ties_by_sequence_then_size_then_id(void) {
    tfg_ledger *ledger = ledger_new();
    const int32_t late = add(ledger, 1000, 1.0, 7);
    const int32_t small = add(ledger, 10, 1.0, -3);
    const int32_t large = add(ledger, 20, 1.0, -3);
    const int32_t large_too = add(ledger, 20, 1.0, -3);
    CHECK(large < large_too);
    CHECK_EQ(take_first(ledger), large);
    CHECK_EQ(take_first(ledger), large_too);
    CHECK_EQ(take_first(ledger), small);
    CHECK_EQ(take_first(ledger), late);
    ledger_end(ledger);
}

static void test_ledger_counts_what_is_aside_and_does_not_name_it(void) {
    tfg_ledger *ledger = ledger_new();
    const int32_t first = add(ledger, 5, 1.0, 0);
    const int32_t second = add(ledger, 7, 2.0, 0);
    tfg_ledger_set_aside(ledger, first);
    tfg_ledger_set_aside(ledger, first);
    CHECK_LEDGER(ledger);
    check_totals(ledger, 12, 5, 2, 1);
    CHECK_EQ(tfg_ledger_first(ledger), second);
    CHECK(tfg_ledger_holds(ledger, first));
    CHECK_EQ(tfg_ledger_size_bytes(ledger, first), 5);
    tfg_ledger_set_aside(ledger, second);
    CHECK_EQ(tfg_ledger_first(ledger), TFG_LEDGER_NONE);
    tfg_ledger_reprice(ledger, first, 3.0);
    CHECK_LEDGER(ledger);
    CHECK_EQ(tfg_ledger_first(ledger), TFG_LEDGER_NONE);
    tfg_ledger_set_back(ledger, second);
    tfg_ledger_set_back(ledger, first);
    tfg_ledger_set_back(ledger, first);
    CHECK_LEDGER(ledger);
    check_totals(ledger, 12, 0, 2, 0);
    CHECK_EQ(tfg_ledger_first(ledger), second); /* at the price it was given while aside */
    tfg_ledger_set_aside(ledger, second);
    tfg_ledger_remove(ledger, second);
    CHECK_LEDGER(ledger);
    check_totals(ledger, 5, 0, 1, 0);
    ledger_end(ledger);
}

static void test_ledger_reprices_up_and_down(void) {
    tfg_ledger *ledger = ledger_new();
    int32_t entries[40];
    for (int32_t i = 0; i < 40; i++) {
        entries[i] = add(ledger, 1, i, 0);
    }
    tfg_ledger_reprice(ledger, entries[39], -1.0);
    CHECK_LEDGER(ledger);
    CHECK_EQ(tfg_ledger_first(ledger), entries[39]);
    tfg_ledger_reprice(ledger, entries[39], 20.5);
    CHECK_LEDGER(ledger);
    for (int32_t i = 0; i <= 20; i++) {
        CHECK_EQ(take_first(ledger), entries[i]);
    }
    CHECK_EQ(take_first(ledger), entries[39]);
    tfg_ledger_reprice(ledger, entries[21], NAN); /* any doubt means keep */
    CHECK_LEDGER(ledger);
    for (int32_t i = 22; i < 39; i++) {
        CHECK_EQ(take_first(ledger), entries[i]);
    }
    CHECK_EQ(take_first(ledger), entries[21]);
    ledger_end(ledger);
}

/* ---- arguments --------------------------------------------------------------------------------------------------- */

static void test_ledger_refuses_bad_numbers(void) {
    tfg_ledger *ledger = ledger_new();
    int32_t entry = 5;
    CHECK_EQ(tfg_ledger_add(ledger, 1, NAN, 0, &entry), TFG_ERR_ARGUMENT);
    CHECK_EQ(entry, TFG_LEDGER_NONE);
    entry = 5;
    CHECK_EQ(tfg_ledger_add(ledger, -1, 1.0, 0, &entry), TFG_ERR_ARGUMENT);
    CHECK_EQ(entry, TFG_LEDGER_NONE);
    check_totals(ledger, 0, 0, 0, 0);
    const int32_t all = add(ledger, INT64_MAX, 1.0, INT64_MIN);
    CHECK_EQ(tfg_ledger_add(ledger, 1, 1.0, 0, &entry), TFG_ERR_ARGUMENT); /* 63 bits in all */
    const int32_t none = add(ledger, 0, 1.0, INT64_MAX);
    tfg_ledger_set_aside(ledger, all);
    CHECK_EQ(tfg_ledger_add(ledger, 1, 1.0, 0, &entry), TFG_ERR_ARGUMENT); /* aside is still there */
    CHECK_LEDGER(ledger);
    check_totals(ledger, INT64_MAX, INT64_MAX, 2, 1);
    CHECK_EQ(take_first(ledger), none);
    tfg_ledger_remove(ledger, all);
    add(ledger, INT64_MAX, 1.0, 0);
    ledger_end(ledger);
}

static void ignore(tfg_ledger *ledger, int32_t entry) {
    CHECK(!tfg_ledger_holds(ledger, entry));
    CHECK_EQ(tfg_ledger_size_bytes(ledger, entry), 0);
    tfg_ledger_remove(ledger, entry);
    tfg_ledger_set_aside(ledger, entry);
    tfg_ledger_set_back(ledger, entry);
    tfg_ledger_reprice(ledger, entry, 0.0);
    CHECK_LEDGER(ledger);
}

static void test_ledger_ignores_what_it_does_not_hold(void) {
    tfg_ledger *ledger = ledger_new();
    ignore(ledger, 0);
    const int32_t kept = add(ledger, 3, 1.0, 0);
    const int32_t removed = add(ledger, 4, 1.0, 0);
    tfg_ledger_remove(ledger, removed);
    const int32_t unknown[] = {-1, -2, removed, removed + 1, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        ignore(ledger, unknown[i]);
    }
    check_totals(ledger, 3, 0, 1, 0);
    CHECK_EQ(add(ledger, 4, 1.0, 0), removed); /* removed once, so it is given out once */
    CHECK_EQ(add(ledger, 4, 1.0, 0), removed + 1);
    CHECK(tfg_ledger_holds(ledger, kept));
    tfg_ledger_reset(ledger);
    CHECK_LEDGER(ledger);
    ignore(ledger, kept);
    check_totals(ledger, 0, 0, 0, 0);
    CHECK_EQ(tfg_ledger_first(ledger), TFG_LEDGER_NONE);
    ledger_end(ledger);
    tfg_ledger_destroy(NULL);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static void fill(tfg_ledger *ledger, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        int32_t entry;
        CHECK_EQ(tfg_ledger_add(ledger, 1, random_below(&source, 9), i, &entry), TFG_OK);
    }
}

static void test_ledger_asks_for_no_memory_once_warm(void) {
    enum { N = 1024 }; /* what doubling arrives at: one more would ask */
    tfg_ledger *ledger = ledger_new();
    fill(ledger, N);
    CHECK(heap.n_requests < 20); /* grown by doubling */
    heap.fail_at = heap.n_requests;
    for (int32_t entry = 0; entry < N; entry++) {
        tfg_ledger_set_aside(ledger, entry);
    }
    CHECK_LEDGER(ledger);
    check_totals(ledger, N, N, N, N);
    for (int32_t entry = 0; entry < N; entry++) {
        tfg_ledger_set_back(ledger, entry);
        tfg_ledger_reprice(ledger, entry, entry % 7);
    }
    for (int32_t i = 0; i < N / 2; i++) {
        take_first(ledger);
    }
    fill(ledger, N / 2);
    CHECK_LEDGER(ledger);
    tfg_ledger_reset(ledger);
    fill(ledger, N);
    CHECK_LEDGER(ledger);
    CHECK_EQ(heap.n_requests, heap.fail_at);
    ledger_end(ledger);
}

/* Adds until it has grown several times, some aside, some removed; a refused add changes nothing and is tried again. */
static void add_with_failure_at(int64_t fail_at, bool *out_has_failed) {
    const tfg_allocator allocator = failing_allocator_init(&heap);
    tfg_ledger *ledger = (tfg_ledger *)&heap;
    int64_t kept_bytes = 0;
    int32_t n_kept = 0;
    heap.fail_at = fail_at;
    *out_has_failed = false;
    if (tfg_ledger_create(&allocator, &ledger) == TFG_ERR_MEMORY) {
        *out_has_failed = true;
        CHECK(ledger == NULL);
    }
    for (int32_t i = 0; ledger != NULL && i < 150; i++) {
        int32_t entry = 5;
        const int32_t first = tfg_ledger_first(ledger);
        if (tfg_ledger_add(ledger, i, i % 5, i, &entry) == TFG_ERR_MEMORY) {
            CHECK(!*out_has_failed);
            *out_has_failed = true;
            CHECK_EQ(entry, TFG_LEDGER_NONE);
            CHECK_EQ(tfg_ledger_first(ledger), first);
            check_totals(ledger, kept_bytes, 0, n_kept, 0);
            CHECK_LEDGER(ledger);
            CHECK_EQ(tfg_ledger_add(ledger, i, i % 5, i, &entry), TFG_OK);
        }
        kept_bytes += i;
        n_kept++;
        tfg_ledger_set_aside(ledger, entry); /* and back: the heap must have had room for it */
        tfg_ledger_set_back(ledger, entry);
        CHECK_LEDGER(ledger);
    }
    tfg_ledger_destroy(ledger);
    CHECK_EQ(heap.n_live_blocks, 0);
    CHECK_EQ(heap.n_wrong_sizes, 0);
}

static void test_ledger_survives_each_failing_allocation(void) {
    bool has_failed = true;
    int64_t n_rounds = 0;
    for (; has_failed; n_rounds++) {
        add_with_failure_at(n_rounds, &has_failed);
    }
    CHECK_EQ(n_rounds, 1 + 2 * 5 + 1); /* the ledger; two arrays of 16, 32, 64, 128, 256; a round without failure */
}

/* ---- against a plain list ---------------------------------------------------------------------------------------- */

typedef struct row {
    double price_ns_per_byte;
    int64_t sequence;
    int64_t size_bytes;
    int32_t id;
    bool is_held;
    bool is_aside;
} row;

static row rows[MAX_ENTRIES];
static int32_t n_rows;

static int compare_rows(const void *left, const void *right) {
    const row *l = left;
    const row *r = right;
    if (l->price_ns_per_byte != r->price_ns_per_byte) {
        return l->price_ns_per_byte < r->price_ns_per_byte ? -1 : 1;
    }
    if (l->sequence != r->sequence) {
        return l->sequence < r->sequence ? -1 : 1;
    }
    if (l->size_bytes != r->size_bytes) {
        return l->size_bytes > r->size_bytes ? -1 : 1;
    }
    return l->id < r->id ? -1 : 1;
}

static void check_against_rows(const tfg_ledger *ledger) {
    tfg_ledger_totals wanted = {0};
    int32_t first = TFG_LEDGER_NONE;
    for (int32_t id = 0; id < n_rows; id++) {
        const row *r = &rows[id];
        CHECK_EQ(tfg_ledger_holds(ledger, id), r->is_held);
        CHECK_EQ(tfg_ledger_size_bytes(ledger, id), r->is_held ? r->size_bytes : 0);
        if (!r->is_held) {
            continue;
        }
        wanted.kept_bytes += r->size_bytes;
        wanted.n_kept++;
        if (r->is_aside) {
            wanted.aside_bytes += r->size_bytes;
            wanted.n_aside++;
        } else if (first == TFG_LEDGER_NONE || compare_rows(r, &rows[first]) < 0) {
            first = id;
        }
    }
    check_totals(ledger, wanted.kept_bytes, wanted.aside_bytes, wanted.n_kept, wanted.n_aside);
    CHECK_EQ(tfg_ledger_first(ledger), first);
    CHECK_LEDGER(ledger);
}

static double random_price(int32_t n_prices) {
    return random_one_in(&source, 20) ? INFINITY : random_below(&source, n_prices) / 4.0;
}

static void random_add(tfg_ledger *ledger, int32_t n_prices) {
    row r = {random_price(n_prices), random_below(&source, 8), random_below(&source, 4), 0, true, false};
    CHECK_EQ(tfg_ledger_add(ledger, r.size_bytes, r.price_ns_per_byte, r.sequence, &r.id), TFG_OK);
    CHECK(r.id >= 0 && r.id <= n_rows && (r.id == n_rows || !rows[r.id].is_held));
    n_rows += r.id == n_rows;
    rows[r.id] = r;
}

static void random_call(tfg_ledger *ledger, int32_t n_prices) {
    const int32_t id = n_rows == 0 ? -1 : random_below(&source, n_rows);
    row ignored = {0};
    row *r = id < 0 || !rows[id].is_held ? &ignored : &rows[id];
    switch (random_below(&source, 8)) {
    case 0:
        tfg_ledger_remove(ledger, id);
        r->is_held = false;
        break;
    case 1:
        tfg_ledger_set_aside(ledger, id);
        r->is_aside = true;
        break;
    case 2:
        tfg_ledger_set_back(ledger, id);
        r->is_aside = false;
        break;
    case 3:
        r->price_ns_per_byte = random_price(n_prices);
        tfg_ledger_reprice(ledger, id, r->price_ns_per_byte);
        break;
    case 4:
        if (tfg_ledger_first(ledger) != TFG_LEDGER_NONE) {
            rows[tfg_ledger_first(ledger)].is_held = false;
            tfg_ledger_remove(ledger, tfg_ledger_first(ledger));
        }
        break;
    default:
        random_add(ledger, n_prices);
    }
}

/* What leaves one after the other is the sorted list. */
static void drain(tfg_ledger *ledger) {
    static row sorted[MAX_ENTRIES];
    int32_t n_sorted = 0;
    for (int32_t id = 0; id < n_rows; id++) {
        if (rows[id].is_held && !rows[id].is_aside) {
            sorted[n_sorted++] = rows[id];
        }
    }
    qsort(sorted, (size_t)n_sorted, sizeof sorted[0], compare_rows);
    for (int32_t i = 0; i < n_sorted; i++) {
        CHECK_EQ(take_first(ledger), sorted[i].id);
    }
    CHECK_EQ(tfg_ledger_first(ledger), TFG_LEDGER_NONE);
}

static void test_ledger_agrees_with_a_plain_list(void) {
    tfg_ledger *ledger = ledger_new();
    for (int32_t round = 0; round < 60; round++) {
        tfg_ledger_reset(ledger);
        n_rows = 0;
        for (int32_t step = 0; step < 10 * (round % 30); step++) {
            random_call(ledger, round % 3 == 0 ? 1 : 1 << round % 10);
            check_against_rows(ledger);
        }
        drain(ledger);
    }
    ledger_end(ledger);
}

static void test_ledger_drains_a_long_queue_in_order(void) {
    tfg_ledger *ledger = ledger_new();
    tfg_ledger_reset(ledger);
    n_rows = 0;
    for (int32_t i = 0; i < 2000; i++) {
        random_add(ledger, 50);
    }
    drain(ledger);
    ledger_end(ledger);
}

int main(int argc, char **argv) {
    source.state = random_seed(argc, argv);
    RUN(test_ledger_drops_cheapest_first);
    RUN(test_ledger_breaks_ties_by_sequence_then_size_then_id);
    RUN(test_ledger_counts_what_is_aside_and_does_not_name_it);
    RUN(test_ledger_reprices_up_and_down);
    RUN(test_ledger_refuses_bad_numbers);
    RUN(test_ledger_ignores_what_it_does_not_hold);
    RUN(test_ledger_asks_for_no_memory_once_warm);
    RUN(test_ledger_survives_each_failing_allocation);
    RUN(test_ledger_agrees_with_a_plain_list);
    RUN(test_ledger_drains_a_long_queue_in_order);
    return check_finish();
}
